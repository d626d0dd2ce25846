"""Recipes from what YAML says, checked before anything is run."""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from tammes.lab.config import Config
from tammes.lab.expression.syntax import did_you_mean
from tammes.lab.recipes.claim import Course, Near, Peak, read_claim, rows_of
from tammes.lab.recipes.files import RecipeError, as_table, find, start_from, values_of
from tammes.lab.recipes.quantities import KNOWN
from tammes.lab.recipes.recipe import ALWAYS, Column, Kind, Published, Recipe, Row, check_names

_KEPT = ("histograms", "scatter")
_DRAWN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "curves": (("of",), ()),
    "by": (("x", "of"), ()),
    "sweep": (("x",), ("of",)),
    "analysis": (("x",), ()),
    "histograms": ((), ()),
    "scatter": ((), ()),
    "formula": (("of",), ()),
    "spheres": ((), ()),
}
"""What figures can be drawn, and what each needs and may have to be said."""
_NAME = re.compile(r"[\w.+-]+")
_TEXTS = ("title", "source", "summary", "released_source", "released_title")


def load(name: str | Path) -> Recipe:
    """A recipe by its name, or of a YAML file of one's own.

    Args:
        name: such as ``kobayashi2019/table2``, or a path that ends in ``.yaml``.

    Raises:
        RecipeError: it is not there, or something in it cannot be; the sentence says what.
    """
    path, title = find(name)
    try:
        return read(values_of(path), title, path.parent)
    except RecipeError:
        raise
    except ValueError as error:
        said = str(error)
        raise RecipeError(said if said.startswith(title) else f"{title}: {said}") from error


def read(given: Any, name: str, folder: Path = Path()) -> Recipe:
    """A recipe from plain values, checked; every cell is built once.

    Args:
        given: what YAML says.
        name: how the recipe is called.
        folder: where another is looked for that it starts from.
    """
    known = {each.name for each in fields(Recipe)} - {"name"}
    values = dict(start_from(as_table(given, "a recipe"), folder))
    check_names([str(key) for key in values], dict.fromkeys(known), "a recipe has no field")
    for key in _TEXTS:
        if key in values or key in ("title", "source"):
            values[key] = _text(values.get(key), key)
    seeds = values.get("seeds", 3)
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"seeds is expected to be a whole number from 1 on, got {seeds!r}")
    listed = values.get("quantities", ["accuracy"])
    quantities = [str(key) for key in _list(listed, "quantities")]
    check_names(quantities, KNOWN, "there is no quantity")
    values["quantities"] = tuple(KNOWN[key] for key in quantities)
    values["settings"] = as_table(values.get("settings", {}), "settings")
    for key in ("config", "quick"):
        values[key] = _fields(values.get(key, {}), key)
    columns = {
        str(key): _column(str(key), each)
        for key, each in as_table(values.get("columns", {}), "columns").items()
    }
    rows: dict[str, Row] = {}
    for key, each in as_table(values.get("rows", {}), "rows").items():
        rows[str(key)] = _row(str(key), each, rows, columns)
    for key in (*rows, *columns):
        # A ledger joins them by a slash, and the command line by commas.
        if not _NAME.fullmatch(key):
            raise ValueError(f"names are expected to have letters, digits and _ . + -, got {key!r}")
    if rows and not columns:
        raise ValueError("a recipe with rows is expected to have columns")
    values |= {"rows": rows, "columns": columns}
    for key in ("paper", "released"):
        values[key] = dict(_published(values.get(key, {}), key, rows, columns))
    main = quantities[0] if quantities else ""
    values["claims"] = tuple(
        read_claim(each, f"claim {number + 1}", main=main)
        for number, each in enumerate(_list(values.get("claims", []), "claims"))
    )
    for claim in values["claims"]:
        check_names(sorted(rows_of(claim)), rows, "a claim names no row")
        check_names(claim.columns, columns, "a claim names no column")
        if isinstance(claim, Course):
            curves = dict.fromkeys([*ALWAYS, *map(str, _list(values.get("curves", []), "curves"))])
            check_names([claim.curve], curves, "a claim is about a curve that is not kept:")
        else:
            check_names([claim.quantity], KNOWN, "there is no quantity")
        if isinstance(claim, Near) and not any(
            key == claim.quantity for *_, key in values[claim.near]
        ):
            raise ValueError(f"a claim is about numbers of {claim.near}, which has none")
        if isinstance(claim, Peak):
            _check_peak(claim, rows)
    values["curves"] = tuple(str(each) for each in _list(values.get("curves", []), "curves"))
    values["keep"] = tuple(str(each) for each in _list(values.get("keep", []), "keep"))
    check_names(values["keep"], dict.fromkeys(_KEPT), "keep knows no")
    values["figures"] = tuple(
        _figure(each, rows, columns) for each in _list(values.get("figures", []), "figures")
    )
    values["protocol"] = tuple(
        {
            str(key): _text(text, f"protocol {key}")
            for key, text in as_table(each, "protocol").items()
        }
        for each in _list(values.get("protocol", []), "protocol")
    )
    recipe = Recipe(name=name, **values)
    _build_all(recipe)
    return recipe


