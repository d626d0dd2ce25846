"""A term on cosines beside one on the head's own scores: two looks at one batch, on every way."""

import copy

import pytest
import torch
import torch.nn.functional as F
from blocks import cut
from catalogue import CLASSES, HEADS
from rank_pool import everywhere
from torch.testing import assert_close

import tammes
from tammes.kernels.fused import launch
from tammes.kernels.problem import cosines_of
from tammes.similarity import Cosine

SUMS = {
    "softmax": tammes.softmax() + 0.5 * tammes.sample_margin(),
    "divergence": tammes.softmax(smoothing=0.1)
    + 0.3 * tammes.logit_divergence()
    + 0.5 * tammes.sample_margin(),
    "first": tammes.sample_margin() + tammes.hard_bias(),
    "hinge": tammes.hinge() + tammes.bce() + 2.0 * tammes.sample_margin(),
}
NAMES = ["linear", "linear_no_bias", "cosine", "cosine_raw_features", "gaussian"]
ROWS, SIZE = 13, 6


def everything(head, loss, features, labels, implementation, reduction="mean"):
    """Loss, terms and every gradient of one call."""
    head = copy.deepcopy(head)
    head.implementation = implementation
    criterion = tammes.Criterion(head, loss, reduction=reduction)
    features = features.clone().requires_grad_()
    value = criterion(features, labels)
    (
        torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).view_as(value) * value
    ).sum().backward()
    found = {"loss": value.detach(), "features": features.grad, **criterion.terms}
    for name, parameter in criterion.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


def batch(dtype=torch.double):
    generator = torch.Generator().manual_seed(3)
    features = 3 * torch.randn(ROWS, SIZE, dtype=dtype, generator=generator)
    return features, torch.randint(CLASSES, (ROWS,), generator=generator)


def head_of(name, dtype=torch.double):
    torch.manual_seed(5)
    head = HEADS[name](SIZE, CLASSES).to(dtype)
    if head.bias is not None:
        with torch.no_grad():
            head.bias.copy_(torch.linspace(-3, 3, CLASSES))
    return head


def cosines(head, features, labels):
    """The sample margin term, written out."""
    found = F.normalize(features) @ F.normalize(head.weight).T
    own = F.one_hot(labels, CLASSES).bool()
    return found.masked_fill(own, -2).amax(1) - found[own]


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_sum_is_what_its_terms_are_alone(name, implementation):
    features, labels = batch()
    head = head_of(name)
    both = everything(head, SUMS["softmax"], features, labels, implementation, "none")
    alone = everything(head, tammes.softmax(), features, labels, implementation, "none")
    expected = alone["loss"] + 0.5 * cosines(head, features, labels).detach()
    assert_close(both["loss"], expected)
    assert_close(both["sample_margin"], cosines(head, features, labels).detach().mean())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize("name", NAMES)
def test_streamed_is_dense(monkeypatch, name, loss, reduction):
    features, labels = batch()
    head = head_of(name)
    expected = everything(head, SUMS[loss], features, labels, "dense", reduction)
    for rows, classes in ((ROWS, CLASSES), (4, 3), (1, 1)):
        cut(monkeypatch, rows, classes)
        assert_close(
            everything(head, SUMS[loss], features, labels, "streamed", reduction), expected
        )


@pytest.mark.skipif(torch.cuda.is_available() or not launch.INTERPRETED, reason="no interpreter")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("loss", ["softmax", "divergence"])
@pytest.mark.parametrize("name", NAMES)
def test_fused_is_dense(name, loss):
    pytest.importorskip("triton", reason="no triton here")
    features, labels = batch(torch.float)
    head = head_of(name, torch.float)
    expected = everything(head, SUMS[loss], features, labels, "dense")
    got = everything(head, SUMS[loss], features, labels, "fused")
    assert_close(got, expected, rtol=5e-5, atol=2e-5)


def on_ranks(group, kind, settings, loss, rows, implementation):
    """A sharded head on this rank's part of a batch, beside a plain one on all of it."""
    torch.manual_seed(5)
    plain = kind(SIZE, CLASSES, **settings).double()
    sharded = tammes.ShardedHead(kind, SIZE, CLASSES, group=group, **settings).double()
    sharded.load_state_dict(plain.state_dict())
    sharded.implementation = implementation
    features, labels = batch()
    features, labels = features[: sum(rows)], labels[: sum(rows)]
    rank = torch.distributed.get_rank(group)
    begin = sum(rows[:rank])
    own = slice(begin, begin + rows[rank])
    whole = features.clone().requires_grad_()
    mine = features[own].clone().requires_grad_()
    expected = tammes.Criterion(plain, loss)(whole, labels)
    got = tammes.Criterion(sharded, loss)(mine, labels[own])
    expected.backward()
    got.backward()
    assert_close(got, expected)
    size = torch.distributed.get_world_size(group)
    # Gradients are averaged over the ranks afterwards.
    assert_close(mine.grad, size * whole.grad[own])
    for name, parameter in sharded.named_parameters():
        all_classes = plain.get_parameter(name).grad
        assert_close(parameter.grad, all_classes[sharded.start : sharded.stop], msg=name)
    return True


@pytest.mark.parametrize("implementation", ["auto", "streamed"])
@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(tammes.LinearHead, {}), (tammes.LinearHead, {"bias": False}), (tammes.GaussianHead, {})],
)
def test_sharded_is_dense(kind, settings, loss, implementation):
    assert (
        everywhere(3, on_ranks, kind, settings, SUMS[loss], [5, 0, 3], implementation) == [True] * 3
    )


@pytest.mark.parametrize("name", NAMES)
def test_neither_lengths_nor_bias_nor_scale_matter_to_it(name):
    features, labels = batch()
    loss = tammes.sample_margin()
    head = head_of(name)
    first = everything(head, loss, features, labels, "dense")
    with torch.no_grad():
        head.weight.mul_(torch.linspace(0.5, 4, CLASSES)[:, None])
        if head.bias is not None:
            head.bias.mul_(-7)
    second = everything(head, loss, 11 * features, labels, "dense")
    assert_close(second["loss"], first["loss"])
    assert -2 <= float(first["loss"]) <= 2


def test_cosine_problem_has_the_same_features_and_prototypes_alone():
    head = head_of("linear")
    features, labels = batch()
    problem = head.problem(features, labels)
    found = cosines_of(problem)
    assert found.features is problem.features
    assert found.prototypes is problem.prototypes
    assert (found.bias, found.scale, type(found.similarity)) == (None, 1.0, Cosine)
    assert problem.bias is head.bias


def test_a_term_of_one_s_own_can_be_on_cosines():
    @tammes.term(reads="target", cosines=True)
    def far(split):
        """How far the own prototype is."""
        return 1 - split.target

    head, (features, labels) = head_of("linear"), batch()
    loss = tammes.Criterion(head, far(), reduction="none")(features, labels)
    assert_close(loss, 1 - F.cosine_similarity(features, head.weight[labels]))
