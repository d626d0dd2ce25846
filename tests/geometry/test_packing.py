"""Packings, their measure and their energy."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from tammes.geometry import largest_class_margin, orthoplex, pack, packing, riesz_energy, simplex
from tammes.metrics.functional import class_margin
from tammes.similarity import unit

slow = pytest.mark.slow


@pytest.fixture
def points(generator):
    return torch.randn(12, 4, generator=generator, dtype=torch.double)


@pytest.mark.parametrize(
    ("count", "size"),
    [
        *[(k, 3) for k in (4, 5, 6, 7, 8, 10, 13)],
        *[pytest.param(k, 3, marks=slow) for k in (9, 11, 12, 14, 24)],
        *[pytest.param(*place, marks=slow) for place in ((10, 4), (24, 4), (16, 5), (27, 6))],
    ],
)
def test_the_known_optimum_is_found_to_a_hundredth_of_a_degree(count, size):
    found = pack(count, size)
    limit = largest_class_margin(count, size)
    assert limit.exact
    assert found.degrees == pytest.approx(limit.degrees, abs=0.01)


@pytest.mark.parametrize(("count", "size"), [(2, 1), (2, 2), (4, 3), (5, 8), (100, 99)])
def test_few_points_are_the_simplex(count, size):
    found = pack(count, size)
    assert_close(found.points, simplex(count, size, dtype=torch.double))
    assert found.angle == pytest.approx(math.acos(-1 / (count - 1)), abs=1e-7)


@pytest.mark.parametrize(("count", "size"), [(4, 2), (5, 3), (6, 3), (11, 8), (100, 64)])
def test_up_to_twice_the_dimension_points_are_at_right_angles(count, size):
    assert pack(count, size).degrees == pytest.approx(90, abs=1e-12)


def test_the_circle_and_the_line_are_in_closed_form():
    assert pack(9, 2).degrees == pytest.approx(40, abs=1e-12)
    assert pack(3, 1).points.flatten().tolist() == [1, -1, 1]
    assert pack(3, 1).angle == 0


@pytest.mark.parametrize(("count", "size"), [(4, 3), (5, 8), (6, 3), (12, 6)])
def test_the_search_itself_finds_what_is_known_in_closed_form(count, size, generator):
    start = unit(torch.randn(8, count, size, generator=generator, dtype=torch.double))
    best = packing._best(packing._anneal(start, 1500), largest_class_margin(count, size))
    assert abs(math.degrees(best.gap)) < 0.001


def test_a_packing_knows_its_angle_and_how_far_it_is_from_the_bound():
    found = pack(20, 3, starts=4, steps=500)
    assert found.degrees == pytest.approx(float(class_margin(found.points).angle), abs=1e-12)
    assert found.angle == math.radians(float(class_margin(found.points).angle))
    assert found.bound == largest_class_margin(20, 3)
    assert found.gap == found.bound.angle - found.angle > 0
    assert_close(found.points.norm(dim=1), torch.ones(20, dtype=torch.double))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.angle = 0.0


def test_the_same_seed_gives_the_same_points_and_another_does_not():
    one, same, other = (pack(9, 4, seed=seed, starts=2, steps=50).points for seed in (3, 3, 4))
    assert one.equal(same)
    assert not one.allclose(other)


def test_the_best_of_all_starts_is_returned(generator):
    candidates = unit(torch.randn(6, 20, 3, generator=generator, dtype=torch.double)).roll(2, 0)
    angles = [float(class_margin(points).angle) for points in candidates]
    assert angles.index(max(angles)) == 2
    best = packing._best(candidates, largest_class_margin(20, 3))
    assert best.degrees == pytest.approx(max(angles), abs=1e-12)
    assert_close(best.points, candidates[angles.index(max(angles))])


def test_single_precision_is_good_to_a_hundredth_of_a_degree():
    found = pack(8, 3, starts=16, dtype=torch.float32)
    assert found.points.dtype == torch.float32
    assert found.degrees == pytest.approx(74.8585, abs=0.01)


def test_the_push_is_the_gradient_of_the_log_sum_exp(points):
    points = unit(points)[None].repeat(2, 1, 1).requires_grad_()
    sharpness = torch.tensor([3.0, 50.0], dtype=torch.double)
    cosine = points @ points.mT - torch.diag(torch.full((12,), math.inf, dtype=torch.double))
    energy = (sharpness[:, None, None] * cosine).logsumexp((1, 2)) / sharpness
    (gradient,) = torch.autograd.grad(energy.sum(), points)
    assert_close(packing._push(points.detach(), sharpness), gradient)


def test_the_push_does_not_depend_on_the_blocks(points, monkeypatch):
    points = unit(points)[None].repeat(2, 1, 1)
    sharpness = torch.tensor([3.0, 50.0], dtype=torch.double)
    whole = packing._push(points, sharpness)
    monkeypatch.setattr(packing, "_BLOCK", 100)
    assert_close(packing._push(points, sharpness), whole)


def test_orthoplex_has_the_axes_and_their_opposites():
    points = orthoplex(5, 3)
    expected = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, 0, 0], [0, -1, 0]])
    assert_close(points, expected.float())
    assert orthoplex(4, 2, dtype=torch.double).dtype == torch.double


def test_the_largest_cosine_is_that_of_all_pairs_whatever_the_blocks(points, monkeypatch):
    starts = unit(torch.stack([points, points.flip(1) + 1]))
    gram = starts @ starts.mT - 3 * torch.eye(12, dtype=torch.double)
    assert_close(packing._largest_cosine(starts), gram.amax((1, 2)))
    monkeypatch.setattr(packing, "_BLOCK", 100)
    assert_close(packing._largest_cosine(starts), gram.amax((1, 2)))


def test_riesz_energy_by_hand():
    # Distances of a square's corners: four sides of sqrt(2) and two diagonals of 2, both ways.
    square = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    assert_close(riesz_energy(square, 2.0), torch.tensor(8 / 2 + 4 / 4).sqrt())


@pytest.mark.parametrize("exponent", [0.5, 1.0, 20.0])
def test_riesz_energy_is_the_root_of_the_sum_over_pairs(points, exponent):
    total = sum((a - b).norm() ** -exponent for a, b in itertools.permutations(points, 2))
    assert_close(riesz_energy(points, exponent), total ** (1 / exponent))


def test_riesz_energy_tends_to_one_over_the_smallest_distance(points):
    smallest = torch.nn.functional.pdist(points).min()
    # The sum has 132 pairs, two of them the nearest.
    assert 1 < riesz_energy(points, 1e3) * smallest < 132 ** (1 / 1e3)
    assert_close(
        riesz_energy(points, 1e5) * smallest, torch.tensor(1.0).double(), atol=1e-4, rtol=0
    )


def test_riesz_energy_has_the_right_gradient_in_blocks_too(points, monkeypatch):
    monkeypatch.setattr(packing, "_BLOCK", 30)
    assert torch.autograd.gradcheck(lambda x: riesz_energy(x, 3.0), points.requires_grad_())


def test_riesz_energy_does_not_depend_on_the_blocks(points, monkeypatch):
    whole = riesz_energy(points, 3.0)
    monkeypatch.setattr(packing, "_BLOCK", 30)
    assert_close(riesz_energy(points, 3.0), whole)


def test_riesz_energy_of_coinciding_points_is_infinite(points):
    assert riesz_energy(torch.cat([points, points[:1]]), 2.0) == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(1, 3), "pack expects count of 2 or more.*got count=1 and size=3"),
        (lambda: pack(9, 3, dtype=torch.half), "float32 or float64, got torch.float16"),
        (lambda: pack(9, 3, starts=0), "got starts=0 and steps=3000"),
        (lambda: pack(9, 3, steps=0), "steps of 1 or more"),
        (lambda: orthoplex(7, 3), r"2 <= count <= 2 \* size, got count=7 and size=3"),
        (lambda: riesz_energy(torch.ones(3, 2), 0.0), "exponent above 0, got 0"),
        (lambda: riesz_energy(torch.ones(1, 2), 1.0), r"k of 2 or more, got \(1, 2\)"),
        (lambda: riesz_energy(torch.ones(3), 1.0), r"shape \(k, d\).*got \(3,\)"),
    ],
)
def test_impossible_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
