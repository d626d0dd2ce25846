"""Open sets against plain counts, scikit-learn and the faults of other evaluation code."""

import numpy as np
import pytest
import scipy.special
import torch
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    roc_auc_score,
)
from sklearn.neighbors import NearestNeighbors
from torch.testing import assert_close

from tammes import metrics
from tammes.metrics import functional as F


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.double, generator=generator)


def examples(seed=0, *, ties=False, known=300, unknown=200):
    scores = normal(known + unknown, seed=seed)
    flags = torch.arange(known + unknown) < known
    scores = scores + 1.2 * flags
    right = normal(known + unknown, seed=seed + 1) < 0.8
    if ties:
        scores = (4 * scores).round() / 4
    return scores, flags, right


def plain_oscr(scores, known, right):
    """Area under correctly classified known over accepted unknown examples."""
    points = [(0.0, 0.0)]
    for t in sorted(set(scores), reverse=True):
        points.append(((scores[~known] >= t).mean(), ((scores[known] >= t) & right[known]).mean()))
    x, y = np.array(points).T
    return np.trapezoid(y, x)


def plain_fpr(scores, positive, tpr):
    """False positives at the highest threshold that accepts enough positives."""
    for t in sorted(set(scores), reverse=True):
        if (scores[positive] >= t).mean() >= tpr:
            return (scores[~positive] >= t).mean()
    raise AssertionError


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", [0, 5])
def test_every_number_is_that_of_plain_counts_and_scikit_learn(seed, ties):
    scores, known, right = examples(seed, ties=ties)
    result = F.openset(scores, known, right)
    s, k, r = scores.numpy(), known.numpy(), right.numpy()
    expected = {
        "auroc": roc_auc_score(k, s),
        "fpr95": plain_fpr(s, k, 0.95),
        "aupr_in": average_precision_score(k, s),
        "aupr_out": average_precision_score(~k, -s),
        "oscr": plain_oscr(s, k, r),
    }
    for name, value in expected.items():
        assert_close(float(getattr(result, name)), float(value), rtol=0, atol=1e-9, msg=name)
    for tpr in (0.05, 0.5, 0.8, 1.0):
        assert_close(float(result.fpr_at(tpr)), float(plain_fpr(s, k, tpr)), rtol=0, atol=1e-9)
        other = result.fpr_at(tpr, positive="unknown")
        assert_close(float(other), float(plain_fpr(-s, ~k, tpr)), rtol=0, atol=1e-9)
    assert (result.known, result.unknown) == (300, 200)


def test_oscr_is_the_area_of_all_known_if_all_are_right():
    scores, known, _ = examples()
    result = F.openset(scores, known, torch.ones(500).bool())
    assert_close(result.oscr, result.auroc)
    assert F.openset(scores, known).oscr is None


# ------------------------------------------------------------ faults of other evaluation code


def test_aupr_in_and_out_are_not_swapped():
    # OpenOOD #211. With few known examples the two are far apart, each near its base rate.
    scores, known, _ = examples(known=10, unknown=490)
    scores = scores - 1.2 * known
    result = F.openset(scores, known)
    assert float(result.aupr_in) < 0.1
    assert float(result.aupr_out) > 0.9


def test_fpr95_names_its_positive_class():
    # OpenOOD detects the unknown, ODIN accepts the known: different numbers for one list.
    scores = torch.tensor([0.9, 0.8, 0.7, 0.2, 0.6, 0.5, 0.4, 0.3])
    result = F.openset(scores, torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]))
    assert float(result.fpr95) == float(result.fpr_at(positive="known")) == 1
    assert float(result.fpr_at(positive="unknown")) == 0.25


