"""One self-contained HTML page: it opens from disk, without a network, on any screen.

A page is sections, a section is blocks: text, headline numbers, tables, plots, details. What a
block shows is escaped here and nowhere else, so a class called ``<script>`` stays a name.
"""

import html
import json
import os
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import groupby
from typing import Any, TypeAlias

import tammes
from tammes.lab.atomic import write_atomically
from tammes.lab.report.charts import Chart
from tammes.lab.report.interactive import draw
from tammes.optional import require

Cell: TypeAlias = str | int | float | None
_SHORT = 20
"""Letters of a cell that is never broken."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Card:
    """A headline number; ``share`` of its optimum is shown as a bar."""

    label: str
    value: str
    detail: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Cards:
    """Headline numbers side by side."""

    cards: Sequence[Card]


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; a row that is a single text is a heading within the table.

    On a narrow screen the rows of a wide table become blocks. A table without headings sorts by a
    click.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell] | str]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A Plotly figure with a title and a sentence on what it shows."""

    plot: Any
    title: str
    caption: str = ""
    tall: bool = False


@dataclass(frozen=True)
class Details:
    """A text that is folded away, kept as it is: a command, a configuration."""

    summary: str
    text: str


Block: TypeAlias = Text | Cards | Table | Figure | Details


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; without a title only the blocks."""

    title: str
    blocks: Sequence[Block]


def pictures(
    chart: Chart, *, title: str = "", caption: str = "", tall: bool = False
) -> list[Figure]:
    """A chart as figures of a page, one for each panel, so that they fit on a narrow screen.

    Args:
        chart: what to draw.
        title: of the figures; by default that of each panel.
        caption: what they show.
        tall: give them more height.
    """
    return [
        Figure(draw(replace(chart, panels=[panel], title="")), title or panel.title, caption, tall)
        for panel in chart.panels
    ]


def render(title: str, sections: Sequence[Section], *, lead: Sequence[str] = ()) -> str:
    """A page as text.

    Args:
        title: of the page.
        sections: what it shows.
        lead: paragraphs under the title.

    Returns:
        The HTML, with everything it needs inside.

    Example:
        >>> from tammes.lab.report.page import Section, Text, render
        >>> text = render("a <b> title", [Section("one", [Text("1 < 2")])])
        >>> "a &lt;b&gt; title" in text, "1 &lt; 2" in text
        (True, True)
    """
    plots: list[dict[str, Any]] = []
    body = "\n".join(part for section in sections for part in _section(section, plots))
    template = resources.files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        title=_escape(title),
        generator=_escape(f"tammes {tammes.__version__}"),
        lead="\n".join(f'<p class="soft">{_escape(text)}</p>' for text in lead),
        body=body,
        footer=f"Written by tammes {_escape(tammes.__version__)}. This file needs no network.",
        library=_library() if plots else "",
        plots=_json(plots),
    )


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a page in one step; nothing is left behind where that fails."""
    write_atomically(path, text.encode())


def _library() -> str:
    code = require("plotly.offline", extra="lab").get_plotlyjs()
    # Nothing in it may end the element it stands in.
    assert "</script" not in code.lower()
    warning = "The plots need JavaScript; the numbers do not."
    return f"<noscript>{warning}</noscript>\n<script>{code}</script>"


def _json(value: Any) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _escape(text: object) -> str:
    return html.escape(str(text))


def _section(section: Section, plots: list[dict[str, Any]]) -> Iterator[str]:
    yield "<section>"
    if section.title:
        yield f"<h2>{_escape(section.title)}</h2>"
    for kind, blocks in groupby(section.blocks, type):
        if kind is Figure:
            yield '<div class="plots">'
        for block in blocks:
            yield _block(block, plots)
        if kind is Figure:
            yield "</div>"
    yield "</section>"


def _block(block: Block, plots: list[dict[str, Any]]) -> str:
    match block:
        case Text():
            return f"<p>{_escape(block.text)}</p>"
        case Cards():
            return f'<div class="cards">{"".join(map(_card, block.cards))}</div>'
        case Table():
            return _table(block)
        case Details():
            summary, text = _escape(block.summary), _escape(block.text)
            return f"<details><summary>{summary}</summary><pre>{text}</pre></details>"
        case Figure():
            figure = json.loads(block.plot.to_json())
            plots.append({"data": figure["data"], "layout": figure["layout"], "name": block.title})
            caption = f"<p>{_escape(block.caption)}</p>" if block.caption else ""
            heading = f"<h3>{_escape(block.title)}</h3>" if block.title else ""
            kind = "plot tall" if block.tall else "plot"
            return (
                f"<figure><figcaption>{heading}{caption}</figcaption>"
                f'<div class="{kind}" data-plot="{len(plots) - 1}" role="img" '
                f'aria-label="{_escape(block.title)}"></div></figure>'
            )
    raise TypeError(f"no block of a page: {type(block).__name__}")


def _card(card: Card) -> str:
    bar = ""
    if card.share is not None:
        percent = 100 * min(max(card.share, 0.0), 1.0)
        bar = f'<div class="meter"><div style="width:{percent:.1f}%"></div></div>'
    return (
        f'<div class="card"><div class="label">{_escape(card.label)}</div>'
        f'<div class="value">{_escape(card.value)}</div>{bar}'
        f'<div class="detail">{_escape(card.detail)}</div></div>'
    )


def _table(table: Table) -> str:
    grouped = any(isinstance(row, str) for row in table.rows)
    cells = [row for row in table.rows if not isinstance(row, str)]
    numeric = [
        bool(cells) and all(not isinstance(row[place], str) for row in cells)
        for place in range(len(table.columns))
    ]
    heads = []
    for name, right in zip(table.columns, numeric, strict=True):
        text = _escape(name) if grouped else f'<button type="button">{_escape(name)}</button>'
        kind = ' class="number"' if right else ""
        heads.append(f"<th{kind}>{text}</th>")
    rows = []
    for row in table.rows:
        if isinstance(row, str):
            rows.append(f'<tr class="group"><th colspan="{len(numeric)}">{_escape(row)}</th></tr>')
            continue
        parts = zip(table.columns, row, numeric, strict=True)
        rows.append(f"<tr>{''.join(_cell(name, cell, right) for name, cell, right in parts)}</tr>")
    caption = f"<caption>{_escape(table.caption)}</caption>" if table.caption else ""
    wide = ' class="stack"' if len(table.columns) > 3 else ""
    return (
        f'<div class="scroll"><table{wide}>{caption}'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(column: str, cell: Cell, right: bool) -> str:
    number = isinstance(cell, int | float)
    shown = "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    kind = ' class="number"' if right else ' class="short"' if len(shown) <= _SHORT else ""
    sort = f' data-sort="{cell}"' if number else ""
    return f'<td{kind} data-column="{_escape(column)}"{sort}>{_escape(shown)}</td>'
