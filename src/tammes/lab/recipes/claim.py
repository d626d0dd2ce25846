"""What a paper claims, as a recipe writes it down; :mod:`tammes.lab.claims` judges it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Where: TypeAlias = Literal["paper", "released"]


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
    pairs: tuple[tuple[str, str], ...]
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
    near: Where
    within: float


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
    """Where a quantity is best among rows that differ in one value.

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


def read_claim(given: Any, where: str, *, main: str) -> Claim:
    """A claim from what YAML says of it.

    Args:
        given: plain values.
        where: what they are called in an error.
        main: quantity that is meant where none is named.

    Raises:
        ValueError: where it is none of the five kinds.
    """
    if not isinstance(given, Mapping) or not isinstance(given.get("says"), str):
        raise ValueError(f"{where} is expected to have a sentence under says, got {given!r}")
    values = {str(key): value for key, value in given.items()}
    if "better" in values or "than" in values:
        values["pairs"] = [[values.pop("better", None), values.pop("than", None)]]
    kinds: list[tuple[str, Callable[..., Claim]]] = [
        ("pairs", Better), ("near", Near), ("curve", Course), ("peak", Peak),
        ("at_least", Bound), ("at_most", Bound),
    ]  # fmt: skip
    kind = next((kind for key, kind in kinds if key in values), None)
    if kind is None:
        raise ValueError(
            f"{where} is expected to have better and than, pairs, near, at_least, at_most, curve "
            f"or peak, got {', '.join(values)}"
        )
    if kind is not Course:
        values.setdefault("quantity", main)
    for key in ("columns", "rows", "falls", "falls_then_rises"):
        if key in values:
            values[key] = _names(values[key], f"{key} of {where}")
    if "pairs" in values:
        if isinstance(values["pairs"], str) or not isinstance(values["pairs"], Sequence):
            raise ValueError(f"pairs of {where} is expected to be a list, got {values['pairs']!r}")
        values["pairs"] = tuple(_pair(pair, where) for pair in values["pairs"])
    if kind is Peak and not {"at_least", "at_most", "not_before"} & {*values}:
        raise ValueError(f"{where} is expected to say at_least, at_most or not_before of its peak")
    for key in ("quantity", "curve", "peak", "not_before"):
        if key in values and not isinstance(values[key], str):
            raise ValueError(f"{key} of {where} is expected to be a text, got {values[key]!r}")
    for key in ("by", "within", "at_least", "at_most", "where_below_optimum"):
        if key in values and (isinstance(values[key], bool) or not _is_number(values[key])):
            raise ValueError(f"{key} of {where} is expected to be a number, got {values[key]!r}")
    if kind is Bound and "at_least" in values and "at_most" in values:
        raise ValueError(f"{where} is expected to have at_least or at_most, got both")
    if values.get("within", 0) < 0:
        raise ValueError(f"within of {where} is expected to be 0 or more, got {values['within']}")
    if any(better == than for better, than in values.get("pairs", ())):
        raise ValueError(f"{where} is expected to compare two rows, got one with itself")
    if values.get("near", "paper") not in ("paper", "released"):
        raise ValueError(f"near of {where} is expected to be paper or released")
    try:
        return kind(**values)
    except TypeError:
        known = ", ".join(inspect.signature(kind).parameters)
        got = ", ".join(map(str, given))
        raise ValueError(f"{where} is expected to have {known}, got {got}") from None


def rows_of(claim: Claim) -> set[str]:
    """Rows that a claim names."""
    match claim:
        case Better():
            return {row for pair in claim.pairs for row in pair}
        case Course():
            return {*claim.falls, *claim.falls_then_rises}
        case _:
            return set(claim.rows)


def _names(value: Any, what: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{what} is expected to be a list of names, got {value!r}")
    return tuple(str(name) for name in value)


def _pair(value: Any, where: str) -> tuple[str, str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"pairs of {where} are expected to be two rows each, got {value!r}")
    return str(value[0]), str(value[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value
