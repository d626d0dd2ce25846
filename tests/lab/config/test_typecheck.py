"""Plain values are checked against types, and what does not fit is said in one sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from messages import pattern

from tammes.lab.config.typecheck import (
    above_zero,
    at_least,
    between,
    check_fields,
    check_names,
    construct,
    finite,
    fit,
    from_text,
)


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (3, float, 3),
        ([1, 2], tuple[int, ...], (1, 2)),
        (("a", 0.5), tuple[str, str], ("a", "0.5")),
        ({1: [2]}, Mapping[str, list[int]], {"1": [2]}),
        (None, Annotated[int, at_least(1)] | None, None),
        (4, Annotated[int, at_least(1)] | None, 4),
        (" a ", Annotated[str, str.strip], "a"),
        (object, Any, object),
    ],
)
def test_a_value_that_fits_is_returned(value, kind, found):
    assert fit(value, kind, "it") == found
    assert type(fit(value, kind, "it")) is type(found)


@pytest.mark.parametrize(
    ("value", "kind", "sentence"),
    [
        (True, int, "it is expected to be a whole number, got True"),
        (float("nan"), float, "it ... number ... nan"),
        ("ab", list[str], "it ... list ... 'ab'"),
        ([1], tuple[int, int], "it ... list of 2 ... [1]"),
        ([[1]], list[str], "a part of it is expected to be text, got [1]"),
        ({"a": 1}, Mapping[str, str], "a ... it ... text ... 1"),
        ("d", Literal["a", "b", "c"], "it ... b ... 'd'"),
        ("x", int | None, "it ... whole number ... 'x'"),
        (0, Annotated[int, at_least(1)] | None, "it is expected to be at least 1, got 0"),
        (0, Annotated[float, above_zero], "it is expected to be above 0, got 0"),
        (2, Annotated[float, between(0, 1)], "it is expected to be from 0 to 1, got 2"),
        (float("inf"), Annotated[float, at_least(0)], "it ... at least 0 ... inf"),
        (float("-inf"), Annotated[float, finite], "it is expected to be finite, got -inf"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(value, kind, sentence):
    with pytest.raises(ValueError, match=pattern(sentence)):
        fit(value, kind, "it")


@dataclass
class Point:
    x: Annotated[float, finite]
    y: float = 0.0
    name: str = ""


def test_a_dataclass_is_built_of_a_table():
    assert construct(Point, {"x": 1}, "a point", name="a") == Point(1, name="a")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"y": 1}, "a point is expected to have x, got y"),
        ({"x": 1, "z": 2}, "a point has no 'z'; it has x, y"),
        ({"x": 1, "name": "b"}, "... point ... 'name' ... x, y"),
        ([1], "a point is expected to be a table of names and values, got [1]"),
    ],
)
def test_a_table_that_is_no_such_dataclass_is_refused(values, sentence):
    with pytest.raises(ValueError, match=pattern(sentence)):
        construct(Point, values, "a point", name="a")


def test_fields_of_what_was_built_by_hand_are_checked():
    check_fields(Point(1.0), "a point")
    with pytest.raises(ValueError, match=r"^x of a point is expected to be a number, got 'a'$"):
        check_fields(Point("a"), "a point")


def test_a_long_list_of_names_is_not_shown():
    with pytest.raises(ValueError, match=r"^there is no 'q'$"):
        check_names(["q"], map(str, range(100)), "there is no")


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("OFF", False), ("true", True)])
def test_truth_has_several_words(text, value):
    assert from_text(text, bool, "--x") is value
