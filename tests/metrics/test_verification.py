"""Verification against plain counts, scikit-learn and the faults of other evaluation code."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from sklearn.metrics import det_curve, roc_auc_score, roc_curve
from torch.testing import assert_close

from tammes import metrics
from tammes.metrics import functional as F

TARGETS = [0.003, 0.01, 0.1, 0.29, 0.5, 1.0]


def scores_of_pairs(seed=0, *, ties=False, same=130, different=700):
    generator = torch.Generator().manual_seed(seed)
    scores = 0.2 * torch.randn(same + different, dtype=torch.double, generator=generator)
    flags = torch.arange(same + different) < same
    scores = scores + 0.25 * flags
    if ties:
        scores = (20 * scores).round() / 20
    order = torch.randperm(len(scores), generator=generator)
    return scores[order].clamp(-1, 1), flags[order]


def plain_tar(scores, same, far):
    """TAR and threshold: try every score, from the highest."""
    best = (0.0, np.inf)
    for t in sorted(set(scores), reverse=True):
        if (scores[~same] >= t).mean() <= far:
            best = ((scores[same] >= t).mean(), t)
    return best


def plain_min_dcf(scores, same, p, miss, alarm):
    thresholds = [*set(scores), np.inf]
    costs = [
        miss * p * (scores[same] < t).mean() + alarm * (1 - p) * (scores[~same] >= t).mean()
        for t in thresholds
    ]
    return min(costs) / min(miss * p, alarm * (1 - p))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_number_is_that_of_plain_counts(seed, ties):
    scores, same = scores_of_pairs(seed, ties=ties)
    result = F.verification(scores, same)
    s, y = scores.numpy(), same.numpy()
    for far in TARGETS:
        tar, threshold = plain_tar(s, y, far)
        assert_close(float(result.tar(far)), float(tar), rtol=0, atol=1e-9)
        assert float(result.threshold(far)) == threshold
    for settings in [(0.01, 1, 1), (0.05, 1, 1), (0.001, 10, 1), (0.5, 1, 3)]:
        expected = plain_min_dcf(s, y, *settings)
        assert_close(float(result.min_dcf(*settings)), float(expected), rtol=0, atol=1e-9)
    half = np.mean([np.sign(a - b) / 2 + 0.5 for a in s[y] for b in s[~y]])
    assert_close(float(result.auc), float(half), rtol=0, atol=1e-9)
    assert (result.same, result.different) == (130, 700)


@pytest.mark.parametrize("ties", [False, True])
def test_curves_and_area_are_those_of_scikit_learn(ties):
    scores, same = scores_of_pairs(2, ties=ties)
    result = F.verification(scores, same)
    fpr, tpr, thresholds = roc_curve(same, scores, drop_intermediate=False)
    assert_close(result.roc.far.numpy(), fpr, rtol=0, atol=1e-9)
    assert_close(result.roc.tar.numpy(), tpr, rtol=0, atol=1e-9)
    assert_close(result.roc.thresholds.numpy(), thresholds, rtol=0, atol=0)
    assert_close(float(result.auc), roc_auc_score(same, scores), rtol=0, atol=1e-9)
    # scikit-learn leaves out the ends of the DET curve.
    errors = {(round(a, 9), round(m, 9)) for a, m in zip(*np.array(result.det[:2]), strict=True)}
    for alarm, miss in zip(*det_curve(same, scores)[:2], strict=True):
        assert (round(alarm, 9), round(miss, 9)) in errors


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_equal_error_rate_is_the_root_on_the_polyline(seed, ties):
    scores, same = scores_of_pairs(seed, ties=ties, same=37, different=90)
    far, tar, _ = roc_curve(same, scores, drop_intermediate=False)
    place = np.arange(len(far))
    along = [lambda u, rates=rates: np.interp(u, place, rates) for rates in (far, 1 - tar)]
    root = brentq(lambda u: along[0](u) - along[1](u), 0, place[-1], xtol=1e-14)
    assert_close(float(F.verification(scores, same).eer), along[0](root), rtol=0, atol=1e-9)


def test_equal_error_rate_by_hand():
    # FAR is 1/3 from 0.6 on and FRR is 1/3 above 0.4: they meet.
    same, flags = torch.tensor([0.9, 0.7, 0.4, 0.6, 0.3, 0.1]), torch.tensor([1, 1, 1, 0, 0, 0])
    assert_close(float(F.verification(same, flags).eer), 1 / 3)
    # One tie of all: the line from (0, 1) to (1, 0).
    assert float(F.verification(torch.zeros(4), torch.tensor([1, 0, 0, 0])).eer) == 0.5
    # Between the points (0, 1/2) and (1, 1/2) and so on: FAR grows from 0 to 1/4 at FRR 1/2.
    scores = torch.tensor([0.9, 0.1, 0.8, 0.7, 0.05, 0.02])
    assert_close(float(F.verification(scores, torch.tensor([1, 1, 0, 0, 0, 0])).eer), 0.5)
    assert float(F.verification(torch.tensor([0.9, 0.1]), torch.tensor([1, 0])).eer) == 0


# ------------------------------------------------------------ faults of other evaluation code


def test_tar_is_never_read_at_a_far_above_the_target():
    # InsightFace and copies take the FAR nearest to the target, here 0.1 for 0.08.
    scores = torch.cat([torch.tensor([0.95, 0.75]), torch.linspace(0.8, 0.1, 20)])
    same = torch.arange(22) < 2
    result = F.verification(scores, same)
    fpr, tpr, _ = roc_curve(same, scores, drop_intermediate=False)
    nearest = np.flip(tpr)[np.argmin(abs(np.flip(fpr) - 0.08))]
    assert nearest == 1
    assert float(result.tar(0.08)) == 0.5
    assert (scores[~same] >= result.threshold(0.08)).double().mean() <= 0.08


def test_a_product_that_rounding_lowers_still_allows_its_integer():
    assert 0.29 * 100 < 29
    scores = torch.cat([torch.linspace(1, 0.01, 100, dtype=torch.double), torch.tensor([0.715])])
    same = torch.arange(101) == 100
    assert float(F.verification(scores, same).tar(0.29)) == 1


def test_a_rate_that_cannot_be_measured_is_refused():
    # VAL@FAR 1e-3 of ten folds with 300 different pairs each is not a measurement.
    scores, same = scores_of_pairs(different=300)
    with pytest.raises(
        ValueError, match=r"expects 1,000 pairs of different identities .* FAR of 0.001, got 300"
    ):
        F.verification(scores, same).tar(1e-3)
    assert 0 < float(F.verification(scores, same).tar(1 / 300)) < 1
    with pytest.raises(ValueError, match="expects 0 < FAR <= 1, got 0"):
        F.verification(scores, same).threshold(0)


def test_fold_accuracy_is_exact_where_a_grid_is_blind():
    # Squared distances on a grid of 0.01 cannot separate cosines that differ by 1e-3.
    generator = torch.Generator().manual_seed(3)
    same = torch.arange(200) % 2 == 0
    scores = 0.5 + 1e-3 * same + 1e-4 * torch.rand(200, generator=generator, dtype=torch.double)
    result = F.fold_accuracy(scores, same)
    assert float(result.mean) == 1
    assert float(result.standard_error) == 0
    distance = 2 - 2 * scores
    grid = max(((distance < t) == same).double().mean() for t in torch.arange(0, 4, 0.01))
    assert grid < 0.9


def plain_fold_accuracy(scores, same, folds):
    rates = []
    for inside in np.array_split(np.arange(len(scores)), folds):
        rest = np.setdiff1d(np.arange(len(scores)), inside)
        values = np.sort(np.unique(scores[rest]))
        ends = [-np.inf, *((values[1:] + values[:-1]) / 2), np.inf]
        right = [((scores[rest] >= t) == same[rest]).sum() for t in ends]
        best = max(t for t, count in zip(ends, right, strict=True) if count == max(right))
        rates.append(((scores[inside] >= best) == same[inside]).mean())
    return np.array(rates)


@pytest.mark.parametrize("ties", [False, True])
def test_fold_accuracy_is_the_plain_search_over_all_thresholds(ties):
    scores, same = scores_of_pairs(4, ties=ties)
    result = F.fold_accuracy(scores, same)
    expected = plain_fold_accuracy(scores.numpy(), same.numpy(), 10)
    assert_close(result.accuracies.numpy(), expected, rtol=0, atol=1e-9)
    assert_close(float(result.mean), expected.mean())
    assert_close(float(result.standard_error), expected.std(ddof=1) / 10**0.5)
    named = F.fold_accuracy(scores, same, folds=torch.arange(830) // 83)
    assert_close(named, result)


def test_fold_accuracy_has_intervals_too():
    scores, same, names = pairs_of_identities(12, 7, seed=0)
    folds = torch.randint(4, (len(scores),), generator=torch.Generator().manual_seed(0))
    result = F.fold_accuracy(scores, same, folds=folds, identities=names)
    counts = torch.arange(len(scores)) % 3
    rows = torch.arange(len(scores)).repeat_interleave(counts)
    repeated = F.fold_accuracy(scores[rows], same[rows], folds=folds[rows])
    assert_close(result.weighted(counts.double()).accuracies, repeated.accuracies)
    interval = F.intervals(result, resamples=30)["mean"]
    assert interval.low < float(result.mean) < interval.high


def test_equal_error_rate_of_a_toy_is_what_it_is_by_hand():
    # voxceleb_trainer #11: two codes gave 0.2 and 0.4 for one list of ten scores.
    scores = torch.tensor([0.9, 0.8, 0.7, 0.4, 0.2, 0.75, 0.5, 0.3, 0.1, 0.05])
    same = torch.arange(10) < 5
    # At 0.5: 2 of 5 same pairs rejected, 2 of 5 different pairs accepted.
    assert_close(float(F.verification(scores, same).eer), 0.4)


def test_minimum_cost_is_normalised_and_at_most_one():
    # SpeechBrain does not divide: a useless system then seems to cost 0.01.
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(1000, generator=generator)
    useless = F.verification(scores, torch.arange(1000) % 2 == 0).min_dcf(p_target=0.01)
    assert 0.9 < float(useless) <= 1


# --------------------------------------------------------------------------------- histograms


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("bins", [16, 256, 65_536])
@pytest.mark.parametrize("limits", [(-1.0, 1.0), (-0.1, 0.3)])
def test_the_exact_numbers_are_between_the_bounds_of_a_histogram(bins, limits, ties):
    scores, same = scores_of_pairs(6, ties=ties)
    exact = F.verification(scores, same)
    metric = metrics.Verification(bins=bins, limits=limits)
    for rows in (slice(0, 300), slice(300, 300), slice(300, None)):
        metric.update(scores[rows], same[rows])
    result = metric.compute()
    worst, best = result.bounds()
    measures = [
        lambda r: -r.eer,
        lambda r: r.auc,
        lambda r: -r.min_dcf(),
        lambda r: -r.min_dcf(0.3, 2, 1),
        *(lambda r, far=far: r.tar(far) for far in TARGETS),
    ]
    for measure in measures:
        low, high = float(measure(worst)), float(measure(best))
        assert low - 1e-12 <= float(measure(exact)) <= high + 1e-12
        assert low - 1e-12 <= float(measure(result)) <= high + 1e-12
    for far in TARGETS[:-1]:
        # TAR is not overstated, the threshold is at most a bin too high.
        assert float(result.tar(far)) <= float(exact.tar(far))
        assert (scores[~same] >= result.threshold(far)).double().mean() <= far
        if limits == (-1.0, 1.0):
            above = scores[scores < exact.threshold(far)].amax()
            assert float(above) < float(result.threshold(far))
            assert float(result.threshold(far)) <= float(above) + result.bin_width + 1e-12
    if bins == 65_536 and limits == (-1.0, 1.0) and not ties:
        assert float(best.tar(0.01) - worst.tar(0.01)) < 0.01
        assert float(worst.eer - best.eer) < 0.002
    assert exact.bounds() == (exact, exact)


def test_a_histogram_counts_what_it_was_given():
    metric = metrics.Verification(bins=8)
    metric.update(torch.tensor([0.5, 1.0, -1.0, 7.0, -7.0]), torch.tensor([1, 1, 0, 1, 0]))
    result = metric.compute()
    assert (result.same, result.different) == (3, 2)
    assert float(result.auc) == 1
    assert result.bin_width == 0.25


# ---------------------------------------------------------------------------------- intervals


def test_a_weight_counts_a_pair_as_often():
    scores, same = scores_of_pairs(7, ties=True)
    counts = torch.randint(4, (830,), generator=torch.Generator().manual_seed(8))
    weighted = F.verification(scores, same).weighted(counts.double())
    rows = torch.arange(830).repeat_interleave(counts)
    expected = F.verification(scores[rows], same[rows])
    for measure in (
        lambda r: r.eer,
        lambda r: r.auc,
        lambda r: r.tar(0.05),
        lambda r: r.min_dcf(),
    ):
        assert_close(measure(weighted), measure(expected), rtol=0, atol=1e-9)


def pairs_of_identities(identities, images, seed):
    """All pairs of images whose identity has its own quality."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(identities).repeat_interleave(images)
    quality = torch.randn(identities, generator=generator, dtype=torch.double)
    first, second = torch.combinations(torch.arange(len(owner))).unbind(1)
    a, b = owner[first], owner[second]
    noise = torch.randn(len(a), generator=generator, dtype=torch.double)
    return (a == b) * 1.5 + 0.8 * (quality[a] + quality[b]) + 0.2 * noise, a == b, (a, b)


