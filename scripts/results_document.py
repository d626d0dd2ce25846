"""Write ``docs/results.md``, ``results/results.csv`` and the figures from the ledgers.

The ledgers are under ``results/``, the words of the front page in ``results/findings.yaml``.

Run by ``make docs`` at the root of the repository.
"""

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tammes.lab.config.yaml_file import read_yaml
from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.report.pages.reproduction_page import reproduction_figures
from tammes.lab.report.paper_comparison import DAGGER, ERRORS, VERDICTS, Head, PaperComparison
from tammes.lab.report.render.matplotlib_charts import draw, save
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.judge import in_words
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.quantities import KNOWN
from tammes.lab.stats.paired import difference, resampled_difference
from tammes.lab.stats.seed_groups import format_mean

_PICTURE = re.compile(r"figure-\d+")
"""Names of the figures that a recipe requests."""
_DPI = 80
_HEAD = """\
# Results

Results of `tammes reproduce`, next to the published numbers. `make docs` writes this page from the
ledgers under [results/](../results/README.md), with its figures and with
[results.csv](../results/results.csv), in which every number of every cell is a line; do not edit it
by hand.
"""
_TERMS = """\
Our numbers are means ± standard deviations over seeds, of the last epoch unless a recipe says
otherwise, never of the epoch that is best on the test images.
"""
_FINDINGS = "findings.yaml"
_NUMBER = re.compile(r"\{(\S+) (\S+)(?: minus (\S+))? (\S+) (\S+)\}")
"""Recipe, row or difference of two rows, column and quantity in the words of the front page."""
_SAID = ("short", "holds", "fails", "open")
"""Words on a paper: a sentence, and the details."""
_COLUMNS = ("recipe", "row", "column", "seed", "quantity", "value", "paper", "commit", "machine")
"""Columns of ``results.csv``."""
_IN_MARKDOWN: tuple[Head, ...] = ("paper", "released", "ours or missing", "difference and errors")
_OUTCOMES = ("holds", "leans", "fails", "open")


def results_document(folder: Path) -> str:
    """Return the page of all results as Markdown.

    Args:
        folder: folder with the ledgers, as ``PAPER/TABLE.json``.

    Returns:
        The text of the page.

    Raises:
        ValueError: a ledger cannot be read, or is in quick form.
    """
    comparisons = [_read(path) for path in sorted(Path(folder).glob("*/*.json"))]
    if not comparisons:
        return f"{_HEAD}\nNothing has been reproduced yet.\n"
    front = _front_page(comparisons, folder)
    terms = f"## All recipes\n\n{_TERMS}\n{ERRORS} {DAGGER}\n{VERDICTS}\n"
    parts = [_HEAD, *front, terms, "\n".join(_contents(comparisons)) + "\n"]
    for each in comparisons:
        lines = [f"## {each.recipe.name}", "", *markdown_section(each), *_pictures(each, folder)]
        parts.append("\n".join(lines) + "\n")
    begun = {each.recipe.name for each in comparisons}
    waiting = [name for name in recipes.names() if name not in begun]
    if waiting:
        parts.append("## Not begun\n\n" + "".join(f"- `{name}`\n" for name in waiting))
    return "\n".join(parts)


