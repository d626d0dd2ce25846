"""General path of a criterion's call, which supports everything.

Weights, ignored and several labels, settings for one call, schedules, states, terms on features or
prototypes, a batch over several ranks, tracing. The common call needs none of these and takes the
fast path in :meth:`tammes.Criterion.forward`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tammes._compile import outside_compile
from tammes._recomputation import checkpointing, once, recomputing
from tammes._validation import (
    check_batch,
    check_values,
    check_weights,
    transforming,
)
from tammes.criterion.evaluate_terms import Arguments, group_terms, other_terms, split_terms
from tammes.criterion.hyperparameters import named_schedules
from tammes.criterion.resize import check_followed
from tammes.distributed.global_batch import WeightedBatch, per_example_settings
from tammes.heads.adaptive_scale import ADAPTIVE_READS
from tammes.kernels.dispatch import split
from tammes.kernels.problem import Problem
from tammes.kernels.streamed.functions import own_split
from tammes.similarity import working_dtype
from tammes.states import Hook, LearnedNumber, Reading
from tammes.terms import Batch, Setting

if TYPE_CHECKING:
    from tammes.criterion.criterion import Criterion


def general_call(
    criterion: "Criterion",
    features: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    settings: Mapping[str, Setting],
) -> Tensor:
    """Loss of a batch; see :meth:`tammes.Criterion.forward` for the arguments."""
    tracing, head, scope = transforming(), criterion.head, criterion._scope()
    problem, masked = None, None
    if scope is not None or head.group is not None:
        masked = head.masked()
    else:
        # In a single process a head needs no labels to collect its problem.
        problem = head.problem(features)
        masked = None if problem.there is None else ~problem.there
    changing = criterion._changing
    none_ignored = False
    if scope is None:
        none_ignored = _check(criterion, features, labels, weights, settings, masked, tracing)
    else:
        max_rows = scope.validate(
            type(criterion).__name__,
            lambda: _check(criterion, features, labels, weights, settings, masked, tracing),
            features,
            embedding_size=head.embedding_size,
            num_classes=head.num_classes,
            values_per_example=len(per_example_settings(settings)) + (weights is not None),
            labels_per_example=labels.shape[-1] if getattr(labels, "ndim", 1) == 2 else 1,
        )
    dtype = working_dtype(features, head.weight)
    batch = _as_batch(features, labels, criterion.ignore_index, none_ignored)
    if problem is not None:
        problem = problem._replace(features=batch.features)
    own = whole = WeightedBatch(batch, weights, settings)
    mine = slice(None)
    if scope is not None:
        kinds = {term.definition.on for _, term in criterion._others.values()}
        adaptive = head.adaptive_scale is not None
        # Whether a term, a state or the scale reads the features of the other ranks' examples.
        compares = (
            adaptive or criterion.states.read_features or bool(kinds & {"features", "proxies"})
        )
        whole, mine = scope.gather(own, max_rows, features=compares)
    # A rank splits its own examples, or those of all ranks if the prototypes are sharded.
    part = whole if scope is not None and scope.sharded else own

    if problem is None and criterion._groups:
        problem = head.problem(part.batch.features, part.batch.labels)
    arguments: Arguments = criterion.settings.arguments
    groups, class_weights = criterion._groups, criterion.settings.class_weights
    if changing or settings or criterion._per_class:
        here = part.batch
        if part is not whole and len(criterion.states) > 0:
            here = here._replace(first=whole.batch.valid[: mine.start].sum())
        now = _read(criterion, whole.batch, here, problem, tracing)
        if now.scale is not None and problem is not None:
            problem = problem._replace(scale=now.scale)
        arguments = criterion.settings.resolve(part.batch, now.scheduled, part.settings, dtype)
        for name, state in now.states.items():
            arguments[name]["state"] = state
        groups = group_terms(head, criterion.settings.named, arguments)
        class_weights = now.class_weights

    weights = _weigh(whole, class_weights, masked, dtype)
    total = weights.sum()
    if whole.weights is None and class_weights is None:
        # A count, which is at least 1 unless it is 0.
        total = total.clamp_min(1)
    else:
        total = torch.where(total == 0, torch.ones_like(total), total)
    mean = criterion.reduction == "mean"
    # Traced code divides the sum: for the count before it, a compiler would need a kernel more.
    late = mean and tracing and scope is None
    if mean and not late:
        weights = weights / total
    rowwise = criterion.reduction == "none"
    some = weights if part is whole else weights[mine]
    loss, noted = split_terms(
        head,
        problem,
        groups,
        criterion.settings,
        arguments,
        part.batch.labels,
        masked,
        some,
        rowwise=rowwise,
    )
    rows: dict[str, Tensor] = {}
    if criterion._others:
        batch = whole.batch._replace(masked=masked)
        if scope is not None:
            batch = batch._replace(features=scope.for_replicated_loss(batch.features))
        rows = dict(other_terms(head, criterion._others, arguments, batch, weights))
    losses = [criterion._others[n][0] * (r if rowwise else r.sum()) for n, r in rows.items()]
    if scope is None:
        loss = sum(losses, loss)
        loss = loss / total if late else loss
    else:
        sums = {n: v if w is None else (v * w).sum() for n, (v, w) in noted.items()}
        loss, sums = scope.combine(loss, losses, sums, mine)
        noted = {name: (total_of, None) for name, total_of in sums.items()}
    if not tracing and recomputing():
        # Activation checkpointing: the first pass has already recorded this call.
        return loss
    if not _transformed(tracing):
        noted |= {name: (r.detach().sum(), None) for name, r in rows.items()}
        if late:
            sums = {n: v if w is None else (v * w).sum() for n, (v, w) in noted.items()}
            noted = {name: (value / total.detach(), None) for name, value in sums.items()}
        criterion._noted = {name: noted[name] for name in criterion.settings.named}
        criterion._noted_total = None if mean else total.detach()
    if changing:
        _remember(criterion, "after", whole.batch, tracing)
        # The first pass of an activation checkpoint may run without gradients.
        learning = criterion.training and (torch.is_grad_enabled() or checkpointing())
        if learning and not criterion._step_by_hand:
            criterion.step()
    return loss


def _check(
    criterion: "Criterion",
    features: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    settings: Mapping[str, Setting],
    masked: Tensor | None,
    tracing: bool,
) -> bool:
    """Reject wrong shapes, types, devices and, where they may be read, values.

    Returns:
        Whether no example is ignored; ``False`` if unknown, as on a GPU.
    """
    name, prototypes = type(criterion).__name__, criterion.head.weight
    head = type(criterion.head).__name__
    check_followed(criterion)
    check_batch(name, features, labels, prototypes, head, criterion._several)
    weighed = criterion.class_weights is not None or "class_weights" in criterion.schedules
    if labels.ndim == 2 and weighed:
        raise ValueError(
            f"{name} expects one label per example where it has class_weights, got labels of "
            f"shape {tuple(labels.shape)}"
        )
    if weights is not None:
        check_weights(name, weights, labels)
    # Values are read in eager mode only and, unless ``validate`` is set, without synchronising.
    on_host, none_ignored = labels.device.type == "cpu", False
    if not tracing and (criterion.validate or on_host) and criterion.validate is not None:
        classes, ignored = criterion.head.num_classes, criterion.ignore_index
        none_ignored = check_values(name, features, labels.long(), classes, masked, ignored)
    if settings or criterion.schedules:
        valid = labels.long() != criterion.ignore_index
        values = None if tracing else criterion.validate
        criterion.settings.check(_scheduled(criterion), settings, valid, values=values)
    return none_ignored and on_host


def _as_batch(features: Tensor, labels: Tensor, ignored_label: int, none_ignored: bool) -> Batch:
    """Mark the valid examples, and zero the others: times a weight of 0 a NaN would remain NaN.

    Padding among several labels becomes -1; a single ignored label becomes 0.
    """
    # Before the comparison: ``ignore_index`` may not fit a small integer type.
    labels = labels.long()
    there = labels != ignored_label
    if labels.ndim == 2:
        labels, valid = labels.masked_fill(~there, -1), there.any(1)
    else:
        valid = there
    if none_ignored:
        return Batch(features, labels, valid)
    ignored = ~valid
    labels = labels if labels.ndim == 2 else labels.masked_fill(ignored, 0)
    return Batch(features.masked_fill(ignored.unsqueeze(1), 0.0), labels, valid)


def _weigh(
    examples: WeightedBatch,
    class_weights: Tensor | None,
    masked: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the weights of the examples, shape ``(N,)``; NaN if the target class is masked."""
    batch, weights, _ = examples
    result = batch.valid.to(dtype)
    if weights is not None:
        result = torch.where(batch.valid, weights.to(dtype), 0.0)
    if class_weights is not None:
        result = result * class_weights.to(dtype)[batch.labels]
    if masked is not None:
        # Where values are not checked, an example of a masked class must make the loss NaN.
        own = masked[batch.labels.clamp_min(0)] & (batch.labels >= 0)
        own = own if own.ndim == 1 else own.any(1)
        result = result.masked_fill(batch.valid & own, torch.nan)
    return result


