"""Claims of a paper, as a recipe writes them; :mod:`tammes.lab.reproduce.judge` judges them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from tammes.lab.config.typecheck import as_table, at_least, construct

NumberSource: TypeAlias = Literal["paper", "released"]
Pairs: TypeAlias = tuple[tuple[str, str], ...]


def _check_pairs(pairs: Pairs) -> Pairs:
    if any(better == than for better, than in pairs):
        raise ValueError("is expected to compare two rows, got one with itself")
    return pairs


@dataclass(frozen=True, kw_only=True)
class Better:
    """Some rows are better than others by at least so much.

    Attributes:
        says: the claim in a sentence.
        quantity: in which it is better; the direction is the quantity's own.
        columns: where; all that have the rows where none is named.
        pairs: a row, and the one it is better than.
        by: at least this much, in the unit of the quantity.
        where_below_optimum: only pairs whose second row is more than this below the optimum.
    """

    says: str
    quantity: str
    columns: tuple[str, ...] = ()
    pairs: Annotated[Pairs, _check_pairs]
    by: float = 0.0
    where_below_optimum: float | None = None


@dataclass(frozen=True, kw_only=True)
class Near:
    """Some rows come within so much of a published number.

    Attributes:
        says: the claim in a sentence.
        quantity: of which.
        columns: where; all that are usually run where none is named.
        rows: which; all that have a published number where none is named.
        near: the paper, or the code its authors released.
        within: at most this far, in the unit of the quantity.
    """

    says: str
    quantity: str
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    near: NumberSource
    within: Annotated[float, at_least(0)]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A quantity of some rows stays on one side of a number.

    Attributes:
        says: the claim in a sentence.
        quantity: of which.
        columns: where; all that have the rows where none is named.
        rows: which.
        at_least: lower bound, if that is what is claimed.
        at_most: upper bound, if that is; a claim has one of them.
    """

    says: str
    quantity: str
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...]
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a measure goes during training.

    Attributes:
        says: the claim in a sentence.
        curve: path in the lines of ``metrics.jsonl``.
        columns: where; all that have the rows where none is named.
        falls: rows in which it is lower at the end than anywhere before, but for a little.
        falls_then_rises: rows in which it is lowest somewhere in between.
    """

    says: str
    curve: str
    columns: tuple[str, ...] = ()
    falls: tuple[str, ...] = ()
    falls_then_rises: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Peak:
    """NumberSource a quantity is best among rows that differ in one value.

    Attributes:
        says: the claim in a sentence.
        quantity: that is best somewhere.
        columns: where; all that have the rows where none is named.
        rows: that differ in the value.
        peak: name of the value, such as ``margin``.
        at_least: it is best there or above, if that is what is claimed.
        at_most: it is best there or below, if that is.
        not_before: another quantity; it is best where that one is or above, if that is.
    """

    says: str
    quantity: str
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...]
    peak: str
    at_least: float | None = None
    at_most: float | None = None
    not_before: str | None = None


Claim: TypeAlias = Better | Near | Bound | Course | Peak

_KINDS: dict[str, type[Claim]] = {
    "pairs": Better, "near": Near, "curve": Course, "peak": Peak,
    "at_least": Bound, "at_most": Bound,
}  # fmt: skip
"""Kinds of claims by the field that only they have, or that the kinds before them have too."""


def read_claim(plain: Any, what: str, *, main: str) -> Claim:
    """Read a claim from plain values.

    Args:
        plain: what YAML says.
        what: name of the claim in an error.
        main: quantity that is meant where none is named.

    Raises:
        ValueError: where it is none of the five kinds.
    """
    values = as_table(plain, what)
    keys = ", ".join(values)
    if "better" in values or "than" in values:
        values["pairs"] = [[values.pop("better", None), values.pop("than", None)]]
    kind = next((kind for key, kind in _KINDS.items() if key in values), None)
    if kind is None:
        raise ValueError(
            f"{what} is expected to have better and than, pairs, near, at_least, at_most, curve "
            f"or peak, got {keys}"
        )
    if kind is Bound and {"at_least", "at_most"} <= {*values}:
        raise ValueError(f"{what} is expected to have at_least or at_most, got both")
    if kind is Peak and not {"at_least", "at_most", "not_before"} & {*values}:
        raise ValueError(f"{what} is expected to say at_least, at_most or not_before of its peak")
    return construct(kind, values if kind is Course else {"quantity": main, **values}, what)


def rows_of(claim: Claim) -> set[str]:
    """Return the rows that a claim names."""
    match claim:
        case Better():
            return {row for pair in claim.pairs for row in pair}
        case Course():
            return {*claim.falls, *claim.falls_then_rises}
        case _:
            return set(claim.rows)
