"""Metrics of prototypes: the class margin, and the ratio of their norms."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import as_prototypes
from tammes.similarity import norm, unit

_GRAIN = 1024
"""Classes per block: the screening keeps one number for each pair of blocks."""
_SPAN = {"cuda": 8}
"""Blocks per side of a tile by device, 4 elsewhere: small products are slow on a GPU."""
_KEEP = 32
"""Number of pairs with equal cosines in float64 that are compared by their angles."""


class ClassMarginResult(NamedTuple):
    """Result of :func:`class_margin`.

    Attributes:
        angle: smallest angle between two prototypes, in degrees.
        pair: the two classes, the lower first, shape ``(2,)``.
        ratio: the angle over the optimum.
        optimum: largest possible class margin, in degrees, or an upper bound of it.
        exact: whether the optimum is known exactly.
    """

    angle: Tensor
    pair: Tensor
    ratio: Tensor
    optimum: Tensor
    exact: bool


class PrototypeNormsResult(NamedTuple):
    """Result of :func:`prototype_norms`.

    Attributes:
        largest: norm of the longest prototype.
        smallest: norm of the shortest prototype.
        mean: mean of all norms.
        ratio: longest over shortest; 1 if all are equal, infinite if only some are zero.
    """

    largest: Tensor
    smallest: Tensor
    mean: Tensor
    ratio: Tensor


@torch.no_grad()
def class_margin(prototypes: Tensor) -> ClassMarginResult:
    r"""Smallest angle between two prototypes, and its ratio to the largest possible.

    .. math:: m_c(W) = \min_{i\ne j}\angle(w_i, w_j)

    Exact for any number of classes, without a C x C matrix: products of blocks in low precision
    give the largest cosine of each pair of blocks up to a proven error, and the blocks that can
    contain the overall largest are recomputed in float64. The angle of the closest pair is
    :math:`2\,\mathrm{atan2}(\lVert\hat w_i-\hat w_j\rVert, \lVert\hat w_i+\hat w_j\rVert)`, which
    is accurate near 0 and 180 degrees. Pairs whose cosines agree to the last digit of float64
    (below 1e-8 radians, or in a symmetric arrangement) may be interchanged. A zero prototype
    is orthogonal to all others. If a class has several prototypes, the angle is the smallest
    between those of different classes.

    Args:
        prototypes: of at least two classes, of any norm, shape ``(C, D)`` or ``(C, K, D)``.

    Returns:
        The :class:`ClassMarginResult`; numbers in float64 on the device of the prototypes.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import class_margin
        >>> result = class_margin(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]))
        >>> result.angle, result.pair, result.ratio
        (tensor(90., dtype=torch.float64), tensor([0, 2]), tensor(0.7500, dtype=torch.float64))

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, class margin.
    """
    prototypes = as_prototypes("class_margin", prototypes, several=True)
    classes, *centers, size = prototypes.shape
    if classes < 2:
        raise ValueError(f"class_margin expects 2 prototypes or more, got {classes}")
    # Autocast would round products that must be exact.
    with torch.autocast(prototypes.device.type, enabled=False):
        radians, pair = _closest(prototypes.flatten(0, -2), *centers)
    # Imported here, so that importing the metrics does not import geometry.
    from tammes.geometry.bounds import largest_class_margin

    # Several prototypes of a class cannot be further apart than one of each.
    best = largest_class_margin(classes, size)
    angle = torch.rad2deg(radians)
    optimum = angle.new_tensor(best.degrees)
    return ClassMarginResult(
        angle=angle,
        pair=pair,
        # On a line, three classes always have margin zero.
        ratio=torch.where(optimum > 0, angle / optimum, 1.0),
        optimum=optimum,
        exact=bool(best.exact),
    )


@torch.no_grad()
def prototype_norms(prototypes: Tensor) -> PrototypeNormsResult:
    r"""Ratio of the longest to the shortest prototype.

    .. math:: r = \max_c\lVert w_c\rVert \,/\, \min_c\lVert w_c\rVert

    An inner product favours long prototypes; in long-tailed data these are the frequent classes.

    Args:
        prototypes: shape ``(C, D)`` or ``(C, K, D)``.

    Returns:
        The :class:`PrototypeNormsResult`.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import prototype_norms
        >>> prototype_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).ratio
        tensor(2.5000, dtype=torch.float64)

    References:
        Kang et al., Decoupling Representation and Classifier for Long-tailed Recognition,
        ICLR 2020, Section 4.2.
    """
    prototypes = as_prototypes("prototype_norms", prototypes, several=True)
    return finish_norms(norm_sums(prototypes))


class NormSums(NamedTuple):
    """Sums over ranks for a :class:`PrototypeNormsResult`."""

    total: Tensor
    counts: Tensor
    smallest: Tensor
    largest: Tensor


def norm_sums(prototypes: Tensor) -> NormSums:
    """Sum, number, smallest and largest of the norms; blocks keep float64 copies small."""
    rows = prototypes.flatten(0, -2)
    lengths = torch.cat([norm(block.double()) for block in rows.split(_GRAIN)])
    if not bool(lengths.isfinite().all()):
        raise ValueError("prototype_norms expects finite prototypes, got NaN or infinity")
    return NormSums(
        total=lengths.sum(),
        counts=torch.tensor(len(lengths), device=lengths.device),
        smallest=lengths.amin(),
        largest=lengths.amax(),
    )


def finish_norms(sums: NormSums) -> PrototypeNormsResult:
    """Compute mean and ratio from the sums."""
    equal = sums.largest == sums.smallest
    return PrototypeNormsResult(
        largest=sums.largest,
        smallest=sums.smallest,
        mean=sums.total / sums.counts,
        ratio=torch.where(equal, 1.0, sums.largest / sums.smallest),
    )


def _closest(prototypes: Tensor, centers: int = 1) -> tuple[Tensor, Tensor]:
    """Smallest angle in radians, and its pair: screen all blocks, then recompute a few.

    Args:
        prototypes: grouped by class, shape ``(C K, D)``.
        centers: number K per class.
    """
    # Blocks of whole classes.
    grain = max(_GRAIN // centers, 1) * centers
    screen, error = _screen(prototypes, grain, centers)
    top = float(screen.max())
    if not math.isfinite(top):
        raise ValueError("class_margin expects finite prototypes, got NaN or infinity")
    candidates = (screen >= top - 2 * error).nonzero()
    heights = screen[candidates[:, 0], candidates[:, 1]]
    order = heights.argsort(descending=True)
    best, pair, reached = candidates.new_tensor(math.inf, dtype=torch.double), candidates[:0], -2.0
    for (row, column), height in zip(
        candidates[order].tolist(), heights[order].tolist(), strict=True
    ):
        if height + error < reached:
            break
        angle, found = _closest_in_block(prototypes, row, column, grain, centers)
        if bool(angle < best):
            best, pair, reached = angle, found, math.cos(float(angle))
    return best, pair // centers


def _hide_own(tile: Tensor, centers: int) -> None:
    """Overwrite the cosines within each class, in a tile on the diagonal."""
    classes = len(tile) // centers
    tile.view(classes, centers, classes, centers).diagonal(dim1=0, dim2=2).fill_(-2)


def _screen(prototypes: Tensor, grain: int, centers: int) -> tuple[Tensor, float]:
    """Largest cosine of each pair of blocks up to a known error, and that error.

    Half precision on a GPU is fast, and its known error is enough to never discard a block that
    could contain the closest pair.
    """
    count, size = prototypes.shape
    blocks = -(-count // grain)
    dtype = torch.half if prototypes.is_cuda else torch.float
    span = grain * _SPAN.get(prototypes.device.type, 4)
    screen = prototypes.new_full((blocks, blocks), -math.inf, dtype=torch.float)
    for top in range(0, count, span):
        rows = _directions(prototypes, top, span).to(dtype)
        for left in range(top, count, span):
            columns = rows if left == top else _directions(prototypes, left, span).to(dtype)
            tile = rows @ columns.T
            if left == top:
                _hide_own(tile, centers)
            highest = _block_maxima(_block_maxima(tile, grain).T, grain).T
            row, column = top // grain, left // grain
            height, width = highest.shape
            screen[row : row + height, column : column + width] = highest
    # Blocks below the diagonal mirror those above.
    return screen.triu() + torch.full_like(screen, -math.inf).tril(-1), _screen_error(dtype, size)


def _block_maxima(tile: Tensor, grain: int) -> Tensor:
    """Maximum over each block of classes along a row; the last block may be shorter."""
    whole = tile.shape[1] // grain * grain
    maxima = [tile[:, :whole].unflatten(1, (-1, grain)).amax(2)]
    if whole < tile.shape[1]:
        maxima.append(tile[:, whole:].amax(1, keepdim=True))
    return torch.cat(maxima, 1)


def _screen_error(dtype: torch.dtype, size: int) -> float:
    """Bound on the rounding of a product of unit rows.

    By the Cauchy-Schwarz inequality, two units of roundoff in float32 for each term of the sum: one
    for the product and one for the norms. If factors and result have lower precision, a few of its
    units are added.
    """
    error = (2 * size + 8) * 2.0**-24
    if dtype == torch.half:
        return error + 8 * 2.0**-11
    # Missing in torch's type stubs.
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    if precision not in ("none", "ieee"):
        return error + 8 * 2.0**-9
    return error


def _directions(prototypes: Tensor, start: int, count: int) -> Tensor:
    block = prototypes[start : start + count]
    return unit(block.to(torch.promote_types(block.dtype, torch.float)))


def _closest_in_block(
    prototypes: Tensor, row: int, column: int, grain: int, centers: int
) -> tuple[Tensor, Tensor]:
    """Smallest angle in radians between a class of one block and one of another, in float64."""
    top, left = row * grain, column * grain
    rows = unit(prototypes[top : top + grain].double())
    columns = unit(prototypes[left : left + grain].double())
    cosine = rows @ columns.T
    if top == left:
        _hide_own(cosine, centers)
    height, place = cosine.flatten().topk(min(_KEEP, cosine.numel()))
    # If angles tie, the first pair must win, but topk does not keep the order of the classes.
    place, order = place.sort()
    i, j = place // len(columns), place % len(columns)
    angle = 2 * torch.atan2(norm(rows[i] - columns[j]), norm(rows[i] + columns[j]))
    angle = torch.where(height[order] > -1.5, angle, math.inf)
    best = angle.argmin()
    return angle[best], torch.stack([i[best] + top, j[best] + left])
