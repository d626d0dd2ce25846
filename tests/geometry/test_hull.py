"""The distance of each prototype to the hull of the others, and the feature that has it."""

import math

import pytest
import torch
from torch.testing import assert_close

from tammes.geometry import largest_sample_margin, simplex
from tammes.similarity import unit


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


@pytest.mark.parametrize("place", [(2, 2), (3, 1), (9, 2), (40, 3), (60, 20), (30, 64)], ids=str)
def test_the_margin_is_certified_to_1e_8(place):
    prototypes = draw(*place)
    best = largest_sample_margin(prototypes)
    # Weak duality: any feature's margin is below any hull point's distance, and these two meet.
    assert (best.gap.abs() < 1e-8).all()
    outside = best.margin > 0
    score = best.features @ prototypes.T
    own = score.diagonal().clone()
    others = score.fill_diagonal_(-math.inf).amax(1)
    assert_close((own - others)[outside], best.margin[outside], atol=1e-12, rtol=0)
    assert_close(best.features.norm(dim=1)[outside], torch.ones(int(outside.sum())).double())


def test_the_distance_to_a_segment_by_hand():
    # From (0, 2) straight down to the segment between (-1, 0) and (3, 0); from (-1, 0) at a right
    # angle to the line through the other two, twice the area over the length.
    best = largest_sample_margin(torch.tensor([[0.0, 2.0], [-1.0, 0.0], [3.0, 0.0]]))
    assert_close(best.margin[0], torch.tensor(2.0).double())
    assert_close(best.features[0], torch.tensor([0.0, 1.0]).double())
    assert_close(best.margin[1], 8 / torch.tensor(13.0).double().sqrt())


def test_the_simplex_has_equal_margins_and_features_at_its_prototypes():
    points = simplex(7, 9, dtype=torch.double)
    best = largest_sample_margin(points)
    assert_close(best.margin, torch.full((7,), 7 / 6, dtype=torch.double), atol=1e-14, rtol=0)
    assert_close(best.features, points, atol=1e-14, rtol=0)


def test_a_prototype_inside_the_hull_of_the_others_has_no_margin():
    square = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1], [0.2, 0.1], [1, 1]])
    best = largest_sample_margin(square)
    # The fifth is inside, the first and the last coincide.
    assert best.margin[[0, 4, 5]].tolist() == [0, 0, 0]
    assert best.features[4].tolist() == [0, 0]
    # From (1, -1) to the line through (-1, -1) and (0.2, 0.1).
    assert best.margin[1] == pytest.approx(2.2 / 2.65**0.5)


def test_nearly_equal_prototypes_keep_their_digits():
    prototypes = unit(draw(20, 4))
    prototypes = torch.cat([prototypes, unit(prototypes + 1e-6 * draw(20, 4, seed=1))])
    best = largest_sample_margin(prototypes)
    assert (best.gap.abs() < 1e-12).all()
    distance = (prototypes[:20] - prototypes[20:]).norm(dim=1)
    assert (best.margin[:20] <= distance).all()
    assert (best.margin > 0).all()


def test_the_margin_scales_with_the_prototypes_and_ignores_a_shift():
    prototypes = draw(12, 3)
    best, moved = largest_sample_margin(prototypes), largest_sample_margin(1e3 * prototypes + 50)
    assert_close(moved.margin, 1e3 * best.margin)


def test_classes_in_blocks_give_the_same_margins(monkeypatch):
    prototypes = draw(30, 4)
    whole = largest_sample_margin(prototypes)
    split = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda self, size: split(self, 7))
    assert_close(largest_sample_margin(prototypes).margin, whole.margin)


def test_impossible_prototypes_are_refused():
    with pytest.raises(ValueError, match=r"C of 2 or more, got \(1, 3\)"):
        largest_sample_margin(torch.ones(1, 3))
    with pytest.raises(ValueError, match="finite prototypes, got NaN"):
        largest_sample_margin(torch.full((3, 3), math.nan))
