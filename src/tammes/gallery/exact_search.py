"""Exact search for the most similar rows, in blocks."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from tammes.similarity import full_precision

_QUERIES = 512
"""Queries that are multiplied with a block of rows at a time."""
_SCORES = 32 * 2**20
"""Bytes of the scores of a block, about the size of a CPU cache; 16 times as many on a GPU."""
_GROUP = 64
"""Neighbouring scores whose maximum is taken first."""


def search_rows(
    query: Tensor, blocks: Callable[[], Iterable[Tensor]], top: int
) -> tuple[Tensor, Tensor]:
    """Find the rows with the largest inner products.

    Args:
        query: shape ``(Q, D)``.
        blocks: returns the rows in blocks of shape ``(n, D)``; called once per block of queries.
        top: number of rows K to find for each query, at most as many as there are.

    Returns:
        Inner products in descending order, and rows, both of shape ``(Q, K)``.
    """
    scores = query.new_empty(len(query), top)
    rows = torch.empty(len(query), top, dtype=torch.long, device=query.device)
    for first in range(0, len(query), _QUERIES):
        block = slice(first, first + _QUERIES)
        scores[block], rows[block] = _search(query[block], blocks(), top)
    return scores, rows


def _search(query: Tensor, blocks: Iterable[Tensor], top: int) -> tuple[Tensor, Tensor]:
    best = query.new_empty(len(query), 0)
    rows = torch.empty(len(query), 0, dtype=torch.long, device=query.device)
    for first, scores in score_blocks(query, blocks):
        values, places = largest(scores, min(top, scores.shape[1]))
        best, rows = torch.cat([best, values], 1), torch.cat([rows, places + first], 1)
        best, order = best.topk(min(top, best.shape[1]), dim=1)
        rows = rows.gather(1, order)
    return best, rows


def score_blocks(query: Tensor, blocks: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row of a block and its inner products, shape ``(Q, n)``.

    Blocks are joined until their products fill a buffer, which is reused for the next ones.
    """
    budget = _SCORES if query.device.type == "cpu" else 16 * _SCORES
    width = max(budget // (4 * max(len(query), 1)), 1)
    memory = query.new_empty(len(query), width)
    begin = filled = 0
    with full_precision(query.device):
        for part in (part for block in blocks for part in block.split(width)):
            if filled + len(part) > width:
                yield begin, memory[:, :filled]
                begin, filled = begin + filled, 0
            torch.mm(query, part.T, out=memory[:, filled : filled + len(part)])
            filled += len(part)
    yield begin, memory[:, :filled]


def largest(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row in descending order, and their columns.

    All of them are in the ``top`` groups of columns with the largest maxima, and finding a maximum
    is faster than sorting.
    """
    rows, width = scores.shape
    groups = width // _GROUP
    if groups < 4 * top:
        values, columns = scores.topk(top, dim=1)
        return values, columns
    grouped = scores[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    chosen = grouped.amax(2).topk(top, dim=1, sorted=False).indices
    columns = (chosen[:, :, None] * _GROUP + torch.arange(_GROUP, device=scores.device)).flatten(1)
    rest = torch.arange(groups * _GROUP, width, device=scores.device).expand(rows, -1)
    columns = torch.cat([columns, rest], 1)
    values, order = scores.gather(1, columns).topk(top, dim=1)
    return values, columns.gather(1, order)
