"""Health checks of a run (looks): before the first step, after the first epochs, at the end."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from tammes.doctor import Diagnosis, check_muted, diagnose
from tammes.lab.config.schema import Config
from tammes.lab.data.samplers import BatchSampler
from tammes.lab.records.run_folder import RecordError, Run, write_json
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.model import Model, load_model
from tammes.lab.training.step import make_optimizer

_EARLY = (0, 1, 2)
"""Numbers of finished epochs at which to look, besides the last."""
_ROWS = 256
"""Largest number of images that a look passes through the network."""
_TRIAL, _TRIAL_ROWS = 2, 128
"""Trial steps before the first step, and the largest number of images in them."""


@dataclass(kw_only=True)
class HealthLooks:
    """Diagnoses a run during training and records the findings in ``health.json``.

    A look passes the first batch of the sampler through the network in training mode, and leaves
    weights, running statistics, gradients and random state unchanged. Only rank 0 looks, and never
    at a sharded head, whose classes are not all in one process. A resumed run repeats the looks
    after its checkpoint, and catches up on one that was due at it.

    ``rate`` maps a step to its learning rate; recorded looks after ``steps`` finished steps are
    dropped; ``say`` receives each finding once.
    """

    config: Config
    folder: Path
    fabric: Any
    model: Model
    optimizer: torch.optim.Optimizer
    loader: ImageLoader
    sampler: BatchSampler
    rate: Callable[[int], float]
    steps: int
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.muted = muted_names(self.config.mute)
        run = Run(self.folder)
        self.looks = [look for look in run.health if look["step"] <= self.steps]
        self.seconds = run.look_seconds

    def due(self, epoch: int) -> bool:
        """Whether this process looks at the run after ``epoch`` epochs."""
        looks = self.fabric.is_global_zero and not self.model.criterion.head.is_sharded
        done = any(look["epoch"] == epoch for look in self.looks)
        return looks and not done and epoch in (*_EARLY, self.config.epochs)

    def look(self, epoch: int, step: int, history: Sequence[dict[str, Any]]) -> None:
        """Look at the run after these finished epochs and steps, if a look is due."""
        if not self.due(epoch) or step != epoch * len(self.sampler):
            # A run that resumes in mid-epoch has had this look before.
            return
        began = time.perf_counter()
        first = [look["measured"]["loss"] for look in self.looks if look["epoch"] == 0]
        losses = [*first, *(row["train"]["loss"] for row in history)]
        devices = [self.fabric.device] if self.fabric.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), _untuned_convolutions():
            features, labels = self._features()
            diagnosis = diagnose(
                self.model.criterion,
                features,
                labels,
                optimizer=self.optimizer,
                losses=[loss for loss in losses if loss is not None],
                counts=self.loader.images.counts(),
                lr=self.rate(step),
                steps=step,
                trial=self._trial() if epoch == 0 else (),
                mute=self.muted,
            )
        self._report(epoch, diagnosis)
        self.looks.append({"epoch": epoch, "step": step, **diagnosis.to_dict()})
        # Reading the diagnosis has synchronised with the device, so this is the whole time.
        self.seconds[str(epoch)] = round(time.perf_counter() - began, 4)
        write_json(self.folder / "look_seconds.json", self.seconds)
        write_json(self.folder / "health.json", {"looks": self.looks})

    def _report(self, epoch: int, diagnosis: Diagnosis) -> None:
        known = {finding["name"] for look in self.looks for finding in look["findings"]}
        for finding in diagnosis.findings:
            if finding.name not in known:
                self.say(f"doctor, {moment(epoch, self.config.epochs)}: {finding}")

    def _batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        rank, world_size = self.sampler.rank, self.sampler.world_size
        positions = self.sampler.draw(0)(0)[: rows * world_size]
        (batch,) = self.loader([positions], rank=rank, world_size=world_size)
        return batch

    def _features(self) -> tuple[Tensor, Tensor]:
        """Compute features in training mode, on copies of the running statistics."""
        pixels, labels, index = self._batch(_ROWS)
        model, backbone = self.model, self.model.backbone
        was_training = model.training
        model.train()
        buffers = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
        with torch.no_grad(), self.fabric.autocast():
            images = model.images(pixels, index, 0)
            features: Tensor = functional_call(backbone, buffers, (images,))
        model.train(was_training)
        return features.float(), labels

    def _trial(self) -> list[float]:
        """Train a copy of the model for a few steps; return the losses before and after each."""
        if self.fabric.world_size > 1 or self.config.precision == "fp16":
            # A trial on rank 0 has no other processes, and no gradient scaler.
            return []
        parts = (self.model.backbone, self.model.criterion)
        channels_last = self.model.channels_last
        losses = []
        try:
            model = Model(self.model.augment, *copy.deepcopy(parts), channels_last=channels_last)
            optimizer = make_optimizer(model, self.config, self.fabric.device, graphs=False)
            batch = self._batch(_TRIAL_ROWS)
            for step in range(_TRIAL + 1):
                with self.fabric.autocast():
                    loss, _ = model(*batch, 0)
                losses.append(float(loss.detach()))
                if step == _TRIAL:
                    break
                optimizer.zero_grad()
                loss.backward()
                if self.config.clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.clip)
                for group in optimizer.param_groups:
                    ratio = group.setdefault("ratio", group["lr"] / self.config.lr)
                    group["lr"] = self.rate(step) * ratio
                optimizer.step()
        except torch.OutOfMemoryError:
            return []
        return losses


@contextlib.contextmanager
def _untuned_convolutions() -> Iterator[None]:
    """Turn off cuDNN's benchmark mode, which takes seconds, for the few batches of a look."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def moment(epoch: int, epochs: int) -> str:
    """Say when a look was taken.

    Example:
        >>> moment(0, 20), moment(2, 20), moment(20, 20)
        ('before the first step', 'after epoch 2', 'at the end')
    """
    if epoch == epochs:
        return "at the end"
    return "before the first step" if epoch == 0 else f"after epoch {epoch}"


def first_findings(looks: Iterable[Mapping[str, Any]], epochs: int) -> dict[str, dict[str, Any]]:
    """Return the findings of looks by name, each with the moment ``when`` it was first found."""
    found: dict[str, dict[str, Any]] = {}
    for look in looks:
        for finding in look["findings"]:
            found.setdefault(finding["name"], {"when": moment(look["epoch"], epochs), **finding})
    return found


def muted_names(text: str) -> tuple[str, ...]:
    """Parse the comma-separated names of checks to mute.

    Example:
        >>> muted_names("scale-small, learning-rate")
        ('scale-small', 'learning-rate')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    check_muted("mute", names)
    return names


def diagnose_run(run: Run, muted: Sequence[str] = ()) -> Diagnosis:
    """Diagnose the model of a finished run on features of its test images."""
    if run.config.identities:
        raise RecordError(
            f"{run.folder}: test images of trained classes are expected, got identities that were "
            "not trained; its health.json has the findings during training"
        )
    criterion = load_model(run).criterion
    embeddings = run.tensors("embeddings")
    chosen = torch.linspace(0, len(embeddings["labels"]) - 1, 2 * _ROWS).long().unique()
    return diagnose(
        criterion,
        embeddings["features"][chosen],
        embeddings["labels"][chosen],
        losses=[row["train"]["loss"] for row in run.metrics],
        steps=run.final["step"],
        counts=run.data["counts"],
        # The training batches are not known.
        company=1.0,
        mute=muted,
    )
