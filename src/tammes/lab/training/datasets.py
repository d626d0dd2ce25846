"""The images of a run: to train on, to choose the best epoch on, to test on."""

from collections.abc import Callable
from typing import Any

from tammes.lab import data
from tammes.lab.config import build
from tammes.lab.config.schema import Config
from tammes.lab.data import Images, samplers
from tammes.lab.fewshot import class_lists


def prepare_data(
    config: Config, report: Callable[[str], None] = print
) -> tuple[Images, Images | None, Images]:
    """Images to train on, to choose the best epoch on, and to test on.

    The corruptions of the configuration are applied to those to train on only. With ``whole`` those
    to test on are among them.

    Args:
        config: of the run.
        report: is told what is worth knowing about the data.
    """
    options: dict[str, Any] = {
        "size": config.image_size,
        "skip_corrupt": config.skip_corrupt,
        "memory": int(config.memory * 2**30),
        # With a source of its own to test on, nothing is set aside of the other.
        "whole": config.whole or config.test is not None,
        "report": _once(report),
    }
    chosen = classes_of(config.classes) if config.classes else None
    if config.whole:
        report(f"{config.data}: trained on the test images too, so no accuracy on them is a test")
        size, tell = config.image_size, options["report"]
        training = class_lists.load_classes(config.data, chosen, size=size, report=tell)
    else:
        training = data.load(config.data, "train", **options)
    # Those of the chosen classes alone would refuse the others, which are left out below.
    like = None if config.whole else training
    testing = data.load(config.test or config.data, "test", like=like, **options)
    if chosen is not None:
        training, testing = (class_lists.take(images, chosen) for images in (training, testing))
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


def classes_of(text: str) -> tuple[str, ...]:
    """Names of the classes that ``classes`` of a configuration stands for.

    Args:
        text: a part of a split of classes; the base classes where no part is named.

    Example:
        >>> classes_of("cifar-fs")[:2]
        ('apple', 'aquarium_fish')
    """
    split, part = class_lists.parse(text, default="base")
    return split.part(part)


def _once(report: Callable[[str], None]) -> Callable[[str], None]:
    """Says everything once: what is to be known of a source is the same for its splits."""
    said: set[str] = set()

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            report(text)

    return tell


def make_sampler(
    config: Config, training: Images, *, rank: int = 0, world_size: int = 1
) -> samplers.BatchSampler:
    """What draws the batches of a run.

    Args:
        config: of the run.
        training: images to train on.
        rank: which process this is.
        world_size: how many there are.
    """
    made: samplers.BatchSampler = build(
        config.sampler,
        samplers.TABLE,
        what="sampler",
        labels=training.labels,
        batch_size=config.batch_size,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )
    return made


def describe_data(
    training: Images, held_out: Images | None, testing: Images, *, whole: bool = False
) -> dict[str, Any]:
    """What ``data.json`` says.

    Args:
        training: images to train on.
        held_out: to choose the best epoch on.
        testing: to test on.
        whole: whether those are among the images to train on, which is then said.
    """
    mean, std = training.mean_std()
    return {
        **({"test_is_trained_on": True} if whole else {}),
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
