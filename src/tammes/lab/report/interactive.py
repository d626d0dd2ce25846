"""Draw charts with Plotly, for pages."""

import html
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

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

_DASH = {"solid": "solid", "dashed": "dash", "dotted": "dot"}
_LEGEND = 12
"""Classes on a sphere up to which all are named beside it."""
_GAP = 0.08
"""Share of the width between two panels."""


def draw(chart: Chart) -> Any:
    """A chart as a ``plotly.graph_objects.Figure``.

    Colours of text, axes and background are left to the page, which knows whether it is dark.

    Args:
        chart: what to draw.

    Returns:
        The figure.

    Example:
        >>> from tammes.lab.report import plots
        >>> figure = plots.psi.interactive(margins=(1, 2, 3))
        >>> [trace.name for trace in figure.data]
        ['m = 1', 'm = 2', 'm = 3']
    """
    traces: list[dict[str, Any]] = []
    one = len(chart.panels) == 1
    layout: dict[str, Any] = {
        "margin": {
            "l": 56,
            "r": 16,
            "t": 28 if one and not chart.title else 56,
            "b": 48 if one else 84,
        },
        "legend": {"orientation": "h", "x": 0, **_legend_place(chart)},
        "barmode": "overlay",
        "bargap": 0,
        "hovermode": "closest",
        "annotations": [],
        "shapes": [],
    }
    if chart.title:
        layout["title"] = {"text": _text(chart.title), "font": {"size": 15}, "x": 0.02}
    columns = min(chart.columns, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    for place, panel in enumerate(chart.panels):
        row, column = divmod(place, columns)
        domain = (_share(column, columns), _share(rows - 1 - row, rows))
        for trace in _panel(panel, "" if not place else str(place + 1), domain, layout):
            traces.append({**trace, "showlegend": False} if place and chart.one_legend else trace)
    graph = require("plotly.graph_objects", extra="lab")
    named = [trace for trace in traces if trace.get("showlegend", True) and trace.get("name")]
    layout["showlegend"] = len(named) > 1
    if layout["showlegend"] and "yref" not in layout["legend"]:
        # The buttons are above the legend, and the legend above the panel.
        layout["margin"]["t"] = 52
    # An empty template: the default one is as large as the data, and the page has its own.
    layout["template"] = graph.layout.Template()
    return graph.Figure(data=traces, layout=layout)


def _legend_place(chart: Chart) -> dict[str, Any]:
    """Above a single panel, below several and below a sphere: where nothing else is."""
    spheres = any(isinstance(layer, Ball) for panel in chart.panels for layer in panel.layers)
    if spheres or len(chart.panels) > 1:
        return {"y": 0, "yref": "container", "yanchor": "bottom"}
    return {"y": 1.02, "yanchor": "bottom"}


def _share(place: int, count: int) -> list[float]:
    width = (1 - _GAP * (count - 1)) / count
    return [place * (width + _GAP), place * (width + _GAP) + width]


def _text(text: str) -> str:
    """Names come from files; Plotly reads a little HTML in its texts."""
    return html.escape(text, quote=False)


def _panel(
    panel: Panel, suffix: str, domain: tuple[list[float], list[float]], layout: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    if any(isinstance(layer, Ball) for layer in panel.layers):
        layout[f"scene{suffix}"] = _scene(domain)
    else:
        layout[f"xaxis{suffix}"], layout[f"yaxis{suffix}"] = _axes(panel, suffix, domain)
    if panel.title and (suffix or domain[0][1] < 1):
        layout["annotations"].append(
            {
                "text": _text(panel.title),
                "x": sum(domain[0]) / 2,
                "y": domain[1][1],
                "xref": "paper",
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
    for layer in panel.layers:
        match layer:
            case Arrow() | Note() | Rule():
                _mark(layer, suffix, layout)
            case Ball():
                for trace in _ball(layer):
                    yield {**trace, "scene": f"scene{suffix}"}
            case _:
                yield {**_trace(layer), "xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


def _axes(
    panel: Panel, suffix: str, domain: tuple[list[float], list[float]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    heat = any(isinstance(layer, Heat) for layer in panel.layers)
    x: dict[str, Any] = {
        "domain": domain[0],
        "anchor": f"y{suffix}",
        "title": {"text": _text(panel.x)},
        "range": panel.x_range,
        "dtick": panel.x_step,
        "visible": not panel.bare,
        "zeroline": False,
    }
    y: dict[str, Any] = {
        "domain": domain[1],
        "anchor": f"x{suffix}",
        "title": {"text": _text(panel.y)},
        "range": panel.y_range,
        "visible": not panel.bare and (bool(panel.y) or heat),
        "zeroline": False,
    }
    if panel.equal:
        y |= {"scaleanchor": f"x{suffix}", "constrain": "domain"}
        x |= {"constrain": "domain"}
    if heat:
        y |= {"autorange": "reversed", "type": "category", "automargin": True}
        x |= {"type": "category", "automargin": True}
    return x, y


def _trace(layer: Layer) -> dict[str, Any]:
    match layer:
        case Line():
            return {
                "type": "scatter",
                "mode": "lines",
                "x": list(layer.x),
                "y": list(layer.y),
                "name": _text(layer.name),
                "showlegend": bool(layer.name),
                "line": {"color": color(layer.color), "dash": _DASH[layer.dash], "width": 2},
            }
        case Bars():
            pairs = list(zip(layer.edges[:-1], layer.edges[1:], strict=True))
            return {
                "type": "bar",
                "x": [(low + high) / 2 for low, high in pairs],
                "width": [high - low for low, high in pairs],
                "y": list(layer.heights),
                "name": _text(layer.name),
                "opacity": 0.6,
                "marker": {"color": color(layer.color), "line": {"width": 0}},
                "customdata": [[low, high] for low, high in pairs],
                "hovertemplate": "%{customdata[0]:.3~f} to %{customdata[1]:.3~f}: %{y:.2%}",
            }
        case Points():
            return {
                "type": "scatter",
                "mode": "markers",
                "x": list(layer.x),
                "y": list(layer.y),
                "name": _text(layer.name),
                "text": [_text(text) for text in layer.texts] or None,
                "marker": {
                    "color": color(layer.color),
                    "size": layer.size + 1,
                    "symbol": "circle-open" if layer.hollow else "circle",
                },
            }
        case Region():
            return {
                "type": "scatter",
                "mode": "none",
                "fill": "toself",
                "hoverinfo": "skip",
                "x": list(layer.x),
                "y": list(layer.y),
                "name": _text(layer.name),
                "fillcolor": _faint(color(layer.color), 0.22),
            }
        case Heat():
            names = _unique(layer.names)
            return {
                "type": "heatmap",
                "z": [[None if v is None else round(v, 2) for v in row] for row in layer.values],
                "hoverongaps": False,
                "x": names,
                "y": names,
                "hovertemplate": f"%{{y}} – %{{x}}: %{{z:.2f}}{layer.unit}<extra></extra>",
                "colorscale": "Viridis",
                "colorbar": {"title": {"text": layer.unit}, "thickness": 12},
            }
    raise TypeError(f"no trace for {type(layer).__name__}")


def _unique(names: Sequence[str]) -> list[str]:
    """Names as categories of an axis: short, and no two the same."""
    short = [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
    twice = {name for name, count in Counter(short).items() if count > 1}
    return [
        _text(f"{name} ({place})" if name in twice else name) for place, name in enumerate(short)
    ]


def _faint(hexadecimal: str, opacity: float) -> str:
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _mark(layer: Arrow | Note | Rule, suffix: str, layout: dict[str, Any]) -> None:
    axes = {"xref": f"x{suffix}", "yref": f"y{suffix}"}
    match layer:
        case Arrow():
            (x0, y0), (x1, y1) = layer.start, layer.end
            layout["annotations"].append(
                {
                    **axes,
                    "x": x1,
                    "y": y1,
                    "ax": x0,
                    "ay": y0,
                    "axref": axes["xref"],
                    "ayref": axes["yref"],
                    "text": "",
                    "showarrow": True,
                    "arrowhead": 2,
                    "arrowwidth": 2,
                    "arrowside": "end+start" if layer.both else "end",
                    "arrowcolor": color(layer.color),
                }
            )
            if layer.text:
                text = Note((x0 + x1) / 2, (y0 + y1) / 2, layer.text)
                _mark(text, suffix, layout)
                layout["annotations"][-1] |= {"yanchor": "bottom", "yshift": 2}
        case Note():
            layout["annotations"].append(
                {**axes, "x": layer.x, "y": layer.y, "text": _text(layer.text), "showarrow": False}
            )
        case Rule():
            across = {"xref": axes["xref"], "yref": f"{axes['yref']} domain"}
            upright = layer.axis == "x"
            if not upright:
                across = {"xref": f"{axes['xref']} domain", "yref": axes["yref"]}
            ends = (
                {"x0": layer.at, "x1": layer.at, "y0": 0, "y1": 1}
                if upright
                else {"x0": 0, "x1": 1, "y0": layer.at, "y1": layer.at}
            )
            line = {"color": MUTED, "dash": "dash", "width": 1}
            layout["shapes"].append({"type": "line", **across, **ends, "line": line})
            layout["annotations"].append(
                {
                    **across,
                    "x": layer.at if upright else 1,
                    "y": 1 if upright else layer.at,
                    "text": _text(layer.name),
                    "showarrow": False,
                    "textangle": -90 if upright else 0,
                    "xanchor": "left" if upright else "right",
                    "yanchor": "top" if upright else "bottom",
                    "font": {"size": 11},
                }
            )


def _scene(domain: tuple[list[float], list[float]]) -> dict[str, Any]:
    axis = {"visible": False, "range": [-1.1, 1.1], "showspikes": False}
    return {
        "xaxis": axis,
        "yaxis": axis,
        "zaxis": axis,
        "aspectmode": "cube",
        "dragmode": "orbit",
        "domain": {"x": domain[0], "y": domain[1]},
        "camera": {"eye": {"x": 0.85, "y": 0.85, "z": 0.55}},
    }


def _ball(ball: Ball) -> Iterator[dict[str, Any]]:
    yield _globe()
    names = [_text(name) for name in ball.names]
    for place, prototype in enumerate(ball.prototypes):
        x, y, z = prototype
        yield {
            "type": "scatter3d",
            "mode": "lines+markers",
            "x": [0, x],
            "y": [0, y],
            "z": [0, z],
            "name": names[place],
            "legendgroup": names[place],
            "showlegend": len(names) <= _LEGEND,
            "line": {"color": color(place), "width": 6},
            "marker": {"color": color(place), "size": [0, 7], "symbol": "diamond"},
            "hovertemplate": f"prototype of {names[place]}<extra></extra>",
        }
    for place in sorted(set(ball.labels)):
        own = [row for row, label in zip(ball.features, ball.labels, strict=True) if label == place]
        xs, ys, zs = zip(*own, strict=True)
        yield {
            "type": "scatter3d",
            "mode": "markers",
            "x": [round(value, 4) for value in xs],
            "y": [round(value, 4) for value in ys],
            "z": [round(value, 4) for value in zs],
            "name": names[place],
            "legendgroup": names[place],
            "showlegend": False,
            "marker": {"color": color(place), "size": 3, "opacity": 0.85},
            "hovertemplate": f"feature of {names[place]}<extra></extra>",
        }


def _globe() -> dict[str, Any]:
    """Circles of latitude and longitude, as one broken line."""
    points: list[tuple[float | None, float | None, float | None]] = []
    for circle in circles():
        points += [(round(x, 4), round(y, 4), round(z, 4)) for x, y, z in circle]
        points.append((None, None, None))
    xs, ys, zs = zip(*points, strict=True)
    return {
        "type": "scatter3d",
        "mode": "lines",
        "x": list(xs),
        "y": list(ys),
        "z": list(zs),
        "name": "",
        "showlegend": False,
        "hoverinfo": "skip",
        "line": {"color": MUTED, "width": 1.5},
        "opacity": 0.5,
    }
