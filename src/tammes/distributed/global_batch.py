"""Loss of a global batch whose examples are distributed over the ranks.

One rule holds for all gradients. The objective is the mean over the ranks of the losses that they
return, because that is what wrappers such as DistributedDataParallel optimize, and every rank
returns the loss of the global batch. So a part that every rank computes from all examples needs no
factor, and a part that a rank computes from its own rows only is multiplied by the world size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.distributed.process_group import RankGroup, uncompiled
from tammes.heads.head import Head
from tammes.kernels.merge import scale_gradient
from tammes.terms import Batch, Setting


class WeightedBatch(NamedTuple):
    """Arguments of one call of a criterion.

    Attributes:
        batch: features, labels, and a mask of the examples that count.
        weights: weight of each example, shape ``(N,)``, or ``None``.
        settings: settings of the terms; some may have one value per example.
    """

    batch: Batch
    weights: Tensor | None
    settings: Mapping[str, Setting]


class GlobalBatch:
    """Global batch of a process group, whose examples are distributed over the ranks.

    Args:
        group: ranks that share the batch.
        sharded: whether each rank holds only some of the prototypes.
        averaged: whether the gradients of the ranks are averaged afterwards, else summed.
        even: whether all ranks are guaranteed to have equally many rows. Then only the first call
            compares batch sizes, and later calls do not synchronize with the accelerator.
    """

    def __init__(self, group: RankGroup, *, sharded: bool, averaged: bool, even: bool) -> None:
        self.group, self.sharded = group, sharded
        self.averaged, self.even = averaged, even
        self.validated = False

    @property
    def process_group(self) -> Any:
        """The ``torch.distributed`` group, or ``None`` in a single process."""
        return self.group.process_group

    @property
    def factor(self) -> float:
        """Factor of a part of the loss that only this rank computes."""
        return float(self.group.world_size) if self.averaged else 1.0

    @uncompiled
    def validate(
        self, caller: str, check: Callable[[], object], features: Tensor, **numbers: int
    ) -> int:
        """Check this rank's batch, and return the largest number of rows on any rank.

        If the batch of one rank is invalid, all ranks raise.

        Args:
            caller: name that messages begin with.
            check: raises ``TypeError`` or ``ValueError`` if the batch is invalid.
            features: features of this rank, shape ``(N, D)``.
            **numbers: further integers that must be equal on all ranks.
        """
        if self.even and self.validated:
            check()
            return len(features)
        error: Exception | None = None
        try:
            check()
        except (TypeError, ValueError) as caught:
            error = caught
        gathered = self.group.all_gather_ints(
            refused=error is not None,
            number_of_examples=0 if error else len(features),
            bits_of_a_feature=0 if error else 8 * features.itemsize,
            features_with_gradient=not error and features.requires_grad and torch.is_grad_enabled(),
            **numbers,
        )
        if error is not None:
            raise error
        refused = [rank for rank, failed in enumerate(gathered.pop("refused")) if failed]
        if refused:
            raise RuntimeError(
                f"{caller} cannot continue in {self.group.name}: rank {refused[0]} rejected its "
                "batch; see the error on that rank"
            )
        rows = gathered["number_of_examples"]
        if not self.even:
            del gathered["number_of_examples"]
        self.group.check_gathered_equal(caller, gathered)
        self.validated = True
        return max(rows)

    def gather(
        self, local: WeightedBatch, max_rows: int, *, features: bool
    ) -> tuple[WeightedBatch, slice]:
        """Gather the examples of all ranks, and return the slice that belongs to this rank.

        One collective for the features, one for everything else.

        Args:
            local: examples of this rank.
            max_rows: largest number of rows on any rank. Shorter batches are padded with examples
                that do not count.
            features: whether anything reads the features of other ranks. If not, they are not
                sent, and the gathered batch has none.
        """
        batch, weights, settings = local
        # A rank that scores only its own rows needs no settings of other rows.
        per_example = dict(per_example_settings(settings)) if self.sharded else {}
        several = batch.labels.ndim == 2
        own = list(batch.labels.unbind(1)) if several else [batch.labels]
        columns = [*own, batch.valid, *per_example.values()]
        columns += [] if weights is None else [weights]
        # float64 represents every label and every weight exactly.
        packed = torch.stack(
            [column.to(batch.labels.device, torch.double) for column in columns], 1
        )
        gathered = self.for_replicated_loss(self.group.all_gather_rows(packed, max_rows))
        # Sliced: compiled by torch 2.11, a starred name behind a graph break is no list.
        columns = list(gathered.unbind(1))
        labels = torch.stack(columns[: len(own)], 1) if several else columns[0]
        valid = columns[len(own)]
        gathered_settings = {
            key: column.to(value.dtype)
            for (key, value), column in zip(
                per_example.items(), columns[len(own) + 1 :], strict=False
            )
        }
        if weights is not None:
            weights = columns[-1].to(weights.dtype)
        if features or self.sharded:
            rows = self.group.all_gather_rows(batch.features, max_rows)
        else:
            rows = batch.features.new_empty(len(labels), 0)
        first = self.group.rank * max_rows
        whole = Batch(rows, labels.long(), valid.bool())
        return (
            WeightedBatch(whole, weights, {**settings, **gathered_settings}),
            slice(first, first + len(batch.labels)),
        )

    def for_replicated_loss(self, gathered: Tensor) -> Tensor:
        """Prepare gathered rows for a loss that every rank computes alike from all of them.

        The gradients of all ranks are added up in the backward pass of the gathering.
        """
        if not self.sharded or self.averaged:
            return gathered
        return scale_gradient(gathered, 1 / self.group.world_size)

    def combine(
        self, split: Tensor, others: Sequence[Tensor], sums: Mapping[str, Tensor], local: slice
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and the sum of each term on the split over all ranks.

        Args:
            split: loss of the terms on the split, a sum or rows: of all examples if sharded, else
                of those of this rank.
            others: losses of the other terms, each a sum or rows, of all examples.
            sums: sum of each term on the split.
            local: rows of this rank.
        """
        if self.sharded:
            loss = sum(others, split)
            return (_LocalRows.apply(loss, self, local) if loss.ndim else loss), dict(sums)
        packed = torch.stack([split.detach().sum(), *sums.values()])
        whole, *values = self.group.all_reduce(packed).unbind()
        summed = dict(zip(sums, values, strict=True))
        if split.ndim:
            return sum((rows[local] for rows in others), split), summed
        other = sum(others, torch.zeros_like(split))
        part = split + other / self.group.world_size
        return replace_value(part, whole + other.detach(), self.factor), summed


