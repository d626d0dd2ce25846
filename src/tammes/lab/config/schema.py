"""Everything a run depends on, in one flat table: a field is a flag and a line of YAML.

What has settings of its own is written as a call, ``"cosface(margin=0.35)"`` or
``"mnist_cnn(features=3)"``; :mod:`.expression` reads it, without ``eval``.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tammes.lab.config.expressions import normal
from tammes.lab.config.typecheck import check_names, fit

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["sgd", "adam", "adamw"]
Choice = Literal["auto", "on", "off"]
Accelerator = Literal["auto", "cpu", "cuda"]

_ONLY_HOW = frozenset(
    {"name", "accelerator", "memory", "workers", "save_every", "save_steps", "loggers"}
)
"""Fields that say how a run is carried out, and leave its result alone."""
_LATER: dict[str, Any] = {"limit": 0, "classes": "", "whole": False, "watch": ""}
"""Fields that came when there were digests already, with the value that changes nothing: where they
have it, a digest is what it was. Whoever adds a field adds it here."""
_CALLS = ("loss", "head", "backbone", "augment", "sampler", "lr_schedule", "imbalance", "noise")
"""Fields that are calls."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one run.

    Args:
        data: what to train on: ``digits``, a known name such as ``cifar100``, a folder of class
            folders, a parquet file or folder, or a name on the Hugging Face hub.
        test: what to test on, if it is not a partition of ``data``.
        classes: the only classes to train and to test on, a part of class lists such as
            ``cifar-fs:base``; all by default.
        whole: train on the test images too, as few-shot tables do. The test images are
            then among those trained on.
        image_size: side of the square images; their own if they all have one.
        validation: share of the training images held out to choose the best epoch; 0 keeps the
            last one.
        limit: most images of each partition to use, evenly of all classes; 0 uses all. To try
            things out.
        fraction: share of the training images to use, the same of every class.
        imbalance: ``long_tail(100)`` or ``step(10)``: largest class over smallest.
        noise: ``symmetric(0.4)``, ``asymmetric(0.4)`` or ``pair(0.4)``: share of wrong labels, of
            every class that has any.
        skip_corrupt: leave out images that cannot be read, instead of stopping.
        loss: a loss of the algebra, such as ``cosface(margin=0.35) + 0.5*sample_margin()``.
        head: such as ``cosine(scale=30)``; ``auto`` takes the one the loss is made for.
        backbone: the network that makes the features; ``auto`` takes a small one.
        schedules: settings that change, such as ``margin=WarmUp(0, 0.35, epochs=5)``.
        augment: such as ``pad_crop(4) + flip()``; ``none``, or ``auto``.
        sampler: ``random()``, ``balanced()``, ``episodes(way=16, shot=8)`` or
            ``pk(classes=16, images=4)``.
        batch_size: examples in a step, over all processes.
        epochs: how long to train.
        optimizer: ``sgd``, ``adam`` (decay added to the gradient) or ``adamw``.
        lr: learning rate of the backbone.
        head_lr: learning rate of the head, that of the backbone by default.
        momentum: of SGD.
        nesterov: of SGD.
        weight_decay: of all parameters but the head's bias and scale.
        head_weight_decay: of the prototypes, ``weight_decay`` by default.
        decay_norms: whether biases and normalisation layers decay too.
        lr_schedule: ``cosine()``, ``log(1e-4)``, ``steps([60, 120], 0.2)`` or ``constant()``.
        warmup: epochs of linear warm-up of the learning rate; the schedule begins after it.
        warmup_start: share of the learning rate that the warm-up begins with.
        clip: largest norm of the gradient; 0 does not clip.
        precision: of the products.
        compile: use ``torch.compile``.
        graphs: record the step as a CUDA graph: ``on``, ``off``, or ``auto``, wherever it can be.
        shard: spread the prototypes over the processes of ``torchrun``, each of which has some of
            the classes; a run goes on with any number of them.
        deterministic: choose deterministic algorithms on a GPU; the CPU always is.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        memory: GiB of pixels to hold on the device; of a larger set images are read one by one.
        workers: processes that read such images.
        evaluate_every: epochs between two tests.
        save_every: epochs between two checkpoints.
        save_steps: steps between two checkpoints within an epoch; 0 for none.
        watch: ``gradients`` writes down after every epoch how far the gradients of the
            classification part and of the metric part of the loss are from orthogonal.
        loggers: ``tensorboard``, ``mlflow`` or ``wandb``, joined by commas.
        seed: of initial weights, order, augmentation and corruption.
        name: how the run is called; its loss by default.
    """

    data: str = "digits"
    test: str | None = None
    classes: str = ""
    whole: bool = False
    image_size: int | None = None
    validation: float = 0.0
    limit: int = 0
    fraction: float = 1.0
    imbalance: str = "none"
    noise: str = "none"
    skip_corrupt: bool = False

    loss: str = "softmax()"
    head: str = "auto"
    backbone: str = "auto"
    schedules: str = ""
    augment: str = "auto"
    sampler: str = "random()"

    batch_size: int = 128
    epochs: int = 20
    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    head_lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
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
    save_every: int = 1
    save_steps: int = 0
    watch: str = ""
    loggers: str = ""
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
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
        if self.whole and self.skip_corrupt:
            raise ValueError("whole expects images that can all be read, got skip_corrupt")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is expected in [0, 1), got {self.validation}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is expected in (0, 1], got {self.fraction}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Build a configuration from plain values; a key that is no field is refused.

        Example:
            >>> Config.from_dict({"loss": "cosface()", "epochs": 5}).epochs
            5
        """
        check_names(
            values, [field.name for field in dataclasses.fields(cls)], "a configuration has no"
        )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> "Config":
        """The same with some fields changed."""
        return self.from_dict({**self.to_dict(), **changes})

    @property
    def label(self) -> str:
        """How the run is called in tables: its name, or its loss."""
        return self.name or self.loss

    @property
    def folder(self) -> str:
        """Name of the run's folder: one to read, and a digest that tells configurations apart.

        Example:
            >>> Config(loss="cosface(margin=0.35)", seed=3).folder[:-8]
            'cosface_margin_0.35-seed3-'
        """
        slug = re.sub(r"[^A-Za-z0-9.]+", "_", self.label).strip("_.")[:60]
        return f"{slug or 'run'}-seed{self.seed}-{self.digest}"

    def identity(self) -> dict[str, Any]:
        """The fields its result depends on."""
        kept = {key: value for key, value in self.to_dict().items() if key not in _ONLY_HOW}
        # The same is the same however it is written.
        return kept | {key: normal(kept[key]) for key in _CALLS}

    def group(self) -> dict[str, Any]:
        """What runs that differ only in their seed have in common."""
        return {key: value for key, value in self.identity().items() if key != "seed"}

    @property
    def digest(self) -> str:
        """Eight letters that stand for :meth:`identity`.

        Example:
            >>> Config(workers=0).digest == Config(workers=8).digest
            True
            >>> Config(seed=0).digest == Config(seed=1).digest
            False
        """
        known = self.identity()
        named = {k: v for k, v in known.items() if k not in _LATER or v != _LATER[k]}
        return digest_of(named)


def digest_of(value: Any, letters: int = 8) -> str:
    """Letters that stand for plain values."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:letters]


_AT_LEAST = {
    "limit": 0, "image_size": 1, "batch_size": 1, "epochs": 1, "momentum": 0, "weight_decay": 0,
    "head_weight_decay": 0, "warmup": 0, "warmup_start": 0, "clip": 0, "memory": 0, "workers": 0,
    "evaluate_every": 1, "save_every": 1, "save_steps": 0, "seed": 0,
}  # fmt: skip
