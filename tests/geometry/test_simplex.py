"""The regular simplex: its angles, what the losses reach there, and that nothing beats it."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import tammes
from tammes.geometry import simplex
from tammes.similarity import unit

SIZES = [(2, 1), (2, 2), (4, 3), (5, 8), (10, 16)]
GM = [(1.0, 0.0, 1.0, 0.0), (1.0, -0.35, 1.0, -0.35), (0.9, -0.1, 0.6, 0.2), (0.5, 0.3, -0.4, 0.1)]


def bound(count, scale, alpha1, beta1, alpha2, beta2):
    """The least GM-Softmax any arrangement can have (Theorems 5 and 8, signs corrected)."""
    own, rest = alpha2 + beta2 - alpha1 - beta1, 1 / (count - 1) + alpha1 + beta1
    return math.log(math.exp(scale * own) + (count - 1) * math.exp(-scale * rest))


def bounds(count, scale):
    """Every loss that is least at the simplex, and its least value."""
    gain = count / (count - 1)
    known = {
        tammes.normface(): math.log1p((count - 1) * math.exp(-scale * gain)),
        tammes.cosface(margin=0.35): math.log1p((count - 1) * math.exp(-scale * (gain - 0.35))),
        tammes.lm_softmax(): -gain + math.log(count - 1) / scale,
        tammes.sample_margin(): -gain,
    }
    return known | {tammes.gm_softmax(*s): bound(count, scale, *s) for s in GM}


def split_of(prototypes, features, labels, scale):
    return tammes.split(unit(features) @ unit(prototypes).T, labels, scale=scale)


# --------------------------------------------------------------------------------- the points


def test_two_and_three_points_by_hand():
    assert_close(simplex(2, 1).abs(), torch.ones(2, 1))
    assert_close(simplex(2, 1).sum(0), torch.zeros(1))
    triangle = simplex(3, 2, dtype=torch.double)
    assert_close(torch.cdist(triangle, triangle).sum(1), torch.full((3,), 2 * 3**0.5).double())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(count=st.integers(2, 40), extra=st.integers(0, 9))
def test_all_points_have_length_one_and_the_same_largest_angle(count, extra):
    points = simplex(count, count - 1 + extra, dtype=torch.double)
    gram = torch.full((count, count), -1 / (count - 1), dtype=torch.double).fill_diagonal_(1.0)
    assert_close(points @ points.T, gram, rtol=0, atol=1e-14)
    assert_close(points.sum(0), torch.zeros(count - 1 + extra, dtype=torch.double))
    assert points[:, count - 1 :].eq(0).all()


def test_the_type_is_the_default_or_the_one_asked_for():
    assert simplex(3, 2).dtype == torch.float32
    assert simplex(3, 2, dtype=torch.double).dtype == torch.double
    many = simplex(1000, 999)
    off = (many @ many.T + 1 / 999).fill_diagonal_(0.0)
    assert off.abs().max() < 1e-6


@pytest.mark.parametrize(("count", "size"), [(1, 3), (5, 3), (2, 0)])
def test_a_simplex_that_does_not_exist_is_refused(count, size):
    with pytest.raises(ValueError, match=f"got count={count} and size={size}"):
        simplex(count, size)


# -------------------------------------------------------------------------- what is reached there


@pytest.mark.parametrize(("count", "size"), SIZES)
@pytest.mark.parametrize("scale", [1.0, 7.0, 64.0])
def test_at_the_simplex_every_loss_is_at_its_bound(count, size, scale):
    head = tammes.CosineHead(size, count, scale=scale).double()
    points = simplex(count, size, dtype=torch.double)
    with torch.no_grad():
        head.weight.copy_(3 * points)
    labels = torch.arange(count).repeat(2)
    s = head.split(0.2 * points[labels], labels)
    gain = torch.full((2 * count,), count / (count - 1), dtype=torch.double)
    assert_close(s.target - s.hardest, gain)
    assert_close(s.others - scale * s.hardest, torch.full_like(gain, math.log(count - 1)))
    assert_close(tammes.logit_divergence()(s), torch.zeros_like(gain), rtol=0, atol=1e-13)
    for term, least in bounds(count, scale).items():
        assert_close(term(s), torch.full_like(gain, least), rtol=1e-9, atol=1e-13)
    assert tammes.zero_centroid()(head.prototypes) < 1e-30
    assert tammes.super_symmetry()(head.prototypes) < 1e-28


def near_and_far(count, size, draws):
    """Arrangements from almost a simplex to anything, with features from own prototype to any."""
    points = simplex(count, size, dtype=torch.double)
    for noise in torch.logspace(-3, 1, draws).tolist():
        prototypes = unit(points + noise * torch.randn_like(points))
        yield noise, prototypes


@pytest.mark.parametrize(("count", "size"), SIZES)
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_with_equal_classes_no_arrangement_has_a_smaller_mean_loss(count, size, scale):
    labels = torch.arange(count).repeat(3)
    closest = {}
    for noise, prototypes in near_and_far(count, size, draws=60):
        features = unit(prototypes[labels] + noise * torch.randn(3 * count, size).double())
        s = split_of(prototypes, features, labels, scale)
        for term, least in bounds(count, scale).items():
            slack = (term(s).mean() - least).item()
            assert slack > -1e-12, term
            closest[term] = min(slack, closest.get(term, math.inf))
    # The test means something only where the bound is nearly reached.
    assert max(closest.values()) < 1e-2


def centred(prototypes):
    """Unit prototypes that sum to zero, near those given."""
    while prototypes.sum(0).abs().max() > 1e-13:
        prototypes = unit(prototypes - prototypes.mean(0))
    return prototypes


@pytest.mark.parametrize(("count", "size"), [(4, 3), (5, 8), (10, 16)])
def test_bound_holds_for_every_class_if_prototypes_sum_to_zero(count, size):
    scale, labels = 5.0, torch.tensor([0] * 20 + [1] * 3 + list(range(count)))
    settings = [GM[i % len(GM)] for i in range(len(labels))]
    columns = torch.tensor(settings, dtype=torch.double).T
    named = dict(zip(("alpha1", "beta1", "alpha2", "beta2"), columns, strict=True))
    least = torch.tensor([bound(count, scale, *s) for s in settings], dtype=torch.double)
    closest = math.inf
    for noise, start in near_and_far(count, size, draws=20):
        prototypes = centred(start)
        features = unit(prototypes[labels] + noise * torch.randn(len(labels), size).double())
        slack = tammes.gm_softmax()(split_of(prototypes, features, labels, scale), **named) - least
        assert slack.min() > -1e-12
        closest = min(closest, slack.max().item())
    assert closest < 1e-2


def test_without_that_an_unbalanced_mean_does_beat_the_bound():
    # Two rare classes crowd together so that the large one has more room.
    labels = torch.tensor([0] * 98 + [1, 2])
    angles = torch.tensor([0.0, math.pi - 0.3, math.pi + 0.3], dtype=torch.double)
    prototypes = torch.stack([angles.cos(), angles.sin()], 1)
    s = split_of(prototypes, prototypes[labels], labels, 7.0)
    assert tammes.lm_softmax()(s).mean() < bounds(3, 7.0)[tammes.lm_softmax()]


# ----------------------------------------------------------------------- means and the least margin


@settings(max_examples=25, deadline=None, derandomize=True)
@given(n=st.integers(1, 9), count=st.integers(2, 6), seed=st.integers(0, 999))
def test_the_soft_least_margin_is_above_the_mean_of_lm_softmax(n, count, seed):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(n + count, 4, dtype=torch.double, generator=draw)
    labels = torch.randint(count, (n,), generator=draw)
    for scale in (1.0, 7.0, 100.0):
        s = split_of(rows[n:], rows[:n], labels, scale)
        lm, negative_margin = tammes.lm_softmax()(s), tammes.sample_margin()(s)
        soft = (s.others - scale * s.target).logsumexp(0) / scale
        assert soft >= lm.mean() + math.log(n) / scale - 1e-12
        least_margin = -negative_margin.max()
        assert -least_margin >= negative_margin.mean() - 1e-12
        # Its limit is minus the least margin.
        assert -least_margin <= soft + 1e-12
        assert soft <= -least_margin + math.log(n * (count - 1)) / scale + 1e-12


@pytest.mark.parametrize(("count", "size"), SIZES)
def test_at_the_simplex_that_inequality_is_an_equality(count, size):
    points, labels = simplex(count, size, dtype=torch.double), torch.arange(count)
    s = split_of(points, points, labels, 7.0)
    soft = (s.others - 7 * s.target).logsumexp(0) / 7
    assert_close(soft, tammes.lm_softmax()(s).mean() + math.log(count) / 7)


def test_a_correct_example_has_a_margin_above_zero():
    rows = F.normalize(torch.randn(60, 4, dtype=torch.double))
    labels = torch.randint(6, (54,))
    s = split_of(rows[54:], rows[:54], labels, 1.0)
    correct = (rows[:54] @ rows[54:].T).argmax(1) == labels
    assert torch.equal(s.target > s.hardest, correct)
    assert 0 < correct.sum() < 54
