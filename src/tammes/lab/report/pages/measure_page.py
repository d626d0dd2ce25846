"""Page of ``tammes measure``."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tammes.lab.report.charts import distributions
from tammes.lab.report.charts.chart import Chart, sentence
from tammes.lab.report.render import html_page

if TYPE_CHECKING:
    from tammes.lab.measure.measures import Measured

_HEADLINES = (
    ("class_margin.angle", "class margin"),
    ("sample_margin.mean", "sample margin, mean"),
    ("sample_margin.minimum", "sample margin, smallest"),
    ("accuracy", "accuracy, nearest prototype"),
    ("softmax_bias.mean", "softmax bias, mean"),
    ("discriminability.ratio", "discriminability"),
)


def margins_page(measured: "Measured", files: Sequence[str]) -> str:
    """Return the page of the measurements of some files, as self-contained HTML."""
    given = measured.given
    classes, size = measured.directions.shape
    what = f"{classes:,} classes in {size:,} dimensions"
    if given.labels is not None:
        what += f", {len(given.labels):,} examples"
    sections = [
        html_page.Section("", [_cards(measured)]),
        html_page.Section("Pictures", _pictures(measured)),
        html_page.Section("All measures", [_all(measured)]),
    ]
    if tables := _tables(measured):
        sections.append(html_page.Section("Smallest margins", tables))
    scale = "" if measured.scale is None else f" --scale {measured.scale:g}"
    command = f"tammes measure {' '.join(map(shlex.quote, files))}{scale}"
    read = "\n".join([command, "", *given.sources])
    sections.append(
        html_page.Section("How to repeat this", [html_page.Details("Command and files", read)])
    )
    names = ", ".join(Path(file).name for file in files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return html_page.render(f"Margins: {names}{more}", sections, lead=[f"{what}.", *measured.notes])


def _cards(measured: "Measured") -> html_page.Cards:
    cards = []
    for key, label in _HEADLINES:
        found = measured.measure(key)
        if found is not None:
            best = found.shown_optimum()
            best = best if found.bound or not best else f"optimum {best}"
            detail = best or found.note
            cards.append(html_page.Card(label, found.shown(), detail, found.of_optimum))
    return html_page.Cards(cards)


def _pictures(measured: "Measured") -> list[html_page.Block]:
    given, found = measured.given, measured.split
    blocks: list[html_page.Block] = []
    size = measured.directions.shape[1]

    def show(chart: Chart, title: str, caption: str, *, tall: bool = False) -> None:
        blocks.extend(html_page.pictures(chart, title=title, caption=caption, tall=tall))

    if size == 3:
        ball = distributions.sphere.chart(
            measured.directions, given.embeddings, given.labels, given.names
        )
        caption = "Arrows are prototypes, points are examples; drag to turn."
        show(ball, "On the sphere", caption, tall=True)
    if size == 2 and given.examples is not None:
        plane = distributions.feature_scatter.chart(
            *given.examples, measured.directions, given.names
        )
        caption = "Points are examples, lines the directions of the prototypes."
        show(plane, "Features", caption, tall=True)
    closest = measured.pairs[0][1:] if measured.pairs else ()
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
    caption = "Degrees to the true class and to the nearest wrong class."
    show(
        distributions.angle_histogram.chart(angles.own, angles.hardest, angles.edges),
        "Angles",
        caption,
    )
    return blocks


def _all(measured: "Measured") -> html_page.Table:
    rows: list[Any] = []
    for heading, group in measured.groups:
        rows.append(sentence(heading))
        for found in group:
            share = "" if found.of_optimum is None else f"{100 * found.of_optimum:.1f}"
            row = (found.name, found.shown(), found.shown_optimum(), share, found.note)
            rows.append(row)
    return html_page.Table(("measure", "value", "optimum", "% of optimum", "note"), rows)


def _tables(measured: "Measured") -> list[html_page.Block]:
    blocks: list[html_page.Block] = []
    if measured.pairs:
        closest = [(measured.name(i), measured.name(j), angle) for angle, i, j in measured.pairs]
        blocks.append(html_page.Text("The closest classes, by the angle between their prototypes:"))
        blocks.append(html_page.Table(("class", "and class", "degrees"), closest))
    margins = measured.margins
    if margins is not None:
        known = margins.counts.nonzero().flatten()
        worst = known[margins.class_mean[known].argsort()[:10]].tolist()
        rows = [
            (
                measured.name(place),
                int(margins.counts[place]),
                float(margins.class_mean[place]),
                float(margins.class_minimum[place]),
            )
            for place in worst
        ]
        blocks.append(html_page.Text("The classes with the smallest mean sample margin:"))
        blocks.append(
            html_page.Table(("class", "examples", "mean margin", "smallest margin"), rows)
        )
    return blocks
