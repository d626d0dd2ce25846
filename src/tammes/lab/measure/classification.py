"""Classification: accuracy and margins of features against the prototypes of a head."""

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.advise.feasibility import largest_sample_margin_of_any
from tammes.criterion.criterion import Criterion
from tammes.distributed.sharded_rows import ShardedRows
from tammes.heads.head import Head
from tammes.heads.sharded import ShardedHead
from tammes.kernels import dispatch
from tammes.kernels.dense import similarity_matrix
from tammes.kernels.problem import Problem, cosines_of
from tammes.metrics import functional
from tammes.split import Split, split_matrix
from tammes.terms import Loss

_BLOCK = 1 << 24
"""Scores in memory at once."""
MEASURED = 20_000
"""Classes up to which margins are measured while training; beyond, they cost too much."""
_CONFUSED = 12
"""Confused pairs of classes of which examples are kept."""
_EXAMPLES = 4
"""Examples of each of them."""


class Examined(NamedTuple):
    """What is known of each example, all of shape ``(N,)``.

    Attributes:
        predictions: class with the highest score.
        correct: whether the own class scores higher than every other.
        margins: cosine to the own prototype minus that to the nearest other, whatever the head.
        bias: the softmax bias of the head's scores.
    """

    predictions: Tensor
    correct: Tensor
    margins: Tensor
    bias: Tensor


@torch.no_grad()
def examine(head: Head, features: Tensor, labels: Tensor) -> Examined:
    """Look at each example.

    Args:
        head: whose prototypes and scores. Where it is spread over processes, all of them must look
            at the same examples together.
        features: shape ``(N, D)``.
        labels: class of each example, shape ``(N,)``.
    """
    if isinstance(head, ShardedHead) and head.is_sharded:
        return _examine_together(head, features, labels)
    problem = head.problem(features)
    similarity = similarity_matrix(problem)
    own = cosines = _split(problem, similarity, labels)
    if not head.similarity.is_cosine or head.bias is not None:
        plain = cosines_of(problem)
        cosines = _split(plain, similarity_matrix(plain), labels)
    return Examined(
        similarity.argmax(1),
        own.target > own.hardest,
        cosines.target - cosines.hardest,
        _bias(own, head.num_classes),
    )


def _split(problem: Problem, similarity: Tensor, labels: Tensor) -> Split:
    """Split without a check: in a run that has diverged, a score or a bias may be -inf."""
    reads = frozenset(("target", "others", "hardest"))
    return split_matrix(similarity, labels, problem.scale, problem.there, {}, reads)


def _examine_together(head: ShardedHead, features: Tensor, labels: Tensor) -> Examined:
    reads = ("target", "others", "hardest")
    problem = head.problem(features, labels)
    own = dispatch.split(problem, labels, reads, head.implementation)
    cosines = own
    if not head.similarity.is_cosine or head.bias is not None:
        cosines = dispatch.split(cosines_of(problem), labels, reads, head.implementation)
    return Examined(
        head.top(features, shared=True).classes[:, 0],
        own.target > own.hardest,
        cosines.target - cosines.hardest,
        _bias(own, head.num_classes),
    )


def _bias(own: Split, classes: int) -> Tensor:
    bias = own.others - own.scale * own.hardest
    return bias.clamp(0.0, math.log(classes - 1))


