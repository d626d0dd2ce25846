"""Scores for detecting unknown examples; all are higher for known ones."""

from typing import NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import (
    as_examples,
    check_features,
    check_one_space,
    count_classes,
    wide,
)
from tammes.similarity import directions

_ROWS = 1024
"""Rows whose similarities to all training examples are in memory at a time."""


@torch.no_grad()
def softmax_score(logits: Tensor) -> Tensor:
    r"""Maximum softmax probability.

    .. math:: s = \max_c \frac{e^{f_c}}{\sum_j e^{f_j}}

    Args:
        logits: shape ``(N, C)``; of a cosine head, scale times the cosines.

    Returns:
        The scores, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import softmax_score
        >>> softmax_score(torch.tensor([[0.0, 0.0], [0.0, 9.0]]))
        tensor([0.5000, 0.9999])

    References:
        Hendrycks and Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution
        Examples, ICLR 2017.
    """
    logits = _logits("softmax_score", logits)
    return (logits.amax(1) - logits.logsumexp(1)).exp()


@torch.no_grad()
def logit_score(logits: Tensor) -> Tensor:
    r"""Maximum logit.

    .. math:: s = \max_c f_c

    Args:
        logits: shape ``(N, C)``.

    Returns:
        The scores, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import logit_score
        >>> logit_score(torch.tensor([[0.0, 1.0], [0.0, 9.0]]))
        tensor([1., 9.])

    References:
        Hendrycks et al., Scaling Out-of-Distribution Detection for Real-World Settings, ICML 2022.
    """
    return _logits("logit_score", logits).amax(1)