def test_tpir_needs_the_rank_and_a_threshold_from_non_mated_probes():
    # InsightFace IJB_1N: threshold by the number of positives, no condition on the rank.
    gallery, names = torch.eye(4), ["a", "b", "c", "d"]
    query = torch.tensor(
        [
            [1.0, 0, 0, 0],
            # Its own identity has cosine 0.6, the wrong one 0.8: accepted by its score alone.
            [0.8, 0.6, 0, 0],
            [0, 0, 0.9, 0.1],
            # Non-mated.
            [0.5, 0.5, 0.5, 0.5],
            [0.3, 0.4, 0.5, 0.4],
        ]
    )
    result = F.identification(query, gallery, ["a", "b", "c", "x", "y"], names)
    assert (result.mated, result.nonmated) == (3, 2)
    assert_close(float(result.rank_1), 2 / 3)
    assert_close(float(result.tpir(0.5)), 2 / 3)
    assert_close(float(result.tpir(0.5, rank=2)), 1.0)
    # The threshold is set by non-mated probes only; here between 0.5 and 0.62.
    assert 0.5 < float(result.threshold(0.5)) <= 1
    assert float(result.tpir(1.0)) == float(result.rank_1)
    with pytest.raises(ValueError, match=r"10 non-mated probes .* FPIR of 0.1, got 2"):
        result.tpir(0.1)
    with pytest.raises(ValueError, match="rank of 1 or more, got 0"):
        result.tpir(0.5, rank=0)


def searched(seed=0):
    centres = normal(20, 5, seed=seed)
    ids = torch.randint(20, (90,), generator=torch.Generator().manual_seed(seed + 1))
    query = centres[ids] + 0.6 * normal(90, 5, seed=seed + 2)
    names = torch.arange(14)
    return query, centres[names], ids, names


def plain_tpir(query, gallery, ids, names, fpir, rank):
    unit = torch.nn.functional.normalize
    cosine, ids, names = (unit(query) @ unit(gallery).T).numpy(), ids.numpy(), names.numpy()
    mated = np.isin(ids, names)
    tops = cosine.max(1)[~mated]
    found = []
    for row, identity in zip(cosine[mated], ids[mated], strict=True):
        own = row[names == identity].max()
        found.append(own if (row[names != identity] >= own).sum() < rank else -np.inf)
    allowed = [t for t in np.unique(cosine) if (tops >= t).mean() <= fpir]
    return max((np.mean(np.array(found) >= t) for t in allowed), default=0.0)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("fpir", [0.06, 0.2, 1.0])
def test_identification_is_the_plain_search(fpir, rank):
    data = searched()
    result = F.identification(*data)
    expected = float(plain_tpir(*data, fpir, rank))
    assert_close(float(result.tpir(fpir, rank=rank)), expected, rtol=0, atol=1e-9)


def test_galleries_are_searched_one_by_one():
    # Joined, the identities of one gallery are wrong answers in the other, and nobody is unmated.
    query, gallery, ids, names = searched(3)
    member = ["first"] * 7 + ["second"] * 7
    result = F.identification(query, gallery, ids, names, galleries=member)
    parts = [
        F.identification(query, gallery[r], ids, names[r]) for r in (slice(0, 7), slice(7, 14))
    ]
    assert_close(result.tpir(0.1), torch.stack([part.tpir(0.1) for part in parts]).mean())
    assert_close(result.threshold(0.1), torch.cat([part.threshold(0.1) for part in parts]))
    assert_close(result.rank_1, torch.stack([part.rank_1 for part in parts]).mean())
    assert result.nonmated == sum(part.nonmated for part in parts)
    assert abs(float(result.tpir(0.1)) - float(F.identification(*searched(3)).tpir(0.1))) > 0.01


def test_the_class_identifies_as_the_function_does():
    query, gallery, ids, names = searched(3)
    member = [0] * 7 + [1] * 7
    metric = metrics.Identification()
    metric.update(query[:50], ids[:50], query=True)
    metric.update(gallery, names, query=False, galleries=member)
    metric.update(query[50:], ids[50:], query=True)
    expected = F.identification(query, gallery, ids, names, galleries=member)
    assert_close(metric.compute().tpir(0.1), expected.tpir(0.1))
    assert F.scalars(metric.compute()) == F.scalars(expected)


