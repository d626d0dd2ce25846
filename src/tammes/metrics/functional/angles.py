"""Angles of examples to their target class and to their hardest other class."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import as_split, warn_undefined
from tammes.similarity import TINY
from tammes.split import Split

_NEAR = 1e-2
"""Largest deviation of a similarity from its cosine; covers half precision."""


class AnglesResult(NamedTuple):
    """Result of :func:`angles`.

    Attributes:
        own: histogram of the angles to the target class, shape ``(bins,)``.
        hardest: histogram of the angles to the hardest other class, shape ``(bins,)``.
        edges: edges of the bins, in degrees from 0 to 180, shape ``(bins + 1,)``.
        own_mean: mean angle to the target class, in degrees.
        hardest_mean: mean angle to the hardest other class, in degrees.
        beyond: fraction of the examples whose target angle exceeds 180 degrees minus the margin.
    """

    own: Tensor
    hardest: Tensor
    edges: Tensor
    own_mean: Tensor
    hardest_mean: Tensor
    beyond: Tensor


class AngleSums(NamedTuple):
    """Sums over batches and ranks for an :class:`AnglesResult`."""

    own: Tensor
    hardest: Tensor
    own_total: Tensor
    hardest_total: Tensor
    past: Tensor


@torch.no_grad()
def angles(
    split: Split | Tensor, labels: Tensor | None = None, *, bins: int = 180, margin: float = 0.0
) -> AnglesResult:
    r"""Histograms of the angles to the target class and to the hardest other class.

    .. math:: \theta = 2\,\mathrm{atan2}\bigl(\sqrt{h},\ \sqrt{2 - h}\bigr),\qquad h = 1-\cos\theta

    A bin includes its lower edge and excludes its upper edge. Beyond :math:`\pi - m` the angle plus
    an ArcFace margin :math:`m` exceeds :math:`\pi`, where the target is no longer the cosine of the
    sum: ``beyond`` is the fraction of such examples.

    Args:
        split: a split of a cosine head, with its features normalised or not, or cosines of shape
            ``(N, C)``.
        labels: class of each example, shape ``(N,)``; with cosines only.
        bins: number of bins from 0 to 180 degrees.
        margin: angle :math:`m` in radians.

    Returns:
        The :class:`AnglesResult`.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import angles
        >>> cosine = torch.tensor([[1.0, 0.5, -1.0], [0.1, -0.2, 0.0]])
        >>> result = angles(cosine, torch.tensor([0, 1]), bins=4)
        >>> result.own, result.hardest
        (tensor([1, 0, 1, 0]), tensor([0, 2, 0, 0]))

    References:
        Deng et al., ArcFace, CVPR 2019, Figure 3.
    """
    check_bins("angles", bins)
    checked = as_split("angles", split, labels, reads=ANGLE_READS)
    return finish_angles("angles", angle_sums("angles", checked, bins, margin))


ANGLE_READS = ("target", "hardest", "length", "norm", "gap")
"""Fields of a split that angles need."""


def check_bins(name: str, bins: int) -> None:
    """Raise ``ValueError`` for a histogram without bins."""
    if bins < 1:
        raise ValueError(f"{name} expects bins of 1 or more, got {bins}")


def angle_sums(name: str, split: Split, bins: int, margin: float) -> AngleSums:
    """Histograms and sums of both angles in degrees, and the number beyond the margin."""
    length = split.length.double()
    safe = length.clamp_min(TINY)
    hardest = torch.where(length > TINY, split.hardest.double() / safe, 0.0)
    target = torch.where(length > TINY, split.target.double() / safe, 0.0)
    gap = split.gap.double()
    # The hardest similarity is a cosine only with unit prototypes; length is then that of the
    # feature.
    unit_keys = (length - 1).abs() < _NEAR
    unit_keys |= (length - split.norm.double()).abs() < _NEAR * (1 + length)
    cosines = unit_keys & (hardest.abs() < 1 + _NEAR) & ((1 - gap - target).abs() < _NEAR)
    if not bool(cosines.all()):
        raise ValueError(
            f"{name} expects cosines or the split of a cosine head, "
            f"got {int((~cosines).sum())} of {len(cosines)} examples with other values"
        )
    own_angle = _degrees(gap)
    hardest_angle = _degrees(1 - hardest)
    return AngleSums(
        own=_count(own_angle, bins),
        hardest=_count(hardest_angle, bins),
        own_total=own_angle.sum(),
        hardest_total=hardest_angle.sum(),
        past=(own_angle > 180 - math.degrees(margin)).sum(),
    )


def finish_angles(name: str, sums: AngleSums) -> AnglesResult:
    """Turn sums into means."""
    counts = sums.own.sum()
    if not bool(counts):
        warn_undefined(name, "no example was given; the means are NaN")
    edges = torch.linspace(0, 180, len(sums.own) + 1, dtype=torch.double, device=counts.device)
    return AnglesResult(
        own=sums.own,
        hardest=sums.hardest,
        edges=edges,
        own_mean=sums.own_total / counts,
        hardest_mean=sums.hardest_total / counts,
        beyond=sums.past.double() / counts,
    )


def _degrees(gap: Tensor) -> Tensor:
    gap = gap.clamp(0.0, 2.0)
    return torch.rad2deg(2 * torch.atan2(gap.sqrt(), (2 - gap).sqrt()))


def _count(degrees: Tensor, bins: int) -> Tensor:
    place = (degrees * (bins / 180)).floor().clamp(0, bins - 1).long()
    return torch.bincount(place, minlength=bins)
