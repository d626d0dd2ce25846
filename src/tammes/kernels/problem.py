"""Input of a kernel: features, prototypes, and how they are compared."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tammes._validation import transforming
from tammes.kernels.merge import sum_gradient
from tammes.similarity import Cosine, InnerProduct, Similarity, working_dtype

if TYPE_CHECKING:
    from tammes.distributed.process_group import RankGroup


class Share(NamedTuple):
    """The part of the classes that is here, where others are elsewhere or left out.

    Features and labels of the problem are then those of all ranks, in the same order on each.

    Attributes:
        own: place of each example's class among the prototypes here, -1 where it is not here,
            shape ``(N,)``.
        classes: number of classes in all.
        group: ranks that hold the other classes.
        counts: how many classes each prototype stands for, shape ``(K,)``, or one each.
        factor: what the gradient of the features is multiplied with, so that it is right once a
            wrapper has averaged the ranks' gradients.
        most: prototypes on the rank that has most of them, so that all cut their rows alike.
        here: which of all the classes the prototypes are.
    """

    own: Tensor
    classes: int
    group: "RankGroup"
    counts: Tensor | None = None
    factor: float = 1.0
    most: int = 0
    here: Tensor | slice = slice(None)


class Problem(NamedTuple):
    """Features against prototypes.

    Attributes:
        features: shape ``(N, D)``.
        prototypes: shape ``(C, D)``, or ``(C, K, D)`` where the similarity pools K of a class.
        bias: added to the similarities, shape ``(C,)``, or none.
        scale: similarity times scale is the score; a number or a scalar tensor.
        similarity: how a feature is compared with a prototype.
        share: set where these prototypes are not all there are.
        there: which classes are not masked, shape ``(C,)``, or none where none can be.
        valid: which examples count, shape ``(N,)``, where features of the others may hold anything
            and a bias of ``-inf`` masks a class; none after :meth:`masked`.
    """

    features: Tensor
    prototypes: Tensor
    bias: Tensor | None
    scale: Tensor | float
    similarity: Similarity
    share: Share | None = None
    there: Tensor | None = None
    valid: Tensor | None = None

    def masked(self) -> "Problem":
        """The same with zeros for examples that do not count, and a finite bias."""
        if self.valid is None:
            return self
        kept = self.features.masked_fill(~self.valid.unsqueeze(1), 0.0)
        bias, there = unmasked(self.bias)
        return self._replace(features=kept, bias=bias, there=there, valid=None)


def unmasked(bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A finite bias, and which classes are there: all but those whose bias is ``-inf``.

    A masked class gets no gradient. Where it costs nothing to see that none is masked, nothing is
    masked.
    """
    if bias is None:
        return None, None
    if bias.device.type == "cpu" and not transforming() and len(bias):
        lowest = bias.detach().amin().item()
        if lowest > -torch.inf:
            return bias, None
    there = bias != -torch.inf
    return torch.where(there, bias, 0.0), there


def cosines_of(problem: Problem) -> Problem:
    """The same features and prototypes by their directions alone."""
    return problem._replace(bias=None, scale=1.0, similarity=problem.similarity.over(Cosine()))


def adjusted(problem: Problem, offset: Tensor, gain: Tensor | None = None) -> Problem:
    """The same problem with the scores ``gain * score + offset``.

    Args:
        problem: features and prototypes; with a gain their similarity must be a product.
        offset: of all classes, shape ``(C,)``, or one number for all.
        gain: of all classes, shape ``(C,)``.
    """
    share, scale, bias = problem.share, problem.scale, problem.bias
    here = slice(None) if share is None else share.here
    if gain is not None:
        gain, dtype = gain[here], working_dtype(problem.features, problem.prototypes)
        query, _ = problem.similarity.query(problem.features.to(dtype))
        keys, _ = problem.similarity.keys(problem.prototypes.to(dtype))
        problem = problem._replace(
            features=query,
            prototypes=keys * gain.view(-1, *(1 for _ in keys.shape[1:])),
            similarity=problem.similarity.over(InnerProduct()),
        )
        bias = None if bias is None else bias * gain
    if share is not None and isinstance(scale, Tensor):
        # Each rank knows the gradient of its own classes only.
        scale = sum_gradient(scale, share.group)
    if share is not None and offset.requires_grad:
        offset = sum_gradient(offset, share.group)
    shift = (offset[here] if offset.ndim else offset) / scale
    shift = shift.expand(len(problem.prototypes))
    return problem._replace(bias=shift if bias is None else bias + shift)
