"""Dense kernel: the split of a batch with its scores in memory, gradients in closed form.

Forward computes the scores of all classes, reduces them to the numbers that terms read, and saves
the softmax of the other classes (and the scores, for the few numbers that need them). Backward
(:mod:`tammes.kernels.dense_gradients`) turns it into the gradient of the scores

    d loss / d f_c = q_c (d_others + d_expected (1 + f_c - expected)) + d_mean + ...

in place, enters that of the own class, and two matrix products give the gradients of features and
prototypes. Losses, weights and reductions are plain autograd on tensors of shape ``(N,)``, but for
the cross entropy with a margin, which :func:`dense_cross_entropy` computes as a whole.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tammes._validation import batched
from tammes.angles import shifted_cosine_and_slope
from tammes.kernels import dense_gpu
from tammes.kernels.dense_gpu import cross_entropy_on_gpu, split_on_gpu, takes
from tammes.kernels.dense_gradients import (
    OWN,
    Saved,
    gradient_of_entropy,
    gradients_of_inputs,
    is_one,
    through_products,
)
from tammes.kernels.problem import Margin, Problem
from tammes.kernels.reference import (
    gradients_by_reference,
    loss_gradients_by_reference,
    target_rows,
)
from tammes.kernels.tiling import OF_SCORES
from tammes.similarity import (
    InnerProduct,
    Operand,
    Similarity,
    full_precision,
    has_exact_products,
    working_dtype,
)
from tammes.split import ALONGSIDE, Split, assemble, softplus

NEAR = 2**-7
"""Distance of a cosine from 1 and -1 above which float32 products give the gradient of a margin of
the angle as exactly as a difference of unit vectors does; that of 7 degrees."""
_OTHERS = ("others", "hardest", "expected", "mean", "softplus")


def dense_split(
    problem: Problem,
    labels: Tensor,
    reads: frozenset[str],
    low: torch.dtype | None = None,
) -> Split:
    """Split a batch, outside of autocast; differentiable any number of times.

    Args:
        problem: features and prototypes, of at least one example.
        labels: class of each example, shape ``(N,)``.
        reads: names of the fields to compute.
        low: dtype of autocast for products on a GPU, or none.
    """
    features, prototypes, bias, scale, similarity, _, there, valid = problem
    # Cast once, so that gradients add up in the working dtype.
    dtype = working_dtype(features, prototypes)
    features, prototypes = features.to(dtype), prototypes.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    similarity = similarity.bind(prototypes)
    compiling = torch.compiler.is_compiling()
    # A compiler traces cached functions, with a warning.
    names, beside = (_outputs.__wrapped__ if compiling else _outputs)(similarity.is_cosine, reads)
    classes = prototypes.shape[0]
    known: dict[str, Tensor] = {}
    if there is not None:
        # Counted in integers, which are exact.
        known["rivals"] = (there.sum() - there.index_select(0, labels).long()).to(dtype)
    if beside:
        # The norm depends on the features alone.
        alone = similarity.is_cosine and beside <= {"norm"}
        own = features if alone else target_rows(prototypes, labels)
        known |= similarity.own(features, own, beside)
        if bias is not None and "target" in known:
            known["target"] = known["target"] + bias.index_select(0, labels)
    numbers = known
    problem = Problem(features, prototypes, bias, scale, similarity, None, there, valid)
    on_gpu = features.is_cuda or dense_gpu.ANYWHERE
    if compiling or valid is not None or (on_gpu and takes(problem, names)):
        numbers = split_on_gpu(problem, labels, names, low) | known
    elif names:
        found = _DenseSplit.apply(
            features, prototypes, bias, scale, labels, there, similarity, names
        )
        numbers = known | dict(zip(names, found, strict=True))
    return assemble(numbers, labels, scale, classes, features, unit=similarity.is_cosine)


def takes_raw(problem: Problem, reads: frozenset[str]) -> bool:
    """Whether a problem may have ``valid`` set: the GPU kernels compute everything that is read."""
    return takes(problem, reads) and not _outputs(problem.similarity.is_cosine, reads)[1]


@cache
def _outputs(is_cosine: bool, reads: frozenset[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the numbers computed in closed form, and those left to autograd."""
    wanted = reads | {"opposite"} if "gap" in reads else reads
    closed = {*OWN} if is_cosine else {"target"}
    own = [n for n in OWN if n in wanted & closed]
    # The length of a cosine is 1, which ``assemble`` fills in.
    known = {*own, "length"} if is_cosine else {*own}
    beside = (reads & {"target", *ALONGSIDE}) - known
    return (*own, *(name for name in _OTHERS if name in reads)), beside


