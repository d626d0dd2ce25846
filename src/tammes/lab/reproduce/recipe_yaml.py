"""Read recipes from YAML and validate them before anything is run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tammes.lab.config.typecheck import as_table, check_names, construct, fit
from tammes.lab.config.yaml_file import read_yaml
from tammes.lab.reproduce.claims import Claim, Course, Near, Peak, read_claim, rows_of
from tammes.lab.reproduce.quantities import KNOWN
from tammes.lab.reproduce.recipe import ALWAYS, Column, Published, Recipe, Row
from tammes.lab.reproduce.recipe_files import RecipeError, find_recipe, inherit

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
"""Kinds of figures, with their required and their optional fields."""
_NAME = re.compile(r"[\w.+-]+")


def load(name: str | Path) -> Recipe:
    """Load a recipe by name, such as ``kobayashi2019/table2``, or from the user's own YAML file.

    Raises:
        RecipeError: the recipe does not exist or is invalid.
    """
    path, title = find_recipe(name)
    try:
        return read(read_yaml(path), title, path.parent)
    except ValueError as error:
        message = str(error)
        known = message.startswith((title, str(path)))
        raise RecipeError(message if known else f"{title}: {message}") from error


def read(plain: Any, name: str, folder: Path = Path()) -> Recipe:
    """Read a recipe from parsed YAML, and plan every cell once as a check.

    A relative path in ``like`` refers to ``folder``.
    """
    values = dict(inherit(as_table(plain, "the recipe"), folder))
    check_names(values, [each.name for each in fields(Recipe)[1:]], "the recipe has no")
    quantities = fit(values.pop("quantities", ["accuracy"]), list[str], "quantities")
    check_names(quantities, KNOWN, "there is no quantity")
    columns = {
        key: construct(
            Column, {"title": key, **as_table(each, f"column {key}")}, f"column {key}", name=key
        )
        for key, each in as_table(values.pop("columns", {}), "columns").items()
    }
    rows: dict[str, Row] = {}
    for key, each in as_table(values.pop("rows", {}), "rows").items():
        rows[key] = _row(key, each, rows, columns)
    for key in (*rows, *columns):
        # A ledger joins the names with a slash, the command line with commas.
        if not _NAME.fullmatch(key):
            raise ValueError(f"names are expected to have letters, digits and _ . + -, got {key!r}")
    if rows and not columns:
        raise ValueError("a recipe with rows is expected to have columns")
    paper, released = (
        dict(_published(values.pop(key, {}), key, rows, columns)) for key in ("paper", "released")
    )
    claims = [
        read_claim(each, f"claim {number}", main=quantities[0] if quantities else "")
        for number, each in enumerate(fit(values.pop("claims", []), list[Any], "claims"), 1)
    ]
    recipe = construct(
        Recipe, values, "the recipe", name=name, rows=rows, columns=columns, paper=paper,
        released=released, quantities=tuple(KNOWN[key] for key in quantities), claims=tuple(claims),
    )  # fmt: skip
    for claim in claims:
        _check_claim(claim, recipe)
    for figure in recipe.figures:
        _check_figure(figure, recipe)
    _build_all(recipe)
    return recipe


def _row(name: str, plain: Any, before: Mapping[str, Row], columns: Mapping[str, Column]) -> Row:
    what = f"row {name}"
    values = {"title": name, **as_table(plain, what)}
    base = values.pop("base", None)
    if base is not None:
        check_names([str(base)], before, f"base of {what} names no row above it:")
        start = before[str(base)]
        inherited = {key: getattr(start, key) for key in ("kind", "tune", "tuned_as")}
        values = inherited | values
    row = construct(Row, values, what, name=name)
    check_names([*row.columns, *row.overrides], columns, f"{what} names no column")
    if row.tune and row.kind == "sphere":
        raise ValueError(f"{what} is of the kind sphere, which cannot be tuned, got tune")
    if base is None:
        return row
    merged: dict[str, Any] = {
        key: {**getattr(start, key), **getattr(row, key)}
        for key in ("config", "overrides", "values", "settings")
    }
    return replace(row, **merged)


def _check_claim(claim: Claim, recipe: Recipe) -> None:
    """Reject a claim about rows, columns, curves or numbers that the recipe does not have."""
    check_names(sorted(rows_of(claim)), recipe.rows, "a claim names no row")
    check_names(claim.columns, recipe.columns, "a claim names no column")
    if isinstance(claim, Course):
        curves = (*ALWAYS, *recipe.curves)
        check_names([claim.curve], curves, "a claim is about a curve that is not kept:")
    else:
        check_names([claim.quantity], KNOWN, "there is no quantity")
    if isinstance(claim, Near) and not any(
        key == claim.quantity for *_, key in getattr(recipe, claim.near)
    ):
        raise ValueError(f"a claim is about numbers of {claim.near}, which has none")
    if isinstance(claim, Peak):
        check_names([claim.not_before] if claim.not_before else [], KNOWN, "there is no quantity")
        for row in claim.rows:
            what = f"{claim.peak} of row {row}, along which a claim looks for a peak,"
            fit(recipe.rows[row].values.get(claim.peak), float, what)


def _check_figure(figure: Mapping[str, Any], recipe: Recipe) -> None:
    """Reject a figure of an unknown kind or with wrong fields."""
    if figure.get("draw") not in _DRAWN:
        raise ValueError(
            f"draw of a figure is expected to be one of {', '.join(_DRAWN)}, got {figure!r}"
        )
    needed, allowed = _DRAWN[figure["draw"]]
    check_names(figure, ("draw", "title", "rows", "columns", *needed, *allowed), "a figure has no")
    for key in needed:
        if key not in figure:
            raise ValueError(f"a figure of {figure['draw']} is expected to have {key}, got none")
    for key, there in (("rows", recipe.rows), ("columns", recipe.columns)):
        named = fit(figure.get(key, []), list[str], f"{key} of a figure")
        check_names(named, there, f"a figure names no {key[:-1]}")


def _build_all(recipe: Recipe) -> None:
    """Check that every cell has a valid configuration."""
    for row, column in recipe.all_places():
        _check_tuned_place(recipe, row, column)
        tried = recipe.trials(row, column)
        cells = tried or [recipe.cell(row, column, 0)]
        recipe.cell(row, column, 0, quick=True, values=tried[0].tried if tried else None)
        for config in (cell.config for cell in cells if cell.config is not None):
            try:
                # This parses every field that is written as a call.
                config.identity()
            except ValueError as error:
                raise ValueError(f"row {row}, column {column}: {error}") from error


def _check_tuned_place(recipe: Recipe, row: str, column: str) -> None:
    """Reject a cell that is tuned as one with other candidates or a ``tuned_as`` of its own."""
    check_names([recipe.rows[row].tuned_as or row], recipe.rows, "tuned_as names no row")
    check_names(
        [recipe.columns[column].tuned_as or column], recipe.columns, "tuned_as names no column"
    )
    source = recipe.tuned_place(row, column)
    other = recipe.tuned_place(*source)
    if other != source:
        raise ValueError(
            f"row {row}, column {column} is tuned as row {source[0]}, column {source[1]}, which is "
            f"expected to be tuned itself, got tuned_as row {other[0]}, column {other[1]}"
        )
    own, theirs = recipe.tune(row, column), recipe.tune(*source) if recipe.has(*source) else {}
    if own != theirs:
        raise ValueError(
            f"row {row}, column {column} is tuned as row {source[0]}, column {source[1]}, which is "
            f"expected to have the candidates {dict(own)}, got {dict(theirs)}"
        )


def _published(
    plain: Any, what: str, rows: Mapping[str, Row], columns: Mapping[str, Column]
) -> Iterator[tuple[tuple[str, str, str], Published]]:
    numbers = fit(plain, Mapping[str, Mapping[str, Mapping[str, Any]]], what)
    for row, by_column in numbers.items():
        check_names([row], rows, f"{what} names no row")
        check_names(by_column, columns, f"{what} names no column")
        for column, by_quantity in by_column.items():
            check_names(by_quantity, KNOWN, "there is no quantity")
            for key, value in by_quantity.items():
                yield (row, column, key), _number(value, f"{what} of {row} in {column}")


def _number(value: Any, what: str) -> Published:
    """Parse a number or a text such as ``28.62 ± 0.24``."""
    found = re.fullmatch(r"\s*(-?[\d.]+)\s*(?:±\s*([\d.]+))?\s*", str(value))
    try:
        if found is None or isinstance(value, bool):
            raise ValueError
        return Published(float(found[1]), float(found[2]) if found[2] else None)
    except ValueError:
        raise ValueError(
            f"{what} is expected to be a number such as 28.62 ± 0.24, got {value!r}"
        ) from None
