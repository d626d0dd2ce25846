"""The nearest centroid of an episode's support: nothing is trained."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tammes.lab.fewshot.episodes import Episodes
from tammes.lab.fewshot.finetuned_heads import directions
from tammes.losses.subspace import OrthogonalComplement


@dataclass(frozen=True)
class NearestCentroid:
    """The class whose mean of support features is nearest; nothing is trained.

    Args:
        normalize: scale features to length one first (L2).
        centre: take away the mean of the base features before that (CL2N).
        outside: take away what is in the span of the prototypes before that.
    """

    normalize: bool = False
    centre: bool = False
    outside: bool = False


def centroid() -> NearestCentroid:
    """Nearest centroid of the features as they are."""
    return NearestCentroid()


def l2() -> NearestCentroid:
    """Nearest centroid of features of length one."""
    return NearestCentroid(normalize=True)


def cl2n() -> NearestCentroid:
    """Nearest centroid of features less the mean of the base features, of length one."""
    return NearestCentroid(normalize=True, centre=True)


def complement() -> NearestCentroid:
    """Nearest centroid of what is left of features outside the prototypes' span, of length one."""
    return NearestCentroid(normalize=True, outside=True)


def preprocess(
    features: Tensor,
    method: NearestCentroid,
    base_mean: Tensor | None = None,
    prototypes: Tensor | None = None,
) -> Tensor:
    """Features as a method compares them, shape ``(N, D)``.

    A factor of all features makes no difference to what is nearest, nor to what is prepared.

    Args:
        features: shape ``(N, D)``, in single precision at least.
        method: what compares them.
        base_mean: mean of the base features, shape ``(D,)``; ``cl2n`` needs it.
        prototypes: of the head they were trained with, shape ``(C, D)``; ``complement`` needs them.
    """
    if method.centre:
        who = "cl2n expects the mean of the base features"
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
            "few-shot expects features that stay finite less a mean or a span, got infinity"
        )
    if method.normalize:
        return directions(features)
    # Squares of what is very long or short would not be finite, or all zero.
    return features / features.abs().amax().clamp_min(torch.finfo(features.dtype).tiny)


def _needed(sentence: str, value: Tensor | None, features: Tensor) -> Tensor:
    """What a method cannot do without, as the features are."""
    if value is None:
        raise ValueError(f"{sentence}, got none")
    value = value.to(features)
    if not bool(value.isfinite().all()):
        raise ValueError(f"{sentence} to be finite, got NaN or infinity")
    return value


def centroid_classifiers(
    features: Tensor, episodes: Episodes, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """What the scores of queries are products with, and what is added to them for each class.

    Args:
        features: of all examples, prepared, shape ``(N, D)``.
        episodes: which were drawn from them.
        numbers: of the episodes to work on, shape ``(E,)``.

    Returns:
        Shapes ``(E, way, D)`` and ``(E, way)``; the largest score is that of the nearest centroid.
    """
    places = episodes.support[numbers.cpu()].to(features.device)
    centroids = features[places].mean(2)
    # The nearest by |q - c|^2, measured from the middle of the centroids: what all have in common
    # would only cost digits.
    middle = centroids.mean(1, keepdim=True)
    weight = centroids - middle
    return weight, -(weight * (middle + weight / 2)).sum(2)
