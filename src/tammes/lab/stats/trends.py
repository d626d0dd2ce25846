"""Trends of training curves: still rising, collapsed, crossing.

Curves are percentages by epoch, where more is better.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

Curve = Mapping[int, float]
"""Values by epoch."""

_FEW_POINTS = 4
"""Smallest number of evaluations that can show a trend."""
_TREND = 1.645
"""Mann-Kendall statistic above which a curve rises: 5 % of curves without a trend reach it."""
_LEAST_RISE, _LEAST_SHARE = 0.5, 0.1
"""Smallest rise that counts: in points or as a share of the remaining errors, if that is less."""
_FALL = 0.5
"""Share of its best value below which a curve has collapsed."""


def mean_curve(curves: Iterable[Curve]) -> dict[int, float]:
    """Return the mean of curves at the epochs that all of them have."""
    known = [curve for curve in curves if curve]
    common = set.intersection(*(set(curve) for curve in known)) if known else set()
    return {x: statistics.fmean(curve[x] for curve in known) for x in sorted(common)}


def rise(curve: Curve) -> float | None:
    """Return the gain in the last third of a curve of percentages; None if it is not rising.

    It rises if its last third (at least four evaluations) has an upward trend by the Mann-Kendall
    test, and if its slope (Theil-Sen) gains half a point or, if less, a tenth of the remaining
    errors. Its second half must gain half of that and a tenth of the whole gain, so that a step of
    the learning rate does not count as a rise.

    Example:
        >>> rise({1: 60, 2: 70, 3: 75, 4: 78, 5: 80}), rise({1: 90, 2: 98, 3: 98, 4: 98, 5: 98})
        (9.5, None)
    """
    tail = _last_third(curve)
    if not _has_trend([value for _, value in tail]):
        return None
    gain, late = _slope_gain(tail), _slope_gain(tail[len(tail) // 2 :])
    least = min(_LEAST_RISE, _LEAST_SHARE * (100 - tail[-1][1]))
    return gain if gain >= least > 0 and late >= max(least / 2, gain / 10) else None


def collapse(curve: Curve) -> int | None:
    """Return the epoch of the best value, if the last value is less than half of it.

    Example:
        >>> collapse({1: 60.0, 2: 81.0, 3: 10.0}), collapse({1: 60.0, 2: 81.0, 3: 79.0})
        (2, None)
    """
    best = max(curve, key=lambda epoch: curve[epoch], default=None)
    return best if best is not None and curve[max(curve)] < _FALL * curve[best] else None


def crossing(leader: Curve, other: Curve) -> tuple[str, int] | None:
    """Return whether two curves of percentages crossed late, or are about to.

    Returns:
        ``("overtaken", epoch)``, the last epoch at which the other was ahead, if that is in the
        last third; ``("catching up", epochs)`` if the other rises and would close the gap within
        half the epochs of this training; or None. The leader must be half a point ahead at the end,
        and an overtaken curve as much, by the median, in the first half.

    Example:
        >>> crossing({1: 9, 2: 30, 3: 50, 4: 70}, {1: 40, 2: 50, 3: 52, 4: 53})
        ('overtaken', 3)
    """
    gaps = {epoch: leader[epoch] - other[epoch] for epoch in leader if epoch in other}
    tail = _last_third(gaps)
    if not tail:
        return None
    end, gap = tail[-1]
    if gap < _LEAST_RISE:
        return None
    ahead = [epoch for epoch, value in sorted(gaps.items()) if value < 0]
    first_half = [value for _, value in sorted(gaps.items())][: len(gaps) // 2]
    if ahead and ahead[-1] >= tail[0][0] and statistics.median(first_half) <= -_LEAST_RISE:
        return "overtaken", ahead[-1]
    if rise(other) is not None and _has_trend([-value for _, value in tail]):
        rate = _slope_gain(tail) / (tail[0][0] - end)
        if rate > 0 and gap / rate <= end / 2:
            return "catching up", math.ceil(gap / rate)
    return None


def _last_third(curve: Curve) -> list[tuple[int, float]]:
    """Return the last third of the points, at least four; empty for a shorter curve."""
    points = sorted(curve.items())
    return (
        points[-max(_FEW_POINTS, math.ceil(len(points) / 3)) :]
        if len(points) >= _FEW_POINTS
        else []
    )


def _has_trend(values: Sequence[float]) -> bool:
    """Return whether values rise, by the one-sided Mann-Kendall test."""
    count = len(values)
    score = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    variance = count * (count - 1) * (2 * count + 5) / 18
    return count >= _FEW_POINTS and score - 1 > _TREND * math.sqrt(variance)


def _slope_gain(points: Sequence[tuple[int, float]]) -> float:
    """Return the Theil-Sen slope, the median over pairs of points, times the epochs they span."""
    slopes = [
        (after - before) / (end - start)
        for (start, before), (end, after) in combinations(points, 2)
    ]
    return statistics.median(slopes) * (points[-1][0] - points[0][0])
