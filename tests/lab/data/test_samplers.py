"""Batches: what is in them, that ranks share them, that they go on where they stopped."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tammes.lab.config import build
from tammes.lab.data import samplers

CALLS = [
    "random()",
    "random(drop_last=True)",
    "balanced()",
    "episodes(way=3, shot=2)",
    "episodes(way=3, shot=2, repeat=False)",
    "pk(classes=3, images=4)",
]


def make(call, labels, *, batch_size=7, seed=0, **given):
    return build(
        call,
        samplers.TABLE,
        what="sampler",
        labels=labels,
        batch_size=batch_size,
        seed=seed,
        **{"rank": 0, "world_size": 1, **given},
    )


@pytest.fixture
def labels():
    """Five classes of 2 to 10 examples, mixed."""
    counts = torch.tensor([2, 10, 5, 3, 9])
    rows = torch.arange(5).repeat_interleave(counts)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("call", CALLS)
def test_an_epoch_has_as_many_batches_as_it_says(call, labels):
    sampler = make(call, labels)
    assert len(list(sampler)) == len(sampler)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_parts_of_all_ranks_are_the_batch_of_one(call, labels, world_size):
    alone = list(make(call, labels))
    parts = [list(make(call, labels, rank=r, world_size=world_size)) for r in range(world_size)]
    assert [torch.cat(each).tolist() for each in zip(*parts, strict=True)] == [
        batch.tolist() for batch in alone
    ]
    sizes = [[len(part) for part in each] for each in zip(*parts, strict=True)]
    assert all(max(row) - min(row) <= 1 for row in sizes)


@pytest.mark.parametrize("call", CALLS)
def test_a_saved_position_goes_on_exactly(call, labels):
    whole = make(call, labels, batch_size=3)
    whole.set_epoch(4)
    expected = [batch.tolist() for batch in whole]
    for stop in range(len(expected) + 1):
        first = make(call, labels, batch_size=3)
        first.set_epoch(4)
        seen = [batch.tolist() for batch in itertools.islice(first, stop)]
        second = make(call, labels, batch_size=3)
        second.load_state_dict(first.state_dict())
        second.set_epoch(4)
        assert seen + [batch.tolist() for batch in second] == expected


@pytest.mark.parametrize("call", CALLS)
def test_the_position_counts_the_batches_that_were_yielded(call, labels):
    sampler = make(call, labels)
    for number, _ in enumerate(sampler, start=1):
        assert sampler.state_dict() == {"epoch": 0, "position": number}
    assert sampler.state_dict() == {"epoch": 1, "position": 0}


@pytest.mark.parametrize("call", CALLS)
def test_epochs_and_seeds_differ_and_come_again(call, labels):
    def batches(seed, epoch):
        sampler = make(call, labels, seed=seed)
        sampler.set_epoch(epoch)
        return [batch.tolist() for batch in sampler]

    assert batches(0, 0) != batches(0, 1)
    assert batches(0, 0) != batches(1, 0)
    torch.rand(1)
    assert batches(0, 1) == batches(0, 1)


def test_going_to_another_epoch_starts_it(labels):
    sampler = make("random()", labels)
    next(iter(sampler))
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "position": 0}


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5))
def test_random_has_every_example_once(count, batch_size, epoch):
    sampler = make("random()", torch.zeros(count), batch_size=batch_size)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert torch.cat(batches).sort().values.equal(torch.arange(count))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)


def test_random_may_leave_out_the_last_batch():
    sampler = make("random(drop_last=True)", torch.zeros(10), batch_size=4)
    assert [len(batch) for batch in sampler] == [4, 4]


def test_balanced_has_as_many_of_a_rare_class_as_of_a_common_one():
    labels = torch.tensor([0] * 9000 + [1] * 900 + [2] * 100)
    sampler = make("balanced()", labels, batch_size=100)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [100] * 100
    counts = labels[torch.cat(batches)].bincount()
    # Six deviations of a binomial of 10,000 draws.
    assert (counts - 10_000 / 3).abs().max() < 6 * (10_000 * 2 / 9) ** 0.5
    common = torch.cat(batches)[labels[torch.cat(batches)] == 0].bincount(minlength=9000)
    assert common.max() < 8


def test_balanced_passes_classes_without_examples_by():
    labels = torch.tensor([0, 5, 5])
    assert set(labels[torch.cat(list(make("balanced()", labels)))].tolist()) <= {0, 5}


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9), st.data())
def test_episodes_repeat_neither_class_nor_example_in_a_batch(way, shot, seed, data):
    counts = data.draw(st.lists(st.integers(shot, shot + 6), min_size=way, max_size=way + 4))
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    sampler = make(f"episodes(way={way}, shot={shot})", labels, seed=seed)
    assert len(sampler) == len(labels) // (way * shot)
    for batch in sampler:
        assert len(batch.unique()) == way * shot
        assert labels[batch].unique(return_counts=True)[1].tolist() == [shot] * way


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.data())
def test_episodes_without_repeats_have_an_example_once_in_as_many_batches_as_there_can_be(
    way, shot, seed, data
):
    counts = data.draw(st.lists(st.integers(shot, 30), min_size=way, max_size=way + 4))
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    sampler = make(f"episodes(way={way}, shot={shot}, repeat=False)", labels, seed=seed)
    batches = list(sampler)
    everything = torch.cat(batches)
    assert len(everything.unique()) == len(everything) == len(batches) * way * shot
    for batch in batches:
        assert labels[batch].unique(return_counts=True)[1].tolist() == [shot] * way
    # One batch more would need more groups of `shot` than the classes have.
    more = len(batches) + 1
    assert sum(min(count // shot, more) for count in counts) < way * more


def test_episodes_without_repeats_visit_classes_of_one_size_in_turn():
    labels = torch.arange(8).repeat_interleave(25)
    sampler = make("episodes(way=4, shot=3, repeat=False)", labels)
    batches = list(sampler)
    assert len(batches) == 16
    turns = [
        labels[torch.cat(pair)].unique().tolist()
        for pair in zip(batches[::2], batches[1::2], strict=True)
    ]
    assert turns == [list(range(8))] * 8
    # The first class has 25 images, of which another one is left out in another epoch.
    left = {tuple(set(range(25)) - set(torch.cat(batches).tolist()))}
    sampler.set_epoch(1)
    left.add(tuple(set(range(25)) - set(torch.cat(list(sampler)).tolist())))
    assert len(left) == 2


def test_episodes_draw_all_classes_alike():
    labels = torch.arange(10).repeat_interleave(40)
    sampler = make("episodes(way=2, shot=2)", labels)
    drawn = torch.zeros(10)
    for _ in range(10):
        for batch in sampler:
            drawn += labels[batch].bincount(minlength=10) / 2
    # 1,000 batches of 2 out of 10 classes: 200 each, five deviations.
    assert (drawn - 200).abs().max() < 5 * (1000 * 0.2 * 0.8) ** 0.5


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9), st.data())
def test_pk_visits_every_class_and_repeats_images_only_of_small_ones(classes, images, seed, data):
    counts = data.draw(st.lists(st.integers(1, 9), min_size=classes, max_size=classes + 9))
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    sampler = make(f"pk(classes={classes}, images={images})", labels, seed=seed)
    batches = list(sampler)
    assert len(batches) == -(-len(counts) // classes)
    visits = torch.zeros(len(counts), dtype=torch.int64)
    for batch in batches:
        present, times = labels[batch].unique(return_counts=True)
        assert times.tolist() == [images] * classes
        visits[present] += 1
        for label in present.tolist():
            own = batch[labels[batch] == label]
            assert len(own.unique()) == min(images, counts[label])
            assert int(own.bincount().max()) <= -(-images // counts[label])
    assert int(visits.min()) >= 1
    assert int(visits.sum()) - len(counts) < classes


def test_the_size_of_a_batch_follows_from_the_settings(labels):
    assert make("random()", labels, batch_size=9).batch_size == 9
    assert make("episodes(way=3, shot=2)", labels, batch_size=9).batch_size == 6
    assert make("pk(3, 4)", labels, batch_size=9).batch_size == 12


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("random()", {"batch_size": 2, "world_size": 3}, "one example for each of 3 processes"),
        ("random()", {"rank": 2, "world_size": 2}, "expects a rank below 2, got 2"),
        (
            "random(drop_last=True)",
            {"batch_size": 99},
            "one full batch of 99 with drop_last, got 29 examples",
        ),
        ("episodes(way=6, shot=2)", {}, "expects at least 6 classes, got 5"),
        ("episodes(way=2, shot=3)", {}, "expects 3 examples of every class, got 2 of class 0"),
        ("episodes(way=0, shot=3)", {}, "expects way to be a whole number above 0, got 0"),
        ("episodes(way=2, shot=2, repeat=2)", {}, "expects repeat to be True or False, got 2"),
        ("episodes(way=2, shot=1.5)", {}, "expects shot to be a whole number above 0, got 1.5"),
        ("pk(classes=6, images=2)", {}, "expects at least 6 classes, got 5"),
        ("pk(classes=2, images=True)", {}, "images to be a whole number above 0, got True"),
        ("randm()", {}, "there is no sampler 'randm'; did you mean random"),
        ("pk(clases=2, images=4)", {}, "pk has no setting 'clases'; did you mean classes"),
        ("pk(2)", {}, "pk expects images, got none"),
    ],
)
def test_a_sampler_says_what_is_wrong(call, given, message, labels):
    with pytest.raises(ValueError, match=message):
        make(call, labels, **given)


def test_a_sampler_without_examples_says_so():
    with pytest.raises(ValueError, match="at least one example, got none"):
        make("random()", torch.zeros(0))
