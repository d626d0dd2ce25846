"""Launch of the Triton kernels, and the matrix products around them."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tammes.kernels.fused import triton_kernels
from tammes.kernels.tiling import tile_rows
from tammes.similarity import TINY

LOG2E = math.log2(math.e)
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on a CPU, by Triton's interpreter."""


class Tile(NamedTuple):
    """Sizes of a tile, and what a program of it takes."""

    rows: int
    classes: int
    depth: int
    warps: int = 4
    stages: int = 3


_HALF = Tile(tile_rows(2), 128, 64)
"""Two programs of these share a multiprocessor: one multiplies while the other exponentiates."""
_SINGLE = Tile(tile_rows(4), 64, 32)
_CENTERS = Tile(tile_rows(2), 128, 64, warps=8)
"""Classes of two or three centres, of which the largest product counts."""
_NARROW = Tile(tile_rows(2), 64, 64, stages=2)
"""The same with more centres, an average of them, or little shared memory."""
_COLUMNS = 192
"""Products of a row in a tile of classes of several centres: three times 64 fill the registers."""
MOST_CENTERS = _COLUMNS // 16
"""Centres of a class with which a tile has 16 classes, the fewest that make a product."""


def tile_of(
    dtype: torch.dtype, centers: int = 1, *, soft: bool = False, shared: float = math.inf
) -> Tile:
    """Sizes of a tile, by the dtype of the products, the centres of a class and their pooling.

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
    # A power of two that divides the length of a plane of exponentials.
    classes = min(_NARROW.classes, 1 << (_COLUMNS // centers).bit_length() - 1)
    # Derivatives of an average are kept beside it: in the registers of more threads.
    return _NARROW._replace(classes=classes, warps=8 if soft or centers > 3 else _NARROW.warps)


class Work(NamedTuple):
    """Rows against all classes, everything in units of log 2.

    Attributes:
        query: shape ``(n, W)``, W a multiple of 16 bytes.
        keys: shape ``(C, W)``, or ``(C K, W)`` of classes of K centres.
        own: place of the own class, -1 where it is not here, shape ``(n,)``.
        row_offset: added to all scores of a row, shape ``(n,)``.
        offsets: added to all scores of a class, shape ``(C,)``, or none.
        counts: how many classes each stands for, shape ``(C,)``, or none.
        mapped: threshold, above which scores are mapped, and coefficients of the quadratic
            polynomial that they are mapped to, shape ``(n,)`` each, or none.
        shift: subtracted from scores once they are mapped, shape ``(n,)``, where there is a map;
            else it is part of the row offset.
        wants_sums: whether the coefficients take a gradient.
        centers: K, of which a class has the largest product, or an average.
        sharpness: two to this, times a product, is its weight in an average, shape ``(1,)``; none
            where the largest product counts.
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
        """C."""
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
"""Sums over the classes above the threshold of a map: of exponentials, alone and with scores."""


def parts(work: Work, names: set[str]) -> dict[str, Tensor]:
    """Room for what each tile has to say of each row: ``sums``, ``tilts`` and ``tops``."""
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
        work: what is multiplied.
        into: those of ``sums``, ``tilts``, ``tops``, ``spreads`` and :data:`HARD` that are wanted.
        out: where exponentials are written, shape ``(n or more, C or more)``; K times as long for
            classes of K centres, each a plane of columns.
        gate: for each block of rows whether to work on it, or on all.
        bent: level and slope of each row, see ``triton_kernels.exponentials``.
    """
    tile, none, width = work.tile, work.row_offset, work.query.shape[1]
    keys = work.keys.view(work.classes, work.centers * width)
    # As many whatever the shape, since the kernel is compiled for their number.
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
    )


def gates(wrong: Tensor, dtype: torch.dtype) -> Tensor:
    """Flag the blocks of rows that contain an invalid row."""
    size = tile_of(dtype).rows
    padded = torch.nn.functional.pad(wrong, (0, -len(wrong) % size))
    return padded.view(-1, size).any(1).int()


def hardest(work: Work, tops: Tensor) -> Tensor:
    """Place of the largest score of each row, in the tile that has it."""
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
    )
    return places


def bend(work: Work, out: Tensor, level: Tensor, slope: Tensor) -> None:
    """Turn exponentials ``e`` that were written into ``e (level + slope z)``."""
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
    )


def unit_keys(prototypes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unit rows in a dtype, widened, and what each was multiplied with."""
    keys = prototypes.new_empty((len(prototypes), wide(prototypes.shape[1])), dtype=dtype)
    inverses = prototypes.new_empty(len(prototypes), dtype=torch.float32)
    _by_row(
        triton_kernels.to_unit, prototypes, prototypes, keys, inverses, keys.stride(0), TINY=TINY
    )
    return keys, inverses


def through_unit(gradient: Tensor, prototypes: Tensor, inverses: Tensor, factor: Tensor) -> None:
    """Turn the gradient of unit rows, in place, into that of the rows, times a factor."""
    _by_row(triton_kernels.through_unit, prototypes, gradient, prototypes, inverses, factor)


def _by_row(kernel: Any, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel that takes whole rows."""
    count, size = like.shape
    if count == 0:
        return
    block = triton.next_power_of_2(wide(size))
    rows = max(1, min(16, 4096 // block))
    kernel[(triton.cdiv(count, rows),)](
        *arguments, count, size, BLOCK_ROWS=rows, BLOCK_SIZE=block, num_warps=4, **constants
    )


def wide(size: int) -> int:
    """Descriptors want rows that begin at multiples of 16 bytes: of 8 numbers, at least."""
    return -(-size // 8) * 8


def widened(rows: Tensor) -> Tensor:
    """The same rows, with zeros at their end where they are too short."""
    more = wide(rows.shape[1]) - rows.shape[1]
    return (torch.nn.functional.pad(rows, (0, more)) if more else rows).contiguous()


def _precision(dtype: torch.dtype) -> str:
    """Precision of float32 products, following torch's own setting."""
    fast = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if dtype == torch.float32 and fast else "ieee"


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
