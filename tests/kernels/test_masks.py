"""A class whose bias is -inf is not there: no loss counts it, whichever way its scores are made."""

import copy

import pytest
import torch
from blocks import cut
from catalogue import CLASSES, SPLIT_TERMS, fits
from torch.testing import assert_close

import tammes
from tammes.kernels import dispatch

try:
    from tammes.kernels.fused import launch as tiles
except ImportError:
    tiles = None

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED_HERE = tiles is not None and (tiles.INTERPRETED or DEVICE == "cuda")
needs_fused = pytest.mark.skipif(not FUSED_HERE, reason="neither a GPU nor TRITON_INTERPRET=1")
MASKED = [0, 4, 6]
"""The first of them is the class that an ignored example is given."""
KEPT = [c for c in range(CLASSES) if c not in MASKED]
FUSED = {n for n, t in SPLIT_TERMS.items() if not t.definition.reads & {"free_map", "softplus"}}
LABELS = torch.tensor([1, 2, 3, -100, 5, 8, 7, 7, 1, -100, 2])


def make_head(kind, scale="learnable"):
    """A head whose masked classes would win, were they there."""
    torch.manual_seed(1)
    head = {
        "linear": tammes.LinearHead,
        "cosine": tammes.CosineHead,
        "gaussian": tammes.GaussianHead,
    }
    head = head[kind](6, CLASSES, scale=scale)
    head.bias = torch.nn.Parameter(torch.randn(CLASSES))
    with torch.no_grad():
        head.weight[MASKED] *= 50.0
        head.bias[MASKED] = -torch.inf
    return head


def outcome(criterion, features, labels=LABELS, backwards=1):
    """Loss, terms and every gradient, in double precision on the CPU."""
    criterion = criterion.to(DEVICE)
    features = features.to(DEVICE, copy=True).requires_grad_()
    value = criterion(features, labels.to(DEVICE))
    up = torch.linspace(0.5, 2.0, value.numel(), device=DEVICE, dtype=value.dtype)
    for turn in range(backwards):
        criterion.zero_grad()
        features.grad = None
        value.backward(up.view_as(value), retain_graph=turn + 1 < backwards)
    found = {"loss": value.detach(), "features": features.grad, **criterion.terms}
    for name, parameter in criterion.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {
        name: (tensor.to_dense() if tensor.is_sparse else tensor).double().cpu()
        for name, tensor in found.items()
    }


def without(head, loss, reduction, features, labels=LABELS):
    """What the loss is where the masked classes have been removed."""
    criterion = tammes.Criterion(
        copy.deepcopy(head), loss, reduction=reduction, implementation="dense"
    )
    criterion.remove_classes(MASKED)
    places = torch.full((CLASSES,), -100)
    places[KEPT] = torch.arange(len(KEPT))
    labels = torch.where(labels >= 0, places[labels.clamp_min(0)], labels)
    found = outcome(criterion, torch.where((labels >= 0)[:, None], features, 0.0), labels)
    for name in ("head.weight", "head.bias"):
        short = found[name]
        found[name] = short.new_zeros(CLASSES, *short.shape[1:])
        found[name][KEPT] = short
    return found


def pairs():
    for name, term in SPLIT_TERMS.items():
        for kind in ("linear", "cosine", "gaussian"):
            if fits(term, make_head(kind)):
                yield name, kind


WAYS = {
    "dense": {},
    "one pass": {"rows": 4, "classes": 2},
    "one block": {"rows": 99, "classes": 99},
    "recompute": {"rows": 4, "classes": 2, "thin": True},
    "fused": {},
}


@pytest.mark.parametrize(("name", "kind"), [*pairs()])
def test_a_masked_class_is_one_that_was_removed(monkeypatch, name, kind):
    features = torch.randn(len(LABELS), 6, dtype=torch.double)
    # What an ignored example holds is not looked at either.
    features[3], features[9, 2] = torch.nan, torch.inf
    head, loss = make_head(kind).double(), SPLIT_TERMS[name]
    for reduction in ("mean", "none"):
        expected = without(head, loss, reduction, features)
        assert all(value.isfinite().all() for value in expected.values())
        for way, blocks in WAYS.items():
            if way == "fused" and (name not in FUSED or not FUSED_HERE or reduction == "none"):
                continue
            if blocks:
                cut(monkeypatch, **blocks)
            mine, x = copy.deepcopy(head), features
            mine.implementation = way if way in ("dense", "fused") else "streamed"
            tolerance = {}
            if way == "fused":
                mine, x, tolerance = mine.float(), x.float(), {"rtol": 2e-4, "atol": 5e-5}
            criterion = tammes.Criterion(mine, loss, reduction=reduction)
            # The second backward of a sum makes the gradients anew.
            found = outcome(criterion, x, backwards=2)
            assert_close(found, expected, **tolerance, msg=f"{way}: {{}}".format)


