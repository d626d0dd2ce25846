"""Carry what an optimizer knows over to a parameter that has replaced another."""

from typing import Any

import torch
from torch import Tensor, nn

OF_ALL_ROWS = ("step", "mu_product", "eta", "mu")
"""Numbers that torch's optimizers have once for a parameter, whatever its shape."""


def find(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[list[Any], int]:
    """The list of parameters in which an optimizer holds one, and its place there."""
    for group in optimizer.param_groups:
        for place, held in enumerate(group["params"]):
            if held is parameter:
                return group["params"], place
    raise ValueError(
        "carrying state over expects an optimizer that holds the parameter, "
        f"got {type(optimizer).__name__} that does not"
    )


def carry_over(
    optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, keep: Tensor
) -> None:
    """Let an optimizer hold ``new`` in the place of ``old``, with the state of the rows that stay.

    Momentum and the like of row ``keep[i]`` of the old parameter become those of row ``i`` of the
    new one; rows beyond start from zero, as in a new optimizer.

    Args:
        optimizer: the one that holds ``old``.
        old: the parameter that was replaced, shape ``(C, ...)``.
        new: the parameter in its place; its first ``len(keep)`` rows come from ``old``.
        keep: rows of ``old`` that stay, shape ``(K,)``.

    Example:
        >>> old, new = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 3))
        >>> optimizer = torch.optim.SGD([old], lr=0.1, momentum=0.9)
        >>> optimizer.state[old]["momentum_buffer"] = torch.ones(2, 3)
        >>> carry_over(optimizer, old, new, torch.arange(2))
        >>> optimizer.state[new]["momentum_buffer"][:, 0]
        tensor([1., 1., 0.])
    """
    params, place = find(optimizer, old)
    params[place] = new
    state = optimizer.state.pop(old, None)
    if state is None:
        return
    for name, value in state.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == len(old):
            carried = value.new_zeros(len(new), *value.shape[1:])
            carried[: len(keep)] = value[keep.to(value.device)]
            state[name] = carried
    optimizer.state[new] = state
