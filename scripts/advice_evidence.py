"""Print the grids behind ``tammes advise`` as a table, for docs/choosing.md.

With ``--write``, as in ``make docs``, first collect them from the ledgers under ``results/advice``
into ``src/tammes/advise/evidence.json``. Only columns whose grid is complete count.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tammes.advise import evidence
from tammes.advise.advice import defaults_of
from tammes.advise.evidence import Grid, GridTrial
from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.ledger import Ledger

ROOT = Path(__file__).parents[1]
NAMES = ("advice/classes", "advice/identities")


def collect(results: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete grids of the ledgers as plain values."""
    for name in NAMES:
        path = results / f"{name}.json"
        if not path.exists():
            continue
        recipe = recipes.load(name)
        ledger = Ledger.at(path, recipe)
        main = recipe.quantities[0].key
        for column in recipe.columns.values():
            trials, devices, seeds = [], set[str](), 0
            for row in recipe.rows.values():
                cells = [e for e in ledger.cells if (e.row, e.column) == (row.name, column.name)]
                done = [e.values[main] for e in cells if e.status == "done"]
                ended = [e for e in cells if e.status in ("done", "diverged")]
                if len(ended) < recipe.seeds:
                    break
                # A setting that diverges with a seed has nothing to recommend it.
                values = done if len(done) == len(ended) else [0.0]
                mean = sum(values) / len(values)
                spread = sum((value - mean) ** 2 for value in values)
                error = math.sqrt(spread / max(len(values) - 1, 1) / len(values))
                trial = {**row.values, "mean": round(mean, 2), "error": round(error, 2)}
                trials.append(trial)
                seeds = len(ended)
                devices |= {
                    ledger.machines[e.machine]["device"] for e in ended if e.machine is not None
                }
            else:
                sizes = {key: column.values[key] for key in ("classes", "dim", "images")}
                yield {
                    "data": column.name,
                    **sizes,
                    "quantity": main,
                    "seeds": seeds,
                    "device": ", ".join(sorted(devices)),
                    "trials": trials,
                }


def advised(grid: Grid, loss: str) -> GridTrial | None:
    """Return the trial of the setting that is advised for a grid."""
    return grid.find(loss, *defaults_of(loss, grid))


def table(grids: tuple[Grid, ...]) -> str:
    """Format the grids as a table in Markdown."""
    lines = [
        "| data | classes × images | quantity | CosFace as advised | ArcFace as advised "
        "| best of 12 | its setting |",
        "|---|---|---|---|---|---|---|",
    ]
    for grid in grids:
        best = grid.best
        setting = f"{best.loss}, s = {best.scale:g}, m = {best.margin:g}{best.beyond_defaults}"
        cells = [
            grid.data,
            f"{grid.classes:,} × {grid.images}",
            f"{grid.quantity} %",
            *(_number(advised(grid, loss)) for loss in ("cosface", "arcface")),
            _number(best),
            setting,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(trial: GridTrial | None) -> str:
    return "-" if trial is None else f"{trial.mean:.2f} ± {trial.error:.2f}"


def main(words: Sequence[str] | None = None) -> None:
    """Print the table, after collecting the grids if asked to."""
    if "--write" in (sys.argv[1:] if words is None else words):
        values = [*collect(ROOT / "results")]
        write_atomically(evidence.FILE, (json.dumps(values, indent=1) + "\n").encode())
        evidence.grids.cache_clear()
    print(table(evidence.grids()))


if __name__ == "__main__":
    main()