def markdown_section(comparison: PaperComparison) -> Iterator[str]:
    """Yield the lines of the comparison as Markdown, without its heading."""
    recipe = comparison.recipe
    yield f"{markdown_text(recipe.title)}. {markdown_text(recipe.source)}."
    yield ""
    yield f"- {markdown_text(comparison.summary)}"
    yield from (
        f"- `{' '.join(each.replace('`', chr(39)).split())}`" for each in comparison.commands
    )
    if recipe.released:
        yield f"- {markdown_text(recipe.released_title)}: {markdown_text(recipe.released_source)}"
    for table in comparison.tables(_IN_MARKDOWN, begun=True):
        several = ["column"] * (len(table.by_column()) > 1)
        rows = [[row.label, *[row.column] * len(several), *(each.text for each in row.values)]
                for row in table.rows]  # fmt: skip
        yield from ("", *markdown_table([table.title, *several, *table.heads], rows))
    claims = [(each.claim.says, each.outcome, each.sentence) for each in comparison.verdicts]
    if claims:
        yield from ("", *markdown_table(("claim", "verdict", "what was found"), claims, bold=1))
    stopped = [f"{row}, {column}, seed {seed}: {state}. {reason}"
               for row, column, seed, state, reason in comparison.stopped_in_words()]  # fmt: skip
    opened = [f"{column}: {words}" for column, words in comparison.open_in_words()]
    for title, items in (("Diverged or failed:", stopped), ("Open:", opened)):
        if items:
            yield from ("", title, "", *(f"- {markdown_text(each)}" for each in items))


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, bold: int | None = None
) -> Iterator[str]:
    """Yield the lines of a Markdown table; the cells of one column can be bold."""
    yield f"| {' | '.join(map(markdown_text, heads))} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        cells = [markdown_text(each) for each in row]
        if bold is not None:
            cells[bold] = f"**{cells[bold]}**"
        yield f"| {' | '.join(cells)} |"


def markdown_text(text: str) -> str:
    r"""Escape a text so that Markdown shows it literally, on one line."""
    line = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", line)


def _read(path: Path) -> PaperComparison:
    ledger = Ledger.read(path)
    if ledger.quick:
        raise ValueError(f"{path} is a ledger in quick form, whose numbers mean nothing")
    recipe = recipes.load(ledger.recipe)
    return PaperComparison(recipe, ledger.current(recipe))


def _front_page(comparisons: Sequence[PaperComparison], folder: Path) -> list[str]:
    """Return the parts of the page that say per paper what came out, and the main findings."""
    if not (folder / _FINDINGS).exists():
        return []
    given = read_yaml(folder / _FINDINGS)
    ledgers = {each.recipe.name: each.ledger for each in comparisons}
    lines = ["## In a minute", "", _counts(comparisons), ""]
    lines += ["| paper | what came out | claims |", "|---|---|---|"]
    details = ["### Paper by paper\n"]
    for paper, words in given["papers"].items():
        outcomes: Counter[str] = Counter()
        for each in comparisons:
            if each.recipe.name.startswith(f"{paper}/"):
                outcomes.update(verdict.outcome for verdict in each.verdicts)
        claims = ", ".join(f"{outcomes[kind]} {kind}" for kind in _OUTCOMES if outcomes[kind])
        said = {key: _with_numbers(words[key], ledgers) for key in _SAID}
        lines.append(f"| {words['title']} | {said.pop('short')} | {claims} |")
        points = [f"- **{key.capitalize()}:** {text}\n" for key, text in said.items()]
        details.append(f"**{words['title']}**\n\n{''.join(points)}")
    parts = ["\n".join(lines) + "\n"]
    for number, finding in enumerate(given["findings"], 1):
        text = _with_numbers(finding["text"], ledgers)
        title, figure = finding["title"], f"../results/{finding['figure']}"
        parts.append(f"### {number}. {title}\n\n{text}\n\n![{title}]({figure})\n")
    return parts + details


def _counts(comparisons: Sequence[PaperComparison]) -> str:
    published = [each.recipe for each in comparisons if not each.recipe.source.startswith("Ours")]
    papers = len({recipe.name.partition("/")[0] for recipe in published})
    done = sum(each.counts["done"] for each in comparisons)
    outcomes = Counter(v.outcome for each in comparisons for v in each.verdicts)
    claims = ", ".join(f"{outcomes[kind]} {kind}" for kind in _OUTCOMES)
    return (
        f"{done} cells (a row, a column and a seed) are done, of {len(published)} tables and "
        f"figures in {papers} papers and {len(comparisons) - len(published)} experiments of ours. "
        f"Verdicts on their claims: {claims}."
    )


