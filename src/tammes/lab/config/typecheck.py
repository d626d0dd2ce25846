"""Check plain values from YAML and flags against the field types of dataclasses.

A type may be annotated with checks that run after the type check: each returns the value or raises
``ValueError`` with the end of a sentence, such as "is expected to be at least 1, got 0".
"""

import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from tammes.lab.config.expressions import did_you_mean, short

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
"""Largest number of names that a message lists."""
_TRUTH = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: _TRUTH.get(text.lower()),
}


def construct(kind: type[T], plain: Any, what: str, **ready: Any) -> T:
    """Build a dataclass from a table of plain values.

    Args:
        kind: the dataclass.
        plain: table of its fields.
        what: name of the table, for messages.
        **ready: fields to pass on unchecked; the table must not have them.

    Raises:
        ValueError: a field is unknown, missing or invalid; the message names it.

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
    known = {item.name: item for item in fields(kind) if item.name not in ready}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind, include_extras=True)
    values = as_table(plain, what)
    check_names(values, known, f"{what} has no")
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(
                f"{what} is expected to have {name}, got {', '.join(values) or 'none'}"
            )
    found = {key: fit(value, hints[key], f"{key} of {what}") for key, value in values.items()}
    return kind(**found, **ready)


def fit(value: Any, kind: Any, what: str) -> Any:
    """Check a plain value against a type; convert lists to tuples where the type is a tuple.

    Args:
        value: a number, text, boolean, None, list or table.
        kind: type of one of these, a union, a literal, or any of them annotated.
        what: name of the value, for the ValueError that is raised if it does not fit.

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
    one = next((each for each in members(kind) if _is(value, each)), None)
    if one is None:
        got = _kind(value) if hasattr(value, "shape") else repr(value)
        raise ValueError(f"{what} is expected to be {type_name(kind)}, got {got}")
    if one is not kind:
        return fit(value, one, what)
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
    # Names of rows and columns may look like numbers.
    named = [str(v) if k is str and _is(v, float) else v for v, k in zip(value, kinds, strict=True)]
    return [fit(v, k, f"a part of {what}") for v, k in zip(named, kinds, strict=True)]


def members(kind: Any) -> tuple[Any, ...]:
    """Return the member types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value has a type, without checking its items."""
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return _is(value, get_args(kind)[0])
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
    """Convert text, such as the value of a flag, to a type.

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
    """Describe a type in words.

    Example:
        >>> type_name(int | None)
        'a whole number or null'
    """
    return " or ".join(map(_words, members(kind)))


def _words(kind: Any) -> str:
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return f"{', '.join(args[:-1])} or {args[-1]}"
    return type_name(args[0]) if origin is Annotated else _WORDS[origin]


def _kind(value: Any) -> str:
    """Describe a value by its type and shape, never by its numbers."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def as_source(name: str, value: Any) -> str:
    """Return the path or name of a data source; reject anything else, such as images in memory."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise ValueError(
        f"{name} is expected to be the path or the name of a source, got {_kind(value)}; "
        "tammes.lab.data.write_source writes images of a program to one"
    )


def as_table(value: Any, what: str) -> dict[str, Any]:
    """Return a mapping as a dict; raise if the value is not one."""
    table: dict[str, Any] = fit(value, Mapping[str, Any], what)
    return table


def check_names(names: Iterable[str], known: Iterable[str], sentence: str) -> None:
    """Reject unknown names with a hint; ``sentence`` begins the message."""
    known = [*known]
    listed = "it has" if len(known) <= _FEW else ""
    for name in names:
        if name not in known:
            raise ValueError(f"{sentence} {name!r}{did_you_mean(name, known, otherwise=listed)}")


def check_fields(instance: Any, what: str) -> None:
    """Check the fields of a dataclass instance as :func:`construct` does."""
    hints = typing.get_type_hints(type(instance), include_extras=True)
    for each in fields(instance):
        fit(getattr(instance, each.name), hints[each.name], f"{each.name} of {what}")


def seed_numbers(seeds: int | Sequence[int], first: int = 0) -> Sequence[int]:
    """Return the seeds, given as a list or as their number, counted from ``first``."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise ValueError(f"seeds is expected to be at least 1, got {seeds}")
        return range(first, first + seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds is expected to name each seed once, got {list(seeds)}")
    return seeds


def between(low: float, high: float, words: str = "") -> Callable[[Any], Any]:
    """Return a check for :func:`fit`: a finite number between two bounds."""

    def check(value: Any) -> Any:
        if not low <= value <= high or math.isinf(value):
            expected = words or f"from {low} to {high}"
            raise ValueError(f"is expected to be {expected}, got {value!r}")
        return value

    return check


def at_least(low: float) -> Callable[[Any], Any]:
    """Return a check for :func:`fit`: a finite number that is at least a bound."""
    return between(low, math.inf, f"at least {low}")


finite = between(-math.inf, math.inf, "finite")
above_zero = between(math.ulp(0.0), math.inf, "above 0")


def not_empty(value: Any) -> Any:
    """Check for :func:`fit`: a text or list that is not empty."""
    if not value:
        raise ValueError(f"is expected not to be empty, got {value!r}")
    return value
