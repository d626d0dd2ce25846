"""Train one model, from its configuration to a finished run folder.

Start reading at :func:`train`, which has all stages of a run. An interrupted run resumes from its
last checkpoint and ends with the same weights and records as an uninterrupted one, but for the
rounding of metrics where batches are measured together: data order and augmentation are keyed by
seed, epoch and image, dropout by seed and step, and everything else is in the checkpoint.
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
from tammes.lab.data.identities.identity_protocol import IdentityProtocol
from tammes.lab.data.samplers import BatchSampler
from tammes.lab.data.sources.loading import identity_protocol
from tammes.lab.fewshot.epoch_selection import ValidationEpisodes, parse_selection
from tammes.lab.measure.classification import MEASURED, classifies, measure_prototypes
from tammes.lab.records.atomic_io import clear_leftovers, locked
from tammes.lab.records.run_folder import (
    Run,
    check_same_data,
    holds_run,
    write_json,
    write_lines,
    write_tensors,
)
from tammes.lab.training.check_expressions import check_expressions
from tammes.lab.training.checkpoints import Checkpoints, ShardedCheckpoints
from tammes.lab.training.datasets import describe_data, make_sampler, prepare_data
from tammes.lab.training.evaluation import Evaluation, evaluate, gather_features, write_results
from tammes.lab.training.fabric import launch, uses_graphs
from tammes.lab.training.fine_tuning import start_from
from tammes.lab.training.gradient_angles import GradientAngles
from tammes.lab.training.health import HealthLooks
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.lr_schedules import learning_rate
from tammes.lab.training.model import Model, build_model, with_recorded_head
from tammes.lab.training.progress import Progress
from tammes.lab.training.provenance import environment
from tammes.lab.training.sharded_head import exclude_from_ddp, gather_head
from tammes.lab.training.step import Step, make_optimizer
from tammes.metrics.functional import subcenter_usage

_CHECK_EVERY = {"cpu": 1, "cuda": 50}
"""Steps between two checks of the loss; each check synchronises with the device."""


class TrainingError(ValueError):
    """Training stopped; the message is one sentence, and the last checkpoint is kept."""


def train(
    config: Config, folder: str | os.PathLike[str], *, progress: Progress | None = None
) -> Run:
    """Train a model and write its run folder, or resume an interrupted run.

    Args:
        config: configuration of the run.
        folder: run folder; a finished run in it is returned unchanged.
        progress: receives the progress of the run.

    Returns:
        The finished run.

    Raises:
        TrainingError: a loss was not finite, or memory ran out. ``failure.json`` has the details.
        ValueError: the configuration is invalid.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     run = train(Config(data="digits", loss="cosface()", epochs=2), folder)
        ...     print(run.status, run.final["epoch"])
        done 2
    """
    folder = Path(folder)
    run = Run(folder)
    if holds_run(run, config) and run.status == "done":
        if progress is not None:
            progress.say(f"{folder}: already finished, nothing to train")
        return run
    check_expressions(config)
    before = torch.are_deterministic_algorithms_enabled()
    fabric = launch(config, folder)
    first = fabric.is_global_zero
    progress = progress if progress is not None and first else Progress()
    try:
        with locked(folder, "another process is training this run") if first else nullcontext():
            work = _set_up(fabric, config, folder, progress)
            progress.begin(epochs=config.epochs, steps=len(work.sampler), done=work.epoch)
            while work.epoch < config.epochs:
                _train_epoch(work)
                _end_epoch(work)
            _finish(work)
    except torch.OutOfMemoryError as error:
        message = (
            "the GPU ran out of memory; try a smaller batch_size or precision bf16 "
            f"({str(error).split('. ')[0]})"
        )
        raise _failed(folder, first, "out of memory", message) from error
    finally:
        progress.end()
        torch.use_deterministic_algorithms(before)
    return Run(folder)


@dataclass(kw_only=True)
class _TrainingState:
    """The objects of a run, and how far training has come.

    Attributes:
        rate: maps a step to its learning rate.
        loader: training images.
        eval_loaders: test images, and validation images if there are any.
        selection: few-shot episodes that select the epoch to keep, and the images they draw from.
        saved: time of the last checkpoint.
        epoch: finished epochs.
        position: finished batches of the current epoch.
        steps: finished batches in all.
        seconds: time spent on the current epoch.
        history: lines of ``metrics.jsonl``.
        best: validation accuracy and step of the best epoch so far.
        evaluations: results of the last evaluated epoch.
        protocol: how test images are compared, if their identities are not training classes.
    """

    fabric: Any
    config: Config
    folder: Path
    progress: Progress
    sampler: BatchSampler
    rate: Callable[[int], float]
    model: Model
    optimizer: torch.optim.Optimizer
    step: Step
    loader: ImageLoader
    eval_loaders: dict[str, ImageLoader]
    checkpoints: Checkpoints | ShardedCheckpoints
    selection: tuple[ValidationEpisodes, ImageLoader] | None = None
    health: HealthLooks | None = None
    saved: float = 0.0
    epoch: int = 0
    position: int = 0
    steps: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    timing: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, int] | None = None
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    gradient_angles: GradientAngles | None = None
    protocol: IdentityProtocol | None = None

    @property
    def writes(self) -> bool:
        """Whether this process writes the run folder."""
        return bool(self.fabric.is_global_zero)

    @property
    def saves(self) -> bool:
        """Whether this process saves checkpoints: rank 0, or every rank of a sharded head."""
        return self.writes or self.config.shard

    def save(self) -> None:
        """Write a checkpoint, after checking that the loss is finite."""
        _stop_if_not_finite(self)
        if self.saves:
            self.checkpoints.save("last", self.steps, self.snapshot())
            self.checkpoints.keep_best(None if self.best is None else self.best[1])
        self.saved = time.monotonic()
        self.fabric.barrier()

    def is_due(self) -> bool:
        """Whether ``save_seconds`` have passed since the last save, by the clock of rank 0."""
        if not self.config.save_seconds:
            return False
        due = time.monotonic() - self.saved >= self.config.save_seconds
        return bool(RankGroup().all_gather_ints(due=due)["due"][0])

    def snapshot(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "steps": self.steps,
            "seconds": self.seconds,
            "sums": self.step.sums.read(),
            "history": json.dumps(self.history),
            "timing": json.dumps(self.timing),
            "best": self.best,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Resume from the content of a checkpoint."""
        self.model.load_state_dict(saved["model"])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if saved["optimizer"] is not None:
            self.optimizer.load_state_dict(saved["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            # A CUDA graph reads the rate from this tensor; its value is set before every step.
            group["lr"] = rate
        self.fabric.strategy.precision.load_state_dict(saved["precision"])
        self.step.sums.restore(saved["sums"])
        self.history, self.timing = json.loads(saved["history"]), json.loads(saved["timing"])
        self.epoch, self.position, self.steps = (saved[k] for k in ("epoch", "position", "steps"))
        self.seconds = saved["seconds"]
        self.best = None if saved["best"] is None else tuple(saved["best"])
        self.progress.say(
            f"{self.folder}: resuming at epoch {self.epoch + 1}, step {self.steps + 1}"
        )


def _set_up(fabric: Any, config: Config, folder: Path, progress: Progress) -> _TrainingState:
    """Prepare data, model, optimizer and folder; resume from a checkpoint if there is one."""
    with fabric.rank_zero_first(local=True):
        # One process decodes the images; the others read them from the cache.
        sets = training, held_out, testing = prepare_data(config, progress.say)
    described = describe_data(*sets, whole=config.whole, identities=config.identities)
    check_same_data(Run(folder), described)
    sampler = make_sampler(config, training, rank=fabric.global_rank, world_size=fabric.world_size)
    rate = learning_rate(config, len(sampler))
    built_as = with_recorded_head(config, Run(folder))
    parts = build_model(built_as, training, steps_per_epoch=len(sampler))
    model = parts.model
    # Prototypes of an earlier run may classify.
    if not (config.identities or config.start or classifies(model.criterion.loss)):
        progress.say(
            f"{config.loss}: no term classifies, so accuracies are about those of guessing; "
            "add one that does, such as softmax(), or test by --identities"
        )
    if model.needs_batches and sampler.batch_size < 2 * fabric.world_size:
        raise ValueError(
            f"{parts.backbone} uses batch normalisation and expects 2 images per process in each "
            f"batch, got {sampler.batch_size} on {fabric.world_size}; norm='group' has no limit"
        )
    if fabric.device.type == "cuda":
        # Convolutions on a GPU are faster with channels last.
        model.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.channels_last = True
    graphs = uses_graphs(config, fabric)
    optimizer = make_optimizer(model.to(fabric.device), config, fabric.device, graphs=graphs)
    if config.shard:
        exclude_from_ddp(model, model.criterion.head)
    # With one process this is the model itself. Wrappers of fabric.setup() would convert all inputs
    # and outputs in every step.
    module: Any = fabric.strategy.setup_module(model)
    if config.compile and graphs:
        model.compile_backbone(sampler.batch_size)
    elif config.compile:
        module = torch.compile(module, dynamic=False)
    provenance = environment(fabric.device, fabric.world_size) | parts.described()

    def without_graphs(reason: str) -> None:
        progress.say(reason)
        # CUDA graphs run in a single process, so this is the one that writes the folder.
        write_json(folder / "environment.json", provenance | {"graphs": reason})

    step = Step(
        fabric=fabric,
        module=module,
        model=model,
        optimizer=optimizer,
        config=config,
        graphs=graphs,
        report=without_graphs,
    )

    def loader(images: Any) -> ImageLoader:
        return ImageLoader(images, fabric.device, workers=config.workers)

    eval_loaders = {"test": loader(testing)}
    if held_out is not None:
        eval_loaders = {"validation": loader(held_out), **eval_loaders}
    selection = None
    if chosen := parse_selection(config.select_epoch):
        with fabric.rank_zero_first(local=True):
            selection = chosen, loader(chosen.load_images(config, training, progress.say))
    saves, say = folder / "checkpoints", progress.say
    checkpoints: Checkpoints | ShardedCheckpoints = Checkpoints(saves, say)
    if config.shard:
        checkpoints = ShardedCheckpoints(saves, model.criterion, optimizer, say)
    work = _TrainingState(
        fabric=fabric,
        config=config,
        folder=folder,
        progress=progress,
        sampler=sampler,
        rate=rate,
        model=model,
        optimizer=optimizer,
        step=step,
        loader=loader(training),
        eval_loaders=eval_loaders,
        checkpoints=checkpoints,
        selection=selection,
        saved=time.monotonic(),
    )
    if config.identities:
        work.protocol = identity_protocol(config.test or config.data, testing)
    if config.watch:
        work.gradient_angles = GradientAngles(model, work.loader, sampler)
    with nullcontext() if config.shard else fabric.rank_zero_first():
        # Rank 0 renames damaged checkpoints before the others read; sharded ones load collectively.
        saved = checkpoints.load_last()
    if saved is not None:
        work.restore(saved)
    elif config.start:
        start_from(model, Run(Path(config.start).expanduser()), described["classes"])
    if work.writes:
        clear_leftovers(folder)
        (folder / "failure.json").unlink(missing_ok=True)
        write_json(folder / "config.json", config.to_dict())
        write_json(folder / "data.json", described)
        write_json(folder / "environment.json", provenance)
        used = {"index": training.index, "labels": training.labels}
        write_tensors(folder / "subset.safetensors", used)
        write_lines(folder / "metrics.jsonl", work.history)
    work.health = HealthLooks(
        config=config,
        folder=folder,
        fabric=fabric,
        model=model,
        optimizer=optimizer,
        loader=work.loader,
        sampler=sampler,
        rate=rate,
        steps=work.steps,
        say=progress.say,
    )
    work.health.look(work.epoch, work.steps, work.history)
    return work


def _train_epoch(work: _TrainingState) -> None:
    """Train on the remaining batches of the epoch."""
    step, sampler, config = work.step, work.sampler, work.config
    check_every = _CHECK_EVERY[work.fabric.device.type]
    began = time.perf_counter() - work.seconds
    work.model.train()
    sampler.load_state_dict({"epoch": work.epoch, "position": work.position})
    batches = work.loader(
        sampler.global_batches(), rank=sampler.rank, world_size=sampler.world_size
    )
    if work.loader.pixels is not None:
        # Images that are read from files are augmented as they come.
        batches = step.augmented(batches, work.epoch)
    for batch in batches:
        due = False
        step.set_rate(work.rate(work.steps))
        step(batch, epoch=work.epoch, step=work.steps)
        work.steps += 1
        work.position += 1
        if work.steps % check_every == 0:
            _stop_if_not_finite(work)
            work.seconds = time.perf_counter() - began
            values, _ = step.sums.means()
            values["images_per_second"] = step.sums.read()[0] / work.seconds
            work.progress.step(epoch=work.epoch + 1, step=work.position, values=values)
            due = work.is_due()
        if due or (config.save_steps and work.steps % config.save_steps == 0):
            work.seconds = time.perf_counter() - began
            work.save()
    _stop_if_not_finite(work)
    work.seconds = time.perf_counter() - began
    sound = all(bool(torch.isfinite(weight).all()) for weight in work.model.parameters())
    if RankGroup().all_gather_ints(sound=sound)["sound"].count(0):
        raise _not_finite(work, "weights")


def _end_epoch(work: _TrainingState) -> None:
    """Evaluate, write the metrics of the epoch and save a checkpoint, where due."""
    config, model, folder = work.config, work.model, work.folder
    head = model.criterion.head
    last = work.epoch + 1 == config.epochs
    tested = last or (work.epoch + 1) % config.evaluate_every == 0
    measured, terms = work.step.sums.means()
    row: dict[str, Any] = {
        "epoch": work.epoch + 1,
        "step": work.steps,
        "lr": work.rate(work.steps - 1),
        "train": measured,
        "terms": terms,
        "prototypes": measure_prototypes(head, margin=tested and head.num_classes <= MEASURED),
    }
    if tested:
        work.evaluations = _evaluate(work)
        row |= {name: result.measures for name, result in work.evaluations.items()}
        if work.selection is not None:
            row["fewshot"] = _select(work, *work.selection)
    if work.gradient_angles is not None:
        row["gradients"] = work.gradient_angles()
    rate = work.step.sums.read()[0] / work.seconds
    timing = {"seconds": work.seconds, "images_per_second": rate, "ended": time.time()}
    work.timing.append({"epoch": work.epoch + 1, **timing})
    work.history.append(row)
    work.step.sums.reset()
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
    if work.health is not None:
        work.health.look(work.epoch, work.steps, work.history)


def _finish(work: _TrainingState) -> None:
    """Choose the epoch to keep, evaluate it and write the results."""
    chosen, row = "last epoch", work.history[-1]
    if work.best is not None and work.best[1] != work.steps:
        best = work.checkpoints.load_best(work.best[1])
        if best is None:
            chosen = "last epoch, because the checkpoint of the best one is missing or damaged"
            work.progress.say(f"{work.folder}: keeping the {chosen}")
        else:
            work.model.load_state_dict(best["model"])
            row = next(row for row in work.history if row["step"] == work.best[1])
            work.evaluations = {}
    if row["step"] == (work.best or (0.0, 0))[1]:
        kind = "images" if work.selection is None else "classes, in few-shot episodes"
        chosen = f"best epoch on the validation {kind}"
    evaluations = work.evaluations or _evaluate(work)
    head = work.model.criterion.head = gather_head(work.model.criterion.head)
    usage = None
    if head.similarity.centers > 1:
        features = gather_features(work.fabric, work.model, work.loader)
        usage = subcenter_usage(features, work.loader.labels, head.weight)
    if work.writes:
        testing = work.eval_loaders["test"].images
        counts = work.loader.images.counts()
        write_results(
            work.folder,
            work.model,
            testing,
            evaluations,
            row,
            chosen=chosen,
            counts=counts,
            usage=usage,
        )
    work.fabric.barrier()


def _evaluate(work: _TrainingState) -> dict[str, Evaluation]:
    """Evaluate the model on the validation and test images."""
    config = work.config
    evaluations = {
        name: evaluate(
            work.fabric,
            work.model,
            loader,
            flip=config.flip_test,
            protocol=work.protocol if name == "test" else None,
        )
        for name, loader in work.eval_loaders.items()
    }
    for name, result in evaluations.items():
        if not bool(torch.isfinite(result.features).all()):
            raise _not_finite(work, f"features of the {name} images")
    return evaluations


def _select(
    work: _TrainingState, episodes: ValidationEpisodes, loader: ImageLoader
) -> dict[str, float]:
    """Measure the few-shot accuracy that selects the epoch, as an entry of ``metrics.jsonl``."""

    def features(loader: ImageLoader) -> torch.Tensor:
        return gather_features(work.fabric, work.model, loader, projected=False)

    base_mean = features(work.loader).mean(0) if episodes.needs_base_mean else None
    return {"accuracy": episodes.accuracy(features(loader), loader.images, base_mean)}


def _is_best(row: dict[str, Any], work: _TrainingState) -> bool:
    """Whether this is the best epoch on validation images or classes so far; records it if so."""
    measured = row.get("validation" if work.selection is None else "fewshot")
    if measured is None:
        return False
    accuracy = measured["accuracy"]
    if work.best is not None and accuracy <= work.best[0]:
        return False
    work.best = (accuracy, work.steps)
    return True


def _stop_if_not_finite(work: _TrainingState) -> None:
    """Raise if a loss was not finite, and report its step, terms and images."""
    nonfinite = work.step.sums.first_nonfinite()
    if nonfinite is None:
        return
    number, terms = nonfinite
    epoch, position = divmod(number, len(work.sampler))
    batch = work.loader.images.index[work.sampler.draw(epoch)(position)].tolist()
    names = ", ".join(terms) or "the sum"
    message = (
        f"the loss was not finite at step {number + 1}, epoch {epoch + 1}, in {names}; the last "
        f"checkpoint is from before it, and failure.json in {work.folder} lists the images"
    )
    where = {"step": number + 1, "epoch": epoch + 1, "terms": terms, "batch": batch}
    raise _failed(work.folder, work.writes, "not finite", message, **where)


def _not_finite(work: _TrainingState, what: str) -> TrainingError:
    """Return the error for weights or features that are not finite after a finite loss."""
    message = (
        f"the {what} are not finite after step {work.steps}, epoch {work.epoch + 1}, though the "
        "loss was; the last checkpoint is from before it"
    )
    where = {"step": work.steps, "epoch": work.epoch + 1}
    return _failed(work.folder, work.writes, "not finite", message, **where)


def _failed(folder: Path, writes: bool, kind: str, message: str, **known: Any) -> TrainingError:
    """Write ``failure.json`` and return the error to raise."""
    if writes:
        write_json(folder / "failure.json", {"kind": kind, "message": message, **known})
    return TrainingError(message)
