"""Page about runs, written by ``tammes report`` and ``tammes compare``."""

from collections.abc import Sequence
from typing import Any

from tammes.lab.records.run_folder import Run, read_each
from tammes.lab.report.charts import comparison
from tammes.lab.report.charts.chart import Chart
from tammes.lab.report.charts.comparison import FEATURES_SHOWN
from tammes.lab.report.charts.feature_projection import CAPTIONS
from tammes.lab.report.charts.training_curves import (
    SEEDS_SHOWN,
    Drawing,
    figure_blocks,
    legend,
    optimum,
    training,
)
from tammes.lab.report.confusions import pair_blocks, worst_mistakes
from tammes.lab.report.load_runs import LoadedRuns, load_runs
from tammes.lab.report.render import html_page as page
from tammes.lab.report.rerun import configuration, data_and_machines, rerun
from tammes.lab.report.verdicts import verdict_on_runs
from tammes.lab.stats.seed_groups import Group, Quantity, format_difference, format_mean
from tammes.lab.training.health import first_findings

_GALLERIES = 8
"""Largest number of groups with images of confused classes."""
_LISTED = 300
"""Largest number of classes in the table of class accuracies."""
_COMPARED = 6
"""Largest number of groups in that table."""


def runs_page(
    runs: Sequence[Run],
    *,
    baseline: str | None = None,
    title: str | None = None,
    command: str | None = None,
) -> str:
    """Return the page about runs as self-contained HTML, from their records alone.

    Args:
        runs: runs in any state; unreadable ones are listed with the reason.
        baseline: label of the group that the others are compared with; the first by default.
        title: title of the page.
        command: command that writes this page, to be shown on it.

    Raises:
        RecordError: no run can be read, or no group has the label of the baseline.
    """
    return render_runs_page(load_runs(runs, baseline), title=title, command=command)


def run_figures(runs: Sequence[Run], *, baseline: str | None = None) -> dict[str, Chart]:
    """Return every chart of :func:`runs_page`, by file name."""
    return charts_of_runs(load_runs(runs, baseline))


def charts_of_runs(loaded: LoadedRuns) -> dict[str, Chart]:
    """Return every chart of loaded runs, by file name."""
    return {each.name: each.chart for drawings in _drawings(loaded).values() for each in drawings}


def render_runs_page(
    loaded: LoadedRuns,
    *,
    title: str | None = None,
    command: str | None = None,
    verdict: Sequence[str] | None = None,
) -> str:
    """Render the page about loaded runs; its verdict is by default that on the runs."""
    drawn = _drawings(loaded)
    labels = [group.label for group in loaded.groups]
    sections: dict[str, list[page.Block]] = {
        "Health": _health(loaded),
        "Results": [*_summary(loaded), *figure_blocks(drawn["results"])],
        "Margins": figure_blocks(drawn["margins"], labels),
        "Features": _features(loaded, drawn["features"]),
        "Training": [
            *legend(drawn["training"], labels),
            *_seed_note(loaded),
            *figure_blocks(drawn["training"]),
        ],
        "Classes": [*figure_blocks(drawn["classes"], labels), *_class_table(loaded)],
        "Confused and close classes": [
            *figure_blocks(drawn["confusion"]),
            *_confusion(loaded),
        ],
        "Configuration": [*configuration(loaded), *data_and_machines(loaded)],
        "How to run it again": rerun(loaded, command),
    }
    return page.render(
        title or _title(loaded),
        page.sections(sections),
        verdict=verdict_on_runs(loaded) if verdict is None else verdict,
        lead=_lead(loaded),
    )


def _drawings(loaded: LoadedRuns) -> dict[str, list[Drawing]]:
    return {
        "results": comparison.results(loaded),
        "margins": comparison.margins(loaded),
        "features": comparison.features(loaded),
        "training": training(loaded),
        "classes": comparison.classes(loaded),
        "confusion": comparison.confusion(loaded),
    }


