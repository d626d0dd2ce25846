"""Training curves: quantities measured after each epoch, one curve per group."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tammes.lab.records.run_folder import Run, number
from tammes.lab.report.charts.chart import DASHES, Chart, Dash, Line, Panel, Rule, palette_wraps
from tammes.lab.report.load_runs import LoadedRuns
from tammes.lab.report.render.html_page import Block, Legend, pictures
from tammes.lab.stats.seed_groups import Group
from tammes.lab.stats.trends import Curve, mean_curve

SEEDS_SHOWN = 8
"""Largest number of groups for which every seed has a curve."""
_ENDS_SHOWN = 4
"""Largest number of groups for which the shortest and longest prototypes are drawn."""
_POINTS = 400
"""Largest number of points of a curve; longer ones are thinned out."""


@dataclass(frozen=True)
class Drawing:
    """Chart with its file name, title, caption and layout on a page.

    By default the panels' own titles are shown. Without its own ``legend`` a drawing uses that of
    the section; a ``tall`` one gets more height.
    """

    name: str
    chart: Chart
    title: str = ""
    caption: str = ""
    tall: bool = False
    legend: bool = False


def drawing(
    name: str,
    panels: Sequence[Panel],
    caption: str,
    *,
    columns: int = 2,
    tall: bool = False,
    legend: bool = True,
) -> list[Drawing]:
    """Combine panels into one drawing; return nothing without panels."""
    chart = Chart(panels, columns=columns)
    return [Drawing(name, chart, caption=caption, tall=tall, legend=legend)] if panels else []


def legend(drawings: Sequence[Drawing], labels: Sequence[str]) -> list[Block]:
    """Return the legend that drawings share, if there is more than one label to tell apart."""
    shared = len(labels) > 1 and not all(each.legend for each in drawings)
    return [Legend(labels)] if shared else []


def figure_blocks(drawings: Sequence[Drawing], labels: Sequence[str] = ()) -> list[Block]:
    """Return the blocks of a page that show some drawings, with the legend they share."""
    blocks = legend(drawings, labels)
    for each in drawings:
        look = {"title": each.title, "caption": each.caption}
        blocks += pictures(each.chart, **look, tall=each.tall, legend=each.legend)
    return blocks


@dataclass(frozen=True)
class _Graph:
    """Quantity measured each epoch: its path in the metrics, and how it is drawn."""

    name: str
    path: tuple[str, ...]
    title: str
    y: str
    caption: str = ""
    factor: float = 1.0


_CURVES = (
    _Graph("test-accuracy", ("test", "accuracy"), "Test accuracy", "%", factor=100),
    _Graph("test-map", ("test", "mean_average_precision"), "Test mAP", "%",
           "Of identities that are not trained.", 100),
    _Graph("test-eer", ("test", "eer"), "Test EER", "%",
           "Of pairs of identities that are not trained.", 100),
    _Graph("validation-accuracy", ("validation", "accuracy"), "Validation accuracy", "%",
           "Selects the best epoch.", 100),
    _Graph("train-accuracy", ("train", "accuracy"), "Training accuracy", "%",
           "Running mean over the epoch, with augmentation.", 100),
    _Graph("class-margin", ("prototypes", "class_margin"), "Class margin", "degrees",
           "Smallest angle between two prototypes."),
    _Graph("test-sample-margin", ("test", "sample_margin"), "Test sample margin", "cosine",
           "Cosine to the true class minus the nearest wrong class, mean over the test set."),
    _Graph("train-sample-margin", ("train", "sample_margin"), "Training sample margin", "cosine",
           "Running mean over the epoch."),
    _Graph("train-loss", ("train", "loss"), "Training loss", "loss",
           "Values of different losses are not comparable; the shapes of the curves are."),
    _Graph("test-loss", ("test", "loss"), "Test loss", "loss",
           "Values of different losses are not comparable."),
    _Graph("softmax-bias", ("test", "bias"), "Softmax bias", "ρ̂",
           "Logsumexp of the wrong classes minus the largest of them: the margin implicit in the "
           "softmax, at most log(C − 1)."),
    _Graph("prototype-norms", ("prototypes", "norm_mean"), "Prototype norms", "norm",
           "Mean over the classes."),
    _Graph("gradients", ("gradients", "cosine"), "Angle between the two gradients", "|cosine|",
           "Between the gradients of the classification and the metric part of the loss, mean over "
           "the images of one batch. In a direct sum it is rounding error."),
    _Graph("learning-rate", ("lr",), "Learning rate", "rate"),
)  # fmt: skip


def training(loaded: LoadedRuns) -> list[Drawing]:
    """Chart everything that was measured after each epoch."""
    drawings = [
        _draw(loaded, curve, _reader(loaded.metrics, curve.path, curve.factor)) for curve in _CURVES
    ]
    drawings += _terms(loaded)
    speed = _Graph(
        "images-per-second", (), "Speed", "images/s", "Training only, without evaluation."
    )
    drawings.append(_draw(loaded, speed, _reader(loaded.timing, ("images_per_second",))))
    return [each for each in drawings if each is not None]


def _reader(
    rows: Mapping[Path, Sequence[Mapping[str, Any]]], path: Sequence[str], factor: float = 1.0
) -> Callable[[Run], Curve]:
    def read(run: Run) -> Curve:
        values = {row["epoch"]: number(row, path) for row in rows[run.folder]}
        return {epoch: factor * value for epoch, value in values.items() if value is not None}

    return read


def _draw(loaded: LoadedRuns, curve: _Graph, read: Callable[[Run], Curve]) -> Drawing | None:
    ends: list[Callable[[Run], Curve]] = []
    if curve.name == "prototype-norms" and len(loaded.groups) <= _ENDS_SHOWN:
        ends = [_reader(loaded.metrics, ("prototypes", end)) for end in ("norm_min", "norm_max")]
    lines: list[Line] = []
    for place, group in enumerate(loaded.groups):
        lines += _lines(group, place, read, len(loaded.groups) <= SEEDS_SHOWN)
        for end in ends:
            lines += [replace(line, thin=True) for line in _lines(group, place, end, False)]
    if not lines:
        return None
    panel = Panel([*lines, *_marks(loaded, curve.name)], curve.title, "epoch", curve.y)
    caption = curve.caption + (" Thin lines: the shortest and the longest." if ends else "")
    return Drawing(curve.name, Chart([panel]), caption=caption)


def _lines(group: Group, place: int, read: Callable[[Run], Curve], seeds: bool) -> list[Line]:
    finished, stopped = map(read, group.runs.values()), map(read, group.stopped)
    return mean_and_seeds(finished, stopped, group.label, place, seeds=seeds)


def mean_and_seeds(
    finished: Iterable[Curve], stopped: Iterable[Curve], label: str, place: int, *, seeds: bool
) -> list[Line]:
    """Draw the mean over finished seeds as a line and, with ``seeds``, single seeds as thin ones.

    Values of unfinished seeds are dotted and not in the mean.
    """
    done, others = [each for each in finished if each], [each for each in stopped if each]
    lines: list[Line] = []
    if seeds and len(done) > 1:
        lines += [_line(each, "", "solid", place, label, thin=True) for each in done]
    if seeds or not done:
        lines += [_line(each, "", "dotted", place, label, thin=True) for each in others]
    if done:
        # If finished seeds have different epochs, the mean covers those in common.
        lines.append(_line(mean_curve(done), label, DASHES[palette_wraps(place)], place, label))
    return lines


def _line(
    curve: Curve, name: str, dash: Dash, place: int, group: str, *, thin: bool = False
) -> Line:
    epochs = sorted(curve)
    if len(epochs) > _POINTS:
        step = (len(epochs) - 1) / (_POINTS - 1)
        epochs = [epochs[round(step * each)] for each in range(_POINTS)]
    values = [float(f"{curve[epoch]:.6g}") for epoch in epochs]
    return Line(epochs, values, name, dash, place, group, thin)


def _terms(loaded: LoadedRuns) -> list[Drawing]:
    """Chart the terms of composite losses, one figure per group."""
    drawings = []
    for place, group in enumerate(loaded.groups):
        rows = [row for run in group.runs.values() for row in loaded.metrics[run.folder]]
        names = dict.fromkeys(
            name for row in rows if isinstance(row.get("terms"), Mapping) for name in row["terms"]
        )
        if len(names) < 2:
            continue
        lines: list[Line] = []
        for number_of_term, name in enumerate(names):
            read = _reader(loaded.metrics, ("terms", name))
            own = _lines(group, number_of_term, read, False)
            lines += [replace(line, name=name, group="", thin=False) for line in own]
        panel = Panel(lines, f"Terms of {group.label}", "epoch", "value")
        caption = "Mean over the seeds, before weighting."
        drawings.append(Drawing(f"terms-{place + 1}", Chart([panel]), caption=caption, legend=True))
    return drawings


@dataclass(frozen=True)
class Optimum:
    """Largest possible value, or an upper bound of it."""

    value: float
    is_bound: bool

    def text(self, unit: str = "") -> str:
        """Format the value."""
        return f"{'at most' if self.is_bound else 'optimum'} {self.value:.4g}{unit}"


def optimum(loaded: LoadedRuns, key: str) -> Optimum | None:
    """Return the optimum that all groups share; None if they differ."""
    values = set()
    for group in loaded.groups:
        for run in group.runs.values():
            best: Any = run.final.get("optimum")
            value = number(best, (key,))
            if value is not None:
                values.add(Optimum(value, bool(best.get(f"{key}_is_bound"))))
    return values.pop() if len(values) == 1 else None


def class_count(loaded: LoadedRuns) -> int | None:
    """Return the number of classes; None if groups differ."""
    counts = {len(seen.names) for seen in loaded.seen.values() if seen.names}
    return counts.pop() if len(counts) == 1 else None


def _marks(loaded: LoadedRuns, name: str) -> list[Rule]:
    if name == "softmax-bias":
        classes = class_count(loaded)
        if classes is not None and classes > 2:
            bound = math.log(classes - 1)
            return [Rule(bound, f"log(C − 1) = {bound:.3f}", "y")]
    keys = {"class-margin": "class_margin", "train-sample-margin": "sample_margin",
            "test-sample-margin": "sample_margin"}  # fmt: skip
    best = optimum(loaded, keys[name]) if name in keys else None
    unit = "°" if name == "class-margin" else ""
    return [] if best is None else [Rule(best.value, best.text(unit), "y")]
