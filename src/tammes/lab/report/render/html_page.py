"""Self-contained HTML page that opens from disk, offline, on any screen.

A page has sections, a section has blocks: text, headline numbers, tables, plots, images, details.
The templates escape all text, so a class named ``<script>`` is harmless.
"""

import base64
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, get_args

import tammes
from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.report.charts.chart import DASHES, Chart, Panel, color, palette_wraps
from tammes.lab.report.glossary import definition
from tammes.lab.report.render.plotly_charts import draw
from tammes.optional import require

_CONTENTS = 5
"""Smallest number of titled sections for a page to have a table of contents."""


@dataclass(frozen=True)
class Value:
    """Text in a table, with an optional sort key and an optional group colour beside it."""

    text: str
    sort: float | None = None
    color: int | None = None


class _Head(NamedTuple):
    """Column of a table; numbers are aligned to the right, and a definition is a tooltip."""

    name: str
    is_number: bool
    definition: str


Cell: TypeAlias = str | int | float | Value | None


@dataclass(frozen=True)
class Text:
    """Paragraph."""

    text: str


@dataclass(frozen=True)
class Card:
    """Headline number; its ``share`` of the optimum is shown as a bar."""

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
    """Table of texts and numbers; a row that is a single text is a heading within the table.

    On a narrow screen the rows of a wide table become blocks. A table without headings can be
    sorted by clicking a column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell] | str]
    caption: str = ""

    @property
    def grouped(self) -> bool:
        """Whether it has headings between its rows."""
        return any(isinstance(row, str) for row in self.rows)

    @cached_property
    def heads(self) -> list[_Head]:
        """Its columns; a column is numeric if every cell is a number or empty."""
        cells = [row for row in self.rows if not isinstance(row, str)]
        columns = zip(*cells, strict=True) if cells else ([""] for _ in self.columns)
        numbers = (all(map(_is_number, column)) for column in columns)
        return list(map(_Head, self.columns, numbers, map(definition, self.columns)))

    def cells(self, row: Sequence[Cell]) -> Iterator[tuple[_Head, Value]]:
        """Yield the cells of a row with their columns."""
        return zip(self.heads, map(_value, row), strict=True)


def _is_number(cell: Cell) -> bool:
    """Whether a cell is a number, or empty."""
    match cell:
        case Value():
            return cell.sort is not None
        case str():
            return not cell
    return True


def _value(cell: Cell) -> Value:
    match cell:
        case Value():
            return cell
        case float():
            return Value(f"{cell:.4g}", cell)
        case int():
            return Value(str(cell), cell)
    return Value(cell or "")


@dataclass(frozen=True)
class Figure:
    """Plotly figure with a title and a caption."""

    plot: Any
    title: str
    caption: str = ""
    tall: bool = False
    height: int | None = None


@dataclass(frozen=True)
class Legend:
    """Legend shared by the plots of a section; a click hides or shows a group in all of them."""

    names: Sequence[str]


@dataclass(frozen=True)
class Image:
    """Small image as a data URL, with a caption."""

    source: str
    caption: str
    wrong: bool = False


@dataclass(frozen=True)
class ImageGallery:
    """Images in a row under a heading."""

    title: str
    images: Sequence[Image]
    detail: str = ""


@dataclass(frozen=True)
class Details:
    """Folded preformatted text, such as a command or a configuration."""

    summary: str
    text: str


@dataclass(frozen=True)
class Fold:
    """Folded blocks; plots among them are resized when it is opened."""

    summary: str
    blocks: Sequence["Block"] = field(default_factory=tuple)
    open: bool = False


Block: TypeAlias = Text | Cards | Table | Figure | Legend | ImageGallery | Details | Fold


@dataclass(frozen=True)
class Section:
    """Blocks under an optional heading."""

    title: str
    blocks: Sequence[Block]


def sections(blocks: Mapping[str, Sequence[Block]]) -> list[Section]:
    """Return sections by their titles; those without blocks are left out."""
    return [Section(title, inside) for title, inside in blocks.items() if inside]


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell] | str], caption: str = ""
) -> list[Block]:
    """Return a table as a block of a page, and nothing without rows."""
    listed = list(rows)
    return [Table(columns, listed, caption)] if listed else []


def pictures(
    chart: Chart, *, title: str = "", caption: str = "", tall: bool = False, legend: bool = True
) -> list[Figure]:
    """Convert a chart to figures, one per panel so that they fit on a narrow screen.

    By default the panels' own titles are used. With ``legend`` false, the section has a shared
    :class:`Legend`.
    """
    figures = []
    for panel in chart.panels:
        plot = draw(replace(chart, panels=[panel], title=""))
        if not legend and plot.layout.showlegend:
            # A plot that is saved as an image needs its own legend.
            plot.update_layout(showlegend=False, margin_t=28, meta={"legend": True})
        figures.append(Figure(plot, title or panel.title, caption, tall, _height(panel)))
    return figures


def _height(panel: Panel) -> int | None:
    """Return the height in pixels of a panel with named rows."""
    return 96 + (46 if panel.above else 20) * len(panel.rows) if panel.rows else None


def render(
    title: str,
    sections: Sequence[Section],
    *,
    verdict: Sequence[str] = (),
    lead: Sequence[str] = (),
) -> str:
    """Render a page as self-contained HTML.

    Under the title come the verdict, sentences that sum up the page, and the paragraphs of the
    lead.

    Example:
        >>> from tammes.lab.report.render.html_page import Section, Text, render
        >>> text = render("a <b> title", [Section("one", [Text("1 < 2")])])
        >>> "a &lt;b&gt; title" in text, "1 &lt; 2" in text
        (True, True)
    """
    blocks = [*_unfolded(block for section in sections for block in section.blocks)]
    figures = [block for block in blocks if isinstance(block, Figure)]
    sections = [*sections, *_glossary(block for block in blocks if isinstance(block, Table))]
    numbers = {id(figure): number for number, figure in enumerate(figures)}
    titles = [section.title for section in sections if section.title]
    return str(
        _template().render(
            title=title,
            version=tammes.__version__,
            verdict=verdict,
            lead=lead,
            sections=sections,
            contents=titles if len(titles) >= _CONTENTS else (),
            number_of=lambda figure: numbers[id(figure)],
            library=_library() if figures else None,
            plots=_packed(_json_of(figures)) if figures else "",
        )
    )


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a page atomically; nothing is left behind if that fails."""
    # A file name may contain a lone surrogate.
    write_atomically(path, text.encode(errors="replace"), what="page")


