"""Figures over a setting that rows differ in: a quantity, a sweep, the analysis of margins."""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tammes.lab.ledger import Entry
from tammes.lab.paired import summary
from tammes.lab.protocols.margin_analysis import Analysed, judge
from tammes.lab.recipes import Published
from tammes.lab.recipes.quantities import KNOWN
from tammes.lab.report.charts import Chart, Dash, Layer, Line, Panel, Points, Rule
from tammes.lab.report.curves import Drawing
from tammes.lab.report.paper_comparison import PaperComparison
from tammes.lab.statistics import Quantity

_SWEPT = ("base_accuracy", "shot1", "shot5")
"""What a sweep shows where the figure does not say: those of them that there are."""
_RIGHT, _WRONG = 2, 1
"""Places in the palette."""


def rows_of(found: PaperComparison, figure: Mapping[str, Any]) -> list[str]:
    """Rows that a figure shows: all by default."""
    return [str(name) for name in figure.get("rows", found.recipe.rows)]


def columns_of(found: PaperComparison, figure: Mapping[str, Any]) -> list[str]:
    """Columns that a figure shows: all by default."""
    return [str(name) for name in figure.get("columns", found.recipe.columns)]


def titled(title: str, heading: str, several: bool) -> str:
    """A title, with the column behind it where there are several."""
    return f"{title}: {heading}" if several else title


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _listed(of: Any) -> list[str]:
    return [of] if isinstance(of, str) else [str(each) for each in of]


def _series(
    found: PaperComparison, x: str, rows: Sequence[str]
) -> dict[str, list[tuple[float, str]]]:
    """Rows that have a number for the setting, with it, in its order; by their series."""
    series: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        values = found.recipe.rows[row].values
        if _is_number(values.get(x)):
            series.setdefault(str(values.get("series", "ours")), []).append((float(values[x]), row))
    return {name: sorted(own, key=lambda point: point[0]) for name, own in series.items()}


# ------------------------------------------------------------------------------------------- by


