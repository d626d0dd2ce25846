"""Losses are found under the other names that they are known by."""

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tammes
from tammes.advise import advise
from tammes.lab.cli.losses import description, loss_info
from tammes.lab.config import parse_loss
from tammes.losses.aliases import ALIASES

SAME = {
    "am_softmax": "cosface",
    "lmcl": "cosface",
    "aam_softmax": "arcface",
    "a_softmax": "sphereface",
    "proxy_nca_pp": "normface",
}
VARIANTS = {
    "mlcd": tammes.multi_positive(margin=0.0, form="apart"),
    "proxy_nca": tammes.gm_softmax(beta2=-math.inf),
    "sphereface_r": tammes.sphereface(margin=1.7, gradient="detached"),
    "balanced_softmax": tammes.logit_adjustment([5.0, 3.0, 2.0]),
}


def test_every_alias_is_looked_at():
    assert {*SAME, *VARIANTS} == ALIASES.keys()


@pytest.mark.parametrize("name", SAME)
def test_a_name_for_the_same_loss_is_its_builder(name):
    assert getattr(tammes, name) is getattr(tammes, SAME[name])
    assert parse_loss(name) == getattr(tammes, SAME[name])()
    assert loss_info(name) == loss_info(SAME[name])
    assert name in loss_info(SAME[name]).also
    assert f"also      {name}" in description(SAME[name]) or name == "lmcl"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_a_loss_with_other_settings(name):
    counts = [5.0, 3.0, 2.0]
    term = getattr(tammes, name)(*([counts] if name == "balanced_softmax" else []))
    assert term == VARIANTS[name] == pickle.loads(pickle.dumps(term))
    assert parse_loss(name, counts=counts) == term
    found = loss_info(name)
    assert found.name == name
    assert found.source
    assert found.heads
    assert description(name).startswith(f"tammes.{name}(")


@pytest.mark.parametrize("name", SAME)
def test_advice_knows_the_name(name):
    builder = getattr(tammes, name)
    found, plain = (advise(100, 64, loss=each) for each in (name, builder.definition.name))
    assert found.to_dict() == plain.to_dict()


@pytest.mark.parametrize("name", VARIANTS)
def test_advice_keeps_the_name_of_a_loss_with_settings_of_its_own(name):
    found = advise(100, 64, loss=name)
    assert found.loss == name
    assert f"tammes.{name}(" in found.code


def proxies(scale):
    x = torch.randn(12, 6, dtype=torch.double)
    head = tammes.CosineHead(6, 5, scale=scale).double()
    distance = torch.cdist(F.normalize(x), F.normalize(head.weight.detach())).square()
    return head, x, torch.arange(12) % 5, distance


def test_proxy_nca_of_squared_distances_at_half_the_scale():
    head, x, y, distance = proxies(scale=6.0)
    own = F.one_hot(y, 5).bool()
    expected = 3 * distance[own] + (-3 * distance).masked_fill(own, -math.inf).logsumexp(1)
    loss = tammes.Criterion(head, tammes.proxy_nca(), reduction="none")(x, y)
    assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    lm = tammes.Criterion(head, tammes.lm_softmax(), reduction="none")(x, y)
    assert_close(loss, 6 * lm, rtol=1e-9, atol=1e-9)


def test_proxy_nca_pp_is_the_softmax_of_squared_distances():
    head, x, y, distance = proxies(scale=18.0)
    loss = tammes.Criterion(head, tammes.proxy_nca_pp(), reduction="none")(x, y)
    # Of vectors of length 3: their squared distances are 9 times as large.
    assert_close(loss, F.cross_entropy(-9 * distance, y, reduction="none"), rtol=1e-9, atol=1e-9)


def test_sphereface_r_has_the_gradient_of_the_plain_cosine():
    head = tammes.CosineHead(6, 5, scale=30.0).double()
    x, y = torch.randn(12, 6, dtype=torch.double, requires_grad=True), torch.arange(12) % 5
    cosine = F.normalize(x) @ F.normalize(head.weight).T
    with torch.no_grad():
        angle = cosine.clamp(-1 + 1e-12, 1 - 1e-12).acos()
        angle = torch.where(F.one_hot(y, 5).bool(), 1.7 * angle, angle)
        turns = (angle / math.pi).floor()
        bent = (1 - 2 * turns.remainder(2)) * angle.cos() - 2 * turns
        change = bent - cosine
    expected = F.cross_entropy(30 * (cosine + change), y)
    loss = tammes.Criterion(head, tammes.sphereface_r())(x, y)
    assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    (found,) = torch.autograd.grad(loss, x)
    (wanted,) = torch.autograd.grad(expected, x)
    assert_close(found, wanted, rtol=1e-8, atol=1e-9)
