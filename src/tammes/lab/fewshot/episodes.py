"""Few-shot episodes: a few classes, a few labelled images of each, and query images.

All episodes are drawn at once with a counter-based generator: the same seed gives the same episodes
on every machine, so that models are compared on the same ones, and the first 600 of 10,000 episodes
are those of a call for 600.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tammes.lab.data import seeded_draws
from tammes.lab.data.samplers import ClassMembers


@dataclass(frozen=True, eq=False)
class Episodes:
    """Positions of the examples of each episode, on the CPU.

    Attributes:
        classes: labels of the classes, shape ``(E, way)``; distinct within an episode.
        support: labelled examples, shape ``(E, way, shot)``.
        queries: examples to recognise, shape ``(E, way, Q)``; distinct from the support.
        seed: seed of the draws.
    """

    classes: Tensor
    support: Tensor
    queries: Tensor
    seed: int

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def way(self) -> int:
        """Number of classes per episode."""
        return self.classes.shape[1]

    @property
    def shot(self) -> int:
        """Number of labelled examples per class."""
        return self.support.shape[2]


def draw(
    labels: Tensor,
    *,
    way: int,
    shot: int,
    queries: int,
    episodes: int,
    seed: int = 0,
    names: Sequence[str] = (),
) -> Episodes:
    """Draw N-way K-shot episodes.

    Classes are drawn without replacement, then examples of each without replacement; every set of
    classes, and every choice of support and queries, is equally likely.

    Args:
        labels: class of each example, shape ``(N,)``; classes without an example are ignored.
        way: classes per episode (N).
        shot: labelled examples per class (K).
        queries: examples to recognise per class (Q).
        episodes: number of episodes (E).
        seed: seed of the draws.
        names: names of the classes, for messages.

    Returns:
        The :class:`Episodes`; a larger ``episodes`` begins with those of a smaller one.

    Raises:
        TypeError: labels are not integers.
        ValueError: there are too few classes, or too few examples of one.

    Example:
        >>> labels = torch.arange(4).repeat(5)
        >>> drawn = draw(labels, way=3, shot=1, queries=2, episodes=100)
        >>> drawn.support.shape, drawn.queries.shape
        (torch.Size([100, 3, 1]), torch.Size([100, 3, 2]))
        >>> bool((labels[drawn.queries] == drawn.classes[:, :, None]).all())
        True
    """
    check_numbers(way=way, shot=shot, queries=queries, episodes=episodes)
    # Draws are keyed by these numbers: NumPy integers must give the same key.
    way, shot, queries, episodes = map(int, (way, shot, queries, episodes))
    check_labels("draw", labels)
    members = ClassMembers(labels.cpu())
    present, counts = members.present, members.counts
    if len(members) < way:
        raise ValueError(f"{way}-way episodes expect at least {way} classes, got {len(members)}")
    each = shot + queries
    fewest = int(counts.argmin())
    if int(counts[fewest]) < each:
        label = int(present[fewest])
        raise ValueError(
            f"{shot}-shot episodes with {queries} queries expect {each} images of every class, "
            f"got {int(counts[fewest])} of class {repr(names[label]) if names else label}"
        )
    what = (seed, "few-shot", way, shot, queries)
    chosen = _sample_without_replacement(
        torch.full((episodes,), len(members)), way, *what, "classes"
    )
    sizes = counts[chosen].flatten()
    places = _sample_without_replacement(sizes, each, *what, "examples").view(episodes, way, each)
    positions = members.order[members.starts[chosen][:, :, None] + places]
    return Episodes(present[chosen], positions[:, :, :shot], positions[:, :, shot:], seed)


def check_numbers(*, way: int, shot: int, queries: int, episodes: int) -> None:
    """Reject sizes that are invalid for any data set."""
    settings = {"way": way, "shot": shot, "queries": queries, "their number": episodes}
    for name, value in settings.items():
        least = 2 if name == "way" else 1
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(
                f"episodes expect {name} to be a whole number of at least {least}, got {value!r}"
            )


def check_tensor(name: str, what: str, value: Any) -> None:
    """Reject anything but a tensor; ``name`` begins the message."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} expects {what} to be a tensor, got {type(value).__name__}; "
            "torch.as_tensor makes one"
        )


def check_labels(name: str, labels: Tensor) -> None:
    """Reject labels that are not a vector of non-negative integers; ``name`` begins the message."""
    check_tensor(name, "labels", labels)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        hint = "labels.long() converts them"
        raise TypeError(f"{name} expects labels of an integer type, got {labels.dtype}; {hint}")
    if labels.ndim != 1:
        raise ValueError(f"{name} expects labels of shape (N,), got {tuple(labels.shape)}")
    if len(labels) and int(labels.min()) < 0:
        raise ValueError(f"{name} expects labels of 0 or more, got {int(labels.min())}")


def _sample_without_replacement(sizes: Tensor, count: int, *names: int | str) -> Tensor:
    """Draw ``count`` numbers from 0 to ``sizes - 1`` in each row, without replacement.

    Floyd's algorithm: each draw has one more candidate than the last and takes the newest candidate
    if it hits one that was drawn before. Its cost does not depend on the size of a class. The set
    is uniform but its order is not, so it is shuffled.
    """
    rows = len(sizes)
    numbers = seeded_draws.numbers(rows * count, *names, "members").view(rows, count)
    chosen = torch.empty(rows, count, dtype=torch.long)
    for place in range(count):
        newest = sizes - count + place
        drawn = numbers[:, place] % (newest + 1)
        is_repeated = (chosen[:, :place] == drawn[:, None]).any(1)
        chosen[:, place] = torch.where(is_repeated, newest, drawn)
    order = seeded_draws.numbers(rows * count, *names, "order").view(rows, count).argsort(1)
    return chosen.gather(1, order)
