"""Prototypes of which each rank has some: what a function of all of them can ask for."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tammes.distributed.process_group import Ranks
    from tammes.heads.head import Head


class Shards:
    """Sums over all prototypes, or all of them, where only some rows are here.

    A term on prototypes that has an argument ``shards`` is given the rows that are here, and asks
    for the rest itself; any other is given all rows. Where all are here anyway, everything is what
    it looks like.

    Each rank is to compute the same from what it gets. So the gradient that arrives there is
    already the whole one, and goes on to the rows that are here without being sent anywhere.

    Args:
        ranks: who has the others, or none.
        classes: number of rows in all.

    Example:
        >>> shards, rows = Shards(), torch.eye(2)
        >>> shards.sum(rows.sum(0)) / shards.count(rows)
        tensor([0.5000, 0.5000])
    """

    def __init__(self, ranks: "Ranks | None" = None, classes: int | None = None) -> None:
        self.ranks, self.classes = ranks, classes

    @classmethod
    def of(cls, head: "Head") -> "Shards":
        """Those of a head."""
        ranks = getattr(head, "ranks", None)
        return WHOLE if ranks is None or ranks.size == 1 else cls(ranks, head.num_classes)

    def count(self, rows: Tensor) -> int:
        """Number of rows in all."""
        return len(rows) if self.classes is None else self.classes

    def sum(self, part: Tensor) -> Tensor:
        """Sum over the ranks of what each has made of its rows."""
        if self.ranks is None:
            return part
        total: Tensor = _Sum.apply(part, self.ranks)
        return total

    def whole(self, rows: Tensor) -> Tensor:
        """All rows in the order of the classes, shape ``(C, ...)``."""
        if self.ranks is None:
            return rows
        everything: Tensor = _Whole.apply(rows, self.ranks)
        return everything


WHOLE = Shards()
"""All prototypes are here."""


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: "Ranks") -> Tensor:
        return ranks.sum(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: "Ranks") -> Tensor:
        counts = ranks.exchange(rows=len(rows))["rows"]
        longest = max(counts)
        filled = ranks.gather_rows(rows, longest).unflatten(0, (ranks.size, longest))
        start = sum(counts[: ranks.rank])
        ctx.mine = slice(start, start + len(rows))
        return torch.cat([some[:count] for some, count in zip(filled, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.mine], None
