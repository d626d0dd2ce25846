"""What a head hands to a kernel."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.similarity import Similarity

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", "privateuseone")
_AUTOCAST = frozenset(name for name in _DEVICES if torch.amp.is_autocast_available(name))
"""Kinds of devices that have autocast: asked once, as torch 2.11 cannot compile the question."""


class Problem(NamedTuple):
    """Features against prototypes.

    Attributes:
        features: shape ``(N, D)``.
        prototypes: shape ``(C, D)``.
        bias: added to the similarities, shape ``(C,)``, or none.
        scale: similarity times scale is the score; a number or a scalar tensor.
        similarity: how a feature is compared with a prototype.
    """

    features: Tensor
    prototypes: Tensor
    bias: Tensor | None
    scale: Tensor | float
    similarity: Similarity


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Single precision, or wider where an input is: what scores and losses are computed in."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Leave autocast, where the device has one: scores and losses stay in the working dtype."""
    if device.type not in _AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def product_dtype(device: torch.device) -> torch.dtype | None:
    """Under autocast on CUDA, products take half precision in and give single precision out."""
    if device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return None
