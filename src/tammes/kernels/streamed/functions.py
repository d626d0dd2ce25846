"""Streamed kernel: the loss and its gradients without the N x C matrix.

A loss depends on the scores of an example only through its :class:`~tammes.split.Split`. So scores
are computed in blocks, reduced to a few numbers per row, and discarded. Given the gradients of
those numbers, from autograd, the gradient of the scores is

    d loss / d f_c = q_c (d_others + d_expected (1 + f_c - expected)) + d_mean / (C - 1)

and matrix products carry it back to features and prototypes. There are two ways to do this:

- *one pass* (:class:`OnePass`), for a sum over the rows: blocks of rows against all classes.
  Already in forward, a block's scores are overwritten by their gradient and multiplied back: three
  matrix products.
- *recompute* (:func:`streamed_split`), for anything else: blocks of classes against all rows, whose
  scores are recomputed in backward: four products, and no row of C scores is ever in memory.

Everything that takes O(D) per row (its query, its target class, its hardest class, the loss itself)
is a small graph left to autograd. If the classes are sharded over ranks, the ranks' numbers are
merged in between; nothing else changes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tammes.kernels.merge import scale_gradient, sum_gradient
from tammes.kernels.problem import Problem
from tammes.kernels.score_map import MappedRows
from tammes.kernels.streamed.class_blocks import ClassBlocks
from tammes.kernels.streamed.forward_gradients import OnePass, RowGraph, Take, take
from tammes.kernels.streamed.score_blocks import Engine, Keys, Needs, Rows, WholeRows
from tammes.kernels.tiling import Plan, class_blocks, fits_in_gradient, longest
from tammes.similarity import full_precision, working_dtype
from tammes.split import Split


def tensor_scale(problem: Problem, dtype: torch.dtype) -> Tensor:
    """Return the scale as a scalar tensor in the working dtype."""
    if isinstance(problem.scale, Tensor):
        return problem.scale.to(dtype)
    return torch.full((), problem.scale, dtype=dtype, device=problem.features.device)


def weighted_loss(
    problem: Problem, labels: Tensor, weights: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Weighted loss of a batch, one block of rows at a time, with gradients computed in forward.

    The weights are in the working dtype and require no gradient.

    Returns:
        The weighted sum of the loss, and that of each term, shape ``(T,)``.
    """
    problem = _bound(problem)
    loss, sums = _WeightedLoss.apply(
        problem.features,
        problem.prototypes,
        problem.bias,
        tensor_scale(problem, weights.dtype),
        problem,
        labels,
        weights,
        plan,
        torch.is_grad_enabled(),
    )
    return loss, sums


def _bound(problem: Problem) -> Problem:
    """Bind the similarity to the prototypes."""
    return problem._replace(similarity=problem.similarity.bind(problem.prototypes))


