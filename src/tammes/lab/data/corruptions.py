"""Optional corruption of training data: fewer examples, class imbalance, label noise.

Everything depends on the seed alone. The changes of a lower noise rate or imbalance ratio are a
subset of those of a higher one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tammes.lab.config import build
from tammes.lab.config.expressions import did_you_mean
from tammes.lab.data import seeded_draws
from tammes.lab.data.images import Images
from tammes.lab.data.subsets import rank_in_class, stratified_mask

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_SUPERCLASSES = (
    "beaver dolphin otter seal whale",
    "aquarium_fish flatfish ray shark trout",
    "orchid poppy rose sunflower tulip",
    "bottle bowl can cup plate",
    "apple mushroom orange pear sweet_pepper",
    "clock keyboard lamp telephone television",
    "bed chair couch table wardrobe",
    "bee beetle butterfly caterpillar cockroach",
    "bear leopard lion tiger wolf",
    "bridge castle house road skyscraper",
    "cloud forest mountain plain sea",
    "camel cattle chimpanzee elephant kangaroo",
    "fox porcupine possum raccoon skunk",
    "crab lobster snail spider worm",
    "baby boy girl man woman",
    "crocodile dinosaur lizard snake turtle",
    "hamster mouse rabbit shrew squirrel",
    "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "bicycle bus motorcycle pickup_truck train",
    "lawn_mower rocket streetcar tank tractor",
)
"""Classes of CIFAR-100 by superclass, in the order of their numbers."""
_CONFUSIONS: tuple[tuple[frozenset[str], dict[str, str]], ...] = (
    (
        frozenset(_CIFAR10.split()),
        dict(truck="automobile", bird="airplane", deer="horse", cat="dog", dog="cat"),
    ),
    (
        frozenset(" ".join(_SUPERCLASSES).split()),
        {
            name: following
            for group in map(str.split, _SUPERCLASSES)
            for name, following in zip(group, group[1:] + group[:1], strict=True)
        },
    ),
    (frozenset("0123456789"), {"7": "1", "2": "7", "5": "6", "6": "5", "3": "8"}),
)
"""Usual confusions, for data with exactly these classes."""
_SPELLINGS = {"cra": "crab"}
"""Class names that a copy on the hub misspells, and their usual spelling."""


def corrupt(
    images: Images,
    *,
    fraction: float = 1.0,
    imbalance: str = "none",
    noise: str = "none",
    seed: int,
) -> Images:
    """Apply fraction, imbalance and label noise to images.

    First ``fraction`` of every class is kept, then ``imbalance`` thins the classes out, then
    ``noise`` switches labels.

    Args:
        images: original images; they are not modified.
        fraction: share to keep of every class, rounded to whole images; a class keeps at least
            one.
        imbalance: ``long_tail(ratio)`` or ``step(ratio)``, see :data:`IMBALANCE`.
        noise: ``symmetric(rate)``, ``asymmetric(rate)`` or ``pair(rate)``, see :data:`NOISE`.
        seed: seed of the draws.

    Returns:
        The remaining images, in their original order.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is expected in (0, 1], got {fraction}")
    if fraction < 1:
        kept = stratified_mask(images.labels, fraction, seed, "fraction", least=1)
        images = images.subset(kept.nonzero().squeeze(1))
    if not _is_none(imbalance):
        sizes = build(imbalance, IMBALANCE, what="imbalance", counts=images.counts())
        kept = rank_in_class(images.labels, seed, "imbalance") < torch.tensor(sizes)[images.labels]
        images = images.subset(kept.nonzero().squeeze(1))
    if not _is_none(noise):
        labels = build(
            noise,
            NOISE,
            what="noise",
            labels=images.labels,
            classes=images.classes,
            num_classes=len(images.classes),
            seed=seed,
        )
        images = images.subset(torch.arange(len(images)), labels)
    return images


