"""What belongs to rows alone: a small graph that is left to autograd."""

from collections.abc import Callable

import torch
from torch import Tensor

from tammes.kernels.merge import assemble, exchange, scale_gradient
from tammes.kernels.problem import Problem
from tammes.kernels.streamed.engines import Rows
from tammes.split import Split

Take = Callable[[str, Tensor], tuple[Tensor, Tensor | None]]
"""Prototypes at some places, under a name, and their bias where there is one."""


class RowGraph:
    """From features to queries and own classes, and from numbers to a split.

    Args:
        problem: its similarity is bound.
        features: of these rows, in the working dtype, shape ``(n, D)``.
        scale: what scores are multiplied with, a scalar or ``(n,)``.
        shown: the scale that terms see: another leaf where ranks add up what each did to it.
        labels: shape ``(n,)``.
        own: place of the own class among the prototypes here, shape ``(n,)``.
        reads: fields of the split that are wanted.
        threshold: of the ``excess`` that is read.
        take: takes rows of the prototypes.
        alike: whether every rank makes the same of the split.
    """

    def __init__(
        self,
        problem: Problem,
        features: Tensor,
        scale: Tensor,
        shown: Tensor | float,
        labels: Tensor,
        own: Tensor,
        reads: frozenset[str],
        threshold: Callable[[Split], Tensor] | None,
        take: Take,
        *,
        alike: bool,
    ) -> None:
        self.problem, self.features = problem, features
        self.labels, self.own, self.take, self.alike = labels, own, take, alike
        query, offset = problem.similarity.query(features)
        self.query = query * (scale[:, None] if scale.ndim else scale)
        self.offset = None if offset is None else offset * scale
        self.known = self._own_numbers(query, reads)
        self.threshold: Tensor | None = None
        if "excess" in reads and threshold is not None:
            known = self._everywhere(self.known)
            self.threshold = threshold(self._split(known, slice(None), shown))
            if problem.share is not None and not alike:
                # What each rank wants of it, for its classes, adds up; the exchange averages.
                self.threshold = scale_gradient(self.threshold, problem.share.group.world_size)

    def rows(self, block: slice) -> Rows:
        """What an engine is given of some rows."""
        return Rows(
            self.query[block].detach(),
            None if self.offset is None else self.offset[block].detach(),
            self.own[block],
            None if self.threshold is None else self.threshold[block].detach(),
        )

    def hardest(self, features: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Similarity to the hardest other class, of which an engine found the place."""
        similarity = self.problem.similarity.target(features, rows)
        return similarity if bias is None else similarity + bias

    def split(self, numbers: dict[str, Tensor], block: slice, shown: Tensor | float) -> Split:
        """The split of some rows.

        Args:
            numbers: what an engine found of them, what is known of their own classes, and the
                similarity to the hardest, as tensors that take a gradient.
            block: which rows.
            shown: the scale that terms see.
        """
        if self.problem.share is not None or self.problem.there is not None:
            rivals = self._rivals(block)
            numbers = numbers | {"rivals": rivals}
            if "hardest" in numbers:
                nobody = torch.full_like(rivals, float("-inf"))
                numbers["hardest"] = torch.where(rivals > 0, numbers["hardest"], nobody)
        return self._split(self._everywhere(numbers), block, shown)

    def _own_numbers(self, query: Tensor, reads: frozenset[str]) -> dict[str, Tensor]:
        rows, bias = self.take("own", self.own)
        known = self.problem.similarity.own(self.features, rows, reads, query)
        if bias is not None and "target" in known:
            known["target"] = known["target"] + bias
        if self.problem.share is None:
            return known
        here = self.own >= 0
        return {name: torch.where(here, value, 0.0) for name, value in known.items()}

    def _rivals(self, block: slice) -> Tensor:
        """How many other classes, of those that are not masked, the prototypes here stand for."""
        there, counts, own = self.problem.there, self.problem.counts, self.own[block]
        mine = own >= 0
        if there is None:
            here = len(self.problem.prototypes) if counts is None else counts.sum()
        else:
            here = (there if counts is None else counts * there).sum()
            mine = mine & there[own.clamp_min(0)] if len(there) else mine
        return here - mine.to(self.query.dtype)

    def _everywhere(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        share = self.problem.share
        if share is None or share.group.world_size == 1:
            return mine
        return exchange(share.group, mine, alike=self.alike)

    def _split(self, numbers: dict[str, Tensor], block: slice, shown: Tensor | float) -> Split:
        share = self.problem.share
        classes = len(self.problem.prototypes) if share is None else share.classes
        like = self.query.detach()[block, 0]
        return assemble(numbers, self.labels[block], shown, classes, like)
