"""Scores in blocks: products with prototypes, reduced to a few numbers per row, then overwritten.

:class:`Keys` computes the scores of a block of classes and multiplies their gradient back,
:class:`Block` reduces scores to numbers and overwrites them with their gradient, and
:class:`WholeRows` is the engine that does both for all classes and a block of rows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tammes.kernels.matmul import halved, multiply
from tammes.kernels.problem import Problem
from tammes.kernels.score_map import MappedRows
from tammes.kernels.tiling import OF_SCORES
from tammes.pooling import Pooled, Slopes
from tammes.similarity import Operand
from tammes.split import SUMMED, softplus

NUMBERS = ("others", "expected", "mean", *SUMMED)
"""Numbers that a kernel reduces scores to; for the hardest class it returns only the index."""

_LOG2_E = 1 / math.log(2)


class Needs(NamedTuple):
    """Selection of the gradients to compute."""

    features: bool
    prototypes: bool
    bias: bool
    scale: bool


def _rows(prototypes: Tensor) -> Tensor:
    """All prototypes of k classes as rows, shape ``(k, D)`` or ``(k K, D)``."""
    return prototypes if prototypes.ndim == 2 else prototypes.flatten(0, 1)


class Keys:
    """Scores of a block of classes, ``query . key + scale * offset``, and their backward.

    Products use the prototypes as stored and are rescaled for cosines, which avoids a normalised
    copy. In half precision such a copy is kept: on a GPU, recomputing it for every block of rows
    takes longer than the products.

    Args:
        problem: its scale is a tensor in the working dtype, its similarity bound.
        needs: which gradients to compute.
        blocks: slices of the classes.
        low: dtype of the inputs of products, or none for the working dtype.
    """

    def __init__(
        self, problem: Problem, needs: Needs, blocks: Sequence[slice], low: torch.dtype | None
    ) -> None:
        features, self.prototypes, bias, scale, similarity, share, *_ = problem
        assert isinstance(scale, Tensor)
        self.dtype = scale.dtype
        self.needs, self.blocks, self.low = needs, blocks, low
        self.bias = None if bias is None else bias.to(self.dtype)
        self.scale = scale
        self.similarity = similarity
        self.counts, self.there = None if share is None else share.counts, problem.there
        self.gradient: Tensor | None = None
        if needs.prototypes:
            self.gradient = torch.empty_like(
                self.prototypes, dtype=self.dtype, memory_format=torch.contiguous_format
            )
        like = torch.zeros((), dtype=self.dtype, device=features.device)
        self.d_offsets = like.expand(len(self.prototypes)).clone()
        self.written = False
        self.inverses: dict[int, Tensor] = {}
        self.kept: dict[int, Operand] = {}
        self.slopes: dict[int, Slopes] = {}

    def make(self, block: slice) -> Operand:
        """Operand of a block of classes; its offset includes the bias."""
        if block.start in self.kept:
            return self.kept[block.start]
        rows, inverse, offset, _ = self._operand(block)
        if self.bias is not None:
            offset = self.bias[block] if offset is None else offset + self.bias[block]
        if self.low is None:
            return Operand(rows, inverse, offset)
        rows = rows if inverse is None else rows * inverse
        self.kept[block.start] = Operand(rows.to(self.low), None, offset)
        return self.kept[block.start]

    def _operand(self, block: slice) -> Operand:
        """Prototypes of a block as they enter products; their norms are cached."""
        rows, known = _rows(self.prototypes[block]).to(self.dtype), self.inverses.get(block.start)
        if known is not None:
            return Operand(rows, known)
        operand = self.similarity.prototypes_operand(rows)
        if operand.inverse is not None:
            self.inverses[block.start] = operand.inverse
        return operand

    def fill(
        self, scores: Tensor, query: Tensor, row_offset: Tensor | None, block: slice
    ) -> Tensor | None:
        """Write the scores of a block of classes; return its offsets."""
        keys, inverse, offset, _ = self.make(block)
        pooled = self.similarity if isinstance(self.similarity, Pooled) else None
        products = scores if pooled is None else query.new_empty(len(query), len(keys))
        self.product(query, keys.T, out=products)
        if inverse is not None:
            products *= inverse.view(-1)
        if pooled is not None:
            slopes = pooled.pool(products, self.scale, out=scores, to_scale=self.needs.scale)
            if any(self.needs):
                self.slopes[block.start] = slopes
        if offset is not None:
            scores += self.scale * offset
        if row_offset is not None:
            scores += row_offset[:, None]
        return offset

    def back(
        self, gradient: Tensor, heavy: Tensor, block: slice, d_query: Tensor | None, *, add: bool
    ) -> Tensor | None:
        """Multiply the scores' gradient with keys and queries.

        Args:
            gradient: gradient of the scores up to a factor per row, shape ``(n, k)``; overwritten.
            heavy: queries times that factor and the weight of the row, shape ``(n, D)``.
            block: slice of the classes.
            d_query: the queries' gradient, without the factor, is added to it, shape ``(n, D)``.
            add: whether the keys' gradient already holds that of other rows.

        Returns:
            Gradient of the scale that does not pass through the query, per row, without the
            factor, shape ``(n,)``, or none.
        """
        keys, inverse, *_ = self.make(block)
        d_scale = None
        if isinstance(self.similarity, Pooled):
            slopes = self.slopes.pop(block.start)
            if slopes.excess is not None:
                d_scale = torch.linalg.vecdot(gradient, slopes.excess) / -self.scale
            gradient = self.similarity.unpool(gradient, slopes)
        if inverse is not None:
            gradient *= inverse.view(-1)
        if d_query is not None:
            self.product(gradient, keys, out=d_query, add=True)
        if self.gradient is not None:
            self.product(gradient.T, heavy, out=_rows(self.gradient[block]), add=add)
        self.written = True
        return d_scale

    def product(self, left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
        """``out = left @ right``, or ``out += left @ right``."""
        if self.low is None:
            torch.addmm(out, left, right, beta=1 if add else 0, out=out)
            return
        low, size = (right, None) if right.dtype == self.low else halved(right, self.low)
        result = multiply(left.to(self.low), low)
        if size is not None:
            result *= size
        if add:
            out += result
        else:
            out.copy_(result)

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of prototypes and offsets, once all rows are done."""
        if self.gradient is not None:
            if not self.written:
                self.gradient.zero_()
            for block in self.blocks:
                self._through(block)
        # Reading the factor is free on a CPU, and synchronises elsewhere.
        if factor.device.type != "cpu" or factor.item() != 1:
            self.d_offsets *= factor
            if self.gradient is not None:
                self.gradient *= factor
        return self.gradient, self.d_offsets

    def _through(self, block: slice) -> None:
        """Turn the gradient of a block of operands into that of its prototypes, in place."""
        assert self.gradient is not None
        gradient, operand = _rows(self.gradient[block]), self._operand(block)
        if self.low is not None and operand.inverse is not None:
            gradient *= operand.inverse
        self.similarity.prototypes_gradient(operand, gradient, self.d_offsets[block])


