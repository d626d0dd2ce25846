"""Quick form of a run, as a smoke test: few images, a narrow network, two epochs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tammes.lab.config.expressions import parse_call
from tammes.lab.config.schema import Config
from tammes.lab.config.shorten import shortened

IMAGES, EPOCHS, BATCH, WIDTH, STEPS, EPISODES = 300, 2, 50, 0.125, 50, 20
_SHOT, _QUERIES = 2, 4


def quick_config(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return the quick form of a configuration; ``overrides`` are the recipe's own quick fields.

    Example:
        >>> full = Config(backbone="layer13", epochs=50, lr_schedule="steps([25, 40], 0.1)")
        >>> quick = quick_config(full, {})
        >>> quick.backbone, quick.epochs, quick.lr_schedule
        ('layer13(width=0.125)', 2, 'steps([1.0, 1.6], 0.1)')
    """
    return shortened(config, overrides.get("epochs", EPOCHS)).replace(
        **{
            "limit": IMAGES,
            "batch_size": min(BATCH, config.batch_size),
            "backbone": _narrow_backbone(config.backbone),
            "sampler": _small_episodes(config.sampler),
            "select_epoch": _few_episodes(config.select_epoch),
            "precision": "fp32",
            "compile": False,
            "evaluate_every": 1,
            **overrides,
        }
    )


def quick_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quick form of the settings of a cell that trains no network."""
    return {**settings, "steps": min(STEPS, settings.get("steps", STEPS))}


def _narrow_backbone(backbone: str) -> str:
    if backbone == "auto" or backbone.startswith("timm:"):
        return backbone
    call = parse_call(backbone, what="backbone")
    width = WIDTH * call.kwargs.get("width", 1.0)
    return str(dataclasses.replace(call, kwargs={**call.kwargs, "width": width}))


def _small_episodes(sampler: str) -> str:
    """Reduce episodes to two images per class, as few are loaded."""
    call = parse_call(sampler, what="sampler")
    if call.name != "episodes" or "way" not in call.kwargs:
        return sampler
    way = min(call.kwargs["way"], BATCH // _SHOT)
    return str(dataclasses.replace(call, kwargs={**call.kwargs, "way": way, "shot": _SHOT}))


def _few_episodes(selection: str) -> str:
    """Reduce the number of episodes that score an epoch."""
    if not selection:
        return ""
    call = parse_call(selection, what="select_epoch")
    few = {"episodes": EPISODES, "queries": _QUERIES}
    return str(dataclasses.replace(call, kwargs={**call.kwargs, **few}))
