"""Losses between the examples of a batch and the prototypes as proxies of the classes."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tammes._validation import transforming
from tammes.distributed.sharded_rows import ALL_ROWS_LOCAL, ShardedRows
from tammes.losses.angular import check_margin_kind, margin_target
from tammes.similarity import directions, unit
from tammes.split import assemble, softplus
from tammes.term_decorator import term
from tammes.terms import Batch, Setting

_SCORES = 1 << 24
"""Most cosines in memory at a time; with more, blocks of classes are recomputed in backward."""


def _by_blocks(
    function: Callable[[Tensor, Tensor, int], Tensor], features: Tensor, proxies: Tensor
) -> list[Tensor]:
    """Evaluate a function of features, a block of proxies and the block's first index, by block."""
    most = max(1, _SCORES // max(1, len(features) * proxies.shape[1:-1].numel()))
    if len(proxies) <= most or transforming():
        return [function(features, proxies, 0)]
    return [
        checkpoint(
            function,
            features,
            proxies[first : first + most],
            first,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for first in range(0, len(proxies), most)
    ]


def _unit_proxies(prototypes: Tensor, shards: ShardedRows) -> Tensor:
    """Unit proxies of this rank's classes, ``(c, D)``, or ``(c, K, D)`` with several per class."""
    rows = unit(prototypes)
    return rows if shards.centers == 1 else shards.by_class(rows)


def _there(batch: Batch, shards: ShardedRows, proxies: Tensor) -> Tensor | None:
    """Mark the unmasked classes of this rank, shape ``(c,)``; none if no class can be masked."""
    if batch.masked is None:
        return None
    return ~batch.masked[shards.start : shards.start + len(proxies)]


def _check_scale(scale: float, margin: float) -> None:
    if not scale > 0:
        raise ValueError(f"proxy_anchor expects scale above 0, got {scale}")


@term(on="proxies", reads="", check=_check_scale)
def proxy_anchor(
    batch: Batch,
    prototypes: Tensor,
    *,
    scale: Setting = 32.0,
    margin: Setting = 0.1,
    shards: ShardedRows = ALL_ROWS_LOCAL,
) -> Tensor:
    r"""Proxy-Anchor: each prototype pulls its hardest examples and pushes all others.

    .. math::
        \ell = \frac{1}{|P|}\sum_{c\in P}
        \log\Bigl(1 + \sum_{i:\,y_i = c} e^{-\alpha(\cos\theta_{ic} - \delta)}\Bigr)
        + \frac1C\sum_c
        \log\Bigl(1 + \sum_{i:\,y_i \ne c} e^{\alpha(\cos\theta_{ic} + \delta)}\Bigr)

    with :math:`P` the classes in the batch. The inner sums are over the examples of the global
    batch, where a softmax sums over classes: there is one value for the batch, so weights of
    examples have no effect. It uses cosines with any head, pooled if a class has several
    prototypes. With more than 16 million cosines, only a block of classes is in memory at a time.

    Args:
        batch: features and labels.
        prototypes: shape ``(C, D)``, or ``(C K, D)`` with several per class.
        scale: :math:`\alpha`; the scale of the head is not used.
        margin: cosine :math:`\delta` by which examples should be nearer, or farther.
        shards: access to the prototypes of other ranks; the criterion supplies it.

    Returns:
        The loss, a scalar.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.proxy_anchor())
        >>> loss = criterion(torch.randn(8, 4), torch.randint(3, (8,)))

    References:
        Kim et al., Proxy Anchor Loss for Deep Metric Learning, CVPR 2020, eq. 4.
    """
    features, proxies = directions(batch.features), _unit_proxies(prototypes, shards)
    labels = torch.where(batch.valid, batch.labels - shards.start, -1)
    there = _there(batch, shards, proxies)

    def sums(features: Tensor, proxies: Tensor, first: int) -> Tensor:
        """Positive and negative parts of some classes, and how many are in the batch."""
        cosine = shards.cosines.products(features, proxies)
        classes = torch.arange(first, first + len(proxies), device=labels.device)
        own = labels[:, None] == classes
        others = ~own & batch.valid[:, None]
        if there is not None:
            others = others & there[first : first + len(proxies)]
        zero = cosine.new_zeros(1, len(proxies))
        # The 1 in the logarithm is a score of zero, which also keeps empty sums finite.
        near = torch.where(own, -scale * (cosine - margin), -torch.inf)
        far = torch.where(others, scale * (cosine + margin), -torch.inf)
        pulled = torch.cat([zero, near]).logsumexp(0).sum()
        pushed = torch.cat([zero, far]).logsumexp(0).sum()
        return torch.stack([pulled, pushed, own.any(0).sum().to(cosine.dtype)])

    total = torch.stack(_by_blocks(sums, features, proxies)).sum(0)
    pulled, pushed, present = shards.all_reduce(total)
    classes: Tensor | int = shards.count_classes(prototypes)
    if batch.masked is not None:
        classes = (~batch.masked).sum().clamp_min(1)
    return pulled / present.detach().clamp_min(1) + pushed / classes


def _check_multi_positive(scale: float, margin: float, kind: str, form: str) -> None:
    if not scale > 0:
        raise ValueError(f"multi_positive expects scale above 0, got {scale}")
    check_margin_kind("multi_positive", margin, kind, "cos")
    if form not in ("each", "pairs", "apart"):
        raise ValueError(f"multi_positive expects form 'each', 'pairs' or 'apart', got {form!r}")


@term(on="proxies", reads="", check=_check_multi_positive, several_positives=True)
def multi_positive(
    batch: Batch,
    prototypes: Tensor,
    *,
    scale: Setting = 64.0,
    margin: Setting = 0.3,
    kind: str = "arc",
    form: str = "each",
    shards: ShardedRows = ALL_ROWS_LOCAL,
) -> Tensor:
    r"""Margin softmax with several positives, against all classes that are not positives.

    .. math::
        \text{each:}\quad \ell_i &= \frac{1}{|P_i|}\sum_{p\in P_i}
        \log\Bigl(1 + \sum_{c\notin P_i} e^{s\cos\theta_{ic} - s\,\Phi(\theta_{ip})}\Bigr) \\
        \text{pairs:}\quad \ell_i &=
        \log\Bigl(1 + \sum_{c\notin P_i} e^{s\cos\theta_{ic}}
        \sum_{p\in P_i} e^{-s\,\Phi(\theta_{ip})}\Bigr) \\
        \text{apart:}\quad \ell_i &=
        \log\Bigl(1 + \sum_{c\notin P_i} e^{s\cos\theta_{ic}}\Bigr)
        + \log\Bigl(1 + \sum_{p\in P_i} e^{-s\,\Phi(\theta_{ip})}\Bigr)

    with :math:`\Phi(\theta) = \cos(\theta + m)` or :math:`\cos\theta - m`. For labels of shape
    ``(N, P)``, padded with the criterion's ``ignore_index``: images that show several objects, or
    belong to several clusters. Positives do not compete with each other, as they would with one
    softmax for each. With one positive, ``"each"`` and ``"pairs"`` are :func:`tammes.arcface` or
    :func:`tammes.cosface`; ``"apart"`` compares both sides with a cosine of zero instead of with
    each other. It uses cosines with any head, pooled if a class has several prototypes. With more
    than 16 million cosines, only a block of classes is in memory at a time.

    Args:
        batch: features and labels; a label that an example has twice counts once.
        prototypes: shape ``(C, D)``, or ``(C K, D)`` with several per class.
        scale: :math:`s`; the scale of the head is not used.
        margin: :math:`m`, in radians or, for ``"cos"``, a cosine.
        kind: ``"arc"`` adds to the angle, ``"cos"`` subtracts from the cosine.
        form: ``"each"`` averages over the positives, ``"pairs"`` sums over them, ``"apart"`` has
            separate sums for positives and other classes.
        shards: access to the prototypes of other ranks; the criterion supplies it.

    Returns:
        Loss of each example, shape ``(N,)``.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 5), tammes.multi_positive())
        >>> labels = torch.tensor([[0, 3], [2, -100]])
        >>> loss = criterion(torch.randn(2, 4), labels)

    References:
        An et al., Multi-label Cluster Discrimination for Visual Representation Learning, ECCV 2024:
        ``"pairs"`` is its MLC and ``"apart"`` its MLCD, both without a margin; ``"each"`` is ours.
    """
    features, proxies = directions(batch.features), _unit_proxies(prototypes, shards)
    labels = batch.labels if batch.labels.ndim == 2 else batch.labels[:, None]
    ordered, order = labels.sort(dim=1, stable=True)
    follows = torch.zeros_like(labels, dtype=torch.bool)
    follows[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = torch.zeros_like(follows).scatter(1, order, follows)
    counts = (labels >= 0) & batch.valid[:, None] & ~repeated
    place = labels - shards.start
    here = counts & (place >= 0) & (place < len(proxies))
    # A row of zeros for classes of other ranks; a rank may have no classes at all.
    rows = torch.cat([proxies, proxies.new_zeros(1, *proxies.shape[1:])])
    rows = rows[torch.where(here, place, len(proxies)).flatten()]
    each, query = (
        vectors.repeat_interleave(labels.shape[1], 0) for vectors in (batch.features, features)
    )
    gaps = shards.cosines.own(each, rows, frozenset({"gap"}), query)
    known = {
        name: shards.all_reduce(torch.where(here.flatten(), value, 0.0))
        for name, value in gaps.items()
    }
    known["length"] = torch.ones_like(known["gap"])
    classes = shards.count_classes(prototypes)
    split = assemble(known, labels.flatten(), 1.0, classes, known["gap"], unit=True)
    target = margin_target(split, margin, kind).view_as(labels)

    there = _there(batch, shards, proxies)

    def negatives(features: Tensor, proxies: Tensor, first: int) -> Tensor:
        """Log-sum-exp of the scores of some classes that are not positives."""
        some = torch.arange(first, first + len(proxies), device=labels.device)
        own = torch.zeros(len(features), len(proxies), dtype=torch.bool, device=labels.device)
        for column in torch.where(here, place, -1).unbind(1):
            own = own | (column[:, None] == some)
        if there is not None:
            own = own | ~there[first : first + len(proxies)]
        # Not -inf, whose gradient would be NaN if all classes are positives.
        scores = torch.where(own, _NEVER, scale * shards.cosines.products(features, proxies))
        return torch.cat([scores, scores.new_full((len(scores), 1), _NEVER)], 1).logsumexp(1)

    others = torch.stack(_by_blocks(negatives, features, proxies)).logsumexp(0)
    others = shards.all_gather(others[None]).logsumexp(0)
    # Where values are not checked, a label out of range must make the loss NaN.
    pull = (-scale * target).masked_fill(labels >= classes, torch.nan)
    if form == "each":
        losses = torch.where(counts, softplus(others[:, None] + pull), 0.0)
        return losses.sum(1) / counts.sum(1).clamp_min(1)
    pulled = torch.where(counts, pull, _NEVER).logsumexp(1)
    return softplus(others + pulled) if form == "pairs" else softplus(others) + softplus(pulled)


_NEVER = -1e30
"""Score of a class that does not count."""
