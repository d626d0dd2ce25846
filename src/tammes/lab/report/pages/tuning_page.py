"""Page about a search by ``tammes tune``."""

from tammes.lab.report.render import html_page as page
from tammes.lab.report.rerun import train_command
from tammes.lab.runner.halving import Tuning


def tuning_page(tuning: Tuning, *, command: str) -> str:
    """Return the page about a search, which ``command`` repeats, as self-contained HTML."""
    columns, rows = tuning_table(tuning)
    blocks: dict[str, list[page.Block]] = {
        "Search": [
            page.Table(
                columns,
                rows,
                caption="Accuracy in % on the held-out images after each round, best first.",
            )
        ],
        "Train with it": [page.Details("Command", train_command(tuning.final))],
        "How to run it again": [page.Details("This search", command)],
    }
    title = f"Tuning of {tuning.grid[tuning.given].loss} on {tuning.final.data}"
    return page.render(title, page.sections(blocks), verdict=tuning.sentences())


def tuning_table(tuning: Tuning) -> tuple[list[str], list[list[page.Cell]]]:
    """Return columns and rows of all settings, those that got furthest first."""

    def rank(setting: object) -> list[float]:
        return [-each.accuracies.get(setting, -1.0) for each in reversed(tuning.rounds)]  # type: ignore[call-overload]

    columns = [
        "setting",
        *(f"{each.epochs} epoch{'s' if each.epochs > 1 else ''}" for each in tuning.rounds),
        "note",
    ]
    rows: list[list[page.Cell]] = []
    for setting in sorted(tuning.rounds[0].runs, key=rank):
        cells: list[page.Cell] = []
        for each in tuning.rounds:
            run, found = each.runs.get(setting), each.accuracies.get(setting)
            if found is not None:
                cells.append(page.Value(f"{found:.2f}", found))
            else:
                cells.append("" if run is None else page.Value("did not train", -1.0))
        notes = ["given"] * (setting == tuning.given) + ["best"] * (setting == tuning.best)
        rows.append([str(setting), *cells, ", ".join(notes)])
    return columns, rows
