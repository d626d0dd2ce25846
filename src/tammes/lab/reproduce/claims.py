"""Claims of a paper as written in a recipe; :mod:`tammes.lab.reproduce.judge` judges them."""

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
class _Claim:
    """Base of all claims.

    Attributes:
        says: the claim in a sentence.
        columns: columns to judge; by default all that have the rows, except on-request columns
            that were not run.
    """

    says: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _QuantityClaim(_Claim):
    """Claim about a quantity, which defines whether larger or smaller is better."""

    quantity: str


@dataclass(frozen=True, kw_only=True)
class Better(_QuantityClaim):
    """Claim that rows are better than others by at least a margin.

    Attributes:
        pairs: pairs of the better row and the worse row.
        by: smallest difference claimed, in the unit of the quantity.
        where_below_optimum: restrict to pairs whose second row is more than this below the optimum.
    """

    pairs: Annotated[Pairs, _check_pairs]
    by: float = 0.0
    where_below_optimum: float | None = None


@dataclass(frozen=True, kw_only=True)
class Near(_QuantityClaim):
    """Claim that rows come close to the published numbers.

    Attributes:
        rows: rows of the claim; by default all that have a published number.
        near: source of the numbers: the paper, or the code its authors released.
        within: largest deviation, in the unit of the quantity.
    """

    rows: tuple[str, ...] = ()
    near: NumberSource
    within: Annotated[float, at_least(0)]


@dataclass(frozen=True, kw_only=True)
class Bound(_QuantityClaim):
    """Claim that a quantity is at least, or at most, a number; exactly one of the two is set."""

    rows: tuple[str, ...]
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Course(_Claim):
    """Claim about the shape of a training curve.

    Attributes:
        curve: path in the lines of ``metrics.jsonl``.
        falls: rows whose curve is lowest at the end, within a tolerance.
        falls_then_rises: rows whose curve is lowest before the end and clearly rises afterwards.
    """

    curve: str
    falls: tuple[str, ...] = ()
    falls_then_rises: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Peak(_QuantityClaim):
    """Claim about the location of the best value, among rows that differ in one setting.

    Attributes:
        peak: name of the setting, such as ``margin``.
        at_least: smallest claimed location of the peak.
        at_most: largest claimed location of the peak.
        not_before: another quantity, whose peak is claimed to be at the same or a smaller value.
    """

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
"""Kinds of claims by a field that identifies them; the first match decides."""


def read_claim(plain: Any, what: str, *, main: str) -> Claim:
    """Read the claim ``what`` from plain values; ``main`` is the default quantity.

    Raises:
        ValueError: it is none of the five kinds, or a field is invalid.
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
