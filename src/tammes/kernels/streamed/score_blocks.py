"""Scores in blocks: reduced to a few numbers per row, then overwritten by their own gradient.

Two engines go over them in plain torch: :class:`WholeRows` holds all scores of a block of rows,
:class:`ClassBlocks` those of all rows for a block of classes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tammes.kernels.merge import merge
from tammes.kernels.streamed.prototype_blocks import Keys
from tammes.kernels.tiling import OF_SCORES
from tammes.split import SUMMED, OthersMap, columns, softplus

NUMBERS = ("others", "expected", "mean", *SUMMED)
"""Numbers that a kernel reduces scores to; of the hardest class it finds only the ``place``."""


class MappedRows(NamedTuple):
    """Map of the other scores of some rows.

    Attributes:
        function: maps similarities.
        numbers: the scale of the scores and the numbers that the function takes, shape ``(n,)``
            each. Those that require a gradient get one.
    """

    function: OthersMap
    numbers: tuple[Tensor, ...]

    def __call__(self, scores: Tensor) -> Tensor:
        """Map scores to scores."""
        scale, *numbers = columns(self.numbers)
        return self.function(scores / scale, *numbers) * scale

    def take(self, block: slice) -> "MappedRows":
        """The same for some of the rows; their numbers are leaves of a graph."""
        taken = (n[block].detach().requires_grad_(n.requires_grad) for n in self.numbers)
        return self._replace(numbers=tuple(taken))

    def gradient(self, scores: Tensor, wanted: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of scores and numbers from that of the mapped scores."""
        leaves, scores = self.take(slice(None)), scores.detach().requires_grad_()
        inputs = [scores, *(n for n in leaves.numbers if n.requires_grad)]
        with torch.enable_grad():
            mapped = leaves(scores)
        d_scores, *found = torch.autograd.grad(
            mapped, inputs, wanted, allow_unused=True, materialize_grads=True
        )
        rest = iter(found)
        return d_scores, [next(rest) if n.requires_grad else None for n in leaves.numbers]


class Block:
    """Scores of some rows against some classes.

    Args:
        scores: shape ``(n, k)``, finite, overwritten.
        own: place of each row's own class, -1 where it is not among these, shape ``(n,)``.
        reads: which numbers are wanted.
        counts: how many classes each column stands for, shape ``(k,)``, or one each.
        mapped: map of the scores of other classes, or none.
        there: which columns are not masked, shape ``(k,)``, or all of them.

    Attributes:
        numbers: of the other classes here, shape ``(n,)`` each: their log-sum-exp ``others``,
            the expectation ``expected`` under their softmax, the sum ``mean`` of their scores (not
            divided yet), and the sum ``softplus``.
        top: the largest score of another class, and ``place`` where it is.
    """

    def __init__(
        self,
        scores: Tensor,
        own: Tensor,
        reads: frozenset[str],
        counts: Tensor | None = None,
        mapped: MappedRows | None = None,
        there: Tensor | None = None,
    ) -> None:
        counts = None if counts is None else counts.to(scores.dtype)
        self.scores, self.counts, self.mapped = scores, counts, mapped
        # In a sum over scores themselves a masked class stands for none.
        self.many = counts
        if there is not None:
            self.many = there.to(scores.dtype) if counts is None else counts * there
        self.column, self.mine = own.clamp_min(0)[:, None], (own >= 0)[:, None]
        self.numbers: dict[str, Tensor] = {}
        self.d_numbers: list[Tensor | None] = []
        if mapped is not None:
            # The own class is not mapped: nothing may come of it, not even 0 times infinity.
            self._set_own(0.0)
            self.unmapped = scores.clone()
            scores.copy_(mapped(scores))
        if "mean" in reads:
            self._set_own(0.0)
            self.numbers["mean"] = scores.sum(1) if self.many is None else scores @ self.many
        # Masked, not subtracted from a sum over all: see tammes.split.split_matrix.
        if there is not None:
            scores.masked_fill_(~there, float("-inf"))
        self._set_own(float("-inf"))
        self.place: Tensor | None = None
        if "hardest" in reads:
            self.top, self.place = scores.max(1)
        else:
            self.top = scores.amax(1)
        # Where there is no other class, there is nothing to shift by.
        self.shift = torch.where(self.top > float("-inf"), self.top, 0.0)
        # Kept beside the exponentials that take their place.
        keep = not reads.isdisjoint(OF_SCORES)
        self.raw = scores.clone() if keep else None
        if self.raw is not None and "softplus" in reads:
            smooth = softplus(self.raw)
            self.numbers["softplus"] = smooth.sum(1) if counts is None else smooth @ counts
        self.has_softmax = not reads.isdisjoint(("others", "expected"))
        if self.has_softmax:
            scores.sub_(self.shift[:, None]).exp_()
            if counts is not None:
                scores.mul_(counts)
            self.sum = scores.sum(1)
            self.numbers["others"] = self.shift + self.sum.log()
        if self.raw is not None and "expected" in reads:
            # A product with the exponential, which is zero at the own class and at masked ones.
            self.raw.clamp_min_(torch.finfo(self.raw.dtype).min)
            mean = torch.linalg.vecdot(scores, self.raw) / self.sum
            self.numbers["expected"] = torch.where(self.sum > 0, mean, 0.0)

    def _set_own(self, value: float) -> None:
        kept = self.scores.gather(1, self.column)
        self.scores.scatter_(1, self.column, torch.where(self.mine, value, kept))

    def overwrite_with_gradient(self, wanted: dict[str, Tensor | None]) -> Tensor:
        """Write over each score its gradient, up to a factor of each row, which is returned.

        ``d_numbers`` is then the gradient of the numbers of the map, shape ``(n,)`` each.

        Args:
            wanted: gradient of each of the numbers, shape ``(n,)``.

        Returns:
            The factor, shape ``(n,)``: what is left for the short side of a product.
        """
        factor = self._overwrite(wanted)
        if self.mapped is not None:
            d_scores, found = self.mapped.gradient(self.unmapped, self.scores)
            # Where nothing is wanted nothing comes, not even 0 times infinity.
            self.scores.copy_(d_scores.masked_fill_(self.scores == 0, 0.0))
            self.d_numbers = [None if d_number is None else factor * d_number for d_number in found]
        return factor

    def _overwrite(self, wanted: dict[str, Tensor | None]) -> Tensor:
        """Write over each score, as it is mapped, its gradient up to a factor of each row."""
        scores, raw = self.scores, self.raw
        factor = torch.zeros_like(self.shift)
        if self.has_softmax:
            inverse = torch.where(self.sum > 0, self.sum.reciprocal(), 0.0)
            others, expected = wanted.get("others"), wanted.get("expected")
            if raw is not None and expected is not None:
                size = expected.abs() if others is None else expected.abs() + others.abs()
                size = torch.where(size > 0, size, 1.0)
                below = (1 - self.numbers["expected"])[:, None]
                tilt = (raw + below).mul_((expected / size)[:, None])
                scores.mul_(tilt if others is None else tilt.add_((others / size)[:, None]))
                factor = inverse * size
            elif others is not None:
                factor = others * inverse
        # Each of the following is no multiple of the exponentials.
        added = {
            name: value for name in ("mean", *SUMMED) if (value := wanted.get(name)) is not None
        }
        if not added:
            return factor if self.has_softmax else self._nothing()
        # What is large or small in a row as a whole still goes to the short side.
        size = factor.abs() + sum(value.abs() for value in added.values())
        size = torch.where(size > 0, size, 1.0)
        added = {name: (value / size)[:, None] for name, value in added.items()}
        scores.mul_((factor / size)[:, None]) if self.has_softmax else scores.zero_()
        many = 1.0 if self.counts is None else self.counts
        if "mean" in added:
            scores.add_(added["mean"] * (1.0 if self.many is None else self.many))
        if "softplus" in added and raw is not None:
            scores.add_(raw.sigmoid().mul_(added["softplus"]) * many)
        self._set_own(0.0)
        return size

    def _nothing(self) -> Tensor:
        self.scores.zero_()
        return torch.zeros_like(self.shift)


