"""Make data worse on purpose: fewer examples, classes of different size, wrong labels.

Everything depends on the seed alone. Of two rates of noise or two ratios of imbalance, what the
milder one changes the stronger one changes too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tammes.lab.data import chance
from tammes.lab.data.images import Images
from tammes.lab.expression import build

__all__ = ["IMBALANCE", "NOISE", "corrupt", "hold_out"]


def corrupt(
    images: Images,
    *,
    fraction: float = 1.0,
    imbalance: str = "none",
    noise: str = "none",
    seed: int,
) -> Images:
    """Some of the images, some of them with wrong labels.

    First ``fraction`` of every class is kept, then ``imbalance`` thins the classes out, then
    ``noise`` switches labels.

    Args:
        images: to start from; they are not changed.
        fraction: share to keep, the same of every class as far as whole images allow; a class
            keeps at least one.
        imbalance: ``long_tail(ratio)`` or ``step(ratio)``, see :data:`IMBALANCE`.
        noise: ``symmetric(rate)``, ``asymmetric(rate)`` or ``pair(rate)``, see :data:`NOISE`.
        seed: of the draws.

    Returns:
        The images that are left, in the order they had.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is expected in (0, 1], got {fraction}")
    if fraction < 1:
        kept = _share(images.labels, fraction, seed, "fraction", least=1)
        images = images.subset(kept.nonzero().squeeze(1))
    if not _is_none(imbalance):
        sizes = build(imbalance, IMBALANCE, what="imbalance", counts=images.counts())
        images = images.subset(_thin_out(images.labels, sizes, seed))
    if not _is_none(noise):
        labels = build(
            noise,
            NOISE,
            what="noise",
            labels=images.labels,
            num_classes=len(images.classes),
            seed=seed,
        )
        images = images.subset(torch.arange(len(images)), labels)
    return images


def hold_out(images: Images, share: float, *, seed: int) -> tuple[Images, Images]:
    """Split off a share of every class.

    Args:
        images: to split.
        share: to hold out, in [0, 1). A class keeps at least one image.
        seed: of the draws.

    Returns:
        The rest, and what is held out, each in the order it had.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the share to hold out is expected in [0, 1), got {share}")
    held = _share(images.labels, share, seed, "hold out", leave=1)
    if share and not bool(held.any()):
        raise ValueError(
            f"{images.source}: of {len(images)} images in {len(images.classes)} classes, "
            f"none can be held out for a share of {share}"
        )
    return images.subset((~held).nonzero().squeeze(1)), images.subset(held.nonzero().squeeze(1))


def long_tail(ratio: float, *, counts: list[int]) -> list[int]:
    r"""Sizes of the classes that fall exponentially, the first class being the largest.

    .. math:: n_c = \lfloor n_{\max}\, r^{-c/(k-1)} \rfloor

    Args:
        ratio: largest over smallest, at least 1.
        counts: examples there are of each class; a class never gets more, nor fewer than one.

    Returns:
        Examples to keep of each class.

    Example:
        >>> long_tail(100, counts=[5000] * 10)
        [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]

    References:
        Cao et al., Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, 2019.
    """
    _check_ratio("long_tail", ratio)
    last = max(len(counts) - 1, 1)
    sizes = [int(max(counts) * ratio ** (-place / last)) for place in range(len(counts))]
    return _possible(sizes, counts)


def step(ratio: float, *, counts: list[int]) -> list[int]:
    """Two sizes: the first half of the classes keeps the largest, the others that over ``ratio``.

    Args:
        ratio: largest over smallest, at least 1.
        counts: examples there are of each class; a class never gets more, nor fewer than one.

    Returns:
        Examples to keep of each class.

    Example:
        >>> step(10, counts=[50] * 4)
        [50, 50, 5, 5]
    """
    _check_ratio("step", ratio)
    half, largest = len(counts) // 2, max(counts)
    sizes = [largest if place < half else int(largest / ratio) for place in range(len(counts))]
    return _possible(sizes, counts)


def symmetric(rate: float, *, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """``round(rate * N)`` labels become another class, all others being as likely.

    Args:
        rate: share of wrong labels, in [0, 1].
        labels: the right ones, shape ``(N,)``.
        num_classes: number of classes.
        seed: of the draws.

    Returns:
        All labels, shape ``(N,)``.
    """
    wrong = _wrong("symmetric", rate, labels, num_classes, seed)
    shift = 1 + chance.below(num_classes - 1, len(labels), seed, "symmetric")
    return torch.where(wrong, (labels + shift) % num_classes, labels)


def asymmetric(rate: float, *, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """``round(rate * N)`` labels become the one class that theirs is confused with.

    Which class is confused with which is drawn: the classes in random order, each taken for the
    next, so that every class is the wrong answer for exactly one other.

    Args:
        rate: share of wrong labels, in [0, 1].
        labels: the right ones, shape ``(N,)``.
        num_classes: number of classes.
        seed: of the draws.

    Returns:
        All labels, shape ``(N,)``.
    """
    wrong = _wrong("asymmetric", rate, labels, num_classes, seed)
    circle = chance.permutation(num_classes, seed, "asymmetric")
    taken_for = torch.empty_like(circle)
    taken_for[circle] = circle.roll(-1)
    return torch.where(wrong, taken_for[labels], labels)


def pair(rate: float, *, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """``round(rate * N)`` labels become the next class, the last class the first.

    Args:
        rate: share of wrong labels, in [0, 1].
        labels: the right ones, shape ``(N,)``.
        num_classes: number of classes.
        seed: of the draws.

    Returns:
        All labels, shape ``(N,)``.
    """
    wrong = _wrong("pair", rate, labels, num_classes, seed)
    return torch.where(wrong, (labels + 1) % num_classes, labels)


IMBALANCE: dict[str, Callable[..., list[int]]] = {"long_tail": long_tail, "step": step}
"""Ways to thin classes out, by name."""
NOISE: dict[str, Callable[..., Tensor]] = {
    "symmetric": symmetric,
    "asymmetric": asymmetric,
    "pair": pair,
}
"""Ways to get labels wrong, by name."""


def _is_none(text: str) -> bool:
    return text.strip() in ("", "none", "none()")


def _wrong(who: str, rate: Any, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """Which labels are to be wrong."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f"{who} expects a rate in [0, 1], got {rate!r}")
    if num_classes < 2:
        raise ValueError(f"{who} expects at least 2 classes, got {num_classes}")
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    chosen = chance.permutation(len(labels), seed, "noise")
    wrong[chosen[: round(rate * len(labels))]] = True
    return wrong


