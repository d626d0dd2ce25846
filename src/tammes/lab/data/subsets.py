"""Some of the images of a set, the same share of every class."""

import torch
from torch import Tensor

from tammes.lab.data import seeded_draws
from tammes.lab.data.images import Images


def limit(images: Images, most: int, *, seed: int) -> Images:
    """At most so many of the images, evenly of all classes; a class keeps at least one.

    Args:
        images: to take from.
        most: how many, as far as every class can have one.
        seed: of the draws.
    """
    if most < 1:
        raise ValueError(f"limit is expected to be at least 1, got {most}")
    if len(images) <= most:
        return images
    kept = share_of(images.labels, most / len(images), seed, "limit", least=1)
    sizes = images.labels[kept].bincount().tolist()
    for _ in range(sum(sizes) - most):
        # Where small classes keep more than their share, the largest make up for it.
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest] = max(sizes[largest] - 1, 1)
    kept = rank_in_class(images.labels, seed, "limit") < torch.tensor(sizes)[images.labels]
    return images.subset(kept.nonzero().squeeze(1))


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
    held = share_of(images.labels, share, seed, "hold out", leave=1)
    if share and not bool(held.any()):
        raise ValueError(
            f"{images.source}: of {len(images)} images in {len(images.classes)} classes, "
            f"none can be held out for a share of {share}"
        )
    return images.subset((~held).nonzero().squeeze(1)), images.subset(held.nonzero().squeeze(1))


def rank_in_class(labels: Tensor, seed: int, purpose: str) -> Tensor:
    """Place of each example in a random order of its class, shape ``(N,)``."""
    shuffled = seeded_draws.permutation(len(labels), seed, purpose)
    order = shuffled[labels[shuffled].argsort(stable=True)]
    counts = labels.bincount()
    starts = (counts.cumsum(0) - counts)[labels[order]]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(labels)) - starts
    return rank


def share_of(
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
    ties = seeded_draws.numbers(len(counts), seed, purpose, "ties").tolist()
    by_rest = sorted(range(len(counts)), key=lambda c: (sizes[c] - exact[c], ties[c]))
    for place in by_rest[: max(missing, 0)]:
        sizes[place] += 1
    limits = [(min(least, count), max(count - leave, 0)) for count in counts]
    bounded = [min(max(n, low), high) for n, (low, high) in zip(sizes, limits, strict=True)]
    return rank_in_class(labels, seed, purpose) < torch.tensor(bounded)[labels]
