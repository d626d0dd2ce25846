"""Episodes are drawn right, all at once, and the same for everybody."""

import numpy
import pytest
import torch

from tammes.lab.fewshot.episodes import _sample_without_replacement, draw

UNEVEN = torch.tensor([3] * 9 + [7] * 25 + [1] * 12 + [4] * 8 + [0] * 40)


def permuted(labels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return labels[torch.randperm(len(labels), generator=generator)]


def drawn(labels=None, **settings):
    labels = permuted(UNEVEN) if labels is None else labels
    return labels, draw(
        labels, **{"way": 3, "shot": 2, "queries": 5, "episodes": 200, "seed": 0, **settings}
    )


def test_support_and_queries_are_of_the_classes_of_their_episode():
    labels, found = drawn()
    assert found.support.shape == (200, 3, 2)
    assert found.queries.shape == (200, 3, 5)
    assert (labels[found.support] == found.classes[:, :, None]).all()
    assert (labels[found.queries] == found.classes[:, :, None]).all()


def test_neither_a_class_nor_an_example_comes_twice_in_an_episode():
    _, found = drawn(episodes=500)
    examples = torch.cat([found.support, found.queries], 2).flatten(1)
    assert all(len(row.unique()) == 3 for row in found.classes)
    assert all(len(row.unique()) == 21 for row in examples)


def test_more_episodes_begin_with_fewer():
    _, few = drawn(episodes=50)
    _, many = drawn(episodes=300)
    for name in ("classes", "support", "queries"):
        assert getattr(many, name)[:50].equal(getattr(few, name))


def test_another_seed_draws_other_episodes():
    _, one = drawn(seed=0)
    _, two = drawn(seed=1)
    assert not one.classes.equal(two.classes)


def test_torchs_generator_is_neither_read_nor_moved():
    state = torch.get_rng_state()
    _, one = drawn()
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(99)
    _, two = drawn()
    assert one.queries.equal(two.queries)


def test_every_ordered_choice_is_equally_likely():
    # 60 ordered choices of 3 out of 5, 1000 of each expected: chi squared of 59 degrees.
    statistics = []
    for seed in range(20):
        chosen = _sample_without_replacement(torch.full((60_000,), 5), 3, seed, "test")
        counts = (chosen * torch.tensor([25, 5, 1])).sum(1).bincount()
        counts = counts[counts > 0]
        assert len(counts) == 60
        statistics.append(float(((counts - 1000.0) ** 2 / 1000).sum()))
    # The mean of 20 has a deviation of sqrt(2 * 59 / 20).
    assert sum(statistics) / 20 == pytest.approx(59, abs=4 * (2 * 59 / 20) ** 0.5)


def test_the_first_support_may_be_any_example_of_a_class():
    labels, found = drawn(episodes=4000, shot=1, queries=1)
    counts = found.support.flatten().bincount(minlength=len(labels))
    assert (counts > 0).all()
    # A class is drawn 3 times in 5, an example of it as often as any other.
    expected = 4000 * 3 / 5 / labels.bincount()[labels]
    assert ((counts - expected).abs() < 6 * expected.sqrt()).all()


def test_rows_of_different_sizes_stay_within_them():
    sizes = torch.tensor([4, 9, 1000]).repeat(300)
    chosen = _sample_without_replacement(sizes, 4, 0, "test")
    assert (chosen < sizes[:, None]).all()
    assert (chosen >= 0).all()
    assert all(len(row.unique()) == 4 for row in chosen)
    assert chosen[sizes == 4].sort(1).values.equal(torch.arange(4).expand(300, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"way": 6}, "6-way episodes expect at least 6 classes, got 5"),
        (
            {"shot": 5, "queries": 16},
            "5-shot episodes with 16 queries expect 21 images of every class, got 8 of class 'e'",
        ),
        ({"way": 1}, "episodes expect way to be a whole number of at least 2, got 1"),
        ({"shot": 0}, "episodes expect shot to be a whole number of at least 1, got 0"),
        ({"queries": 0}, "episodes expect queries to be a whole number of at least 1, got 0"),
        (
            {"episodes": 2.5},
            "episodes expect their number to be a whole number of at least 1, got 2.5",
        ),
    ],
)
def test_episodes_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        drawn(**settings, names=tuple("abcdefgh"))


def test_a_class_without_a_name_is_called_by_its_number():
    with pytest.raises(ValueError, match=r"got 8 of class 4$"):
        drawn(shot=5, queries=16)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (UNEVEN[:, None], ValueError, r"labels of shape \(N,\), got \(94, 1\)"),
        (UNEVEN.float(), TypeError, "labels of an integer type, got torch.float32; .*"),
        (UNEVEN.tolist(), TypeError, "labels to be a tensor of integers, got list; .*"),
        (UNEVEN - 1, ValueError, "labels of 0 or more, got -1"),
    ],
)
def test_labels_that_are_not_a_class_of_each_example_are_refused(labels, error, message):
    with pytest.raises(error, match=f"^draw expects {message}$"):
        drawn(labels)


def test_integers_of_numpy_draw_the_same_episodes():
    _, same = drawn(way=numpy.int64(3), shot=numpy.int64(2))
    assert same.support.equal(drawn(way=3, shot=2)[1].support)
