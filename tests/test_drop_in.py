"""Classes with the names of other libraries have their constructor, call, values and weights."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rank_pool import everywhere
from torch.testing import assert_close

import tammes
from tammes.convert import (
    AdditiveAngularMargin,
    AddMarginProduct,
    AngularMargin,
    ArcMarginProduct,
    PartialFC_V2,
)

ARC = SimpleNamespace(s=16.0, m1=1.0, m2=0.5, m3=0.0, interclass_filtering_threshold=0)


@pytest.fixture
def batch():
    weight = torch.randn(7, 6, dtype=torch.double)
    labels = torch.arange(40) % 7
    # From beside the own prototype to behind it.
    toward = torch.linspace(3, -3, 40, dtype=torch.double)[:, None]
    features = toward * F.normalize(weight[labels]) + 0.2 * torch.randn(40, 6, dtype=torch.double)
    return features.requires_grad_(), weight, labels


def with_margin(cosine, labels, margin, past, easy_margin=False):
    """Cosines with a margin, by sines and cosines."""
    sine = (1 - cosine.square()).sqrt()
    shifted = cosine * math.cos(margin) - sine * math.sin(margin)
    if easy_margin:
        shifted = torch.where(cosine > 0, shifted, cosine)
    else:
        shifted = torch.where(cosine > math.cos(math.pi - margin), shifted, cosine - past)
    return torch.where(F.one_hot(labels, cosine.shape[1]).bool(), shifted, cosine)


def cosines(features, weight):
    return F.normalize(features) @ F.normalize(weight).T


def assert_same(found, expected, *inputs):
    """Values to 1e-9, and gradients of a sum with weights that differ."""
    assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = torch.linspace(0.5, 2, found.numel(), dtype=torch.double).view(found.shape)
    for got, want in zip(
        torch.autograd.grad((found * weights).sum(), inputs, retain_graph=True),
        torch.autograd.grad((expected * weights).sum(), inputs, retain_graph=True),
        strict=True,
    ):
        assert_close(got, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("easy_margin", [False, True])
@pytest.mark.parametrize("margin", [0.0, 0.2, 0.5])
def test_arc_margin_product_is_that_of_wespeaker(batch, margin, easy_margin):
    features, weight, labels = batch
    projection = ArcMarginProduct(6, 7, scale=32.0, margin=0.1, easy_margin=easy_margin).double()
    projection.load_state_dict({"weight": weight})
    projection.update(margin=margin)
    cosine = cosines(features, projection.weight)
    past = 1 + math.cos(math.pi - margin)
    expected = 32 * with_margin(cosine, labels, margin, past, easy_margin)
    for given in (labels, labels[:, None].int()):
        assert_same(projection(features, given), expected, features, projection.weight)
    assert (cosine.gather(1, labels[:, None]) < -math.cos(0.5)).any()


def test_add_margin_product_is_that_of_wespeaker_and_cosface(batch):
    features, weight, labels = batch
    projection = AddMarginProduct(6, 7, scale=32.0, margin=0.2).double()
    projection.load_state_dict({"weight": weight})
    cosine = cosines(features, projection.weight)
    expected = 32 * (cosine - 0.2 * F.one_hot(labels, 7).double())
    assert_same(projection(features, labels), expected, features, projection.weight)
    criterion = tammes.CosFace(6, 7, scale=32.0, margin=0.2).double()
    criterion.head.load_state_dict(projection.state_dict())
    loss = F.cross_entropy(projection(features, labels), labels)
    assert_close(criterion(features, labels), loss)


@pytest.mark.parametrize("easy_margin", [False, True])
def test_additive_angular_margin_is_that_of_speechbrain(batch, easy_margin):
    features, weight, labels = batch
    targets = F.one_hot(labels, 7).double()
    cosine = cosines(features, weight)
    expected = 30 * with_margin(cosine, labels, 0.4, 0.4 * math.sin(0.4), easy_margin)
    found = AdditiveAngularMargin(margin=0.4, scale=30.0, easy_margin=easy_margin)(cosine, targets)
    assert_same(found, expected, features)
    plain = AngularMargin(margin=0.4, scale=30.0)(cosine, targets)
    assert_same(plain, 30 * (cosine - 0.4 * targets), features)


def test_gradients_are_finite_where_a_feature_meets_its_prototype():
    cosine = torch.tensor([[1.0, 0.0], [0.3, -1.0], [1.0000001, 0.2]], requires_grad=True)
    targets = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    found = AdditiveAngularMargin(margin=0.2, scale=30.0)(cosine, targets)
    (gradient,) = torch.autograd.grad(found.sum(), cosine)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    assert AdditiveAngularMargin()(torch.eye(2).half(), torch.eye(2)).dtype == torch.float32


# ------------------------------------------------------------------------------- Partial FC


def partial_fc_loss(features, weight, labels, margin, scale):
    """The margin is outside of the graph, so the own score has the gradient of its cosine."""
    cosine = cosines(features, weight)
    with torch.no_grad():
        own = cosine.gather(1, labels[:, None])
        angle = own.acos() + margin
        # Past pi the original rises again, where this library goes on falling.
        bent = torch.where(angle <= math.pi, angle.cos(), -2 - angle.cos())
        change = torch.zeros_like(cosine).scatter(1, labels[:, None], bent - own)
    return F.cross_entropy(scale * (cosine + change), labels)


def test_partial_fc_takes_the_weights_and_the_call_of_insightface(batch):
    features, weight, labels = batch
    module = PartialFC_V2(ARC, 6, 7, 1.0, False).double()
    module.load_state_dict({"weight": weight})
    assert torch.equal(module.head.weight, weight)
    expected = partial_fc_loss(features, module.head.weight, labels, 0.5, 16.0)
    for given in (labels, labels[:, None]):
        assert_same(module(features, given), expected, features, module.head.weight)
    again = PartialFC_V2(margin_loss=ARC, embedding_size=6, num_classes=7).double()
    again.load_state_dict(module.state_dict())
    assert_close(again(features, labels), module(features, labels))


def test_partial_fc_reads_the_margins_of_either_loss():
    arc = PartialFC_V2(ARC, 6, 7)
    assert arc.loss == tammes.arcface(margin=0.5, gradient="detached")
    assert arc.head.scale == 16.0
    assert abs(arc.head.weight.std() - 0.01) < 0.003
    cos = PartialFC_V2(SimpleNamespace(s=64.0, m=0.4), 6, 7, sample_rate=0.5)
    assert cos.loss == tammes.cosface(margin=0.4)
    assert cos.head.sample_rate == 0.5
    combined = PartialFC_V2(SimpleNamespace(s=64.0, m1=1.0, m2=0.0, m3=0.4), 6, 7)
    assert combined.loss == cos.loss


def test_partial_fc_filters_other_classes_as_the_original_does(batch):
    features, weight, labels = batch
    filtering = SimpleNamespace(**vars(ARC) | {"interclass_filtering_threshold": 0.2})
    module = PartialFC_V2(filtering, 6, 7).double()
    module.load_state_dict({"weight": weight})
    cosine = F.normalize(features) @ F.normalize(module.head.weight).T
    own = F.one_hot(labels, 7).bool()
    near = cosine[own].detach().acos() + 0.5 <= math.pi
    kept = torch.where((cosine > 0.2) & ~own, 0.0, cosine)
    bent = cosine + ((cosine.detach().acos() + 0.5).cos() - cosine).detach()
    expected = F.cross_entropy(16.0 * torch.where(own, bent, kept)[near], labels[near])
    assert_same(module(features[near], labels[near]), expected, features, module.head.weight)


def test_partial_fc_in_half_precision_trains():
    module = PartialFC_V2(ARC, 6, 7, fp16=True)
    features = torch.randn(8, 6, requires_grad=True)
    loss = module(features, torch.arange(8) % 7)
    loss.backward()
    assert loss.dtype == torch.float32
    assert features.grad.isfinite().all()


def _load_own(group, weight, features, labels):
    module = PartialFC_V2(ARC, 6, 8).double()
    rank = torch.distributed.get_rank()
    module.load_state_dict({"weight": weight[2 * rank : 2 * rank + 2]})
    mine = slice(3 * rank, 3 * rank + 3)
    return module(features[mine], labels[mine]).item()


def test_every_rank_loads_the_weight_that_it_saved():
    weight, features = torch.randn(8, 6).double(), torch.randn(12, 6).double()
    labels = torch.arange(12) % 8
    expected = partial_fc_loss(features, weight, labels, 0.5, 16.0).item()
    assert everywhere(4, _load_own, weight, features, labels) == pytest.approx([expected] * 4)


@pytest.mark.parametrize(
    ("margin_loss", "message"),
    [
        (object(), "a margin_loss with s, m1, m2 and m3"),
        (SimpleNamespace(s=64.0, m1=1.3, m2=0.5, m3=0.0), r"expects margins \(1, m2, 0\)"),
    ],
)
def test_partial_fc_refuses_what_it_cannot_do(margin_loss, message):
    with pytest.raises((TypeError, ValueError), match=f"PartialFC_V2 expects.*{message}|{message}"):
        PartialFC_V2(margin_loss, 6, 7)
