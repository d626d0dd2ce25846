"""Contents of a figure, independent of the plotting library.

A chart has panels, a panel has layers, a layer has numbers and a name.
:mod:`tammes.lab.report.render.matplotlib_charts` draws a chart for papers,
:mod:`tammes.lab.report.render.plotly_charts` for pages; both use the same numbers.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeAlias

from torch import Tensor

PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00",
    "#56B4E9", "#8C6BB1", "#A6761D", "#DC267F", "#A3A500",
)  # fmt: skip
"""Colour-blind safe colours on white and black: those of Okabe and Ito, and four more."""
MUTED = "#8A8F98"
"""Colour of elements in the background, such as rules and grids."""
LEGEND = 12
"""Largest number of classes for which a legend is drawn."""

Numbers: TypeAlias = Sequence[float]
Dash = Literal["solid", "dashed", "dotted"]
DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted")
SYMBOLS = ("circle", "diamond", "square")
P = ParamSpec("P")


def numbers(values: Tensor | Numbers) -> list[float]:
    """Convert a tensor or a sequence to a list of numbers."""
    return values.detach().double().tolist() if isinstance(values, Tensor) else list(values)


def color(place: int | None) -> str:
    """Return the palette colour of an index, or the muted colour for None."""
    return MUTED if place is None else PALETTE[place % len(PALETTE)]


def palette_wraps(place: int | None) -> int:
    """Return how often the palette has wrapped at an index, to tell equal colours apart."""
    return 0 if place is None else place // len(PALETTE) % len(DASHES)


def short(names: Sequence[str], limit: int) -> list[str]:
    """Shorten names to a limit and make them distinct.

    Example:
        >>> short(["a", "a", "a long name"], 7)
        ['a (1)', 'a (2)', 'a l…ame']
    """
    cut = [
        name if len(name) <= limit else f"{name[: (limit - 1) // 2]}…{name[-(limit // 2) :]}"
        for name in names
    ]
    count = Counter(cut)
    seen: Counter[str] = Counter()
    for place, name in enumerate(cut):
        seen[name] += 1
        if count[name] > 1:
            cut[place] = f"{name} ({seen[name]})"
    return cut


def sentence(text: str) -> str:
    """Capitalize the first letter."""
    return text[:1].upper() + text[1:]


def circles() -> list[list[tuple[float, float, float]]]:
    """Return circles of latitude and longitude on the unit sphere, every 30 degrees."""
    turn = [math.radians(6 * step) for step in range(61)]
    cosine = {degrees: math.cos(math.radians(degrees)) for degrees in range(-90, 180, 30)}
    sine = {degrees: math.sin(math.radians(degrees)) for degrees in range(-90, 180, 30)}
    latitudes = [
        [(cosine[d] * math.cos(a), cosine[d] * math.sin(a), sine[d]) for a in turn]
        for d in range(-60, 61, 30)
    ]
    longitudes = [
        [(cosine[d] * math.cos(a), sine[d] * math.cos(a), math.sin(a)) for a in turn]
        for d in range(0, 180, 30)
    ]
    return latitudes + longitudes


@dataclass(frozen=True)
class Line:
    """Curve through points; ``color`` is an index into the palette.

    Curves of one ``group`` are shown and hidden together; ``thin`` curves are faint.
    """

    x: Numbers
    y: Numbers
    name: str = ""
    dash: Dash = "solid"
    color: int | None = 0
    group: str = ""
    thin: bool = False


@dataclass(frozen=True)
class Bars:
    """Histogram, with one more edge than heights."""

    edges: Numbers
    heights: Numbers
    name: str = ""
    color: int | None = 0


@dataclass(frozen=True)
class Points:
    """Single points with optional texts, and optional horizontal error bars ``low`` to ``high``."""

    x: Numbers
    y: Numbers
    name: str = ""
    color: int | None = 0
    size: float = 5.0
    hollow: bool = False
    texts: Sequence[str] = ()
    low: Numbers = ()
    high: Numbers = ()
    group: str = ""


@dataclass(frozen=True)
class HorizontalBars:
    """Horizontal bars, one per row of the panel; None leaves a row empty."""

    values: Sequence[float | None]
    colors: Sequence[int | None]
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Arrow:
    """Arrow between two points, with a text at its middle."""

    start: tuple[float, float]
    end: tuple[float, float]
    text: str = ""
    color: int | None = None


@dataclass(frozen=True)
class Note:
    """Text at a point."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Rule:
    """Line across the panel at one value of an axis, labelled at its end."""

    at: float
    name: str = ""
    axis: Literal["x", "y"] = "x"


@dataclass(frozen=True)
class Region:
    """Filled polygon."""

    x: Numbers
    y: Numbers
    name: str = ""
    color: int | None = 0


@dataclass(frozen=True)
class HeatMap:
    """Square matrix as colours, with names of its rows and columns; None leaves a cell empty.

    ``low`` is the value of the first colour; by default the smallest one.
    """

    values: Sequence[Sequence[float | None]]
    names: Sequence[str]
    unit: str = ""
    low: float | None = None


@dataclass(frozen=True)
class Ball:
    """Unit sphere with prototypes as arrows and features as points.

    ``labels`` are the classes of the features, ``names`` the names of the classes.
    """

    prototypes: Sequence[Numbers]
    features: Sequence[Numbers]
    labels: Sequence[int]
    names: Sequence[str]


Layer: TypeAlias = (
    Line | Bars | Points | HorizontalBars | Arrow | Note | Rule | Region | HeatMap | Ball
)


@dataclass(frozen=True)
class Panel:
    """Layers on common axes.

    ``x_step`` is the distance between ticks, ``x_log`` and ``y_log`` give an axis a logarithmic
    scale (ranges are still in data units), ``equal`` gives both axes the same scale, and ``bare``
    hides them. With ``rows`` the y axis has names instead of numbers, the first (y = 0) at the top;
    ``above`` puts long names above their rows, where they take no width.
    """

    layers: Sequence[Layer]
    title: str = ""
    x: str = ""
    y: str = ""
    x_range: tuple[float, float] | None = None
    x_step: float | None = None
    y_range: tuple[float, float] | None = None
    x_log: bool = False
    y_log: bool = False
    equal: bool = False
    bare: bool = False
    rows: Sequence[str] = ()
    above: bool = False

    def has(self, kind: type[Layer]) -> bool:
        """Return whether any layer is of a kind."""
        return any(isinstance(layer, kind) for layer in self.layers)


@dataclass(frozen=True)
class Chart:
    """Panels side by side, or in rows of a given number of columns.

    With ``one_legend`` all panels share the legend of the first.
    """

    panels: Sequence[Panel]
    title: str = ""
    columns: int = 4
    one_legend: bool = False


class Plot(Generic[P]):
    """Plotting function: calling it draws with matplotlib and returns the ``Figure``.

    The decorator :func:`plot` makes it from a function that returns a :class:`Chart`, which stays
    available as its attribute ``chart``.
    """

    def __init__(self, build: Callable[P, Chart]) -> None:
        self.chart = build
        functools.update_wrapper(self, build)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Draw the figure as a ``matplotlib.figure.Figure``."""
        from tammes.lab.report.render.matplotlib_charts import draw

        return draw(self.chart(*args, **kwargs))

    def interactive(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Draw the figure as a ``plotly.graph_objects.Figure``."""
        from tammes.lab.report.render.plotly_charts import draw

        return draw(self.chart(*args, **kwargs))


plot = Plot
"""Decorator that turns a function that returns a chart into a :class:`Plot`."""
