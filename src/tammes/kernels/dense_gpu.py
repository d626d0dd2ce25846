"""Dense kernel on a GPU: three matrix products, and four Triton kernels around them.

The function of :mod:`tammes.kernels.dense` for the losses that read the own class and ``others``
alone, which are nearly all: inner products and cosines, with a scale that is a number. At everyday
sizes a step takes as long as it takes to launch it, so rows are handled whole, by one kernel each
way. Products take the dtype of autocast; sums and everything of the own class stay in single
precision. The softmax is kept in the dtype of the products, times all factors of its classes, and
is the gradient of the products as it is: the factor of each row goes to the short side.
"""

import logging
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tammes._validation import batched
from tammes.kernels.matmul import halved, multiply
from tammes.kernels.problem import Problem
from tammes.kernels.reference import gradients_by_reference
from tammes.kernels.tiling import OF_SCORES, WIDEST
from tammes.similarity import (
    HUGE,
    TINY,
    InnerProduct,
    Similarity,
    full_precision,
    working_dtype,
)

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger("tammes")
_NUMBERS = ("target", "gap", "opposite", "others")
_OTHERWISE = OF_SCORES | {"hardest", "mean", "rest"}
"""Numbers that are left to the other kernels."""
_HALF = 2.0**14
"""Factor of a softmax in float16, with which small ones keep their digits."""
ANYWHERE = False
"""Whether to run on any device, which tests do by Triton's interpreter."""


def takes(problem: Problem, names: Collection[str]) -> bool:
    """Whether these kernels can be imported, and support a problem on a GPU."""
    return supports(problem, names) and _kernels() is not None


def supports(problem: Problem, names: Collection[str]) -> bool:
    """Whether these kernels compute those numbers of a split that are made of all scores.

    Args:
        problem: features and prototypes.
        names: of the numbers; those of the features alone do not matter.
    """
    features, prototypes, bias, scale, similarity, share, *_ = problem
    return (
        "others" in names
        and _OTHERWISE.isdisjoint(names)
        and working_dtype(features, prototypes) == torch.float32
        and (isinstance(similarity, InnerProduct) or (similarity.is_cosine and bias is None))
        and similarity.centers == 1
        and not isinstance(scale, Tensor)
        and share is None
        and features.shape[1] <= WIDEST
    )


@cache
def _kernels() -> "ModuleType | None":
    """The Triton kernels, where Triton can be imported and can compile one for this machine."""
    try:
        from tammes.kernels.fused import row_kernels

        if torch.cuda.is_available():
            vectors = torch.ones(1, 16, device="cuda")
            row_kernels.through_lengths[(1,)](vectors, vectors, vectors[0], 16, True, BLOCK=16)
    except Exception as error:
        _log.warning(
            "tammes: dense calls on a GPU run without Triton: %s", str(error).split("\n")[0]
        )
        return None
    return row_kernels


def split_on_gpu(
    problem: Problem, labels: Tensor, names: tuple[str, ...], low: torch.dtype | None
) -> dict[str, Tensor]:
    """Compute the numbers of a split, by name; where there is a bias, ``rivals`` too.

    Args:
        problem: one that :func:`takes` accepts; its bias may have infinities that mask classes.
        labels: class of each example, shape ``(N,)``.
        names: of the numbers.
        low: dtype of the inputs of products, where it is not single precision.
    """
    features, prototypes, bias, scale, similarity, _, there, valid = problem
    if there is not None:
        bias = torch.where(there, 0.0 if bias is None else bias, -torch.inf)
    # Copied here, where it has a gradient: saved tensors are differentiated again.
    features, prototypes = features.contiguous(), prototypes.contiguous()
    labels = labels.contiguous()
    with _on(features.device):
        *found, rivals = _Split.apply(
            features, prototypes, bias, labels, valid, scale, similarity, names, low
        )
    numbers = dict(zip(names, found, strict=True))
    return numbers if bias is None else numbers | {"rivals": rivals}