def examine_all(head: Head, features: Tensor, labels: Tensor) -> Examined:
    """:func:`examine` in blocks, for any number of examples; the results are on the CPU."""
    rows = max(1, _BLOCK // head.num_classes)
    parts = [
        examine(head, some.to(head.weight.device), own.to(head.weight.device))
        for some, own in zip(features.split(rows), labels.split(rows), strict=True)
    ]
    return Examined(
        *(torch.cat([part.cpu() for part in column]) for column in zip(*parts, strict=True))
    )


def summarise(seen: Examined) -> dict[str, float]:
    """Means over the examples, as a line of ``metrics.jsonl`` has them."""
    return {
        "accuracy": seen.correct.double().mean().item(),
        "sample_margin": seen.margins.double().mean().item(),
        "bias": seen.bias.double().mean().item(),
    }


@torch.no_grad()
def mean_loss(criterion: Criterion, features: Tensor, labels: Tensor) -> float | None:
    """Mean of the criterion over the examples; none where it compares examples with each other."""
    if not by_example(criterion.loss):
        return None
    device, total = criterion.head.weight.device, 0.0
    rows = max(1, _BLOCK // criterion.head.num_classes)
    for some, own in zip(features.split(rows), labels.split(rows), strict=True):
        total += float(criterion(some.to(device), own.to(device))) * len(some)
    mean = total / len(features)
    return mean if math.isfinite(mean) else None


def by_example(loss: Loss) -> bool:
    """Whether the loss of an example depends on no other example."""
    return all(term.definition.on != "features" for _, term in loss.leaves())


def measure_prototypes(head: Head, *, margin: bool = True) -> dict[str, float]:
    """Class margin and norms of the prototypes, as a line of ``metrics.jsonl`` has them.

    Args:
        head: whose prototypes.
        margin: the class margin too, whose time grows with the square of the number of classes.
    """
    prototypes, found = ShardedRows.of_head(head).all_gather(head.weight.detach()), {}
    with warnings.catch_warnings():
        # Prototypes of zero length have no direction; they are what the norms are there to show.
        warnings.simplefilter("ignore")
        if margin:
            closest = functional.class_margin(prototypes)
            found["class_margin"] = float(closest.angle)
            found["class_margin_ratio"] = float(closest.ratio)
        norms = functional.prototype_norms(prototypes)
    if math.isfinite(norms.ratio):
        found["norm_ratio"] = float(norms.ratio)
    return found | {
        "norm_mean": float(norms.mean),
        "norm_min": float(norms.smallest),
        "norm_max": float(norms.largest),
    }


def optimum(classes: int, size: int) -> dict[str, Any]:
    """The best class margin, in degrees, and sample margin there can be."""
    from tammes.geometry import largest_class_margin

    best = largest_class_margin(classes, size)
    return {
        "class_margin": best.degrees,
        "class_margin_is_bound": not best.exact,
        "sample_margin": largest_sample_margin_of_any(classes, size, math.radians(best.degrees)),
    }


def per_class_accuracy(seen: Examined, labels: Tensor, classes: int) -> list[float | None]:
    """Share of right answers in each class; none where a class has no example."""
    counts = torch.bincount(labels, minlength=classes)
    right = torch.bincount(labels[seen.correct], minlength=classes)
    return [
        None if not count else good / count
        for good, count in zip(right.tolist(), counts.tolist(), strict=True)
    ]


def telling_examples(seen: Examined, labels: Tensor, classes: int) -> Tensor:
    """Examples to look at: of the classes most often confused, the clearest mistakes.

    Args:
        seen: of the test set.
        labels: shape ``(N,)``.
        classes: number of classes.

    Returns:
        Positions: for each confused pair, most frequent first, some wrong examples with the lowest
        margin; then, for every class among them, the right example with the largest.
    """
    wrong = (~seen.correct & (seen.predictions != labels)).nonzero().flatten()
    pairs = labels[wrong] * classes + seen.predictions[wrong]
    kinds, counts = pairs.unique(return_counts=True)
    frequent = kinds[counts.argsort(descending=True, stable=True)][:_CONFUSED]
    chosen: list[int] = []
    shown: dict[int, None] = {}
    for pair in frequent.tolist():
        own = wrong[pairs == pair]
        chosen += own[seen.margins[own].argsort(stable=True)[:_EXAMPLES]].tolist()
        shown.update(dict.fromkeys(divmod(pair, classes)))
    for place in shown or range(min(classes, _CONFUSED)):
        own = ((labels == place) & seen.correct).nonzero().flatten()
        if len(own):
            chosen.append(int(own[seen.margins[own].argmax()]))
    return torch.tensor(chosen, dtype=torch.long)
