"""Train one model: data, network, criterion, a loop, a record.

Read it from top to bottom: :func:`_train` is the whole course of a run. A run that was interrupted,
however roughly, goes on from its last checkpoint and ends in the same weights and the same record
as one that was not: order and augmentation are keyed by seed, epoch and image, dropout by seed and
step, and everything else is in the checkpoint.
"""

import json
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tammes.lab.atomic import alone
from tammes.lab.config import Config
from tammes.lab.data import Images
from tammes.lab.data.samplers import TABLE as SAMPLERS
from tammes.lab.expression import build
from tammes.lab.protocols.classification import measure_prototypes
from tammes.lab.record import RecordError, Run, write_json, write_lines, write_tensors
from tammes.lab.training.checkpoint import Checkpoints
from tammes.lab.training.environment import environment
from tammes.lab.training.feed import Feed
from tammes.lab.training.machine import gather_rows, start, uses_graphs
from tammes.lab.training.model import Model, build_model
from tammes.lab.training.outcome import Outcome, evaluate, finish
from tammes.lab.training.preparation import describe_data, prepare_data
from tammes.lab.training.progress import Progress
from tammes.lab.training.rates import learning_rate
from tammes.lab.training.step import Step, make_optimizer

_LOOK = 50
"""Steps between two looks at what a GPU has done; each one waits for it."""


class TrainingError(ValueError):
    """Training cannot go on; the message is one sentence, and the last checkpoint is kept."""


@dataclass
class State:
    """Where a run is; with the weights, all that a checkpoint holds.

    Attributes:
        epoch: epochs that are over.
        position: batches of the current epoch that are over.
        step: batches that are over in all.
        sums: what was seen in the current epoch.
        history: lines of ``metrics.jsonl``.
        best: accuracy on the validation images and step of the best epoch so far.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    sums: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, int] | None = None


def train(config: Config, folder: Path, *, progress: Progress | None = None) -> Run:
    """Train a model and write its record, or go on with one that was interrupted.

    Args:
        config: of the run.
        folder: of its record; a finished run there is returned as it is.
        progress: is told how far it is.

    Returns:
        The finished run.

    Raises:
        TrainingError: a loss was not finite. ``failure.json`` says where.
        ValueError: something in the configuration cannot be.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     run = train(Config(data="digits", loss="cosface()", epochs=2), Path(folder))
        ...     print(run.status, run.final["epoch"])
        done 2
    """
    progress, run = progress or Progress(), Run(folder)
    if _same_run(run, config) and run.status == "done":
        return run
    fabric = start(config, folder)
    first = fabric.is_global_zero
    with alone(folder, "another process is training this run") if first else nullcontext():
        try:
            _train(fabric, config, folder, progress if first else Progress())
        except torch.OutOfMemoryError as error:
            raise _failed(
                folder,
                "out of memory",
                "the GPU has too little memory for this run; a smaller batch_size or "
                f"precision bf16 may do ({str(error).split('. ')[0]})",
            ) from error
    return Run(folder)


def _train(fabric: Any, config: Config, folder: Path, progress: Progress) -> None:
    """The course of a run, from its data to its record."""
    training, held_out, testing = prepare_data(config, progress.say)
    sampler = build(
        config.sampler,
        SAMPLERS,
        what="sampler",
        labels=training.labels,
        batch_size=config.batch_size,
        seed=config.seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    rate = learning_rate(config, len(sampler))
    parts = build_model(config, training, steps_per_epoch=len(sampler))
    model = parts.model
    if fabric.world_size > 1:
        model.gather = gather_rows(fabric)
    if fabric.device.type == "cuda":
        # Convolutions on a GPU are faster with the channels last.
        model.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.channels_last = True
    graphs = uses_graphs(config, fabric)
    optimizer: Any = make_optimizer(model.to(fabric.device), config, fabric.device, graphs=graphs)
    module: Any = torch.compile(model, dynamic=False) if config.compile else model
    module, optimizer = fabric.setup(module, optimizer)
    step = Step(fabric, module, model, optimizer, config, graphs=graphs, report=progress.say)

    checkpoints = Checkpoints(folder / "checkpoints", progress.say)
    with fabric.rank_zero_first():
        # The first process puts a damaged one aside, before the others look.
        saved = checkpoints.load_last()
    state = _restore(saved, fabric, model, optimizer, step)
    if fabric.is_global_zero:
        (folder / "failure.json").unlink(missing_ok=True)
        write_json(folder / "config.json", config.to_dict())
        write_json(folder / "data.json", describe_data(training, held_out, testing))
        around = environment(fabric.device, fabric.world_size)
        write_json(folder / "environment.json", around | parts.described())
        used = {"index": training.index, "labels": training.labels}
        write_tensors(folder / "subset.safetensors", used)
        write_lines(folder / "metrics.jsonl", state.history)
    timing = [row for row in Run(folder).timing if row["epoch"] <= state.epoch]
    if state.step:
        progress.say(f"{folder}: going on at epoch {state.epoch + 1}, step {state.step + 1}")

    def save() -> None:
        _stop_if_not_finite(step, sampler, training, folder)
        if fabric.is_global_zero:
            checkpoints.save("last", state.step, _snapshot(state, fabric, model, optimizer, step))
            checkpoints.keep_best(None if state.best is None else state.best[1])
        fabric.barrier()

    feed = Feed(training, fabric.device, workers=config.workers)
    feeds = {
        name: Feed(images, fabric.device, workers=config.workers)
        for name, images in (("validation", held_out), ("test", testing))
        if images is not None
    }
    outcomes: dict[str, Outcome] = {}
    look = 1 if fabric.device.type == "cpu" else _LOOK
    length = -(-sampler.batch_size // fabric.world_size) if fabric.world_size > 1 else None
    progress.begin(epochs=config.epochs, steps=len(sampler), done=state.epoch)
    try:
        while state.epoch < config.epochs:
            began, images_before = time.perf_counter(), float(step.sums[0])
            model.train()
            sampler.load_state_dict({"epoch": state.epoch, "position": state.position})
            for batch in feed(sampler, fill=length):
                step.set_rate(rate(state.step))
                step(batch, epoch=state.epoch, step=state.step)
                state.step += 1
                state.position += 1
                if state.step % look == 0:
                    _stop_if_not_finite(step, sampler, training, folder)
                    _show(progress, step, state, began, images_before)
                if config.save_steps and state.step % config.save_steps == 0:
                    save()
            _stop_if_not_finite(step, sampler, training, folder)
            seconds = time.perf_counter() - began
            images = float(step.sums[0]) - images_before

            state.epoch, state.position = state.epoch + 1, 0
            row = _row(step, state, rate(state.step - 1), model)
            last = state.epoch == config.epochs
            if last or state.epoch % config.evaluate_every == 0:
                outcomes = {name: evaluate(fabric, model, each) for name, each in feeds.items()}
                row |= {name: outcome.measures for name, outcome in outcomes.items()}
            state.history.append(row)
            step.sums.zero_()
            timing.append(
                {
                    "epoch": state.epoch,
                    "seconds": seconds,
                    "images_per_second": images / seconds,
                    "ended": time.time(),
                }
            )
            _log(fabric, row, state.step)
            progress.epoch(row, images_per_second=images / seconds)
            if _is_best(row, state) and fabric.is_global_zero:
                checkpoints.save("best", state.step, {"model": model.state_dict()})
            if fabric.is_global_zero:
                write_lines(folder / "metrics.jsonl", state.history)
                write_lines(folder / "timing.jsonl", timing)
            if last or state.epoch % config.save_every == 0:
                save()
    finally:
        progress.end()

    chosen, row = "last epoch", state.history[-1]
    if state.best is not None:
        model.load_state_dict(checkpoints.load_best(state.best[1])["model"])
        chosen = "best epoch on the validation images"
        row = next(row for row in state.history if row["step"] == state.best[1])
    if state.best is not None or not outcomes:
        outcomes = {name: evaluate(fabric, model, each) for name, each in feeds.items()}
    if fabric.is_global_zero:
        finish(folder, model, testing, outcomes, row, chosen=chosen)
    fabric.barrier()


def _same_run(run: Run, config: Config) -> bool:
    """Whether the folder holds a run of this configuration; an error if it holds another."""
    if not (run.folder / "config.json").exists():
        return False
    theirs, ours = run.config.identity(), config.identity()
    for key, value in ours.items():
        if theirs[key] != value:
            raise RecordError(
                f"{run.folder}: holds a run with {key} {theirs[key]!r}, got {value!r}; "
                "give this one a folder of its own"
            )
    return True


def _snapshot(
    state: State, fabric: Any, model: Model, optimizer: Any, step: Step
) -> dict[str, Any]:
    return {
        "epoch": state.epoch,
        "position": state.position,
        "step": state.step,
        "sums": step.sums.tolist(),
        "history": json.dumps(state.history),
        "best": state.best,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "precision": fabric.strategy.precision.state_dict(),
    }


def _restore(
    saved: dict[str, Any] | None, fabric: Any, model: Model, optimizer: Any, step: Step
) -> State:
    if saved is None:
        return State()
    model.load_state_dict(saved["model"])
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(saved["optimizer"])
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        # The rate of a graph stays where it is; its value is set before every step.
        group["lr"] = rate
    fabric.strategy.precision.load_state_dict(saved["precision"])
    step.sums.copy_(torch.tensor(saved["sums"], dtype=torch.double))
    best = None if saved["best"] is None else tuple(saved["best"])
    return State(
        epoch=saved["epoch"],
        position=saved["position"],
        step=saved["step"],
        history=json.loads(saved["history"]),
        best=best,
    )


def _row(step: Step, state: State, rate: float, model: Model) -> dict[str, Any]:
    measured, terms = step.means()
    return {
        "epoch": state.epoch,
        "step": state.step,
        "lr": rate,
        "train": measured,
        "terms": terms,
        "prototypes": measure_prototypes(model.criterion.head),
    }


def _stop_if_not_finite(step: Step, sampler: Any, training: Images, folder: Path) -> None:
    """Stop where a loss was not finite, and say at which step, in which term, on which images."""
    fault = step.fault_found()
    if fault is None:
        return
    number, terms = fault
    epoch, position = divmod(number, len(sampler))
    sampler.load_state_dict({"epoch": epoch, "position": position})
    batch = training.index[next(iter(sampler))].tolist()
    named = ", ".join(terms) or "the sum"
    message = (
        f"the loss was not finite at step {number + 1}, epoch {epoch + 1}, in {named}; the last "
        f"checkpoint is from before it, and failure.json in {folder} names the images of the batch"
    )
    where = {"step": number + 1, "epoch": epoch + 1, "terms": terms, "batch": batch}
    raise _failed(folder, "not finite", message, **where)


def _failed(folder: Path, kind: str, message: str, **known: Any) -> TrainingError:
    """Write down why a run stops; what comes back is to be raised."""
    write_json(folder / "failure.json", {"kind": kind, "message": message, **known})
    return TrainingError(message)


def _show(progress: Progress, step: Step, state: State, began: float, before: float) -> None:
    values, _ = step.means()
    images = float(step.sums[0]) - before
    values["images_per_second"] = images / (time.perf_counter() - began)
    progress.step(epoch=state.epoch + 1, step=state.position, values=values)


def _log(fabric: Any, row: dict[str, Any], step: int) -> None:
    """Hand a line of ``metrics.jsonl`` to the loggers, if there are any."""
    if fabric.loggers:
        fabric.log_dict(
            {
                f"{group}/{name}": value
                for group, values in row.items()
                if isinstance(values, dict)
                for name, value in values.items()
            },
            step=step,
        )


def _is_best(row: dict[str, Any], state: State) -> bool:
    """Whether no epoch before did better on the validation images; if so, it is noted."""
    if "validation" not in row:
        return False
    accuracy = row["validation"]["accuracy"]
    if state.best is not None and accuracy <= state.best[0]:
        return False
    state.best = (accuracy, state.step)
    return True