class _DenseSplit(torch.autograd.Function):
    """From features, prototypes, bias and scale to the numbers of a split."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        bias: Tensor | None,
        scale: Tensor | float,
        labels: Tensor,
        there: Tensor | None,
        similarity: Similarity,
        names: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        problem = Problem(features, prototypes, bias, scale, similarity, there=there)
        numbers, saved = _evaluate(problem, labels, names)
        ctx.save_for_backward(*saved)
        # A plain number cannot be saved as a tensor.
        ctx.scale = None if isinstance(scale, Tensor) else scale
        ctx.similarity, ctx.names, ctx.spent = similarity, names, False
        ctx.set_materialize_grads(False)
        return tuple(numbers[name] for name in names)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands them out once.
        saved = Saved(*ctx.saved_tensors)
        wanted = dict(zip(ctx.names, gradients, strict=True))
        scale = ctx.scale if saved.scale is None else saved.scale
        problem = Problem(
            saved.features, saved.prototypes, saved.bias, scale, ctx.similarity, there=saved.there
        )
        with full_precision(saved.features.device):
            if torch.is_grad_enabled() or batched(gradients):
                found = gradients_by_reference(problem, saved.labels, wanted)
                return *found, None, None, None, None
            if ctx.spent:
                # Second backward: the first one overwrote the softmax.
                _, saved = _evaluate(problem, saved.labels, ctx.names)
            ctx.spent = True
            needs = ctx.needs_input_grad[:4]
            return *gradients_of_inputs(problem, saved, wanted, needs), None, None, None, None


def dense_cross_entropy(
    problem: Problem,
    labels: Tensor,
    margin: Margin,
    ignored: int,
    low: torch.dtype | None = None,
    *,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor | int]:
    r"""Cross entropy of a batch with a margin, outside of autocast.

    .. math:: \ell = \sum_i \log\bigl(1 + e^{\Lambda_i - s(a_i - m)}\bigr),
              \quad\text{or the mean}

    This is all of softmax, NormFace and CosFace, and with :math:`\cos(\theta_i + m)` in place of
    :math:`a_i - m` of ArcFace, so that one function has their gradient too.

    Args:
        problem: features and prototypes of at least one example, with a number as scale.
        labels: class of each example, shape ``(N,)``; on a GPU also ``ignored``.
        margin: lowers the similarity to the target class; an angle on a cosine head only.
        ignored: label of ignored examples, on a GPU.
        low: dtype of autocast for products on a GPU, or none.
        mean: whether to divide by the number of valid examples.

    Returns:
        The loss, a copy without gradient, and the number of valid examples.
    """
    if problem.features.is_cuda or dense_gpu.ANYWHERE:
        return cross_entropy_on_gpu(problem, labels, margin, ignored, low, mean=mean)
    dtype = working_dtype(problem.features, problem.prototypes)
    features, prototypes = problem.features.to(dtype), problem.prototypes.to(dtype)
    bias = None if problem.bias is None else problem.bias.to(dtype)
    similarity = problem.similarity.bind(prototypes)
    loss: Tensor = _CrossEntropy.apply(
        *(features, prototypes, bias, labels, problem.there),
        *(problem.scale, similarity, margin, mean),
    )
    return loss, loss.detach().clone(), labels.shape[0]


class _CrossEntropy(torch.autograd.Function):
    """From features, prototypes and bias to a mean or a sum of cross entropies."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        there: Tensor | None,
        scale: float,
        similarity: Similarity,
        margin: Margin,
        mean: bool,
    ) -> Tensor:
        problem = Problem(features, prototypes, bias, scale, similarity, there=there)
        numbers, saved = _evaluate(problem, labels, _entropy_reads(margin))
        bend = None
        if margin.angle:
            angles = numbers["gap"], numbers["opposite"]
            target, bend = shifted_cosine_and_slope(*angles, margin.angle)
        else:
            target = numbers["target"]
        if margin.similarity:
            target = target - margin.similarity
        excess = torch.add(numbers["others"], target, alpha=-scale)
        losses = softplus(excess)
        ctx.save_for_backward(*saved, bend, excess.sigmoid_())
        ctx.settings, ctx.spent = (scale, similarity, margin, mean), False
        return losses.mean() if mean else losses.sum()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands them out once.
        *tensors, bend, slopes = ctx.saved_tensors
        saved = Saved(*tensors)
        scale, similarity, margin, mean = ctx.settings
        problem = Problem(
            saved.features, saved.prototypes, saved.bias, scale, similarity, there=saved.there
        )
        with full_precision(saved.features.device):
            if torch.is_grad_enabled() or batched((d_loss,)):
                found = loss_gradients_by_reference(
                    problem, saved.labels, margin, d_loss, mean=mean
                )
                return *found, *[None] * 6
            if ctx.spent:
                # Second backward: the first one overwrote the softmax.
                _, saved = _evaluate(problem, saved.labels, _entropy_reads(margin))
            ctx.spent = True
            others = slopes * (d_loss / slopes.shape[0] if mean else d_loss)
            gradient, factor, own = gradient_of_entropy(saved, scale, others, bend)
            needs = (*ctx.needs_input_grad[:3], False)
            found = through_products(problem, saved, gradient, factor, own, needs, {"target": own})
            return *found[:3], *[None] * 6


def _entropy_reads(margin: Margin) -> tuple[str, ...]:
    return ("gap", "opposite", "others") if margin.angle else ("target", "others")


