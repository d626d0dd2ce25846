"""Buffers that stay exact when a model is cast to half precision, moved, or made without memory."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Steady(nn.Module):
    """Its floating buffers move with the model but never go below single precision.

    A margin per class, or a running average that moves by a hundredth, would not survive it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._constants: dict[str, Tensor | None] = {}

    def register_constant(
        self, name: str, values: Tensor, device: torch.device, *, persistent: bool = False
    ) -> None:
        """Add a buffer that keeps its values where a state_dict would not bring them back.

        ``to_empty`` leaves them alone, also of a model that was made on the device ``meta``.

        Args:
            name: of the buffer.
            values: on the CPU.
            device: of the buffer.
            persistent: part of the ``state_dict``.
        """
        buffer = values.to(device)
        self.register_buffer(name, buffer, persistent=persistent)
        self._constants[name] = values if buffer.is_meta else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Steady":
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self.get_buffer(name)
            if new.is_floating_point() and new.dtype.itemsize < 4:
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, old.float().to(new.device))
        self._keep_constants(before)
        return self

    def _keep_constants(self, before: dict[str, Tensor]) -> None:
        """Give constants the values they had, whatever was done to them."""
        for name, on_meta in self._constants.items():
            old, new = before[name], self.get_buffer(name)
            if new.is_meta and not old.is_meta:
                self._constants[name] = old.cpu()
            elif new is not old and not new.is_meta:
                values = old if on_meta is None else on_meta
                setattr(self, name, values.to(new))
                self._constants[name] = None
