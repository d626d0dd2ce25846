"""A batch that lies on several ranks: brought together, and taken home again as one loss.

One rule holds for all gradients. The objective is the mean over the ranks of what each of them
returns, since that is what wrappers such as DistributedDataParallel make of it; and each of them
returns the loss of the whole batch. So what every rank computes in whole needs no factor, and what
a rank computes of its own rows alone is multiplied with the number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.distributed.process_group import Ranks, uncompiled
from tammes.heads.head import Head
from tammes.kernels.merge import scale_gradient
from tammes.terms import Batch, Setting


class Examples(NamedTuple):
    """What a criterion is called with.

    Attributes:
        batch: features, labels and which of them count.
        weights: of the examples, shape ``(N,)``, or none.
        settings: of the terms; some may have one value per example.
    """

    batch: Batch
    weights: Tensor | None
    settings: Mapping[str, Setting]

    def weigh(
        self, class_weights: Tensor | None, masked: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Weight of each example, shape ``(N,)``; NaN where its own class is masked."""
        valid = self.batch.valid
        result = valid.to(dtype)
        if self.weights is not None:
            result = torch.where(valid, self.weights.to(dtype), 0.0)
        if class_weights is not None:
            result = result * class_weights.to(dtype)[self.batch.labels]
        if masked is not None:
            # Where values are not checked: an own class that is masked is to show.
            result = result.masked_fill(valid & masked[self.batch.labels], torch.nan)
        return result


