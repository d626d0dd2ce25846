"""Optimal packings: directions whose smallest angle is as large as possible."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tammes.geometry.bounds import LargestClassMargin, largest_class_margin
from tammes.geometry.simplex import orthoplex, simplex
from tammes.metrics.functional import class_margin
from tammes.similarity import unit

_BLOCK = 2**24
"""Number of pairs held in memory at once."""


def _blocks(rows: int, width: int) -> Iterator[slice]:
    height = max(1, _BLOCK // width)
    return (slice(start, min(start + height, rows)) for start in range(0, rows, height))


def riesz_energy(points: Tensor, exponent: float) -> Tensor:
    r"""Riesz energy of points, to the power of one over the exponent.

    .. math:: E_t = \Bigl(\sum_{i\ne j}\lVert w_i - w_j\rVert^{-t}\Bigr)^{1/t}

    As :math:`t\to\infty` it tends to one over the smallest distance, so that its minimum becomes
    the best packing; for :math:`k \le d+1` points on the sphere the simplex is the minimum for
    every :math:`t`. Computed as a log-sum-exp, block by block, backward included.

    Args:
        points: shape ``(k, d)``, at least two.
        exponent: :math:`t`, above 0.

    Returns:
        The energy, a scalar; infinite where points coincide.

    Example:
        >>> riesz_energy(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 1.0)
        tensor(1.)

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, Lemma 1 (where root and
        minimum are missing in print).
    """
    if points.ndim != 2 or len(points) < 2:
        raise ValueError(
            "riesz_energy expects points of shape (k, d) with k of 2 or more, "
            f"got {tuple(points.shape)}"
        )
    if not exponent > 0:
        raise ValueError(f"riesz_energy expects an exponent above 0, got {exponent}")

    def potential(rows: slice) -> Tensor:
        distance = torch.cdist(
            points[rows], points, compute_mode="donot_use_mm_for_euclid_dist"
        ).clone()
        _own(distance, rows).fill_(math.inf)
        return (-exponent * distance.log()).logsumexp((0, 1))

    blocks = [
        checkpoint(potential, rows, use_reentrant=False)
        for rows in _blocks(len(points), len(points))
    ]
    return (torch.stack(blocks).logsumexp(0) / exponent).exp()


@dataclass(frozen=True, eq=False)
class Packing:
    """Arrangement of directions, with its quality.

    Attributes:
        points: unit vectors, shape ``(k, d)``.
        angle: their smallest angle, in radians.
        bound: the largest possible angle, as far as known.

    Example:
        >>> found = pack(4, 3)
        >>> round(found.degrees, 4), found.bound.bound, abs(found.gap) < 1e-12
        (109.4712, 'simplex', True)
    """

    points: Tensor
    angle: float
    bound: LargestClassMargin

    @property
    def degrees(self) -> float:
        """Smallest angle in degrees."""
        return math.degrees(self.angle)

    @property
    def gap(self) -> float:
        """Difference of the bound and the angle, in radians."""
        return self.bound.angle - self.angle


def pack(
    count: int,
    size: int,
    *,
    seed: int = 0,
    starts: int | None = None,
    steps: int = 3000,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Packing:
    r"""Find directions with the largest possible smallest angle.

    In closed form where there is one: the simplex for :math:`k \le d+1`, the orthoplex for
    :math:`k \le 2d`, the circle for :math:`d = 2`. Otherwise several random starts minimize

    .. math:: \frac1s\log\sum_{i\ne j} e^{s\,w_i\cdot w_j},

    which tends to the largest cosine, while the sharpness :math:`s` grows. A soft start finds
    regular arrangements and a sharp one others (ten points on the sphere get stuck at 66.08° with
    soft starts), so the starts begin at different sharpness. The best one is returned.

    Args:
        count: number :math:`k` of points, at least 2.
        size: dimension :math:`d`, at least 1.
        seed: seed of the random starts.
        starts: number of starts; by default 64, and fewer for more than 32 points, down to 4.
        steps: number of steps of each start.
        device: device of the computation and of the result.
        dtype: dtype of the computation. In ``float32`` the angle is accurate to about 0.01°.

    Returns:
        The best :class:`Packing` found.

    Example:
        >>> packing = pack(8, 3, starts=8, steps=1000)
        >>> round(packing.degrees, 3), packing.bound.exact
        (74.858, True)
    """
    if count < 2 or size < 1:
        raise ValueError(
            f"pack expects count of 2 or more and size of 1 or more, got {count=} and {size=}"
        )
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"pack expects dtype float32 or float64, got {dtype}")
    bound = largest_class_margin(count, size)
    if starts is None:
        starts = max(4, min(64, 2**16 // count**2))
    if starts < 1 or steps < 1:
        raise ValueError(f"pack expects starts and steps of 1 or more, got {starts=} and {steps=}")
    if bound.bound == "simplex":
        points = simplex(count, size, dtype=dtype)
    elif bound.bound == "orthoplex":
        points = orthoplex(count, size, dtype=dtype)
    elif bound.bound == "circle":
        turn = torch.arange(count, dtype=torch.double) * (2 * math.pi / count)
        points = torch.stack([turn.cos(), turn.sin()], 1)
    elif bound.bound == "line":
        points = torch.ones(count, 1, dtype=dtype)
        points[1::2] = -1
    else:
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(starts, count, size, generator=generator, dtype=torch.double)
        return _best(_anneal(unit(points).to(device, dtype), steps), bound)
    return _best(points.to(device, dtype)[None], bound)


def _best(candidates: Tensor, bound: LargestClassMargin) -> Packing:
    points = candidates[int(_largest_cosine(candidates).argmin())].clone()
    return Packing(points, math.radians(float(class_margin(points).angle)), bound)


def _largest_cosine(points: Tensor) -> Tensor:
    """Largest cosine of ``(starts, k, d)`` unit vectors, shape ``(starts,)``, by blocks of rows."""
    starts, count, _ = points.shape
    largest = []
    for rows in _blocks(count, starts * count):
        cosine = points[:, rows] @ points.mT
        _own(cosine, rows).fill_(-math.inf)
        largest.append(cosine.amax((1, 2)))
    return torch.stack(largest).amax(0)


def _anneal(points: Tensor, steps: int) -> Tensor:
    """Move ``(starts, k, d)`` unit vectors apart, independently for each start."""
    starts = len(points)
    first = torch.logspace(math.log10(5), math.log10(200), starts).to(points)
    last = 1e6 if points.dtype == torch.float64 else 1e4
    momentum, square = torch.zeros_like(points), points.new_zeros(starts)
    for step in range(steps):
        # At sharpness s the curvature is s too, so steps are in units of 1/s. The gradient is
        # divided by its running magnitude, as in Adam, but with one number per start, which
        # does not depend on the axes.
        sharpness = first * (last / first) ** (step / max(1, steps - 1))
        gradient = _push(points, sharpness)
        gradient = gradient - (gradient * points).sum(-1, keepdim=True) * points
        momentum = 0.9 * momentum + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient.square().sum(-1).mean(-1)
        size = (square / (1 - 0.99 ** (step + 1))).sqrt() * (1 - 0.9 ** (step + 1))
        stride = 5 / (sharpness * size.clamp_min(torch.finfo(points.dtype).tiny))
        points = unit(points - stride[:, None, None] * momentum)
    return points


def _push(points: Tensor, sharpness: Tensor) -> Tensor:
    """Gradient of the log-sum-exp of all scaled cosines, ``(starts, k, d)``, by blocks of rows."""
    starts, count, _ = points.shape
    height, pushes, masses = sharpness[:, None, None], [], []
    for rows in _blocks(count, starts * count):
        score = height * (points[:, rows] @ points.mT)
        _own(score, rows).fill_(-math.inf)
        top = score.amax(-1, keepdim=True)
        weight = (score - top).exp_()
        total = weight.sum(-1, keepdim=True)
        pushes.append(weight @ points / total)
        masses.append(top + total.log())
    # Softmax of each row, weighted by the row's share of the whole sum.
    return 2 * torch.cat(masses, 1).softmax(1) * torch.cat(pushes, 1)


def _own(block: Tensor, rows: slice) -> Tensor:
    """View of the entries that pair a row with itself, in a block of rows."""
    return block.diagonal(rows.start, -2, -1)
