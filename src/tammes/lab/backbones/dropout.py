"""Dropping parts of maps while training, as few-shot recipes do."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STEPS = 40_000
"""Batches over which DropBlock comes to its full rate."""


class DropBlock(nn.Module):
    """Drops squares of a map, each channel for itself, at a rate that grows from 0.

    The rate is ``rate * min(batches / steps, 1)``. What is kept is scaled up by the share that was
    dropped in the whole batch.

    Args:
        rate: share of a map to drop, in the end.
        size: side of the squares; at most that of the map.
        steps: batches until the full rate.
    """

    batches: Tensor

    def __init__(self, rate: float, size: int, steps: int = _STEPS) -> None:
        super().__init__()
        self.rate, self.size, self.steps = rate, size, steps
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, maps: Tensor) -> Tensor:
        """Maps with holes while training, the maps themselves otherwise."""
        if not self.training:
            return maps
        height, width = maps.shape[2:]
        size = min(self.size, height, width)
        # A square has its corner where it fits as a whole, so corners are rarer than what is
        # dropped by the area of a square, and denser by the share of places they can be at.
        corners = (height - size + 1) * (width - size + 1)
        rate = self.rate * (self.batches / self.steps).clamp(max=1)
        rate = rate * (height * width) / (size * size * corners)
        self.batches += 1
        shape = (*maps.shape[:2], height - size + 1, width - size + 1)
        dropped = (torch.rand(shape, device=maps.device) < rate).to(maps.dtype)
        if size > 1:
            dropped = F.max_pool2d(F.pad(dropped, (size - 1,) * 4), size, stride=1)
        kept = 1 - dropped
        # All of it dropped is 0, not 0 / 0, in half precision too.
        share = kept.float().mean().clamp(min=1e-4)
        return maps * kept / share.to(maps.dtype)

    def extra_repr(self) -> str:
        """Its settings."""
        return f"rate={self.rate}, size={self.size}, steps={self.steps}"


def drops(name: str, rate: float, block_size: int) -> Callable[[int], list[nn.Module]]:
    """What follows a block of a stage: dropout in stages 1 and 2, DropBlock in 3 and 4.

    Args:
        name: of the network, for messages.
        rate: of both; 0 for nothing at all.
        block_size: of DropBlock.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"{name} expects drop_rate in [0, 1), got {rate!r}")
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"{name} expects block_size to be at least 1, got {block_size!r}")

    def after(stage: int) -> list[nn.Module]:
        if rate == 0:
            return []
        return [nn.Dropout(rate) if stage <= 2 else DropBlock(rate, block_size)]

    return after
