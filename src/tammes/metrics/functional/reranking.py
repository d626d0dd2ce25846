"""Re-rank a gallery by the neighbours that a query and an item have in common."""

from collections.abc import Callable

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import check_features, check_one_space
from tammes.similarity import directions

_ROWS = 512
"""Rows whose distances to all others are in memory at a time."""


@torch.no_grad()
def k_reciprocal(
    query: Tensor, gallery: Tensor, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Tensor:
    r"""Similarities re-ranked by k-reciprocal neighbours, for :func:`retrieval`.

    Two items are k-reciprocal neighbours if each is among the other's k nearest. An item's set
    consists of its :math:`k_1`-reciprocal neighbours, expanded by the :math:`k_1/2`-reciprocal
    neighbours of each of them if more than two thirds of those are already in the set. Weights
    :math:`V_{ij} \propto e^{-d_{ij}}` on this set, averaged over the :math:`k_2` nearest items,
    give a Jaccard distance:

    .. math::
        d^*_{qg} = (1-\lambda)\Bigl(1 - \frac{\sum_i\min(V_{qi}, V_{gi})}
        {\sum_i\max(V_{qi}, V_{gi})}\Bigr) + \lambda\, d_{qg},\qquad
        d_{ij} = \frac{\lVert x_i - x_j\rVert^2}{\max_l \lVert x_i - x_l\rVert^2}

    on unit features, as in the published code (an item is its own nearest neighbour; the fraction
    is strictly above two thirds; junk takes part). Neighbour lists are stored, not the distances of
    all queries and gallery items. The order of equally near items is undefined.

    Args:
        query: shape ``(Q, D)``.
        gallery: shape ``(G, D)``.
        k1: number of neighbours.
        k2: number of neighbours over which weights are averaged.
        weight: weight :math:`\lambda` of the original distance.

    Returns:
        Similarities :math:`-d^*`, shape ``(Q, G)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import k_reciprocal
        >>> query = torch.tensor([[1.0, 0.0]])
        >>> gallery = torch.tensor([[1.0, 0.1], [1.0, 0.3], [0.0, 1.0]])
        >>> k_reciprocal(query, gallery, k1=2, k2=1).argsort(descending=True)
        tensor([[0, 1, 2]])

    References:
        Zhong et al., Re-ranking Person Re-identification with k-reciprocal Encoding, CVPR 2017.
    """
    for what, features in (("query", query), ("gallery", gallery)):
        check_features("k_reciprocal", what, features)
    check_one_space("k_reciprocal", query, gallery, "gallery")
    query, gallery = directions(query.double()), directions(gallery.double())
    blocks = k_reciprocal_blocks(query, gallery, k1=k1, k2=k2, weight=weight)
    rows = torch.arange(len(query), device=query.device)
    return torch.cat([blocks(part) for part in rows.split(_ROWS)])


def k_reciprocal_blocks(
    query: Tensor, gallery: Tensor, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Callable[[Tensor], Tensor]:
    """Return a function from rows of queries to re-ranked similarities of unit features."""
    if k1 < 1 or k2 < 1 or not 0 <= weight <= 1:
        raise ValueError(
            f"k_reciprocal expects k1 and k2 of 1 or more and a weight from 0 to 1, "
            f"got {k1}, {k2} and {weight}"
        )
    items = torch.cat([query, gallery])
    size = len(items)
    nearest, farthest = _neighbours(items, max(k1 + 1, k2))
    index, value = _encode(items, nearest[:, : k1 + 1], farthest, round(k1 / 2))
    if k2 > 1:
        index, value = _average(index, value, nearest[:, :k2], size)
    starts = _row_starts(index // size, size)
    columns = index % size
    # The gallery's weights by column: the items that have a neighbour in common with a query.
    in_gallery = (index >= len(query) * size).nonzero().squeeze(1)
    in_gallery = in_gallery[columns[in_gallery].sort(stable=True).indices]
    column_starts = _row_starts(columns[in_gallery], size)
    gallery_rows, gallery_values = index[in_gallery] // size - len(query), value[in_gallery]

    def blocks(rows: Tensor) -> Tensor:
        entry, block_row = _ranges(starts[rows], starts[rows + 1])
        column = columns[entry]
        common, source = _ranges(column_starts[column], column_starts[column + 1])
        smaller = torch.minimum(value[entry][source], gallery_values[common])
        place = block_row[source] * len(gallery) + gallery_rows[common]
        shared = value.new_zeros(len(rows) * len(gallery)).index_add_(0, place, smaller)
        shared = shared.view(len(rows), -1)
        # Weights of a row sum to one, so the larger of two sum to 2 minus the smaller.
        jaccard = 1 - shared / (2 - shared)
        distance = (2 - 2 * (query[rows] @ gallery.T)) / farthest[rows, None]
        return -((1 - weight) * jaccard + weight * distance)

    return blocks


def _neighbours(items: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k nearest items of each, itself first, and the largest squared distance."""
    nearest, farthest = [], []
    for rows in torch.arange(len(items), device=items.device).split(_ROWS):
        distance = 2 - 2 * (items[rows] @ items.T)
        farthest.append(distance.amax(1))
        distance[torch.arange(len(rows), device=rows.device), rows] = -1
        nearest.append(distance.topk(min(k, len(items)), largest=False).indices)
    return torch.cat(nearest), torch.cat(farthest).clamp_min(torch.finfo(items.dtype).tiny)


def _encode(items: Tensor, nearest: Tensor, farthest: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Weights of each item's neighbours as sorted places ``row * N + column`` and values."""
    size = len(items)
    reciprocal = _reciprocal(nearest)
    short = nearest[:, : half + 1]
    short_reciprocal = _reciprocal(short)
    known = _places(nearest)[reciprocal].sort().values
    places = [known]
    for rows in torch.arange(size, device=items.device).split(_ROWS):
        theirs, valid = short[nearest[rows]], short_reciprocal[nearest[rows]]
        place = rows[:, None, None] * size + theirs
        shared = (_contains(known, place) & valid).sum(-1)
        joined = reciprocal[rows] & (3 * shared > 2 * valid.sum(-1))
        places.append(place[valid & joined[..., None]])
    index = torch.cat(places).unique()
    row, column = index // size, index % size
    pairs = zip(row.split(_ROWS), column.split(_ROWS), strict=True)
    value = torch.cat([torch.linalg.vecdot(items[some], items[other]) for some, other in pairs])
    value = torch.exp(-(2 - 2 * value) / farthest[row])
    return index, value / value.new_zeros(size).index_add(0, row, value)[row]


def _reciprocal(nearest: Tensor) -> Tensor:
    """Whether each neighbour has the item among its own."""
    rows = torch.arange(len(nearest), device=nearest.device)[:, None]
    return _contains(_places(nearest).view(-1).sort().values, nearest * len(nearest) + rows)


def _places(nearest: Tensor) -> Tensor:
    """Places ``row * N + column`` of neighbours, shape ``(N, k)``."""
    return torch.arange(len(nearest), device=nearest.device)[:, None] * len(nearest) + nearest


def _contains(known: Tensor, places: Tensor) -> Tensor:
    """Whether each place is among the sorted known ones."""
    found = torch.searchsorted(known, places).clamp_max(len(known) - 1)
    return known[found] == places


def _average(index: Tensor, value: Tensor, nearest: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean of the weights of each item's nearest items."""
    starts = _row_starts(index // size, size)
    source = nearest.reshape(-1)
    entry, origin = _ranges(starts[source], starts[source + 1])
    place = (origin // nearest.shape[1]) * size + index[entry] % size
    found, where = place.unique(return_inverse=True)
    total = value.new_zeros(len(found)).index_add_(0, where, value[entry])
    return found, total / nearest.shape[1]


def _row_starts(sorted_rows: Tensor, size: int) -> Tensor:
    """Index of the first entry of each row, and the number of entries, shape ``(size + 1,)``."""
    return torch.searchsorted(sorted_rows, torch.arange(size + 1, device=sorted_rows.device))


def _ranges(start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """All integers of some ranges, and the index of the range of each."""
    lengths = stop - start
    which = torch.arange(len(start), device=start.device).repeat_interleave(lengths)
    offset = start - (lengths.cumsum(0) - lengths)
    return torch.arange(len(which), device=start.device) + offset[which], which
