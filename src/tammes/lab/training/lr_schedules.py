r"""Learning rates over time: laws of the epoch, as numbers.

A law gives the learning rate :math:`\eta(t)` at :math:`t` epochs of :math:`T`. A warm-up of
:math:`W` epochs may come before it; the smooth laws then run over the :math:`T - W` that remain,
and the epochs of ``steps`` are counted from the beginning.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from tammes.lab.config import build
from tammes.lab.config.schema import Config

Law: TypeAlias = Callable[[float], float]
"""Learning rate at a time in epochs."""
_LITTLE = 1e-9
"""Epochs that are rounding."""
Per: TypeAlias = Literal["step", "epoch"]


def cosine(
    end: float = 0.0, *, per: Per = "step", lr: float, epochs: float, warmup: float = 0.0
) -> Law:
    r"""Half a cosine: :math:`\eta(t) = e + \tfrac12(\eta_0 - e)(1 + \cos\pi t/T)`."""
    past = _past(per, epochs - warmup, warmup)
    return lambda t: end + (lr - end) * (1 + math.cos(math.pi * past(t))) / 2


def log(
    end: float = 1e-4, *, per: Per = "epoch", lr: float, epochs: float, warmup: float = 0.0
) -> Law:
    r"""Evenly spaced on a logarithmic scale: :math:`\eta(t) = \eta_0 (e/\eta_0)^{t/(T-1)}`.

    The last epoch has the rate ``end``: ``numpy.logspace`` over the epochs.
    """
    if end <= 0:
        raise ValueError(f"lr_schedule log expects an end above 0, got {end}")
    past = _past(per, max(epochs - warmup - 1, 1e-9), warmup)
    return lambda t: lr * (end / lr) ** past(t)


def steps(at: Sequence[float], factor: float | Sequence[float] = 0.1, *, lr: float) -> Law:
    """Multiplied by a factor at some epochs; by one of its own where there are several."""
    marks = [float(mark) for mark in at]
    factors = [factor] * len(marks) if isinstance(factor, int | float) else [*factor]
    if len(factors) != len(marks):
        raise ValueError(
            f"lr_schedule steps expects a factor for each of {len(marks)} epochs, "
            f"got {len(factors)}"
        )
    pairs = list(zip(marks, factors, strict=True))

    def law(t: float) -> float:
        # A step more or less of rounding must not make it another epoch.
        return lr * math.prod(times for mark, times in pairs if t >= mark - _LITTLE)

    return law


def constant(*, lr: float) -> Law:
    """The same all the time."""
    return lambda t: lr


TABLE: dict[str, Callable[..., Law]] = {
    "constant": constant,
    "cosine": cosine,
    "log": log,
    "steps": steps,
}


def _past(per: str, length: float, warmup: float) -> Callable[[float], float]:
    """Share of a law that is behind at a time."""
    if per not in ("step", "epoch"):
        raise ValueError(f"lr_schedule expects per='step' or 'epoch', got {per!r}")
    count: Callable[[float], float] = math.floor if per == "epoch" else float
    return lambda t: min(count(t - warmup + _LITTLE) / length, 1.0)


def learning_rate(config: Config, steps_per_epoch: int) -> Callable[[int], float]:
    """Learning rate of the backbone by the number of steps done.

    Args:
        config: of the run: ``lr``, ``lr_schedule``, ``warmup``, ``warmup_start``, ``epochs``.
        steps_per_epoch: how many steps an epoch has.

    Example:
        >>> rate = learning_rate(Config(lr=0.1, lr_schedule="log(1e-4)", epochs=4), 10)
        >>> [round(rate(10 * epoch), 5) for epoch in range(4)]
        [0.1, 0.01, 0.001, 0.0001]
    """
    if config.warmup >= config.epochs:
        raise ValueError(
            f"warmup is expected to be shorter than the {config.epochs} epochs, got {config.warmup}"
        )
    law: Law = build(
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
        return law(step / steps_per_epoch)

    return rate
