"""Margins on the angle: values by hand, how they hang together, and the ends of the circle."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import tammes
from tammes.angles import angle
from tammes.losses.angular import target_similarity
from tammes.losses.softmax import softplus

LOG4 = math.log(4)
PI = math.pi


@st.composite
def problems(draw, most=9):
    """Cosines of unit vectors of any shape, their labels, and a scale."""
    n, d, c = draw(st.integers(1, 6)), draw(st.integers(2, 7)), draw(st.integers(2, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    rows = F.normalize(torch.randn(n + c, d, dtype=torch.double, generator=generator))
    cosine = (rows[:n] @ rows[n:].T).clamp(-1, 1)
    return cosine, torch.randint(c, (n,), generator=generator), draw(st.sampled_from([1.0, 7, 64]))


def for_any(strategy):
    """Run with a few dozen problems, the same ones every time."""
    return lambda test: settings(max_examples=25, deadline=None, derandomize=True)(
        given(strategy)(test)
    )


def at_angles(theta, scale=1.0):
    """A split whose own angles are these, with one other class at a right angle."""
    gap = 2 * (theta / 2).sin().square()
    cosine = torch.stack([1 - gap, torch.zeros_like(gap)], 1)
    labels = torch.zeros(len(theta), dtype=torch.long)
    return tammes.split(cosine, labels, scale=scale, own={"gap": gap})


def grid(n=2001):
    return torch.linspace(0, PI, n, dtype=torch.double)


# The scale is log 4, so that a score f counts as 4 ** f.
@pytest.mark.parametrize(
    ("term", "cosine", "value"),
    [
        (tammes.normface(), [1, 0.5, 0.5], math.log(8 / 4)),
        (tammes.cosface(margin=0.5), [1, 0.5, 0.5], math.log(6 / 2)),
        (tammes.cosface(margin=-0.5), [0.5, 0.5, 0.5], math.log(8 / 4)),
        # 60 and 30 degrees: cos 90 = 0
        (tammes.arcface(margin=PI / 6), [0.5, 0, 0], math.log(3)),
        # 120 and 120 degrees: -2 - cos 240 = -1.5
        (tammes.arcface(margin=2 * PI / 3), [-0.5, 0], math.log(9)),
        (
            tammes.arcface(margin=2 * PI / 3, extension="linear"),
            [-0.5, 0],
            math.log(1 + 4 ** (0.5 + PI / math.sqrt(3))),
        ),
        # twice 30 and 30 degrees: cos 90 - 0.5
        (tammes.combined_margin(2, PI / 6, 0.5), [math.sqrt(0.75), 0], math.log(3)),
        # twice 60 degrees: -0.5; twice 120: -1.5
        (tammes.l_softmax(margin=2), [0.5, 0], math.log(3)),
        (tammes.sphereface(margin=2), [-0.5, 0], math.log(9)),
        # half of each: (0.5 - 0.5) / 2
        (tammes.sphereface(margin=2, blend=1), [0.5, 0], math.log(2)),
        (tammes.gm_softmax(0.5, 0.5, 1, -0.5), [1, 0.5, 0.5], math.log(6 / 4)),
        (tammes.lm_softmax(), [0.25, 0.5, 0.5], 1 - 0.25),
    ],
    ids=str,
)
def test_a_value_by_hand(term, cosine, value):
    s = tammes.split(torch.tensor([cosine], dtype=torch.double), torch.tensor([0]), scale=LOG4)
    assert_close(term(s), torch.tensor([value], dtype=torch.double))


def test_l_softmax_by_hand_on_long_vectors():
    # Lengths 2 and 3 at 60 degrees: the plain score is 3, the doubled angle gives -3.
    head = tammes.LinearHead(2, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    feature = torch.tensor([[1.5, 1.5 * math.sqrt(3)]])
    for blend, score in ((0.0, -3.0), (1.0, 0.0), (2.0, 1.0)):
        loss = tammes.l_softmax(margin=2, blend=blend)(head.split(feature, torch.tensor([0])))
        assert_close(loss, torch.tensor([math.log1p(math.exp(-score))]))


# ------------------------------------------------------------------------------------ identities


@for_any(problems())
def test_without_a_margin_all_are_normface(problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine, labels, scale=scale)
    want = F.cross_entropy(scale * cosine, labels, reduction="none")
    for term in (
        tammes.normface(),
        tammes.softmax(),
        tammes.cosface(margin=0.0),
        tammes.arcface(margin=0.0),
        tammes.combined_margin(),
        tammes.sphereface(margin=1.0),
        tammes.sphereface(margin=[1.0] * cosine.shape[1]),
        tammes.l_softmax(margin=1.0, blend=0.7),
        tammes.gm_softmax(1, 0, 1, 0),
        tammes.ldam([1] * cosine.shape[1], max_margin=0.0),
    ):
        assert_close(term(s), want, rtol=1e-9, atol=1e-12, msg=term.name)


@for_any(problems())
def test_each_single_margin_is_a_combined_margin(problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine, labels, scale=scale)
    assert_close(tammes.combined_margin(2.5, 0, 0)(s), tammes.sphereface(margin=2.5)(s))
    assert_close(tammes.combined_margin(1, 0.4, 0)(s), tammes.arcface(margin=0.4)(s))
    assert_close(tammes.combined_margin(1, 0, 0.4)(s), tammes.cosface(margin=0.4)(s))


@pytest.mark.parametrize("margin", [-0.3, 0.0, 0.35])
@for_any(problems())
def test_cosface_is_the_softplus_of_lm_softmax_plus_its_margin(margin, problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine.requires_grad_(), labels, scale=scale)
    lm, loss = tammes.lm_softmax()(s), tammes.cosface(margin=margin)(s)
    assert_close(loss, softplus(scale * (lm + margin)))
    (of_lm,) = torch.autograd.grad(lm.sum(), cosine, retain_graph=True)
    (of_loss,) = torch.autograd.grad(loss.sum(), cosine)
    # LM-Softmax is NormFace without the factor that saturates.
    assert_close(of_loss, (scale * (scale * (lm + margin)).sigmoid())[:, None] * of_lm)


@for_any(problems())
def test_lm_softmax_has_the_softmax_of_the_others_as_gradient_and_minus_one(problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine.requires_grad_(), labels, scale=scale)
    (grad,) = torch.autograd.grad(tammes.lm_softmax()(s).sum(), cosine)
    own = F.one_hot(labels, cosine.shape[1])
    q = (scale * cosine.detach()).masked_fill(own == 1, -math.inf).softmax(1)
    assert_close(grad, q - own)


@for_any(problems())
def test_lm_softmax_exceeds_minus_the_margin_by_at_most_log_c_minus_1_over_s(problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine, labels, scale=scale)
    lm, negative_margin = tammes.lm_softmax()(s), tammes.sample_margin()(s)
    assert (lm >= negative_margin - 1e-14).all()
    assert (lm <= negative_margin + math.log(cosine.shape[1] - 1) / scale + 1e-14).all()


@for_any(problems(most=2))
def test_with_two_classes_lm_softmax_is_minus_the_margin(problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine, labels, scale=scale)
    assert_close(tammes.lm_softmax()(s), tammes.sample_margin()(s))


@for_any(problems())
def test_gm_softmax_reduces_to_its_members(problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine.requires_grad_(), labels, scale=scale)
    assert_close(tammes.gm_softmax(1, -0.35, 1, -0.35)(s), tammes.cosface(margin=0.35)(s))
    without = tammes.gm_softmax(beta2=-math.inf)(s)
    assert_close(without, scale * tammes.lm_softmax()(s))
    (grad,) = torch.autograd.grad(without.sum(), cosine, retain_graph=True)
    (want,) = torch.autograd.grad(scale * tammes.lm_softmax()(s).sum(), cosine)
    assert_close(grad, want)


@for_any(problems())
def test_gm_softmax_has_the_gradient_of_its_formula_in_its_four_settings(problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine, labels, scale=scale)
    given = [torch.full((len(labels),), v).double() for v in (0.9, -0.1, 0.6, 0.2)]
    settings = dict(zip(("alpha1", "beta1", "alpha2", "beta2"), given, strict=True))
    for value in given:
        value.requires_grad_()
    loss = tammes.gm_softmax()(s, **settings)
    p = (scale * (0.6 * s.target + 0.2) - s.others).sigmoid()
    want = (-scale * s.target, -scale * torch.ones_like(p), scale * p * s.target, scale * p)
    for got, value in zip(torch.autograd.grad(loss.sum(), given), want, strict=True):
        assert_close(got, value)


# ----------------------------------------------------------------------------- the bent cosine


def chebyshev(cosine, margin):
    """(-1)^k cos(m θ) - 2k for a whole m, from the cosine alone."""
    before, now = torch.ones_like(cosine), cosine
    for _ in range(margin - 1):
        before, now = now, 2 * cosine * now - before
    k = sum((cosine < math.cos(r * PI / margin)).to(cosine) for r in range(1, margin))
    return (1 - 2 * (k % 2)) * now - 2 * k


def binomial(cosine, margin):
    """cos(m θ) by the binomial of L-Softmax, without its arcs."""
    return sum(
        (-1) ** n * math.comb(margin, 2 * n) * cosine ** (margin - 2 * n) * (1 - cosine**2) ** n
        for n in range(margin // 2 + 1)
    )


@pytest.mark.parametrize("margin", [2, 3, 4, 5])
def test_the_bent_cosine_of_a_whole_margin_is_a_polynomial(margin):
    s = at_angles(grid())
    bent = target_similarity(s, m1=margin)
    assert_close(bent, chebyshev(s.cosine, margin), rtol=1e-9, atol=1e-11)
    first_arc = grid() <= PI / margin
    assert_close(bent[first_arc], binomial(s.cosine, margin)[first_arc], rtol=1e-9, atol=1e-11)


# What the Chebyshev recurrence itself reaches in single precision.
@pytest.mark.parametrize(("margin", "error"), [(2, 2e-7), (3, 4.5e-7), (4, 6e-7), (8, 1.5e-6)])
def test_the_bent_cosine_is_as_exact_as_a_polynomial_in_single_precision(margin, error):
    cosine = torch.linspace(-1, 1, 20001)
    s = tammes.split(torch.stack([cosine, cosine], 1), torch.zeros(len(cosine), dtype=torch.long))
    exact = chebyshev(1 - s.gap.double(), margin)
    assert (target_similarity(s, m1=margin).double() - exact).abs().max() < error


@pytest.mark.parametrize("margin", [1, 2, 3, 4])
def test_bent_cosine_of_margin_m_runs_from_one_to_one_minus_twice_m(margin):
    ends = target_similarity(at_angles(grid(2)), m1=margin)
    assert_close(ends, torch.tensor([1.0, 1 - 2 * margin], dtype=torch.double))


@pytest.mark.parametrize("m1", [1.0, 1.5, 2.0, 3.2, 4.0])
@pytest.mark.parametrize("m2", [0.0, 0.2, 0.5, PI / 3])
def test_the_bent_cosine_falls_and_stays_below_cos_m2_times_the_cosine(m1, m2):
    s = at_angles(grid())
    bent = target_similarity(s, m1=m1, m2=m2)
    assert (bent.diff() < 0).all()
    assert (bent <= math.cos(m2) * s.cosine + 1e-11).all()


@pytest.mark.parametrize(("m1", "m2"), [(2.0, 0.0), (3.0, 0.0), (4.0, 0.0), (1.0, 0.5), (1.7, 0.3)])
def test_the_bent_cosine_has_no_jump_and_no_corner_where_its_arcs_meet(m1, m2):
    joints = [(k * PI - m2) / m1 for k in range(1, math.ceil(m1) + 1)]
    for joint in (joint for joint in joints if joint < PI - 1e-6):
        around = torch.tensor([joint - 1e-7, joint + 1e-7], dtype=torch.double)
        theta = around.clone().requires_grad_()
        bent = target_similarity(at_angles(theta), m1=m1, m2=m2)
        (slope,) = torch.autograd.grad(bent.sum(), theta)
        assert abs(bent[1] - bent[0]) < 1e-12
        assert slope.abs().max() < 1e-5


@for_any(problems())
def test_a_multiplied_angle_is_never_easier_than_the_softmax(problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine, labels, scale=scale)
    for term in (tammes.l_softmax(margin=2), tammes.sphereface(margin=3.3, blend=2.0)):
        assert (term(s) >= tammes.softmax()(s) - 1e-9).all(), term.name


@pytest.mark.parametrize("margin", [0.1, 0.5, PI / 3])
@for_any(problems())
def test_arcface_is_bounded_below_by_gm_softmax(margin, problem):
    cosine, labels, scale = problem
    s = tammes.split(cosine, labels, scale=scale)
    alpha = math.cos(margin)
    below = tammes.gm_softmax(alpha, 0, alpha, 0)(s)
    assert (tammes.arcface(margin=margin)(s) >= below - 1e-9).all()
    shifted = tammes.gm_softmax(alpha, -0.2, alpha, -0.2)(s)
    assert (tammes.combined_margin(1.5, margin, 0.2)(s) >= shifted - 1e-9).all()


def test_a_large_blend_is_the_softmax():
    s = at_angles(grid(50), scale=8.0)
    assert_close(tammes.l_softmax(margin=4, blend=1e12)(s), tammes.softmax()(s), rtol=1e-9, atol=0)


def test_the_linear_extension_jumps_by_hand():
    # Most copies of ArcFace have it; the jump at pi is part of what they compute.
    margin, eps = 0.5, 1e-9
    theta = torch.tensor([PI - margin - eps, PI - margin + eps, PI], dtype=torch.double)
    score = target_similarity(at_angles(theta), m2=margin, extension="linear")
    past = math.cos(PI - margin) - margin * math.sin(margin)
    want = torch.tensor([-1, past, -1 - margin * math.sin(margin)], dtype=torch.double)
    assert_close(score, want, rtol=0, atol=1e-8)
    assert_close((score[0] - score[1]).item(), 0.117295, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("gradient", ["exact", "detached"])
def test_the_slope_of_the_target_similarity_in_the_cosine(gradient):
    theta, margin = torch.tensor([0.05, 0.6, 1.5, 2.4]).double(), 0.5
    cosine = theta.cos()[:, None].expand(-1, 2).clone().requires_grad_()
    s = tammes.split(cosine, torch.zeros(4, dtype=torch.long), scale=30.0)
    bent = target_similarity(s, m2=margin, gradient=gradient)
    assert_close(bent, (theta + margin).cos())
    (grad,) = torch.autograd.grad(bent.sum(), cosine)
    if gradient == "detached":
        assert grad[:, 0].tolist() == [1.0] * 4
    else:
        assert_close(grad[:, 0], (theta + margin).sin() / theta.sin())


@pytest.mark.parametrize("margin", [2, 3, 4])
def test_the_slope_of_a_whole_margin_in_the_cosine_is_a_polynomial(margin):
    theta = torch.linspace(0.01, PI - 0.01, 301, dtype=torch.double)
    cosine = theta.cos()[:, None].expand(-1, 2).clone().requires_grad_()
    s = tammes.split(cosine, torch.zeros(301, dtype=torch.long))
    (grad,) = torch.autograd.grad(target_similarity(s, m1=margin).sum(), cosine)
    sign = 1 - 2 * (margin * theta / PI).floor().remainder(2)
    assert_close(grad[:, 0], sign * margin * (margin * theta).sin() / theta.sin())


def arcface_gradients(theta, dtype, size=512):
    """ArcFace gradients of a pair at an angle; in double precision by the plain formula."""
    draw = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(size, 4, dtype=torch.double, generator=draw))
    feature = math.cos(theta) * basis[:, 0] + math.sin(theta) * basis[:, 1]
    features = feature[None].float().to(dtype).requires_grad_()
    weight = torch.nn.Parameter(basis[:, [0, 2, 3]].T.float().to(dtype))
    labels = torch.tensor([0])
    if dtype == torch.double:
        x, w = F.normalize(features), F.normalize(weight)
        cosine = x @ w.T
        bent = (cosine[:, :1].acos() + 0.5).cos()
        loss = F.cross_entropy(8 * torch.cat([bent, cosine[:, 1:]], 1), labels)
    else:
        head = tammes.CosineHead(size, 3, scale=8.0)
        head.weight = weight
        loss = tammes.arcface(margin=0.5)(head.split(features, labels)).sum()
    return torch.autograd.grad(loss, (features, weight))


@pytest.mark.parametrize("theta", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_the_gradient_of_arcface_keeps_its_digits_near_the_prototype(theta):
    single, double = (arcface_gradients(theta, dtype) for dtype in (torch.float, torch.double))
    for got, want in zip(single, double, strict=True):
        assert (got.double() - want).norm() < 1e-3 * want.norm()


ANGULAR = {
    "arcface": tammes.arcface(),
    "linear": tammes.arcface(extension="linear"),
    "detached": tammes.arcface(gradient="detached"),
    "combined": tammes.combined_margin(1.5, 0.3, 0.2),
    "l_softmax": tammes.l_softmax(),
    "sphereface": tammes.sphereface(margin=1.7, blend=0.5),
}


@pytest.mark.parametrize("name", ANGULAR)
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("scale", [1.0, 64.0, 1000.0])
def test_on_behind_and_without_a_direction_the_gradient_is_finite_and_bounded(name, dtype, scale):
    head = tammes.CosineHead(16, 4, scale=scale).to(dtype)
    w = head.weight.detach()
    beside = 1e-5 * torch.randn(16, dtype=dtype)
    rows = [w[0], 2 * w[1], -w[2], -3 * w[3], 0 * w[0], w[0] + beside, beside - w[0]]
    features = torch.stack(rows).requires_grad_()
    loss = ANGULAR[name](head.split(features, torch.tensor([0, 1, 2, 3, 0, 0, 0])))
    assert loss.isfinite().all()
    grad, of_weight = torch.autograd.grad(loss.sum(), (features, head.weight))
    assert of_weight.isfinite().all()
    assert grad[4].eq(0).all()
    # Along the sphere a cosine falls at most as fast as its angle is multiplied, here by 4.
    length = features.detach().norm(dim=1)
    assert (grad.norm(dim=1) * length <= scale * (4 + 1)).all()


def test_the_angle_is_exact_near_zero_where_an_arc_cosine_is_not():
    theta = torch.tensor([1e-1, 1e-2, 1e-3, 1e-4], dtype=torch.double)
    gap = 2 * (theta / 2).sin().square()
    assert_close(angle(gap.float(), 2 - gap.float()).double(), theta, rtol=3e-7, atol=0)
    ends = angle(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([2.0, 1.0, 0.0]))
    assert_close(ends, torch.tensor([0.0, PI / 2, PI]), rtol=0, atol=3e-6)


AT_THE_ENDS = {
    "arcface": tammes.arcface(),
    "arcface_linear": tammes.arcface(extension="linear"),
    "combined_margin": tammes.combined_margin(1.2, 0.3, 0.1),
    "sphereface": tammes.sphereface(margin=1.5),
    "sphereface_raw_features": tammes.sphereface(margin=1.5, blend=0.5),
    "l_softmax": tammes.l_softmax(margin=4),
    "l_softmax_real": tammes.l_softmax(margin=2.5),
    "adaface": tammes.adaface(),
}


def angular_gradients(name, theta, implementation, dtype):
    """Gradients of an example at this angle from its prototype, in some precision."""
    torch.manual_seed(0)
    head = {
        "sphereface_raw_features": lambda: tammes.CosineHead(64, 5, normalize_features=False),
        "l_softmax": lambda: tammes.LinearHead(64, 5, bias=False),
        "l_softmax_real": lambda: tammes.LinearHead(64, 5, bias=False),
    }.get(name, lambda: tammes.CosineHead(64, 5))()
    head.scale = 2.0
    own = F.normalize(torch.randn(8, 64, dtype=torch.double))
    aside = torch.randn(8, 64, dtype=torch.double)
    aside = F.normalize(aside - (aside * own).sum(1, keepdim=True) * own)
    features = (1.7 * (math.cos(theta) * own + math.sin(theta) * aside)).float()
    weight = torch.cat([own, torch.randn(3, 64, dtype=torch.double)]).float()
    head.weight = torch.nn.Parameter(weight.to(dtype))
    head.implementation = implementation
    features = features.to(dtype).requires_grad_()
    tammes.Criterion(head, AT_THE_ENDS[name]).to(dtype)(features, torch.arange(8)).backward()
    return features.grad.double(), head.weight.grad.double()[:8]


@pytest.mark.parametrize("implementation", ["dense", "streamed", "fused"])
@pytest.mark.parametrize("name", AT_THE_ENDS)
@pytest.mark.parametrize("end", [0.0, PI])
def test_gradients_keep_their_digits_near_both_ends_in_single_precision(name, implementation, end):
    if implementation == "fused":
        pytest.importorskip("triton", reason="no triton here")
    for apart in (1e-1, 1e-2, 3e-3, 1e-3):
        theta = abs(end - apart)
        single = angular_gradients(name, theta, implementation, torch.float)
        double = angular_gradients(name, theta, "dense", torch.double)
        for found, exact in zip(single, double, strict=True):
            error = (found - exact).norm(dim=1) / exact.norm(dim=1)
            assert error.max() < 1e-3, (apart, error.max())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tammes.arcface(extension="raw"), "'monotone' or 'linear', got 'raw'"),
        (lambda: tammes.arcface(gradient="none"), "'exact' or 'detached', got 'none'"),
        (lambda: tammes.combined_margin(2.0, extension="linear"), "expects m1=1, got m1=2.0"),
        (lambda: tammes.sphereface(margin=0.5), "1 or more, got 0.5"),
        (lambda: tammes.l_softmax(margin=[2.0, 0.9]), "1 or more, got 0.9"),
        (lambda: tammes.l_softmax(blend=-1.0), "blend is expected to be 0 or more, got -1.0"),
        (lambda: tammes.sphereface(gradient="x"), "'exact' or 'detached', got 'x'"),
    ],
)
def test_a_setting_out_of_range_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
