"""The page of runs, written by ``tammes report`` and at the end of ``tammes compare``."""

from collections.abc import Sequence
from typing import Any

from tammes.lab.records.run_folder import RecordError, Run
from tammes.lab.report.charts import comparison
from tammes.lab.report.charts.chart import Chart
from tammes.lab.report.charts.training_curves import (
    SEEDS_SHOWN,
    Drawing,
    figures_in,
    optimum,
    training,
)
from tammes.lab.report.confusions import pair_blocks
from tammes.lab.report.load_runs import Gathered, gather
from tammes.lab.report.render import html_page as page
from tammes.lab.report.rerun import configuration, rerun, surroundings
from tammes.lab.stats.seed_groups import Group, Quantity, format_difference, format_mean

_GALLERIES = 8
"""Groups with images of confused classes."""
_LISTED = 300
"""Classes in the table of their accuracies."""
_COMPARED = 6
"""Groups beside each other in that table."""


def runs_page(
    runs: Sequence[Run],
    *,
    baseline: str | None = None,
    title: str | None = None,
    command: str | None = None,
) -> str:
    """The page of runs, made from their records alone.

    Args:
        runs: in any state; what cannot be read is listed with the reason.
        baseline: label of the group that the others are compared with; the first by default.
        title: of the page.
        command: that writes this page, to be shown on it.

    Returns:
        The HTML, with everything it needs inside.

    Raises:
        RecordError: where not a single run can be read, or no group is called like the baseline.
    """
    return page_of(gather(runs, baseline), title=title, command=command)


def run_figures(runs: Sequence[Run], *, baseline: str | None = None) -> dict[str, Chart]:
    """Every chart of the page of runs, by the name of its file.

    Args:
        runs: in any state.
        baseline: label of the group that the others are compared with; the first by default.
    """
    return figures_of(gather(runs, baseline))


def figures_of(found: Gathered) -> dict[str, Chart]:
    """Every chart of what was gathered, by the name of its file."""
    return {each.name: each.chart for _, drawings in _drawings(found) for each in drawings}


def page_of(found: Gathered, *, title: str | None = None, command: str | None = None) -> str:
    """The page of what was gathered."""
    drawn = dict(_drawings(found))
    labels = [group.label for group in found.groups]
    sections = [
        page.Section("Results", [*_summary(found), *figures_in(drawn["results"])]),
        page.Section("Margins", [*_legend(labels, drawn["margins"]),
                                 *figures_in(drawn["margins"])]),
        page.Section("Features", _features(found, drawn["features"])),
        page.Section("Training", [*_legend(labels, drawn["training"]), *_seed_note(found),
                             *figures_in(drawn["training"])]),
        page.Section("Classes", [*_legend(labels, drawn["classes"]), *figures_in(drawn["classes"]),
                            *_class_table(found)]),
        page.Section("Confused and close classes", _confusion(found)),
        page.Section("Configuration", [*configuration(found), *surroundings(found)]),
        page.Section("How to run it again", rerun(found, command)),
    ]  # fmt: skip
    shown = [section for section in sections if section.blocks]
    return page.render(title or _title(found), shown, lead=_lead(found))


def _drawings(found: Gathered) -> list[tuple[str, list[Drawing]]]:
    return [
        ("results", comparison.results(found)),
        ("margins", comparison.margins(found)),
        ("features", comparison.features(found)),
        ("training", training(found)),
        ("classes", comparison.classes(found)),
    ]


def _legend(labels: Sequence[str], drawings: Sequence[Drawing]) -> list[page.Block]:
    return [page.Legend(labels)] if len(labels) > 1 and drawings else []


def _seed_note(found: Gathered) -> list[page.Block]:
    if all(len(group.runs) + len(group.stopped) < 2 for group in found.groups):
        return []
    if len(found.groups) > SEEDS_SHOWN:
        return [page.Text("Means over the seeds; with so many groups single seeds are not drawn.")]
    text = "Thick lines are means over the finished seeds, thin lines single seeds"
    stopped = any(group.stopped for group in found.groups)
    return [page.Text(f"{text}, dotted ones runs that did not finish." if stopped else f"{text}.")]


def _title(found: Gathered) -> str:
    sources = dict.fromkeys(group.config.data for group in found.groups)
    where = ", ".join(sources)
    if len(found.groups) == 1:
        return f"{found.groups[0].label} on {where}"
    return f"{len(found.groups)} losses on {where}" if _losses(found) else f"Runs on {where}"


def _losses(found: Gathered) -> bool:
    losses = [group.config.loss for group in found.groups]
    return len(set(losses)) == len(losses)


def _lead(found: Gathered) -> list[str]:
    lead = []
    data = _data(found)
    if data:
        image = " × ".join(str(side) for side in data.get("image", [])[1:])
        size = f" of {image} pixels" if image else ""
        lead.append(
            f"{len(data['classes']):,} classes, {data['train']:,} images for training and "
            f"{data['test']:,} for testing{size}."
        )
    finished = sum(len(group.runs) for group in found.groups)
    seeds = sorted({seed for group in found.groups for seed in group.runs})
    some = ", ".join(map(str, seeds[:8])) + ("…" if len(seeds) > 8 else "")
    text = f"{finished} finished {'run' if finished == 1 else 'runs'}"
    lead.append(
        f"{text}, {'seed' if len(seeds) == 1 else 'seeds'} {some}." if seeds else f"{text}."
    )
    return lead


def _data(found: Gathered) -> dict[str, Any] | None:
    """Description of the data by the first run that has it whole."""
    for group in found.groups:
        for run in (*group.runs.values(), *group.stopped):
            try:
                data = run.data
            except RecordError:
                continue
            numbers = all(isinstance(data.get(key), int) for key in ("train", "test"))
            lists = isinstance(data.get("classes"), list) and isinstance(data.get("image"), list)
            if numbers and lists:
                return data
    return None


