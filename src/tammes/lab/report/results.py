"""``docs/results.md``, made of the ledgers under ``results/``.

``python -m tammes.lab.report.results`` writes it anew, at the root of the repository.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tammes.lab import recipes
from tammes.lab.atomic import write_atomically
from tammes.lab.ledger import Ledger
from tammes.lab.report.figures import draw, save
from tammes.lab.report.reproduction import reproduction_figures
from tammes.lab.report.side_by_side import (
    DAGGER,
    ERRORS,
    VERDICTS,
    Beside,
    Reproduced,
    Shown,
    commands_of,
    counts_in_words,
    machines_in_words,
    open_by_name,
    published,
    seeds_in_words,
    stop_in_words,
)
from tammes.lab.statistics import Quantity, spread

_PICTURE = re.compile(r"figure-\d+")
"""Names of the figures that a recipe asks for."""
_DPI = 80
_HEAD = """\
# Results

What `tammes reproduce` gave, beside what was published. This page is made of the ledgers under
[results/](../results/README.md) by `python -m tammes.lab.report.results`; change those, not this.
Ours are means ± standard deviations over seeds, of the last epoch, never of the one that is best on
the test images.
"""


def results_document(folder: Path) -> str:
    """The page of all results, as Markdown.

    Args:
        folder: with the ledgers, as ``PAPER/TABLE.json``.

    Returns:
        The text of the page.

    Raises:
        ValueError: a ledger cannot be read, or is of the quick form, which is no result.
    """
    found = [_read(path) for path in sorted(Path(folder).glob("*/*.json"))]
    if not found:
        return f"{_HEAD}\nNothing has been reproduced yet.\n"
    parts = [f"{_HEAD}\n{ERRORS} {DAGGER}\n{VERDICTS}\n", "\n".join(_contents(found)) + "\n"]
    parts += ["\n".join([*_section(each), *_pictures(each, folder)]) + "\n" for each in found]
    begun = {each.recipe.name for each in found}
    waiting = [name for name in recipes.names() if name not in begun]
    if waiting:
        parts.append("## Not begun\n\n" + "".join(f"- `{name}`\n" for name in waiting))
    return "\n".join(parts)


def _read(path: Path) -> Reproduced:
    ledger = Ledger.read(path)
    if ledger.quick:
        raise ValueError(f"{path} is a ledger of the quick form, which is no result")
    recipe = recipes.load(ledger.recipe)
    return Reproduced(recipe, ledger.current(recipe))


def _contents(found: Sequence[Reproduced]) -> Iterator[str]:
    yield "| recipe | source | cells | claims |"
    yield "|---|---|---|---|"
    for each in found:
        outcomes = [verdict.outcome for verdict in each.verdicts]
        kinds = [kind for kind in ("holds", "leans", "fails", "open") if kind in outcomes]
        claims = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in kinds)
        cells = counts_in_words(each.counts).partition(": ")[2]
        name = each.recipe.name
        link = f"[{name}](#{_anchor(name)})"
        yield f"| {link} | {_plain(each.recipe.source)} | {cells} | {claims} |"


def _anchor(heading: str) -> str:
    """Where a heading is linked to: small letters, no signs but hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _section(found: Reproduced) -> Iterator[str]:
    recipe, ledger = found.recipe, found.ledger
    yield f"## {recipe.name}"
    yield ""
    yield f"{_plain(recipe.title)}. {_plain(recipe.source)}."
    yield ""
    words = [counts_in_words(found.counts)]
    if ledger.cells:
        words.append(seeds_in_words(found.seeds))
    where = machines_in_words(ledger)
    words += [_plain(where)] if where else []
    yield f"- {'; '.join(words)}"
    yield from (f"- `{_code(each)}`" for each in commands_of(ledger))
    if recipe.released:
        yield f"- {_plain(recipe.released_title)}: {_plain(recipe.released_source)}"
    alone, shared = found.tables(begun=True)
    for quantity, columns in alone:
        yield ""
        yield from _table(found, quantity, columns)
    if shared:
        yield ""
        yield from _shared_table(found, shared)
    if found.verdicts:
        yield ""
        yield "| claim | verdict | what was found |"
        yield "|---|---|---|"
        for verdict in found.verdicts:
            says, said = _plain(verdict.claim.says), _plain(verdict.sentence)
            yield f"| {says} | **{verdict.outcome}** | {said} |"
    if found.stopped:
        yield ""
        yield "Diverged or failed:"
        yield ""
        for entry in found.stopped:
            row = found.labels.get(entry.row, entry.row)
            cell = f"{row}, {found.headings.get(entry.column, entry.column)}, seed {entry.seed}"
            yield f"- {_plain(cell)}: {stop_in_words(entry)}. {_plain(entry.reason or '')}".rstrip()
    opened = open_by_name(found)
    if opened:
        yield ""
        yield "Open:"
        yield ""
        for column, open_words in opened:
            yield f"- {_plain(column)}: {_plain(open_words)}"


