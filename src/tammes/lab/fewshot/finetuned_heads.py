"""Heads that are fine-tuned on the support of an episode, those of many episodes at once.

Each episode has a small head of its own, trained by SGD on a few features that stay as they are.
One after the other that is hundreds of thousands of tiny steps; here a step is taken in all
episodes together, with the gradient written out.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from tammes.lab.config.typecheck import above_zero, at_least, between, check_fields, finite
from tammes.lab.data import keyed_random
from tammes.lab.fewshot.episodes import Episodes
from tammes.similarity import TINY, norm, unit

_HEADS, _ORDER = 0, 1
"""What random numbers of an episode are for."""


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    r"""A head without bias, trained on the support of each episode.

    Scores are :math:`s\,x\cdot w_c` or :math:`s\cos(x, w_c)`; the loss is the softmax's, with the
    margin taken from the own class's similarity while training. The defaults are those of the
    negative-margin paper's code, where the margin is of pre-training only.

    Args:
        scale: of the similarities.
        margin: of the loss.
        passes: over the support.
        batch: examples in a step; the last step of a pass may have fewer.
        lr: of SGD.
        momentum: of SGD.
        dampening: of SGD.
        weight_decay: of SGD.

    Attributes:
        cosine: compare by cosines, else by inner products.

    References:
        Liu et al., Negative Margin Matters, ECCV 2020, and its published code.
    """

    cosine: ClassVar[bool]

    scale: Annotated[float, above_zero] = 5.0
    margin: Annotated[float, finite] = 0.0
    passes: Annotated[int, at_least(1)] = 100
    batch: Annotated[int, at_least(1)] = 4
    lr: Annotated[float, above_zero] = 0.01
    momentum: Annotated[float, at_least(0)] = 0.9
    dampening: Annotated[float, between(0, 1)] = 0.9
    weight_decay: Annotated[float, at_least(0)] = 1e-3

    def __post_init__(self) -> None:
        check_fields(self, f"method {'cosine' if self.cosine else 'linear'}")


class LinearTuning(FineTuning):
    """Inner products."""

    cosine = False


class CosineTuning(FineTuning):
    """Cosines."""

    cosine = True


def directions(vectors: Tensor) -> Tensor:
    """Rows of length one, however long or short they are; a zero row stays zero.

    Example:
        >>> directions(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    largest = vectors.abs().amax(-1, keepdim=True)
    return unit(vectors / largest.clamp_min(torch.finfo(vectors.dtype).tiny))


def initial_heads(
    seed: int, numbers: Tensor, way: int, size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Prototypes that heads start with: uniform within ``1 / sqrt(size)``, as a linear layer's.

    Args:
        seed: of the episodes.
        numbers: of the episodes, int64, shape ``(E,)``.
        way: classes.
        size: of a feature.
        dtype: of the result.

    Returns:
        Shape ``(E, way, size)``, on the device of ``numbers``; the same on every device.
    """
    key = keyed_random.keys(keyed_random.mix_int(seed), _HEADS, numbers)
    draws = torch.arange(way * size, device=numbers.device)
    share = keyed_random.uniform(keyed_random.bits(key, draws)).to(dtype)
    return (2 * share - 1).div(math.sqrt(size)).view(len(numbers), way, size)


def orders(seed: int, numbers: Tensor, passes: int, count: int) -> Tensor:
    """In which order each pass goes through the support of each episode.

    Returns:
        Permutations of 0 to ``count - 1``, shape ``(E, passes, count)``.
    """
    key = keyed_random.keys(keyed_random.mix_int(seed), _ORDER, numbers)
    draws = torch.arange(passes * count, device=numbers.device)
    numbered = keyed_random.bits(key, draws).view(len(numbers), passes, count)
    return numbered.argsort(dim=2, stable=True)


@torch.no_grad()
def fine_tune(support: Tensor, heads: Tensor, order: Tensor, settings: FineTuning) -> Tensor:
    """Train a head in each episode.

    Args:
        support: features, class after class, shape ``(E, way, shot, D)``.
        heads: prototypes to start with, shape ``(E, way, D)``.
        order: of the examples in each pass, shape ``(E, passes, way * shot)``.
        settings: how to train.

    Returns:
        Prototypes, shape ``(E, way, D)``.
    """
    way, shot, size = support.shape[1:]
    features = support.flatten(1, 2)
    if settings.cosine:
        features = unit(features)
    count = way * shot
    # Every step stays in the span of the support and the first prototypes: a few dimensions, in
    # which all products are the same.
    basis = None
    if 2 * (count + way) <= size:
        together = torch.cat([features, heads], 1).transpose(1, 2)
        basis, coordinates = torch.linalg.qr(together)
        coordinates = coordinates.transpose(1, 2)
        features, heads = coordinates[:, :count], coordinates[:, count:]
    with one_thread(features.device):
        trained = _descend(features.contiguous(), heads, shot, order, settings)
    return trained if basis is None else trained @ basis.transpose(1, 2)


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, do not share a product among threads: they would wait longer than they work."""
    before = torch.get_num_threads()
    if device.type == "cpu" and before > 1:
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
    else:
        yield


def _descend(
    features: Tensor, heads: Tensor, shot: int, order: Tensor, settings: FineTuning
) -> Tensor:
    """Steps of SGD, all episodes together."""
    way, size = heads.shape[1:]
    weight = heads.clone(memory_format=torch.contiguous_format)
    velocity: Tensor | None = None
    own = torch.eye(way, dtype=weight.dtype, device=weight.device)
    for places in order.unbind(1):
        for some in places.split(settings.batch, 1):
            batch = features.gather(1, some[:, :, None].expand(-1, -1, size))
            target = own[some // shot]
            gradient = _gradient(batch, target, weight, settings)
            gradient.add_(weight, alpha=settings.weight_decay)
            if velocity is None or not settings.momentum:
                # As torch's SGD: the first gradient is not dampened, nor is any without momentum.
                velocity = gradient
            else:
                velocity.mul_(settings.momentum).add_(gradient, alpha=1 - settings.dampening)
            weight.sub_(velocity, alpha=settings.lr)
    return weight


def _gradient(batch: Tensor, target: Tensor, weight: Tensor, settings: FineTuning) -> Tensor:
    """Of the mean loss of a batch with respect to the prototypes, shape ``(E, way, D)``.

    Args:
        batch: features, of length one if compared by cosines, shape ``(E, B, D)``.
        target: one for the own class, zero for the others, shape ``(E, B, way)``.
        weight: prototypes, shape ``(E, way, D)``.
        settings: how to train.
    """
    if not settings.cosine:
        similarity = batch @ weight.transpose(1, 2)
    else:
        length = norm(weight)[:, :, None]
        inverse = torch.where(length > TINY, length.clamp_min(TINY).reciprocal(), 0.0)
        direction = weight * inverse
        similarity = batch @ direction.transpose(1, 2)
    if settings.margin:
        similarity = similarity - settings.margin * target
    excess = (settings.scale * similarity).softmax(2).sub_(target)
    excess.mul_(settings.scale / batch.shape[1])
    gradient = excess.transpose(1, 2) @ batch
    if settings.cosine:
        along = (gradient * direction).sum(2, keepdim=True)
        gradient.addcmul_(along, direction, value=-1).mul_(inverse)
    return gradient


def finetune_heads(
    features: Tensor, episodes: Episodes, numbers: Tensor, settings: FineTuning
) -> Tensor:
    """Heads fine-tuned on the support of some episodes.

    Args:
        features: of all examples, shape ``(N, D)``.
        episodes: which were drawn from them.
        numbers: of the episodes to work on, shape ``(E,)``, on the device of the features.
        settings: how to train.

    Returns:
        Prototypes, shape ``(E, way, D)``; they do not depend on which others are worked on.
    """
    places = episodes.support[numbers.cpu()].to(features.device)
    support = features[places]
    count = episodes.way * episodes.shot
    heads = initial_heads(
        episodes.seed, numbers, episodes.way, features.shape[1], dtype=features.dtype
    )
    order = orders(episodes.seed, numbers, settings.passes, count)
    return fine_tune(support, heads, order, settings)
