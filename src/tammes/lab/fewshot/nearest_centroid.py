"""Nearest-centroid classifiers for episodes, which need no training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tammes.lab.fewshot.episodes import Episodes
from tammes.lab.fewshot.finetuned_heads import directions
from tammes.losses.subspace import OrthogonalComplement


@dataclass(frozen=True)
class NearestCentroid:
    """Classifier that predicts the class with the nearest mean of support features.

    Args:
        normalize: scale features to unit length (L2).
        centre: before that, subtract the mean of the base features (CL2N).
        outside: before that, project onto the orthogonal complement of the prototypes' span.
        cosine: compare by cosine with the mean instead of distance from it.
    """

    normalize: bool = False
    centre: bool = False
    outside: bool = False
    cosine: bool = False


def centroid() -> NearestCentroid:
    """Return the nearest centroid of raw features."""
    return NearestCentroid()


def l2() -> NearestCentroid:
    """Return the nearest centroid of unit features."""
    return NearestCentroid(normalize=True)


def cl2n() -> NearestCentroid:
    """Return the nearest centroid of features centred by the base mean and normalized."""
    return NearestCentroid(normalize=True, centre=True)


def centred_cosine() -> NearestCentroid:
    """Return the nearest centroid, by cosine, of features centred by the base mean.

    With one support image per class this equals :func:`cl2n`; with several, longer features weigh
    more.
    """
    return NearestCentroid(centre=True, cosine=True)


def complement() -> NearestCentroid:
    """Return the nearest centroid of features projected off the prototypes' span and normalized."""
    return NearestCentroid(normalize=True, outside=True)


def preprocess(
    features: Tensor,
    method: NearestCentroid,
    base_mean: Tensor | None = None,
    prototypes: Tensor | None = None,
) -> Tensor:
    """Centre, project and scale features as a classifier needs them, shape ``(N, D)``.

    The result does not depend on the overall scale of the features. ``cl2n`` and
    ``centred_cosine`` need the mean of the base features, ``complement`` the prototypes of the
    trained head.
    """
    if method.centre:
        name = "centred_cosine" if method.cosine else "cl2n"
        who = f"{name} expects the mean of the base features"
        features = features - _needed(who, base_mean, features)
    if method.outside:
        who = "complement expects the prototypes of the head that was trained"
        known = _needed(who, prototypes, features)
        if len(known) >= features.shape[1]:
            raise ValueError(
                "complement expects fewer prototypes than dimensions, "
                f"got {len(known)} of {features.shape[1]}: nothing is outside their span"
            )
        features = OrthogonalComplement().project(features, known)
    if not bool(features.isfinite().all()):
        raise ValueError(
            "few-shot expects features that stay finite when centred or projected, got infinity"
        )
    if method.normalize:
        return directions(features)
    # Squares of very long or short features would overflow or underflow.
    return features / features.abs().amax().clamp_min(torch.finfo(features.dtype).tiny)


def _needed(sentence: str, value: Tensor | None, features: Tensor) -> Tensor:
    """Return a required tensor with the dtype and device of the features."""
    if value is None:
        raise ValueError(f"{sentence}, got none")
    value = value.to(features)
    if not bool(value.isfinite().all()):
        raise ValueError(f"{sentence} to be finite, got NaN or infinity")
    return value


def centroid_classifiers(
    features: Tensor, episodes: Episodes, numbers: Tensor, *, cosine: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the weights and offsets of linear classifiers that pick the nearest centroid.

    For preprocessed features and the episodes with these numbers, the shapes are ``(E, way, D)``
    and ``(E, way)``; with ``cosine`` the nearest centroid is that of the largest cosine.
    """
    places = episodes.support[numbers.cpu()].to(features.device)
    centroids = features[places].mean(2)
    if cosine:
        # The length of a query does not change which class scores highest.
        return directions(centroids), centroids.new_zeros(centroids.shape[:2])
    # |q - c|^2 relative to the mean of the centroids: a common offset would only cost precision.
    middle = centroids.mean(1, keepdim=True)
    weight = centroids - middle
    return weight, -(weight * (middle + weight / 2)).sum(2)
