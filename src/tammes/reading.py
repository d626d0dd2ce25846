"""Read buffers that are written later in the same step."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from tammes.recomputation import check_first_pass

_M = TypeVar("_M", bound=nn.Module)


def read(value: Tensor) -> Tensor:
    """Copy a buffer, or a value computed from buffers, that the step may change afterwards.

    A plain copy is not enough under ``torch.compile``: it computes the value again in the backward
    pass, from the buffer as it is by then, and gradients are those of the next state (torch 2.13).
    It never does so with an operator it does not know.

    Example:
        >>> steps = torch.zeros((), dtype=torch.long)
        >>> now = read(steps)
        >>> steps += 1
        >>> now
        tensor(0)
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        copied: Tensor = torch.ops.tammes.read(value)
        return copied
    return value.clone()


def snapshot(module: _M) -> _M:
    """Copy a module and its buffers as they are now; parameters and the rest are shared.

    Example:
        >>> warm_up = tammes.schedules.WarmUp(0.0, 0.5, steps=10)
        >>> then = snapshot(warm_up)
        >>> warm_up.step()
        >>> warm_up.steps, then.steps
        (tensor(1), tensor(0))
    """
    # Unlike copy.copy, torch.compile can trace this.
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_buffers"] = {
        name: None if buffer is None else read(buffer) for name, buffer in module._buffers.items()
    }
    copied.__dict__["_modules"] = {
        name: None if child is None else snapshot(child) for name, child in module._modules.items()
    }
    return copied


def _read(value: Tensor) -> Tensor:
    check_first_pass("a compiled module")
    return value.clone()


def _fake_read(value: Tensor) -> Tensor:
    return torch.empty_like(value)


if not hasattr(torch.ops.tammes, "read"):
    torch.library.define("tammes::read", "(Tensor value) -> Tensor")
    torch.library.impl("tammes::read", "CompositeExplicitAutograd", _read)
    torch.library.register_fake("tammes::read", _fake_read)
