"""Few-shot evaluation: recognise novel classes from a few images of each, over many episodes.

Features are computed once, and an episode selects rows of them. Methods are written as calls, such
as ``l2`` or ``cosine(scale=10)``; all methods and models get the same episodes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tammes.lab.config.expressions import build, split_list
from tammes.lab.fewshot.episodes import Episodes, check_labels, check_tensor, draw
from tammes.lab.fewshot.finetuned_heads import (
    CosineTuning,
    FineTuning,
    LinearTuning,
    directions,
    finetune_heads,
    one_thread,
)
from tammes.lab.fewshot.nearest_centroid import (
    NearestCentroid,
    centred_cosine,
    centroid,
    centroid_classifiers,
    cl2n,
    complement,
    l2,
    preprocess,
)
from tammes.similarity import full_precision

_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Largest number of gathered feature values, by device."""

Method = NearestCentroid | FineTuning

TABLE: dict[str, Callable[..., Method]] = {
    "centroid": centroid,
    "l2": l2,
    "cl2n": cl2n,
    "centred_cosine": centred_cosine,
    "complement": complement,
    "linear": LinearTuning,
    "cosine": CosineTuning,
}
"""Methods by name."""


def methods(text: str) -> dict[str, Method]:
    """Parse a list of methods; the keys are the methods as written.

    Args:
        text: such as ``"l2, cosine(scale=10)"``.

    Example:
        >>> methods("l2, cosine(margin=-0.1)")["l2"]
        NearestCentroid(normalize=True, centre=False, outside=False, cosine=False)
    """
    found = {each: build(each, TABLE, what="method") for each in split_list(text, what="method")}
    if not found:
        raise ValueError(f"method expects one of {', '.join(TABLE)}, got none")
    return found


def needs_base_mean(methods: Mapping[str, Method]) -> bool:
    """Return whether a method needs :attr:`LabelledFeatures.base_mean`.

    Example:
        >>> needs_base_mean(methods("l2, cl2n")), needs_base_mean(methods("l2, cosine"))
        (True, False)
    """
    return any(isinstance(each, NearestCentroid) and each.centre for each in methods.values())


def needs_prototypes(methods: Mapping[str, Method]) -> bool:
    """Return whether a method needs :attr:`LabelledFeatures.prototypes`.

    Example:
        >>> needs_prototypes(methods("complement")), needs_prototypes(methods("l2, cosine"))
        (True, False)
    """
    return any(isinstance(each, NearestCentroid) and each.outside for each in methods.values())


def _check(features: Tensor, base_mean: Tensor | None, prototypes: Tensor | None) -> None:
    """Reject features that are not a matrix, and a mean or prototypes of another dimension."""
    given = {"features": features, "base_mean": base_mean, "prototypes": prototypes}
    for name, value in given.items():
        if value is not None or name == "features":
            check_tensor("few-shot", name, value)
    if not features.is_floating_point():
        raise TypeError(f"few-shot expects features of a floating type, got {features.dtype}")
    if features.ndim != 2 or not features.shape[1]:
        raise ValueError(f"few-shot expects features of shape (N, D), got {tuple(features.shape)}")
    size = features.shape[1]
    if base_mean is not None and base_mean.shape != (size,):
        raise ValueError(
            f"few-shot expects base_mean of shape ({size},), got {tuple(base_mean.shape)}"
        )
    if prototypes is not None and (prototypes.ndim != 2 or prototypes.shape[1] != size):
        raise ValueError(
            f"few-shot expects prototypes of shape (C, {size}), got {tuple(prototypes.shape)}"
        )


