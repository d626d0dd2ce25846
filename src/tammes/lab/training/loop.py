"""Train one model: data, network, criterion, a loop, a record.

Read it from top to bottom: :func:`train` is the course of a run. A run that was interrupted,
however roughly, goes on from its last checkpoint and ends in the same weights and the same record
as one that was not: order and augmentation are keyed by seed, epoch and image, dropout by seed and
step, and everything else is in the checkpoint.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tammes.distributed.process_group import RankGroup
from tammes.lab.config.schema import Config
from tammes.lab.data.samplers import BatchSampler
from tammes.lab.measure.classification import MEASURED, measure_prototypes
from tammes.lab.records.atomic_io import alone, clear_leftovers
from tammes.lab.records.run_folder import (
    Run,
    same_data,
    same_run,
    write_json,
    write_lines,
    write_tensors,
)
from tammes.lab.training.checkpoints import Checkpoints, SharedCheckpoints, make_checkpoints
from tammes.lab.training.datasets import describe_data, make_sampler, prepare_data
from tammes.lab.training.evaluation import Outcome, evaluate, finish
from tammes.lab.training.fabric import start, uses_graphs
from tammes.lab.training.gradient_angles import Gradients, make_watch
from tammes.lab.training.loader import Feed
from tammes.lab.training.lr_schedules import learning_rate
from tammes.lab.training.model import Model, build_model
from tammes.lab.training.progress import Progress
from tammes.lab.training.provenance import environment
from tammes.lab.training.sharded_head import gather_head, leave_to_itself
from tammes.lab.training.step import Step, make_optimizer

_LOOK = 50
"""Steps between two looks at what a GPU has done; each one waits for it."""


class TrainingError(ValueError):
    """Training cannot go on; the message is one sentence, and the last checkpoint is kept."""


def train(
    config: Config, folder: str | os.PathLike[str], *, progress: Progress | None = None
) -> Run:
    """Train a model and write its record, or go on with one that was interrupted.

    Args:
        config: of the run.
        folder: of its record; a finished run there is returned as it is.
        progress: is told how far it is.

    Returns:
        The finished run.

    Raises:
        TrainingError: a loss was not finite, or memory ran out. ``failure.json`` says more.
        ValueError: something in the configuration cannot be.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     run = train(Config(data="digits", loss="cosface()", epochs=2), folder)
        ...     print(run.status, run.final["epoch"])
        done 2
    """
    folder = Path(folder)
    run = Run(folder)
    if same_run(run, config) and run.status == "done":
        if progress is not None:
            progress.say(f"{folder}: this run is finished, nothing is trained again")
        return run
    before = torch.are_deterministic_algorithms_enabled()
    fabric = start(config, folder)
    first = fabric.is_global_zero
    progress = progress if progress is not None and first else Progress()
    try:
        with alone(folder, "another process is training this run") if first else nullcontext():
            work = _set_up(fabric, config, folder, progress)
            progress.begin(epochs=config.epochs, steps=len(work.sampler), done=work.epoch)
            while work.epoch < config.epochs:
                _train_epoch(work)
                _close_epoch(work)
            _conclude(work)
    except torch.OutOfMemoryError as error:
        message = (
            "the GPU has too little memory for this run; a smaller batch_size or precision bf16 "
            f"may do ({str(error).split('. ')[0]})"
        )
        raise _failed(folder, first, "out of memory", message) from error
    finally:
        progress.end()
        torch.use_deterministic_algorithms(before)
    return Run(folder)


@dataclass
class _Work:
    """What a run works with, and where it is.

    Attributes:
        epoch: epochs that are over.
        position: batches of the current epoch that are over.
        steps: batches that are over in all.
        seconds: spent on the current epoch.
        history: lines of ``metrics.jsonl``.
        best: accuracy on the validation images and step of the best epoch so far.
        outcomes: of the last epoch that was tested.
        watched: what is looked at after every epoch.
    """

    fabric: Any
    config: Config
    folder: Path
    progress: Progress
    sampler: BatchSampler
    rate: Callable[[int], float]
    model: Model
    optimizer: Any
    step: Step
    feed: Feed
    tests: dict[str, Feed]
    checkpoints: Checkpoints | SharedCheckpoints
    epoch: int = 0
    position: int = 0
    steps: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    timing: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, int] | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    watched: Gradients | None = None

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes."""
        return bool(self.fabric.is_global_zero)

    @property
    def saves(self) -> bool:
        """Whether this is a process that saves: the first, or all where each has some classes."""
        return self.writes or self.config.shard

    def save(self) -> None:
        """Write a checkpoint of a state that is known to be sound."""
        _stop_if_not_finite(self)
        if self.saves:
            self.checkpoints.save("last", self.steps, self.snapshot())
            self.checkpoints.keep_best(None if self.best is None else self.best[1])
        self.fabric.barrier()

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "steps": self.steps,
            "seconds": self.seconds,
            "sums": self.step.sums.tolist(),
            "history": json.dumps(self.history),
            "timing": json.dumps(self.timing),
            "best": self.best,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go to where a checkpoint was written."""
        self.model.load_state_dict(saved["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if saved["optimizer"] is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            # The rate of a graph stays where it is; its value is set before every step.
            group["lr"] = rate
        self.fabric.strategy.precision.load_state_dict(saved["precision"])
        self.step.sums.copy_(torch.tensor(saved["sums"], dtype=torch.double))
        self.history, self.timing = json.loads(saved["history"]), json.loads(saved["timing"])
        self.epoch, self.position, self.steps = (saved[k] for k in ("epoch", "position", "steps"))
        self.seconds = saved["seconds"]
        self.best = None if saved["best"] is None else tuple(saved["best"])
        self.progress.say(
            f"{self.folder}: going on at epoch {self.epoch + 1}, step {self.steps + 1}"
        )


def _set_up(fabric: Any, config: Config, folder: Path, progress: Progress) -> _Work:
    """Everything that is there before the first step, or before the next one."""
    with fabric.rank_zero_first(local=True):
        # One process decodes the images, the others find them decoded.
        sets = training, held_out, testing = prepare_data(config, progress.say)
    described = describe_data(*sets, whole=config.whole)
    same_data(Run(folder), described)
    sampler = make_sampler(config, training, rank=fabric.global_rank, world_size=fabric.world_size)
    rate = learning_rate(config, len(sampler))
    parts = build_model(config, training, steps_per_epoch=len(sampler))
    model = parts.model
    if model.needs_batches and sampler.batch_size < 2 * fabric.world_size:
        raise ValueError(
            f"{parts.backbone} normalises batches, and expects 2 images in each on every process, "
            f"got {sampler.batch_size} on {fabric.world_size}; norm='group' does without"
        )
    if fabric.device.type == "cuda":
        # Convolutions on a GPU are faster with the channels last.
        model.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.channels_last = True
    graphs = uses_graphs(config, fabric)
    optimizer: Any = make_optimizer(model.to(fabric.device), config, fabric.device, graphs=graphs)
    if config.shard:
        leave_to_itself(model, model.criterion.head)
    module: Any = model
    if config.compile and graphs:
        model.compile_backbone(sampler.batch_size)
    elif config.compile:
        module = torch.compile(model, dynamic=False)
    module, optimizer = fabric.setup(module, optimizer)
    around = environment(fabric.device, fabric.world_size) | parts.described()

    def without_graphs(reason: str) -> None:
        progress.say(reason)
        # One process: graphs are not for several.
        write_json(folder / "environment.json", around | {"graphs": reason})

    step = Step(fabric, module, model, optimizer, config, graphs=graphs, report=without_graphs)

    def feed(images: Any) -> Feed:
        return Feed(images, fabric.device, workers=config.workers)

    tests = {"test": feed(testing)}
    if held_out is not None:
        tests = {"validation": feed(held_out), **tests}
    checkpoints = make_checkpoints(
        folder / "checkpoints", config, model, optimizer.optimizer, progress.say
    )
    work = _Work(
        fabric, config, folder, progress, sampler, rate, model, optimizer, step,
        feed(training), tests, checkpoints,
    )  # fmt: skip
    work.watched = make_watch(config.watch, model, work.feed, sampler)
    with nullcontext() if config.shard else fabric.rank_zero_first():
        # The first process puts a damaged one aside, before the others look; or all read together.
        saved = checkpoints.load_last()
    if saved is not None:
        work.restore(saved)
    if work.writes:
        clear_leftovers(folder)
        (folder / "failure.json").unlink(missing_ok=True)
        write_json(folder / "config.json", config.to_dict())
        write_json(folder / "data.json", described)
        write_json(folder / "environment.json", around)
        used = {"index": training.index, "labels": training.labels}
        write_tensors(folder / "subset.safetensors", used)
        write_lines(folder / "metrics.jsonl", work.history)
    return work


def _train_epoch(work: _Work) -> None:
    """All batches of an epoch, or those that are left of it."""
    step, sampler, config = work.step, work.sampler, work.config
    look = 1 if work.fabric.device.type == "cpu" else _LOOK
    began = time.perf_counter() - work.seconds
    work.model.train()
    sampler.load_state_dict({"epoch": work.epoch, "position": work.position})
    for batch in work.feed(sampler.whole(), rank=sampler.rank, world_size=sampler.world_size):
        step.set_rate(work.rate(work.steps))
        step(batch, epoch=work.epoch, step=work.steps)
        work.steps += 1
        work.position += 1
        if work.steps % look == 0:
            _stop_if_not_finite(work)
            work.seconds = time.perf_counter() - began
            values, _ = step.means()
            values["images_per_second"] = float(step.sums[0]) / work.seconds
            work.progress.step(epoch=work.epoch + 1, step=work.position, values=values)
        if config.save_steps and work.steps % config.save_steps == 0:
            work.seconds = time.perf_counter() - began
            work.save()
    _stop_if_not_finite(work)
    work.seconds = time.perf_counter() - began
    sound = all(bool(torch.isfinite(weight).all()) for weight in work.model.parameters())
    if RankGroup().all_gather_ints(sound=sound)["sound"].count(0):
        raise _broken(work, "weights")


def _close_epoch(work: _Work) -> None:
    """Measure, write down, save."""
    config, model, folder = work.config, work.model, work.folder
    head = model.criterion.head
    last = work.epoch + 1 == config.epochs
    tested = last or (work.epoch + 1) % config.evaluate_every == 0
    measured, terms = work.step.means()
    row: dict[str, Any] = {
        "epoch": work.epoch + 1,
        "step": work.steps,
        "lr": work.rate(work.steps - 1),
        "train": measured,
        "terms": terms,
        "prototypes": measure_prototypes(head, margin=tested and head.num_classes <= MEASURED),
    }
    if tested:
        work.outcomes = _evaluate(work)
        row |= {name: outcome.measures for name, outcome in work.outcomes.items()}
    if work.watched is not None:
        row["gradients"] = work.watched()
    rate = float(work.step.sums[0]) / work.seconds
    timing = {"seconds": work.seconds, "images_per_second": rate, "ended": time.time()}
    work.timing.append({"epoch": work.epoch + 1, **timing})
    work.history.append(row)
    work.step.sums.zero_()
    work.epoch, work.position, work.seconds = work.epoch + 1, 0, 0.0
    if work.fabric.loggers:
        groups = {name: values for name, values in row.items() if isinstance(values, dict)}
        flat = {f"{group}/{name}": v for group, each in groups.items() for name, v in each.items()}
        work.fabric.log_dict(flat, step=work.steps)
    work.progress.epoch(row, images_per_second=rate)
    if _is_best(row, work) and work.saves:
        work.checkpoints.save("best", work.steps, {"model": model.state_dict()})
    if work.writes:
        write_lines(folder / "metrics.jsonl", work.history)
        write_lines(folder / "timing.jsonl", work.timing)
    if last or work.epoch % config.save_every == 0:
        work.save()


def _conclude(work: _Work) -> None:
    """Take the epoch that is to be kept, measure it and write down what came of it."""
    chosen, row = "last epoch", work.history[-1]
    if work.best is not None and work.best[1] != work.steps:
        best = work.checkpoints.load_best(work.best[1])
        if best is None:
            chosen = "last epoch, as the checkpoint of the best one is missing or damaged"
            work.progress.say(f"{work.folder}: the {chosen}")
        else:
            work.model.load_state_dict(best["model"])
            row = next(row for row in work.history if row["step"] == work.best[1])
            work.outcomes = {}
    if row["step"] == (work.best or (0.0, 0))[1]:
        chosen = "best epoch on the validation images"
    outcomes = work.outcomes or _evaluate(work)
    work.model.criterion.head = gather_head(work.model.criterion.head)
    if work.writes:
        testing = work.tests["test"].images
        finish(work.folder, work.model, testing, outcomes, row, chosen=chosen)
    work.fabric.barrier()


def _evaluate(work: _Work) -> dict[str, Outcome]:
    """What the model makes of the images it is not trained on."""
    outcomes = {
        name: evaluate(work.fabric, work.model, source) for name, source in work.tests.items()
    }
    for name, outcome in outcomes.items():
        if not bool(torch.isfinite(outcome.features).all()):
            raise _broken(work, f"features of the {name} images")
    return outcomes


def _is_best(row: dict[str, Any], work: _Work) -> bool:
    """Whether no epoch before did better on the validation images; if so, it is noted."""
    if "validation" not in row:
        return False
    accuracy = row["validation"]["accuracy"]
    if work.best is not None and accuracy <= work.best[0]:
        return False
    work.best = (accuracy, work.steps)
    return True


def _stop_if_not_finite(work: _Work) -> None:
    """Stop where a loss was not finite, and say at which step, in which term, on which images."""
    fault = work.step.fault_found()
    if fault is None:
        return
    number, terms = fault
    epoch, position = divmod(number, len(work.sampler))
    batch = work.feed.images.index[work.sampler.draw(epoch)(position)].tolist()
    named = ", ".join(terms) or "the sum"
    message = (
        f"the loss was not finite at step {number + 1}, epoch {epoch + 1}, in {named}; the last "
        f"checkpoint is from before it, and failure.json in {work.folder} names the images"
    )
    where = {"step": number + 1, "epoch": epoch + 1, "terms": terms, "batch": batch}
    raise _failed(work.folder, work.writes, "not finite", message, **where)


def _broken(work: _Work, what: str) -> TrainingError:
    """The last step has left something that is not finite."""
    message = (
        f"the {what} are not finite after step {work.steps}, epoch {work.epoch + 1}, though the "
        "loss was; the last checkpoint is from before it"
    )
    where = {"step": work.steps, "epoch": work.epoch + 1}
    return _failed(work.folder, work.writes, "not finite", message, **where)


def _failed(folder: Path, writes: bool, kind: str, message: str, **known: Any) -> TrainingError:
    """Write down why a run stops; what comes back is to be raised."""
    if writes:
        write_json(folder / "failure.json", {"kind": kind, "message": message, **known})
    return TrainingError(message)
