"""The theorems, each found again by optimisation from random starts, and the numbers they give.

Numbers in brackets refer to Zhou et al., Learning Towards the Largest Margins, ICLR 2022, with the
corrections listed in docs/geometry.md. Everything is in double precision.
"""

import math

import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes import geometry
from tammes.geometry import largest_sample_margin, pack, simplex
from tammes.metrics.functional import class_margin
from tammes.similarity import Cosine, unit

PLACES = [(2, 2), (4, 3), (5, 8)]
GM = (0.9, -0.1, 0.6, 0.2)
LOSSES = {
    "normface": (tammes.normface(), geometry.normface_lower_bound),
    "cosface": (
        tammes.cosface(margin=0.35),
        lambda k, s: geometry.cosface_lower_bound(k, s, margin=0.35),
    ),
    "arcface": (
        tammes.arcface(margin=0.5),
        lambda k, s: geometry.combined_margin_lower_bound(k, s, m2=0.5),
    ),
    "sphereface": (tammes.sphereface(margin=4), geometry.normface_lower_bound),
    "combined": (
        tammes.combined_margin(1.2, 0.3, 0.2),
        lambda k, s: geometry.combined_margin_lower_bound(k, s, m2=0.3, m3=0.2),
    ),
    "gm_softmax": (tammes.gm_softmax(*GM), lambda k, s: geometry.risk_lower_bound(k, s, *GM)),
    "lm_softmax": (tammes.lm_softmax(), geometry.lm_softmax_lower_bound),
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def degrees_of(prototypes):
    return float(class_margin(prototypes).angle)


def losses(term, scale, features, prototypes, labels):
    """The term of every example on unit features and unit prototypes."""
    features, prototypes = unit(features), unit(prototypes)
    own = Cosine().own(features, prototypes[labels], term.definition.reads)
    return term(tammes.split(features @ prototypes.T, labels, scale=scale, own=own))


def descend(objective, *starts, iterations=400):
    """Minimise by L-BFGS; the free tensors are returned."""
    free = [start.clone().requires_grad_() for start in starts]
    optimizer = torch.optim.LBFGS(
        free,
        max_iter=iterations,
        history_size=20,
        tolerance_grad=1e-13,
        tolerance_change=1e-17,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        value = objective(*free)
        value.backward()
        return value

    optimizer.step(closure)
    return [tensor.detach() for tensor in free]


def beside(prototypes, offsets, labels):
    """Features at an angle that grows with the offset's square: smooth at a corner at zero."""
    own = unit(prototypes)[labels]
    across = offsets - (offsets * own).sum(1, keepdim=True) * own
    return unit(own + across * across.norm(dim=1, keepdim=True))


def optimum(term, scale, place, labels, weights=None, seed=0):
    """Features and prototypes that minimise the (weighted) mean of a term."""
    count, size = place
    prototypes, features = draw(count, size, seed=seed), draw(len(labels), size, seed=seed + 100)
    # A margin added to the angle leaves a corner where a feature meets its prototype.
    corner = term.name in ("arcface", "combined_margin")

    def located(prototypes, features):
        return beside(prototypes, features, labels) if corner else features

    def objective(prototypes, features):
        each = losses(term, scale, located(prototypes, features), prototypes, labels)
        return each.mean() if weights is None else (weights * each).sum()

    prototypes, features = descend(objective, prototypes, features)
    return unit(located(prototypes, features)), unit(prototypes)


def simplex_gram(count):
    points = simplex(count, count - 1, dtype=torch.double)
    return points @ points.T


# Theorem 0/4: the softmax does not care about the class margin.


@pytest.mark.parametrize("degrees", [1.0, 3.0, 60.0, 89.0])
def test_theorem_4_softmax_comes_near_its_infimum_at_any_class_margin(degrees):
    count = 5
    # A simplex around an axis, closed like an umbrella until neighbours are at the wanted angle.
    cosine, flat = math.cos(math.radians(degrees)), -1 / (count - 1)
    height = math.sqrt((cosine - flat) / (1 - flat))
    directions = torch.cat(
        [
            torch.full((count, 1), height, dtype=torch.double),
            math.sqrt(1 - height**2) * simplex(count, count - 1, dtype=torch.double),
        ],
        1,
    )
    assert degrees_of(directions) == pytest.approx(degrees, abs=1e-9)

    labels = torch.arange(count)
    term = tammes.softmax()

    def risk(features, growth):
        prototypes = growth.exp() * directions
        return term(tammes.split(features @ prototypes.T, labels)).mean()

    features, growth = descend(
        # The logarithm, so that it does not saturate, but of nothing below what is wanted.
        lambda features, growth: (risk(features, growth) + 1e-9).log(),
        draw(count, count),
        torch.zeros(1, dtype=torch.double),
    )
    assert risk(features, growth) < 1e-6
    # And where features are at the prototypes, this length is enough.
    length = (20 / (1 - cosine)) ** 0.5
    value = risk(length * directions, torch.tensor([math.log(length)], dtype=torch.double))
    assert value <= math.log1p((count - 1) * math.exp(-20)) * (1 + 1e-6)


# Lemma 1: the simplex is the best packing and has the least energy.


@pytest.mark.parametrize("exponent", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_lemma_1_the_least_riesz_energy_is_at_the_simplex(place, exponent):
    for seed in range(2):
        (points,) = descend(
            lambda points: geometry.riesz_energy(unit(points), exponent), draw(*place, seed=seed)
        )
        points = unit(points)
        assert_close(points @ points.T, simplex_gram(place[0]), atol=1e-6, rtol=0)


def test_the_least_riesz_energy_of_more_points_tends_to_the_best_packing():
    (points,) = descend(lambda points: geometry.riesz_energy(unit(points), 6.0), draw(12, 3))
    for exponent in (25.0, 100.0, 400.0):
        (points,) = descend(
            lambda points, exponent=exponent: geometry.riesz_energy(unit(points), exponent), points
        )
    assert degrees_of(points) == pytest.approx(63.4349, abs=0.01)


# Proposition 3 and Theorem 2: the largest sample margin.


def smallest_margin(features, prototypes, labels):
    return -losses(tammes.sample_margin(), 1.0, features, prototypes, labels).max()


def sharpen(objective, *free, last=1e5):
    """Minimise a soft maximum while it becomes a sharp one."""
    for sharpness in torch.logspace(1, math.log10(last), 9).tolist():
        free = descend(lambda *x, s=sharpness: objective(s, *x), *free, iterations=150)
    return free


def soft_worst(sharpness, features, prototypes, labels):
    """Minus the smallest sample margin, softly: the left side of the LM-Softmax inequality."""
    worst = losses(tammes.lm_softmax(), sharpness, features, prototypes, labels)
    return (sharpness * worst).logsumexp(0) / sharpness


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_proposition_3_the_largest_smallest_margin_is_the_simplex(place):
    count, size = place
    labels = torch.arange(count).repeat(2)
    features, prototypes = sharpen(
        lambda s, features, prototypes: soft_worst(s, features, prototypes, labels),
        draw(2 * count, size),
        draw(count, size, seed=1),
        last=1e3,
    )
    assert smallest_margin(features, prototypes, labels) == pytest.approx(
        -geometry.sample_margin_lower_bound(count), abs=1e-5
    )
    assert_close(unit(prototypes) @ unit(prototypes).T, simplex_gram(count), atol=1e-5, rtol=0)
    assert_close(unit(features), unit(prototypes)[labels], atol=1e-4, rtol=0)


@pytest.mark.parametrize("place", [(4, 3), (8, 3), (9, 5)], ids=str)
def test_theorem_2_no_feature_has_a_larger_margin_than_the_distance_to_the_hull(place):
    prototypes = unit(draw(*place))
    labels = torch.arange(place[0])
    best = largest_sample_margin(prototypes)
    (features,) = sharpen(
        lambda s, features: losses(tammes.lm_softmax(), s, features, prototypes, labels).sum(),
        draw(*place, seed=1),
    )
    reached = -losses(tammes.sample_margin(), 1.0, features, prototypes, labels)
    assert (reached <= best.margin + 1e-12).all()
    assert_close(reached, best.margin, atol=1e-4, rtol=0)


def test_theorem_2_the_largest_smallest_margin_is_at_the_best_packing():
    labels = torch.arange(8)
    features, prototypes = sharpen(
        lambda s, features, prototypes: soft_worst(s, features, prototypes, labels),
        draw(8, 3),
        draw(8, 3, seed=1),
    )
    limit = geometry.largest_class_margin(8, 3)
    assert degrees_of(prototypes) == pytest.approx(limit.degrees, abs=0.01)
    assert smallest_margin(features, prototypes, labels) == pytest.approx(
        1 - math.cos(limit.angle), abs=1e-3
    )


def test_theorem_2_feature_at_the_best_packing_is_the_prototype():
    points = pack(8, 3, starts=16).points
    best = largest_sample_margin(points)
    assert_close(best.margin, torch.full((8,), 0.738796).double(), atol=1e-5, rtol=0)
    assert_close(best.features, points, atol=1e-3, rtol=0)
    # In print: away from the centroid of the nearest neighbours.
    cosine = points @ points.T
    near = (cosine > cosine.fill_diagonal_(-1).amax(1, keepdim=True) - 1e-3).double()
    printed = unit(points - near @ points / near.sum(1, keepdim=True))
    assert smallest_margin(printed, points, torch.arange(8)) == pytest.approx(0.6326, abs=1e-3)


# Theorems 5 and 7, Proposition 6: balanced classes.


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_theorem_5_and_proposition_6_all_losses_share_the_simplex_as_optimum(name, place):
    term, bound = LOSSES[name]
    count, _ = place
    labels = torch.arange(count).repeat(2)
    features, prototypes = optimum(term, 5.0, place, labels)
    risk = losses(term, 5.0, features, prototypes, labels).mean()
    assert risk == pytest.approx(bound(count, 5.0), abs=1e-7)
    assert_close(prototypes @ prototypes.T, simplex_gram(count), atol=1e-5, rtol=0)
    assert_close(features, prototypes[labels], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_the_bound_is_the_value_at_the_simplex(name):
    term, bound = LOSSES[name]
    for count, scale in [(2, 1.0), (5, 0.1), (10, 64.0)]:
        points = simplex(count, 9, dtype=torch.double)
        value = losses(term, scale, points, points, torch.arange(count))
        # The angle is never taken below 1.4e-6, which ArcFace sees.
        assert_close(value, torch.full_like(value, bound(count, scale)), atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_no_balanced_arrangement_is_below_the_bound(name):
    term, bound = LOSSES[name]
    labels = torch.arange(5).repeat(3)
    near = simplex(5, 4, dtype=torch.double)
    for seed in range(50):
        noise = 10.0 ** (-seed % 5 - 2)
        prototypes = near + noise * draw(5, 4, seed=seed)
        features = near[labels] + noise * draw(15, 4, seed=seed + 1000)
        risk = losses(term, 6.0, features, prototypes, labels).mean()
        assert risk >= bound(5, 6.0) - 1e-12


@pytest.mark.parametrize(("alpha", "collapses"), [(0.38, True), (0.42, False)])
def test_below_the_smallest_alpha_the_classes_collapse(alpha, collapses):
    assert geometry.smallest_alpha1(6) == 0.4
    term = tammes.gm_softmax(alpha, 0.0, alpha, 0.0)
    labels = torch.arange(6)
    _, prototypes = optimum(term, 0.1, (6, 5), labels)
    degrees = degrees_of(prototypes)
    assert degrees == pytest.approx(0 if collapses else 101.537, abs=0.01)


def test_theorem_7_the_sample_margin_regulariser_ends_at_the_simplex():
    count, size = 4, 3
    labels = torch.arange(count)
    free = [draw(count, size).requires_grad_(), draw(count, size, seed=1).requires_grad_()]
    optimizer = torch.optim.Adam(free, lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(1200):
        optimizer.zero_grad()
        losses(tammes.sample_margin(), 1.0, *free, labels).mean().backward()
        optimizer.step()
        schedule.step()
    features, prototypes = (tensor.detach() for tensor in free)
    risk = losses(tammes.sample_margin(), 1.0, features, prototypes, labels).mean()
    assert risk == pytest.approx(geometry.sample_margin_lower_bound(count), abs=1e-5)
    assert degrees_of(prototypes) == pytest.approx(109.4712, abs=0.05)


def test_theorem_7_no_balanced_arrangement_is_below_the_bound():
    labels = torch.arange(5).repeat(3)
    for seed in range(200):
        features, prototypes = draw(15, 4, seed=seed), draw(5, 4, seed=seed + 1000)
        risk = losses(tammes.sample_margin(), 1.0, features, prototypes, labels).mean()
        assert risk >= geometry.sample_margin_lower_bound(5)


# Theorem 8: any balance.


WEIGHTS = torch.tensor([100.0, 100.0, 1.0, 1.0], dtype=torch.double) / 202


def without_centroid(term, place, weights):
    """Minimise with prototypes of sum zero, by an augmented Lagrangian."""
    labels = torch.arange(place[0])
    free = [draw(*place), draw(*place, seed=1)]
    price = torch.zeros(place[1], dtype=torch.double)
    for _ in range(12):

        def objective(features, prototypes, price=price):
            risk = (weights * losses(term, 10.0, features, prototypes, labels)).sum()
            # Risks near zero would not be felt beside the penalty; their logarithm is.
            risk = risk if term.name == "lm_softmax" else risk.log()
            centroid = unit(prototypes).sum(0)
            return risk + price @ centroid + 100 * centroid.square().sum()

        free = descend(objective, *free, iterations=100)
        price = price + 200 * unit(free[1]).sum(0)
    return unit(free[0]), unit(free[1])


@pytest.mark.parametrize("name", ["normface", "cosface", "lm_softmax"])
def test_theorem_8_with_unequal_classes_the_simplex_needs_a_centroid_of_zero(name):
    term, bound = LOSSES[name]
    labels = torch.arange(4)
    features, prototypes = without_centroid(term, (4, 3), WEIGHTS)
    assert prototypes.sum(0).norm() < 1e-6
    risk = (WEIGHTS * losses(term, 10.0, features, prototypes, labels)).sum()
    assert risk == pytest.approx(bound(4, 10.0), rel=1e-5)
    assert_close(prototypes @ prototypes.T, simplex_gram(4), atol=1e-4, rtol=0)
    # Left alone, the two rare classes are pushed together, and the risk is below the bound.
    features, prototypes = optimum(term, 10.0, (4, 3), labels, WEIGHTS)
    assert degrees_of(prototypes) < 80
    assert (WEIGHTS * losses(term, 10.0, features, prototypes, labels)).sum() < bound(4, 10.0)


def test_theorem_8_holds_for_parameters_of_each_example():
    count, size = 5, 6
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 3, 4, 4, 0])
    alpha1 = 0.3 + draw(10).abs()
    beta1, beta2 = 0.2 * draw(2, 10, seed=1)
    alpha2 = alpha1 - draw(10, seed=2).abs()
    arguments = {"alpha1": alpha1, "beta1": beta1, "alpha2": alpha2, "beta2": beta2}
    least = geometry.risk_lower_bound(count, 4.0, **arguments, zero_centroid=True)

    def risk(features, prototypes):
        cosine = unit(features) @ unit(prototypes).T
        return tammes.gm_softmax()(tammes.split(cosine, labels, scale=4.0), **arguments).mean()

    points = simplex(count, size, dtype=torch.double)
    assert risk(points[labels], points) == pytest.approx(least, abs=1e-13)
    # Prototypes of sum zero that are no simplex: opposite pairs, and a triangle.
    for seed in range(50):
        pair, (one, two) = unit(draw(1, size, seed=seed)), unit(draw(2, size, seed=seed + 50))
        two = unit(two - (two @ one) * one)
        turn = [
            math.cos(a) * one + math.sin(a) * two for a in (0, 2 * math.pi / 3, -2 * math.pi / 3)
        ]
        prototypes = torch.cat([pair, -pair, torch.stack(turn)])
        assert prototypes.sum(0).norm() < 1e-12
        features = prototypes[labels] + 0.3 * draw(10, size, seed=seed)
        assert risk(features, prototypes) > least


# LM-Softmax against the smallest margin.


def test_lm_softmax_inequality_holds_and_is_tight_at_the_simplex():
    labels = torch.arange(5).repeat(2)
    for seed in range(100):
        features, prototypes = draw(10, 4, seed=seed), draw(5, 4, seed=seed + 1000)
        value = losses(tammes.lm_softmax(), 7.0, features, prototypes, labels)
        left = soft_worst(7.0, features, prototypes, labels)
        assert left >= value.mean() + math.log(10) / 7 - 1e-12
    points = simplex(5, 4, dtype=torch.double)
    value = losses(tammes.lm_softmax(), 7.0, points[labels], points, labels)
    left = soft_worst(7.0, points[labels], points, labels)
    assert left == pytest.approx(float(value.mean()) + math.log(10) / 7, abs=1e-14)
    # As printed, with 1 / (sN), it fails there.
    assert left < value.mean() / 7 + math.log(10) / 7 - 0.5


@pytest.mark.parametrize("scale", [10.0, 100.0, 1e4])
def test_lm_softmax_tends_to_minus_the_smallest_margin(scale):
    labels = torch.arange(5).repeat(2)
    for seed in range(20):
        features, prototypes = draw(10, 4, seed=seed), draw(5, 4, seed=seed + 1000)
        excess = soft_worst(scale, features, prototypes, labels)
        excess = excess + smallest_margin(features, prototypes, labels)
        assert -1e-12 <= excess <= math.log(10 * 4) / scale


# The numbers themselves.


def test_the_lower_bounds_by_hand():
    assert geometry.normface_lower_bound(3, 2.0) == pytest.approx(math.log1p(2 * math.exp(-3)))
    assert geometry.cosface_lower_bound(3, 2.0, 0.5) == pytest.approx(math.log1p(2 * math.exp(-2)))
    assert geometry.lm_softmax_lower_bound(3, 2.0) == pytest.approx(-1.5 + math.log(2) / 2)
    assert geometry.sample_margin_lower_bound(3) == -1.5
    assert geometry.risk_lower_bound(3, 2.0, 0.9, -0.1, 0.6, 0.2) == pytest.approx(
        math.log(math.exp(2 * (0.8 - 0.8)) + 2 * math.exp(-2 * (0.5 + 0.8)))
    )


def test_the_lower_bounds_keep_their_digits_at_a_large_scale():
    tiny = geometry.normface_lower_bound(10, 64.0)
    assert tiny == pytest.approx(9 * math.exp(-640 / 9), rel=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: geometry.risk_lower_bound(1, 5.0), "at least 2 classes, got 1"),
        (lambda: geometry.risk_lower_bound(3, 0.0), "scale above 0, got 0"),
        (lambda: geometry.risk_lower_bound(3, 5.0, 1.0, 0.0, 1.1), "alpha2 <= alpha1"),
        (lambda: geometry.risk_lower_bound(6, 5.0, 0.3, 0, 0.3), "at least 0.4 for 6 classes"),
        (
            lambda: geometry.risk_lower_bound(6, 5.0, -0.3, 0, -1.0, zero_centroid=True),
            "above -0.2 for 6 classes, got -0.3",
        ),
        (lambda: geometry.risk_lower_bound(6, 5.0, [1.0, 2.0]), "unless zero_centroid=True"),
        (lambda: geometry.combined_margin_lower_bound(6, 5.0, m2=-0.1), "m2 of 0 or more"),
        (lambda: geometry.sample_margin_lower_bound(1), "at least 2 classes, got 1"),
        (lambda: geometry.smallest_alpha1(0), "at least 2 classes, got 0"),
    ],
)
def test_impossible_numbers_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
