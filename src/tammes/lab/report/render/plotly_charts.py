"""Draw charts with Plotly, for pages."""

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tammes.lab.report.charts import chart as charts
from tammes.lab.report.charts.chart import MUTED, SYMBOLS, Chart, Panel, color, palette_wraps, short
from tammes.optional import require

_DASH = {"solid": "solid", "dashed": "dash", "dotted": "dot"}
_GAP = 0.08
"""Gap between two panels, as a share of the width."""
_ABOVE = 52
"""Longest name above its row, in characters, that fits on the screen of a phone."""

Domain = tuple[list[float], list[float]]
"""Extent of a panel in x and y, as shares of the figure."""


def draw(chart: Chart) -> Any:
    """Draw a chart as a ``plotly.graph_objects.Figure``.

    The page sets the colours of text, axes and background, as it may be light or dark.

    Example:
        >>> from tammes.lab.report.charts import paper_figures
        >>> figure = paper_figures.psi.interactive(margins=(1, 2, 3))
        >>> [trace.name for trace in figure.data]
        ['m = 1', 'm = 2', 'm = 3']
    """
    traces: list[dict[str, Any]] = []
    one = len(chart.panels) == 1
    top = 28 if one and not chart.title else 56
    layout: dict[str, Any] = {
        "margin": {"l": 56, "r": 16, "t": top, "b": 48 if one else 84},
        "legend": {"orientation": "h", "x": 0, "itemsizing": "constant", **_legend_place(chart)},
        "barmode": "overlay", "bargap": 0, "hovermode": "closest", "annotations": [], "shapes": [],
    }  # fmt: skip
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
        # From the top: buttons, legend, panel.
        layout["margin"]["t"] = 52
    # The default template is as large as the data, and the page has its own style.
    layout["template"] = graph.layout.Template()
    return graph.Figure(data=traces, layout=layout)


def _legend_place(chart: Chart) -> dict[str, Any]:
    """Place the legend above a single panel, but below several panels or a sphere."""
    if len(chart.panels) > 1 or chart.panels[0].has(charts.Ball):
        return {"y": 0, "yref": "container", "yanchor": "bottom"}
    return {"y": 1.02, "yanchor": "bottom"}


def _share(place: int, count: int) -> list[float]:
    width = (1 - _GAP * (count - 1)) / count
    return [place * (width + _GAP), place * (width + _GAP) + width]


def _text(text: str) -> str:
    """Escape a text, as Plotly interprets some HTML."""
    return html.escape(text, quote=False)


