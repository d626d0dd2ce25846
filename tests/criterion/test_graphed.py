"""A graphed criterion gives what the criterion gives; without a GPU it is the criterion."""

import copy
import logging

import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes.criterion.graphed import _compared, _Conditions
from tammes.schedules import WarmUp


def test_without_a_gpu_calls_run_as_they_are(caplog):
    criterion = tammes.CosFace(5, 4)
    features, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 2])
    with caplog.at_level(logging.WARNING, logger="tammes"):
        fast = criterion.graphed(features, labels)
    assert "without CUDA graphs: it needs features on a CUDA device, got them on cpu" in caplog.text
    assert not fast.recorded
    assert_close(fast(features, labels), criterion(features, labels))
    assert fast.terms.keys() == {"cosface"}
    assert fast.head is criterion.head
    weighted = fast(features, labels, weights=torch.tensor([1.0, 0.0, 0.0]), margin=0.1)
    assert_close(
        weighted, criterion(features, labels, weights=torch.tensor([1.0, 0.0, 0.0]), margin=0.1)
    )


def test_attributes_are_those_of_the_criterion():
    criterion = tammes.CosFace(5, 4)
    fast = criterion.graphed(torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 2]))
    fast.class_weights = torch.rand(4)
    assert fast.class_weights is criterion.class_weights is not None
    copied = copy.deepcopy(fast)
    assert copied.criterion is not criterion


def test_conditions_tell_every_change_of_a_criterion():
    criterion = tammes.CosFace(5, 4)
    features, labels = torch.randn(3, 5), torch.tensor([0, 1, 2])

    def now():
        return _Conditions.now(criterion, features, labels)

    def change_scale():
        criterion.head.scale = 5.0

    def change_ignored():
        criterion.ignore_index = 2

    def change_weights():
        # Twice, so that the first object is freed and its place may be taken.
        for _ in range(2):
            criterion.class_weights = torch.rand(4)

    def replace_prototypes():
        criterion.head.weight = torch.nn.Parameter(criterion.head.weight.detach())

    changes = [
        change_scale,
        change_ignored,
        *[change_weights] * 20,
        replace_prototypes,
        lambda: criterion.schedule(margin=WarmUp(0.0, 0.1, steps=3)),
    ]
    for change in changes:
        # Kept alive as a recording keeps them, so that no id is taken twice.
        before, alive = now(), _compared(criterion)
        assert now() == before
        change()
        assert now() != before, change
        del alive


LOSSES = {
    "softmax": lambda: tammes.Softmax(16, 10),
    "arcface": lambda: tammes.ArcFace(16, 10),
    "scheduled": lambda: tammes.CosFace(16, 10).schedule(margin=WarmUp(0.0, 0.35, steps=5)),
    "center": lambda: tammes.Criterion(
        tammes.CosineHead(16, 10), tammes.cosface() + 0.1 * tammes.center()
    ),
    "direct_sum": lambda: tammes.Criterion(
        tammes.LinearHead(16, 10, bias=False), tammes.direct_sum(tammes.softmax(), tammes.nca())
    ),
    "learned": lambda: tammes.CosFace(16, 10, scale="learnable"),
}


def make_batch(count=32):
    features = torch.randn(count, 16).cuda().requires_grad_()
    return features, torch.randint(10, (count,)).cuda()