def by(found: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    """Quantities over a setting of the rows or of the columns, the paper's beside ours."""
    keys = _listed(figure["of"])
    rows, columns, x = rows_of(found, figure), columns_of(found, figure), str(figure["x"])
    axis = x.replace("_", " ")
    panels = []
    for key in keys:
        quantity = KNOWN[key]
        title = str(figure.get("title", f"{quantity.name.capitalize()} by {axis}"))
        if len(keys) > 1 and "title" in figure:
            title += f", {quantity.name}"
        for heading, lines in _lines_by(found, quantity, x, rows, columns):
            layers = [layer for place, line in enumerate(lines) for layer in _drawn(line, place)]
            if layers:
                shown = titled(title, heading, bool(heading))
                panels.append(Panel(layers, shown, axis, quantity.heading))
    if not panels:
        return []
    caption = "Mean over the seeds; thin: from the lowest to the highest; dashed: the paper."
    return [Drawing(name, Chart(panels, columns=2), caption=caption, legend=True)]


_Line = tuple[str, list[tuple[float, Mapping[int, float], Published | None]]]
"""A name; and an x, our values by seed and the paper's number for each point."""


def _lines_by(
    found: PaperComparison, quantity: Quantity, x: str, rows: Sequence[str], columns: Sequence[str]
) -> Iterator[tuple[str, list[_Line]]]:
    """For each panel its heading and its lines."""
    recipe = found.recipe

    def point(at: Any, row: str, column: str) -> tuple[float, Mapping[int, float], Any]:
        published = recipe.paper.get((row, column, quantity.key))
        return float(at), found.ledger.values(row, column, quantity.key), published

    if any(x in recipe.columns[column].values for column in columns):
        at = {column: recipe.columns[column].values.get(x) for column in columns}
        yield (
            "",
            [
                (found.labels[row], [point(v, row, c) for c, v in at.items() if _is_number(v)])
                for row in rows
            ],
        )
        return
    for column in columns:
        lines = [
            (name, [point(at, row, column) for at, row in own])
            for name, own in _series(found, x, rows).items()
        ]
        yield found.headings[column] if len(columns) > 1 else "", lines


def _drawn(line: _Line, place: int) -> Iterator[Layer]:
    name, points = line
    ordered = sorted(points, key=lambda point: point[0])
    ours = [(x, values) for x, values, _ in ordered if values]
    if ours:
        means = [math.fsum(values.values()) / len(values) for _, values in ours]
        yield Line([x for x, _ in ours], means, name, "solid", place, name)
        for x, values in ours:
            if len(values) > 1:
                ends = [min(values.values()), max(values.values())]
                yield Line([x, x], ends, "", "solid", place, name, thin=True)
    yield from _published(name, [(x, published) for x, _, published in ordered], place)


def _published(
    name: str, points: Sequence[tuple[float, Published | None]], place: int
) -> Iterator[Layer]:
    """The paper's numbers of a line."""
    paper = [(x, published.mean) for x, published in points if published is not None]
    if paper:
        called = "paper" if name == "ours" else f"{name}, paper"
        yield Line([x for x, _ in paper], [y for _, y in paper], called, "dashed", place, called)


# ---------------------------------------------------------------------------------------- sweep


def sweep(found: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    """Accuracies over a setting, such as the margin, with intervals and with the peak marked."""
    rows, columns, x = rows_of(found, figure), columns_of(found, figure), str(figure["x"])
    panels = []
    for column in columns:
        for key in _listed(figure.get("of", _SWEPT)):
            layers: list[Layer] = []
            for place, (line, points) in enumerate(_series(found, x, rows).items()):
                layers += _swept(found, key, column, line, points, place)
            if layers:
                quantity = KNOWN[key]
                title = _first_large(quantity.name)
                if "title" in figure:
                    title = f"{figure['title']}, {quantity.name}"
                shown = titled(title, found.headings[column], len(columns) > 1)
                axis = x.replace("_", " ")
                panels.append(Panel(layers, shown, axis, quantity.heading, x_range=_room(layers)))
    if not panels:
        return []
    caption = "Thin: 95 % intervals, over seeds, or over the episodes of a single one. Circle: "
    caption += "where the mean is best."
    return [Drawing(name, Chart(panels, columns=2), caption=caption, legend=True)]


def _room(layers: Sequence[Layer]) -> tuple[float, float] | None:
    """A little more than the lines take, so that the marks at their ends are whole."""
    xs = [x for layer in layers if isinstance(layer, Line) for x in layer.x]
    room = 0.04 * (max(xs) - min(xs))
    return (min(xs) - room, max(xs) + room) if room else None


def _first_large(text: str) -> str:
    return text[:1].upper() + text[1:]


def _swept(
    found: PaperComparison,
    key: str,
    column: str,
    name: str,
    points: Sequence[tuple[float, str]],
    place: int,
) -> Iterator[Layer]:
    known: list[tuple[float, float]] = []
    spans: list[tuple[float, float, float]] = []
    for at, row in points:
        mean = found.ledger.summary(row, column, key)
        if mean is None:
            continue
        half = mean.half
        if half is None:
            half = _over_episodes(found.ledger.of(row, column), key)
        known.append((at, mean.mean))
        if half:
            spans.append((at, mean.mean - half, mean.mean + half))
    if known:
        yield Line([x for x, _ in known], [y for _, y in known], name, "solid", place, name)
        for at, low, high in spans:
            yield Line([at, at], [low, high], "", "solid", place, name, thin=True)
        x, y = max(known, key=lambda each: each[1] * (KNOWN[key].better or 1))
        shown = f"{name}: best at {x:g}"
        text = f"{shown}, {KNOWN[key].shown(y)} {KNOWN[key].unit}".rstrip()
        yield Points([x], [y], shown, place, 11, True, [text], group=name)
    published = [(at, found.recipe.paper.get((row, column, key))) for at, row in points]
    yield from _published(name, published, place)


def _over_episodes(entries: Sequence[Entry], key: str) -> float | None:
    """Half the 95 % interval over the episodes of a single seed, where it was kept."""
    for entry in entries:
        kept = entry.kept.get("fewshot")
        intervals = kept.get("intervals") if isinstance(kept, Mapping) else None
        half = intervals.get(key) if isinstance(intervals, Mapping) else None
        if _is_number(half):
            return float(half)  # type: ignore[arg-type]
    return None


# ------------------------------------------------------------------------------------- analysis


@dataclass(frozen=True)
class _Measured:
    """What was measured with one value of the setting."""

    at: float
    by_seed: Mapping[int, Analysed]

    def mean(self, name: str) -> float:
        found = summary(getattr(each, name) for each in self.by_seed.values())
        assert found is not None
        return found.mean


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
"""Title, axis, and what is drawn: attribute, name and line."""


def analysis(found: PaperComparison, figure: Mapping[str, Any], name: str) -> list[Drawing]:
    """How classes spread over a setting such as the margin, and (12) held against what is so."""
    rows, columns, x = rows_of(found, figure), columns_of(found, figure), str(figure["x"])
    axis = x.replace("_", " ")
    courses: list[Panel] = []
    judged: list[Drawing] = []
    for column in columns:
        heading, several = found.headings[column], len(columns) > 1
        lines = {
            line: measured
            for line, points in _series(found, x, rows).items()
            if (measured := _measured(found, column, points))
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
                shots = _means(found, column, "shot1", _series(found, x, rows)[line])
                caption = f"{_PAIRS} {_told(own, verdicts, shots)}"
                number = f"{name}-inequality-{len(judged) + 1}"
                judged.append(Drawing(number, Chart([panel]), caption=caption, legend=True))
    if not courses:
        return []
    caption = "Of unit features, mean over the seeds; of base classes, images held out of training."
    return [Drawing(name, Chart(courses, columns=2), caption=caption, legend=True), *judged]


def _named(line: str, words: str, several: bool) -> str:
    return ", ".join(filter(None, (line, words))) if several or not words else words


def _measured(
    found: PaperComparison, column: str, points: Sequence[tuple[float, str]]
) -> list[_Measured]:
    measured = []
    for at, row in points:
        by_seed = {
            entry.seed: analysed
            for entry in found.ledger.of(row, column)
            if (analysed := _analysed(entry.values)) is not None
        }
        if by_seed:
            measured.append(_Measured(at, by_seed))
    return measured


def _analysed(values: Mapping[str, float]) -> Analysed | None:
    """What was measured of a cell; None where it was not."""
    keys = ("d_intra_base", "d_inter_base", "d_intra_novel", "d_inter_novel")
    distances = [values.get(key, math.nan) for key in keys]
    share = values.get("p_same", math.nan)
    # Of classes that have collapsed there is no ratio.
    if not all(0 < each < math.inf for each in distances) or not math.isfinite(share):
        return None
    base_intra, base_inter, novel_intra, novel_inter = distances
    return Analysed.from_distances(
        base_intra=base_intra,
        base_inter=base_inter,
        novel_intra=novel_intra,
        novel_inter=novel_inter,
        same_base_class=share,
    )


_PAIRS = (
    "A point for two values m₁ < m₂ and a seed: what (12) says, and what is so on novel classes."
)
_Verdict = tuple[float, float, bool, str]
"""By how much (12) says that it is so, by how much it is, whether the two agree, and in words."""


def _verdicts(own: Sequence[_Measured], axis: str) -> Iterator[_Verdict]:
    """Every two values of the setting, the smaller one first, with every seed they share."""
    for one, two in itertools.combinations(own, 2):
        for seed in sorted(set(one.by_seed) & set(two.by_seed)):
            verdict = judge(one.by_seed[seed], two.by_seed[seed])
            more = verdict.first.novel_ratio - verdict.second.novel_ratio
            words = "so" if verdict.agrees else "not so"
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
    title = titled("What (12) says against what is so", heading, bool(heading))
    return Panel(layers, title, "says: t − P^s Δ", "is: φ(m₁) − φ(m₂)")


def _means(
    found: PaperComparison, column: str, key: str, points: Sequence[tuple[float, str]]
) -> dict[float, float]:
    summaries = {at: found.ledger.summary(row, column, key) for at, row in points}
    return {at: each.mean for at, each in summaries.items() if each is not None}


def _told(
    own: Sequence[_Measured], verdicts: Sequence[_Verdict], shots: Mapping[float, float]
) -> str:
    """Whether (12) is right, and whether it says which value wins."""
    right = sum(agrees for _, _, agrees, _ in verdicts)
    said, measured = (
        max(own, key=operator.methodcaller("mean", name)).at
        for name in ("predicted_ratio", "novel_ratio")
    )
    text = (
        f"(12) is right in {right} of {len(verdicts)}. φ on novel classes is largest at {said:g} "
        f"by (11), and at {measured:g} as measured"
    )
    if shots:
        text += f"; 1-shot accuracy is best at {max(shots, key=shots.__getitem__):g}"
    return f"{text}."
