"""Criteria inside activation checkpoints, whose forward pass runs again in the backward pass."""

import copy

import pytest
import torch
from cover import slow
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tammes
from tammes.heads.class_sampling import Sampler
from tammes.schedules import DeferredReweighting, WarmUp

pytestmark = pytest.mark.torch_version
SIZE, CLASSES, ROWS = 6, 5, 8


def scheduled():
    criterion = tammes.Criterion(tammes.CosineHead(SIZE, CLASSES, scale=8.0), tammes.arcface())
    return criterion.schedule(
        margin=WarmUp(0.0, 0.6, steps=3),
        class_weights=DeferredReweighting(range(1, CLASSES + 1), start=1, beta=0.9),
    )


def sampled():
    head = tammes.ShardedHead(tammes.CosineHead, SIZE, 40, scale=8.0, sample_rate=0.3)
    return tammes.Criterion(head, tammes.cosface())


CHANGING = {
    "center": lambda: tammes.Criterion(
        tammes.LinearHead(SIZE, CLASSES), tammes.softmax() + tammes.center()
    ),
    "adaface": lambda: tammes.Criterion(
        tammes.CosineHead(SIZE, CLASSES, scale=8.0), tammes.adaface(momentum=0.5)
    ),
    "schedules": scheduled,
    "sampled classes": sampled,
}


class Model(nn.Module):
    """A backbone and a criterion, which are checkpointed together."""

    def __init__(self, criterion):
        super().__init__()
        self.backbone = nn.Linear(4, SIZE)
        self.criterion = criterion

    def forward(self, inputs, labels):
        return self.criterion(self.backbone(inputs), labels)


def batches(count):
    return [(torch.randn(ROWS, 4), torch.randint(CLASSES, (ROWS,))) for _ in range(count)]


def plainly(model, *batch):
    return model(*batch)


def reentrant(model, *batch):
    return checkpoint(model, *batch, use_reentrant=True)


def not_reentrant(model, *batch):
    return checkpoint(model, *batch, use_reentrant=False)


def train(model, way, steps, *, at_once=1, again=False):
    """Losses and gradients of some steps of several calls each, and what is left at the end."""
    seen = []
    for batch in steps:
        calls = [batch, *batches(at_once - 1)]
        # A reentrant checkpoint wants an input with a gradient.
        inputs = [x.clone().requires_grad_() for x, _ in calls]
        losses = [way(model, x, labels) for x, (_, labels) in zip(inputs, calls, strict=True)]
        total = sum((2.0**i) * loss for i, loss in enumerate(losses))
        if again:
            total.backward(retain_graph=True)
        total.backward()
        seen += [*losses, *(x.grad for x in inputs), *(dense(p.grad) for p in model.parameters())]
        model.zero_grad()
    return [*(tensor.detach() for tensor in seen), *model.state_dict().values()]


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, reentrant) for name in CHANGING),
        *((name, not_reentrant) for name in CHANGING),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_checkpointed_criterion_trains_as_one_that_is_not(name, at_once, way):
    model, steps = Model(CHANGING[name]()), batches(3)
    found = []
    for each in (plainly, way):
        torch.manual_seed(0)
        found.append(train(copy.deepcopy(model), each, steps, at_once=at_once))
    assert_close(found[1], found[0])


@pytest.mark.parametrize("way", [reentrant, not_reentrant])
def test_a_checkpoint_is_recomputed_twice_with_the_same_state(way):
    model, steps = Model(CHANGING["center"]()), batches(2)
    expected, found = (
        train(copy.deepcopy(model), each, steps, again=True) for each in (plainly, way)
    )
    assert_close(found, expected)


@pytest.mark.parametrize("way", [reentrant, not_reentrant])
def test_two_calls_within_one_checkpoint_are_told_apart(way):
    class Twice(Model):
        def forward(self, inputs, labels):
            loss = super().forward(inputs, labels)
            return loss + 2 * super().forward(inputs.flip(0), labels)

    model, steps = Twice(CHANGING["center"]()), batches(2)
    expected, found = (train(copy.deepcopy(model), each, steps) for each in (plainly, way))
    assert_close(found, expected)


def test_terms_are_those_of_the_last_call_and_not_of_a_recomputation():
    model = Model(CHANGING["center"]())
    first, second = (reentrant(model, x.requires_grad_(), labels) for x, labels in batches(2))
    terms = dict(model.criterion.terms)
    (first + second).backward()
    assert model.criterion.terms == terms


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_samples_the_same_classes_again(use_reentrant):
    sampler, labels = Sampler(0.3, seed=0), torch.tensor([3, 1])
    drawn = []

    def loss(weight):
        drawn.append(sampler(labels, 40).index)
        return weight[drawn[-1]].square().sum()

    weight = torch.randn(40, requires_grad=True)
    first, second = (checkpoint(loss, weight, use_reentrant=use_reentrant) for _ in range(2))
    (first + second).backward()
    assert {tuple(index.tolist()) for index in drawn[2:]} == {
        tuple(index.tolist()) for index in drawn[:2]
    }
    assert not torch.equal(drawn[0], drawn[1])
    assert sampler.steps == 2


class Unknown(torch.autograd.Function):
    """A checkpoint that torch does not know of."""

    @staticmethod
    def forward(ctx, model, inputs, labels):
        ctx.model, ctx.labels = model, labels
        ctx.save_for_backward(inputs)
        with torch.no_grad():
            return model(inputs, labels)

    @staticmethod
    def backward(ctx, grad):
        (inputs,) = ctx.saved_tensors
        inputs = inputs.detach().requires_grad_()
        with torch.enable_grad():
            ctx.model(inputs, ctx.labels).backward(grad)
        return None, inputs.grad, None


@pytest.mark.parametrize("name", CHANGING)
def test_a_recomputation_of_an_unknown_call_is_refused(name):
    ((inputs, labels),) = batches(1)
    loss = Unknown.apply(Model(CHANGING[name]()), inputs.requires_grad_(), labels)
    with pytest.raises(RuntimeError, match="keep it outside of the activation checkpoint"):
        loss.backward()


def test_a_criterion_that_nothing_changes_is_recomputed_by_anybody():
    model = Model(tammes.CosFace(SIZE, CLASSES, scale=8.0))
    ((inputs, labels),) = batches(1)
    inputs.requires_grad_()
    (expected,) = torch.autograd.grad(model(inputs, labels), inputs)
    Unknown.apply(model, inputs, labels).backward()
    assert_close(inputs.grad, expected)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("center", reentrant),
        slow("center", not_reentrant),
        slow("schedules", reentrant),
        ("schedules", not_reentrant),
    ],
)
def test_a_compiled_criterion_is_refused_when_it_is_recomputed(name, way):
    torch._dynamo.reset()
    criterion = torch.compile(CHANGING[name](), backend="aot_eager")
    features, labels = torch.randn(ROWS, SIZE, requires_grad=True), torch.arange(ROWS) % CLASSES
    loss = way(criterion, features, labels)
    with pytest.raises(RuntimeError, match="keep it outside of the activation checkpoint"):
        loss.backward()
    torch._dynamo.reset()