def _scheduled(criterion: "Criterion") -> dict[str, Tensor]:
    """Current values of the terms' scheduled settings."""
    schedules = named_schedules(criterion.schedules)
    return {key: schedule() for key, schedule in schedules.items() if key != "class_weights"}


def _read(
    criterion: "Criterion", whole: Batch, part: Batch, problem: Problem | None, tracing: bool
) -> Reading:
    """Read the states and schedules as they are for this call; later calls change them."""
    states, schedules = criterion.states, criterion.schedules
    deferred = "class_weights" in schedules

    def make() -> Reading:
        seen, scale = whole, None
        if problem is not None:
            every = problem._replace(features=whole.features)
            if criterion.training and states.sees:
                run = own_split if problem.share is None else outside_compile(own_split)
                seen = whole._replace(split=run(every, whole.labels, states.sees))
            if criterion.head.adaptive_scale is not None and criterion._groups:
                # Otherwise no term reads it, and an example may have several labels.
                scale = _adapted_scale(criterion, whole, every, tracing)
        _remember(criterion, "before", seen, tracing)
        weights = schedules["class_weights"]() if deferred else criterion.class_weights
        named = criterion.settings.named
        on_features = {name for name in named if named[name][1].definition.on == "features"}
        read = {name: whole if name in on_features else part for name in states}
        return Reading(_scheduled(criterion), weights, states.reading(read), scale)

    now = once(criterion, make) if criterion.training and criterion._changing else make()
    if recomputing():
        # Learned parameters have not changed, but the first pass may have built no graph.
        for name, state in states.items():
            if isinstance(state, LearnedNumber):
                now.states[name] = state.reading(part)
    return now


def _adapted_scale(
    criterion: "Criterion", batch: Batch, problem: Problem, tracing: bool
) -> Tensor | float:
    """Scale of the head, in training first updated from the examples of all ranks."""
    head = criterion.head
    if criterion.training and not _transformed(tracing):
        run = split if problem.share is None else outside_compile(split)
        with torch.no_grad():
            seen = run(problem, batch.labels, ADAPTIVE_READS, head.implementation)
            head.adapt_scale(seen, batch.valid)
    return head.scale


def _remember(criterion: "Criterion", hook: Hook, batch: Batch, tracing: bool) -> None:
    if criterion.training and not _transformed(tracing):
        criterion.states.run_hook(hook, batch)


def _transformed(tracing: bool) -> bool:
    """Whether tensors belong to a functorch transform and must not be stored."""
    return tracing and not torch.compiler.is_compiling()
