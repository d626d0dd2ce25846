"""Margins and scales that are called feasible are, and those called infeasible are not."""

import math

import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes.advise.feasibility import (
    KINDS,
    bent,
    builder,
    class_radius,
    feasible_margins,
    largest_sample_margin_of_any,
    log_odds,
    scale_for,
    starting_loss,
)
from tammes.geometry import (
    combined_margin_lower_bound,
    cosface_lower_bound,
    largest_class_margin,
    largest_sample_margin,
    normface_lower_bound,
    orthoplex,
    simplex,
)
from tammes.heads import adacos_scale
from tammes.losses.angular import target_similarity

SHARP = 1e4
"""A scale at which a margin missed by a hundredth costs a hundred nats."""

BEST = {
    "simplex": simplex(5, 4).double(),
    "orthoplex": orthoplex(8, 4).double(),
    "circle": torch.tensor(
        [[math.cos(a), math.sin(a)] for a in torch.linspace(0, 2 * math.pi, 8)[:-1].tolist()],
        dtype=torch.double,
    ),
}
"""Arrangements with the largest class margin there is."""


def limit(name):
    return largest_class_margin(*BEST[name].shape).angle


def term(loss, margin, classes):
    """A loss with its margin set, as a user would."""
    if loss == "ldam":
        return tammes.ldam(counts=[7] * classes, max_margin=margin)
    if loss == "gm_softmax":
        return tammes.gm_softmax(beta1=-margin, beta2=-margin)
    if loss == "combined_margin":
        return tammes.combined_margin(m2=0.3, m3=margin)
    if loss == "magface":
        return tammes.magface(max_margin=margin, norm_weight=0.0)
    return builder(loss)(margin=margin)


def losses_at(loss, margin, prototypes, features, labels):
    """Loss of each example, on prototypes that stand where they should."""
    head = tammes.CosineHead(prototypes.shape[1], len(prototypes), scale=SHARP)
    criterion = tammes.Criterion(
        head, term(loss, margin, len(prototypes)), reduction="none"
    ).double()
    with torch.no_grad():
        head.weight.copy_(prototypes)
    if loss == "adaface":
        # Features of length 100 are then of the best quality, where the margin is largest.
        features = 100 * features
        criterion.states["adaface"].mean.fill_(1.0)
        criterion.states["adaface"].std.fill_(0.1)
    if loss == "magface":
        # So long that the margin is largest.
        features = 1000 * features
    return criterion.eval()(features, labels).detach()


@pytest.mark.parametrize("m1", [1.0, 1.7, 4.0])
@pytest.mark.parametrize("m2", [-0.4, 0.0, 0.5])
def test_the_bent_cosine_is_the_score_the_losses_compute(m1, m2):
    theta = torch.linspace(0.01, math.pi - 0.01, 50, dtype=torch.double)
    cosine = theta.cos()
    rows = tammes.split(torch.stack([cosine, cosine], 1), torch.zeros(50, dtype=torch.long))
    expected = target_similarity(rows, m1=m1, m2=m2, m3=0.2)
    ours = torch.tensor([bent(t, (m1, m2, 0.2)) for t in theta.tolist()], dtype=torch.double)
    assert_close(ours, expected)


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("arrangement", BEST)
def test_margin_below_the_largest_is_met_and_one_above_is_not(loss, arrangement):
    prototypes, angle = BEST[arrangement], limit(arrangement)
    largest, labels = KINDS[loss].largest(angle), torch.arange(len(prototypes))
    if math.isinf(largest):
        met = losses_at(loss, 50.0, prototypes, prototypes, labels)
        assert (met < 1e-3).all()
        return
    met = losses_at(loss, largest - 0.01, prototypes, prototypes, labels)
    missed = losses_at(loss, largest + 0.01, prototypes, prototypes, labels)
    assert (met < 1e-3).all()
    assert (missed > 50).all()


@pytest.mark.parametrize("arrangement", BEST)
@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
def test_margin_as_a_distance_is_bounded_by_the_closest_prototypes(loss, arrangement):
    features = BEST[arrangement].repeat_interleave(2, 0)
    labels = torch.arange(len(BEST[arrangement])).repeat_interleave(2)
    batch = tammes.Batch(features, labels, torch.ones(len(labels), dtype=torch.bool))
    row = next(row for row in feasible_margins(limit(arrangement)) if row.loss == loss)
    met, anchors = builder(loss)(margin=row.largest - 1e-6, normalize=True)(batch)
    missed, _ = builder(loss)(margin=row.largest + 0.01, normalize=True)(batch)
    assert anchors.all()
    assert (met == 0).all()
    assert (missed > 0).all()


