"""Fewer examples, uneven classes, wrong labels: exact counts, the same for the same seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tammes.lab.data import Images, corrupt, hold_out
from tammes.lab.data.corruptions import long_tail, step

NOISE = ["symmetric", "asymmetric", "pair"]


def images_of(counts, seed=0):
    """Images whose only pixel is a running number, classes mixed."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    return Images(
        labels=labels,
        index=torch.arange(len(labels)),
        classes=tuple(f"class {n}" for n in range(len(counts))),
        shape=(1, 1, 1),
        pixels=(torch.arange(len(labels)) % 256).to(torch.uint8)[:, None, None, None],
        source="test",
    )


few = settings(deadline=None, max_examples=40)
counts_of_classes = st.lists(st.integers(1, 40), min_size=2, max_size=8)


def test_long_tail_of_cifar10_by_hand():
    # The numbers of LDAM's CIFAR-10 at ratio 100.
    left = corrupt(images_of([5000] * 10), imbalance="long_tail(100)", seed=0)
    assert left.counts() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]


def test_long_tail_by_hand():
    # 80, 80 / sqrt(16) = 20, 80 / 16 = 5
    assert long_tail(16, counts=[80, 80, 80]) == [80, 20, 5]


def test_long_tail_takes_no_more_than_there_is_and_leaves_one():
    assert long_tail(1000, counts=[10, 2, 7]) == [10, 1, 1]
    assert long_tail(2, counts=[100, 3, 100]) == [100, 3, 50]


def test_step_by_hand():
    assert corrupt(images_of([30] * 4), imbalance="step(10)", seed=0).counts() == [30, 30, 3, 3]
    assert step(4, counts=[8] * 5) == [8, 8, 2, 2, 2]


@few
@given(counts_of_classes, st.floats(0.05, 1.0), st.integers(0, 99))
def test_a_fraction_is_the_same_of_every_class(counts, fraction, seed):
    left = corrupt(images_of(counts), fraction=fraction, seed=seed).counts()
    for before, after in zip(counts, left, strict=True):
        assert 1 <= after <= before
        assert abs(after - fraction * before) < 1 or after == 1


def test_a_fraction_is_exact_where_it_can_be():
    assert corrupt(images_of([100] * 5), fraction=0.29, seed=0).counts() == [29] * 5
    assert len(corrupt(images_of([3] * 10), fraction=0.5, seed=0)) == 15


@pytest.mark.parametrize("kind", NOISE)
@few
@given(counts=counts_of_classes, rate=st.floats(0, 1), seed=st.integers(0, 99))
def test_noise_switches_exactly_as_many_labels(kind, counts, rate, seed):
    clean = images_of(counts)
    noisy = corrupt(clean, noise=f"{kind}({rate})", seed=seed)
    assert int((noisy.labels != clean.labels).sum()) == round(rate * len(clean))
    assert 0 <= int(noisy.labels.min()) <= int(noisy.labels.max()) < len(counts)
    assert noisy.index.equal(clean.index)


def test_symmetric_noise_is_uniform_over_the_other_classes():
    clean = images_of([6000] * 4)
    noisy = corrupt(clean, noise="symmetric(1.0)", seed=0)
    for label in range(4):
        taken_for = noisy.labels[clean.labels == label].bincount(minlength=4)
        assert taken_for[label] == 0
        others = taken_for[torch.arange(4) != label]
        # Five deviations of a binomial.
        assert (others - 2000).abs().max() < 5 * (6000 * 2 / 9) ** 0.5


def test_asymmetric_noise_takes_each_class_for_one_other_and_no_two_for_the_same():
    clean = images_of([50] * 7)
    noisy = corrupt(clean, noise="asymmetric(0.5)", seed=3)
    wrong = noisy.labels != clean.labels
    pairs = set(zip(clean.labels[wrong].tolist(), noisy.labels[wrong].tolist(), strict=True))
    assert len(pairs) == 7
    assert {to for _, to in pairs} == set(range(7))


def test_pair_noise_takes_a_class_for_the_next():
    clean = images_of([20] * 3)
    noisy = corrupt(clean, noise="pair(0.4)", seed=0)
    wrong = noisy.labels != clean.labels
    assert noisy.labels[wrong].equal((clean.labels[wrong] + 1) % 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"fraction": 0.5},
        {"imbalance": "long_tail(10)"},
        {"imbalance": "step(5)"},
        *({"noise": f"{kind}(0.3)"} for kind in NOISE),
    ],
)
def test_a_seed_decides_everything_and_another_one_something_else(settings):
    clean = images_of([40] * 5)
    first = corrupt(clean, seed=1, **settings)
    torch.manual_seed(99)
    torch.rand(3)
    again, other = (corrupt(clean, seed=seed, **settings) for seed in (1, 2))
    assert again.index.equal(first.index)
    assert again.labels.equal(first.labels)
    assert again.digest == first.digest
    assert other.digest != first.digest


