"""Largest sample margin for given prototypes: distance of each to the hull of the others."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_EPS = torch.finfo(torch.double).eps


@dataclass(frozen=True, eq=False)
class LargestSampleMargin:
    """Best features for given prototypes.

    Attributes:
        margin: largest possible sample margin of an example of each class, shape ``(C,)``.
        features: unit feature with that margin, shape ``(C, D)``; zero if there is none.
        gap: difference between the margin of the feature and the distance to the hull, shape
            ``(C,)``: the true optimum is at most that much larger.

    Example:
        >>> best = largest_sample_margin(torch.eye(2))
        >>> best.margin, best.features
        (tensor([1.4142, 1.4142], dtype=torch.float64), tensor([[ 0.7071, -0.7071],
                [-0.7071,  0.7071]], dtype=torch.float64))
    """

    margin: Tensor
    features: Tensor
    gap: Tensor


def largest_sample_margin(prototypes: Tensor) -> LargestSampleMargin:
    r"""Largest sample margin for fixed prototypes, and the features that reach it.

    .. math:: \max_{\lVert z\rVert\le 1}\min_{j\ne y}(w_y - w_j)\cdot z
              = \mathrm{dist}\bigl(w_y,\ \mathrm{conv}\{w_j\}_{j\ne y}\bigr)

    reached at :math:`z \propto w_y - p` with :math:`p` the point of the hull nearest to
    :math:`w_y`. (The paper has the centroid of the nearest prototypes for :math:`p`, which is
    correct only for symmetric arrangements.) The nearest point is found by Wolfe's algorithm, for
    all classes at once, in double precision.

    Args:
        prototypes: shape ``(C, D)``, not normalized: pass unit rows for a cosine head.

    Returns:
        The :class:`LargestSampleMargin`, in double precision. A prototype inside the hull of the
        others has margin zero and no feature.

    Example:
        >>> best = largest_sample_margin(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]))
        >>> best.margin
        tensor([1.4142, 1.4142, 1.0000], dtype=torch.float64)

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, Theorem 2, corrected; Wolfe,
        Finding the Nearest Point in a Polytope, Mathematical Programming 1976.
    """
    if prototypes.ndim != 2 or len(prototypes) < 2:
        raise ValueError(
            "largest_sample_margin expects prototypes of shape (C, D) with C of 2 or more, "
            f"got {tuple(prototypes.shape)}"
        )
    prototypes = prototypes.detach().double()
    if not bool(prototypes.isfinite().all()):
        raise ValueError("largest_sample_margin expects finite prototypes, got NaN or infinity")
    # A shift or scaling of all prototypes changes only the unit of length.
    prototypes = prototypes - prototypes.mean(0)
    unit_length = prototypes.norm(dim=1).amax().clamp_min(torch.finfo(torch.double).tiny)
    prototypes = prototypes / unit_length
    # A class may need as many others as there are dimensions; blocks limit the memory.
    count, size = prototypes.shape
    block = max(1, 2**24 // max(count, size * min(size + 1, count)))
    own = torch.arange(count, device=prototypes.device)
    parts = [_shortest(prototypes, some) for some in own.split(block)]
    shortest, lowest = (torch.cat(part) for part in zip(*parts, strict=True))
    length = shortest.norm(dim=1)
    # Below this the direction is only rounding, and the prototype counts as inside the hull.
    outside = length > 1e3 * _EPS
    features = torch.where(outside[:, None], shortest / length[:, None], 0.0)
    margin = torch.where(outside, lowest / length, 0.0)
    return LargestSampleMargin(margin * unit_length, features, (length - margin) * unit_length)


def _shortest(prototypes: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Shortest vector in the hull of ``w_y - w_j``, and its smallest product with any of them.

    Wolfe's algorithm. Every class ``y`` in ``own`` keeps an active set of others, with weights. If
    the shortest vector in the plane through them has no negative weight, it is the new point, and
    the vector with the smallest product joins the set; else the weights move towards it until the
    first one is zero, and that one leaves the set. Each class is at its own stage.
    """
    size = prototypes.shape[1]
    result, product = prototypes.new_zeros(len(own), size), prototypes.new_zeros(len(own))
    live = torch.arange(len(own), device=own.device)
    first = _lowest(prototypes, own, prototypes[own])[1]
    chosen, weight = first[:, None], prototypes.new_ones(len(own), 1)
    active = torch.ones_like(chosen, dtype=torch.bool)
    shortest = prototypes.new_full((len(own),), math.inf)
    while len(live):
        steps = prototypes[own[live]][:, None] - prototypes[chosen]
        plane = _shortest_in_plane(steps, active)
        negative = active & (plane <= 0)
        inside = ~negative.any(1)
        # If the point in the plane is outside, move towards it until the first weight is zero.
        share = torch.where(negative, weight / (weight - plane), math.inf)
        part, leaving = share.min(1)
        weight = weight + torch.where(inside, 1.0, part.nan_to_num(0.0))[:, None] * (plane - weight)
        left = torch.nn.functional.one_hot(leaving, weight.shape[1]).bool() & ~inside[:, None]
        active = active & ~left & ((weight > 0) | inside[:, None])
        weight = torch.where(active, weight, 0.0)

        point = (weight[:, :, None] * steps).sum(1)
        square = point.square().sum(1)
        low, index = _lowest(prototypes, own[live], point)
        better = inside & (square < shortest)
        result[live[better]], product[live[better]] = point[better], low[better]
        shortest = torch.where(better, square, shortest)
        # Done if nothing is lower than the point itself, if no more can join, or if rounding
        # stops the progress.
        done = inside & ((low >= square - 4 * _EPS) | (active.sum(1) > size) | ~better)

        # Keep the active ones first, so that tables are only as wide as the largest set.
        order = (~active).byte().argsort(dim=1, stable=True)
        width = int(active.sum(1).max())
        chosen, weight, active = (
            torch.nn.functional.pad(table.gather(1, order)[:, :width], (0, 1))
            for table in (chosen, weight, active)
        )
        slot = active.sum(1)
        joins = (inside & ~done).nonzero().squeeze(1)
        chosen[joins, slot[joins]], active[joins, slot[joins]] = index[joins], True
        keep = ~done
        live, chosen, weight, active = live[keep], chosen[keep], weight[keep], active[keep]
        shortest = shortest[keep]
    return result, product


