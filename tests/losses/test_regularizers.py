"""Terms to add: the divergence of the logits, the sample margin, the place of the prototypes."""

import math

import pytest
import torch
import torch.nn.functional as F
from catalogue import PROTOTYPE_TERMS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import tammes
from tammes.geometry import simplex

LOG2 = math.log(2)
KINDS = ("symmetric", "q_u", "u_q")


@st.composite
def problems(draw, most=9):
    """Logits of any shape, and labels."""
    n, c = draw(st.integers(1, 6)), draw(st.integers(2, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    logits = 3 * torch.randn(n, c, dtype=torch.double, generator=generator)
    return logits, torch.randint(c, (n,), generator=generator)


@st.composite
def prototypes(draw):
    """Prototypes of any shape, more or fewer than there are dimensions."""
    c, d = draw(st.integers(2, 9)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    return 2 * torch.randn(c, d, dtype=torch.double, generator=generator)


def for_any(strategy):
    """Run with a few dozen problems, the same ones every time."""
    return lambda test: settings(max_examples=25, deadline=None, derandomize=True)(
        given(strategy)(test)
    )


def divergence(logits, labels, kind="symmetric"):
    return tammes.logit_divergence(kind=kind)(tammes.split(logits, labels))


# ------------------------------------------------------------------------------ logit divergence


# The others have q = (1/3, 2/3), uniform is (1/2, 1/2).
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("q_u", math.log(2 / 3) / 3 + 2 * math.log(4 / 3) / 3),
        ("u_q", (math.log(3 / 2) + math.log(3 / 4)) / 2),
        ("symmetric", LOG2 / 12),
    ],
)
def test_the_divergence_by_hand(kind, value):
    logits = torch.tensor([[5.0, 0.0, LOG2]], dtype=torch.double)
    got = divergence(logits, torch.tensor([0]), kind)
    assert_close(got, torch.tensor([value], dtype=torch.double))


@for_any(problems())
def test_the_divergences_are_those_of_the_softmax_of_the_others(problem):
    logits, labels = problem
    q_u, u_q, symmetric = (divergence(logits, labels, kind) for kind in ("q_u", "u_q", "symmetric"))
    rest = logits[F.one_hot(labels, logits.shape[1]) == 0].view(len(labels), -1)
    log_q, log_u = rest.log_softmax(1), -math.log(rest.shape[1])
    assert_close(q_u, (log_q.exp() * (log_q - log_u)).sum(1))
    assert_close(u_q, (log_u - log_q).mean(1))
    assert_close(symmetric, (q_u + u_q) / 2)
    assert (symmetric >= -1e-14).all()
    assert (symmetric <= (rest.amax(1) - rest.mean(1)) / 2 + 1e-14).all()


@for_any(problems())
def test_the_gradient_of_a_divergence_is_that_of_its_formula(problem):
    logits, labels = problem
    logits.requires_grad_()
    own = F.one_hot(labels, logits.shape[1])
    q = logits.detach().masked_fill(own == 1, -math.inf).softmax(1)
    expected = (q * logits.detach()).sum(1, keepdim=True)
    of_q_u = q * (logits.detach() - expected)
    of_u_q = q - (1 - own) / (logits.shape[1] - 1)
    for kind, want in (("q_u", of_q_u), ("u_q", of_u_q), ("symmetric", (of_q_u + of_u_q) / 2)):
        (grad,) = torch.autograd.grad(divergence(logits, labels, kind).sum(), logits)
        assert_close(grad, want)
        assert grad.gather(1, labels[:, None]).eq(0).all()
    # Together with the softmax, as it is trained; its rows sum to zero.
    loss = tammes.softmax()(tammes.split(logits, labels)) + 0.3 * divergence(logits, labels)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert_close(grad, logits.detach().softmax(1) - own + 0.15 * (of_q_u + of_u_q))
    assert_close(grad.sum(1), torch.zeros(len(labels), dtype=torch.double))


@pytest.mark.parametrize("kind", KINDS)
@for_any(problems(most=2))
def test_with_two_classes_a_divergence_is_zero_with_a_zero_gradient(kind, problem):
    logits, labels = problem
    logits.requires_grad_()
    value = divergence(logits, labels, kind)
    (grad,) = torch.autograd.grad(value.sum(), logits)
    assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-14)
    assert grad.eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
