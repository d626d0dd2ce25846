"""Classes that are spread over ranks give what one process gives: numbers, losses, gradients."""

import importlib.util

import pytest
import torch
from catalogue import KERNEL_HEADS, SPLIT_TERMS, fits
from cover import slow
from rank_pool import everywhere
from torch import nn
from torch.testing import assert_close

import tammes
from tammes.kernels import dispatch, tiling
from tammes.split import ALONGSIDE, REDUCED

SIZE, BATCH = 6, 11
KINDS = {
    "linear": (tammes.LinearHead, {}),
    "linear_masked": (tammes.LinearHead, {}),
    "linear_no_bias": (tammes.LinearHead, {"bias": False}),
    "cosine": (tammes.CosineHead, {"scale": 8.0}),
    "cosine_adaptive": (tammes.CosineHead, {"scale": "adaptive"}),
    "cosine_raw_features": (tammes.CosineHead, {"scale": 2.0, "normalize_features": False}),
    "cosine_subcenters": (tammes.CosineHead, {"scale": 8.0, "subcenters": 3}),
    "gaussian": (tammes.GaussianHead, {}),
}
SPREADS = [(1, 9), (2, 9), (3, 9), (4, 7), (4, 5)]
"""Ranks and classes: of 7 classes the fourth rank has one, of 5 it has none."""
TRITON = importlib.util.find_spec("triton") is not None


def terms(classes):
    """Every term on a split, for a number of classes."""
    per_class = {
        "cosface_per_class": tammes.cosface(margin=[0.1 * c for c in range(classes)]),
    }
    for name in ("ldam", "logit_adjustment", "vs_softmax"):
        per_class[name] = SPLIT_TERMS[name].altered(counts=[50 - c for c in range(classes)])
    return SPLIT_TERMS | per_class


def the_batch(head_name, classes, dtype):
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(BATCH, SIZE, generator=generator, dtype=torch.double)
    labels = torch.randint(classes, (BATCH,), generator=generator)
    weights = torch.rand(BATCH, generator=generator, dtype=torch.double) + 0.5
    if head_name == "linear_masked":
        labels %= classes - 2
    labels[3] = -100
    return features.to(dtype), labels, weights.to(dtype)


def options_at(options, scale):
    """Options of a head, at a scale unless its own adapts."""
    return options if options.get("scale") == "adaptive" else options | {"scale": scale}


def one_process(head_name, options, classes, dtype):
    torch.manual_seed(3)
    head = KINDS[head_name][0](SIZE, classes, **options).to(dtype)
    if head_name == "linear_masked":
        # Of five classes on four ranks these are half of the second rank's and all of the third's.
        with torch.no_grad():
            head.bias[-2:] = -torch.inf
    return head


def call(head, loss, reduction, batch, implementation):
    """Loss, terms and gradients of the head; features as a parameter, as a backbone would be."""
    features, labels, weights = batch
    head.implementation = implementation
    if head.adaptive_scale is not None:
        # Every term begins at the same scale.
        head.scale = 8.0
    criterion = tammes.Criterion(head, loss, reduction=reduction)
    backbone = nn.Parameter(features.clone())
    head.zero_grad()
    value = criterion(backbone, labels, weights=weights)
    (value * value.detach()).sum().backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in head.named_parameters()
    }
    return {"loss": value.detach(), "features": backbone.grad, **criterion.terms}, grads


def on_ranks(group, head_name, scale, classes, reduction, implementation, dtype, names):
    """Every term on this rank: what is whole, and the gradients of what is here."""
    kind, options = KINDS[head_name]
    options = options_at(options, scale)
    whole = one_process(head_name, options, classes, dtype)
    head = tammes.ShardedHead(kind, SIZE, classes, group=group, **options).to(dtype)
    head.load_state_dict(whole.state_dict())
    rank, size = head.group.rank, head.group.world_size
    features, labels, weights = the_batch(head_name, classes, dtype)
    # Uneven, and with five ranks' worth of cuts some have one example or none.
    cuts = [0, *(min(BATCH, 7 * r) for r in range(1, size)), BATCH]
    mine = slice(cuts[rank], cuts[rank + 1])
    batch = features[mine], labels[mine], weights[mine]
    found = {}
    for name in names:
        loss = terms(classes)[name]
        if fits(loss, head):
            found[name] = (*call(head, loss, reduction, batch, implementation), mine)
    return found