def _health(loaded: LoadedRuns) -> list[page.Block]:
    """Return a table of the findings of all health checks; nothing if there were none."""
    rows: list[list[page.Cell]] = []
    looked_at = 0
    for place, group in enumerate(loaded.groups):
        # Damaged files are listed under the results.
        for run, looks in read_each(group.every, "health"):
            looked_at += bool(looks)
            for found in first_findings(looks, run.config.epochs).values():
                rows.append(
                    [
                        page.Value(group.label, color=place),
                        run.config.seed,
                        found["name"],
                        found["severity"],
                        found["when"],
                        f"{found['measured']}; {found['why']}.",
                        f"{found['change']}.",
                    ]
                )
    if not looked_at:
        return []
    if not rows:
        return [page.Text(f"No findings in {looked_at} {'run' if looked_at == 1 else 'runs'}.")]
    heads = ("group", "seed", "finding", "severity", "first seen", "measured", "what to change")
    return [page.Table(heads, rows, "docs/doctor.md explains each finding.")]


def _seed_note(loaded: LoadedRuns) -> list[page.Block]:
    if all(len(group.runs) + len(group.stopped) < 2 for group in loaded.groups):
        return []
    if len(loaded.groups) > SEEDS_SHOWN:
        return [page.Text("Means over the seeds; single seeds are not drawn for this many groups.")]
    text = "Thick lines are means over the finished seeds, thin lines single seeds"
    stopped = any(group.stopped for group in loaded.groups)
    return [page.Text(f"{text}, dotted lines unfinished runs." if stopped else f"{text}.")]


def _title(loaded: LoadedRuns) -> str:
    where = ", ".join(dict.fromkeys(group.config.data for group in loaded.groups))
    if len(loaded.groups) == 1:
        return f"{loaded.groups[0].label} on {where}"
    count = len({group.config.loss for group in loaded.groups})
    return f"{count} losses on {where}" if count == len(loaded.groups) else f"Runs on {where}"


def _lead(loaded: LoadedRuns) -> list[str]:
    lead = []
    data = _data(loaded)
    if data:
        image = " × ".join(str(side) for side in data.get("image", [])[1:])
        size = f" of {image} pixels" if image else ""
        lead.append(
            f"{len(data['classes']):,} classes, {data['train']:,} images for training and "
            f"{data['test']:,} for testing{size}."
        )
    finished = sum(len(group.runs) for group in loaded.groups)
    seeds = sorted({seed for group in loaded.groups for seed in group.runs})
    some = ", ".join(map(str, seeds[:8])) + ("…" if len(seeds) > 8 else "")
    text = f"{finished} finished {'run' if finished == 1 else 'runs'}"
    lead.append(
        f"{text}, {'seed' if len(seeds) == 1 else 'seeds'} {some}." if seeds else f"{text}."
    )
    return lead


def _data(loaded: LoadedRuns) -> dict[str, Any] | None:
    """Return the data description of the first run that has a complete one."""
    kinds = {"train": int, "test": int, "classes": list, "image": list}
    for _, data in read_each(loaded.runs, "data"):
        if all(isinstance(data.get(key), kind) for key, kind in kinds.items()):
            return dict(data)
    return None


def _summary(loaded: LoadedRuns) -> list[page.Block]:
    study = loaded.study
    rows: list[list[page.Cell]] = [
        [page.Value(group.label, color=place), len(group.runs), *_means(group, study.quantities)]
        for place, group in enumerate(loaded.groups)
    ]
    heads = ["group", "seeds", *(quantity.heading for quantity in study.quantities)]
    caption = f"Mean ± standard deviation over seeds.{_best(loaded)}"
    states = {each.state for each in loaded.troubles}
    words = [w for w in ("failed", "unfinished", "damaged", "left out") if w in states]
    troubles = (
        (each.label, each.seed, each.state, each.reason, str(each.run.folder))
        for each in loaded.troubles
    )
    why = f"Runs that are {' or '.join(words)}, and why."
    return [
        *(_cards(loaded) if len(loaded.groups) == 1 else ()),
        *(page.table(heads, rows, caption) if study.quantities else ()),
        *_difference_table(loaded),
        *page.table(("group", "seed", "state", "reason", "folder"), troubles, why),
    ]


def _best(loaded: LoadedRuns) -> str:
    parts = []
    for key, name, unit in (
        ("class_margin", "class margin", "°"),
        ("sample_margin", "sample margin", ""),
    ):
        best = optimum(loaded, key)
        if best is not None:
            parts.append(f"{name} {best.text(unit).removeprefix('optimum ')}")
    return f" Largest possible: {', '.join(parts)}." if parts else ""


def _means(group: Group, quantities: Sequence[Quantity]) -> list[page.Cell]:
    known = [(quantity, group.summary(quantity.key)) for quantity in quantities]
    return [
        None if mean is None else page.Value(format_mean(q, mean), mean.mean) for q, mean in known
    ]


