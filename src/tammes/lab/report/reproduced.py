"""A reproduction as a table for a terminal: paper against ours, claims, what is open."""

import textwrap
from collections.abc import Iterator, Sequence

from tammes.lab.ledger import Ledger
from tammes.lab.recipes import Recipe
from tammes.lab.report.side_by_side import (
    DAGGER,
    ERRORS,
    QUICK,
    Beside,
    Reproduced,
    counts_in_words,
    machines_in_words,
    open_by_name,
    published,
    seeds_in_words,
    stop_in_words,
)
from tammes.lab.statistics import Quantity, spread

_WIDTH = 120
_TITLE = 40
"""Letters of a row's title beside its numbers; a longer one has a line of its own."""


def print_table(recipe: Recipe, ledger: Ledger, *, width: int = _WIDTH) -> str:
    """What has become of a recipe, as plain text.

    Args:
        recipe: what was to be done.
        ledger: what was done.
        width: letters in a line; only a table that is wider by itself passes it.

    Returns:
        The text, without a line break at its end.
    """
    found = Reproduced(recipe, ledger)
    lines = _wrapped(f"{recipe.title} ({recipe.source})", width, "")
    lines += _wrapped(QUICK, width) if ledger.quick else []
    lines += _wrapped(_state(found), width)
    for quantity, columns in found.quantities(begun=True):
        lines += ["", *_table(found, quantity, columns, width)]
    if recipe.paper:
        lines += ["", *_wrapped(ERRORS, width)]
        lines += _wrapped(DAGGER, width) if any("†" in line for line in lines) else []
    if found.verdicts:
        lines += ["", "claims"]
        for verdict in found.verdicts:
            lines += _wrapped(f"{verdict.outcome.upper():<6} {verdict.claim.says}", width)
            lines += _wrapped(verdict.sentence, width, " " * 9)
    if found.stopped:
        lines += ["", "diverged and failed"]
        for entry in found.stopped:
            cell = f"{found.labels.get(entry.row, entry.row)}, {entry.column}, seed {entry.seed}"
            reason = f": {entry.reason}" if entry.reason else ""
            lines += _wrapped(f"{cell}: {stop_in_words(entry)}{reason}", width)
    opened = open_by_name(found)
    if opened:
        lines += ["", "open"]
        lines += [
            line for column, words in opened for line in _wrapped(f"{column}: {words}", width)
        ]
    return "\n".join(line.rstrip() for line in lines)


def _state(found: Reproduced) -> str:
    cells = counts_in_words(found.counts) if found.recipe.rows else "nothing is trained"
    words = [found.recipe.name, cells]
    if found.ledger.cells:
        words.append(seeds_in_words(found.seeds))
    where = machines_in_words(found.ledger)
    return "; ".join([*words, where] if where else words)


def _table(
    found: Reproduced, quantity: Quantity, columns: Sequence[str], width: int
) -> Iterator[str]:
    tables = {column: found.table(quantity, column) for column in columns}
    cells = [cell for own in tables.values() for cell in own]
    kinds = {
        "paper": any(cell.paper for cell in cells),
        "released": any(cell.released for cell in cells),
        "ours": True,
        "difference": any(cell.difference is not None for cell in cells),
        "in s.e.": any(cell.errors_in_words for cell in cells),
    }
    heads = [name for name, there in kinds.items() if there]
    # What is missing is a text of any length: it comes last, where it moves nothing.
    every = {cell: [_part(cell, head) for head in heads] for cell in cells}
    sizes = [max(map(len, column)) for column in zip(heads, *every.values(), strict=True)]
    room = max(12, min(_TITLE, width - 2 - sum(sizes) - 2 * len(sizes)))
    room = min(room, max(len(found.labels[cell.row]) for cell in cells))
    room = max(room, len(quantity.heading))
    yield _line(quantity.heading, heads, room, sizes)
    for column, own in tables.items():
        if len(tables) > 1:
            yield f"  {found.headings[column]}"
        for cell in own:
            label = found.labels[cell.row]
            if len(label) > room:
                yield from _wrapped(label, width)
                label = ""
            yield f"{_line(label, every[cell], room, sizes)}  {cell.state}"


def _part(cell: Beside, head: str) -> str:
    match head:
        case "paper":
            return published(cell.quantity, cell.paper)
        case "released":
            return published(cell.quantity, cell.released)
        case "ours":
            return spread(cell.quantity, cell.ours)
        case "difference":
            return cell.difference_in_words
    return cell.errors_in_words


def _line(label: str, parts: Sequence[str], room: int, sizes: Sequence[int]) -> str:
    numbers = "".join(f"  {part:>{size}}" for part, size in zip(parts, sizes, strict=True))
    return f"  {label:<{room}}{numbers}"


def _wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    # What comes from a file may hold line breaks, and signs that a terminal obeys.
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(plain, width, initial_indent=indent, subsequent_indent=f"{indent}  ")
