"""The sphere of a chart for Plotly."""

import html
from collections.abc import Iterator
from typing import Any

from tammes.lab.report.charts import MUTED, SYMBOLS, Ball, circles, color, turn

_LEGEND = 12
"""Classes on a sphere up to which all are named beside it."""


def scene(domain: tuple[list[float], list[float]]) -> dict[str, Any]:
    """The space a sphere is in, and where it is looked at from."""
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


def ball_traces(ball: Ball) -> Iterator[dict[str, Any]]:
    """The globe, an arrow for each prototype, the points of each class."""
    yield _globe()
    names = [html.escape(name, quote=False) for name in ball.names]
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
            "hoverinfo": "text",
            "text": f"prototype of {names[place]}",
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
            "marker": {
                "color": color(place),
                "size": 3,
                "symbol": SYMBOLS[turn(place)],
                "opacity": 0.85,
            },
            "hoverinfo": "text",
            "text": f"feature of {names[place]}",
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
