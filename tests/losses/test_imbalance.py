"""Margins by class size."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tammes
from tammes.lab.config import parse_loss

COUNTS = [1600, 100, 6250, 100]


@pytest.fixture
def split():
    rows = F.normalize(torch.randn(10 + 4, 5, dtype=torch.double))
    return tammes.split(rows[:10] @ rows[10:].T, torch.arange(10) % 4, scale=9.0)


def test_ldam_by_hand():
    # 16 times as many examples: half the margin. Scores count as 4 ** f.
    cosine = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.double)
    s = tammes.split(cosine, torch.tensor([0, 1]), scale=math.log(4))
    loss = tammes.ldam(counts=[160, 10], max_margin=0.5)(s)
    want = [math.log1p(4**-0.75), math.log1p(4**-0.5)]
    assert_close(loss, torch.tensor(want, dtype=torch.double))


def test_ldam_is_cosface_and_gm_softmax_with_a_margin_per_class(split):
    margins = [0.4 * (100 / count) ** 0.25 for count in COUNTS]
    loss = tammes.ldam(COUNTS, max_margin=0.4)(split)
    assert_close(loss, tammes.cosface(margin=margins)(split))
    shifts = [-margin for margin in margins]
    assert_close(loss, tammes.gm_softmax(beta1=shifts, beta2=shifts)(split))


def test_margins_depend_on_ratios_of_counts_and_the_rarest_has_the_largest(split):
    loss = tammes.ldam(COUNTS, max_margin=0.4)(split)
    assert_close(tammes.ldam([7 * count for count in COUNTS], max_margin=0.4)(split), loss)
    rarest = (split.labels == 1) | (split.labels == 3)
    assert_close(loss[rarest], tammes.cosface(margin=0.4)(split)[rarest])
    assert (loss <= tammes.cosface(margin=0.4)(split) + 1e-12).all()
    assert (loss >= tammes.normface()(split)).all()


def test_equal_counts_are_cosface(split):
    assert_close(tammes.ldam([3] * 4)(split), tammes.cosface(margin=0.5)(split))


def test_the_slope_in_the_largest_margin_is_scale_times_the_mass_of_the_others(split):
    margin = torch.full((10,), 0.4, dtype=torch.double, requires_grad=True)
    loss = tammes.ldam(COUNTS)(split, max_margin=margin)
    (grad,) = torch.autograd.grad(loss.sum(), margin)
    relative = (100 / torch.tensor(COUNTS).double()[split.labels]) ** 0.25
    assert_close(grad, 9 * relative * (1 - (-loss).exp()))


@pytest.mark.parametrize("counts", [[5, 0], [5], 7, [3, -1, 2]])
def test_ldam_refuses_counts_that_are_not_one_positive_number_per_class(counts):
    with pytest.raises(ValueError, match="ldam expects a positive count for each class"):
        tammes.ldam(counts)


def test_ldam_refuses_another_number_of_counts_than_classes():
    with pytest.raises(ValueError, match="ldam expects one counts for each of 3 classes, got 4"):
        tammes.Criterion(tammes.CosineHead(2, 3), tammes.ldam(COUNTS))


# ------------------------------------------------------------------------ margins from counts


def test_margins_from_counts_are_those_of_the_landmark_solution():
    counts = torch.tensor([5000.0, 7, 120, 33, 2])
    root = (1 / counts.double().sqrt()).sqrt()
    expected = (root - root.min()) / (root.max() - root.min()) * 0.45 + 0.05
    for given in (counts, counts.numpy(), [*counts.tolist()], tuple(counts.int().tolist())):
        assert_close(torch.tensor(tammes.margins_from_counts(given)).double(), expected)


def test_margins_from_counts_reach_their_ends_and_are_level_for_equal_counts():
    margins = tammes.margins_from_counts([1, 10, 100], smallest=-0.1, largest=0.3, power=1.0)
    assert margins[0] == pytest.approx(0.3)
    assert margins[1] == pytest.approx(-0.1 + 0.4 * 0.09 / 0.99)
    assert margins[2] == -0.1
    assert tammes.margins_from_counts([7, 7], smallest=0.1, largest=0.3) == (0.2, 0.2)


@pytest.mark.parametrize("counts", [[3], [3, 0], [], 5])
def test_margins_from_counts_expect_a_count_of_each_class(counts):
    with pytest.raises(ValueError, match="margins_from_counts expects a positive count for each"):
        tammes.margins_from_counts(counts)


def test_a_loss_written_as_text_takes_its_margins_from_the_counts():
    counts = [100, 10, 1]
    found = parse_loss("arcface(margin=margins_from_counts(largest=0.4))", counts=counts)
    assert found == tammes.arcface(margin=tammes.margins_from_counts(counts, largest=0.4))
    given = parse_loss("arcface(margin=margins_from_counts([5, 6, 7]))", counts=counts)
    assert given == tammes.arcface(margin=tammes.margins_from_counts([5, 6, 7]))
    with pytest.raises(ValueError, match="margins_from_counts has no setting 'most'"):
        parse_loss("arcface(margin=margins_from_counts(most=0.4))", counts=counts)