def long_tail(ratio: float, *, counts: list[int]) -> list[int]:
    r"""Compute exponentially falling class sizes; the first class is the largest.

    .. math:: n_c = \lfloor n_{\max}\, r^{-c/(k-1)} \rfloor

    Args:
        ratio: size of the largest class over that of the smallest, at least 1.
        counts: examples of each class; a class keeps at most these and at least one.

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
    return _clamp_sizes(sizes, counts)


def step(ratio: float, *, counts: list[int]) -> list[int]:
    """Compute two class sizes: the largest for the first half, ``1/ratio`` of it for the rest.

    The arguments and the result are those of :func:`long_tail`.

    Example:
        >>> step(10, counts=[50] * 4)
        [50, 50, 5, 5]
    """
    _check_ratio("step", ratio)
    half, largest = len(counts) // 2, max(counts)
    sizes = [largest if place < half else int(largest / ratio) for place in range(len(counts))]
    return _clamp_sizes(sizes, counts)


def symmetric(rate: float, *, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """Replace ``round(rate * N)`` labels with another class, drawn uniformly.

    Args:
        rate: share of wrong labels, in [0, 1].
        labels: true labels, shape ``(N,)``.
        num_classes: number of classes.
        seed: seed of the draws.

    Returns:
        All labels, shape ``(N,)``.
    """
    wrong = _wrong("symmetric", rate, labels, num_classes, seed)
    shift = 1 + seeded_draws.below(num_classes - 1, len(labels), seed, "symmetric")
    return torch.where(wrong, (labels + shift) % num_classes, labels)


def asymmetric(
    rate: float,
    mapping: Mapping[str, str] | Sequence[Sequence[str]] | None = None,
    *,
    labels: Tensor,
    classes: Sequence[str],
    seed: int,
) -> Tensor:
    """Replace ``round(rate * n)`` labels of each class with the class it is confused with.

    Classes without a confusion keep their labels, so the overall share of wrong labels is below
    ``rate`` if only some classes have one.

    Args:
        rate: share of wrong labels in each class of the mapping, in [0, 1].
        mapping: class that each class is confused with, ``{"cat": "dog"}`` or
            ``[("cat", "dog")]``. None uses the usual mapping, for data with the class names of
            CIFAR-10 (truck to automobile, bird to airplane, deer to horse, cat and dog to each
            other), of CIFAR-100 (each to the next in its superclass, the last to the first) or of
            MNIST (7 to 1, 2 to 7, 3 to 8, 5 and 6 to each other).
        labels: true labels, shape ``(N,)``.
        classes: names of the classes.
        seed: seed of the draws.

    Returns:
        All labels, shape ``(N,)``.

    References:
        Patrini et al., Making Deep Neural Networks Robust to Label Noise: a Loss Correction
        Approach, 2017.
    """
    _check_rate("asymmetric", rate)
    if mapping is None:
        pairs = _usual_confusions(classes)
        if pairs is None:
            raise ValueError(
                "asymmetric: the usual confusions are known for the classes of cifar10, "
                f"cifar100 and mnist only; use pair({rate}) or symmetric({rate}), or give "
                "mapping=[('cat', 'dog')]"
            )
    else:
        pairs = _given_confusions(mapping, classes)
    numbers = {name: number for number, name in enumerate(classes)}
    confused = torch.arange(len(classes))
    for name, other in pairs.items():
        confused[numbers[name]] = numbers[other]
    counts = labels.bincount(minlength=len(classes)).tolist()
    sizes = torch.tensor([round(rate * count) for count in counts])
    wrong = rank_in_class(labels, seed, "noise") < sizes[labels]
    return torch.where(wrong, confused[labels], labels)


def pair(rate: float, *, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """Replace ``round(rate * N)`` labels with the next class, the last with the first.

    The arguments and the result are those of :func:`symmetric`.
    """
    wrong = _wrong("pair", rate, labels, num_classes, seed)
    return torch.where(wrong, (labels + 1) % num_classes, labels)


IMBALANCE: dict[str, Callable[..., list[int]]] = {"long_tail": long_tail, "step": step}
"""Imbalance profiles by name."""
NOISE: dict[str, Callable[..., Tensor]] = {
    "symmetric": symmetric,
    "asymmetric": asymmetric,
    "pair": pair,
}
"""Kinds of label noise by name."""


def _is_none(text: str) -> bool:
    return text.strip() in ("", "none", "none()")


def _wrong(who: str, rate: Any, labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """Choose the labels to replace; true where a label becomes wrong."""
    _check_rate(who, rate)
    if num_classes < 2:
        raise ValueError(f"{who} expects at least 2 classes, got {num_classes}")
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    chosen = seeded_draws.permutation(len(labels), seed, "noise")
    wrong[chosen[: round(rate * len(labels))]] = True
    return wrong


def _usual_confusions(classes: Sequence[str]) -> dict[str, str] | None:
    """Return the usual confusions for these class names, or None."""
    own = {}
    for name in classes:
        plain = name.lower().replace(" ", "_").replace("-", "_")
        own[_SPELLINGS.get(plain, plain)] = name
    for known, pairs in _CONFUSIONS:
        if own.keys() == known and len(classes) == len(known):
            return {own[name]: own[other] for name, other in pairs.items()}
    return None


def _given_confusions(mapping: Any, classes: Sequence[str]) -> dict[str, str]:
    """Validate a mapping given by the user."""
    listed = list(mapping.items()) if isinstance(mapping, Mapping) else mapping
    if not (isinstance(listed, list | tuple) and listed and all(map(_is_pair, listed))):
        raise ValueError(
            "asymmetric expects mapping to be pairs of classes such as [('cat', 'dog')], "
            f"got {mapping!r}"
        )
    pairs: dict[str, str] = {}
    for name, other in (map(str, each) for each in listed):
        for each in (name, other):
            if each not in classes:
                hint = did_you_mean(each, classes)
                raise ValueError(f"asymmetric: there is no class {each!r} to map{hint}")
        if name == other or name in pairs:
            twice = "itself" if name == other else f"{pairs[name]!r} and to {other!r}"
            raise ValueError(
                f"asymmetric expects each class to map to one other class, {name!r} maps to {twice}"
            )
        pairs[name] = other
    return pairs


def _is_pair(each: Any) -> bool:
    # The names of unnamed classes are their numbers.
    return (
        isinstance(each, list | tuple)
        and len(each) == 2
        and all(isinstance(name, str | int) for name in each)
    )


def _check_rate(who: str, rate: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f"{who} expects a rate in [0, 1], got {rate!r}")


def _check_ratio(who: str, ratio: Any) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 <= ratio < 1e9:
        raise ValueError(f"{who} expects the largest class over the smallest, got {ratio!r}")


def _clamp_sizes(sizes: list[int], counts: list[int]) -> list[int]:
    return [min(max(size, 1), count) for size, count in zip(sizes, counts, strict=True)]
