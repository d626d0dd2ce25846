"""Figures over a setting that varies between rows: quantities, sweeps, margin analysis."""

import itertools
import math
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tammes.lab.fewshot.margin_analysis import MarginAnalysis, check_inequality
from tammes.lab.records.run_folder import number
from tammes.lab.report.charts.chart import Chart, Dash, Layer, Line, Panel, Points, Rule, sentence
from tammes.lab.report.charts.training_curves import Drawing, drawing
from tammes.lab.report.paper_comparison import PaperComparison
from tammes.lab.reproduce.ledger import Entry
from tammes.lab.reproduce.quantities import KNOWN
from tammes.lab.reproduce.recipes import Published
from tammes.lab.stats.seed_groups import Quantity

_SWEPT = ("base_accuracy", "shot1", "shot5")
"""Default quantities of a sweep."""
_RIGHT, _WRONG = 2, 1
"""Palette indices of right and wrong predictions."""


def rows_of(comparison: PaperComparison, figure: Mapping[str, Any]) -> list[str]:
    """Return the rows that a figure shows; by default all."""
    return [str(name) for name in figure.get("rows", comparison.recipe.rows)]


def columns_of(comparison: PaperComparison, figure: Mapping[str, Any]) -> list[str]:
    """Return the columns that a figure shows; by default all."""
    return [str(name) for name in figure.get("columns", comparison.recipe.columns)]


def titled(title: str, heading: str, several: bool) -> str:
    """Append the column to a title if there are several."""
    return f"{title}: {heading}" if several else title


def _listed(of: Any) -> list[str]:
    return [of] if isinstance(of, str) else [str(each) for each in of]


def _series(
    comparison: PaperComparison, x: str, rows: Sequence[str]
) -> dict[str, list[tuple[float, str]]]:
    """Return the rows with a numeric setting, sorted by it, grouped by series."""
    series: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        values = comparison.recipe.rows[row].values
        at = number(values, (x,))
        if at is not None:
            series.setdefault(str(values.get("series", "ours")), []).append((at, row))
    return {name: sorted(own, key=lambda point: point[0]) for name, own in series.items()}


# ------------------------------------------------------------------------------------------- by


