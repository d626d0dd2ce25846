"""Tables of the page of a reproduction: the paper's numbers and ours."""

from collections.abc import Sequence
from typing import Any

from tammes.lab.report.page import Block, Cell, Fold, Table, Text, Value
from tammes.lab.report.side_by_side import (
    DAGGER,
    ERRORS,
    ON_REQUEST,
    Beside,
    Reproduced,
    Shown,
    published,
)
from tammes.lab.statistics import Quantity, spread

_UNFOLDED = 36
"""Cells of a quantity up to which the table of differences is not folded."""
_BESIDE = 4
"""Columns of a table beside each other."""


def tables(found: Reproduced) -> list[Block]:
    """A table or two for each quantity; what has no published numbers shares one."""
    blocks: list[Block] = []
    dagger = False
    alone, shared = found.tables()
    for quantity, columns in alone:
        own = {column: found.table(quantity, column) for column in columns}
        count = sum(map(len, own.values()))
        detail = _detail(found, quantity, own)
        dagger = dagger or any(
            cell.errors_in_words.endswith("†") for cells in own.values() for cell in cells
        )
        # What is run on request, and was not, has its published numbers in the other table.
        told = {
            name: cells
            for name, cells in own.items()
            if any(cell.state != ON_REQUEST for cell in cells)
        }
        names = list(told) if len(columns) > 1 else []
        for start in range(0, len(names), _BESIDE):
            part = {name: told[name] for name in names[start : start + _BESIDE]}
            blocks.append(_overview(found, quantity, part))
        if len(columns) > 1 and count > _UNFOLDED:
            words = f"{quantity.name.capitalize()}: every number with its difference to the paper"
            blocks.append(Fold(words, [detail]))
        else:
            blocks.append(detail)
    if shared:
        blocks.append(_shared(found, shared))
    if found.recipe.paper or found.recipe.released:
        remarks = [
            ERRORS if found.recipe.paper else "",
            DAGGER if dagger else "",
            found.recipe.released_source if found.recipe.released else "",
        ]
        blocks.append(Text(" ".join(filter(None, remarks))))
    return blocks


def _overview(found: Reproduced, quantity: Quantity, tables: dict[str, list[Beside]]) -> Table:
    cells = {(cell.row, column): cell for column, own in tables.items() for cell in own}
    rows: list[list[Cell]] = []
    for place, row in enumerate(found.recipe.rows):
        line = [cells.get((row, column)) for column in tables]
        if any(line):
            rows.append([Value(found.labels[row], color=place), *map(_both, line)])
    heads = ["", *(found.headings[column] for column in tables)]
    caption = f"{quantity.heading.capitalize()}: ours, mean ± standard deviation [paper]."
    return Table(heads, rows, caption)


def _shared(found: Reproduced, given: Sequence[Shown]) -> Table:
    """What has no published numbers: the quantities beside each other."""
    places = {row: place for place, row in enumerate(found.recipe.rows)}
    rows: list[Sequence[Cell] | str] = []
    several = len({column for _, columns in given for column in columns}) > 1
    column = ""
    for cells in found.shared_rows(given):
        first = cells[0]
        if first.column != column and several:
            rows.append(found.headings[first.column])
        column = first.column
        numbers = [
            _number(spread(c.quantity, c.ours), c.ours.mean if c.ours else None) for c in cells
        ]
        count = max((cell.ours.count for cell in cells if cell.ours), default=None)
        label = Value(found.labels[first.row], color=places[first.row])
        rows.append([label, *numbers, count, first.state])
    heads = ["", *(quantity.heading for quantity, _ in given), "n", "missing"]
    return Table(heads, rows, "Ours, mean ± standard deviation; nothing of it is published.")


def _both(cell: Beside | None) -> Cell:
    if cell is None:
        return None
    theirs = published(cell.quantity, cell.paper)
    text = " ".join(filter(None, (cell.ours_in_words, f"[{theirs}]" if theirs else "")))
    mean = cell.ours.mean if cell.ours else None
    return Value(text, mean)


def _detail(found: Reproduced, quantity: Quantity, tables: dict[str, list[Beside]]) -> Table:
    cells = [cell for own in tables.values() for cell in own]
    released = any(cell.released for cell in cells)
    paper = any(cell.paper for cell in cells)
    heads = ["", *["paper"] * paper, *[found.recipe.released_title] * released, "ours", "n",
             *["difference", "standard errors"] * paper]  # fmt: skip
    places = {row: place for place, row in enumerate(found.recipe.rows)}
    rows: list[Sequence[Cell] | str] = []
    for column, own in tables.items():
        rows += [found.headings[column]] if len(tables) > 1 else []
        for cell in own:
            line: list[Cell] = [Value(found.labels[cell.row], color=places[cell.row])]
            line += [_published(quantity, cell.paper)] * paper
            line += [_published(quantity, cell.released)] * released
            line.append(Value(cell.ours_in_words, cell.ours.mean if cell.ours else None))
            line.append(cell.ours.count if cell.ours else None)
            if paper:
                line.append(_number(cell.difference_in_words, cell.difference))
                line.append(_number(cell.errors_in_words, cell.errors))
            rows.append(line)
    return Table(heads, rows, f"{quantity.heading.capitalize()}, mean ± standard deviation.")


def _published(quantity: Quantity, found: Any) -> Cell:
    return None if found is None else Value(published(quantity, found), found.mean)


def _number(text: str, value: float | None) -> Cell:
    if value is None:
        return text or None
    return Value(text, value)
