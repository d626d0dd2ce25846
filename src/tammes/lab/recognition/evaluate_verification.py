"""Verification: accept pairs whose score is at or above a threshold."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tammes.lab.measure.identity_pairs import MAX_PAIRS, pair_scores
from tammes.lab.recognition.embeddings import IdentityEmbeddings, PairRows, numbered
from tammes.lab.recognition.evaluate_retrieval import example_counts
from tammes.lab.recognition.results import (
    Listing,
    Number,
    RankedItem,
    Ranking,
    Recognition,
    as_curve,
    as_number,
    counted,
    failing_identities,
    grid,
    measurable,
    measured,
    operating_points,
    positives_at,
    without_warnings,
)
from tammes.metrics.functional import VerificationResult, fold_accuracy, verification
from tammes.metrics.functional.operating_points import smallest_threshold
from tammes.similarity import directions

RATES = (0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)
"""False acceptance rates of the table of thresholds, as far as they can be measured."""
SIMILARITIES = ("cosine", "dot", "euclidean")
_SHOWN = 8
"""Number of pairs of each kind shown."""


@without_warnings
def evaluate_verification(
    examples: IdentityEmbeddings,
    *,
    pairs: PairRows | None = None,
    max_pairs: int = MAX_PAIRS,
    fars: Sequence[float] | None = None,
    p_target: float = 0.01,
    similarity: str = "cosine",
    resamples: int = 200,
    seed: int = 0,
) -> Recognition:
    """Verify pairs of examples: ROC, TAR at a FAR, EER, minDCF.

    The pairs are by default those of the data set, or else all; of more than ``max_pairs`` of a
    kind a sample is drawn. The false acceptance rates are by default those of :data:`RATES` that
    can be measured; ``p_target`` is the prior probability of a same pair, for minDCF. The
    similarity is ``"cosine"``, ``"dot"`` or ``"euclidean"`` (minus the squared distance);
    ``resamples`` is the number of bootstrap resamples of identities.

    Raises:
        ValueError: there are no pairs of one identity or none of two, or too few for a rate.
    """
    if similarity not in SIMILARITIES:
        raise ValueError(
            f"verification expects similarity 'cosine', 'dot' or 'euclidean', got {similarity!r}"
        )
    notes = examples.first_notes()
    counts = {} if examples.identities is None else example_counts(examples)
    counts["junk"] = int(examples.junk.sum())
    pairs = examples.pairs if pairs is None else pairs
    if pairs is None:
        if examples.identities is None:
            raise ValueError(
                f"{examples.title}: identities or a list of pairs (--pairs FILE) are expected, "
                "got neither"
            )
        sampled = examples.sample_pairs(max_pairs, seed)
        pairs = PairRows(sampled.rows, sampled.is_same)
        counts |= {"all_same": sampled.same, "all_different": sampled.different}
        notes += _sampling_notes(sampled.same, sampled.different, sampled.one_camera, max_pairs)
        if counts["junk"]:
            notes.append(f"{counted(counts['junk'], 'junk example')} ignored")
    same, different = int(pairs.same.sum()), int((~pairs.same).sum())
    _check_kinds(examples.title, same, different)
    counts |= {"same": same, "different": different}
    sides = None
    if examples.identities is not None:
        sides = examples.of(pairs.rows[:, 0]), examples.of(pairs.rows[:, 1])
    else:
        notes.append("identities are not known: no intervals")
    features = examples.features.double()
    features = directions(features) if similarity == "cosine" else features
    scores = pair_scores(features, pairs.rows, similarity)
    result = verification(scores, pairs.same, identities=sides)
    targets = measurable(RATES, different) if fars is None else list(fars)
    for far in targets:
        result.tar(far)
    if fars is None:
        notes.append(f"a FAR below {1 / different:.2g} cannot be measured with so few pairs")
    rates, curve = torch.tensor(targets, dtype=torch.double), grid(different)
    fixed = smallest_threshold(result.points, rates)

    def measure(result: VerificationResult) -> dict[str, Any]:
        points = result.points
        tar, far = positives_at(points, rates), points.negatives[fixed] / points.all_negatives
        return {
            "eer": result.eer,
            "auc": result.auc,
            "min_dcf": result.min_dcf(p_target),
            **{f"tar.{place}": value for place, value in enumerate(tar.tolist())},
            **{f"far.{place}": value for place, value in enumerate(far.tolist())},
            **{f"roc.{i}": v for i, v in enumerate(positives_at(points, curve).tolist())},
        }

    found = measured(result, measure, notes, resamples=resamples, seed=seed)
    numbers = [
        as_number("eer", "EER", found["eer"]),
        as_number("auc", "AUC", found["auc"]),
        *(
            as_number(f"tar_at_{far:g}", f"TAR at FAR {100 * far:g} %", found[f"tar.{place}"])
            for place, far in enumerate(targets)
        ),
        as_number("min_dcf", f"minDCF (p = {p_target:g})", found["min_dcf"], percent=False),
    ]
    if pairs.folds is not None:
        numbers.append(_folds(scores, pairs, sides, notes, resamples, seed))
    limits = result.points.thresholds[fixed]
    kinds = counted(same, "pair") + " of one identity, " + counted(different, "pair") + " of two"
    working = min(targets, key=lambda far: abs(far - 0.01)) if targets else 1.0
    threshold = float(result.threshold(working))
    return Recognition(
        "verification",
        examples.title,
        (f"{counted(len(examples), 'embedding')}; {kinds}, scored by {similarity}",),
        counts,
        tuple(notes),
        tuple(numbers),
        _failing(sides, scores, pairs.same, threshold, working),
        ("FAR", "TAR"),
        operating_points(targets, ("FAR", "TAR"), limits[None], found),
        {"roc": as_curve(curve, [found[f"roc.{place}"] for place in range(len(curve))])},
        {"one identity": scores[pairs.same], "two identities": scores[~pairs.same]},
        {
            "One identity, lowest scores": _extremes(scores, pairs, highest=False),
            "Two identities, highest scores": _extremes(scores, pairs, highest=True),
        },
    )


def _sampling_notes(same: int, different: int, one_camera: int, limit: int) -> list[str]:
    notes = []
    for count, kind in ((same, "one identity"), (different, "two identities")):
        if count > limit:
            notes.append(
                f"{limit:,} of {count:,} pairs of {kind} are drawn at random; --max-pairs N "
                "changes it"
            )
    if one_camera:
        notes.append(
            f"{counted(one_camera, 'pair')} of one identity and one camera left out; "
            "--ignore-cameras counts them"
        )
    return notes


def _check_kinds(title: str, same: int, different: int) -> None:
    if same and different:
        return
    hint = "does every identity have one example?" if not same else "are all of one identity?"
    raise ValueError(
        f"{title}: pairs of one identity and pairs of two are expected, got {same:,} and "
        f"{different:,}, so that no error rate is defined; {hint}"
    )


def _folds(
    scores: Tensor, pairs: PairRows, sides: Any, notes: list[str], resamples: int, seed: int
) -> Number:
    assert pairs.folds is not None
    result = fold_accuracy(scores, pairs.same, folds=pairs.folds, identities=sides)
    found = measured(result, lambda r: {"mean": r.mean}, notes, resamples=resamples, seed=seed)
    name = f"{len(result.accuracies)}-fold accuracy"
    return as_number("fold_accuracy", name, found["mean"])


def _failing(
    sides: tuple[list[Any], list[Any]] | None,
    scores: Tensor,
    same: Tensor,
    threshold: float,
    far: float,
) -> Listing:
    """List the identities with the largest share of wrong decisions at a threshold."""
    columns = ("identity", "same pairs", "rejected %", "different pairs", "accepted %")
    if sides is None:
        return Listing(columns, [])
    both = [*sides[0], *sides[1]]
    names = list(dict.fromkeys(both))
    left, right = numbered(both).chunk(2)
    accepted, size = scores >= threshold, len(names)

    def total(flags: Tensor) -> Tensor:
        # A pair of two identities counts for both.
        counts = torch.bincount(left[flags], minlength=size)
        return counts + torch.bincount(right[flags & ~same], minlength=size)

    asked = total(same), total(~same)
    wrong = total(same & ~accepted), total(~same & accepted)
    caption = f"At the threshold {threshold:.4g} of a FAR of {100 * far:g} %."
    return failing_identities(columns, names, asked, wrong, caption)


def _extremes(scores: Tensor, pairs: PairRows, *, highest: bool) -> list[Ranking]:
    """Return the highest-scoring pairs of two identities or the lowest of one; examples differ."""
    places = (~pairs.same if highest else pairs.same).nonzero().squeeze(1)
    order = places[scores[places].argsort(descending=highest, stable=True)]
    found: list[Ranking] = []
    seen: set[int] = set()
    for place in order.tolist():
        (left, right), score = pairs.rows[place].tolist(), float(scores[place])
        if left in seen or right in seen:
            continue
        seen |= {left, right}
        found.append(Ranking(left, (RankedItem(right, score, not highest),), f"score {score:.4g}"))
        if len(found) == _SHOWN:
            break
    return found
