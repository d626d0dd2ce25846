"""Heads fine-tuned on the support of an episode, many episodes at once.

Each episode has its own small head, trained by SGD on a few frozen features. One by one, that would
be hundreds of thousands of tiny steps; here each step is taken for all episodes at once, with an
explicit gradient.
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
"""Streams of random numbers of an episode: initial heads and order of examples."""


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    r"""Head without bias, trained on the support of each episode.

    Scores are :math:`s\,x\cdot w_c` or :math:`s\cos(x, w_c)`; the loss is the softmax, with the
    margin subtracted from the similarity to the true class while training. The defaults are those
    of the negative-margin paper's code, which uses the margin in pre-training only.

    Args:
        scale: scale of the similarities.
        margin: margin of the loss.
        passes: number of passes over the support.
        batch: examples per step; the last step of a pass may have fewer.
        lr: learning rate of SGD.
        momentum: momentum of SGD.
        dampening: dampening of SGD.
        weight_decay: weight decay of SGD.

    Attributes:
        cosine: whether similarities are cosines, or else inner products.

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
    """Fine-tuning with inner products."""

    cosine = False


class CosineTuning(FineTuning):
    """Fine-tuning with cosines."""

    cosine = True


def directions(vectors: Tensor) -> Tensor:
    """Normalize rows to length one without overflow or underflow; a zero row stays zero.

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
    """Draw initial prototypes, uniform within ``1 / sqrt(size)`` as in a linear layer.

    The result for the episodes with these numbers has shape ``(E, way, size)`` and is the same on
    every device.
    """
    key = keyed_random.keys(keyed_random.mix_int(seed), _HEADS, numbers)
    draws = torch.arange(way * size, device=numbers.device)
    share = keyed_random.uniform(keyed_random.bits(key, draws)).to(dtype)
    return (2 * share - 1).div(math.sqrt(size)).view(len(numbers), way, size)


def orders(seed: int, numbers: Tensor, passes: int, count: int) -> Tensor:
    """Draw the order of the support in each pass of each episode, shape ``(E, passes, count)``."""
    key = keyed_random.keys(keyed_random.mix_int(seed), _ORDER, numbers)
    draws = torch.arange(passes * count, device=numbers.device)
    numbered = keyed_random.bits(key, draws).view(len(numbers), passes, count)
    return numbered.argsort(dim=2, stable=True)


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Use one thread on a CPU, as the products are too small to parallelize."""
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
    """Take the SGD steps of all episodes together."""
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
                # As in torch.optim.SGD: no dampening of the first gradient or without momentum.
                velocity = gradient
            else:
                velocity.mul_(settings.momentum).add_(gradient, alpha=1 - settings.dampening)
            weight.sub_(velocity, alpha=settings.lr)
    return weight


def _gradient(batch: Tensor, target: Tensor, weight: Tensor, settings: FineTuning) -> Tensor:
    """Return the gradient of a batch's mean loss in the prototypes, shape ``(E, way, D)``.

    Features ``(E, B, D)`` are unit vectors for cosines; labels ``(E, B, way)`` are one-hot.
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


@torch.no_grad()
def finetune_heads(
    features: Tensor, episodes: Episodes, numbers: Tensor, settings: FineTuning
) -> Tensor:
    """Fine-tune heads on the support of the episodes with these numbers.

    The prototypes ``(E, way, D)`` of an episode do not depend on the other episodes.
    """
    places = episodes.support[numbers.cpu()].to(features.device)
    own, way, size = features[places].flatten(1, 2), episodes.way, features.shape[1]
    own = unit(own) if settings.cosine else own
    count = way * episodes.shot
    heads = initial_heads(episodes.seed, numbers, way, size, dtype=features.dtype)
    order = orders(episodes.seed, numbers, settings.passes, count)
    # Every step stays in the span of the support and the initial prototypes: coordinates in this
    # small subspace preserve all inner products.
    basis = None
    if 2 * (count + way) <= size:
        basis, coordinates = torch.linalg.qr(torch.cat([own, heads], 1).transpose(1, 2))
        coordinates = coordinates.transpose(1, 2)
        own, heads = coordinates[:, :count], coordinates[:, count:]
    with one_thread(features.device):
        trained = _descend(own.contiguous(), heads, episodes.shot, order, settings)
    return trained if basis is None else trained @ basis.transpose(1, 2)
