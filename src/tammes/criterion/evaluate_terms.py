"""Evaluate the terms of a loss: those on the split through a kernel, the others directly."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes._compile import outside_compile
from tammes._setting_values import extremes
from tammes.criterion.hyperparameters import Settings
from tammes.distributed.sharded_rows import ShardedRows
from tammes.heads.head import Head
from tammes.kernels.dense import dense_split
from tammes.kernels.dispatch import choose_kernel
from tammes.kernels.merge import scale_gradient, sum_gradient
from tammes.kernels.problem import Margin, Problem, adjusted, cosines_of
from tammes.kernels.reference import reference_split
from tammes.kernels.score_map import ScoreMap
from tammes.kernels.streamed.functions import streamed_split, weighted_loss
from tammes.kernels.tiling import Plan
from tammes.losses import arcface, combined_margin, cosface, normface, softmax
from tammes.similarity import full_precision, product_dtype, working_dtype
from tammes.split import MAPPED, Split
from tammes.terms import Batch, Setting, Term

Named = Mapping[str, tuple[float, Term]]
"""Weight and term by name."""
Arguments = Mapping[str, Mapping[str, Setting]]
"""Arguments of each term by name: numbers, or tensors of one value per example."""
Noted = tuple[Tensor, Tensor | None]
"""Values of a term and their weights, or their weighted sum and no weights."""


class SplitGroup(NamedTuple):
    """Terms that read the same split and are evaluated in one kernel call.

    Attributes:
        names: names of the terms.
        terms: the terms, in the same order.
        coefficients: weight of each term in the loss.
        cosines: whether they read the cosines of the head instead of its scores.
        reads: fields of the split that any of them reads.
    """

    names: tuple[str, ...]
    terms: tuple[Term, ...]
    coefficients: tuple[float, ...]
    cosines: bool
    reads: frozenset[str]


def check_fit(head: Head, term: Term) -> None:
    """Reject a term that does not work with the head."""
    requires, kind = term.definition.requires, type(head).__name__
    several = head.similarity.centers > 1
    if requires == "cosine" and not head.similarity.is_cosine:
        raise ValueError(
            f"{term.name} expects a head with unit features and unit prototypes, got {kind}"
        )
    if requires == "angle" and not head.has_angle:
        raise ValueError(
            f"{term.name} expects a head whose similarity is an angle, without bias, "
            f"got {kind}{'' if head.bias is None else ' with bias'}"
        )
    if requires == "product" and not head.similarity.is_product:
        raise ValueError(
            f"{term.name} expects a head whose similarity is a product of feature and prototype, "
            f"got {kind}{' with pooling=soft' if several else ''}"
        )
    if requires == "adaptive" and head.adaptive_scale is None:
        raise ValueError(
            f"{term.name} expects a head with scale='adaptive', got {kind} with "
            f"scale={head.scale_setting!r}"
        )
    if "rest" in term.definition.reads and head.group is not None and head.is_sharded:
        raise ValueError(
            f"{term.name} expects a head that has all classes, since it reads rest, "
            f"got {kind} over {head.group.name}"
        )
    if term.definition.on == "proxies" and several and not term.definition.takes_shards:
        raise ValueError(
            f"{term.name} expects a head with one prototype per class, "
            f"got {kind} with subcenters={head.similarity.centers}"
        )
    if term.within is not None:
        term.within.check(head.embedding_size, head.num_classes * head.similarity.centers)


def check_cosine_margin(head: Head, term: Term, scheduled: Tensor | None = None) -> None:
    """Reject a margin larger than any difference of two cosines, on a cosine head."""
    key = term.definition.in_cosines
    if key and head.similarity.is_cosine:
        worst = max(extremes(term.settings[key] if scheduled is None else scheduled), key=abs)
        if abs(worst) > 2:
            angle = math.radians(worst)
            raise ValueError(
                f"{term.name} expects {key} to be a difference of cosines, at most 2 either way, "
                f"got {worst:g}; as an angle in degrees it is arcface(margin={angle:.4g})"
            )


def group_terms(head: Head, named: Named, arguments: Arguments) -> list[SplitGroup]:
    """Group the terms on the split that one kernel call can evaluate together.

    A call sees either the head's scores or its cosines; a term that adjusts or maps the scores
    needs a call of its own.

    Args:
        head: the head that makes the split.
        named: all terms of the loss.
        arguments: arguments of each term; a field that is needed only for a nonzero setting is not
            read if the setting is zero.
    """
    on_split = [name for name, (_, term) in named.items() if term.definition.on == "split"]
    one_view = head.similarity.is_cosine and head.bias is None
    groups = []
    for cosines in (False, True):
        names = [
            n for n in on_split if (named[n][1].definition.cosines and not one_view) == cosines
        ]
        alone = [name for name in names if named[name][1].definition.has_own_scores]
        first = [name for name in names if name not in alone]
        for some in ([first] if first else []) + [[name] for name in alone]:
            terms = tuple(named[name][1] for name in some)
            reads = frozenset(
                field
                for name, term in zip(some, terms, strict=True)
                for field in term.definition.reads
                if not _is_zero(arguments[name].get(term.definition.unless_zero.get(field, "")))
            )
            weights = tuple(named[name][0] for name in some)
            groups.append(SplitGroup(tuple(some), terms, weights, cosines, reads))
    return groups


_ADDITIVE = {loss().definition for loss in (softmax, normface, cosface)}
"""Cross entropies with a margin that is subtracted from the similarity to the target class."""
_ANGULAR = {loss().definition for loss in (arcface, combined_margin)}
"""Cross entropies that may also have a margin that is added to the angle."""


def margin_of(head: Head, group: SplitGroup, arguments: Arguments) -> Margin | None:
    """Return the margin if a group is a cross entropy of the head's scores, else none.

    Such a loss is one function of the batch, see :func:`tammes.kernels.dense.dense_cross_entropy`.
    """
    term, own = group.terms[0], arguments[group.names[0]]
    if group.coefficients != (1,) or not group.reads <= {"target", "gap", "length", "others"}:
        return None
    if any(isinstance(value, Tensor) for value in own.values()):
        return None
    if head.similarity.is_cosine and head.bias is not None:
        return None
    if term.definition in _ADDITIVE:
        return Margin(similarity=float(own.get("margin", 0.0)))
    if term.definition not in _ANGULAR or not head.similarity.is_cosine:
        return None
    m1, m2, m3 = own.get("m1", 1.0), own.get("m2", own.get("margin")), own.get("m3", 0.0)
    plain = own["extension"] == "monotone" and own["gradient"] == "exact"
    return Margin(float(m2), float(m3)) if plain and m1 == 1 else None


def split_terms(
    head: Head,
    problem: Problem | None,
    groups: Sequence[SplitGroup],
    settings: Settings,
    arguments: Arguments,
    labels: Tensor,
    masked: Tensor | None,
    weights: Tensor,
    *,
    rowwise: bool = False,
) -> tuple[Tensor, dict[str, Noted]]:
    """Evaluate the terms on the split: return their weighted loss, and the values of each.

    ``groups`` come from :func:`group_terms`; ``problem`` may be none if there are none. ``masked``
    marks masked classes, shape ``(C,)``. ``rowwise`` returns the weighted loss of each example
    instead of the sum.
    """
    if problem is None or not groups:
        return (torch.zeros_like(weights) if rowwise else weights.new_zeros(())), {}
    first, *more = (
        _evaluate_group(head, problem, group, settings, arguments, labels, masked, weights, rowwise)
        for group in groups
    )
    loss, noted = first
    for part, part_noted in more:
        loss, noted = loss + part, noted | part_noted
    return loss, noted


def _evaluate_group(
    head: Head,
    problem: Problem,
    group: SplitGroup,
    settings: Settings,
    arguments: Arguments,
    labels: Tensor,
    masked: Tensor | None,
    weights: Tensor,
    rowwise: bool,
) -> tuple[Tensor, dict[str, Noted]]:
    """Evaluate one group of terms, see :func:`split_terms`."""
    problem = cosines_of(problem) if group.cosines else problem
    if group.terms[0].definition.adjust is not None:
        name = group.names[0]
        own = dict(arguments[name])
        with full_precision(weights.device):
            change = settings.adjustment(name, weights.dtype, masked, own.pop("state", None))
            problem = adjusted(problem, *change)
        arguments = {name: own}
    kernel = choose_kernel(head.implementation, problem, group.reads)
    low = product_dtype(weights.device) if weights.is_cuda else None
    mapping = _score_map(group, arguments, problem) if MAPPED in group.reads else None
    if kernel in ("dense", "reference"):
        with full_precision(weights.device):
            if kernel == "dense":
                split = dense_split(problem, labels, group.reads, low)
            else:
                split = reference_split(problem, labels, group.reads, mapping)
            return _weigh(group, evaluate_rows(group, arguments, split), weights, rowwise)
    plan = Plan(
        reads=group.reads,
        evaluate=lambda split, rows: torch.stack(evaluate_rows(group, arguments, split, rows)),
        coefficients=group.coefficients,
        product_dtype=low,
        mapping=mapping,
        bound=_largest_score(problem, mapping is not None) if kernel == "fused" else None,
        fused=kernel == "fused",
        itemsize=weights.itemsize,
    )
    # For a sum over the batch, forward computes the gradients too. Losses per example, and weights
    # or settings that require a gradient, need a differentiable split instead.
    summed = not (rowwise or weights.requires_grad or _take_gradient(arguments, group.names))
    if summed and not plan.too_thin(problem):
        # Without shards, a compiler traces the reference and never gets here.
        run = weighted_loss if problem.share is None else outside_compile(weighted_loss)
        loss, sums = run(problem, labels, weights, plan)
        return loss, {name: (total, None) for name, total in zip(group.names, sums, strict=True)}
    with full_precision(weights.device):
        split = outside_compile(streamed_split)(problem, labels, plan)
        return _weigh(group, evaluate_rows(group, arguments, split), weights, rowwise)


def evaluate_rows(
    group: SplitGroup, arguments: Arguments, split: Split, rows: slice | None = None
) -> list[Tensor]:
    """Evaluate each term on the split of a batch or of some of its rows, shape ``(n,)`` each."""
    return [
        term.definition.function(split, **_of_rows(arguments[name], rows))
        for name, term in zip(group.names, group.terms, strict=True)
    ]


def _weigh(
    group: SplitGroup, values: list[Tensor], weights: Tensor, rowwise: bool
) -> tuple[Tensor, dict[str, Noted]]:
    """Sum the terms and weight the examples."""
    fixed = weights.detach() if weights.requires_grad else weights
    noted: dict[str, Noted] = {
        name: (value.detach(), fixed) for name, value in zip(group.names, values, strict=True)
    }
    first, *more = (
        value if coefficient == 1 else coefficient * value
        for coefficient, value in zip(group.coefficients, values, strict=True)
    )
    rows = sum(more, first)
    return (rows * weights if rowwise else torch.dot(rows, weights)), noted


def other_terms(
    head: Head, named: Named, arguments: Arguments, batch: Batch, weights: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Evaluate terms on prototypes, features or both: yield names and weighted rows ``(N,)``."""
    projected: dict[Any, Tensor] = {None: batch.features}
    shards = ShardedRows.of_head(head)
    with full_precision(weights.device):
        for name, (_, term) in named.items():
            function, within = term.definition.function, term.within
            if term.definition.on in ("prototypes", "proxies"):
                local = term.definition.takes_shards
                given: tuple[Any, ...] = (_prototypes(head),)
                if not local:
                    given = (shards.all_gather(*given),)
                if term.definition.on == "proxies":
                    features = batch.features.to(weights.dtype)
                    features = shards.for_local_rows(features) if local else features
                    given = (batch._replace(features=features), given[0].to(weights.dtype))
                more = {"shards": shards} if local else {}
                yield name, function(*given, **more, **arguments[name]) * weights
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
    """Return all prototypes as rows in the working dtype, normalised where the head normalises."""
    return head.similarity.keys(head.weight.to(working_dtype(head.weight)))[0].flatten(0, -2)