class Alone:
    """One process: its batch is the whole batch.

    Attributes:
        sharded: whether every rank works on all rows, with the prototypes that it has.
    """

    sharded = False

    def agree(self, who: str, check: Callable[[], None], features: Tensor, **numbers: int) -> int:
        """Check this rank's batch, and learn how many rows the longest of all ranks has.

        Args:
            who: expects it.
            check: raises what is wrong with the batch.
            features: of this rank.
            **numbers: what else has to be the same on all ranks.
        """
        check()
        return len(features)

    def gather(self, own: Examples, longest: int, *, features: bool) -> tuple[Examples, slice]:
        """The examples of all ranks, and which of them are those of this rank.

        Args:
            own: of this rank.
            longest: how many rows the longest of all ranks has. Where one has fewer, they are
                filled up with some that do not count.
            features: whether anything looks at the features of other ranks. If not, they are not
                sent, and what comes back has none.
        """
        return own, slice(None)

    def seen_by_all(self, gathered: Tensor) -> Tensor:
        """Gathered rows, for what every rank computes of all of them in the same way."""
        return gathered

    def combine(
        self, split: Tensor, others: Sequence[Tensor], sums: Mapping[str, Tensor], own: slice
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to return, and the sums of the terms on the split over all ranks.

        Args:
            split: loss of the terms on the split, a sum or rows: of all examples if sharded, else
                of those of this rank.
            others: losses of the other terms, each a sum or rows, of all examples.
            sums: of each term on the split.
            own: which rows are those of this rank.
        """
        return sum(others, split), dict(sums)


ALONE = Alone()


class Gathering(Alone):
    """Several ranks, whose batches are parts of one.

    Args:
        ranks: whose.
        sharded: whether each of them has a part of the prototypes, and not all.
        averaged: whether the gradients of the ranks are averaged afterwards, else summed.
        even: the promise that all ranks bring equally many rows. Then nothing is agreed on after
            the first call, and nothing waits for an accelerator.
    """

    def __init__(self, ranks: Ranks, *, sharded: bool, averaged: bool, even: bool) -> None:
        self.ranks, self.sharded = ranks, sharded
        self.averaged, self.even = averaged, even
        self.agreed = False

    @property
    def group(self) -> Any:
        """The process group of the ranks."""
        return self.ranks.group

    @property
    def factor(self) -> float:
        """What a rank's own part of the loss is multiplied with."""
        return float(self.ranks.size) if self.averaged else 1.0

    @uncompiled
    def agree(self, who: str, check: Callable[[], None], features: Tensor, **numbers: int) -> int:
        """See :meth:`Alone.agree`; a rank whose batch is refused tells the others."""
        if self.even and self.agreed:
            return super().agree(who, check, features)
        fault: Exception | None = None
        try:
            check()
        except (TypeError, ValueError) as error:
            fault = error
        told = self.ranks.exchange(
            refused=fault is not None,
            number_of_examples=0 if fault else len(features),
            bits_of_a_feature=0 if fault else 8 * features.itemsize,
            features_with_gradient=not fault and features.requires_grad and torch.is_grad_enabled(),
            **numbers,
        )
        if fault is not None:
            raise fault
        refused = [rank for rank, wrong in enumerate(told.pop("refused")) if wrong]
        if refused:
            raise RuntimeError(
                f"{who} cannot go on with {self.ranks.name}: rank {refused[0]} has refused its "
                "batch, and says why"
            )
        rows = told["number_of_examples"]
        if not self.even:
            del told["number_of_examples"]
        self.ranks.check_same(who, told)
        self.agreed = True
        return max(rows)

    def gather(self, own: Examples, longest: int, *, features: bool) -> tuple[Examples, slice]:
        """See :meth:`Alone.gather`; one collective for all but the features, one for these."""
        batch, weights, settings = own
        # Where each rank works on its own rows, nobody else asks for settings of them.
        per_example = dict(by_example(settings)) if self.sharded else {}
        columns = [batch.labels, batch.valid, *per_example.values()]
        columns += [] if weights is None else [weights]
        # Doubles hold any label and any weight as it is.
        packed = torch.stack(
            [column.to(batch.labels.device, torch.double) for column in columns], 1
        )
        gathered = self.seen_by_all(self.ranks.gather_rows(packed, longest))
        labels, valid, *more = gathered.unbind(1)
        if weights is not None:
            weights = more.pop().to(weights.dtype)
        together = {
            key: column.to(per_example[key].dtype)
            for key, column in zip(per_example, more, strict=True)
        }
        if features or self.sharded:
            rows = self.ranks.gather_rows(batch.features, longest)
        else:
            rows = batch.features.new_empty(len(labels), 0)
        first = self.ranks.rank * longest
        whole = Batch(rows, labels.long(), valid.bool())
        return (
            Examples(whole, weights, {**settings, **together}),
            slice(first, first + len(batch.labels)),
        )

    def seen_by_all(self, gathered: Tensor) -> Tensor:
        """See :meth:`Alone.seen_by_all`; each rank then wants the whole gradient of it."""
        if not self.sharded or self.averaged:
            return gathered
        return scale_gradient(gathered, 1 / self.ranks.size)

    def combine(
        self, split: Tensor, others: Sequence[Tensor], sums: Mapping[str, Tensor], own: slice
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See :meth:`Alone.combine`."""
        if self.sharded:
            loss = sum(others, split)
            return (_OwnRows.apply(loss, self, own) if loss.ndim else loss), dict(sums)
        packed = torch.stack([split.detach().sum(), *sums.values()])
        whole, *values = self.ranks.sum(packed).unbind()
        summed = dict(zip(sums, values, strict=True))
        if split.ndim:
            return sum((rows[own] for rows in others), split), summed
        other = sum(others, torch.zeros_like(split))
        part = split + other / self.ranks.size
        return replaced(part, whole + other.detach(), self.factor), summed


def gathering_of(head: Head, group: Any, *, averaged: bool, even: bool) -> Gathering | None:
    """What a criterion is asked to gather, or none.

    Args:
        head: a sharded one says itself over which ranks, and whether gradients are averaged.
        group: a process group, ranks, ``True`` for the default group, or none.
        averaged: see :class:`Gathering`.
        even: see :class:`Gathering`.
    """
    shards: Ranks | None = getattr(head, "ranks", None)
    wanted = None if group in (None, False) else Ranks(None if group is True else group)
    if shards is None:
        if wanted is None:
            return None
        return Gathering(wanted, sharded=False, averaged=averaged, even=even)
    if wanted is not None and wanted != shards:
        raise ValueError(
            f"Criterion expects the group of its head, {shards.name}, got {wanted.name}"
        )
    return Gathering(shards, sharded=True, averaged=getattr(head, "averaged", averaged), even=even)


def by_example(settings: Mapping[str, Setting]) -> list[tuple[str, Tensor]]:
    """The settings of a call that have one value per example."""
    return [(k, v) for k, v in settings.items() if isinstance(v, Tensor) and v.ndim]


def replaced(part: Tensor, value: Tensor, factor: float) -> Tensor:
    """A value that has the gradient of ``factor * part``."""
    result: Tensor = _Replaced.apply(part, value, factor)
    return result


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None


class _OwnRows(torch.autograd.Function):
    """Some of the rows that all ranks have; what a rank wants of its own is heard by all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gathering: Gathering, own: slice) -> Tensor:
        ctx.gathering, ctx.longest = gathering, len(rows) // gathering.ranks.size
        return rows[own].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        heard = ctx.gathering.ranks.gather_rows(grad, ctx.longest)
        return heard / ctx.gathering.factor, None, None
