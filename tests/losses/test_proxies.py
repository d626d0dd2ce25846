"""Proxy-Anchor: sums over the batch for each class."""

import math

import pytest
import torch
import torch.nn.functional as F
from rank_pool import everywhere
from torch.testing import assert_close

import tammes
from tammes.lab.config import head_text, parse_head, parse_loss
from tammes.losses import proxies

CLASSES = 9
LABELS = torch.tensor([0, 3, 3, 8, -100, 0, 5, 3, 1, 1, 8])
TOLERANCE = {
    torch.double: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
}


def batch(dtype=torch.double):
    x = torch.randn(11, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return x.to(dtype).requires_grad_(), LABELS


def official(x, y, weight, scale, margin):
    """Proxy-Anchor-CVPR2020/code/losses.py."""
    x, y = x[y >= 0], y[y >= 0]
    return anchored(F.normalize(x) @ F.normalize(weight).T, y, scale, margin)


def anchored(cosine, y, scale, margin):
    positive = F.one_hot(y, cosine.shape[1]).to(cosine.dtype)
    pulls = (torch.exp(-scale * (cosine - margin)) * positive).sum(0)
    pushes = (torch.exp(scale * (cosine + margin)) * (1 - positive)).sum(0)
    present = (positive.sum(0) != 0).sum()
    return (1 + pulls).log().sum() / present + (1 + pushes).log().sum() / cosine.shape[1]


@pytest.mark.parametrize("most", [1 << 24, 30, 1], ids=["at once", "blocks", "one by one"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [tammes.CosineHead, tammes.LinearHead])
def test_values_and_gradients_are_those_of_the_official_form(kind, dtype, most, monkeypatch):
    monkeypatch.setattr(proxies, "_SCORES", most)
    torch.manual_seed(0)
    made = tammes.Criterion(kind(6, CLASSES), tammes.proxy_anchor(scale=16.0, margin=0.2)).to(dtype)
    x, y = batch(dtype)
    loss, expected = made(x, y), official(x, y, made.head.weight, 16.0, 0.2)
    inputs = [x, made.head.weight]
    assert_close(loss, expected, **TOLERANCE[dtype])
    found, wanted = (torch.autograd.grad(value, inputs) for value in (loss, expected))
    assert_close(found, wanted, **TOLERANCE[dtype])


@tammes.term(on="proxies", reads="")
def mean_cosine(batch, prototypes):
    return (F.normalize(batch.features) @ prototypes.T).mean()


@pytest.mark.parametrize("most", [1 << 24, 1], ids=["at once", "one by one"])
@pytest.mark.parametrize("pooling", ["max", "soft"])
@pytest.mark.parametrize("loss", [tammes.proxy_anchor(), tammes.multi_positive(kind="cos")])
def test_with_several_prototypes_the_cosines_are_the_pooled_ones(loss, pooling, most, monkeypatch):
    monkeypatch.setattr(proxies, "_SCORES", most)
    torch.manual_seed(0)
    head = tammes.CosineHead(6, CLASSES, subcenters=3, pooling=pooling, scale=1.0)
    made = tammes.Criterion(head, loss, reduction="sum").double()
    x, y = batch()
    x, y = x.detach()[y >= 0].requires_grad_(), y[y >= 0]
    each = torch.einsum("nd,ckd->nck", F.normalize(x), F.normalize(head.weight, dim=2))
    weights = (each / 0.1).softmax(2)
    cosine = each.max(2).values if pooling == "max" else (weights * each).sum(2)
    if loss.name == "proxy_anchor":
        expected = len(y) * anchored(cosine, y, 32.0, 0.1)
    else:
        margin = 0.3 * F.one_hot(y, CLASSES).double()
        expected = F.cross_entropy(64.0 * (cosine - margin), y, reduction="sum")
    value, inputs = made(x, y), [x, head.weight]
    assert_close(value, expected, **TOLERANCE[torch.double])
    found, wanted = (torch.autograd.grad(each, inputs) for each in (value, expected))
    assert_close(found, wanted, **TOLERANCE[torch.double])


def test_one_value_by_hand():
    # One example on its prototype, another prototype at a right angle: margin 0 and scale 1.
    head = tammes.CosineHead(2, 2).double()
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    made = tammes.Criterion(head, tammes.proxy_anchor(scale=1.0, margin=0.0))
    loss = made(torch.tensor([[5.0, 0.0]], dtype=torch.double), torch.tensor([0]))
    assert_close(loss.item(), math.log1p(math.exp(-1)) + math.log(2) / 2)


def test_blocks_of_classes_never_have_all_cosines_in_memory(monkeypatch):
    monkeypatch.setattr(proxies, "_SCORES", 64)
    made = tammes.Criterion(tammes.CosineHead(6, 100), tammes.proxy_anchor())
    x, y = batch(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        loss = made(x, y)
    assert max(kept) <= 100 * 6 < 11 * 100
    loss.backward()
    assert made.head.weight.grad.any()


def test_large_scales_are_finite():
    made = tammes.Criterion(tammes.CosineHead(6, CLASSES), tammes.proxy_anchor(scale=1000.0))
    x, y = batch(torch.float32)
    loss = made(x, y)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


BOTH = tammes.proxy_anchor() + 0.5 * tammes.multi_positive()


def on_ranks(group, sharded, centers):
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    torch.manual_seed(0)
    whole = tammes.CosineHead(6, CLASSES, subcenters=centers)
    head, options = whole, {"group": group}
    if sharded:
        head = tammes.ShardedHead(
            tammes.CosineHead, 6, CLASSES, group=group, scale=64.0, subcenters=centers
        )
        head.load_state_dict(whole.state_dict())
        options = {}
    made = tammes.Criterion(head, BOTH + tammes.cosface(), **options).double()
    x, y = batch()
    mine = (
        slice(0, 4)
        if rank == 0
        else slice(4 + (rank - 1) * 7 // (size - 1), 4 + rank * 7 // (size - 1))
    )
    part = x.detach()[mine].requires_grad_()
    loss = made(part, y[mine])
    loss.backward()
    # What a wrapper that averages makes of it.
    return loss.detach(), part.grad / size, made.head.weight.grad


@pytest.mark.parametrize(("sharded", "centers"), [(False, 1), (True, 1), (True, 2)])
def test_on_several_ranks_the_batch_is_that_of_all(sharded, centers):
    torch.manual_seed(0)
    made = tammes.Criterion(
        tammes.CosineHead(6, CLASSES, subcenters=centers), BOTH + tammes.cosface()
    ).double()
    x, y = batch()
    loss = made(x, y)
    loss.backward()
    losses, features, weights = zip(*everywhere(3, on_ranks, sharded, centers), strict=True)
    assert_close(losses, (loss.detach(),) * 3)
    assert_close(torch.cat(features), x.grad, rtol=1e-10, atol=1e-12)
    whole = torch.cat(weights) if sharded else sum(weights) / 3
    assert_close(whole, made.head.weight.grad, rtol=1e-10, atol=1e-12)


def test_it_is_written_as_text_and_has_a_cosine_head():
    loss = parse_loss("proxy_anchor(margin=0.2)")
    assert loss == tammes.proxy_anchor(margin=0.2)
    assert head_text(parse_head("auto", loss, 6, CLASSES)).startswith("cosine(")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tammes.proxy_anchor(scale=0.0), "proxy_anchor expects scale above 0, got 0"),
        (lambda: tammes.proxy_anchor(margin=[0.1, 0.2]), "one margin for all classes"),
        (
            lambda: tammes.Criterion(tammes.CosineHead(6, 9, subcenters=2), mean_cosine()),
            "one prototype per class, got CosineHead with subcenters=2",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
