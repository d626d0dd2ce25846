"""Accuracy and margins of features against the prototypes of a head."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.advise.feasibility import largest_sample_margin_of_any
from tammes.criterion.criterion import Criterion
from tammes.distributed.sharded_rows import ShardedRows
from tammes.geometry import largest_class_margin
from tammes.heads.head import Head
from tammes.heads.sharded import ShardedHead
from tammes.kernels import dispatch
from tammes.kernels.problem import Problem, cosines_of
from tammes.kernels.reference import similarity_matrix
from tammes.metrics import functional
from tammes.metrics.functional.groups import GROUPS, class_groups
from tammes.terms import Loss

_BLOCK = 1 << 24
"""Largest number of scores in memory."""
MEASURED = 20_000
"""Largest number of classes for which margins are measured during training."""
_CONFUSED = 12
"""Number of confused class pairs whose examples are kept."""
_EXAMPLES = 4
"""Number of examples kept of each confused pair."""


class ExampleMetrics(NamedTuple):
    """Metrics of each example, all of shape ``(N,)``.

    An example is correct if its class scores higher than every other. Margins are of cosines, for
    any head; the bias is the softmax bias of the scores.
    """

    predictions: Tensor
    correct: Tensor
    margins: Tensor
    bias: Tensor


@torch.no_grad()
def example_metrics(head: Head, features: Tensor, labels: Tensor) -> ExampleMetrics:
    """Compute prediction, correctness, margin and softmax bias of each example.

    All processes of a sharded head must call this together, with the same examples.
    """
    if isinstance(head, ShardedHead) and head.is_sharded:
        return _sharded_example_metrics(head, features, labels)
    problem = head.problem(features)
    similarity = similarity_matrix(problem)
    target, others = _apart(problem, similarity, labels)
    hardest = others.amax(1)
    log_sum = (problem.scale * others).logsumexp(1)
    margins = target - hardest
    if not head.similarity.is_cosine or head.bias is not None:
        plain = cosines_of(problem)
        own, rest = _apart(plain, similarity_matrix(plain), labels)
        margins = own - rest.amax(1)
    bias = _bias(log_sum, problem.scale * hardest, head.num_classes)
    return ExampleMetrics(similarity.argmax(1), target > hardest, margins, bias)


def _apart(problem: Problem, similarity: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Similarity to the target class ``(N,)``, and to all, -inf for that and masked ones.

    Nothing is validated: in a run that has diverged, a similarity may be anything.
    """
    column = labels[:, None]
    others = similarity.scatter(1, column, -math.inf)
    if problem.there is not None:
        others.masked_fill_(~problem.there, -math.inf)
    return similarity.gather(1, column).squeeze(1), others


def _sharded_example_metrics(head: ShardedHead, features: Tensor, labels: Tensor) -> ExampleMetrics:
    reads = ("target", "others", "hardest")
    problem = head.problem(features, labels)
    own = dispatch.split(problem, labels, reads, head.implementation)
    cosines = own
    if not head.similarity.is_cosine or head.bias is not None:
        cosines = dispatch.split(cosines_of(problem), labels, reads, head.implementation)
    return ExampleMetrics(
        head.top(features, shared=True).classes[:, 0],
        own.target > own.hardest,
        cosines.target - cosines.hardest,
        _bias(own.others, own.scale * own.hardest, head.num_classes),
    )


def _bias(log_sum: Tensor, largest: Tensor, classes: int) -> Tensor:
    """Softmax bias: log-sum-exp minus maximum of the other classes' scores, without rounding."""
    return (log_sum - largest).clamp(0.0, math.log(classes - 1))


