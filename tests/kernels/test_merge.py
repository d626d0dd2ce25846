"""Numbers of parts of the classes merge to those of all, however the classes are cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tammes.kernels.matmul import add_product, halved
from tammes.kernels.merge import merge
from tammes.kernels.score_map import MappedRows
from tammes.kernels.streamed.score_blocks import Block
from tammes.kernels.tiling import cut

READS = frozenset(("others", "expected", "mean", "softplus", "hardest"))
NOWHERE = -1


def over(similarity, threshold):
    return similarity + (similarity - threshold).relu()


def numbers(scores, own, threshold, columns=slice(None)):
    """Those of some columns of a matrix of scores, which are mapped."""
    part = scores[:, columns].clone()
    first = columns.start or 0
    here = (own >= first) & (own < first + part.shape[1])
    mapped = MappedRows(over, (torch.full_like(threshold, 2.0), threshold))
    block = Block(part, torch.where(here, own - first, NOWHERE), READS, None, mapped)
    return block.numbers | {"hardest": block.top}


def merged(parts):
    return merge({name: torch.stack([part[name] for part in parts]) for name in parts[0]})


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5),
    classes=st.integers(2, 9),
    most=st.integers(1, 9),
    size=st.sampled_from([0.1, 3.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_any_cut_gives_the_numbers_of_all_classes(rows, classes, most, size, seed):
    torch.manual_seed(seed)
    scores = size * torch.randn(rows, classes, dtype=torch.double)
    own, threshold = torch.randint(classes, (rows,)), torch.randn(rows, dtype=torch.double)
    whole = numbers(scores, own, threshold)
    parts = [numbers(scores, own, threshold, columns) for columns in cut(classes, most)]
    assert_close(merged(parts), whole)


def test_merging_does_not_depend_on_the_order_or_the_grouping():
    scores = torch.randn(4, 9, dtype=torch.double)
    own, threshold = torch.tensor([0, 4, 8, 8]), torch.zeros(4, dtype=torch.double)
    parts = [numbers(scores, own, threshold, columns) for columns in cut(9, 3)]
    whole = merged(parts)
    for a, b, c in itertools.permutations(parts):
        assert_close(merged([merged([a, b]), c]), whole)
        assert_close(merged([a, merged([b, c])]), whole)


def test_a_part_that_holds_only_the_own_class_adds_nothing():
    scores = torch.randn(1, 4, dtype=torch.double)
    own, threshold = torch.tensor([0]), torch.zeros(1, dtype=torch.double)
    alone = numbers(scores, own, threshold, slice(0, 1))
    assert alone["others"].item() == float("-inf")
    assert alone["expected"].item() == alone["mean"].item() == alone["softplus"].item() == 0
    rest = numbers(scores, own, threshold, slice(1, 4))
    assert_close(merged([alone, rest]), rest)
    assert merged([alone, alone])["others"].item() == float("-inf")
    assert merged([alone, alone])["expected"].item() == 0


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16, torch.float32])
def test_a_product_of_tiny_numbers_keeps_its_digits(low):
    # What a row of a batch of thousands gives a class: far below float16's smallest number.
    left, right = torch.rand(30, 20), 1e-9 * torch.randn(20, 5)
    total = torch.ones(30, 5, dtype=torch.float32) * 1e-9
    add_product(total, left.to(low), right)
    exact = 1e-9 + left.double() @ right.double()
    bound = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}[low]
    assert (total - exact).norm() <= bound * exact.norm()


def test_nothing_is_halved_into_nothing():
    for tensor in (torch.zeros(3), torch.empty(0, 3)):
        low, size = halved(tensor, torch.float16)
        assert_close(low, tensor.half())
        assert size.item() == 1


def test_the_expectation_of_large_scores_keeps_its_digits():
    others = 1000 + torch.randn(8, 200, dtype=torch.double)
    expected = others - torch.rand(8, 200, dtype=torch.double)
    exact = merge({"others": others, "expected": expected})["expected"]
    found = merge({"others": others.float(), "expected": expected.float()})["expected"]
    # A few units in the last place of 1000, not of 1000 squared.
    assert (found - exact).abs().max() < 1e-3
