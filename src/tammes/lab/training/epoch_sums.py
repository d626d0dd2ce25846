"""Metrics of training steps: computed on the device, summed on the host when they are read."""

import math
from typing import TypeAlias

import torch
from torch import Tensor

from tammes.distributed.process_group import RankGroup
from tammes.lab.training.model import BATCH_SUMS, Model

Nonfinite: TypeAlias = tuple[int, list[str]]
"""Step of a non-finite loss, and the terms that were not finite."""


class EpochSums:
    """Sums of metrics and terms over the steps of an epoch.

    A step leaves a row of numbers on the device. Reading synchronises with it, and adds the rows of
    the steps since the last reading, in order and in double precision. All processes must read
    together.
    """

    def __init__(self, model: Model) -> None:
        self.head = model.criterion.head
        self.metrics = BATCH_SUMS if model.measures else BATCH_SUMS[:1]
        self.terms = [*model.criterion.settings.named]
        self.nonfinite: Nonfinite | None = None
        self.steps: list[int] = []
        self.rows: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Start an epoch."""
        self.sums = torch.zeros(len(self.metrics) + 1 + len(self.terms), dtype=torch.double)

    def restore(self, saved: list[float]) -> None:
        """Continue from the result of :meth:`read`."""
        self.sums = torch.tensor(saved, dtype=torch.double)

    def add(self, step: int, row: Tensor) -> None:
        """Add a step: its batch sums, its loss and its terms, concatenated."""
        self.steps.append(step)
        self.rows.append(row)

    def read(self) -> list[float]:
        """Return the sums over the examples: their count, loss, other metrics, and terms."""
        if not self.rows:
            return self.sums.tolist()
        sums, values = torch.stack(self.rows).tensor_split([len(self.metrics)], 1)
        if not self.head.is_sharded:
            sums = RankGroup().all_reduce(sums)
        count, metrics = sums.cpu().tensor_split([1], 1)
        loss, terms = values.cpu().tensor_split([1], 1)
        added = torch.cat([count, loss * count, metrics, terms.double() * count], 1)
        for step, row, own in zip(self.steps, added, values.tolist(), strict=True):
            self.sums += row
            if self.nonfinite is None and not math.isfinite(own[0]):
                broken = zip(self.terms, own[1:], strict=True)
                self.nonfinite = step, [name for name, x in broken if not math.isfinite(x)]
        self.steps, self.rows = [], []
        return self.sums.tolist()

    def means(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return means of metrics and terms over the examples of the epoch so far."""
        count, *sums = self.read()
        means = [value / max(count, 1.0) for value in sums]
        measured = dict(zip(("loss", *self.metrics[1:]), means, strict=False))
        return measured, dict(zip(self.terms, means[len(measured) :], strict=True))

    def first_nonfinite(self) -> Nonfinite | None:
        """Return step and terms of the first non-finite loss, or None."""
        self.read()
        return self.nonfinite