class Block:
    """Scores of some rows against some classes.

    Args:
        scores: shape ``(n, k)``, finite, overwritten.
        own: column of each row's target class, -1 if it is not among these, shape ``(n,)``.
        reads: which numbers to compute.
        counts: how many classes each column stands for, shape ``(k,)``; 1 by default.
        mapped: map of the other classes' scores, or none.
        there: which columns are not masked, shape ``(k,)``, or none if no column is.

    Attributes:
        numbers: numbers of the other classes in this block, shape ``(n,)`` each: ``others``,
            ``expected``, ``softplus``, and ``mean`` as a sum, not divided yet.
        top: largest score of another class; ``place`` is its column.
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
        # In sums over the scores themselves, a masked class counts zero times.
        self.many = counts
        if there is not None:
            self.many = there.to(scores.dtype) if counts is None else counts * there
        self.column, self.mine = own.clamp_min(0)[:, None], (own >= 0)[:, None]
        self.numbers: dict[str, Tensor] = {}
        self.d_numbers: list[Tensor | None] = []
        if mapped is not None:
            # The map must not see the target class: its gradient could be 0 times infinity.
            self._set_own(0.0)
            self.unmapped = scores.clone()
            scores.copy_(mapped(scores))
        if "mean" in reads:
            self._set_own(0.0)
            self.numbers["mean"] = scores.sum(1) if self.many is None else scores @ self.many
        # Masked out rather than subtracted from a full sum: see tammes.split.split_matrix.
        if there is not None:
            scores.masked_fill_(~there, float("-inf"))
        self._set_own(float("-inf"))
        self.place: Tensor | None = None
        if "hardest" in reads:
            self.top, self.place = scores.max(1)
        else:
            self.top = scores.amax(1)
        # Without any other class, the largest score is -inf, which must not be subtracted.
        self.shift = torch.where(self.top > float("-inf"), self.top, 0.0)
        # A copy of the scores, which exponentials are about to overwrite.
        keep = not reads.isdisjoint(OF_SCORES)
        self.raw = scores.clone() if keep else None
        if self.raw is not None and "softplus" in reads:
            smooth = softplus(self.raw)
            self.numbers["softplus"] = smooth.sum(1) if counts is None else smooth @ counts
        self.has_softmax = not reads.isdisjoint(("others", "expected"))
        if self.has_softmax:
            exponentiate(scores.sub_(self.shift[:, None]))
            if counts is not None:
                scores.mul_(counts)
            self.sum = scores.sum(1)
            self.numbers["others"] = self.shift + self.sum.log()
        if self.raw is not None and "expected" in reads:
            # Made finite for the product with the exponentials, which are 0 where scores are -inf.
            self.raw.clamp_min_(torch.finfo(self.raw.dtype).min)
            mean = torch.linalg.vecdot(scores, self.raw) / self.sum
            self.numbers["expected"] = torch.where(self.sum > 0, mean, 0.0)

    def _set_own(self, value: float) -> None:
        kept = self.scores.gather(1, self.column)
        self.scores.scatter_(1, self.column, torch.where(self.mine, value, kept))

    def overwrite_with_gradient(self, wanted: dict[str, Tensor | None]) -> Tensor:
        """Overwrite the scores with their gradient, up to a factor per row, which is returned.

        Also sets ``d_numbers``, the gradients of the map's numbers, shape ``(n,)`` each.

        Args:
            wanted: gradient of each of the numbers, shape ``(n,)``.

        Returns:
            The factor, shape ``(n,)``, to be applied to the ``(n, D)`` side of a product.
        """
        factor = self._overwrite(wanted)
        if self.mapped is not None:
            d_scores, found = self.mapped.gradient(self.unmapped, self.scores)
            # A zero gradient stays zero, even times an infinite derivative of the map.
            self.scores.copy_(d_scores.masked_fill_(self.scores == 0, 0.0))
            self.d_numbers = [None if d_number is None else factor * d_number for d_number in found]
        return factor

    def _overwrite(self, wanted: dict[str, Tensor | None]) -> Tensor:
        """Overwrite the mapped scores with their gradient, up to a factor per row."""
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
        # The following gradients are not multiples of the exponentials.
        added = {
            name: value for name in ("mean", *SUMMED) if (value := wanted.get(name)) is not None
        }
        if not added:
            return factor if self.has_softmax else self._nothing()
        # The overall magnitude of a row is still left to the factor.
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
    """A block of rows, as the input of an engine.

    Attributes:
        query: queries times the scale, shape ``(n, D)``.
        offset: added to all scores of a row, shape ``(n,)``, or none.
        own: local index of the target class, -1 if it is not here, shape ``(n,)``.
        mapped: map of the other classes' scores, or none.
    """

    query: Tensor
    offset: Tensor | None
    own: Tensor
    mapped: MappedRows | None = None


class Found(NamedTuple):
    """Numbers that the scores of a block of rows were reduced to.

    Attributes:
        numbers: by name, shape ``(n,)`` each.
        place: index of the hardest other class, shape ``(n,)``, if it is read.
    """

    numbers: dict[str, Tensor]
    place: Tensor | None


class Back(NamedTuple):
    """Gradients of a block of rows, before weighting.

    Attributes:
        query: shape ``(n, D)``.
        offset: shape ``(n,)``, if rows have an offset.
        scale: through the classes' offsets and pooling, shape ``(n,)``, if there are any.
        mapped: of the map's numbers, shape ``(n,)`` each, if there is a map.
    """

    query: Tensor
    offset: Tensor | None
    scale: Tensor | None
    mapped: Sequence[Tensor | None] = ()


class Engine(Protocol):
    """Computes numbers from queries, and their backward; driven by :class:`OnePass`."""

    def forward(self, rows: Rows) -> Found:
        """Reduce the scores of some rows."""

    def backward(self, rows: Rows, wanted: dict[str, Tensor | None], weights: Tensor) -> Back:
        """Backpropagate through the last :meth:`forward`.

        Args:
            rows: the same rows.
            wanted: gradient of each of their numbers, shape ``(n,)``.
            weights: weights of the rows in the gradients of the classes, shape ``(n,)``.
        """

    def close(self) -> None:
        """Free everything but the gradients, once all rows are done."""

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of the prototypes and of their offsets, times a factor."""


