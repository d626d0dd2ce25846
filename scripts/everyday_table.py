"""Print the times of the everyday call relative to code by hand, for docs/kernels.md.

    python scripts/everyday_table.py cpu         one and two threads
    python scripts/everyday_table.py cuda        float32 and bfloat16 autocast
    python scripts/everyday_table.py compiled    CosFace under torch.compile, likewise

The numbers are from ``results/everyday_NAME.json``.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
CONTESTANTS = {
    "Tammes": "eager",
    "Tammes, graphed": "graphed",
    "Tammes, compiled": "compiled",
    "by hand, compiled": "by hand, compiled",
    "PML": "pytorch-metric-learning",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows of a benchmark in Markdown; the settings of a size share a line."""
    found = {key for row in rows for key in row["contestants"]}
    names = [name for name in CONTESTANTS if name in found]
    heads = ["(N, D, C)", "loss", "by hand, ms", *(CONTESTANTS[name] for name in names)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    places = dict.fromkeys(map(_place, rows))
    settings = dict.fromkeys(row["setting"] for row in rows)
    known = {(*_place(row), row["setting"]): row["contestants"] for row in rows}
    last = None
    for place in places:
        same = [known.get((*place, setting), {}) for setting in settings]
        n, c, loss = place
        size = "" if (n, c) == last else f"({n}, 512, {c:,})"
        last = n, c
        cells = [
            _joined(_digits(each["by hand"]["milliseconds"]) if each else "–" for each in same)
        ]
        for name in names:
            cells.append(
                _joined(f"{each[name]['of_by_hand']:.2f}" if name in each else "–" for each in same)
            )
        lines.append(f"| {size} | {loss} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _place(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["n"], row["c"], row["loss"]


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _joined(texts: Any) -> str:
    parts = [*texts]
    return "" if all(part == "–" for part in parts) else " / ".join(parts)


def main(words: Sequence[str] | None = None) -> None:
    """Print a table."""
    (name,) = sys.argv[1:] if words is None else words
    print(table(json.loads((RESULTS / f"everyday_{name}.json").read_text())["rows"]))


if __name__ == "__main__":
    main()
