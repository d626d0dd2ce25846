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
from tammes.lab.backbones.blocks import Projected
from tammes.lab.config import head_text, parse_head, parse_loss, parse_schedules
from tammes.lab.config.schema import Config
from tammes.lab.data import Images
from tammes.lab.data.augment import Augment
from tammes.lab.measure.classification import MEASURED, example_metrics
from tammes.lab.records.run_folder import RecordError, Run
from tammes.lab.training.sharded_head import shard_head
from tammes.terms import Loss

IGNORED = -100
"""Label of rows that only pad a batch."""
BATCH_SUMS = ("count", "accuracy", "sample_margin", "bias")
"""Metrics of a batch; with many classes only the first."""


class Model(nn.Module):
    """Augmentation, backbone and criterion: the module that is compiled, distributed and saved."""

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
        self._compiled: tuple[Callable[[Tensor], Tensor], int] | None = None

    @property
    def needs_batches(self) -> bool:
        """Whether training needs at least two images in a batch."""
        return any(isinstance(part, _BatchNorm) for part in self.backbone.modules())

    def compile_backbone(self, rows: int) -> None:
        """Compile the network for training batches of ``rows`` images; others run eagerly.

        All losses and seeds then share one compiled network, which is cached on disk; a CUDA graph
        saves the remaining launches.
        """
        self._compiled = torch.compile(self.backbone, dynamic=False), rows

    def images(self, pixels: Tensor, index: Tensor, epoch: Tensor | int) -> Tensor:
        """Augment uint8 pixels as in :meth:`features`, in the memory format of the network."""
        images: Tensor = self.augment(pixels, index, epoch)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images

    def features(
        self,
        pixels: Tensor,
        index: Tensor | None = None,
        epoch: Tensor | int = 0,
        *,
        projected: bool = True,
    ) -> Tensor:
        """Compute features of images, shape ``(N, D)``.

        Args:
            pixels: uint8, shape ``(N, C, H, W)``.
            index: index of each image in its data set, shape ``(N,)``; keys the augmentation. Not
                needed in evaluation mode, which does not augment.
            epoch: current epoch, which keys the augmentation too.
            projected: whether to apply the projection layer, if there is one; the head expects
                projected features.
        """
        if index is None:
            index = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device)
        return self._features(self.images(pixels, index, epoch), projected=projected)

    def _features(self, images: Tensor, *, projected: bool = True) -> Tensor:
        compiled, rows = self._compiled or (None, 0)
        if compiled is not None and self.training and len(images) == rows:
            return compiled(images)
        network = self.backbone
        if isinstance(network, Projected) and not projected:
            network = network.network
        features: Tensor = network(images)
        return features

    def num_features(self, *, projected: bool = True) -> int:
        """Return the dimension of :meth:`features`."""
        if projected or not isinstance(self.backbone, Projected):
            return self.criterion.head.embedding_size
        return self.backbone.network.num_features

    def project(self, features: Tensor) -> Tensor:
        """Apply the projection layer to features, if there is one."""
        if not isinstance(self.backbone, Projected):
            return features
        projected: Tensor = self.backbone.layer(features)
        return projected

    def forward(
        self,
        pixels: Tensor,
        labels: Tensor,
        index: Tensor,
        epoch: Tensor | int,
        *,
        measure: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of the global batch, and its :func:`batch_sums`.

        Args:
            pixels: as in :meth:`features`, or the result of :meth:`images`.
            labels: class of each image, shape ``(N,)``; :data:`IGNORED` for padding.
            index: as in :meth:`features`.
            epoch: as in :meth:`features`.
            measure: false to return the features in place of the sums.
        """
        images = pixels if pixels.is_floating_point() else self.images(pixels, index, epoch)
        features = self._features(images)
        loss: Tensor = self.criterion(features, labels)
        features = features.detach()
        return loss, batch_sums(self.criterion.head, features, labels) if measure else features


def batch_metrics(head: Head) -> tuple[str, ...]:
    """Return the names of the metrics that :func:`batch_sums` computes."""
    return BATCH_SUMS if head.num_classes <= MEASURED else BATCH_SUMS[:1]


def batch_sums(head: Head, features: Tensor, labels: Tensor) -> Tensor:
    """Sum :func:`batch_metrics` over the examples of this process, shape ``(M,)``.

    If the head is sharded, the sums are over the examples of all processes.
    """
    if head.is_sharded:
        # Every rank has a shard of the classes, so all ranks measure all examples together.
        group = RankGroup()
        features = group.all_gather_rows(features, len(features))
        labels = group.all_gather_rows(labels, len(labels))
    counts = labels != IGNORED
    rows = [counts.float()]
    if len(batch_metrics(head)) > 1:
        _, correct, margins, bias = example_metrics(head, features, labels.clamp(min=0))
        rows += [correct.float(), margins.float(), bias.float()]
    return torch.where(counts, torch.stack(rows), 0.0).sum(1)


class BuiltModel(NamedTuple):
    """A model on the CPU, and the expressions that its configuration resolved to."""

    model: Model
    backbone: str
    augment: str
    head: str
    loss: str

    def described(self) -> dict[str, Any]:
        """Return the entries of ``environment.json`` about the model."""
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


def build_model(config: Config, images: Images, *, steps_per_epoch: int) -> BuiltModel:
    """Build a new model for a set of training images; its weights depend on the seed alone.

    Only the shape, class counts, mean and standard deviation of the images are used.
    """
    mean, std = images.mean_std()
    return _build(config, images.shape, images.counts(), mean, std, steps_per_epoch)


def load_model(run: Run) -> Model:
    """Load the model of a finished run on the CPU, without its images.

    Args:
        run: a finished run.

    Returns:
        The model in evaluation mode: ``model.features(pixels)``, and
        ``model.criterion.logits(features)`` for the scores of ``run.data["classes"]``.
    """
    data = run.data
    # One process loads the model, however many trained it.
    config = with_recorded_head(run.config, run).replace(shard=False)
    parts = _build(config, tuple(data["image"]), data["counts"], data["mean"], data["std"], 1)
    parts.model.load_state_dict(run.tensors("model"))
    return parts.model.eval()


def with_recorded_head(config: Config, run: Run) -> Config:
    """Return a configuration with the head that a run recorded when it started, if it has.

    The default behind ``auto`` may have changed since.
    """
    try:
        head = run.environment.get("head")
    except RecordError:
        # The run has not started, or the file is damaged and will be rewritten.
        return config
    return config.replace(head=head) if isinstance(head, str) else config


def _build(
    config: Config,
    shape: tuple[int, int, int],
    counts: list[int],
    mean: list[float],
    std: list[float],
    steps_per_epoch: int,
) -> BuiltModel:
    augment_text = resolve_augment(config.augment, shape)
    augment = Augment(augment_text, mean=mean, std=std, shape=shape, seed=config.seed)
    torch.manual_seed(config.seed)
    # Augmentation may change the size of the images.
    backbone_text = backbones.resolve(config.backbone, augment.output_shape)
    network = backbones.build(backbone_text, shape=augment.output_shape)
    backbone = Projected(network, config.projection) if config.projection else network
    loss = parse_loss(config.loss, counts=counts)
    head, head_as_text = _make_head(config, loss, int(backbone.num_features), len(counts))
    # One global batch, of which every rank gets an equal share.
    criterion = tammes.Criterion(
        head, loss, ignore_index=IGNORED, validate=None, group=True, even=True
    )
    for name, schedule in parse_schedules(
        config.schedules, steps_per_epoch=steps_per_epoch, counts=counts
    ).items():
        criterion.schedule(by_hand=None, **{name: schedule})
    model = Model(augment, backbone, criterion)
    return BuiltModel(model, backbone_text, augment_text, head_as_text, repr(loss))


def _make_head(config: Config, loss: Loss, size: int, classes: int) -> tuple[Head, str]:
    """Return the head of a run and its expression."""
    if not config.shard:
        head: Head = parse_head(config.head, loss, size, classes)
        return head, head_text(head)
    if config.head.strip().startswith("simplex"):
        raise ValueError("shard expects a cosine, linear or gaussian head, got simplex")
    with torch.device("meta"):
        # The meta device allocates no memory for the prototypes of all classes.
        head = parse_head(config.head, loss, size, classes)
    return shard_head(head), head_text(head)


def resolve_augment(text: str, shape: tuple[int, int, int]) -> str:
    """Resolve ``auto``: no augmentation for grey images, crops and flips for colour images."""
    if text.strip() != "auto":
        return text
    channels, height, _ = shape
    return "none" if channels == 1 else f"pad_crop({max(height // 8, 1)}) + flip()"


def parameter_groups(model: Model, config: Config) -> list[dict[str, object]]:
    """Return the parameter groups of the optimizer, with learning rates and weight decays."""
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
    result: list[dict[str, object]] = []
    for group in groups:
        flat = [p for p in group["params"] if id(p) in backbone and p.ndim <= 1]
        chosen = {id(p) for p in flat}
        rest = [p for p in group["params"] if id(p) not in chosen]
        result += [{**group, "params": rest}] if rest else []
        result += [{**group, "params": flat, "weight_decay": 0.0}] if flat else []
    return result