def _lowest(prototypes: Tensor, own: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest product of each point with ``w_y - w_j`` over the other classes, and its j."""
    along = (point @ prototypes.T).scatter(1, own[:, None], -math.inf)
    index = along.max(1).indices
    return (point * (prototypes[own] - prototypes[index])).sum(1), index


def _shortest_in_plane(steps: Tensor, active: Tensor) -> Tensor:
    """Weights (sum one, any sign) of the shortest vector in the plane through the steps.

    Active steps come first. Differences from the first one are solved by QR, which is twice as
    accurate (in digits) as a Gram matrix.
    """
    first, others = steps[:, 0], active[:, 1:]
    if not others.shape[1]:
        return active.to(steps)
    differences = torch.where(others[:, :, None], steps[:, 1:] - first[:, None], 0.0).mT
    size, width = differences.shape[1:]
    if width > size:
        # One more than the dimension is never needed, only kept free.
        differences, others = differences[:, :, :size], others[:, :size]
    q, r = torch.linalg.qr(differences)
    diagonal = r.diagonal(dim1=1, dim2=2)
    # Unused or numerically dependent columns must not cause a division by zero.
    diagonal.copy_(torch.where(diagonal.abs() > _EPS, diagonal, 1.0))
    right = -(q.mT @ first[:, :, None])
    rest = torch.linalg.solve_triangular(r, right, upper=True).squeeze(2)
    rest = torch.where(others, rest, 0.0)
    weight = torch.cat([1 - rest.sum(1, keepdim=True), rest], 1)
    return torch.nn.functional.pad(weight, (0, steps.shape[1] - weight.shape[1]))