def test_the_class_agrees_with_exact_numbers_within_a_bin():
    scores, known, right = examples()
    metric = metrics.OpenSet(limits=(-5.0, 5.0))
    for rows in (slice(0, 310), slice(310, None)):
        metric.update(scores[rows], known[rows], right[rows])
    found, exact = F.scalars(metric.compute()), F.scalars(F.openset(scores, known, right))
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert_close(found[name], value, rtol=0, atol=5e-4, msg=name)


# ---------------------------------------------------------------------------------- intervals


def test_a_weight_counts_an_example_as_often():
    scores, known, right = examples(ties=True)
    counts = torch.randint(4, (500,), generator=torch.Generator().manual_seed(8))
    rows = torch.arange(500).repeat_interleave(counts)
    found = F.openset(scores, known, right).weighted(counts.double())
    expected = F.openset(scores[rows], known[rows], right[rows])
    for name in ("auroc", "fpr95", "aupr_in", "aupr_out", "oscr"):
        assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-9, msg=name)


def test_intervals_of_open_sets_and_of_identification():
    scores, known, right = examples()
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(500) // 5
    result = F.openset(scores, known, right, identities=ids)
    found = F.intervals(result, resamples=200, generator=generator)
    assert set(found) == {"auroc", "fpr95", "aupr_in", "aupr_out", "oscr"}
    for name, interval in found.items():
        assert interval.low < float(getattr(result, name)) < interval.high
    searches = F.identification(*searched())
    rates = F.intervals(searches, lambda r: {"tpir": r.tpir(0.2)}, resamples=50)["tpir"]
    assert rates.low < rates.value < rates.high


# -------------------------------------------------------------------------------------- scores


LOGITS = 3 * normal(7, 5, seed=1)


def test_scores_of_logits_are_their_formulas():
    logits = LOGITS.numpy()
    softmax = scipy.special.softmax(logits, axis=1).max(1)
    assert_close(F.softmax_score(LOGITS).numpy(), softmax)
    assert_close(F.logit_score(LOGITS).numpy(), logits.max(1))
    energy = 2 * scipy.special.logsumexp(logits / 2, axis=1)
    assert_close(F.energy_score(LOGITS, temperature=2.0).numpy(), energy)
    assert F.softmax_score(LOGITS.half()).dtype == torch.float32


def test_scores_of_features_are_those_of_scikit_learn():
    features, training = normal(9, 4, seed=2), normal(60, 4, seed=3)
    unit = torch.nn.functional.normalize
    nearest = (unit(features) @ unit(training).T).amax(1)
    assert_close(F.prototype_score(features, training), nearest)
    neighbours = NearestNeighbors(n_neighbors=5).fit(unit(training))
    distance = neighbours.kneighbors(unit(features))[0][:, -1]
    assert_close(F.knn_score(features, training, k=5).numpy(), -distance)


def test_mahalanobis_score_is_that_of_the_common_covariance():
    features, training = normal(9, 4, seed=2), normal(60, 4, seed=3)
    labels = torch.arange(60) % 3
    # Labels 1, 2 and 5: a label without an example is no class.
    classes = F.gaussian_classes(training, torch.tensor([1, 2, 5])[labels])
    means = torch.stack([training[labels == c].mean(0) for c in range(3)])
    covariance = EmpiricalCovariance(assume_centered=True).fit(training - means[labels])
    expected = np.min([covariance.mahalanobis(features - mean) for mean in means], axis=0)
    assert_close(classes.means, means)
    assert_close(F.mahalanobis_score(features, classes).numpy(), -expected)


def test_known_examples_have_the_higher_score():
    training = torch.cat([normal(40, 6, seed=4) + 4, normal(40, 6, seed=5) - 4])
    labels = torch.arange(80) // 40
    known, unknown = normal(30, 6, seed=6) + 4, normal(30, 6, seed=7)
    both, flags = torch.cat([known, unknown]), torch.arange(60) < 30
    classes = F.gaussian_classes(training, labels)
    logits = both @ classes.means.T
    for scores in (
        F.energy_score(logits),
        F.logit_score(logits),
        F.prototype_score(both, classes.means),
        F.knn_score(both, training, k=5),
        F.mahalanobis_score(both, classes),
    ):
        assert float(F.openset(scores, flags).auroc) > 0.9