def test_no_features_at_all_meet_an_angular_margin_above_the_class_margin(generator):
    for _ in range(20):
        prototypes = torch.randn(6, 3, dtype=torch.double, generator=generator)
        unit = torch.nn.functional.normalize(prototypes)
        cosine = (unit @ unit.T).fill_diagonal_(-1)
        angle = cosine.max().acos()
        a, b = divmod(int(cosine.argmax()), 6)
        features = torch.randn(500, 3, dtype=torch.double, generator=generator)
        theta = (torch.nn.functional.normalize(features) @ unit[[a, b]].T).acos()
        assert (theta[:, 1] - theta[:, 0] <= angle + 1e-9).all()


@pytest.mark.parametrize("angle", [0.3, 1.2, math.pi / 2, 1.9])
def test_the_radius_of_a_class_has_the_closed_forms(angle):
    assert class_radius(angle) == pytest.approx(angle / 2)
    assert class_radius(angle, (1.0, 0.2, 0.0)) == pytest.approx((angle - 0.2) / 2)
    assert class_radius(angle, (4.0, 0.0, 0.0)) == pytest.approx(angle / 5)
    cosine = angle / 2 - math.asin(0.03 / (2 * math.sin(angle / 2)))
    assert class_radius(angle, (1.0, 0.0, 0.03)) == pytest.approx(cosine)


def test_there_is_no_radius_where_the_margin_cannot_be_met():
    assert class_radius(1.0, (1.0, 1.0 - 1e-6, 0.0)) == pytest.approx(0, abs=1e-6)
    assert class_radius(1.0, (1.0, 1.0 + 1e-6, 0.0)) is None


@pytest.mark.parametrize(
    ("loss", "margin"), [("cosface", 0.2), ("arcface", 0.3), ("sphereface", 3), ("adaface", 0.1)]
)
def test_an_example_within_the_radius_meets_the_margin_and_one_outside_does_not(loss, margin):
    prototypes, angle = BEST["circle"], limit("circle")
    radius = class_radius(angle, KINDS[loss].place(margin))

    def at(theta):
        # Towards the next prototype.
        feature = torch.tensor([[math.cos(theta), math.sin(theta)]], dtype=torch.double)
        return float(losses_at(loss, margin, prototypes, feature, torch.tensor([0])))

    assert at(radius - 0.01) < 1e-3
    assert at(radius + 0.01) > 50


def test_the_table_of_margins_has_the_losses_own_defaults():
    rows = {row.loss: row for row in feasible_margins(1.5)}
    assert rows["cosface"].default == tammes.cosface().settings["margin"]
    assert rows["arcface"].default == tammes.arcface().settings["margin"]
    assert rows["adaface"].default == tammes.adaface().settings["margin"]
    assert rows["combined_margin"].default == 0.2
    assert rows["normface"].setting == ""


def test_a_default_that_cannot_be_met_is_called_infeasible():
    rows = {row.loss: row for row in feasible_margins(0.45)}
    assert not rows["arcface"].feasible
    assert rows["arcface"].radius is None
    assert rows["sphereface"].feasible
    assert not rows["contrastive"].feasible
    assert rows["triplet"].feasible


@pytest.mark.parametrize(
    "points",
    [simplex(4, 3), orthoplex(5, 3), orthoplex(6, 3), orthoplex(12, 6), BEST["circle"]],
    ids=["simplex", "five of the octahedron", "octahedron", "orthoplex", "circle"],
)
@pytest.mark.parametrize("noise", [0.01, 0.3, 3.0])
def test_no_prototypes_have_a_larger_sample_margin_than_the_limit(points, noise, generator):
    points = points.double()
    ours = largest_sample_margin_of_any(*points.shape, largest_class_margin(*points.shape).angle)
    for _ in range(10):
        moved = points + noise * torch.randn(points.shape, dtype=torch.double, generator=generator)
        found = largest_sample_margin(torch.nn.functional.normalize(moved))
        assert float(found.margin.min()) <= ours


