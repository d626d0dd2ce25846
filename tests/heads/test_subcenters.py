"""Usage of the centres of a class, and heads without those that serve few examples."""

import pytest
import torch
from rank_pool import everywhere
from torch.testing import assert_close

import tammes
from tammes.heads import drop_subcenters
from tammes.metrics.functional import subcenter_usage
from tammes.pooling import Pooled

SIZE, CLASSES, CENTERS = 5, 7, 3


def examples(count=60):
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(count, SIZE, generator=generator)
    return features, torch.randint(CLASSES, (count,), generator=generator)


@pytest.fixture
def head():
    torch.manual_seed(1)
    return tammes.CosineHead(SIZE, CLASSES, subcenters=CENTERS, scale=8.0)


def test_an_example_uses_the_nearest_centre_of_its_class(head):
    features, labels = examples()
    usage = subcenter_usage(features, labels, head.prototypes)
    counts = torch.zeros(CLASSES, CENTERS, dtype=torch.long)
    for feature, label, center in zip(features, labels, usage.center, strict=True):
        cosines = torch.cosine_similarity(feature, head.weight[label], dim=1)
        assert center == cosines.argmax()
        counts[label, center] += 1
    assert torch.equal(usage.counts, counts)
    assert torch.equal(usage.counts.amax(1), counts[torch.arange(CLASSES), usage.dominant])
    own = head.weight[labels, usage.dominant[labels]].detach().double()
    angle = torch.cosine_similarity(features.double(), own).acos()
    assert_close(usage.angle, torch.rad2deg(angle))
    assert_close(
        usage.share.item(), (usage.center == usage.dominant[labels]).double().mean().item()
    )


def test_counts_add_up_over_batches(head):
    features, labels = examples()
    whole = subcenter_usage(features, labels, head.prototypes).counts
    parts = [
        subcenter_usage(x, y, head.prototypes).counts
        for x, y in zip(features.split(17), labels.split(17), strict=True)
    ]
    assert torch.equal(sum(parts), whole)


def test_wrong_labels_are_far_from_the_dominant_centre():
    # Nine of ten examples of class 0 at one centre, the tenth at right angles.
    prototypes = torch.eye(4).view(2, 2, 4)
    features = torch.eye(4)[[0] * 9 + [1] + [2] * 5]
    labels = torch.tensor([0] * 10 + [1] * 5)
    usage = subcenter_usage(features, labels, prototypes)
    assert (usage.angle > 75).tolist() == [False] * 9 + [True] + [False] * 5
    assert_close(usage.share.item(), 14 / 15)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_centres_that_serve_most_examples_stay_in_order(head, keep):
    features, labels = examples()
    counts = subcenter_usage(features, labels, head.prototypes).counts
    kept = drop_subcenters(head, counts, keep=keep)
    assert kept.similarity.centers == keep
    weight = kept.weight.view(CLASSES, keep, SIZE)
    for c in range(CLASSES):
        order = sorted(range(CENTERS), key=lambda k: (-counts[c, k].item(), k))[:keep]
        assert torch.equal(weight[c], head.weight[c, sorted(order)])
    loss = tammes.Criterion(kept, tammes.arcface())(features, labels)
    assert loss.isfinite()
    if keep == 1:
        plain = tammes.CosineHead(SIZE, CLASSES, scale=8.0)
        plain.load_state_dict(kept.state_dict())
        assert torch.equal(plain.logits(features), kept.logits(features))
    assert head.weight.shape == (CLASSES, CENTERS, SIZE)


def on_ranks(group, keep):
    torch.manual_seed(3)
    whole = tammes.CosineHead(SIZE, CLASSES, subcenters=CENTERS, scale=8.0)
    head = tammes.ShardedHead(
        tammes.CosineHead, SIZE, CLASSES, group=group, subcenters=CENTERS, scale=8.0
    )
    head.load_state_dict(whole.state_dict())
    counts = torch.arange(CLASSES * CENTERS).view(CLASSES, CENTERS) * 5 % 7
    kept, expected = (drop_subcenters(each, counts, keep=keep) for each in (head, whole))
    assert torch.equal(kept.weight, expected.weight[head.start : head.stop])
    features, _ = examples()
    assert_close(kept.logits(features), expected.logits(features))
    kept.add_classes(2)
    assert kept.weight.ndim == expected.weight.ndim


@pytest.mark.parametrize("keep", [1, 2])
def test_every_rank_drops_centres_of_its_classes(keep):
    everywhere(3, on_ranks, keep)


def test_soft_pooling_keeps_its_temperature():
    head = tammes.CosineHead(4, 3, subcenters=3, pooling="soft", temperature=0.2)
    kept = drop_subcenters(head, torch.ones(3, 3), keep=2)
    assert kept.similarity == Pooled(head.similarity.inner, 2, 0.2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda head: drop_subcenters(tammes.CosineHead(4, 3), torch.ones(3, 1)),
            "expects a head with several prototypes per class, .* got CosineHead",
        ),
        (
            lambda head: drop_subcenters(head, torch.ones(3, 3)),
            r"expects counts of shape \(7, 3\), got \(3, 3\)",
        ),
        (
            lambda head: drop_subcenters(head, torch.ones(7, 3), keep=4),
            "expects keep from 1 to 3, got 4",
        ),
        (
            lambda head: subcenter_usage(torch.ones(2, 4), torch.tensor([0, 1]), head.prototypes),
            r"subcenter_usage expects features of shape \(N, 5\), got \(2, 4\)",
        ),
        (
            lambda head: subcenter_usage(torch.ones(1, 5), torch.tensor([7]), head.prototypes),
            r"subcenter_usage expects labels .* got 7",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(head, call, message):
    with pytest.raises(ValueError, match=message):
        call(head)


def test_classes_that_a_direct_sum_has_no_room_for_are_refused_before_anything_changes():
    loss = tammes.direct_sum(tammes.arcface(), tammes.nca())
    criterion = tammes.Criterion(tammes.CosineHead(16, 3, subcenters=4), loss)
    with pytest.raises(ValueError, match="direct_sum"):
        criterion.add_classes(2)
    assert criterion.head.num_classes == criterion.settings.num_classes == 3
