"""Softmax cross entropy and its relatives: values by hand, identities, bounds, hard points."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import tammes
from tammes.losses.softmax import softplus
from tammes.split import ALONGSIDE, REDUCED

LOG2, LOG3 = math.log(2), math.log(3)


def split(logits, labels, **options):
    return tammes.split(logits, labels, reads=(*REDUCED, *ALONGSIDE, "rest"), **options)


@st.composite
def problems(draw, most=9):
    """Logits of any shape, and labels."""
    n, c = draw(st.integers(1, 6)), draw(st.integers(2, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    logits = 3 * torch.randn(n, c, dtype=torch.double, generator=generator)
    return logits, torch.randint(c, (n,), generator=generator)


def for_any(strategy):
    """Run with a few dozen problems, the same ones every time."""
    return lambda test: settings(max_examples=25, deadline=None, derandomize=True)(
        given(strategy)(test)
    )


@pytest.mark.parametrize(
    ("term", "logits", "value"),
    [
        # exp(logits) = 2, 1, 1: the own class has half.
        (tammes.softmax(), [LOG2, 0, 0], LOG2),
        (tammes.softmax(margin=LOG2), [LOG2, 0, 0], LOG3),
        # log 4 - 0.7 log 2 - 0.3 * mean logit
        (tammes.softmax(smoothing=0.3), [LOG2, 0, 0], 1.2 * LOG2),
        (tammes.hard_bias(), [1, 0, -5], LOG2),
        (tammes.hard_bias(margin=0), [LOG3, 0, -5], math.log(4 / 3)),
        (tammes.crammer_singer(), [0.25, 0.5, -1], 1.25),
        (tammes.crammer_singer(margin=0.1), [0.8, 0.5, -1], 0),
        (tammes.focal(), [0, 0], LOG2 / 4),
        (tammes.focal(gamma=1, margin=LOG3), [0, 0], 0.75 * math.log(4)),
        (tammes.hinge(), [0, 0.5, -0.5], 1),
        (tammes.hinge(margin=2), [1, 0.5, -3], 0.75),
        (tammes.bce(), [LOG3, 0, -LOG3], 2 * math.log(4 / 3) + LOG2),
        (tammes.bce(average=True), [LOG3, 0, -LOG3], (2 * math.log(4 / 3) + LOG2) / 3),
        # the own score counts twice: log(1 + exp(-log 2 + 2 log 2)), and half of it is added
        (
            tammes.large_margin_gaussian(margin=1, likelihood=0.5),
            [-LOG2, -LOG2],
            LOG3 + LOG2 / 2,
        ),
    ],
    ids=str,
)
def test_a_value_by_hand(term, logits, value):
    logits = torch.tensor([logits], dtype=torch.double)
    loss = term(split(logits, torch.tensor([0])))
    assert_close(loss, torch.tensor([value], dtype=torch.double))


# ------------------------------------------------------------------------------------ identities


@for_any(problems())
def test_the_three_forms_of_the_softmax_are_cross_entropy(problem):
    logits, labels = problem
    s = split(logits, labels)
    rho = s.others - s.hardest
    want = F.cross_entropy(logits, labels, reduction="none")
    for form in (
        (logits - s.target[:, None]).exp().sum(1).log(),
        softplus(s.others - s.target),
        softplus(s.hardest - s.target + rho),
        tammes.softmax()(s),
    ):
        assert_close(form, want)


@for_any(problems())
def test_the_gradient_of_the_softmax_is_probability_minus_label(problem):
    logits, labels = problem
    logits.requires_grad_()
    (grad,) = torch.autograd.grad(tammes.softmax()(split(logits, labels)).sum(), logits)
    assert_close(grad, logits.softmax(1) - F.one_hot(labels, logits.shape[1]))


@for_any(problems())
def test_the_bias_hidden_in_the_softmax_is_between_zero_and_log_c_minus_one(problem):
    logits, labels = problem
    s = split(logits, labels)
    rho, most = s.others - s.hardest, math.log(logits.shape[1] - 1)
    assert (rho >= 0).all()
    assert (rho <= most + 1e-12).all()
    # The sharper lower end, and what is missing to the upper one.
    assert (rho >= most - (s.hardest - s.mean) - 1e-12).all()
    q_u = tammes.logit_divergence(kind="q_u")(s)
    assert_close(rho, most - q_u - (s.hardest - s.expected))


def test_both_ends_of_the_hidden_bias_are_reached():
    logits = torch.tensor([[1.0, 0.5, 0.5, 0.5], [1.0, 90.0, 0.0, 0.0]], dtype=torch.double)
    s = split(logits, torch.tensor([0, 0]))
    assert_close(s.others - s.hardest, torch.tensor([LOG3, 0.0], dtype=torch.double))


@for_any(problems(most=2))
def test_with_two_classes_the_hidden_bias_is_zero_and_the_softmax_is_logistic(problem):
    logits, labels = problem
    s = split(logits, labels)
    assert (s.others == s.hardest).all()
    assert_close(tammes.softmax()(s), tammes.hard_bias(margin=0.0)(s))
    assert_close(tammes.crammer_singer()(s), tammes.hinge()(s))


@pytest.mark.parametrize("smoothing", [0.0, 0.05, 0.3, 1.0])
@for_any(problems())
def test_smoothing_is_that_of_cross_entropy(smoothing, problem):
    logits, labels = problem
    logits.requires_grad_()
    loss = tammes.softmax(smoothing=smoothing)(split(logits, labels))
    want = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    assert_close(loss, want)
    # (1 - eps) (-log p_y) + eps (D(u || p) + log C), with u uniform over all C classes.
    count = logits.shape[1]
    log_p = logits.log_softmax(1)
    from_uniform = -math.log(count) - log_p.mean(1)
    own = log_p.gather(1, labels[:, None]).squeeze(1)
    assert_close(loss, -(1 - smoothing) * own + smoothing * (from_uniform + math.log(count)))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    label = (1 - smoothing) * F.one_hot(labels, count) + smoothing / count
    assert_close(grad, logits.softmax(1) - label)


@for_any(problems())
def test_the_modified_loss_is_cross_entropy_with_the_own_score_lowered_by_one(problem):
    logits, labels = problem
    s = split(logits, labels)
    want = F.cross_entropy(logits - F.one_hot(labels, logits.shape[1]), labels, reduction="none")
    assert_close(tammes.softmax(margin=1.0)(s), want)
    assert_close(tammes.cosface(margin=1.0)(s), want)
    # With its hidden bias replaced by a constant it can only fall, and the hinge is below both.
    assert (tammes.hard_bias()(s) <= want + 1e-12).all()
    assert (tammes.crammer_singer()(s) <= tammes.hard_bias()(s)).all()


@for_any(problems())
def test_the_hinge_is_c_over_c_minus_one_times_that_of_torch(problem):
    logits, labels = problem
    count = logits.shape[1]
    logits.requires_grad_()
    loss = tammes.hinge()(split(logits, labels))
    want = F.multi_margin_loss(logits, labels, reduction="none") * count / (count - 1)
    assert_close(loss, want)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    own = logits.gather(1, labels[:, None])
    active = ((logits > own - 1) & (F.one_hot(labels, count) == 0)).double() / (count - 1)
    assert_close(grad, active - active.sum(1, keepdim=True) * F.one_hot(labels, count))


@for_any(problems())
def test_bce_is_that_of_torch_against_the_one_hot_label(problem):
    logits, labels = problem
    logits.requires_grad_()
    one_hot = F.one_hot(labels, logits.shape[1]).double()
    each = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none")
    loss = tammes.bce()(split(logits, labels))
    assert_close(loss, each.sum(1))
    assert_close(tammes.bce(average=True)(split(logits, labels)), each.mean(1))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert_close(grad, logits.sigmoid() - one_hot)


@pytest.mark.parametrize(
    ("term", "slope"),
    [
        (tammes.crammer_singer(), lambda excess: (excess > 0).double()),
        (tammes.hard_bias(), torch.sigmoid),
    ],
    ids=["crammer_singer", "hard_bias"],
)
@for_any(problems())
def test_losses_of_the_hardest_class_have_a_gradient_at_two_classes_only(term, slope, problem):
    logits, labels = problem
    logits.requires_grad_()
    s = split(logits, labels)
    (grad,) = torch.autograd.grad(term(s).sum(), logits)
    others = logits.scatter(1, labels[:, None], -math.inf)
    count = logits.shape[1]
    pair = F.one_hot(others.argmax(1), count) - F.one_hot(labels, count)
    assert_close(grad, slope(s.hardest - s.target + 1)[:, None] * pair)


@for_any(problems())
def test_focal_is_the_softmax_times_a_power_of_the_missing_mass(problem):
    logits, labels = problem
    s = split(logits, labels)
    plain = tammes.softmax(margin=0.4)(s)
    assert_close(tammes.focal(gamma=0.0, margin=0.4)(s), plain)
    assert_close(tammes.focal(gamma=1.5, margin=0.4)(s), (1 - (-plain).exp()) ** 1.5 * plain)


@for_any(problems())
def test_the_gaussian_margin_is_a_factor_of_the_own_score(problem):
    scores, labels = problem
    s = split(-scores.abs(), labels)
    want = tammes.gm_softmax(alpha1=1.3, alpha2=1.3)(s)
    assert_close(tammes.large_margin_gaussian(margin=0.3, likelihood=0.0)(s), want)
    assert_close(tammes.large_margin_gaussian()(s), want - 0.1 * s.target)


# -------------------------------------------------------------------------- margins of any sign


@pytest.mark.parametrize("margin", [-0.7, -0.3, 0.2, 1.0])
@for_any(problems())
def test_a_margin_changes_the_loss_by_at_most_scale_times_margin(margin, problem):
    similarity, labels = problem
    s = split(similarity, labels, scale=2.5)
    change = tammes.softmax(margin=margin)(s) - tammes.softmax()(s)
    assert (change * margin >= 0).all()
    assert (change.abs() <= 2.5 * abs(margin) + 1e-12).all()


@pytest.mark.parametrize("builder", [tammes.softmax, tammes.cosface], ids=["softmax", "cosface"])
@for_any(problems())
def test_the_slope_in_the_margin_is_scale_times_the_mass_of_the_others(builder, problem):
    similarity, labels = problem
    s = split(similarity, labels, scale=2.5)
    margin = torch.full((len(labels),), -0.2, dtype=torch.double, requires_grad=True)
    (grad,) = torch.autograd.grad(builder()(s, margin=margin).sum(), margin)
    lowered = 2.5 * (similarity + 0.2 * F.one_hot(labels, similarity.shape[1]))
    mass = 1 - lowered.softmax(1).gather(1, labels[:, None]).squeeze(1)
    assert_close(grad, 2.5 * mass)


def test_the_ranking_of_classes_does_not_depend_on_the_margin():
    head = tammes.LinearHead(4, 5)
    features = torch.randn(6, 4)
    plain, negative = (
        tammes.Criterion(head, tammes.softmax(margin=margin)) for margin in (0.0, -0.3)
    )
    assert torch.equal(plain.logits(features), negative.logits(features))
    assert_close(plain.logits(features), F.linear(features, head.weight, head.bias))


# ----------------------------------------------------------------------------------- hard points


@pytest.mark.parametrize("lead", [40.0, 60.0, 80.0])
@pytest.mark.parametrize(
    "term",
    [
        tammes.softmax(),
        tammes.hard_bias(margin=0.0),
        tammes.focal(gamma=0.0),
        tammes.large_margin_gaussian(margin=0.0, likelihood=0.0),
        tammes.cosface(margin=0.0),
        tammes.gm_softmax(),
        tammes.arcface(margin=0.0),
        tammes.ldam([1, 1], max_margin=0.0),
    ],
    ids=str,
)
def test_a_tiny_loss_keeps_its_digits_in_single_precision(term, lead):
    # 1 - p and a difference of log-sum-exps are exactly zero here.
    logits = torch.tensor([[1.0, 1 - lead / 64]])
    loss = term(tammes.split(logits, torch.tensor([0]), scale=64.0)).double()
    excess = 64 * (logits[:, 1] - logits[:, 0]).double()
    assert loss > 0
    assert_close(loss, excess.exp().log1p(), rtol=1e-6, atol=0)


def test_the_target_gradient_keeps_its_digits_at_scale_64_with_4096_classes():
    head = tammes.CosineHead(128, 4096, scale=64.0)
    labels = torch.randint(4096, (64,))
    strength = torch.linspace(0.5, 6, 64)[:, None]
    features = strength * F.normalize(head.weight.detach()[labels]) + 0.1 * torch.randn(64, 128)
    grads = []
    for dtype in (torch.float, torch.double):
        s = head.to(dtype).split(features.to(dtype), labels)
        loss = tammes.normface()(s)
        grads.append(torch.autograd.grad(loss.sum(), s.target)[0].double())
    single, double = grads
    assert (-double).min() < 1e-6
    assert_close(single, double, rtol=1e-4, atol=0)


def test_softplus_is_exact_on_both_sides_with_its_gradient():
    # torch's own is linear above 20, which double precision sees.
    value = torch.tensor([-700.0, -30.0, 0.0, 20.5, 30.0, 700.0], dtype=torch.double)
    want = torch.tensor(
        [math.exp(-700), math.log1p(math.exp(-30)), LOG2]
        + [v + math.log1p(math.exp(-v)) for v in (20.5, 30.0, 700.0)],
        dtype=torch.double,
    )
    assert_close(softplus(value), want, rtol=1e-14, atol=0)
    value.requires_grad_()
    (grad,) = torch.autograd.grad(softplus(value).sum(), value)
    assert_close(grad, value.sigmoid(), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tammes.softmax(smoothing=1.5), "smoothing between 0 and 1, got 1.5"),
        (lambda: tammes.softmax(smoothing=-0.1), "smoothing between 0 and 1, got -0.1"),
        (lambda: tammes.focal(gamma=-1.0), "gamma of 0 or more, got -1.0"),
    ],
)
def test_a_setting_out_of_range_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("term", [tammes.hinge(), tammes.bce()], ids=str)
def test_a_dense_term_says_that_it_misses_the_scores_of_the_others(term):
    with pytest.raises(ValueError, match="expects a split with rest"):
        term(tammes.split(torch.zeros(1, 2), torch.tensor([0])))