def test_baks_and_baus_are_balanced_accuracies():
    generator = torch.Generator().manual_seed(0)
    actual = torch.randint(9, (200,), generator=generator)
    predicted = torch.where(torch.rand(200, generator=generator) < 0.7, actual % 6, 0)
    accepted = torch.rand(200, generator=generator) < 0.8
    result = F.open_set_accuracy(predicted, actual, torch.arange(6), accepted)
    given = torch.where(accepted, predicted, -1)
    known = actual < 6
    recalls = [(given[actual == c] == c).double().mean() for c in range(6)]
    assert_close(result.baks, torch.stack(recalls).mean())
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert_close(float(result.baks), balanced_accuracy_score(actual[known], given[known]))
    rejected = [(~accepted[actual == c]).double().mean() for c in range(6, 9)]
    assert_close(result.baus, torch.stack(rejected).mean())
    assert (result.known, result.unknown) == (6, 3)
    again = result.weighted(torch.tensor([2.0, 1, 0, 0, 0, 0, 0, 3, 1]))
    assert_close(again.baks, (2 * recalls[0] + recalls[1]) / 3)
    assert_close(again.baus, (3 * rejected[1] + rejected[2]) / 4)
    assert set(F.intervals(result, resamples=5)) == {"baks", "baus"}


# -------------------------------------------------------------------------------------- bad input


def test_no_unknown_is_a_defined_result_with_a_warning():
    with pytest.warns(UserWarning, match="3 known and 0 unknown examples; .* NaN"):
        result = F.openset(torch.rand(3), torch.ones(3).bool())
    assert result.auroc.isnan()
    assert result.fpr95.isnan()
    with pytest.warns(UserWarning, match="no probe has an identity of a gallery"):
        assert F.identification(torch.eye(2), torch.eye(2), [1, 2], [3, 4]).rank_1.isnan()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.openset(torch.tensor([torch.nan]), torch.tensor([1])), "infinity in 1 of 1"),
        (lambda: F.openset(torch.ones(2), torch.tensor([1, 2])), "known of 0 and 1, got 2"),
        (lambda: F.openset(*examples()).fpr_at(positive="id"), "'known' or 'unknown'"),
        (lambda: F.energy_score(LOGITS, temperature=0), "temperature above 0, got 0"),
        (lambda: F.softmax_score(LOGITS * torch.nan), "infinity in 7 of 7 rows"),
        (lambda: F.knn_score(torch.eye(2), torch.eye(2), k=3), "k from 1 to 2, got 3"),
        (
            lambda: F.prototype_score(torch.eye(2), torch.eye(3)),
            "query and prototypes of one dimension .* got 2 .* and 3",
        ),
        (
            lambda: F.mahalanobis_score(
                torch.eye(2), F.gaussian_classes(torch.eye(3), torch.arange(3))
            ),
            "query and classes of one dimension .* got 2 .* and 3",
        ),
        (lambda: metrics.Identification(similarity="x"), "Identification expects similarity"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_correct_is_given_in_all_updates_or_in_none():
    metric = metrics.OpenSet()
    metric.update(torch.rand(3), torch.tensor([1, 0, 1]), torch.tensor([1, 0, 0]))
    metric.update(torch.rand(3), torch.tensor([1, 0, 1]))
    with pytest.raises(ValueError, match="correct in all updates or in none, got it for 3 of 6"):
        metric.compute()


@pytest.mark.gpu
def test_a_gpu_gives_what_a_cpu_gives():
    scores, known, right = examples(ties=True)
    found = F.openset(scores.cuda(), known.cuda(), right.cuda())
    assert F.scalars(found) == pytest.approx(F.scalars(F.openset(scores, known, right)), abs=1e-9)
    query, gallery, ids, names = searched()
    found = F.identification(query.cuda(), gallery.cuda(), ids, names)
    expected = F.identification(query, gallery, ids, names)
    assert_close(found.tpir(0.2).cpu(), expected.tpir(0.2))
