"""Gradients of the dense kernel in closed form, from the tensors that its forward pass saved."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.kernels.problem import Problem
from tammes.similarity import Operand

OWN = ("target", "gap", "opposite")
"""Numbers of a split that are functions of the similarity to the target class alone."""


class Saved(NamedTuple):
    """Tensors saved for backward: inputs, operands, target class, other classes."""

    features: Tensor
    prototypes: Tensor
    bias: Tensor | None
    scale: Tensor | None
    labels: Tensor
    there: Tensor | None
    query: Tensor
    query_inverse: Tensor | None
    query_offset: Tensor | None
    keys: Tensor
    keys_inverse: Tensor | None
    keys_offset: Tensor | None
    factor: Tensor | None
    directed: Tensor | None
    own_inverse: Tensor | None
    apart: Tensor | None
    sign: Tensor | None
    softmax: Tensor | None
    scores: Tensor | None
    target: Tensor | None
    expected: Tensor | None
    hardest: Tensor | None
    place: Tensor | None


def is_one(scale: Tensor | float) -> bool:
    """Whether a factor can be skipped."""
    return isinstance(scale, float) and scale == 1


def gradient_of_entropy(
    saved: Saved, scale: float, others: Tensor, bend: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Overwrite the softmax with the gradient of the scores of a cross entropy.

    Args:
        saved: tensors saved for backward.
        scale: scale of the scores.
        others: gradient of ``others``, shape ``(N,)``.
        bend: derivative of the target's similarity with a margin by that without, ``(N,)``; 1 by
            default.

    Returns:
        The gradient and the factor of each row, see :func:`_gradient_of_scores`, and the gradient
        of the target's similarity if it is not part of that.
    """
    assert saved.softmax is not None
    # Bypasses the version counter; ``spent`` marks that the softmax is overwritten.
    gradient, own = saved.softmax.data, None
    if saved.directed is not None:
        bend = saved.directed.to(others) if bend is None else bend * saved.directed
    if saved.apart is not None:
        own = others * -scale if bend is None else others * bend * -scale
    else:
        value = -1.0 if bend is None else -bend.unsqueeze(1)
        gradient.scatter_(1, saved.labels.unsqueeze(1), value)
    if saved.keys.shape[0] > saved.keys.shape[1]:
        return gradient, others, own
    return gradient.mul_(others.unsqueeze(1)), None, own


