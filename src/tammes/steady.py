"""Buffers that stay exact when a model is cast to half precision."""

from collections.abc import Callable

from torch import Tensor, nn


class Steady(nn.Module):
    """Its floating buffers move with the model but never go below single precision.

    A margin per class, or a running average that moves by a hundredth, would not survive it.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Steady":
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self.get_buffer(name)
            if new.is_floating_point() and new.dtype.itemsize < 4:
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, old.float().to(new.device))
        return self
