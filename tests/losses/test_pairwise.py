"""Losses between the examples of a batch: plain formulas, gradients, who is an anchor."""

import math

import pytest
import torch
import torch.nn.functional as F
from catalogue import CLASSES, FEATURE_TERMS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import tammes
from tammes.losses.pairwise import Centers


def batch_of(features, labels, valid=None):
    labels = torch.as_tensor(labels)
    valid = torch.ones(len(labels), dtype=torch.bool) if valid is None else torch.as_tensor(valid)
    return tammes.Batch(features, labels, valid)


@st.composite
def batches(draw):
    """Features of any shape, with singletons and absent classes among the labels."""
    n, d, c = draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    features = torch.randn(n, d, dtype=torch.double, generator=generator)
    return features, torch.randint(c, (n,), generator=generator)


def for_any(strategy):
    """Run with a few dozen problems, the same ones every time."""
    return lambda test: settings(max_examples=25, deadline=None, derandomize=True)(
        given(strategy)(test)
    )


# ------------------------------------------------------------- plain formulas, example by example


def plain_nca(x, y, i, scale=1.0):
    others = [j for j in range(len(x)) if j != i]
    weight = {j: torch.exp(-scale * (x[i] - x[j]).square().sum()) for j in others}
    return -(sum(weight[j] for j in others if y[j] == y[i]) / sum(weight.values())).log()


def plain_proto(x, y, i, scale=1.0):
    scores = []
    for c in [y[i], *(c for c in y.unique() if c != y[i])]:
        rows = [j for j in range(len(x)) if y[j] == c and j != i]
        scores.append(-scale * (x[i] - x[rows].mean(0)).square().sum())
    return -torch.stack(scores).log_softmax(0)[0]


def hardest(x, y, i):
    distance = {j: (x[i] - x[j]).norm() for j in range(len(x)) if j != i}
    far = max((j for j in distance if y[j] == y[i]), key=distance.get)
    near = min((j for j in distance if y[j] != y[i]), key=distance.get)
    return far, near, distance


def plain_triplet(x, y, i, margin=0.3):
    far, near, _ = hardest(x, y, i)
    return F.triplet_margin_loss(
        x[i : i + 1], x[far : far + 1], x[near : near + 1], margin=margin, eps=1e-30
    )


def plain_contrastive(x, y, i, margin=1.0):
    far, near, distance = hardest(x, y, i)
    return (distance[far] ** 2 + (margin - distance[near]).clamp_min(0) ** 2) / 2


def has_company(y, i):
    return int((y == y[i]).sum()) > 1


def has_company_and_others(y, i):
    return has_company(y, i) and len(y.unique()) > 1


