"""One self-contained HTML page: it opens from disk, without a network, on any screen.

A page is sections, a section is blocks: text, headline numbers, tables, plots, images, details.
What a block shows is escaped here and nowhere else, so a class called ``<script>`` stays a name.
"""

import html
import json
import os
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import count, groupby
from typing import Any, TypeAlias

import tammes
from tammes.lab.atomic import write_atomically
from tammes.lab.report.charts import DASHES, Chart, Panel, color, turn
from tammes.lab.report.interactive import draw
from tammes.optional import require

_SHORT = 20
"""Letters of a cell that is never broken."""
_CONTENTS = 5
"""Sections with a title from which on a page has a list of them."""


@dataclass(frozen=True)
class Value:
    """A text in a table with a number it is sorted by, or the colour of a group beside it."""

    text: str
    sort: float | None = None
    color: int | None = None


Cell: TypeAlias = str | int | float | Value | None


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
    height: int | None = None


@dataclass(frozen=True)
class Legend:
    """Names of the groups that the plots of a section show; a click hides or shows one in all."""

    names: Sequence[str]


@dataclass(frozen=True)
class Image:
    """A small image as the address of its data, with what it shows."""

    source: str
    caption: str
    wrong: bool = False


@dataclass(frozen=True)
class Gallery:
    """Images in a row under a heading."""

    title: str
    images: Sequence[Image]
    detail: str = ""


@dataclass(frozen=True)
class Details:
    """A text that is folded away, kept as it is: a command, a configuration."""

    summary: str
    text: str


@dataclass(frozen=True)
class Fold:
    """Blocks that are folded away; plots among them find their size when it is opened."""

    summary: str
    blocks: Sequence["Block"] = field(default_factory=tuple)
    open: bool = False


Block: TypeAlias = Text | Cards | Table | Figure | Legend | Gallery | Details | Fold


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; without a title only the blocks."""

    title: str
    blocks: Sequence[Block]


def pictures(
    chart: Chart, *, title: str = "", caption: str = "", tall: bool = False, legend: bool = True
) -> list[Figure]:
    """A chart as figures of a page, one for each panel, so that they fit on a narrow screen.

    Args:
        chart: what to draw.
        title: of the figures; by default that of each panel.
        caption: what they show.
        tall: give them more height.
        legend: have one in each; otherwise a :class:`Legend` of the section stands for it.
    """
    figures = []
    for panel in chart.panels:
        plot = draw(replace(chart, panels=[panel], title=""))
        if not legend and plot.layout.showlegend:
            # A plot that is saved leaves the page, and takes its legend along.
            plot.update_layout(showlegend=False, margin_t=28, meta={"legend": True})
        figures.append(Figure(plot, title or panel.title, caption, tall, _height(panel)))
    return figures


def _height(panel: Panel) -> int | None:
    """Pixels of a panel whose rows have names."""
    return 96 + (46 if panel.above else 20) * len(panel.rows) if panel.rows else None


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
        body=_contents(sections) + body,
        footer=f"Written by tammes {_escape(tammes.__version__)}. This file needs no network.",
        library=_library() if plots else "",
        plots=_json(plots),
    )


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a page in one step; nothing is left behind where that fails."""
    # A name from a file can hold half of a character.
    write_atomically(path, text.encode(errors="replace"))


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


def _contents(sections: Sequence[Section]) -> str:
    titles = [section.title for section in sections if section.title]
    if len(titles) < _CONTENTS:
        return ""
    links = (f'<a href="#{_anchor(title)}">{_escape(title)}</a>' for title in titles)
    return f'<nav aria-label="Contents">{"".join(links)}</nav>\n'


