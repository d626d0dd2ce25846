"""Steps of an optimizer on some rows of a large parameter; the others are not touched at all.

Rows taken by :func:`take_rows` get a gradient of their own: the parameter's is sparse, and no
gradient of all rows is ever made. Most optimizers refuse such a gradient, and a dense one full of
zeros would still decay every row and move it by its momentum. So for the time of a step the
optimizer holds, in the place of the parameter, one that has only the sampled rows, with their
gradient and their rows of the state; afterwards these are written back. To the optimizer it is an
ordinary dense parameter, whatever its kind, its settings and its implementation.

This needs no word from the user: torch calls a hook before and after every optimizer's step, and
the hook looks for parameters that rows were taken from.
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

_taken: "dict[int, _Taken]" = {}
"""Parameters that rows were taken from, by identity."""
_listening = False
_at_work: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers in the middle of a step, or whose step has ended in an error."""
_REFUSED = ("Adafactor", "LBFGS", "Muon", "Rprop")
"""Optimizers whose numbers of a row depend on other rows, or do not start from zero."""


def take_rows(parameter: Tensor, index: Tensor) -> Tensor:
    """Some rows of a parameter; only they get a gradient, and only they take part in a step.

    Gradients of several calls add up. A row that has none is left alone by every optimizer of
    torch that updates each number by itself: weight, momentum and decay. The others, and Rprop,
    whose state does not start from zero, are refused at their step.

    Args:
        parameter: shape ``(C, ...)``.
        index: the rows, in order and each once, int64, shape ``(K,)``.

    Returns:
        The rows, shape ``(K, ...)``.

    Example:
        >>> weight = nn.Parameter(torch.ones(4, 2))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        >>> take_rows(weight, torch.tensor([0, 2])).sum().backward()
        >>> optimizer.step()
        >>> weight[:, 0].detach()
        tensor([0.8500, 1.0000, 0.8500, 1.0000])
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter.index_select(0, index)
    if torch.compiler.is_compiling():
        # It has no sparse gradients: a graph ends before this call.
        return outside_compile(take_rows)(parameter, index)
    listen()
    for optimizer in tuple(_at_work):
        # Before a new gradient is added to one that has been cleared since.
        _recover(optimizer, here_only=True)
    known = _taken.get(id(parameter))
    if known is None or known.parameter() is not parameter:
        known = _taken[id(parameter)] = _Taken(parameter)
    rows: Tensor = _TakeRows.apply(parameter, index, known)
    return rows


def listen() -> None:
    """Have torch tell of every optimizer's step from now on.

    :func:`take_rows` sees to it; but a closure calls that when the step has begun.
    """
    global _listening
    if not _listening:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _say_unchecked()
        _listening = True


def _say_unchecked() -> None:
    """Say that sparse gradients are not checked; torch 2.11 and 2.12 warn until somebody has."""
    checks = torch.sparse.check_sparse_tensor_invariants
    with warnings.catch_warnings():
        # Even where nothing but the state is asked for.
        warnings.simplefilter("ignore")
        if not checks.is_enabled():
            checks.disable()


class _Taken:
    """A parameter that rows were taken from, and the rows of its latest gradient."""

    def __init__(self, parameter: Tensor) -> None:
        place = id(parameter)
        self.parameter = weakref.ref(parameter, lambda _: _taken.pop(place, None))
        self.index: Tensor | None = None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, index: Tensor, taken: _Taken) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.taken = parameter.shape, taken
        return parameter.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        ctx.taken.index = index
        # In order and each once, so that there is nothing to check.
        gradient = torch.sparse_coo_tensor(
            index[None], grad, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return gradient, None, None


class _Swap(NamedTuple):
    """A parameter, and what an optimizer holds in its place during a step."""

    parameter: Tensor
    rows: nn.Parameter
    numbers: Tensor
    group: list[Tensor]
    place: int


class _Work:
    """The step an optimizer is at: the frame that called our hooks, and what is swapped.

    Kept at the optimizer, not in its state: a copy of it is at no step.
    """

    def __init__(self, frame: FrameType) -> None:
        self.frame, self.thread = frame, threading.get_ident()
        self.swaps: tuple[_Swap, ...] = ()

    @property
    def under_way(self) -> bool:
        """Whether we are being called from within that step; if not, it ended in an error."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