def test_intervals_weight_pairs_by_the_draws_of_both_identities():
    scores, same, (a, b) = pairs_of_identities(8, 3, seed=0)
    result = F.verification(scores, same, identities=(a, b))
    found = F.intervals(result, resamples=50, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    areas = []
    for _ in range(50):
        drawn = torch.randint(8, (8,), generator=generator).tolist()
        rows = [
            i
            for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True))
            for _ in range(drawn.count(x) * (1 if x == y else drawn.count(y)))
        ]
        areas.append(roc_auc_score(same[rows], scores[rows]))
    low, high = np.quantile(areas, [0.025, 0.975])
    assert_close((found["auc"].low, found["auc"].high), (float(low), float(high)))
    assert found["auc"].value == float(result.auc)
    assert set(found) == {"eer", "auc"}


def test_intervals_over_identities_cover_where_those_over_pairs_do_not():
    generator = torch.Generator().manual_seed(2)
    areas = [F.verification(*pairs_of_identities(12, 7, seed)[:2]).auc for seed in range(200)]
    truth = float(torch.stack(areas).mean())
    covered = {"identities": 0, "pairs": 0}
    for seed in range(1000, 1040):
        scores, same, names = pairs_of_identities(12, 7, seed)
        result = F.verification(scores, same, identities=names)
        of_pairs = result._replace(identities=(torch.arange(len(scores)),))
        for kind, what in (("identities", result), ("pairs", of_pairs)):
            interval = F.intervals(what, resamples=60, generator=generator)["auc"]
            covered[kind] += interval.low <= truth <= interval.high
    # 36 and 19 of 40, at a level of 95 %.
    assert covered["identities"] > 32
    assert covered["pairs"] < 25


