"""Check the expressions of a configuration before any image is decoded."""

import torch

from tammes.lab.backbones import registry
from tammes.lab.config import build, parse_head, parse_loss, parse_schedules
from tammes.lab.config.expressions import check_call, parse_calls
from tammes.lab.config.schema import Config
from tammes.lab.data import corruptions, samplers
from tammes.lab.data.augment_ops import OPERATIONS
from tammes.lab.fewshot.epoch_selection import parse_selection
from tammes.lab.training.datasets import classes_of
from tammes.lab.training.health import muted_names
from tammes.lab.training.lr_schedules import learning_rate

_COUNTS = (2, 1, 1)
"""Placeholder class counts; the real ones are not known yet."""
_EMBEDDING_SIZE = 64


def check_expressions(config: Config) -> None:
    """Reject names, settings and values that are wrong whatever the images.

    Raises:
        ValueError: an expression is wrong; the message is one sentence.
        ImportError: a package that an expression needs cannot be imported.
    """
    loss = parse_loss(config.loss, counts=_COUNTS)
    with torch.random.fork_rng(devices=[]):
        parse_head(config.head, loss, _EMBEDDING_SIZE, len(_COUNTS))
    parse_schedules(config.schedules, steps_per_epoch=1, counts=_COUNTS)
    registry.check(config.backbone)
    if config.augment.strip() != "auto":
        for call in parse_calls(config.augment, what="augmentation"):
            build(call, OPERATIONS, what="augmentation")
    supplied = ("labels", "batch_size", "seed", "rank", "world_size")
    check_call(config.sampler, samplers.TABLE, what="sampler", context=supplied)
    for field, table in (("imbalance", corruptions.IMBALANCE), ("noise", corruptions.NOISE)):
        supplied = ("counts", "labels", "classes", "num_classes", "seed")
        for call in parse_calls(getattr(config, field), what=field):
            check_call(call, table, what=field, context=supplied)
    learning_rate(config, 1)
    parse_selection(config.select_epoch)
    muted_names(config.mute)
    if config.classes:
        classes_of(config.classes)
    if config.watch not in ("", "gradients"):
        raise ValueError(f"watch is expected to be gradients or nothing, got {config.watch!r}")