def test_corruption_does_not_touch_what_it_is_given_nor_the_generator_of_torch():
    clean = images_of([40] * 5)
    labels, state = clean.labels.clone(), torch.random.get_rng_state()
    corrupt(clean, fraction=0.9, imbalance="step(2)", noise="symmetric(0.5)", seed=0)
    assert clean.labels.equal(labels)
    assert torch.random.get_rng_state().equal(state)


def test_the_order_is_fraction_then_imbalance_then_noise():
    clean = images_of([100] * 4)
    left = corrupt(clean, fraction=0.5, imbalance="long_tail(10)", noise="symmetric(0.2)", seed=0)
    # 50, 50 / 10^(1/3), 50 / 10^(2/3), 5
    assert clean.labels[left.index].bincount().tolist() == [50, 23, 10, 5]
    assert int((clean.labels[left.index] != left.labels).sum()) == round(0.2 * 88)
    assert left.index.equal(left.index.sort().values)
    assert left.pixels.flatten().tolist() == [index % 256 for index in left.index.tolist()]


@pytest.mark.parametrize("kind", NOISE)
def test_more_noise_switches_what_less_noise_did(kind):
    clean = images_of([50] * 4)
    little, much = (corrupt(clean, noise=f"{kind}({rate})", seed=0) for rate in (0.1, 0.6))
    wrong = little.labels != clean.labels
    assert much.labels[wrong].equal(little.labels[wrong])


def test_nothing_asked_is_nothing_done():
    clean = images_of([5, 5])
    assert corrupt(clean, seed=0) is clean
    assert corrupt(clean, noise="symmetric(0)", seed=0).pixels is clean.pixels


@few
@given(counts_of_classes, st.floats(0.1, 0.9), st.integers(0, 99))
def test_held_out_and_rest_are_all_examples_and_every_class_keeps_one(counts, share, seed):
    images = images_of(counts)
    if all(count == 1 for count in counts):
        return
    try:
        rest, held = hold_out(images, share, seed=seed)
    except ValueError:
        assert round(share * len(images)) == 0 or max(counts) == 1
        return
    assert torch.cat([rest.index, held.index]).sort().values.equal(images.index)
    assert min(rest.counts()) >= 1
    for before, after in zip(counts, held.counts(), strict=True):
        assert abs(after - share * before) < 1 or after == before - 1


def test_the_only_example_of_a_class_is_not_held_out():
    rest, held = hold_out(images_of([1, 9]), 0.9, seed=0)
    assert (rest.counts(), held.counts()) == ([1, 1], [0, 8])


def test_a_share_of_few_examples_is_held_out_of_some_classes():
    rest, held = hold_out(images_of([3] * 10), 0.1, seed=0)
    assert (len(rest), len(held)) == (27, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 0.0}, r"fraction is expected in \(0, 1\], got 0.0"),
        ({"fraction": 1.5}, "got 1.5"),
        ({"imbalance": "long_tale(10)"}, "no imbalance 'long_tale'; did you mean long_tail"),
        ({"imbalance": "long_tail(0.5)"}, "long_tail expects the largest class over the smallest"),
        ({"imbalance": "step('a')"}, "step expects the largest class over the smallest, got 'a'"),
        ({"noise": "symetric(0.1)"}, "no noise 'symetric'; did you mean symmetric"),
        ({"noise": "symmetric(1.5)"}, r"symmetric expects a rate in \[0, 1\], got 1.5"),
        ({"noise": "pair(-0.1)"}, r"pair expects a rate in \[0, 1\], got -0.1"),
        ({"noise": "asymmetric('x')"}, r"asymmetric expects a rate in \[0, 1\], got 'x'"),
        ({"noise": "symmetric"}, "symmetric expects rate, got none"),
    ],
)
def test_a_corruption_says_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        corrupt(images_of([5, 5]), seed=0, **settings)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match=r"hold out is expected in \[0, 1\)"):
        hold_out(images_of([5, 5]), share, seed=0)


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"none can be held out for a share of 0\.2"):
        hold_out(images_of([1, 1]), 0.2, seed=0)