def _check_ratio(who: str, ratio: Any) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 <= ratio < 1e9:
        raise ValueError(f"{who} expects the largest class over the smallest, got {ratio!r}")


def _possible(sizes: list[int], counts: list[int]) -> list[int]:
    return [min(max(size, 1), count) for size, count in zip(sizes, counts, strict=True)]


def _rank_in_class(labels: Tensor, seed: int, purpose: str) -> Tensor:
    """Place of each example in a random order of its class, shape ``(N,)``."""
    shuffled = chance.permutation(len(labels), seed, purpose)
    order = shuffled[labels[shuffled].argsort(stable=True)]
    counts = labels.bincount()
    starts = (counts.cumsum(0) - counts)[labels[order]]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(labels)) - starts
    return rank


def _thin_out(labels: Tensor, sizes: list[int], seed: int) -> Tensor:
    """Positions of as many examples of each class."""
    rank = _rank_in_class(labels, seed, "imbalance")
    return (rank < torch.tensor(sizes)[labels]).nonzero().squeeze(1)


def _share(
    labels: Tensor, share: float, seed: int, purpose: str, *, least: int = 0, leave: int = 0
) -> Tensor:
    """A share of every class, and of all examples together; true where an example is in it.

    Whole numbers: each class gets its share rounded down, and those it takes most from get one
    more until the total is right.
    """
    counts = labels.bincount().tolist()
    exact = [share * count for count in counts]
    sizes = [int(value) for value in exact]
    missing = round(share * len(labels)) - sum(sizes)
    ties = chance.numbers(len(counts), seed, purpose, "ties").tolist()
    by_rest = sorted(range(len(counts)), key=lambda c: (sizes[c] - exact[c], ties[c]))
    for place in by_rest[: max(missing, 0)]:
        sizes[place] += 1
    limits = [(min(least, count), max(count - leave, 0)) for count in counts]
    bounded = [min(max(n, low), high) for n, (low, high) in zip(sizes, limits, strict=True)]
    return _rank_in_class(labels, seed, purpose) < torch.tensor(bounded)[labels]
