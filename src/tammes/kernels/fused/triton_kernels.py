"""Triton kernels of the fused split; :mod:`tammes.kernels.fused.engine` says what they are for.

Everything is in units of ``log 2``, so that an exponential is one instruction. Addresses are 64 bit
wide. What lies beyond the last row, class or number is masked, so any shape will do.
"""

import triton
import triton.language as tl


@triton.jit
def exponentials(
    query,
    keys,
    out,
    sums,
    tilts,
    tops,
    row_offset,
    offsets,
    counts,
    own,
    level,
    slope,
    gate,
    shift,
    threshold,
    constant,
    linear,
    quadratic,
    hard_sums,
    hard_scores,
    hard_squares,
    rows,
    classes,
    size,
    WRITE: tl.constexpr,
    SUMS: tl.constexpr,
    TILTS: tl.constexpr,
    TOPS: tl.constexpr,
    BENT: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    GATED: tl.constexpr,
    MAPPED: tl.constexpr,
    HARD: tl.constexpr,
    PRECISION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CLASSES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Tiles of scores: their exponentials, and what rows sum up to within each tile.

    A score is ``z = query . key + row_offset + offset`` and its exponential ``e = 2^z``, zero at
    the own class, times the count of the class. Written are ``e``, or with BENT
    ``e (level + slope z)``; and for each row and tile the sum of ``e``, of ``e z``, and the largest
    ``z``. ``query``, ``keys`` and ``out`` are descriptors, which read zero and write nothing where
    their tensors end. Each program takes many tiles, so that the loads of one hide behind the
    exponentials of the one before; with GATED only blocks of rows whose gate is open are worked on.

    With MAPPED, ``z`` above a threshold becomes a quadratic polynomial of itself, and what is
    written is multiplied with its derivative; a shift of the row is subtracted after that, not as
    part of ``row_offset``. HARD adds up what the gradients of the coefficients are made of.
    """
    # Rows run fastest: the programs at work at one time share a few blocks of keys.
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    tiles = tl.cdiv(classes, BLOCK_CLASSES) * row_blocks
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=not GATED):
        first_row = tile % row_blocks * BLOCK_ROWS
        part = tile // row_blocks
        first = part * BLOCK_CLASSES
        row = first_row + tl.arange(0, BLOCK_ROWS)
        there = row < rows
        working = True
        if GATED:
            working = tl.load(gate + tile % row_blocks) != 0
        if working:
            z = tl.zeros((BLOCK_ROWS, BLOCK_CLASSES), dtype=tl.float32)
            for start in range(0, size, BLOCK_SIZE):
                left = query.load([first_row, start])
                right = keys.load([first, start])
                z = tl.dot(left, right.T, z, input_precision=PRECISION)
            z += tl.load(row_offset + row, mask=there, other=0.0)[:, None]
            column = first + tl.arange(0, BLOCK_CLASSES)
            known = column < classes
            if HAS_OFFSETS:
                z += tl.load(offsets + column, mask=known, other=0.0)[None, :]
            mine = tl.load(own + row, mask=there, other=-1)
            # Few tiles have somebody's own class in them, or are the last one.
            inside = (mine >= first) & (mine < first + BLOCK_CLASSES)
            if (tl.max(inside.to(tl.int32), 0) > 0) | (first + BLOCK_CLASSES > classes):
                other = known[None, :] & (column[None, :] != mine[:, None])
                z = tl.where(other, z, float("-inf"))
            if MAPPED:
                # After the branch: beside their exponentials there is no room to keep the scores.
                edge = tl.load(threshold + row, mask=there, other=0.0)[:, None]
                zeroth = tl.load(constant + row, mask=there, other=0.0)[:, None]
                first_order = tl.load(linear + row, mask=there, other=0.0)[:, None]
                second = tl.load(quadratic + row, mask=there, other=0.0)[:, None]
                hard = z > edge
                # Finite, which the own class and masked ones are not.
                plain = tl.where(hard, z, 0.0)
                z = tl.where(hard, zeroth + (first_order + second * plain) * plain, z)
                z -= tl.load(shift + row, mask=there, other=0.0)[:, None]
            e = tl.exp2(z)
            if HAS_COUNTS:
                e *= tl.load(counts + column, mask=known, other=0.0)[None, :]
            partial = part.to(tl.int64) * rows + row
            if SUMS:
                tl.store(sums + partial, tl.sum(e, 1), mask=there)
            if HARD:
                weight = tl.where(hard, e, 0.0)
                tl.store(hard_sums + partial, tl.sum(weight, 1), mask=there)
                tl.store(hard_scores + partial, tl.sum(weight * plain, 1), mask=there)
                tl.store(hard_squares + partial, tl.sum(weight * plain * plain, 1), mask=there)
            if TILTS:
                tl.store(tilts + partial, tl.sum(e * tl.where(e > 0, z, 0.0), 1), mask=there)
            if TOPS:
                tl.store(tops + partial, tl.max(z, 1), mask=there)
            if WRITE:
                if MAPPED:
                    e *= tl.where(hard, first_order + 2 * second * plain, 1.0)
                if BENT:
                    high = tl.load(level + row, mask=there, other=0.0)
                    steep = tl.load(slope + row, mask=there, other=0.0)
                    e *= high[:, None] + steep[:, None] * tl.where(e > 0, z, 0.0)
                # In two halves, which need half the room on their way out.
                halves = tl.reshape(e, (BLOCK_ROWS, 2, BLOCK_CLASSES // 2))
                left_half, right_half = tl.split(tl.permute(halves, (0, 2, 1)))
                out.store([first_row, first], left_half.to(out.dtype))
                out.store([first_row, first + BLOCK_CLASSES // 2], right_half.to(out.dtype))


@triton.jit
def bend(
    out,
    level,
    slope,
    counts,
    classes,
    out_stride,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn exponentials ``e`` that were written into ``e (level + slope z)``, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = column < classes
    at = out + row * out_stride + column
    e = tl.load(at, mask=known, other=0.0).to(tl.float32)
    z = tl.log2(tl.where(e > 0, e, 1.0))
    if HAS_COUNTS:
        z -= tl.log2(tl.load(counts + column, mask=known, other=1.0))
    bent = e * (tl.load(level + row) + tl.load(slope + row) * z)
    tl.store(at, bent.to(out.dtype.element_ty), mask=known)


@triton.jit
def find_hardest(
    query,
    keys,
    offsets,
    own,
    tiles,
    places,
    classes,
    stride,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_CLASSES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The class of the largest score of each row, in the tile where it is known to be."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(tiles + row) * BLOCK_CLASSES + tl.arange(0, BLOCK_CLASSES)
    known = column < classes
    key_row = tl.where(known, column, 0)
    z = tl.zeros((BLOCK_CLASSES,), dtype=tl.float32)
    for start in range(0, stride, BLOCK_SIZE):
        place = start + tl.arange(0, BLOCK_SIZE)
        inside = place < stride
        left = tl.load(query + row * stride + place, mask=inside, other=0.0).to(tl.float32)
        at = keys + key_row[:, None] * stride + place[None, :]
        right = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
        z += tl.sum(left[None, :] * right, 1)
    if HAS_OFFSETS:
        z += tl.load(offsets + column, mask=known, other=0.0)
    z = tl.where(known & (column != tl.load(own + row)), z, float("-inf"))
    best = tl.max(z, 0)
    first = tl.min(tl.where(z == best, column, classes), 0)
    tl.store(places + row, tl.minimum(first, classes - 1))


@triton.jit
def to_unit(
    vectors,
    units,
    inverses,
    unit_stride,
    count,
    size,
    TINY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Rows of length one, and what they were multiplied with; a zero row stays zero.

    Rows of the result may be longer than those of the vectors; they end with zeros.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = tl.arange(0, BLOCK_SIZE)
    there = (row < count)[:, None]
    mask = there & (place < size)[None, :]
    at = vectors + row[:, None] * size + place[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(x * x, 1))
    inverse = tl.where(length > TINY, 1.0 / tl.maximum(length, TINY), 0.0)
    tl.store(inverses + row, inverse, mask=row < count)
    out = units + row[:, None] * unit_stride + place[None, :]
    wide = there & (place < unit_stride)[None, :]
    tl.store(out, (x * inverse[:, None]).to(units.dtype.element_ty), mask=wide)


@triton.jit
def through_unit(
    gradient,
    vectors,
    inverses,
    factor,
    count,
    size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Turn the gradient of unit rows, in place, into that of the rows, times a factor."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = tl.arange(0, BLOCK_SIZE)
    mask = (row < count)[:, None] & (place < size)[None, :]
    at = row[:, None] * size + place[None, :]
    inverse = tl.load(inverses + row, mask=row < count, other=0.0)[:, None]
    unit = tl.load(vectors + at, mask=mask, other=0.0).to(tl.float32) * inverse
    g = tl.load(gradient + at, mask=mask, other=0.0)
    along = tl.sum(g * unit, 1)
    result = (g - along[:, None] * unit) * (inverse * tl.load(factor))
    tl.store(gradient + at, result, mask=mask)
