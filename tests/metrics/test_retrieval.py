"""Retrieval against a plain ranking in numpy, from the definitions; faults of other code."""

import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch.testing import assert_close

from tammes import metrics
from tammes.metrics import functional as F

# The name in the package is the function.
CORE = sys.modules["tammes.metrics.functional.retrieval"]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.double, generator=generator)


def integers(high, count, seed):
    return torch.randint(high, (count,), generator=torch.Generator().manual_seed(seed))


def market(seed=0, *, ties=False):
    """Queries and a gallery with cameras, junk, distractors and identities without a match."""
    centres = normal(12, 6, seed=seed)
    query_ids, gallery_ids = integers(12, 40, seed + 1), integers(9, 150, seed + 2)
    query = centres[query_ids] + 0.9 * normal(40, 6, seed=seed + 3)
    gallery = centres[gallery_ids] + 0.9 * normal(150, 6, seed=seed + 4)
    if ties:
        # Products of small integers are exact, and many are equal.
        query, gallery = query.round().clamp(-1, 1), gallery.round().clamp(-1, 1)
    return {
        "query": query,
        "gallery": gallery,
        "query_ids": query_ids,
        "gallery_ids": gallery_ids,
        "query_cameras": integers(3, 40, seed + 5),
        "gallery_cameras": integers(3, 150, seed + 6),
        "gallery_junk": integers(8, 150, seed + 7) == 0,
    }


def plain_similarity(query, gallery, kind):
    query, gallery = query.numpy(), gallery.numpy()
    if kind == "cosine":
        query = query / np.linalg.norm(query, axis=1, keepdims=True)
        gallery = gallery / np.linalg.norm(gallery, axis=1, keepdims=True)
    if kind == "euclidean":
        return -((query[:, None] - gallery[None]) ** 2).sum(-1)
    return query @ gallery.T


def plain_ranking(similarity, query_ids, gallery_ids, query_cameras, gallery_cameras, gallery_junk):
    """Sorted matches (1) and wrong items (0) of each query, and the similarity of the first."""
    for i, row in enumerate(similarity):
        same = gallery_ids == query_ids[i]
        kept = ~gallery_junk & ~(same & (gallery_cameras == query_cameras[i]))
        # Of equal similarities the wrong item is first.
        order = np.lexsort((same[kept], -row[kept].round(9)))
        yield same[kept][order].astype(float), row[kept].max().round(9)


def plain_values(rankings):
    """Every number from its definition, in loops."""
    ap, trapezoid, inp, r_precision, map_at_r, first, tops = [], [], [], [], [], [], []
    for hits, top in rankings:
        tops.append((top, bool(hits[0]) if len(hits) else False))
        count = int(hits.sum())
        if not count:
            continue
        precisions = [hits[: rank + 1].sum() / (rank + 1) for rank in range(len(hits))]
        ap.append(sum(p * h for p, h in zip(precisions, hits, strict=True)) / count)
        area, old_recall, old_precision, seen = 0.0, 0.0, 1.0, 0
        for rank, hit in enumerate(hits):
            seen += hit
            recall, precision = seen / count, seen / (rank + 1)
            area += (recall - old_recall) * (old_precision + precision) / 2
            old_recall, old_precision = recall, precision
        trapezoid.append(area)
        ranks = np.flatnonzero(hits) + 1
        first.append(ranks[0])
        inp.append(count / ranks[-1])
        r_precision.append(hits[:count].sum() / count)
        map_at_r.append(sum(precisions[r - 1] for r in ranks if r <= count) / count)
    gap = 0.0
    for value, correct in tops:
        at_least = [c for v, c in tops if v >= value]
        gap += correct * sum(at_least) / len(at_least)
    return {
        "mean_average_precision": np.mean(ap),
        "trapezoid": np.mean(trapezoid),
        "minp": np.mean(inp),
        "r_precision": np.mean(r_precision),
        "map_at_r": np.mean(map_at_r),
        "gap": gap / len(ap),
        "cmc": [np.mean(np.array(first) <= k) for k in (1, 2, 5, 10, 20)],
        "without": len(tops) - len(ap),
    }


@pytest.mark.parametrize("seed", [0, 100])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean"])
def test_every_number_is_that_of_a_plain_ranking(kind, ties, seed):
    data = market(seed, ties=ties)
    names = {name: value.numpy() for name, value in data.items() if "_" in name}
    if ties:
        zero = data["gallery"].abs().sum(1) == 0
        data["gallery"][zero] = 1.0
        data["query"][data["query"].abs().sum(1) == 0] = 1.0
    similarity = plain_similarity(data["query"], data["gallery"], kind)
    plain = plain_values(plain_ranking(similarity, **names))
    result = F.retrieval(**data, similarity=kind)
    for name in ("mean_average_precision", "minp", "r_precision", "map_at_r", "gap"):
        assert_close(float(getattr(result, name)), plain[name], rtol=0, atol=1e-9, msg=name)
    found = [float(result.recall_at(k)) for k in (1, 2, 5, 10, 20)]
    assert_close(found, [float(v) for v in plain["cmc"]], rtol=0, atol=1e-9)
    assert_close(result.cmc[[0, 1, 4, 9, 19]].tolist(), found)
    assert float(result.precision_at_1) == found[0]
    assert result.queries_without_match == plain["without"] > 0
    assert result.junk == int(data["gallery_junk"].sum()) > 0
    other = F.retrieval(**data, similarity=kind, ap="trapezoid").mean_average_precision
    assert_close(float(other), plain["trapezoid"], rtol=0, atol=1e-9)


def test_ties_are_part_of_that_test():
    data = market(0, ties=True)
    product = data["query"] @ data["gallery"].T
    assert len(product.unique()) < 20


def test_average_precision_is_that_of_scikit_learn():
    data = market()
    query, gallery = data["query"], data["gallery"]
    result = F.retrieval(query, gallery, data["query_ids"], data["gallery_ids"])
    cosine = plain_similarity(query, gallery, "cosine")
    for i, found in enumerate(result.per_query.average_precision.tolist()):
        same = (data["gallery_ids"] == data["query_ids"][i]).numpy()
        if same.any():
            assert_close(found, average_precision_score(same, cosine[i]), rtol=0, atol=1e-9)
        else:
            assert np.isnan(found)


def test_values_by_hand():
    # Ranks of the matches: 1, 3 and 4 of 5 items.
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5]])
    ids = [1, 2, 1, 1, 2]
    result = F.retrieval(torch.ones(1, 2), torch.ones(5, 2), [1], ids, similarity=scores)
    assert_close(float(result.mean_average_precision), (1 + 2 / 3 + 3 / 4) / 3)
    assert_close(float(result.minp), 3 / 4)
    assert_close(float(result.r_precision), 2 / 3)
    assert_close(float(result.map_at_r), (1 + 2 / 3) / 3)
    matlab = F.retrieval(
        torch.ones(1, 2), torch.ones(5, 2), [1], ids, similarity=scores, ap="trapezoid"
    )
    expected = ((1 + 1) + (1 / 2 + 2 / 3) + (2 / 3 + 3 / 4)) / 6
    assert_close(float(matlab.mean_average_precision), expected)


# ---------------------------------------------------------------- ties, blocks, kinds of names


def test_constant_features_do_not_score():
    # A stable sort of equal similarities would rank the matches first here.
    ids = torch.tensor([1] * 5 + [2] * 20)
    result = F.retrieval(torch.ones(3, 4), torch.ones(25, 4), [1, 1, 1], ids)
    assert float(result.precision_at_1) == float(result.gap) == 0
    assert result.per_query.first_rank.tolist() == [21, 21, 21]


def test_the_order_of_the_gallery_has_no_effect():
    data = market(ties=True)
    data["gallery"][data["gallery"].abs().sum(1) == 0] = 1.0
    data["query"][data["query"].abs().sum(1) == 0] = 1.0
    order = torch.randperm(150, generator=torch.Generator().manual_seed(9))
    moved = {n: v[order] if n.startswith("gallery") else v for n, v in data.items()}
    for found, expected in zip(
        F.retrieval(**moved).per_query, F.retrieval(**data).per_query, strict=True
    ):
        assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("budget", [1, 10_000, 2**30])
def test_the_size_of_blocks_has_no_effect(monkeypatch, budget):
    expected = F.retrieval(**market())
    monkeypatch.setattr(CORE, "BUDGET", budget)
    found = F.retrieval(**market())
    assert_close(found.per_query, expected.per_query, equal_nan=True)


def test_names_may_be_strings():
    data = market()
    expected = F.retrieval(**data)
    for name in ("query_ids", "gallery_ids", "query_cameras", "gallery_cameras"):
        data[name] = [f"name {value}" for value in data[name].tolist()]
    found = F.retrieval(**data)
    assert_close(found.per_query, expected.per_query, equal_nan=True)
    data["query_ids"], data["gallery_ids"] = map(np.array, (data["query_ids"], data["gallery_ids"]))
    assert_close(F.retrieval(**data).cmc, expected.cmc)


def test_half_precision_is_ranked_in_float64():
    data = market()
    half = {**data, "query": data["query"].half(), "gallery": data["gallery"].half()}
    wide = {**data, "query": half["query"].double(), "gallery": half["gallery"].double()}
    assert_close(F.retrieval(**half).per_query, F.retrieval(**wide).per_query, equal_nan=True)


def test_without_a_gallery_a_query_does_not_find_itself():
    data = market()
    features, ids = data["gallery"], data["gallery_ids"]
    result = F.retrieval(features, None, ids, None)
    cosine = plain_similarity(features, features, "cosine")
    np.fill_diagonal(cosine, -2)
    assert_close(float(result.recall_at(1)), float((ids[cosine.argmax(1)] == ids).double().mean()))
    # Itself in the gallery, everyone is found at once.
    assert float(F.retrieval(features, features, ids, ids).recall_at(1)) == 1


def test_recall_beyond_the_gallery_is_that_of_all_of_it():
    result = F.retrieval(**market())
    assert float(result.recall_at(10**6)) == float(result.cmc[-1]) == 1
    with pytest.raises(ValueError, match="k of 1 or more, got 0"):
        result.recall_at(0)


# ----------------------------------------------------------- faults of other evaluation code


def test_market_ignores_the_same_camera_and_junk_instead_of_counting_them():
    # Junk that counts as wrong halves the average precision; the twin image is no match.
    query, gallery = torch.eye(3)[:1], torch.tensor([[1.0, 0, 0], [1, 0.1, 0], [1, 0.2, 0.5]])
    cameras, junk = [1, 2, 2], torch.tensor([False, True, False])
    result = F.retrieval(query, gallery, [7], [7, -1, 7], [1], cameras, junk)
    assert float(result.mean_average_precision) == 1
    assert result.per_query.matches.tolist() == [1]
    counted = F.retrieval(query, gallery, [7], [7, -1, 7], [1], cameras)
    assert float(counted.mean_average_precision) == 0.5


def test_the_matlab_form_is_lower_than_the_step_form():
    # fast-reid #18: 0.5 to 1 point on Market between codes that differ in this.
    data = market()
    step, trapezoid = (
        F.retrieval(**data, ap=ap).mean_average_precision for ap in ("step", "trapezoid")
    )
    assert step - trapezoid > 0.005


def test_queries_without_a_match_are_counted_not_scored_as_zero():
    query, gallery = torch.eye(3), torch.eye(3)[:2]
    result = F.retrieval(query, gallery, ["a", "b", "c"], ["a", "b"])
    assert float(result.mean_average_precision) == float(result.recall_at(1)) == 1
    assert (result.queries, result.queries_without_match) == (3, 1)
    # A global ranking has no way to leave them out: its answer is wrong.
    assert float(result.gap) == 1
    worse = F.retrieval(query[[0, 2]], torch.tensor([[1.0, 0.5, 0], [0, 0, 1]]), [1, 2], [1, 3])
    assert float(worse.gap) == 0.5


# -------------------------------------------------------------------------------- re-ranking


def plain_k_reciprocal(query, gallery, k1, k2, weight):
    """Dense re-ranking, item by item."""
    items = torch.nn.functional.normalize(torch.cat([query, gallery])).numpy()
    distance = ((items[:, None] - items[None]) ** 2).sum(-1)
    distance = distance / distance.max(1, keepdims=True)
    rank = distance.argsort(1, kind="stable")
    size = len(items)

    def neighbours(i, k):
        return {j for j in rank[i, : k + 1] if i in rank[j, : k + 1]}

    v = np.zeros((size, size))
    for i in range(size):
        own = neighbours(i, k1)
        expanded = set(own)
        for j in own:
            theirs = neighbours(j, round(k1 / 2))
            if len(theirs & own) > 2 / 3 * len(theirs):
                expanded |= theirs
        for j in expanded:
            v[i, j] = np.exp(-distance[i, j])
        v[i] /= v[i].sum()
    v = np.stack([v[rank[i, :k2]].mean(0) for i in range(size)])
    count = len(query)
    jaccard = [
        [
            1 - np.minimum(v[i], v[j]).sum() / np.maximum(v[i], v[j]).sum()
            for j in range(count, size)
        ]
        for i in range(count)
    ]
    return -((1 - weight) * np.array(jaccard) + weight * distance[:count, count:])


@pytest.mark.parametrize(("k1", "k2", "weight"), [(20, 6, 0.3), (5, 1, 0.0), (7, 3, 0.8)])
def test_k_reciprocal_is_the_dense_form(k1, k2, weight):
    data = market()
    query, gallery = data["query"][:15], data["gallery"][:70]
    found = F.k_reciprocal(query, gallery, k1=k1, k2=k2, weight=weight)
    expected = plain_k_reciprocal(query, gallery, k1, k2, weight)
    assert_close(found.numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("gallery", "settings", "message"),
    [
        (torch.eye(4), {}, "one dimension and device, got 3 .* and 4"),
        (torch.eye(3), {"k1": 0}, "k1 and k2 of 1 or more .* got 0, 6 and 0.3"),
        (torch.eye(3), {"weight": 2}, "a weight from 0 to 1, got 20, 6 and 2"),
    ],
)
def test_k_reciprocal_says_what_is_wrong(gallery, settings, message):
    with pytest.raises(ValueError, match=message):
        F.k_reciprocal(torch.eye(3), gallery, **settings)


def test_retrieval_knows_k_reciprocal_by_name():
    data = market()
    found = F.retrieval(**data, similarity="k_reciprocal")
    table = F.k_reciprocal(data["query"], data["gallery"])
    assert_close(found.cmc, F.retrieval(**data, similarity=table).cmc)
    assert not torch.equal(found.cmc, F.retrieval(**data).cmc)


# ---------------------------------------------------------------------------------- intervals


def test_a_weight_counts_a_query_as_often():
    data = market()
    counts = integers(4, 40, 11)
    weighted = F.retrieval(**data).weighted(counts.double())
    rows = torch.arange(40).repeat_interleave(counts)
    several = {n: v[rows] if n.startswith("query") else v for n, v in data.items()}
    expected = F.scalars(F.retrieval(**several))
    for name, value in F.scalars(weighted).items():
        if name not in ("queries", "queries_without_match", "junk"):
            assert_close(value, expected[name], rtol=0, atol=1e-9, msg=name)
    assert_close(weighted.cmc, F.retrieval(**several).cmc)


def test_intervals_resample_identities_and_not_queries():
    # 20 identities, each with 50 equal queries: as many independent observations as identities.
    generator = torch.Generator().manual_seed(0)
    found = torch.arange(20) % 2 == 0
    gallery = torch.cat([torch.eye(20), torch.eye(20)[~found]])
    gallery_ids = [*range(20), *[99] * 10]
    query, ids = torch.eye(20).repeat_interleave(50, 0), torch.arange(20).repeat_interleave(50)
    result = F.retrieval(query, gallery, ids, gallery_ids)
    assert float(result.recall_at(1)) == 0.5
    interval = F.intervals(result, generator=generator)["precision_at_1"]
    # The share of 20 coins: a standard error of 0.11, not the 0.016 of 1000 queries.
    assert interval.value == 0.5
    assert 0.2 <= interval.low <= 0.35
    assert 0.65 <= interval.high <= 0.8
    some = F.intervals(result, lambda r: {"rank 5": r.recall_at(5)}, resamples=20)
    assert some["rank 5"] == (1.0, 1.0, 1.0, 0)


# -------------------------------------------------------------------------------------- classes


def test_the_class_gives_what_the_function_gives():
    data = market()
    expected = F.retrieval(**data, ap="trapezoid")
    metric = metrics.Retrieval(ap="trapezoid")
    for rows in (slice(0, 60), slice(60, 60), slice(60, None)):
        metric.update(
            data["gallery"][rows],
            data["gallery_ids"][rows],
            query=False,
            cameras=data["gallery_cameras"][rows],
            junk=data["gallery_junk"][rows],
        )
    metric.update(data["query"], data["query_ids"], query=True, cameras=data["query_cameras"])
    assert_close(metric.compute().per_query, expected.per_query, equal_nan=True)
    assert_close(metric.compute().gap, expected.gap)
    metric.reset()
    with (
        pytest.warns(UserWarning, match="before the ``update`` method"),
        pytest.raises(ValueError, match="Retrieval expects an update before compute"),
    ):
        metric.compute()


def test_the_class_searches_each_among_the_others():
    data = market()
    metric = metrics.Retrieval()
    names = [f"id {value}" for value in data["gallery_ids"].tolist()]
    metric.update(data["gallery"][:70], names[:70])
    metric.update(data["gallery"][70:], names[70:])
    expected = F.retrieval(data["gallery"], None, names, None)
    assert_close(metric.compute().cmc, expected.cmc)


def test_a_mask_says_which_rows_are_queries():
    data = market()
    metric = metrics.Retrieval()
    features = torch.cat([data["query"], data["gallery"]])
    ids = torch.cat([data["query_ids"], data["gallery_ids"]])
    metric.update(features, ids, query=torch.arange(190) < 40)
    expected = F.retrieval(data["query"], data["gallery"], data["query_ids"], data["gallery_ids"])
    assert_close(metric.compute().cmc, expected.cmc)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "k_reciprocal"])
def test_a_gpu_ranks_as_a_cpu_does(kind):
    data = market()
    moved = {name: value.cuda() for name, value in data.items()}
    found = F.retrieval(**moved, similarity=kind)
    expected = F.retrieval(**data, similarity=kind)
    for name, value in F.scalars(expected).items():
        assert_close(F.scalars(found)[name], value, rtol=0, atol=1e-9, msg=name)
    assert found.cmc.is_cuda
    assert "gap" in F.intervals(found, resamples=3)


# -------------------------------------------------------------------------------------- bad input


def test_one_camera_is_a_defined_result_with_a_warning():
    data = market()
    data["query_cameras"], data["gallery_cameras"] = [0] * 40, [0] * 150
    with pytest.warns(UserWarning, match="identity of a query and another camera; .* NaN"):
        result = F.retrieval(**data)
    assert result.queries_without_match == 40
    assert result.mean_average_precision.isnan()


def test_zero_features_are_counted_in_a_warning():
    data = market()
    data["query"][:2], data["gallery"][:3] = 0, 0
    with pytest.warns(UserWarning, match="2 of 40 queries and 3 of 150 gallery items are zero"):
        result = F.retrieval(**data)
    # Cosine 0 with everything: all wrong items are ahead.
    matches, first = result.per_query.matches[0], result.per_query.first_rank[0]
    valid = 150 - int(data["gallery_junk"].sum())
    same = data["gallery_ids"] == data["query_ids"][0]
    assert int(first) == (valid - int((same & ~data["gallery_junk"]).sum()) + 1) * bool(matches)


NAN = torch.full((2, 3), torch.nan)
EYE = torch.eye(3)


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "message"),
    [
        (
            (EYE, torch.eye(4), [1, 2, 3], [1] * 4),
            {},
            ValueError,
            "one dimension .* 3 on cpu and 4",
        ),
        ((EYE, EYE[:0], [1, 2, 3], []), {}, ValueError, r"with a row or more, got \(0, 3\)"),
        ((NAN, EYE, [1, 2], [1] * 3), {}, ValueError, "infinity in 2 of 2 rows of the query"),
        ((EYE, NAN, [1] * 3, [1] * 2), {}, ValueError, "infinity in 2 of 2 rows of the gallery"),
        ((EYE, EYE, [1, 2], [1] * 3), {}, ValueError, r"query_ids of shape \(3,\), got \(2,\)"),
        ((EYE, EYE, [1] * 3, ["1"] * 3), {}, TypeError, "strings and integers, which never match"),
        (
            (EYE, EYE, [1, "2", 3], [1] * 3),
            {},
            TypeError,
            "all integers or all strings, got int, str",
        ),
        ((EYE, EYE, [0.5] * 3, [1] * 3), {}, TypeError, "all integers or all strings, got float"),
        ((EYE, EYE, EYE[0], [1] * 3), {}, TypeError, "integers or strings, got torch.float32"),
        ((EYE, EYE, None, [1] * 3), {}, TypeError, "query_ids to be integers or strings, got None"),
        ((EYE, EYE, "abc", [1] * 3), {}, TypeError, "query_ids to be integers or strings, got str"),
        ((EYE.numpy(), EYE, [1] * 3, [1] * 3), {}, TypeError, "query features to be a tensor, got"),
        ((EYE.long(), EYE, [1] * 3, [1] * 3), {}, TypeError, "floating type, got torch.int64"),
        ((EYE, EYE, [1] * 3, None), {}, ValueError, "gallery_ids with a gallery, got none"),
        ((EYE, EYE, [1] * 3, [1] * 3), {"query_cameras": [1] * 3}, ValueError, "or of neither"),
        (
            (EYE, EYE, [1] * 3, [1] * 3),
            {"similarity": "cos"},
            ValueError,
            "'euclidean' or .* 'cos'",
        ),
        (
            (EYE, EYE, [1] * 3, [1] * 3),
            {"similarity": NAN},
            ValueError,
            r"shape \(3, 3\), got \(2, 3\)",
        ),
        ((EYE, EYE, [1] * 3, [1] * 3), {"ap": "mean"}, ValueError, "ap 'step' or 'trapezoid'"),
        (
            (EYE, EYE, [1] * 3, [1] * 3),
            {"gallery_junk": torch.ones(3).bool()},
            ValueError,
            "a gallery item that is not junk, got 3 junk items",
        ),
        (
            (EYE, EYE, [1] * 3, [1] * 3),
            {"gallery_junk": torch.tensor([0, 1, 2])},
            ValueError,
            "gallery_junk of 0 and 1, got 2",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(args, kwargs, kind, message):
    with pytest.raises(kind, match=message), warnings.catch_warnings():
        F.retrieval(*args, **kwargs)


@pytest.mark.parametrize(
    ("updates", "kind", "message"),
    [
        ([(["a"] * 3, {}), ([1] * 3, {})], TypeError, "of one kind, got strings and integers"),
        ([([1] * 3, {"cameras": [1] * 3}), ([1] * 3, {})], ValueError, "in all updates or in none"),
        ([([1] * 3, {"query": True})], ValueError, r"gallery features .* got \(0, 3\)"),
    ],
)
def test_updates_that_do_not_fit_are_refused(updates, kind, message):
    metric = metrics.Retrieval()
    for ids, kwargs in updates:
        metric.update(EYE, ids, **kwargs)
    with pytest.raises(kind, match=message):
        metric.compute()


def test_updates_of_two_dimensions_are_refused():
    # 2 rows of 2 and 2 rows of 4 are as many numbers as 4 rows of 3.
    metric = metrics.Retrieval()
    metric.update(torch.ones(2, 2), [1, 2])
    metric.update(torch.ones(2, 4), [1, 2])
    with pytest.raises(ValueError, match=r"features of one dimension, got \[2, 4\]"):
        metric.compute()