PLAIN = {
    "nca": (tammes.nca(scale=0.7), lambda *e: plain_nca(*e, scale=0.7), has_company),
    "proto": (tammes.proto(scale=0.7), lambda *e: plain_proto(*e, scale=0.7), has_company),
    "triplet": (tammes.triplet(), plain_triplet, has_company_and_others),
    "contrastive": (
        tammes.contrastive(margin=2.0),
        lambda *e: plain_contrastive(*e, margin=2.0),
        has_company_and_others,
    ),
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", PLAIN)
@for_any(batches())
def test_a_term_has_the_value_and_the_gradient_of_its_plain_formula(name, normalize, batch):
    x, y = batch
    term, plain, is_anchor = PLAIN[name]
    x = (x + 0.1).requires_grad_()
    rows, anchors = term.altered(normalize=normalize)(batch_of(x, y))
    seen = F.normalize(x) if normalize else x
    assert anchors.tolist() == [is_anchor(y, i) for i in range(len(y))]
    if not anchors.any():
        assert rows.eq(0).all()
        return
    chosen = anchors.nonzero().flatten().tolist()
    want = torch.stack([plain(seen, y, i) for i in chosen])
    assert_close(rows[anchors], want)
    assert rows[~anchors].eq(0).all()
    (got,), (expected,) = (torch.autograd.grad(v.sum(), x) for v in (rows, want))
    assert_close(got, expected, rtol=1e-6, atol=1e-9)


# On a line: 0 and 1 of one class, 2 of another, alone in it.
@pytest.mark.parametrize(
    ("term", "values"),
    [
        (tammes.nca(), [math.log1p(math.exp(1 - 4)), math.log(2), 0]),
        (tammes.proto(), [math.log1p(math.exp(1 - 4)), math.log(2), 0]),
        (tammes.triplet(margin=1.5), [0.5, 1.5, 0]),
        (tammes.contrastive(margin=3), [(1 + 1) / 2, (1 + 4) / 2, 0]),
    ],
    ids=str,
)
def test_a_value_by_hand(term, values):
    rows, anchors = term(batch_of(torch.tensor([[0.0], [1.0], [2.0]]), [0, 0, 1]))
    assert_close(rows, torch.tensor(values))
    assert anchors.tolist() == [True, True, False]


# ---------------------------------------------------------------------------- gradients in form


def centred_batch():
    """Fewer examples than dimensions, so that their span is not everything."""
    x = torch.randn(7, 12, dtype=torch.double, requires_grad=True)
    return x, torch.tensor([0, 0, 1, 1, 1, 3, 0])


@pytest.mark.parametrize("term", [tammes.nca(), tammes.proto()], ids=["nca", "proto"])
def test_the_gradient_lies_in_the_span_of_the_centred_features_and_sums_to_zero(term):
    x, y = centred_batch()
    (grad,) = torch.autograd.grad(term(batch_of(x, y))[0].sum(), x)
    centred = (x - x.mean(0)).detach()
    basis = torch.linalg.svd(centred, full_matrices=False).Vh[:6]
    assert grad.norm() > 0.1
    assert_close(grad @ basis.T @ basis, grad)
    assert_close(grad.sum(0), torch.zeros(12, dtype=torch.double))


def test_the_gradient_of_proto_is_its_matrix_form():
    x, y = centred_batch()
    rows, anchors = tammes.proto()(batch_of(x, y))
    (grad,) = torch.autograd.grad(rows.sum(), x)
    x = x.detach()
    one_hot = F.one_hot(y, 4).double()[:, [0, 1, 3]]
    count = one_hot.sum(0)
    means = (one_hot.T @ x) / count[:, None]
    stretch = (one_hot @ count / (one_hot @ count - 1)) ** 2
    # A singleton is no anchor: its row counts nothing.
    factor = 1 + one_hot * (torch.where(anchors, stretch, 1.0)[:, None] - 1)
    p = (-torch.cdist(x, means).square() * factor).softmax(1)
    a = (one_hot - p) * factor * anchors[:, None]
    through_x = a.sum(1)[:, None] * x - a @ means
    through_means = (a.T @ x - a.sum(0)[:, None] * means) / count[:, None]
    assert_close(grad, 2 * through_x - 2 * one_hot @ through_means)


def test_the_gradient_of_nca_is_its_matrix_form():
    x, y = centred_batch()
    rows, anchors = tammes.nca()(batch_of(x, y))
    (grad,) = torch.autograd.grad(rows.sum(), x)
    x = x.detach()
    scores = (-torch.cdist(x, x).square()).fill_diagonal_(-math.inf)
    same = y[:, None] == y
    p, own = scores.softmax(1), scores.masked_fill(~same, -math.inf).softmax(1)
    a = torch.where(anchors[:, None], own - p, 0.0)
    a = a + a.T
    assert_close(grad, 2 * (a.sum(1)[:, None] * x - a @ x))


@pytest.mark.parametrize("name", FEATURE_TERMS)
def test_the_gradients_of_a_term_are_those_of_finite_differences(name):
    features = torch.randn(6, 3, dtype=torch.double, requires_grad=True)
    labels = torch.tensor([0, 0, 2, 2, 2, 5])
    head = tammes.LinearHead(3, CLASSES).double()
    criterion = tammes.Criterion(head, FEATURE_TERMS[name], reduction="none").double().eval()
    assert torch.autograd.gradcheck(lambda x: criterion(x, labels), features)


# ------------------------------------------------------------------------------------ the rules


def test_leaving_an_example_out_stretches_its_distance_to_the_mean():
    # The other class stands on the mean of the five: it is nearer by 1 to (5 / 4) squared.
    x = torch.randn(5, 3, dtype=torch.double)
    both = torch.cat([x, x.mean(0, keepdim=True)])
    rows, _ = tammes.proto()(batch_of(both, [0, 0, 0, 0, 0, 1]))
    square = (x - x.mean(0)).square().sum(1)
    assert_close(rows[:5], F.softplus((25 / 16 - 1) * square))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("labels", "anchored"),
    [([0, 1, 2, 3], False), ([4, 4, 4, 4], None)],
    ids=["all alone", "one class"],
)
def test_a_batch_of_singletons_or_of_one_class_has_loss_zero_and_no_gradient(
    name, labels, anchored
):
    x = torch.randn(4, 3, requires_grad=True)
    rows, anchors = PLAIN[name][0](batch_of(x, labels))
    anchored = name in ("nca", "proto") if anchored is None else anchored
    assert anchors.tolist() == [anchored] * 4
    assert rows.eq(0).all()
    (grad,) = torch.autograd.grad(rows.sum(), x)
    assert grad.eq(0).all()


