"""Streaming verification of pairs, from histograms of their scores."""

from typing import Any

import torch
from torch import Tensor

from tammes.metrics.functional.angles import check_bins
from tammes.metrics.functional.operating_points import check_scores
from tammes.metrics.functional.quantiles import check_limits
from tammes.metrics.functional.verification import (
    ScoreSums,
    VerificationResult,
    finish_score_sums,
    score_sums,
)
from tammes.metrics.streaming import SumMetric


class Verification(SumMetric):
    """Error rates of accepting pairs, for any number of pairs in fixed memory.

    The state is two histograms. The rates at the edges of their bins are exact; a threshold is an
    edge, so it is at most one bin above the exact one, and TAR at a FAR is never overstated.
    ``compute().bounds()`` returns the worst and the best case, which bound the exact EER, AUC, TAR
    at a FAR and minDCF. Formulas and references:
    :func:`tammes.metrics.functional.verification`, which is exact.

    Args:
        limits: range of the scores. Scores beyond count in one bin at each end, which the bounds
            take into account.
        bins: number of bins between the limits; a power of two makes edges exact.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import Verification
        >>> metric = Verification()
        >>> metric.update(torch.tensor([0.9, 0.7, 0.4]), torch.tensor([1, 1, 1]))
        >>> metric.update(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0, 0, 0]))
        >>> round(float(metric.compute().eer), 4)
        0.3333
    """

    higher_is_better = None

    def __init__(
        self, *, limits: tuple[float, float] = (-1.0, 1.0), bins: int = 65_536, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_bins("Verification", bins)
        check_limits("Verification", limits)
        self.limits = limits
        self.bins = bins
        nothing = torch.zeros(bins + 2, dtype=torch.long)
        self._register(ScoreSums(nothing, nothing))

    def update(self, scores: Tensor, same: Tensor) -> None:
        """Add pairs: scores of shape ``(N,)`` and whether each pair has the same identity."""
        same = check_scores("Verification", scores, same, "same")
        self._accumulate(score_sums(scores, same, self.limits, self.bins))

    def compute(self) -> VerificationResult:
        """Compute the metric over all pairs since the last reset, of all ranks."""
        return finish_score_sums("Verification", self._collected(ScoreSums), self.limits)
