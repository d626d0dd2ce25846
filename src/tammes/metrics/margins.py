"""Streaming metrics of examples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tammes.metrics.functional.angles import (
    ANGLE_READS,
    AnglesResult,
    AngleSums,
    angle_sums,
    check_bins,
    finish_angles,
)
from tammes.metrics.functional.inputs import as_split
from tammes.metrics.functional.margins import (
    QUANTILES,
    BiasSums,
    HardMarginLossResult,
    HardMarginSums,
    MarginSums,
    SampleMarginResult,
    SoftmaxBiasResult,
    as_gamma,
    bias_sums,
    finish_bias,
    finish_hard_margin,
    finish_margin,
    hard_margin_sums,
    margin_sums,
)
from tammes.metrics.functional.quantiles import (
    check_limits,
    check_quantiles,
    histogram,
    histogram_quantiles,
)
from tammes.metrics.streaming import SumMetric
from tammes.split import Split, split


class SampleMargin(SumMetric):
    """Mean, minimum and quantiles of the sample margin, over all and for each class.

    Mean and minima are exact. Quantiles come from a histogram: each is within one bin of the exact
    quantile, that is 4/4096, about 0.001, for cosines.
    Formula and reference: :func:`tammes.metrics.functional.sample_margin`, which computes them
    exactly.

    Args:
        num_classes: number of classes C.
        quantiles: levels between 0 and 1; torchmetrics turns a single one into a scalar.
        limits: range of the histogram; the default covers every margin of cosines. Outside of it
            quantiles are interpolated up to the smallest and the largest margin.
        bins: number of bins of the histogram.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import SampleMargin
        >>> metric = SampleMargin(2)
        >>> metric.update(torch.tensor([[0.9, 0.2], [0.8, 0.4]]), torch.tensor([0, 0]))
        >>> metric.update(torch.tensor([[0.3, 0.5]]), torch.tensor([1]))
        >>> metric.compute().mean
        tensor(0.4333, dtype=torch.float64)
    """

    higher_is_better = True

    histogram: Tensor
    largest: Tensor

    def __init__(
        self,
        num_classes: int,
        *,
        quantiles: Sequence[float] = QUANTILES,
        limits: tuple[float, float] = (-2.0, 2.0),
        bins: int = 4096,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_classes("SampleMargin", num_classes)
        check_bins("SampleMargin", bins)
        check_limits("SampleMargin", limits)
        self.num_classes = num_classes
        self.levels = check_quantiles("SampleMargin", quantiles)
        self.limits = limits
        self.bins = bins
        nothing = torch.zeros(0)
        self._register(margin_sums(nothing, nothing.long(), num_classes))
        self.add_state("histogram", histogram(nothing, limits, bins), dist_reduce_fx="sum")
        self.add_state(
            "largest", torch.tensor(-torch.inf, dtype=torch.double), dist_reduce_fx="max"
        )

    def update(self, split: Split | Tensor, labels: Tensor | None = None) -> None:
        """Add examples: a split, or similarities of shape ``(N, C)`` and labels."""
        found = as_split(
            "SampleMargin", split, labels, reads=("target", "hardest"), classes=self.num_classes
        )
        values = (found.target - found.hardest).double()
        self._accumulate(margin_sums(values, found.labels, self.num_classes))
        self.histogram = self.histogram + histogram(values, self.limits, self.bins)
        self.largest = torch.cat([values, self.largest.view(1)]).amax()

    def compute(self) -> SampleMarginResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        sums = self._collected(MarginSums)
        ends = (sums.smallest.amin(), self.largest)
        quantiles = histogram_quantiles(self.histogram, self.limits, ends, self.levels)
        return finish_margin("SampleMargin", sums, quantiles)


class HardMarginLoss(SumMetric):
    """Fraction of each class that does not reach a margin.

    Formula and reference: :func:`tammes.metrics.functional.hard_margin_loss`.

    Args:
        gamma: the margin, in units of similarity; one number, or one for each class.
        num_classes: number of classes C.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import HardMarginLoss
        >>> metric = HardMarginLoss(0.5, num_classes=2)
        >>> cosine = torch.tensor([[0.9, 0.2], [0.8, 0.6], [0.1, 0.5]])
        >>> metric.update(cosine, torch.tensor([0, 0, 1]))
        >>> metric.compute().balanced
        tensor(0.7500, dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(
        self, gamma: float | Sequence[float] | Tensor, num_classes: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        _check_classes("HardMarginLoss", num_classes)
        self.num_classes = num_classes
        self.gamma = as_gamma("HardMarginLoss", gamma, num_classes)
        nothing = torch.zeros(0)
        self._register(hard_margin_sums(nothing, nothing.long(), self.gamma))

    def update(self, split: Split | Tensor, labels: Tensor | None = None) -> None:
        """Add examples: a split, or similarities of shape ``(N, C)`` and labels."""
        found = as_split(
            "HardMarginLoss", split, labels, reads=("target", "hardest"), classes=self.num_classes
        )
        self._accumulate(hard_margin_sums(found.target - found.hardest, found.labels, self.gamma))

    def compute(self) -> HardMarginLossResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        return finish_hard_margin("HardMarginLoss", self._collected(HardMarginSums))


class SoftmaxBias(SumMetric):
    """Margin implied by the softmax.

    Formula and reference: :func:`tammes.metrics.functional.softmax_bias`.

    Args:
        num_classes: number of classes C.
        scale: factor of the similarities; 1 for logits. A split has its own.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import SoftmaxBias
        >>> metric = SoftmaxBias(3)
        >>> metric.update(torch.tensor([[5.0, 1.0, 1.0]]), torch.tensor([0]))
        >>> metric.compute().mean
        tensor(0.6931, dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(self, num_classes: int, *, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        _check_classes("SoftmaxBias", num_classes)
        self.num_classes = num_classes
        self.scale = scale
        self._register(bias_sums(_no_examples()))

    def update(self, split: Split | Tensor, labels: Tensor | None = None) -> None:
        """Add examples: a split, or similarities of shape ``(N, C)`` and labels."""
        reads = ("target", "others", "hardest")
        found = as_split(
            "SoftmaxBias", split, labels, reads=reads, scale=self.scale, classes=self.num_classes
        )
        self._accumulate(bias_sums(found))

    def compute(self) -> SoftmaxBiasResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        return finish_bias("SoftmaxBias", self._collected(BiasSums), self.num_classes)


class Angles(SumMetric):
    """Histograms of the angles to the target class and to the hardest other class.

    Formula and reference: :func:`tammes.metrics.functional.angles`.

    Args:
        bins: number of bins from 0 to 180 degrees.
        margin: an ArcFace margin in radians; ``beyond`` is the fraction of examples whose angle
            plus the margin exceeds 180 degrees.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import Angles
        >>> metric = Angles(bins=4)
        >>> metric.update(torch.tensor([[1.0, 0.5, -1.0], [0.1, -0.2, 0.0]]), torch.tensor([0, 1]))
        >>> metric.compute().own
        tensor([1, 0, 1, 0])
    """

    def __init__(self, *, bins: int = 180, margin: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_bins("Angles", bins)
        self.bins = bins
        self.margin = margin
        self._register(angle_sums("Angles", _no_examples(), bins, margin))

    def update(self, split: Split | Tensor, labels: Tensor | None = None) -> None:
        """Add examples: a split of a cosine head, or cosines of shape ``(N, C)`` and labels."""
        found = as_split("Angles", split, labels, reads=ANGLE_READS)
        self._accumulate(angle_sums("Angles", found, self.bins, self.margin))

    def compute(self) -> AnglesResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        return finish_angles("Angles", self._collected(AngleSums))


def _check_classes(name: str, num_classes: int) -> None:
    if num_classes < 2:
        raise ValueError(f"{name} expects at least 2 classes, got num_classes={num_classes}")


def _no_examples() -> Split:
    return split(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
