"""Draw charts with matplotlib, for papers.

Figures are made without pyplot: no window opens, no global setting changes, and no figure stays in
memory.
"""

import io
import itertools
import math
import os
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.report.charts import chart as charts
from tammes.lab.report.charts.chart import MUTED, Chart, Panel, color, palette_wraps, short
from tammes.optional import require

_DASH = {"solid": "-", "dashed": "--", "dotted": ":"}
_MARKS = ("o", "D", "s")
_SMALL = 8
_FAR = 0.25
"""Opacity on the far side of a sphere."""
_LETTERS = 10.5
"""Letters of a panel's title in an inch, at the most."""
_CROWDED = 8
"""Most legend entries in one of several panels."""
_INSIDE = 30
"""Longest legend entry, in characters, that is placed inside the panel."""


def draw(chart: Chart) -> Any:
    """Draw a chart as a ``matplotlib.figure.Figure``, which :func:`save` writes.

    Example:
        >>> from tammes.lab.report.charts import paper_figures
        >>> figure = paper_figures.psi(margins=(1, 2, 3))
        >>> len(figure.axes[0].lines)
        3
    """
    columns = min(chart.columns, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    wide = 3.7 if columns > 1 else 4.8
    high = max(map(_height, chart.panels))
    figure = require("matplotlib.figure", extra="lab").Figure(
        figsize=(wide * columns, high * rows + 0.3 * bool(chart.title)), layout="constrained"
    )
    panels = []
    for place, panel in enumerate(chart.panels, 1):
        options = {"projection": "3d"} if panel.has(charts.Ball) else {}
        axes = figure.add_subplot(rows, columns, place, **options)
        axes.set_title(textwrap.fill(_plain(panel.title), int(_LETTERS * wide)), fontsize=10)
        _draw_panel(figure, axes, panel)
        panels.append(axes)
    _draw_legends(figure, panels, columns, one=chart.one_legend)
    if chart.title:
        figure.suptitle(_plain(chart.title), fontsize=11)
    return figure


def _draw_legends(figure: Any, panels: Sequence[Any], columns: int, *, one: bool) -> None:
    """Draw a legend in every panel, or one below the figure if those would hide the curves."""
    legends = [axes.get_legend_handles_labels() for axes in panels]
    shared: dict[str, Any] = {}
    for handles, names in legends:
        for handle, name in zip(handles, names, strict=True):
            shared.setdefault(name, handle)
    most = max(len(names) for _, names in legends)
    look = {"fontsize": _SMALL, "frameon": False}
    if one or (len(panels) > 1 and most > _CROWDED):
        ncols = len(shared) if one else columns * 3 // 2
        if not one:
            _grow(figure, math.ceil(len(shared) / ncols))
        place = "outside lower center"
        figure.legend(shared.values(), shared.keys(), loc=place, ncols=ncols, **look)
    elif len(panels) == 1 and most > 1 and max(map(len, shared)) > _INSIDE:
        _grow(figure, most)
        figure.legend(loc="outside lower left", **look)
    else:
        for axes, (_, names) in zip(panels, legends, strict=True):
            if len(names) > 1:
                axes.legend(ncols=2 if len(names) > 12 else 1, **look)


def _grow(figure: Any, lines: int) -> None:
    """Make room for a legend of so many lines below the panels."""
    figure.set_figheight(figure.get_figheight() + 0.17 * lines)


def save(figure: Any, path: str | os.PathLike[str], *, dpi: int = 200) -> None:
    """Write a figure as a ``.png`` of ``dpi`` pixels per inch, a ``.svg`` or a ``.pdf``.

    Nothing is left behind if writing fails, and the file contains no date.
    """
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"a figure is expected to be .png, .svg or .pdf, got {str(path)!r}")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Names may be in any script; a character missing from the font is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=dates.get(kind))
    write_atomically(path, buffer.getvalue(), what="figure")


def _height(panel: Panel) -> float:
    """Return the height of a panel in inches."""
    return 0.9 + (0.42 if panel.above else 0.2) * len(panel.rows) if panel.rows else 3.1


def _plain(text: str) -> str:
    """Escape dollars, which start formulas, and drop control characters, which SVG forbids."""
    return "".join(letter for letter in text if letter.isprintable()).replace("$", r"\$")


def _label(name: str) -> str:
    # matplotlib omits names that start with an underscore from the legend.
    return f"\u200b{_plain(name)}" if name.startswith("_") else _plain(name) or "_"


def _draw_panel(figure: Any, axes: Any, panel: Panel) -> None:
    for layer in panel.layers:
        _draw_layer(figure, axes, layer)
    axes.set_xlabel(_plain(panel.x), fontsize=9)
    axes.set_ylabel(_plain(panel.y), fontsize=9)
    axes.tick_params(labelsize=_SMALL)
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("log")
    if panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    if panel.equal:
        axes.set_aspect("equal")
    if panel.bare:
        axes.set_axis_off()
    elif not panel.has(charts.HeatMap):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if panel.rows:
            _draw_rows(axes, panel)
        elif not panel.y:
            axes.spines["left"].set_visible(False)
            axes.set_yticks([])
        if panel.x_step is None and not panel.x_log:
            axes.locator_params(axis="x", nbins=6)
        elif panel.x_step is not None:
            axes.xaxis.set_major_locator(
                require("matplotlib.ticker", extra="lab").MultipleLocator(panel.x_step)
            )


def _draw_rows(axes: Any, panel: Panel) -> None:
    axes.set_ylim(len(panel.rows) - 0.5, -0.9 if panel.above else -0.6)
    if not panel.above:
        axes.set_yticks(range(len(panel.rows)), short(panel.rows, 20), parse_math=False)
        return
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    for place, name in enumerate(short(panel.rows, 60)):
        where = {"xy": (0, place), "xycoords": ("axes fraction", "data")}
        _write(axes, name, (0, 7), **where, fontsize=_SMALL)