@pytest.mark.parametrize("name", ["nca", "proto"])
def test_an_example_alone_in_its_class_still_repels_and_is_moved(name):
    x = torch.tensor([[0.0, 0.0], [0.2, 0.0], [0.4, 0.1]], requires_grad=True)
    y = torch.tensor([0, 0, 1])
    rows, _ = PLAIN[name][0](batch_of(x, y))
    without, _ = PLAIN[name][0](batch_of(x[:2], y[:2]))
    assert (rows[:2] > without + 0.1).all()
    (grad,) = torch.autograd.grad(rows.sum(), x)
    assert grad[2].norm() > 0.1


@pytest.mark.parametrize("name", FEATURE_TERMS)
def test_the_mean_of_a_criterion_is_over_the_anchors(name):
    features = torch.randn(6, 3)
    labels = torch.tensor([0, 0, 2, 2, 2, 5])
    criterion = tammes.Criterion(tammes.LinearHead(3, CLASSES), FEATURE_TERMS[name]).eval()
    state = {"state": criterion.states[name]} if name in criterion.states else {}
    rows, anchors = FEATURE_TERMS[name](batch_of(features, labels), **state)
    assert_close(criterion(features, labels), rows.sum() / anchors.sum())
    alone = criterion(features[[0, 2, 5]], labels[[0, 2, 5]])
    assert alone == 0 or name == "center"


@pytest.mark.parametrize("name", FEATURE_TERMS)
def test_an_example_that_does_not_count_is_not_there(name):
    x, y = torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 1, 0])
    head = tammes.LinearHead(3, CLASSES)
    state = FEATURE_TERMS[name].make_state(head)
    state = {} if state is None else {"state": state}
    huge = torch.cat([x, torch.full((1, 3), 1e30)])
    rows, anchors = FEATURE_TERMS[name](
        batch_of(huge, [*y.tolist(), 1], [True] * 6 + [False]), **state
    )
    want, _ = FEATURE_TERMS[name](batch_of(x, y), **state)
    assert_close(rows, torch.cat([want, torch.zeros(1)]))
    assert not anchors[6]


@pytest.mark.parametrize("name", PLAIN)
def test_a_common_offset_costs_no_digits_in_single_precision(name):
    # Expanded squares around the origin lose three digits more here.
    x = (0.05 * torch.randn(32, 512)).double()
    moved = (3 + x).float()
    y = torch.arange(32) % 8
    term = PLAIN[name][0]
    exact, _ = term(batch_of(moved.double(), y))
    assert_close(term(batch_of(moved, y))[0].double(), exact, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_equal_features_have_a_finite_loss_and_gradient(name, scale):
    x = (scale * torch.ones(6, 4)).requires_grad_()
    rows, _ = PLAIN[name][0](batch_of(x, [0, 0, 1, 1, 2, 2]))
    (grad,) = torch.autograd.grad(rows.sum(), x)
    assert rows.isfinite().all()
    assert grad.isfinite().all()


# ----------------------------------------------------------------------------------- center loss


def test_the_center_loss_and_the_step_of_its_centres_by_hand():
    criterion = tammes.Criterion(tammes.LinearHead(2, 3), tammes.center(rate=0.5))
    centers = criterion.states["center"].centers
    features = torch.tensor([[2.0, 0.0], [4.0, 0.0], [0.0, 3.0], [9.0, 9.0]])
    labels = torch.tensor([0, 0, 2, -100])
    # The loss is measured from where the centres were, at zero.
    assert_close(criterion(features, labels), torch.tensor((2 + 8 + 4.5) / 3))
    # 0.5 * (2 + 4) / (1 + 2), and 0.5 * 3 / (1 + 1)
    assert_close(centers, torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.75]]))
    criterion.eval()(features, labels)
    assert_close(centers, torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.75]]))


@for_any(batches())
def test_the_centres_move_by_their_rule(batch):
    x, y = batch
    state = Centers(torch.zeros(5, x.shape[1], dtype=torch.double), rate=0.3)
    state.centers.copy_(torch.randn(5, x.shape[1], generator=torch.Generator().manual_seed(1)))
    before = state.centers.clone()
    state.after(batch_of(x, y))
    for c in range(5):
        rows = x[y == c]
        step = 0.3 * (rows - before[c]).sum(0) / (1 + len(rows))
        assert_close(state.centers[c], before[c] + step)


def test_centres_get_no_gradient_and_features_get_the_difference():
    state = Centers(torch.zeros(2, 3), rate=0.5)
    state.centers.copy_(torch.randn(2, 3))
    x, y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 1, 0])
    rows, anchors = tammes.center()(batch_of(x, y), state=state)
    assert anchors.all()
    (grad,) = torch.autograd.grad(rows.sum(), x)
    assert_close(grad, x.detach() - state.centers[y])
    assert not state.centers.requires_grad


def test_center_says_what_it_misses():
    with pytest.raises(ValueError, match="expects the centres of a criterion"):
        tammes.center()(batch_of(torch.zeros(1, 2), [0]))
    for rate in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"rate above 0 and up to 1, got {rate}"):
            tammes.center(rate=rate)
