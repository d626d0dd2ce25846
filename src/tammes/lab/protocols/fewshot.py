"""Few-shot recognition: new classes from a few images of each, over many episodes.

Features are computed once; an episode then is a choice of rows of theirs. Methods are written as
calls, ``l2`` or ``cosine(scale=10)``, and every method, and every model, gets the same episodes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tammes.kernels.problem import full_precision
from tammes.lab.expression.syntax import build, split_list
from tammes.lab.protocols.episodes import Episodes, draw
from tammes.lab.protocols.fewshot_heads import (
    CosineTuning,
    FineTuning,
    LinearTuning,
    heads_of,
    one_thread,
)
from tammes.similarity import unit

_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Numbers of gathered features at once, by device."""


@dataclass(frozen=True)
class NearestCentroid:
    """The class whose mean of support features is nearest; nothing is trained.

    Args:
        normalize: scale features to length one first (L2).
        centre: take away the mean of the base features before that (CL2N).
    """

    normalize: bool = False
    centre: bool = False


Method = NearestCentroid | FineTuning


def centroid() -> NearestCentroid:
    """Nearest centroid of the features as they are."""
    return NearestCentroid()


def l2() -> NearestCentroid:
    """Nearest centroid of features of length one."""
    return NearestCentroid(normalize=True)


def cl2n() -> NearestCentroid:
    """Nearest centroid of features less the mean of the base features, of length one."""
    return NearestCentroid(normalize=True, centre=True)


TABLE: dict[str, Callable[..., Method]] = {
    "centroid": centroid,
    "l2": l2,
    "cl2n": cl2n,
    "linear": LinearTuning,
    "cosine": CosineTuning,
}
"""Methods by the name they are asked for with."""


def methods(text: str) -> dict[str, Method]:
    """Methods by how they are written.

    Args:
        text: such as ``"l2, cosine(scale=10)"``.

    Example:
        >>> methods("l2, cosine(margin=-0.1)")["l2"]
        NearestCentroid(normalize=True, centre=False)
    """
    found = {each: build(each, TABLE, what="method") for each in split_list(text, what="method")}
    if not found:
        raise ValueError(f"method expects one of {', '.join(TABLE)}, got none")
    return found


def prepared(features: Tensor, method: Method, base_mean: Tensor | None = None) -> Tensor:
    """Features as a method compares them, shape ``(N, D)``.

    Args:
        features: shape ``(N, D)``.
        method: what compares them.
        base_mean: mean of the base features, shape ``(D,)``; ``cl2n`` needs it.
    """
    if isinstance(method, FineTuning):
        return features
    if method.centre:
        if base_mean is None:
            raise ValueError("cl2n expects the mean of the base features, got none")
        if base_mean.shape != features.shape[1:]:
            raise ValueError(
                f"cl2n expects a mean of {features.shape[1]} numbers, got {tuple(base_mean.shape)}"
            )
        features = features - base_mean.to(features)
    return unit(features) if method.normalize else features


