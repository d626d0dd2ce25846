"""Triton kernels of the fused split; see :mod:`tammes.kernels.fused.engine`.

Everything is in units of ``log 2``, so that an exponential is one instruction. Addresses are 64
bits wide. Everything past the last row, class or dimension is masked, so any shape will do.
"""

import triton
import triton.language as tl


@triton.jit
def winners(products, CENTERS: tl.constexpr):
    """Keep the largest product of each class, the first if tied; the others become ``-inf``."""
    kept = ()
    for k in tl.static_range(CENTERS):
        z = products[k]
        for rival in tl.static_range(CENTERS):
            if rival < k:
                z = tl.where(products[rival] >= products[k], float("-inf"), z)
            elif rival > k:
                z = tl.where(products[rival] > products[k], float("-inf"), z)
        kept += (z,)
    return kept


@triton.jit
def average(products, sharpness, CENTERS: tl.constexpr):
    """Average of a class's products with weights ``2^(sharpness z)``, and its derivatives."""
    top = products[0]
    for k in tl.static_range(1, CENTERS):
        top = tl.maximum(top, products[k], propagate_nan=tl.PropagateNan.ALL)
    mean = tl.zeros_like(top)
    total = tl.zeros_like(top)
    for k in tl.static_range(CENTERS):
        weight = tl.exp2((products[k] - top) * sharpness)
        mean += weight * products[k]
        total += weight
    mean /= total
    slopes = ()
    for k in tl.static_range(CENTERS):
        weight = tl.exp2((products[k] - top) * sharpness) / total
        # The factor is log 2, from the derivative of 2^x.
        slope = weight * (1 + 0.6931471805599453 * sharpness * (products[k] - mean))
        slopes += (slope,)
    return mean, slopes


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
    spreads,
    sharpness,
    rows,
    classes,
    size,
    plane,
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
    CENTERS: tl.constexpr,
    SOFT: tl.constexpr,
    SPREADS: tl.constexpr,
    PRECISION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CLASSES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Compute tiles of scores, their exponentials, and the sums of each row within each tile.

    A score is ``z = query . key + row_offset + offset`` and its exponential ``e = 2^z`` times the
    count of the class, zero for the target class. The kernel writes ``e``, or with BENT
    ``e (level + slope z)``; and for each row and tile the sum of ``e`` (SUMS), that of ``e z``
    (TILTS), and the largest ``z`` (TOPS). ``query``, ``keys`` and ``out`` are tensor descriptors,
    which read zero and write nothing out of bounds. Each program processes many tiles, so that the
    loads of one overlap the exponentials of the one before; with GATED, blocks of rows whose gate
    is zero are skipped.

    With MAPPED, a ``z`` above the threshold is replaced by a quadratic polynomial of it, and what
    is written is multiplied by the derivative; the shift of the row is subtracted after the map,
    not as part of ``row_offset``. HARD sums what the gradients of the coefficients need.

    A class has CENTERS keys side by side, and ``out`` has as many planes of columns. With max
    pooling, the plane of the largest product gets its ``e`` and the others zero, as if their scores
    were ``-inf``. With SOFT the products are averaged, and each plane gets ``e`` times its
    derivative of the average. SPREADS sums ``e (sum_k slope_k product_k - average)``.
    """
    # Rows vary fastest, so that concurrent programs share a few blocks of keys.
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
            products = (tl.zeros((BLOCK_ROWS, BLOCK_CLASSES), dtype=tl.float32),) * CENTERS
            for start in range(0, size, BLOCK_SIZE):
                left = query.load([first_row, start])
                more = ()
                for k in tl.static_range(CENTERS):
                    right = keys.load([first, k * size + start])
                    z = tl.dot(left, right.T, products[k], input_precision=PRECISION)
                    more += (z,)
                products = more
            slopes = products
            if SOFT:
                heat = tl.load(sharpness)
                mean, slopes = average(products, heat, CENTERS)
                if SPREADS:
                    spread = -mean
                    for k in tl.static_range(CENTERS):
                        spread += slopes[k] * products[k]
                products = (mean,)
            else:
                products = winners(products, CENTERS)
            column = first + tl.arange(0, BLOCK_CLASSES)
            known = column < classes
            mine = tl.load(own + row, mask=there, other=-1)
            # Only tiles with a row's target class, and the last one, need a mask.
            inside = (mine >= first) & (mine < first + BLOCK_CLASSES)
            special = (tl.max(inside.to(tl.int32), 0) > 0) | (first + BLOCK_CLASSES > classes)
            row_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
            row_tilt = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
            row_top = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
            row_hard = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
            row_scores = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
            row_squares = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
            partial = part.to(tl.int64) * rows + row
            for k in tl.static_range(1 if SOFT else CENTERS):
                z = products[k] + tl.load(row_offset + row, mask=there, other=0.0)[:, None]
                if HAS_OFFSETS:
                    z += tl.load(offsets + column, mask=known, other=0.0)[None, :]
                if special:
                    other = known[None, :] & (column[None, :] != mine[:, None])
                    z = tl.where(other, z, float("-inf"))
                if MAPPED:
                    # Outside the branch above: registers cannot hold scores and exponentials.
                    edge = tl.load(threshold + row, mask=there, other=0.0)[:, None]
                    zeroth = tl.load(constant + row, mask=there, other=0.0)[:, None]
                    first_order = tl.load(linear + row, mask=there, other=0.0)[:, None]
                    second = tl.load(quadratic + row, mask=there, other=0.0)[:, None]
                    hard = z > edge
                    # Finite even where z is -inf, as for the target class and masked ones.
                    plain = tl.where(hard, z, 0.0)
                    z = tl.where(hard, zeroth + (first_order + second * plain) * plain, z)
                    z -= tl.load(shift + row, mask=there, other=0.0)[:, None]
                e = tl.exp2(z)
                if HAS_COUNTS:
                    e *= tl.load(counts + column, mask=known, other=0.0)[None, :]
                row_sum += tl.sum(e, 1)
                if HARD:
                    weight = tl.where(hard, e, 0.0)
                    row_hard += tl.sum(weight, 1)
                    row_scores += tl.sum(weight * plain, 1)
                    row_squares += tl.sum(weight * plain * plain, 1)
                if TILTS:
                    row_tilt += tl.sum(e * tl.where(e > 0, z, 0.0), 1)
                if TOPS:
                    row_top = tl.maximum(row_top, tl.max(z, 1))
                if WRITE:
                    if MAPPED:
                        e *= tl.where(hard, first_order + 2 * second * plain, 1.0)
                    if BENT:
                        high = tl.load(level + row, mask=there, other=0.0)
                        steep = tl.load(slope + row, mask=there, other=0.0)
                        e *= high[:, None] + steep[:, None] * tl.where(e > 0, z, 0.0)
                    if SPREADS:
                        tl.store(spreads + partial, tl.sum(e * spread, 1), mask=there)
                    if SOFT:
                        for center in tl.static_range(CENTERS):
                            written = e * slopes[center]
                            store_halves(out, written, first_row, center * plane + first)
                    else:
                        store_halves(out, e, first_row, k * plane + first)
            if SUMS:
                tl.store(sums + partial, row_sum, mask=there)
            if HARD:
                tl.store(hard_sums + partial, row_hard, mask=there)
                tl.store(hard_scores + partial, row_scores, mask=there)
                tl.store(hard_squares + partial, row_squares, mask=there)
            if TILTS:
                tl.store(tilts + partial, row_tilt, mask=there)
            if TOPS:
                tl.store(tops + partial, row_top, mask=there)


@triton.jit
def store_halves(out, tile, first_row, first):
    """Write a tile in two halves, which need half the staging memory."""
    rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    left, right = tl.split(tl.permute(tl.reshape(tile, (rows, 2, half)), (0, 2, 1)))
    out.store([first_row, first], left.to(out.dtype))
    out.store([first_row, first + half], right.to(out.dtype))


@triton.jit
def bend(
    out,
    level,
    slope,
    counts,
    classes,
    out_stride,
    plane,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn written exponentials ``e`` into ``e (level + slope z)``, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = column < classes
    at = out + row * out_stride + tl.program_id(2).to(tl.int64) * plane + column
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
    sharpness,
    classes,
    size,
    HAS_OFFSETS: tl.constexpr,
    CENTERS: tl.constexpr,
    SOFT: tl.constexpr,
    BLOCK_CLASSES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Find the class of the largest score of each row, within the tile that contains it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(tiles + row) * BLOCK_CLASSES + tl.arange(0, BLOCK_CLASSES)
    known = column < classes
    key_row = tl.where(known, column, 0)
    products = ()
    for k in tl.static_range(CENTERS):
        z = tl.zeros((BLOCK_CLASSES,), dtype=tl.float32)
        for start in range(0, size, BLOCK_SIZE):
            place = start + tl.arange(0, BLOCK_SIZE)
            inside = place < size
            left = tl.load(query + row * size + place, mask=inside, other=0.0).to(tl.float32)
            at = keys + (key_row[:, None] * CENTERS + k) * size + place[None, :]
            right = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
            z += tl.sum(left[None, :] * right, 1)
        products += (z,)
    if SOFT:
        z, _ = average(products, tl.load(sharpness), CENTERS)
    else:
        z = products[0]
        for k in tl.static_range(1, CENTERS):
            z = tl.maximum(z, products[k])
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
    """Normalise rows, and write their inverse norms; a zero row stays zero.

    Rows of the result may be longer than those of the vectors; they are padded with zeros.
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
    """Turn the gradient of unit rows into that of the rows, times a factor, in place."""
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
