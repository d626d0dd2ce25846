"""Buffers that stay exact when a model is cast to half precision, moved, or built on ``meta``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ExactBuffers(nn.Module):
    """Module whose floating-point buffers move with the model but never drop below float32.

    Half precision would destroy a margin per class, or a running average that moves by a hundredth.

    Attributes:
        cast: names of buffers that are cast with the parameters all the same.
    """

    cast: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self._constants: dict[str, Tensor | None] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, even one made before modules had constants."""
        super().__setstate__(state)
        self.__dict__.setdefault("_constants", {})

    def register_constant(
        self, name: str, values: Tensor, device: torch.device, *, persistent: bool = False
    ) -> None:
        """Register a buffer that keeps its values where no state_dict restores them.

        ``to_empty`` does not erase them, even if the model was built on the device ``meta``.

        Args:
            name: name of the buffer.
            values: initial values, on the CPU.
            device: device of the buffer.
            persistent: whether the buffer is part of the ``state_dict``.
        """
        buffer = values.to(device)
        self.register_buffer(name, buffer, persistent=persistent)
        self._constants[name] = values if buffer.is_meta else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExactBuffers":
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self.get_buffer(name)
            if name not in self.cast and new.is_floating_point() and new.dtype.itemsize < 4:
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, old.float().to(new.device))
        self._restore_constants(before)
        return self

    def _restore_constants(self, before: dict[str, Tensor]) -> None:
        """Copy the values from before ``_apply`` back into the constants."""
        for name, saved in self._constants.items():
            old, new = before[name], self.get_buffer(name)
            if new.is_meta and not old.is_meta:
                self._constants[name] = old.cpu()
            elif new is not old and not new.is_meta:
                values = old if saved is None else saved
                setattr(self, name, values.to(new))
                self._constants[name] = None
