"""Batch samplers.

A sampler yields positions, one tensor for each batch. With several processes every rank gets its
share of the global batch; concatenated in rank order, the shares are the batch of one process.
Draws depend on seed, epoch and batch number only, so a run resumes exactly in the middle of an
epoch.
"""

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tammes.lab.data import seeded_draws


def rank_share(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """Return the share of a rank in a global batch.

    Example:
        >>> [rank_share(torch.arange(5), rank, 2).tolist() for rank in range(2)]
        [[0, 1], [2, 3, 4]]
    """
    low, high = (len(whole) * edge // world_size for edge in (rank, rank + 1))
    return whole[low:high]


@dataclass(eq=False, repr=False, kw_only=True)
class BatchSampler:
    """Base class of samplers: keeps epoch and position, and yields the rank's share of each batch.

    Args:
        labels: class of each example, shape ``(N,)``.
        batch_size: size of the global batch.
        seed: seed of the draws.
        rank: rank of this process.
        world_size: number of processes.

    Attributes:
        epoch: current epoch.
        position: batches of the epoch already yielded.
    """

    labels: Tensor
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"sampler expects a rank below {self.world_size}, got {self.rank}")
        if self.batch_size < self.world_size:
            raise ValueError(
                f"sampler expects a batch of at least one example for each of {self.world_size} "
                f"processes, got {self.batch_size}"
            )
        if not len(self.labels):
            raise ValueError("sampler expects at least one example, got none")
        self.labels = self.labels.cpu()

    @cached_property
    def members(self) -> "ClassMembers":
        """Examples by class."""
        return ClassMembers(self.labels)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        raise NotImplementedError

    def draw(self, epoch: int) -> Callable[[int], Tensor]:
        """Return a function from batch number to the positions of the global batch."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; does nothing if it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[Tensor]:
        for whole in self.global_batches():
            yield rank_share(whole, self.rank, self.world_size)

    def global_batches(self) -> Iterator[Tensor]:
        """Yield the remaining global batches of the epoch."""
        batch = self.draw(self.epoch)
        while self.position < len(self):
            self.position += 1
            yield batch(self.position - 1)
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Return epoch and position; after the last batch, the start of the next epoch."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore epoch and position."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


@dataclass(eq=False, repr=False, kw_only=True)
class Random(BatchSampler):
    """Draws every example once, in random order; the last batch may be smaller.

    A last batch of one example, or of less than an eighth of a batch, is merged with the batch
    before it: the statistics of so few examples would spoil batch normalisation.

    Args:
        drop_last: drop the last batch if it is smaller.

    Example:
        >>> sampler = Random(labels=torch.zeros(5), batch_size=2, seed=0)
        >>> [len(batch) for batch in sampler]
        [2, 3]
    """

    drop_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop_last and len(self.labels) < self.batch_size:
            raise ValueError(
                f"sampler expects at least one full batch of {self.batch_size} with drop_last, got "
                f"{len(self.labels)} examples"
            )

    def __len__(self) -> int:
        full, rest = divmod(len(self.labels), self.batch_size)
        if self.drop_last or not rest:
            return full
        few = rest == 1 or 8 * rest < self.batch_size
        return max(full, 1) if few else full + 1

    def draw(self, epoch: int) -> Callable[[int], Tensor]:
        """Draw one order of all examples for the epoch."""
        order = seeded_draws.permutation(len(self.labels), self.seed, "random", epoch)
        last = len(self) - 1
        whole = len(self.labels) // self.batch_size * self.batch_size
        end = whole if self.drop_last else len(self.labels)

        def batch(number: int) -> Tensor:
            low = number * self.batch_size
            return order[low : end if number == last else low + self.batch_size]

        return batch


class ClassMembers:
    """Examples by class; classes without examples are left out.

    Attributes:
        order: positions of all examples, class after class.
        present: classes with examples, ascending.
        counts: number of examples of each class.
        starts: start of each class in ``order``.
    """

    def __init__(self, labels: Tensor) -> None:
        self.order = labels.argsort(stable=True)
        self.present, self.counts = labels.unique(return_counts=True)
        self.starts = self.counts.cumsum(0) - self.counts

    def __len__(self) -> int:
        return len(self.present)

    def draw_examples(self, classes: Tensor, count: int, *names: int | str) -> Tensor:
        """Draw ``count`` examples of each class, class after class.

        Examples repeat only if a class has too few; their counts then differ by at most one.
        """
        sizes = self.counts[classes][:, None]
        widest = int(sizes.max())
        # The positions of the smallest keys in a row are a draw without replacement.
        keys = seeded_draws.numbers(len(classes) * widest, *names).view(len(classes), widest)
        keys = keys.masked_fill(torch.arange(widest) >= sizes, torch.iinfo(torch.int64).max)
        drawn = keys.topk(min(count, widest), largest=False).indices
        drawn = drawn.gather(1, torch.arange(count) % sizes)
        return self.order[self.starts[classes][:, None] + drawn].flatten()


class Balanced(BatchSampler):
    """Draws a class uniformly, then an example of it, with replacement.

    An epoch has as many draws as there are examples.
    """

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def draw(self, epoch: int) -> Callable[[int], Tensor]:
        """Draw all examples of the epoch at once."""
        count = len(self.labels)
        members = self.members
        drawn = seeded_draws.below(len(members), count, self.seed, "class", epoch)
        which = seeded_draws.below(members.counts[drawn], count, self.seed, "member", epoch)
        chosen = members.order[members.starts[drawn] + which]
        return lambda number: chosen[number * self.batch_size : (number + 1) * self.batch_size]


@dataclass(eq=False, repr=False, kw_only=True)
class _ClassBatches(BatchSampler):
    """Base class of samplers that draw some classes, and equally many examples of each."""

    batch_size: int = field(init=False)

    def _set_sizes(self, who: str, **sizes: Any) -> None:
        """Check the numbers of classes per batch and examples per class; set the batch size."""
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{who} expects {name} to be a whole number above 0, got {value!r}"
                )
        self.batch_size, (wanted, _) = math.prod(sizes.values()), sizes.values()
        super().__post_init__()
        self.title = f"{who}({', '.join(f'{name}={value}' for name, value in sizes.items())})"
        if len(self.members) < wanted:
            raise ValueError(
                f"{self.title} expects at least {wanted} classes, got {len(self.members)}"
            )


@dataclass(eq=False, repr=False)
class EpisodeSampler(_ClassBatches):
    """Draws batches of ``way`` classes with ``shot`` examples each, for few-shot training.

    Neither a class nor an example repeats in a batch. An epoch has N // (way * shot) independently
    drawn batches, or without ``repeat`` as many as can be made from different examples.

    Args:
        way: classes in a batch.
        shot: examples of each.
        repeat: whether an example may be in several batches of an epoch.

    Example:
        >>> labels = torch.arange(3).repeat(4)
        >>> sampler = EpisodeSampler(way=2, shot=3, labels=labels, seed=0)
        >>> [labels[batch].unique(return_counts=True)[1].tolist() for batch in sampler]
        [[3, 3], [3, 3]]
    """

    way: int
    shot: int
    repeat: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.repeat, bool):
            raise ValueError(f"episodes expects repeat to be True or False, got {self.repeat!r}")
        self._set_sizes("episodes", way=self.way, shot=self.shot)
        fewest = int(self.members.counts.argmin())
        if int(self.members.counts[fewest]) < self.shot:
            raise ValueError(
                f"{self.title} expects {self.shot} examples of every class, got "
                f"{int(self.members.counts[fewest])} of class {int(self.members.present[fewest])}"
            )

    @cached_property
    def _count(self) -> int:
        """Number of batches in an epoch."""
        if self.repeat:
            return len(self.labels) // self.batch_size
        groups = self.members.counts // self.shot

        def too_many(batches: int) -> bool:
            # A class is in a batch once at most.
            return int(groups.clamp(max=batches).sum()) < self.way * batches

        return (
            bisect.bisect_left(range(len(self.labels) // self.batch_size + 1), 1, key=too_many) - 1
        )

    def __len__(self) -> int:
        return self._count

    def draw(self, epoch: int) -> Callable[[int], Tensor]:
        """Draw each batch independently, or without ``repeat`` all batches of the epoch."""
        if not self.repeat:
            return self._draw_without_repeats(epoch)

        def batch(number: int) -> Tensor:
            names = (self.seed, "episode", epoch, number)
            chosen = seeded_draws.permutation(len(self.members), *names)[: self.way]
            return self.members.draw_examples(chosen, self.shot, *names, "examples")

        return batch

    def _draw_without_repeats(self, epoch: int) -> Callable[[int], Tensor]:
        """Draw the batches of an epoch from shuffled classes, the fullest classes first.

        Classes of equal size take turns, in a new order each round.
        """
        members, names = self.members, (self.seed, "class-aware", epoch)
        shuffled = seeded_draws.permutation(len(self.labels), *names)
        shuffled = shuffled[self.labels[shuffled].argsort(stable=True)]
        left = members.counts // self.shot
        batches = []
        for number in range(len(self)):
            order = seeded_draws.permutation(len(members), *names, number)
            chosen = order[left[order].argsort(descending=True, stable=True)[: self.way]]
            left[chosen] -= 1
            first = members.starts[chosen] + left[chosen] * self.shot
            batches.append(shuffled[first[:, None] + torch.arange(self.shot)].flatten())
        return batches.__getitem__


@dataclass(eq=False, repr=False)
class PK(_ClassBatches):
    """Draws batches of ``classes`` classes with ``images`` images each (PK), for re-identification.

    An epoch visits each class once, in random order; its last batch is filled up with classes of
    the first. An image repeats in a batch only if its class has too few.

    Args:
        classes: classes in a batch (P).
        images: images of each (K).
    """

    classes: int
    images: int

    def __post_init__(self) -> None:
        self._set_sizes("pk", classes=self.classes, images=self.images)

    def __len__(self) -> int:
        return -(-len(self.members) // self.classes)

    def draw(self, epoch: int) -> Callable[[int], Tensor]:
        """Draw one order of the classes for the epoch, and images for each batch."""
        order = seeded_draws.permutation(len(self.members), self.seed, "pk", epoch)
        # The last batch wraps around: with at least P classes it has no class twice.
        order = torch.cat([order, order[: self.classes]])

        def batch(number: int) -> Tensor:
            chosen = order[number * self.classes : (number + 1) * self.classes]
            return self.members.draw_examples(chosen, self.images, self.seed, "pk", epoch, number)

        return batch


TABLE: dict[str, Callable[..., BatchSampler]] = {
    "random": Random,
    "balanced": Balanced,
    "episodes": EpisodeSampler,
    "pk": PK,
}
"""Samplers by their name in a configuration."""