def _write(axes: Any, text: str, shift: tuple[float, float], **more: Any) -> None:
    """Write a text next to a position, shifted by a few points."""
    axes.annotate(_plain(text), xytext=shift, textcoords="offset points", **more)


def _draw_layer(figure: Any, axes: Any, layer: charts.Layer) -> None:
    look: dict[str, Any]
    match layer:
        case charts.Line():
            thin = {"linewidth": 0.7, "alpha": 0.4, "label": "_"} if layer.thin else {}
            look = {"linewidth": 1.6, "label": _label(layer.name), **thin}
            dash = _DASH[layer.dash] if len(layer.x) > 1 else "."
            axes.plot(layer.x, layer.y, dash, color=color(layer.color), **look)
        case charts.Bars():
            look = {"fill": True, "alpha": 0.55, "color": color(layer.color)}
            axes.stairs(layer.heights, layer.edges, label=_label(layer.name), **look)
        case charts.Points():
            look = {"color": color(layer.color), "label": _label(layer.name),
                    "markersize": layer.size, "markeredgewidth": 1.0 if layer.hollow else 0.0,
                    "markerfacecolor": "none" if layer.hollow else None}  # fmt: skip
            axes.plot(layer.x, layer.y, _MARKS[palette_wraps(layer.color)], **look)
            if layer.low:
                axes.hlines(layer.y, layer.low, layer.high, color=color(layer.color), linewidth=1.6)
        case charts.HorizontalBars():
            known = [y for y, value in enumerate(layer.values) if value is not None]
            colors = [color(layer.colors[y]) for y in known]
            widths = [layer.values[y] for y in known]
            axes.barh(known, widths, height=0.36, color=colors, alpha=0.85)
        case charts.Arrow():
            look = {"arrowstyle": "-|>", "color": color(layer.color), "linewidth": 1.6}
            look |= {"shrinkA": 0, "shrinkB": 0}
            axes.annotate("", xy=layer.end, xytext=layer.start, arrowprops=look)
            if layer.text:
                middle = [(a + b) / 2 for a, b in zip(layer.start, layer.end, strict=True)]
                _write(axes, layer.text, (0, 4), xy=middle, ha="center", va="bottom", fontsize=9)
        case charts.Note():
            axes.text(layer.x, layer.y, _plain(layer.text), ha="center", va="center", fontsize=9)
        case charts.Rule():
            _draw_rule(axes, layer)
        case charts.Region():
            look = {"color": color(layer.color), "alpha": 0.18, "linewidth": 0}
            axes.fill(layer.x, layer.y, label=_label(layer.name), **look)
        case charts.HeatMap():
            _draw_heat(figure, axes, layer)
        case charts.Ball():
            _draw_ball(axes, layer)


def _draw_rule(axes: Any, rule: charts.Rule) -> None:
    line = {"color": MUTED, "linewidth": 1.0, "linestyle": "--"}
    text = {"fontsize": _SMALL, "color": "#444444"}
    if rule.axis == "x":
        axes.axvline(rule.at, **line)
        end = {"xy": (rule.at, 1), "xycoords": ("data", "axes fraction")}
        _write(axes, rule.name, (2, -2), **end, rotation=90, va="top", **text)
    else:
        axes.axhline(rule.at, **line)
        end = {"xy": (1, rule.at), "xycoords": ("axes fraction", "data")}
        _write(axes, rule.name, (-2, 2), **end, ha="right", **text)


def _draw_heat(figure: Any, axes: Any, heat: charts.HeatMap) -> None:
    values = [[math.nan if value is None else value for value in row] for row in heat.values]
    image = axes.imshow(values, cmap="viridis", interpolation="nearest", vmin=heat.low)
    bar = figure.colorbar(image, ax=axes, fraction=0.046)
    bar.ax.tick_params(labelsize=_SMALL)
    bar.ax.set_title(heat.unit, fontsize=9)
    step = max(1, math.ceil(len(heat.names) / 12))
    ticks = list(range(0, len(heat.names), step))
    names = [heat.names[place] for place in ticks]
    upright = max((len(name) for name in names), default=0) > 3
    axes.set_xticks(ticks, names, rotation=90 if upright else 0, parse_math=False)
    axes.set_yticks(ticks, names, parse_math=False)


def _draw_ball(axes: Any, ball: charts.Ball) -> None:
    """Draw a sphere, with everything on its far side pale."""
    up, around = math.radians(axes.elev), math.radians(axes.azim)
    eye = (math.cos(up) * math.cos(around), math.cos(up) * math.sin(around), math.sin(up))

    def is_front(point: charts.Numbers) -> bool:
        return sum(a * b for a, b in zip(point, eye, strict=True)) >= 0

    for circle in charts.circles():
        axes.plot(*zip(*circle, strict=True), color=MUTED, linewidth=0.5, alpha=0.6)
    for place, prototype in enumerate(ball.prototypes):
        look = {"color": color(place), "alpha": 1.0 if is_front(prototype) else _FAR}
        axes.quiver(0, 0, 0, *prototype, arrow_length_ratio=0.12, linewidth=1.8, **look)
    rows = list(zip(ball.features, ball.labels, strict=True))
    for place, front in itertools.product(sorted(set(ball.labels)), (False, True)):
        own = [row for row, label in rows if label == place and is_front(row) == front]
        if own:
            look = {"color": color(place), "alpha": 0.9 if front else _FAR}
            axes.plot(*zip(*own, strict=True), "o", markersize=3.5, **look)
    axes.set(xlim=(-0.75, 0.75), ylim=(-0.75, 0.75), zlim=(-0.75, 0.75))
