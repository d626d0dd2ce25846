"""Accepted positives and negatives at every threshold: the basis of all rates."""

from typing import NamedTuple

import torch
from torch import Tensor

from tammes._validation import check_floating, check_tensor


class OperatingPoints(NamedTuple):
    """Weight of accepted examples at descending thresholds: a score at or above is accepted.

    Equal scores are accepted together. The first point accepts nothing, the last everything. An
    example with a score of -inf is accepted by no threshold; it counts in the totals only.

    Attributes:
        thresholds: infinity, then the distinct scores in descending order, shape ``(T + 1,)``.
        positives: accepted positives, shape ``(T + 1,)``.
        negatives: accepted negatives, shape ``(T + 1,)``.
    """

    thresholds: Tensor
    positives: Tensor
    negatives: Tensor

    @property
    def all_positives(self) -> Tensor:
        """Weight of all positives, shape ``()``."""
        return self.positives[-1]

    @property
    def all_negatives(self) -> Tensor:
        """Weight of all negatives, shape ``()``."""
        return self.negatives[-1]


class RankedScores(NamedTuple):
    """Scores sorted once, from which points for any weights are computed.

    Attributes:
        thresholds: the distinct scores in descending order, shape ``(T,)``.
        place: index of each example's score among them, shape ``(N,)``.
        positive: which examples are positive, shape ``(N,)``.
    """

    thresholds: Tensor
    place: Tensor
    positive: Tensor

    def points(self, weights: Tensor | None = None) -> OperatingPoints:
        """Accumulate the examples, each counted with its weight."""
        if weights is None:
            weights = torch.ones_like(self.place, dtype=torch.double)
        empty = weights.new_zeros(len(self.thresholds))
        positives = empty.index_add(0, self.place, weights * self.positive)
        negatives = empty.index_add(0, self.place, weights * ~self.positive)
        return accumulated(self.thresholds, positives, negatives)


def rank_scores(scores: Tensor, positive: Tensor) -> RankedScores:
    """Sort the scores of positive and negative examples."""
    rising, place = scores.detach().double().unique(return_inverse=True)
    return RankedScores(rising.flip(0), len(rising) - 1 - place, positive)


def accumulated(thresholds: Tensor, positives: Tensor, negatives: Tensor) -> OperatingPoints:
    """Accumulate positives and negatives counted at descending thresholds."""
    start = thresholds.new_zeros(1)
    return OperatingPoints(
        torch.cat([start + torch.inf, thresholds]),
        torch.cat([start, positives.double().cumsum(0)]),
        torch.cat([start, negatives.double().cumsum(0)]),
    )


def mirrored(points: OperatingPoints) -> OperatingPoints:
    """Points of the negated scores with positives and negatives exchanged."""
    start = points.thresholds.new_full((1,), torch.inf)
    return OperatingPoints(
        torch.cat([start, -points.thresholds[1:].flip(0)]),
        points.all_negatives - points.negatives.flip(0),
        points.all_positives - points.positives.flip(0),
    )


def extremes(points: OperatingPoints) -> tuple[OperatingPoints, OperatingPoints]:
    """Worst and best case of scores that are known up to a bin.

    In the worst case all negatives of a bin are above its positives, in the best case below. The
    ROC curve of the scores themselves is between the two, and so are all rates.
    """
    thresholds = torch.cat([points.thresholds[:1], points.thresholds[1:].repeat_interleave(2)])
    before = [part[:-1] for part in points[1:]]
    after = [part[1:] for part in points[1:]]

    def path(positives: Tensor, negatives: Tensor) -> OperatingPoints:
        corners = ((positives, after[0]), (negatives, after[1]))
        start = thresholds.new_zeros(1)
        paths = [torch.cat([start, torch.stack(corner, 1).flatten()]) for corner in corners]
        return OperatingPoints(thresholds, *paths)

    return path(before[0], after[1]), path(after[0], before[1])