def numbers_on_ranks(group, head_name, classes):
    kind, options = KINDS[head_name]
    whole = one_process(head_name, options, classes, torch.double)
    head = tammes.ShardedHead(kind, SIZE, classes, group=group, **options).double()
    head.load_state_dict(whole.state_dict())
    features, labels, _ = the_batch(head_name, classes, torch.double)
    labels = labels.clamp_min(0)
    split = dispatch.split(
        head.problem(features, labels), labels, (*REDUCED, *ALONGSIDE), "streamed"
    )
    return {name: getattr(split, name).detach() for name in (*REDUCED, *ALONGSIDE)}


def compare(ranks, head_name, scale, classes, reduction, implementation, dtype, names, **tolerance):
    arguments = (head_name, scale, classes, reduction, implementation, dtype, names)
    everybody = everywhere(ranks, on_ranks, *arguments)
    _, options = KINDS[head_name]
    head = one_process(head_name, options_at(options, scale), classes, dtype)
    batch = the_batch(head_name, classes, dtype)
    assert everybody[0]
    for name in everybody[0]:
        expected, gradients = call(head, terms(classes)[name], reduction, batch, "dense")
        factor = 1.0
        if reduction == "none":
            # Each rank's own sum of squares; the objective is their mean over the ranks.
            factor = 1 / ranks
        for whole, _, mine in (rank[name] for rank in everybody):
            for key, value in expected.items():
                if key == "features":
                    # A wrapper divides by the number of ranks.
                    assert_close(whole[key] / ranks, factor * value[mine], **tolerance)
                elif key == "loss" and reduction == "none":
                    assert_close(whole[key], value[mine], **tolerance)
                else:
                    assert_close(whole[key], value, **tolerance)
        for key, value in gradients.items():
            parts = [rank[name][1][key] for rank in everybody]
            if key == "log_scale":
                for part in parts:
                    assert_close(part, factor * value, **tolerance)
            else:
                assert_close(torch.cat(parts), factor * value, **tolerance)


@pytest.mark.parametrize(("ranks", "classes"), SPREADS)
@pytest.mark.parametrize("head", KINDS)
def test_numbers_are_those_of_one_process(ranks, classes, head):
    _, options = KINDS[head]
    whole = one_process(head, options, classes, torch.double)
    features, labels, _ = the_batch(head, classes, torch.double)
    split = whole.split(features, labels.clamp_min(0))
    for found in everywhere(ranks, numbers_on_ranks, head, classes):
        for name, value in found.items():
            assert_close(value, getattr(split, name).detach())


@pytest.mark.parametrize(
    ("head", "ranks", "classes"),
    [
        # On two ranks all heads, and one of them on four, of which one has few classes.
        (head, *s) if s == (2, 9) or (head, s) == ("cosine", (4, 5)) else slow(head, *s)
        for head in KINDS
        for s in SPREADS
    ],
)
def test_every_loss_has_the_value_and_gradients_of_one_process(head, ranks, classes):
    names = [*SPLIT_TERMS]
    compare(ranks, head, "learnable", classes, "mean", "streamed", torch.double, names)


@pytest.mark.parametrize("head", [slow("linear"), "cosine", slow("gaussian")])
def test_so_has_every_loss_without_reduction(head):
    names = [*SPLIT_TERMS]
    compare(3, head, "learnable", 9, "none", "streamed", torch.double, names)


