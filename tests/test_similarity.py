"""How features are compared with prototypes, and the digits that survive it."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import tammes
from tammes.similarity import Cosine, InnerProduct, SquaredDistance, angle_gaps, norm, unit

PLAIN = {
    "inner product": (InnerProduct(), lambda x, w: x @ w.T),
    "cosine": (Cosine(), lambda x, w: F.normalize(x) @ F.normalize(w).T),
    "cosine of raw features": (Cosine(False), lambda x, w: x @ F.normalize(w).T),
    "squared distance": (SquaredDistance(), lambda x, w: -torch.cdist(x, w).square() / 2),
}


def pair_at(theta, size=512, seed=0):
    """A unit feature and a unit prototype at an angle, as single precision holds them."""
    draw = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, 2, dtype=torch.double, generator=draw))
    prototype, across = basis.T
    feature = math.cos(theta) * prototype + math.sin(theta) * across
    return feature[None].float(), prototype[None].float()


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(n=st.integers(1, 5), d=st.integers(1, 6), c=st.integers(2, 7), seed=st.integers(0, 999))
def test_a_similarity_is_the_product_of_its_rows_and_agrees_with_its_pairs(name, n, d, c, seed):
    similarity, plain = PLAIN[name]
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, dtype=torch.double, generator=draw)
    w = torch.randn(c, d, dtype=torch.double, generator=draw)
    labels = torch.randint(c, (n,), generator=draw)
    bound = similarity.bind(w)
    (query, of_row), (keys, of_class) = bound.query(x), bound.keys(w)
    matrix = query @ keys.T
    matrix = matrix + (0 if of_row is None else of_row[:, None])
    matrix = matrix + (0 if of_class is None else of_class)
    want = plain(x, w)
    assert_close(matrix, want)
    own = similarity.own(x, w[labels], frozenset(["target", "length", "norm", "gap"]))
    assert_close(own["target"], want.gather(1, labels[:, None]).squeeze(1))
    assert_close(own["norm"], x.norm(dim=1))
    assert_close(own["gap"], 1 - F.cosine_similarity(x, w[labels]))
    if similarity.has_angle:
        assert_close(own["length"] * (1 - own["gap"]), own["target"])


def test_only_what_is_read_is_computed():
    x, w = torch.randn(2, 3), torch.randn(2, 3)
    assert Cosine().own(x, w, frozenset(["gap", "others"])).keys() == {"gap", "opposite"}


def test_the_gradient_of_a_unit_vector_is_across_it_and_over_its_length():
    x = torch.randn(4, 3, dtype=torch.double, requires_grad=True)
    upstream = torch.randn(4, 3, dtype=torch.double)
    (grad,) = torch.autograd.grad(unit(x), x, upstream)
    direction = (x / x.norm(dim=1, keepdim=True)).detach()
    along = (upstream * direction).sum(1, keepdim=True) * direction
    assert_close(grad, (upstream - along) / x.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("length", [1e-20, 1e-6, 1.0, 1e15])
def test_a_vector_of_any_length_above_nothing_is_scaled_to_one(length):
    vector = length * torch.tensor([[0.6, -0.8]])
    want = torch.zeros(1, 2) if length < 1e-12 else torch.tensor([[0.6, -0.8]])
    assert_close(unit(vector), want)


def test_a_zero_vector_stays_zero_with_a_zero_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(unit(x).sum(), x)
    assert unit(x).eq(0).all()
    assert grad.eq(0).all()


def test_a_zero_vector_is_at_a_right_angle_to_everything_without_gradient():
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    w = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], requires_grad=True)
    gap = angle_gaps(x, w)["gap"]
    assert gap.tolist() == [1.0, 1.0, 1.0]
    for grad in torch.autograd.grad(gap.sum(), (x, w)):
        assert grad.eq(0).all()


def test_the_gap_by_hand():
    x = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 5.0], [1.0, 1.0]])
    w = torch.tensor([[7.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    assert_close(angle_gaps(x, w)["gap"], torch.tensor([0.0, 2.0, 1.0, 1 - math.sqrt(0.5)]))


# About three times the errors measured on vectors of this size; from the cosine itself, in single
# precision, no digit of the sine is left at 1e-4.
@pytest.mark.parametrize(
    ("theta", "error"), [(1e-1, 4e-7), (1e-2, 2e-6), (1e-3, 1.5e-5), (1e-4, 1.6e-4)]
)
def test_the_sine_from_the_gap_keeps_its_digits_in_single_precision(theta, error):
    for seed in range(5):
        feature, prototype = pair_at(theta, seed=seed)
        gap = angle_gaps(feature, prototype)["gap"].item()
        x, w = F.normalize(feature.double()), F.normalize(prototype.double())
        exact = (x - w).square().sum().item() / 2
        sine, want = (math.sqrt(h * (2 - h)) for h in (gap, exact))
        assert abs(sine / want - 1) < error


@pytest.mark.parametrize("size", [2, 3, 64, 512])
def test_a_cosine_is_never_above_one(size):
    x = torch.randn(2000, size)
    stretch = torch.linspace(0.01, 50, 2000)[:, None]
    cosine = Cosine().target(x, stretch * x)
    assert cosine.max() <= 1
    assert cosine.min() > 1 - 1e-6
    assert angle_gaps(x, -x)["gap"].max() <= 2 + 1e-6


def test_the_squared_distance_keeps_its_digits_far_from_the_origin():
    x = 3 + 0.05 * torch.randn(16, 512)
    w = 3 + 0.05 * torch.randn(10, 512)
    head = tammes.GaussianHead(512, 10)
    with torch.no_grad():
        head.weight.copy_(w)
    exact = -torch.cdist(x.double(), w.double()).square() / 2
    assert (head.logits(x).double() - exact).abs().max() < 5e-6


def test_the_origin_of_a_squared_distance_takes_no_gradient():
    x = torch.randn(4, 3, dtype=torch.double)
    head = tammes.GaussianHead(3, 5).double()
    logits = head.logits(x)
    plain = -(x[:, None] - head.weight).square().sum(-1) / 2
    upstream = torch.randn(4, 5, dtype=torch.double)
    (got,) = torch.autograd.grad(logits, head.weight, upstream)
    (want,) = torch.autograd.grad(plain, head.weight, upstream)
    assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_features_are_compared_in_single_precision(dtype):
    head = tammes.CosineHead(64, 9, scale=64.0)
    x, labels = torch.randn(6, 64).to(dtype), torch.arange(6)
    low, full = head.split(x, labels), head.split(x.float(), labels)
    for name in ("target", "others", "hardest", "expected", "mean", "gap", "norm"):
        assert getattr(low, name).dtype == torch.float32, name
        assert_close(getattr(low, name), getattr(full, name), rtol=0, atol=0, msg=name)
    assert norm(x.float()).dtype == torch.float32


def test_gradients_too_small_for_half_precision_reach_the_prototypes():
    features = torch.randn(256, 8)
    features[:, 0] = features[:, 0].abs() + 16
    features = features.half()
    criterion = tammes.Criterion(tammes.LinearHead(8, 3, bias=False), tammes.softmax())
    weight = torch.eye(3, 8)
    with torch.no_grad():
        criterion.head.weight.copy_(weight)
    labels = torch.zeros(256, dtype=torch.long)
    criterion(features, labels).backward()
    share = (features.double() @ weight.double().T).softmax(1) - F.one_hot(labels, 3)
    assert (share / 256).half().eq(0).any(1).all()
    want = share.T @ features.double() / 256
    assert_close(criterion.head.weight.grad.double(), want, rtol=1e-4, atol=1e-12)


def test_fixed_prototypes_cost_distances_no_gradient(monkeypatch):
    head = tammes.DistanceHead(4, 3, anchors=2.0)
    made, backward = [], torch.ops.aten._cdist_backward

    def counted(*arguments):
        made.append(backward(*arguments))
        return made[-1]

    monkeypatch.setattr(torch.ops.aten, "_cdist_backward", counted)
    features = torch.randn(5, 4, requires_grad=True)
    head.logits(features).sum().backward()
    assert [gradient.shape for gradient in made] == [features.shape]