def area(points: OperatingPoints) -> Tensor:
    """Area under accepted positives over accepted negatives; equal scores count half."""
    heights = points.positives[1:] + points.positives[:-1]
    area = (points.negatives.diff() * heights).sum() / 2
    return area / (points.all_positives * points.all_negatives)


def precision_sum(points: OperatingPoints) -> Tensor:
    """Sum over the positives of the precision at their scores."""
    gains = points.positives.diff()
    precision = points.positives[1:] / (points.positives + points.negatives)[1:]
    return torch.where(gains > 0, gains * precision, 0.0).sum()


def average_precision(points: OperatingPoints) -> Tensor:
    """Mean over the positives of the precision at their scores."""
    return precision_sum(points) / points.all_positives


def equal_error_rate(points: OperatingPoints) -> Tensor:
    """Rate at which false acceptances equal false rejections, on straight lines between points."""
    accepted = points.negatives / points.all_negatives
    rejected = 1 - points.positives / points.all_positives
    excess = accepted - rejected
    if bool(excess.isnan().any()):
        return excess.new_tensor(torch.nan)
    after = int((excess >= 0).nonzero()[0])
    share = excess[after - 1] / (excess[after - 1] - excess[after])
    return accepted[after - 1] + share * (accepted[after] - accepted[after - 1])


def smallest_threshold(points: OperatingPoints, share: float | Tensor) -> Tensor:
    """Index of the smallest threshold that accepts at most each fraction of the negatives."""
    # A product just below an integer is that integer, up to rounding.
    allowed = share * points.all_negatives * (1 + 1e-12)
    possible = points.negatives[points.thresholds > -torch.inf]
    return torch.searchsorted(possible, allowed, right=True) - 1


def largest_threshold(points: OperatingPoints, share: float) -> int:
    """Index of the largest threshold that accepts at least this fraction of the positives."""
    needed = share * points.all_positives * (1 - 1e-12)
    return min(int(torch.searchsorted(points.positives, needed)), len(points.positives) - 1)


def check_rate(name: str, rate: str, share: float, negatives: int, kind: str) -> None:
    """Raise ``ValueError`` if a rate cannot be measured with so few negatives."""
    if not 0 < share <= 1:
        raise ValueError(f"{name} expects 0 < {rate} <= 1, got {share}")
    if negatives * share < 1 - 1e-9:
        raise ValueError(
            f"{name} expects {1 / share:,.0f} {kind} or more to measure at a {rate} of {share:g}, "
            f"got {negatives:,}"
        )


def check_scores(name: str, scores: Tensor, flags: Tensor, what: str) -> Tensor:
    """Check finite scores of shape ``(N,)`` and a flag for each; return the flags as booleans."""
    check_floating(name, "scores", scores)
    if scores.ndim != 1:
        raise ValueError(f"{name} expects scores of shape (N,), got {tuple(scores.shape)}")
    # Both extremes are NaN if any score is.
    if len(scores) and not all(bool(end.isfinite()) for end in scores.aminmax()):
        wrong = int((~scores.isfinite()).sum())
        raise ValueError(
            f"{name} expects finite scores, got NaN or infinity in {wrong:,} of {len(scores):,}"
        )
    return check_flags(name, flags, scores, what)


def check_flags(name: str, flags: Tensor, rows: Tensor, what: str) -> Tensor:
    """Check a flag for each row: booleans, or integers 0 and 1."""
    check_tensor(name, what, flags)
    if flags.is_floating_point() or flags.is_complex():
        raise TypeError(f"{name} expects {what} of booleans, got {flags.dtype}")
    if flags.shape != rows.shape[:1] or flags.device != rows.device:
        raise ValueError(
            f"{name} expects {what} of shape ({len(rows)},) on {rows.device}, "
            f"got {tuple(flags.shape)} on {flags.device}"
        )
    if flags.dtype == torch.bool:
        return flags
    wrong = flags[(flags != 0) & (flags != 1)]
    if len(wrong):
        raise ValueError(f"{name} expects {what} of 0 and 1, got {int(wrong[0])}")
    return flags.bool()
