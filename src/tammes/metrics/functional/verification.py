"""Verify whether two examples have the same identity: ROC, TAR@FAR, EER, minDCF, fold accuracy."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.identities import Identities, check_kinds, encode_identities
from tammes.metrics.functional.inputs import warn_undefined
from tammes.metrics.functional.operating_points import (
    OperatingPoints,
    RankedScores,
    accumulated,
    area,
    check_rate,
    check_scores,
    equal_error_rate,
    extremes,
    rank_scores,
    smallest_threshold,
)
from tammes.metrics.functional.quantiles import bin_places

ScoreNorm = Literal["z", "s", "as"]


class RocCurve(NamedTuple):
    """Rates at each threshold, from accepting nothing to accepting everything.

    Attributes:
        far: fraction of different pairs that are accepted, shape ``(T + 1,)``.
        tar: fraction of same pairs that are accepted, shape ``(T + 1,)``.
        thresholds: a score is accepted at or above it, shape ``(T + 1,)``.
    """

    far: Tensor
    tar: Tensor
    thresholds: Tensor


class DetCurve(NamedTuple):
    """Error rates at each threshold, from accepting nothing to accepting everything.

    Attributes:
        far: fraction of different pairs that are accepted, shape ``(T + 1,)``.
        frr: fraction of same pairs that are rejected, shape ``(T + 1,)``.
        thresholds: a score is accepted at or above it, shape ``(T + 1,)``.
    """

    far: Tensor
    frr: Tensor
    thresholds: Tensor


class VerificationResult(NamedTuple):
    """Result of :func:`verification`.

    Attributes:
        eer: equal error rate.
        auc: area under the ROC curve; equal scores count half.
        same: number of pairs of one identity.
        different: number of pairs of two identities.
        points: accepted pairs at each threshold.
        bin_width: width of the bins of a histogram of scores; 0 if the scores are in memory.
        pairs: the scores in memory; None for a histogram.
        identities: codes of both identities of each pair, or None.
    """

    eer: Tensor
    auc: Tensor
    same: int
    different: int
    points: OperatingPoints
    bin_width: float = 0.0
    pairs: RankedScores | None = None
    identities: tuple[Tensor, Tensor] | None = None

    def threshold(self, far: float) -> Tensor:
        """Smallest threshold whose FAR does not exceed the target.

        It is one of the scores (for a histogram, the edge of a bin), or infinity if even the
        largest score would exceed the target. Needs ``1 / far`` different pairs.
        """
        return self.points.thresholds[self._index(far)]

    def tar(self, far: float) -> Tensor:
        """Fraction of same pairs accepted at :meth:`threshold`, with the same requirement."""
        return self.points.positives[self._index(far)] / self.points.all_positives

    def min_dcf(self, p_target: float = 0.01, c_miss: float = 1, c_fa: float = 1) -> Tensor:
        r"""Smallest detection cost over all thresholds, normalised.

        .. math::
            \min_t\frac{c_{miss}\,p\,\mathrm{FRR}(t) + c_{fa}(1-p)\,\mathrm{FAR}(t)}
            {\min(c_{miss}\,p,\ c_{fa}(1-p))}

        Accepting or rejecting everything has a cost of 1 or more, so it is at most 1.

        Args:
            p_target: prior probability of a same pair.
            c_miss: cost of rejecting a same pair.
            c_fa: cost of accepting a different pair.
        """
        if not 0 < p_target < 1 or c_miss <= 0 or c_fa <= 0:
            raise ValueError(
                "min_dcf expects 0 < p_target < 1 and costs above 0, "
                f"got {p_target}, {c_miss} and {c_fa}"
            )
        miss, alarm = c_miss * p_target, c_fa * (1 - p_target)
        far, frr, _ = self.det
        return (miss * frr + alarm * far).amin() / min(miss, alarm)

    @property
    def roc(self) -> RocCurve:
        """ROC curve: FAR, TAR and thresholds."""
        points = self.points
        far = points.negatives / points.all_negatives
        return RocCurve(far, points.positives / points.all_positives, points.thresholds)

    @property
    def det(self) -> DetCurve:
        """DET curve: FAR, FRR and thresholds; plot both rates on a probit scale."""
        far, tar, thresholds = self.roc
        return DetCurve(far, 1 - tar, thresholds)

    def bounds(self) -> tuple["VerificationResult", "VerificationResult"]:
        """Worst and best case of a histogram, which bound every value of the exact scores.

        Rates at the edges of bins are exact. Within a bin, all different pairs may be above the
        same pairs, or below. If the scores are in memory, both are the result itself.
        """
        if not self.bin_width:
            return self, self
        worst, best = (self._replaced(points) for points in extremes(self.points))
        return worst, best

    def weighted(self, weights: Tensor) -> "VerificationResult":
        """Weight the pairs, shape ``(N,)``; not for a histogram."""
        if self.pairs is None:
            raise ValueError("weighted expects scores in memory, got a histogram")
        return self._replaced(self.pairs.points(weights))

    def _replaced(self, points: OperatingPoints) -> "VerificationResult":
        return self._replace(points=points, eer=equal_error_rate(points), auc=area(points))

    def _index(self, far: float) -> Tensor:
        check_rate("verification", "FAR", far, self.different, "pairs of different identities")
        return smallest_threshold(self.points, far)


class FoldAccuracy(NamedTuple):
    """Result of :func:`fold_accuracy`.

    Attributes:
        mean: mean accuracy of the folds.
        standard_error: standard deviation over the folds, divided by the root of their number.
        accuracies: accuracy of each fold, shape ``(F,)``.
        thresholds: threshold of each fold, from the other folds, shape ``(F,)``.
        pairs: scores, same and fold of each pair.
        identities: codes of both identities of each pair, or None.
    """

    mean: Tensor
    standard_error: Tensor
    accuracies: Tensor
    thresholds: Tensor
    pairs: tuple[Tensor, Tensor, Tensor]
    identities: tuple[Tensor, Tensor] | None

    def weighted(self, weights: Tensor) -> "FoldAccuracy":
        """Weight the pairs, shape ``(N,)``."""
        return _fold_accuracy(self.pairs, weights, self.identities)


@torch.no_grad()
def verification(
    scores: Tensor, same: Tensor, *, identities: Sequence[Identities] | None = None
) -> VerificationResult:
    r"""Error rates of accepting pairs whose score is at or above a threshold.

    .. math::
        \mathrm{FAR}(t) = \frac{\#\{\text{different}: s \ge t\}}{\#\text{different}},\qquad
        \mathrm{TAR}(t) = 1 - \mathrm{FRR}(t) = \frac{\#\{\text{same}: s \ge t\}}{\#\text{same}}

    TAR at a FAR is taken at the smallest threshold whose FAR does not exceed the target, never at a
    nearby one whose FAR is higher. The EER is where FAR and FRR are equal, interpolated linearly
    between successive distinct scores. Equal scores are accepted together.

    Args:
        scores: similarity of each pair, shape ``(N,)``.
        same: whether a pair has the same identity, shape ``(N,)``.
        identities: first and second identity of each pair, for :func:`intervals`.

    Returns:
        The :class:`VerificationResult`. Without same or without different pairs, the numbers that
        need them are NaN, with a warning.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import verification
        >>> result = verification(torch.tensor([0.9, 0.7, 0.4, 0.6, 0.3, 0.1]),
        ...                       torch.tensor([1, 1, 1, 0, 0, 0]))
        >>> round(float(result.eer), 4), round(float(result.auc), 4)
        (0.3333, 0.8889)
        >>> round(float(result.tar(0.34)), 4), round(float(result.threshold(0.34)), 4)
        (1.0, 0.4)

    References:
        Martin et al., The DET Curve in Assessment of Detection Task Performance, Eurospeech 1997;
        NIST 2016 Speaker Recognition Evaluation Plan (normalised cost).
    """
    same = check_scores("verification", scores, same, "same")
    codes = _pair_codes("verification", identities, same)
    pairs = rank_scores(scores, same)
    result = finish_verification("verification", pairs.points())
    return result._replace(pairs=pairs, identities=codes)


def _pair_codes(
    name: str, identities: Sequence[Identities] | None, same: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Check the identities of both sides of pairs, and convert them to integers."""
    if identities is None:
        return None
    if len(identities) != 2:
        raise ValueError(
            f"{name} expects identities of the first and of the second of each pair, "
            f"got {len(identities)}"
        )
    first, second = (
        encode_identities(name, "identities", side, len(same), same.device) for side in identities
    )
    check_kinds(name, first, second)
    wrong = int(((first.values == second.values) != same).sum())
    if wrong:
        raise ValueError(
            f"{name} expects same where the identities of a pair are equal, got {wrong:,} pairs of "
            f"{len(same):,} where they disagree"
        )
    return first.values, second.values


class ScoreSums(NamedTuple):
    """Histograms of scores, summed over batches and ranks; see :func:`score_sums`."""

    same: Tensor
    different: Tensor


def score_sums(scores: Tensor, same: Tensor, limits: tuple[float, float], bins: int) -> ScoreSums:
    """Count scores of same and of different pairs in bins."""
    place = bin_places(scores, limits, bins).add_(same, alpha=bins + 2)
    different, alike = torch.bincount(place, minlength=2 * (bins + 2)).view(2, -1)
    return ScoreSums(alike, different)


def bin_edges(limits: tuple[float, float], bins: int, device: torch.device) -> Tensor:
    """Lower edges of the bins of a histogram, from the highest bin down."""
    inner = torch.linspace(*limits, bins + 1, dtype=torch.double, device=device)
    lowest = inner.new_full((1,), torch.finfo(torch.double).min)
    return torch.cat([lowest, inner]).flip(0)


def finish_score_sums(
    name: str, sums: ScoreSums, limits: tuple[float, float]
) -> VerificationResult:
    """Compute rates from histograms; every edge of a bin is a threshold."""
    bins = len(sums.same) - 2
    edges = bin_edges(limits, bins, sums.same.device)
    result = finish_verification(
        name, accumulated(edges, sums.same.flip(0), sums.different.flip(0))
    )
    return result._replace(bin_width=(limits[1] - limits[0]) / bins)


def finish_verification(name: str, points: OperatingPoints) -> VerificationResult:
    """Summarise operating points of pairs."""
    same, different = int(points.all_positives), int(points.all_negatives)
    if not (same and different):
        warn_undefined(
            name,
            f"got {same:,} pairs of one identity and {different:,} of two; numbers that need both "
            "are NaN",
        )
    return VerificationResult(equal_error_rate(points), area(points), same, different, points)


@torch.no_grad()
def fold_accuracy(
    scores: Tensor,
    same: Tensor,
    *,
    folds: int | Tensor = 10,
    identities: Sequence[Identities] | None = None,
) -> FoldAccuracy:
    """Accuracy of each fold of pairs at the threshold that is best for the other folds.

    The threshold is exact: among all midpoints of successive scores of the other folds, and the two
    ends, the one with the most correct pairs; if tied, the highest.

    Args:
        scores: similarity of each pair, shape ``(N,)``.
        same: whether a pair has the same identity, shape ``(N,)``.
        folds: number of consecutive folds to cut the pairs into; or the fold of each pair, shape
            ``(N,)``. The files of LFW list the pairs fold by fold.
        identities: first and second identity of each pair, for :func:`intervals`.

    Returns:
        The :class:`FoldAccuracy`.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import fold_accuracy
        >>> scores = torch.tensor([0.5035, 0.5015, 0.504, 0.502])
        >>> fold_accuracy(scores, torch.tensor([1, 0, 1, 0]), folds=2).mean
        tensor(1., dtype=torch.float64)

    References:
        Huang et al., Labeled Faces in the Wild, 2007.
    """
    same = check_scores("fold_accuracy", scores, same, "same")
    scores = scores.detach().double()
    if isinstance(folds, Tensor):
        if folds.shape != scores.shape:
            raise ValueError(
                f"fold_accuracy expects folds of shape ({len(scores)},), got {tuple(folds.shape)}"
            )
        member = folds.to(scores.device)
    else:
        place = torch.arange(len(scores), device=scores.device)
        member = place * folds // max(len(scores), 1)
    parts = member.unique()
    if len(parts) < 2 or (not isinstance(folds, Tensor) and len(parts) != folds):
        raise ValueError(
            f"fold_accuracy expects 2 folds or more and a pair in each, got {len(parts)} folds of "
            f"{len(scores)} pairs"
        )
    codes = _pair_codes("fold_accuracy", identities, same)
    return _fold_accuracy((scores, same, member), torch.ones_like(scores), codes)


def _fold_accuracy(
    pairs: tuple[Tensor, Tensor, Tensor],
    weights: Tensor,
    identities: tuple[Tensor, Tensor] | None,
) -> FoldAccuracy:
    scores, same, member = pairs
    accuracies, thresholds = [], []
    for fold in member.unique():
        inside = member == fold
        others = ~inside & (weights > 0)
        points = rank_scores(scores[others], same[others]).points(weights[others])
        thresholds.append(_best_threshold(points))
        right = (scores[inside] >= thresholds[-1]) == same[inside]
        accuracies.append((weights[inside] * right).sum() / weights[inside].sum())
    rates = torch.stack(accuracies)
    error = rates.std() / len(rates) ** 0.5
    return FoldAccuracy(rates.mean(), error, rates, torch.stack(thresholds), pairs, identities)


def _best_threshold(points: OperatingPoints) -> Tensor:
    """Threshold with the most correct pairs, halfway below a score; if tied, the highest."""
    right = points.positives + (points.all_negatives - points.negatives)
    best = int(right.argmax())
    below = torch.cat([points.thresholds[1:], points.thresholds.new_tensor([-torch.inf])])
    return (points.thresholds[best] + below[best]) / 2 if best else points.thresholds[0]


@torch.no_grad()
def normalize_scores(
    scores: Tensor,
    first: Tensor,
    second: Tensor | None = None,
    pairs: Tensor | None = None,
    *,
    norm: ScoreNorm = "as",
    top: int = 300,
) -> Tensor:
    r"""Normalise the scores of pairs with a cohort of other identities: z-, s- or AS-norm.

    .. math::
        s_z = \frac{s - \mu_e}{\sigma_e},\qquad
        s_s = \frac12\Bigl(\frac{s - \mu_e}{\sigma_e} + \frac{s - \mu_t}{\sigma_t}\Bigr)

    with mean and standard deviation (population) of the cohort scores of the first side e and of
    the second side t. AS-norm is the s-norm with the ``top`` largest scores of each side.

    Args:
        scores: score of each pair, shape ``(N,)``.
        first: scores of the first sides with the cohort, shape ``(E, K)``.
        second: scores of the second sides with the cohort, shape ``(T, K)``; not for z-norm.
        pairs: row of the first and of the second side of each pair, shape ``(N, 2)``; by default
            pair i has row i of both.
        norm: ``"z"``, ``"s"`` or ``"as"``.
        top: number of cohort scores of AS-norm.

    Returns:
        The normalised scores in float64, shape ``(N,)``.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import normalize_scores
        >>> cohort = torch.tensor([[0.0, 0.2, 0.4, 0.6]])
        >>> normalize_scores(torch.tensor([0.7]), cohort, cohort, norm="as", top=2)
        tensor([2.0000], dtype=torch.float64)

    References:
        Matejka et al., Analysis of Score Normalization in Multilingual Speaker Recognition,
        Interspeech 2017 (AS-norm1).
    """
    if norm not in ("z", "s", "as"):
        raise ValueError(f"normalize_scores expects norm 'z', 's' or 'as', got {norm!r}")
    if (second is None) != (norm == "z"):
        wanted, got = ("one side", "both") if norm == "z" else ("both sides", "one")
        raise ValueError(
            f"normalize_scores expects cohort scores of {wanted} for norm {norm!r}, got {got}"
        )
    sides = [side for side in (first, second) if side is not None]
    if pairs is None:
        rows = torch.arange(len(scores), device=scores.device)[:, None].expand(-1, 2)
    else:
        rows = pairs
    if rows.shape != (len(scores), 2):
        raise ValueError(
            f"normalize_scores expects pairs of shape ({len(scores)}, 2), got {tuple(rows.shape)}"
        )
    total = torch.zeros_like(scores, dtype=torch.double)
    for column, cohort in enumerate(sides):
        row = rows[:, column]
        if cohort.ndim != 2 or (len(row) and int(row.max()) >= len(cohort)):
            raise ValueError(
                "normalize_scores expects cohort scores with a row for each side of a pair, got "
                f"shape {tuple(cohort.shape)} and row {int(row.max())}"
            )
        used = cohort.double()
        if norm == "as":
            used = used.topk(min(top, used.shape[1]), dim=1).values
        mean, spread = used.mean(1), used.std(1, correction=0)
        if not bool((spread[row] > 0).all()):
            raise ValueError(
                "normalize_scores expects cohort scores that differ, got a side whose scores with "
                "the cohort have standard deviation 0 or NaN"
            )
        total += (scores.double() - mean[row]) / spread[row]
    return total / len(sides)