class _WeightedLoss(torch.autograd.Function):
    """The loss; its gradients are computed in forward and returned in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        problem: Problem,
        labels: Tensor,
        weights: Tensor,
        plan: Plan,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = Needs(*(ctx.needs_input_grad[:4] if with_grad else (False,) * 4))
        ctx.save_for_backward(features, prototypes, bias, scale, labels, weights)
        ctx.plan, ctx.rest = plan, (problem.similarity, problem.share, problem.there)
        problem = Problem(features, prototypes, bias, scale, *ctx.rest)
        done = _run(problem, labels, weights, plan, needs)
        loss, sums = done.loss, done.sums
        # The results reference this node; referencing them from it would be a cycle.
        del done.loss, done.sums
        ctx.done = done if any(needs) else None
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        # Read once: activation checkpointing hands them out once.
        features, prototypes, bias, scale, labels, weights = ctx.saved_tensors
        done, ctx.done = ctx.done, None
        if done is None:
            # The first backward returned them without a copy; a second one recomputes them.
            problem = Problem(features, prototypes, bias, scale, *ctx.rest)
            done = _run(problem, labels, weights, ctx.plan, Needs(*ctx.needs_input_grad[:4]))
        with torch.no_grad(), full_precision(features.device):
            gradients = done.gradients(grad)
        # Cast to the dtype of the inputs last, so that a loss scale acts before half precision.
        inputs = (features, prototypes, bias, scale)
        gradients = [
            g if g is None or t is None else g.to(t.dtype)
            for g, t in zip(gradients, inputs, strict=True)
        ]
        return *once(gradients, *inputs), None, None, None, None, None


def _run(problem: Problem, labels: Tensor, weights: Tensor, plan: Plan, needs: Needs) -> OnePass:
    """Compute the weighted loss, the weighted sum of each term, and the needed gradients."""
    with torch.no_grad(), full_precision(problem.features.device):
        engine, blocks = _whole_rows(problem, plan, needs)
        work = OnePass(problem, labels, weights, plan, needs, engine, blocks)
        work.run()
        return work


def _whole_rows(problem: Problem, plan: Plan, needs: Needs) -> tuple[Engine, list[slice]]:
    """Build the engine for whole rows of scores, and the slices of rows it takes."""
    if plan.fused:
        from tammes.kernels.fused.engine import fused_rows

        return fused_rows(problem, plan, needs)
    rows, classes = plan.blocks(problem)
    shared, most = needs.prototypes and fits_in_gradient(problem, rows), longest(rows)
    keys = Keys(problem, needs, classes, plan.product_dtype)
    return WholeRows(keys, plan.reads, longest=most, shared=shared), rows


def streamed_split(problem: Problem, labels: Tensor, plan: Plan) -> Split:
    """Split whose scores are recomputed in backward, one block of classes at a time.

    It can be differentiated once.
    """
    share = problem.share
    with full_precision(problem.features.device):
        dtype = working_dtype(problem.features, problem.prototypes)
        scale = shown = tensor_scale(problem, dtype)
        features = problem.features.to(dtype)
        if share is not None:
            features = scale_gradient(features, share.factor)
            scale = sum_gradient(scale, share.group)
        problem = _bound(problem)
        rows_at = _rows_of(problem, dtype)
        terms_see = problem.scale
        if share is not None:
            # Other ranks evaluate the terms of other examples with the same scale.
            size = share.group.world_size
            terms_see = scale_gradient(sum_gradient(shown, share.group), 1 / size)
        graph = RowGraph(
            problem=problem,
            features=features,
            scale=scale,
            shown=terms_see,
            labels=labels,
            reads=plan.reads,
            mapping=plan.mapping,
            product_dtype=plan.product_dtype,
            take=rows_at,
            alike=False,
        )
        job = _Job(problem._replace(scale=scale), plan, graph.own)
        numbers_of_map = () if graph.mapped is None else graph.mapped.numbers
        found = _Numbers.apply(
            graph.query,
            graph.offset,
            problem.prototypes,
            problem.bias,
            scale,
            job,
            *numbers_of_map,
        )
        numbers = graph.known | dict(zip(job.names, found, strict=True))
        if job.place is not None:
            numbers["hardest"] = graph.hardest(features, *rows_at("hardest", job.place))
        return graph.split(numbers, slice(None), terms_see)


def _rows_of(problem: Problem, dtype: torch.dtype) -> Take:
    """Return a function that selects rows of the prototypes and of the bias."""

    def rows_at(_: str, places: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = None if problem.bias is None else take(problem.bias, places, dtype)
        return take(problem.prototypes, places, dtype), bias

    return rows_at


@torch.no_grad()
def own_split(problem: Problem, labels: Tensor, reads: frozenset[str]) -> Split:
    """Split with the numbers of the target class alone, without gradient; equal on all ranks."""
    with full_precision(problem.features.device):
        dtype = working_dtype(problem.features, problem.prototypes)
        problem, scale = _bound(problem), tensor_scale(problem, dtype)
        graph = RowGraph(
            problem=problem,
            features=problem.features.to(dtype),
            scale=scale,
            shown=scale,
            labels=labels,
            reads=reads,
            take=_rows_of(problem, dtype),
            alike=True,
        )
        return graph.own_split(scale)


class _Job:
    """Inputs of one recomputed call, other than tensors."""

    names: tuple[str, ...]
    place: Tensor | None

    def __init__(self, problem: Problem, plan: Plan, own: Tensor) -> None:
        # Only the shape and dtype of the features are used.
        self.problem = problem._replace(features=problem.features.detach())
        self.plan, self.own = plan, own

    def rows(self, query: Tensor, offset: Tensor | None, of_map: Sequence[Tensor]) -> Rows:
        """All rows, as the input of an engine."""
        mapping = self.plan.mapping
        mapped = None if mapping is None else MappedRows(mapping.function, tuple(of_map))
        return Rows(query, offset, self.own, mapped)

    def engine(self, tensors: Sequence[Tensor | None], needs: Needs) -> ClassBlocks:
        """Engine over blocks of classes."""
        prototypes, bias, scale = tensors
        assert prototypes is not None
        assert scale is not None
        problem = self.problem._replace(prototypes=prototypes, bias=bias, scale=scale)
        keys = Keys(problem, needs, class_blocks(problem), self.plan.product_dtype)
        return ClassBlocks(keys, self.plan.reads)


class _Numbers(torch.autograd.Function):
    """Numbers of all rows, from queries and prototypes."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        offset: Tensor | None,
        prototypes: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        job: _Job,
        *of_map: Tensor,
    ) -> tuple[Tensor, ...]:
        nothing = Needs(False, False, False, False)
        engine = job.engine((prototypes, bias, scale), nothing)
        found = engine.forward(job.rows(query, offset, of_map))
        # The returned numbers reference this node; keeping them on it would be a cycle.
        job.names, job.place = tuple(found.numbers), found.place
        numbers = tuple(found.numbers.values())
        ctx.save_for_backward(query, offset, prototypes, bias, scale, *of_map, *numbers)
        ctx.job, ctx.size = job, len(of_map)
        return numbers

    @staticmethod
    def backward(ctx: Any, *d_numbers: Tensor | None) -> tuple[Any, ...]:
        # Read once: activation checkpointing hands them out once.
        query, offset, prototypes, bias, scale, *more = ctx.saved_tensors
        of_map, numbers = more[: ctx.size], more[ctx.size :]
        job, wanted_inputs = ctx.job, ctx.needs_input_grad
        needs = Needs(wanted_inputs[0], *wanted_inputs[2:5])
        wanted = dict(zip(job.names, d_numbers, strict=True))
        with torch.no_grad(), full_precision(query.device):
            engine = job.engine((prototypes, bias, scale), needs)
            engine.numbers = dict(zip(job.names, numbers, strict=True))
            rows = job.rows(query, offset, of_map)
            back = engine.backward(rows, wanted, torch.ones_like(query[:, 0]))
            d_prototypes, d_offsets = engine.finish(torch.ones_like(scale))
        d_scale = None if back.scale is None else back.scale.sum()
        gradients = [
            back.query,
            back.offset,
            None if d_prototypes is None else d_prototypes.to(prototypes.dtype),
            d_offsets.to(bias.dtype) if needs.bias else None,
            d_scale,
            *back.mapped,
        ]
        found = once(gradients, query, offset, prototypes, bias, scale, *of_map)
        return *found[:5], None, *found[5:]


class _Once(torch.autograd.Function):
    """Gradients that raise a clear error when differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(
            "a streamed or fused split expects to be differentiated once, got a second "
            "derivative: implementation='dense' has them all"
        )


def once(gradients: Sequence[Tensor | None], *inputs: Tensor | None) -> list[Tensor | None]:
    """Return the gradients; under ``create_graph`` a second derivative raises."""
    if not torch.is_grad_enabled():
        return [*gradients]
    return [None if g is None else _Once.apply(g, *inputs) for g in gradients]
