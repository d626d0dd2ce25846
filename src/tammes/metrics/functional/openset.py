"""Known or unknown: AUROC, FPR95, AUPR, OSCR; and 1:N identification with TPIR at a FPIR."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.identities import Identities, check_kinds, encode_identities
from tammes.metrics.functional.inputs import warn_undefined
from tammes.metrics.functional.operating_points import (
    OperatingPoints,
    RankedScores,
    accumulated,
    area,
    average_precision,
    check_flags,
    check_rate,
    check_scores,
    largest_threshold,
    mirrored,
    rank_scores,
    smallest_threshold,
)
from tammes.metrics.functional.quantiles import histogram
from tammes.metrics.functional.retrieval import (
    Search,
    as_search,
    check_similarity,
    rank_gallery,
)
from tammes.metrics.functional.verification import bin_edges

Positive = Literal["known", "unknown"]


class OpenSetResult(NamedTuple):
    """Result of :func:`openset`.

    Attributes:
        auroc: probability that a known example has a higher score than an unknown one; equal
            scores count half. It does not depend on which is called positive.
        fpr95: fraction of unknown examples accepted where at least 95 % of the known ones are; the
            known are positive.
        aupr_in: average precision with the known as positive.
        aupr_out: average precision with the unknown as positive, by descending -score.
        oscr: area under the curve of the fraction of known examples that are accepted and
            classified correctly over the fraction of unknown examples that are accepted; None
            without ``correct``.
        known: number of known examples.
        unknown: number of unknown examples.
        points: accepted known (positive) and unknown (negative) examples at each threshold.
        examples: scores of known and unknown examples in memory; None for a histogram.
        classified: the same, with -inf for misclassified known examples, or None.
        identities: code of the identity of each example, or None.
    """

    auroc: Tensor
    fpr95: Tensor
    aupr_in: Tensor
    aupr_out: Tensor
    oscr: Tensor | None
    known: int
    unknown: int
    points: OperatingPoints
    examples: RankedScores | None = None
    classified: RankedScores | None = None
    identities: tuple[Tensor] | None = None

    def fpr_at(self, tpr: float = 0.95, *, positive: Positive = "known") -> Tensor:
        """Fraction of negatives accepted where at least ``tpr`` of the positives are.

        Args:
            tpr: fraction of the positives.
            positive: ``"known"`` as in ODIN: unknown examples are the false positives;
                ``"unknown"`` as in OpenOOD: examples are detected as unknown at or below a
                threshold, and known ones are the false positives.
        """
        if positive not in ("known", "unknown") or not 0 < tpr <= 1:
            raise ValueError(
                "fpr_at expects positive 'known' or 'unknown' and 0 < tpr <= 1, "
                f"got {positive!r} and {tpr}"
            )
        points = self.points if positive == "known" else mirrored(self.points)
        return _false_positives(points, tpr)

    def weighted(self, weights: Tensor) -> "OpenSetResult":
        """Weight the examples, shape ``(N,)``; not for a histogram."""
        if self.examples is None:
            raise ValueError("weighted expects scores in memory, got a histogram")
        classified = None if self.classified is None else self.classified.points(weights)
        values = _open_set_values(self.examples.points(weights), classified)
        return self._replace(**values)


class IdentificationSearch(NamedTuple):
    """Searches of all probes in one gallery.

    Attributes:
        score: similarity of the best match of a mated probe; of others the largest similarity.
        rank: rank of the best match, from 1; 0 for a probe that is not mated.
    """

    score: Tensor
    rank: Tensor


class IdentificationResult(NamedTuple):
    """Result of :func:`identification`; rates are means over the galleries.

    Attributes:
        rank_1: fraction of mated probes whose first item is a match, whatever its score.
        mated: number of probes whose identity is in the gallery, summed over the galleries.
        nonmated: number of probes whose identity is not in the gallery, summed likewise.
        searches: the searches in each gallery.
        weights: how often each probe counts, shape ``(Q,)``.
        identities: code of the identity of each probe, for intervals.
    """

    rank_1: Tensor
    mated: int
    nonmated: int
    searches: tuple[IdentificationSearch, ...]
    weights: Tensor
    identities: tuple[Tensor]

    def threshold(self, fpir: float) -> Tensor:
        """Smallest threshold of each gallery whose FPIR does not exceed the target."""
        found = [points.thresholds[index] for points, index in self._points(fpir, 1)]
        return torch.stack(found)

    def tpir(self, fpir: float, rank: int = 1) -> Tensor:
        """Fraction of mated probes with an accepted match among the first ``rank`` items.

        The threshold is the smallest whose FPIR does not exceed the target; ``1 / fpir`` probes of
        each gallery must be non-mated.
        """
        if rank < 1:
            raise ValueError(f"tpir expects a rank of 1 or more, got {rank}")
        rates = [
            points.positives[index] / points.all_positives
            for points, index in self._points(fpir, rank)
        ]
        return torch.stack(rates).mean()

    def weighted(self, weights: Tensor) -> "IdentificationResult":
        """Weight the probes, shape ``(Q,)``."""
        return self._replace(weights=weights, rank_1=_rank_1(self.searches, weights))

    def _points(self, fpir: float, rank: int) -> list[tuple[OperatingPoints, Tensor]]:
        found = []
        for score, place in self.searches:
            nonmated = int((place == 0).sum())
            check_rate("identification", "FPIR", fpir, nonmated, "non-mated probes of a gallery")
            # A match beyond the rank is never accepted, and does not lower the threshold.
            ranked = rank_scores(score.where(place <= rank, -torch.inf), place > 0)
            points = ranked.points(self.weights)
            found.append((points, smallest_threshold(points, fpir)))
        return found


class OpenSetAccuracy(NamedTuple):
    """Result of :func:`open_set_accuracy`.

    Attributes:
        baks: mean over known identities of the fraction accepted and identified correctly.
        baus: mean over unknown identities of the fraction rejected.
        known: number of known identities among the examples.
        unknown: number of unknown identities among the examples.
        rates: fraction of each identity's examples that is right, shape ``(I,)``.
        is_known: whether each identity is known, shape ``(I,)``.
        identities: code of each identity, for intervals.
    """

    baks: Tensor
    baus: Tensor
    known: int
    unknown: int
    rates: Tensor
    is_known: Tensor
    identities: tuple[Tensor]

    def weighted(self, weights: Tensor) -> "OpenSetAccuracy":
        """Weight the identities, shape ``(I,)``."""
        sides = (weights * self.is_known, weights * ~self.is_known)
        baks, baus = ((side * self.rates).sum() / side.sum() for side in sides)
        return self._replace(baks=baks, baus=baus)


@torch.no_grad()
def openset(
    scores: Tensor,
    known: Tensor,
    correct: Tensor | None = None,
    *,
    identities: Identities | None = None,
) -> OpenSetResult:
    r"""Separate known from unknown examples by a score that is higher for the known.

    An example is accepted as known if its score is at or above a threshold t. With the acceptance
    rates :math:`A_k(t)` of known and :math:`A_u(t)` of unknown examples, and :math:`C(t)` the
    fraction of known examples that are accepted and classified correctly:

    .. math::
        \mathrm{AUROC} = \int A_k\,dA_u,\qquad
        \mathrm{FPR95} = A_u\bigl(\max\{t: A_k(t) \ge 0.95\}\bigr),\qquad
        \mathrm{OSCR} = \int C\,dA_u

    Equal scores are accepted together.

    Args:
        scores: shape ``(N,)``; for instance of :func:`energy_score`.
        known: whether an example is of a known class, shape ``(N,)``.
        correct: whether it is classified correctly, shape ``(N,)``; read where known. For OSCR.
        identities: identity or class of each example, for :func:`intervals`.

    Returns:
        The :class:`OpenSetResult`. Without known or without unknown examples, the numbers that need
        them are NaN, with a warning.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import openset
        >>> scores = torch.tensor([0.9, 0.8, 0.4, 0.5, 0.1])
        >>> result = openset(scores, torch.tensor([1, 1, 1, 0, 0]), torch.tensor([1, 0, 1, 0, 0]))
        >>> [round(float(value), 4) for value in result[:5]]
        [0.8333, 0.5, 0.9167, 0.8333, 0.5]

    References:
        Liang et al., Enhancing the Reliability of Out-of-distribution Image Detection (ODIN), ICLR
        2018 (FPR95, AUPR); Dhamija et al., Reducing Network Agnostophobia, NeurIPS
        2018 (OSCR).
    """
    known = check_scores("openset", scores, known, "known")
    examples = rank_scores(scores, known)
    classified, codes = None, None
    if correct is not None:
        right = check_flags("openset", correct, scores, "correct")
        classified = rank_scores(scores.where(right | ~known, -torch.inf), known)
    if identities is not None:
        found = encode_identities("openset", "identities", identities, len(scores), scores.device)
        codes = (found.values,)
    result = finish_open_set(
        "openset", examples.points(), None if classified is None else classified.points()
    )
    return result._replace(examples=examples, classified=classified, identities=codes)


class OpenSetSums(NamedTuple):
    """Histograms of scores, summed over batches and ranks.

    Attributes:
        unknown: scores of unknown examples.
        known: scores of known examples.
        right: scores of known examples that are classified correctly.
        judged: number of examples for which ``correct`` was given.
    """

    unknown: Tensor
    known: Tensor
    right: Tensor
    judged: Tensor


def open_set_sums(
    name: str,
    scores: Tensor,
    known: Tensor,
    correct: Tensor | None,
    limits: tuple[float, float],
    bins: int,
) -> OpenSetSums:
    """Count scores of unknown, of known and of correctly classified examples in bins."""
    known = check_scores(name, scores, known, "known")
    right = (
        known & False if correct is None else known & check_flags(name, correct, scores, "correct")
    )
    judged = torch.tensor(0 if correct is None else len(scores), device=scores.device)
    unknown, accepted, classified = (
        histogram(scores[group], limits, bins) for group in (~known, known, right)
    )
    return OpenSetSums(unknown, accepted, classified, judged)


def finish_open_set_sums(
    name: str, sums: OpenSetSums, limits: tuple[float, float]
) -> OpenSetResult:
    """Compute rates from histograms."""
    edges = bin_edges(limits, len(sums.known) - 2, sums.known.device)
    unknown, known, right = (counts.flip(0) for counts in sums[:3])
    examples = int(sums.known.sum() + sums.unknown.sum())
    classified = None
    if int(sums.judged):
        if int(sums.judged) != examples:
            raise ValueError(
                f"{name} expects correct in all updates or in none, got it for "
                f"{int(sums.judged):,} of {examples:,} examples"
            )
        wrong = (known - right).sum().view(1)
        classified = accumulated(
            torch.cat([edges, edges.new_full((1,), -torch.inf)]),
            torch.cat([right, wrong]),
            torch.cat([unknown, torch.zeros_like(wrong)]),
        )
    return finish_open_set(name, accumulated(edges, known, unknown), classified)


def finish_open_set(
    name: str, points: OperatingPoints, classified: OperatingPoints | None
) -> OpenSetResult:
    """Summarise operating points of known and unknown examples."""
    known, unknown = int(points.all_positives), int(points.all_negatives)
    if not (known and unknown):
        warn_undefined(
            name,
            f"got {known:,} known and {unknown:,} unknown examples; numbers that need both are NaN",
        )
    return OpenSetResult(**_open_set_values(points, classified), known=known, unknown=unknown)


def _open_set_values(points: OperatingPoints, classified: OperatingPoints | None) -> dict[str, Any]:
    return {
        "auroc": area(points),
        "fpr95": _false_positives(points, 0.95),
        "aupr_in": average_precision(points),
        "aupr_out": average_precision(mirrored(points)),
        "oscr": None if classified is None else area(classified),
        "points": points,
    }


def _false_positives(points: OperatingPoints, tpr: float) -> Tensor:
    return points.negatives[largest_threshold(points, tpr)] / points.all_negatives


@torch.no_grad()
def identification(
    query: Tensor,
    gallery: Tensor,
    query_ids: Identities,
    gallery_ids: Identities,
    *,
    galleries: Identities | None = None,
    similarity: str = "cosine",
) -> IdentificationResult:
    r"""Search each probe in a gallery (1:N): TPIR at a FPIR.

    A probe is mated if its identity is in the gallery. With :math:`s_1(p)` the largest similarity,
    :math:`s_m(p)` that of the best match and :math:`r_m(p)` its rank:

    .. math::
        \mathrm{FPIR}(t) = \frac{\#\{p\ \text{non-mated}: s_1(p) \ge t\}}{\#\text{non-mated}},\qquad
        \mathrm{TPIR}(t) = \frac{\#\{p\ \text{mated}: s_m(p) \ge t,\ r_m(p) \le r\}}{\#\text{mated}}

    Of equal similarities, a wrong item is ahead of a match. Ranks count items of the gallery; with
    one template for each identity they are ranks of identities.

    Args:
        query: features of the probes, shape ``(Q, D)``.
        gallery: features of the gallery, shape ``(G, D)``.
        query_ids: identity of each probe, integers or strings, shape ``(Q,)``.
        gallery_ids: identity of each gallery item, shape ``(G,)``.
        galleries: gallery of each item, if several disjoint galleries are searched separately, as
            IJB-B and IJB-C prescribe; rates are averaged. By default all items are one gallery.
        similarity: see :func:`retrieval`.

    Returns:
        The :class:`IdentificationResult`.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import identification
        >>> query = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, -0.6]])
        >>> result = identification(query, torch.eye(2), ["ann", "bob", "eve"], ["ann", "bob"])
        >>> float(result.rank_1), float(result.tpir(1.0))
        (1.0, 1.0)

    References:
        Grother and Ngan, Face Recognition Vendor Test, NIST IR 8009, 2014; Whitelam et
        al., IARPA Janus Benchmark-B, CVPRW 2017.
    """
    check_similarity("identification", similarity)
    search = as_search("identification", query, gallery, query_ids, gallery_ids)
    member = None
    if galleries is not None:
        member = encode_identities(
            "identification", "galleries", galleries, len(gallery), gallery.device
        ).values
    return finish_identification("identification", search, member, similarity)


def finish_identification(
    name: str, search: Search, member: Tensor | None, similarity: str
) -> IdentificationResult:
    """Search each gallery, given by the member items, and summarise the searches."""
    member = torch.zeros_like(search.gallery_ids) if member is None else member
    found = []
    for gallery in member.unique():
        values = rank_gallery(name, search.within(member == gallery), similarity)
        score = values.best_match.where(values.matches > 0, values.best_wrong)
        found.append(IdentificationSearch(score, values.first_rank))
    searches = tuple(found)
    mated = sum(int((search.rank > 0).sum()) for search in searches)
    nonmated = sum(int((search.rank == 0).sum()) for search in searches)
    if not mated:
        warn_undefined(name, "no probe has an identity of a gallery; its rates are NaN")
    weights = torch.ones_like(searches[0].score)
    rank_1 = _rank_1(searches, weights)
    return IdentificationResult(rank_1, mated, nonmated, searches, weights, (search.query_ids,))


def _rank_1(searches: tuple[IdentificationSearch, ...], weights: Tensor) -> Tensor:
    rates = [(weights * (rank == 1)).sum() / (weights * (rank > 0)).sum() for _, rank in searches]
    return torch.stack(rates).mean()


@torch.no_grad()
def open_set_accuracy(
    predicted: Identities, identities: Identities, gallery_ids: Identities, accepted: Tensor
) -> OpenSetAccuracy:
    r"""Balanced accuracy on known and on unknown identities, BAKS and BAUS, at a threshold.

    .. math::
        \mathrm{BAKS} = \frac{1}{|K|}\sum_{a\in K}\frac{\#\{i: y_i = a,\ \text{accepted},\
        \hat y_i = a\}}{n_a},\qquad
        \mathrm{BAUS} = \frac{1}{|U|}\sum_{a\in U}\frac{\#\{i: y_i = a,\ \text{rejected}\}}{n_a}

    Args:
        predicted: predicted identity of each example, shape ``(N,)``.
        identities: actual identity of each example, shape ``(N,)``.
        gallery_ids: the known identities.
        accepted: whether an example is accepted as known, shape ``(N,)``.

    Returns:
        The :class:`OpenSetAccuracy`; NaN, with a warning, where there are no such identities.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import open_set_accuracy
        >>> predicted, actual = ["ann", "bob", "ann", "bob"], ["ann", "ann", "bob", "eve"]
        >>> accepted = torch.tensor([1, 1, 1, 0])
        >>> result = open_set_accuracy(predicted, actual, ["ann", "bob"], accepted)
        >>> float(result.baks), float(result.baus)
        (0.25, 1.0)

    References:
        The metrics of wildlife-datasets and of AnimalCLEF 2025.
    """
    name, count = "open_set_accuracy", len(identities)
    accepted = check_flags(name, accepted, torch.empty(count, device=accepted.device), "accepted")
    given, actual, gallery = (
        encode_identities(name, what, values, len(values), accepted.device)
        for what, values in (
            ("predicted", predicted),
            ("identities", identities),
            ("gallery_ids", gallery_ids),
        )
    )
    check_kinds(name, given, actual)
    check_kinds(name, gallery, actual)
    everyone, place = actual.values.unique(return_inverse=True)
    known = torch.isin(everyone, gallery.values)
    right = torch.where(known[place], accepted & (given.values == actual.values), ~accepted)
    rates = torch.bincount(place, right.double(), len(everyone)) / torch.bincount(place)
    if not bool(known.any()) or bool(known.all()):
        warn_undefined(
            name,
            f"got {int(known.sum())} known and {int((~known).sum())} unknown identities; the mean "
            "over none is NaN",
        )
    return OpenSetAccuracy(
        rates[known].mean(),
        rates[~known].mean(),
        int(known.sum()),
        int((~known).sum()),
        rates,
        known,
        (everyone,),
    )
