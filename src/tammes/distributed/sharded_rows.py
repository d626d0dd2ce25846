"""Prototypes sharded over the ranks by rows, for terms that are functions of all prototypes."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tammes.kernels.merge import scale_gradient
from tammes.similarity import Cosine, Similarity

if TYPE_CHECKING:
    from tammes.distributed.process_group import RankGroup
    from tammes.heads.head import Head


_COSINE = Cosine()


class ShardedRows:
    """Collectives over the rows of a sharded matrix of prototypes.

    A term on prototypes with an argument ``shards`` receives the rows of this rank, and calls these
    methods for whatever depends on the others; any other term receives all rows. If one process
    holds all rows, nothing is communicated.

    Every rank must compute the same value from the results. The gradient that arrives here is then
    already that of the whole loss, and goes on to the local rows without communication.

    Args:
        group: ranks that hold the rows, or ``None`` if this process holds them all.
        classes: number of classes of all ranks.
        centers: rows of a class.
        start: first class of this rank.
        cosines: cosines of features and classes, pooled over the rows of a class as the head does.

    Example:
        >>> shards, rows = ShardedRows(), torch.eye(2)
        >>> shards.all_reduce(rows.sum(0)) / shards.count(rows)
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        group: "RankGroup | None" = None,
        classes: int | None = None,
        centers: int = 1,
        start: int = 0,
        cosines: Similarity = _COSINE,
    ) -> None:
        self.group, self.classes, self.centers, self.start = group, classes, centers, start
        self.cosines = cosines

    @classmethod
    def of_head(cls, head: "Head") -> "ShardedRows":
        """Shards of the prototypes of a head."""
        centers, cosines = head.similarity.centers, head.similarity.over(_COSINE)
        if not head.is_sharded:
            return ALL_ROWS_LOCAL if centers == 1 else cls(centers=centers, cosines=cosines)
        start: int = head.start  # type: ignore[assignment]
        return cls(head.group, head.num_classes, centers, start, cosines)

    def count(self, rows: Tensor) -> int:
        """Number of rows of all ranks."""
        return len(rows) if self.classes is None else self.classes * self.centers

    def count_classes(self, rows: Tensor) -> int:
        """Number of classes of all ranks."""
        return self.count(rows) // self.centers

    def by_class(self, rows: Tensor) -> Tensor:
        """The rows of this rank by class, shape ``(c, K, D)``."""
        return rows.unflatten(0, (-1, self.centers))

    def for_local_rows(self, features: Tensor) -> Tensor:
        """Prepare gathered features for a computation with the local rows only.

        Gathering combines the ranks' gradients as if each were that of the whole loss; here each is
        only the part through the rank's own rows.
        """
        return features if self.group is None else scale_gradient(features, self.group.world_size)

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum over the ranks of a tensor that each rank computed from its own rows."""
        if self.group is None:
            return part
        total: Tensor = _AllReduce.apply(part, self.group)
        return total

    def all_gather(self, rows: Tensor) -> Tensor:
        """Rows of all ranks in the order of the classes, shape ``(C, ...)``."""
        if self.group is None:
            return rows
        gathered: Tensor = _AllGather.apply(rows, self.group)
        return gathered


ALL_ROWS_LOCAL = ShardedRows()
"""One process holds all prototypes."""


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: "RankGroup") -> Tensor:
        return group.all_reduce(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: "RankGroup") -> Tensor:
        counts = group.all_gather_ints(rows=len(rows))["rows"]
        max_rows = max(counts)
        padded = group.all_gather_rows(rows, max_rows).unflatten(0, (group.world_size, max_rows))
        start = sum(counts[: group.rank])
        ctx.local = slice(start, start + len(rows))
        return torch.cat([shard[:count] for shard, count in zip(padded, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.local], None
