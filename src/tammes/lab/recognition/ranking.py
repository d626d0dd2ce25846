"""First items of a ranking, for a few queries."""

import torch
from torch import Tensor

from tammes.lab.recognition.results import RankedItem
from tammes.metrics.functional.retrieval import Search, similarity_blocks


def first_items(
    search: Search, rows: Tensor, gallery: Tensor, similarity: str, count: int
) -> dict[int, tuple[RankedItem, ...]]:
    """Return the first ``count`` gallery items of some queries, by the place of the query.

    Items that a ranking ignores are left out; a wrong item is ahead of a match of equal similarity.
    ``gallery`` has the row of each gallery item among the examples.
    """
    keep = (~search.junk).nonzero().squeeze(1)
    scores, tie = similarity_blocks("ranking", search, similarity, keep)
    found: dict[int, tuple[RankedItem, ...]] = {}
    for row in rows.unique().tolist():
        values = scores(torch.tensor([row]))[0]
        own = search.gallery_ids[keep] == search.query_ids[row]
        match = own
        if search.query_cameras is not None and search.gallery_cameras is not None:
            match = own & (search.gallery_cameras[keep] != search.query_cameras[row])
        values = values.masked_fill(own & ~match, -torch.inf)
        ahead = values - tie * match
        order = ahead.argsort(descending=True, stable=True)[:count]
        order = order[values[order] > -torch.inf]
        found[row] = tuple(
            RankedItem(int(gallery[keep[place]]), float(values[place]), bool(match[place]))
            for place in order
        )
    return found


def one_of_each(order: Tensor, identities: Tensor, count: int) -> Tensor:
    """Return the first places of an order, at most one of each identity."""
    chosen: dict[int, int] = {}
    for place in order.tolist():
        chosen.setdefault(int(identities[place]), place)
        if len(chosen) == count:
            break
    return torch.tensor(list(chosen.values()), dtype=torch.long)
