"""AdaFace: the norm of a feature decides between the two margins."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tammes
from tammes.losses.adaptive import NormStatistics


@pytest.fixture
def state():
    statistics = NormStatistics(momentum=0.1).double()
    statistics.mean.fill_(10.0)
    statistics.std.fill_(2.0 - 1e-3)
    return statistics


def split_with_norms(norms, n_classes=5):
    norms = torch.tensor(norms, dtype=torch.double)
    rows = F.normalize(torch.randn(len(norms) + n_classes, 6, dtype=torch.double))
    cosine = rows[: len(norms)] @ rows[len(norms) :].T
    return tammes.split(
        cosine, torch.arange(len(norms)) % n_classes, scale=9.0, own={"norm": norms}
    )


@pytest.mark.parametrize(
    ("cosine", "norm", "margin", "score"),
    [
        # One deviation above the mean, k = 0.5: 60 - 30 degrees, and 1.5 m off the cosine.
        (0.5, 12.0, math.pi / 3, math.sqrt(0.75) - math.pi / 2),
        # One below, k = -0.5: 60 + 30 degrees, and 0.5 m off.
        (0.5, 8.0, math.pi / 3, 0 - math.pi / 6),
        # k = 1: 30 - 90 degrees, where the cosine goes on rising as 2 - cos 60.
        (math.sqrt(0.75), 99.0, math.pi / 2, 1.5 - math.pi),
    ],
)
def test_adaface_by_hand(state, cosine, norm, margin, score):
    cosine = torch.tensor([[cosine, 0.0]], dtype=torch.double)
    norm = torch.tensor([norm], dtype=torch.double)
    s = tammes.split(cosine, torch.tensor([0]), scale=math.log(4), own={"norm": norm})
    loss = tammes.adaface(margin=margin, concentration=0.5)(s, state=state)
    assert_close(loss, torch.tensor([math.log1p(4**-score)], dtype=torch.double))


def test_a_short_feature_gets_arcface(state):
    s = split_with_norms([1.0, 2.0, 3.0, 0.5])
    assert_close(
        tammes.adaface(margin=0.4)(s, state=state), tammes.arcface(margin=0.4)(s), rtol=0, atol=0.5
    )
    want = tammes.combined_margin(1, 0.4, 0)(s)
    assert_close(tammes.adaface(margin=0.4, concentration=1.0)(s, state=state), want)
    assert_close(want, tammes.arcface(margin=0.4)(s))


def test_a_feature_of_average_norm_gets_cosface(state):
    s = split_with_norms([10.0] * 7)
    assert_close(tammes.adaface(margin=0.4)(s, state=state), tammes.cosface(margin=0.4)(s))
    s = split_with_norms([0.5, 8.0, 30.0])
    flat = tammes.adaface(margin=0.4, concentration=0.0)(s, state=state)
    assert_close(flat, tammes.cosface(margin=0.4)(s))


def test_a_long_feature_gets_both_margins_in_full(state):
    s = split_with_norms([16.0 + 1e-9, 40.0, 1e4])
    want = tammes.combined_margin(1, -0.4, 0.8)(s)
    assert_close(tammes.adaface(margin=0.4, concentration=1 / 3)(s, state=state), want)


def test_no_gradient_goes_through_the_norm_that_drives_the_margin(state):
    head = tammes.CosineHead(6, 5, scale=9.0).double()
    features = (2 * torch.randn(8, 6, dtype=torch.double)).requires_grad_()
    s = head.split(features, torch.arange(8) % 5)
    (grad,) = torch.autograd.grad(tammes.adaface()(s, state=state).sum(), features)
    # On unit features only the direction counts, so nothing is left along the feature.
    assert_close((grad * features).sum(1), torch.zeros(8, dtype=torch.double))
    quality = (0.333 * (features.norm(dim=1) - 10) / 2).clamp(-1, 1).detach()
    fixed = tammes.combined_margin()(
        head.split(features, torch.arange(8) % 5), m2=-0.4 * quality, m3=0.4 * (1 + quality)
    )
    assert_close(grad, torch.autograd.grad(fixed.sum(), features)[0])


def test_running_statistics_move_towards_the_valid_batch_before_the_loss():
    criterion = tammes.Criterion(tammes.CosineHead(2, 3), tammes.adaface(momentum=0.25))
    state = criterion.states["adaface"]
    features = torch.tensor([[3.0, 0.0], [0.0, 5.0], [4.0, 0.0], [500.0, 0.0], [0.0, 700.0]])
    labels = torch.tensor([0, 1, 2, 1, -100])
    loss = criterion(features, labels)
    # Norms 3, 5, 4 and 500, which is cut to 100; the last one is ignored.
    mean, std = 28.0, torch.tensor([3.0, 5.0, 4.0, 100.0]).std()
    assert_close(state.mean, torch.tensor([0.75 * 20 + 0.25 * mean]))
    assert_close(state.std, 0.75 * 100 + 0.25 * std.view(1))
    assert_close(criterion.eval()(features, labels), loss)


def test_running_statistics_stay_in_evaluation_and_for_empty_batches():
    criterion = tammes.Criterion(tammes.CosineHead(2, 3), tammes.adaface())
    state = criterion.states["adaface"]
    criterion.eval()(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    assert (state.mean.item(), state.std.item()) == (20.0, 100.0)
    criterion.train()(torch.randn(2, 2), torch.tensor([-100, -100]))
    assert (state.mean.item(), state.std.item()) == (20.0, 100.0)
    criterion(torch.tensor([[0.0, 10.0]]), torch.tensor([0]))
    assert_close(state.mean.item(), 19.9)
    assert state.std.item() == 100.0


def test_a_zero_feature_has_a_finite_loss_and_no_gradient():
    criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.adaface())
    features = torch.zeros(2, 4, requires_grad=True)
    loss = criterion(features, torch.tensor([0, 1]))
    (grad,) = torch.autograd.grad(loss, features)
    assert loss.isfinite()
    assert grad.eq(0).all()


def test_adaface_says_what_it_misses():
    with pytest.raises(ValueError, match="expects the running averages of a criterion"):
        tammes.adaface()(split_with_norms([1.0]))
    with pytest.raises(ValueError, match=r"momentum between 0 and 1, got 1\.5"):
        tammes.adaface(momentum=1.5)