def make_global_batch(head: Head, group: Any, *, averaged: bool, even: bool) -> GlobalBatch | None:
    """Global batch of a criterion, or ``None`` without a process group.

    The group is a process group, a :class:`RankGroup`, ``True`` for the default group, or ``None``.
    A sharded head has its own group, and its own ``averaged``.
    """
    requested = None if group in (None, False) else RankGroup(None if group is True else group)
    if head.group is None:
        if requested is None:
            return None
        return GlobalBatch(requested, sharded=False, averaged=averaged, even=even)
    if requested is not None and requested != head.group:
        raise ValueError(
            f"Criterion expects the group of its head, {head.group.name}, got {requested.name}"
        )
    return GlobalBatch(head.group, sharded=True, averaged=head.averaged, even=even)


def per_example_settings(settings: Mapping[str, Setting]) -> list[tuple[str, Tensor]]:
    """Settings of a call that have one value per example."""
    return [(k, v) for k, v in settings.items() if isinstance(v, Tensor) and v.ndim]


def replace_value(part: Tensor, value: Tensor, factor: float) -> Tensor:
    """Return ``value`` with the gradient of ``factor * part``."""
    result: Tensor = _ReplaceValue.apply(part, value, factor)
    return result


class _ReplaceValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None


class _LocalRows(torch.autograd.Function):
    """Rows of this rank out of those of all ranks; backward gathers the gradients of all rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, batch: GlobalBatch, local: slice) -> Tensor:
        ctx.batch, ctx.max_rows = batch, len(rows) // batch.group.world_size
        return rows[local].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gathered = ctx.batch.group.all_gather_rows(grad, ctx.max_rows)
        return gathered / ctx.batch.factor, None, None
