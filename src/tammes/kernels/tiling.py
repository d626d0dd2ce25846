"""Block sizes: how a call is cut into blocks of rows and classes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tammes.kernels.problem import Problem
from tammes.kernels.score_map import ScoreMap
from tammes.pooling import Pooled
from tammes.similarity import working_dtype
from tammes.split import MAPPED, SUMMED, Split

Evaluate = Callable[[Split, slice], Tensor]
"""Values of the T terms, shape ``(T, n)``, on the split of a slice of the batch."""


OF_SCORES = frozenset(("expected", *SUMMED, MAPPED))
"""Fields whose gradient needs the scores, which are then kept beside their softmax."""
WIDEST = 4096
"""Largest feature dimension that the Triton kernels support."""
MOST_CENTERS = 12
"""Most prototypes per class that the Triton kernels support: a tile then has 16 classes, the
fewest for a matrix product."""
MULTIPLY_ADD = {"enable_fp_fusion": True}
"""Option of all Triton kernels: a product and a sum are one instruction. Triton 3.9 warns where it
is left to the default, which 3.10 is to change."""
SCORES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Bytes of one block of scores, by device type."""
KEYS = {"cpu": 1 << 20, "cuda": 256 << 20}
"""Bytes of one block of keys."""
EXPONENTIALS = 1 << 31
"""Bytes that a fused call may take besides keys and gradients, nearly all for exponentials, per
prototype of a class."""
_BESIDE = 30
"""Of these, room reserved for other tensors, in single-precision copies of the features."""
FEWEST = 32
"""Rows per block below which matrix products are inefficient; blocks of classes are used then."""


@dataclass(frozen=True)
class Plan:
    """Settings shared by all blocks of one call.

    Attributes:
        reads: fields of the split to compute.
        evaluate: evaluates the terms.
        coefficients: weight of each term.
        product_dtype: dtype of the inputs of products, or none for the working dtype.
        mapping: map of the other classes' scores, or none.
        bound: upper bound of the scores, if known.
        fused: whether Triton kernels compute the scores.
        itemsize: bytes of a score.
        cuts: slices of rows and classes, cached by :meth:`blocks`.
    """

    reads: frozenset[str]
    evaluate: Evaluate
    coefficients: tuple[float, ...]
    product_dtype: torch.dtype | None = None
    mapping: ScoreMap | None = None
    bound: float | None = None
    fused: bool = False
    itemsize: int = 4
    cuts: list[tuple[list[slice], list[slice]]] = field(default_factory=list)

    def blocks(self, problem: Problem) -> tuple[list[slice], list[slice]]:
        """Cut rows and classes into slices for one pass; cached."""
        if not self.cuts:
            count, (classes, *size) = len(problem.features), problem.prototypes.shape
            width, similarity = self.itemsize, problem.similarity
            most = max(most_prototypes(problem), 1)
            tile = max(64, _of(KEYS, problem) // (width * math.prod(size)))
            row = width * most * self.copies
            if isinstance(similarity, Pooled):
                # Products of a block of classes, and what pooling saves of them.
                row += width * min(tile, most) * similarity.centers
                row += similarity.kept_bytes(width) * most
            rows = max(1, _of(SCORES, problem) // row)
            self.cuts.append((cut(count, rows), cut(classes, tile)))
        return self.cuts[0]

    @property
    def copies(self) -> int:
        """Number of score blocks in memory: a second one if the gradient needs the scores.

        A score map is differentiated by autograd, which takes a few more.
        """
        if MAPPED in self.reads:
            return 6
        return 1 if self.reads.isdisjoint(OF_SCORES) else 2

    def too_thin(self, problem: Problem) -> bool:
        """Whether blocks of rows against all classes would have too few rows to be efficient."""
        blocks, _ = self.blocks(problem)
        return not self.fused and len(blocks) > 1 and longest(blocks) < FEWEST


def dense_matrices(reads: frozenset[str]) -> int:
    """Count the N x C matrices alive at once in the dense kernel, by the fields read."""
    if not reads.isdisjoint(("rest", MAPPED)):
        # Differentiated by autograd.
        return 5
    # Scores and their softmax, and a temporary if the two are multiplied.
    return 2 if reads.isdisjoint(OF_SCORES) else 3


def most_prototypes(problem: Problem) -> int:
    """Largest number of prototypes on any rank, so that all ranks cut their rows alike."""
    here = problem.prototypes.shape[0]
    return here if problem.share is None else max(here, problem.share.most)


def class_blocks(problem: Problem) -> list[slice]:
    """Cut the classes into slices small enough for all rows at once."""
    width = 2 * working_dtype(problem.features, problem.prototypes).itemsize
    rows = max(len(problem.features), problem.prototypes.shape[-1], 1)
    row = width * rows * problem.similarity.centers
    return cut(len(problem.prototypes), max(64, _of(SCORES, problem) // row))


def tile_rows(width: int) -> int:
    """Rows of a tile of the fused kernel, given the item size of its products."""
    return 64 if width == 4 else 128


def fused_blocks(count: int, classes: int, size: int, width: int, centers: int = 1) -> list[slice]:
    """Cut the rows into slices for the fused kernel: whole tiles, if there are several.

    Args:
        count: number of rows.
        classes: number of classes.
        size: feature dimension.
        width: item size of the products in bytes.
        centers: prototypes per class.
    """
    room = EXPONENTIALS * centers
    room = max(room // 2, room - _BESIDE * 4 * count * size)
    # Every block reads all keys and gradients again, so it should not be much smaller than them.
    room = max(room, width * classes * centers * size)
    most = max(1, room // (width * centers * max(64, padded(classes, centers))))
    rows = tile_rows(width)
    return cut(count, most // rows * rows or most, rows)


def padded(classes: int, centers: int = 1) -> int:
    """Length of a row of exponentials, padded so that the widest loads and stores are aligned.

    With several centres, their rows follow each other, and a tile must stay within one of them.
    """
    step = 64 if centers == 1 else 128
    return -(-classes // step) * step


def fits_in_gradient(problem: Problem, row_blocks: Sequence[slice]) -> bool:
    """Whether the scores can share the memory of the prototypes' gradient: one block, N <= D.

    Not on a GPU, where reductions along the strided rows take more memory than this saves.
    """
    count, size = problem.features.shape
    return problem.features.device.type == "cpu" and len(row_blocks) <= 1 and count <= size


def cut(total: int, most: int, multiple: int = 1) -> list[slice]:
    """Cut a range into as few slices as ``most`` allows, of nearly equal length.

    Args:
        total: length of the range.
        most: maximal length of a slice.
        multiple: all lengths but the last are multiples of it, if ``most`` is.

    Example:
        >>> cut(5, 3)
        [slice(0, 3, None), slice(3, 5, None)]
        >>> cut(10, 8, multiple=4)
        [slice(0, 8, None), slice(8, 10, None)]
    """
    pieces = max(1, -(-total // most))
    step = max(1, -(-total // pieces))
    step = min(most, -(-step // multiple) * multiple)
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def longest(blocks: Sequence[slice]) -> int:
    """Length of the longest slice."""
    return max((block.stop - block.start for block in blocks), default=0)


def _of(budget: dict[str, int], problem: Problem) -> int:
    return budget.get(problem.features.device.type, budget["cuda"])
