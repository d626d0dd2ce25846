"""Writers of the comparison with a paper: terminal and HTML page."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tammes.lab.report.paper_comparison import (
    DAGGER,
    ERRORS,
    ON_REQUEST,
    QUICK,
    Head,
    PaperComparison,
    ResultRow,
    ResultTable,
)
from tammes.lab.report.render.html_page import Block, Cell, Fold, Table, Text, Value
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipes import Recipe
from tammes.optional import require

_ON_TERMINAL: tuple[Head, ...] = (
    "paper", "released", "ours", "difference", "standard errors", "missing"
)  # fmt: skip
_ON_PAGE: tuple[Head, ...] = (
    "paper", "released", "ours or missing", "n", "difference", "standard errors"
)  # fmt: skip
_TITLE = 40
"""Width of row titles on a terminal; longer ones are wrapped."""
_UNFOLDED = 36
"""Largest number of rows of a table that a page does not fold."""
_BESIDE = 4
"""Number of columns side by side in an overview table of a page."""


# ------------------------------------------------------------------------------ for a terminal


def print_table(recipe: Recipe, ledger: Ledger, *, width: int = 120) -> str:
    """Format the comparison as plain text for a terminal, in lines of ``width`` characters."""
    comparison = PaperComparison(recipe, ledger)
    stream = io.StringIO()
    console = require("rich.console", extra="lab").Console(
        file=stream, width=width, color_system=None
    )
    padding = require("rich.padding", extra="lab").Padding

    def say(*parts: Any, title: str = "") -> None:
        if title:
            console.print("", _printable(title), sep="\n")
        for part in parts:
            shown = _printable(part) if isinstance(part, str) else part
            console.print(padding(shown, (0, 0, 0, 2)))

    console.print(_printable(f"{recipe.title} ({recipe.source})"))
    say(*[QUICK] * ledger.quick, f"{recipe.name}; {comparison.summary}")
    for quantity, columns in comparison.quantities(begun=True):
        say("", _rich_table(comparison.table(quantity, columns, _ON_TERMINAL)))
    if recipe.paper:
        say("", ERRORS, *[DAGGER] * ("†" in stream.getvalue()))
    if comparison.verdicts:
        claims = require("rich.table", extra="lab").Table.grid(padding=(0, 2, 0, 0))
        for verdict in comparison.verdicts:
            claims.add_row(verdict.outcome.upper(), _printable(verdict.claim.says))
            claims.add_row("", _printable(verdict.sentence))
        say(claims, title="claims")
    stopped = [
        f"{row}, {column}, seed {seed}: {': '.join(filter(None, why))}"
        for row, column, seed, *why in comparison.stopped_in_words()
    ]
    if stopped:
        say(*stopped, title="diverged and failed")
    opened = [f"{column}: {words}" for column, words in comparison.open_in_words()]
    if opened:
        say(*opened, title="open")
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _rich_table(table: ResultTable) -> Any:
    drawn = require("rich.table", extra="lab").Table(box=None, pad_edge=False)
    drawn.add_column(_printable(table.title), max_width=max(_TITLE, len(table.title)))
    for head in table.heads:
        # The column of missing seeds has text of any length.
        numbers = {"justify": "right", "no_wrap": True} if head != "missing" else {}
        drawn.add_column(_printable(head if numbers else ""), **numbers)
    columns = table.by_column()
    for column, rows in columns:
        if len(columns) > 1:
            drawn.add_row(_printable(column))
        for row in rows:
            drawn.add_row(_printable(row.label), *(_printable(each.text) for each in row.values))
    return drawn


def _printable(text: str) -> Any:
    """Return a rich text without control characters."""
    letters = (letter if letter.isprintable() else " " for letter in text)
    return require("rich.text", extra="lab").Text("".join(letters))


# --------------------------------------------------------------------------------- for a page


def comparison_blocks(comparison: PaperComparison) -> list[Block]:
    """Return the comparison as blocks of a page: tables of each quantity, and remarks."""
    blocks: list[Block] = []
    tables = [*comparison.tables(_ON_PAGE)]
    for table in tables:
        caption = f"{table.title.capitalize()}, mean ± standard deviation."
        if table.shared:
            caption = "Ours, mean ± standard deviation; the paper has no numbers for these."
        columns = table.by_column()
        detail = Table(["", *table.heads], [*_page_rows(comparison, columns)], caption)
        if table.shared or len(columns) == 1:
            blocks.append(detail)
            continue
        blocks += _overviews(comparison, table)
        words = f"{table.title.capitalize()}: every number with its difference from the paper"
        blocks.append(Fold(words, [detail]) if len(table.rows) > _UNFOLDED else detail)
    dagger = any("†" in each.text for t in tables for row in t.rows for each in row.values)
    recipe = comparison.recipe
    if recipe.paper or recipe.released:
        remarks = [*[ERRORS] * bool(recipe.paper), *[DAGGER] * dagger,
                   *[recipe.released_source] * bool(recipe.released)]  # fmt: skip
        blocks.append(Text(" ".join(remarks)))
    return blocks


def _page_rows(
    comparison: PaperComparison, columns: Sequence[tuple[str, list[ResultRow]]]
) -> Iterator[Sequence[Cell] | str]:
    for column, rows in columns:
        if len(columns) > 1:
            yield column
        for row in rows:
            yield [
                _label(comparison, row.name),
                *(each if each.text else None for each in row.values),
            ]


def _label(comparison: PaperComparison, row: str) -> Value:
    return Value(comparison.labels[row], color=list(comparison.labels).index(row))


def _overviews(comparison: PaperComparison, table: ResultTable) -> Iterator[Table]:
    """Yield tables of rows by columns, a few columns each: ours, with the paper's in brackets."""
    cells: dict[str, dict[str, Value]] = {}
    for column, rows in table.by_column():
        own = {row.name: dict(zip(table.heads, row.values, strict=True)) for row in rows}
        # Published numbers of a column that was not requested are in the detailed table.
        if any(values["ours"].text != ON_REQUEST for values in own.values()):
            cells[column] = {name: _with_paper(values) for name, values in own.items()}
    columns = list(cells)
    for start in range(0, len(columns), _BESIDE):
        part = columns[start : start + _BESIDE]
        lines = [
            [_label(comparison, name), *(cells[column].get(name) for column in part)]
            for name in comparison.recipe.rows
            if any(name in cells[column] for column in part)
        ]
        caption = f"{table.title.capitalize()}: ours, mean ± standard deviation [paper]."
        yield Table(["", *part], lines, caption)


def _with_paper(values: Mapping[str, Value]) -> Value:
    ours, paper = values["ours"], values.get("paper", Value("")).text
    return Value(" ".join(filter(None, (ours.text, paper and f"[{paper}]"))), ours.sort)
