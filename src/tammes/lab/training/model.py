"""From pixels to a loss: augmentation, backbone and criterion as one module."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import tammes
from tammes.distributed.process_group import RankGroup
from tammes.heads.head import Head
from tammes.lab import backbones
from tammes.lab.config import head_text, parse_head, parse_loss, parse_schedules
from tammes.lab.config.schema import Config
from tammes.lab.data import Images
from tammes.lab.data.augment import Augment
from tammes.lab.measure.classification import MEASURED, examine
from tammes.lab.records.run_folder import Run
from tammes.lab.training.sharded_head import is_spread, spread
from tammes.terms import Loss

IGNORED = -100
"""Label of rows that only fill up a batch."""
SEEN = ("count", "loss", "accuracy", "sample_margin", "bias")
"""What :class:`Model` returns sums of, beside its loss; the first two alone with many classes."""


class Model(nn.Module):
    """What is compiled, wrapped for several processes, and saved.

    Args:
        augment: pixels to images.
        backbone: images to features.
        criterion: features to a loss.
        channels_last: how images lie in memory.
    """

    def __init__(
        self,
        augment: Augment,
        backbone: nn.Module,
        criterion: tammes.Criterion,
        *,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.augment, self.backbone, self.criterion = augment, backbone, criterion
        self.channels_last = channels_last
        self.measures = criterion.head.num_classes <= MEASURED
        self._compiled: tuple[Callable[[Tensor], Tensor], int] | None = None

    @property
    def needs_batches(self) -> bool:
        """Whether an image alone cannot be trained on."""
        return any(isinstance(part, _BatchNorm) for part in self.backbone.modules())

    def compile_backbone(self, rows: int) -> None:
        """Compile the network for batches of so many images in training; others go as they are.

        Losses and seeds then have one compiled network between them, which is made once and found
        again on disk; a CUDA graph makes up for the rest.
        """
        self._compiled = torch.compile(self.backbone, dynamic=False), rows

    def features(
        self, pixels: Tensor, index: Tensor | None = None, epoch: Tensor | int = 0
    ) -> Tensor:
        """Features of images, shape ``(N, D)``.

        Args:
            pixels: uint8, shape ``(N, C, H, W)``.
            index: identity of each image, which its augmentation is keyed by, shape ``(N,)``.
                Nothing is augmented in evaluation mode, and none is needed.
            epoch: likewise.
        """
        if index is None:
            index = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device)
        images = self.augment(pixels, index, epoch)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        compiled, rows = self._compiled or (None, 0)
        if compiled is not None and self.training and len(images) == rows:
            return compiled(images)
        features: Tensor = self.backbone(images)
        return features

    def forward(
        self, pixels: Tensor, labels: Tensor, index: Tensor, epoch: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Loss of a batch, and the sums of :data:`SEEN` over it, both of all processes.

        Args:
            pixels: uint8, shape ``(N, C, H, W)``.
            labels: shape ``(N,)``; :data:`IGNORED` where a row only fills up.
            index: see :meth:`features`.
            epoch: see :meth:`features`.
        """
        features = self.features(pixels, index, epoch)
        loss: Tensor = self.criterion(features, labels)
        return loss, self._seen(loss.detach(), features.detach(), labels)

    def _seen(self, loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        group, head = RankGroup(), self.criterion.head
        if is_spread(head):
            # Each process has some of the classes: they look at all examples together.
            features = group.all_gather_rows(features, len(features))
            labels = group.all_gather_rows(labels, len(labels))
        counts = labels != IGNORED
        sums = [counts.sum().to(loss)]
        if self.measures:
            seen = examine(head, features, labels.clamp(min=0))
            sums.append((seen.correct & counts).sum().to(loss))
            sums.append(torch.where(counts, seen.margins, 0.0).sum().to(loss))
            sums.append(torch.where(counts, seen.bias, 0.0).sum().to(loss))
        together = torch.stack(sums)
        count, *measured = together if is_spread(head) else group.all_reduce(together)
        return torch.stack([count, loss * count, *measured])


class Parts(NamedTuple):
    """A model and what the texts of its configuration became.

    Attributes:
        model: on the CPU.
        backbone: name and settings of the backbone.
        augment: what is done to the pixels.
        head: the head in words.
        loss: the loss in words.
    """

    model: Model
    backbone: str
    augment: str
    head: str
    loss: str

    def described(self) -> dict[str, Any]:
        """What ``environment.json`` says of it."""
        backbone = self.model.backbone
        return {
            "backbone": {
                "name": self.backbone,
                "parameters": sum(p.numel() for p in backbone.parameters()),
                "num_features": int(backbone.num_features),  # type: ignore[arg-type]
            },
            "augment": self.augment,
            "head": self.head,
            "loss": self.loss,
        }


def build_model(config: Config, images: Images, *, steps_per_epoch: int) -> Parts:
    """A fresh model for a set of training images; its weights depend on the seed alone.

    Args:
        config: of the run.
        images: to train on: their shape, counts of classes, mean and deviation are read.
        steps_per_epoch: for schedules that are given in epochs.
    """
    mean, std = images.mean_std()
    return _build(
        config,
        shape=images.shape,
        counts=images.counts(),
        mean=mean,
        std=std,
        steps_per_epoch=steps_per_epoch,
    )


def load_model(run: Run) -> Model:
    """The model of a finished run, on the CPU and ready to use; its images are not needed.

    Args:
        run: that finished.

    Returns:
        The model in evaluation mode: ``model.features(pixels)``, and
        ``model.criterion.logits(features)`` for the scores of ``run.data["classes"]``.
    """
    about = run.data
    known = {key: about[key] for key in ("counts", "mean", "std")}
    # On whichever number of processes it was trained, this is one.
    config = run.config.replace(shard=False)
    parts = _build(config, shape=tuple(about["image"]), **known, steps_per_epoch=1)
    parts.model.load_state_dict(run.tensors("model"))
    return parts.model.eval()


def _build(
    config: Config,
    *,
    shape: tuple[int, int, int],
    counts: list[int],
    mean: list[float],
    std: list[float],
    steps_per_epoch: int,
) -> Parts:
    augment_text = resolve_augment(config.augment, shape)
    augment = Augment(augment_text, mean=mean, std=std, shape=shape, seed=config.seed)
    torch.manual_seed(config.seed)
    # A crop may have changed the size.
    backbone_text = backbones.resolve(config.backbone, augment.output_shape)
    backbone = backbones.build(backbone_text, shape=augment.output_shape)
    loss = parse_loss(config.loss, counts=counts)
    head, head_as_text = _make_head(config, loss, int(backbone.num_features), len(counts))
    criterion = tammes.Criterion(
        head,
        loss,
        ignore_index=IGNORED,
        validate=None,
        # One batch of all processes, of which each is fed an equal share.
        group=True,
        even=True,
    )
    for name, schedule in parse_schedules(
        config.schedules, steps_per_epoch=steps_per_epoch, counts=counts
    ).items():
        criterion.schedule(by_hand=None, **{name: schedule})
    return Parts(
        Model(augment, backbone, criterion),
        backbone_text,
        augment_text,
        head_as_text,
        repr(loss),
    )


def _make_head(config: Config, loss: Loss, size: int, classes: int) -> tuple[Head, str]:
    """The head of a run, and how it is written."""
    if not config.shard:
        head: Head = parse_head(config.head, loss, size, classes)
        return head, head_text(head)
    if config.head.strip().startswith("simplex"):
        raise ValueError("shard expects a cosine, linear or gaussian head, got simplex")
    with torch.device("meta"):
        # Nobody needs memory for all classes.
        head = parse_head(config.head, loss, size, classes)
    return spread(head), head_text(head)


def resolve_augment(text: str, shape: tuple[int, int, int]) -> str:
    """What ``auto`` is: nothing for small grey images, crops and flips for photographs."""
    if text.strip() != "auto":
        return text
    channels, height, _ = shape
    return "none" if channels == 1 else f"pad_crop({max(height // 8, 1)}) + flip()"


def parameter_groups(model: Model, config: Config) -> list[dict[str, object]]:
    """What the optimizer holds, with rates and decays."""
    groups = model.criterion.param_groups(
        model.backbone,
        lr=config.lr,
        head_lr=config.head_lr,
        weight_decay=config.weight_decay,
        head_weight_decay=config.head_weight_decay,
    )
    if config.decay_norms:
        return groups
    backbone = {id(parameter) for parameter in model.backbone.parameters()}
    kept: list[dict[str, object]] = []
    for group in groups:
        flat = [p for p in group["params"] if id(p) in backbone and p.ndim <= 1]
        chosen = {id(p) for p in flat}
        rest = [p for p in group["params"] if id(p) not in chosen]
        kept += [{**group, "params": rest}] if rest else []
        kept += [{**group, "params": flat, "weight_decay": 0.0}] if flat else []
    return kept