@pytest.mark.skipif(not TRITON, reason="no triton here")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("head", "ranks", "classes"),
    [
        ("linear", 2, 9),
        slow("linear", 4, 5),
        slow("cosine", 2, 9),
        ("cosine", 4, 5),
        slow("cosine_subcenters", 4, 5),
    ],
)
def test_fused_shards_are_one_process_too(head, ranks, classes):
    names = ["softmax_smoothed_margin", "arcface", "logit_divergence", "sample_margin"]
    names += ["mv_softmax", "curricularface"]
    compare(
        ranks, head, "learnable", classes, "mean", "fused", torch.float32, names,
        rtol=1e-4, atol=2e-5,
    )  # fmt: skip


def uneven_cuts(group, thin):
    """One more class on the first rank, where that would make its blocks of rows shorter."""
    classes, dtype = 129, torch.double
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(tiling.SCORES, "cpu", 8 * 64 * (tiling.FEWEST if thin else 40))
        whole = one_process("cosine", {"scale": 8.0}, classes, dtype)
        head = tammes.ShardedHead(tammes.CosineHead, SIZE, classes, group=group, scale=8.0)
        head = head.to(dtype)
        head.load_state_dict(whole.state_dict())
        features = torch.randn(80, SIZE, dtype=dtype, generator=torch.Generator().manual_seed(1))
        labels = torch.arange(80) % classes
        mine = slice(40 * head.group.rank, 40 * head.group.rank + 40)
        batch = features[mine], labels[mine], torch.ones(40, dtype=dtype)
        return call(head, tammes.cosface(), "mean", batch, "streamed")[0]["loss"]


@pytest.mark.parametrize("thin", [False, True])
def test_ranks_with_different_numbers_of_classes_cut_their_rows_alike(thin):
    features = torch.randn(80, SIZE, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    head = one_process("cosine", {"scale": 8.0}, 129, torch.double)
    batch = features, torch.arange(80) % 129, torch.ones(80, dtype=torch.double)
    expected = call(head, tammes.cosface(), "mean", batch, "dense")[0]["loss"]
    for loss in everywhere(2, uneven_cuts, thin):
        assert_close(loss, expected)


def two_hinges(group, reduction):
    classes = 9
    whole = one_process("linear", {}, classes, torch.double)
    head = tammes.ShardedHead(tammes.LinearHead, SIZE, classes, group=group).double()
    head.load_state_dict(whole.state_dict())
    features, labels, weights = the_batch("linear", classes, torch.double)
    share = slice(None, 4) if head.group.rank == 0 else slice(4, None)
    loss = tammes.hinge() + 0.5 * tammes.hinge(margin=2.0) + tammes.softmax()
    found, gradients = call(
        head, loss, reduction, (features[share], labels[share], weights[share]), "streamed"
    )
    return found["loss"], gradients["weight"]


def test_two_thresholds_in_one_loss_are_right_on_ranks():
    head = one_process("linear", {}, 9, torch.double)
    loss = tammes.hinge() + 0.5 * tammes.hinge(margin=2.0) + tammes.softmax()
    found, gradients = call(head, loss, "mean", the_batch("linear", 9, torch.double), "dense")
    everybody = everywhere(2, two_hinges, "mean")
    for value, _ in everybody:
        assert_close(value, found["loss"])
    assert_close(torch.cat([weight for _, weight in everybody]), gradients["weight"])


def rank_without_classes(group):
    """Only the loss has a gradient here: of rows whose features have none."""
    head = tammes.ShardedHead(tammes.CosineHead, SIZE, 5, group=group, scale=8.0)
    criterion = tammes.Criterion(head, tammes.crammer_singer(), reduction="none")
    criterion(torch.randn(2, SIZE), torch.tensor([0, 4])).sum().backward()
    return len(head.weight), head.weight.grad is not None


def test_a_rank_without_classes_meets_the_others_in_backward():
    assert everywhere(4, rank_without_classes) == [(2, True), (2, True), (1, True), (0, True)]


def test_every_head_that_can_be_sharded_is_here():
    assert set(KINDS) == {*KERNEL_HEADS, "linear_masked"}