def _evaluate(
    problem: Problem, labels: Tensor, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], Saved]:
    """Compute the numbers of a split, and the tensors that their gradients need."""
    features, prototypes, bias, scale, similarity, _, there, _ = problem
    query = similarity.features_operand(features)
    keys = similarity.prototypes_operand(prototypes)
    factor = scale if keys.inverse is None else keys.inverse.view(-1) * scale
    shift = bias
    if there is not None:
        shift = torch.where(there, features.new_zeros(()) if bias is None else bias, -torch.inf)
    scores = _make_scores(query, keys, shift, scale, factor)
    column = labels.unsqueeze(1)

    numbers: dict[str, Tensor] = {}
    directed = own_inverse = apart = sign = None
    angles = "gap" in names or "opposite" in names
    exact = isinstance(similarity, InnerProduct) and has_exact_products(features.dtype)
    if names[0] in OWN and not exact:
        own = prototypes.index_select(0, labels)
        if keys.inverse is not None:
            own_inverse = keys.inverse.index_select(0, labels)
            own.mul_(own_inverse)
            if query.inverse is not None and not (query.directed and keys.directed):
                directed = ((query.inverse > 0) & (own_inverse > 0)).squeeze(1)
        left = query.values if similarity.is_cosine else features
        nearly = scores.gather(1, column).squeeze(1) if angles else None
        numbers, apart, sign = similarity.paired(left, own, names, nearly)
        if directed is not None:
            # A zero row is at a right angle to everything.
            numbers = {
                n: torch.where(directed, v, float(n != "target")) for n, v in numbers.items()
            }
        if bias is not None and "target" in numbers:
            numbers["target"] += bias.index_select(0, labels)
        if similarity.is_cosine and bias is None and not (angles and _is_near(numbers)):
            # As accurate in the products: only a margin of a small angle has gradients that grow.
            apart = sign = None
    elif "target" in names:
        target = scores.gather(1, column).squeeze(1)
        if there is not None:
            # An ignored example has label 0, which may be masked.
            target = torch.where(there.index_select(0, labels), target, 0.0)
        numbers["target"] = target if is_one(scale) else target / scale
    softmax = place = None
    if "mean" in names:
        scores.scatter_(1, column, 0.0)
        numbers["mean"] = (scores if there is None else torch.where(there, scores, 0.0)).sum(1)
    # Masked out rather than subtracted from a full sum: where the target class dominates, the
    # subtraction would cancel all digits of the others.
    scores.scatter_(1, column, -torch.inf)
    if "hardest" in names:
        # max, unlike amax, gives the whole gradient to one of several tied classes.
        top, place = scores.max(1)
        numbers["hardest"] = top / scale
    if "others" in names or "expected" in names:
        softmax = scores.softmax(1)
    if "others" in names:
        assert softmax is not None
        top = scores.amax(1) if place is None else top
        numbers["others"] = top - softmax.amax(1).log_()
    if "softplus" in names:
        numbers["softplus"] = softplus(scores).sum(1)
    if "expected" in names:
        assert softmax is not None
        scores.scatter_(1, column, 0.0)
        scores = scores if there is None else scores.masked_fill_(~there, 0.0)
        numbers["expected"] = torch.linalg.vecdot(softmax, scores)

    own_similarity = None
    if isinstance(scale, Tensor):
        own_similarity = 1 - numbers["gap"] if "gap" in numbers else numbers.get("target")
    saved = Saved(
        features=features,
        prototypes=prototypes,
        bias=bias,
        scale=scale if isinstance(scale, Tensor) else None,
        labels=labels,
        there=there,
        query=query.values,
        query_inverse=query.inverse,
        query_offset=query.offset,
        keys=keys.values,
        keys_inverse=keys.inverse,
        keys_offset=keys.offset,
        factor=factor if isinstance(factor, Tensor) else None,
        directed=directed,
        own_inverse=None if apart is None else own_inverse,
        apart=apart,
        sign=sign,
        softmax=softmax,
        scores=None if OF_SCORES.isdisjoint(names) else scores,
        target=own_similarity,
        expected=numbers.get("expected"),
        hardest=numbers.get("hardest"),
        place=place,
    )
    return numbers, saved


def _is_near(numbers: Mapping[str, Tensor]) -> bool:
    """Whether any angle is so near 0 or π that the products have too few digits of its gradient.

    On a GPU, which would have to wait for the answer, always.
    """
    gap = numbers["gap"]
    if gap.device.type != "cpu":
        return True
    least, most = torch.aminmax(gap)
    return not (least.item() > NEAR and most.item() < 2 - NEAR)


def _make_scores(
    query: Operand,
    keys: Operand,
    bias: Tensor | None,
    scale: Tensor | float,
    factor: Tensor | float,
) -> Tensor:
    """Scores of every example for every class, shape ``(N, C)``."""
    if bias is not None and keys.inverse is None and keys.offset is None and is_one(scale):
        return torch.addmm(bias, query.values, keys.values.t())
    scores = query.values @ keys.values.t()
    scores = scores if is_one(factor) else scores.mul_(factor)
    for offset in (keys.offset, bias):
        if offset is not None:
            scores.add_(offset * scale)
    if query.offset is not None:
        scores.add_((query.offset * scale).unsqueeze(1))
    return scores