@torch.no_grad()
def accuracies(
    features: Tensor,
    episodes: Episodes,
    method: Method,
    *,
    base_mean: Tensor | None = None,
    prototypes: Tensor | None = None,
) -> Tensor:
    """Compute the accuracy on the queries of each episode.

    Args:
        features: features of all examples that the episodes were drawn from, shape ``(N, D)``; the
            computation runs on their device.
        episodes: the episodes.
        method: the classifier.
        base_mean: mean of the base features, for ``cl2n`` and ``centred_cosine``.
        prototypes: prototypes of the trained head, for ``complement``.

    Returns:
        Shape ``(E,)``, float64, on the CPU.

    Raises:
        ValueError: the inputs do not match or are not finite, or fine-tuning diverged.

    Example:
        >>> labels = torch.arange(3).repeat(4)
        >>> drawn = draw(labels, way=2, shot=1, queries=2, episodes=50)
        >>> accuracies(torch.eye(3)[labels], drawn, l2()).mean()
        tensor(1., dtype=torch.float64)
    """
    _check(features, base_mean, prototypes)
    last = max(int(episodes.support.max()), int(episodes.queries.max()))
    if last >= len(features):
        raise ValueError(
            f"episodes expect features of every example they were drawn from, {last + 1} at least, "
            f"got {len(features)}"
        )
    if not bool(features.isfinite().all()):
        raise ValueError("few-shot episodes expect finite features, got NaN or infinity")
    features = features if features.dtype == torch.float64 else features.float()
    if isinstance(method, NearestCentroid):
        features = preprocess(features, method, base_mean, prototypes)
    elif method.cosine:
        features = directions(features)
    features = features.contiguous()
    gathered = episodes.way * (episodes.shot + episodes.queries.shape[2] + 2)
    size = _BLOCK.get(features.device.type, _BLOCK["cuda"])
    if isinstance(method, FineTuning):
        # Fine-tuning takes many small steps, so more episodes share each.
        size *= 8
    block = max(1, size // (gathered * features.shape[1]))
    own = torch.arange(episodes.way, device=features.device)[:, None]
    found = []
    diverged = 0
    with full_precision(features.device), one_thread(features.device):
        for numbers in torch.arange(len(episodes), device=features.device).split(block):
            weight, offset = _classifiers(features, episodes, numbers, method)
            places = episodes.queries[numbers.cpu()].to(features.device)
            rows = features.index_select(0, places.flatten())
            queries = rows.view(len(numbers), -1, features.shape[1])
            scores = torch.baddbmm(offset[:, None], queries, weight.transpose(1, 2))
            diverged += int((~scores.isfinite()).any(2).any(1).sum())
            right = scores.argmax(2).view(places.shape) == own
            found.append(right.double().mean((1, 2)).cpu())
    if diverged:
        raise ValueError(
            f"fine-tuning expects finite scores, got NaN or infinity in {diverged:,} of "
            f"{len(episodes):,} episodes: try a smaller lr"
        )
    return torch.cat(found)


def _classifiers(
    features: Tensor, episodes: Episodes, numbers: Tensor, method: Method
) -> tuple[Tensor, Tensor]:
    """Return the weights and offsets of the classifiers of some episodes."""
    if not isinstance(method, FineTuning):
        return centroid_classifiers(features, episodes, numbers, cosine=method.cosine)
    weight = finetune_heads(features, episodes, numbers, method)
    # The length of a query does not change which class scores highest.
    weight = directions(weight) if method.cosine else weight
    return weight, weight.new_zeros(weight.shape[:2])


@dataclass(frozen=True)
class Interval:
    """Mean over ``count`` episodes with its 95 % interval, ``mean ± half``.

    ``half`` is 1.96 standard errors. It covers the choice of episodes for *these* images and
    *this* model, not another training run.
    """

    mean: float
    half: float
    count: int

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.mean) > self.half > 0

    def shown(self, *, sign: bool = False) -> str:
        """Format in percent; a single episode has no interval.

        Example:
            >>> Interval(0.6844, 0.0021, 10_000).shown()
            '68.44 ± 0.21'
        """
        half = f" ± {100 * self.half:.2f}" if math.isfinite(self.half) else ""
        return f"{100 * self.mean:{'+' if sign else ''}.2f}{half}"

    def as_dict(self, name: str = "mean") -> dict[str, Any]:
        """Return plain values, the mean under ``name``; a single episode has no interval."""
        half = self.half if math.isfinite(self.half) else None
        return {name: self.mean, "half": half, "episodes": self.count}


