"""Check plain values, as YAML and flags give them, against the types of a dataclass's fields.

A type may be annotated with functions that look at the value after its type: each returns the value
or raises ``ValueError`` with the rest of a sentence, such as "is expected to be at least 1, got 0".
"""

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from tammes.lab.expression.syntax import did_you_mean, short

T = TypeVar("T")

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
    Mapping: "a table of names and values",
    list: "a list",
    tuple: "a list",
}
_FEW = 12
"""Names that a message lists at most."""
_TRUTH = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: _TRUTH.get(text.lower()),
}


def construct(kind: type[T], given: Any, what: str, **ready: Any) -> T:
    """Build a dataclass from a table of plain values.

    Args:
        kind: the dataclass.
        given: its fields by name.
        what: what the table is, for messages.
        **ready: fields that are passed on as they are, and that the table may not have.

    Raises:
        ValueError: with a sentence that names the field and what was expected.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> construct(Point, {"x": 3}, "a point")
        Point(x=3, y=0)
        >>> construct(Point, {"x": 3.5}, "a point")
        Traceback (most recent call last):
        ValueError: x of a point is expected to be a whole number, got 3.5
    """
    known = {each.name: each for each in fields(kind) if each.name not in ready}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind, include_extras=True)
    values = as_table(given, what)
    check_names(values, known, f"{what} has no")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(
                f"{what} is expected to have {name}, got {', '.join(values) or 'none'}"
            )
    found = {key: fit(value, hints[key], f"{key} of {what}") for key, value in values.items()}
    return kind(**found, **ready)


def fit(value: Any, kind: Any, what: str) -> Any:
    """Return a plain value if it has a type, with lists as the type has them.

    Args:
        value: a number, text, truth value, None, list or table.
        kind: the type: one of these, a union, a literal, or any of them annotated.
        what: what the value is, for messages.

    Raises:
        ValueError: with a sentence that names what was expected.

    Example:
        >>> fit([1, 2], tuple[int, ...], "shots")
        (1, 2)
    """
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        value = fit(value, args[0], what)
        for check in args[1:]:
            try:
                value = check(value)
            except ValueError as error:
                raise ValueError(f"{what} {error}") from None
        return value
    if not any(_is(value, each) for each in members(kind)):
        raise ValueError(f"{what} is expected to be {type_name(kind)}, got {value!r}")
    if origin is Mapping:
        return {str(key): fit(each, args[1], f"{key} of {what}") for key, each in value.items()}
    if origin in (list, tuple):
        return origin(_items(value, args, what))
    return value


def _items(value: Sequence[Any], kinds: tuple[Any, ...], what: str) -> list[Any]:
    if len(kinds) == 1 or kinds[1] is ...:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{what} is expected to be a list of {len(kinds)}, got {value!r}")
    # Names, as those of rows and columns, may look like numbers.
    named = [str(v) if k is str and _is(v, float) else v for v, k in zip(value, kinds, strict=True)]
    return [fit(v, k, f"a part of {what}") for v, k in zip(named, kinds, strict=True)]


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types that a union has, or the one type."""
    return get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _is(value: Any, kind: Any) -> bool:
    """Return whether a value has a type; its items are not looked at."""
    origin = get_origin(kind) or kind
    if origin is Any:
        return True
    if origin is Literal:
        return value in get_args(kind)
    if origin in (list, tuple):
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if origin in (int, float):
        number = isinstance(value, int if origin is int else int | float)
        return number and not isinstance(value, bool) and value == value
    return isinstance(value, origin)


def from_text(text: str, kind: Any, what: str) -> Any:
    """Return what a text says as a value of a type, such as that of a flag.

    Example:
        >>> from_text("3", float | None, "--clip"), from_text("null", float | None, "--clip")
        (3.0, None)
    """
    first = members(kind)[0]
    convert = _FROM_TEXT.get(first, str)
    if types.NoneType in members(kind) and text.strip() in ("null", "~"):
        return None
    try:
        return fit(convert(text), kind, what)
    except ValueError:
        raise ValueError(f"{what} is expected to be {type_name(kind)}, got {short(text)}") from None


def type_name(kind: Any) -> str:
    """Name a type in words.

    Example:
        >>> type_name(int | None)
        'a whole number or null'
    """
    names = [
        _either(get_args(each)) if get_origin(each) is Literal else _WORDS[get_origin(each) or each]
        for each in members(kind)
    ]
    return " or ".join(names)


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def as_table(given: Any, what: str) -> dict[str, Any]:
    """Return names and values, or say in a sentence that a table was expected."""
    table: dict[str, Any] = fit(given, Mapping[str, Any], what)
    return table


def check_names(names: Iterable[str], known: Iterable[str], otherwise: str) -> None:
    """Reject a name that is not known, with a hint; ``otherwise`` begins the sentence."""
    known = [*known]
    listed = "it has" if len(known) <= _FEW else ""
    for name in names:
        if name not in known:
            raise ValueError(f"{otherwise} {name!r}{did_you_mean(name, known, otherwise=listed)}")


def at_least(low: float) -> Callable[[Any], Any]:
    """Check of a number for :func:`fit`: not below a bound."""

    def check(value: Any) -> Any:
        if value < low:
            raise ValueError(f"is expected to be at least {low}, got {value!r}")
        return value

    return check


def above_zero(value: Any) -> Any:
    """Check of a number for :func:`fit`: positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"is expected to be above 0, got {value!r}")
    return value


def not_empty(value: Any) -> Any:
    """Check of a text or list for :func:`fit`."""
    if not value:
        raise ValueError(f"is expected to have something in it, got {value!r}")
    return value
