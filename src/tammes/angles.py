r"""Angles between unit vectors, exact at both ends.

An arc cosine loses all digits near 0 and :math:`\pi`. So an angle :math:`\theta` is given by two
numbers that keep them, :math:`h = 1-\cos\theta` (``gap``) and :math:`h' = 1+\cos\theta`
(``opposite``), see :class:`tammes.Split`.
"""

import math

import torch
from torch import Tensor


def angle(gap: Tensor, opposite: Tensor) -> Tensor:
    r"""Angle in radians, exact near 0 and near :math:`\pi`, where an arc cosine is not.

    .. math:: \theta = 2\,\mathrm{atan2}\bigl(\sqrt{h},\ \sqrt{h'}\bigr),\qquad
              h = 1-\cos\theta,\quad h' = 1+\cos\theta

    An angle within rounding of 0 or :math:`\pi` is returned as exactly that, with zero gradient.

    Args:
        gap: one minus the cosine, :math:`h`.
        opposite: one plus the cosine, :math:`h'`.

    Example:
        >>> angle(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([2.0, 1.0, 0.0]))
        tensor([0.0000, 1.5708, 3.1416])
    """
    return 2 * torch.atan2(_root(gap), _root(opposite))


def _root(half_square: Tensor) -> Tensor:
    """Square root; zero, with zero gradient, where unit vectors differ by rounding only."""
    rounding = rounding_of(half_square.dtype)
    return torch.where(half_square < rounding, 0.0, half_square.clamp_min(rounding).sqrt())


def sine(gap: Tensor, opposite: Tensor) -> Tensor:
    """Sine of the angle, with zero gradient where that of :func:`angle` is zero.

    The value there is slightly above zero, so that the derivative of the root stays finite.
    """
    square = torch.nn.functional.threshold(gap * opposite, rounding_of(gap.dtype), 1e-30)
    return square.sqrt()


def rounding_of(dtype: torch.dtype) -> float:
    """Half the squared distance of unit vectors that are equal up to rounding."""
    return float((8 * torch.finfo(dtype).eps) ** 2)


def shifted_cosine(gap: Tensor, opposite: Tensor, shift: float) -> Tensor:
    r"""Cosine of :math:`\theta + m` by the addition theorem, without the angle, made monotone.

    Past :math:`\pi`, or below 0 for a negative m, the cosine is mirrored at -1, or at 1.

    Args:
        gap: one minus the cosine of :math:`\theta`.
        opposite: one plus that cosine.
        shift: :math:`m`, between :math:`-\pi` and :math:`\pi`.

    Example:
        >>> shifted_cosine(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), math.pi / 6)
        tensor([-0.5000, -1.1340])
    """
    cosine = torch.rsub(gap, math.cos(shift), alpha=math.cos(shift))
    moved = torch.sub(cosine, sine(gap, opposite), alpha=math.sin(shift))
    side = _side(gap.detach(), shift)
    return torch.addcmul(side - 1 if shift > 0 else 1 - side, side, moved)


def shifted_cosine_and_slope(gap: Tensor, opposite: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    r"""Return :func:`shifted_cosine` and its derivative by :math:`\cos\theta`, without autograd."""
    square, side = gap * opposite, _side(gap, shift)
    root = square.sqrt()
    moved = torch.rsub(gap, math.cos(shift), alpha=math.cos(shift)).sub_(
        root, alpha=math.sin(shift)
    )
    value = torch.addcmul(side - 1 if shift > 0 else 1 - side, side, moved)
    cotangent = (opposite - gap).div_(root).masked_fill_(square <= rounding_of(gap.dtype), 0.0)
    return value, cotangent.mul_(math.sin(shift) / 2).add_(math.cos(shift)).mul_(side)


def _side(gap: Tensor, shift: float) -> Tensor:
    r"""1 where :math:`\theta + m` is between 0 and :math:`\pi`, -1 beyond, 0 on the border."""
    if shift > 0:
        return (1 + math.cos(shift) - gap).sign()
    return (gap - 1 + math.cos(shift)).sign()