class _Split(torch.autograd.Function):
    """From features, prototypes and bias to the numbers of a split."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        valid: Tensor | None,
        scale: float,
        similarity: Similarity,
        names: tuple[str, ...],
        low: torch.dtype | None,
    ) -> tuple[Tensor | None, ...]:
        kernels, unit = _kernels(), similarity.is_cosine
        assert kernels is not None
        (count, size), classes = features.shape, len(prototypes)
        block = _power_of_two(size)
        row = {"BLOCK": block, "num_warps": _warps(block)}
        angles = "gap" in names or "opposite" in names
        query = torch.empty_like(features, dtype=low)
        target, others = features.new_empty(count), features.new_empty(count)
        inverse = own_inverse = class_inverses = gap = opposite = rivals = target
        keys = prototypes
        if low is not None:
            # Half precision does not reach as far as lengths may, so its products take unit rows.
            keys = torch.empty_like(prototypes, dtype=low) if unit else prototypes.to(low)
        if unit:
            inverse, own_inverse = features.new_empty(count), features.new_empty(count)
            class_inverses = features.new_empty(classes)
            if angles:
                gap, opposite = features.new_empty(count), features.new_empty(count)
        if bias is not None:
            rivals = features.new_empty(count)
        kernels.pair[(count + classes if unit else count,)](
            *(features, prototypes, labels),
            labels if valid is None else valid,
            target if bias is None else bias,
            *(query, keys, inverse, own_inverse, class_inverses, target, gap, opposite),
            *(count, classes, size, unit, angles),
            *(valid is not None, bias is not None, low is not None, TINY, HUGE),
            **row,
        )
        products = multiply(query, keys.t())
        softmax = products if low is None else torch.empty_like(products, dtype=low)
        lift = _HALF if low is torch.float16 else 1.0
        block = min(4096, _power_of_two(classes))
        kernels.softmax_of_others[(count,)](
            *(products, class_inverses, target if bias is None else bias, labels),
            *(softmax, others, rivals, classes, float(scale), lift),
            *(unit and low is None, bias is not None),
            BLOCK=block,
            num_warps=_warps(block),
        )
        lengths = (inverse, own_inverse, class_inverses) if unit else (None, None, None)
        ctx.save_for_backward(features, prototypes, bias, labels, valid, *lengths, keys, softmax)
        ctx.row, ctx.names, ctx.angles, ctx.low = row, names, angles, low
        ctx.scale, ctx.factor, ctx.similarity = scale, scale / lift, similarity
        ctx.set_materialize_grads(False)
        numbers = {"target": target, "gap": gap, "opposite": opposite, "others": others}
        if bias is not None:
            ctx.mark_non_differentiable(rivals)
        return *(numbers[name] for name in names), None if bias is None else rivals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands them out once.
        saved = ctx.saved_tensors
        wanted = dict(zip(ctx.names, gradients[:-1], strict=True))
        with full_precision(saved[0].device), _on(saved[0].device):
            if torch.is_grad_enabled() or batched(gradients):
                return *_by_reference(ctx, saved, wanted), *[None] * 6
            return *_in_closed_form(ctx, saved, wanted), *[None] * 6


def _by_reference(
    ctx: Any, saved: tuple[Any, ...], wanted: dict[str, Tensor | None]
) -> list[Tensor | None]:
    """Gradients of features, prototypes and bias, batched or to be differentiated again."""
    features, prototypes, bias, labels, valid, *_ = saved
    problem = Problem(features, prototypes, bias, ctx.scale, ctx.similarity, valid=valid)
    if bias is not None and valid is None:
        # Of the mask only the infinities of the bias are left.
        problem = problem._replace(valid=torch.ones_like(labels, dtype=torch.bool))
    return gradients_by_reference(problem, labels, wanted)[:3]


def _in_closed_form(
    ctx: Any, saved: tuple[Any, ...], wanted: dict[str, Tensor | None]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of features, prototypes and bias."""
    features, prototypes, _, labels, valid, inverse, own_inverse, *rest = saved
    class_inverses, keys, softmax = rest
    kernels, unit, low = _kernels(), ctx.similarity.is_cosine, ctx.low
    assert kernels is not None
    need_features, need_prototypes, need_bias = ctx.needs_input_grad[:3]
    zeros = None
    if any(wanted.get(name) is None for name in (_NUMBERS if ctx.angles else ("target", "others"))):
        zeros = features.new_zeros(len(features))
    d_target, d_gap, d_opposite, d_others = (
        zeros if (found := wanted.get(name)) is None else found.contiguous() for name in _NUMBERS
    )
    d_features = multiply(softmax, keys) if need_features else None
    own_rows = torch.empty_like(features)
    if inverse is None:
        inverse = own_inverse = own_rows
    # Half precision may not hold what a row of a large batch amounts to.
    weighted = torch.empty_like(features, dtype=None if low is torch.float16 else low)
    kernels.pair_back[(len(features),)](
        *(features, prototypes, labels, labels if valid is None else valid, inverse, own_inverse),
        own_rows if d_features is None else d_features,
        *(d_others, d_target),
        *((d_gap, d_opposite) if ctx.angles else (d_others, d_others)),
        *(weighted, own_rows, len(prototypes), features.shape[1], ctx.factor),
        *(unit, ctx.angles, valid is not None, low is None, need_features),
        **ctx.row,
    )
    d_prototypes = d_bias = None
    if need_prototypes:
        left, size = halved(weighted, low) if low is torch.float16 else (weighted, None)
        d_prototypes = multiply(softmax.t(), left)
        if size is not None:
            d_prototypes *= size
        d_prototypes.index_add_(0, labels, own_rows)
        if unit:
            kernels.through_lengths[(len(prototypes),)](
                d_prototypes, prototypes, class_inverses, features.shape[1], low is None, **ctx.row
            )
    if need_bias:
        assert d_others is not None
        assert d_target is not None
        part = (d_others * ctx.factor).unsqueeze(0)
        part, size = (part, None) if low is None else halved(part, low)
        d_bias = multiply(part, softmax).squeeze(0)
        d_bias = d_bias if size is None else d_bias * size
        d_bias.index_add_(0, labels, d_target)
    return d_features, d_prototypes, d_bias


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device current, where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _power_of_two(number: int) -> int:
    """The next power of two, as lengths of blocks are."""
    return 1 << max(4, (number - 1).bit_length())


def _warps(block: int) -> int:
    return 4 if block <= 1024 else 8