class Rows(NamedTuple):
    """A block of rows, as scores are made of it.

    Attributes:
        query: times the scale, shape ``(n, D)``.
        offset: added to all scores of a row, shape ``(n,)``, or none.
        own: place of the own class, -1 where it is not here, shape ``(n,)``.
        mapped: map of their other scores, or none.
    """

    query: Tensor
    offset: Tensor | None
    own: Tensor
    mapped: MappedRows | None = None


class Found(NamedTuple):
    """Numbers that the scores of a block of rows were reduced to.

    Attributes:
        numbers: by name, shape ``(n,)`` each.
        place: of the hardest other class, shape ``(n,)``, where it is read.
    """

    numbers: dict[str, Tensor]
    place: Tensor | None


class Back(NamedTuple):
    """Gradients of a block of rows, before weighting.

    Attributes:
        query: shape ``(n, D)``.
        offset: shape ``(n,)``, where rows have an offset.
        scale: through the classes' offsets, shape ``(n,)``, where they have any.
        mapped: of the numbers of the map, shape ``(n,)`` each, where there is one.
    """

    query: Tensor
    offset: Tensor | None
    scale: Tensor | None
    mapped: Sequence[Tensor | None] = ()


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
            self.scratch = keys.gradient.flatten(1)[:, :longest].T
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
        self.block = Block(scores, rows.own, self.reads, self.counts, rows.mapped, self.there)
        return Found(self.block.numbers, self.block.place)

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
            more = keys.back(piece, heavy_query, block, d_query if needs_query else None, add=add)
            d_scale = added(d_scale, more, factor)
        return Back(d_query.mul_(factor[:, None]), d_row, d_scale, self.block.d_numbers)

    def close(self) -> None:
        """Free the scratch memory."""
        self.__dict__.pop("scratch", None)
        self.__dict__.pop("block", None)
        self.keys.kept.clear()

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the accumulated gradients."""
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
                    # The first of several equal ones stays.
                    place = torch.where(part.top > top, here, place)
                    top = torch.maximum(part.top, top)
            del part
        if not self.keys.blocks:
            return nothing_here(rows, self.reads)
        self.numbers = merged
        return Found(merged, place)

    def backward(self, rows: Rows, wanted: dict[str, Tensor | None], weights: Tensor) -> Back:
        """Make every block again, and its gradient by the chain rule of the merge."""
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
        counts = None if self.counts is None else self.counts[block]
        there = None if self.there is None else self.there[block]
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
    """Add gradients pairwise; none is zero."""
    pairs = zip(some, more, strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def added(total: Tensor | None, more: Tensor | None, factor: Tensor) -> Tensor | None:
    """Add a part times a factor, where there is one."""
    if more is None:
        return total
    return factor * more if total is None else total + factor * more


def nothing_here(rows: Rows, reads: frozenset[str]) -> Found:
    """Return the numbers of a rank without classes."""
    zero = torch.zeros_like(rows.query[:, 0])
    numbers = {name: zero for name in NUMBERS if name in reads}
    if "others" in numbers or "expected" in numbers:
        numbers["others"] = torch.full_like(zero, float("-inf"))
    place = torch.zeros_like(rows.own) if "hardest" in reads else None
    return Found(numbers, place)
