"""Page of ``tammes measure``."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tammes.lab.measure.measures import Measured
from tammes.lab.report.charts import distributions
from tammes.lab.report.charts.chart import Chart, sentence
from tammes.lab.report.charts.feature_projection import CAPTIONS, feature_charts
from tammes.lab.report.render import html_page as page
from tammes.lab.report.verdicts import verdict_on_margins

_HEADLINES = (
    ("class_margin.angle", "class margin"),
    ("sample_margin.mean", "sample margin, mean"),
    ("sample_margin.minimum", "sample margin, smallest"),
    ("accuracy", "accuracy, nearest prototype"),
    ("softmax_bias.mean", "softmax bias, mean"),
    ("discriminability.ratio", "discriminability"),
)


def margins_page(measured: Measured, files: Sequence[str]) -> str:
    """Return the page of the measurements of some files, as self-contained HTML."""
    given = measured.given
    classes, *_, size = measured.directions.shape
    what = f"{classes:,} classes in {size:,} dimensions"
    if given.labels is not None:
        what += f", {len(given.labels):,} examples"
    scale = "" if measured.scale is None else f" --scale {measured.scale:g}"
    command = f"tammes measure {' '.join(map(shlex.quote, files))}{scale}"
    sections: dict[str, list[page.Block]] = {
        "": [_cards(measured)],
        "Pictures": _pictures(measured),
        "All measures": [_all(measured)],
        "Smallest margins": _tables(measured),
        "How to repeat this": [
            page.Details("Command and files", "\n".join([command, "", *given.sources]))
        ],
    }
    names = ", ".join(Path(file).name for file in files[:3])
    title = f"Margins: {names}{f' and {len(files) - 3} more' if len(files) > 3 else ''}"
    return page.render(
        title,
        page.sections(sections),
        verdict=verdict_on_margins(measured),
        lead=[f"{what}.", *measured.notes],
    )


def _cards(measured: Measured) -> page.Cards:
    cards = []
    for key, label in _HEADLINES:
        found = measured.measure(key)
        if found is not None:
            best = found.shown_optimum()
            best = best if found.bound or not best else f"optimum {best}"
            detail = best or found.note
            cards.append(page.Card(label, found.shown(), detail, found.of_optimum))
    return page.Cards(cards)


def _pictures(measured: Measured) -> list[page.Block]:
    given, found = measured.given, measured.split
    blocks: list[page.Block] = []
    single = measured.directions.ndim == 2

    def show(chart: Chart, title: str, caption: str, *, tall: bool = False) -> None:
        blocks.extend(page.pictures(chart, title=title, caption=caption, tall=tall))

    names, titles = given.names, {"sphere": "On the sphere", "umap": "Features, by UMAP"}
    charts: dict[str, Chart] = {}
    if single and given.examples is not None:
        charts = feature_charts(measured.directions, *given.examples, names)
    elif single and measured.directions.shape[1] == 3:
        charts = {"sphere": distributions.sphere.chart(measured.directions, names=names)}
    for kind, chart in charts.items():
        show(chart, titles.get(kind, "Features"), CAPTIONS[kind], tall=True)
    closest = measured.pairs[0][1:] if measured.pairs else ()
    if single:
        heat = distributions.angle_heat_map.chart(measured.directions, given.names, always=closest)
        title = sentence(heat.panels[0].title)
        show(heat, title, "In degrees; the darkest pairs are closest.", tall=True)
    if found is None or measured.angles is None:
        return blocks
    margin, angles = measured.measure("sample_margin.mean"), measured.angles
    caption = "Cosine to the true class and to the nearest wrong class."
    show(distributions.similarity_histogram.chart(found), "Similarities", caption)
    optimum = None if margin is None else margin.optimum
    caption = "Cosine to the true class minus the nearest wrong class; negative values are errors."
    show(distributions.margin_histogram.chart(found, optimum=optimum), "Sample margins", caption)
    counts = distributions.angle_histogram.chart(angles.own, angles.hardest, angles.edges)
    show(counts, "Angles", "Degrees to the true class and to the nearest wrong class.")
    return blocks


def _all(measured: Measured) -> page.Table:
    rows: list[Any] = []
    for heading, group in measured.groups:
        rows.append(sentence(heading))
        for m in group:
            share = "" if m.of_optimum is None else f"{100 * m.of_optimum:.1f}"
            rows.append((m.name, m.shown(), m.shown_optimum(), share, m.note))
    return page.Table(("measure", "value", "optimum", "% of optimum", "note"), rows)


def _tables(measured: Measured) -> list[page.Block]:
    blocks: list[page.Block] = []
    if measured.pairs:
        closest = [(measured.name(i), measured.name(j), angle) for angle, i, j in measured.pairs]
        blocks.append(page.Text("The closest classes, by the angle between their prototypes:"))
        blocks.append(page.Table(("class", "and class", "degrees"), closest))
    if measured.margins is not None:
        counts, mean, least = (
            getattr(measured.margins, name) for name in ("counts", "class_mean", "class_minimum")
        )
        known = counts.nonzero().flatten()
        rows = [
            (measured.name(place), int(counts[place]), float(mean[place]), float(least[place]))
            for place in known[mean[known].argsort()[:10]].tolist()
        ]
        blocks.append(page.Text("The classes with the smallest mean sample margin:"))
        blocks.append(page.Table(("class", "examples", "mean margin", "smallest margin"), rows))
    return blocks
