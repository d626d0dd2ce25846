r"""Learning rate schedules as functions of the epoch.

A schedule gives the learning rate :math:`\eta(t)` after :math:`t` of :math:`T` epochs. A warm-up of
:math:`W` epochs may precede it; the smooth schedules then run over the remaining :math:`T - W`,
and the epochs of ``steps`` count from the start of training.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from tammes.lab.config import build
from tammes.lab.config.schema import Config

Schedule: TypeAlias = Callable[[float], float]
"""Learning rate as a function of the time in epochs."""
_ROUNDING = 1e-9
"""Tolerance for rounding, in epochs."""
Per: TypeAlias = Literal["step", "epoch"]


def cosine(
    end: float = 0.0, *, per: Per = "step", lr: float, epochs: float, warmup: float = 0.0
) -> Schedule:
    r"""Anneal along half a cosine: :math:`\eta(t) = e + \tfrac12(\eta_0 - e)(1 + \cos\pi t/T)`."""
    elapsed = _elapsed(per, epochs - warmup, warmup)
    return lambda t: end + (lr - end) * (1 + math.cos(math.pi * elapsed(t))) / 2


def log(
    end: float = 1e-4, *, per: Per = "epoch", lr: float, epochs: float, warmup: float = 0.0
) -> Schedule:
    r"""Decay evenly on a logarithmic scale: :math:`\eta(t) = \eta_0 (e/\eta_0)^{t/(T-1)}`.

    The last epoch has the rate ``end``, as in ``numpy.logspace`` over the epochs.
    """
    if end <= 0:
        raise ValueError(f"lr_schedule log expects an end above 0, got {end}")
    elapsed = _elapsed(per, max(epochs - warmup - 1, 1e-9), warmup)
    return lambda t: lr * (end / lr) ** elapsed(t)


def steps(at: Sequence[float], factor: float | Sequence[float] = 0.1, *, lr: float) -> Schedule:
    """Multiply by a factor at the given epochs; a list gives each epoch its own factor."""
    marks = [float(mark) for mark in at]
    factors = [factor] * len(marks) if isinstance(factor, int | float) else [*factor]
    if len(factors) != len(marks):
        raise ValueError(
            f"lr_schedule steps expects a factor for each of {len(marks)} epochs, "
            f"got {len(factors)}"
        )
    pairs = list(zip(marks, factors, strict=True))

    def rate(t: float) -> float:
        # Rounding must not move a milestone to another epoch.
        return lr * math.prod(times for mark, times in pairs if t >= mark - _ROUNDING)

    return rate


def constant(*, lr: float) -> Schedule:
    """Keep the learning rate constant."""
    return lambda t: lr


TABLE: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "log": log,
    "steps": steps,
}


def _elapsed(per: str, length: float, warmup: float) -> Callable[[float], float]:
    """Return the elapsed share of a schedule as a function of the epoch."""
    if per not in ("step", "epoch"):
        raise ValueError(f"lr_schedule expects per='step' or 'epoch', got {per!r}")
    count: Callable[[float], float] = math.floor if per == "epoch" else float
    return lambda t: min(count(t - warmup + _ROUNDING) / length, 1.0)


def learning_rate(config: Config, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the learning rate of the backbone as a function of the step.

    Example:
        >>> rate = learning_rate(Config(lr=0.1, lr_schedule="log(1e-4)", epochs=4), 10)
        >>> [round(rate(10 * epoch), 5) for epoch in range(4)]
        [0.1, 0.01, 0.001, 0.0001]
    """
    if config.warmup >= config.epochs:
        raise ValueError(
            f"warmup is expected to be shorter than the {config.epochs} epochs, got {config.warmup}"
        )
    schedule = build(
        config.lr_schedule,
        TABLE,
        what="lr_schedule",
        lr=config.lr,
        epochs=config.epochs,
        warmup=config.warmup,
    )
    warm = config.warmup * steps_per_epoch

    def rate(step: int) -> float:
        if step < warm:
            share = (step + 1) / warm
            return config.lr * (config.warmup_start + (1 - config.warmup_start) * share)
        return schedule(step / steps_per_epoch)

    return rate
