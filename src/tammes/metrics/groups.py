"""Streaming accuracy by class frequency, and calibration."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tammes.metrics.functional.groups import (
    GroupAccuracyResult,
    GroupSums,
    class_groups,
    confidence,
    finish_groups,
    group_sums,
)
from tammes.metrics.functional.inputs import as_split
from tammes.metrics.streaming import BinaryCalibrationError, SumMetric
from tammes.split import Split


class GroupAccuracy(SumMetric):
    """Accuracy of classes with many, medium and few training examples.

    Formula and reference: :func:`tammes.metrics.functional.group_accuracy`.

    Args:
        training_counts: training examples of each class, shape ``(C,)``.
        many: classes with more training examples are frequent.
        few: classes with fewer training examples are rare.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import GroupAccuracy
        >>> metric = GroupAccuracy([500, 50, 5])
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> metric.update(logits, torch.tensor([0, 1, 2]))
        >>> [float(value) for value in metric.compute()[:3]]
        [1.0, 0.0, 1.0]
    """

    higher_is_better = True

    def __init__(
        self,
        training_counts: Sequence[int] | Tensor,
        *,
        many: int = 100,
        few: int = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.group = class_groups("GroupAccuracy", training_counts, many, few)
        nothing = torch.zeros(len(self.group), dtype=torch.long)
        self._register(GroupSums(nothing, nothing))

    def update(self, split: Split | Tensor, labels: Tensor | None = None) -> None:
        """Add examples: a split, or similarities of shape ``(N, C)`` and labels."""
        found = as_split(
            "GroupAccuracy", split, labels, reads=("target", "hardest"), classes=len(self.group)
        )
        self._accumulate(group_sums(found))

    def compute(self) -> GroupAccuracyResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        return finish_groups("GroupAccuracy", self._collected(GroupSums), self.group)


class Calibration(BinaryCalibrationError):
    r"""Expected calibration error of the predictions; torchmetrics computes it.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{N}\,\bigl|\mathrm{acc}_b - \mathrm{conf}_b\bigr|

    The confidence is the softmax probability of the prediction. torchmetrics guesses from the
    values whether they are logits or probabilities, and mistakes cosines between 0 and 1 for
    probabilities; here it always receives the softmax of ``scale`` times the similarities.

    Args:
        bins: number of equal bins of the probability.
        norm: ``"l1"`` is the expected, ``"max"`` the maximum calibration error, ``"l2"`` the root
            of the mean square.
        scale: factor of the similarities; 1 for logits. A split has its own.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import Calibration
        >>> metric = Calibration()
        >>> metric.update(torch.tensor([[0.0, 0.0], [9.0, -9.0]]), torch.tensor([0, 0]))
        >>> metric.compute()
        tensor(0.2500)

    References:
        Guo et al., On Calibration of Modern Neural Networks, ICML 2017, eq. 3.
    """

    def __init__(
        self, *, bins: int = 15, norm: Any = "l1", scale: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(n_bins=bins, norm=norm, validate_args=True, **kwargs)
        self.scale = scale

    def update(self, split: Split | Tensor, labels: Tensor | None = None) -> None:
        """Add examples: a split, or similarities of shape ``(N, C)`` and labels."""
        found = confidence(split, labels, scale=self.scale)
        if len(found.right):
            super().update(found.probability.float(), found.right.long())
