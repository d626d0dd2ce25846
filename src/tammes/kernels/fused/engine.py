r"""Fused kernel: the streamed split in Triton; scores are never written, exponentials once.

For a block of rows, one kernel computes the scores tile by tile, takes their exponentials in single
precision, sums them per row, and writes them in the dtype of the products. No other pass over the
block is needed: the gradient of a score is its exponential times a factor of its row,

    d loss / d f_c = 2^(z_c) * (d_others / sum),

and that factor is applied to the ``(n, D)`` side of the two products that follow, for features and
for prototypes. The mean of the scores is a product with the sum of the keys; the target class and
the hardest class are computed from pairs of rows in full precision. So besides the three products,
the exponentials are written once and read twice.

Exponentials need a shift per row that is roughly the largest score; roughly is enough, since
float32 and bfloat16 range from 2^-126 to 2^127. If the scores are bounded by the scale, a quarter
of the scale will do for all rows. Otherwise the shift is estimated from a few classes, and rows for
which it turns out wrong are recomputed; this is decided on the GPU, by kernels that return at once
if there is nothing to do. In float16, whose range is far smaller, nothing is written before the
sums are known; the scores are recomputed for the gradient.
"""

import torch
from torch import Tensor

from tammes.kernels.fused import launch
from tammes.kernels.fused.launch import LOG2E, Work
from tammes.kernels.matmul import add_product, halved, multiply
from tammes.kernels.problem import Problem
from tammes.kernels.score_map import MappedRows
from tammes.kernels.streamed.score_blocks import Back, Found, Needs, Rows, nothing_here
from tammes.kernels.tiling import (
    MOST_CENTERS,
    WIDEST,
    Plan,
    fused_blocks,
    longest,
    most_prototypes,
    padded,
)
from tammes.pooling import Pooled
from tammes.similarity import Cosine, Similarity
from tammes.split import FREE_MAP, MAPPED

_REACH = 64.0
"""Largest bound on the scores for which one shift is safe for all rows."""
_LOW, _HIGH = 2.0**-90, 2.0**100
"""A sum outside this range means that the shift was wrong."""
_SAMPLE = 256
"""Classes from which a shift is estimated."""
_HALF_SUM = 14.0
"""Exponentials in float16 sum to two to this power, so that small ones do not underflow."""


def why_not(problem: Problem, reads: frozenset[str]) -> str | None:
    """Return the reason a problem cannot use this kernel, or none."""
    features, prototypes = problem.features, problem.prototypes
    if features.device.type != "cuda" and not launch.INTERPRETED:
        return f"it runs on CUDA, and the features are on {features.device.type}"
    if FREE_MAP in reads:
        return "losses that map the other scores, but by quadratic_above, are streamed"
    if MAPPED in reads and not reads.isdisjoint(("expected", "mean")):
        return "of mapped scores it computes the log-sum-exp alone"
    if "softplus" in reads:
        return "losses that sum over all classes by themselves, such as bce, are streamed"
    if torch.float64 in (features.dtype, prototypes.dtype):
        return "it computes in single precision, and an input is in double"
    if problem.similarity.centers > 1 and "mean" in reads:
        return "means over scores of classes of several prototypes are streamed"
    if problem.similarity.centers > MOST_CENTERS:
        centers = prototypes.shape[1]
        return f"it takes up to {MOST_CENTERS} prototypes per class, and these have {centers}"
    if prototypes.shape[-1] > WIDEST:
        return f"it takes features of up to {WIDEST} numbers, and these have {prototypes.shape[-1]}"
    return None


def product_type(problem: Problem, plan: Plan) -> torch.dtype:
    """Dtype of the inputs of products: that of autocast, or of the tensors if both are half."""
    if plan.product_dtype is not None:
        return plan.product_dtype
    dtype = problem.features.dtype
    half = dtype in (torch.bfloat16, torch.float16) and problem.prototypes.dtype == dtype
    return dtype if half else torch.float32