def _panel(
    panel: Panel, suffix: str, domain: Domain, layout: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the traces of a panel; add its axes and annotations to the layout."""
    if panel.has(charts.Ball):
        layout[f"scene{suffix}"] = _scene(domain)
    else:
        layout[f"xaxis{suffix}"], layout[f"yaxis{suffix}"] = _axes(panel, suffix, domain)
    if panel.title and (suffix or domain[0][1] < 1):
        paper = {"xref": "paper", "yref": "paper", "yanchor": "bottom"}
        middle = sum(domain[0]) / 2
        layout["annotations"].append(_note(panel.title, middle, domain[1][1], **paper))
    axes = {"xref": f"x{suffix}", "yref": f"y{suffix}"}
    if panel.above:
        place = {"xref": f"x{suffix} domain", "yref": axes["yref"], "xanchor": "left",
                 "yanchor": "bottom", "yshift": 9, "font": {"size": 11}}  # fmt: skip
        names = enumerate(short(panel.rows, _ABOVE))
        layout["annotations"] += [_note(name, 0, row, **place) for row, name in names]
    for layer in panel.layers:
        match layer:
            case charts.Arrow():
                layout["annotations"] += _arrow(layer, axes)
            case charts.Note():
                layout["annotations"].append(_note(layer.text, layer.x, layer.y, **axes))
            case charts.Rule():
                _rule(layer, axes, layout)
            case charts.Ball():
                yield from ({**trace, "scene": f"scene{suffix}"} for trace in _ball(layer))
            case _:
                trace = {**_trace(layer), "xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
                # Positions of named rows mean nothing to a reader.
                yield {**trace, "hovertemplate": "%{text}<extra></extra>"} if panel.rows else trace


def _axes(panel: Panel, suffix: str, domain: Domain) -> tuple[dict[str, Any], dict[str, Any]]:
    heat = panel.has(charts.HeatMap)
    x: dict[str, Any] = {
        "domain": domain[0], "anchor": f"y{suffix}", "title": {"text": _text(panel.x)},
        "range": panel.x_range, "dtick": panel.x_step, "visible": not panel.bare, "zeroline": False,
    }  # fmt: skip
    y: dict[str, Any] = {
        "domain": domain[1], "anchor": f"x{suffix}", "title": {"text": _text(panel.y)},
        "range": panel.y_range, "visible": not panel.bare and (bool(panel.y) or heat),
        "zeroline": False, "automargin": True,
    }  # fmt: skip
    for axis, is_log in ((x, panel.x_log), (y, panel.y_log)):
        if is_log:
            ends = None if axis["range"] is None else [math.log10(end) for end in axis["range"]]
            axis |= {"type": "log", "range": ends, "dtick": 1, "exponentformat": "power"}
            axis |= {"automargin": True}
    if panel.rows:
        last = len(panel.rows) - 1
        y |= {"visible": not panel.above, "showgrid": False, "fixedrange": True}
        y |= {"range": [last + 0.5, -0.9 if panel.above else -0.6]}
        names = list(map(_text, short(panel.rows, 20)))
        y |= {"tickvals": list(range(last + 1)), "ticktext": names}
    if panel.equal:
        y |= {"scaleanchor": f"x{suffix}", "constrain": "domain"}
        x |= {"constrain": "domain"}
    if heat:
        y |= {"autorange": "reversed", "type": "category"}
        x |= {"type": "category", "automargin": True}
    return x, y


def _trace(layer: charts.Layer) -> dict[str, Any]:
    match layer:
        case charts.Line():
            return {
                **_points(layer), "mode": "lines" if len(layer.x) > 1 else "markers",
                "legendgroup": layer.group or None,
                "showlegend": bool(layer.name) and not layer.thin,
                "opacity": 0.35 if layer.thin else 1,
                "line": {"color": color(layer.color), "dash": _DASH[layer.dash],
                         "width": 1 if layer.thin else 2},
            }  # fmt: skip
        case charts.Bars():
            pairs = list(zip(layer.edges[:-1], layer.edges[1:], strict=True))
            return {
                "type": "bar", "x": [(low + high) / 2 for low, high in pairs],
                "width": [high - low for low, high in pairs], "y": list(layer.heights),
                "name": _text(layer.name), "opacity": 0.6,
                "marker": {"color": color(layer.color), "line": {"width": 0}},
                "customdata": [[low, high] for low, high in pairs],
                "hovertemplate": "%{customdata[0]:.3~f} to %{customdata[1]:.3~f}: %{y:.2%}",
            }  # fmt: skip
        case charts.Points():
            symbol = SYMBOLS[palette_wraps(layer.color)] + ("-open" if layer.hollow else "")
            return {
                **_points(layer), "mode": "markers", "legendgroup": layer.group or None,
                "showlegend": bool(layer.name),
                "text": [_text(text) for text in layer.texts] or None, "error_x": _spans(layer),
                "marker": {"color": color(layer.color), "size": layer.size + 1, "symbol": symbol},
            }  # fmt: skip
        case charts.HorizontalBars():
            return {
                "type": "bar", "orientation": "h", "x": list(layer.values),
                "y": list(range(len(layer.values))), "width": 0.36,
                "text": [_text(text) for text in layer.texts] or None,
                "texttemplate": "%{x:.4~g}", "textposition": "auto", "textangle": 0,
                "insidetextanchor": "end", "showlegend": False, "opacity": 0.85,
                "marker": {"color": [color(place) for place in layer.colors]},
            }  # fmt: skip
        case charts.Region():
            fill = {"fill": "toself", "fillcolor": _faint(color(layer.color), 0.22)}
            return {**_points(layer), "mode": "none", "hoverinfo": "skip", **fill}
        case charts.HeatMap():
            names = list(map(_text, short(layer.names, 14)))
            return {
                "type": "heatmap", "x": names, "y": names, "hoverongaps": False,
                "z": [[None if v is None else round(v, 2) for v in row] for row in layer.values],
                "hovertemplate": f"%{{y}} – %{{x}}: %{{z:.2f}}{layer.unit}<extra></extra>",
                "colorscale": "Viridis", "zmin": layer.low,
                "zmax": None if layer.low is None else max(
                    (v for row in layer.values for v in row if v is not None), default=None
                ),
                "colorbar": {"title": {"text": layer.unit}, "thickness": 12},
            }  # fmt: skip
    raise TypeError(f"no trace for {type(layer).__name__}")


def _points(layer: charts.Line | charts.Points | charts.Region) -> dict[str, Any]:
    x, y = list(layer.x), list(layer.y)
    return {"type": "scatter", "x": x, "y": y, "name": _text(layer.name)}


def _spans(points: charts.Points) -> dict[str, Any] | None:
    if not points.low:
        return None
    above = [high - x for x, high in zip(points.x, points.high, strict=True)]
    below = [x - low for x, low in zip(points.x, points.low, strict=True)]
    span = {"type": "data", "symmetric": False, "thickness": 2, "width": 5}
    return {**span, "array": above, "arrayminus": below}


def _faint(hexadecimal: str, opacity: float) -> str:
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


# ---------------------------------------------------------------------------------------- marks


def _note(text: str, x: float, y: float, **more: Any) -> dict[str, Any]:
    return {"text": _text(text), "x": x, "y": y, "showarrow": False, **more}


def _arrow(arrow: charts.Arrow, axes: dict[str, str]) -> Iterator[dict[str, Any]]:
    (x0, y0), (x1, y1) = arrow.start, arrow.end
    yield {
        **axes, "x": x1, "y": y1, "ax": x0, "ay": y0, "axref": axes["xref"], "ayref": axes["yref"],
        "text": "", "showarrow": True, "arrowhead": 2, "arrowwidth": 2, "arrowside": "end",
        "arrowcolor": color(arrow.color),
    }  # fmt: skip
    if arrow.text:
        above = {**axes, "yanchor": "bottom", "yshift": 2}
        yield _note(arrow.text, (x0 + x1) / 2, (y0 + y1) / 2, **above)


def _rule(rule: charts.Rule, axes: dict[str, str], layout: dict[str, Any]) -> None:
    """Add a line across the panel, labelled at its end."""
    line: dict[str, Any] = {"type": "line", "line": {"color": MUTED, "dash": "dash", "width": 1}}
    if rule.axis == "x":
        across = {"xref": axes["xref"], "yref": f"{axes['yref']} domain"}
        line |= {**across, "x0": rule.at, "x1": rule.at, "y0": 0, "y1": 1}
        name = _note(rule.name, rule.at, 1, textangle=-90, xanchor="left", yanchor="top")
    else:
        across = {"xref": f"{axes['xref']} domain", "yref": axes["yref"]}
        line |= {**across, "x0": 0, "x1": 1, "y0": rule.at, "y1": rule.at}
        name = _note(rule.name, 1, rule.at, textangle=0, xanchor="right", yanchor="bottom")
    layout["shapes"].append(line)
    layout["annotations"].append({**name, **across, "font": {"size": 11}})


# --------------------------------------------------------------------------------- the sphere


def _scene(domain: Domain) -> dict[str, Any]:
    """Return the 3-D scene of a sphere with its camera."""
    axis = {"visible": False, "range": [-1.1, 1.1], "showspikes": False}
    return {
        "xaxis": axis, "yaxis": axis, "zaxis": axis, "aspectmode": "cube", "dragmode": "orbit",
        "domain": {"x": domain[0], "y": domain[1]},
        "camera": {"eye": {"x": 0.85, "y": 0.85, "z": 0.55}},
    }  # fmt: skip


def _ball(ball: charts.Ball) -> Iterator[dict[str, Any]]:
    """Yield the ball with its grid, the arrows of the prototypes and the points of each class."""
    yield _veil()
    grid = [point for circle in charts.circles() for point in (*circle, (None, None, None))]
    thin = {"line": {"color": MUTED, "width": 1.5}, "opacity": 0.5}
    quiet = {"showlegend": False, "hoverinfo": "skip"}
    yield {**_in_space(grid), "mode": "lines", "name": "", **quiet, **thin}
    names = list(map(_text, ball.names))

    def named(place: int, what: str) -> dict[str, Any]:
        name = names[place]
        return {"name": name, "legendgroup": name, "hoverinfo": "text", "text": f"{what} of {name}"}

    for place, prototype in enumerate(ball.prototypes):
        marker: dict[str, Any] = {"color": color(place), "size": [0, 7], "symbol": "diamond"}
        line = {"line": {"color": color(place), "width": 6}, "marker": marker}
        shown = {"mode": "lines+markers", "showlegend": len(names) <= charts.LEGEND, **line}
        yield {**_in_space([(0, 0, 0), prototype]), **named(place, "prototype"), **shown}
    for place in sorted(set(ball.labels)):
        own = [row for row, label in zip(ball.features, ball.labels, strict=True) if label == place]
        symbol = SYMBOLS[palette_wraps(place)]
        # The veil hides only opaque points.
        marker = {"color": color(place), "size": 3, "symbol": symbol}
        shown = {"mode": "markers", "showlegend": False, "marker": marker}
        yield {**_in_space(own), **named(place, "feature"), **shown}


def _veil() -> dict[str, Any]:
    """Return a translucent ball inside the sphere, behind which everything is pale.

    The page gives it the colour of its theme.
    """
    turn = [math.radians(10 * step) for step in range(37)]
    grid = [
        [(0.97 * math.cos(up) * math.cos(a), 0.97 * math.cos(up) * math.sin(a), 0.97 * math.sin(up))
         for a in turn]
        for up in (math.radians(10 * step) for step in range(-9, 10))
    ]  # fmt: skip
    axes = {name: [[round(point[place], 3) for point in row] for row in grid]
            for place, name in enumerate("xyz")}  # fmt: skip
    flat = {"ambient": 1, "diffuse": 0, "specular": 0, "fresnel": 0}
    return {
        "type": "surface", **axes, "opacity": 0.6, "lighting": flat, "showscale": False,
        "colorscale": [[0, MUTED], [1, MUTED]], "hoverinfo": "skip", "showlegend": False,
        "contours": {axis: {"highlight": False} for axis in "xyz"}, "name": "",
    }  # fmt: skip


def _in_space(points: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return a 3-D trace of points; None breaks a line."""
    rounded = ([None if v is None else round(v, 4) for v in axis]
               for axis in zip(*points, strict=True))  # fmt: skip
    return {"type": "scatter3d", **dict(zip("xyz", rounded, strict=True))}
