"""Draws are a function of their names, and uniform."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tammes.lab.data import seeded_draws


def splitmix(names, count):
    """The same numbers, in Python's whole numbers."""
    state = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:8], "little")
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        value = state
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        yield (value ^ (value >> 31)) % 2**63


@pytest.mark.parametrize("names", [(0, "order"), (7,), ("a", 3, 2**40)])
def test_numbers_are_those_of_splitmix64(names):
    assert seeded_draws.numbers(50, *names).tolist() == list(splitmix(names, 50))


def test_numbers_are_the_same_on_every_machine():
    # Written down once; a change would change every data set that was corrupted before.
    assert seeded_draws.permutation(8, 0, "order").tolist() == [1, 3, 6, 0, 2, 5, 7, 4]


def test_numbers_do_not_touch_the_generator_of_torch():
    before = torch.random.get_rng_state()
    seeded_draws.permutation(10, 0)
    assert torch.random.get_rng_state().equal(before)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200), st.integers(0, 2**40))
def test_a_permutation_has_every_number_once(count, seed):
    assert seeded_draws.permutation(count, seed).sort().values.equal(torch.arange(count))


def test_other_names_give_other_numbers():
    rows = [
        seeded_draws.numbers(8, *names).tolist()
        for names in [(0,), (1,), (0, "a"), (0, "b"), ("0",)]
    ]
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("high", [2, 3, 10])
def test_numbers_below_are_uniform(high):
    counts = seeded_draws.below(high, 60_000, 0, "uniform").bincount()
    assert len(counts) == high
    # Five deviations of a binomial.
    expected = 60_000 / high
    assert (counts - expected).abs().max() < 5 * (expected * (1 - 1 / high)) ** 0.5


def test_numbers_below_may_have_a_limit_for_each_place():
    high = torch.arange(1, 1001)
    drawn = seeded_draws.below(high, 1000, 0)
    assert bool(((drawn >= 0) & (drawn < high)).all())