def example_metrics_in_blocks(head: Head, features: Tensor, labels: Tensor) -> ExampleMetrics:
    """Compute :func:`example_metrics` block by block; the results are on the CPU."""
    rows = max(1, _BLOCK // head.num_classes)
    parts = [
        example_metrics(head, block.to(head.weight.device), own.to(head.weight.device))
        for block, own in zip(features.split(rows), labels.split(rows), strict=True)
    ]
    return ExampleMetrics(
        *(torch.cat([part.cpu() for part in column]) for column in zip(*parts, strict=True))
    )


def summarise(examples: ExampleMetrics) -> dict[str, float]:
    """Return means over the examples, as in a line of ``metrics.jsonl``."""
    return {
        "accuracy": examples.correct.double().mean().item(),
        "sample_margin": examples.margins.double().mean().item(),
        "bias": examples.bias.double().mean().item(),
    }


@torch.no_grad()
def mean_loss(criterion: Criterion, features: Tensor, labels: Tensor) -> float | None:
    """Return the mean loss over the examples; None if it compares examples with each other."""
    if not by_example(criterion.loss):
        return None
    device, total = criterion.head.weight.device, 0.0
    rows = max(1, _BLOCK // criterion.head.num_classes)
    for block, own in zip(features.split(rows), labels.split(rows), strict=True):
        total += float(criterion(block.to(device), own.to(device))) * len(block)
    mean = total / len(features)
    return mean if math.isfinite(mean) else None


def by_example(loss: Loss) -> bool:
    """Whether the loss of an example depends on no other example."""
    return all(term.definition.on not in ("features", "proxies") for _, term in loss.leaves())


def classifies(loss: Loss) -> bool:
    """Whether a loss trains the prototypes of the head as a classifier."""
    return any(term.definition.on in ("split", "proxies") for _, term in loss.leaves())


def measure_prototypes(head: Head, *, margin: bool = True) -> dict[str, float]:
    """Return class margin and norms of the prototypes, as in a line of ``metrics.jsonl``.

    Computing the class margin, which is quadratic in the number of classes, is optional.
    """
    prototypes, measures = ShardedRows.of_head(head).all_gather(head.weight.detach()), {}
    with warnings.catch_warnings():
        # Prototypes of zero length have no direction; the norms show them.
        warnings.simplefilter("ignore")
        if margin:
            closest = functional.class_margin(prototypes)
            measures["class_margin"] = float(closest.angle)
            measures["class_margin_ratio"] = float(closest.ratio)
        norms = functional.prototype_norms(prototypes)
    if math.isfinite(norms.ratio):
        measures["norm_ratio"] = float(norms.ratio)
    return measures | {
        "norm_mean": float(norms.mean),
        "norm_min": float(norms.smallest),
        "norm_max": float(norms.largest),
    }


def optimum(classes: int, size: int) -> dict[str, Any]:
    """Return the largest possible class margin, in degrees, and sample margin."""
    best = largest_class_margin(classes, size)
    return {
        "class_margin": best.degrees,
        "class_margin_is_bound": not best.exact,
        "sample_margin": largest_sample_margin_of_any(classes, size, math.radians(best.degrees)),
    }


def per_class_accuracy(
    examples: ExampleMetrics, labels: Tensor, classes: int
) -> list[float | None]:
    """Return the accuracy of each class; None for a class without examples."""
    counts = torch.bincount(labels, minlength=classes)
    right = torch.bincount(labels[examples.correct], minlength=classes)
    return [
        None if not count else good / count
        for good, count in zip(right.tolist(), counts.tolist(), strict=True)
    ]


def accuracy_by_count(per_class: Sequence[float | None], counts: Sequence[int]) -> dict[str, float]:
    """Return the mean accuracy of classes with many, medium and few training examples.

    It is empty if all classes are of one kind.
    """
    kinds = class_groups("accuracy_by_count", counts, many=100, few=20).tolist()
    found: dict[str, list[float]] = {}
    for kind, accuracy in zip(kinds, per_class, strict=True):
        if accuracy is not None:
            found.setdefault(GROUPS[kind], []).append(accuracy)
    if len(found) < 2:
        return {}
    return {f"accuracy_{name}": sum(some) / len(some) for name, some in found.items()}


def confused_examples(examples: ExampleMetrics, labels: Tensor, classes: int) -> Tensor:
    """Select the clearest mistakes of the most confused class pairs.

    Returns:
        Positions: for each confused pair, most frequent first, the wrong examples with the lowest
        margins; then, for every class among them, the correct example with the largest margin.
    """
    wrong = (~examples.correct & (examples.predictions != labels)).nonzero().flatten()
    pairs = labels[wrong] * classes + examples.predictions[wrong]
    kinds, counts = pairs.unique(return_counts=True)
    frequent = kinds[counts.argsort(descending=True, stable=True)][:_CONFUSED]
    chosen: list[int] = []
    shown: dict[int, None] = {}
    for pair in frequent.tolist():
        own = wrong[pairs == pair]
        chosen += own[examples.margins[own].argsort(stable=True)[:_EXAMPLES]].tolist()
        shown.update(dict.fromkeys(divmod(pair, classes)))
    for label in shown or range(min(classes, _CONFUSED)):
        own = ((labels == label) & examples.correct).nonzero().flatten()
        if len(own):
            chosen.append(int(own[examples.margins[own].argmax()]))
    return torch.tensor(chosen, dtype=torch.long)
