"""Figures that a recipe requests, drawn from its ledger."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.report.charts import distributions, paper_figures
from tammes.lab.report.charts.chart import Bars, Layer, Panel, Plot, Rule
from tammes.lab.report.charts.comparison import FEATURES_SHOWN, POINTS_SHOWN
from tammes.lab.report.charts.sweeps import analysis, by, columns_of, rows_of, sweep, titled
from tammes.lab.report.charts.training_curves import (
    SEEDS_SHOWN,
    Drawing,
    drawing,
    mean_and_seeds,
)
from tammes.lab.report.paper_comparison import PaperComparison
from tammes.lab.reproduce.ledger import Entry
from tammes.lab.stats.trends import Curve

_AXES = {
    "accuracy": ("%", 100.0), "class_margin": ("degrees", 1.0), "sample_margin": ("cosine", 1.0),
    "bias": ("ρ̂", 1.0), "loss": ("loss", 1.0),
}  # fmt: skip
"""Unit and factor of a curve, by the last part of its path."""
_ALWAYS = {"test.accuracy": "Test accuracy", "train.loss": "Training loss"}
"""Titles of the curves of every cell."""
_LOGARITHMIC = ("gradients.cosine", "gradients.largest")
"""Curves drawn on a logarithmic scale."""
_ORTHOGONAL = 1e-5
"""Cosine below which two gradients are orthogonal in float32."""


def requested_figures(comparison: PaperComparison) -> list[Drawing]:
    """Draw every figure that the recipe requests and the ledger has numbers for."""
    draw: dict[str, Callable[[PaperComparison, Mapping[str, Any], str], list[Drawing]]] = {
        "curves": _curves, "by": by, "sweep": sweep, "analysis": analysis,
        "histograms": _histograms, "scatter": _scatter, "formula": _formula, "spheres": _spheres,
    }  # fmt: skip
    drawings: list[Drawing] = []
    for number, figure in enumerate(comparison.recipe.figures, 1):
        drawings += draw[str(figure["draw"])](comparison, figure, f"figure-{number}")
    return drawings


def other_curves(comparison: PaperComparison) -> list[Drawing]:
    """Draw all other curves in the ledger."""
    shown = {figure.get("of") for figure in comparison.recipe.figures if figure["draw"] == "curves"}
    figures = {
        path: {"of": path, "title": _ALWAYS.get(path, path), "columns": comparison.columns}
        for path in dict.fromkeys((*_ALWAYS, *comparison.recipe.curves))
        if path not in shown
    }
    return [
        each
        for path, figure in figures.items()
        for each in _curves(comparison, figure, path.replace(".", "-"))
    ]


# ------------------------------------------------------------------------------------- curves


def _curves(comparison: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    """Draw a quantity over the epochs, one panel per column and one curve per row."""
    path = str(figure["of"])
    title = str(figure.get("title", path.replace(".", " ").replace("_", " ")))
    rows, columns = rows_of(comparison, figure), columns_of(comparison, figure)
    last = path.rpartition(".")[2]
    unit, factor = _AXES.get(last, (last.replace("_", " "), 1.0))
    marks: list[Layer] = []
    if path in _LOGARITHMIC:
        unit, marks = "log₁₀ |cosine|", [Rule(math.log10(_ORTHOGONAL), f"{_ORTHOGONAL:g}", "y")]
    places = {row: place for place, row in enumerate(comparison.recipe.rows)}
    every = len(rows) <= SEEDS_SHOWN
    panels = []
    for column in columns:
        layers: list[Layer] = []
        for row in rows:
            stopped = [
                each for each in comparison.stopped if (each.row, each.column) == (row, column)
            ]
            done, others = (
                [_curve(entry, path, factor) for entry in entries]
                for entries in (comparison.ledger.of(row, column), stopped)
            )
            layers += mean_and_seeds(done, others, comparison.labels[row], places[row], seeds=every)
        if layers:
            heading = titled(title, comparison.headings[column], len(columns) > 1)
            panels.append(Panel([*layers, *marks], heading, "epoch", unit))
    several = any(len(comparison.ledger.of(row, column)) > 1 for row in rows for column in columns)
    caption = "Mean over the seeds" + ("; thin: single seeds." if every else ".") if several else ""
    return drawing(name, panels, caption, legend=every)


def _curve(entry: Entry, path: str, factor: float) -> Curve:
    known = entry.curve(path).items()
    if path in _LOGARITHMIC:
        return {epoch: math.log10(factor * value) for epoch, value in known if value > 0}
    return {epoch: factor * value for epoch, value in known}


# --------------------------------------------------------------- histograms, features, formulas


def _shown(
    comparison: PaperComparison, figure: Mapping[str, Any], part: str
) -> Iterator[tuple[str, Entry, Mapping[str, Any]]]:
    """Yield label, entry and kept data of one seed of each cell that has them."""
    rows, columns = rows_of(comparison, figure), columns_of(comparison, figure)
    for column in columns:
        for row in rows:
            for entry in comparison.ledger.of(row, column):
                kept = entry.kept.get(part)
                if kept:
                    heading = f", {comparison.headings[column]}" if len(columns) > 1 else ""
                    yield f"{comparison.labels[row]}{heading}", entry, kept
                    break


def _histograms(comparison: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    panels = []
    for label, entry, kept in _shown(comparison, figure, "histograms"):
        cosines: list[Layer] = [
            _bars(kept["edges_cosine"], kept[part], words, place)
            for place, (part, words) in enumerate(
                (("own", "true class"), ("hardest", "nearest wrong class"))
            )
        ]
        title = f"{label}: cosines"
        panels.append(Panel(cosines, title, "cosine", distributions.SHARE, x_range=(-1.0, 1.0)))
        bars = _bars(*_inside(kept["edges_margin"], kept["margin"]), "sample margin", 2)
        layers: list[Layer] = [bars]
        best = entry.optimum.get("sample_margin")
        if best is not None:
            layers.append(Rule(best, f"optimum {best:.3f}"))
        if bars.edges[0] <= 0 <= bars.edges[-1]:
            layers.append(Rule(0.0, "errors below 0"))
        top = max(bars.heights, default=1.0)
        panels.append(distributions.margin_panel(layers, top, f"{label}: margins"))
    return drawing(name, panels, "Test images, one seed.")


def _bars(edges: Sequence[float], counts: Sequence[int], name: str, place: int) -> Bars:
    total = max(sum(counts), 1)
    return Bars(list(edges), [round(count / total, 6) for count in counts], name, place)


def _inside(edges: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[int]]:
    """Remove the empty bins at the ends of a histogram."""
    filled = [place for place, count in enumerate(counts) if count]
    if not filled:
        return list(edges), list(counts)
    low, high = filled[0], filled[-1] + 1
    return list(edges[low : high + 1]), list(counts[low:high])


def _scatter(comparison: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    panels: list[Panel] = []
    for label, _, kept in _shown(comparison, figure, "scatter"):
        prototypes = torch.tensor(kept["prototypes"], dtype=torch.double)
        for part, words in (("train", "training images"), ("test", "test images")):
            if part not in kept:
                continue
            xs, ys, labels = (kept[part][key] for key in ("x", "y", "label"))
            features = torch.tensor(list(zip(xs, ys, strict=True)), dtype=torch.double)
            panels += distributions.feature_scatter.chart(
                features.view(-1, 2),
                torch.tensor(labels, dtype=torch.long),
                prototypes,
                limit=POINTS_SHOWN // 2,
                title=f"{label}, {words}",
            ).panels
    caption = "Features of one seed by class; lines: directions of the prototypes."
    return drawing(name, panels, caption, tall=True)


def _spheres(comparison: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    panels: list[Panel] = []
    cells = itertools.islice(_shown(comparison, figure, "sphere"), FEATURES_SHOWN)
    for label, entry, kept in cells:
        prototypes = torch.tensor(kept["prototypes"], dtype=torch.double)
        if prototypes.shape[1:] != (3,):
            continue
        margin = entry.values.get("class_margin")
        title = label if margin is None else f"{label}: {margin:.2f}°"
        features = torch.tensor(kept["features"], dtype=torch.double).view(-1, 3)
        labels = torch.tensor(kept["labels"], dtype=torch.long)
        panels += distributions.sphere.chart(
            prototypes, features, labels, limit=POINTS_SHOWN, title=title
        ).panels
    caption = "Prototypes and features on the unit sphere, one seed; drag to rotate."
    return drawing(name, panels, caption, columns=4, tall=True)


def _formula(comparison: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    of = str(figure.get("of"))
    known = {key: each for key, each in vars(paper_figures).items() if isinstance(each, Plot)}
    if of not in known:
        hint = did_you_mean(of, known)
        raise ValueError(f"{comparison.recipe.name}: there is no figure {of!r} of a formula{hint}")
    return [Drawing(name, known[of].chart(), str(figure.get("title", "")), legend=True)]
