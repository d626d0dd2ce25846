"""Inputs of a kernel: features, prototypes, and how they are compared."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tammes._validation import transforming
from tammes.kernels.merge import sum_gradient
from tammes.similarity import Cosine, InnerProduct, Similarity, working_dtype

if TYPE_CHECKING:
    from tammes.distributed.process_group import RankGroup


class Share(NamedTuple):
    """This rank's share of the classes, if they are sharded or sampled.

    Features and labels of the problem are then those of all ranks, in the same order on each.

    Attributes:
        own: index of each example's class among the local prototypes, -1 if it is not among them,
            shape ``(N,)``.
        classes: total number of classes.
        group: ranks that hold the other classes.
        counts: how many classes each prototype stands for, shape ``(K,)``; 1 by default.
        factor: factor of the features' gradient, which makes it correct once a wrapper has
            averaged the ranks' gradients.
        most: largest number of prototypes on any rank, so that all ranks block their rows alike.
        here: index of the local prototypes among all classes.
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
        prototypes: shape ``(C, D)``, or ``(C, K, D)`` if the similarity pools K per class.
        bias: added to the similarities, shape ``(C,)``, or none.
        scale: factor from similarities to scores; a number or a scalar tensor.
        similarity: how a feature is compared with a prototype.
        share: set if these are not all the prototypes.
        there: which classes are not masked, shape ``(C,)``, or none if no class is.
        valid: which examples count, shape ``(N,)``. If set, the inputs are not masked yet: features
            of other examples may hold anything, and the bias may be ``-inf``; see :meth:`masked`.
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
        """Apply ``valid``: zero the examples that do not count, and make the bias finite."""
        if self.valid is None:
            return self
        kept = self.features.masked_fill(~self.valid.unsqueeze(1), 0.0)
        bias, there = unmasked(self.bias)
        return self._replace(features=kept, bias=bias, there=there, valid=None)


class Margin(NamedTuple):
    r"""Margin of a cross entropy: the target class scores :math:`s(\cos(\theta + m) - m')`.

    Past :math:`\pi` the cosine is continued monotonically, see
    :func:`tammes.angles.shifted_cosine`.

    Attributes:
        angle: radians added to the angle, :math:`m`; 0 for similarities other than a cosine.
        similarity: subtracted from the similarity, :math:`m'`.
    """

    angle: float = 0.0
    similarity: float = 0.0


def unmasked(bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return a finite bias and the mask of the classes whose bias is not ``-inf``.

    A masked class gets no gradient. The mask is none if no class is masked and checking that does
    not synchronise.
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
    """The same features and prototypes, compared by cosine."""
    return problem._replace(bias=None, scale=1.0, similarity=problem.similarity.over(Cosine()))


def adjusted(problem: Problem, offset: Tensor, gain: Tensor | None = None) -> Problem:
    """The same problem with the scores ``gain * score + offset``.

    Args:
        problem: features and prototypes; a gain requires a similarity that is a product.
        offset: one per class, shape ``(C,)``, or a scalar.
        gain: one per class, shape ``(C,)``.
    """
    share, scale, bias = problem.share, problem.scale, problem.bias
    here = slice(None) if share is None else share.here
    offset = offset.to(problem.features.device)
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
        # Each rank has the gradient through its own classes only.
        scale = sum_gradient(scale, share.group)
    if share is not None and offset.requires_grad:
        offset = sum_gradient(offset, share.group)
    shift = (offset[here] if offset.ndim else offset) / scale
    shift = shift.expand(len(problem.prototypes))
    return problem._replace(bias=shift if bias is None else bias + shift)
