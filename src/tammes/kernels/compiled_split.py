"""The dense split on a GPU as a custom operator, opaque to ``torch.compile``.

Traced code would have to keep all scores in single precision, since a compiler rounds the results
of half-precision products to half precision.
"""

from typing import Any

import torch
from torch import Tensor

from tammes.kernels import dense_gpu
from tammes.kernels.dense_gpu import backward_pass, forward_pass
from tammes.similarity import full_precision


@torch.compiler.assume_constant_result
def is_available() -> bool:
    """Whether there are Triton kernels for this machine; evaluated at trace time."""
    return dense_gpu.has_kernels()


@torch.library.custom_op("tammes::split", mutates_args=())
def split_operator(
    features: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    valid: Tensor | None,
    scale: float,
    unit: bool,
    angles: bool,
    low: torch.dtype | None,
) -> list[Tensor]:
    """Numbers of a split and tensors saved for backward; empty tensors in place of ``None``."""
    with full_precision(features.device), dense_gpu.on(features.device):
        found = forward_pass(features, prototypes, bias, labels, valid, scale, unit, angles, low)
    return [features.new_empty(0) if tensor is None else tensor for tensor in found]


@split_operator.register_fake
def _(
    features: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    valid: Tensor | None,
    scale: float,
    unit: bool,
    angles: bool,
    low: torch.dtype | None,
) -> list[Tensor]:
    count, classes = features.shape[0], prototypes.shape[0]
    numbers = [
        features.new_empty(count if there else 0)
        for there in (True, unit and angles, unit and angles, True, bias is not None, unit, unit)
    ]
    return [
        *numbers,
        features.new_empty(classes if unit else 0),
        features.new_empty(0) if low is None else torch.empty_like(prototypes, dtype=low),
        features.new_empty((count, classes), dtype=low or features.dtype),
    ]


@torch.library.custom_op("tammes::split_gradient", mutates_args=())
def gradient_operator(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    valid: Tensor | None,
    kept: list[Tensor],
    gradients: list[Tensor | None],
    needed: list[bool],
    scale: float,
    unit: bool,
    angles: bool,
    low: torch.dtype | None,
) -> list[Tensor]:
    """Gradients of features, prototypes and bias; empty tensors for those not needed."""
    some = tuple(tensor if tensor.numel() else None for tensor in kept)
    with full_precision(features.device), dense_gpu.on(features.device):
        found = backward_pass(
            features, prototypes, labels, valid, some, tuple(gradients), tuple(needed),
            scale, unit, angles, low,
        )  # fmt: skip
    return [features.new_empty(0) if tensor is None else tensor for tensor in found]


@gradient_operator.register_fake
def _(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    valid: Tensor | None,
    kept: list[Tensor],
    gradients: list[Tensor | None],
    needed: list[bool],
    *settings: Any,
) -> list[Tensor]:
    shapes = (features.shape, prototypes.shape, prototypes.shape[:1])
    return [
        features.new_empty(shape if there else 0)
        for shape, there in zip(shapes, needed, strict=True)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    features, prototypes, _, labels, valid, *ctx.settings = inputs
    ctx.save_for_backward(features, prototypes, labels, valid, *output[5:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    features, prototypes, labels, valid, *kept = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    found = torch.ops.tammes.split_gradient(
        *(features, prototypes, labels, valid, kept),
        *(gradients[:4], needed, *ctx.settings),
    )
    some = [tensor if there else None for tensor, there in zip(found, needed, strict=True)]
    return *some, *[None] * 6


split_operator.register_autograd(_backward, setup_context=_setup)
