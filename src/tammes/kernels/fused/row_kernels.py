"""Triton kernels of the dense split on a GPU: everything around its three matrix products.

All but ``weigh``, ``reduce_rows`` and ``column_sums`` process one row per program, in single
precision whatever the dtype of the tensors; each replaces about ten launches of torch. See
:mod:`tammes.kernels.dense_gpu`.
"""

import torch
import triton
import triton.language as tl

from tammes import angles, similarity

TINY = tl.constexpr(similarity.TINY)
HUGE = tl.constexpr(similarity.HUGE)
ROUNDING = tl.constexpr(angles.rounding_of(torch.float32))


@triton.jit
def weigh(
    labels, kept, valid, weights, total, ignored, count, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Equal weights of the valid examples, and labels with class 0 for the ignored ones.

    One program for the whole batch. With MEAN the weights sum to one.
    """
    number = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < count
        label = tl.load(labels + row, mask=inside, other=0)
        counts = inside & (label != ignored)
        number += counts.to(tl.float32)
        tl.store(kept + row, tl.where(counts, label, 0), mask=inside)
        tl.store(valid + row, counts, mask=inside)
        if not MEAN:
            tl.store(weights + row, counts.to(tl.float32), mask=inside)
    whole = tl.maximum(tl.sum(number, 0), 1.0)
    tl.store(total, whole)
    if MEAN:
        for start in range(0, count, BLOCK):
            row = start + tl.arange(0, BLOCK)
            inside = row < count
            counts = tl.load(labels + row, mask=inside, other=0) != ignored
            tl.store(weights + row, counts.to(tl.float32) / whole, mask=inside)


@triton.jit
def pair(
    features,
    prototypes,
    labels,
    valid,
    bias,
    queries,
    units,
    inverses,
    own_inverses,
    class_inverses,
    targets,
    gaps,
    opposites,
    kept,
    ignored,
    cosine,
    sine,
    count,
    classes,
    size,
    UNIT: tl.constexpr,
    ANGLES: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WRITE: tl.constexpr,
    LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the query of a feature, and its similarity to the target prototype.

    With UNIT the query is normalised and the target is the cosine ``1 - gap``; with ANGLES ``gap``
    and ``opposite`` are written too. Otherwise the target is the inner product. A row that is not
    valid, for which ``valid`` has the value ``ignored``, is read as zero, whatever it holds. The
    target is NaN for a label out of range, and for a valid row whose class is masked by a bias of
    ``-inf``. With WRITE, programs from ``count`` on copy a prototype to ``units``. With UNIT they
    write its inverse norm, and the copy is normalised.

    With LOSS the numbers belong to a cross entropy: labels are written to ``kept``, 0 for a row
    that is not valid or has a label out of range, and with ANGLES the target is the cosine of the
    angle plus a margin, whose cosine and sine are given, and ``gaps`` gets its derivative by the
    cosine.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    if row < count:
        label = tl.load(labels + row).to(tl.int64)
        if HAS_VALID:
            counts = tl.load(valid + row) != ignored
            if LOSS:
                label = tl.where(counts, label, 0)
        # A label out of range must not read out of bounds, and has to show in the result.
        known = (label >= 0) & (label < classes)
        own = tl.where(known, label, 0)
        if LOSS:
            tl.store(kept + row, own)
        x = tl.load(features + row * size + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(prototypes + own * size + place, mask=inside, other=0.0).to(tl.float32)
        # Without ``valid``, the weights of the examples are NaN where the target class is masked.
        hidden = 0.0
        if HAS_VALID:
            x = tl.where(counts, x, 0.0)
            hidden = tl.where(counts, float("nan"), 0.0)
        if UNIT:
            # Scaled down by a power of two where squares would overflow.
            shrink = tl.where(tl.max(tl.abs(x), 0) > HUGE, 8.271806125530277e-25, 1.0)
            length = tl.sqrt(tl.sum((x * shrink) * (x * shrink), 0))
            inverse = tl.where(length > TINY, 1.0 / tl.maximum(length, TINY), 0.0) * shrink
            own_length = tl.sqrt(tl.sum(w * w, 0))
            own_inverse = tl.where(own_length > TINY, 1.0 / tl.maximum(own_length, TINY), 0.0)
            x *= inverse
            w *= own_inverse
            directed = (inverse > 0) & (own_inverse > 0)
            gap = tl.where(directed, tl.sum((x - w) * (x - w), 0) * 0.5, 1.0)
            gap = tl.where(known, gap, float("nan"))
            tl.store(inverses + row, inverse)
            tl.store(own_inverses + row, own_inverse)
            target = 1.0 - gap
            if ANGLES:
                opposite = tl.where(directed, tl.sum((x + w) * (x + w), 0) * 0.5, 1.0)
                if LOSS:
                    target, gap = shifted_cosine(gap, opposite, cosine, sine)
                else:
                    tl.store(opposites + row, opposite)
                tl.store(gaps + row, gap)
            tl.store(targets + row, target)
        else:
            target = tl.sum(x * w, 0)
            if HAS_BIAS:
                shift = tl.load(bias + own)
                target = tl.where(shift == float("-inf"), hidden, target + shift)
            tl.store(targets + row, tl.where(known, target, float("nan")))
        tl.store(queries + row * size + place, x.to(queries.dtype.element_ty), mask=inside)
    else:
        at = (row - count) * size + place
        w = tl.load(prototypes + at, mask=inside, other=0.0).to(tl.float32)
        if UNIT:
            length = tl.sqrt(tl.sum(w * w, 0))
            inverse = tl.where(length > TINY, 1.0 / tl.maximum(length, TINY), 0.0)
            tl.store(class_inverses + row - count, inverse)
            w *= inverse
        if WRITE:
            tl.store(units + at, w.to(units.dtype.element_ty), mask=inside)


@triton.jit
def shifted_cosine(gap, opposite, cosine, sine):
    """Return :func:`tammes.angles.shifted_cosine` and its derivative by the cosine."""
    square = gap * opposite
    root = tl.sqrt(square)
    moved = cosine * (1.0 - gap) - sine * root
    border = tl.where(sine >= 0, 1.0 + cosine - gap, gap - 1.0 + cosine)
    side = tl.where(border > 0, 1.0, tl.where(border < 0, -1.0, 0.0))
    inside = square > ROUNDING
    cotangent = tl.where(inside, (opposite - gap) / (2.0 * tl.where(inside, root, 1.0)), 0.0)
    value = side * moved + tl.where(sine >= 0, side - 1.0, 1.0 - side)
    return value, side * (cosine + sine * cotangent)


@triton.jit
def softmax_of_others(
    products,
    factors,
    shifts,
    labels,
    softmax,
    others,
    rivals,
    valid,
    targets,
    slopes,
    ignored,
    margin,
    classes,
    scale,
    lift,
    HAS_FACTORS: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
    LOSS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-sum-exp of the other classes' scores, and their softmax times ``lift`` and the factors.

    A score is ``scale (product factor + shift)``; a shift of ``-inf`` masks a class, and the other
    classes that are not masked are counted. The softmax may overwrite the products. With LOSS,
    ``others`` gets the cross entropy at the target minus ``margin`` instead, and ``slopes`` its
    derivative; both are 0 where ``valid`` has the value ``ignored``. With WHOLE the softmax has -1
    for the target class, else 0.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    many = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        known = column < classes
        f = tl.load(products + row * classes + column, mask=known, other=0.0) * scale
        if HAS_FACTORS:
            f *= tl.load(factors + column, mask=known, other=0.0)
        if HAS_SHIFTS:
            shift = tl.load(shifts + column, mask=known, other=float("-inf"))
            many += tl.where((shift > float("-inf")) & (column != label), 1.0, 0.0)
            f += shift * scale
        f = tl.where(known & (column != label), f, float("-inf"))
        # NaN must show in the result; a maximum might hide it.
        higher = tl.where(f > top, f, top)
        base = tl.where(higher > float("-inf"), higher, 0.0)
        total = total * tl.exp(tl.where(top > float("-inf"), top - base, float("-inf")))
        total += tl.exp(f - base)
        top = higher
    if HAS_SHIFTS and not LOSS:
        tl.store(rivals + row, tl.sum(many, 0))
    best = tl.max(top, 0)
    base = tl.where(best > float("-inf"), best, 0.0)
    whole = tl.sum(total * tl.exp(top - base), 0)
    level = base + tl.log(whole)
    if LOSS:
        excess = level - scale * (tl.load(targets + row) - margin)
        counts = tl.load(valid + row) != ignored
        tail = tl.exp(-tl.abs(excess))
        near = 1.0 + tail
        # log(1 + tail) with all digits: what the sum lost is put back as a factor.
        kept = near - 1.0
        soft = tl.where(kept > 0, tl.log(near) * (tail / tl.where(kept > 0, kept, 1.0)), tail)
        level = tl.where(counts, tl.maximum(excess, 0.0) + soft, 0.0)
        tl.store(slopes + row, tl.where(counts, tl.where(excess < 0, tail, 1.0) / near, 0.0))
    tl.store(others + row, level)
    # Not through the logarithm, which lost digits when the shift was added.
    lift = tl.where(whole == 0, 0.0, lift / whole)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        known = column < classes
        f = tl.load(products + row * classes + column, mask=known, other=0.0) * scale
        value = lift
        if HAS_FACTORS:
            factor = tl.load(factors + column, mask=known, other=0.0)
            f *= factor
            value = lift * factor
        if HAS_SHIFTS:
            f += tl.load(shifts + column, mask=known, other=0.0) * scale
        value = tl.where(column != label, tl.exp(f - base) * value, -1.0 if WHOLE else 0.0)
        at = softmax + row * classes + column
        tl.store(at, value.to(softmax.dtype.element_ty), mask=known)


@triton.jit
def reduce_rows(
    rows, labels, loss, numbers, ignored, count, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean or sum of the losses; also in ``numbers``, with the number of valid examples.

    One program. The number is at least 1.
    """
    whole = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < count
        whole += tl.load(rows + row, mask=inside, other=0.0)
        number += (inside & (tl.load(labels + row, mask=inside, other=0) != ignored)).to(tl.float32)
    valid = tl.maximum(tl.sum(number, 0), 1.0)
    result = tl.sum(whole, 0)
    if MEAN:
        result /= valid
    tl.store(loss, result)
    tl.store(numbers, result)
    tl.store(numbers + 1, valid)


@triton.jit
def pair_back(
    features,
    prototypes,
    labels,
    valid,
    inverses,
    own_inverses,
    d_query,
    d_others,
    d_target,
    d_gap,
    d_opposite,
    weighted,
    own_rows,
    parts,
    ignored,
    classes,
    size,
    factor,
    scale,
    UNIT: tl.constexpr,
    ANGLES: tl.constexpr,
    HAS_VALID: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    LOSS: tl.constexpr,
    WHOLE: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of a feature and its target prototype from those of its numbers.

    ``d_query`` comes without the row's factor ``d_others factor`` and is overwritten with the
    gradient of the feature. ``weighted`` is the query times that factor, for the product that
    follows. ``own_rows`` will be added to the gradient of the target class: of the prototypes as
    stored with SCALED, else of normalised ones.

    With LOSS the numbers belong to a cross entropy: ``d_others`` has its slopes, ``d_target`` the
    gradient of the loss, a single number, which MEAN divides by the second one in ``d_gap``, and
    with ANGLES ``d_opposite`` has the derivative of the target by the cosine. The factor of each
    row is written to ``parts``. With WHOLE, the products include the target class.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    at = row * size + place
    label = tl.load(labels + row).to(tl.int64)
    label = tl.where((label >= 0) & (label < classes), label, 0)
    x = tl.load(features + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(prototypes + label * size + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_VALID:
        x = tl.where(tl.load(valid + row) != ignored, x, 0.0)
    part = tl.load(d_others + row)
    if LOSS:
        part *= tl.load(d_target)
        if MEAN:
            part /= tl.load(d_gap + 1)
        closer = -scale * part
        if ANGLES:
            closer *= tl.load(d_opposite + row)
    else:
        closer = tl.load(d_target + row)
    part *= factor
    if LOSS:
        tl.store(parts + row, part)
    inverse = 1.0
    if UNIT:
        inverse = tl.load(inverses + row)
        own_inverse = tl.load(own_inverses + row)
        x *= inverse
        w *= own_inverse
        directed = (inverse > 0) & (own_inverse > 0)
        if ANGLES and not LOSS:
            closer += tl.load(d_opposite + row) - tl.load(d_gap + row)
        closer = tl.where(directed, closer, 0.0)
        # The difference is along the vectors themselves, which projections remove. Of the two,
        # the shorter sum loses fewer digits.
        sign = tl.where(tl.sum(x * w, 0) < 0, -1.0, 1.0)
        d_x = closer * (w - sign * x)
        d_w = closer * (x - sign * w)
        if SCALED:
            d_w *= own_inverse
    elif WHOLE:
        d_x = 0.0
    else:
        d_x = closer * w
        d_w = closer * x
    if not WHOLE:
        tl.store(own_rows + at, d_w, mask=inside)
    tl.store(weighted + at, (x * part).to(weighted.dtype.element_ty), mask=inside)
    if HAS_QUERY:
        d_x += tl.load(d_query + at, mask=inside, other=0.0) * part
        if UNIT:
            d_x = (d_x - x * tl.sum(d_x * x, 0)) * inverse
        tl.store(d_query + at, d_x, mask=inside)


@triton.jit
def through_lengths(gradient, vectors, inverses, size, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Project a gradient, in place, onto the space orthogonal to each row.

    With SCALED it is already the gradient of the rows as stored, else of unit rows.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    at = row * size + place
    inverse = tl.load(inverses + row)
    unit = tl.load(vectors + at, mask=inside, other=0.0).to(tl.float32) * inverse
    g = tl.load(gradient + at, mask=inside, other=0.0)
    g -= unit * tl.sum(g * unit, 0)
    if not SCALED:
        g *= inverse
    tl.store(gradient + at, g, mask=inside)


@triton.jit
def column_sums(
    matrix,
    weights,
    labels,
    own,
    sums,
    count,
    classes,
    own_factor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up the rows of a matrix times their weights, by chunks: the gradient of a bias.

    Each row also adds ``own`` times ``own_factor`` to the column of its label.
    """
    blocks = tl.cdiv(classes, TILE)
    chunk = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * TILE + tl.arange(0, TILE)
    known = column < classes
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, tl.minimum(count - chunk * CHUNK, CHUNK), TILE):
        row = chunk * CHUNK + start + tl.arange(0, TILE)
        inside = row < count
        weight = tl.load(weights + row, mask=inside, other=0.0)
        at = row.to(tl.int64)[:, None] * classes + column[None, :]
        values = tl.load(matrix + at, mask=inside[:, None] & known[None, :], other=0.0)
        extra = tl.load(own + row, mask=inside, other=0.0) * own_factor
        here = tl.load(labels + row, mask=inside, other=-1)[:, None] == column[None, :]
        values = values.to(tl.float32) * weight[:, None] + tl.where(here, extra[:, None], 0.0)
        total += tl.sum(values, 0)
    tl.store(sums + chunk.to(tl.int64) * classes + column, total, mask=known)
