"""Class sampling: the classes of the batch, and others drawn uniformly or by a proposal.

A head that samples asks its :class:`Sampler` for the classes of a step, selects their rows with
:func:`tammes.optim.sparse_rows.select_rows`, and passes those to the kernel. Nothing here
synchronises a GPU: the number of classes depends on sizes alone, and random numbers are hashes of
a key.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes._buffers import ExactBuffers
from tammes._compile import outside_compile
from tammes._keyed_draws import GOLDEN, mix, step_key
from tammes._recomputation import once
from tammes.optim.sparse_rows import register_hooks


class Sample(NamedTuple):
    """Classes that take part in a step.

    Attributes:
        index: the K distinct classes in ascending order, shape ``(K,)``.
        own: position of each example's class in ``index``, -1 if it is on another rank, shape
            ``(N,)``.
        counts: how many classes each of the K stands for, shape ``(K,)``: one for a class in the
            batch; for a drawn class, its share of the absent ones or, with a proposal, the inverse
            of its probability.
    """

    index: Tensor  # type: ignore[assignment]
    own: Tensor
    counts: Tensor


def sample_size(examples: int, classes: int, rate: float) -> int:
    """Number of classes to sample: at least one more than the batch can contain.

    Without the extra one, no class might stand for the absent ones.

    Example:
        >>> sample_size(64, 1000, 0.3), sample_size(64, 1000, 0.01), sample_size(64, 50, 0.3)
        (300, 65, 50)
    """
    return min(classes, max(math.ceil(rate * classes), examples + 1))


def sample(
    own: Tensor,
    classes: int,
    rate: float,
    key: Tensor | int,
    *,
    start: int = 0,
    masked: Tensor | None = None,
    proposal: Tensor | None = None,
) -> Sample:
    r"""Sample classes: those present in the batch, and others without replacement.

    With :math:`p` classes present, :math:`K` sampled and :math:`C` in all, a drawn class stands for
    :math:`(C-p)/(K-p)` of them. So for any values :math:`v`

    .. math:: \mathbb{E}\sum_{c \in \text{index}} \text{counts}_c\,v_c = \sum_{c=1}^{C} v_c .

    With a proposal :math:`q` it is priority sampling (Duffield et al., J. ACM 2007): of the numbers
    :math:`u_c/q_c` with uniform :math:`u_c` the smallest are drawn, and with :math:`\tau` the
    smallest that is not, a drawn class stands for :math:`1/\min(1, q_c\tau)`. The same holds.

    Args:
        own: local class of each example, -1 if it is on another rank, shape ``(N,)``.
        classes: number of local classes C.
        rate: fraction of the classes to sample, see :func:`sample_size`.
        key: random key, an int64 scalar tensor or a number.
        start: first local class among those of all ranks.
        masked: classes to draw only if there are no others, shape ``(C,)``; they count zero times.
        proposal: sampling probabilities up to a factor, shape ``(C,)``; uniform by default.

    Returns:
        The :class:`Sample`; the same on every device.

    Example:
        >>> chosen = sample(torch.tensor([7, 2, -1, 7]), classes=10, rate=0.6, key=0)
        >>> chosen.index[chosen.own[:2]], int(chosen.own[2])
        (tensor([7, 2]), -1)
        >>> chosen.counts.unique(), chosen.counts.sum()
        (tensor([1., 2.]), tensor(10.))
    """
    device, size = own.device, sample_size(len(own), classes, rate)
    # Classes of other ranks are marked in an extra entry past the last.
    present = torch.zeros(classes + 1, dtype=torch.bool, device=device)
    present = present.index_fill(0, torch.where(own < 0, classes, own), True)[:classes]
    number = torch.arange(start, start + classes, device=device)
    words = mix(number * GOLDEN + key) & _POSITIVE
    there = present.sum()
    absent, drawn = classes - there, size - there
    if masked is not None:
        words = words.masked_fill(masked, _POSITIVE)
        absent = absent - (masked & ~present).sum()
        drawn = torch.minimum(drawn, absent)
    if proposal is not None:
        return _by_priority(own, size, present, words, masked, proposal)
    words = words.masked_fill(present, -1)
    index = words.topk(size, largest=False, sorted=False).indices.sort().values
    counts = torch.where(present[index], 1.0, (absent / drawn).to(torch.float32))
    return Sample(
        index,
        torch.where(own < 0, -1, torch.searchsorted(index, own)),
        counts if masked is None else counts.masked_fill(masked[index], 0.0),
    )


def _by_priority(
    own: Tensor,
    size: int,
    present: Tensor,
    words: Tensor,
    masked: Tensor | None,
    proposal: Tensor,
) -> Sample:
    """Draw by priority sampling, see :func:`sample`."""
    # In double precision, so that all devices have the same order.
    chances = proposal.double()
    priority = ((words >> 10).double() + 0.5) * 2.0**-53 / chances
    if masked is not None:
        priority = priority.masked_fill(masked, torch.inf)
    priority = priority.masked_fill(present, -1.0)
    lowest = priority.topk(min(size + 1, len(priority)), largest=False)
    index = lowest.indices[:size].sort().values
    # If no class is left out, all are drawn with certainty.
    threshold = lowest.values[size] if size < len(priority) else torch.inf
    counts = 1 / (chances[index] * threshold).clamp_max(1.0)
    counts = torch.where(present[index], 1.0, counts).float()
    return Sample(
        index,
        torch.where(own < 0, -1, torch.searchsorted(index, own)),
        counts if masked is None else counts.masked_fill(masked[index], 0.0),
    )


class Sampler(ExactBuffers):
    """Sampler of classes, one sample per step, keyed by a seed and the step number.

    Both are in the ``state_dict``, so a resumed run draws the same samples as an uninterrupted one.
    They live on the device of the head, so that reading them does not synchronise.

    Args:
        rate: fraction of the classes to sample, above 0 and at most 1.
        seed: seed of the draws; the same on all ranks.
        proposal: sampling probabilities, see :func:`sample`.

    Example:
        >>> sampler = Sampler(0.2, seed=0)
        >>> first, second = (sampler(torch.tensor([3]), 100).index for _ in range(2))
        >>> len(first), first.equal(second)
        (20, False)
        >>> again = Sampler(0.2, seed=0)
        >>> again(torch.tensor([3]), 100).index.equal(first)
        True
    """

    seed: Tensor
    steps: Tensor
    proposal: Tensor | None

    def __init__(self, rate: float, seed: int, proposal: Tensor | None = None) -> None:
        super().__init__()
        if not 0 < rate <= 1:
            raise ValueError(f"Sampler expects rate above 0 and at most 1, got {rate}")
        self.rate = rate
        # Kept as constants: a checkpoint of a head that does not sample lacks them.
        for name, number in (("seed", seed), ("steps", 0)):
            values = torch.tensor(number, dtype=torch.int64, device="cpu")
            self.register_constant(name, values, torch.get_default_device(), persistent=True)
        if proposal is None:
            self.register_buffer("proposal", None, persistent=False)
        else:
            self.register_constant("proposal", proposal, torch.get_default_device())
        register_hooks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The sampler may have been pickled before there were proposals.
        self._buffers.setdefault("proposal", None)
        register_hooks()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        own = {f"{prefix}{name}": getattr(self, name) for name in ("seed", "steps")}
        if state_dict.keys().isdisjoint(own):
            # A checkpoint of a head that did not sample: keep the current seed and step.
            state_dict |= own
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(
        self, own: Tensor, classes: int, *, start: int = 0, masked: Tensor | None = None
    ) -> Sample:
        """Sample the classes of the next step, see :func:`sample`."""
        if torch.compiler.is_compiling():
            # Selecting the rows breaks the graph anyway, and compiled by torch 2.13 this crashes.
            return outside_compile(self.forward)(own, classes, start=start, masked=masked)
        return once(self, lambda: self._draw(own, classes, start, masked))

    def _draw(self, own: Tensor, classes: int, start: int, masked: Tensor | None) -> Sample:
        chosen = sample(
            own,
            classes,
            self.rate,
            self.key,
            start=start,
            masked=masked,
            proposal=self.proposal,
        )
        self.steps += 1
        return chosen

    @property
    def key(self) -> Tensor:
        """Key of the next sample."""
        return step_key(self.seed, self.steps)

    def extra_repr(self) -> str:
        """The rate."""
        return f"rate={self.rate:g}"


_POSITIVE = (1 << 63) - 1
