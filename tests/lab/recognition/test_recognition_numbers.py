"""Evaluations return the numbers of the metrics, on the examples that the protocol says."""

import dataclasses
import itertools

import pytest
import torch
from messages import pattern
from sklearn.metrics import roc_auc_score
from torch.testing import assert_close

from tammes.lab.recognition.embeddings import IdentityEmbeddings, PairRows
from tammes.lab.recognition.evaluate_openset import evaluate_openset
from tammes.lab.recognition.evaluate_retrieval import evaluate_retrieval
from tammes.lab.recognition.evaluate_verification import evaluate_verification
from tammes.metrics.functional import (
    fold_accuracy,
    identification,
    intervals,
    retrieval,
    verification,
)

QUICK = {"resamples": 20}


def examples(identities=None, *, seed=0, spread=0.8, features=None, **columns):
    """Examples around a point for each identity."""
    identities = [place % 8 for place in range(64)] if identities is None else identities
    generator = torch.Generator().manual_seed(seed)
    known = sorted(set(identities))
    points = torch.randn(len(known), 6, generator=generator, dtype=torch.double)
    rows = points[[known.index(each) for each in identities]]
    rows = rows + spread * torch.randn(len(rows), 6, generator=generator, dtype=torch.double)
    given = IdentityEmbeddings(
        "file",
        rows if features is None else features,
        identities,
        None,
        torch.zeros(len(rows), dtype=torch.bool),
        None,
        [f"row {row}" for row in range(len(rows))],
    )
    return dataclasses.replace(given, **columns)


def values(found):
    return {number.key: number.value for number in found.numbers}


def number(found, key):
    return next(each for each in found.numbers if each.key == key)


# ---------------------------------------------------------------------------------- retrieval


def test_retrieval_has_the_numbers_of_the_metric_and_their_intervals():
    given = examples()
    found = evaluate_retrieval(given, ranks=(1, 3), **QUICK)
    result = retrieval(given.features, None, given.identities, None)
    expected = {
        "map": result.mean_average_precision,
        "rank_1": result.cmc[0],
        "rank_3": result.cmc[2],
        "minp": result.minp,
        "map_at_r": result.map_at_r,
        "r_precision": result.r_precision,
        "gap": result.gap,
    }
    assert values(found) == {key: float(value) for key, value in expected.items()}
    generator = torch.Generator().manual_seed(0)
    interval = intervals(
        result, lambda r: {"map": r.mean_average_precision}, generator=generator, **QUICK
    )["map"]
    assert number(found, "map")[3:5] == (interval.low, interval.high)
    curve = found.curves["cmc"]
    assert_close(curve.y, result.cmc[:50])
    assert bool((curve.low <= curve.y).all() and (curve.y <= curve.high).all())


def test_retrieval_of_sides_keeps_the_rules_of_cameras_and_junk():
    query = torch.arange(64) % 3 == 0
    cameras = [place % 5 for place in range(64)]
    junk = torch.arange(64) % 11 == 1
    given = examples(query=query, cameras=cameras, junk=junk)
    found = evaluate_retrieval(given, **QUICK)
    asked, items = (query & ~junk).nonzero()[:, 0], (~query).nonzero()[:, 0]
    result = retrieval(
        given.features[asked],
        given.features[items],
        given.of(asked),
        given.of(items),
        given.cameras_of(asked),
        given.cameras_of(items),
        junk[items],
    )
    assert values(found)["map"] == float(result.mean_average_precision)
    assert found.counts["queries"] == len(asked)
    assert found.counts["gallery"] == len(items) - int(junk[items].sum())
    assert f"{int(junk.sum())} junk examples ignored" in found.notes
    ignored = evaluate_retrieval(given.without_cameras(), **QUICK)
    assert values(ignored)["map"] != values(found)["map"]


def test_queries_without_a_match_are_counted_and_left_out_of_the_means():
    people = [place % 8 for place in range(64)] + [98, 99]
    with_strangers = evaluate_retrieval(examples(people), **QUICK)
    assert with_strangers.counts["queries_without_match"] == 2
    note = "2 of 66 queries have no match in the gallery: left out of the means, errors of GAP"
    assert note in with_strangers.notes


def test_worst_and_best_queries_are_shown_as_they_were_ranked():
    given = examples(cameras=[place // 8 % 4 for place in range(64)])
    found = evaluate_retrieval(given, **QUICK)
    result = retrieval(given.features, None, given.identities, None, given.cameras)
    unit = torch.nn.functional.normalize(given.features)
    precision = result.per_query.average_precision
    for heading, worst in (("Worst queries", True), ("Best queries", False)):
        rankings = found.rankings[heading]
        assert len({given.identities[each.query] for each in rankings}) == len(rankings) == 5
        shown = precision[[each.query for each in rankings]]
        assert float(shown[0]) == float(precision.min() if worst else precision.max())
        assert shown.tolist() == sorted(shown.tolist(), reverse=not worst)
        for each in rankings:
            own = given.identities[each.query]
            allowed = [
                (float(unit[each.query] @ unit[row]), row)
                for row in range(64)
                if given.identities[row] != own or given.cameras[row] != given.cameras[each.query]
            ]
            expected = [row for _, row in sorted(allowed, reverse=True)[:8]]
            assert [item.row for item in each.items] == expected
            assert [item.match for item in each.items] == [
                given.identities[row] == own for row in expected
            ]
            first = int(result.per_query.first_rank[each.query])
            assert f"the first at rank {first}" in each.remark


def test_a_wrong_item_is_shown_ahead_of_a_match_of_equal_similarity():
    given = examples(list("aab"), features=torch.ones(3, 2, dtype=torch.double))
    found = evaluate_retrieval(given, **QUICK)
    (first,) = [each for each in found.rankings["Worst queries"] if each.query == 0]
    assert [(item.row, item.match) for item in first.items] == [(2, False), (1, True)]


def test_failing_identities_have_the_lowest_mean_precision():
    given = examples()
    found = evaluate_retrieval(given, **QUICK)
    result = retrieval(given.features, None, given.identities, None)
    member = torch.tensor(given.identities)
    means = {
        str(name): 100 * float(result.per_query.average_precision[member == name].mean())
        for name in set(given.identities)
    }
    rows = found.failing.rows
    assert [row[0] for row in rows] == sorted(means, key=means.get)[: len(rows)]
    assert rows[0][2] == pytest.approx(means[rows[0][0]])
    unit = torch.nn.functional.normalize(given.features)
    cosine = (unit @ unit.T).fill_diagonal_(-2)
    for name, _, _, _, mistaken in rows:
        nearest = member[cosine[member == int(name)].argmax(1)]
        wrong = nearest[nearest != int(name)].tolist()
        if wrong:
            often, count = mistaken.removesuffix(")").split(" (")
            assert wrong.count(int(often)) == int(count) == max(map(wrong.count, wrong))
        else:
            assert mistaken == ""


# ------------------------------------------------------------------------------- verification


def all_pairs(given):
    rows = torch.combinations(torch.arange(len(given)))
    left, right = torch.tensor(given.identities)[rows].T
    return PairRows(rows, left == right)


def score(given, pairs):
    unit = torch.nn.functional.normalize(given.features)
    return unit[pairs.rows].prod(1).sum(1)


def test_verification_has_the_numbers_of_the_metric_on_all_pairs():
    given = examples()
    found = evaluate_verification(given, fars=(0.1, 0.01), p_target=0.05, **QUICK)
    pairs = all_pairs(given)
    result = verification(score(given, pairs), pairs.same)
    expected = {
        "eer": result.eer,
        "auc": result.auc,
        "tar_at_0.1": result.tar(0.1),
        "tar_at_0.01": result.tar(0.01),
        "min_dcf": result.min_dcf(0.05),
    }
    assert values(found) == pytest.approx({k: float(v) for k, v in expected.items()}, abs=1e-12)
    assert (found.counts["same"], found.counts["different"]) == (224, 1792)
    for point in found.thresholds:
        assert point.thresholds[0] == pytest.approx(float(result.threshold(point.target)))
        assert point.accepted.value == pytest.approx(float(result.tar(point.target)))
        reached = (score(given, pairs)[~pairs.same] >= point.thresholds[0] - 1e-12).double().mean()
        assert point.reached.value == pytest.approx(float(reached))
        assert point.reached.low <= point.reached.value <= point.target
    curve = found.curves["roc"]
    smallest = [float(result.tar(float(far))) for far in curve.x]
    assert curve.y.tolist() == pytest.approx(smallest)


def test_rates_are_those_that_can_be_measured():
    found = evaluate_verification(examples(), **QUICK)
    assert [point.target for point in found.thresholds] == [0.1, 0.01, 1e-3]
    assert "a FAR below 0.00056 cannot be measured with so few pairs" in found.notes
    with pytest.raises(ValueError, match="expects 10,000 pairs of different identities or more"):
        evaluate_verification(examples(), fars=(1e-4,), **QUICK)


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_pairs_are_scored_by_other_similarities(similarity):
    given = examples()
    pairs = all_pairs(given)
    left, right = given.features[pairs.rows].unbind(1)
    scores = (left * right).sum(1) if similarity == "dot" else -(left - right).square().sum(1)
    found = evaluate_verification(given, similarity=similarity, **QUICK)
    assert values(found)["auc"] == pytest.approx(roc_auc_score(pairs.same, scores))


def test_listed_pairs_are_verified_with_their_folds():
    given = examples()
    every = all_pairs(given)
    chosen = torch.randperm(len(every.same), generator=torch.Generator().manual_seed(0))[:600]
    folds = torch.arange(600) % 10
    pairs = PairRows(every.rows[chosen], every.same[chosen], folds)
    found = evaluate_verification(given, pairs=pairs, **QUICK)
    result = fold_accuracy(score(given, pairs), pairs.same, folds=folds)
    assert values(found)["fold_accuracy"] == pytest.approx(float(result.mean))
    assert number(found, "fold_accuracy").name == "10-fold accuracy"
    # A data set may prescribe its pairs.
    own = evaluate_verification(dataclasses.replace(given, pairs=pairs), **QUICK)
    assert values(own) == values(found)


def test_pairs_alone_have_no_intervals():
    given = examples()
    found = evaluate_verification(
        dataclasses.replace(given, identities=None), pairs=all_pairs(given), **QUICK
    )
    assert number(found, "eer").low is None
    assert found.curves["roc"].low is None
    assert number(found, "eer").value == values(evaluate_verification(given, **QUICK))["eer"]
    assert "identities are not known: no intervals" in found.notes


def test_a_sample_of_pairs_is_said_to_be_one():
    found = evaluate_verification(examples(), max_pairs=500, **QUICK)
    note = "500 of 1,792 pairs of two identities are drawn at random; --max-pairs N changes it"
    assert note in found.notes
    assert (found.counts["different"], found.counts["all_different"]) == (500, 1792)


def test_pairs_of_one_camera_are_left_out_and_counted():
    given = examples(cameras=[place // 8 % 2 for place in range(64)])
    found = evaluate_verification(given, **QUICK)
    assert found.counts["same"] == 128
    note = "96 pairs of one identity and one camera left out; --ignore-cameras counts them"
    assert note in found.notes
    assert evaluate_verification(given.without_cameras(), **QUICK).counts["same"] == 224


def test_failing_identities_have_the_most_wrong_decisions_at_the_threshold():
    given = examples()
    found = evaluate_verification(given, **QUICK)
    pairs = all_pairs(given)
    threshold = found.thresholds[1].thresholds[0]
    wrong = {}
    scores = score(given, pairs).tolist()
    for (left, right), same, value in zip(*map(as_list, pairs[:2]), scores, strict=True):
        for name in {given.identities[left], given.identities[right]}:
            counts = wrong.setdefault(str(name), [0, 0, 0, 0])
            counts[2 * (not same)] += 1
            counts[2 * (not same) + 1] += (value >= threshold - 1e-12) != same
    expected = {name: (a, 100 * b / a, c, 100 * d / c) for name, (a, b, c, d) in wrong.items()}
    rows = found.failing.rows
    assert rows
    assert {row[0]: row[1:] for row in rows} == {
        row[0]: pytest.approx(expected[row[0]]) for row in rows
    }
    badness = [row[2] + row[4] for row in rows]
    assert badness == sorted(badness, reverse=True)


def as_list(tensor):
    return tensor.tolist()


def test_the_hardest_pairs_are_shown_and_no_example_twice():
    given = examples()
    found = evaluate_verification(given, **QUICK)
    pairs = all_pairs(given)
    scores = score(given, pairs)
    low, high = found.rankings.values()
    assert low[0].items[0].similarity == pytest.approx(float(scores[pairs.same].min()))
    assert high[0].items[0].similarity == pytest.approx(float(scores[~pairs.same].max()))
    for rankings in (low, high):
        rows = [row for each in rankings for row in (each.query, each.items[0].row)]
        assert len(rows) == len(set(rows)) == 16


# ------------------------------------------------------------------------------------ open set


def test_openset_of_sides_has_the_numbers_of_the_metrics():
    query = torch.arange(64) >= 16
    # Identities 6 and 7 are not in the gallery.
    people = [place % 6 for place in range(16)] + [place % 8 for place in range(48)]
    given = examples(people, query=query)
    found = evaluate_openset(given, fpirs=(0.5, 0.25), **QUICK)
    asked, items = query.nonzero()[:, 0], (~query).nonzero()[:, 0]
    features, names = given.features, (given.of(asked), given.of(items))
    result = identification(features[asked], features[items], *names)
    numbers = values(found)
    for fpir in (0.5, 0.25):
        assert numbers[f"tpir_at_{fpir}"] == pytest.approx(float(result.tpir(fpir)))
    assert numbers["rank_1"] == float(result.rank_1)
    unit = torch.nn.functional.normalize(features)
    top, first = (unit[asked] @ unit[items].T).max(1)
    known = torch.tensor([name in names[1] for name in names[0]])
    assert numbers["auroc"] == pytest.approx(roc_auc_score(known, top))
    right = torch.tensor(names[1])[first] == torch.tensor(names[0])
    score = top.where(right | ~known, -9.0)
    pairs = itertools.product(score[known].tolist(), score[~known].tolist())
    oscr = sum((a > b) + (a == b) / 2 for a, b in pairs) / (int(known.sum() * (~known).sum()))
    assert numbers["oscr"] == pytest.approx(oscr)
    for point in found.thresholds:
        assert point.thresholds == (float(result.threshold(point.target)),)
        assert point.reached.value <= point.target
    sizes = {name: len(scores) for name, scores in found.scores.items()}
    assert sizes["unknown"] == found.counts["unknown"] == int((~known).sum())
    assert sum(sizes.values()) == 48


def test_openset_divides_identities_into_two_galleries():
    found = evaluate_openset(examples(), enrol=2, **QUICK)
    assert found.counts["galleries"] == 2
    assert (found.counts["gallery"], found.counts["probes"]) == (16, 48)
    # Every probe is known to one gallery and unknown to the other.
    assert found.counts["known"] == found.counts["unknown"] == 48
    assert all(len(point.thresholds) == 2 for point in found.thresholds)
    again, other = (evaluate_openset(examples(), enrol=2, seed=seed, **QUICK) for seed in (0, 1))
    assert values(again) == values(found) != values(other)


def test_identities_with_few_examples_are_unknown_to_both_galleries():
    people = [place % 8 for place in range(64)] + [98, 99]
    found = evaluate_openset(examples(people), **QUICK)
    assert (
        "2 identities with fewer than 2 examples are in no gallery, unknown to both" in found.notes
    )
    assert found.counts["unknown"] == found.counts["known"] + 4


def test_openset_shows_the_most_convincing_strangers():
    given = examples()
    found = evaluate_openset(given, **QUICK)
    unknown, behind = found.rankings.values()
    assert unknown[0].items[0].similarity == pytest.approx(float(found.scores["unknown"].max()))
    assert not any(item.match for each in unknown for item in each.items)
    assert all(not each.items[0].match for each in behind)
    assert all(row[2] or row[4] for row in found.failing.rows)


# ----------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("evaluate", "given", "message"),
    [
        (
            evaluate_retrieval,
            examples(["a", "a", "b", "b"], cameras=[1, 1, 1, 1]),
            "file: a match of another camera is expected for some query, all are of camera 1; "
            "--ignore-cameras counts matches of the same camera",
        ),
        (
            evaluate_retrieval,
            examples(["a", "a", "b", "b"], cameras=[1, 1, 2, 2]),
            "file: a match of another camera ... there is none ...",
        ),
        (
            evaluate_retrieval,
            examples(list("abcd")),
            "file: an identity with a query and a match is expected, but every identity has one "
            "example; ...",
        ),
        (
            evaluate_retrieval,
            examples(list("abcd"), query=torch.tensor([True, True, False, False])),
            "file: ... none of the 2 identities of the queries is among the 2 of the gallery ...",
        ),
        (
            evaluate_retrieval,
            examples(list("aabb"), query=torch.tensor([True] * 4)),
            "file: queries and a gallery are expected, got 4 queries and 0 gallery items",
        ),
        (
            evaluate_retrieval,
            examples(list("aabb"), junk=torch.tensor([True] * 4)),
            "file: ... got 0 queries and 0 gallery items, as 4 examples of 4 are junk",
        ),
        (
            evaluate_verification,
            examples(list("aaaa")),
            "file: pairs of one identity and pairs of two are expected, got 6 and 0, so that no "
            "error rate is defined; are all of one identity?",
        ),
        (evaluate_verification, examples(list("abcd")), "file: ... got 0 and 6 ..."),
        (
            evaluate_verification,
            dataclasses.replace(examples(list("aabb")), identities=None),
            "file: identities or a list of pairs (--pairs FILE) are expected, got neither",
        ),
        (
            evaluate_openset,
            examples(list("aabb"), query=torch.tensor([True, False, True, False])),
            "file: known and unknown probes are expected, but every probe has an identity of the "
            "gallery, so that none is unknown; leave some identities out of the gallery",
        ),
        (
            evaluate_openset,
            examples(list("aabb"), query=torch.tensor([True, True, False, False])),
            "file: ... no probe has an identity of the gallery ...",
        ),
        (
            evaluate_openset,
            examples(list("abcd")),
            "file: 2 identities or more with 2 examples ...",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(evaluate, given, message):
    with pytest.raises(ValueError, match=pattern(message)):
        evaluate(given, **QUICK)


def test_contradicting_pairs_are_refused():
    given = examples()
    pairs = all_pairs(given)
    with pytest.raises(ValueError, match="got 2,016 pairs of 2,016 where they disagree"):
        evaluate_verification(given, pairs=pairs._replace(same=~pairs.same), **QUICK)


@pytest.mark.parametrize("evaluate", [evaluate_retrieval, evaluate_verification, evaluate_openset])
def test_zero_embeddings_are_counted_in_one_note(evaluate):
    given = examples()
    zeros = given.features * (torch.arange(64) > 8)[:, None]
    found = evaluate(dataclasses.replace(given, features=zeros), **QUICK)
    notes = [note for note in found.notes if "zero" in note]
    assert notes == ["9 of 64 embeddings are zero, with cosine 0 to all others"]
