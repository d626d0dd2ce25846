"""Faults measured in other libraries, each as a property that holds here."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tammes
from tammes.losses.angular import target_similarity
from tammes.schedules import LambdaAnnealing

IMPLEMENTATIONS = ("dense", "streamed")
LOW = (torch.bfloat16, torch.float16)
WITH_WEIGHTS = (
    "Softmax",
    "LSoftmax",
    "SphereFace",
    "NormFace",
    "CosFace",
    "ArcFace",
    "CombinedMargin",
    "GMSoftmax",
    "LMSoftmax",
    "LargeMarginGaussian",
)


def cosine_of(theta):
    """Two classes: the own at an angle that wants a gradient, the other at a right angle."""
    cosine = torch.tensor([[math.cos(theta), 0.0]], dtype=torch.double, requires_grad=True)
    return cosine, torch.tensor([0])


# ------------------------------------------------------------ a: master weights that were cast


@pytest.mark.parametrize("dtype", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_low_precision_batch_leaves_master_weights_float32(name, dtype):
    # Fault a: pytorch-metric-learning 2.9 casts its weights to the dtype of the batch, for good.
    criterion = getattr(tammes, name)(32, 100)
    backbone = torch.nn.Linear(16, 32)
    with torch.autocast("cpu", dtype=dtype):
        features = backbone(torch.randn(64, 16))
        loss = criterion(features, torch.randint(100, (64,)))
    assert features.dtype == dtype
    loss.backward()
    for parameter in criterion.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_small_step_of_sgd_after_a_low_precision_batch_moves_the_weights(dtype, implementation):
    # Fault a, what it costs: at lr=1e-3, 99 % of the weights that had a gradient did not move.
    head = tammes.CosineHead(32, 100, scale=64.0, implementation=implementation)
    criterion = tammes.Criterion(head, tammes.cosface())
    before = head.weight.detach().clone()
    optimizer = torch.optim.SGD(criterion.parameters(), lr=1e-3)
    features = torch.randn(64, 32).to(dtype).requires_grad_()
    criterion(features, torch.randint(100, (64,))).backward()
    optimizer.step()
    assert features.grad.dtype == dtype
    assert torch.equal(head.weight.detach(), before.add(head.weight.grad, alpha=-1e-3))
    # A gradient below half a unit in the last place of its weight cannot move it.
    visible = (1e-3 * head.weight.grad).abs() > before.abs() * torch.finfo(torch.float32).eps
    assert visible.float().mean() > 0.98
    assert (head.weight.detach() != before)[visible].all()


# ---------------------------------------------- b, c, k: an arc cosine, or a root without a floor


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("gradient", ["exact", "detached"])
@pytest.mark.parametrize("extension", ["monotone", "linear"])
def test_arcface_has_a_finite_gradient_where_the_cosine_is_one(
    implementation, sign, gradient, extension
):
    # Faults b, c, k: the gradient of acos and of sqrt(1 - cos^2) is infinite at cosine 1 and -1.
    head = tammes.CosineHead(8, 5, implementation=implementation)
    criterion = tammes.Criterion(head, tammes.arcface(gradient=gradient, extension=extension))
    features = (sign * head.weight.detach()).requires_grad_()
    criterion(features, torch.arange(5)).backward()
    assert features.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sample_that_equals_its_centre_is_finite_in_300_trials(implementation, generator):
    # Fault c: products of a float32 unit vector with itself exceed one, and the root is then NaN.
    above_one = 0
    for trial in range(300):
        head = tammes.CosineHead(64, 4, implementation=implementation)
        criterion = tammes.Criterion(head, tammes.arcface())
        with torch.no_grad():
            head.weight.copy_(torch.randn(4, 64, generator=generator))
        features = head.weight.detach().clone().requires_grad_()
        unit = F.normalize(features.detach())
        above_one += int(((unit * unit).sum(1) > 1).any())
        loss = criterion(features, torch.arange(4))
        loss.backward()
        assert loss.isfinite(), trial
        assert features.grad.isfinite().all(), trial
        assert head.weight.grad.isfinite().all(), trial
    assert above_one > 30  # the trials do meet what breaks others


# ------------------------------------------------------- d: a margin set behind autograd's back


@pytest.mark.parametrize("theta", [0.3, 2.8])
def test_the_exact_gradient_of_arcface_is_that_of_its_formula(theta):
    # Fault d: set in place without autograd, d target / d cos is s everywhere.
    scale, margin = 64.0, 0.5
    cosine, labels = cosine_of(theta)
    bent = target_similarity(tammes.split(cosine, labels, scale=scale), m2=margin)
    (scale * bent).sum().backward()
    # Past pi, here at theta = 2.8, the monotone continuation turns the sign of the formula.
    sign = 1 if theta + margin <= math.pi else -1
    expected = sign * scale * math.sin(theta + margin) / math.sin(theta)
    assert expected == pytest.approx({0.3: 2.427, 2.8: 0.471}[theta] * scale, rel=1e-3)
    assert cosine.grad[0, 0].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("theta", [0.3, 2.8])
def test_the_detached_gradient_of_arcface_is_the_scale(theta):
    # Fault d again: the same behaviour, but asked for by name, and with the same value.
    cosine, labels = cosine_of(theta)
    split = tammes.split(cosine, labels, scale=64.0)
    bent = target_similarity(split, m2=0.5, gradient="detached")
    (split.scale * bent).sum().backward()
    assert cosine.grad[0, 0].item() == pytest.approx(64.0, rel=1e-12)
    assert_close(bent, target_similarity(split, m2=0.5))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_arcface_exact_and_detached_differ_by_the_factor_of_the_formula(implementation):
    # Fault d, seen from the features: only the pull to the own prototype differs.
    theta, margin = 0.3, 0.5
    pulls = {}
    for gradient in ("exact", "detached"):
        head = tammes.CosineHead(3, 2, scale=8.0, implementation=implementation).double()
        with torch.no_grad():
            head.weight.copy_(torch.eye(3, dtype=torch.double)[:2])
        criterion = tammes.Criterion(head, tammes.arcface(margin=margin, gradient=gradient))
        # The other prototype is at a right angle and to the side, so that it does not interfere.
        feature = torch.tensor([[math.cos(theta), 0.0, math.sin(theta)]], dtype=torch.double)
        feature.requires_grad_()
        criterion(feature, torch.tensor([0])).backward()
        pulls[gradient] = feature.grad[0, 0].item()
    factor = math.sin(theta + margin) / math.sin(theta)
    assert pulls["exact"] / pulls["detached"] == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_call_never_writes_to_the_tensors_of_the_caller(name, implementation):
    # Fault d: the margin was written into the logits of the caller, and the labels were edited.
    criterion = getattr(tammes, name)(8, 5)
    criterion.head.implementation = implementation
    features, labels = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 4, -100])
    weights = torch.rand(6)
    given = [features, labels, weights, criterion.head.weight]
    copies, versions = [t.detach().clone() for t in given], [t._version for t in given]
    criterion(features.requires_grad_(), labels, weights=weights).backward()
    criterion.logits(features)
    for tensor, copied, version in zip(given, copies, versions, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, copied)


def test_a_term_never_writes_to_its_split():
    # Fault d, one floor below.
    cosine = torch.randn(6, 5).clamp(-1, 1)
    before, labels = cosine.clone(), torch.tensor([0, 1, 2, 3, 4, 0])
    for term in (tammes.arcface(), tammes.cosface(), tammes.combined_margin(1.5, 0.3, 0.2)):
        term(tammes.split(cosine, labels, scale=64.0))
    assert torch.equal(cosine, before)


def test_arcface_grows_with_the_angle_past_pi():
    # Fault d: without a continuation the loss falls again once angle and margin exceed pi.
    theta = torch.linspace(0, math.pi, 2001, dtype=torch.double)
    cosine = torch.stack([theta.cos(), torch.zeros_like(theta)], 1)
    labels = torch.zeros(len(theta), dtype=torch.long)
    loss = tammes.arcface(margin=0.5)(tammes.split(cosine, labels, scale=8.0))
    assert (loss.diff() > 0).all()


# ------------------------------------------------------------- e: a margin that hides the others


def test_the_combined_margin_uses_all_three():
    # Fault e: with m3 > 0 the faulty code leaves out m2 and has 0.300 for the target.
    cosine = torch.tensor([[0.5, 0.0]], dtype=torch.double)
    split = tammes.split(cosine, torch.tensor([0]))
    assert target_similarity(split, m2=0.3, m3=0.2).item() == pytest.approx(0.022, abs=5e-4)
    expected = math.cos(1.2 * math.acos(0.5) + 0.3) - 0.2
    assert target_similarity(split, m1=1.2, m2=0.3, m3=0.2).item() == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize(
    ("m1", "m2", "m3"), [(1.0, 0.3, 0.2), (1.35, 0.0, 0.0), (1.2, 0.1, -0.1), (1.0, 0.0, -0.3)]
)
def test_any_combination_of_margins_is_the_softmax_on_the_shifted_target(m1, m2, m3):
    # Fault e: a factor other than one, or a negative m3, ended in a bare raise.
    theta = torch.tensor([0.2, 0.9, 1.6], dtype=torch.double)
    other = torch.tensor([[0.1, -0.4], [0.7, 0.2], [-0.3, 0.5]], dtype=torch.double)
    labels = torch.zeros(3, dtype=torch.long)
    split = tammes.split(torch.cat([theta.cos()[:, None], other], 1), labels, scale=16.0)
    target = (m1 * theta + m2).cos() - m3
    logits = 16.0 * torch.cat([target[:, None], other], 1)
    expected = F.cross_entropy(logits, labels, reduction="none")
    assert_close(tammes.combined_margin(m1, m2, m3)(split), expected)


# ----------------------------------------------------- h: rows that get each other's gradient


def plain_rows(name, parameters, features, labels):
    """Losses of the rows, written down with torch alone."""
    weight, scale = parameters["head.weight"], parameters["head.log_scale"].exp()
    if name == "linear":
        logits = scale * (features @ weight.T + parameters["head.bias"])
        return F.cross_entropy(logits, labels, reduction="none")
    cosine = F.normalize(features) @ F.normalize(weight).T
    shifted = cosine - 0.35 * F.one_hot(labels, len(weight)).double()
    return F.cross_entropy(scale * shifted, labels, reduction="none")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.double, 1e-10), (torch.float, 1e-5)], ids=["double", "float"]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_rows_with_different_upstream_gradients_have_right_gradients(
    name, implementation, dtype, tolerance
):
    # Fault h: every row was scaled by the gradient of the first, silently.
    options = {"scale": "learnable", "implementation": implementation}
    if name == "linear":
        head, term = tammes.LinearHead(8, 7, **options), tammes.softmax()
    else:
        head, term = tammes.CosineHead(8, 7, **options), tammes.cosface()
    criterion = tammes.Criterion(head, term, reduction="none").to(dtype)
    features, labels = torch.randn(12, 8, dtype=dtype), torch.randint(7, (12,))
    upstream = torch.linspace(-1, 3, 12, dtype=dtype)

    parameters = {
        key: value.detach().double().requires_grad_() for key, value in criterion.named_parameters()
    }
    wide = features.double().requires_grad_()
    expected = plain_rows(name, parameters, wide, labels)
    (expected * upstream.double()).sum().backward()

    features.requires_grad_()
    rows = criterion(features, labels)
    (rows * upstream).sum().backward()
    close = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    assert_close(rows, expected, **close)
    assert_close(features.grad, wide.grad, **close)
    for key, parameter in criterion.named_parameters():
        assert_close(
            parameter.grad, parameters[key].grad, **close, msg=lambda m, k=key: f"{k}: {m}"
        )


# ------------------------------------------------------------------- i: margins from class counts


def test_ldam_is_built_and_run_on_the_cpu():
    # Fault i: the constructor made a CUDA tensor.
    criterion = tammes.LDAM(8, 3, counts=[500, 50, 5])
    loss = criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    assert loss.isfinite()
    assert {p.device.type for p in criterion.parameters()} == {"cpu"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ldam_gives_each_class_the_margin_of_its_count(implementation):
    # Fault i: a mask of the wrong type chose where the margin goes.
    counts = torch.tensor([500.0, 50.0, 5.0], dtype=torch.double)
    margins = 0.5 * (counts.min() / counts) ** 0.25
    assert_close(margins[2].item(), 0.5)
    head = tammes.CosineHead(8, 3, scale=30.0, implementation=implementation).double()
    criterion = tammes.Criterion(head, tammes.ldam(counts.tolist()), reduction="none")
    features, labels = torch.randn(5, 8, dtype=torch.double), torch.tensor([0, 1, 2, 0, 2])
    cosine = F.normalize(features) @ F.normalize(head.weight).T
    logits = 30.0 * (cosine - margins * F.one_hot(labels, 3))
    expected = F.cross_entropy(logits, labels, reduction="none")
    assert_close(criterion(features, labels), expected)


# --------------------------------------------------------------- j: an annealing that starts over


def annealed():
    return tammes.LSoftmax(8, 5, margin=2).schedule(
        blend=LambdaAnnealing(base=10.0, gamma=0.5, power=1.0)
    )


def test_a_resumed_annealing_continues_where_it_stopped():
    # Fault j: the counter was a Python number, so a resumed run began at lambda = base.
    batches = [(torch.randn(6, 8), torch.randint(5, (6,))) for _ in range(6)]
    criterion = annealed()
    for batch in batches[:4]:
        criterion(*batch)
    saved = copy.deepcopy(criterion.state_dict())
    assert saved["schedules.blend.steps"].item() == 4

    resumed, fresh = annealed(), annealed()
    resumed.load_state_dict(saved)
    fresh.head.load_state_dict(criterion.head.state_dict())
    assert resumed.schedules["blend"].value == criterion.schedules["blend"].value
    for batch in batches[4:]:
        goes_on = criterion(*batch)
        assert torch.equal(resumed(*batch), goes_on)
        assert not torch.isclose(fresh(*batch), goes_on)


# ------------------------------------------------------------------------------------ l: degrees


def test_the_margin_of_arcface_is_in_radians():
    # Fault l: degrees in one library, radians in the next, and a silent factor of 57 between them.
    theta = torch.tensor([0.4, 1.1, 2.0], dtype=torch.double)
    cosine = torch.stack([theta.cos(), torch.zeros_like(theta)], 1)
    loss = tammes.arcface(0.5)(tammes.split(cosine, torch.zeros(3, dtype=torch.long), scale=4.0))
    assert_close(loss, (1 + (-4.0 * (theta + 0.5).cos()).exp()).log())
