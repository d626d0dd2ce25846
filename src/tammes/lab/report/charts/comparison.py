"""Charts of finished runs: groups compared with each other and with the optimum."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from tammes.lab.records.run_folder import number
from tammes.lab.report.charts import distributions
from tammes.lab.report.charts.chart import (
    DASHES,
    Chart,
    HeatMap,
    HorizontalBars,
    Layer,
    Line,
    Panel,
    Points,
    Rule,
    palette_wraps,
)
from tammes.lab.report.charts.feature_projection import feature_charts
from tammes.lab.report.charts.training_curves import Drawing, class_count, optimum
from tammes.lab.report.load_runs import InspectedRun, LoadedRuns
from tammes.lab.stats.paired import summary
from tammes.lab.stats.seed_groups import QUANTITIES, Group, Quantity, format_difference, format_mean
from tammes.metrics.functional import margins as sample_margins

FEATURES_SHOWN = 8
"""Largest number of groups whose features are drawn: a browser can show only a few spheres."""
POINTS_SHOWN = 1500
HISTOGRAMS_SHOWN = 6
"""Largest number of groups with separate histograms of similarities."""
CLASSES_SHOWN = 30
"""Largest number of classes in the chart of class accuracies and in a confusion matrix."""
MATRICES_SHOWN = 4
"""Largest number of groups with a confusion matrix."""
_BY_KEY = {quantity.key: quantity for quantity in QUANTITIES}


def results(loaded: LoadedRuns) -> list[Drawing]:
    """Chart the main quantity of every group, and its difference from the first."""
    main = loaded.study.main
    groups = [group for group in loaded.groups if group.values[main.key]]
    if not groups:
        return []
    drawings = [
        Drawing(
            main.key,
            Chart([_means(groups, loaded, main, f"Test {main.name}")]),
            caption="Filled: mean ± standard deviation; hollow: single seeds.",
        )
    ]
    panel = _differences(loaded, groups, main)
    if panel is not None:
        caption = "Paired over common seeds: mean and 95 % interval (Student t). "
        caption += "Without bars: one seed, no interval."
        drawings.append(Drawing(f"{main.key}-differences", Chart([panel]), caption=caption))
    return drawings


def _place(loaded: LoadedRuns, group: Group) -> int:
    return loaded.groups.index(group)


def _means(groups: Sequence[Group], loaded: LoadedRuns, quantity: Quantity, title: str) -> Panel:
    layers: list[Layer] = []
    for row, group in enumerate(groups):
        place, values = _place(loaded, group), group.values[quantity.key]
        mean = group.summary(quantity.key)
        if mean is None:
            continue
        half = mean.std
        text = f"{group.label}: {format_mean(quantity, mean)} {quantity.unit}, n = {mean.count}"
        ends = ([mean.mean - half], [mean.mean + half]) if half else ((), ())
        if len(values) > 1:
            texts = [f"seed {seed}: {quantity.shown(v)}" for seed, v in values.items()]
            every = list(values.values())
            layers.append(Points(every, [row] * len(every), "", place, 4, True, texts))
        layers.append(Points([mean.mean], [row], "", place, 7, False, [text], *ends))
    return Panel(layers, title, quantity.unit, rows=[group.label for group in groups], above=True)


def _differences(loaded: LoadedRuns, groups: Sequence[Group], quantity: Quantity) -> Panel | None:
    base = loaded.groups[0]
    layers: list[Layer] = []
    rows: list[str] = []
    for group in groups:
        less = None if group is base else loaded.study.difference(group, quantity.key)
        if less is None:
            continue
        text = f"{group.label}: {format_difference(quantity, less).rstrip(' *')} {quantity.unit}, "
        text += f"n = {len(less.seeds)}"
        low, high = less.interval or (None, None)
        ends = ((), ()) if low is None or high is None else ([low], [high])
        look = ("", _place(loaded, group), 7, low is None)
        layers.append(Points([less.mean], [len(rows)], *look, [text], *ends))
        rows.append(group.label)
    if not rows:
        return None
    title = f"Difference in {quantity.name} from {base.label}"
    return Panel([*layers, Rule(0.0)], title, f"{quantity.unit} points", rows=rows, above=True)


def margins(loaded: LoadedRuns) -> list[Drawing]:
    """Chart class and sample margins against their optimum, and histograms."""
    drawings = []
    for key, what in (("class_margin", "class-margins"), ("sample_margin", "sample-margins")):
        quantity = _BY_KEY[key]
        groups = [group for group in loaded.groups if group.values[key]]
        if not groups:
            continue
        means = [group.summary(key) for group in groups]
        best = optimum(loaded, key)
        rules = [] if best is None else [Rule(best.value, best.text(quantity.unit))]
        bars = HorizontalBars(
            [None if mean is None else mean.mean for mean in means],
            [_place(loaded, group) for group in groups],
            [f"{g.label}: {format_mean(quantity, m)}" for g, m in zip(groups, means, strict=True)],
        )
        labels = [group.label for group in groups]
        unit = "degrees" if quantity.unit else "cosine"
        title = f"{quantity.name.capitalize()} against its optimum"
        panel = Panel([bars, *rules], title, unit, rows=labels, above=True)
        drawings.append(Drawing(what, Chart([panel]), caption=_MARGINS[key]))
    return drawings + _histograms(loaded)


_MARGINS = {
    "class_margin": "Smallest angle between two prototypes, mean over seeds.",
    "sample_margin": "Cosine to the true class minus the nearest wrong class, mean over test "
    "set and seeds.",
}


def _histograms(loaded: LoadedRuns) -> list[Drawing]:
    known = [(group, seen) for group, seen in _seen(loaded) if seen.cosines is not None]
    if not known:
        return []
    which = sample_note(known)
    values = [sample_margins(seen.cosines).double() for _, seen in known if seen.cosines]
    low = math.floor(20 * min(0.0, *(float(each.min()) for each in values))) / 20
    high = math.ceil(20 * max(0.05, *(float(each.max()) for each in values))) / 20
    lines = _outlines(loaded, known, values, low, high)
    best = optimum(loaded, "sample_margin")
    rules = [Rule(0.0, "errors below 0")]
    if best is not None and best.value <= 1.3 * high:
        rules.insert(0, Rule(best.value, f"optimum {best.value:.4g}"))
    top = max(max(line.y) for line in lines)
    panel = distributions.margin_panel([*lines, *rules], top, "Sample margins of the test set")
    drawings = [Drawing("margin-histogram", Chart([panel]), caption=which)]
    if len(known) > HISTOGRAMS_SHOWN:
        return drawings + _overlaid(loaded, known, which)
    for group, seen in known:
        assert seen.cosines is not None
        title = f"Similarities: {group.label}"
        bins = 20 + _bins(seen.cosines.target)
        chart = distributions.similarity_histogram.chart(seen.cosines, bins=bins, title=title)
        name = f"similarities-{_place(loaded, group) + 1}"
        caption = "Cosine to the true class and to the nearest wrong class. " + which
        drawings.append(Drawing(name, chart, caption=caption, legend=True))
    return drawings


def _overlaid(
    loaded: LoadedRuns, known: Sequence[tuple[Group, InspectedRun]], which: str
) -> list[Drawing]:
    drawings = []
    parts = (("target", "own", "true class"), ("hardest", "hardest", "nearest wrong class"))
    for part, name, words in parts:
        values = [getattr(seen.cosines, part).double() for _, seen in known]
        low = math.floor(10 * min(float(each.min()) for each in values)) / 10
        high = min(1.0, math.ceil(10 * max(float(each.max()) for each in values)) / 10)
        layers = _outlines(loaded, known, values, low, high)
        panel = Panel(layers, f"Cosine to the {words}", "cosine", distributions.SHARE)
        drawings.append(Drawing(f"cosine-{name}", Chart([panel]), caption=which))
    return drawings


def _outlines(
    loaded: LoadedRuns,
    known: Sequence[tuple[Group, InspectedRun]],
    values: Sequence[Tensor],
    low: float,
    high: float,
) -> list[Line]:
    """Return the histograms of the groups as lines."""
    lines = []
    for (group, _), each in zip(known, values, strict=True):
        place = _place(loaded, group)
        bars = distributions.histogram(each, low, high, _bins(each), group.label, place)
        middles = [round((a + b) / 2, 6) for a, b in itertools.pairwise(bars.edges)]
        heights = [float(f"{height:.4g}") for height in bars.heights]
        dash = DASHES[palette_wraps(place)]
        lines.append(Line(middles, heights, group.label, dash, place, group.label))
    return lines


def _bins(values: Tensor) -> int:
    """Return a number of bins that suits the number of values."""
    return max(16, min(60, round(len(values) ** 0.5)))


def _seen(loaded: LoadedRuns) -> list[tuple[Group, InspectedRun]]:
    return [(g, loaded.seen[g.label]) for g in loaded.groups if g.label in loaded.seen]


def sample_note(known: Sequence[tuple[Group, InspectedRun]]) -> str:
    """Describe the seed and the number of examples shown."""
    seeds = {seen.seed for _, seen in known}
    words = f"Seed {seeds.pop()} of each." if len(seeds) == 1 else "One seed of each."
    parts = [(len(seen.labels), seen.total) for _, seen in known if seen.labels is not None]
    if any(shown < total for shown, total in parts):
        shown, total = min(parts)
        words += f" {shown:,} of {total:,} test examples."
    return words


def features(loaded: LoadedRuns) -> list[Drawing]:
    """Draw the features of each group on the sphere, in the plane or projected."""
    drawings = []
    known = [(group, seen, seen.drawable) for group, seen in _seen(loaded)]
    able = [(group, seen, given) for group, seen, given in known if given is not None]
    for group, seen, given in able[:FEATURES_SHOWN]:
        charts = feature_charts(*given, seen.names, limit=POINTS_SHOWN, title=group.label)
        for kind, chart in charts.items():
            shown = min(len(given[2]), POINTS_SHOWN if kind == "sphere" else POINTS_SHOWN // 2)
            caption = f"Seed {seen.seed}, {shown:,} of {seen.total:,} test examples."
            name = f"{kind}-{_place(loaded, group) + 1}"
            drawings.append(Drawing(name, chart, caption=caption, tall=True, legend=True))
    return drawings


def classes(loaded: LoadedRuns) -> list[Drawing]:
    """Chart the accuracy of each class, the worst first."""
    table = class_accuracies(loaded)
    if not table:
        return []
    groups = [group for group in loaded.groups if group.label in table]
    order = worst_first(table)
    shown = order[:CLASSES_SHOWN]
    names = class_names(loaded, len(next(iter(table.values()))))
    layers: list[Layer] = []
    for group in groups:
        place, values = _place(loaded, group), table[group.label]
        known = [(row, values[each]) for row, each in enumerate(shown)]
        points = [(row, value) for row, value in known if value is not None]
        texts = [f"{names[shown[row]]}, {group.label}: {v:.1f} %" for row, v in points]
        at, accuracies = [row for row, _ in points], [value for _, value in points]
        look = (group.label, place, 6, len(groups) > 1)
        layers.append(Points(accuracies, at, *look, texts, group=group.label))
    title = "Accuracy of each class"
    caption = "Mean over seeds, the worst class first."
    if len(shown) < len(order):
        caption = f"The worst {len(shown)} of {len(order)} classes; mean over seeds."
    low = min(value for layer in layers if isinstance(layer, Points) for value in layer.x)
    x_range = (max(-1.0, low - 3.0), 101.0)
    rows = [names[each] for each in shown]
    panel = Panel(layers, title, "%", x_range=x_range, rows=rows)
    return [Drawing("class-accuracy", Chart([panel]), caption=caption)]


def confusion(loaded: LoadedRuns) -> list[Drawing]:
    """Chart the confusion matrix of each group, without its diagonal."""
    drawings = []
    known = [(g, s) for g, s in _seen(loaded) if s.confused and s.counts is not None]
    for group, seen in known[:MATRICES_SHOWN]:
        assert seen.counts is not None
        errors: Counter[int] = Counter()
        for (label, prediction), count in seen.confused.items():
            errors[label] += count
            errors[prediction] += count
        # Ties are broken by class number, so that the page is deterministic.
        most = sorted(errors, key=lambda each: (-errors[each], each))[:CLASSES_SHOWN]
        shown = sorted(most) if len(seen.counts) > CLASSES_SHOWN else range(len(seen.counts))
        values = [
            [
                100 * count / int(seen.counts[label])
                if (count := seen.confused.get((label, prediction), 0))
                else None
                for prediction in shown
            ]
            for label in shown
        ]
        heat = HeatMap(values, [seen.name(each) for each in shown], "%", low=0.0)
        panel = Panel([heat], group.label, "predicted class", "true class", equal=True)
        caption = f"Mistakes as a share of the images of the true class. Seed {seen.seed}."
        if len(shown) < len(seen.counts):
            caption += f" The {len(shown)} classes with the most mistakes."
        name = f"confusion-{_place(loaded, group) + 1}"
        drawings.append(Drawing(name, Chart([panel]), caption=caption, tall=True, legend=True))
    return drawings


def class_names(loaded: LoadedRuns, count: int) -> list[str]:
    """Return the names of the classes, or their numbers if the runs disagree."""
    known = {tuple(seen.names) for seen in loaded.seen.values() if len(seen.names) == count}
    return list(known.pop()) if len(known) == 1 else [str(place) for place in range(count)]


def class_accuracies(loaded: LoadedRuns) -> dict[str, list[float | None]]:
    """Return the mean accuracy of each class over the seeds in percent, by group label."""
    table: dict[str, list[float | None]] = {}
    for group in loaded.groups:
        rows = []
        for run in group.runs.values():
            test = run.final.get("test")
            values = test.get("per_class_accuracy") if isinstance(test, dict) else None
            if isinstance(values, list) and values:
                rows.append([number(value, ()) for value in values])
        if not rows or len({len(row) for row in rows}) > 1:
            continue
        means = [_mean(column) for column in zip(*rows, strict=True)]
        table[group.label] = [None if mean is None else 100 * mean for mean in means]
    # Groups with different classes cannot be compared.
    count = class_count(loaded) or len(next(iter(table.values()), []))
    return {label: means for label, means in table.items() if len(means) == count}


def worst_first(table: dict[str, list[float | None]]) -> list[int]:
    """Sort classes by mean accuracy over all groups; classes without examples are left out."""
    means = [_mean(column) for column in zip(*table.values(), strict=True)]
    known = [(mean, place) for place, mean in enumerate(means) if mean is not None]
    return [place for _, place in sorted(known)]


def _mean(values: Iterable[float | None]) -> float | None:
    found = summary(value for value in values if value is not None)
    return None if found is None else found.mean
