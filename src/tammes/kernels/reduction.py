"""A block of scores, reduced to four numbers per row and then overwritten by its own gradient."""

import torch
from torch import Tensor


class Reduction:
    """A block of scores, reduced to four numbers per row and then turned into its gradient."""

    def __init__(self, scores: Tensor, column: Tensor, reads: frozenset[str]) -> None:
        self.scores, self.column = scores, column
        unread = scores.new_full(scores.shape[:1], float("nan"))
        others, expected, mean = unread, unread, unread
        self.shifted: Tensor | None = None
        if "mean" in reads:
            own = scores.gather(1, column).squeeze(1)
            mean = (scores.sum(1) - own) / (scores.shape[1] - 1)
        # Masked, not subtracted: see tammes.split.split.
        scores.scatter_(1, column, float("-inf"))
        if "hardest" in reads:
            top, self.where = scores.max(1)
        else:
            top = scores.amax(1)
        self.has_softmax = not reads.isdisjoint(("others", "expected"))
        if self.has_softmax:
            scores.sub_(top[:, None])
            if "expected" in reads:
                self.shifted = scores.scatter(1, column, 0.0)
            self.sum = scores.exp_().sum(1)
            others = top + self.sum.log()
            if self.shifted is not None:
                self.below = torch.linalg.vecdot(scores, self.shifted) / self.sum
                expected = top + self.below
        self.leaves = [
            leaf.requires_grad_() for leaf in (others.clone(), top, expected.clone(), mean.clone())
        ]

    def overwrite_with_gradient(
        self,
        d_others: Tensor | None,
        d_top: Tensor | None,
        d_expected: Tensor | None,
        d_mean: Tensor | None,
    ) -> None:
        """Write over each score what the loss wants of it."""
        scores = self.scores
        if not self.has_softmax:
            scores.zero_()
        else:
            d_others = torch.zeros_like(self.sum) if d_others is None else d_others
            if self.shifted is not None and d_expected is not None:
                factor = self.shifted.add_((1 - self.below)[:, None])
                factor.mul_(d_expected[:, None]).add_(d_others[:, None])
                scores.mul_(factor)
                scores.div_(self.sum[:, None])
            else:
                scores.mul_((d_others / self.sum)[:, None])
        if d_mean is not None:
            scores.add_((d_mean / (scores.shape[1] - 1))[:, None])
            scores.scatter_(1, self.column, 0.0)
        if d_top is not None:
            scores.scatter_add_(1, self.where[:, None], d_top[:, None])
