"""Engine of the streamed split: all rows against one block of classes at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tammes.kernels.merge import merge
from tammes.kernels.streamed.score_blocks import Back, Block, Found, Keys, Rows, added, nothing_here


class ClassBlocks:
    """Scores of all rows against one block of classes at a time, recomputed in backward.

    No row of C scores is ever in memory, at the price of a fourth matrix product.
    """

    def __init__(self, keys: Keys, reads: frozenset[str]) -> None:
        self.keys, self.reads = keys, reads

    def forward(self, rows: Rows) -> Found:
        """Compute and merge the numbers of all blocks of classes."""
        merged: dict[str, Tensor] = {}
        top = place = None
        for block in self.keys.blocks:
            part, _ = self._block(rows, block)
            both = {n: torch.stack([merged[n], v]) for n, v in part.numbers.items() if merged}
            merged = merge(both) if both else part.numbers
            if part.place is not None:
                here = part.place + block.start
                if top is None or place is None:
                    top, place = part.top, here
                else:
                    # Of several tied classes, the first one wins.
                    place = torch.where(part.top > top, here, place)
                    top = torch.maximum(part.top, top)
            del part
        if not self.keys.blocks:
            return nothing_here(rows, self.reads)
        self.numbers = merged
        return Found(merged, place)

    def backward(self, rows: Rows, wanted: dict[str, Tensor | None], weights: Tensor) -> Back:
        """Recompute every block, and its gradient by the chain rule through the merge."""
        keys = self.keys
        d_query = torch.zeros_like(rows.query)
        d_row = None if rows.offset is None else torch.zeros_like(d_query[:, 0])
        d_scale = None
        d_mapped: list[Tensor | None] = [None for _ in rows.mapped.numbers] if rows.mapped else []
        for block in keys.blocks:
            part, offset = self._block(rows, block)
            gradient = part.scores
            factor = part.overwrite_with_gradient(self._of_part(part, wanted))
            d_mapped = add_gradients(d_mapped, part.d_numbers)
            heavy = factor * weights
            if d_row is not None:
                d_row += factor * gradient.sum(1)
            if offset is not None:
                d_scale = torch.zeros_like(factor) if d_scale is None else d_scale
                d_scale += factor * (gradient @ offset)
                keys.d_offsets[block] += keys.scale * (heavy @ gradient)
            d_part = torch.zeros_like(rows.query)
            more = keys.back(gradient, rows.query * heavy[:, None], block, d_part, add=False)
            d_scale = added(d_scale, more, factor)
            d_query += d_part * factor[:, None]
            del part, gradient
        return Back(d_query, d_row, d_scale, d_mapped)

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the accumulated gradients."""
        return self.keys.finish(factor)

    def _block(self, rows: Rows, block: slice) -> tuple[Block, Tensor | None]:
        size = block.stop - block.start
        scores = rows.query.new_empty(len(rows.own), size)
        offset = self.keys.fill(scores, rows.query, rows.offset, block)
        here = (rows.own >= block.start) & (rows.own < block.stop)
        own = torch.where(here, rows.own - block.start, -1)
        counts = None if self.keys.counts is None else self.keys.counts[block]
        there = None if self.keys.there is None else self.keys.there[block]
        return Block(scores, own, self.reads, counts, rows.mapped, there), offset

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


def add_gradients(
    some: Sequence[Tensor | None], more: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Add gradients pairwise; ``None`` counts as zero."""
    pairs = zip(some, more, strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]