def interval(values: Tensor) -> Interval:
    """Compute the mean of one number per episode, ``± 1.96 s / sqrt(n)``.

    Args:
        values: shape ``(E,)``; for a paired interval, the differences of two models.

    Example:
        >>> found = interval(torch.tensor([0.5, 0.7, 0.6, 0.6]))
        >>> round(found.mean, 3), round(found.half, 3)
        (0.6, 0.08)
    """
    values = values.double()
    count = len(values)
    half = 1.96 * float(values.std()) / math.sqrt(count) if count > 1 else math.inf
    return Interval(float(values.mean()), half, count)


@dataclass(frozen=True, eq=False)
class FewShotResult:
    """Accuracies ``(E,)`` of one method, as written, at one number of shots.

    ``against`` are those of another model on the same episodes, if there is one.
    """

    method: str
    shot: int
    accuracies: Tensor
    against: Tensor | None = None

    @property
    def accuracy(self) -> Interval:
        """Mean accuracy."""
        return interval(self.accuracies)

    @property
    def difference(self) -> Interval | None:
        """Mean difference from the other model, paired by episode."""
        return None if self.against is None else interval(self.accuracies - self.against)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        found = {"method": self.method, "shot": self.shot, **self.accuracy.as_dict("accuracy")}
        if self.against is not None and self.difference is not None:
            found["against"] = interval(self.against).as_dict("accuracy")
            found["difference"] = {**self.difference.as_dict(), "clear": self.difference.clear}
        return found


@dataclass(frozen=True, eq=False)
class LabelledFeatures:
    """Features and labels to draw episodes from.

    Attributes:
        features: shape ``(N, D)``.
        labels: class of each, shape ``(N,)``.
        classes: names of the classes.
        base_mean: mean of the base features, shape ``(D,)``, or None.
        title: origin of the features, for messages.
        prototypes: prototypes of the trained head, shape ``(C, D)``, or None.
    """

    features: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    base_mean: Tensor | None = None
    title: str = ""
    prototypes: Tensor | None = None

    def __post_init__(self) -> None:
        _check(self.features, self.base_mean, self.prototypes)
        check_labels("few-shot", self.labels)
        if len(self.labels) != len(self.features):
            raise ValueError(
                f"few-shot expects a label for each of {len(self.features)} features, "
                f"got {len(self.labels)}"
            )
        if len(self.labels) and int(self.labels.max()) >= len(self.classes):
            raise ValueError(
                f"few-shot expects labels from 0 to {len(self.classes) - 1}, one per name of the "
                f"classes, got {int(self.labels.max())}"
            )


def evaluate(
    examples: LabelledFeatures,
    *,
    way: int = 5,
    shots: int | Sequence[int] = (1, 5),
    queries: int = 15,
    episodes: int = 10_000,
    method: str = "centroid, l2",
    seed: int = 0,
    against: LabelledFeatures | None = None,
) -> list[FewShotResult]:
    """Evaluate one model, or two on the same episodes.

    Args:
        examples: features of the novel classes.
        way: classes per episode.
        shots: labelled images per class, one or several numbers.
        queries: images to recognise per class.
        episodes: number of episodes.
        method: such as ``"l2, cosine"``; see :data:`TABLE`.
        seed: seed of the episodes.
        against: features of the same images from another model.

    Returns:
        One :class:`FewShotResult` per number of shots and method.
    """
    chosen = methods(method)
    if against is not None and not against.labels.equal(examples.labels):
        raise ValueError(
            f"{against.title}: features of the same images in the same order are expected as "
            f"{examples.title} has, got other labels"
        )
    rows = []
    for shot in [shots] if isinstance(shots, int) else shots:
        drawn = draw(
            examples.labels, way=way, shot=shot, queries=queries, episodes=episodes, seed=seed,
            names=examples.classes,
        )  # fmt: skip
        for written, each in chosen.items():
            both = [
                accuracies(
                    one.features, drawn, each, base_mean=one.base_mean, prototypes=one.prototypes
                )
                for one in (examples, against)
                if one is not None
            ]
            rows.append(FewShotResult(written, shot, *both))
    return rows
