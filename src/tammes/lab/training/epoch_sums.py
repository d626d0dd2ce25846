"""Metrics of training steps: computed on the device, summed on the host when they are read."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tammes.criterion.criterion import Criterion
from tammes.distributed.process_group import RankGroup
from tammes.heads.head import Head
from tammes.lab.training.model import batch_metrics, batch_sums

Nonfinite: TypeAlias = tuple[int, list[str]]
"""Step of a non-finite loss, and the terms that were not finite."""


class _Deferred(NamedTuple):
    """A step whose batch is not measured yet, and copies of the tensors of the head."""

    step: int
    values: Sequence[Tensor]
    features: Tensor
    labels: Tensor
    head: Sequence[Tensor]


class _BatchSums(nn.Module):
    """Computes :func:`batch_sums`, as a module for ``functional_call``."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return batch_sums(self.head, features, labels)


class EpochSums:
    """Sums of metrics and terms over the steps of an epoch.

    A step leaves a row of numbers on the device. Reading synchronises with it, and adds the rows of
    the steps since the last reading, in order and in double precision. All processes must read
    together.
    """

    def __init__(self, criterion: Criterion) -> None:
        self.head = criterion.head
        self.metrics = batch_metrics(self.head)
        self.terms = [*criterion.settings.named]
        self.nonfinite: Nonfinite | None = None
        self.steps: list[int] = []
        self.rows: list[Tensor] = []
        self.deferred: list[_Deferred] = []
        self.measure = _BatchSums(self.head)
        # Training changes these tensors in place.
        state = *self.measure.named_parameters(), *self.measure.named_buffers()
        self.tensors = {name: tensor.detach() for name, tensor in state}
        self.reset()

    def reset(self) -> None:
        """Start an epoch."""
        self.sums = [0.0] * (len(self.metrics) + 1 + len(self.terms))

    def restore(self, saved: list[float]) -> None:
        """Continue from the result of :meth:`read`."""
        self.sums = saved

    def add(self, step: int, row: Tensor) -> None:
        """Add a step: its batch sums, its loss and its terms, concatenated."""
        self._measure()
        self.steps.append(step)
        self.rows.append(row)

    def defer(
        self, step: int, values: Sequence[Tensor], features: Tensor, labels: Tensor, *, at_once: int
    ) -> None:
        """Add a step by its loss and terms, to measure its batch with those of later steps.

        Batches are measured when there are ``at_once``, all of one size, each against the head as
        it was when its step was added.
        """
        if self.deferred and self.deferred[0].features.shape != features.shape:
            self._measure()
        head = [tensor.clone() for tensor in self.tensors.values()]
        self.deferred.append(_Deferred(step, values, features, labels, head))
        if len(self.deferred) >= at_once:
            self._measure()

    @torch.no_grad()
    def _measure(self) -> None:
        """Measure the deferred batches."""
        if not self.deferred:
            return
        steps, values, features, labels, heads = zip(*self.deferred, strict=True)
        self.deferred = []
        tensors = map(torch.stack, zip(*heads, strict=True))
        state = dict(zip(self.tensors, tensors, strict=True))
        batches = torch.stack(features), torch.stack(labels)
        sums = vmap(functional_call, in_dims=(None, 0, 0))(self.measure, state, batches)
        numbers = torch.stack([number for own in values for number in own]).view(len(steps), -1)
        self.steps += steps
        self.rows += torch.cat([sums, numbers.float()], 1).unbind()

    def read(self) -> list[float]:
        """Return the sums over the examples: their count, loss, other metrics, and terms."""
        self._measure()
        if not self.rows:
            return self.sums
        rows, size = torch.stack(self.rows), len(self.metrics)
        if not self.head.is_sharded:
            rows[:, :size] = RankGroup().all_reduce(rows[:, :size])
        rows = rows.cpu()
        count, metrics, loss, terms = rows.split([1, size - 1, 1, len(self.terms)], 1)
        added = torch.cat([count, loss * count, metrics, terms.double() * count], 1)
        found = zip(
            self.steps, added.tolist(), loss.flatten().tolist(), terms.tolist(), strict=True
        )
        for step, row, own_loss, own_terms in found:
            self.sums = [total + number for total, number in zip(self.sums, row, strict=True)]
            if self.nonfinite is None and not math.isfinite(own_loss):
                named = zip(self.terms, own_terms, strict=True)
                self.nonfinite = step, [name for name, x in named if not math.isfinite(x)]
        self.steps, self.rows = [], []
        return self.sums

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
