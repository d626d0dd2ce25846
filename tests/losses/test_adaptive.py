"""Margins of each example: AdaFace and MagFace by the norm of its feature, ElasticFace drawn."""

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


# ---------------------------------------------------------------------------------- MagFace


def magface_as_published(x, w, y, scale, lowest, highest, weight):
    """Scores by sines and cosines of the margin, as the authors' code has them."""
    norms = x.norm(dim=1).clamp(lowest, highest)
    margin = (0.8 - 0.45) / (highest - lowest) * (norms - lowest) + 0.45
    cosine = F.normalize(x) @ F.normalize(w).T
    own = cosine.gather(1, y[:, None])[:, 0]
    shifted = own * margin.cos() - (1 - own**2).sqrt() * margin.sin()
    shifted = torch.where(
        own > (math.pi - margin).cos(), shifted, own - (math.pi - margin).sin() * margin
    )
    scores = scale * cosine.scatter(1, y[:, None], shifted[:, None])
    return F.cross_entropy(scores, y) + weight * (norms / highest**2 + 1 / norms).mean()


def test_magface_is_that_of_the_authors_code_in_value_and_gradient():
    criterion = tammes.Criterion(
        tammes.CosineHead(6, 5, scale=16.0), tammes.magface(extension="linear")
    ).double()
    x = 60 * torch.randn(40, 6, dtype=torch.double)
    x[:5] *= 0.01
    x, y = x.requires_grad_(), torch.arange(40) % 5
    w = criterion.head.weight
    loss = criterion(x, y)
    published = magface_as_published(x, w, y, 16.0, 10.0, 110.0, 35.0)
    assert_close(loss, published, rtol=1e-9, atol=1e-9)
    for got, want in zip(
        torch.autograd.grad(loss, (x, w)), torch.autograd.grad(published, (x, w)), strict=True
    ):
        assert_close(got, want, rtol=1e-8, atol=1e-10)
        assert got.abs().sum() > 0


def test_magface_with_equal_margins_and_no_weight_is_arcface():
    s = split_with_norms([0.0, 5.0, 50.0, 500.0])
    flat = tammes.magface(min_margin=0.3, max_margin=0.3, norm_weight=0.0)
    assert_close(flat(s), tammes.arcface(margin=0.3)(s))


def test_magface_at_the_ends_of_the_norms():
    short, long = (split_with_norms([norm] * 4) for norm in (1.0, 1000.0))
    for s, margin, norm in ((short, 0.2, 10.0), (long, 0.9, 50.0)):
        loss = tammes.magface(min_margin=0.2, max_margin=0.9, max_norm=50.0, norm_weight=2.0)(s)
        assert_close(loss, tammes.arcface(margin=margin)(s) + 2 * (1 / norm + norm / 2500))


def test_magface_says_which_norms_it_cannot_take():
    for norms in ({"min_norm": 0.0}, {"max_norm": 10.0}):
        with pytest.raises(ValueError, match="magface expects 0 < min_norm < max_norm, got"):
            tammes.magface(**norms)


# ------------------------------------------------------------------------------ ElasticFace


def elastic(**settings):
    head = tammes.CosineHead(6, 5, scale=16.0)
    return tammes.Criterion(head, tammes.elasticface(**settings), reduction="none").double()


@pytest.mark.parametrize(("kind", "plain"), [("arc", tammes.arcface), ("cos", tammes.cosface)])
def test_elasticface_without_deviation_or_in_evaluation_is_the_plain_loss(kind, plain):
    x, y = torch.randn(20, 6, dtype=torch.double), torch.arange(20) % 5
    criterion = elastic(margin=0.3, std=0.0, kind=kind)
    expected = plain(margin=0.3)(criterion.head.split(x, y))
    assert_close(criterion(x, y), expected)
    drawing = elastic(margin=0.3, std=0.2, kind=kind)
    drawing.load_state_dict(criterion.state_dict())
    assert not torch.allclose(drawing(x, y), expected)
    assert_close(drawing.eval()(x, y), expected)
    s = criterion.head.split(x, y)
    assert_close(tammes.elasticface(margin=0.3, kind=kind)(s), plain(margin=0.3)(s))


def drawn(criterion, n):
    """Margins of the next step, from the loss itself."""
    w = F.normalize(torch.eye(5, 6, dtype=torch.double))
    criterion.head.weight.data.copy_(w)
    y = torch.arange(n) % 5
    # At a right angle to all others: the loss is log(1 + 4 e^-score).
    loss = criterion(w[y], y).detach()
    return 1 - (math.log(4) - loss.expm1().log()) / 16


def test_elasticface_draws_normal_margins_that_differ_by_example_step_and_seed():
    criterion = elastic(margin=0.35, std=0.05, kind="cos")
    first, second = drawn(criterion, 4000), drawn(criterion, 4000)
    for margins in (first, second):
        assert margins.unique().numel() > 3990
        standard = ((margins - 0.35) / 0.05).sort().values
        quantiles = (torch.arange(4000, dtype=torch.double) + 0.5) / 4000
        normal = torch.distributions.Normal(0.0, 1.0).icdf(quantiles)
        assert (standard - normal)[200:-200].abs().max() < 0.1
    other = drawn(elastic(margin=0.35, std=0.05, kind="cos", seed=1), 4000)
    for left, right in ((first, second), (first, other)):
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 0.06


def test_elasticface_goes_on_with_its_draws_after_resuming():
    criterion, resumed = elastic(std=0.1), elastic(std=0.1)
    x, y = torch.randn(20, 6, dtype=torch.double), torch.arange(20) % 5
    losses = [criterion(x, y)]
    resumed.load_state_dict(criterion.state_dict())
    losses.append(criterion(x, y))
    assert not torch.equal(*losses)
    assert torch.equal(resumed(x, y), losses[1])


def test_elasticface_draws_nothing_for_an_ignored_example():
    x, y = torch.randn(6, 6, dtype=torch.double), torch.arange(6) % 5
    some = torch.tensor([0, 2, 3, 5])
    criterion = elastic(std=0.1)
    alone = elastic(std=0.1)
    alone.load_state_dict(criterion.state_dict())
    ignored = torch.full_like(y, -100).index_copy(0, some, y[some])
    assert_close(criterion(x, ignored)[some], alone(x[some], y[some]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "both"}, "kind 'arc' or 'cos', got 'both'"),
        ({"std": -1.0}, "std of 0 or more, got -1.0"),
        ({"seed": 1.5}, "a whole number as seed, got 1.5"),
    ],
)
def test_elasticface_refuses_in_a_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        tammes.elasticface(**settings)
