"""Angles from one minus and one plus their cosine: values, slopes, and both ends."""

import math

import pytest
import torch
from torch.testing import assert_close

from tammes.angles import angle, shifted_cosine, shifted_cosine_and_slope

SHIFTS = [0.5, 1.9, math.pi, -0.4, -2.0]


def ends(theta):
    """``gap`` and ``opposite`` of angles in double precision, exact at both ends."""
    theta = torch.as_tensor(theta, dtype=torch.double)
    return 2 * (theta / 2).sin().square(), 2 * (theta / 2).cos().square()


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_shifted_cosine_is_that_of_the_angle_continued_monotonically(shift):
    theta = torch.linspace(0.01, math.pi - 0.01, 41, dtype=torch.double)
    phi = theta + shift
    turns = (phi / math.pi).floor()
    expected = (1 - 2 * turns.remainder(2)) * phi.cos() - 2 * turns
    found = shifted_cosine(*ends(theta), shift)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (found.diff() < 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", SHIFTS)
def test_the_slope_is_that_of_autograd(shift, dtype):
    theta = torch.linspace(0.0, math.pi, 50, dtype=torch.double)
    gap, opposite = (number.to(dtype).requires_grad_() for number in ends(theta))
    value = shifted_cosine(gap, opposite, shift)
    by_gap, by_opposite = torch.autograd.grad(value.sum(), (gap, opposite))
    found, slope = shifted_cosine_and_slope(gap.detach(), opposite.detach(), shift)
    rounding = 4 * torch.finfo(dtype).eps
    assert_close(found, value.detach(), rtol=rounding, atol=rounding)
    # Both numbers are functions of one cosine.
    assert_close(slope, by_opposite - by_gap, rtol=2 * rounding, atol=2 * rounding)


@pytest.mark.parametrize("shift", [0.5, 1.9, -0.4, -2.0])
def test_the_slope_is_finite_at_both_ends(shift):
    gap, opposite = torch.tensor([0.0, 2.0, 1e-14]), torch.tensor([2.0, 0.0, 2.0])
    value, slope = shifted_cosine_and_slope(gap, opposite, shift)
    assert value.isfinite().all()
    # The sine has no derivative there.
    assert_close(slope.abs(), torch.full((3,), abs(math.cos(shift))))


def test_an_angle_keeps_its_digits_near_both_ends():
    theta = torch.tensor([1e-3, math.pi - 1e-3], dtype=torch.double)
    gap, opposite = (number.float() for number in ends(theta))
    assert_close(angle(gap, opposite).double(), theta, rtol=1e-6, atol=0)
