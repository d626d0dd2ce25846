"""Print what a warm-up does to losses and their sums on CIFAR-FS, for docs/fewshot.md.

The numbers are from ``results/kobayashi2024/cifar.json``: 32-way batches, CL2N. Those of cells that
are open were measured by hand, with one seed, and are marked.
"""

from collections.abc import Sequence
from pathlib import Path

from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.ledger import Entry, Ledger
from tammes.lab.stats.paired import Summary, summary

LEDGER = Path(__file__).parents[1] / "results" / "kobayashi2024" / "cifar.json"
NAME, WARM, COLD, METHOD = "kobayashi2024/cifar", "way32", "way32_cold", "cl2n"
BY_HAND = {
    "sce": "69.2 / 84.0",
    "bce": "68.0 / 83.1",
    "nca": "70.1 / 83.0",
    "proto": "69.9 / 83.6",
    "sce+nca": "69.6 / 82.9",
    "sce_direct_nca": "69.7 / 83.0",
    "sce+proto": "70.1 / 84.4",
    "sce_direct_proto": "69.5 / 83.5",
    "bce_direct_nca": "66.9 / 81.1",
}
"""Accuracies in 1-shot and 5-shot with a warm-up, from runs on an H200 that were not kept."""


def table(ledger: Ledger) -> str:
    """Format the accuracies as a table in Markdown."""
    recipe = recipes.load(NAME)
    lines = ["| | no warm-up | warm-up | paper |", "|---|---|---|---|"]
    by_hand = False
    for row in recipe.rows.values():
        cold, warm = (_both(ledger.of(row.name, column)) for column in (COLD, WARM))
        if not warm and row.name in BY_HAND:
            warm, by_hand = f"{BY_HAND[row.name]} \\*", True
        numbers = [recipe.paper.get((row.name, WARM, key)) for key in ("shot1", "shot5")]
        paper = " / ".join(f"{number.mean:.2f}" for number in numbers if number is not None)
        if cold or warm:
            lines.append(f"| {row.title} | {cold} | {warm} | {paper} |")
    note = "\n\n\\* By hand, one seed, not in a ledger." if by_hand else ""
    return "\n".join(lines) + note


def _both(entries: Sequence[Entry]) -> str:
    """Format the accuracies in 1-shot and in 5-shot, with the deviation over several seeds."""
    found = [summary(_accuracy(entry, shot) for entry in entries) for shot in (1, 5)]
    shown = [_shown(each) for each in found if each is not None]
    seeds = f" ({len(entries)} seeds)" if len(entries) > 1 else ""
    return " / ".join(shown) + seeds


def _shown(each: Summary) -> str:
    return f"{each.mean:.1f}" if each.std is None else f"{each.mean:.1f} ± {each.std:.1f}"


def _accuracy(entry: Entry, shot: int) -> float:
    rows = entry.kept["fewshot"]["rows"]["novel"]
    (found,) = (row for row in rows if (row["method"], row["shot"]) == (METHOD, shot))
    return 100 * float(found["accuracy"])


def main(_: Sequence[str] | None = None) -> None:
    """Print the table."""
    print(table(Ledger.at(LEDGER, recipes.load(NAME))))


if __name__ == "__main__":
    main()
