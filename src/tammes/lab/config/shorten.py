"""Shorten training, and everything that is given in epochs in proportion."""

import dataclasses

from tammes.lab.config.expressions import Call, parse_call, parse_keywords
from tammes.lab.config.schema import Config


def shortened(config: Config, epochs: int) -> Config:
    """Return a configuration with fewer epochs, and warm-up and schedules in proportion.

    Example:
        >>> short = shortened(Config(epochs=50, lr_schedule="steps([25, 40], 0.1)"), 2)
        >>> short.epochs, short.lr_schedule
        (2, 'steps([1.0, 1.6], 0.1)')
    """
    share = epochs / config.epochs
    return config.replace(
        epochs=epochs,
        warmup=config.warmup * share,
        lr_schedule=_shorten_lr_schedule(config.lr_schedule, share),
        schedules=_shorten_schedules(config.schedules, share),
    )


def _shorten_lr_schedule(schedule: str, share: float) -> str:
    """Move the steps of the learning rate to the same fraction of training."""
    call = parse_call(schedule, what="lr_schedule")
    if call.name != "steps":
        return schedule
    at, *more = call.args or (call.kwargs.get("at", []),)
    named = {key: value for key, value in call.kwargs.items() if key != "at"}
    return str(Call(call.name, ([mark * share for mark in at], *more), named))


def _shorten_schedules(schedules: str, share: float) -> str:
    """Scale the epochs in schedules of settings."""
    parts = []
    for name, call in parse_keywords(schedules, what="schedules").items():
        kwargs = {
            key: value * share if key.endswith("epochs") else value
            for key, value in call.kwargs.items()
        }
        parts.append(f"{name}={dataclasses.replace(call, kwargs=kwargs)}")
    return ", ".join(parts)
