"""Dense kernel on a GPU: three matrix products, and five Triton kernels around them.

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
from tammes.similarity import InnerProduct, Similarity, full_precision, working_dtype

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger("tammes")
_NUMBERS = ("target", "gap", "opposite", "others")
_KEPT = ("inverse", "own_inverse", "class_inverses", "keys", "softmax")
_FORWARD = (*_NUMBERS, "rivals", *_KEPT)
_OTHERWISE = OF_SCORES | {"hardest", "mean", "rest"}
"""Numbers that are left to the other kernels."""
_AT_ONCE = 1 << 14
"""Examples up to which one program weighs them sooner than torch launches its kernels."""
ANYWHERE = False
"""Whether to run on any device, which tests do by Triton's interpreter."""


def takes(problem: Problem, names: Collection[str]) -> bool:
    """Whether these kernels can be imported, and support a problem on a GPU."""
    return supports(problem, names) and has_kernels()


def supports(problem: Problem, names: Collection[str]) -> bool:
    """Whether these kernels compute those numbers of a split that are made of all scores.

    Numbers of the features alone do not matter.
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


def has_kernels() -> bool:
    """Whether Triton compiles kernels for this machine."""
    return _kernels() is not None


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


def weigh_examples(
    labels: Tensor, ignored: int, *, mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Labels with class 0 for ignored examples, which count, weights, and the number that count.

    None where the batch is so large that torch is as fast.

    Args:
        labels: in 64 bits, of at least one example, shape ``(N,)``.
        ignored: label of examples that do not count.
        mean: let the weights sum to one.
    """
    kernels, count = _kernels(), len(labels)
    if kernels is None or count > _AT_ONCE:
        return None
    kept, valid = torch.empty_like(labels), torch.empty_like(labels, dtype=torch.bool)
    weights = torch.empty_like(labels, dtype=torch.float32)
    total = weights.new_empty(())
    with on(labels.device):
        kernels.weigh[(1,)](
            *(labels.contiguous(), kept, valid, weights, total, ignored, count),
            MEAN=mean,
            BLOCK=min(1024, _power_of_two(count)),
        )
    return kept, valid, weights, total


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
    assert not isinstance(scale, Tensor)
    if there is not None:
        bias = torch.where(there, 0.0 if bias is None else bias, -torch.inf)
    # Copied here, where it has a gradient: saved tensors are differentiated again.
    features, prototypes = features.contiguous(), prototypes.contiguous()
    labels = labels.contiguous()
    angles = "gap" in names or "opposite" in names
    if torch.compiler.is_compiling():
        found = dict(
            zip(
                _FORWARD,
                torch.ops.tammes.split(
                    *(features, prototypes, bias, labels, valid),
                    *(float(scale), similarity.is_cosine, angles, low),
                ),
                strict=True,
            )
        )
    else:
        with on(features.device):
            found = dict(
                zip(
                    (*_NUMBERS, "rivals"),
                    _Split.apply(
                        *(features, prototypes, bias, labels, valid),
                        *(scale, similarity, angles, low),
                    ),
                    strict=True,
                )
            )
    wanted = names if bias is None else (*names, "rivals")
    return {name: found[name] for name in wanted}


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
        angles: bool,
        low: torch.dtype | None,
    ) -> tuple[Tensor | None, ...]:
        unit = similarity.is_cosine
        found = forward_pass(features, prototypes, bias, labels, valid, scale, unit, angles, low)
        ctx.save_for_backward(features, prototypes, bias, labels, valid, *found[5:])
        ctx.scale, ctx.similarity, ctx.angles, ctx.low = scale, similarity, angles, low
        ctx.set_materialize_grads(False)
        if bias is not None:
            ctx.mark_non_differentiable(found[4])
        return found[:5]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands them out once.
        saved = ctx.saved_tensors
        with full_precision(saved[0].device), on(saved[0].device):
            if torch.is_grad_enabled() or batched(gradients):
                return *_by_reference(ctx, saved, gradients[:4]), *[None] * 6
            features, prototypes, _, labels, valid, *kept = saved
            found = backward_pass(
                features, prototypes, labels, valid, tuple(kept), gradients[:4],
                ctx.needs_input_grad[:3], ctx.scale, ctx.similarity.is_cosine, ctx.angles, ctx.low,
            )  # fmt: skip
            return *found, *[None] * 6


