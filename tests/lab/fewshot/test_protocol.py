"""Few-shot: every method is what it says, for all episodes at once, and so are its intervals."""

import math
from dataclasses import replace

import pytest
import torch
from made_features import examples, made
from torch.testing import assert_close

from tammes.lab.fewshot import protocol
from tammes.lab.fewshot.episodes import draw
from tammes.lab.fewshot.protocol import (
    Interval,
    LabelledFeatures,
    accuracies,
    evaluate,
    interval,
    methods,
)

# ----------------------------------------------------------------------------- nearest centroid


def by_hand(features, episodes):
    """Accuracy of each episode with a distance at a time."""
    found = []
    for support, queries in zip(episodes.support, episodes.queries, strict=True):
        centroids = torch.stack([features[places].mean(0) for places in support])
        right = [
            int((features[place] - centroids).square().sum(1).argmin()) == own
            for own, places in enumerate(queries)
            for place in places
        ]
        found.append(sum(right) / len(right))
    return torch.tensor(found, dtype=torch.double)


@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("centroid", lambda features: features),
        ("l2", lambda features: torch.nn.functional.normalize(features, dim=1)),
        (
            "cl2n",
            lambda features: torch.nn.functional.normalize(features - features[::3].mean(0), dim=1),
        ),
    ],
)
def test_the_nearest_centroid_is_the_nearest(name, change, shot):
    features, labels = made(spread=2.0)
    episodes = draw(labels, way=4, shot=shot, queries=6, episodes=40)
    expected = by_hand(change(features), episodes)
    (method,) = methods(name).values()
    found = accuracies(features, episodes, method, base_mean=features[::3].mean(0))
    assert_close(found, expected, atol=1e-12, rtol=0)
    assert 0.3 < float(expected.mean()) < 0.95


@pytest.mark.parametrize("shot", [1, 5])
def test_the_centred_cosine_is_with_the_mean_of_centred_features(shot):
    features, labels = made(spread=2.0)
    mean = features[::3].mean(0)
    episodes = draw(labels, way=4, shot=shot, queries=6, episodes=40)
    expected = []
    for support, queries in zip(episodes.support, episodes.queries, strict=True):
        centroids = torch.stack([(features[places] - mean).mean(0) for places in support])
        cosines = torch.cosine_similarity(
            (features[queries] - mean)[:, :, None], centroids[None, None], dim=3
        )
        own = torch.arange(4)[:, None]
        expected.append(float((cosines.argmax(2) == own).double().mean()))
    (method,) = methods("centred_cosine").values()
    found = accuracies(features, episodes, method, base_mean=mean)
    assert_close(found, torch.tensor(expected, dtype=torch.double), atol=1e-12, rtol=0)
    assert protocol.needs_base_mean({"": method})
    same = found.equal(accuracies(features, episodes, protocol.cl2n(), base_mean=mean))
    # One support image is its own mean: only with several do lengths matter.
    assert same == (shot == 1)


def test_the_complement_is_what_is_outside_the_span_of_the_prototypes():
    features, labels = made(spread=2.0)
    prototypes, _ = made(classes=12, each=1, seed=1)
    episodes = draw(labels, way=4, shot=2, queries=6, episodes=40)
    basis = torch.linalg.qr(prototypes.T).Q
    left = features - features @ basis @ basis.T
    expected = by_hand(torch.nn.functional.normalize(left, dim=1), episodes)
    found = accuracies(features, episodes, protocol.complement(), prototypes=prototypes)
    assert_close(found, expected, atol=1e-12, rtol=0)
    assert not found.equal(accuracies(features, episodes, protocol.l2()))


@pytest.mark.parametrize(
    "name", ["centroid", "l2", "cl2n", "centred_cosine", "complement", "cosine(passes=50)"]
)
@pytest.mark.parametrize("factor", [2.0**100, 2.0**-100])
def test_a_common_factor_of_all_features_changes_nothing(name, factor):
    # A power of two, so that not even rounding differs; their squares are beyond single precision.
    features, labels = made(spread=2.0, dtype=torch.float)
    episodes = draw(labels, way=4, shot=2, queries=6, episodes=40)
    (method,) = methods(name).values()

    def found(features):
        return accuracies(
            features, episodes, method, base_mean=features[::3].mean(0), prototypes=features[:5]
        )

    expected = found(features)
    assert 0.3 < float(expected.mean()) < 0.95
    assert found(factor * features).equal(expected)


def test_features_far_from_the_origin_lose_no_digits():
    features, labels = made(spread=2.0)
    episodes = draw(labels, way=5, shot=5, queries=10, episodes=200)
    expected = accuracies(features, episodes, protocol.centroid())
    found = accuracies((features + 50).float(), episodes, protocol.centroid())
    assert abs(float((found - expected).mean())) < 1e-3


def test_the_size_of_a_block_changes_nothing(monkeypatch):
    features, labels = made()
    episodes = draw(labels, way=3, shot=2, queries=4, episodes=30)
    for method in methods("l2, cosine(passes=3)").values():
        whole = accuracies(features, episodes, method)
        with monkeypatch.context() as patch:
            patch.setattr(protocol, "_BLOCK", {"cpu": 1, "cuda": 1})
            assert accuracies(features, episodes, method).equal(whole)


