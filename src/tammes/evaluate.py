"""Evaluate the terms of a loss on a batch: those on the split by a kernel, the others plainly."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tammes.compose import Batch, Setting, Term
from tammes.heads.head import Head
from tammes.kernels import choose
from tammes.kernels.problem import full_precision, product_dtype, working_dtype
from tammes.kernels.streamed import Plan, combine, weighted_loss
from tammes.split import Split

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
    names = [name for name, (_, term) in named.items() if term.definition.on == "split"]
    if not names:
        nothing = torch.zeros_like(weights)
        return (nothing if rowwise else nothing.sum()), {}
    terms = {name: named[name][1] for name in names}
    coefficients = tuple(named[name][0] for name in names)
    reads = frozenset(
        field
        for name, term in terms.items()
        for field in term.definition.reads
        if not _is_zero(arguments[name].get(term.definition.unless_zero.get(field, "")))
    )
    problem = head.problem(batch.features)
    # These have a gradient, or need all scores at once: only the plain form has both.
    plain = "rest" in reads or weights.requires_grad or _take_gradient(arguments, names)
    if plain or choose(head.implementation, problem) == "dense":
        with full_precision(weights.device):
            split = head.split(batch.features, batch.labels, reads)
            values = _evaluate(terms, arguments, split, slice(None))
            rows = combine(coefficients, values) * weights
        loss, sums = (rows if rowwise else rows.sum()), values.detach() @ weights.detach()
    else:
        # A gradient made later must see what a term remembered now.
        arguments = {name: _snapshot(arguments[name]) for name in names}
        plan = Plan(
            similarity=head.similarity,
            reads=reads,
            evaluate=lambda split, rows: _evaluate(terms, arguments, split, rows),
            coefficients=coefficients,
            product_dtype=product_dtype(weights.device),
        )
        loss, sums = weighted_loss(problem, batch.labels, weights, plan, rowwise=rowwise)
    return loss, dict(zip(names, sums, strict=True))


def other_terms(
    head: Head, named: Named, arguments: Arguments, batch: Batch, weights: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Name and weighted rows ``(N,)`` of every term on prototypes or features."""
    projected: dict[Any, Tensor] = {None: batch.features}
    with full_precision(weights.device):
        for name, (_, term) in named.items():
            function, within = term.definition.function, term.within
            if term.definition.on == "prototypes":
                prototypes = head.prototypes.to(working_dtype(head.prototypes))
                yield name, function(prototypes, **arguments[name]) * weights
            elif term.definition.on == "features":
                if within is not None and within not in projected:
                    projected[within] = within.project(batch.features, head.prototypes)
                features = projected[within].to(weights.dtype)
                rows, anchors = function(batch._replace(features=features), **arguments[name])
                # Rescaled, so that the mean over all examples is the mean over the anchors.
                anchored = (weights * anchors).sum()
                share = weights.sum() / torch.where(anchored == 0, 1.0, anchored)
                yield name, torch.where(anchors, rows, 0.0) * weights * share


def _evaluate(terms: Mapping[str, Term], arguments: Arguments, split: Split, rows: slice) -> Tensor:
    """Values of the terms on the split of some rows of the batch, shape ``(T, n)``."""
    values = []
    for name, term in terms.items():
        own = {
            key: value[rows] if isinstance(value, Tensor) and value.ndim else value
            for key, value in arguments[name].items()
        }
        values.append(term.definition.function(split, **own))
    return torch.stack(values)


def _is_zero(value: Setting) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def _take_gradient(arguments: Arguments, names: list[str]) -> bool:
    values = [value for name in names for value in arguments[name].values()]
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )


def _snapshot(arguments: Mapping[str, Setting]) -> dict[str, Setting]:
    return {key: copy.deepcopy(v) if key == "state" else v for key, v in arguments.items()}