def test_resamples_without_a_number_are_counted():
    scores, same, names = pairs_of_identities(2, 2, seed=0)
    result = F.verification(scores, same, identities=names)
    interval = F.intervals(result, resamples=200)["auc"]
    # Two draws of one identity leave no different pair: half of all resamples.
    assert 60 < interval.undefined < 140


# ------------------------------------------------------------------------- score normalisation


def test_score_normalisation_is_the_formula():
    generator = torch.Generator().manual_seed(9)
    scores = torch.randn(6, generator=generator, dtype=torch.double)
    first, second = torch.randn(2, 4, 50, generator=generator, dtype=torch.double)
    pairs = torch.tensor([[0, 1], [3, 2], [2, 2], [1, 0], [0, 0], [3, 3]])
    z, s, adaptive = (
        F.normalize_scores(
            scores, first, None if norm == "z" else second, pairs, norm=norm, top=7
        ).numpy()
        for norm in ("z", "s", "as")
    )
    for i, (e, t) in enumerate(pairs.tolist()):
        x, rows = float(scores[i]), (first[e].numpy(), second[t].numpy())
        assert_close(z[i], (x - rows[0].mean()) / rows[0].std())
        assert_close(s[i], np.mean([(x - row.mean()) / row.std() for row in rows]))
        tops = [np.sort(row)[-7:] for row in rows]
        assert_close(adaptive[i], np.mean([(x - row.mean()) / row.std() for row in tops]))
    rows = pairs.unbind(1)
    same = F.normalize_scores(scores, first[rows[0]], second[rows[1]], norm="s")
    assert_close(same.numpy(), s)


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("flags", [torch.ones(5), torch.zeros(5)])
def test_pairs_of_one_kind_are_a_defined_result_with_a_warning(flags):
    with pytest.warns(UserWarning, match="pairs of one identity and .* of two; .* NaN"):
        result = F.verification(torch.rand(5), flags.bool())
    assert result.eer.isnan()
    assert result.auc.isnan()
    if not result.different:
        with pytest.raises(ValueError, match=r"10 pairs of different identities .* got 0"):
            result.tar(0.1)


