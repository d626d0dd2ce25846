"""Prototypes as keys, one block of classes at a time, and their gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.kernels.matmul import halved, multiply
from tammes.kernels.problem import Problem
from tammes.pooling import Pooled, Slopes
from tammes.similarity import Operand


class Needs(NamedTuple):
    """Flags of the gradients to compute."""

    features: bool
    prototypes: bool
    bias: bool
    scale: bool


def take(tensor: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Select rows of a tensor in a dtype; zeros where the tensor is empty."""
    if len(tensor) == 0:
        zeros = tensor.new_zeros(len(places), *tensor.shape[1:], dtype=dtype)
        # Nothing, but nothing that has a gradient: this rank must meet the others in backward.
        return zeros + tensor.sum().to(dtype)
    return tensor.index_select(0, places.clamp_min(0)).to(dtype)


def _rows(prototypes: Tensor) -> Tensor:
    """All prototypes of some classes, shape ``(k, D)`` or ``(k K, D)``."""
    return prototypes if prototypes.ndim == 2 else prototypes.flatten(0, 1)


class Keys:
    """Scores of a block of classes, ``query . key + scale * offset``, and the way back.

    Products are made with the prototypes as they are, and scaled where directions are compared, so
    no copy of all of them is made. But in half precision one of unit rows is kept: on a GPU, making
    it again for every block of rows takes longer than the products.

    Args:
        problem: its scale is a tensor in the working dtype, its similarity bound.
        needs: which gradients are wanted.
        blocks: slices of the classes.
        low: dtype of the inputs of products, where it is not the working one.
    """

    def __init__(
        self, problem: Problem, needs: Needs, blocks: Sequence[slice], low: torch.dtype | None
    ) -> None:
        features, self.prototypes, bias, scale, similarity, *_ = problem
        assert isinstance(scale, Tensor)
        self.dtype = scale.dtype
        self.needs, self.blocks, self.low = needs, blocks, low
        self.bias = None if bias is None else bias.to(self.dtype)
        self.scale = scale
        self.similarity = similarity
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
        """Operand of a block of classes; its offset has the bias in it."""
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
        """Prototypes of a block as they enter products; their lengths are taken once."""
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
        """Write the scores of a block of classes; returns its offsets."""
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
            gradient: of the scores up to a factor of each row, shape ``(n, k)``; overwritten.
            heavy: queries times that factor and the weight of the row, shape ``(n, D)``.
            block: slice of the classes.
            d_query: is added to, without the factor, shape ``(n, D)``.
            add: whether other rows have given the keys a gradient before.

        Returns:
            Share of each row in the gradient of the scale beyond that of its query, without the
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
        """Gradients of the prototypes and the offsets, once everything is multiplied back."""
        if self.gradient is not None:
            if not self.written:
                self.gradient.zero_()
            for block in self.blocks:
                self._through(block)
        # On a CPU it costs nothing to see that there is nothing to do.
        if factor.device.type != "cpu" or factor.item() != 1:
            self.d_offsets *= factor
            if self.gradient is not None:
                self.gradient *= factor
        return self.gradient, self.d_offsets

    def _through(self, block: slice) -> None:
        """Turn the gradient of a block of operands, in place, into that of its prototypes."""
        assert self.gradient is not None
        gradient, operand = _rows(self.gradient[block]), self._operand(block)
        if self.low is not None and operand.inverse is not None:
            gradient *= operand.inverse
        self.similarity.prototypes_gradient(operand, gradient, self.d_offsets[block])
