"""One self-contained HTML page: it opens from disk, without a network, on any screen.

A page is sections, a section is blocks: text, headline numbers, tables, plots, images, details.
The templates escape whatever a block shows, so a class called ``<script>`` stays a name.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, get_args

import tammes
from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.report.charts.chart import DASHES, Chart, Panel, color, palette_wraps
from tammes.lab.report.render.plotly_charts import draw
from tammes.optional import require

_CONTENTS = 5
"""Sections with a title from which on a page has a list of them."""


@dataclass(frozen=True)
class Value:
    """A text in a table with a number it is sorted by, or the colour of a group beside it."""

    text: str
    sort: float | None = None
    color: int | None = None


class _Head(NamedTuple):
    """A column of a table; one of numbers is aligned to the right."""

    name: str
    is_number: bool


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

    @property
    def grouped(self) -> bool:
        """Whether it has headings within."""
        return any(isinstance(row, str) for row in self.rows)

    @cached_property
    def heads(self) -> list[_Head]:
        """Its columns; one is of numbers where every cell has a number, or nothing."""
        cells = [row for row in self.rows if not isinstance(row, str)]
        columns = zip(*cells, strict=True) if cells else ([""] for _ in self.columns)
        numbers = (all(map(_is_number, column)) for column in columns)
        return list(map(_Head, self.columns, numbers))

    def cells(self, row: Sequence[Cell]) -> Iterator[tuple[_Head, Value]]:
        """The cells of a row, each under its head."""
        return zip(self.heads, map(_value, row), strict=True)


def _is_number(cell: Cell) -> bool:
    return not isinstance(cell, str) and not (isinstance(cell, Value) and cell.sort is None)


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
        >>> from tammes.lab.report.render.html_page import Section, Text, render
        >>> text = render("a <b> title", [Section("one", [Text("1 < 2")])])
        >>> "a &lt;b&gt; title" in text, "1 &lt; 2" in text
        (True, True)
    """
    figures = [*_figures(block for section in sections for block in section.blocks)]
    numbers = {id(figure): number for number, figure in enumerate(figures)}
    titles = [section.title for section in sections if section.title]
    return str(
        _template().render(
            title=title,
            version=tammes.__version__,
            lead=lead,
            sections=sections,
            contents=titles if len(titles) >= _CONTENTS else (),
            number_of=lambda figure: numbers[id(figure)],
            library=_library() if figures else "",
            plots=[_plot(figure) for figure in figures],
        )
    )


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a page in one step; nothing is left behind where that fails."""
    # A name from a file can hold half of a character.
    write_atomically(path, text.encode(errors="replace"))


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
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html")


def _by_kind(blocks: Sequence[Block]) -> Iterator[tuple[str, Iterator[Block]]]:
    """Blocks that follow each other and are of one class, with the name of the class."""
    for kind, alike in groupby(blocks, type):
        if kind not in get_args(Block):
            raise TypeError(f"no block of a page: {kind.__name__}")
        yield kind.__name__, alike


def _figures(blocks: Iterable[Block]) -> Iterator[Figure]:
    for block in blocks:
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Fold):
            yield from _figures(block.blocks)


def _plot(figure: Figure) -> dict[str, Any]:
    plot = json.loads(figure.plot.to_json())
    return {"data": plot["data"], "layout": plot["layout"], "name": figure.title}


def _library() -> str:
    code: str = require("plotly.offline", extra="lab").get_plotlyjs()
    # Nothing in it may end the element it stands in.
    assert "</script" not in code.lower()
    return code


def _anchor(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())