def _with_numbers(text: str, ledgers: Mapping[str, Ledger]) -> str:
    """Replace ``{RECIPE ROW COLUMN QUANTITY}`` by our number.

    ``{RECIPE ROW minus ROW COLUMN QUANTITY}`` is the difference of two rows with its interval.

    Raises:
        ValueError: there is no such number.
    """

    def number(found: re.Match[str]) -> str:
        name, row, other, column, key = found.groups()
        if name in ledgers:
            ledger, quantity = ledgers[name], KNOWN[key]
            if other is None:
                known = ledger.summary(row, column, key)
                if known is not None:
                    return format_mean(quantity, known)
            else:
                rows = row, other
                paired = difference(*(ledger.values(each, column, key) for each in rows))
                drawn = (ledger.resamples(each, column, key) for each in rows)
                if paired is not None:
                    return in_words(paired, quantity, resampled_difference(*drawn))
        raise ValueError(f"{_FINDINGS} expects a number of a ledger, got {found[0]}")

    return _NUMBER.sub(number, " ".join(text.split()))


def results_csv(folder: Path) -> str:
    """Return every number of every cell as a line of CSV.

    A cell that diverged or failed has one line, with its state as the value.

    Args:
        folder: folder with the ledgers, as ``PAPER/TABLE.json``.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for path in sorted(folder.glob("*/*.json")):
        writer.writerows(_lines(_read(path)))
    return stream.getvalue()


def _lines(comparison: PaperComparison) -> Iterator[tuple[Any, ...]]:
    recipe, ledger = comparison.recipe, comparison.ledger
    rows, columns = [*recipe.rows], [*recipe.columns]
    for entry in sorted(
        ledger.cells, key=lambda e: (rows.index(e.row), columns.index(e.column), e.seed)
    ):
        machine = {} if entry.machine is None else ledger.machines[entry.machine]
        about = machine.get("commit") or "", machine.get("device") or ""
        keys = [each.key for each in recipe.quantities]
        for key in keys if entry.status == "done" else keys[:1]:
            value = entry.values.get(key) if entry.status == "done" else entry.status
            if value is None:
                continue
            published = recipe.paper.get((entry.row, entry.column, key))
            paper = "" if published is None else published.mean
            yield (recipe.name, entry.row, entry.column, entry.seed, key, value, paper, *about)


def _contents(comparisons: Sequence[PaperComparison]) -> Iterator[str]:
    yield "| recipe | source | cells | claims |"
    yield "|---|---|---|---|"
    for each in comparisons:
        name, source = each.recipe.name, markdown_text(each.recipe.source)
        outcomes = Counter(verdict.outcome for verdict in each.verdicts)
        claims = {kind: outcomes[kind] for kind in _OUTCOMES}
        counts = (", ".join(f"{count} {what}" for what, count in some.items() if count)
                  for some in (each.counts, claims))  # fmt: skip
        # Anchors of headings are lower case, without punctuation but hyphens.
        anchor = re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")
        yield f"| [{name}](#{anchor}) | {source} | {' | '.join(counts)} |"


def _pictures(comparison: PaperComparison, folder: Path) -> Iterator[str]:
    """Yield links to the figures of a recipe."""
    title, name = markdown_text(comparison.recipe.title), comparison.recipe.name
    for path in sorted((folder / name).glob("*.png")):
        if _PICTURE.fullmatch(path.stem):
            yield from ("", f"![{title}](../results/{name}/{path.name})")


def main(folder: Path = Path("results"), page: Path = Path("docs/results.md")) -> int:
    """Write the page, and the figures and ``results.csv`` beside the ledgers.

    Args:
        folder: folder of the ledgers.
        page: path of the page.

    Returns:
        The exit code.
    """
    if not folder.is_dir():
        message = f"{folder}: there is no such folder; run this at the root of the repository"
        print(message, file=sys.stderr)
        return 2
    for path in sorted(folder.glob("*/*.json")):
        comparison = _read(path)
        charts = reproduction_figures(comparison.recipe, comparison.ledger)
        for name in filter(_PICTURE.fullmatch, charts):
            save(draw(charts[name]), path.with_suffix("") / f"{name}.png", dpi=_DPI)
    write_atomically(folder / "results.csv", results_csv(folder).encode())
    write_atomically(page, results_document(folder).encode())
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
