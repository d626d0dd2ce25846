"""Launchers of the Triton kernels of the fused split."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tammes.kernels.fused import triton_kernels
from tammes.kernels.tiling import MOST_CENTERS, MULTIPLY_ADD, tile_rows
from tammes.similarity import TINY

LOG2E = math.log2(math.e)
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on a CPU, in Triton's interpreter."""


class Tile(NamedTuple):
    """Sizes of a tile, and the warps and pipeline stages of its program."""

    rows: int
    classes: int
    depth: int
    warps: int = 4
    stages: int = 3


_HALF = Tile(tile_rows(2), 128, 64)
"""Two such programs share a multiprocessor: one multiplies while the other exponentiates."""
_SINGLE = Tile(tile_rows(4), 64, 32)
_CENTERS = Tile(tile_rows(2), 128, 64, warps=8)
"""For two or three centres per class with max pooling."""
_NARROW = Tile(tile_rows(2), 64, 64, stages=2)
"""For more centres, soft pooling, or little shared memory."""
_COLUMNS = 16 * MOST_CENTERS
"""Products per row in a tile with several centres: three times 64 fill the registers."""


def tile_of(
    dtype: torch.dtype, centers: int = 1, *, soft: bool = False, shared: float = math.inf
) -> Tile:
    """Tile for the dtype of the products, the number of centres per class and their pooling.

    ``shared`` is the shared memory of a multiprocessor in bytes.
    """
    single = dtype == torch.float32
    if centers == 1:
        return _SINGLE if single else _HALF
    if single:
        return Tile(tile_rows(4), 16, 16, warps=8)
    rows, classes, depth, _, stages = _CENTERS
    if not soft and centers <= 3 and shared >= 2 * stages * depth * (rows + centers * classes):
        return _CENTERS
    # A power of two, so that it divides the padded number of classes.
    classes = min(_NARROW.classes, 1 << (_COLUMNS // centers).bit_length() - 1)
    # Soft pooling keeps its derivatives too, which takes the registers of more threads.
    return _NARROW._replace(classes=classes, warps=8 if soft or centers > 3 else _NARROW.warps)


class Work(NamedTuple):
    """Rows against all classes, everything in units of log 2.

    Attributes:
        query: shape ``(n, W)``, W a multiple of 16 bytes.
        keys: shape ``(C, W)``, or ``(C K, W)`` with K centres per class.
        own: local index of the target class, -1 if it is not here, shape ``(n,)``.
        row_offset: added to all scores of a row, shape ``(n,)``.
        offsets: added to all scores of a class, shape ``(C,)``, or none.
        counts: how many classes each prototype stands for, shape ``(C,)``, or none.
        mapped: threshold above which scores are mapped, and the coefficients of the quadratic
            polynomial, shape ``(n,)`` each, or none.
        shift: subtracted from mapped scores, shape ``(n,)``; without a map it is part of
            ``row_offset``.
        wants_sums: whether the coefficients require a gradient.
        centers: K, prototypes per class.
        sharpness: with soft pooling, a product z has the weight ``2^(sharpness z)``, shape
            ``(1,)``; none with max pooling.
    """

    query: Tensor
    keys: Tensor
    own: Tensor
    row_offset: Tensor
    offsets: Tensor | None
    counts: Tensor | None
    mapped: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    shift: Tensor | None = None
    wants_sums: bool = False
    centers: int = 1
    sharpness: Tensor | None = None

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return len(self.keys) // self.centers

    @property
    def tile(self) -> Tile:
        """Sizes of a tile."""
        shared = math.inf
        if self.keys.is_cuda:
            machine: Any = torch.cuda.get_device_properties(self.keys.device)
            shared = machine.shared_memory_per_block_optin
        soft = self.sharpness is not None
        return tile_of(self.keys.dtype, self.centers, soft=soft, shared=shared)


HARD = ("hard", "hard_scores", "hard_squares")
"""Sums over the classes above a map's threshold: of ``e``, ``e z`` and ``e z^2``."""


def parts(work: Work, names: set[str]) -> dict[str, Tensor]:
    """Allocate the partial results of each row in each tile, by name."""
    shape = (triton.cdiv(work.classes, work.tile.classes), len(work.own))
    return {name: work.row_offset.new_empty(shape) for name in sorted(names)}


def exponentials(
    work: Work,
    into: dict[str, Tensor],
    out: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    bent: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Run the kernel over all tiles.

    Args:
        work: the rows and classes.
        into: tensors for the wanted ones of ``sums``, ``tilts``, ``tops``, ``spreads`` and
            :data:`HARD`.
        out: where exponentials are written, shape ``(n or more, C or more)``; with K centres, K
            such planes side by side.
        gate: which blocks of rows to process; all by default.
        bent: level and slope of each row, see ``triton_kernels.exponentials``.
    """
    tile, none, width = work.tile, work.row_offset, work.query.shape[1]
    keys = work.keys.view(work.classes, work.centers * width)
    # Independent of the shape, since the kernel is compiled for this number.
    programs = 2 * _processors(work.keys.device)
    level, slope = bent or (none, none)
    written = work.query if out is None else out
    triton_kernels.exponentials[(programs,)](
        TensorDescriptor.from_tensor(work.query, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(keys, [tile.classes, tile.depth]),
        TensorDescriptor.from_tensor(written, [tile.rows, tile.classes // 2]),
        into.get("sums", none),
        into.get("tilts", none),
        into.get("tops", none),
        work.row_offset,
        none if work.offsets is None else work.offsets,
        none if work.counts is None else work.counts,
        work.own,
        level,
        slope,
        none if gate is None else gate,
        none if work.shift is None else work.shift,
        *(work.mapped or (none,) * 4),
        *(into.get(name, none) for name in HARD),
        into.get("spreads", none),
        none if work.sharpness is None else work.sharpness,
        len(work.own),
        work.classes,
        width,
        written.shape[1] // work.centers,
        WRITE=out is not None,
        SUMS="sums" in into,
        TILTS="tilts" in into,
        TOPS="tops" in into,
        BENT=bent is not None,
        HAS_OFFSETS=work.offsets is not None,
        HAS_COUNTS=work.counts is not None,
        GATED=gate is not None,
        MAPPED=work.mapped is not None,
        HARD=HARD[0] in into,
        CENTERS=work.centers,
        SOFT=work.sharpness is not None,
        SPREADS="spreads" in into,
        PRECISION=_precision(work.keys.dtype),
        PROGRAMS=programs,
        BLOCK_ROWS=tile.rows,
        BLOCK_CLASSES=tile.classes,
        BLOCK_SIZE=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **MULTIPLY_ADD,
    )


def gates(wrong: Tensor, dtype: torch.dtype) -> Tensor:
    """Flag the blocks that contain a row with a wrong shift."""
    size = tile_of(dtype).rows
    padded = torch.nn.functional.pad(wrong, (0, -len(wrong) % size))
    return padded.view(-1, size).any(1).int()


def hardest(work: Work, tops: Tensor) -> Tensor:
    """Index of the largest score of each row, searched in the tile that has it."""
    places = torch.empty(len(work.own), dtype=torch.long, device=work.own.device)
    width = work.keys.shape[1]
    triton_kernels.find_hardest[(len(places),)](
        work.query,
        work.keys,
        work.row_offset if work.offsets is None else work.offsets,
        work.own,
        tops.argmax(0),
        places,
        work.row_offset if work.sharpness is None else work.sharpness,
        work.classes,
        width,
        HAS_OFFSETS=work.offsets is not None,
        CENTERS=work.centers,
        SOFT=work.sharpness is not None,
        BLOCK_CLASSES=work.tile.classes,
        BLOCK_SIZE=min(64, triton.next_power_of_2(width)),
        **MULTIPLY_ADD,
    )
    return places


def bend(work: Work, out: Tensor, level: Tensor, slope: Tensor) -> None:
    """Turn written exponentials ``e`` into ``e (level + slope z)``, in place."""
    rows, classes = len(work.own), work.classes
    counts = work.row_offset if work.counts is None else work.counts
    triton_kernels.bend[(rows, triton.cdiv(classes, 2048), work.centers)](
        out,
        level,
        slope,
        counts,
        classes,
        out.stride(0),
        out.shape[1] // work.centers,
        HAS_COUNTS=work.counts is not None,
        BLOCK=2048,
        **MULTIPLY_ADD,
    )


def unit_keys(prototypes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Normalised rows in a dtype, padded, and the inverse norms."""
    keys = prototypes.new_empty((len(prototypes), wide(prototypes.shape[1])), dtype=dtype)
    inverses = prototypes.new_empty(len(prototypes), dtype=torch.float32)
    _by_row(
        triton_kernels.to_unit, prototypes, prototypes, keys, inverses, keys.stride(0), TINY=TINY
    )
    return keys, inverses


def through_unit(gradient: Tensor, prototypes: Tensor, inverses: Tensor, factor: Tensor) -> None:
    """Turn the gradient of unit rows into that of the rows, times a factor, in place."""
    _by_row(triton_kernels.through_unit, prototypes, gradient, prototypes, inverses, factor)


def _by_row(kernel: Any, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel that processes whole rows."""
    count, size = like.shape
    if count == 0:
        return
    block = triton.next_power_of_2(wide(size))
    rows = max(1, min(16, 4096 // block))
    kernel[(triton.cdiv(count, rows),)](
        *(*arguments, count, size),
        BLOCK_ROWS=rows,
        BLOCK_SIZE=block,
        num_warps=4,
        **constants,
        **MULTIPLY_ADD,
    )


def wide(size: int) -> int:
    """Round up to 8 numbers: tensor descriptors need rows aligned to 16 bytes."""
    return -(-size // 8) * 8


def widened(rows: Tensor) -> Tensor:
    """Pad rows with zeros to a length that descriptors accept."""
    more = wide(rows.shape[1]) - rows.shape[1]
    return (torch.nn.functional.pad(rows, (0, more)) if more else rows).contiguous()


def _precision(dtype: torch.dtype) -> str:
    """Precision of float32 products, following torch's setting."""
    # Not ``get_float32_matmul_precision``, which raises once a precision is set for one backend.
    fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and fast else "ieee"


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
