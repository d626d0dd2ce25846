"""Write ``docs/results.md`` from the ledgers under ``results/``.

Run by ``make docs`` at the root of the repository.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.report.pages.reproduction_page import reproduction_figures
from tammes.lab.report.paper_comparison import DAGGER, ERRORS, VERDICTS, PaperComparison
from tammes.lab.report.paper_comparison_writers import markdown_section, markdown_text
from tammes.lab.report.render.matplotlib_charts import draw, save
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.ledger import Ledger

_PICTURE = re.compile(r"figure-\d+")
"""Names of the figures that a recipe requests."""
_DPI = 80
_HEAD = """\
# Results

Results of `tammes reproduce`, next to the published numbers. `make docs` writes this page from the
ledgers under [results/](../results/README.md); do not edit it by hand.
Our numbers are means ± standard deviations over seeds, of the last epoch, never of the epoch that
is best on the test images.
"""


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
    parts = [f"{_HEAD}\n{ERRORS} {DAGGER}\n{VERDICTS}\n", "\n".join(_contents(comparisons)) + "\n"]
    for each in comparisons:
        lines = [f"## {each.recipe.name}", "", *markdown_section(each), *_pictures(each, folder)]
        parts.append("\n".join(lines) + "\n")
    begun = {each.recipe.name for each in comparisons}
    waiting = [name for name in recipes.names() if name not in begun]
    if waiting:
        parts.append("## Not begun\n\n" + "".join(f"- `{name}`\n" for name in waiting))
    return "\n".join(parts)


def _read(path: Path) -> PaperComparison:
    ledger = Ledger.read(path)
    if ledger.quick:
        raise ValueError(f"{path} is a ledger in quick form, whose numbers mean nothing")
    recipe = recipes.load(ledger.recipe)
    return PaperComparison(recipe, ledger.current(recipe))


def _contents(comparisons: Sequence[PaperComparison]) -> Iterator[str]:
    yield "| recipe | source | cells | claims |"
    yield "|---|---|---|---|"
    for each in comparisons:
        name, source = each.recipe.name, markdown_text(each.recipe.source)
        outcomes = Counter(verdict.outcome for verdict in each.verdicts)
        claims = {kind: outcomes[kind] for kind in ("holds", "leans", "fails", "open")}
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
    """Write the page, and the requested figures beside the ledgers.

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
    write_atomically(page, results_document(folder).encode())
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
