"""Quantiles of values in memory and of histograms."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_quantiles(name: str, quantiles: Sequence[float]) -> Tensor:
    """Check quantile levels, and convert them to a tensor."""
    levels = torch.as_tensor(quantiles, dtype=torch.double)
    if levels.ndim != 1 or not bool(((levels >= 0) & (levels <= 1)).all()):
        raise ValueError(f"{name} expects quantiles between 0 and 1, got {quantiles!r}")
    return levels


def check_limits(name: str, limits: tuple[float, float]) -> None:
    """Raise ``ValueError`` for a histogram without width."""
    if not limits[0] < limits[1]:
        raise ValueError(f"{name} expects limits (low, high) with low < high, got {limits}")


def _ranks(levels: Tensor, counts: Tensor) -> Tensor:
    """Rank of each level's quantile among the sorted examples, from 1."""
    # A product just above an integer is that integer, up to rounding.
    ranks = (levels.to(counts.device) * counts - 1e-9).ceil().long()
    return ranks.clamp_min(1)


def exact_quantiles(values: Tensor, levels: Tensor) -> Tensor:
    """Quantiles of values in memory; NaN if there are none."""
    if not len(values):
        return values.new_full(levels.shape, math.nan)
    return values.sort().values[_ranks(levels, torch.tensor(len(values), device=values.device)) - 1]


def histogram(values: Tensor, limits: tuple[float, float], bins: int) -> Tensor:
    """Count values in equal bins, with an extra bin at each end for values beyond the limits."""
    return torch.bincount(bin_places(values, limits, bins), minlength=bins + 2)


def bin_places(values: Tensor, limits: tuple[float, float], bins: int) -> Tensor:
    """Bin of each value in a :func:`histogram`."""
    low, high = limits
    # In place, since there may be hundreds of millions of pairs.
    place = torch.sub(values.double(), low).mul_(bins / (high - low))
    return place.floor_().clamp_(-1, bins).long().add_(1)


def histogram_quantiles(
    counts: Tensor, limits: tuple[float, float], ends: tuple[Tensor, Tensor], levels: Tensor
) -> Tensor:
    """Quantiles from a :func:`histogram`, each in the same bin as the exact quantile.

    Args:
        counts: the histogram, shape ``(bins + 2,)``.
        limits: its limits.
        ends: smallest and largest value, which bound the first and the last bin.
        levels: fractions of the values that are below the quantiles.

    Returns:
        The quantiles, NaN if nothing was counted.
    """
    total = counts.sum()
    if not bool(total):
        return torch.full_like(levels, math.nan, device=counts.device)
    low, high = limits
    inner = torch.linspace(low, high, len(counts) - 1, dtype=torch.double, device=counts.device)
    smallest, largest = ends
    edges = torch.cat([smallest.clamp_max(low).view(1), inner, largest.clamp_min(high).view(1)])
    ranks = _ranks(levels, total)
    cumulative = counts.cumsum(0)
    place = torch.searchsorted(cumulative, ranks)
    inside = (ranks - cumulative[place] + counts[place] - 0.5) / counts[place]
    value = edges[place] + inside * (edges[place + 1] - edges[place])
    return torch.minimum(torch.maximum(value, smallest), largest)
