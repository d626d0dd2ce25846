"""The loss and its gradients without the N x C matrix: three matrix products, one block of scores.

A loss depends on the scores of an example only through its :class:`~tammes.split.Split`. So for a
block of rows at a time the scores are made, reduced to the split, and, once autograd has told what
the loss wants of those few numbers per row, overwritten by their own gradient,

    d loss / d f_c = q_c (d_others + d_expected (1 + f_c - expected))
                     + d_mean / (C - 1) + [c = j*] d_top

which is multiplied back to features and prototypes at once. Prototypes are turned into keys block
by block too, so no copy of them is made. What is asked of a row is linear in the row's weight, so
the weight is applied to the short side of each product, never to the scores.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tammes.kernels.problem import Problem, full_precision, working_dtype
from tammes.kernels.reduction import Reduction
from tammes.kernels.reference import dense_split
from tammes.similarity import Similarity
from tammes.split import Split

Evaluate = Callable[[Split, slice], Tensor]
"""Values of the T terms, shape ``(T, n)``, on the split of a slice of the batch."""

_SCORES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Bytes of one block of scores, by kind of device."""
_KEYS = {"cpu": 1 << 20, "cuda": 256 << 20}
"""Bytes of one block of keys."""


@dataclass(frozen=True)
class Plan:
    """What stays the same over the blocks of one call."""

    similarity: Similarity
    reads: frozenset[str]
    evaluate: Evaluate
    coefficients: tuple[float, ...]
    product_dtype: torch.dtype | None = None

    def blocks(self, problem: Problem) -> tuple[list[slice], list[slice]]:
        """Slices of the rows and of the classes."""
        count, (classes, size) = len(problem.features), problem.prototypes.shape
        device = problem.features.device.type
        width = working_dtype(problem.features, problem.prototypes).itemsize
        # A second block of scores is kept where the expectation is read.
        width_of_row = width * classes * (2 if "expected" in self.reads else 1)
        rows = max(1, _SCORES.get(device, _SCORES["cuda"]) // width_of_row)
        tile = max(64, _KEYS.get(device, _KEYS["cuda"]) // (width * size))
        return list(_even(count, rows)), list(_even(classes, tile))


def fits_in_gradient(problem: Problem, row_blocks: Sequence[slice]) -> bool:
    """Whether the scores are one block of no more rows than a feature has numbers."""
    count, size = problem.features.shape
    return len(row_blocks) <= 1 and count <= size


def _even(total: int, most: int) -> Iterator[slice]:
    """Cut a range into as few slices as ``most`` allows, of nearly equal length."""
    pieces = max(1, -(-total // most))
    step = max(1, -(-total // pieces))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def weighted_loss(
    problem: Problem, labels: Tensor, weights: Tensor, plan: Plan, *, rowwise: bool
) -> tuple[Tensor, Tensor]:
    """Weighted loss of a batch, one block of scores at a time.

    Args:
        problem: features and prototypes.
        labels: class of each example, shape ``(N,)``.
        weights: weight of each example, shape ``(N,)``; takes no gradient.
        plan: the loss, and how to cut the work.
        rowwise: return ``weights * loss`` of each example in place of their sum. The gradient is
            then computed in backward, at the price of a fourth product.

    Returns:
        The loss, a scalar or ``(N,)``, and the weighted sum of each term, shape ``(T,)``.
    """
    scale = problem.scale
    if not isinstance(scale, Tensor):
        dtype = working_dtype(problem.features, problem.prototypes)
        scale = torch.full((), scale, dtype=dtype, device=problem.features.device)
    loss, sums = _Streamed.apply(
        problem.features,
        problem.prototypes,
        problem.bias,
        scale,
        labels,
        weights,
        plan,
        rowwise,
        torch.is_grad_enabled(),
    )
    return loss, sums


class _Streamed(torch.autograd.Function):
    """The loss; its gradients are made in forward (a sum) or in backward (rows)."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        bias: Tensor | None,
        scale: Tensor,
        labels: Tensor,
        weights: Tensor,
        plan: Plan,
        rowwise: bool,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        problem = Problem(features, prototypes, bias, scale, plan.similarity)
        needs = ctx.needs_input_grad[:4] if with_grad and not rowwise else (False,) * 4
        rows, sums, gradients = _run(problem, labels, weights, plan, needs)
        ctx.save_for_backward(features, prototypes, bias, scale, labels, weights)
        ctx.plan = plan
        ctx.gradients = gradients if any(needs) else None
        ctx.mark_non_differentiable(sums)
        return (rows if rowwise else rows.sum()), sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        features, prototypes, bias, scale, labels, weights = ctx.saved_tensors
        problem = Problem(features, prototypes, bias, scale, ctx.plan.similarity)
        needs = ctx.needs_input_grad[:4]
        gradients: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            # Somebody wants to differentiate the gradient: only the plain form can.
            gradients = _differentiable(problem, labels, weights, ctx.plan, grad, needs)
        elif ctx.gradients is not None:
            # Given away, not copied: a second backward makes them anew.
            gradients, ctx.gradients = ctx.gradients, None
            if grad.device.type != "cpu" or grad.item() != 1:
                gradients = [None if g is None else g.mul_(grad) for g in gradients]
        else:
            _, _, gradients = _run(problem, labels, weights * grad, ctx.plan, needs)
        # Only now to half precision, where an input has it: a loss scale must come before.
        inputs = (features, prototypes, bias, scale)
        gradients = [
            g if g is None or t is None else g.to(t.dtype)
            for g, t in zip(gradients, inputs, strict=True)
        ]
        return (*gradients, None, None, None, None, None)


def _differentiable(
    problem: Problem,
    labels: Tensor,
    weights: Tensor,
    plan: Plan,
    grad: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    with torch.enable_grad():
        dense = dense_split(problem, labels, plan.reads)
        rows = combine(plan.coefficients, plan.evaluate(dense, slice(None)))
        tensors = (problem.features, problem.prototypes, problem.bias, problem.scale)
        inputs = [
            t for t, need in zip(tensors, needs, strict=True) if need and isinstance(t, Tensor)
        ]
        found = torch.autograd.grad(
            (rows * weights * grad).sum(), inputs, create_graph=True, materialize_grads=True
        )
    remaining = iter(found)
    return [next(remaining) if need else None for need in needs]


def combine(coefficients: Sequence[float], values: Tensor) -> Tensor:
    """Weighted sum of the terms, shape ``(n,)``, without making a tensor of the weights."""
    weighted = [weight * value for weight, value in zip(coefficients, values, strict=True)]
    return torch.stack(weighted).sum(0)


def _run(
    problem: Problem, labels: Tensor, weights: Tensor, plan: Plan, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Weighted losses ``(N,)``, weighted sums of the terms, and the gradients that are needed."""
    with torch.no_grad(), full_precision(problem.features.device):
        return _Pass(problem, labels, weights, plan, needs).result()


class _Pass:
    """One pass over a batch: the blocks and what they add to."""

    def __init__(
        self,
        problem: Problem,
        labels: Tensor,
        weights: Tensor,
        plan: Plan,
        needs: Sequence[bool],
    ) -> None:
        features, prototypes, bias, scale, similarity = problem
        assert isinstance(scale, Tensor)
        self.dtype = working_dtype(features, prototypes)
        self.low = plan.product_dtype
        self.features, self.prototypes, self.labels = features, prototypes, labels
        self.bias = None if bias is None else bias.to(self.dtype)
        self.scale = scale.to(self.dtype)
        self.weights = weights.to(self.dtype)
        self.similarity = similarity.bind(prototypes)
        self.plan = plan
        self.needs_x, self.needs_w, self.needs_b, self.needs_s = needs
        self.row_blocks, self.class_blocks = plan.blocks(problem)

        device, dtype = features.device, self.dtype
        self.losses = torch.empty(len(features), dtype=dtype, device=device)
        self.sums = torch.zeros(len(plan.coefficients), dtype=dtype, device=device)
        self.d_features = torch.empty_like(features, dtype=dtype) if self.needs_x else None
        self.d_scale = torch.zeros((), dtype=dtype, device=device) if self.needs_s else None
        self.d_keys = torch.empty_like(prototypes, dtype=dtype) if self.needs_w else None
        self.d_offsets = torch.zeros(len(prototypes), dtype=dtype, device=device)
        self.own_rows: list[tuple[Tensor, Tensor]] = []
        self.own_bias: list[tuple[Tensor, Tensor]] = []
        longest = max((block.stop - block.start for block in self.row_blocks), default=0)
        # The scores of one short block fit into the memory of the keys' gradient, as its first
        # columns: a block of classes is copied out just before its gradient is written there.
        self.shared = self.d_keys is not None and fits_in_gradient(problem, self.row_blocks)
        if self.shared and self.d_keys is not None:
            self.scores = self.d_keys[:, :longest].T
        else:
            self.scores = torch.empty(longest, len(prototypes), dtype=dtype, device=device)

    def result(self) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Work through all blocks."""
        for block in self.row_blocks:
            self._rows(block, first=block.start == 0)
        return self.losses, self.sums, [*self._gradients()]

    def _rows(self, block: slice, *, first: bool) -> None:
        labels, weights = self.labels[block], self.weights[block]
        column = labels[:, None]
        with torch.enable_grad():
            # What belongs to a row alone is a small graph, differentiated by autograd.
            features = self.features[block].detach().to(self.dtype).requires_grad_()
            own = self.prototypes.index_select(0, labels).to(self.dtype).requires_grad_()
            scale = self.scale.expand(len(labels)).clone().requires_grad_()
            query, row_offset = self.similarity.query(features)
            query = query * scale[:, None]
            row_offset = None if row_offset is None else row_offset * scale
            known = self.similarity.own(features, own, self.plan.reads)
            own_bias = None
            if self.bias is not None and "target" in known:
                own_bias = self.bias.index_select(0, labels).requires_grad_()
                known["target"] = known["target"] + own_bias

        scores = self.scores[: len(labels)]
        self._fill(scores, query.detach(), None if row_offset is None else row_offset.detach())
        reduced = Reduction(scores, column, self.plan.reads)
        with torch.enable_grad():
            split = self._split(reduced, known, scale, labels)
            values = self.plan.evaluate(split, block)
            loss = combine(self.plan.coefficients, values)
        self.losses[block] = loss.detach() * weights
        self.sums += values.detach() @ weights
        if not (self.needs_x or self.needs_w or self.needs_b or self.needs_s):
            return

        ones = torch.ones_like(loss)
        wanted = torch.autograd.grad(
            loss, reduced.leaves, ones, retain_graph=True, allow_unused=True
        )
        reduced.overwrite_with_gradient(*wanted)
        # Before multiplying back, which may write over the scores.
        d_row_offset = None if row_offset is None else scores.sum(1)
        d_offset_scale = None
        if self.d_scale is not None and self._offsets is not None:
            d_offset_scale = scores @ self._offsets
        d_query = self._multiply_back(scores, query.detach(), weights, first)

        outputs, d_outputs = [loss, query], [ones, d_query]
        if row_offset is not None and d_row_offset is not None:
            outputs.append(row_offset)
            d_outputs.append(d_row_offset)
        inputs = [features, own, scale, *([] if own_bias is None else [own_bias])]
        maybe = torch.autograd.grad(outputs, inputs, d_outputs, allow_unused=True)
        found = [
            torch.zeros_like(i) if g is None else g for i, g in zip(inputs, maybe, strict=True)
        ]
        if self.d_features is not None:
            self.d_features[block] = found[0] * weights[:, None]
        if self.d_keys is not None:
            self.own_rows.append((labels, found[1] * weights[:, None]))
        if self.d_scale is not None:
            d_scale = found[2]
            if d_offset_scale is not None:
                d_scale = d_scale + d_offset_scale
            self.d_scale += d_scale @ weights
        if own_bias is not None and self.needs_b:
            self.own_bias.append((labels, found[3] * weights))

    def _fill(self, scores: Tensor, query: Tensor, row_offset: Tensor | None) -> None:
        """Scores of a block of rows against all classes."""
        offsets: list[Tensor] = []
        for block in self.class_blocks:
            keys, offset = self.similarity.keys(self.prototypes[block].to(self.dtype))
            self._product(query, keys.T, out=scores[:, block])
            if offset is not None:
                offsets.append(offset)
        total = torch.cat(offsets) if offsets else None
        if self.bias is not None:
            total = self.bias if total is None else total + self.bias
        self._offsets = total
        if total is not None:
            scores += self.scale * total
        if row_offset is not None:
            scores += row_offset[:, None]

    def _split(
        self, reduced: Reduction, known: dict[str, Tensor], scale: Tensor, labels: Tensor
    ) -> Split:
        unread = torch.full_like(scale, float("nan"))
        others, top, expected, mean = reduced.leaves
        return Split(
            target=known.get("target", unread),
            others=others,
            hardest=top / scale if "hardest" in self.plan.reads else unread,
            expected=expected,
            mean=mean,
            labels=labels,
            scale=scale,
            length=known.get("length", unread),
            norm=known.get("norm", unread),
            gap=known.get("gap", unread),
            classes=len(self.prototypes),
            rivals=len(self.prototypes) - 1,
        )

    def _multiply_back(
        self, gradient: Tensor, query: Tensor, weights: Tensor, first: bool
    ) -> Tensor:
        """Gradient of the queries; that of the keys is added to what other rows gave."""
        d_query = torch.zeros_like(query)
        heavy = query * weights[:, None]
        has_offsets = self._offsets is not None and (self.needs_b or self.needs_w)
        for block in self.class_blocks:
            piece = gradient[:, block].clone() if self.shared else gradient[:, block]
            if self.needs_x or self.needs_s:
                keys, _ = self.similarity.keys(self.prototypes[block].to(self.dtype))
                self._product(piece, keys, out=d_query, add=True)
            if self.d_keys is not None:
                self._product(piece.T, heavy, out=self.d_keys[block], add=not first)
            if has_offsets:
                self.d_offsets[block] += self.scale * (weights @ piece)
        return d_query

    def _product(self, left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
        if self.low is None:
            torch.addmm(out, left, right, beta=1 if add else 0, out=out)
            return
        result = torch.mm(left.to(self.low), right.to(self.low), out_dtype=self.dtype)
        if add:
            out += result
        else:
            out.copy_(result)

    def _gradients(self) -> Iterator[Tensor | None]:
        """What was gathered, in the working dtype."""
        d_features, d_prototypes = self.d_features, self.d_keys
        yield d_features
        if d_prototypes is not None:
            if not self.row_blocks:
                d_prototypes.zero_()
            for block in self.class_blocks:
                self._through_keys(d_prototypes, block)
            for labels, rows in self.own_rows:
                d_prototypes.index_add_(0, labels, rows)
        yield d_prototypes
        if self.needs_b:
            d_bias = self.d_offsets
            for labels, values in self.own_bias:
                d_bias = d_bias.index_add(0, labels, values)
            yield d_bias
        else:
            yield None
        yield self.d_scale

    def _through_keys(self, gradient: Tensor, block: slice) -> None:
        """Turn the gradient of a block of keys, in place, into that of its prototypes."""
        with torch.enable_grad():
            prototypes = self.prototypes[block].detach().to(self.dtype).requires_grad_()
            keys, offset = self.similarity.keys(prototypes)
        if keys is prototypes:
            return
        outputs, d_outputs = [keys], [gradient[block]]
        if offset is not None:
            outputs.append(offset)
            d_outputs.append(self.d_offsets[block])
        (gradient[block],) = torch.autograd.grad(outputs, prototypes, d_outputs)
