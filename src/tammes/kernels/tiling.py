"""Sizes of blocks: how the work of one call is cut."""

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
"""Fields whose gradient is made of the scores, which are then kept beside their softmax."""
WIDEST = 4096
"""Numbers in the longest feature of a Triton kernel."""
SCORES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Bytes of one block of scores, by kind of device."""
KEYS = {"cpu": 1 << 20, "cuda": 256 << 20}
"""Bytes of one block of keys."""
EXPONENTIALS = 1 << 31
"""Bytes that a fused call may take beside keys and gradients, nearly all of them exponentials, for
each prototype of a class."""
_BESIDE = 30
"""Single precision copies of the features that this leaves room for: what else is in memory."""
FEWEST = 32
"""Rows in a block below which products are too thin; then blocks of classes are better."""


@dataclass(frozen=True)
class Plan:
    """Settings of one call that hold for all of its blocks.

    Attributes:
        reads: fields of the split that are wanted.
        evaluate: the terms.
        coefficients: weight of each term.
        product_dtype: of the inputs of products, where it is not the working one.
        mapping: map of the other scores, or none.
        bound: largest score there can be, where that is known.
        fused: whether Triton kernels go over the scores.
        itemsize: bytes of a score.
        cuts: slices of rows and classes, once :meth:`blocks` has made them.
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
        """Cut rows and classes into slices for one pass, once for each call."""
        if not self.cuts:
            count, (classes, *size) = len(problem.features), problem.prototypes.shape
            width, similarity = self.itemsize, problem.similarity
            most = max(most_prototypes(problem), 1)
            tile = max(64, _of(KEYS, problem) // (width * math.prod(size)))
            row = width * most * self.copies
            if isinstance(similarity, Pooled):
                # Products of a block of classes, and what pooling keeps of them.
                row += width * min(tile, most) * similarity.centers
                row += similarity.kept_bytes(width) * most
            rows = max(1, _of(SCORES, problem) // row)
            self.cuts.append((cut(count, rows), cut(classes, tile)))
        return self.cuts[0]

    @property
    def copies(self) -> int:
        """Blocks of scores: a second is kept where more than the exponentials are read.

        Autograd differentiates a map, which takes a few more.
        """
        if MAPPED in self.reads:
            return 6
        return 1 if self.reads.isdisjoint(OF_SCORES) else 2

    def too_thin(self, problem: Problem) -> bool:
        """Whether even a block of few rows against all classes is too large."""
        blocks, _ = self.blocks(problem)
        return not self.fused and len(blocks) > 1 and longest(blocks) < FEWEST


def dense_matrices(reads: frozenset[str]) -> int:
    """Count the N x C matrices alive at once in the dense kernel, by the fields read."""
    if not reads.isdisjoint(("rest", MAPPED)):
        # Autograd makes the gradients.
        return 5
    # Scores and their softmax; and what is made beside them where both are multiplied.
    return 2 if reads.isdisjoint(OF_SCORES) else 3


def most_prototypes(problem: Problem) -> int:
    """Count the prototypes of the rank that has most of them, so that all ranks cut rows alike."""
    here = len(problem.prototypes)
    return here if problem.share is None else max(here, problem.share.most)


def class_blocks(problem: Problem) -> list[slice]:
    """Slices of the classes, against which all rows fit at once."""
    width = 2 * working_dtype(problem.features, problem.prototypes).itemsize
    rows = max(len(problem.features), problem.prototypes.shape[-1], 1)
    row = width * rows * problem.similarity.centers
    return cut(len(problem.prototypes), max(64, _of(SCORES, problem) // row))


def tile_rows(width: int) -> int:
    """Rows of a tile of the fused kernel, by the bytes of a number in its products."""
    return 64 if width == 4 else 128


def fused_blocks(count: int, classes: int, size: int, width: int, centers: int = 1) -> list[slice]:
    """Slices of the rows for the fused kernel: whole tiles, where there is more than one.

    Args:
        count: rows in all.
        classes: how many.
        size: numbers in a prototype.
        width: bytes of a number in products.
        centers: prototypes of a class.
    """
    room = EXPONENTIALS * centers
    room = max(room // 2, room - _BESIDE * 4 * count * size)
    # Every block goes over keys and gradients again, so it is not much smaller than they are.
    room = max(room, width * classes * centers * size)
    most = max(1, room // (width * centers * max(64, padded(classes, centers))))
    rows = tile_rows(width)
    return cut(count, most // rows * rows or most, rows)


def padded(classes: int, centers: int = 1) -> int:
    """Length of a row of exponentials: each begins where the widest loads and stores can.

    Of several centres the rows follow each other, and a tile of classes writes to one of them only.
    """
    step = 64 if centers == 1 else 128
    return -(-classes // step) * step


def fits_in_gradient(problem: Problem, row_blocks: Sequence[slice]) -> bool:
    """Whether the scores are one block of no more rows than a feature has numbers.

    On a GPU they stay apart: sums along rows that lie across memory take more room than that saves.
    """
    count, size = problem.features.shape
    return problem.features.device.type == "cpu" and len(row_blocks) <= 1 and count <= size


def cut(total: int, most: int, multiple: int = 1) -> list[slice]:
    """Cut a range into as few slices as ``most`` allows, of nearly equal length.

    Args:
        total: length of the range.
        most: length of the longest slice.
        multiple: of which lengths are to be, but for the last, where ``most`` is one.

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
