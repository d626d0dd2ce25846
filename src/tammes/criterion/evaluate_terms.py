"""Evaluate the terms of a loss on a batch: those on the split by a kernel, the others plainly."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tammes._compile import outside_compile
from tammes.distributed.sharded_rows import ShardedRows
from tammes.heads.head import Head
from tammes.kernels.dense import dense_split
from tammes.kernels.dispatch import choose
from tammes.kernels.problem import Problem, cosines_of, full_precision, product_dtype, working_dtype
from tammes.kernels.streamed.forward_gradients import combine
from tammes.kernels.streamed.functions import streamed_split, weighted_loss
from tammes.kernels.tiling import Plan, Threshold
from tammes.split import Split, with_sums
from tammes.terms import Batch, Setting, Term

Named = Mapping[str, tuple[float, Term]]
"""Weight and term by name."""
Arguments = Mapping[str, Mapping[str, Setting]]
"""What each term is called with: numbers, or tensors of one value per example."""


def check_fit(head: Head, term: Term) -> None:
    """Refuse a term on a head it has no meaning on."""
    requires, kind = term.definition.requires, type(head).__name__
    if requires == "cosine" and not head.similarity.is_cosine:
        raise ValueError(
            f"{term.name} expects a head with unit features and unit prototypes, got {kind}"
        )
    if requires == "angle" and not head.has_angle:
        raise ValueError(
            f"{term.name} expects a head whose similarity is an angle, without bias, "
            f"got {kind}{'' if head.bias is None else ' with bias'}"
        )
    if "rest" in term.definition.reads and head.group is not None and head.is_sharded:
        raise ValueError(
            f"{term.name} expects a head that has all classes, since it reads rest, "
            f"got {kind} over {head.group.name}"
        )
    if term.within is not None:
        term.within.check(head.embedding_size, head.num_classes)


def split_terms(
    head: Head,
    named: Named,
    arguments: Arguments,
    batch: Batch,
    weights: Tensor,
    *,
    rowwise: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted loss of the terms on the split, and the weighted sum of each.

    Args:
        head: makes the split.
        named: all terms of the loss.
        arguments: what each term is called with.
        batch: features and labels.
        weights: of the examples, shape ``(N,)``.
        rowwise: return the loss of each example, weighted, in place of their sum.
    """
    terms = {name: term for name, (_, term) in named.items() if term.definition.on == "split"}
    if not terms:
        return (torch.zeros_like(weights) if rowwise else weights.new_zeros(())), {}
    problem = head.problem(batch.features, batch.labels)
    first, *more = (
        _evaluated(head, of, named, group, arguments, batch, weights, rowwise)
        for of, some in _by_similarity(problem, terms)
        for group in _by_threshold(some)
    )
    loss, sums = first
    for part, part_sums in more:
        loss, sums = loss + part, sums | part_sums
    return loss, sums


def _by_similarity(
    problem: Problem, terms: Mapping[str, Term]
) -> Iterator[tuple[Problem, dict[str, Term]]]:
    """The terms, with the problem they look at: the head's own, or its cosines."""
    if problem.similarity.is_cosine and problem.bias is None:
        yield problem, dict(terms)
        return
    for cosines, of in ((False, problem), (True, cosines_of(problem))):
        some = {name: term for name, term in terms.items() if term.definition.cosines == cosines}
        if some:
            yield of, some


def _by_threshold(terms: Mapping[str, Term]) -> list[dict[str, Term]]:
    """The terms, such that no two with a threshold are together: a kernel takes one at a time."""
    over = [name for name, term in terms.items() if "excess" in term.definition.reads]
    first = {name: term for name, term in terms.items() if name not in over[1:]}
    return [first, *({name: terms[name]} for name in over[1:])]


