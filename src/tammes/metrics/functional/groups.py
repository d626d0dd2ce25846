"""Accuracy of frequent, medium and rare classes, and the confidence of predictions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import as_split, warn_absent, warn_undefined
from tammes.split import Split

GROUPS = ("many", "medium", "few")


class GroupAccuracyResult(NamedTuple):
    """Result of :func:`group_accuracy`; means are over classes with test examples.

    Attributes:
        many: mean accuracy of the classes with many training examples.
        medium: mean accuracy of the classes in between.
        few: mean accuracy of the classes with few training examples.
        balanced: mean accuracy of all classes.
        overall: accuracy over all examples.
        class_accuracy: accuracy of each class, NaN where it has no test example, shape ``(C,)``.
        counts: test examples of each class, shape ``(C,)``.
    """

    many: Tensor
    medium: Tensor
    few: Tensor
    balanced: Tensor
    overall: Tensor
    class_accuracy: Tensor
    counts: Tensor


class GroupSums(NamedTuple):
    """Sums over batches and ranks for a :class:`GroupAccuracyResult`."""

    right: Tensor
    counts: Tensor


class Confidence(NamedTuple):
    """Result of :func:`confidence`: probability of each prediction, and whether it is correct."""

    probability: Tensor
    right: Tensor


@torch.no_grad()
def group_accuracy(
    split: Split | Tensor,
    labels: Tensor | None = None,
    *,
    training_counts: Sequence[int] | Tensor,
    many: int = 100,
    few: int = 20,
) -> GroupAccuracyResult:
    r"""Accuracy of classes with many, medium and few training examples.

    .. math::
        A_G = \frac{1}{|G|}\sum_{c\in G}\frac{\#\{i: y_i = c,\ a_c > \max_{j\ne c}a_j\}}{n_c}

    A class has many training examples if it has more than ``many``, few if it has fewer than
    ``few``, and is medium otherwise.

    Args:
        split: a split, or similarities of shape ``(N, C)``.
        labels: class of each example, shape ``(N,)``; with similarities only.
        training_counts: training examples of each class, shape ``(C,)``.
        many: classes with more training examples are frequent.
        few: classes with fewer training examples are rare.

    Returns:
        The :class:`GroupAccuracyResult`. Groups and classes without a test example are NaN, with a
        warning.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import group_accuracy
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> counts = [500, 50, 5]
        >>> result = group_accuracy(logits, torch.tensor([0, 1, 2]), training_counts=counts)
        >>> [float(value) for value in result[:3]]
        [1.0, 0.0, 1.0]

    References:
        Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019, Section 4.
    """
    group = class_groups("group_accuracy", training_counts, many, few)
    checked = as_split(
        "group_accuracy", split, labels, reads=("target", "hardest"), classes=len(group)
    )
    return finish_groups("group_accuracy", group_sums(checked), group)


def class_groups(name: str, training_counts: Sequence[int] | Tensor, many: int, few: int) -> Tensor:
    """Index into :data:`GROUPS` of each class, shape ``(C,)``."""
    counts = torch.as_tensor(training_counts).detach().cpu()
    if counts.ndim != 1 or len(counts) < 2 or bool((counts < 0).any()):
        raise ValueError(
            f"{name} expects training_counts of 2 classes or more, none negative, "
            f"got {training_counts!r}"
        )
    if few > many:
        raise ValueError(f"{name} expects few <= many, got few={few} and many={many}")
    return torch.where(counts > many, 0, torch.where(counts < few, 2, 1))


def group_sums(split: Split) -> GroupSums:
    """Count correct predictions and examples by class; a tie is an error."""
    right = split.labels[split.target > split.hardest]
    return GroupSums(
        right=torch.bincount(right, minlength=split.classes),
        counts=torch.bincount(split.labels, minlength=split.classes),
    )


def finish_groups(name: str, sums: GroupSums, group: Tensor) -> GroupAccuracyResult:
    """Compute the accuracy of each class, and average it over each group."""
    group = group.to(sums.counts.device)
    accuracy = sums.right.double() / sums.counts
    parts = {label: accuracy[group == index].nanmean() for index, label in enumerate(GROUPS)}
    empty = [label for label, part in parts.items() if bool(part.isnan())]
    if empty:
        warn_undefined(name, f"no example of the classes with {', '.join(empty)}; these are NaN")
    warn_absent(name, sums.counts)
    return GroupAccuracyResult(
        **parts,
        balanced=accuracy.nanmean(),
        overall=sums.right.sum().double() / sums.counts.sum(),
        class_accuracy=accuracy,
        counts=sums.counts,
    )


@torch.no_grad()
def confidence(
    split: Split | Tensor, labels: Tensor | None = None, *, scale: float = 1.0
) -> Confidence:
    r"""Softmax probability of each prediction, and whether the prediction is correct.

    .. math:: p_{\max} = e^{\max(f_y,\ \max_{j\ne y} f_j)} \,/\, (e^{f_y} + e^{\Lambda})

    with :math:`\Lambda` the log-sum-exp of the other classes' scores: a split is enough for
    calibration.

    Args:
        split: a split, or similarities of shape ``(N, C)``.
        labels: class of each example, shape ``(N,)``; with similarities only.
        scale: factor of the similarities; 1 for logits. A split has its own.

    Returns:
        The :class:`Confidence`, two tensors of shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import confidence
        >>> confidence(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([2]))
        Confidence(probability=tensor([0.5761]), right=tensor([True]))

    References:
        Guo et al., On Calibration of Modern Neural Networks, ICML 2017, Section 2.
    """
    reads = ("target", "others", "hardest")
    checked = as_split("confidence", split, labels, reads=reads, scale=scale)
    own = checked.scale * checked.target
    answer = torch.maximum(own, checked.scale * checked.hardest)
    probability = (answer - torch.logaddexp(own, checked.others)).exp().clamp_max(1.0)
    return Confidence(probability, checked.target > checked.hardest)