def test_a_frozen_bias_masks_as_a_learned_one_does(monkeypatch):
    cut(monkeypatch, 4, 2)
    features, head = torch.randn(len(LABELS), 6), make_head("linear", 3.0)
    loss = tammes.softmax(smoothing=0.1) + 0.3 * tammes.logit_divergence() + tammes.hinge()
    expected = without(head, loss, "mean", features)
    head.bias.requires_grad_(False)
    for way in ("dense", "streamed"):
        head.implementation = way
        found = outcome(tammes.Criterion(copy.deepcopy(head), loss), features)
        for key in ("loss", "features", "head.weight"):
            assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)


def test_masked_scores_are_minus_infinity_and_leave_a_learned_scale_finite():
    head = make_head("linear")
    logits = head.logits(torch.randn(5, 6))
    assert logits[:, MASKED].eq(-torch.inf).all()
    assert logits[:, KEPT].isfinite().all()
    logits.logsumexp(1).sum().backward()
    assert head.log_scale.grad.isfinite()
    assert head.bias.grad[MASKED].eq(0).all()


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_rivals_are_the_other_classes_that_are_not_masked(implementation):
    head = make_head("linear")
    head.implementation = implementation
    split = head.split(torch.randn(3, 6), torch.tensor([1, 2, 5]))
    assert split.rivals.tolist() == [len(KEPT) - 1] * 3


def test_a_compiled_criterion_masks_alike():
    features, loss = torch.randn(len(LABELS), 6), tammes.softmax(smoothing=0.1) + tammes.bce()
    head = make_head("linear")
    expected = without(head, loss, "mean", features)
    criterion = tammes.Criterion(head, loss)
    x = features.clone().requires_grad_()
    value = torch.compile(criterion, backend="aot_eager")(x, LABELS)
    value.backward()
    assert_close(value.detach().double(), expected["loss"], rtol=1e-5, atol=1e-6)
    assert_close(head.log_scale.grad.double(), 2 * expected["head.log_scale"], rtol=1e-4, atol=1e-5)
    assert head.bias.grad[MASKED].eq(0).all()


def test_rows_of_a_matrix_may_be_masked_one_by_one():
    similarity = torch.randn(3, 5, dtype=torch.double)
    similarity[0, 1] = similarity[0, 2] = similarity[2, 4] = -torch.inf
    scale = torch.tensor(2.0, dtype=torch.double, requires_grad=True)
    similarity.requires_grad_()
    reads = ("target", "others", "hardest", "expected", "mean", "softplus")
    split = tammes.split(similarity, torch.tensor([0, 1, 2]), scale=scale, reads=reads)
    assert split.rivals.tolist() == [2, 4, 3]
    loss = tammes.softmax(smoothing=0.2) + tammes.logit_divergence() + tammes.hard_bias()
    rows = sum(weight * term(split) for weight, term in loss.leaves())
    for row in range(3):
        kept = similarity[row].isfinite()
        alone = tammes.split(
            similarity[row][kept][None], kept[:row].sum()[None], scale=scale, reads=reads
        )
        assert_close(rows[row], sum(w * t(alone)[0] for w, t in loss.leaves()))
    for gradient in torch.autograd.grad(rows.sum(), (similarity, scale)):
        assert gradient.isfinite().all()


def test_an_own_class_that_is_masked_shows_where_values_are_not_checked():
    head = make_head("linear", 3.0)
    criterion = tammes.Criterion(head, tammes.softmax(), validate=None)
    assert criterion(torch.randn(2, 6), torch.tensor([1, 4])).isnan()
    assert criterion(torch.randn(2, 6), torch.tensor([1, -100])).isfinite()


def test_new_classes_start_with_the_mean_bias_of_those_that_are_not_masked():
    head = make_head("linear", 3.0)
    mean = head.bias.detach()[KEPT].mean()
    head.add_classes(2)
    assert_close(head.bias.detach()[-2:], mean.expand(2))


def sampled(rate, **options):
    head = tammes.ShardedHead(
        tammes.LinearHead, 6, CLASSES, sample_rate=rate, scale="learnable", **options
    )
    head.load_state_dict(make_head("linear").state_dict(), strict=False)
    return head


def test_a_sampled_class_that_is_masked_is_not_there():
    # Eleven examples ask for all nine classes, so the sample is everything.
    features = torch.randn(len(LABELS), 6)
    loss = tammes.softmax(smoothing=0.1) + tammes.logit_divergence() + tammes.hinge()
    head = make_head("linear")
    expected = without(head, loss, "mean", features)
    found = outcome(tammes.Criterion(sampled(0.5), loss), features)
    for key in ("loss", "features", "head.weight", "head.bias", "head.log_scale"):
        assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5, msg=f"{key}: {{}}".format)


def test_a_sample_has_no_masked_class_and_stands_for_those_that_are_not():
    torch.manual_seed(0)
    head, labels = sampled(0.4, correct=True), torch.tensor([1, 2])
    seen = set()
    for _ in range(20):
        problem = head.problem(torch.randn(2, 6), labels)
        chosen = [row.tolist() in head.weight[KEPT].tolist() for row in problem.prototypes]
        seen |= {tuple(row.tolist()) for row in problem.prototypes}
        assert all(chosen)
        split = dispatch.split(problem, labels, ("target", "mean"), "streamed")
        assert_close(split.rivals, torch.full((2,), len(KEPT) - 1.0))
    assert len(seen) == len(KEPT)
