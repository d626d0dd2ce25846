"""Quick form of a run, as a smoke test: few images, a narrow network, two epochs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tammes.lab.config.expressions import Call, parse_call, parse_keywords
from tammes.lab.config.schema import Config

IMAGES, EPOCHS, BATCH, WIDTH, STEPS, EPISODES = 300, 2, 50, 0.125, 50, 20
_SHOT, _QUERIES = 2, 4


def quick_config(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a configuration in quick form, with the fields of the recipe's own quick form.

    Example:
        >>> full = Config(backbone="layer13", epochs=50, lr_schedule="steps([25, 40], 0.1)")
        >>> quick = quick_config(full, {})
        >>> quick.backbone, quick.epochs, quick.lr_schedule
        ('layer13(width=0.125)', 2, 'steps([1.0, 1.6], 0.1)')
    """
    share = overrides.get("epochs", EPOCHS) / config.epochs
    return config.replace(
        **{
            "limit": IMAGES,
            "epochs": EPOCHS,
            "batch_size": min(BATCH, config.batch_size),
            "backbone": _narrow_backbone(config.backbone),
            "sampler": _small_episodes(config.sampler),
            "select_epoch": _few_episodes(config.select_epoch),
            "warmup": config.warmup * share,
            "lr_schedule": _shorten_lr_schedule(config.lr_schedule, share),
            "schedules": _shorten_schedules(config.schedules, share),
            "precision": "fp32",
            "compile": False,
            "evaluate_every": 1,
            **overrides,
        }
    )


def quick_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a cell without a network in quick form."""
    return {**settings, "steps": min(STEPS, settings.get("steps", STEPS))}


def _narrow_backbone(backbone: str) -> str:
    if backbone == "auto" or backbone.startswith("timm:"):
        return backbone
    call = parse_call(backbone, what="backbone")
    width = WIDTH * call.kwargs.get("width", 1.0)
    return str(dataclasses.replace(call, kwargs={**call.kwargs, "width": width}))


def _small_episodes(sampler: str) -> str:
    """Reduce episodes to two images per class, as there are few of each."""
    call = parse_call(sampler, what="sampler")
    if call.name != "episodes" or "way" not in call.kwargs:
        return sampler
    way = min(call.kwargs["way"], BATCH // _SHOT)
    return str(dataclasses.replace(call, kwargs={**call.kwargs, "way": way, "shot": _SHOT}))


def _few_episodes(selection: str) -> str:
    """Reduce the episodes that choose an epoch."""
    if not selection:
        return ""
    call = parse_call(selection, what="select_epoch")
    few = {"episodes": EPISODES, "queries": _QUERIES}
    return str(dataclasses.replace(call, kwargs={**call.kwargs, **few}))


def _shorten_lr_schedule(schedule: str, share: float) -> str:
    """Move the steps of the learning rate to the same share of the training."""
    call = parse_call(schedule, what="lr_schedule")
    if call.name != "steps":
        return schedule
    at, *more = call.args or (call.kwargs.get("at", []),)
    named = {key: value for key, value in call.kwargs.items() if key != "at"}
    return str(Call(call.name, ([mark * share for mark in at], *more), named))


def _shorten_schedules(schedules: str, share: float) -> str:
    """Scale the epochs of scheduled settings to the shorter training."""
    parts = []
    for name, call in parse_keywords(schedules, what="schedules").items():
        kwargs = {
            key: value * share if key.endswith("epochs") else value
            for key, value in call.kwargs.items()
        }
        parts.append(f"{name}={dataclasses.replace(call, kwargs=kwargs)}")
    return ", ".join(parts)
