"""Train with several losses and seeds, to compare them.

A cell is a loss and a seed, with its own run folder. Finished cells are not run again, interrupted
cells resume, and a failed cell does not stop the others.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tammes.lab.config import normal, split_list
from tammes.lab.config.schema import Config
from tammes.lab.config.typecheck import seed_numbers
from tammes.lab.data.sources.loading import say
from tammes.lab.records.atomic_io import locked, writable
from tammes.lab.records.run_folder import Run, write_json
from tammes.lab.runner import Cell, Emit, Resources, Result, plan_resources, run_cells
from tammes.lab.runner.progress_table import ProgressTable
from tammes.lab.training.check_expressions import check_expressions
from tammes.lab.training.datasets import make_sampler, prepare_data
from tammes.lab.training.fabric import check_machine
from tammes.lab.training.loop import train
from tammes.lab.training.lr_schedules import learning_rate
from tammes.lab.training.model import build_model
from tammes.lab.training.progress import Progress

_WORK = "tammes.lab.runner.sweep:train_cell"
"""Work function of a cell."""


def compare(
    config: Config,
    losses: str | Sequence[str],
    seeds: int | Sequence[int] = 3,
    out: str | os.PathLike[str] = "runs",
    *,
    workers: int | None = None,
    retry_failed: bool = False,
    report: Callable[[str], None] | None = None,
) -> list[Run]:
    """Train with every loss and every seed.

    Expressions and data are checked before the first run starts. Progress is shown on stderr.

    Args:
        config: configuration that all runs share.
        losses: expressions of losses, or one comma-separated string.
        seeds: number of seeds, counted from that of the configuration, or a list of seeds.
        out: parent folder of the runs.
        workers: number of concurrent runs; by default one per core, or six per GPU.
        retry_failed: also retry runs whose loss was not finite; runs that failed for another reason
            are always retried.
        report: called with one-line messages; prints to stderr by default.

    Returns:
        All runs, loss by loss, including failed ones; see :attr:`.Run.status`.

    Raises:
        ValueError: nothing was trained; the message says why.
    """
    report = report or say
    configs = plan_configs(config, losses, seeds)
    folder = writable(Path(out), flag="--out")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("compare starts its own processes and cannot run under torchrun")
    at = plan_resources(len(configs), workers, accelerator=config.accelerator)
    with locked(folder, "another comparison is running in this folder"):
        for text, head in check(configs, report).items():
            report(f"{text}: {head}")
        return train_all(configs, folder, at=at, retry_failed=retry_failed, report=report)


def train_all(
    configs: Sequence[Config],
    folder: Path,
    *,
    at: Resources,
    retry_failed: bool = False,
    report: Callable[[str], None],
) -> list[Run]:
    """Train all configurations that are not finished, several at a time; return all runs."""
    cells = []
    for each in configs:
        name = f"{each.label}, seed {each.seed}"
        cells.append(Cell(name, folder / each.folder, {"config": each.to_dict()}))
    _check_images(cells)
    waiting = [cell for cell in cells if is_open(Run(cell.folder), retry_failed)]
    for cell in cells:
        if cell not in waiting and Run(cell.folder).status == "failed":
            reason = Run(cell.folder).failure.get("message")
            report(f"{cell.name}: failed before, --retry-failed retries it: {reason}")
    report(
        f"{len(cells)} runs in {folder}, {len(cells) - len(waiting)} of them already finished; "
        f"{at.workers} at a time, {at.threads} thread{'s' * (at.threads > 1)} each"
    )
    if waiting:
        prepare(waiting)
        with ProgressTable(waiting) as board:
            record_failures(run_cells(waiting, _WORK, at=at, on_event=board))
    return [Run(cell.folder) for cell in cells]


def plan_configs(
    config: Config, losses: str | Sequence[str], seeds: int | Sequence[int]
) -> list[Config]:
    """Return the configuration of every cell.

    Example:
        >>> [(c.loss, c.seed) for c in plan_configs(Config(), "softmax, cosface(margin=0.2)", [7])]
        [('softmax', 7), ('cosface(margin=0.2)', 7)]
    """
    texts = split_list(losses, what="losses") if isinstance(losses, str) else list(losses)
    texts = [" ".join(text.split()) for text in texts]
    if not texts:
        raise ValueError("losses is expected to name at least one loss, got none")
    known = [normal(text) for text in texts]
    for text in texts:
        if known.count(normal(text)) > 1:
            raise ValueError(f"losses is expected to name each loss once, got {text!r} twice")
    if config.name and len(texts) > 1:
        raise ValueError(
            f"compare names runs by their losses, so name works with one loss only, "
            f"got {config.name!r} for {len(texts)}"
        )
    numbers = seed_numbers(seeds, config.seed)
    return [config.replace(loss=text, seed=seed) for text in texts for seed in numbers]


def check(configs: Sequence[Config], report: Callable[[str], None]) -> dict[str, str]:
    """Load the data and build every model once, to find errors early.

    This also fills the cache of decoded images, so that runs do not decode concurrently. All
    configurations share their images.

    Returns:
        The expression of the head of each loss.
    """
    check_machine(configs[0])
    for config in configs:
        check_expressions(config)
    training, _, _ = prepare_data(configs[0], report)
    heads: dict[str, str] = {}
    built: set[str] = set()
    with torch.random.fork_rng(devices=[]):
        for config in configs:
            text = config.replace(seed=0).digest
            if text not in built:
                built.add(text)
                steps = len(make_sampler(config, training))
                learning_rate(config, steps)
                heads[config.loss] = build_model(config, training, steps_per_epoch=steps).head
    return heads


def train_cell(payload: Mapping[str, Any], folder: Path, emit: Emit) -> None:
    """Train one cell; runs in a worker process."""
    train(Config.from_dict(payload["config"]), folder, progress=_EmitProgress(emit))


class _EmitProgress(Progress):
    """Emits the progress of a run as events."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    def say(self, text: str) -> None:
        self.emit({"say": text})

    def begin(self, *, epochs: int, steps: int, done: int) -> None:
        self.emit({"what": "begin", "epochs": epochs, "done": done})

    def epoch(self, row: Mapping[str, Any], *, images_per_second: float) -> None:
        measured = row.get("test") or row.get("validation") or row["train"]
        known = {"accuracy": measured["accuracy"]} if "accuracy" in measured else {}
        self.emit({"what": "epoch", "epoch": row["epoch"], **known})


