"""Scale of AdaCos: official form, limits, and the same value on every path."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from rank_pool import everywhere
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tammes
from tammes.advise import advise
from tammes.heads import adacos_scale
from tammes.lab.cli.losses import loss_info
from tammes.lab.config import parse_head
from tammes.lab.config.head_expressions import head_text

SIZE, CLASSES = 5, 7


def make(implementation="auto", classes=CLASSES, loss=None, **options):
    torch.manual_seed(3)
    head = tammes.CosineHead(
        SIZE, classes, scale="adaptive", implementation=implementation, **options
    )
    return tammes.Criterion(head, loss or tammes.adacos()).double()


def batches(count=3, rows=9, classes=CLASSES):
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        features = torch.randn(rows, SIZE, generator=generator, dtype=torch.double)
        yield features, torch.randint(classes, (rows,), generator=generator)


def official(features, labels, weight, scale):
    """Scale and loss of a step as the published code has them, in plain torch."""
    cosine = F.normalize(features) @ F.normalize(weight).T
    own = F.one_hot(labels, len(weight)).bool()
    average = torch.where(own, 0.0, torch.exp(scale * cosine)).sum() / len(labels)
    median = torch.median(cosine[own].clamp(-1, 1).acos())
    scale = average.log() / torch.cos(median.clamp_max(math.pi / 4))
    return scale, F.cross_entropy(scale.detach() * cosine, labels)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("dense", torch.double), ("streamed", torch.double), ("fused", torch.float)],
)
def test_scales_losses_and_gradients_of_several_steps_are_those_of_the_official_form(
    implementation, dtype
):
    criterion = make(implementation).to(dtype)
    scale, near = criterion.head.scale, 1e-9 if dtype == torch.double else 1e-5
    for features, labels in batches():
        features = features.to(dtype).requires_grad_()
        weight = criterion.head.weight.detach().clone().requires_grad_()
        scale, expected = official(features, labels, weight, scale.detach())
        wanted = torch.autograd.grad(expected, (features, weight))
        loss = criterion(features, labels)
        assert_close(criterion.head.scale, scale.detach(), rtol=near, atol=near)
        assert_close(loss, expected, rtol=near, atol=near)
        found = torch.autograd.grad(loss, (features, criterion.head.weight))
        assert_close(found, wanted, rtol=near, atol=near)


def test_the_first_scale_is_the_fixed_one_and_evaluation_leaves_it():
    criterion = make().eval()
    assert criterion.head.scale.item() == pytest.approx(math.sqrt(2) * math.log(6), rel=1e-6)
    features, labels = next(batches())
    loss = criterion(features, labels)
    fixed = tammes.CosineHead(SIZE, CLASSES, scale=float(criterion.head.scale)).double()
    fixed.weight = criterion.head.weight
    assert_close(loss, tammes.Criterion(fixed, tammes.normface())(features, labels))
    assert_close(criterion.logits(features), fixed.logits(features))


def test_angles_beyond_45_degrees_count_as_45():
    criterion = make()
    features = -criterion.head.weight.detach()[:4]
    before = criterion.head.scale
    others = criterion.head.split(features, torch.arange(4), ["others"]).others
    criterion(features, torch.arange(4))
    assert before != criterion.head.scale
    expected = math.sqrt(2) * (others.logsumexp(0) - math.log(4))
    assert_close(criterion.head.scale, expected.clamp_min(adacos_scale(3)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_keep_a_scale_above_zero(classes):
    criterion = make(classes=classes)
    with torch.no_grad():
        criterion.head.weight[1:] = -criterion.head.weight[:1]
    for _ in range(3):
        criterion(criterion.head.weight.detach()[:1], torch.tensor([0]))
        assert criterion.head.scale.item() == pytest.approx(adacos_scale(3), rel=1e-12)


@pytest.mark.parametrize("spoiled", ["nothing counts", "infinite", "no rows"])
def test_a_batch_that_says_nothing_leaves_the_scale(spoiled):
    criterion = make()
    criterion.validate = None
    features, labels = next(batches())
    criterion(features, labels)
    before = criterion.head.scale
    if spoiled == "infinite":
        features[0] = math.inf
    elif spoiled == "no rows":
        features, labels = features[:0], labels[:0]
    else:
        labels = torch.full_like(labels, -100)
    criterion(features, labels)
    assert_close(criterion.head.scale, before, rtol=0, atol=0)


def test_ignored_examples_do_not_count():
    features, labels = next(batches())
    kept, whole = make(), make()
    kept(features[:6], labels[:6])
    labels[6:] = -100
    whole(features, labels)
    assert_close(whole.head.scale, kept.head.scale, rtol=1e-12, atol=1e-12)


def test_a_loss_that_does_not_read_the_scale_leaves_it():
    criterion = make(loss=tammes.multi_positive())
    before, (features, labels) = criterion.head.scale, next(batches())
    loss = criterion(features, torch.stack([labels, (labels + 1) % CLASSES], 1))
    assert loss.isfinite()
    assert_close(criterion.head.scale, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "again", ["resumed", "copied", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_a_resumed_copied_or_compiled_criterion_goes_on_with_the_scale(again):
    criterion, (first, second) = make(loss=tammes.arcface()), [*batches(2)]
    criterion(*first)
    other = copy.deepcopy(criterion)
    if again == "resumed":
        other = make(loss=tammes.arcface())
        other.load_state_dict(criterion.state_dict())
    run = torch.compile(other, backend="aot_eager") if again == "compiled" else other
    assert_close(run(*second), criterion(*second))
    assert_close(other.head.scale, criterion.head.scale, rtol=1e-12, atol=1e-12)


def test_a_recomputed_call_has_the_scale_of_the_first_pass():
    plain, again = make(), make()
    (features, labels), (other, _) = batches(2)
    gradients = []
    for criterion in (plain, again):
        x = features.clone().requires_grad_()
        if criterion is again:
            loss = checkpoint(criterion, x, labels, use_reentrant=False)
        else:
            loss = criterion(x, labels)
        criterion(other, labels)
        scale = criterion.head.scale
        loss.backward()
        assert_close(criterion.head.scale, scale, rtol=0, atol=0)
        gradients.append(x.grad)
    assert_close(gradients[1], gradients[0])


def test_a_head_in_half_precision_keeps_its_scale_in_single():
    exact, half = make(), make()
    half.head.weight = exact.head.weight = torch.nn.Parameter(exact.head.weight.bfloat16().double())
    half.to(torch.bfloat16)
    for features, labels in batches():
        features = features.bfloat16()
        half(features, labels)
        exact(features.double(), labels)
    assert half.head.weight.dtype == torch.bfloat16
    assert_close(half.head.scale, exact.head.scale.float(), rtol=1e-5, atol=0)
    assert tammes.SimplexHead(4, 3, scale="adaptive").half().weight.dtype == torch.float16


def on_ranks(group, sharded):
    criterion = make("streamed", loss=tammes.curricularface())
    if sharded:
        head = tammes.ShardedHead(
            tammes.CosineHead, SIZE, CLASSES, group=group, scale="adaptive",
            implementation="streamed",
        ).double()  # fmt: skip
        head.load_state_dict(criterion.head.state_dict())
        criterion = tammes.Criterion(head, criterion.loss).double()
    else:
        criterion = tammes.Criterion(criterion.head, criterion.loss, group=group).double()
    losses = []
    for features, labels in batches():
        part = slice(0, 2) if group.rank() == 0 else slice(2, None)
        losses.append(criterion(features[part], labels[part]).item())
    return losses, criterion.head.scale.item()


@pytest.mark.parametrize("sharded", [False, True])
def test_all_ranks_have_the_scale_of_all_examples(sharded):
    criterion = make(loss=tammes.curricularface())
    losses = [criterion(*batch).item() for batch in batches()]
    for found, scale in everywhere(2, on_ranks, sharded):
        assert_close(found, losses, rtol=1e-9, atol=1e-9)
        assert scale == pytest.approx(criterion.head.scale.item(), rel=1e-9)


def test_texts_and_advice_know_it():
    head = parse_head("cosine(scale='adaptive')", tammes.normface(), 4, 11)
    assert head_text(head) == "cosine(scale='adaptive')"
    assert repr(head) == "CosineHead(4, 11, scale=adaptive)"


def test_every_way_to_a_head_gives_adacos_one_whose_scale_adapts():
    with pytest.raises(ValueError, match=r"expects a head with scale='adaptive', got Cosine"):
        tammes.Criterion(tammes.CosineHead(4, 11), tammes.adacos())
    for text in ("auto", "cosine", "cosine(subcenters=2)"):
        for loss in (tammes.adacos(), tammes.cosface() + tammes.adacos()):
            assert parse_head(text, loss, 4, 11).scale_setting == "adaptive"
    adaptive = ["CosineHead(scale='adaptive')", "SimplexHead(scale='adaptive')"]
    assert loss_info("adacos").heads == adaptive
    assert loss_info("normface").heads == ["CosineHead", "SimplexHead"]
    advice = advise(100, 64, loss="adacos")
    assert advice.scale == pytest.approx(adacos_scale(100))
    assert [row.value for row in advice.recommendations if row.setting == "scale"] == ["adaptive"]
    assert "tammes.CosineHead(64, 100, scale='adaptive')" in advice.code
    assert "cosine(scale='\"'\"'adaptive'\"'\"')" in advice.command
    assert not advice.cautions
    with pytest.raises(ValueError, match="expects no scale for adacos, whose head adapts it, got"):
        advise(100, 64, loss="adacos", scale=30.0)


@pytest.mark.parametrize(
    "build",
    [
        lambda: tammes.LinearHead(4, 3, scale="adaptive"),
        lambda: tammes.CosineHead(4, 3, scale="adaptive", normalize_features=False),
    ],
)
def test_scores_that_are_no_cosines_have_no_adaptive_scale(build):
    with pytest.raises(ValueError, match="expects scale 'adaptive' with cosines"):
        build()


def test_it_is_read_in_single_precision_however_it_came_about():
    torch.set_default_dtype(torch.bfloat16)
    try:
        head = tammes.CosineHead(SIZE, CLASSES, scale="adaptive")
    finally:
        torch.set_default_dtype(torch.float32)
    assert head.adaptive_scale.dtype == torch.float32
    halved = {name: value.bfloat16() for name, value in head.state_dict().items()}
    head.load_state_dict(halved, assign=True)
    assert head.scale.dtype == torch.float32
