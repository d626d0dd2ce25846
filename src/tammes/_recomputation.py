"""Support for activation checkpointing, which repeats the forward pass in the backward pass.

State that a call reads and then changes, such as a running average, has a new value by then. So the
first pass stores the old value with the checkpoint, and the second pass reads it from there.
"""

import inspect
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def checkpointing() -> bool:
    """Whether this is the first pass through a function under ``torch.utils.checkpoint``."""
    return not recomputing() and _first_pass() is not None


def check_first_pass(name: str) -> None:
    """Raise ``RuntimeError`` in a recomputation whose first pass stored nothing."""
    if recomputing():
        raise RuntimeError(
            f"{name} that has states, schedules or sampled classes expects to know which of its "
            "calls is recomputed in the backward pass, got one that it does not know: keep it "
            "outside of the activation checkpoint"
        )


def once(owner: object, make: Callable[[], _T]) -> _T:
    """Make a value; in a recomputation, return the value of the first pass.

    Args:
        owner: object that makes the value; its calls within a checkpoint are matched by order.
        make: reads state that later calls change, and may change it.
    """
    if not recomputing():
        value = make()
        first = _first_pass()
        if first is not None:
            _recorded_values(first).setdefault(owner, _RecordedValues()).values.append(value)
        return value
    again = _second_pass()
    made = None if again is None else _recorded_values(again).get(owner)
    if made is None or made.num_used() == len(made.values):
        check_first_pass(f"a {type(owner).__name__}")
    assert made is not None
    result: _T = made.next()
    return result


class _RecordedValues:
    """Values of the calls within a checkpoint, and how many each backward pass has used."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._used: dict[int, int] = {}

    def num_used(self) -> int:
        # A backward pass recomputes a checkpoint once.
        return self._used.get(torch._C._current_graph_task_id(), 0)

    def next(self) -> Any:
        count = self.num_used()
        self._used[torch._C._current_graph_task_id()] = count + 1
        return self.values[count]


def _recorded_values(checkpoint: Any) -> "weakref.WeakKeyDictionary[object, _RecordedValues]":
    """Values by owner; an attribute of the checkpoint, so they are freed with it."""
    if not hasattr(checkpoint, "_tammes_made"):
        checkpoint._tammes_made = weakref.WeakKeyDictionary()
    made: weakref.WeakKeyDictionary[object, _RecordedValues] = checkpoint._tammes_made
    return made


def _first_pass() -> Any:
    """Return torch's checkpoint that runs its function for the first time, or None."""
    if torch.compiler.is_compiling():
        # A compiled call raises an error when it is recomputed, see tammes.states.
        return None
    if not torch.is_grad_enabled():
        frame = _find("CheckpointFunction.forward")
        return None if frame is None else frame.f_locals["ctx"]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else hooks[0]
    if getattr(pack, "__qualname__", "") != "_checkpoint_hook.__init__.<locals>.pack_hook":
        return None
    return inspect.getclosurevars(pack).nonlocals.get("frame")


def _second_pass() -> Any:
    """Return torch's checkpoint that repeats its function, or None."""
    frame = _find("CheckpointFunction.backward", "_checkpoint_hook.__init__.<locals>.unpack_hook")
    if frame is None:
        return None
    # The hook of torch 2.11 has a variable ctx too.
    return frame.f_locals["frame" if "frame" in frame.f_locals else "ctx"]


def _find(*names: str) -> FrameType | None:
    """Return the nearest calling frame of one of these functions of ``torch.utils.checkpoint``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_qualname in names and frame.f_globals["__name__"] == "torch.utils.checkpoint":
            return frame
        frame = frame.f_back
    return None