def _difference_table(loaded: LoadedRuns) -> list[page.Block]:
    study, base = loaded.study, loaded.groups[0]
    compared_with = [quantity for quantity in study.quantities if quantity.better > 0]
    if len(loaded.groups) < 2 or not compared_with:
        return []
    rows: list[list[page.Cell]] = []
    for place, group in enumerate(loaded.groups[1:], 1):
        less = [(q, study.difference(group, q.key)) for q in compared_with]
        seeds = max((len(each.seeds) for _, each in less if each is not None), default=0)
        cells: list[page.Cell] = [
            None if each is None else page.Value(format_difference(q, each).rstrip(), each.mean)
            for q, each in less
        ]
        rows.append([page.Value(group.label, color=place), seeds, *cells, _verdict(loaded, group)])
    heads = ["group", "n", *(q.heading for q in compared_with), f"{study.main.name} is"]
    caption = f"Difference from {base.label}, paired over n common seeds: mean [95 % interval, "
    caption += "Student t]; * where the interval excludes zero."
    # A no-break space keeps "n = 1" on one line.
    remarks = [each.replace("n = 1", "n\u00a0=\u00a01") for each in study.remarks()]
    return [page.Table(heads, rows, caption), *map(page.Text, remarks)]


def _verdict(loaded: LoadedRuns, group: Group) -> str:
    less = loaded.study.difference(group, loaded.study.main.key)
    if less is None:
        return "not compared"
    if less.clear:
        return "higher" if less.mean > 0 else "lower"
    return "not decided (n = 1)" if less.interval is None else "not decided"


def _cards(loaded: LoadedRuns) -> list[page.Block]:
    (group,) = loaded.groups
    cards = []
    for quantity in loaded.study.quantities:
        value = group.summary(quantity.key)
        if value is None:
            continue
        best = optimum(loaded, quantity.key)
        share = None if best is None or not best.value else value.mean / best.value
        detail = "" if best is None else best.text(quantity.unit)
        shown = f"{quantity.shown(value.mean)}{quantity.suffix}"
        cards.append(page.Card(quantity.name, shown, detail, share))
    return [page.Cards(cards)] if cards else []


def _features(loaded: LoadedRuns, drawings: Sequence[Drawing]) -> list[page.Block]:
    if not drawings:
        return []
    kinds = dict.fromkeys(each.name.partition("-")[0] for each in drawings)
    text = " ".join(["Features of test images.", *(CAPTIONS[kind] for kind in kinds)])
    blocks: list[page.Block] = [page.Text(text)]
    left = sum(seen.drawable is not None for seen in loaded.seen.values()) - FEATURES_SHOWN
    if left > 0:
        blocks.append(page.Text(f"The first {FEATURES_SHOWN} groups; {left} more are not drawn."))
    return [*blocks, *figure_blocks(drawings)]


def _class_table(loaded: LoadedRuns) -> list[page.Block]:
    table = comparison.class_accuracies(loaded)
    if not table:
        return []
    order = comparison.worst_first(table)[:_LISTED]
    columns = list(table)[:_COMPARED]
    names = comparison.class_names(loaded, len(next(iter(table.values()))))
    rows: list[list[page.Cell]] = []
    for place in order:
        values = [table[label][place] for label in columns]
        cells: list[page.Cell] = [None if v is None else page.Value(f"{v:.2f}", v) for v in values]
        rows.append([names[place], *cells])
    total = len(next(iter(table.values())))
    words = f"The worst {len(order)} of {total} classes" if len(order) < total else "All classes"
    if len(columns) < len(table):
        words += f", the first {len(columns)} of {len(table)} groups"
    heads = ["class", *columns]
    return [page.Fold(f"{words}: accuracy in %", [page.Table(heads, rows, "Mean over seeds.")])]


def _confusion(loaded: LoadedRuns) -> list[page.Block]:
    blocks: list[page.Block] = []
    many = len(loaded.seen) > 3
    for group in loaded.groups:
        seen = loaded.seen.get(group.label)
        if seen is None or len(blocks) >= _GALLERIES:
            continue
        inside = [*worst_mistakes(seen), *pair_blocks(seen, 3 if many else 5)]
        if inside:
            blocks.append(page.Fold(group.label, inside, open=not blocks))
    if len(blocks) == 1:
        (only,) = blocks
        assert isinstance(only, page.Fold)
        return list(only.blocks)
    return blocks
