"""Mean and deviation over seeds, and paired differences with a confidence interval."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

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
    """Mean of paired differences over common seeds, and its 95 % interval; one seed has none."""

    seeds: tuple[int, ...]
    mean: float
    interval: tuple[float, float] | None

    @property
    def has_spread(self) -> bool:
        """Whether the differences vary; one seed, or equal differences, give no spread to judge."""
        return self.interval is not None and self.interval[0] < self.interval[1]

    @property
    def clear(self) -> bool:
        """Whether the differences vary and the interval excludes zero."""
        if self.interval is None or not self.has_spread:
            return False
        low, high = self.interval
        return not low <= 0 <= high


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t with ``P(|T| <= t) = confidence`` of Student's t distribution.

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
    """Return mean and sample standard deviation (n - 1); None without values."""
    numbers = list(values)
    if not numbers:
        return None
    std = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Summary(len(numbers), statistics.fmean(numbers), std)


def difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Compare values with those of a baseline, over the seeds both have.

    Example:
        >>> result = difference({0: 3.0, 1: 4.0, 7: 9.0}, {0: 1.0, 1: 1.0})
        >>> result.seeds, result.mean, [round(end, 2) for end in result.interval]
        ((0, 1), 2.5, [-3.85, 8.85])
    """
    seeds = tuple(sorted(set(values) & set(baseline)))
    differences = summary(values[seed] - baseline[seed] for seed in seeds)
    if differences is None:
        return None
    mean, half = differences.mean, differences.half
    if half is None:
        return Difference(seeds, mean, None)
    # Accuracies are multiples of 1/N and often differ equally; do not take rounding for spread.
    if half < 1e-9 * max(abs(values[seed]) + abs(baseline[seed]) for seed in seeds):
        half = 0.0
    return Difference(seeds, mean, (mean - half, mean + half))


def resampled_difference(
    drawn: Mapping[int, Sequence[float]], baseline: Mapping[int, Sequence[float]]
) -> tuple[float, float] | None:
    """Return the 95 % interval of a difference over resamples that both groups share.

    The difference in a resample is the mean over the seeds both have; None without a common seed,
    or if the numbers of resamples differ.

    Example:
        >>> resampled_difference({0: [1.0, 2.0, 3.0]}, {0: [0.5, 1.5, 2.5]})
        (0.5, 0.5)
    """
    seeds = sorted(set(drawn) & set(baseline))
    pairs = [(drawn[seed], baseline[seed]) for seed in seeds]
    if len({len(each) for pair in pairs for each in pair}) != 1:
        return None
    ours, theirs = (torch.tensor(side, dtype=torch.double) for side in zip(*pairs, strict=True))
    tail = (1 - CONFIDENCE) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.double)
    low, high = (ours - theirs).mean(0).quantile(ends).tolist()
    return low, high
