"""Cost model of the kernels: bytes of temporaries, matrix products, memory traffic.

All constants fitted to measurements are here; docs/advise.md has the measurements.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tammes.advise.workload import Workload
from tammes.kernels.dispatch import Way
from tammes.kernels.tiling import (
    OF_SCORES,
    Plan,
    class_blocks,
    dense_matrices,
    fits_in_gradient,
    fused_blocks,
    longest,
)
from tammes.pooling import Pooled
from tammes.similarity import InnerProduct, SquaredDistance

_MORE_BLOCKS = {"expected": 2, "softplus": 3, "mapped": 7}
"""Additional blocks of scores in the streamed implementation, by the fields read."""
_KEY_BLOCKS = 1
"""Blocks of keys alive at once while their gradient is converted to that of prototypes."""
_ROWS = 5
"""Copies of the features: queries, own prototypes, and their gradients."""
_TILE = 128
"""Classes per tile of exponentials."""


class Passes(NamedTuple):
    """Number of passes over memory, fitted to an H200."""

    scores: float
    """Reads and writes of a score."""
    prototypes: float
    """Reads and writes of a prototype, or of its gradient."""
    again: float = 0.0
    """The same for each block of rows."""

    def over(self, rows: int, classes: int, dim: int, blocks: int = 1) -> float:
        """Total passes for a batch."""
        prototypes = classes * dim
        return self.scores * rows * classes + (self.prototypes + self.again * blocks) * prototypes


DENSE = Passes(scores=25, prototypes=26)
DENSE_GPU = Passes(scores=6, prototypes=5)
"""With Triton kernels; in units of the working precision, even if products are in half."""
STREAMED = Passes(scores=11, prototypes=33, again=10)
STREAMED_HALF = Passes(scores=15, prototypes=38, again=4.7)
"""Streamed with products in half precision: more copies, but the keys are kept."""
POOLING = 29
"""Further passes over the streamed products with several prototypes per class; fitted to one
step."""
FUSED = Passes(scores=0, prototypes=6.5, again=4.9)
"""In units of half precision, unlike the others. Reads and writes of exponentials overlap their
products."""


class Inside(NamedTuple):
    """Work of a kernel on one rank.

    Attributes:
        scores: bytes of temporaries in addition to the gradients.
        products: additions and multiplications.
        passes: bytes of memory traffic.
        blocks: number of blocks of rows, processed one after the other.
        launches: number of kernels to launch, in units of the streamed and the fused step.
    """

    scores: int
    products: int
    passes: float
    blocks: int = 1
    launches: float = 1.0


def dense(work: Workload) -> Inside:
    """Cost with all scores in memory."""
    scores, prototypes = work.rows * work.classes, work.classes * work.numbers
    centers = work.classes * work.centers
    copy = prototypes * work.working if work.rounds else 0
    if work.on_gpu:
        # One matrix, of scores and then of their softmax; in half precision a second one, and a
        # copy of the prototypes.
        half = 2 if work.half else 0
        rows, number = work.rows * work.dim, half or work.working
        forward = scores * (work.working + half) + rows * number
        backward = scores * number + (prototypes + (_ROWS - 1) * rows) * work.working
        copy += prototypes * half
    else:
        matrix = scores * work.working
        pooled = work.centers > 1
        copied = pooled or isinstance(work.similarity, SquaredDistance)
        keys = prototypes * work.working if copied else 0
        forward = dense_matrices(work.reads | {"rest"} if pooled else work.reads) * matrix + keys
        # Saved scores and their gradient; the gradient of the prototypes and, for cosines, its
        # product with them.
        kept = 1 if OF_SCORES.isdisjoint(work.reads) else 2
        product = prototypes if work.similarity.is_cosine else 0
        backward = kept * matrix + (prototypes + product) * work.working + keys
    return Inside(
        scores=max(0, max(forward, backward) + copy - prototypes * work.stored),
        products=6 * work.rows * prototypes,
        passes=(DENSE_GPU if work.on_gpu else DENSE).over(work.rows, centers, work.dim)
        * work.working,
        launches=0.5,
    )


def streamed(work: Workload, rows: int, classes: int) -> Inside:
    """Cost with one block of scores at a time, tiled as the kernel does, and forward gradients."""
    problem = work.problem(rows, classes)
    plan = Plan(work.reads, _never, (1.0,), itemsize=work.working)
    if plan.too_thin(problem):
        return _recomputed(work, plan, rows, classes)
    row_blocks, key_blocks = plan.blocks(problem)
    often = STREAMED_HALF if work.half else STREAMED
    passes = often.over(rows, classes * work.centers, work.dim, len(row_blocks))
    if work.centers > 1:
        passes += POOLING * rows * classes * work.centers
    if _more_blocks(work.reads):
        passes += STREAMED.scores * rows * classes
    shared = fits_in_gradient(problem, row_blocks)
    return Inside(
        scores=_streamed_bytes(work, rows, classes, row_blocks, longest(key_blocks), shared),
        products=6 * rows * classes * work.numbers,
        passes=passes * work.working,
        blocks=len(row_blocks),
    )


def _streamed_bytes(
    work: Workload, rows: int, classes: int, blocks: Sequence[slice], width: int, shared: bool
) -> int:
    """Bytes of temporaries for blocks of rows and keys of ``width`` classes."""
    height, prototypes = longest(blocks), classes * work.numbers
    block = height * classes
    if isinstance(work.similarity, Pooled):
        # With the products of a block of classes, and what pooling saves of them.
        block += height * width * work.centers
        block += block * work.similarity.kept_bytes(work.working) // work.working
    # For distances, keys are a copy of a block of prototypes. In half precision all keys are kept,
    # and a product is computed from a copy of the block before it is added.
    tile, linear = width * work.numbers, isinstance(work.similarity, InnerProduct)
    beside = tile if isinstance(work.similarity, SquaredDistance) else 0
    if work.half:
        beside = max(height * width, height * width // 2 + tile)
    elif shared:
        # A single short block of scores shares the memory of the gradient, and is copied in pieces.
        beside += height * width
    during = max(_more_blocks(work.reads) * block, beside) + (0 if shared else block)
    during += prototypes // 2 if work.half else 0
    # Then the gradient of the keys is converted to that of the prototypes, block by block.
    finishing = 0 if linear else _KEY_BLOCKS * tile
    taken = max(during, finishing)
    if work.rounds:
        # Accumulated first, then stored in the memory of the key blocks.
        taken += prototypes - min(finishing, prototypes * work.stored // work.working)
    return (taken + _ROWS * rows * work.dim + classes) * work.working


def _more_blocks(reads: frozenset[str]) -> int:
    return max((count for name, count in _MORE_BLOCKS.items() if name in reads), default=0)


def _recomputed(work: Workload, plan: Plan, rows: int, classes: int) -> Inside:
    """Cost if only few rows of scores fit: blocks of classes whose scores are computed twice."""
    width = longest(class_blocks(work.problem(rows, classes)))
    taken = (plan.copies * rows + work.dim) * width * work.centers
    taken += _ROWS * rows * work.dim + classes
    taken += classes * work.numbers if work.rounds else 0
    often = STREAMED_HALF if work.half else STREAMED
    centers = classes * work.centers
    passes = often.over(rows, centers, work.dim) + often.scores * rows * centers
    products = 8 * rows * classes * work.numbers
    return Inside(taken * work.working, products, passes * work.working)


def fused(work: Workload, rows: int, classes: int) -> Inside:
    """Cost of the fused kernels: one block of exponentials in half precision."""
    number = 2 if work.half else work.working
    row_blocks = fused_blocks(rows, classes, work.dim, number, work.centers)
    # Keys, a block of exponentials with its sums per tile, and values per row and per class.
    centers = classes * work.centers
    block, prototypes = longest(row_blocks) * centers, classes * work.numbers
    taken = number * (prototypes + block) + block // _TILE * work.working
    taken += (_ROWS * rows * work.dim + classes) * work.working
    taken += prototypes * work.working if work.rounds else 0
    passes = FUSED.over(rows, centers, work.dim, len(row_blocks)) * number
    return Inside(taken, 6 * rows * prototypes, passes, len(row_blocks))


def shared(work: Workload, rows: int, classes: int) -> tuple[Way, Inside]:
    """Implementation and cost on a rank with a shard of the classes."""
    way = work.within(rows, classes)
    return way, (fused if way == "fused" else streamed)(work, rows, classes)


def _never(*_: Any) -> torch.Tensor:
    raise AssertionError("a plan is not run")
