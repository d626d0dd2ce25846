"""Stratified subsets: the same share of every class."""

import torch
from torch import Tensor

from tammes.lab.data import seeded_draws
from tammes.lab.data.images import Images


def limit(images: Images, most: int, *, seed: int) -> Images:
    """Keep at most ``most`` images, the same share of every class.

    Every class keeps at least one, so more are kept if there are more classes than that.
    """
    if most < 1:
        raise ValueError(f"limit is expected to be at least 1, got {most}")
    if len(images) <= most:
        return images
    kept = stratified_mask(images.labels, most / len(images), seed, "limit", least=1)
    sizes = images.labels[kept].bincount().tolist()
    for _ in range(sum(sizes) - most):
        # Small classes keep more than their share, so the largest give some up.
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest] = max(sizes[largest] - 1, 1)
    kept = rank_in_class(images.labels, seed, "limit") < torch.tensor(sizes)[images.labels]
    return images.subset(kept.nonzero().squeeze(1))


def hold_out(images: Images, share: float, *, seed: int) -> tuple[Images, Images]:
    """Hold out a share of every class, in [0, 1); a class keeps at least one image.

    Returns:
        The rest and the held-out images, both in their original order.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the share to hold out is expected in [0, 1), got {share}")
    held = stratified_mask(images.labels, share, seed, "hold out", leave=1)
    if share and not bool(held.any()):
        raise ValueError(
            f"{images.source}: of {len(images)} images in {len(images.classes)} classes, "
            f"none can be held out for a share of {share}: each class needs 2 images or more, or "
            "test images of their own"
        )
    return images.subset((~held).nonzero().squeeze(1)), images.subset(held.nonzero().squeeze(1))


def rank_in_class(labels: Tensor, seed: int, purpose: str) -> Tensor:
    """Return the rank of each example in a random order of its class, shape ``(N,)``."""
    shuffled = seeded_draws.permutation(len(labels), seed, purpose)
    order = shuffled[labels[shuffled].argsort(stable=True)]
    counts = labels.bincount()
    starts = (counts.cumsum(0) - counts)[labels[order]]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(labels)) - starts
    return rank


def stratified_mask(
    labels: Tensor, share: float, seed: int, purpose: str, *, least: int = 0, leave: int = 0
) -> Tensor:
    """Choose a share of every class; true for chosen examples.

    Each class gets its share rounded down; classes with the largest remainders get one more until
    the total is right. Then at least ``least`` of a class are chosen, and ``leave`` are not.
    """
    counts = labels.bincount().tolist()
    exact = [share * count for count in counts]
    sizes = [int(value) for value in exact]
    missing = round(share * len(labels)) - sum(sizes)
    ties = seeded_draws.numbers(len(counts), seed, purpose, "ties").tolist()
    by_remainder = sorted(range(len(counts)), key=lambda c: (sizes[c] - exact[c], ties[c]))
    for label in by_remainder[: max(missing, 0)]:
        sizes[label] += 1
    limits = [(min(least, count), max(count - leave, 0)) for count in counts]
    bounded = [min(max(n, low), high) for n, (low, high) in zip(sizes, limits, strict=True)]
    return rank_in_class(labels, seed, purpose) < torch.tensor(bounded)[labels]