def fused_rows(problem: Problem, plan: Plan, needs: Needs) -> tuple["FusedRows", list[slice]]:
    """Build the engine, and the slices of rows it takes."""
    width = product_type(problem, plan).itemsize
    count, size = problem.features.shape
    centers = problem.similarity.centers
    blocks = fused_blocks(count, most_prototypes(problem), size, width, centers)
    return FusedRows(problem, plan, needs, longest(blocks)), blocks


class FusedRows:
    """Engine for blocks of up to ``most`` rows against all classes, in Triton kernels.

    The scale of the problem is a tensor, and its similarity is bound.
    """

    def __init__(self, problem: Problem, plan: Plan, needs: Needs, most: int) -> None:
        prototypes = problem.prototypes.contiguous()
        assert isinstance(problem.scale, Tensor)
        self.prototypes, self.bias, self.needs, self.reads = (
            prototypes,
            problem.bias,
            needs,
            plan.reads,
        )
        self.one_shift = plan.bound is not None and plan.bound <= _REACH
        self.dtype, self.scale = product_type(problem, plan), problem.scale.float()
        share = problem.share
        self.counts = None if share is None or share.counts is None else share.counts.float()
        # Separate from the offsets, whose sums must stay finite.
        self.there, self.absent = problem.there, None
        if self.there is not None:
            self.absent = torch.where(self.there, 0.0, -torch.inf)
        self.similarity: Similarity = problem.similarity
        self.centers, self.sharpness = problem.similarity.centers, None
        if isinstance(problem.similarity, Pooled):
            self.similarity, temperature = problem.similarity.inner, problem.similarity.temperature
            if temperature is not None:
                self.sharpness = (self.scale * temperature).reciprocal().view(1)
        self.wide_keys, self.inverses, self.offsets = self._make_keys()
        self.keys = self.wide_keys[:, : prototypes.shape[-1]]
        self.shape = (most, self.centers * padded(len(prototypes), self.centers))
        self.scratch: Tensor | None = None
        self.gradient: Tensor | None = None
        self.d_offsets: Tensor | None = None
        self.d_total: Tensor | None = None
        self.total: Tensor | None = None
        if "mean" in plan.reads:
            self.many = torch.ones_like(prototypes[:, 0], dtype=torch.float32)
            self.many = self.many if self.counts is None else self.counts
            self.many = self.many if self.there is None else self.many * self.there
            self.total = multiply(self.many[None].to(self.dtype), self.keys)[0]

    def _make_keys(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Keys in the dtype of the products, inverse norms, offsets of the classes."""
        rows = self.prototypes.flatten(0, -2)
        if isinstance(self.similarity, Cosine):
            keys, inverses = launch.unit_keys(rows, self.dtype)
            return keys, inverses, None if self.bias is None else self.bias.float()
        keys, offset = self.similarity.keys(rows.float())
        if self.bias is not None:
            offset = self.bias if offset is None else offset + self.bias
        return launch.widened(keys.to(self.dtype)), None, None if offset is None else offset.float()

    # ------------------------------------------------------------------ from queries to numbers

    def forward(self, rows: Rows) -> Found:
        """Compute the exponentials of all scores of these rows, and their sums."""
        if len(self.keys) == 0:
            return nothing_here(rows, self.reads)
        self.work = self._work(rows)
        if self.scratch is None and any(self.needs):
            self.scratch = self.prototypes.new_empty(self.shape, dtype=self.dtype)
        names = {"tops"} if "hardest" in self.reads else set()
        softmax = not self.reads.isdisjoint(("others", "expected"))
        if softmax:
            names |= {"sums", "tilts"} if "expected" in self.reads else {"sums"}
        if self.work.wants_sums:
            names |= {*launch.HARD}
        self.written = softmax and self.dtype != torch.float16 and any(self.needs)
        # With soft pooling, the scores cannot be recovered from what is written.
        self.written &= self.sharpness is None or "expected" not in self.reads
        parts = launch.parts(self.work, names)
        self.spreads: dict[str, Tensor] = {}
        if self.sharpness is not None and self.needs.scale:
            self.spreads = launch.parts(self.work, {"spreads"})
        if parts:
            out = self.scratch if self.written else None
            launch.exponentials(self._shifted(), parts | self.spreads, out)
        numbers: dict[str, Tensor] = {}
        if softmax:
            if not self.one_shift:
                self._mend(parts)
            self.sum = parts["sums"].sum(0)
            numbers["others"] = (self.shift + self.sum.log2()) / LOG2E
            self.hard = [parts[name].sum(0) for name in launch.HARD if name in parts]
        if "expected" in self.reads:
            below = torch.where(self.sum > 0, parts["tilts"].sum(0) / self.sum, 0.0)
            self.expected = (self.shift + below) / LOG2E
            numbers["expected"] = self.expected.clone()
        if "mean" in self.reads:
            numbers["mean"] = self._sum_of_scores(rows)
        place = launch.hardest(self.work, parts["tops"]) if "hardest" in self.reads else None
        return Found(numbers, place)

    def _work(self, rows: Rows) -> Work:
        """The rows in units of log 2; also sets the shift of each."""
        query = launch.widened((rows.query * LOG2E).to(self.dtype))
        zero = torch.zeros(len(rows.own), device=query.device)
        offset = zero if rows.offset is None else rows.offset.float() * LOG2E
        scaled = None if self.offsets is None else self.offsets * (self.scale * LOG2E)
        if self.absent is not None:
            scaled = self.absent if scaled is None else scaled + self.absent
        work = Work(query, self.wide_keys, rows.own.int(), offset, scaled, self.counts)
        work = work._replace(centers=self.centers, sharpness=self.sharpness)
        if rows.mapped is not None:
            work = _mapped_work(work, rows.mapped)
        self.shift = self.scale * (LOG2E / 4) + zero if self.one_shift else _estimate(work)
        return work

    def _shifted(self) -> Work:
        if self.work.mapped is not None:
            return self.work._replace(shift=self.shift)
        return self.work._replace(row_offset=self.work.row_offset - self.shift)

    def _mend(self, parts: dict[str, Tensor]) -> None:
        """Recompute the rows whose shift was wrong, with their largest score as the shift."""
        total = parts["sums"].sum(0)
        wrong = ~((total > _LOW) & (total < _HIGH))
        gate = launch.gates(wrong, self.dtype)
        found = launch.parts(self.work, {"tops"})
        launch.exponentials(self.work, found, gate=gate)
        top = found["tops"].amax(0)
        # Rows of skipped blocks have an undefined ``top``, but are not wrong.
        self.shift = torch.where(wrong & (top > float("-inf")), top, self.shift)
        out = self.scratch if self.written else None
        launch.exponentials(self._shifted(), parts | self.spreads, out, gate=gate)

    def _sum_of_scores(self, rows: Rows) -> Tensor:
        """Sum of the scores of all classes but the target."""
        assert self.total is not None
        own, query = rows.own.clamp_min(0), rows.query.float()
        total = query @ self.total
        mine = (query * self.keys.index_select(0, own).float()).sum(1)
        if self.offsets is not None:
            total = total + self.scale * (self.offsets @ self.many)
            mine = mine + self.scale * self.offsets.index_select(0, own)
        if rows.offset is not None:
            total = total + rows.offset * self.many.sum()
            mine = mine + rows.offset
        return total - torch.where(rows.own >= 0, mine, 0.0)

    # ------------------------------------------------------------------ and back

    def backward(self, rows: Rows, wanted: dict[str, Tensor | None], weights: Tensor) -> Back:
        """Multiply the exponentials with keys and queries, with the row factors on that side."""
        d_query = torch.zeros_like(rows.query)
        d_row = None if rows.offset is None else torch.zeros_like(weights)
        d_scale = None if self.offsets is None else torch.zeros_like(weights)
        back = Back(d_query, d_row, d_scale)
        if len(self.keys) == 0:
            return back
        factor = self._exponentials_to_gradient(wanted)
        if factor is not None and self.scratch is not None:
            back = self._products(self.scratch[: len(weights)], factor, rows, weights)
            if rows.mapped is not None:
                back = back._replace(mapped=self._of_map(rows.mapped, wanted["others"]))
        d_mean = wanted.get("mean")
        return back if d_mean is None else self._mean_back(back, d_mean, rows, weights)

    def _exponentials_to_gradient(self, wanted: dict[str, Tensor | None]) -> Tensor | None:
        """Turn the exponentials into the scores' gradient, up to the returned factor per row."""
        others, expected = wanted.get("others"), wanted.get("expected")
        if others is None and expected is None:
            return None
        others = torch.zeros_like(self.sum) if others is None else others
        inverse = torch.where(self.sum > 0, self.sum.reciprocal(), 0.0)
        if self.written and expected is None:
            return others * inverse
        assert self.scratch is not None
        if self.written and expected is not None:
            launch.bend(self.work, self.scratch, *self._bent(others, expected))
            return inverse
        # Computed only now, shifted so that each row sums to 2^14, which suits float16.
        moved = torch.where(self.sum > 0, self.sum.log2() - _HALF_SUM, 0.0)
        self.shift = self.shift + moved
        if expected is None:
            launch.exponentials(self._shifted(), self.spreads, self.scratch)
            return others * 2.0**-_HALF_SUM
        level, slope = self._bent(others, expected)
        # No number of a row is above 2^14 then: 2^z |level + slope z| for z up to 14.
        size = ((level + _HALF_SUM * slope).abs() + slope.abs()).clamp_min(1e-30)
        bent = (level / size, slope / size)
        launch.exponentials(self._shifted(), self.spreads, self.scratch, bent=bent)
        return size * 2.0**-_HALF_SUM

    def _of_map(self, mapped: MappedRows, d_others: Tensor | None) -> list[Tensor | None]:
        """Gradients of the map's numbers: scale, threshold and coefficients."""
        scale, _, constant, _, quadratic = mapped.numbers
        found: list[Tensor | None] = [None for _ in mapped.numbers]
        if self.work.wants_sums and d_others is not None:
            share = d_others * torch.where(self.sum > 0, self.sum.reciprocal(), 0.0)
            zeroth, first, second = (share * total for total in self.hard)
            first, second = first / LOG2E, second / (LOG2E**2 * scale)
            found[0] = zeroth * constant - second * quadratic / scale
            found[2:] = zeroth * scale, first, second
        return found

    def _bent(self, others: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        """``d_others + d_expected (1 + f - expected)`` as level + slope z, f = (z + shift) ln 2."""
        return others + expected * (1 + self.shift / LOG2E - self.expected), expected / LOG2E

    def _products(self, written: Tensor, factor: Tensor, rows: Rows, weights: Tensor) -> Back:
        heavy, classes = factor * weights, len(self.prototypes)
        heavy_query, first = rows.query * heavy[:, None], self.gradient is None
        if first and self.needs.prototypes:
            self.gradient = torch.empty_like(self.prototypes, dtype=torch.float32)
        zero = torch.zeros_like(factor)
        d_query, d_row, d_scale = torch.zeros_like(rows.query), zero, zero
        for k, plane in enumerate(written.chunk(self.centers, 1)):
            e, keys = plane[:, :classes], self.keys[k :: self.centers]
            if self.needs.features or self.needs.scale:
                d_query += multiply(e, keys)
            if self.gradient is not None:
                mine = self.gradient.view(classes, self.centers, -1)[:, k]
                add_product(mine, e.T, heavy_query, first=first)
            if rows.offset is not None:
                d_row = d_row + e.sum(1, dtype=torch.float32)
            if self.offsets is not None:
                d_scale = d_scale + multiply(e, self.offsets[:, None].to(self.dtype))[:, 0]
                low, size = halved(heavy[None], self.dtype)
                more = multiply(low, e)[0] * self.scale
                self._add_to_offsets(more if size is None else more * size)
        for spread in self.spreads.values():
            d_scale = d_scale - spread.sum(0) / (LOG2E * self.scale)
        return Back(d_query * factor[:, None], d_row * factor, d_scale * factor)

    def _mean_back(self, back: Back, d_mean: Tensor, rows: Rows, weights: Tensor) -> Back:
        """Add the gradient through ``mean``: the same for all classes but the target."""
        assert self.total is not None
        d_query, d_row, d_scale, _ = back
        own, mine = rows.own.clamp_min(0), torch.where(rows.own >= 0, d_mean, 0.0)
        own_keys = self.keys.index_select(0, own).float()
        d_query = d_query + d_mean[:, None] * self.total - mine[:, None] * own_keys
        heavy, heavy_own = weights * d_mean, weights * mine
        if self.needs.prototypes:
            d_total = heavy @ rows.query
            self.d_total = d_total if self.d_total is None else self.d_total + d_total
            self._made_gradient().index_add_(0, own, -heavy_own[:, None] * rows.query)
        if d_row is not None:
            d_row = d_row + self.many.sum() * d_mean - mine
        if self.offsets is not None and d_scale is not None:
            d_scale = d_scale + d_mean * (self.offsets @ self.many) - mine * self.offsets[own]
            d_offsets = heavy.sum() * self.many
            self._add_to_offsets(self.scale * d_offsets.index_add(0, own, -heavy_own))
        return Back(d_query, d_row, d_scale)

    def _add_to_offsets(self, more: Tensor) -> None:
        self.d_offsets = more if self.d_offsets is None else self.d_offsets + more

    def _made_gradient(self) -> Tensor:
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.prototypes, dtype=torch.float32)
        return self.gradient

    def close(self) -> None:
        """Free everything but the gradients."""
        self.scratch = None
        del self.wide_keys, self.keys
        self.__dict__.pop("work", None)

    def finish(self, factor: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of the prototypes and of the offsets, times a factor."""
        d_offsets = self.d_offsets
        if d_offsets is None:
            d_offsets = torch.zeros(len(self.prototypes), device=factor.device)
        if not self.needs.prototypes:
            return None, d_offsets * factor
        gradient = self._made_gradient()
        if self.d_total is not None:
            gradient += self.many[:, None] * self.d_total
        if self.inverses is not None:
            rows = self.prototypes.flatten(0, -2)
            launch.through_unit(gradient.view_as(rows), rows, self.inverses, factor)
            return gradient, d_offsets * factor
        operand = self.similarity.prototypes_operand(self.prototypes.float())
        gradient = self.similarity.prototypes_gradient(operand, gradient, d_offsets)
        return gradient.mul_(factor), d_offsets * factor


def _mapped_work(work: Work, mapped: MappedRows) -> Work:
    """Add the threshold and the coefficients of a map in units of log 2."""
    scale, threshold, *coefficients = (number.detach().float() for number in mapped.numbers)
    constant, linear, quadratic = coefficients
    size = scale * LOG2E
    parts = (threshold * size, constant * size, linear.contiguous(), quadratic / size)
    wanted = any(n.requires_grad for place, n in enumerate(mapped.numbers) if place != 1)
    return work._replace(mapped=parts, shift=torch.zeros_like(work.row_offset), wants_sums=wanted)


def _estimate(work: Work) -> Tensor:
    """Largest score of each row among a few sampled classes."""
    step = max(1, work.classes // _SAMPLE)
    seen = slice(None, None, step)
    keys = work.keys.unflatten(0, (work.classes, work.centers))[seen]
    scores = multiply(work.query, keys.flatten(0, 1).T)
    scores = scores.unflatten(1, (len(keys), work.centers)).amax(2)
    if work.offsets is not None:
        scores = scores + work.offsets[seen]
    index = torch.arange(0, work.classes, step, device=scores.device)
    top = torch.where(index == work.own[:, None], float("-inf"), scores).amax(1)
    return torch.where(top > float("-inf"), top, 0.0) + work.row_offset
