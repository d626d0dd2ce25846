"""Streaming discriminability from class sums."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tammes.metrics.functional.discriminability import (
    ClassSums,
    DiscriminabilityResult,
    Weighting,
    add_examples_,
    check_weighting,
    finish_discriminability,
    no_class_sums,
    novel_mask,
)
from tammes.metrics.streaming import SumMetric, writable


class Discriminability(SumMetric):
    """Intra-class and inter-class distances and their ratio, for base and for novel classes.

    The state is one vector for each class; no pair of examples is ever formed. Formula and
    reference: :func:`tammes.metrics.functional.discriminability`.

    Args:
        num_classes: number of classes, base and novel.
        embedding_size: size D of a feature.
        novel: classes to measure separately from the others.
        distinct: exclude the pairs of an example with itself.
        weighting: ``"class"`` or ``"pair"``.
        normalize: scale features to length one first.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import Discriminability
        >>> metric = Discriminability(2, 2)
        >>> metric.update(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> metric.update(torch.tensor([[-1.0, 0.0], [-3.0, 0.0]]), torch.tensor([1, 1]))
        >>> metric.compute().base.ratio
        tensor(6., dtype=torch.float64)
    """

    higher_is_better = True

    sums: Tensor
    squares: Tensor
    counts: Tensor

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        novel: Sequence[int] | Tensor | None = None,
        distinct: bool = False,
        weighting: Weighting = "class",
        normalize: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_weighting("Discriminability", weighting)
        self.num_classes = num_classes
        self.novel = novel_mask("Discriminability", novel, num_classes)
        self.distinct = distinct
        self.weighting = weighting
        self.normalize = normalize
        self._register(no_class_sums(num_classes, embedding_size))

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add features of shape ``(N, D)`` and their labels."""
        sums = ClassSums(*map(writable, self._collected(ClassSums)))
        add_examples_("Discriminability", sums, features, labels, normalize=self.normalize)
        self.sums, self.squares, self.counts = sums

    def compute(self) -> DiscriminabilityResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        sums = self._collected(ClassSums)
        novel = self.novel.to(sums.counts.device)
        return finish_discriminability(
            "Discriminability", sums, novel, self.distinct, self.weighting
        )