def _evaluated(
    head: Head,
    problem: Problem,
    named: Named,
    terms: Mapping[str, Term],
    arguments: Arguments,
    batch: Batch,
    weights: Tensor,
    rowwise: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted loss of some terms, and the weighted sum of each; see :func:`split_terms`."""
    names = [*terms]
    coefficients = tuple(named[name][0] for name in names)
    reads = frozenset(
        field
        for name, term in terms.items()
        for field in term.definition.reads
        if not _is_zero(arguments[name].get(term.definition.unless_zero.get(field, "")))
    )
    way = choose(head.implementation, problem, reads)
    # What is not a sum over the batch, or takes a gradient itself, is differentiated afterwards;
    # a sum has its gradients made in forward, or made again from the same arguments.
    now = not (rowwise or weights.requires_grad or _take_gradient(arguments, names))
    plan = Plan(
        reads=reads,
        evaluate=lambda split, rows: _evaluate(terms, arguments, split, rows),
        coefficients=coefficients,
        product_dtype=product_dtype(weights.device),
        threshold=_threshold(terms, arguments) if "excess" in reads else None,
        bound=_bound(problem),
        fused=way == "fused",
    )
    if way != "dense" and now and not plan.too_thin(problem):
        loss, sums = outside_compile(weighted_loss)(problem, batch.labels, weights, plan)
        return loss, dict(zip(names, sums, strict=True))
    with full_precision(weights.device):
        if way == "dense":
            split = dense_split(problem, batch.labels, reads)
            over = None if plan.threshold is None else plan.threshold(split, slice(None))
            split = with_sums(split, reads, over)
        else:
            split = outside_compile(streamed_split)(problem, batch.labels, plan)
        values = plan.evaluate(split, slice(None))
        rows = combine(coefficients, values) * weights
        sums = values.detach() @ weights.detach()
    return (rows if rowwise else rows.sum()), dict(zip(names, sums, strict=True))


def other_terms(
    head: Head, named: Named, arguments: Arguments, batch: Batch, weights: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Name and weighted rows ``(N,)`` of every term on prototypes or features."""
    projected: dict[Any, Tensor] = {None: batch.features}
    shards = ShardedRows.of_head(head)
    with full_precision(weights.device):
        for name, (_, term) in named.items():
            function, within = term.definition.function, term.within
            if term.definition.on == "prototypes":
                prototypes = _prototypes(head)
                if term.definition.takes_shards:
                    value = function(prototypes, shards=shards, **arguments[name])
                else:
                    value = function(shards.all_gather(prototypes), **arguments[name])
                yield name, value * weights
            elif term.definition.on == "features":
                if within is not None and within not in projected:
                    projected[within] = within.project(batch.features, _prototypes(head), shards)
                features = projected[within].to(weights.dtype)
                rows, anchors = function(batch._replace(features=features), **arguments[name])
                # Rescaled, so that the mean over all examples is the mean over the anchors.
                anchored = (weights * anchors).sum()
                share = weights.sum() / torch.where(anchored == 0, 1.0, anchored)
                yield name, torch.where(anchors, rows, 0.0) * weights * share


def _prototypes(head: Head) -> Tensor:
    """The prototypes in the working dtype, in which unit rows are made too."""
    return head.similarity.keys(head.weight.to(working_dtype(head.weight)))[0]


def _evaluate(terms: Mapping[str, Term], arguments: Arguments, split: Split, rows: slice) -> Tensor:
    """Values of the terms on the split of some rows of the batch, shape ``(T, n)``."""
    return torch.stack(
        [
            term.definition.function(split, **_of_rows(arguments[name], rows))
            for name, term in terms.items()
        ]
    )


def _threshold(terms: Mapping[str, Term], arguments: Arguments) -> Threshold:
    """That of the one term that has one."""
    name = next(name for name, term in terms.items() if "excess" in term.definition.reads)
    threshold = terms[name].definition.threshold
    if threshold is None:
        raise ValueError(f"{name} expects a threshold where it reads excess, got none: see term()")
    return lambda split, rows: threshold(split, **_of_rows(arguments[name], rows))


def _bound(problem: Problem) -> float | None:
    """Largest score there can be, where that is known without asking a device."""
    scale, bias = problem.scale, problem.bias
    bounded = problem.similarity.is_cosine and bias is None and not isinstance(scale, Tensor)
    return scale if bounded else None  # type: ignore[return-value]


def _of_rows(arguments: Mapping[str, Setting], rows: slice) -> dict[str, Setting]:
    return {
        key: value[rows] if isinstance(value, Tensor) and value.ndim else value
        for key, value in arguments.items()
    }


def _is_zero(value: Setting) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def _take_gradient(arguments: Arguments, names: list[str]) -> bool:
    values = [value for name in names for value in arguments[name].values()]
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )
