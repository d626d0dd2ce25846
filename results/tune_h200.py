"""Compare ``tammes tune`` with the whole grid that it searches, on CIFAR-100 with CosFace.

``python results/tune_h200.py --seconds 560`` tunes, then trains every candidate for all epochs with
two seeds, and writes results/tune_cifar100.json: whether the setting that was found is within half
a point of the grid's best, at a third of its cost or less. It takes some minutes on an H200; when
time is up it exits with 1, and repeating the call goes on. Data are read from ``$TAMMES_DATA``.
Options of ``tammes tune`` may follow, such as ``--data digits --backbone mnist_cnn --epochs 9``.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cell_queue import time_limit

from tammes.lab.config import flags
from tammes.lab.records.run_folder import Run, write_json
from tammes.lab.runner import plan_resources
from tammes.lab.runner.halving import Setting, Tuning, tune
from tammes.lab.runner.sweep import train_all

HERE = Path(__file__).parent
DEFAULTS = {
    "data": "cifar100",
    "backbone": "resnet12_basic",
    "loss": "cosface()",
    "epochs": 18,
    "lr": 0.1,
    "augment": "pad_crop(4) + flip(0.5)",
    "precision": "bf16",
}
WITHIN, COST = 0.5, 1 / 3
"""Points of accuracy, and share of the cost, that the search has to keep to."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the search and the grid; return 0 if both are complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=Path("out/tune_cifar100"), type=Path)
    parser.add_argument("--record", default=HERE / "tune_cifar100.json", type=Path)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=None)
    flags.add_config(parser)
    arguments = parser.parse_args(words)
    config = flags.read_config(arguments, **DEFAULTS)
    try:
        with time_limit(arguments.seconds):
            tuning = tune(config, arguments.out, workers=arguments.parallel)
            configs = [
                each.replace(seed=config.seed + seed)
                for each in tuning.grid.values()
                for seed in range(arguments.seeds)
            ]
            at = plan_resources(len(configs), arguments.parallel, accelerator=config.accelerator)
            runs = train_all(configs, arguments.out, at=at, report=print)
    except KeyboardInterrupt:
        print("time is up; call again to go on")
        return 1
    found = compared(tuning, runs, arguments.seeds)
    about = {name: runs[0].environment[name] for name in ("device", "torch", "tammes", "commit")}
    write_json(arguments.record, {"config": config.to_dict(), **found, "machine": about})
    print(json.dumps(found, indent=2))
    return 0


def compared(tuning: Tuning, runs: Sequence[Run], seeds: int) -> dict[str, Any]:
    """Compare the setting that was found with the best of the grid, by test accuracy."""
    accuracies: dict[Setting, float | None] = {}
    for place, setting in enumerate(tuning.grid):
        own = [run for run in runs[place * seeds : (place + 1) * seeds] if run.status == "done"]
        values = [100 * run.final["test"]["accuracy"] for run in own]
        accuracies[setting] = sum(values) / len(values) if values else None
    trained = {setting: value for setting, value in accuracies.items() if value is not None}
    best = max(trained, key=lambda setting: trained[setting])
    behind, share = trained[best] - trained[tuning.best], tuning.cost / len(runs)
    return {
        "found": str(tuning.best),
        "best": str(best),
        "points_behind": behind,
        "cost_in_runs": tuning.cost,
        "runs_of_the_grid": len(runs),
        "share_of_the_cost": share,
        "share_of_one_seed": share * seeds,
        "holds": behind <= WITHIN and share <= COST,
        "test_accuracy": {str(setting): value for setting, value in accuracies.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
