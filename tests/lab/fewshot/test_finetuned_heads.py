"""Heads fine-tuned on the support: those of all episodes at once are those trained one by one."""

import math

import pytest
import torch
from made_features import made
from torch.testing import assert_close

import tammes
from tammes.lab.fewshot import finetuned_heads
from tammes.lab.fewshot.episodes import draw
from tammes.lab.fewshot.finetuned_heads import CosineTuning, LinearTuning
from tammes.lab.fewshot.protocol import accuracies, methods


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
        {"momentum": 0.0},
    ],
    ids=["the paper's", "negative margin", "one batch", "no momentum"],
)
def test_all_heads_at_once_are_those_trained_one_by_one(kind, size, settings):
    features, labels = made(size=size)
    # Short enough that steps of this size settle: where they do not, every rounding grows.
    features = features / 10
    method = kind(**{"passes": 8, **settings})
    episodes = draw(labels, way=5, shot=3, queries=2, episodes=4, seed=3)
    numbers = torch.arange(4)
    found = finetuned_heads.finetune_heads(features, episodes, numbers, method)
    start = finetuned_heads.initial_heads(3, numbers, 5, size, torch.double)
    order = finetuned_heads.orders(3, numbers, 8, 15)
    own = torch.arange(5).repeat_interleave(3)
    for number in range(4):
        support = features[episodes.support[number]].flatten(0, 1)
        expected = trained_alone(support, own, start[number], order[number], method)
        assert_close(found[number], expected, atol=1e-12, rtol=1e-10)
        assert (found[number] - start[number]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [LinearTuning, CosineTuning])
def test_single_precision_is_as_good_as_torchs_own(kind):
    features, labels = made(size=640, dtype=torch.float)
    features = features / 10
    method = kind()
    episodes = draw(labels, way=5, shot=5, queries=15, episodes=2)
    numbers = torch.arange(2)
    found = finetuned_heads.finetune_heads(features, episodes, numbers, method)
    exact = finetuned_heads.finetune_heads(features.double(), episodes, numbers, method)
    start = finetuned_heads.initial_heads(0, numbers, 5, 640)
    order = finetuned_heads.orders(0, numbers, 100, 25)
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
    heads = finetuned_heads.finetune_heads(features, episodes, torch.arange(10), method)
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
    heads = finetuned_heads.finetune_heads(
        features, episodes, torch.arange(20), CosineTuning(passes=5)
    )
    assert heads.isfinite().all()


def test_each_pass_goes_through_the_whole_support_in_an_order_of_its_own():
    order = finetuned_heads.orders(0, torch.arange(50), 10, 7)
    assert order.sort(2).values.equal(torch.arange(7).expand(50, 10, 7))
    assert len(order.flatten(0, 1).unique(dim=0)) > 400


def test_heads_start_as_a_linear_layer_does():
    heads = finetuned_heads.initial_heads(0, torch.arange(200), 5, 64)
    assert heads.abs().max() <= 1 / 8
    assert float(heads.mean()) == pytest.approx(0, abs=2e-3)
    assert float(heads.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.01)
    again = finetuned_heads.initial_heads(0, torch.arange(100, 103), 5, 64)
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