@torch.no_grad()
def energy_score(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""Negative free energy of the logits.

    .. math:: s = T\log\sum_c e^{f_c/T}

    Args:
        logits: shape ``(N, C)``.
        temperature: T; as it tends to 0, the score tends to the maximum logit.

    Returns:
        The scores, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import energy_score
        >>> energy_score(torch.tensor([[0.0, 0.0], [0.0, 9.0]]))
        tensor([0.6931, 9.0001])

    References:
        Liu et al., Energy-based Out-of-distribution Detection, NeurIPS 2020.
    """
    if not temperature > 0:
        raise ValueError(f"energy_score expects a temperature above 0, got {temperature}")
    return temperature * (_logits("energy_score", logits) / temperature).logsumexp(1)


@torch.no_grad()
def cac_score(logits: Tensor) -> Tensor:
    r"""Score of class anchor clustering: small distance to one anchor alone.

    .. math:: s = -\min_c\ d_c\Bigl(1 - \frac{e^{-d_c}}{\sum_j e^{-d_j}}\Bigr),\qquad d_c = -f_c

    Args:
        logits: of a :class:`tammes.DistanceHead` of scale 1, minus the distances, shape ``(N, C)``.

    Returns:
        The scores, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import cac_score
        >>> cac_score(-torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        tensor([-0.1192, -1.0000])

    References:
        Miller et al., Class Anchor Clustering: A Loss for Distance-Based Open Set Recognition,
        WACV 2021.
    """
    logits = _logits("cac_score", logits)
    # One minus the softmax, without cancellation near one.
    return (logits * -torch.expm1(logits.log_softmax(1))).amax(1)


@torch.no_grad()
def prototype_score(features: Tensor, prototypes: Tensor) -> Tensor:
    r"""Cosine to the nearest prototype.

    .. math:: s = \max_c \cos\angle(x, w_c)

    Args:
        features: shape ``(N, D)``.
        prototypes: shape ``(C, D)``.

    Returns:
        The scores in float64, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import prototype_score
        >>> prototype_score(torch.tensor([[3.0, 4.0]]), torch.eye(2))
        tensor([0.8000], dtype=torch.float64)
    """
    return _cosine_to_nearest("prototype_score", features, prototypes, "prototypes", 1)


@torch.no_grad()
def knn_score(features: Tensor, training: Tensor, *, k: int = 50) -> Tensor:
    r"""Negative distance to the k-th nearest training example, on unit features.

    .. math:: s = -\lVert z - z_{(k)}\rVert,\qquad z = x/\lVert x\rVert

    Args:
        features: shape ``(N, D)``.
        training: features of training examples, shape ``(M, D)``.
        k: which neighbour; at most M.

    Returns:
        The scores in float64, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import knn_score
        >>> knn_score(torch.tensor([[0.0, 2.0]]), torch.eye(2), k=2)
        tensor([-1.4142], dtype=torch.float64)

    References:
        Sun et al., Out-of-Distribution Detection with Deep Nearest Neighbors, ICML 2022.
    """
    cosine = _cosine_to_nearest("knn_score", features, training, "training", k)
    return -(2 - 2 * cosine).clamp_min(0).sqrt()


class GaussianClasses(NamedTuple):
    """Class means and the inverse of their common covariance, of :func:`gaussian_classes`.

    Attributes:
        means: shape ``(C, D)``.
        precision: shape ``(D, D)``.
    """

    means: Tensor
    precision: Tensor


@torch.no_grad()
def gaussian_classes(features: Tensor, labels: Tensor) -> GaussianClasses:
    r"""Fit Gaussian classes with one covariance, for :func:`mahalanobis_score`.

    .. math:: \Sigma = \frac1N\sum_i (x_i - \mu_{y_i})(x_i - \mu_{y_i})^\top

    Args:
        features: training features, shape ``(N, D)``.
        labels: class of each, or -100, shape ``(N,)``.

    Returns:
        The :class:`GaussianClasses`; the inverse is the pseudo-inverse, so that directions without
        variance are ignored. Labels without an example are left out.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import gaussian_classes
        >>> gaussian_classes(torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([0, 0, 1])).precision
        tensor([[1.5000]], dtype=torch.float64)

    References:
        Lee et al., A Simple Unified Framework for Detecting Out-of-Distribution Samples and
        Adversarial Attacks, NeurIPS 2018.
    """
    check_features("gaussian_classes", "training", features)
    classes = count_classes(labels)
    rows, labels = as_examples("gaussian_classes", features, labels, classes, features.shape[1])
    present, place = labels.unique(return_inverse=True)
    sums = rows.new_zeros(len(present), rows.shape[1]).index_add(0, place, rows)
    means = sums / torch.bincount(place)[:, None]
    centred = rows - means[place]
    return GaussianClasses(
        means, torch.linalg.pinv(centred.T @ centred / len(rows), hermitian=True)
    )


@torch.no_grad()
def mahalanobis_score(features: Tensor, classes: GaussianClasses) -> Tensor:
    r"""Negative squared Mahalanobis distance to the nearest class.

    .. math:: s = -\min_c (x - \mu_c)^\top\Sigma^{-1}(x - \mu_c)

    Args:
        features: shape ``(N, D)``.
        classes: of :func:`gaussian_classes`.

    Returns:
        The scores in float64, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import gaussian_classes, mahalanobis_score
        >>> classes = gaussian_classes(torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([0, 0, 1]))
        >>> mahalanobis_score(torch.tensor([[4.0]]), classes)
        tensor([-13.5000], dtype=torch.float64)

    References:
        Lee et al., A Simple Unified Framework for Detecting Out-of-Distribution Samples and
        Adversarial Attacks, NeurIPS 2018.
    """
    check_features("mahalanobis_score", "query", features)
    check_one_space("mahalanobis_score", features, classes.means, "classes")
    # Distances are Euclidean after a linear map whose square is the precision.
    values, vectors = torch.linalg.eigh(classes.precision)
    whiten = vectors * values.clamp_min(0).sqrt()
    exact = "donot_use_mm_for_euclid_dist"
    means = classes.means @ whiten
    rows = (features.double() @ whiten).split(_ROWS)
    return torch.cat(
        [-torch.cdist(block, means, compute_mode=exact).amin(1).square() for block in rows]
    )


def _logits(name: str, logits: Tensor) -> Tensor:
    check_features(name, "logit", logits)
    return wide(logits)


def _cosine_to_nearest(name: str, features: Tensor, others: Tensor, what: str, k: int) -> Tensor:
    check_features(name, "query", features)
    check_features(name, what, others)
    check_one_space(name, features, others, what)
    if not 1 <= k <= len(others):
        raise ValueError(f"{name} expects k from 1 to {len(others)}, got {k}")
    keys = directions(others.double())
    rows = directions(features.double()).split(_ROWS)
    return torch.cat([(block @ keys.T).topk(k).values[:, -1] for block in rows])
