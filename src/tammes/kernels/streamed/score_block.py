"""A block of scores, reduced to a few numbers per row and then overwritten by its own gradient."""

import torch
from torch import Tensor

from tammes.split import SUMMED, softplus

NUMBERS = ("others", "expected", "mean", *SUMMED)
"""What a kernel reduces scores to. The hardest class is only found by it: see ``place``."""


class Block:
    """Scores of some rows against some classes.

    Args:
        scores: shape ``(n, k)``, finite, overwritten.
        own: place of each row's own class, -1 where it is not among these, shape ``(n,)``.
        reads: which numbers are wanted.
        counts: how many classes each column stands for, shape ``(k,)``, or one each.
        threshold: of ``excess``, shape ``(n,)``.
        there: which columns are not masked, shape ``(k,)``, or all of them.

    Attributes:
        numbers: of the other classes here, shape ``(n,)`` each: their log-sum-exp ``others``,
            the expectation ``expected`` under their softmax, the sum ``mean`` of their scores (not
            divided yet), and the sums ``excess`` and ``softplus``.
        top: the largest score of another class, and ``place`` where it is.
    """

    def __init__(
        self,
        scores: Tensor,
        own: Tensor,
        reads: frozenset[str],
        counts: Tensor | None = None,
        threshold: Tensor | None = None,
        there: Tensor | None = None,
    ) -> None:
        counts = None if counts is None else counts.to(scores.dtype)
        self.scores, self.counts, self.threshold = scores, counts, threshold
        # In a sum over scores themselves a masked class stands for none.
        self.many = counts
        if there is not None:
            self.many = there.to(scores.dtype) if counts is None else counts * there
        self.column, self.mine = own.clamp_min(0)[:, None], (own >= 0)[:, None]
        self.numbers: dict[str, Tensor] = {}
        if "mean" in reads:
            total = scores.sum(1) if self.many is None else scores @ self.many
            counted = self.mine if there is None else self.mine & there[self.column]
            own_score = torch.where(counted, scores.gather(1, self.column), 0.0)
            self.numbers["mean"] = total - own_score.squeeze(1)
        # Masked, not subtracted from a sum over all: see tammes.split.split_matrix.
        if there is not None:
            scores.masked_fill_(~there, float("-inf"))
        self._set_own(float("-inf"))
        self.place: Tensor | None = None
        self.active: Tensor | None = None
        if "hardest" in reads:
            self.top, self.place = scores.max(1)
        else:
            self.top = scores.amax(1)
        # Where there is no other class, there is nothing to shift by.
        self.shift = torch.where(self.top > float("-inf"), self.top, 0.0)
        # Kept beside the exponentials that take their place.
        keep = not reads.isdisjoint(("expected", *SUMMED))
        self.raw = scores.clone() if keep else None
        if self.raw is not None:
            self._sum_up(self.raw, reads)
        self.has_softmax = not reads.isdisjoint(("others", "expected"))
        if self.has_softmax:
            scores.sub_(self.shift[:, None]).exp_()
            if counts is not None:
                scores.mul_(counts)
            self.sum = scores.sum(1)
            self.numbers["others"] = self.shift + self.sum.log()
        if self.raw is not None and "expected" in reads:
            # A product with the exponential, which is zero at the own class and at masked ones.
            self.raw.clamp_min_(torch.finfo(self.raw.dtype).min)
            mean = torch.linalg.vecdot(scores, self.raw) / self.sum
            self.numbers["expected"] = torch.where(self.sum > 0, mean, 0.0)

    def _set_own(self, value: float) -> None:
        kept = self.scores.gather(1, self.column)
        self.scores.scatter_(1, self.column, torch.where(self.mine, value, kept))

    def _sum_up(self, raw: Tensor, reads: frozenset[str]) -> None:
        many = raw.new_ones(raw.shape[1]) if self.counts is None else self.counts
        if "excess" in reads:
            assert self.threshold is not None
            over = raw - self.threshold[:, None]
            self.active = (over > 0).to(raw.dtype) @ many
            self.numbers["excess"] = over.relu_() @ many
        if "softplus" in reads:
            self.numbers["softplus"] = softplus(raw) @ many

    def overwrite_with_gradient(self, wanted: dict[str, Tensor | None]) -> Tensor:
        """Write over each score its gradient, up to a factor of each row, which is returned.

        Args:
            wanted: gradient of each of the numbers, shape ``(n,)``.

        Returns:
            The factor, shape ``(n,)``: what is left for the short side of a product.
        """
        scores, raw = self.scores, self.raw
        factor = torch.zeros_like(self.shift)
        if self.has_softmax:
            inverse = torch.where(self.sum > 0, self.sum.reciprocal(), 0.0)
            others, expected = wanted.get("others"), wanted.get("expected")
            if raw is not None and expected is not None:
                size = expected.abs() if others is None else expected.abs() + others.abs()
                size = torch.where(size > 0, size, 1.0)
                below = (1 - self.numbers["expected"])[:, None]
                tilt = (raw + below).mul_((expected / size)[:, None])
                scores.mul_(tilt if others is None else tilt.add_((others / size)[:, None]))
                factor = inverse * size
            elif others is not None:
                factor = others * inverse
        # Each of the following is no multiple of the exponentials.
        added = {
            name: value for name in ("mean", *SUMMED) if (value := wanted.get(name)) is not None
        }
        if not added:
            return factor if self.has_softmax else self._nothing()
        # What is large or small in a row as a whole still goes to the short side.
        size = factor.abs() + sum(value.abs() for value in added.values())
        size = torch.where(size > 0, size, 1.0)
        added = {name: (value / size)[:, None] for name, value in added.items()}
        scores.mul_((factor / size)[:, None]) if self.has_softmax else scores.zero_()
        many = 1.0 if self.counts is None else self.counts
        if "mean" in added:
            scores.add_(added["mean"] * (1.0 if self.many is None else self.many))
        if "excess" in added and raw is not None and self.threshold is not None:
            over = raw > self.threshold[:, None]
            scores.add_(torch.where(over, added["excess"], 0.0) * many)
        if "softplus" in added and raw is not None:
            scores.add_(raw.sigmoid().mul_(added["softplus"]) * many)
        self._set_own(0.0)
        return size

    def _nothing(self) -> Tensor:
        self.scores.zero_()
        return torch.zeros_like(self.shift)
