"""Training, validation and test images of a run, and its sampler."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tammes.lab import data
from tammes.lab.config import build
from tammes.lab.config.schema import Config
from tammes.lab.data import DataError, Images, samplers
from tammes.lab.fewshot import class_lists
from tammes.lab.measure.identities import check_identities


def prepare_data(
    config: Config, report: Callable[[str], None] = print
) -> tuple[Images, Images | None, Images]:
    """Load the training, validation and test images of a run.

    Noise, imbalance and fraction are applied to the training images only. With ``whole`` the
    training images include the test images.
    """
    options: dict[str, Any] = {
        "size": _size(config),
        "skip_corrupt": config.skip_corrupt,
        "memory": int(config.memory * 2**30),
        # With a separate test source or test identities, no training image is held out.
        "whole": config.whole or config.test is not None or config.identities,
        # Every partition of a source repeats its messages; the cache lets each through once.
        "report": cache(report),
    }
    chosen = classes_of(config.classes) if config.classes else None
    if config.whole:
        report(f"{config.data}: training includes the test images, so test accuracies mean nothing")
        training = class_lists.load_classes(
            config.data, chosen, size=options["size"], report=options["report"]
        )
    else:
        training = data.load(config.data, "train", **options)
    # With ``whole``, training has the chosen classes only, and matching them would reject test
    # images of the others, which are dropped below.
    like = None if config.whole else training
    testing = data.load(
        config.test or config.data, "test", like=like, novel=config.identities, **options
    )
    if config.identities:
        _check_novel(config, training, testing, report)
    if chosen is not None:
        training, testing = (
            class_lists.select_classes(images, chosen) for images in (training, testing)
        )
    if config.limit:
        training, testing = (
            data.limit(images, config.limit, seed=config.seed) for images in (training, testing)
        )
    held_out: Images | None = None
    if config.validation:
        training, held_out = data.hold_out(training, config.validation, seed=config.seed)
    training = data.corrupt(
        training,
        fraction=config.fraction,
        imbalance=config.imbalance,
        noise=config.noise,
        seed=config.seed,
    )
    return training, held_out, testing


def _size(config: Config) -> int | tuple[int, int] | None:
    """Return the side of square images, or height and width."""
    if config.image_width is None:
        return config.image_size
    return config.image_size or config.image_width, config.image_width


def _check_novel(
    config: Config, training: Images, testing: Images, report: Callable[[str], None]
) -> None:
    """Reject test identities that are trained classes, or too few to measure."""
    check_identities(testing.source, testing.labels)
    both = [name for name in testing.classes if name in set(training.classes)]
    if both and config.test is None:
        raise DataError(
            f"{testing.source}: test identities must not be training classes, but "
            f"{len(both)} of {len(testing.classes)} are, such as {both[0]!r}"
        )
    if both:
        report(
            f"{testing.source}: {len(both)} of {len(testing.classes)} identities have the name of "
            f"a trained class of {training.source}, such as {both[0]!r}, and are taken for others"
        )


def classes_of(text: str) -> tuple[str, ...]:
    """Return the classes of a part of class lists, such as ``cifar-fs:base``; ``base`` by default.

    Example:
        >>> classes_of("cifar-fs")[:2]
        ('apple', 'aquarium_fish')
    """
    lists, part = class_lists.parse(text, default="base")
    return lists.part(part)


def make_sampler(
    config: Config, training: Images, *, rank: int = 0, world_size: int = 1
) -> samplers.BatchSampler:
    """Build the batch sampler of a run, for one of its processes."""
    return build(
        config.sampler,
        samplers.TABLE,
        what="sampler",
        labels=training.labels,
        batch_size=config.batch_size,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )


def describe_data(
    training: Images,
    held_out: Images | None,
    testing: Images,
    *,
    whole: bool = False,
    identities: bool = False,
) -> dict[str, Any]:
    """Return the content of ``data.json``.

    Set ``whole`` if the model trains on the test images too, and ``identities`` if it trains on
    other classes than theirs.
    """
    mean, std = training.mean_std()
    return {
        **({"test_is_trained_on": True} if whole else {}),
        **({"identities": list(testing.classes)} if identities else {}),
        "source": training.source,
        "test_source": testing.source,
        "classes": list(training.classes),
        "counts": training.counts(),
        "train": len(training),
        "validation": 0 if held_out is None else len(held_out),
        "test": len(testing),
        "image": list(training.shape),
        "mean": mean,
        "std": std,
        "digest": training.digest,
        "test_digest": testing.digest,
    }