def _check_peak(claim: Peak, rows: Mapping[str, Row]) -> None:
    """See that the rows of a claim have the value that it looks along."""
    check_names([claim.not_before] if claim.not_before else [], KNOWN, "there is no quantity")
    for row in claim.rows:
        value = rows[row].values.get(claim.peak)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"a claim looks for a peak along {claim.peak}, "
                f"which row {row} is expected to have as a number in its values"
            )


def _build_all(recipe: Recipe) -> None:
    """See that every cell has a configuration."""
    for row, column in recipe.places(columns=[*recipe.columns] or None):
        tried = recipe.trials(row, column)
        cells = tried or [recipe.cell(row, column, 0)]
        recipe.cell(row, column, 0, quick=True, values=tried[0].tried if tried else None)
        for config in (cell.config for cell in cells if cell.config is not None):
            try:
                # Every text that is a call is read once.
                config.identity()
            except ValueError as error:
                raise ValueError(f"row {row}, column {column}: {error}") from error


def _column(name: str, given: Any) -> Column:
    values = as_table(given, f"column {name}")
    _only(values, Column, f"column {name}")
    on_request = values.get("on_request", False)
    if not isinstance(on_request, bool):
        what = f"on_request of column {name}"
        raise ValueError(f"{what} is expected to be true or false, got {on_request!r}")
    return Column(
        name=name,
        title=_text(values.get("title", name), f"title of column {name}"),
        config=_fields(values.get("config", {}), f"config of column {name}"),
        values=as_table(values.get("values", {}), f"values of column {name}"),
        tune=_tune(values, f"column {name}"),
        settings=as_table(values.get("settings", {}), f"settings of column {name}"),
        on_request=on_request,
    )


def _row(name: str, given: Any, before: Mapping[str, Row], columns: Mapping[str, Column]) -> Row:
    values, what = dict(as_table(given, f"row {name}")), f"row {name}"
    base = values.pop("base", None)
    _only(values, Row, what)
    start = None
    if base is not None:
        check_names([str(base)], before, f"base of {what} names no row above it:")
        start = before[str(base)]
    only = tuple(str(each) for each in _list(values.get("columns", []), f"columns of {what}"))
    overrides = {
        str(key): _fields(each, f"overrides of {what}")
        for key, each in as_table(values.get("overrides", {}), f"overrides of {what}").items()
    }
    check_names([*only, *overrides], columns, f"{what} names no column")
    kind = values.get("kind", start.kind if start else "train")
    if kind not in get_args(Kind):
        raise ValueError(f"kind of {what} is expected to be train, fewshot or sphere, got {kind!r}")
    tune = _tune(values, what)
    if tune and kind == "sphere":
        raise ValueError(f"{what} trains nothing that settings could be chosen by, got tune")
    config = _fields(values.get("config", {}), f"config of {what}")
    own = as_table(values.get("values", {}), f"values of {what}")
    settings = as_table(values.get("settings", {}), f"settings of {what}")
    return Row(
        name=name,
        title=_text(values.get("title", name), f"title of {what}"),
        config={**(start.config if start else {}), **config},
        overrides={**(start.overrides if start else {}), **overrides},
        values={**(start.values if start else {}), **own},
        tune=tune or (start.tune if start and "tune" not in values else {}),
        columns=only,
        kind=kind,
        settings={**(start.settings if start else {}), **settings},
        note=_text(values.get("note", ""), f"note of {what}"),
    )