def _pictures(found: Reproduced, folder: Path) -> Iterator[str]:
    """Figures that were drawn of a recipe."""
    drawn = sorted((folder / found.recipe.name).glob("*.png"))
    for path in drawn:
        if _PICTURE.fullmatch(path.stem):
            yield ""
            yield f"![{_plain(found.recipe.title)}](../results/{found.recipe.name}/{path.name})"


def _table(found: Reproduced, quantity: Quantity, columns: Sequence[str]) -> Iterator[str]:
    tables = {column: found.table(quantity, column) for column in columns}
    cells = [cell for own in tables.values() for cell in own]
    released = any(cell.released for cell in cells)
    paper = any(cell.paper for cell in cells)
    several = len(columns) > 1
    title = _plain(found.recipe.released_title)
    heads = [_plain(quantity.heading), *["column"] * several, *["paper"] * paper,
             *[title] * released, "ours", *["difference"] * paper]  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for cell in cells:
        parts = [found.labels[cell.row], *[found.headings[cell.column]] * several]
        parts += [published(quantity, cell.paper)] * paper
        parts += [published(quantity, cell.released)] * released
        parts += [cell.ours_in_words, *[_difference(cell)] * paper]
        yield f"| {' | '.join(map(_plain, parts))} |"


def _shared_table(found: Reproduced, given: Sequence[Shown]) -> Iterator[str]:
    """What has no published numbers: the quantities beside each other."""
    rows = [*found.shared_rows(given)]
    several = len({cells[0].column for cells in rows}) > 1
    missing = any(cells[0].state for cells in rows)
    heads = ["ours", *["column"] * several, *(quantity.heading for quantity, _ in given)]
    heads += ["missing"] * missing
    yield f"| {' | '.join(map(_plain, heads))} |"
    yield f"|{'---|' * len(heads)}"
    for cells in rows:
        first = cells[0]
        parts = [found.labels[first.row], *[found.headings[first.column]] * several]
        parts += [spread(cell.quantity, cell.ours) for cell in cells]
        parts += [first.state] * missing
        yield f"| {' | '.join(map(_plain, parts))} |"


def _difference(cell: Beside) -> str:
    if cell.errors is None:
        why = f" ({cell.errors_in_words})" if cell.errors_in_words else ""
        return f"{cell.difference_in_words}{why}"
    return f"{cell.difference_in_words} ({cell.errors_in_words} s.e.)"


def _plain(text: str) -> str:
    r"""A text that Markdown shows as it is, on one line.

    Example:
        >>> _plain("CosFace* | <b>\n")
        'CosFace\\* \\| &lt;b&gt;'
    """
    line = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", line)


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def main(folder: Path = Path("results"), page: Path = Path("docs/results.md")) -> int:
    """Write the page, and the figures that recipes ask for beside their ledgers.

    Args:
        folder: of the ledgers.
        page: where it is written.

    Returns:
        The exit code.
    """
    if not folder.is_dir():
        said = f"{folder}: there is no such folder; run this at the root of the repository"
        print(said, file=sys.stderr)
        return 2
    for path in sorted(folder.glob("*/*.json")):
        found = _read(path)
        charts = reproduction_figures(found.recipe, found.ledger)
        for name in filter(_PICTURE.fullmatch, charts):
            save(draw(charts[name]), path.with_suffix("") / f"{name}.png", dpi=_DPI)
    write_atomically(page, results_document(folder).encode())
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
