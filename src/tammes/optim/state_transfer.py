"""Transfer the state of an optimizer to a parameter that replaces another."""

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SHARED_STATE = ("step", "mu_product", "eta", "mu")
"""State that torch's optimizers keep once per parameter, regardless of its shape."""
_GRADIENT_MAGNITUDES = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "row_var")
"""State that measures the magnitude of past gradients."""
_PENDING = "_tammes_new_rows"
"""Attribute of an optimizer: parameters with new rows that have had no gradient yet."""


def find_param_group(
    optimizer: torch.optim.Optimizer, parameter: Tensor
) -> tuple[dict[str, Any], int]:
    """Return the parameter group of a parameter, and its position in that group."""
    for group in optimizer.param_groups:
        for position, candidate in enumerate(group["params"]):
            if candidate is parameter:
                return group, position
    raise ValueError(
        "carrying state over expects an optimizer that holds the parameter, "
        f"got {type(optimizer).__name__} that does not"
    )


def carry_over(
    optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, keep: Tensor
) -> None:
    """Replace ``old`` by ``new`` in an optimizer, with the state of the rows that stay.

    The state (momentum etc.) of row ``keep[i]`` of the old parameter becomes that of row ``i`` of
    the new one; for the new rows see :func:`initial_state` and :func:`start_at_first_gradient`.

    Args:
        optimizer: optimizer that holds ``old``.
        old: parameter to replace, shape ``(C, ...)``.
        new: its replacement; its first ``len(keep)`` rows come from ``old``.
        keep: rows of ``old`` that stay, shape ``(K,)``.

    Example:
        >>> old, new = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 3))
        >>> optimizer = torch.optim.SGD([old], lr=0.1, momentum=0.9)
        >>> optimizer.state[old]["momentum_buffer"] = torch.ones(2, 3)
        >>> carry_over(optimizer, old, new, torch.arange(2))
        >>> optimizer.state[new]["momentum_buffer"][:, 0]
        tensor([1., 1., 0.])
    """
    group, _ = find_param_group(optimizer, old)
    fresh, state = new.detach()[len(keep) :], {}
    for key, value in optimizer.state.get(old, {}).items():
        if isinstance(value, Tensor) and value.ndim and len(value) == len(old):
            kept = value[keep.to(value.device)]
            rows = initial_state(key, group, fresh, kept.double().mean(0))
            state[key] = torch.cat([kept, rows.to(value)])
    replace_parameter(optimizer, old, new, state, len(keep))


def replace_parameter(
    optimizer: torch.optim.Optimizer,
    old: nn.Parameter,
    new: nn.Parameter,
    rows: Mapping[str, Tensor],
    first: int,
) -> None:
    """Replace ``old`` by ``new`` in an optimizer.

    Args:
        optimizer: optimizer that holds ``old``.
        old: parameter to replace.
        new: its replacement.
        rows: state of all rows of ``new``, by name; other state is kept.
        first: index of the first row that is not from ``old``.
    """
    group, position = find_param_group(optimizer, old)
    group["params"][position] = new
    state = {**optimizer.state.pop(old, {}), **rows}
    if state:
        optimizer.state[new] = state
        start_at_first_gradient(optimizer, new, first)


def initial_state(key: str, group: dict[str, Any], rows: Tensor, mean: Tensor) -> Tensor:
    """Initial optimizer state for new rows of a parameter that has already been optimized.

    Magnitudes of gradients start at the mean of the other rows: zero would mean an average over
    many steps without any gradient, and the first gradient would be far too large in comparison.
    Everything else starts as in a new optimizer.
    """
    if key in _GRADIENT_MAGNITUDES:
        begin = mean
    elif key == "ax":
        # An average of the weights themselves.
        begin = rows
    else:
        setting = {"sum": "initial_accumulator_value", "step_size": "lr"}.get(key, "")
        begin = torch.as_tensor(group.get(setting, 0.0))
    return begin.expand(len(rows), *mean.shape)


def start_at_first_gradient(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, first: int
) -> None:
    r"""Start the averages of new rows at their first gradient, as Adam does for a new parameter.

    Adam corrects the bias of its averages after t steps, for all rows at once. A row added later
    needs a larger correction: started from zero, its first step would be
    :math:`(1-\beta_1)/\sqrt{1-\beta_2} = 3.2` times the learning rate, and the tenth 6.5 times.
    So before the next step, when the first gradient is known, the average of the gradients is set
    to it and that of their squares to its square, unless it is larger already. The first step is
    then the learning rate, or less if the other rows had larger gradients. New rows begin at
    ``first``.
    """
    if first == len(parameter) or "exp_avg" not in optimizer.state[parameter]:
        return
    if _PENDING not in vars(optimizer):
        vars(optimizer)[_PENDING] = []
        optimizer.register_step_pre_hook(_before_step)
    vars(optimizer)[_PENDING].append((weakref.ref(parameter), first))


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    pending = vars(optimizer).get(_PENDING)
    if pending:
        # Drop parameters that no longer exist, and those that have had their first gradient.
        vars(optimizer)[_PENDING] = [
            (reference, first)
            for reference, first in pending
            if (parameter := reference()) is not None
            and not _start_averages(optimizer, parameter, first)
        ]


@torch.no_grad()
def _start_averages(optimizer: torch.optim.Optimizer, parameter: Tensor, first: int) -> bool:
    """Start the averages of new rows; return whether their first gradient was there."""
    state, gradient = optimizer.state.get(parameter, {}), parameter.grad
    if gradient is None:
        return False
    if gradient.is_sparse or "exp_avg" not in state:
        return True
    gradient = gradient[first:].to(state["exp_avg"])
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        # A fused optimizer unscales gradients itself.
        gradient = gradient / scale.to(gradient)
    gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
    group, _ = find_param_group(optimizer, parameter)
    # Value of an average over that many steps of a constant gradient of one.
    shares = [1 - beta ** float(state.get("step", math.inf)) for beta in group["betas"]]
    state["exp_avg"][first:] = (-gradient if group.get("maximize") else gradient) * shares[0]
    sizes = {"exp_avg_sq": gradient.square() * shares[1], "exp_inf": gradient.abs()}
    for key in sizes.keys() & state.keys():
        state[key][first:] = torch.maximum(state[key][first:], sizes[key])
    return True
