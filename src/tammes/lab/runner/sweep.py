"""Train with several losses and seeds, to compare them.

A cell is a loss and a seed, and has a folder of its own; one that is finished is not run again, one
that was interrupted goes on, and one that fails does not stop the others.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tammes.lab.config import normal, split_list
from tammes.lab.config.schema import Config
from tammes.lab.data.sources.loading import say
from tammes.lab.records.atomic_io import alone, writable
from tammes.lab.records.run_folder import Run, write_json
from tammes.lab.runner import Cell, Emit, Result, places, run_cells
from tammes.lab.runner.progress_table import Board
from tammes.lab.training.progress import Progress

_WORK = "tammes.lab.runner.sweep:train_cell"
"""What a process does with a cell."""


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

    Everything that can be wrong with the texts or the data is found before the first run starts.
    What happens meanwhile is shown on stderr.

    Args:
        config: what all runs have in common.
        losses: texts of losses, or one text with commas between them.
        seeds: how many, counted from that of the configuration, or which.
        out: folder of the runs.
        workers: how many run at a time; by default one for each core, or six on a GPU.
        retry_failed: try those again whose loss was not finite; runs that failed for another
            reason are always tried again.
        report: is told what is worth knowing; prints to stderr by default.

    Returns:
        All runs, loss by loss; those that failed too, see :attr:`.Run.status`.

    Raises:
        ValueError: nothing was trained, and the sentence says why.
    """
    report = report or say
    configs = cells_of(config, losses, seeds)
    folder = writable(Path(out), flag="--out")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("compare starts its own processes, and is not to be run by torchrun")
    at = places(len(configs), workers, accelerator=config.accelerator)
    with alone(folder, "another comparison is at work in it"):
        for text, head in check(configs, report).items():
            report(f"{text}: {head}")
        cells = [Cell(_name(each), folder / each.folder, {"config": each.to_dict()})
                 for each in configs]  # fmt: skip
        _check_images(cells)
        waiting = [cell for cell in cells if is_open(Run(cell.folder), retry_failed)]
        for cell in cells:
            if cell not in waiting and Run(cell.folder).status == "failed":
                reason = Run(cell.folder).failure.get("message")
                report(f"{cell.name}: left as it is, --retry-failed tries it again: {reason}")
        report(
            f"{len(cells)} runs in {folder}, {len(cells) - len(waiting)} of them there already; "
            f"{at.workers} at a time, {at.threads} thread{'s' * (at.threads > 1)} each"
        )
        if waiting:
            prepare(waiting)
            with Board(waiting) as board:
                note_failures(run_cells(waiting, _WORK, at=at, on_event=board))
    return [Run(cell.folder) for cell in cells]


def cells_of(
    config: Config, losses: str | Sequence[str], seeds: int | Sequence[int]
) -> list[Config]:
    """The configuration of every cell.

    Example:
        >>> [(c.loss, c.seed) for c in cells_of(Config(), "softmax, cosface(margin=0.2)", [7])]
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
            f"compare calls runs by their losses, so a name is for one loss only, "
            f"got {config.name!r} for {len(texts)}"
        )
    if isinstance(seeds, int):
        if seeds < 1:
            raise ValueError(f"seeds is expected to be at least 1, got {seeds}")
        seeds = range(config.seed, config.seed + seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds is expected to name each seed once, got {list(seeds)}")
    return [config.replace(loss=text, seed=seed) for text in texts for seed in seeds]


def check(configs: Sequence[Config], report: Callable[[str], None]) -> dict[str, str]:
    """Read the data and build every model once; what is wrong is found here.

    It also fills the cache of decoded images, so that the runs need not do it side by side.

    Args:
        configs: of all cells, which share their images.
        report: is told what is worth knowing about the data.

    Returns:
        The head of each loss, in words.
    """
    from tammes.lab.training.datasets import make_sampler, prepare_data
    from tammes.lab.training.fabric import check_machine
    from tammes.lab.training.lr_schedules import learning_rate
    from tammes.lab.training.model import build_model

    check_machine(configs[0])
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
    """Train one cell; called in a process of its own."""
    from tammes.lab.training.loop import train

    train(Config.from_dict(payload["config"]), folder, progress=_Emitted(emit))


class _Emitted(Progress):
    """Hands on how far a run is."""

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
    """Refuse to put runs beside each other that were trained on different images."""
    from tammes.lab.training.datasets import prepare_data

    now: dict[int, tuple[str, str]] = {}
    for cell in cells:
        if not (cell.folder / "data.json").exists():
            continue
        config = Config.from_dict(cell.payload["config"])
        if config.seed not in now:
            training, _, testing = prepare_data(config, lambda text: None)
            now[config.seed] = (training.digest, testing.digest)
        then = Run(cell.folder).data
        if (then.get("digest"), then.get("test_digest")) != now[config.seed]:
            raise ValueError(
                f"{cell.folder}: was trained on other images of {config.data} than are there now; "
                "choose another folder with --out, or remove it"
            )


def is_open(run: Run, retry_failed: bool) -> bool:
    """Whether a cell is to be run: it is not finished, and there is hope that it will be."""
    if run.status == "failed":
        # The same numbers would end in the same place.
        return retry_failed or run.failure.get("kind") != "not finite"
    return run.status != "done"


def prepare(cells: Sequence[Cell]) -> None:
    """Make the folders of cells ready for another try."""
    for cell in cells:
        # Before it starts, so that a run that is killed at once is one all the same.
        if "config" in cell.payload and not (cell.folder / "config.json").exists():
            write_json(cell.folder / "config.json", cell.payload["config"])
        (cell.folder / "failure.json").unlink(missing_ok=True)


def note_failures(results: Sequence[Result]) -> None:
    """Write why cells failed where they could not do it themselves."""
    for result in results:
        path = result.cell.folder / "failure.json"
        if not result.ok and not path.exists():
            kind = "interrupted" if result.crashed else "error"
            with contextlib.suppress(OSError):
                write_json(path, {"kind": kind, "message": result.reason})


def _name(config: Config) -> str:
    return f"{config.label}, seed {config.seed}"