def _by_reference(
    ctx: Any, saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Gradients of features, prototypes and bias, batched or to be differentiated again."""
    features, prototypes, bias, labels, valid, *_ = saved
    problem = Problem(features, prototypes, bias, ctx.scale, ctx.similarity, valid=valid)
    if bias is not None and valid is None:
        # Of the mask only the infinities of the bias are left.
        problem = problem._replace(valid=torch.ones_like(labels, dtype=torch.bool))
    names = _NUMBERS if ctx.angles else ("target", "others")
    wanted = {n: g for n, g in zip(_NUMBERS, gradients, strict=True) if n in names}
    return gradients_by_reference(problem, labels, wanted)[:3]


def forward_pass(
    features: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    valid: Tensor | None,
    scale: float,
    unit: bool,
    angles: bool,
    low: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """Compute what :data:`_FORWARD` names, or none where it is not there."""
    kernels = _kernels()
    assert kernels is not None
    (count, size), classes = features.shape, len(prototypes)
    block = _power_of_two(size)
    query = torch.empty_like(features, dtype=low)
    target, others = features.new_empty(count), features.new_empty(count)
    inverse = own_inverse = class_inverses = gap = opposite = rivals = None
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

    def given(tensor: Tensor | None) -> Tensor:
        # A kernel takes a tensor also where it will not look at it.
        return target if tensor is None else tensor

    kernels.pair[(count + classes if unit else count,)](
        *(features, prototypes, labels, given(valid), given(bias), query, keys),
        *(given(inverse), given(own_inverse), given(class_inverses)),
        *(target, given(gap), given(opposite), count, classes, size, unit, angles),
        *(valid is not None, bias is not None, low is not None),
        BLOCK=block,
        num_warps=_warps(block),
    )
    products = multiply(query, keys.t())
    softmax = products if low is None else torch.empty_like(products, dtype=low)
    block = min(4096, _power_of_two(classes))
    kernels.softmax_of_others[(count,)](
        *(products, given(class_inverses), given(bias), labels, softmax, others, given(rivals)),
        *(classes, float(scale), _lift(low), unit and low is None, bias is not None),
        BLOCK=block,
        num_warps=_warps(block),
    )
    kept = (inverse, own_inverse, class_inverses, None if low is None else keys, softmax)
    return target, gap, opposite, others, rivals, *kept


def backward_pass(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    valid: Tensor | None,
    kept: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    scale: float,
    unit: bool,
    angles: bool,
    low: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of features, prototypes and bias, from those of the first four numbers."""
    inverse, own_inverse, class_inverses, keys, softmax = kept
    kernels = _kernels()
    assert kernels is not None
    assert softmax is not None
    need_features, need_prototypes, need_bias = needed
    (count, size), factor = features.shape, scale / _lift(low)
    block = _power_of_two(size)
    row = {"BLOCK": block, "num_warps": _warps(block)}
    zeros = None
    if any(gradient is None for gradient in (gradients if angles else gradients[::3])):
        zeros = features.new_zeros(count)
    d_target, d_gap, d_opposite, d_others = (
        zeros if found is None else found.contiguous() for found in gradients
    )
    d_features = None
    if need_features:
        d_features = multiply(softmax, prototypes if keys is None else keys)
    own_rows = torch.empty_like(features)
    # Half precision may not hold what a row of a large batch amounts to.
    weighted = torch.empty_like(features, dtype=None if low is torch.float16 else low)
    kernels.pair_back[(count,)](
        *(features, prototypes, labels, labels if valid is None else valid),
        *((inverse, own_inverse) if unit else (own_rows, own_rows)),
        own_rows if d_features is None else d_features,
        *(d_others, d_target),
        *((d_gap, d_opposite) if angles else (d_others, d_others)),
        *(weighted, own_rows, len(prototypes), size, factor),
        *(unit, angles, valid is not None, low is None, need_features),
        **row,
    )
    d_prototypes = d_bias = None
    if need_prototypes:
        left, most = halved(weighted, low) if low is torch.float16 else (weighted, None)
        d_prototypes = multiply(softmax.t(), left)
        if most is not None:
            d_prototypes *= most
        d_prototypes.index_add_(0, labels, own_rows)
        if unit:
            kernels.through_lengths[(len(prototypes),)](
                d_prototypes, prototypes, class_inverses, size, low is None, **row
            )
    if need_bias:
        assert d_others is not None
        assert d_target is not None
        part = (d_others * factor).unsqueeze(0)
        part, most = (part, None) if low is None else halved(part, low)
        d_bias = multiply(part, softmax).squeeze(0)
        d_bias = d_bias if most is None else d_bias * most
        d_bias.index_add_(0, labels, d_target)
    return d_features, d_prototypes, d_bias


def _lift(low: torch.dtype | None) -> float:
    """Factor of the softmax, with which small ones keep their digits in half precision."""
    return 2.0**14 if low is torch.float16 else 1.0


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device current, where Triton launches."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _power_of_two(number: int) -> int:
    """The next power of two, as lengths of blocks are."""
    return 1 << max(4, (number - 1).bit_length())


def _warps(block: int) -> int:
    return 4 if block <= 1024 else 8
