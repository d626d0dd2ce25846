"""Two ways over the scores in plain torch: whole rows of them, or blocks of classes."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tammes.kernels.merge import merge
from tammes.kernels.streamed.prototype_blocks import Keys
from tammes.kernels.streamed.score_block import NUMBERS, Block


class Rows(NamedTuple):
    """A block of rows, as scores are made of it.

    Attributes:
        query: times the scale, shape ``(n, D)``.
        offset: added to all scores of a row, shape ``(n,)``, or none.
        own: place of the own class, -1 where it is not here, shape ``(n,)``.
        threshold: of ``excess``, shape ``(n,)``, or none.
    """

    query: Tensor
    offset: Tensor | None
    own: Tensor
    threshold: Tensor | None


class Found(NamedTuple):
    """What the scores of a block of rows were reduced to.

    Attributes:
        numbers: by name, shape ``(n,)`` each.
        place: of the hardest other class, shape ``(n,)``, where it is read.
        active: how many classes are over the threshold, shape ``(n,)``, where that is read.
    """

    numbers: dict[str, Tensor]
    place: Tensor | None
    active: Tensor | None


class Back(NamedTuple):
    """What comes back to a block of rows, not weighted.

    Attributes:
        query: shape ``(n, D)``.
        offset: shape ``(n,)``, where rows have an offset.
        scale: through the classes' offsets, shape ``(n,)``, where they have any.
    """

    query: Tensor
    offset: Tensor | None
    scale: Tensor | None


class Engine(Protocol):
    """From queries to numbers, and from their gradients back: what :class:`OnePass` drives."""

    def forward(self, rows: Rows) -> Found:
        """Reduce the scores of some rows."""

    def backward(self, rows: Rows, wanted: dict[str, Tensor | None], weights: Tensor) -> Back:
        """Multiply back the gradient of the rows last reduced.

        Args:
            rows: the same rows.
            wanted: gradient of each of their numbers, shape ``(n,)``.
            weights: of the rows, shape ``(n,)``, for what they add to the classes' gradients.
        """

    def close(self) -> None:
        """Forget everything but the gradients, once all rows are done."""

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gradients of the prototypes and of what is added to similarities, times a factor."""


class WholeRows:
    """All scores of a block of rows in one scratch, which becomes their gradient: three products.

    Args:
        keys: of the classes.
        reads: which numbers are wanted.
        counts: how many classes each prototype stands for, shape ``(C,)``, or one each.
        there: which classes are not masked, shape ``(C,)``, or all of them.
        longest: most rows of a block.
        shared: whether the scratch lies in the memory of the keys' gradient, as its first
            columns: a block of classes is copied out just before its gradient is written there.
    """

    def __init__(
        self,
        keys: Keys,
        reads: frozenset[str],
        counts: Tensor | None,
        there: Tensor | None,
        *,
        longest: int,
        shared: bool,
    ) -> None:
        self.keys, self.reads, self.shared = keys, reads, shared
        self.counts, self.there = counts, there
        if shared and keys.gradient is not None:
            self.scratch = keys.gradient[:, :longest].T
        else:
            like = keys.d_offsets
            self.scratch = torch.empty(longest, len(like), dtype=like.dtype, device=like.device)

    def forward(self, rows: Rows) -> Found:
        """Fill the scratch and reduce it."""
        scores = self.scratch[: len(rows.own)]
        offsets = [
            self.keys.fill(scores[:, block], rows.query, rows.offset, block)
            for block in self.keys.blocks
        ]
        there = [offset for offset in offsets if offset is not None]
        self.offsets = torch.cat(there) if there else None
        if scores.shape[1] == 0:
            return nothing_here(rows, self.reads)
        # The one before goes first.
        self.block: Block | None = None
        self.block = Block(scores, rows.own, self.reads, self.counts, rows.threshold, self.there)
        return Found(self.block.numbers, self.block.place, self.block.active)

    def backward(self, rows: Rows, wanted: dict[str, Tensor | None], weights: Tensor) -> Back:
        """Overwrite the scratch with its gradient and multiply it back."""
        keys = self.keys
        d_query = torch.zeros_like(rows.query)
        if self.scratch.shape[1] == 0:
            return Back(d_query, None if rows.offset is None else d_query[:, 0], None)
        assert self.block is not None
        gradient = self.block.scores
        factor = self.block.overwrite_with_gradient(wanted)
        heavy = factor * weights
        # Before multiplying back, which may write over the scratch.
        d_row = None if rows.offset is None else factor * gradient.sum(1)
        d_scale = None
        if self.offsets is not None:
            d_scale = factor * (gradient @ self.offsets)
            keys.d_offsets += keys.scale * (heavy @ gradient)
        needs_query = keys.needs.features or keys.needs.scale
        heavy_query, add = rows.query * heavy[:, None], keys.written
        for block in keys.blocks:
            piece = gradient[:, block].clone() if self.shared else gradient[:, block]
            keys.back(piece, heavy_query, block, d_query if needs_query else None, add=add)
        return Back(d_query.mul_(factor[:, None]), d_row, d_scale)

    def close(self) -> None:
        """Forget the scratch."""
        self.__dict__.pop("scratch", None)
        self.__dict__.pop("block", None)
        self.keys.kept.clear()

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """What was gathered."""
        return self.keys.finish(factor)