def _tune(values: Mapping[str, Any], what: str) -> dict[str, list[Any]]:
    """Values to choose from, by name."""
    tune = {
        str(key): _list(each, f"{key}, which {what} tunes,")
        for key, each in as_table(values.get("tune", {}), f"tune of {what}").items()
    }
    for key, tried in tune.items():
        if len(tried) < 2:
            raise ValueError(f"{key}, which {what} tunes, is expected to have 2 values or more")
    return tune


def _published(
    given: Any, what: str, rows: Mapping[str, Row], columns: Mapping[str, Column]
) -> Iterator[tuple[tuple[str, str, str], Published]]:
    for row, by_column in as_table(given, what).items():
        check_names([str(row)], rows, f"{what} names no row")
        for column, by_quantity in as_table(by_column, f"{what} of {row}").items():
            check_names([str(column)], columns, f"{what} names no column")
            numbers = as_table(by_quantity, f"{what} of {row} in {column}")
            check_names([str(key) for key in numbers], KNOWN, "there is no quantity")
            for key, value in numbers.items():
                place = f"{what} of {row} in {column}"
                yield (str(row), str(column), str(key)), _number(value, place)


def _number(value: Any, what: str) -> Published:
    """A number, or a text such as ``28.62 ± 0.24``."""
    found = re.fullmatch(r"\s*(-?[\d.]+)\s*(?:±\s*([\d.]+))?\s*", str(value))
    try:
        if found is None or isinstance(value, bool):
            raise ValueError
        return Published(float(found[1]), float(found[2]) if found[2] else None)
    except ValueError:
        raise ValueError(
            f"{what} is expected to be a number such as 28.62 ± 0.24, got {value!r}"
        ) from None


def _figure(
    given: Any, rows: Mapping[str, Row], columns: Mapping[str, Column]
) -> Mapping[str, Any]:
    values = as_table(given, "a figure")
    if values.get("draw") not in _DRAWN:
        known = ", ".join(_DRAWN)
        raise ValueError(f"draw of a figure is expected to be one of {known}, got {given!r}")
    needed, allowed = _DRAWN[values["draw"]]
    _only_keys(values, {"draw", "title", "rows", "columns", *needed, *allowed}, "a figure")
    for key in needed:
        if key not in values:
            raise ValueError(f"a figure of {values['draw']} is expected to have {key}, got none")
    for key, there in (("rows", rows), ("columns", columns)):
        named = [str(each) for each in _list(values.get(key, []), f"{key} of a figure")]
        check_names(named, there, f"a figure names no {key[:-1]}")
    return values


def _fields(given: Any, what: str) -> Mapping[str, Any]:
    values = as_table(given, what)
    known = {each.name: each for each in fields(Config)}
    check_names([str(key) for key in values], known, f"{what}: a configuration has no")
    for key in ("seed", "validation"):
        if key in values:
            raise ValueError(f"{what}: {key} is not for a recipe to set, got {values[key]!r}")
    return values


def _only(values: Mapping[str, Any], kind: Any, what: str) -> None:
    _only_keys(values, {each.name for each in fields(kind)} - {"name"}, what)


def _only_keys(values: Mapping[str, Any], known: Set[str], what: str) -> None:
    for key in values:
        if key not in known:
            raise ValueError(f"{what} has no {key!r}{did_you_mean(str(key), known)}")


def _list(given: Any, what: str) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"{what} is expected to be a list, got {given!r}")
    return list(given)


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{what} is expected to be a text, got {given!r}")
    return given.strip()
