"""Draw charts with Plotly, for pages."""

import html
import math
from collections.abc import Iterator
from typing import Any

from tammes.lab.report.charts import (
    MUTED,
    SYMBOLS,
    Arrow,
    Ball,
    Bars,
    Chart,
    Heat,
    Layer,
    Lengths,
    Line,
    Note,
    Panel,
    Points,
    Region,
    Rule,
    color,
    short,
    turn,
)
from tammes.lab.report.globe import ball_traces, scene
from tammes.optional import require

_DASH = {"solid": "solid", "dashed": "dash", "dotted": "dot"}
_GAP = 0.08
"""Share of the width between two panels."""
_ABOVE = 52
"""Letters of a name above its row, which fit on the screen of a phone."""


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
    if one and chart.panels[0].above:
        layout["margin"]["l"] = 16
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
        layout[f"scene{suffix}"] = scene(domain)
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
    if panel.above:
        layout["annotations"] += _names_above(panel, suffix)
    for layer in panel.layers:
        match layer:
            case Arrow() | Note() | Rule():
                _mark(layer, suffix, layout)
            case Ball():
                for trace in ball_traces(layer):
                    yield {**trace, "scene": f"scene{suffix}"}
            case _:
                trace = {**_trace(layer), "xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
                # Where rows have names, their numbers mean nothing to a reader.
                yield {**trace, "hovertemplate": "%{text}<extra></extra>"} if panel.rows else trace


def _names_above(panel: Panel, suffix: str) -> Iterator[dict[str, Any]]:
    for place, name in enumerate(short(panel.rows, _ABOVE)):
        yield {
            "text": _text(name),
            "x": 0,
            "y": place,
            "xref": f"x{suffix} domain",
            "yref": f"y{suffix}",
            "xanchor": "left",
            "yanchor": "bottom",
            "yshift": 9,
            "showarrow": False,
            "font": {"size": 11},
        }


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
    if panel.rows:
        last = len(panel.rows) - 1
        y |= {"visible": not panel.above, "automargin": True, "showgrid": False}
        y |= {"range": [last + 0.5, -0.9 if panel.above else -0.6]}
        y |= {
            "tickvals": list(range(last + 1)),
            "ticktext": list(map(_text, short(panel.rows, 20))),
        }
        y |= {"fixedrange": True}
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
                "mode": "lines" if len(layer.x) > 1 else "markers",
                "x": list(layer.x),
                "y": list(layer.y),
                "name": _text(layer.name),
                "legendgroup": layer.group or None,
                "showlegend": bool(layer.name) and not layer.thin,
                "opacity": 0.35 if layer.thin else 1,
                "line": {
                    "color": color(layer.color),
                    "dash": _DASH[layer.dash],
                    "width": 1 if layer.thin else 2,
                },
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
                "legendgroup": layer.group or None,
                "text": [_text(text) for text in layer.texts] or None,
                "error_x": _spans(layer),
                "marker": {
                    "color": color(layer.color),
                    "size": layer.size + 1,
                    "symbol": SYMBOLS[turn(layer.color)] + ("-open" if layer.hollow else ""),
                },
            }
        case Lengths():
            return {
                "type": "bar",
                "orientation": "h",
                "x": list(layer.values),
                "y": list(range(len(layer.values))),
                "width": 0.36,
                "text": [_text(text) for text in layer.texts] or None,
                "texttemplate": "%{x:.4~g}",
                "textposition": "auto",
                "textangle": 0,
                "insidetextanchor": "end",
                "showlegend": False,
                "marker": {"color": [color(place) for place in layer.colors]},
                "opacity": 0.85,
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
            names = list(map(_text, short(layer.names, 14)))
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


def _spans(points: Points) -> dict[str, Any] | None:
    if not points.low:
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - x for x, high in zip(points.x, points.high, strict=True)],
        "arrayminus": [x - low for x, low in zip(points.x, points.low, strict=True)],
        "thickness": 2,
        "width": 5,
    }


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
