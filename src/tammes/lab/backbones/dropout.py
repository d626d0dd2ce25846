"""DropBlock, and the dropout of few-shot recipes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STEPS = 40_000
"""Batches until DropBlock reaches its full rate."""


class DropBlock(nn.Module):
    """Drops squares of a feature map, independently in each channel, at a rate that grows from 0.

    The rate is ``rate * min(batches / steps, 1)``. The kept values are divided by the share kept in
    the whole batch.

    Args:
        rate: final share of a map to drop.
        size: side of the squares; at most that of the map.
        steps: batches until the full rate.
    """

    batches: Tensor

    def __init__(self, rate: float, size: int, steps: int = _STEPS) -> None:
        super().__init__()
        self.rate, self.size, self.steps = rate, size, steps
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, maps: Tensor) -> Tensor:
        """Drop squares in training mode; return the maps unchanged otherwise."""
        if not self.training:
            return maps
        height, width = maps.shape[2:]
        size = min(self.size, height, width)
        # Corners are drawn only where the whole square fits: their rate is that of dropped pixels
        # over the area of a square, divided by the share of such positions.
        corners = (height - size + 1) * (width - size + 1)
        rate = self.rate * (self.batches / self.steps).clamp(max=1)
        rate = rate * (height * width) / (size * size * corners)
        self.batches += 1
        shape = (*maps.shape[:2], height - size + 1, width - size + 1)
        dropped = (torch.rand(shape, device=maps.device) < rate).to(maps.dtype)
        if size > 1:
            dropped = F.max_pool2d(F.pad(dropped, (size - 1,) * 4), size, stride=1)
        kept = 1 - dropped
        # If everything is dropped the result is 0 rather than 0 / 0, in half precision too.
        share = kept.float().mean().clamp(min=1e-4)
        return maps * kept / share.to(maps.dtype)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"rate={self.rate}, size={self.size}, steps={self.steps}"


def drop_layers(name: str, rate: float, block_size: int) -> Callable[[int], list[nn.Module]]:
    """Return a function from stage to drop layers: dropout in 1 and 2, DropBlock in 3 and 4."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name} expects drop_rate in [0, 1), got {rate!r}")
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"{name} expects block_size to be at least 1, got {block_size!r}")

    def layers(stage: int) -> list[nn.Module]:
        if rate == 0:
            return []
        return [nn.Dropout(rate) if stage <= 2 else DropBlock(rate, block_size)]

    return layers