def _work_of(optimizer: Optimizer) -> _Work | None:
    work: _Work | None = vars(optimizer).get("_tammes_work")
    return work


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    _recover(optimizer)
    if _work_of(optimizer) is not None:
        # A step that calls that of its base class.
        return None
    in_place = len(args) > 1
    closure = args[1] if in_place else kwargs.get("closure")
    if closure is None and not any(_is_sampled(p) for p in _parameters(optimizer)):
        return None
    work = vars(optimizer)["_tammes_work"] = _Work(sys._getframe(1))
    _at_work.add(optimizer)
    if "_tammes_guard" not in vars(optimizer):
        # Somebody may save what there is after an error in the middle of a step.
        vars(optimizer)["_tammes_guard"] = optimizer.register_state_dict_pre_hook(_recover)
    if closure is None:
        _swap(optimizer, work)
        return None

    def evaluate() -> Any:
        # The gradients come only now, and may come several times in one step.
        _put_back(optimizer, work)
        loss = closure()
        _swap(optimizer, work)
        return loss

    if in_place:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}


def _after_step(optimizer: Optimizer, *_: object) -> None:
    work = _work_of(optimizer)
    if work is not None and work.frame is sys._getframe(1):
        _put_back(optimizer, work)
        _end(optimizer)


def _recover(optimizer: Optimizer, *, here_only: bool = False) -> None:
    """After a step that ended in an error: parameters and state are as they were before it.

    Args:
        optimizer: that may have been at a step.
        here_only: leave a step of another thread alone, which may well be under way.
    """
    work = _work_of(optimizer)
    if work is None or work.under_way or (here_only and work.thread != threading.get_ident()):
        return
    for parameter, rows, *_ in work.swaps:
        if _is_sampled(parameter) and (rows.grad is None or not rows.grad.any()):
            # The optimizer was told to clear its gradients, and held the rows.
            parameter.grad = None
    _put_back(optimizer, work, keep=False)
    _end(optimizer)


def _end(optimizer: Optimizer) -> None:
    del vars(optimizer)["_tammes_work"]
    _at_work.discard(optimizer)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_sampled(parameter: Tensor) -> bool:
    gradient = parameter.grad if id(parameter) in _taken else None
    return gradient is not None and gradient.is_sparse


@torch.no_grad()
def _swap(optimizer: Optimizer, work: _Work) -> None:
    """Let an optimizer hold the sampled rows in the place of each parameter that has them."""
    if isinstance(optimizer, SparseAdam):
        # Made for it.
        return
    swaps = tuple(
        _Swap(parameter, *_rows(parameter), group["params"], place)
        for group in optimizer.param_groups
        for place, parameter in enumerate(group["params"])
        if _is_sampled(parameter)
    )
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if swaps and not kinds.isdisjoint(_REFUSED):
        raise ValueError(
            "sampled classes expect an optimizer that updates each number by itself and whose "
            f"state starts from zero, such as SGD or AdamW, got {type(optimizer).__name__}"
        )
    work.swaps = swaps
    for parameter, rows, index, group, place in swaps:
        state = optimizer.state.get(parameter)
        if state:
            optimizer.state[rows] = {
                name: _select(value, parameter, index) for name, value in state.items()
            }
        group[place] = rows


def _rows(parameter: Tensor) -> tuple[nn.Parameter, Tensor]:
    """The sampled rows with their gradient, and their numbers."""
    gradient, latest = parameter.grad, _taken[id(parameter)].index
    assert gradient is not None
    if latest is None or gradient._indices().data_ptr() != latest.data_ptr():
        # A sum of several: a row may be there more than once. Waits for a GPU, and makes a copy.
        gradient = gradient.coalesce()
    index = gradient._indices()[0]
    rows = nn.Parameter(parameter.detach().index_select(0, index))
    rows.grad = gradient._values()
    return rows, index


def _select(value: Any, parameter: Tensor, index: Tensor) -> Any:
    """The rows of a state, or a copy of what all rows share, such as the number of the step."""
    if not isinstance(value, Tensor):
        return value
    if _has_rows(value, parameter):
        return value.index_select(0, index.to(value.device))
    return value.clone()


def _has_rows(value: Tensor, parameter: Tensor) -> bool:
    return value.ndim > 0 and value.shape[0] == parameter.shape[0]


@torch.no_grad()
def _put_back(optimizer: Optimizer, work: _Work, *, keep: bool = True) -> None:
    """Let an optimizer hold its own parameters again, and write the rows to where they belong."""
    swaps, work.swaps = work.swaps, ()
    for parameter, rows, index, group, place in swaps:
        group[place] = parameter
        state = optimizer.state.pop(rows, {})
        if not keep:
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