@cache
def _template() -> Any:
    jinja2 = require("jinja2", extra="lab")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"anchor": _anchor, "by_kind": _by_kind}
    environment.globals |= {"color": color, "dash": lambda place: DASHES[palette_wraps(place)]}
    return environment.get_template("page.html")


def _by_kind(blocks: Sequence[Block]) -> Iterator[tuple[str, Iterator[Block]]]:
    """Group consecutive blocks of one class, with the name of the class."""
    for kind, alike in groupby(blocks, type):
        if kind not in get_args(Block):
            raise TypeError(f"not a block of a page: {kind.__name__}")
        yield kind.__name__, alike


def _unfolded(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield blocks, including those inside folds."""
    for block in blocks:
        if isinstance(block, Fold):
            yield from _unfolded(block.blocks)
        else:
            yield block


def _glossary(tables: Iterable[Table]) -> list[Section]:
    """Return a section that defines the columns of tables."""
    heads = {head.name: head.definition for each in tables for head in each.heads}
    rows = [(name, text) for name, text in sorted(heads.items()) if text]
    folded = [Fold("Columns and what they mean", table(("term", "meaning"), rows))]
    return [Section("Glossary", folded)] if rows else []


def _json_of(figures: Sequence[Figure]) -> str:
    plain = ((json.loads(figure.plot.to_json()), figure.title) for figure in figures)
    plots = [{"data": p["data"], "layout": p["layout"], "name": title} for p, title in plain]
    return json.dumps(plots, separators=(",", ":"), allow_nan=False)


class _Library(NamedTuple):
    """Plotly as embedded in a page, and the notice that its license requires."""

    notice: str
    code: str


@cache
def _library() -> _Library:
    code: str = require("plotly.offline", extra="lab").get_plotlyjs()
    notice, end, _ = code.partition("*/")
    # An HTML comment ends at the first two dashes.
    assert end
    assert "--" not in notice
    return _Library(notice, _packed(code))


def _packed(text: str) -> str:
    """Compress a text and encode it for a script element; ``unpack`` of page.js reads it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _anchor(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())
