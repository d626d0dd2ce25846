"""Neural collapse: distance of features and classifier from a simplex."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import (
    IGNORED,
    as_examples,
    as_prototypes,
    count_classes,
    warn_undefined,
)
from tammes.similarity import norm, unit

_BLOCK = 1 << 22
"""Number of cosines held in memory at once."""


class SimplexDeviation(NamedTuple):
    """Deviation of vectors from a simplex; all values are zero at a simplex (NC2).

    Attributes:
        equinorm: standard deviation of the norms over their mean.
        equiangular: standard deviation of the cosines of all pairs.
        widest: mean distance of these cosines from -1/(C - 1), the cosine of the largest angle
            that all pairs can have.
    """

    equinorm: Tensor
    equiangular: Tensor
    widest: Tensor


class NeuralCollapseResult(NamedTuple):
    """Result of :func:`neural_collapse`; all values are zero at full collapse.

    Attributes:
        nc1: variability within classes relative to that between classes.
        nc2: deviation of the centred class means from a simplex.
        nc2_prototypes: deviation of the prototypes from a simplex; None without prototypes.
        nc3: distance of prototypes from centred class means, both scaled to norm one; None without
            prototypes.
        nc4: fraction of the examples on which the classifier and the nearest class mean disagree;
            None without predictions.
    """

    nc1: Tensor
    nc2: SimplexDeviation
    nc2_prototypes: SimplexDeviation | None
    nc3: Tensor | None
    nc4: Tensor | None


class CollapseSums(NamedTuple):
    """Sums over batches and ranks for a :class:`NeuralCollapseResult`.

    The scatter is about the class means rather than about zero: at full collapse the difference of
    second moments would cancel completely.

    Attributes:
        sums: sum of the features of each class, shape ``(C, D)``.
        counts: number of features of each class, shape ``(C,)``.
        within: sum of the outer products of all features minus their class mean, shape ``(D, D)``.
    """

    sums: Tensor
    counts: Tensor
    within: Tensor

    def means(self) -> Tensor:
        """Mean of each class, NaN where it has no example, shape ``(C, D)``."""
        return self.sums / self.counts[:, None]


@torch.no_grad()
def neural_collapse(
    features: Tensor,
    labels: Tensor,
    *,
    prototypes: Tensor | None = None,
    predictions: Tensor | None = None,
    means: Tensor | None = None,
    classes: int | None = None,
) -> NeuralCollapseResult:
    r"""Four measures of neural collapse.

    With class means :math:`\mu_c`, the mean of all features :math:`\mu_G`, :math:`\Sigma_W` the
    mean of :math:`(h-\mu_c)(h-\mu_c)^\top` over all examples and :math:`\Sigma_B` that of
    :math:`(\mu_c-\mu_G)(\mu_c-\mu_G)^\top` over classes:

    .. math::
        NC1 = \frac1C\operatorname{tr}\bigl(\Sigma_W\Sigma_B^\dagger\bigr),\qquad
        NC3 = \Bigl\lVert\frac{W}{\lVert W\rVert_F}-\frac{M}{\lVert M\rVert_F}\Bigr\rVert_F^2,
        \quad M = [\mu_c-\mu_G]_c

    NC2 is :math:`\mathrm{Std}/\mathrm{Avg}` of the norms, :math:`\mathrm{Std}` of the cosines and
    :math:`\mathrm{Avg}\,|\cos + \frac{1}{C-1}|` over pairs, of the columns of M and of the
    prototypes; NC4 is the fraction of examples whose nearest :math:`\mu_c` is not the class that
    the classifier predicts. Standard deviations are those of the population (no Bessel correction).

    Args:
        features: shape ``(N, D)``.
        labels: class of each example, or -100, shape ``(N,)``.
        prototypes: rows of the classifier, shape ``(C, D)``.
        predictions: class that the classifier predicts for each example, shape ``(N,)``.
        means: class means for NC4, such as those of the training set, shape ``(C, D)``; by default
            those of the features.
        classes: number of classes; by default that of the prototypes, or one more than the largest
            label.

    Returns:
        The :class:`NeuralCollapseResult`. Classes without an example are excluded, with a warning.

    Example:
        >>> import torch, tammes
        >>> from tammes.metrics.functional import neural_collapse
        >>> simplex, labels = tammes.geometry.simplex(4, 3), torch.arange(4).repeat(2)
        >>> result = neural_collapse(simplex[labels], labels, prototypes=simplex)
        >>> max(float(value) for value in (result.nc1, *result.nc2, result.nc3)) < 1e-6
        True

    References:
        Papyan, Han and Donoho, Prevalence of Neural Collapse during the Terminal Phase of Deep
        Learning Training, PNAS 2020, Figures 2-7.
    """
    if classes is None:
        classes = count_classes(labels) if prototypes is None else len(prototypes)
    size = features.shape[1] if features.ndim == 2 else 0
    nothing = no_collapse_sums(classes, size, features.device)
    sums = absorb_("neural_collapse", nothing, features, labels)
    nc4 = None
    if predictions is not None:
        known_means = sums.means() if means is None else means
        differ, judged = disagreement("neural_collapse", features, labels, predictions, known_means)
        nc4 = differ.double() / judged
    return finish_collapse("neural_collapse", sums, prototypes, nc4)


@torch.no_grad()
def simplex_deviation(vectors: Tensor) -> SimplexDeviation:
    """Deviation of vectors from equal norms and equal, largest angles.

    Args:
        vectors: two rows or more, shape ``(C, D)``.

    Returns:
        The :class:`SimplexDeviation`; pairs are processed in blocks.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import simplex_deviation
        >>> [round(float(value), 4) for value in simplex_deviation(torch.eye(3))]
        [0.0, 0.0, 0.5]

    References:
        Papyan, Han and Donoho, PNAS 2020, Figures 2-4.
    """
    vectors = as_prototypes("simplex_deviation", vectors).double()
    count = len(vectors)
    if count < 2:
        raise ValueError(f"simplex_deviation expects 2 vectors or more, got {count}")
    lengths, directions = norm(vectors), unit(vectors)
    first, second, absolute = vectors.new_zeros(3).unbind()
    for start in range(0, count, max(1, _BLOCK // count)):
        rows = directions[start : start + max(1, _BLOCK // count)]
        # Relative to the simplex the deviation stays accurate near it.
        excess = rows @ directions.T + 1 / (count - 1)
        excess.diagonal(start).zero_()
        first = first + excess.sum()
        second = second + excess.square().sum()
        absolute = absolute + excess.abs().sum()
    pairs = count * (count - 1)
    spread = (second / pairs - (first / pairs).square()).clamp_min(0.0).sqrt()
    return SimplexDeviation(
        equinorm=torch.where(lengths.mean() > 0, lengths.std(correction=0) / lengths.mean(), 0.0),
        equiangular=spread,
        widest=absolute / pairs,
    )


@torch.no_grad()
def nearest_mean(features: Tensor, means: Tensor) -> Tensor:
    """Class whose mean is nearest to each feature; a class with a NaN mean is never chosen.

    Args:
        features: shape ``(N, D)``.
        means: shape ``(C, D)``.

    Returns:
        The classes, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import nearest_mean
        >>> nearest_mean(torch.tensor([[1.0, 0.9]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        tensor([1])
    """
    features, means = features.detach().double(), means.detach().double()
    # Distances do not depend on the origin; relative to the centre they are more accurate.
    known = ~means.isnan().any(1)
    centre = means[known].mean(0)
    means, features = means - centre, features - centre
    half_squares = means.square().sum(1) / 2
    nearest = [
        (half_squares - block @ means.nan_to_num().T).masked_fill(~known, math.inf).argmin(1)
        for block in features.split(max(1, _BLOCK // len(means)))
    ]
    return torch.cat(nearest) if nearest else features.new_zeros(0, dtype=torch.long)


def no_collapse_sums(classes: int, size: int, device: torch.device | None = None) -> CollapseSums:
    """Sums of no examples."""
    return CollapseSums(
        sums=torch.zeros(classes, size, dtype=torch.double, device=device),
        counts=torch.zeros(classes, dtype=torch.long, device=device),
        within=torch.zeros(size, size, dtype=torch.double, device=device),
    )


def absorb_(name: str, sums: CollapseSums, features: Tensor, labels: Tensor) -> CollapseSums:
    """Add examples to the sums, in place for those with one row per class."""
    classes, size = sums.sums.shape
    features, labels = as_examples(name, features, labels, classes, size)
    present, place = labels.unique(return_inverse=True)
    batch = no_collapse_sums(len(present), size, features.device)
    batch.sums.index_add_(0, place, features)
    batch.counts.index_add_(0, place, torch.ones_like(place))
    residual = features - batch.means()[place]
    with torch.autocast(features.device.type, enabled=False):
        batch.within.addmm_(residual.T, residual)
    known = CollapseSums(sums.sums[present], sums.counts[present], sums.within)
    within = merge(known, batch).within
    sums.sums.index_add_(0, present, batch.sums)
    sums.counts.index_add_(0, present, batch.counts)
    return sums._replace(within=within)


def merge(one: CollapseSums, two: CollapseSums) -> CollapseSums:
    """Merge the sums of two sets of examples; their different means add to the scatter."""
    gap = (two.means() - one.means()).nan_to_num(0.0)
    # In float64: a quotient of integers would be float32.
    weight = one.counts.double() * two.counts / (one.counts + two.counts).clamp_min(1)
    with torch.autocast(gap.device.type, enabled=False):
        between = (weight[:, None] * gap).T @ gap
    return CollapseSums(
        one.sums + two.sums, one.counts + two.counts, one.within + two.within + between
    )


def disagreement(
    name: str, features: Tensor, labels: Tensor, predictions: Tensor, means: Tensor
) -> tuple[Tensor, Tensor]:
    """Count the examples on which classifier and nearest mean disagree, and all examples."""
    if predictions.shape != labels.shape or predictions.is_floating_point():
        raise ValueError(
            f"{name} expects predictions to be a class for each of the {len(labels)} examples, "
            f"got {predictions.dtype} of shape {tuple(predictions.shape)}"
        )
    answers = predictions[labels != IGNORED]
    features, labels = as_examples(name, features, labels, *means.shape)
    differ = nearest_mean(features, means) != answers
    return differ.sum(), torch.tensor(len(labels), device=differ.device)


def finish_collapse(
    name: str, sums: CollapseSums, prototypes: Tensor | None, nc4: Tensor | None
) -> NeuralCollapseResult:
    """Compute the result from the sums."""
    if prototypes is not None:
        prototypes = as_prototypes(name, prototypes).double()
        if prototypes.shape != sums.sums.shape:
            raise ValueError(
                f"{name} expects prototypes of shape {tuple(sums.sums.shape)}, "
                f"got {tuple(prototypes.shape)}"
            )
    present = sums.counts > 0
    classes = int(present.sum())
    if classes < 2:
        warn_undefined(name, f"{classes} classes have examples, 2 are needed; the result is NaN")
        nan = sums.within.new_tensor(math.nan)
        nothing = SimplexDeviation(nan, nan, nan)
        given = prototypes is not None
        return NeuralCollapseResult(
            nan, nothing, nothing if given else None, nan if given else None, nc4
        )
    if classes < len(present):
        warn_undefined(
            name,
            f"{len(present) - classes} of {len(present)} classes have no example: excluded",
        )
    counts = sums.counts[present].double()
    means = sums.sums[present] / counts[:, None]
    total = counts.sum()
    with torch.autocast(means.device.type, enabled=False):
        centred = means - sums.sums.sum(0) / total
        between = centred.T @ centred / classes
        within = sums.within / total
        nc1 = (within * torch.linalg.pinv(between, hermitian=True)).sum() / classes
        nc2 = simplex_deviation(centred)
        nc2_prototypes, nc3 = None, None
        if prototypes is not None:
            kept = prototypes[present]
            nc2_prototypes = simplex_deviation(kept)
            nc3 = (_unit_norm(kept) - _unit_norm(centred)).square().sum()
    return NeuralCollapseResult(nc1.clamp_min(0.0), nc2, nc2_prototypes, nc3, nc4)


def _unit_norm(matrix: Tensor) -> Tensor:
    return matrix / norm(matrix.flatten()).clamp_min(torch.finfo(matrix.dtype).tiny)
