"""Few-shot: every method is what it says, for all episodes at once, and margins are analysed."""

import math

import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes import geometry
from tammes.lab.protocols import fewshot, fewshot_heads, margin_analysis
from tammes.lab.protocols.episodes import draw
from tammes.lab.protocols.fewshot import Examples, accuracies, evaluate, interval, methods
from tammes.lab.protocols.fewshot_heads import CosineTuning, LinearTuning
from tammes.metrics.functional import discriminability


def made(classes=8, each=30, size=24, spread=1.0, seed=0, dtype=torch.double):
    """Features around a point for each class, all of one sign as after a ReLU, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat(each)
    points = torch.randn(classes, size, generator=generator, dtype=torch.double)
    noise = torch.randn(len(labels), size, generator=generator, dtype=torch.double)
    return (1 + points[labels] + spread * noise).relu().to(dtype), labels


def examples(**settings):
    features, labels = made(**settings)
    return Examples(features, labels, tuple(map(str, labels.unique().tolist())), features.mean(0))


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


def test_features_far_from_the_origin_lose_no_digits():
    features, labels = made(spread=2.0)
    episodes = draw(labels, way=5, shot=5, queries=10, episodes=200)
    expected = accuracies(features, episodes, fewshot.centroid())
    found = accuracies((features + 50).float(), episodes, fewshot.centroid())
    assert abs(float((found - expected).mean())) < 1e-3


def test_the_size_of_a_block_changes_nothing(monkeypatch):
    features, labels = made()
    episodes = draw(labels, way=3, shot=2, queries=4, episodes=30)
    for method in methods("l2, cosine(passes=3)").values():
        whole = accuracies(features, episodes, method)
        with monkeypatch.context() as patch:
            patch.setattr(fewshot, "_BLOCK", {"cpu": 1, "cuda": 1})
            assert accuracies(features, episodes, method).equal(whole)


def test_random_features_are_recognised_by_chance():
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(200, 16, generator=generator), torch.arange(10).repeat(20)
    found = evaluate(
        Examples(features, labels, tuple("abcdefghij")),
        shots=[1],
        queries=15,
        episodes=2000,
        method="centroid, l2, cosine(passes=2), linear(passes=2)",
    )
    for row in found:
        assert row.accuracy.mean == pytest.approx(0.2, abs=0.02)


# -------------------------------------------------------------------------------- tuned heads


def trained_alone(features, labels, start, order, settings):
    """What torch's SGD makes of one of the library's heads."""
    way, size = start.shape
    if settings.cosine:
        head = tammes.CosineHead(size, way, scale=settings.scale)
        loss = tammes.cosface(margin=settings.margin)
    else:
        head = tammes.LinearHead(size, way, bias=False, scale=settings.scale)
        loss = tammes.softmax(margin=settings.margin)
    criterion = tammes.Criterion(head.to(features), loss)
    with torch.no_grad():
        criterion.head.weight.copy_(start)
    optimizer = torch.optim.SGD(
        criterion.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        dampening=settings.dampening,
        weight_decay=settings.weight_decay,
    )
    for places in order:
        for some in places.split(settings.batch):
            optimizer.zero_grad()
            criterion(features[some], labels[some]).backward()
            optimizer.step()
    return criterion.head.weight.detach()


@pytest.mark.parametrize("kind", [LinearTuning, CosineTuning])
@pytest.mark.parametrize("size", [8, 64], ids=["all dimensions", "few of many dimensions"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scale": 12.0, "margin": -0.2, "lr": 0.1, "momentum": 0.5, "dampening": 0.0},
        {"margin": 0.3, "batch": 32, "weight_decay": 0.1},
    ],
    ids=["the paper's", "negative margin", "one batch"],
)
def test_all_heads_at_once_are_those_trained_one_by_one(kind, size, settings):
    features, labels = made(size=size)
    method = kind(**{"passes": 8, **settings})
    episodes = draw(labels, way=5, shot=3, queries=2, episodes=4, seed=3)
    numbers = torch.arange(4)
    found = fewshot_heads.heads_of(features, episodes, numbers, method)
    start = fewshot_heads.initial_heads(3, numbers, 5, size, torch.double)
    order = fewshot_heads.orders(3, numbers, 8, 15)
    own = torch.arange(5).repeat_interleave(3)
    for number in range(4):
        support = features[episodes.support[number]].flatten(0, 1)
        expected = trained_alone(support, own, start[number], order[number], method)
        assert_close(found[number], expected, atol=1e-12, rtol=1e-10)
        assert (found[number] - start[number]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [LinearTuning, CosineTuning])
def test_single_precision_is_as_good_as_torchs_own(kind):
    features, labels = made(size=640, dtype=torch.float)
    # Short enough that steps of this size settle: where they do not, every rounding grows.
    features = features / 10
    method = kind()
    episodes = draw(labels, way=5, shot=5, queries=15, episodes=2)
    numbers = torch.arange(2)
    found = fewshot_heads.heads_of(features, episodes, numbers, method)
    exact = fewshot_heads.heads_of(features.double(), episodes, numbers, method)
    start = fewshot_heads.initial_heads(0, numbers, 5, 640)
    order = fewshot_heads.orders(0, numbers, 100, 25)
    own = torch.arange(5).repeat_interleave(5)
    for number in range(2):
        support = features[episodes.support[number]].flatten(0, 1)
        alone = trained_alone(support, own, start[number], order[number], method)
        theirs = (alone - exact[number]).abs().max()
        assert (found[number] - exact[number]).abs().max() <= 2 * theirs + 1e-6


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_queries_are_judged_by_the_scores_of_the_tuned_head(name):
    features, labels = made(spread=2.0)
    episodes = draw(labels, way=4, shot=2, queries=6, episodes=10)
    (method,) = methods(f"{name}(passes=10)").values()
    heads = fewshot_heads.heads_of(features, episodes, torch.arange(10), method)
    expected = []
    for weight, places in zip(heads, episodes.queries, strict=True):
        kind = tammes.CosineHead if name == "cosine" else tammes.LinearHead
        head = kind(24, 4, **({} if name == "cosine" else {"bias": False})).double()
        with torch.no_grad():
            head.weight.copy_(weight)
        best = head.logits(features[places.flatten()]).argmax(1).view(4, 6)
        expected.append(float((best == torch.arange(4)[:, None]).double().mean()))
    found = accuracies(features, episodes, method)
    assert_close(found, torch.tensor(expected, dtype=torch.double), atol=1e-12, rtol=0)


def test_a_feature_without_a_direction_breaks_no_head():
    features, labels = made()
    features[::7] = 0
    episodes = draw(labels, way=4, shot=2, queries=6, episodes=20)
    for method in methods("l2, linear(passes=5), cosine(passes=5)").values():
        assert accuracies(features, episodes, method).isfinite().all()
    heads = fewshot_heads.heads_of(features, episodes, torch.arange(20), CosineTuning(passes=5))
    assert heads.isfinite().all()


def test_each_pass_goes_through_the_whole_support_in_an_order_of_its_own():
    order = fewshot_heads.orders(0, torch.arange(50), 10, 7)
    assert order.sort(2).values.equal(torch.arange(7).expand(50, 10, 7))
    assert len(order.flatten(0, 1).unique(dim=0)) > 400


def test_heads_start_as_a_linear_layer_does():
    heads = fewshot_heads.initial_heads(0, torch.arange(200), 5, 64)
    assert heads.abs().max() <= 1 / 8
    assert float(heads.mean()) == pytest.approx(0, abs=2e-3)
    assert float(heads.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.01)
    again = fewshot_heads.initial_heads(0, torch.arange(100, 103), 5, 64)
    assert again.equal(heads[100:103])


def test_the_number_of_threads_is_left_as_it_was():
    before = torch.get_num_threads()
    features, labels = made()
    torch.set_num_threads(2)
    try:
        episodes = draw(labels, way=3, shot=1, queries=2, episodes=5)
        accuracies(features, episodes, CosineTuning(passes=1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["centroid", "l2", "cl2n", "linear", "cosine"])
def test_a_gpu_finds_what_the_cpu_does(method):
    features, labels = made(size=640, spread=4.0, dtype=torch.float)
    episodes = draw(labels, way=5, shot=5, queries=15, episodes=300)
    (chosen,) = methods(method).values()
    mean = features.mean(0)
    here = accuracies(features, episodes, chosen, base_mean=mean)
    there = accuracies(features.cuda(), episodes, chosen, base_mean=mean)
    assert (here - there).abs().mean() < 1e-3


# ------------------------------------------------------------------------- many models, intervals


def test_the_interval_is_that_of_the_papers():
    values = torch.tensor([0.2, 0.4, 0.9, 0.5])
    found = interval(values)
    assert found.mean == pytest.approx(0.5)
    assert found.half == pytest.approx(1.96 * float(values.double().std()) / 2)
    assert interval(values[:1]).half == math.inf
    assert not interval(values[:1]).clear


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


def test_a_model_is_no_better_than_itself():
    one = examples()
    (row,) = evaluate(one, against=one, shots=[1], episodes=50, method="l2")
    assert row.difference.mean == row.difference.half == 0
    assert not row.difference.clear


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nearest", "there is no method 'nearest'"),
        ("cosin", "did you mean cosine?"),
        ("l2(scale=3)", "l2"),
        ("cosine(scal=3)", "did you mean scale?"),
        ("cosine(scale=0)", "method: cosine expects scale above 0, got 0"),
        ("linear(passes=0)", "method: linear expects passes to be a whole number above 0, got 0"),
        ("linear(lr='a')", "method: linear expects lr to be a number, got 'a'"),
    ],
)
def test_methods_that_cannot_be_are_refused(text, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        methods(text)
    assert message in str(refused.value)


def test_centring_without_a_mean_is_refused():
    features, labels = made()
    episodes = draw(labels, way=3, shot=1, queries=2, episodes=5)
    with pytest.raises(ValueError, match="cl2n expects the mean of the base features, got none"):
        accuracies(features, episodes, fewshot.cl2n())
    with pytest.raises(ValueError, match=r"cl2n expects a mean of 24 numbers, got \(3,\)"):
        accuracies(features, episodes, fewshot.cl2n(), base_mean=torch.zeros(3))


def test_features_that_are_not_finite_are_refused():
    features, labels = made()
    features[3, 0] = math.nan
    episodes = draw(labels, way=3, shot=1, queries=2, episodes=5)
    with pytest.raises(ValueError, match="finite features, got NaN or infinity"):
        accuracies(features, episodes, fewshot.l2())


def test_models_with_other_images_are_not_compared():
    one, two = examples(), examples(each=29)
    with pytest.raises(ValueError, match="features of the same images in the same order"):
        evaluate(one, against=two, episodes=5)


# -------------------------------------------------------------------------------- margin analysis


def pair(seed, spread):
    """Base and novel features of a made-up model."""
    base = made(classes=10, each=20, spread=spread, seed=seed)
    novel = made(classes=6, each=20, spread=1.3 * spread, seed=seed + 1)
    return base, novel


def test_the_analysis_is_made_of_the_measures_of_the_library():
    base, novel = pair(0, 1.0)
    found = margin_analysis.analyse(base, novel)
    on_base = discriminability(*base, distinct=True).base
    on_novel = discriminability(*novel, distinct=True).base
    assert found.base_ratio == pytest.approx(float(on_base.inter / on_base.intra))
    assert found.novel_ratio == pytest.approx(float(on_novel.inter / on_novel.intra))
    assert found.psi == pytest.approx(found.novel_inter / found.base_inter)
    excess = 1 - found.base_intra / found.base_inter
    expected = found.psi / (1 - found.same_base_class * excess)
    assert found.predicted_ratio == pytest.approx(expected)
    assert 0 < found.same_base_class < 1


def test_images_are_taken_for_the_class_the_head_says_or_the_nearest_mean():
    base, novel = pair(0, 1.0)
    nearest = margin_analysis.nearest_base(*base, novel[0])
    unit = torch.nn.functional.normalize(base[0], dim=1)
    means = torch.stack([unit[base[1] == c].mean(0) for c in range(10)])
    cosines = torch.nn.functional.cosine_similarity(novel[0][:, None], means[None], dim=2)
    assert nearest.equal(cosines.argmax(1))
    everywhere = torch.zeros(len(novel[1]), dtype=torch.long)
    assert margin_analysis.analyse(base, novel, everywhere).same_base_class == 1
    expected = geometry.same_class_probability(nearest, novel[1])
    assert margin_analysis.analyse(base, novel).same_base_class == pytest.approx(float(expected))


def test_the_verdict_is_the_inequality_against_what_is_so():
    outcomes = set()
    for seed in range(0, 60, 2):
        first = margin_analysis.analyse(*pair(seed, 1.0))
        second = margin_analysis.analyse(*pair(seed + 100, 1.1))
        found = margin_analysis.judge(first, second)
        assert found.predicted == (found.left < found.right)
        assert found.so == (first.novel_ratio > second.novel_ratio)
        assert found.agrees == (found.predicted == found.so)
        assert ("it is so" in found.sentence) == found.agrees
        outcomes.add(found.predicted)
        # With one P for both, (12) is (11) for each of the two.
        mean = (first.same_base_class + second.same_base_class) / 2
        ratios = [geometry.novel_ratio(mean, each.result()) for each in (first, second)]
        assert found.predicted == (ratios[1] < ratios[0])
    assert outcomes == {True, False}


def test_where_novel_classes_are_mixtures_of_base_classes_the_inequality_is_right():
    outcomes = set()
    for seed in range(12):
        models = []
        for spread in (0.6 + 0.1 * (seed % 8), 1.0):
            features, labels = made(classes=6, each=40, spread=spread, seed=seed)
            # Every novel class is all base classes together, turned: distances stay as they are.
            turned = torch.cat([features.roll(3 * k, 1) for k in range(3)])
            novel = turned, torch.arange(3).repeat_interleave(len(labels))
            models.append(margin_analysis.analyse((features, labels), novel, labels.repeat(3)))
        for model in models:
            assert model.same_base_class == pytest.approx(39 / 239)
            assert model.predicted_ratio == pytest.approx(model.novel_ratio, rel=1e-9)
        verdict = margin_analysis.judge(*models)
        assert verdict.agrees
        outcomes.add(verdict.so)
    assert outcomes == {True, False}
