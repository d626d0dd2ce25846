"""Optimizer steps on some rows of a large parameter that leave all other rows untouched.

Rows selected by :func:`select_rows` get a sparse gradient; no gradient of all rows is ever made.
Most optimizers reject sparse gradients, and with a dense gradient full of zeros they would still
decay every row and move it by its momentum. So during a step the optimizer holds, in place of the
parameter, a small one with only the sampled rows, their gradient and their rows of the state;
afterwards these are written back. To the optimizer it is an ordinary dense parameter, so any
optimizer, setting and implementation works.

Nothing has to be configured: torch calls a hook before and after every optimizer step, and the hook
looks for parameters that rows were selected from.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer, SparseAdam
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tammes._compile import outside_compile

_sampled_parameters: "dict[int, _SampledParameter]" = {}
"""Parameters that rows were selected from, by ``id``."""
_hooks_registered = False
_stepping: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers in the middle of a step, or whose step ended in an error."""
_UNSUPPORTED = ("Adafactor", "LBFGS", "Muon", "Rprop")
"""Optimizers whose state of a row depends on other rows, or does not start from zero."""


def select_rows(parameter: Tensor, index: Tensor) -> Tensor:
    """Select rows of a parameter; only they get a gradient, and only they change in a step.

    Gradients of several calls add up. A row without gradient keeps its weight, momentum and decay
    under every torch optimizer that updates elements independently. Other optimizers, and Rprop,
    whose state does not start from zero, are rejected at their step.

    Args:
        parameter: shape ``(C, ...)``.
        index: row indices, sorted and unique, int64, shape ``(K,)``.

    Returns:
        The rows, shape ``(K, ...)``.

    Example:
        >>> weight = nn.Parameter(torch.ones(4, 2))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        >>> select_rows(weight, torch.tensor([0, 2])).sum().backward()
        >>> optimizer.step()
        >>> weight[:, 0].detach()
        tensor([0.8500, 1.0000, 0.8500, 1.0000])
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter.index_select(0, index)
    if torch.compiler.is_compiling():
        # torch.compile has no sparse gradients: break the graph.
        return outside_compile(select_rows)(parameter, index)
    register_hooks()
    for optimizer in tuple(_stepping):
        # Before a new gradient is added to one that has been cleared in the meantime.
        _recover(optimizer, this_thread_only=True)
    known = _sampled_parameters.get(id(parameter))
    if known is None or known.parameter() is not parameter:
        known = _sampled_parameters[id(parameter)] = _SampledParameter(parameter)
    rows: Tensor = _SelectRows.apply(parameter, index, known)
    return rows


def register_hooks() -> None:
    """Register the global hooks before and after every optimizer step, once.

    :func:`select_rows` does so too, but inside a closure that is after the step has begun.
    """
    global _hooks_registered
    if not _hooks_registered:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _acknowledge_unchecked()
        _hooks_registered = True


def _acknowledge_unchecked() -> None:
    """Disable the checks of sparse tensors explicitly; torch 2.11 and 2.12 warn otherwise."""
    checks = torch.sparse.check_sparse_tensor_invariants
    with warnings.catch_warnings():
        # Even the query below warns.
        warnings.simplefilter("ignore")
        if not checks.is_enabled():
            checks.disable()


class _SampledParameter:
    """Parameter that rows were selected from, and the row indices of its latest gradient."""

    def __init__(self, parameter: Tensor) -> None:
        key = id(parameter)
        self.parameter = weakref.ref(parameter, lambda _: _sampled_parameters.pop(key, None))
        self.index: Tensor | None = None


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, index: Tensor, sampled: _SampledParameter) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.sampled = parameter.shape, sampled
        return parameter.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        ctx.sampled.index = index
        # Sorted and unique, so there is nothing to check.
        gradient = torch.sparse_coo_tensor(
            index[None], grad, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return gradient, None, None


class _Swap(NamedTuple):
    """Parameter, and the rows that an optimizer holds in its place during a step."""

    parameter: Tensor
    rows: nn.Parameter
    row_index: Tensor
    group: list[Tensor]
    position: int


class _Step:
    """Current step of an optimizer: the frame that called the hooks, and the swapped parameters.

    It is an attribute of the optimizer and not part of its state: a copy is not in a step.
    """

    def __init__(self, frame: FrameType) -> None:
        self.frame, self.thread = frame, threading.get_ident()
        self.swaps: tuple[_Swap, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether this is called from within that step; if not, the step ended in an error."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


def _step_of(optimizer: Optimizer) -> _Step | None:
    step: _Step | None = vars(optimizer).get("_tammes_step")
    return step


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    _recover(optimizer)
    if _step_of(optimizer) is not None:
        # The step of a subclass calls that of its base class.
        return None
    in_place = len(args) > 1
    closure = args[1] if in_place else kwargs.get("closure")
    if closure is None and not any(_is_sampled(p) for p in _parameters(optimizer)):
        return None
    step = vars(optimizer)["_tammes_step"] = _Step(sys._getframe(1))
    _stepping.add(optimizer)
    if "_tammes_guard" not in vars(optimizer):
        # The state may be saved after an error in the middle of a step.
        vars(optimizer)["_tammes_guard"] = optimizer.register_state_dict_pre_hook(_recover)
    if closure is None:
        _swap(optimizer, step)
        return None

    def evaluate() -> Any:
        # The closure computes the gradients, maybe several times in one step.
        _restore(optimizer, step)
        loss = closure()
        _swap(optimizer, step)
        return loss

    if in_place:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}


def _after_step(optimizer: Optimizer, *_: object) -> None:
    step = _step_of(optimizer)
    if step is not None and step.frame is sys._getframe(1):
        _restore(optimizer, step)
        _finish(optimizer)


def _recover(optimizer: Optimizer, *, this_thread_only: bool = False) -> None:
    """Restore parameters and state after a step that ended in an error.

    A step of another thread may still be running: ``this_thread_only`` skips it.
    """
    step = _step_of(optimizer)
    if (
        step is None
        or step.is_running
        or (this_thread_only and step.thread != threading.get_ident())
    ):
        return
    for parameter, rows, *_ in step.swaps:
        if _is_sampled(parameter) and (rows.grad is None or not rows.grad.any()):
            # zero_grad was called while the optimizer held the rows.
            parameter.grad = None
    _restore(optimizer, step, write_back=False)
    _finish(optimizer)


def _finish(optimizer: Optimizer) -> None:
    del vars(optimizer)["_tammes_step"]
    _stepping.discard(optimizer)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_sampled(parameter: Tensor) -> bool:
    gradient = parameter.grad if id(parameter) in _sampled_parameters else None
    return gradient is not None and gradient.is_sparse


@torch.no_grad()
def _swap(optimizer: Optimizer, step: _Step) -> None:
    """Replace each sampled parameter in an optimizer by its sampled rows."""
    if isinstance(optimizer, SparseAdam):
        # Handles sparse gradients itself.
        return
    swaps = tuple(
        _Swap(parameter, *_sampled_rows(parameter), group["params"], position)
        for group in optimizer.param_groups
        for position, parameter in enumerate(group["params"])
        if _is_sampled(parameter)
    )
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if swaps and not kinds.isdisjoint(_UNSUPPORTED):
        raise ValueError(
            "sampled classes expect an optimizer that updates each element independently and whose "
            f"state starts from zero, such as SGD or AdamW, got {type(optimizer).__name__}"
        )
    step.swaps = swaps
    for parameter, rows, index, group, position in swaps:
        state = optimizer.state.get(parameter)
        if state:
            optimizer.state[rows] = {
                name: _select(value, parameter, index) for name, value in state.items()
            }
        group[position] = rows


def _sampled_rows(parameter: Tensor) -> tuple[nn.Parameter, Tensor]:
    """Return the sampled rows with their gradient, and their indices."""
    gradient, latest = parameter.grad, _sampled_parameters[id(parameter)].index
    assert gradient is not None
    if latest is None or gradient._indices().data_ptr() != latest.data_ptr():
        # A sum of several gradients may contain a row more than once. This synchronizes and copies.
        gradient = gradient.coalesce()
    index = gradient._indices()[0]
    rows = nn.Parameter(parameter.detach().index_select(0, index))
    rows.grad = gradient._values()
    return rows, index


def _select(value: Any, parameter: Tensor, index: Tensor) -> Any:
    """Select the rows of a state, or copy what all rows share, such as the step count."""
    if not isinstance(value, Tensor):
        return value
    if _has_rows(value, parameter):
        return value.index_select(0, index.to(value.device))
    return value.clone()


def _has_rows(value: Tensor, parameter: Tensor) -> bool:
    return value.ndim > 0 and value.shape[0] == parameter.shape[0]


@torch.no_grad()
def _restore(optimizer: Optimizer, step: _Step, *, write_back: bool = True) -> None:
    """Put the parameters back into an optimizer, and write the rows and their state back."""
    swaps, step.swaps = step.swaps, ()
    for parameter, rows, index, group, position in swaps:
        group[position] = parameter
        state = optimizer.state.pop(rows, {})
        if not write_back:
            continue
        parameter.index_copy_(0, index, rows)
        whole = optimizer.state[parameter] if state else {}
        for name, value in state.items():
            if isinstance(value, Tensor) and _has_rows(value, rows):
                before = whole.get(name)
                if before is None:
                    before = whole[name] = value.new_zeros(len(parameter), *value.shape[1:])
                before.index_copy_(0, index.to(value.device), value)
            else:
                whole[name] = value
