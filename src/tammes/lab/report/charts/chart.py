"""Contents of a figure, apart from what draws it.

A chart is panels, a panel is layers, a layer is numbers and a name. :mod:`.figures` draws a chart
with matplotlib for papers, :mod:`.interactive` with Plotly for pages; both read the same numbers.
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
"""Colours that stay apart for colour-blind eyes, on white and black: Okabe and Ito, four more."""
MUTED = "#8A8F98"
"""For what is only context."""

Numbers: TypeAlias = Sequence[float]
Dash = Literal["solid", "dashed", "dotted"]
DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted")
SYMBOLS = ("circle", "diamond", "square")
P = ParamSpec("P")


def numbers(values: Tensor | Numbers) -> list[float]:
    """Plain numbers of a tensor or a sequence."""
    return values.detach().double().tolist() if isinstance(values, Tensor) else list(values)


def color(place: int | None) -> str:
    """Colour by place in the palette, muted without one."""
    return MUTED if place is None else PALETTE[place % len(PALETTE)]


def palette_wraps(place: int | None) -> int:
    """Number of times the palette wrapped; places of one colour differ in it."""
    return 0 if place is None else place // len(PALETTE) % len(DASHES)


def short(names: Sequence[str], limit: int) -> list[str]:
    """Names that are no longer than a limit, and no two the same.

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
    """The same text with a capital letter first."""
    return text[:1].upper() + text[1:]


def circles() -> list[list[tuple[float, float, float]]]:
    """Circles of latitude and of longitude on the unit sphere, every 30 degrees."""
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
    """A curve through points; ``color`` is a place in the palette.

    Curves of one ``group`` are shown and hidden together; a ``thin`` one stays behind the others.
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
    """A histogram: one more edge than heights."""

    edges: Numbers
    heights: Numbers
    name: str = ""
    color: int | None = 0


@dataclass(frozen=True)
class Points:
    """Single points, with a text for each if wanted, and a span from ``low`` to ``high`` in x."""

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
    """Bars that lie, one for each row of the panel; None leaves a row empty."""

    values: Sequence[float | None]
    colors: Sequence[int | None]
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Arrow:
    """From a point to another, with a text at its middle."""

    start: tuple[float, float]
    end: tuple[float, float]
    text: str = ""
    color: int | None = None
    both: bool = False


@dataclass(frozen=True)
class Note:
    """A text at a point."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Rule:
    """A line across the panel at one value of an axis, named at its end."""

    at: float
    name: str = ""
    axis: Literal["x", "y"] = "x"


@dataclass(frozen=True)
class Region:
    """A filled polygon."""

    x: Numbers
    y: Numbers
    name: str = ""
    color: int | None = 0


@dataclass(frozen=True)
class HeatMap:
    """A square matrix as colours, its rows and columns named; None leaves a place empty."""

    values: Sequence[Sequence[float | None]]
    names: Sequence[str]
    unit: str = ""


@dataclass(frozen=True)
class Ball:
    """The unit sphere with prototypes as arrows and features as points.

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
    """Layers over common axes.

    ``x_step`` is the distance of the ticks, ``equal`` gives both axes the same unit of length, and
    ``bare`` hides them. With ``rows`` the second axis has names in place of numbers: y = 0 is the
    first, at the top. ``above`` puts long names above their rows, where they take no width.
    """

    layers: Sequence[Layer]
    title: str = ""
    x: str = ""
    y: str = ""
    x_range: tuple[float, float] | None = None
    x_step: float | None = None
    y_range: tuple[float, float] | None = None
    equal: bool = False
    bare: bool = False
    rows: Sequence[str] = ()
    above: bool = False

    def has(self, kind: type[Layer]) -> bool:
        """Whether some layer is of a kind."""
        return any(isinstance(layer, kind) for layer in self.layers)


@dataclass(frozen=True)
class Chart:
    """Panels side by side, or in rows of a given number of columns.

    With ``one_legend`` the panels share one; the names are those of the first.
    """

    panels: Sequence[Panel]
    title: str = ""
    columns: int = 4
    one_legend: bool = False


class Plot(Generic[P]):
    """A figure as a function: called, it draws with matplotlib and returns the ``Figure``.

    Made with the decorator :func:`plot` from a function that returns a :class:`Chart`.

    Attributes:
        chart: the function itself, for the numbers of the figure.
    """

    def __init__(self, build: Callable[P, Chart]) -> None:
        self.chart = build
        functools.update_wrapper(self, build)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The figure, a ``matplotlib.figure.Figure``."""
        from tammes.lab.report.render.matplotlib_charts import draw

        return draw(self.chart(*args, **kwargs))

    def interactive(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The figure for a page, a ``plotly.graph_objects.Figure``."""
        from tammes.lab.report.render.plotly_charts import draw

        return draw(self.chart(*args, **kwargs))


def plot(build: Callable[P, Chart]) -> Plot[P]:
    """Make a figure of a function that returns a chart."""
    return Plot(build)