def step(call, criterion, features, labels):
    criterion.zero_grad()
    features.grad = None
    loss = call(features, labels)
    loss.backward()
    found = [loss.detach().clone(), features.grad.clone()]
    return found + [p.grad.clone() for p in criterion.parameters() if p.grad is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("autocast", [False, True])
def test_graphed_calls_give_what_plain_calls_give(name, autocast):
    plain = LOSSES[name]().cuda()
    graphed = copy.deepcopy(plain)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        fast = graphed.graphed(*make_batch())
        assert fast.recorded
        for _ in range(7):
            features, labels = make_batch()
            assert_close(
                step(fast, graphed, features, labels), step(plain, plain, features, labels)
            )
            assert_close(fast.terms, plain.terms)
    assert_close(graphed.state_dict(), plain.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_gradients_are_those_of_the_loss_times_its_own(reduction, dtype):
    criterion = tammes.CosFace(16, 10, reduction=reduction).cuda()
    features, _ = make_batch()
    inputs = features, criterion.head.weight
    labels = torch.randperm(10).repeat(4)[:32].cuda()
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        fast = criterion.graphed(features, labels)
        assert fast.recorded
        # Powers of two round nothing, not even in bfloat16.
        for factor in (4.0, 65536.0):
            expected, found = (
                torch.autograd.grad((factor * call(features, labels)).sum(), inputs)
                for call in (criterion, fast)
            )
            assert_close(found, expected, rtol=1e-4, atol=1e-6 * factor)
    # In float16 small gradients need the factor before they are computed.
    alone = fast._graphs.backward is not None
    assert alone == (reduction == "none" or dtype == torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", ["features", "prototypes"])
def test_what_takes_no_gradient_gets_none(frozen):
    criterion = tammes.CosFace(16, 10).cuda()
    features, labels = make_batch()
    features.requires_grad_(frozen != "features")
    criterion.head.weight.requires_grad_(frozen != "prototypes")
    fast = criterion.graphed(features, labels)
    assert fast.recorded
    trained = criterion.head.weight if frozen == "features" else features
    (expected,) = torch.autograd.grad(2 * criterion(features, labels), trained)
    (2 * fast(features, labels)).backward()
    assert_close(trained.grad, expected)
    assert (features.grad is None) == (frozen == "features")
    assert (criterion.head.weight.grad is None) == (frozen == "prototypes")


@pytest.mark.gpu
def test_the_last_batch_of_an_epoch_and_evaluation_run_without_a_graph():
    criterion = LOSSES["arcface"]().cuda()
    fast = criterion.graphed(*make_batch())
    features, labels = make_batch(7)
    assert_close(
        step(fast, criterion, features, labels), step(criterion, criterion, features, labels)
    )
    with torch.no_grad():
        assert_close(fast(features, labels), criterion(features, labels))
    weights = torch.rand(7).cuda()
    assert_close(
        fast(features, labels, weights=weights), criterion(features, labels, weights=weights)
    )


@pytest.mark.gpu
def test_two_calls_before_the_backward_pass():
    criterion = LOSSES["arcface"]().cuda()
    fast = criterion.graphed(*make_batch())
    first, second = make_batch(), make_batch()
    (fast(*first) + fast(*second)).backward()
    expected = [first[0].grad.clone(), second[0].grad.clone()]
    first[0].grad = second[0].grad = None
    (criterion(*first) + criterion(*second)).backward()
    assert_close([first[0].grad, second[0].grad], expected)


@pytest.mark.gpu
def test_gradients_accumulate():
    criterion = LOSSES["arcface"]().cuda()
    fast, batches = criterion.graphed(*make_batch()), [make_batch(), make_batch()]
    for call in (criterion, fast):
        criterion.zero_grad()
        for features, labels in batches:
            call(features, labels).backward()
        if call is criterion:
            expected = criterion.head.weight.grad.clone()
    assert_close(criterion.head.weight.grad, expected)


@pytest.mark.gpu
def test_a_second_backward_pass_is_refused():
    criterion = LOSSES["arcface"]().cuda()
    loss = criterion.graphed(*make_batch())(*make_batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expects one backward pass"):
        loss.backward()
    features, labels = make_batch()
    loss = criterion.graphed(features, labels)(features, labels)
    with pytest.raises(RuntimeError, match="none to be differentiated again"):
        torch.autograd.grad(loss, features, create_graph=True)


@pytest.mark.gpu
def test_a_change_is_followed():
    criterion = LOSSES["arcface"]().cuda()
    fast = criterion.graphed(*make_batch())
    criterion.class_weights = torch.rand(10)
    assert fast.recorded
    features, labels = make_batch()
    assert_close(
        step(fast, criterion, features, labels), step(criterion, criterion, features, labels)
    )
    with torch.autocast("cuda", torch.bfloat16):
        assert_close(
            step(fast, criterion, features, labels), step(criterion, criterion, features, labels)
        )


@pytest.mark.gpu
def test_recording_steps_no_schedule_and_leaves_no_gradient():
    criterion = LOSSES["scheduled"]().cuda()
    before = copy.deepcopy(criterion.state_dict())
    criterion.graphed(*make_batch())
    assert_close(criterion.state_dict(), before)
    assert criterion.head.weight.grad is None
