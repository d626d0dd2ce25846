"""Configuration of a run, in one flat table: each field is a flag and a YAML key.

Fields with settings of their own are written as calls, such as ``"cosface(margin=0.35)"`` or
``"mnist_cnn(features=3)"``, which :mod:`.expressions` parses without ``eval``.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tammes.advise import defaults
from tammes.lab.config.expressions import normal
from tammes.lab.config.typecheck import as_source, check_names, fit

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["sgd", "adam", "adamw"]
Choice = Literal["auto", "on", "off"]
Accelerator = Literal["auto", "cpu", "cuda"]

_NOT_IN_DIGEST = frozenset(
    {
        "name", "accelerator", "memory", "workers", "save_every", "save_steps", "save_seconds",
        "loggers", "mute",
    }
)  # fmt: skip
"""Fields that do not affect the result of a run."""
_ADDED_LATER: dict[str, Any] = {
    "limit": 0,
    "classes": "",
    "whole": False,
    "watch": "",
    "identities": False,
    "image_width": None,
    "flip_test": False,
    "start": "",
    "projection": 0,
    "select_epoch": "",
}
"""Fields added after digests were in use, with their neutral values: a field at its neutral value
leaves the digest unchanged. A new field must be added here."""
_CALLS = (
    "loss", "head", "backbone", "augment", "sampler", "lr_schedule", "imbalance", "noise",
    "select_epoch",
)  # fmt: skip
"""Fields written as calls."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one run.

    Args:
        data: training data: ``digits``, a known name such as ``cifar100``, a folder with one
            subfolder per class, a CSV file of paths and labels, a pattern such as
            ``photos/{label}_*.jpg``, a parquet file or folder, or a name on the Hugging Face hub.
        test: test data, if they are not a partition of ``data``.
        classes: restrict training and testing to one part of class lists, such as
            ``cifar-fs:base``; all classes by default.
        whole: also train on the test partition, as few-shot tables do; test accuracies are then on
            training images.
        identities: test on identities that are not trained classes, by retrieval, verification and
            1:N search; they are a partition ``novel`` or ``test`` of the data.
        image_size: side of the square images in pixels; by default the images' own size.
        image_width: width of images that are not square; ``image_size`` is then their height.
        validation: share of the training images held out to choose the best epoch; with 0 the last
            epoch is kept.
        select_epoch: keep the epoch with the best accuracy in episodes of classes that are not
            trained on, such as ``fewshot('cifar-fs:validation', shot=1, method='l2')``.
        limit: largest number of images per partition, balanced over the classes, for quick trials;
            0 uses all.
        fraction: share of the training images to use, the same for every class.
        imbalance: ``long_tail(100)`` or ``step(10)``: ratio of the largest to the smallest class.
        noise: ``symmetric(0.4)``, ``asymmetric(0.4)`` or ``pair(0.4)``: share of wrong labels in
            every affected class.
        skip_corrupt: skip images that cannot be decoded instead of stopping.
        loss: loss expression, such as ``cosface(margin=0.35) + 0.5*sample_margin()``.
        head: head expression, such as ``cosine(scale=30)``; ``auto`` chooses the head that the loss
            is designed for.
        backbone: network that computes the features; ``auto`` chooses a small one.
        start: folder of a finished run on the same classes whose weights training starts from, as
            in large-margin fine-tuning.
        projection: size of a linear layer between network and head that few-shot evaluation leaves
            out; 0 for none.
        schedules: scheduled settings of the loss, such as ``margin=WarmUp(0, 0.35, epochs=5)``.
        augment: augmentation such as ``pad_crop(4) + flip()``, ``none``, or ``auto``.
        sampler: how batches are drawn: ``random()``, ``balanced()``, ``pk(classes=16, images=4)``
            or ``episodes(way=16, shot=8)`` (with ``repeat=False`` no image comes twice in an
            epoch).
        batch_size: examples per step, summed over all processes.
        epochs: number of training epochs.
        optimizer: ``sgd``, ``adam`` (weight decay added to the gradient) or ``adamw``.
        lr: learning rate of the backbone.
        head_lr: learning rate of the head; by default that of the backbone.
        momentum: momentum of SGD.
        nesterov: use Nesterov momentum with SGD.
        weight_decay: weight decay of all parameters except the bias and scale of the head.
        head_weight_decay: weight decay of the prototypes; by default ``weight_decay``.
        decay_norms: apply weight decay to biases and normalisation layers too.
        lr_schedule: ``cosine()``, ``log(1e-4)``, ``steps([60, 120], 0.2)`` or ``constant()``.
        warmup: epochs of linear learning rate warm-up; ``cosine`` and ``log`` begin after it, and
            the epochs of ``steps`` include it.
        warmup_start: share of the learning rate at which the warm-up begins.
        clip: gradient norm to clip at; 0 disables clipping.
        precision: precision of matrix products.
        compile: use ``torch.compile``.
        graphs: capture the step as a CUDA graph: ``on``, ``off``, or ``auto`` (if possible).
        shard: shard the prototypes by class over the processes of ``torchrun``; a run can be
            resumed with any number of processes.
        deterministic: use deterministic algorithms on a GPU; those on a CPU always are.
        accelerator: device to train on; ``auto`` is a GPU if there is one.
        memory: GiB of pixels to keep on the device; images of a larger data set are read one by
            one.
        workers: number of processes that read images of a data set larger than ``memory``.
        evaluate_every: epochs between two evaluations on the test data.
        flip_test: average the features of a test image and of its mirror image.
        save_every: epochs between two checkpoints.
        save_steps: steps between two checkpoints within an epoch; 0 for none.
        save_seconds: seconds between two checkpoints, within an epoch too; 0 for none.
        watch: ``gradients`` records after every epoch how far the gradients of the classification
            part and of the metric part of the loss are from orthogonal.
        loggers: ``tensorboard``, ``mlflow`` or ``wandb``, separated by commas.
        mute: names of findings of the doctor to leave out, separated by commas.
        seed: seed of initial weights, data order, augmentation and corruption.
        name: label of the run; by default its loss.
    """

    data: str = "digits"
    test: str | None = None
    classes: str = ""
    whole: bool = False
    identities: bool = False
    image_size: int | None = None
    image_width: int | None = None
    validation: float = 0.0
    select_epoch: str = ""
    limit: int = 0
    fraction: float = 1.0
    imbalance: str = "none"
    noise: str = "none"
    skip_corrupt: bool = False

    loss: str = "softmax()"
    head: str = "auto"
    backbone: str = "auto"
    start: str = ""
    projection: int = 0
    schedules: str = ""
    augment: str = "auto"
    sampler: str = "random()"

    batch_size: int = 128
    epochs: int = 20
    optimizer: Optimizer = defaults.OPTIMIZER
    lr: float = defaults.LEARNING_RATES[defaults.OPTIMIZER]
    head_lr: float | None = None
    momentum: float = defaults.MOMENTUM
    nesterov: bool = False
    weight_decay: float = defaults.WEIGHT_DECAY
    head_weight_decay: float | None = None
    decay_norms: bool = True
    lr_schedule: str = "cosine()"
    warmup: float = 0.0
    warmup_start: float = 0.0
    clip: float = 0.0

    precision: Precision = "fp32"
    compile: bool = False
    graphs: Choice = "auto"
    shard: bool = False
    deterministic: bool = False
    accelerator: Accelerator = "auto"
    memory: float = 4.0
    workers: int = 4

    evaluate_every: int = 1
    flip_test: bool = False
    save_every: int = 1
    save_steps: int = 0
    save_seconds: float = 0.0
    watch: str = ""
    loggers: str = ""
    mute: str = ""
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", as_source("data", self.data))
        if self.test is not None:
            object.__setattr__(self, "test", as_source("test", self.test))
        for each in dataclasses.fields(self):
            fit(getattr(self, each.name), each.type, each.name)
        for field, low in _AT_LEAST.items():
            value = getattr(self, field)
            if value is not None and not value >= low:
                raise ValueError(f"{field} is expected to be at least {low}, got {value}")
        for field in ("lr", "head_lr"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{field} is expected to be above 0, got {value}")
        if self.whole and self.test is not None:
            raise ValueError(
                f"whole expects the test images to be a partition of data, got test {self.test!r}"
            )
        if self.identities and (self.whole or self.classes):
            other = "whole" if self.whole else f"classes {self.classes!r}"
            raise ValueError(
                "identities expects test images that are not trained on, in a partition of their "
                f"own, got {other}"
            )
        if self.start and self.shard:
            raise ValueError("start expects a head in one piece, got shard")
        if self.whole and self.skip_corrupt:
            raise ValueError("whole expects images that can all be read, got skip_corrupt")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is expected in [0, 1), got {self.validation}")
        if self.validation and self.select_epoch:
            raise ValueError(
                "select_epoch cannot be combined with validation, which chooses the epoch too, "
                f"got validation {self.validation}"
            )
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is expected in (0, 1], got {self.fraction}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Build a configuration from plain values; unknown keys are rejected.

        Example:
            >>> Config.from_dict({"loss": "cosface()", "epochs": 5}).epochs
            5
        """
        check_names(
            values, [field.name for field in dataclasses.fields(cls)], "a configuration has no"
        )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with some fields changed."""
        return self.from_dict({**self.to_dict(), **changes})

    @property
    def label(self) -> str:
        """Label of the run in tables: its name, or else its loss."""
        return self.name or self.loss

    @property
    def folder(self) -> str:
        """Name of the run folder: the label, the seed, and the digest of the configuration.

        Example:
            >>> Config(loss="cosface(margin=0.35)", seed=3).folder[:-8]
            'cosface_margin_0.35-seed3-'
            >>> Config(loss="cosface(margin=-0.2)").folder[:-8]
            'cosface_margin_-0.2-seed0-'
        """
        # The sign of a setting stays.
        other = r"(?:[^A-Za-z0-9.-]|-(?![\d.])|(?<![=( ])-)+"
        slug = re.sub(other, "_", self.label).strip("_.")[:60]
        return f"{slug or 'run'}-seed{self.seed}-{self.digest}"

    def identity(self) -> dict[str, Any]:
        """Return the fields that the result depends on, in canonical form."""
        kept = {key: value for key, value in self.to_dict().items() if key not in _NOT_IN_DIGEST}
        # Equal expressions give equal digests, however they are written.
        return kept | {key: normal(kept[key]) for key in _CALLS}

    def group(self) -> dict[str, Any]:
        """Return the fields shared by runs that differ only in their seed."""
        return {key: value for key, value in self.identity().items() if key != "seed"}

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of the hash of :meth:`identity`.

        Example:
            >>> Config(workers=0).digest == Config(workers=8).digest
            True
            >>> Config(seed=0).digest == Config(seed=1).digest
            False
        """
        known = self.identity()
        named = {k: v for k, v in known.items() if k not in _ADDED_LATER or v != _ADDED_LATER[k]}
        return digest_of(named)


def digest_of(value: Any, letters: int = 8) -> str:
    """Return the first hexadecimal digits of a hash of plain values."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:letters]


_AT_LEAST = {
    "limit": 0, "image_size": 1, "image_width": 1, "batch_size": 1, "epochs": 1, "momentum": 0,
    "weight_decay": 0,
    "head_weight_decay": 0, "warmup": 0, "warmup_start": 0, "clip": 0, "memory": 0, "workers": 0,
    "evaluate_every": 1, "save_every": 1, "save_steps": 0, "save_seconds": 0, "seed": 0,
    "projection": 0,
}  # fmt: skip
