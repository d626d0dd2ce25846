"""Drop-in replacements for classes of other libraries: only the import changes.

:class:`PartialFC_V2` replaces InsightFace's, :class:`ArcMarginProduct` and
:class:`AddMarginProduct` WeSpeaker's, :class:`AdditiveAngularMargin` and :class:`AngularMargin`
SpeechBrain's. Trained weights load unchanged. Values are the same; gradients stay finite even where
a feature coincides with its prototype.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tammes.convert.trained_heads import insightface_loss
from tammes.criterion.criterion import Criterion
from tammes.heads import CosineHead, ShardedHead
from tammes.kernels.problem import Problem
from tammes.kernels.reference import similarity_matrix
from tammes.losses.angular import target_similarity
from tammes.losses.hard_negatives import interclass_filter
from tammes.similarity import Cosine
from tammes.split import split


class PartialFC_V2(Criterion):
    """InsightFace's ``PartialFC_V2`` as a criterion: classes sharded over ranks, or sampled.

    The loss is that of its ``CombinedMarginLoss``, see
    :func:`tammes.convert.from_insightface`; as in the original, the gradient ignores the margin.
    Unlike the original it also runs without ``torch.distributed``, on a CPU, with batches of any
    size, and without all scores in memory.

    If the classes divide evenly over the ranks, each rank can load the state dict that it saved
    with the original; in any case, a state dict with the classes of all ranks joined loads.

    Args:
        margin_loss: an object with the attributes of InsightFace's ``CombinedMarginLoss``: ``s``,
            ``m1``, ``m2`` and ``m3``, with or without ``interclass_filtering_threshold``; or those
            of its ``CosFace``: ``s`` and ``m``.
        embedding_size: size of a feature.
        num_classes: total number of classes.
        sample_rate: fraction of the classes used in a step.
        fp16: multiply features and prototypes in half precision.

    Example:
        >>> from types import SimpleNamespace
        >>> margin_loss = SimpleNamespace(s=64.0, m1=1.0, m2=0.5, m3=0.0)
        >>> module = tammes.convert.PartialFC_V2(margin_loss, embedding_size=8, num_classes=5)
        >>> _ = module.load_state_dict({"weight": torch.randn(5, 8)})
        >>> loss = module(torch.randn(4, 8), torch.tensor([[0], [1], [2], [4]]))
    """

    def __init__(
        self,
        margin_loss: Any,
        embedding_size: int,
        num_classes: int,
        sample_rate: float = 1.0,
        fp16: bool = False,
    ) -> None:
        scale, margins = _settings_of(margin_loss)
        loss = insightface_loss("PartialFC_V2", margins, "detached")
        threshold = getattr(margin_loss, "interclass_filtering_threshold", 0)
        if threshold > 0:
            m1, m2, m3 = margins
            loss = interclass_filter(threshold=threshold, m1=m1, m2=m2, m3=m3, gradient="detached")
        head = ShardedHead(
            CosineHead, embedding_size, num_classes, scale=scale, sample_rate=sample_rate
        )
        with torch.no_grad():
            # The initial norm of the original, which determines how fast prototypes turn.
            head.weight.mul_(0.01 * embedding_size**0.5)
        super().__init__(head, loss)
        self.fp16 = fp16

    def forward(  # type: ignore[override]
        self, local_embeddings: Tensor, local_labels: Tensor, **settings: Any
    ) -> Tensor:
        """Loss of the global batch.

        Args:
            local_embeddings: features of this rank, shape ``(N, D)``.
            local_labels: class of each example, shape ``(N,)`` or ``(N, 1)``.
            **settings: see :meth:`tammes.Criterion.forward`.
        """
        labels, kind = local_labels.flatten(), local_embeddings.device.type
        if not self.fp16:
            return super().forward(local_embeddings, labels, **settings)
        with torch.autocast(kind, dtype=torch.float16):
            return super().forward(local_embeddings, labels, **settings)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        weight, head = state_dict.pop(f"{prefix}weight", None), self.head
        if weight is not None:
            assert isinstance(head, ShardedHead)
            state_dict[f"{prefix}head.weight"] = weight
            even = head.num_classes % head.group.world_size == 0
            if head.is_sharded and even and len(weight) == len(head.weight):
                # This rank's weight, since the original divides the classes in the same way.
                state_dict[f"{prefix}head.place"] = head.place
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _settings_of(margin_loss: Any) -> tuple[float, tuple[float, float, float]]:
    """Read scale and margins from a loss of InsightFace."""
    for names in (("m1", "m2", "m3"), ("m",)):
        if all(hasattr(margin_loss, name) for name in ("s", *names)):
            *before, last = (float(getattr(margin_loss, name)) for name in names)
            first, second = before or (1.0, 0.0)
            return float(margin_loss.s), (first, second, last)
    raise TypeError(
        "PartialFC_V2 expects a margin_loss with s, m1, m2 and m3, as CombinedMarginLoss has them, "
        f"or with s and m, got {type(margin_loss).__name__}"
    )


def _with_angle_margin(
    cosine: Tensor, labels: Tensor, margin: float, easy_margin: bool, past: float
) -> Tensor:
    """Cosines with a margin in radians added to the target angle.

    Where the angle would exceed pi, ``past`` is subtracted from the cosine instead; with
    ``easy_margin``, cosines of 0 or less are left unchanged.
    """
    rows = split(cosine, labels, reads=("target", "gap", "length"))
    own, shifted = rows.target, target_similarity(rows, m2=margin)
    if easy_margin:
        shifted = torch.where(own > 0, shifted, own)
    else:
        shifted = torch.where(own > -math.cos(margin), shifted, own - past)
    return cosine.scatter(1, labels[:, None], shifted[:, None])


class _Product(nn.Module):
    """Base of WeSpeaker's projections: prototypes, scale and margin."""

    def __init__(self, in_features: int, out_features: int, scale: float, margin: float) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.scale, self.margin = scale, margin
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)

    def update(self, margin: float = 0.2) -> None:
        """Set the margin, as WeSpeaker's scheduler does in every step."""
        self.margin = margin

    def _cosines(self, features: Tensor) -> Tensor:
        return similarity_matrix(Problem(features, self.weight, None, 1.0, Cosine()))

    def extra_repr(self) -> str:
        """Sizes, scale and margin."""
        return f"{self.in_features}, {self.out_features}, scale={self.scale}, margin={self.margin}"


