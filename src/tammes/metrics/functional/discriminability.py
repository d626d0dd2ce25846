"""Distances between classes relative to those within classes, from class sums alone."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import as_examples, count_classes, warn_undefined
from tammes.similarity import unit

Weighting = Literal["class", "pair"]


class DiscriminabilityValues(NamedTuple):
    """Distances within and between classes.

    Attributes:
        intra: half the mean squared distance of two examples of one class.
        inter: half the mean squared distance of two examples of different classes.
        ratio: inter over intra, the discriminability phi; infinite if classes are points up to the
            precision of float64, a relative width of 2e-16 times the number of examples.
    """

    intra: Tensor
    inter: Tensor
    ratio: Tensor


class DiscriminabilityResult(NamedTuple):
    """Result of :func:`discriminability`.

    Attributes:
        base: distances of all classes that are not novel.
        novel: distances of the novel classes; None if there are none.
    """

    base: DiscriminabilityValues
    novel: DiscriminabilityValues | None


class ClassSums(NamedTuple):
    """Sums over batches and ranks, by class.

    Attributes:
        sums: sum of the features, shape ``(C, D)``.
        squares: sum of their squared norms, shape ``(C,)``.
        counts: number of features, shape ``(C,)``.
    """

    sums: Tensor
    squares: Tensor
    counts: Tensor


@torch.no_grad()
def discriminability(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int | None = None,
    novel: Sequence[int] | Tensor | None = None,
    distinct: bool = False,
    weighting: Weighting = "class",
    normalize: bool = True,
) -> DiscriminabilityResult:
    r"""Intra-class and inter-class distances and their ratio, for base and for novel classes.

    .. math::
        2 D_{intra} = E_{y_i = y_l}\lVert z_i - z_l\rVert^2,\quad
        2 D_{inter} = E_{y_i\ne y_l}\lVert z_i - z_l\rVert^2,\quad
        \phi = D_{inter}/D_{intra}

    For unit features :math:`D_{intra} = 1 - \lVert\mu_c\rVert^2` and :math:`D_{inter} = 1 -
    \mu_a\cdot\mu_b`, so that class sums are enough and no pair is ever formed. Note that
    :math:`D_{inter}` is not the distance of centroids: it includes the widths of both classes.

    Args:
        features: shape ``(N, D)``.
        labels: class of each example, or -100, shape ``(N,)``.
        classes: number of classes; by default one more than the largest label.
        novel: classes to measure separately from the others.
        distinct: exclude pairs of an example with itself, which multiplies the intra-class distance
            by n/(n - 1) and needs two examples of a class. By default the two are drawn
            independently.
        weighting: ``"class"`` weights every class and every pair of classes equally, ``"pair"``
            every pair of examples. The two agree if classes have equal sizes.
        normalize: scale features to length one first, as in the paper.

    Returns:
        The :class:`DiscriminabilityResult`. Values that need more examples are NaN, with a warning.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import discriminability
        >>> features = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [-3.0, 0.0]])
        >>> result = discriminability(features, torch.tensor([0, 0, 1, 1]))
        >>> [round(float(value), 4) for value in result.base]
        [0.25, 1.5, 6.0]

    References:
        Liu et al., Negative Margin Matters, ECCV 2020, eq. 9-11.
    """
    classes = count_classes(labels) if classes is None else classes
    mask = novel_mask("discriminability", novel, classes).to(features.device)
    size = features.shape[1] if features.ndim == 2 else 0
    sums = no_class_sums(classes, size, features.device)
    add_examples_("discriminability", sums, features, labels, normalize=normalize)
    return finish_discriminability("discriminability", sums, mask, distinct, weighting)


def no_class_sums(classes: int, size: int, device: torch.device | None = None) -> ClassSums:
    """Sums of no examples."""
    return ClassSums(
        sums=torch.zeros(classes, size, dtype=torch.double, device=device),
        squares=torch.zeros(classes, dtype=torch.double, device=device),
        counts=torch.zeros(classes, dtype=torch.long, device=device),
    )


def add_examples_(
    name: str, sums: ClassSums, features: Tensor, labels: Tensor, *, normalize: bool
) -> None:
    """Add examples to the sums, in place: there may be a million classes."""
    classes, size = sums.sums.shape
    features, labels = as_examples(name, features, labels, classes, size)
    if normalize:
        features = unit(features)
    sums.sums.index_add_(0, labels, features)
    sums.squares.index_add_(0, labels, features.square().sum(1))
    sums.counts.index_add_(0, labels, torch.ones_like(labels))


def novel_mask(name: str, novel: Sequence[int] | Tensor | None, classes: int) -> Tensor:
    """Mask of the novel classes, shape ``(C,)``."""
    mask = torch.zeros(classes, dtype=torch.bool)
    if novel is not None:
        named = torch.as_tensor(novel, dtype=torch.long).flatten().cpu()
        if named.numel() and (int(named.min()) < 0 or int(named.max()) >= classes):
            raise ValueError(
                f"{name} expects novel classes from 0 to {classes - 1}, "
                f"got {int(named.min())} to {int(named.max())}"
            )
        mask[named] = True
    return mask


def check_weighting(name: str, weighting: str) -> None:
    """Raise ``ValueError`` for an unknown weighting."""
    if weighting not in ("class", "pair"):
        raise ValueError(f"{name} expects weighting 'class' or 'pair', got {weighting!r}")


def finish_discriminability(
    name: str, sums: ClassSums, novel: Tensor, distinct: bool, weighting: Weighting
) -> DiscriminabilityResult:
    """Compute the distances of base and novel classes from the class sums."""
    check_weighting(name, weighting)
    groups = [("base", ~novel), ("novel", novel)]
    values = [
        _distances(
            f"{name} ({group})", ClassSums(*(part[mask] for part in sums)), distinct, weighting
        )
        for group, mask in groups
        if group == "base" or bool(mask.any())
    ]
    return DiscriminabilityResult(values[0], values[1] if len(values) > 1 else None)


def _distances(
    name: str, sums: ClassSums, distinct: bool, weighting: Weighting
) -> DiscriminabilityValues:
    present = sums.counts > 0
    sums = ClassSums(*(part[present] for part in sums))
    counts = sums.counts.double()
    means = sums.sums / counts[:, None]
    squares = sums.squares / counts
    # A difference within the rounding error of such sums is zero: the points are equal.
    rounding = counts * torch.finfo(counts.dtype).eps * squares
    within = squares - means.square().sum(1)
    within = torch.where(within <= rounding, 0.0, within)

    weights = counts if weighting == "pair" else torch.ones_like(counts)
    pairs = weights.square()
    if distinct:
        many = counts > 1
        within = torch.where(many, within * counts / (counts - 1).clamp_min(1), 0.0)
        pairs = torch.where(many, weights * (weights - 1) if weighting == "pair" else pairs, 0.0)
    intra = (pairs * within).sum() / pairs.sum()

    total = weights.sum()
    weighted = weights[:, None] * means
    # Over ordered pairs of different classes: the square of the sum minus the sum of squares.
    between = (weights * squares * (total - weights)).sum()
    between = between - (weighted.sum(0).square().sum() - weighted.square().sum())
    inter = between / (total.square() - weights.square().sum())
    inter = torch.where(inter <= rounding.sum(), 0.0, inter)
    ratio = inter / intra
    if not bool(torch.stack([intra, inter, ratio]).isnan().any()):
        return DiscriminabilityValues(intra, inter, ratio)
    warn_undefined(
        name,
        f"{len(counts)} classes with examples, of which {int((counts > 1).sum())} have two or "
        "more, leave a distance or the ratio undefined (NaN)",
    )
    nan = intra.new_tensor(math.nan)
    one_class = len(counts) < 2
    return DiscriminabilityValues(intra, nan if one_class else inter, nan if one_class else ratio)
