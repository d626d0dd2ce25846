"""Mean and spread of a few numbers, and of the differences of two that belong together."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tammes.optional import require

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation over seeds; a single seed has no deviation."""

    count: int
    mean: float
    std: float | None

    @property
    def half(self) -> float | None:
        """Half the width of the 95 % interval of the mean (Student t)."""
        if self.std is None:
            return None
        return t_quantile(self.count - 1) * self.std / math.sqrt(self.count)


@dataclass(frozen=True)
class Difference:
    """Mean of the differences over common seeds, and its 95 % interval.

    Attributes:
        seeds: that both groups have.
        mean: of the differences.
        low: end of the interval; None for a single seed.
        high: the other end.
    """

    seeds: tuple[int, ...]
    mean: float
    low: float | None
    high: float | None

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero.

        Not for a single seed, and not where all differences are the same number: then there is no
        spread to judge by.
        """
        return (
            self.low is not None
            and self.high is not None
            and self.low < self.high
            and not self.low <= 0 <= self.high
        )


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t with ``P(|T| <= t) = confidence`` of Student's t distribution.

    Args:
        degrees: of freedom, at least 1.
        confidence: how large the middle part is, in (0, 1).

    Example:
        >>> round(t_quantile(1), 3), round(t_quantile(2), 3), round(t_quantile(9), 3)
        (12.706, 4.303, 2.262)
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(
            "t_quantile expects at least 1 degree of freedom and a confidence in (0, 1), "
            f"got {degrees} and {confidence}"
        )
    return float(require("scipy.special", extra="lab").stdtrit(degrees, (1 + confidence) / 2))


def summary(values: Iterable[float]) -> Summary | None:
    """Return mean and standard deviation, that of a sample (n - 1); None of nothing."""
    known = list(values)
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Summary(len(known), statistics.fmean(known), std)


def difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Compare values with those of a baseline, over the seeds both have.

    Example:
        >>> found = difference({0: 3.0, 1: 4.0, 7: 9.0}, {0: 1.0, 1: 1.0})
        >>> found.seeds, found.mean, round(found.low, 2), round(found.high, 2)
        ((0, 1), 2.5, -3.85, 8.85)
    """
    seeds = tuple(sorted(set(values) & set(baseline)))
    found = summary(values[seed] - baseline[seed] for seed in seeds)
    if found is None:
        return None
    half = found.half
    if half is None:
        return Difference(seeds, found.mean, None, None)
    # Shares of a whole number of examples often differ by the same; rounding is no spread.
    if half < 1e-9 * max(abs(values[seed]) + abs(baseline[seed]) for seed in seeds):
        half = 0.0
    return Difference(seeds, found.mean, found.mean - half, found.mean + half)