def by(comparison: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    """Plot quantities over a setting of the rows or columns, with the paper's numbers."""
    keys = _listed(figure["of"])
    rows, columns, x = rows_of(comparison, figure), columns_of(comparison, figure), str(figure["x"])
    axis = x.replace("_", " ")
    panels = []
    for key in keys:
        quantity = KNOWN[key]
        title = str(figure.get("title", f"{quantity.name.capitalize()} by {axis}"))
        if len(keys) > 1 and "title" in figure:
            title += f", {quantity.name}"
        for heading, lines in _lines_by(comparison, quantity, x, rows, columns):
            layers = [
                layer for place, line in enumerate(lines.items()) for layer in _drawn(*line, place)
            ]
            if layers:
                shown = titled(title, heading, bool(heading))
                panels.append(Panel(layers, shown, axis, quantity.heading))
    caption = "Mean over the seeds; thin: range over the seeds; dashed: paper."
    return drawing(name, panels, caption)


@dataclass(frozen=True)
class _Point:
    """Point of a line: our mean with its range, and the paper's number."""

    x: float
    mean: float | None
    span: tuple[float, float] | None
    published: Published | None


def _lines_by(
    comparison: PaperComparison,
    quantity: Quantity,
    x: str,
    rows: Sequence[str],
    columns: Sequence[str],
) -> Iterator[tuple[str, dict[str, list[_Point]]]]:
    """Yield the heading of each panel and its lines by name."""
    recipe = comparison.recipe

    def point(at: float, row: str, column: str) -> _Point:
        values = comparison.ledger.values(row, column, quantity.key).values()
        mean = math.fsum(values) / len(values) if values else None
        span = (min(values), max(values)) if len(values) > 1 else None
        return _Point(at, mean, span, recipe.paper.get((row, column, quantity.key)))

    at = {column: number(recipe.columns[column].values, (x,)) for column in columns}
    if any(x in recipe.columns[column].values for column in columns):
        known = sorted((v, column) for column, v in at.items() if v is not None)
        yield "", {comparison.labels[row]: [point(v, row, c) for v, c in known] for row in rows}
        return
    for column in columns:
        series = _series(comparison, x, rows).items()
        heading = comparison.headings[column] if len(columns) > 1 else ""
        yield heading, {name: [point(v, row, column) for v, row in own] for name, own in series}


def _drawn(name: str, points: Sequence[_Point], place: int) -> Iterator[Layer]:
    """Yield our means, their ranges as thin lines, and the paper's numbers."""
    ours = [(point.x, point.mean) for point in points if point.mean is not None]
    if ours:
        yield Line([x for x, _ in ours], [y for _, y in ours], name, "solid", place, name)
    for point in points:
        if point.span:
            yield Line([point.x] * 2, list(point.span), "", "solid", place, name, thin=True)
    paper = [(point.x, point.published.mean) for point in points if point.published is not None]
    if paper:
        called = "paper" if name == "ours" else f"{name}, paper"
        yield Line([x for x, _ in paper], [y for _, y in paper], called, "dashed", place, called)


# ---------------------------------------------------------------------------------------- sweep


def sweep(comparison: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    """Plot accuracies over a setting such as the margin, with intervals and the peak marked."""
    rows, columns, x = rows_of(comparison, figure), columns_of(comparison, figure), str(figure["x"])
    panels = []
    for column in columns:
        for key in _listed(figure.get("of", _SWEPT)):
            layers: list[Layer] = []
            for place, (line, points) in enumerate(_series(comparison, x, rows).items()):
                layers += _swept(comparison, key, column, line, points, place)
            if layers:
                quantity = KNOWN[key]
                title = sentence(quantity.name)
                if "title" in figure:
                    title = f"{figure['title']}, {quantity.name}"
                shown = titled(title, comparison.headings[column], len(columns) > 1)
                axis = x.replace("_", " ")
                panels.append(Panel(layers, shown, axis, quantity.heading, x_range=_room(layers)))
    caption = "Thin: 95 % intervals over seeds, or over the episodes of a single seed. Circle: "
    return drawing(name, panels, f"{caption}best mean.")


def _room(layers: Sequence[Layer]) -> tuple[float, float] | None:
    """Return an x range with room for the marks at the ends of the lines."""
    xs = [x for layer in layers if isinstance(layer, Line) for x in layer.x]
    room = 0.04 * (max(xs) - min(xs))
    return (min(xs) - room, max(xs) + room) if room else None


def _swept(
    comparison: PaperComparison,
    key: str,
    column: str,
    name: str,
    points: Sequence[tuple[float, str]],
    place: int,
) -> Iterator[Layer]:
    known = []
    for at, row in points:
        ours, span = comparison.ledger.summary(row, column, key), None
        half = ours and ours.half
        if ours and half is None:
            half = _over_episodes(comparison.ledger.of(row, column), key)
        if ours and half:
            span = (ours.mean - half, ours.mean + half)
        published = comparison.recipe.paper.get((row, column, key))
        known.append(_Point(at, ours.mean if ours else None, span, published))
    yield from _drawn(name, known, place)
    means = [(point.mean, point.x) for point in known if point.mean is not None]
    if means:
        y, x = max(means, key=lambda each: each[0] * KNOWN[key].way)
        shown = f"{name}: best at {x:g}"
        text = f"{shown}, {KNOWN[key].shown(y)} {KNOWN[key].unit}".rstrip()
        yield Points([x], [y], shown, place, 11, True, [text], group=name)


def _over_episodes(entries: Sequence[Entry], key: str) -> float | None:
    """Return half the 95 % interval over the episodes of a single seed, if it was kept."""
    halves = (number(entry.kept, ("fewshot", "intervals", key)) for entry in entries)
    return next((half for half in halves if half is not None), None)


# ------------------------------------------------------------------------------------- analysis


@dataclass(frozen=True)
class _Measured:
    """Measurements at one value of the setting, by seed."""

    at: float
    by_seed: Mapping[int, MarginAnalysis]

    def mean(self, name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in self.by_seed.values())


_COURSES: tuple[tuple[str, str, tuple[tuple[str, str, Dash], ...]], ...] = (
    ("D_intra, within classes", "D_intra",
     (("base_intra", "base", "solid"), ("novel_intra", "novel", "dashed"))),
    ("D_inter, between classes", "D_inter",
     (("base_inter", "base", "solid"), ("novel_inter", "novel", "dashed"))),
    ("φ = D_inter / D_intra on base classes", "φ", (("base_ratio", "base", "solid"),)),
    ("φ on novel classes, and by (11)", "φ",
     (("novel_ratio", "novel", "dashed"), ("predicted_ratio", "by (11)", "dotted"))),
    ("P^s, two images of a novel class in one base class", "P^s",
     (("same_base_class", "", "solid"),)),
)  # fmt: skip
"""Title, axis, and curves: attribute, name and dash."""


def analysis(comparison: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    """Plot class distances over a setting such as the margin, and check inequality (12)."""
    rows, columns, x = rows_of(comparison, figure), columns_of(comparison, figure), str(figure["x"])
    axis = x.replace("_", " ")
    courses: list[Panel] = []
    judged: list[Drawing] = []
    for column in columns:
        heading, several = comparison.headings[column], len(columns) > 1
        lines = {
            line: measured
            for line, points in _series(comparison, x, rows).items()
            if (measured := _measured(comparison, column, points))
        }
        if not lines:
            continue
        for title, y, shown in _COURSES:
            layers = [
                Line(
                    [each.at for each in own],
                    [each.mean(of) for each in own],
                    _named(line, words, len(lines) > 1),
                    dash,
                    place,
                    line,
                )
                for place, (line, own) in enumerate(lines.items())
                for of, words, dash in shown
            ]
            courses.append(Panel(layers, titled(title, heading, several), axis, y))
        for line, own in lines.items():
            called = [line] * (len(lines) > 1) + [heading] * several
            verdicts = list(_verdicts(own, axis))
            if verdicts:
                panel = _pairs(verdicts, ", ".join(called))
                points = _series(comparison, x, rows)[line]
                shots = {
                    at: shot.mean
                    for at, row in points
                    if (shot := comparison.ledger.summary(row, column, "shot1")) is not None
                }
                caption = f"{_PAIRS} {_inequality_caption(own, verdicts, shots)}"
                number = f"{name}-inequality-{len(judged) + 1}"
                judged.append(Drawing(number, Chart([panel]), caption=caption, legend=True))
    caption = "Unit features, mean over the seeds; base classes: images held out of training."
    return [*drawing(name, courses, caption), *judged]


def _named(line: str, words: str, several: bool) -> str:
    return ", ".join(filter(None, (line, words))) if several or not words else words


def _measured(
    comparison: PaperComparison, column: str, points: Sequence[tuple[float, str]]
) -> list[_Measured]:
    measured = []
    for at, row in points:
        by_seed = {
            entry.seed: analysed
            for entry in comparison.ledger.of(row, column)
            if (analysed := _analysed(entry.values)) is not None
        }
        if by_seed:
            measured.append(_Measured(at, by_seed))
    return measured


def _analysed(values: Mapping[str, float]) -> MarginAnalysis | None:
    """Return the margin analysis of a cell; None if it was not measured."""
    keys = {
        "base_intra": "d_intra_base",
        "base_inter": "d_inter_base",
        "novel_intra": "d_intra_novel",
        "novel_inter": "d_inter_novel",
    }
    distances = {name: values.get(key, math.nan) for name, key in keys.items()}
    share = values.get("p_same", math.nan)
    # Collapsed classes have no ratio.
    if not all(0 < each < math.inf for each in distances.values()) or not math.isfinite(share):
        return None
    return MarginAnalysis(**distances, same_base_class=share)


_PAIRS = (
    "One point per pair m₁ < m₂ and seed: prediction of (12) against phi measured on novel classes."
)
_Verdict = tuple[float, float, bool, str]
"""Predicted difference, measured difference, whether their signs agree, and a description."""


def _verdicts(own: Sequence[_Measured], axis: str) -> Iterator[_Verdict]:
    """Compare every pair of values of the setting, the smaller one first, for every common seed."""
    for one, two in itertools.combinations(own, 2):
        for seed in sorted(set(one.by_seed) & set(two.by_seed)):
            verdict = check_inequality(one.by_seed[seed], two.by_seed[seed])
            more = verdict.first.novel_ratio - verdict.second.novel_ratio
            words = "right" if verdict.agrees else "wrong"
            larger = "larger" if verdict.predicted else "not larger"
            text = f"φ at {axis} {one.at:g} {larger} than at {two.at:g}: {words}, seed {seed}"
            yield verdict.right - verdict.left, more, verdict.agrees, text


def _pairs(verdicts: Sequence[_Verdict], heading: str) -> Panel:
    layers: list[Layer] = [Rule(0.0), Rule(0.0, axis="y")]
    for right, words, place in ((True, "right", _RIGHT), (False, "wrong", _WRONG)):
        some = [each for each in verdicts if each[2] is right]
        if some:
            xs, ys, _, texts = zip(*some, strict=True)
            layers.append(Points(xs, ys, f"(12) is {words}", place, 6, not right, texts))
    title = titled("Prediction of (12) and measurement", heading, bool(heading))
    return Panel(layers, title, "predicted: t − P^s Δ", "measured: φ(m₁) − φ(m₂)")


def _inequality_caption(
    own: Sequence[_Measured], verdicts: Sequence[_Verdict], shots: Mapping[float, float]
) -> str:
    """Describe how often inequality (12) is right, and where phi and the accuracy are largest."""
    right = sum(agrees for _, _, agrees, _ in verdicts)
    predicted, measured = (
        max(own, key=operator.methodcaller("mean", name)).at
        for name in ("predicted_ratio", "novel_ratio")
    )
    text = (
        f"(12) is right in {right} of {len(verdicts)} cases. φ on novel classes is largest at "
        f"{predicted:g} by (11), and at {measured:g} as measured"
    )
    if shots:
        text += f"; 1-shot accuracy is best at {max(shots, key=shots.__getitem__):g}"
    return f"{text}."