def _gradient_of_scores(
    saved: Saved, scale: Tensor | float, wanted: Mapping[str, Tensor | None], own: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Overwrite the softmax with the gradient of the scores, up to a factor per row.

    Returns:
        The gradient, shape ``(N, C)``, and the factor, shape ``(N,)``, or none. Applying it to the
        ``(N, D)`` side of the products is cheaper and does not underflow.
    """
    others, expected, hardest = wanted.get("others"), wanted.get("expected"), wanted.get("hardest")
    mean, smooth = wanted.get("mean"), wanted.get("softplus")
    added = not (mean is None and smooth is None)
    column = saved.labels.unsqueeze(1)
    if saved.softmax is None or (others is None and expected is None):
        result = saved.query.new_zeros(len(saved.query), len(saved.keys))
    else:
        result = saved.softmax.data
        only = expected is None and hardest is None and own is None and not added
        if only and saved.keys.shape[0] > saved.keys.shape[1]:
            return result, others
        if expected is None:
            assert others is not None
            result.mul_(others.unsqueeze(1))
        else:
            assert saved.scores is not None
            assert saved.expected is not None
            slope = expected * (1 - saved.expected)
            slope = slope if others is None else slope + others
            tilt = saved.scores * expected.unsqueeze(1)
            result.mul_(tilt.add_(slope.unsqueeze(1)))
    if mean is not None:
        result.add_(mean.unsqueeze(1))
    if smooth is not None:
        assert saved.scores is not None
        result.addcmul_(saved.scores.sigmoid(), smooth.unsqueeze(1))
    if added:
        result.scatter_(1, column, 0.0)
        result = result if saved.there is None else result.masked_fill_(~saved.there, 0.0)
    if own is not None and saved.apart is None:
        result.scatter_(1, column, (own if is_one(scale) else own / scale).unsqueeze(1))
    if hardest is not None:
        assert saved.place is not None
        # Not scatter_add_, which is not deterministic on a GPU.
        place = saved.place.unsqueeze(1)
        result.scatter_(1, place, result.gather(1, place) + (hardest / scale).unsqueeze(1))
    return result, None


def gradients_of_inputs(
    problem: Problem,
    saved: Saved,
    wanted: Mapping[str, Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of features, prototypes, bias and scale, given those of a split's numbers."""
    own, gap, opposite = (wanted.get(name) for name in OWN)
    # All three are functions of one cosine.
    if gap is not None:
        own = -gap if own is None else own - gap
    if opposite is not None:
        own = opposite if own is None else own + opposite
    if own is not None and saved.directed is not None:
        own = torch.where(saved.directed, own, 0.0)
    gradient, factor = _gradient_of_scores(saved, problem.scale, wanted, own)
    return through_products(problem, saved, gradient, factor, own, needs, wanted)


def through_products(
    problem: Problem,
    saved: Saved,
    gradient: Tensor,
    factor: Tensor | None,
    own: Tensor | None,
    needs: Sequence[bool],
    wanted: Mapping[str, Tensor | None],
) -> list[Tensor | None]:
    """Gradients of features, prototypes, bias and scale, given that of the scores.

    Args:
        problem: inputs of the call.
        saved: tensors saved for backward.
        gradient: gradient of the scores, overwritten, shape ``(N, C)``.
        factor: factor of each row of it, shape ``(N,)``.
        own: gradient of the similarity to the target class, shape ``(N,)``; part of ``gradient``
            already if no vector for it has been saved.
        needs: which of the four gradients to compute.
        wanted: gradients of the numbers of the split.
    """
    scale, similarity = problem.scale, problem.similarity
    need_features, need_prototypes, need_bias, need_scale = needs
    query = Operand(saved.query, saved.query_inverse, saved.query_offset)
    keys = Operand(saved.keys, saved.keys_inverse, saved.keys_offset)
    column = None if factor is None else factor.unsqueeze(1)
    apart = None if own is None else saved.apart
    d_bias = d_scale = d_features = d_prototypes = d_rows = d_classes = None

    # Gradients of the offsets that similarity and bias add to the products.
    if query.offset is not None or keys.offset is not None or saved.bias is not None:
        d_classes = gradient.sum(0) if factor is None else factor @ gradient
        d_classes = d_classes if is_one(scale) else d_classes * scale
    if query.offset is not None:
        d_rows = gradient.sum(1) * scale
        d_rows = d_rows if factor is None else d_rows * factor
    if not (saved.factor is None and is_one(scale)):
        gradient.mul_(scale if saved.factor is None else saved.factor)

    if need_features or need_scale:
        d_query = gradient @ keys.values
        d_query = d_query if column is None else d_query.mul_(column)
        if need_scale:
            d_scale = _gradient_of_scale(saved, scale, own, wanted, d_query, d_rows, d_classes)
    if need_features:
        if apart is not None:
            assert own is not None
            d_query.addcmul_(apart, own.unsqueeze(1))
        d_features = similarity.features_gradient(query, d_query, d_rows)
    if need_prototypes:
        d_keys = gradient.t() @ (query.values if column is None else query.values * column)
        if apart is not None:
            assert own is not None
            weight = (own if saved.sign is None else own * saved.sign).unsqueeze(1)
            weight = weight if saved.own_inverse is None else weight * saved.own_inverse
            d_keys.index_add_(0, saved.labels, apart * weight, alpha=-1)
        d_prototypes = similarity.prototypes_gradient(keys, d_keys, d_classes)
    if need_bias and d_classes is not None:
        d_bias, d_target = d_classes, wanted.get("target")
        if apart is not None and d_target is not None:
            d_bias = d_bias.index_add(0, saved.labels, d_target)
    return [d_features, d_prototypes, d_bias, d_scale]


def _gradient_of_scale(
    saved: Saved,
    scale: Tensor | float,
    own: Tensor | None,
    wanted: Mapping[str, Tensor | None],
    d_query: Tensor,
    d_rows: Tensor | None,
    d_classes: Tensor | None,
) -> Tensor:
    """Gradient of the scale: the sum of scores times their gradients, without the scores."""
    total = (saved.query * d_query).sum()
    if d_rows is not None and saved.query_offset is not None:
        total = total + saved.query_offset @ d_rows
    for offset in (saved.keys_offset, saved.bias):
        if d_classes is not None and offset is not None:
            total = total + offset @ d_classes
    hardest = wanted.get("hardest")
    # Similarities do not depend on the scale.
    if own is not None and saved.apart is None:
        assert saved.target is not None
        total = total - own @ saved.target
    if hardest is not None:
        assert saved.hardest is not None
        total = total - hardest @ saved.hardest
    return total / scale