@for_any(problems())
def test_a_divergence_does_not_see_a_shift_of_the_logits_nor_the_target(kind, problem):
    logits, labels = problem
    moved = logits + 7.0 + 3.0 * F.one_hot(labels, logits.shape[1])
    assert_close(divergence(moved, labels, kind), divergence(logits, labels, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_is_zero_where_the_others_are_equal(kind):
    logits = torch.tensor([[3.0, 0.5, 0.5, 0.5], [-1.0, -2.0, -2.0, -2.0]])
    value = divergence(logits, torch.tensor([0, 0]), kind)
    assert_close(value, torch.zeros(2), rtol=0, atol=3e-7)


def test_an_unknown_divergence_is_refused():
    with pytest.raises(ValueError, match="'symmetric', 'q_u' or 'u_q', got 'kl'"):
        tammes.logit_divergence(kind="kl")


# -------------------------------------------------------------------------------- sample margin


def test_the_sample_margin_by_hand_whatever_the_scale():
    cosine = torch.tensor([[0.9, 0.2, -0.1], [0.3, 0.5, 0.6]], requires_grad=True)
    s = tammes.split(cosine, torch.tensor([0, 1]), scale=64.0)
    loss = tammes.sample_margin()(s)
    assert_close(loss, torch.tensor([-0.7, 0.1]))
    # Correct exactly where the margin is above zero.
    assert ((loss < 0) == (cosine.argmax(1) == torch.tensor([0, 1]))).all()
    (grad,) = torch.autograd.grad(loss.sum(), cosine)
    assert grad.tolist() == [[-1, 1, 0], [0, -1, 1]]


# ---------------------------------------------------------------------------------- prototypes


def test_the_prototype_terms_by_hand():
    w = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert_close(tammes.zero_centroid()(w), torch.tensor(0.5))
    assert_close(tammes.zero_centroid(normalize=False)(w), torch.tensor(1.25))
    # v = 2.5; Gram (4, 0; 0, 1) against (2.5, -2.5; -2.5, 2.5).
    assert_close(tammes.super_symmetry()(w), torch.tensor(2 * 1.5**2 + 2 * 2.5**2))


@for_any(prototypes())
def test_the_zero_centroid_is_the_sum_of_all_cosines(w):
    count = len(w)
    value = tammes.zero_centroid()(w)
    unit = F.normalize(w)
    off_diagonal = (unit @ unit.T).sum() - count
    assert_close(count**2 * value, count + off_diagonal)
    assert -1e-15 <= value <= 1 + 1e-12


@for_any(prototypes())
def test_the_gradient_of_the_zero_centroid_is_along_the_sphere(w):
    w.requires_grad_()
    count, unit = len(w), F.normalize(w).detach()
    mean = unit.mean(0)
    (grad,) = torch.autograd.grad(tammes.zero_centroid()(w), w)
    across = mean - (unit @ mean)[:, None] * unit
    assert_close(grad, 2 / count * across / w.detach().norm(dim=1, keepdim=True))
    (raw,) = torch.autograd.grad(tammes.zero_centroid(normalize=False)(w), w)
    assert_close(raw, (2 / count * w.detach().mean(0)).expand_as(w))


@for_any(prototypes())
def test_super_symmetry_is_its_plain_formula_for_many_and_for_few_classes(w):
    w.requires_grad_()
    count = len(w)
    gram = w @ w.T
    centring = torch.eye(count, dtype=w.dtype) - 1 / count
    plain = (gram - gram.diagonal().mean() * count / (count - 1) * centring).square().sum()
    value = tammes.super_symmetry()(w)
    assert_close(value, plain)
    (got,), (want,) = (torch.autograd.grad(v, w, retain_graph=True) for v in (value, plain))
    assert_close(got, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("count", "size"), [(2, 1), (4, 3), (5, 8), (9, 8)])
@pytest.mark.parametrize("length", [0.1, 1.0, 30.0])
def test_at_a_scaled_simplex_of_any_orientation_the_prototype_terms_are_zero(count, size, length):
    turn, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.double))
    w = (length * simplex(count, size, dtype=torch.double) @ turn).requires_grad_()
    for term in PROTOTYPE_TERMS.values():
        value = term(w)
        assert value < 1e-20 * max(1, length**4), term
        (grad,) = torch.autograd.grad(value, w)
        assert grad.abs().max() < 1e-9 * max(1, length**3), term


@pytest.mark.parametrize("name", PROTOTYPE_TERMS)
@pytest.mark.parametrize("shape", [(3, 4), (5, 4), (7, 3)])
def test_the_gradients_of_a_prototype_term_are_those_of_finite_differences(name, shape):
    w = torch.randn(shape, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(PROTOTYPE_TERMS[name], w)


@pytest.mark.parametrize("name", PROTOTYPE_TERMS)
@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_a_prototype_term_in_a_criterion_is_that_of_the_prototypes_of_its_head(name, head):
    heads = {"linear": tammes.LinearHead(4, 5), "cosine": tammes.CosineHead(4, 5)}
    criterion = tammes.Criterion(heads[head], 0.5 * PROTOTYPE_TERMS[name])
    w = heads[head].weight
    loss = criterion(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    want = 0.5 * PROTOTYPE_TERMS[name](w if head == "linear" else F.normalize(w))
    assert_close(loss, want)
    (got,), (expected,) = (torch.autograd.grad(v, w) for v in (loss, want))
    assert_close(got, expected)


def test_zero_prototypes_have_a_finite_penalty_and_gradient():
    for term in PROTOTYPE_TERMS.values():
        w = torch.zeros(3, 4, requires_grad=True)
        value = term(w)
        (grad,) = torch.autograd.grad(value, w)
        assert value == 0
        assert grad.isfinite().all()