def _score_map(group: SplitGroup, arguments: Arguments, problem: Problem) -> ScoreMap:
    """Return the map of the group's one term."""
    definition, own = group.terms[0].definition, dict(arguments[group.names[0]])
    function, make = definition.map_others, definition.row_numbers
    assert function is not None
    if problem.share is not None:
        ranks = problem.share.group
        for key, value in own.items():
            if isinstance(value, Tensor) and value.requires_grad and not value.ndim:
                # Each rank has the gradient through its own classes only, times the world size.
                own[key] = scale_gradient(sum_gradient(value, ranks), 1 / ranks.world_size)
    numbers = None if make is None else lambda split: make(split, **own)
    return ScoreMap(function, numbers, own.get(definition.cutoff, 0))


def _largest_score(problem: Problem, mapped: bool) -> float | None:
    """Return an upper bound of the scores, if there is one without reading a tensor."""
    scale, bias = problem.scale, problem.bias
    bounded = problem.similarity.is_cosine and bias is None and not isinstance(scale, Tensor)
    bounded = bounded and not mapped
    return scale if bounded else None  # type: ignore[return-value]


def _of_rows(arguments: Mapping[str, Setting], rows: slice | None) -> Mapping[str, Setting]:
    """Select some rows of the arguments that have one value per example."""
    if rows is None:
        return arguments
    return {
        key: value[rows] if isinstance(value, Tensor) and value.ndim else value
        for key, value in arguments.items()
    }


def _is_zero(value: Setting) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def _take_gradient(arguments: Arguments, names: Sequence[str]) -> bool:
    values = [value for name in names for value in arguments[name].values()]
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )
