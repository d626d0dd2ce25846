"""Page of a reproduction: claims, comparison with the paper, figures, and differences."""

from typing import Any

from tammes.lab.config.yaml_file import write_yaml
from tammes.lab.report.charts.against_paper import OUTCOMES, claim_charts, paper_against_ours
from tammes.lab.report.charts.chart import Chart
from tammes.lab.report.charts.recipe_figures import other_curves, requested_figures
from tammes.lab.report.charts.training_curves import Drawing, figure_blocks
from tammes.lab.report.paper_comparison import QUICK, VERDICTS, PaperComparison
from tammes.lab.report.paper_comparison_writers import comparison_blocks
from tammes.lab.report.render import html_page as page
from tammes.lab.report.verdicts import verdict_on_reproduction
from tammes.lab.reproduce.collect import MACHINE
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipes import Recipe


def reproduction_page(recipe: Recipe, ledger: Ledger) -> str:
    """Return the page of a reproduction as self-contained HTML, from recipe and ledger alone."""
    comparison = PaperComparison(recipe, ledger)
    drawn = _drawings(comparison)
    labels = list(comparison.labels.values())
    training = figure_blocks(drawn["training"], labels)
    sections: dict[str, list[page.Block]] = {
        "": [*_cards(comparison), *[page.Text(recipe.summary)] * bool(recipe.summary)],
        "Claims": [*_claims(comparison), *figure_blocks(drawn["claims"])],
        "Paper and ours": [*comparison_blocks(comparison), *figure_blocks(drawn["paper"])],
        "Intervals over identities": _identity_intervals(comparison),
        "Figures": figure_blocks(drawn["requested"], labels),
        "Differences from the paper": _protocol(comparison),
        "Open, diverged and failed": _missing(comparison),
        "Training": [page.Fold("Training curves", training)] if training else [],
        "Configuration": [*_configuration(comparison), *_machines(comparison)],
        "How to continue": _command(comparison),
    }
    title = f"Quick form, no result: {recipe.title}" if ledger.quick else recipe.title
    lead = [
        *[QUICK] * ledger.quick,
        f"{recipe.source}. Recipe {recipe.name}.",
        f"{comparison.summary}.",
    ]
    verdict = verdict_on_reproduction(comparison)
    return page.render(title, page.sections(sections), verdict=verdict, lead=lead)


def reproduction_figures(recipe: Recipe, ledger: Ledger) -> dict[str, Chart]:
    """Return every chart of the page of a reproduction, by file name."""
    comparison = PaperComparison(recipe, ledger)
    return {
        each.name: each.chart for drawings in _drawings(comparison).values() for each in drawings
    }


def _identity_intervals(comparison: PaperComparison) -> list[page.Block]:
    """Return a table of the intervals over identities, or nothing if no cell has any."""
    recipe = comparison.recipe
    rows: list[list[page.Cell]] = []
    shown: set[str] = set()
    found: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    for cell in comparison.ledger.cells:
        intervals = cell.kept.get("identities", {}).get("intervals", {})
        if cell.status == "done" and intervals:
            found.setdefault((cell.row, cell.column), []).append(intervals)
            shown |= intervals.keys()
    quantities = [each for each in recipe.quantities if each.key in shown]
    for (row, column), several in found.items():
        cells: list[page.Cell] = [
            recipe.rows[row].title,
            recipe.columns[column].title,
            len(several),
        ]
        for quantity in quantities:
            pairs = [each[quantity.key] for each in several if quantity.key in each]
            ends = [quantity.shown(sum(each) / len(pairs)) for each in zip(*pairs, strict=True)]
            cells.append(" to ".join(ends))
        rows.append(cells)
    if not rows:
        return []
    heads = ["", "", "n", *(quantity.heading for quantity in quantities)]
    caption = "95 % bootstrap over the test identities of each run; mean of both ends over n seeds."
    return [page.Table(heads, rows, caption)]


def _drawings(comparison: PaperComparison) -> dict[str, list[Drawing]]:
    return {
        "claims": claim_charts(comparison),
        "paper": paper_against_ours(comparison),
        "requested": requested_figures(comparison),
        "training": other_curves(comparison),
    }


def _cards(comparison: PaperComparison) -> list[page.Block]:
    cards = []
    if comparison.recipe.rows:
        total = sum(comparison.counts.values())
        done = comparison.counts["done"]
        share = done / total if total else 0.0
        cards.append(page.Card("cells done", f"{done} of {total}", "", share))
        cards += [page.Card(f"cells {state}", str(n)) for state, n in comparison.counts.items()
                  if n and state != "done"]  # fmt: skip
    outcomes = [verdict.outcome for verdict in comparison.verdicts]
    if outcomes:
        others = [f"{outcomes.count(kind)} {words}" for kind, words in
                  (("leans", "lean"), ("fails", "fail"), ("open", "open"))
                  if kind in outcomes]  # fmt: skip
        held = f"{outcomes.count('holds')} of {len(outcomes)}"
        cards.append(page.Card("claims that hold", held, ", ".join(others)))
    return [page.Cards(cards)] if cards else []


def _claims(comparison: PaperComparison) -> list[page.Block]:
    verdicts = comparison.verdicts
    rows = ((each.claim.says, _verdict(each.outcome), each.sentence) for each in verdicts)
    blocks = page.table(("claim", "verdict", "what was found"), rows, VERDICTS)
    for verdict in verdicts:
        parts = [
            (part.text, comparison.headings[part.column], _verdict(part.outcome))
            for part in verdict.parts
        ]
        if len(parts) > 1:
            title = f"All {len(parts)} comparisons: {verdict.claim.says}"
            table = page.table(("what was found", "column", "verdict"), parts)
            blocks.append(page.Fold(title, table))
    return blocks


def _verdict(outcome: str) -> page.Value:
    return page.Value(outcome, color=OUTCOMES[outcome])


def _protocol(comparison: PaperComparison) -> list[page.Block]:
    """Show where the protocol differs from the paper's, tuned settings, and notes on rows."""
    keys = ("what", "paper", "ours", "why")
    protocol = ([str(each.get(key, "")) for key in keys] for each in comparison.recipe.protocol)
    tuned = []
    for where, chosen in comparison.ledger.tuned.items():
        values = {key: v for key, v in chosen.items() if key not in ("tried", "trials")}
        tried = "; ".join(map(_trial, chosen.get("tried", [])))
        tuned.append([_place(comparison, where), _assigned(values), tried])
    heads = (
        "cell",
        "chosen",
        "tried: accuracy % on held-out training images, or 1-shot on validation classes",
    )
    caption = (
        "Tuned with seed 0 on a held-out tenth of the training images; the final runs train on all "
        "of them. Few-shot rows are tuned on the validation classes, with nothing held out."
    )
    rows = comparison.recipe.rows.items()
    notes = ([comparison.labels[name], row.note] for name, row in rows if row.note)
    return [
        *page.table(("", "paper", "ours", "why"), protocol),
        *page.table(heads, tuned, caption),
        *page.table(("row", "note"), notes),
    ]


def _place(comparison: PaperComparison, where: str) -> str:
    row, _, column = where.partition("/")
    label = comparison.labels.get(row, row)
    several = len(comparison.recipe.columns) > 1
    return f"{label}, {comparison.headings.get(column, column)}" if several else label


def _assigned(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _trial(tried: dict[str, Any]) -> str:
    accuracy = tried.get("accuracy")
    values = {key: value for key, value in tried.items() if key != "accuracy"}
    shown = "no number" if accuracy is None else f"{accuracy:.2f}"
    return f"{_assigned(values)}: {shown}"


def _missing(comparison: PaperComparison) -> list[page.Block]:
    stopped = (
        (*cell[:4], cell[4] or "no reason recorded") for cell in comparison.stopped_in_words()
    )
    heads = ("row", "column", "seed", "what happened", "reason")
    opened = comparison.open_in_words()
    return [
        *page.table(heads, stopped, "These seeds are in none of the numbers above."),
        *page.table(("column", "open"), opened, "Cells that have not been run yet."),
    ]


def _configuration(comparison: PaperComparison) -> list[page.Block]:
    configs = comparison.ledger.configs
    if not configs:
        return []
    first, *others = configs.values()
    common = {
        key: value
        for key, value in first.items()
        if key != "seed" and all(key in each and each[key] == value for each in others)
    }
    rows = []
    for where, config in configs.items():
        own = {key: value for key, value in config.items() if key not in (*common, "seed")}
        text = write_yaml(own) if own else "none of its own"
        rows.append(page.Details(_place(comparison, where), text))
    shared = page.Details("Settings that all cells share (YAML)", write_yaml(common))
    return [shared, page.Fold("Settings of every row", rows)]


def _machines(comparison: PaperComparison) -> list[page.Block]:
    machines = comparison.ledger.machines
    if not machines:
        return []
    used = [entry.machine for entry in comparison.ledger.cells]
    hours = sum(entry.seconds for entry in comparison.ledger.cells) / 3600
    rows: list[list[page.Cell]] = [
        [*(str(machine.get(key) or "") for key in MACHINE), used.count(place)]
        for place, machine in enumerate(machines)
    ]
    caption = f"{hours:.2f} hours of training, summed over cells that ran in parallel."
    return [page.Fold("Machines", [page.Table((*MACHINE, "cells"), rows, caption)])]


def _command(comparison: PaperComparison) -> list[page.Block]:
    command = comparison.ledger.command or f"tammes reproduce {comparison.recipe.name}"
    if comparison.open:
        text = "Repeating the command runs the open cells, and none that is done."
    else:
        text = "No cell is open; repeating the command only retries failed ones."
    return [page.Text(text), page.Details("Command", command)]