@torch.no_grad()
def accuracies(
    features: Tensor, episodes: Episodes, method: Method, *, base_mean: Tensor | None = None
) -> Tensor:
    """Share of the queries of each episode that are recognised.

    Args:
        features: of all examples that the episodes were drawn from, shape ``(N, D)``; the work is
            done where they are.
        episodes: which examples are compared.
        method: how.
        base_mean: mean of the base features, for ``cl2n``.

    Returns:
        Shape ``(E,)``, float64, on the CPU.

    Example:
        >>> labels = torch.arange(3).repeat(4)
        >>> drawn = draw(labels, way=2, shot=1, queries=2, episodes=50)
        >>> accuracies(torch.eye(3)[labels], drawn, l2()).mean()
        tensor(1., dtype=torch.float64)
    """
    if not bool(features.isfinite().all()):
        raise ValueError("few-shot episodes expect finite features, got NaN or infinity")
    features = features if features.dtype == torch.float64 else features.float()
    features = prepared(features, method, base_mean).contiguous()
    gathered = episodes.way * (episodes.shot + episodes.queries.shape[2] + 2)
    size = _BLOCK.get(features.device.type, _BLOCK["cuda"])
    if isinstance(method, FineTuning):
        # Its many steps are small: they are taken in more episodes together.
        size *= 8
    block = max(1, size // (gathered * features.shape[1]))
    own = torch.arange(episodes.way, device=features.device)[:, None]
    found = []
    with full_precision(features.device), one_thread(features.device):
        for numbers in torch.arange(len(episodes), device=features.device).split(block):
            weight, offset = _classifiers(features, episodes, numbers, method)
            places = episodes.queries[numbers.cpu()].to(features.device)
            rows = features.index_select(0, places.flatten())
            queries = rows.view(len(numbers), -1, features.shape[1])
            scores = torch.baddbmm(offset[:, None], queries, weight.transpose(1, 2))
            right = scores.argmax(2).view(places.shape) == own
            found.append(right.double().mean((1, 2)).cpu())
    return torch.cat(found)


def _classifiers(
    features: Tensor, episodes: Episodes, numbers: Tensor, method: Method
) -> tuple[Tensor, Tensor]:
    """What the scores of queries are products with, and what is added to them for each class."""
    if isinstance(method, FineTuning):
        weight = heads_of(features, episodes, numbers, method)
        # The length of a query does not matter to which class is first.
        weight = unit(weight) if method.cosine else weight
        return weight, weight.new_zeros(weight.shape[:2])
    places = episodes.support[numbers.cpu()].to(features.device)
    centroids = features[places].mean(2)
    # The nearest by |q - c|^2, measured from the middle of the centroids: what all have in common
    # would only cost digits.
    middle = centroids.mean(1, keepdim=True)
    weight = centroids - middle
    return weight, -(weight * (middle + weight / 2)).sum(2)


@dataclass(frozen=True)
class Interval:
    """A mean over episodes with its 95 % interval, ``mean ± half``.

    Attributes:
        mean: over the episodes.
        half: 1.96 standard deviations of the mean. It says how well the mean over *these* images
            and *this* model is known, not how another training would turn out.
        count: of episodes.
    """

    mean: float
    half: float
    count: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.mean) > self.half > 0

    def shown(self, *, sign: bool = False) -> str:
        """In percent.

        Example:
            >>> Interval(0.6844, 0.0021, 10_000).shown()
            '68.44 ± 0.21'
        """
        return f"{100 * self.mean:{'+' if sign else ''}.2f} ± {100 * self.half:.2f}"


def interval(values: Tensor) -> Interval:
    """Mean of one number for each episode, ``± 1.96 s / sqrt(n)``.

    Args:
        values: shape ``(E,)``; differences of two models on the same episodes for a paired one.

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
class Row:
    """One method at one number of shots.

    Attributes:
        method: as it was written.
        shot: labelled images of each class.
        accuracies: of each episode, shape ``(E,)``.
        against: those of another model on the same episodes, or None.
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
        """How much better than the other model, paired by episode."""
        return None if self.against is None else interval(self.accuracies - self.against)

    def as_dict(self) -> dict[str, Any]:
        """As plain values; one episode has no interval."""
        found: dict[str, Any] = {"method": self.method, "shot": self.shot, **_plain(self.accuracy)}
        if self.against is not None and self.difference is not None:
            found["against"] = _plain(interval(self.against))
            found["difference"] = {**_plain(self.difference), "clear": self.difference.clear}
        return found


def _plain(found: Interval) -> dict[str, Any]:
    half = found.half if math.isfinite(found.half) else None
    return {"accuracy": found.mean, "half": half, "episodes": found.count}


@dataclass(frozen=True, eq=False)
class Examples:
    """Features to draw episodes from.

    Attributes:
        features: shape ``(N, D)``.
        labels: class of each, shape ``(N,)``.
        classes: their names.
        base_mean: mean of the base features, shape ``(D,)``, or None.
        title: whose they are.
    """

    features: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    base_mean: Tensor | None = None
    title: str = ""


def evaluate(
    examples: Examples,
    *,
    way: int = 5,
    shots: Sequence[int] = (1, 5),
    queries: int = 15,
    episodes: int = 10_000,
    method: str = "centroid, l2",
    seed: int = 0,
    against: Examples | None = None,
) -> list[Row]:
    """Few-shot accuracies of one model, or of two on the same episodes.

    Args:
        examples: features of the novel classes.
        way: classes in an episode.
        shots: labelled images of each, one or several numbers.
        queries: images of each to recognise.
        episodes: how many.
        method: such as ``"l2, cosine"``; see :data:`TABLE`.
        seed: of the episodes.
        against: features of the same images from another model.

    Returns:
        A :class:`Row` for each number of shots and each method.
    """
    chosen = methods(method)
    if against is not None and not against.labels.equal(examples.labels):
        raise ValueError(
            f"{against.title}: features of the same images in the same order are expected as "
            f"{examples.title} has, got other labels"
        )
    rows = []
    for shot in shots:
        drawn = draw(
            examples.labels, way=way, shot=shot, queries=queries, episodes=episodes, seed=seed,
            names=examples.classes,
        )  # fmt: skip
        for written, each in chosen.items():
            both = [
                accuracies(one.features, drawn, each, base_mean=one.base_mean)
                for one in (examples, against)
                if one is not None
            ]
            rows.append(Row(written, shot, *both))
    return rows
