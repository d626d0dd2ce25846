"""Figures of recognition: ROC, DET and CMC curves with bands, histograms of scores."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tammes.lab.recognition.results import LEVEL, MeasuredCurve
from tammes.lab.report.charts.chart import Chart, Layer, Line, Panel, Region, numbers, plot
from tammes.lab.report.charts.distributions import histogram

BAND = f"{100 * LEVEL:.0f} % interval over identities"


def _banded(curve: MeasuredCurve, name: str, place: int, floor: float = 0.0) -> list[Layer]:
    """Return a curve with its confidence band; values below the floor are raised to it."""
    layers: list[Layer] = []
    if curve.low is not None and curve.high is not None:
        x = torch.cat([curve.x, curve.x.flip(0)])
        y = torch.cat([curve.high, curve.low.flip(0)]).clamp_min(floor)
        layers.append(Region(numbers(x), numbers(y), BAND, place))
    layers.append(Line(numbers(curve.x), numbers(curve.y.clamp_min(floor)), name, color=place))
    return layers


@plot
def roc(
    curve: MeasuredCurve, *, x: str = "false acceptance rate", y: str = "true acceptance rate"
) -> Chart:
    """ROC curve: share of positives accepted over share of negatives accepted, x logarithmic."""
    ends = (float(curve.x[0]), 1.0)
    panel = Panel(_banded(curve, y, 0), "", x, y, x_range=ends, y_range=(0.0, 1.02), x_log=True)
    return Chart([panel])


@plot
def det(curve: MeasuredCurve, same: int) -> Chart:
    """DET curve: false rejections over false acceptances, both on logarithmic scales.

    ``curve`` is the ROC; with ``same`` pairs of one identity, rates below ``0.5 / same`` are drawn
    at that value.
    """
    swapped = MeasuredCurve(
        curve.x,
        1 - curve.y,
        None if curve.high is None else 1 - curve.high,
        None if curve.low is None else 1 - curve.low,
    )
    floor = 0.5 / max(same, 1)
    layers = _banded(swapped, "false rejection rate", 1, floor)
    diagonal = [max(float(curve.x[0]), floor), 1.0]
    layers.append(Line(diagonal, diagonal, "equal rates", "dotted", None))
    return Chart(
        [
            Panel(
                layers,
                "",
                "false acceptance rate",
                "false rejection rate",
                x_range=(float(curve.x[0]), 1.0),
                y_range=(floor, 1.0),
                x_log=True,
                y_log=True,
            )
        ]
    )


@plot
def cmc(curve: MeasuredCurve) -> Chart:
    """CMC curve: share of queries with a match among the first k items."""
    lowest = float(curve.y[0] if curve.low is None else curve.low[0])
    y_range = (max(0.0, lowest - 0.05), 1.01)
    panel = Panel(_banded(curve, "recall", 0), "", "rank k", "recall@k", y_range=y_range)
    return Chart([panel])


@plot
def score_histogram(scores: Mapping[str, Tensor], *, bins: int = 60, axis: str = "score") -> Chart:
    """Histograms of scores by group, each a share of its group; empty groups are left out."""
    groups = {name: values for name, values in scores.items() if len(values)}
    everything = torch.cat(list(groups.values()))
    low, high = float(everything.min()), float(everything.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    layers = [
        histogram(values, low, high, bins, name, place)
        for place, (name, values) in enumerate(groups.items())
    ]
    return Chart([Panel(layers, "", axis, "share of the group")])