def _anchor(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def _section(section: Section, plots: list[dict[str, Any]]) -> Iterator[str]:
    yield "<section>"
    if section.title:
        yield f'<h2 id="{_anchor(section.title)}">{_escape(section.title)}</h2>'
    yield from _blocks(section.blocks, plots)
    yield "</section>"


def _blocks(blocks: Sequence[Block], plots: list[dict[str, Any]]) -> Iterator[str]:
    """Blocks one after the other; plots that follow each other stand side by side."""
    for kind, alike in groupby(blocks, type):
        if kind is Figure:
            yield '<div class="plots">'
        for block in alike:
            yield _block(block, plots)
        if kind is Figure:
            yield "</div>"


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
        case Fold():
            inside = "\n".join(_blocks(block.blocks, plots))
            state = " open" if block.open else ""
            return f"<details{state}><summary>{_escape(block.summary)}</summary>{inside}</details>"
        case Legend():
            return f'<div class="legend">{"".join(map(_entry, block.names, count()))}</div>'
        case Gallery():
            return _gallery(block)
        case Figure():
            figure = json.loads(block.plot.to_json())
            plots.append({"data": figure["data"], "layout": figure["layout"], "name": block.title})
            caption = f"<p>{_escape(block.caption)}</p>" if block.caption else ""
            heading = f"<h3>{_escape(block.title)}</h3>" if block.title else ""
            kind = "plot tall" if block.tall else "plot"
            size = f"flex-basis:{block.height}px;min-height:{block.height}px"
            style = f' style="{size}"' if block.height else ""
            return (
                f"<figure><figcaption>{heading}{caption}</figcaption>"
                f'<div class="{kind}"{style} data-plot="{len(plots) - 1}" role="img" '
                f'aria-label="{_escape(block.title)}"></div></figure>'
            )
    raise TypeError(f"no block of a page: {type(block).__name__}")


def _entry(name: str, place: int) -> str:
    return (
        f'<button type="button" aria-pressed="true" data-group="{_escape(name)}">'
        f"{_swatch(place)}{_escape(name)}</button>"
    )


def _swatch(place: int) -> str:
    """A piece of the line a group is drawn with."""
    return f'<i class="{DASHES[turn(place)]}" style="border-color:{color(place)}"></i>'


def _gallery(gallery: Gallery) -> str:
    images = []
    for image in gallery.images:
        text = _escape(image.caption)
        kind = ' class="wrong"' if image.wrong else ""
        images.append(
            f'<figure{kind}><img src="{_escape(image.source)}" alt="{text}">'
            f"<figcaption>{text}</figcaption></figure>"
        )
    detail = f"<p>{_escape(gallery.detail)}</p>" if gallery.detail else ""
    return (
        f'<div class="gallery"><h3>{_escape(gallery.title)}</h3>{detail}'
        f"<div>{''.join(images)}</div></div>"
    )


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
        bool(cells) and all(_is_number(row[place]) for row in cells)
        for place in range(len(table.columns))
    ]
    heads = []
    for name, right in zip(table.columns, numeric, strict=True):
        text = _escape(name) if grouped else f'<button type="button">{_escape(name)}</button>'
        kinds = ["number"] * right + ["long"] * (len(name) > _SHORT)
        heads.append(f"<th{_classes(kinds)}>{text}</th>")
    rows = []
    for row in table.rows:
        if isinstance(row, str):
            rows.append(f'<tr class="group"><th colspan="{len(numeric)}">{_escape(row)}</th></tr>')
            continue
        parts = zip(table.columns, row, numeric, strict=True)
        rows.append(f"<tr>{''.join(_cell(name, cell, right) for name, cell, right in parts)}</tr>")
    caption = f"<caption>{_escape(table.caption)}</caption>" if table.caption else ""
    kinds = ["stack"] * (len(table.columns) > 3) + ["sorts"] * (not grouped and len(rows) > 1)
    return (
        f'<div class="scroll"><table{_classes(kinds)}>{caption}'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _classes(names: Sequence[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""


def _is_number(cell: Cell) -> bool:
    return not isinstance(cell, str) and not (isinstance(cell, Value) and cell.sort is None)


def _cell(column: str, cell: Cell, right: bool) -> str:
    given = cell if isinstance(cell, Value) else Value("" if cell is None else str(cell))
    if isinstance(cell, int | float):
        given = Value(f"{cell:.4g}" if isinstance(cell, float) else str(cell), cell)
    kind = ' class="number"' if right else ' class="short"' if len(given.text) <= _SHORT else ""
    sort = "" if given.sort is None else f' data-sort="{given.sort}"'
    text = _escape(given.text)
    if given.color is not None:
        text = f'<span class="entry">{_swatch(given.color)}{text}</span>'
    return f'<td{kind} data-column="{_escape(column)}"{sort}>{text}</td>'
