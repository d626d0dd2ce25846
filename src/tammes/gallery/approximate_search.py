"""Approximate search for the most similar rows, with FAISS or usearch (extra ``search``)."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tammes.optional import require

Engine = Literal["faiss", "usearch"]
_NEIGHBOURS = 32
"""Edges of a node of the graph."""
_VISITED = 128
"""Candidates that a search keeps."""
_ALONE = 1024
"""Rows that one thread adds to an empty graph."""


class Recall(NamedTuple):
    """Agreement of an approximate search with the exact one; see :meth:`Gallery.search_with`.

    Attributes:
        recall: fraction of the exact results that it finds.
        queries: number of queries.
        top: number of results per query.
    """

    recall: float
    queries: int
    top: int


class SearchIndex(Protocol):
    """Index of unit rows."""

    def search(self, query: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """Return inner products in descending order, and rows, both of shape ``(Q, top)``.

        If the graph leads to fewer rows, the missing ones are -1, with a product of -inf.
        """


class FaissIndex:
    """HNSW index of FAISS."""

    def __init__(self, blocks: Iterable[Tensor], size: int) -> None:
        faiss: Any = require("faiss", extra="search")
        self.index = faiss.IndexHNSWFlat(size, _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        for block in blocks:
            self.index.add(block.cpu().numpy())

    def search(self, query: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """Return inner products in descending order, and rows, both of shape ``(Q, top)``."""
        self.index.hnsw.efSearch = max(_VISITED, top)
        scores, rows = self.index.search(query.cpu().numpy(), top)
        scores, rows = torch.from_numpy(scores), torch.from_numpy(rows)
        return scores.masked_fill_(rows < 0, -torch.inf), rows


class UsearchIndex:
    """HNSW index of usearch."""

    def __init__(self, blocks: Iterable[Tensor], size: int) -> None:
        usearch: Any = require("usearch.index", extra="search")
        self.index = usearch.Index(
            ndim=size,
            metric="ip",
            dtype="f32",
            connectivity=_NEIGHBOURS,
            expansion_search=_VISITED,
        )
        begin = 0
        for block in blocks:
            # Threads that add to a small graph miss each other's rows, and a search misses them.
            alone = max(0, _ALONE - begin)
            for rows, threads in ((block[:alone], 1), (block[alone:], 0)):
                if len(rows):
                    keys = torch.arange(begin, begin + len(rows))
                    self.index.add(keys.numpy(), rows.cpu().numpy(), threads=threads)
                    begin += len(rows)

    def search(self, query: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """Return inner products in descending order, and rows, both of shape ``(Q, top)``."""
        self.index.expansion_search = max(_VISITED, top)
        scores = torch.full((len(query), top), -torch.inf)
        rows = torch.full((len(query), top), -1)
        found = self.index.search(query.cpu().numpy(), top)
        width = found.keys.shape[-1]
        # A single query returns only what was found; several are padded with arbitrary numbers.
        counts = torch.tensor(getattr(found, "counts", [width]))
        reached = torch.arange(width) < counts[:, None]
        places = reached.nonzero(as_tuple=True)
        rows[places] = torch.from_numpy(found.keys.astype("int64")).view(-1, width)[reached]
        # Its distance is one minus the inner product.
        scores[places] = 1 - torch.from_numpy(found.distances).view(-1, width)[reached]
        return scores, rows


ENGINES: dict[str, type[FaissIndex] | type[UsearchIndex]] = {
    "faiss": FaissIndex,
    "usearch": UsearchIndex,
}
"""Index classes by the name of their package."""
