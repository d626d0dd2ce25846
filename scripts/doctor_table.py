"""Print what the doctor found on CIFAR-100 and what its looks cost, for docs/doctor.md.

The numbers are from the column ``short`` of ``results/zhou2022/unstable.json``.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.ledger import Entry, Ledger
from tammes.lab.training.health import moment

LEDGER = Path(__file__).parents[1] / "results" / "zhou2022" / "unstable.json"
NAME, COLUMN = "zhou2022/unstable", "short"


def table(ledger: Ledger) -> str:
    """Format the cells of the column as a table in Markdown, in the order of the recipe."""
    recipe = recipes.load(NAME)
    rows = [(row, entry) for row in recipe.rows.values() for entry in ledger.of(row.name, COLUMN)]
    if not rows:
        return "It was not run on a GPU yet."
    lines = [
        "| loss | accuracy % | class margin ° | findings | first look | other looks |",
        "|---|---|---|---|---|---|",
    ]
    for row, entry in rows:
        first, others = look_costs(entry)
        values = f"{entry.values['accuracy']:.2f} | {entry.values['class_margin']:.2f}"
        lines.append(f"| {row.title} | {values} | {findings(entry)} | {first} | {others} |")
    machines = {ledger.machines[e.machine]["device"] for _, e in rows if e.machine is not None}
    epochs = {entry.epochs for _, entry in rows}
    return (
        f"CIFAR-100, ResNet-18, {' and '.join(map(str, sorted(epochs)))} epochs on "
        f"{' and '.join(sorted(machines))}, several runs side by side. The cost of a look is "
        "relative to the median epoch of its run.\n\n" + "\n".join(lines)
    )


def findings(entry: Entry) -> str:
    """Name each finding with the look that was the first to have it."""
    first: dict[str, int] = {}
    for look in entry.kept["health"]["looks"]:
        for name in look["findings"]:
            first.setdefault(name, look["epoch"])
    found = (f"`{name}` {moment(epoch, entry.epochs)}" for name, epoch in first.items())
    return ", ".join(found) or "none"


def look_costs(entry: Entry) -> tuple[str, str]:
    """Return the cost of the first look and the median of the others, in percent of an epoch."""
    health = entry.kept["health"]
    cost = {each["epoch"]: each["seconds"] / health["epoch_seconds"] for each in health["looks"]}
    return f"{cost.pop(0):.2%}", f"{median(cost.values()):.2%}"


def main(_: Sequence[str] | None = None) -> None:
    """Print the table."""
    print(table(Ledger.at(LEDGER, recipes.load(NAME))))


if __name__ == "__main__":
    main()
