"""Metrics of examples: sample margins, the hard margin loss, the bias of the softmax."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import as_split, warn_absent, warn_undefined
from tammes.metrics.functional.quantiles import check_quantiles, exact_quantiles
from tammes.split import Split

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class SampleMarginResult(NamedTuple):
    """Result of :func:`sample_margin`, in units of similarity.

    Attributes:
        mean: mean over all examples, as in the tables of the papers.
        minimum: minimum over all examples, as in their theory.
        quantiles: one value for each level.
        class_mean: mean of each class, NaN where it has no example, shape ``(C,)``.
        class_minimum: minimum of each class, NaN where it has no example, shape ``(C,)``.
        counts: number of examples of each class, shape ``(C,)``.
    """

    mean: Tensor
    minimum: Tensor
    quantiles: Tensor
    class_mean: Tensor
    class_minimum: Tensor
    counts: Tensor


class HardMarginLossResult(NamedTuple):
    """Result of :func:`hard_margin_loss`.

    Attributes:
        mean: fraction of all examples that miss the margin.
        balanced: mean over the classes that have examples; the first term of the bound.
        class_mean: fraction of each class, NaN where it has no example, shape ``(C,)``.
        counts: number of examples of each class, shape ``(C,)``.
    """

    mean: Tensor
    balanced: Tensor
    class_mean: Tensor
    counts: Tensor


class SoftmaxBiasResult(NamedTuple):
    r"""Result of :func:`softmax_bias`.

    Attributes:
        mean: mean over all examples.
        minimum: minimum over all examples, at least 0.
        maximum: maximum over all examples, at most ``bound``.
        bound: :math:`\log(C - 1)`, reached if the other classes' scores are all equal.
    """

    mean: Tensor
    minimum: Tensor
    maximum: Tensor
    bound: Tensor


@torch.no_grad()
def margins(split: Split | Tensor, labels: Tensor | None = None) -> Tensor:
    r"""Sample margin of each example.

    .. math:: \gamma(x, y) = a_y - \max_{j\ne y} a_j

    in units of the similarity :math:`a`, independent of the scale. An example is correct if its
    margin is above zero: a tie is an error.

    Args:
        split: a split, or similarities of shape ``(N, C)``.
        labels: class of each example, shape ``(N,)``; with similarities only.

    Returns:
        The margins, shape ``(N,)``; examples labelled -100 are excluded.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import margins
        >>> margins(torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.5]]), torch.tensor([0, 1]))
        tensor([0.7000, 0.0000])

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, sample margin.
    """
    return _margins("margins", split, labels)[0]


@torch.no_grad()
def sample_margin(
    split: Split | Tensor,
    labels: Tensor | None = None,
    *,
    quantiles: Sequence[float] = QUANTILES,
) -> SampleMarginResult:
    r"""Mean, minimum and quantiles of the sample margin, over all and for each class.

    .. math::
        \gamma_j = \min_{i: y_i = j}\gamma_i,\qquad \gamma_{\min} = \min_j\gamma_j

    On unit vectors it is at most :math:`k/(k-1)`, reached at the simplex. A quantile is one of the
    margins: the smallest one that at least this fraction of the examples does not exceed.

    Args:
        split: a split, or similarities of shape ``(N, C)``.
        labels: class of each example, shape ``(N,)``; with similarities only.
        quantiles: levels between 0 and 1.

    Returns:
        The :class:`SampleMarginResult`. Classes without an example are NaN, with a warning.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import sample_margin
        >>> cosine = torch.tensor([[0.9, 0.2], [0.8, 0.4], [0.3, 0.5]])
        >>> result = sample_margin(cosine, torch.tensor([0, 0, 1]), quantiles=[0.5])
        >>> [round(float(value), 4) for value in result[:3]]
        [0.4333, 0.2, 0.4]

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, sample margin.
    """
    levels = check_quantiles("sample_margin", quantiles)
    values, labels, classes = _margins("sample_margin", split, labels)
    sums = margin_sums(values, labels, classes)
    return finish_margin("sample_margin", sums, exact_quantiles(values.double(), levels))


@torch.no_grad()
def hard_margin_loss(
    split: Split | Tensor, labels: Tensor | None = None, *, gamma: float | Sequence[float] | Tensor
) -> HardMarginLossResult:
    r"""Fraction of each class that does not reach a margin.

    .. math::
        \hat L_{\gamma,j} = \frac{1}{n_j}\,\#\bigl\{i: y_i = j,\ \gamma_i < \gamma\bigr\}

    Its mean over the classes is the empirical part of the class-balanced bound on the test error.
    With :math:`\gamma = 0` it is the error rate, except for ties.

    Args:
        split: a split, or similarities of shape ``(N, C)``.
        labels: class of each example, shape ``(N,)``; with similarities only.
        gamma: the margin, in units of similarity; one number, or one for each class.

    Returns:
        The :class:`HardMarginLossResult`. Classes without an example are NaN, with a warning.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import hard_margin_loss
        >>> cosine = torch.tensor([[0.9, 0.2], [0.8, 0.6], [0.3, 0.5]])
        >>> hard_margin_loss(cosine, torch.tensor([0, 0, 1]), gamma=0.5).class_mean
        tensor([0.5000, 1.0000], dtype=torch.float64)

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022; Cao et al., LDAM, NeurIPS
        2019, Theorem 2.
    """
    values, labels, classes = _margins("hard_margin_loss", split, labels)
    limits = as_gamma("hard_margin_loss", gamma, classes)
    return finish_hard_margin("hard_margin_loss", hard_margin_sums(values, labels, limits))


@torch.no_grad()
def softmax_bias(
    split: Split | Tensor, labels: Tensor | None = None, *, scale: float = 1.0
) -> SoftmaxBiasResult:
    r"""Margin implied by the softmax: log-sum-exp of the other classes minus their maximum.

    .. math::
        \hat\rho = \log\sum_{c\ne y} e^{f_c - \max_{j\ne y} f_j},
        \qquad 0 \le \hat\rho \le \log(C-1)

    Softmax cross entropy is the softplus of :math:`\max_{j\ne y} f_j - f_y + \hat\rho`. The bias is
    0 for two classes. Values are clamped to the bounds, which rounding could exceed.

    Args:
        split: a split, or similarities of shape ``(N, C)``.
        labels: class of each example, shape ``(N,)``; with similarities only.
        scale: factor of the similarities; 1 for logits. A split has its own.

    Returns:
        The :class:`SoftmaxBiasResult`.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import softmax_bias
        >>> logits = torch.tensor([[5.0, 1.0, 1.0], [5.0, 9.0, -9.0]])
        >>> [round(float(value), 4) for value in softmax_bias(logits, torch.tensor([0, 0]))]
        [0.3466, 0.0, 0.6931, 0.6931]

    References:
        Kobayashi, Large Margin in Softmax Cross-Entropy Loss, BMVC 2019, eq. 4, 5, 7.
    """
    checked = as_split(
        "softmax_bias", split, labels, reads=("target", "others", "hardest"), scale=scale
    )
    return finish_bias("softmax_bias", bias_sums(checked), checked.classes)


class MarginSums(NamedTuple):
    """Sums over batches and ranks for a :class:`SampleMarginResult`, except quantiles."""

    total: Tensor
    counts: Tensor
    smallest: Tensor


class HardMarginSums(NamedTuple):
    """Sums over batches and ranks for a :class:`HardMarginLossResult`."""

    missed: Tensor
    counts: Tensor


class BiasSums(NamedTuple):
    """Sums over batches and ranks for a :class:`SoftmaxBiasResult`."""

    total: Tensor
    counts: Tensor
    smallest: Tensor
    largest: Tensor


def _margins(name: str, split: Split | Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
    checked = as_split(name, split, labels, reads=("target", "hardest"))
    return checked.target - checked.hardest, checked.labels, checked.classes


def margin_sums(values: Tensor, labels: Tensor, classes: int) -> MarginSums:
    """Sum, number and smallest margin of each class, shape ``(C,)`` each."""
    values = values.double()
    empty = values.new_zeros(classes)
    return MarginSums(
        total=empty.index_add(0, labels, values),
        counts=torch.bincount(labels, minlength=classes),
        smallest=(empty + math.inf).scatter_reduce(0, labels, values, "amin"),
    )


def finish_margin(name: str, sums: MarginSums, quantiles: Tensor) -> SampleMarginResult:
    """Compute means from the sums; classes without examples become NaN."""
    present = sums.counts > 0
    if not bool(present.any()):
        warn_undefined(name, "no example was given; the result is NaN")
    else:
        warn_absent(name, sums.counts)
    return SampleMarginResult(
        mean=sums.total.sum() / sums.counts.sum(),
        minimum=sums.smallest.amin().where(present.any(), math.nan),
        quantiles=quantiles,
        class_mean=sums.total / sums.counts,
        class_minimum=sums.smallest.where(present, math.nan),
        counts=sums.counts,
    )


def as_gamma(name: str, gamma: float | Sequence[float] | Tensor, classes: int) -> Tensor:
    """Expand gamma to one margin per class, shape ``(C,)``."""
    limits = torch.as_tensor(gamma, dtype=torch.double).detach()
    if limits.shape not in ((), (classes,)) or bool(limits.isnan().any()):
        raise ValueError(f"{name} expects gamma to be a number or {classes} numbers, got {gamma!r}")
    return limits.expand(classes)


def hard_margin_sums(values: Tensor, labels: Tensor, limits: Tensor) -> HardMarginSums:
    """Number of examples below the margin of their class, and of all, shape ``(C,)`` each."""
    classes = len(limits)
    missed = labels[values.double() < limits.to(values.device)[labels]]
    return HardMarginSums(
        missed=torch.bincount(missed, minlength=classes),
        counts=torch.bincount(labels, minlength=classes),
    )


def finish_hard_margin(name: str, sums: HardMarginSums) -> HardMarginLossResult:
    """Compute fractions from the counts."""
    if not bool(sums.counts.any()):
        warn_undefined(name, "no example was given; the result is NaN")
    else:
        warn_absent(name, sums.counts)
    class_mean = sums.missed.double() / sums.counts
    return HardMarginLossResult(
        mean=sums.missed.sum().double() / sums.counts.sum(),
        balanced=class_mean.nanmean(),
        class_mean=class_mean,
        counts=sums.counts,
    )


def bias_sums(split: Split) -> BiasSums:
    """Sum, number, smallest and largest bias, all scalars."""
    bias = (split.others - split.scale * split.hardest).double()
    bias = bias.clamp(0.0, math.log(split.classes - 1))
    end = bias.new_full((1,), math.inf)
    return BiasSums(
        total=bias.sum(),
        counts=torch.tensor(len(bias), device=bias.device),
        smallest=torch.cat([bias, end]).amin(),
        largest=torch.cat([bias, -end]).amax(),
    )


def finish_bias(name: str, sums: BiasSums, classes: int) -> SoftmaxBiasResult:
    """Compute the mean from the sum."""
    some = sums.counts > 0
    if not bool(some):
        warn_undefined(name, "no example was given; the result is NaN")
    return SoftmaxBiasResult(
        mean=sums.total / sums.counts,
        minimum=sums.smallest.where(some, math.nan),
        maximum=sums.largest.where(some, math.nan),
        bound=sums.total.new_tensor(math.log(classes - 1)),
    )