class WholeRows:
    """All scores of a block of rows in one buffer, which becomes their gradient: three products.

    A shared buffer is the first columns of the keys' gradient: each block of classes is copied out
    just before its gradient is written there.
    """

    def __init__(self, keys: Keys, reads: frozenset[str], *, longest: int, shared: bool) -> None:
        self.keys, self.reads, self.shared = keys, reads, shared
        if shared and keys.gradient is not None:
            self.scratch = keys.gradient.flatten(1)[:, :longest].T
        else:
            like = keys.d_offsets
            self.scratch = torch.empty(longest, len(like), dtype=like.dtype, device=like.device)

    def forward(self, rows: Rows) -> Found:
        """Compute the scores and reduce them."""
        scores = self.scratch[: len(rows.own)]
        offsets = [
            self.keys.fill(scores[:, block], rows.query, rows.offset, block)
            for block in self.keys.blocks
        ]
        some = [offset for offset in offsets if offset is not None]
        self.offsets = torch.cat(some) if some else None
        if scores.shape[1] == 0:
            return nothing_here(rows, self.reads)
        # Free the previous block first.
        self.block: Block | None = None
        counts, there = self.keys.counts, self.keys.there
        self.block = Block(scores, rows.own, self.reads, counts, rows.mapped, there)
        return Found(self.block.numbers, self.block.place)

    def backward(self, rows: Rows, wanted: dict[str, Tensor | None], weights: Tensor) -> Back:
        """Overwrite the scores with their gradient and multiply it back."""
        keys = self.keys
        d_query = torch.zeros_like(rows.query)
        if self.scratch.shape[1] == 0:
            return Back(d_query, None if rows.offset is None else d_query[:, 0], None)
        assert self.block is not None
        gradient = self.block.scores
        factor = self.block.overwrite_with_gradient(wanted)
        heavy = factor * weights
        # Before multiplying back, which may overwrite the shared buffer.
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
        """Free the scores and cached keys."""
        self.__dict__.pop("scratch", None)
        self.__dict__.pop("block", None)
        self.keys.kept.clear()

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the accumulated gradients."""
        return self.keys.finish(factor)


def exponentiate(scores: Tensor) -> None:
    """Overwrite scores with their exponentials.

    On a CPU powers of two are twice as fast as exponentials, and several times in the strided rows
    of a shared buffer.
    """
    if scores.device.type == "cpu":
        scores.mul_(_LOG2_E).exp2_()
    else:
        scores.exp_()


def added(total: Tensor | None, more: Tensor | None, factor: Tensor) -> Tensor | None:
    """Add ``factor * more`` to a total, where ``None`` counts as zero."""
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