class ArcMarginProduct(_Product):
    r"""WeSpeaker's ``ArcMarginProduct``: scores with ArcFace's margin, for cross entropy.

    .. math:: s\cos(\theta_y + m)\ \text{up to}\ \pi,\ \text{then}\ s(\cos\theta_y - 1 + \cos m)

    Its ``state_dict`` is that of the original. ``tammes.ArcFace(in_features, out_features, ...)``
    with the same ``weight`` in its head computes the loss without all scores in memory.

    Args:
        in_features: size of a feature.
        out_features: number of classes.
        scale: factor of the cosines.
        margin: angle in radians; :meth:`update` changes it.
        easy_margin: leave cosines of 0 or less unchanged.

    Example:
        >>> projection = tammes.convert.ArcMarginProduct(8, 5, scale=32.0, margin=0.2)
        >>> logits = projection(torch.randn(4, 8), torch.tensor([0, 1, 2, 4]))
        >>> loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 4]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale: float = 32.0,
        margin: float = 0.2,
        easy_margin: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, scale, margin)
        self.easy_margin = easy_margin

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """Scores with the margin, shape ``(N, C)``, of features ``(N, D)`` and their classes."""
        past = 1 - math.cos(self.margin)
        cosine = self._cosines(input)
        return self.scale * _with_angle_margin(
            cosine, label.flatten().long(), self.margin, self.easy_margin, past
        )


class AddMarginProduct(_Product):
    r"""WeSpeaker's ``AddMarginProduct``: scores with CosFace's margin, for cross entropy.

    .. math:: s(\cos\theta_y - m)

    Its ``state_dict`` is that of the original. ``tammes.CosFace(in_features, out_features, ...)``
    with the same ``weight`` in its head computes the loss without all scores in memory.

    Args:
        in_features: size of a feature.
        out_features: number of classes.
        scale: factor of the cosines.
        margin: cosine by which the target class must win; :meth:`update` changes it.

    Example:
        >>> projection = tammes.convert.AddMarginProduct(8, 5, scale=32.0, margin=0.2)
        >>> projection(torch.randn(4, 8), torch.tensor([0, 1, 2, 4])).shape
        torch.Size([4, 5])
    """

    def __init__(
        self, in_features: int, out_features: int, scale: float = 32.0, margin: float = 0.2
    ) -> None:
        super().__init__(in_features, out_features, scale, margin)

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """Scores with the margin, shape ``(N, C)``, of features ``(N, D)`` and their classes."""
        cosine, column = self._cosines(input), label.reshape(-1, 1).long()
        return self.scale * cosine.scatter(1, column, cosine.gather(1, column) - self.margin)


class AngularMargin(nn.Module):
    r"""SpeechBrain's ``AngularMargin``: cosines in, scores with CosFace's margin out.

    .. math:: s(\cos\theta_y - m)

    Args:
        margin: cosine by which the target class must win.
        scale: factor of the cosines.

    Example:
        >>> cosines, targets = torch.tensor([[0.9, 0.1]]), torch.tensor([[1.0, 0.0]])
        >>> tammes.convert.AngularMargin(margin=0.2, scale=30.0)(cosines, targets)
        tensor([[21.,  3.]])
    """

    def __init__(self, margin: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.margin, self.scale = margin, scale

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Scores from cosines and one-hot ``targets``, both of shape ``(N, C)``."""
        return self.scale * (outputs - self.margin * targets)


class AdditiveAngularMargin(AngularMargin):
    r"""SpeechBrain's ``AdditiveAngularMargin``: cosines in, scores with ArcFace's margin out.

    .. math:: s\cos(\theta_y + m)\ \text{up to}\ \pi,\ \text{then}\ s(\cos\theta_y - m\sin m)

    It works in SpeechBrain's ``LogSoftmaxWrapper`` like the original.

    Args:
        margin: angle in radians by which the target class must win.
        scale: factor of the cosines.
        easy_margin: leave cosines of 0 or less unchanged.

    Example:
        >>> cosines, targets = torch.tensor([[0.9, 0.1]]), torch.tensor([[1.0, 0.0]])
        >>> tammes.convert.AdditiveAngularMargin(margin=0.2, scale=30.0)(cosines, targets)
        tensor([[23.8639,  3.0000]])
    """

    def __init__(self, margin: float = 0.0, scale: float = 1.0, easy_margin: bool = False) -> None:
        super().__init__(margin, scale)
        self.easy_margin = easy_margin

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Scores from cosines and one-hot ``targets``, both of shape ``(N, C)``."""
        cosine = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        past = self.margin * math.sin(self.margin)
        return self.scale * _with_angle_margin(
            cosine, targets.argmax(1), self.margin, self.easy_margin, past
        )