def _check_images(cells: Sequence[Cell]) -> None:
    """Reject existing runs that were trained on different images."""
    current: dict[int, tuple[str, str]] = {}
    for cell in cells:
        if not (cell.folder / "data.json").exists():
            continue
        config = Config.from_dict(cell.payload["config"])
        if config.seed not in current:
            training, _, testing = prepare_data(config, lambda text: None)
            current[config.seed] = (training.digest, testing.digest)
        recorded = Run(cell.folder).data
        if (recorded.get("digest"), recorded.get("test_digest")) != current[config.seed]:
            raise ValueError(
                f"{cell.folder}: the images of {config.data} have changed since this run; "
                "choose another folder with --out, or remove it"
            )


def is_open(run: Run, retry_failed: bool) -> bool:
    """Whether a cell has to run: it is unfinished, or failed in a way worth retrying."""
    if run.status == "failed":
        # Runs are deterministic, so this one would diverge again.
        return retry_failed or run.failure.get("kind") != "not finite"
    return run.status != "done"


def prepare(cells: Sequence[Cell]) -> None:
    """Prepare the folders of cells for a run."""
    for cell in cells:
        # Written before the start, so that a run killed immediately is recognised as a run.
        if "config" in cell.payload and not (cell.folder / "config.json").exists():
            write_json(cell.folder / "config.json", cell.payload["config"])
        (cell.folder / "failure.json").unlink(missing_ok=True)


def record_failures(results: Sequence[Result]) -> None:
    """Write ``failure.json`` of failed cells that did not write it themselves."""
    for result in results:
        path = result.cell.folder / "failure.json"
        if not result.ok and not path.exists():
            kind = "interrupted" if result.crashed else "error"
            with contextlib.suppress(OSError):
                write_json(path, {"kind": kind, "message": result.reason})
