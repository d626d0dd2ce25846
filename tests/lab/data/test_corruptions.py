"""Fewer examples, uneven classes, wrong labels: exact counts, the same for the same seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_cells import superclasses

from tammes.lab.config.schema import Config
from tammes.lab.data import Images, corrupt, hold_out, limit
from tammes.lab.data.corruptions import asymmetric, long_tail, step
from tammes.lab.training.datasets import prepare_data

NOISE = ["symmetric", "pair"]
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
ANY_NOISE = ["symmetric(RATE)", "pair(RATE)", "asymmetric(RATE, [('class 0', 'class 1')])"]


def images_of(counts, seed=0, classes=None):
    """Images whose only pixel is a running number, classes mixed."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    return Images(
        labels=labels,
        index=torch.arange(len(labels)),
        classes=tuple(classes or (f"class {n}" for n in range(len(counts)))),
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


def confusions(clean, noisy):
    """Which class became which, by name, and how many labels of it did."""
    found = {}
    for before, after in zip(clean.labels.tolist(), noisy.labels.tolist(), strict=True):
        if before != after:
            pair = (clean.classes[before], clean.classes[after])
            found[pair] = found.get(pair, 0) + 1
    return found


def spelled(names):
    """Other spellings of the same names."""
    return [name.replace("_", " ").title() for name in names]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("names", [CIFAR10, CIFAR10[::-1], spelled(CIFAR10)])
def test_asymmetric_noise_of_cifar10_is_the_usual_one(names, seed):
    clean = images_of(range(11, 21), classes=names)
    sizes = {name.lower(): count for name, count in zip(names, clean.counts(), strict=True)}
    found = confusions(clean, corrupt(clean, noise="asymmetric(0.4)", seed=seed))
    pairs = ["truck automobile", "bird airplane", "deer horse", "cat dog", "dog cat"]
    assert {(name.lower(), other.lower()): count for (name, other), count in found.items()} == {
        (name, other): round(0.4 * sizes[name]) for name, other in map(str.split, pairs)
    }


def test_asymmetric_noise_of_digits_is_the_usual_one_of_mnist():
    clean = images_of([10] * 10, classes="0123456789")
    found = confusions(clean, corrupt(clean, noise="asymmetric(0.3)", seed=0))
    assert found == dict.fromkeys([("7", "1"), ("2", "7"), ("5", "6"), ("6", "5"), ("3", "8")], 3)


@pytest.mark.parametrize("crab", ["crab", "cra"])
def test_asymmetric_noise_of_cifar100_is_the_next_class_of_the_superclass(crab):
    table = superclasses()
    names = sorted(table)
    # The copy on the hub has lost a letter.
    clean = images_of([5] * 100, classes=[crab if name == "crab" else name for name in names])
    noisy = corrupt(clean, noise="asymmetric(0.4)", seed=0)
    expected = {}
    for place, name in enumerate(names):
        order = names[place + 1 :] + names[:place]
        other = next(each for each in order if table[each] == table[name])
        expected[(name, other)] = 2
    found = confusions(clean, noisy)
    assert len(found) == 100
    assert found == {
        tuple(crab if name == "crab" else name for name in pair): count
        for pair, count in expected.items()
    }


@few
@given(counts=counts_of_classes, rate=st.floats(0, 1), seed=st.integers(0, 99))
def test_asymmetric_noise_switches_its_share_of_each_mapped_class_exactly(counts, rate, seed):
    clean = images_of(counts)
    pairs = [("class 0", "class 1"), ("class 1", "class 0")]
    noisy = corrupt(clean, noise=f"asymmetric({rate}, mapping={pairs})", seed=seed)
    wrong = {pair: round(rate * counts[place]) for place, pair in enumerate(pairs)}
    assert confusions(clean, noisy) == {pair: count for pair, count in wrong.items() if count}
    assert noisy.index.equal(clean.index)


def test_a_mapping_goes_before_the_usual_one_and_numbers_are_names_too():
    clean = images_of([10] * 10, classes="0123456789")
    noisy = corrupt(clean, noise="asymmetric(0.5, [(4, 9)])", seed=0)
    assert confusions(clean, noisy) == {("4", "9"): 5}


def test_a_mapping_may_be_a_dict_in_python():
    labels = torch.tensor([0, 0, 1, 1, 2])
    noisy = asymmetric(1.0, {"cat": "dog"}, labels=labels, classes=("bird", "cat", "dog"), seed=0)
    assert noisy.tolist() == [0, 0, 2, 2, 2]


