"""Split: the five numbers per example that a margin loss reads, in place of its C scores."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tammes._validation import (
    check_labels,
    check_range,
    check_tensor,
    check_unmasked,
    transforming,
)

REDUCED = ("target", "others", "hardest", "expected", "mean")
"""The five numbers; each can be merged over shards of the classes."""
ALONGSIDE = ("length", "norm", "gap", "opposite", "distance")
"""Further numbers, which depend only on the example and the prototype of its class."""
SUMMED = ("softplus",)
"""Further sums over the other classes, for the few losses that need them."""
MAPPED = "mapped"
"""Flag among the fields that a term reads: its numbers of the other classes use mapped scores."""
FREE_MAP = "free_map"
"""Second flag: the map is not :func:`quadratic_above`, the only one that fused kernels know."""


_KEPT = ("target", "others", "hardest", "expected", *ALONGSIDE)


class Split(NamedTuple):
    r"""Each example's target class against the rest.

    With label :math:`y`, similarities :math:`a_c`, scores :math:`f_c = s\,a_c` and the softmax
    :math:`q` of the other classes' scores, every softmax-type loss, logit regulariser and margin
    measure is a function of five numbers. The dense, streamed and fused kernels and a head sharded
    over ranks all return a split, so a loss is written once and runs on all of them.

    Attributes:
        target: similarity to the target class, :math:`a_y`, shape ``(N,)``.
        others: :math:`\log\sum_{c\ne y} e^{f_c}`, shape ``(N,)``.
        hardest: largest similarity to another class, :math:`\max_{c\ne y} a_c`, shape ``(N,)``.
        expected: :math:`\sum_{c\ne y} q_c f_c`, shape ``(N,)``.
        mean: :math:`\frac{1}{C-1}\sum_{c\ne y} f_c`, shape ``(N,)``.
        labels: class of each example, shape ``(N,)``.
        scale: inverse temperature :math:`s`; a number, or a tensor of one.
        length: norm of the feature times norm of the target prototype, each left out if the head
            normalises it: 1 on a cosine head. Shape ``(N,)``.
        norm: norm of the feature, shape ``(N,)``.
        gap: one minus the cosine to the target prototype, computed as half the squared distance of
            the unit vectors, so that it stays accurate near angle 0. Shape ``(N,)``.
        opposite: one plus that cosine, computed as half the squared norm of the sum of the unit
            vectors, so that it stays accurate near angle :math:`\pi`. Computed whenever the gap
            is; shape ``(N,)``.
        distance: Euclidean distance to the target prototype as the head compares them: between
            unit vectors on a cosine head, the mean squared difference for reciprocal points.
            Unknown if only scores are given. Shape ``(N,)``.
        classes: number of classes C.
        rivals: number of other classes, C - 1; if some may be masked, the number of unmasked ones,
            shape ``(N,)``.
        rest: scores of the other classes, ``-inf`` at the target class, shape ``(N, C)``; only if a
            term reads them.
        softplus: :math:`\sum_{c\ne y}\log(1 + e^{f_c})`, shape ``(N,)``; only if a term reads it.
        unit: whether the length is known to be 1, so that the multiplication can be skipped.
        cutoff: similarity halfway between the k-th and the next largest of the other classes, so
            that k of them are above it; without gradient, ``-inf`` if there are at most k, shape
            ``(N,)``. Only for score maps that ask for it.

    A class whose score is ``-inf`` is masked: it counts in none of these numbers, as if it did not
    exist. The target class of an example cannot be masked. A number that no term reads is not
    computed and holds NaN.

    Example:
        >>> head = tammes.CosineHead(4, 3, scale=16.0)
        >>> split = head.split(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
        >>> correct = split.target > split.hardest
        >>> softmax_bias = split.others - split.scale * split.hardest
    """

    target: Tensor
    others: Tensor
    hardest: Tensor
    expected: Tensor
    mean: Tensor
    labels: Tensor
    scale: Tensor | float
    length: Tensor
    norm: Tensor
    gap: Tensor
    opposite: Tensor
    distance: Tensor
    classes: int
    rivals: Tensor | int
    rest: Tensor | None = None
    softplus: Tensor | None = None
    unit: bool = False
    cutoff: Tensor | None = None

    @property
    def cosine(self) -> Tensor:
        """Cosine to the target prototype, ``1 - gap``."""
        return 1 - self.gap


def read_fields(name: str, reads: str | Iterable[str]) -> frozenset[str]:
    """Names of the fields to read, also given as one string with spaces; raise for unknown ones.

    Example:
        >>> sorted(read_fields("split", "target hardest"))
        ['hardest', 'target']
    """
    fields = reads.split() if isinstance(reads, str) else [*reads]
    unknown = [field for field in fields if field not in Split._fields]
    if unknown:
        known = ", ".join((*REDUCED, *ALONGSIDE, *SUMMED, "rest"))
        raise ValueError(f"{name} expects reads among {known}, got {unknown[0]!r}")
    return frozenset(fields)


def softplus(value: Tensor) -> Tensor:
    """``log(1 + exp(value))``, accurate in both tails, and so is its gradient.

    torch returns its input above a threshold. At 80 the difference is below double precision, and
    the exponential is still finite in single precision.
    """
    return torch.nn.functional.softplus(value, 1.0, 80.0)


def cross_entropy(split: Split, similarity: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    r"""Cross entropy with the target class at a given similarity minus a margin.

    .. math:: \log\bigl(1 + e^{\Lambda - s(a - m)}\bigr)

    Args:
        split: similarities of N examples, split by their labels.
        similarity: :math:`a`, shape ``(N,)``.
        margin: :math:`m`.
    """
    if isinstance(margin, Tensor) or margin:
        similarity = similarity - margin
    if isinstance(split.scale, Tensor):
        return softplus(split.others - split.scale * similarity)
    # Not a subtraction, whose backward takes one more operation.
    return softplus(torch.add(split.others, similarity, alpha=-split.scale))


def with_sums(split: Split, reads: frozenset[str]) -> Split:
    """Compute ``softplus`` from the scores in ``rest``, if it is read."""
    if split.rest is None or "softplus" not in reads:
        return split
    return split._replace(softplus=softplus(split.rest).sum(1))


def cutoff_of(largest: Tensor, top: int, counts: Tensor | None = None) -> Tensor:
    """Midpoint of the k-th and the next largest number, so that rounding moves neither across it.

    If the two are equal up to rounding, it is just below both.

    Args:
        largest: largest numbers in descending order, padded with ``-inf``, shape ``(N, K)``.
        top: k.
        counts: multiplicity of each number, shape ``(N, K)``; 1 by default.
    """
    if counts is None:
        counts = torch.ones_like(largest)
    place = (counts.cumsum(1) < top).sum(1, keepdim=True)
    padded = torch.nn.functional.pad(largest, (0, 2), value=-torch.inf)
    middle = (padded.gather(1, place) + padded.gather(1, place + 1)).squeeze(1) / 2
    return middle - 16 * torch.finfo(middle.dtype).eps * (1 + middle.abs())


OthersMap: TypeAlias = Callable[..., Tensor]
"""Elementwise map of similarities ``(N, C)``; its other arguments are per row, shape ``(N, 1)``."""


def quadratic_above(
    similarity: Tensor,
    threshold: Tensor | float,
    constant: Tensor | float,
    linear: Tensor | float,
    quadratic: Tensor | float,
) -> Tensor:
    """Apply a quadratic polynomial to similarities above a threshold; leave the others unchanged.

    The one map of a term (``map_others=``) that fused kernels support.

    Args:
        similarity: shape ``(N, C)``.
        threshold: shape ``(N, 1)``, or a number, like the coefficients.
        constant: constant coefficient.
        linear: coefficient of the similarity.
        quadratic: coefficient of its square.

    Example:
        >>> tammes.quadratic_above(torch.tensor([[0.1, 0.5]]), 0.3, 0.2, 1.2, 0.0)
        tensor([[0.1000, 0.8000]])
    """
    raised = constant + (linear + quadratic * similarity) * similarity
    return torch.where(similarity > threshold, raised, similarity)


def columns(numbers: Iterable[Tensor | float]) -> list[Tensor | float]:
    """Reshape per-row numbers to ``(N, 1)``, to broadcast against scores; keep scalars."""
    return [n[:, None] if isinstance(n, Tensor) and n.ndim else n for n in numbers]


def map_split(split: Split, function: OthersMap, numbers: Iterable[Tensor | float]) -> Split:
    """Map the other classes' scores of a split that has kept them in ``rest``.

    Args:
        split: with ``rest``.
        function: map of the similarities.
        numbers: its other arguments: one value per row, shape ``(N,)``, or scalars.
    """
    assert split.rest is not None
    there = split.rest != -torch.inf
    similarity = torch.where(there, split.rest, 0.0) / split.scale
    mapped = function(similarity, *columns(numbers))
    own = {name: getattr(split, name) for name in ("target", *ALONGSIDE)}
    there = there.scatter(1, split.labels[:, None], True)
    reads = frozenset((*REDUCED, "rest"))
    return split_matrix(mapped, split.labels, split.scale, there, own, reads)


def adjust_split(split: Split, offset: Tensor, gain: Tensor | None = None) -> Split:
    """Split the scores ``gain * score + offset`` of a split that has kept its scores in ``rest``.

    Args:
        split: with ``rest``.
        offset: one per class, shape ``(C,)``, or a scalar.
        gain: one per class, shape ``(C,)``.
    """
    assert split.rest is not None
    column, scale = split.labels[:, None], split.scale
    there = (split.rest != -torch.inf).scatter(1, column, True)
    scores = split.rest.scatter(1, column, (scale * split.target)[:, None])
    scores = torch.where(there, scores, 0.0)
    scores = (scores if gain is None else scores * gain) + offset
    reads = frozenset((*REDUCED, "rest"))
    return split_matrix(scores / scale, split.labels, scale, there, {}, reads)


def split(
    similarity: Tensor,
    labels: Tensor,
    *,
    scale: Tensor | float = 1.0,
    own: dict[str, Tensor] | None = None,
    reads: str | Iterable[str] = (*REDUCED, *ALONGSIDE),
) -> Split:
    """Split similarities that are in memory; the reference every head is tested against.

    Args:
        similarity: similarity of each example to each class, shape ``(N, C)``; ``-inf`` masks a
            class for an example.
        labels: class of each example in ``[0, C)``, shape ``(N,)``.
        scale: inverse temperature of the softmax, one for all examples.
        own: numbers of the target class that the caller knows more accurately than the matrix
            gives them: any of ``target``, ``length``, ``norm``, ``gap``, ``opposite`` and
            ``distance``, each of shape ``(N,)``. The others are computed as if similarities were
            cosines of unit vectors.
        reads: names of the fields to compute; ``"rest"`` keeps the masked scores, and so does
            ``"softplus"``, which is computed from them.

    Returns:
        The :class:`Split` of the N rows.

    Example:
        >>> import torch, tammes
        >>> cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.1]])
        >>> s = tammes.split(cosine, torch.tensor([0, 1]), scale=10.0)
        >>> s.target - s.hardest
        tensor([0.7000, 0.2000])
        >>> s.others
        tensor([2.0486, 3.1269])
    """
    check_tensor("split", "similarity", similarity)
    if similarity.ndim != 2 or labels.shape != similarity.shape[:1]:
        raise ValueError(
            "split expects similarity of shape (N, C) and labels of shape (N,), "
            f"got {tuple(similarity.shape)} and {tuple(labels.shape)}"
        )
    classes = similarity.shape[1]
    if classes < 2:
        raise ValueError(f"split expects at least 2 classes, got C={classes}")
    check_labels("split", labels, similarity)
    labels, own, fields = labels.long(), own or {}, read_fields("split", reads)
    if isinstance(scale, Tensor) and scale.shape not in ((), (1,)):
        raise ValueError(f"split expects one scale for all rows, got shape {tuple(scale.shape)}")
    for name, values in own.items():
        if name not in ("target", *ALONGSIDE) or values.shape != labels.shape:
            raise ValueError(
                f"split expects own numbers among {', '.join(('target', *ALONGSIDE))}, of shape "
                f"{tuple(labels.shape)}, got {name} of shape {tuple(values.shape)}"
            )
    # Not ``>``: NaN does not mask a class, and has to show in the result.
    there, column = similarity != float("-inf"), labels[:, None]
    if not transforming() and labels.device.type == "cpu":
        check_range("split", labels, classes)
        check_unmasked("split", ~there.gather(1, column).squeeze(1), labels)
    # Where this is not checked, the -inf of a masked target class has to show in the result.
    there = there.scatter(1, column, True)
    # Masked after scaling: the gradient of a learned scale would be NaN at -inf.
    finite = torch.where(there, similarity, 0.0)
    return split_matrix(finite, labels, scale, there, own, fields)


# A compiler fuses a comparison of indices with what comes before and after, and writes the whole
# matrix for a gradient of gather, and for a scatter.
def of_target(scores: Tensor, labels: Tensor) -> Tensor:
    """Select the number of the target class in each row, shape ``(N,)``."""
    if not torch.compiler.is_compiling():
        return scores.gather(1, labels[:, None]).squeeze(1)
    found = torch.where(_is_target(scores, labels), scores, 0.0).sum(1)
    # Labels are not checked here, so one that names no class has to show in the result.
    known = (labels >= 0) & (labels < scores.shape[1])
    return torch.where(known, found, torch.nan)


def fill_target(scores: Tensor, labels: Tensor, value: float) -> Tensor:
    """Replace the number of the target class in each row, shape ``(N, C)``."""
    if not torch.compiler.is_compiling():
        return scores.scatter(1, labels[:, None], value)
    return scores.masked_fill(_is_target(scores, labels), value)


def _is_target(scores: Tensor, labels: Tensor) -> Tensor:
    return torch.arange(scores.shape[1], device=scores.device) == labels[:, None]


def split_matrix(
    similarity: Tensor,
    labels: Tensor,
    scale: Tensor | float,
    there: Tensor | None,
    own: dict[str, Tensor],
    reads: frozenset[str],
) -> Split:
    """Split finite similarities, with the masked classes given separately.

    Args:
        similarity: shape ``(N, C)``.
        labels: shape ``(N,)``.
        scale: inverse temperature of the softmax.
        there: which classes are not masked, shape ``(C,)`` or ``(N, C)``; none if no class is.
        own: see :func:`split`.
        reads: names of the fields to compute.
    """
    keeps = not reads.isdisjoint(("rest", *SUMMED))
    unread = similarity.new_full(labels.shape, float("nan"))
    target, one = of_target(similarity, labels), torch.ones_like(unread)
    assumed = {"target": target, "length": one, "norm": one, "gap": 1 - target}
    own = {field: value for field, value in assumed.items() if field in reads} | own
    if "gap" in own:
        own = {"opposite": 2 - own["gap"]} | own

    # The target is masked out rather than subtracted from a full log-sum-exp: where it dominates,
    # the subtraction would cancel all digits of the others.
    def masked(values: Tensor, value: float) -> Tensor:
        values = fill_target(values, labels, value)
        return values if there is None else values.masked_fill(~there, value)

    scores = scale * similarity
    rest = masked(scores, float("-inf"))
    others, hardest, expected, mean = unread, unread, unread, unread
    rivals: Tensor | int = similarity.shape[1] - 1
    if there is not None:
        among = there.expand_as(similarity)
        own_there = among.gather(1, labels[:, None]).squeeze(1)
        rivals = (among.sum(1) - own_there.long()).to(similarity.dtype)
    if "others" in reads:
        others = rest.logsumexp(1)
    if "hardest" in reads:
        # max, unlike amax, gives the whole gradient to one of several tied classes.
        hardest = masked(similarity, float("-inf")).max(1).values
    if not reads.isdisjoint(("expected", "mean")):
        finite = masked(scores, 0.0)
        if "expected" in reads:
            expected = (rest.softmax(1) * finite).sum(1)
        if "mean" in reads:
            mean = finite.sum(1) / rivals
    alongside: dict[str, Any] = {name: own.get(name, unread) for name in ALONGSIDE}
    return Split(
        target=own.get("target", unread),
        others=others,
        hardest=hardest,
        expected=expected,
        mean=mean,
        labels=labels,
        scale=scale,
        **alongside,
        classes=similarity.shape[1],
        rivals=rivals,
        rest=rest if keeps else None,
    )


def assemble(
    numbers: Mapping[str, Tensor],
    labels: Tensor,
    scale: Tensor | float,
    classes: int,
    like: Tensor,
    *,
    unit: bool = False,
) -> Split:
    """Build a split from merged numbers; missing ones hold NaN, ``length`` is 1 if ``unit``."""
    unread, one = _constants(labels, like)
    if unit and "length" not in numbers:
        numbers = {**numbers, "length": one}
    rivals: Tensor | int = numbers.get("rivals", classes - 1)
    fields: dict[str, Any] = {name: numbers.get(name, unread) for name in _KEPT}
    return Split(
        **fields,
        mean=numbers["mean"] / rivals if "mean" in numbers else unread,
        labels=labels,
        scale=scale,
        classes=classes,
        rivals=rivals,
        softplus=numbers.get("softplus"),
        unit=unit,
    )


def _constants(labels: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return NaN and one for all examples; cached, but for transforms and graph capture."""
    # Last, since a compiler cannot trace is_current_stream_capturing.
    made = type(like) is not Tensor or transforming()
    if made or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return like.new_full(labels.shape, float("nan")), like.new_ones(labels.shape)
    return _kept_constants(labels.shape, like.device, like.dtype)


@lru_cache(maxsize=64)
def _kept_constants(
    shape: torch.Size, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # Expanded, so that writing to them fails.
    with torch.inference_mode(False):
        pair = torch.tensor([float("nan"), 1.0], device=device, dtype=dtype)
        return pair[0].expand(shape), pair[1].expand(shape)