ONES = torch.ones(3).bool()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: F.verification(torch.tensor([0.1, torch.nan, torch.inf]), ONES),
            ValueError,
            "finite scores, got NaN or infinity in 2 of 3",
        ),
        (lambda: F.verification(torch.ones(3, 1), ONES), ValueError, r"shape \(N,\), got \(3, 1\)"),
        (lambda: F.verification(torch.ones(3), ONES[:2]), ValueError, r"same of shape \(3,\)"),
        (lambda: F.verification(torch.ones(3), torch.ones(3)), TypeError, "same of booleans"),
        (lambda: F.verification(torch.ones(3).long(), ONES), TypeError, "floating type"),
        (
            lambda: F.verification([1.0] * 3, ONES),
            TypeError,
            "scores to be a tensor, got list; tor",
        ),
        (lambda: F.verification(torch.ones(3), [True] * 3), TypeError, "same to be a tensor, got"),
        (
            lambda: F.verification(torch.ones(3), ONES, identities=([1, 2, 3], [1, 2, 4])),
            ValueError,
            "1 pairs of 3 where they disagree",
        ),
        (
            lambda: F.verification(torch.ones(3), ONES, identities=([1, 2, 3],)),
            ValueError,
            "first and of the second",
        ),
        (
            lambda: F.intervals(F.verification(*scores_of_pairs())),
            ValueError,
            "identities of its examples, got VerificationResult without",
        ),
        (
            lambda: F.verification(*scores_of_pairs()).min_dcf(p_target=1.0),
            ValueError,
            "0 < p_target < 1",
        ),
        (lambda: F.fold_accuracy(torch.ones(3), ONES), ValueError, "a pair in each, got 3 folds"),
        (lambda: metrics.Verification(bins=0), ValueError, "bins of 1 or more"),
        (lambda: metrics.Verification(limits=(1.0, 0.0)), ValueError, "low < high"),
        (
            lambda: F.normalize_scores(torch.ones(3), torch.rand(3, 4), norm="s"),
            ValueError,
            "both sides for norm 's', got one",
        ),
        (
            lambda: F.normalize_scores(torch.ones(3), torch.ones(3, 4), norm="z"),
            ValueError,
            "standard deviation 0",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_histogram_has_no_pairs_to_weight():
    metric = metrics.Verification()
    metric.update(*scores_of_pairs())
    with pytest.raises(ValueError, match="scores in memory, got a histogram"):
        metric.compute().weighted(torch.ones(830))


@pytest.mark.gpu
def test_a_gpu_verifies_as_a_cpu_does():
    scores, same = scores_of_pairs(ties=True)
    metric = metrics.Verification().cuda()
    metric.update(scores.cuda(), same.cuda())
    exact, found = F.verification(scores, same), F.verification(scores.cuda(), same.cuda())
    assert_close(found.roc, type(exact.roc)(*(part.cuda() for part in exact.roc)))
    assert_close(found.tar(0.01).cpu(), exact.tar(0.01))
    assert_close(metric.compute().eer.cpu(), exact.eer)
    folds = F.fold_accuracy(scores.cuda(), same.cuda())
    assert_close(folds.accuracies.cpu(), F.fold_accuracy(scores, same).accuracies)
