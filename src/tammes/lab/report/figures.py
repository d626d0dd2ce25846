"""Draw charts with matplotlib, for papers.

Figures are made without pyplot, so that no window opens, no global setting changes and no figure
stays behind.
"""

import io
import math
import os
from pathlib import Path
from typing import Any

from tammes.lab.atomic import write_atomically
from tammes.lab.report.charts import (
    MUTED,
    Arrow,
    Ball,
    Bars,
    Chart,
    Heat,
    Layer,
    Line,
    Note,
    Panel,
    Points,
    Region,
    Rule,
    circles,
    color,
)
from tammes.optional import require

_DASH = {"solid": "-", "dashed": "--", "dotted": ":"}
_SMALL = 8


def draw(chart: Chart) -> Any:
    """A chart as a ``matplotlib.figure.Figure``.

    Args:
        chart: what to draw.

    Returns:
        The figure; ``figure.savefig(path)`` or :func:`save` writes it.

    Example:
        >>> from tammes.lab.report import plots
        >>> figure = plots.psi(margins=(1, 2, 3))
        >>> len(figure.axes[0].lines)
        3
    """
    columns = min(chart.columns, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    wide = 3.7 if columns > 1 else 4.8
    figure = require("matplotlib.figure", extra="lab").Figure(
        figsize=(wide * columns, 3.1 * rows + 0.3 * bool(chart.title)), layout="constrained"
    )
    for place, panel in enumerate(chart.panels, 1):
        on_sphere = any(isinstance(layer, Ball) for layer in panel.layers)
        options = {"projection": "3d"} if on_sphere else {}
        axes = figure.add_subplot(rows, columns, place, **options)
        _draw_panel(figure, axes, panel)
        if not chart.one_legend and len(axes.get_legend_handles_labels()[1]) > 1:
            many = 2 if len(panel.layers) > 12 else 1
            axes.legend(fontsize=_SMALL, frameon=False, ncols=many)
    if chart.title:
        figure.suptitle(chart.title, fontsize=11)
    if chart.one_legend:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=len(names),
            fontsize=_SMALL,
            frameon=False,
        )
    return figure


def save(figure: Any, path: str | os.PathLike[str], *, dpi: int = 200) -> None:
    """Write a figure of matplotlib; the suffix of the path says in which format.

    Nothing is left behind where writing fails, and no date is written into the file.

    Args:
        figure: what :func:`draw` returned.
        path: ``.png``, ``.svg`` or ``.pdf``.
        dpi: pixels per inch of a PNG.
    """
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"a figure is written as .png, .svg or .pdf, got {str(path)!r}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=dpi, metadata=dates.get(kind))
    write_atomically(path, buffer.getvalue())


def _draw_panel(figure: Any, axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=10)
    for layer in panel.layers:
        _draw_layer(figure, axes, layer)
    axes.set_xlabel(panel.x, fontsize=9)
    axes.set_ylabel(panel.y, fontsize=9)
    axes.tick_params(labelsize=_SMALL)
    if panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    if panel.equal:
        axes.set_aspect("equal")
    if panel.bare:
        axes.set_axis_off()
    elif not any(isinstance(layer, Heat) for layer in panel.layers):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if not panel.y:
            axes.spines["left"].set_visible(False)
            axes.set_yticks([])
        if panel.x_step is None:
            axes.locator_params(axis="x", nbins=6)
        else:
            axes.xaxis.set_major_locator(
                require("matplotlib.ticker", extra="lab").MultipleLocator(panel.x_step)
            )


def _draw_layer(figure: Any, axes: Any, layer: Layer) -> None:
    # matplotlib leaves names that start with an underscore out of the legend.
    match layer:
        case Line():
            axes.plot(
                layer.x,
                layer.y,
                _DASH[layer.dash],
                color=color(layer.color),
                label=layer.name or "_",
                linewidth=1.6,
            )
        case Bars():
            axes.stairs(
                layer.heights,
                layer.edges,
                fill=True,
                alpha=0.55,
                color=color(layer.color),
                label=layer.name or "_",
            )
        case Points():
            axes.plot(
                layer.x,
                layer.y,
                "o",
                color=color(layer.color),
                label=layer.name or "_",
                markersize=layer.size,
                markerfacecolor="none" if layer.hollow else None,
                markeredgewidth=1.0 if layer.hollow else 0.0,
            )
        case Arrow():
            style = "<->" if layer.both else "-|>"
            axes.annotate(
                "",
                xy=layer.end,
                xytext=layer.start,
                arrowprops={
                    "arrowstyle": style,
                    "color": color(layer.color),
                    "shrinkA": 0,
                    "shrinkB": 0,
                    "linewidth": 1.6,
                },
            )
            if layer.text:
                middle = [(a + b) / 2 for a, b in zip(layer.start, layer.end, strict=True)]
                axes.annotate(
                    layer.text,
                    xy=middle,
                    xytext=(0, 4),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=9,
                )
        case Note():
            axes.text(layer.x, layer.y, layer.text, ha="center", va="center", fontsize=9)
        case Rule():
            _draw_rule(axes, layer)
        case Region():
            axes.fill(
                layer.x,
                layer.y,
                color=color(layer.color),
                alpha=0.18,
                linewidth=0,
                label=layer.name or "_",
            )
        case Heat():
            _draw_heat(figure, axes, layer)
        case Ball():
            _draw_ball(axes, layer)


def _draw_rule(axes: Any, rule: Rule) -> None:
    options = {"color": MUTED, "linewidth": 1.0, "linestyle": "--"}
    text = {"fontsize": _SMALL, "color": "#444444", "textcoords": "offset points"}
    if rule.axis == "x":
        axes.axvline(rule.at, **options)
        axes.annotate(
            rule.name,
            xy=(rule.at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, -2),
            rotation=90,
            va="top",
            **text,
        )
    else:
        axes.axhline(rule.at, **options)
        axes.annotate(
            rule.name,
            xy=(1, rule.at),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 2),
            ha="right",
            **text,
        )


def _draw_heat(figure: Any, axes: Any, heat: Heat) -> None:
    values = [[math.nan if value is None else value for value in row] for row in heat.values]
    image = axes.imshow(values, cmap="viridis", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, fraction=0.046)
    bar.ax.tick_params(labelsize=_SMALL)
    bar.ax.set_title(heat.unit, fontsize=9)
    step = max(1, math.ceil(len(heat.names) / 12))
    ticks = list(range(0, len(heat.names), step))
    names = [heat.names[place] for place in ticks]
    upright = max((len(name) for name in names), default=0) > 3
    axes.set_xticks(ticks, names, rotation=90 if upright else 0, parse_math=False)
    axes.set_yticks(ticks, names, parse_math=False)


def _draw_ball(axes: Any, ball: Ball) -> None:
    for circle in circles():
        axes.plot(*zip(*circle, strict=True), color=MUTED, linewidth=0.5, alpha=0.6)
    for place, prototype in enumerate(ball.prototypes):
        axes.quiver(0, 0, 0, *prototype, color=color(place), arrow_length_ratio=0.12, linewidth=1.8)
    for place in sorted(set(ball.labels)):
        own = [row for row, label in zip(ball.features, ball.labels, strict=True) if label == place]
        axes.plot(*zip(*own, strict=True), "o", color=color(place), markersize=3.5, alpha=0.8)
    axes.set(xlim=(-0.75, 0.75), ylim=(-0.75, 0.75), zlim=(-0.75, 0.75))
