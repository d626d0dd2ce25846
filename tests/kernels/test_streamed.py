"""The streamed kernel gives what the plain one gives, for any loss, head and cut into blocks."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from blocks import cut
from catalogue import CLASSES, HEADS, KERNEL_HEADS, SPLIT_TERMS, default_head, fits
from cover import kernel_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tammes
from tammes.kernels import tiling as plan
from tammes.kernels.dispatch import choose_kernel
from tammes.kernels.streamed import functions
from tammes.kernels.streamed.score_blocks import WholeRows

STREAMABLE = {n: t for n, t in SPLIT_TERMS.items() if "rest" not in t.definition.reads}
CUTS = [(6, (13, CLASSES)), (6, (4, 3)), (6, (1, 1)), (16, (13, 3))]
"""Size of a feature, and of the blocks; where features are longer than the one block of rows has
rows, scores and the gradient of the keys share their memory."""


def everything(head, loss, reduction, features, labels, upstream, implementation):
    """Loss, terms and every gradient of one call."""
    head = copy.deepcopy(head)
    head.implementation = implementation
    criterion = tammes.Criterion(head, loss, reduction=reduction).double()
    features = features.clone().requires_grad_()
    value = criterion(features, labels)
    value.backward(upstream[: value.numel()].reshape(value.shape))
    found = {"loss": value.detach(), "features": features.grad, **criterion.terms}
    for name, parameter in criterion.named_parameters():
        # A gradient that is not there is one of zero.
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


@pytest.mark.parametrize(("scale", "head", "term"), kernel_cases(STREAMABLE))
def test_streamed_is_dense_in_value_and_all_gradients(monkeypatch, scale, head, term):
    loss = STREAMABLE[term]
    heads = {size: HEADS[head](size, CLASSES, scale=scale) for size, _ in CUTS}
    labels = torch.randint(CLASSES, (13,))
    upstream = torch.linspace(0.5, 2.0, 13, dtype=torch.double)
    ways = (("mean", False), ("sum", False), ("sum", True), ("none", False))
    for (reduction, thin), (size, (rows, classes)) in itertools.product(ways, CUTS):
        cut(monkeypatch, rows, classes, thin=thin)
        features = torch.randn(13, size, dtype=torch.double)
        arguments = (heads[size], loss, reduction, features, labels, upstream)
        assert_close(everything(*arguments, "streamed"), everything(*arguments, "dense"))


@pytest.mark.parametrize("name", KERNEL_HEADS)
def test_a_head_that_a_term_does_not_fit_is_refused(name):
    head = HEADS[name](6, CLASSES)
    for loss in STREAMABLE.values():
        if not fits(loss, head):
            with pytest.raises(ValueError, match="expects a head"):
                tammes.Criterion(head, loss)


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 9),
    size=st.integers(1, 5),
    classes=st.integers(2, 7),
    rows=st.integers(1, 9),
    tile=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
def test_a_sum_of_terms_streams_in_any_shape(count, size, classes, rows, tile, seed):
    torch.manual_seed(seed)
    loss = tammes.softmax(smoothing=0.2) + 0.3 * tammes.logit_divergence() + tammes.hard_bias()
    head = tammes.LinearHead(size, classes, scale="learnable")
    features = torch.randn(count, size, dtype=torch.double)
    labels = torch.randint(classes, (count,))
    upstream = torch.rand(count, dtype=torch.double) + 0.5
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut(monkeypatch, rows, tile)
        arguments = (head, loss, "none", features, labels, upstream)
        assert_close(everything(*arguments, "streamed"), everything(*arguments, "dense"))


def streamed_criterion(size=6, classes=CLASSES, loss=None, **options):
    head = tammes.CosineHead(size, classes, scale=8.0, implementation="streamed")
    return tammes.Criterion(head, loss or tammes.cosface(), **options)


def a_batch(size=6, count=13, classes=CLASSES, **options):
    return torch.randn(count, size, **options), torch.randint(classes, (count,))


def test_a_second_backward_gives_the_same_gradient_again():
    criterion, (features, labels) = streamed_criterion(), a_batch(requires_grad=True)
    loss = criterion(features, labels)
    first = torch.autograd.grad(loss, [features, criterion.head.weight], retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(2 * loss, [features, criterion.head.weight])
    assert_close(second, [2 * gradient for gradient in kept])
    assert_close(list(first), kept, rtol=0, atol=0)


def test_only_the_gradients_asked_for_are_made(monkeypatch):
    asked = []
    original = functions._run

    def run(problem, labels, weights, plan, needs):
        asked.append(tuple(needs))
        return original(problem, labels, weights, plan, needs)

    monkeypatch.setattr(functions, "_run", run)
    criterion, (features, labels) = streamed_criterion(), a_batch()
    with torch.no_grad():
        criterion(features, labels)
    criterion(features, labels)
    criterion.requires_grad_(False)
    criterion(features.requires_grad_(), labels).backward()
    nothing, weight_only = (False,) * 4, (False, True, False, False)
    assert asked == [nothing, weight_only, (True, False, False, False)]
    assert criterion.head.weight.grad is None


def test_no_scores_beyond_one_block_are_ever_in_memory(monkeypatch):
    monkeypatch.setitem(plan.SCORES, "cpu", 4 * 40 * 5000)
    sizes = []
    original = WholeRows.forward

    def forward(self, rows):
        sizes.append((tuple(self.scratch.shape), len(rows.own)))
        return original(self, rows)

    monkeypatch.setattr(WholeRows, "forward", forward)
    criterion = streamed_criterion(classes=5000)
    features, labels = a_batch(count=64, classes=5000, requires_grad=True)
    criterion(features, labels).backward()
    assert sizes == [((32, 5000), 32)] * 2


def test_no_row_of_scores_is_ever_in_memory_where_rows_are_asked_for(monkeypatch):
    monkeypatch.setitem(plan.SCORES, "cpu", 2 * 4 * 64 * 100)
    sizes = []
    original = functions.ClassBlocks._block

    def block(self, rows, classes):
        sizes.append((len(rows.own), classes.stop - classes.start))
        return original(self, rows, classes)

    monkeypatch.setattr(functions.ClassBlocks, "_block", block)
    criterion = streamed_criterion(classes=5000, reduction="none")
    features, labels = a_batch(count=64, classes=5000, requires_grad=True)
    criterion(features, labels).sum().backward()
    assert sizes == [(64, 100)] * 100


def test_blocks_of_too_few_rows_give_way_to_blocks_of_classes(monkeypatch):
    monkeypatch.setattr(WholeRows, "forward", None)
    monkeypatch.setitem(plan.SCORES, "cpu", 4 * 5000 * (plan.FEWEST - 1))
    criterion = streamed_criterion(classes=5000)
    features, labels = a_batch(count=64, classes=5000, requires_grad=True)
    criterion(features, labels).backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused_and_the_dense_form_named(reduction):
    criterion = streamed_criterion(reduction=reduction)
    features, labels = a_batch(requires_grad=True)
    loss = criterion(features, labels).sum()
    (gradient,) = torch.autograd.grad(loss, features, create_graph=True)
    assert gradient.isfinite().all()
    with pytest.raises(RuntimeError, match=r"differentiated once.*implementation='dense'"):
        gradient.square().sum().backward()


def test_an_empty_batch_has_no_loss_and_no_gradient():
    for implementation in ("streamed", "dense"):
        criterion = streamed_criterion()
        criterion.head.implementation = implementation
        features = torch.empty(0, 6, requires_grad=True)
        loss = criterion(features, torch.empty(0, dtype=torch.long))
        loss.backward()
        assert_close(loss.detach(), torch.tensor(0.0))
        assert_close(criterion.head.weight.grad, torch.zeros(CLASSES, 6))


@pytest.mark.parametrize("term", STREAMABLE)
def test_an_empty_batch_has_no_rows(term):
    head = default_head(STREAMABLE[term], implementation="streamed")
    criterion = tammes.Criterion(head, STREAMABLE[term], reduction="none")
    features = torch.empty(0, 6, requires_grad=True)
    rows = criterion(features, torch.empty(0, dtype=torch.long))
    rows.sum().backward()
    assert rows.shape == (0,)
    assert_close(head.weight.grad, torch.zeros(CLASSES, 6))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_outlives_its_loss(reduction, backward):
    # A graph that held its own outputs would keep a gradient of all prototypes.
    criterion = streamed_criterion(reduction=reduction)
    features, labels = a_batch()
    hidden = features.requires_grad_() * 1.0
    watched = weakref.ref(hidden)
    gc.collect()
    gc.disable()
    try:
        loss = criterion(hidden, labels).sum()
        if backward:
            loss.backward()
        del loss, hidden
        assert watched() is None
    finally:
        gc.enable()


def test_a_term_that_remembers_is_differentiated_with_what_it_knew_in_forward():
    features, labels = a_batch()
    gradients = []
    for later_batch in (False, True):
        torch.manual_seed(1)
        criterion = streamed_criterion(loss=tammes.adaface(momentum=0.9), reduction="none")
        x = features.clone().requires_grad_()
        rows = criterion(x, labels)
        if later_batch:
            criterion(100 * features, labels)
        rows.sum().backward()
        gradients.append(x.grad)
    assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_scale_is_applied_before_gradients_become_half(reduction):
    # 65536, where a gradient scaler starts, is infinite in float16.
    found = {}
    for implementation in ("dense", "streamed"):
        torch.manual_seed(0)
        criterion = streamed_criterion(size=16, classes=50, reduction=reduction)
        criterion.head.implementation = implementation
        features, labels = a_batch(size=16, count=64, classes=50)
        x = (10 * features).half().requires_grad_()
        (65536 * criterion(x, labels).sum() / (64 if reduction == "none" else 1)).backward()
        assert x.grad.isfinite().all()
        found[implementation] = x.grad.float()
    assert_close(found["streamed"], found["dense"], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_a_criterion_can_be_checkpointed(implementation, reduction):
    # Activation checkpointing hands out each saved tensor once.
    criterion = streamed_criterion(reduction=reduction, loss=tammes.softmax() + tammes.hinge())
    criterion.head.implementation = implementation
    features, labels = a_batch(requires_grad=True)
    inputs = [features, criterion.head.weight]
    expected = torch.autograd.grad(criterion(features, labels).sum(), inputs)
    again = checkpoint(criterion, features, labels, use_reentrant=False)
    assert_close(torch.autograd.grad(again.sum(), inputs), expected)


def reader(field):
    """A term that says it reads the target, and reads another field once it is built."""
    fields = ["target"]

    @tammes.term(reads="target")
    def read(split):
        return getattr(split, fields[-1]) + 0 * split.target

    made = read()
    fields.append(field)
    return made


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize(
    "field", ["others", "hardest", "expected", "mean", "length", "norm", "gap", "cosine"]
)
def test_a_field_that_was_not_declared_is_nan_on_either_kernel(field, implementation):
    head = tammes.LinearHead(6, CLASSES, bias=False, implementation=implementation)
    assert tammes.Criterion(head, reader(field))(*a_batch()).isnan()


def test_settings_and_weights_that_are_learned_get_their_gradient():
    criterion, (features, labels) = streamed_criterion(), a_batch()
    margin = torch.full((13,), 0.2, requires_grad=True)
    weights = torch.ones(13, requires_grad=True)
    criterion(features, labels, margin=margin, weights=weights).backward()
    assert (margin.grad > 0).all()
    assert weights.grad.abs().sum() > 0


def test_auto_streams_only_what_is_large():
    head = tammes.CosineHead(2, 2**12)
    small, large = torch.randn(2**10 - 1, 2), torch.randn(2**10, 2)
    reads = frozenset(("target", "others"))
    assert choose_kernel("auto", head.problem(small), reads) == "dense"
    assert choose_kernel("auto", head.problem(large), reads) == "streamed"
    assert choose_kernel("streamed", head.problem(small), reads) == "streamed"


def test_float32_streamed_is_no_worse_than_plain_torch():
    features, labels = a_batch(size=32, count=64, classes=500)
    head = tammes.CosineHead(32, 500, scale=64.0)
    loss = tammes.arcface()
    errors = {}
    truth = None
    for kind in ("truth", "dense", "streamed"):
        h = copy.deepcopy(head).to(torch.double if kind == "truth" else torch.float)
        h.implementation = "dense" if kind == "truth" else kind
        x = features.to(h.weight.dtype, copy=True).requires_grad_()
        tammes.Criterion(h, loss)(x, labels).backward()
        found = torch.cat([x.grad.flatten(), h.weight.grad.flatten()]).double()
        truth = found if truth is None else truth
        errors[kind] = (found - truth).norm() / truth.norm()
    assert errors["streamed"] <= 2 * errors["dense"] + 1e-7