def _summary(found: Gathered) -> list[page.Block]:
    blocks: list[page.Block] = []
    study = found.study
    if len(found.groups) == 1:
        blocks += _cards(found)
    if study.quantities:
        rows: list[list[page.Cell]] = [
            [
                page.Value(group.label, color=place),
                len(group.runs),
                *(_mean(group, quantity) for quantity in study.quantities),
            ]
            for place, group in enumerate(found.groups)
        ]
        heads = ["group", "seeds", *(quantity.heading for quantity in study.quantities)]
        blocks.append(
            page.Table(heads, rows, caption=f"Mean ± standard deviation over seeds.{_best(found)}")
        )
    blocks += _difference_table(found)
    if found.troubles:
        states = {each.state for each in found.troubles}
        words = [w for w in ("failed", "unfinished", "damaged", "left out") if w in states]
        troubles: list[list[page.Cell]] = [
            [each.label, each.seed, each.state, each.reason, str(each.run.folder)]
            for each in found.troubles
        ]
        caption = f"Runs that are {' or '.join(words)}, and why."
        blocks.append(page.Table(("group", "seed", "state", "reason", "folder"), troubles, caption))
    return blocks


def _best(found: Gathered) -> str:
    parts = []
    for key, name, unit in (
        ("class_margin", "class margin", "°"),
        ("sample_margin", "sample margin", ""),
    ):
        best = optimum(found, key)
        if best is not None:
            parts.append(f"{name} {best.text(unit).removeprefix('optimum ')}")
    return f" The best there can be: {', '.join(parts)}." if parts else ""


def _mean(group: Group, quantity: Quantity) -> page.Cell:
    found = group.summary(quantity.key)
    return None if found is None else page.Value(format_mean(quantity, found), found.mean)


def _difference_table(found: Gathered) -> list[page.Block]:
    study = found.study
    compared_with = [quantity for quantity in study.quantities if quantity.better > 0]
    if len(found.groups) < 2 or not compared_with:
        return []
    base = found.groups[0]
    rows: list[list[page.Cell]] = []
    for place, group in enumerate(found.groups):
        if group is base:
            continue
        less = [(q, study.difference(group, q.key)) for q in compared_with]
        seeds = max((len(each.seeds) for _, each in less if each is not None), default=0)
        cells: list[page.Cell] = [
            None
            if each is None
            else page.Value(format_difference(quantity, each).rstrip(), each.mean)
            for quantity, each in less
        ]
        rows.append([page.Value(group.label, color=place), seeds, *cells, _verdict(found, group)])
    heads = ["group", "n", *(q.heading for q in compared_with), "accuracy is"]
    caption = f"Difference from {base.label}, paired over n common seeds: mean [95 % interval, "
    caption += "Student t]; * where the interval excludes zero."
    return [
        page.Table(heads, rows, caption),
        *(page.Text(_held(remark)) for remark in study.remarks()),
    ]


def _held(text: str) -> str:
    """The same with ``n = 1`` kept on one line."""
    return text.replace("n = 1", "n\u00a0=\u00a01")


def _verdict(found: Gathered, group: Group) -> str:
    less = found.study.difference(group, "accuracy")
    if less is None:
        return "not compared"
    if less.low is None:
        return "no claim (n = 1)"
    if not less.clear:
        return "not clear"
    return "higher" if less.mean > 0 else "lower"


def _cards(found: Gathered) -> list[page.Block]:
    (group,) = found.groups
    cards = []
    for quantity in found.study.quantities:
        value = group.summary(quantity.key)
        if value is None:
            continue
        best = optimum(found, quantity.key)
        share = None if best is None or not best.value else value.mean / best.value
        detail = "" if best is None else best.text(quantity.unit)
        unit = f" {quantity.unit}" if quantity.unit in ("%", "s") else quantity.unit
        cards.append(page.Card(quantity.name, f"{quantity.shown(value.mean)}{unit}", detail, share))
    return [page.Cards(cards)] if cards else []


def _features(found: Gathered, drawings: Sequence[Drawing]) -> list[page.Block]:
    if not drawings:
        return []
    text = "Features of test images and the prototypes of the classes"
    turn = any(each.name.startswith("sphere") for each in drawings)
    text += ", on the unit sphere; drag one to turn it." if turn else "."
    blocks: list[page.Block] = [page.Text(text)]
    left = sum(seen.features is not None for seen in found.seen.values()) - len(drawings)
    if left > 0:
        blocks.append(page.Text(f"The first {len(drawings)} groups; {left} more are not drawn."))
    return [*blocks, *figures_in(drawings)]


def _class_table(found: Gathered) -> list[page.Block]:
    table = comparison.class_accuracies(found)
    if not table:
        return []
    order = comparison.worst_first(table)[:_LISTED]
    columns = list(table)[:_COMPARED]
    names = comparison.class_names(found, len(next(iter(table.values()))))
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


def _confusion(found: Gathered) -> list[page.Block]:
    blocks: list[page.Block] = []
    many = len(found.seen) > 3
    for group in found.groups:
        seen = found.seen.get(group.label)
        if seen is None or len(blocks) >= _GALLERIES:
            continue
        inside = pair_blocks(seen, 3 if many else 5)
        if inside:
            blocks.append(page.Fold(group.label, inside, open=not blocks))
    if len(blocks) == 1:
        (only,) = blocks
        assert isinstance(only, page.Fold)
        return list(only.blocks)
    return blocks