class ClassBlocks:
    """Scores of all rows against one block of classes at a time, made again in backward.

    No row of all scores ever exists. A fourth product is the price.

    Args:
        keys: of the classes.
        reads: which numbers are wanted.
        counts: how many classes each prototype stands for, shape ``(C,)``, or one each.
        there: which classes are not masked, shape ``(C,)``, or all of them.
    """

    def __init__(
        self, keys: Keys, reads: frozenset[str], counts: Tensor | None, there: Tensor | None
    ) -> None:
        self.keys, self.reads, self.counts, self.there = keys, reads, counts, there

    def forward(self, rows: Rows) -> Found:
        """Merge the numbers of every block of classes."""
        merged: dict[str, Tensor] = {}
        top = place = active = None
        for block in self.keys.blocks:
            part, _ = self._block(rows, block)
            both = {n: torch.stack([merged[n], v]) for n, v in part.numbers.items() if merged}
            merged = merge(both) if both else part.numbers
            if part.active is not None:
                active = part.active if active is None else active + part.active
            if part.place is not None:
                here = part.place + block.start
                if top is None or place is None:
                    top, place = part.top, here
                else:
                    # The first of several equal ones stays.
                    place = torch.where(part.top > top, here, place)
                    top = torch.maximum(part.top, top)
            del part
        if not self.keys.blocks:
            return nothing_here(rows, self.reads)
        self.numbers = merged
        return Found(merged, place, active)

    def backward(self, rows: Rows, wanted: dict[str, Tensor | None], weights: Tensor) -> Back:
        """Make every block again, and its gradient by the chain rule of the merge."""
        keys = self.keys
        d_query = torch.zeros_like(rows.query)
        d_row = None if rows.offset is None else torch.zeros_like(d_query[:, 0])
        d_scale = None
        for block in keys.blocks:
            part, offset = self._block(rows, block)
            gradient = part.scores
            factor = part.overwrite_with_gradient(self._of_part(part, wanted))
            heavy = factor * weights
            if d_row is not None:
                d_row += factor * gradient.sum(1)
            if offset is not None:
                d_scale = torch.zeros_like(factor) if d_scale is None else d_scale
                d_scale += factor * (gradient @ offset)
                keys.d_offsets[block] += keys.scale * (heavy @ gradient)
            d_part = torch.zeros_like(rows.query)
            keys.back(gradient, rows.query * heavy[:, None], block, d_part, add=False)
            d_query += d_part * factor[:, None]
            del part, gradient
        return Back(d_query, d_row, d_scale)

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """What was gathered."""
        return self.keys.finish(factor)

    def _block(self, rows: Rows, block: slice) -> tuple[Block, Tensor | None]:
        size = block.stop - block.start
        scores = rows.query.new_empty(len(rows.own), size)
        offset = self.keys.fill(scores, rows.query, rows.offset, block)
        here = (rows.own >= block.start) & (rows.own < block.stop)
        own = torch.where(here, rows.own - block.start, -1)
        counts = None if self.counts is None else self.counts[block]
        there = None if self.there is None else self.there[block]
        return Block(scores, own, self.reads, counts, rows.threshold, there), offset

    def _of_part(self, part: Block, wanted: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        if not part.has_softmax:
            return wanted
        others, expected = wanted.get("others"), wanted.get("expected")
        total = self.numbers["others"]
        share = (part.numbers["others"] - torch.where(total > float("-inf"), total, 0.0)).exp()
        if expected is not None:
            apart = part.numbers["expected"] - self.numbers["expected"]
            others = expected * apart if others is None else others + expected * apart
            expected = expected * share
        return wanted | {"others": None if others is None else others * share, "expected": expected}


def nothing_here(rows: Rows, reads: frozenset[str]) -> Found:
    """The numbers of no class at all."""
    zero = torch.zeros_like(rows.query[:, 0])
    numbers = {name: zero for name in NUMBERS if name in reads}
    if "others" in numbers or "expected" in numbers:
        numbers["others"] = torch.full_like(zero, float("-inf"))
    place = torch.zeros_like(rows.own) if "hardest" in reads else None
    return Found(numbers, place, zero if "excess" in reads else None)
