"""Rows of vectors in blocks of fixed size, so that a gallery grows without being copied."""

from collections.abc import Iterator

import torch
from torch import Tensor

_BYTES = 128 * 2**20
"""Size of a block."""


class RowBlocks:
    """Float32 rows, appended in blocks of 128 MiB.

    Args:
        size: length D of a row; 0 while there are none.
        device: device of the rows.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size, self.device = size, torch.device(device)
        self.step = max(_BYTES // (4 * max(size, 1)), 1)
        self._blocks: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, count: int) -> None:
        """Append rows of zeros."""
        first, last = self._count, self._count + count
        while len(self._blocks) * self.step < last:
            # Not zeros, so that the memory of a block is not used until it is filled.
            self._blocks.append(torch.empty(self.step, self.size, device=self.device))
        self._count = last
        self[first:last] = 0.0

    def truncate(self, count: int) -> None:
        """Drop the rows from ``count`` on."""
        self._count = count
        del self._blocks[-(-count // self.step) :]

    def blocks(self) -> Iterator[Tensor]:
        """Yield views of the rows in blocks."""
        for first in range(0, self._count, self.step):
            yield self._blocks[first // self.step][: self._count - first]

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Copy rows, shape ``(N,)``, to a tensor of shape ``(N, D)``."""
        copied = torch.empty(len(rows), self.size, device=self.device)
        for place, here, inside in self._located(rows):
            copied[here] = self._blocks[place][inside]
        return copied

    def __setitem__(self, rows: Tensor | slice, values: Tensor | float) -> None:
        """Overwrite rows, shape ``(N,)`` or a slice, by values of shape ``(N, D)`` or a number."""
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, max(rows.stop, rows.start))
        for place, here, inside in self._located(rows):
            new = values[here] if isinstance(values, Tensor) else values
            self._blocks[place][inside] = new

    def _located(self, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of a block, the places in ``rows`` that are in it, and its rows."""
        places = rows.to(self.device) // self.step
        for place in places.unique().tolist():
            here = (places == place).nonzero().squeeze(1)
            yield place, here, rows.to(self.device)[here] - place * self.step
