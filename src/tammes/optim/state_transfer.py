"""Carry what an optimizer knows over to a parameter that has replaced another."""

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

OF_ALL_ROWS = ("step", "mu_product", "eta", "mu")
"""Numbers that torch's optimizers have once for a parameter, whatever its shape."""
_SIZES = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "row_var")
"""State that says how large gradients have been."""
_WAITING = "_tammes_new_rows"
"""Where an optimizer keeps parameters with new rows that have had no gradient yet."""


def find(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[dict[str, Any], int]:
    """The group in which an optimizer holds a parameter, and its place there."""
    for group in optimizer.param_groups:
        for place, held in enumerate(group["params"]):
            if held is parameter:
                return group, place
    raise ValueError(
        "carrying state over expects an optimizer that holds the parameter, "
        f"got {type(optimizer).__name__} that does not"
    )


def carry_over(
    optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, keep: Tensor
) -> None:
    """Let an optimizer hold ``new`` in the place of ``old``, with the state of the rows that stay.

    Momentum and the like of row ``keep[i]`` of the old parameter become those of row ``i`` of the
    new one; for rows beyond see :func:`starting_state` and :func:`start_at_first_gradient`.

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
    group, _ = find(optimizer, old)
    fresh, state = new.detach()[len(keep) :], {}
    for key, value in optimizer.state.get(old, {}).items():
        if isinstance(value, Tensor) and value.ndim and len(value) == len(old):
            kept = value[keep.to(value.device)]
            rows = starting_state(key, group, fresh, kept.double().mean(0))
            state[key] = torch.cat([kept, rows.to(value)])
    put_in_place(optimizer, old, new, state, len(keep))


def put_in_place(
    optimizer: torch.optim.Optimizer,
    old: nn.Parameter,
    new: nn.Parameter,
    rows: Mapping[str, Tensor],
    first: int,
) -> None:
    """Let an optimizer hold ``new`` in the place of ``old``.

    Args:
        optimizer: the one that holds ``old``.
        old: the parameter that was replaced.
        new: the parameter in its place.
        rows: state of all rows of ``new``, by name; what is not among it stays as it is.
        first: number of the first row that is not of ``old``.
    """
    group, place = find(optimizer, old)
    group["params"][place] = new
    state = {**optimizer.state.pop(old, {}), **rows}
    if state:
        optimizer.state[new] = state
        start_at_first_gradient(optimizer, new, first)


def starting_state(key: str, group: dict[str, Any], rows: Tensor, mean: Tensor) -> Tensor:
    """State of an optimizer for new rows of a parameter that it has taken steps with.

    What says how large gradients have been starts at the mean of the other rows: a zero would pass
    for an average over many steps without any gradient, and the first one would be far too large
    against it. All else starts as in a new optimizer.

    Args:
        key: name of the state.
        group: settings of the parameter.
        rows: the new rows, shape ``(n, ...)``.
        mean: of the state of the other rows, shape ``(...)``.

    Returns:
        What the new rows start with, shape ``(n, ...)`` of the state.
    """
    if key in _SIZES:
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
    r"""Let averages of new rows start at their first gradient, as Adam's do in a new parameter.

    Adam divides its averages by what they lack after t steps, for all rows at once. A row that has
    come later lacks more: started from zero, its first step would be
    :math:`(1-\beta_1)/\sqrt{1-\beta_2} = 3.2` times the learning rate, and the tenth 6.5 times.
    So before the next step, when the first gradient is known, the average of the gradients is set
    to it and that of their squares to its square, where it is not larger already. The first step is
    then the learning rate, or less where the other rows have had larger gradients.

    Args:
        optimizer: that holds the parameter.
        parameter: shape ``(C, ...)``.
        first: number of the first new row.
    """
    if first == len(parameter) or "exp_avg" not in optimizer.state[parameter]:
        return
    if _WAITING not in vars(optimizer):
        vars(optimizer)[_WAITING] = []
        optimizer.register_step_pre_hook(_before_step)
    vars(optimizer)[_WAITING].append((weakref.ref(parameter), first))


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    waiting = vars(optimizer).get(_WAITING)
    if waiting:
        # Those that are gone, or whose gradient has come, are done.
        vars(optimizer)[_WAITING] = [
            (known, first)
            for known, first in waiting
            if (parameter := known()) is not None and not _begin(optimizer, parameter, first)
        ]


@torch.no_grad()
def _begin(optimizer: torch.optim.Optimizer, parameter: Tensor, first: int) -> bool:
    """Start the averages of new rows, if their first gradient is there."""
    state, gradient = optimizer.state.get(parameter, {}), parameter.grad
    if gradient is None:
        return False
    if gradient.is_sparse or "exp_avg" not in state:
        return True
    gradient = gradient[first:].to(state["exp_avg"])
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        # A fused optimizer takes the scale of half precision off by itself.
        gradient = gradient / scale.to(gradient)
    gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
    group, _ = find(optimizer, parameter)
    # What an average over as many steps has of a gradient that was always the same.
    shares = [1 - beta ** float(state.get("step", math.inf)) for beta in group["betas"]]
    state["exp_avg"][first:] = (-gradient if group.get("maximize") else gradient) * shares[0]
    sizes = {"exp_avg_sq": gradient.square() * shares[1], "exp_inf": gradient.abs()}
    for key in sizes.keys() & state.keys():
        state[key][first:] = torch.maximum(state[key][first:], sizes[key])
    return True