@pytest.mark.parametrize(("points", "expected"), [(simplex(4, 3), 4 / 3), (orthoplex(5, 3), 1.0)])
def test_simplex_and_orthoplex_reach_the_limit_of_the_sample_margin(points, expected):
    angle = largest_class_margin(*points.shape).angle
    assert largest_sample_margin_of_any(*points.shape, angle) == pytest.approx(expected)
    assert 1 - math.cos(angle) == pytest.approx(expected)
    found = largest_sample_margin(points.double()).margin.min()
    assert float(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("classes", [2, 10, 1_000_000])
@pytest.mark.parametrize("posterior", [0.7, 0.9, 0.999])
def test_at_the_least_scale_the_least_risk_is_that_of_the_posterior(classes, posterior):
    odds, others = log_odds(posterior, classes), -1 / (classes - 1)
    wanted = -math.log(posterior)
    scale = scale_for(odds, 1.0, others)
    assert scale == pytest.approx((classes - 1) / classes * odds)
    assert normface_lower_bound(classes, scale) == pytest.approx(wanted)
    scale = scale_for(odds, bent(0, (1.0, 0.0, 0.35)), others)
    assert cosface_lower_bound(classes, scale, 0.35) == pytest.approx(wanted)
    scale = scale_for(odds, bent(0, (1.0, 0.5, 0.1)), others)
    assert combined_margin_lower_bound(classes, scale, 0.5, 0.1) == pytest.approx(wanted)


@pytest.mark.parametrize("arrangement", ["simplex", "orthoplex"])
def test_the_scale_at_the_largest_class_margin_is_enough_for_the_posterior(arrangement):
    prototypes, angle = BEST[arrangement], limit(arrangement)
    scale = scale_for(log_odds(0.9, len(prototypes)), 1.0, math.cos(angle))
    posterior = (scale * prototypes @ prototypes.T).softmax(1).diag()
    # On the simplex all others are as near as the nearest.
    if arrangement == "simplex":
        assert_close(posterior, torch.full_like(posterior, 0.9))
    assert (posterior >= 0.9 - 1e-9).all()
    assert (posterior < 0.95).all()


def test_chance_needs_no_scale_and_a_margin_that_is_not_met_has_none():
    assert scale_for(log_odds(0.1, 10), 1.0, 0.0) == pytest.approx(0, abs=1e-12)
    assert scale_for(log_odds(0.05, 10), 1.0, 0.0) == 0
    assert scale_for(log_odds(0.9, 10), 0.1, 0.2) == math.inf


def test_adacos_gives_even_odds_at_45_degrees():
    scale = adacos_scale(1000)
    assert math.exp(scale * math.cos(math.pi / 4)) == pytest.approx(999)


@pytest.mark.parametrize(
    ("loss", "classes", "size", "scale"),
    [
        (tammes.arcface(), 5000, 128, 64.0),
        (tammes.cosface(), 3000, 512, 64.0),
        (tammes.normface(), 1000, 64, 16.0),
        (tammes.cosface(), 10, 64, 16.0),
        (tammes.lm_softmax(), 8, 3, 10.0),
        (tammes.sphereface(margin=1.5), 100, 32, 30.0),
        (tammes.sample_margin(), 2000, 32, 30.0),
    ],
    ids=repr,
)
def test_the_loss_before_training_is_as_foretold(loss, classes, size, scale):
    simulated = []
    for _ in range(20):
        criterion = tammes.Criterion(tammes.CosineHead(size, classes, scale=scale), loss)
        labels = torch.randint(classes, (500,))
        with torch.no_grad():
            simulated.append(float(criterion(torch.randn(500, size), labels)))
    mean = sum(simulated) / len(simulated)
    assert starting_loss(loss, classes, size, scale) == pytest.approx(mean, rel=0.03)


def test_what_depends_on_more_than_the_split_has_no_foretold_loss():
    assert starting_loss(tammes.adaface(), 10, 4, 16.0) is None
    assert starting_loss(tammes.hinge(), 10, 4, 16.0) is None
    assert starting_loss(tammes.nca(), 10, 4, 16.0) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cosfase", "there is no loss 'cosfase'; did you mean cosface"),
        ("LMSoftMx", "did you mean lm_softmax"),
        ("xyzzy", "`tammes losses` lists them"),
    ],
)
def test_an_unknown_loss_is_answered_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        builder(name)


@pytest.mark.parametrize("posterior", [0.0, 1.0, -1.0, math.nan])
def test_a_posterior_that_is_no_probability_is_refused(posterior):
    with pytest.raises(ValueError, match="posterior between 0 and 1"):
        log_odds(posterior, 10)