def test_some_classes_of_a_known_set_are_not_taken_for_it():
    with pytest.raises(ValueError, match="cifar10, cifar100 and mnist only"):
        corrupt(images_of([5] * 9, classes=CIFAR10[:9]), noise="asymmetric(0.4)", seed=0)


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
        *({"noise": kind.replace("RATE", "0.3")} for kind in ANY_NOISE),
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


@pytest.mark.parametrize("kind", ANY_NOISE)
def test_more_noise_switches_what_less_noise_did(kind):
    clean = images_of([50] * 4)
    little, much = (
        corrupt(clean, noise=kind.replace("RATE", rate), seed=0) for rate in ("0.1", "0.6")
    )
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
        (
            {"noise": "asymmetric(0.4)"},
            r"known for the classes of cifar10, cifar100 and mnist only; use pair\(0.4\) or "
            r"symmetric\(0.4\), or give mapping=\[\('cat', 'dog'\)\]",
        ),
        ({"noise": "asymmetric(0.4, [('class 0', 'clas 1')])"}, "'clas 1' .*mean class 1"),
        ({"noise": "asymmetric(0.4, [('class 0', 'class 0')])"}, "'class 0' maps to itself"),
        (
            {"noise": "asymmetric(0.4, [('class 0', 'class 1'), ('class 0', 'class 1')])"},
            "each class to map to one other class, 'class 0' maps to 'class 1' and to",
        ),
        *(
            ({"noise": f"asymmetric(0.4, mapping={wrong})"}, "mapping to be pairs of classes")
            for wrong in ("[]", "('class 0', 'class 1')", "[('class 0',)]", "'class 0'", "3")
        ),
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
    with pytest.raises(
        ValueError, match=r"none can be held out for a share of 0\.2: each class needs"
    ):
        hold_out(images_of([1, 1]), 0.2, seed=0)


# ------------------------------------------------------------------------------------- a limit


@few
@given(counts_of_classes, st.integers(1, 200), st.integers(0, 99))
def test_a_limit_is_kept_as_far_as_every_class_has_an_image(counts, most, seed):
    left = limit(images_of(counts), most, seed=seed)
    assert len(left) == min(sum(counts), max(most, len(counts)))
    assert all(1 <= after <= before for before, after in zip(counts, left.counts(), strict=True))


def test_a_limit_takes_evenly_of_all_classes():
    assert limit(images_of([100] * 5), 50, seed=0).counts() == [10] * 5
    assert limit(images_of([40, 20, 20]), 20, seed=3).counts() == [10, 5, 5]
    assert sorted(limit(images_of([30] * 4), 10, seed=1).counts()) == [2, 2, 3, 3]


def test_the_largest_class_makes_up_for_what_small_ones_keep_above_their_share():
    assert limit(images_of([100, 1, 1, 1, 1, 1]), 10, seed=0).counts() == [5, 1, 1, 1, 1, 1]


def test_a_limit_leaves_what_is_within_it_alone():
    images = images_of([5, 6])
    for most in (11, 12, 1000):
        assert limit(images, most, seed=0) is images


def test_limit_depends_on_the_seed_alone_and_keeps_labels_and_order():
    images = images_of([50] * 4)
    first, again, other = (limit(images, 40, seed=seed) for seed in (0, 0, 1))
    assert first.index.equal(again.index)
    assert not first.index.equal(other.index)
    assert first.index.equal(first.index.sort().values)
    assert first.labels.equal(images.labels[first.index])
    assert first.pixels.flatten().tolist() == (first.index % 256).tolist()


def test_a_class_that_has_no_image_has_none_then():
    images = images_of([30, 30, 0, 30])
    assert limit(images, 9, seed=0).counts() == [3, 3, 0, 3]


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^limit is expected to be at least 1, got 0$"):
        limit(images_of([5, 6]), 0, seed=0)


def test_a_run_limits_both_splits_before_it_holds_out_and_corrupts():
    config = Config(data="digits", limit=200, validation=0.1, fraction=0.5, augment="none")
    training, held_out, testing = prepare_data(config, lambda text: None)
    assert (len(training), len(held_out), len(testing)) == (90, 20, 200)
    other = prepare_data(config.replace(seed=1), lambda text: None)
    assert not other[2].index.equal(testing.index)
    whole = prepare_data(config.replace(limit=0), lambda text: None)
    assert len(whole[2]) > 400


def test_a_limit_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"^limit is expected to be at least 0, got -1$"):
        Config(limit=-1)
