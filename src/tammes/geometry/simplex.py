"""Regular simplex, the optimal arrangement for every margin loss, and orthoplex."""

import torch
from torch import Tensor


def simplex(count: int, size: int, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Unit vectors that all make the same, largest possible angle with each other.

    .. math:: w_i\cdot w_j = -\frac{1}{k-1}\quad (i\ne j),\qquad \sum_i w_i = 0

    Unique up to an orthogonal map; it exists for :math:`k \le d + 1` points.

    Args:
        count: number :math:`k` of points, at least 2.
        size: dimension :math:`d`, at least ``count - 1``; the coordinates beyond are zero.
        dtype: dtype of the result; torch's default if not given.

    Returns:
        The points, shape ``(count, size)``.

    Example:
        >>> points = simplex(3, 2)
        >>> (points @ points.T).round(decimals=4)
        tensor([[ 1.0000, -0.5000, -0.5000],
                [-0.5000,  1.0000, -0.5000],
                [-0.5000, -0.5000,  1.0000]])

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, Lemma 1.
    """
    if count < 2 or size < count - 1:
        raise ValueError(
            f"simplex expects 2 <= count <= size + 1, got count={count} and size={size}"
        )
    # Helmert's matrix: an orthonormal basis of the complement of (1, ..., 1).
    row = torch.arange(1, count, dtype=torch.double)[:, None]
    column = torch.arange(count, dtype=torch.double)
    basis = (column < row).double() - row * (column == row)
    basis = basis / (row * (row + 1)).sqrt()
    points = torch.zeros(count, size, dtype=torch.double)
    points[:, : count - 1] = basis.T * (count / (count - 1)) ** 0.5
    return points.to(torch.get_default_dtype() if dtype is None else dtype)


def orthoplex(count: int, size: int, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Axes and their opposites: up to :math:`2d` points, all at least a right angle apart.

    Optimal for :math:`d + 1 < k \le 2d` (Rankin), though not uniquely; up to :math:`d + 1` points
    :func:`simplex` is better.

    Args:
        count: number :math:`k` of points, at least 2.
        size: dimension :math:`d`, at least ``count / 2``.
        dtype: dtype of the result; torch's default if not given.

    Returns:
        The points, shape ``(count, size)``: first the axes, then their opposites.

    Example:
        >>> orthoplex(3, 2)
        tensor([[ 1.,  0.],
                [ 0.,  1.],
                [-1., -0.]])

    References:
        Rankin, The Closest Packing of Spherical Caps in n Dimensions, 1955.
    """
    if not 2 <= count <= 2 * size:
        raise ValueError(f"orthoplex expects 2 <= count <= 2 * size, got {count=} and {size=}")
    axes = torch.eye(size, dtype=torch.get_default_dtype() if dtype is None else dtype)
    return torch.cat([axes, -axes])[:count]