def test_random_features_are_recognised_by_chance():
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(200, 16, generator=generator), torch.arange(10).repeat(20)
    found = evaluate(
        LabelledFeatures(features, labels, tuple("abcdefghij")),
        shots=[1],
        queries=15,
        episodes=2000,
        method="centroid, l2, cosine(passes=2), linear(passes=2)",
    )
    for row in found:
        assert row.accuracy.mean == pytest.approx(0.2, abs=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["centroid", "l2", "cl2n", "complement", "linear", "cosine"])
def test_a_gpu_finds_what_the_cpu_does(method):
    features, labels = made(size=640, spread=4.0, dtype=torch.float)
    episodes = draw(labels, way=5, shot=5, queries=15, episodes=300)
    (chosen,) = methods(method).values()
    # Not examples themselves: what is left of those is rounding.
    prototypes = torch.randn(5, 640, generator=torch.Generator().manual_seed(0))
    beside = {"base_mean": features.mean(0), "prototypes": prototypes}
    here = accuracies(features, episodes, chosen, **beside)
    there = accuracies(features.cuda(), episodes, chosen, **beside)
    assert (here - there).abs().mean() < 1e-3


# ------------------------------------------------------------------------- many models, intervals


def test_the_interval_is_that_of_the_papers():
    values = torch.tensor([0.2, 0.4, 0.9, 0.5])
    found = interval(values)
    assert found.mean == pytest.approx(0.5)
    assert found.half == pytest.approx(1.96 * float(values.double().std()) / 2)
    assert interval(values[:1]).half == math.inf
    assert not interval(values[:1]).clear


def test_one_episode_has_no_interval():
    assert interval(torch.tensor([0.25])).shown() == "25.00"
    assert interval(torch.tensor([-0.25])).shown(sign=True) == "-25.00"
    (row,) = evaluate(examples(), shots=[1], episodes=1, method="l2")
    assert row.as_dict()["half"] is None


@pytest.mark.parametrize(
    ("mean", "clear"), [(0.03, True), (0.01, False), (-0.01, False), (-0.03, True)]
)
def test_a_difference_is_clear_where_its_interval_leaves_out_zero(mean, clear):
    assert Interval(mean, 0.02, 600).clear is clear


def test_the_seed_is_that_of_the_episodes():
    one = examples(spread=2.0)
    (zero,) = evaluate(one, shots=[1], queries=6, episodes=40, method="l2")
    (five,) = evaluate(one, shots=[1], queries=6, episodes=40, method="l2", seed=5)
    drawn = draw(one.labels, way=5, shot=1, queries=6, episodes=40, seed=5)
    assert five.accuracies.equal(accuracies(one.features, drawn, protocol.l2()))
    assert not five.accuracies.equal(zero.accuracies)


def test_one_number_of_shots_needs_no_list():
    one = examples()
    (row,) = evaluate(one, shots=2, episodes=20, method="l2")
    (same,) = evaluate(one, shots=[2], episodes=20, method="l2")
    assert row.shot == 2
    assert row.accuracies.equal(same.accuracies)


def test_two_models_are_compared_on_the_same_episodes():
    one, two = examples(spread=2.0), examples(spread=2.4)
    together = evaluate(one, against=two, shots=[1, 5], episodes=300, method="l2, cosine(passes=5)")
    alone = evaluate(two, shots=[1, 5], episodes=300, method="l2, cosine(passes=5)")
    assert [(row.shot, row.method) for row in together] == [
        (1, "l2"),
        (1, "cosine(passes=5)"),
        (5, "l2"),
        (5, "cosine(passes=5)"),
    ]
    for row, other in zip(together, alone, strict=True):
        assert row.against.equal(other.accuracies)
        assert row.difference.mean == pytest.approx(row.accuracy.mean - other.accuracy.mean)
        apart = math.hypot(row.accuracy.half, other.accuracy.half)
        assert row.difference.half < apart
    assert together[2].difference.clear


@pytest.mark.parametrize("method", ["cl2n", "complement"])
def test_each_of_two_models_has_a_mean_and_prototypes_of_its_own(method):
    one, two = examples(spread=2.0), examples(spread=2.4)
    two = replace(two, base_mean=-two.base_mean, prototypes=two.features[20:32])
    (row,) = evaluate(one, against=two, shots=[1], episodes=100, method=method)
    for found, model in ((row.accuracies, one), (row.against, two)):
        (alone,) = evaluate(model, shots=[1], episodes=100, method=method)
        assert found.equal(alone.accuracies)
    swapped = replace(two, base_mean=one.base_mean, prototypes=one.prototypes)
    (other,) = evaluate(swapped, shots=[1], episodes=100, method=method)
    assert not row.against.equal(other.accuracies)


def test_a_worse_model_is_clearly_worse():
    one, two = examples(spread=2.4), examples(spread=2.0)
    (row,) = evaluate(one, against=two, shots=[5], episodes=300, method="l2")
    assert row.difference.mean < 0
    assert row.difference.clear
    plain = row.as_dict()
    assert plain["accuracy"] == row.accuracy.mean
    assert plain["against"]["accuracy"] == interval(row.against).mean
    assert plain["difference"] == {
        "mean": row.difference.mean,
        "half": row.difference.half,
        "episodes": 300,
        "clear": True,
    }


def test_a_model_is_no_better_than_itself():
    one = examples()
    (row,) = evaluate(one, against=one, shots=[1], episodes=50, method="l2")
    assert row.difference.mean == row.difference.half == 0
    assert not row.difference.clear
