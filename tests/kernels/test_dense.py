"""The dense kernel against its reference, and the ways autograd may ask for gradients."""

import copy
import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tammes
from tammes.kernels import dense
from tammes.kernels.problem import Margin
from tammes.kernels.reference import reference_split
from tammes.similarity import Similarity
from tammes.split import ALONGSIDE, REDUCED, cross_entropy


def masked_head(scale):
    """A head with three classes that are not there, one of which would win."""
    head = tammes.LinearHead(6, 9, scale=scale)
    with torch.no_grad():
        head.weight[4] *= 50.0
        head.bias[[2, 4, 6]] = -torch.inf
    return head


HEADS = {
    "linear": lambda scale: tammes.LinearHead(6, 9, scale=scale),
    "linear without bias": lambda scale: tammes.LinearHead(6, 9, bias=False, scale=scale),
    "cosine": lambda scale: tammes.CosineHead(6, 9, scale=scale),
    "cosine of raw features": lambda scale: tammes.CosineHead(
        6, 9, scale=scale, normalize_features=False
    ),
    "gaussian": lambda scale: tammes.GaussianHead(6, 9, scale=scale),
    "masked": masked_head,
}
READS = [
    frozenset(["target"]),
    frozenset(["others"]),
    frozenset(["target", "others"]),
    frozenset(["target", "hardest"]),
    frozenset(["hardest", "mean"]),
    frozenset(["gap", "length", "norm", "others"]),
    frozenset(["target", "opposite", "gap", "expected"]),
    frozenset(["target", "softplus"]),
    frozenset([*REDUCED, *ALONGSIDE, "softplus"]),
]
SCALES = [1.0, 7.0, "learnable"]


def numbers_of(made, head, features, labels, reads):
    """Numbers that are read, and gradients of a sum of them with different weights."""
    head, features = copy.deepcopy(head), features.clone().requires_grad_()
    split = made(head.problem(features), labels, reads)
    fields = sorted(reads | {"opposite"} if "gap" in reads else reads)
    like = features.detach()[:, 0]
    values = {name: like.new_ones(()) * getattr(split, name) for name in fields}
    values = {name: value.expand_as(like) for name, value in values.items()}
    draw = torch.Generator().manual_seed(1)
    total = 0.0
    for value in values.values():
        weights = torch.randn(len(labels), generator=draw, dtype=torch.double).to(value)
        total = total + (value * weights).sum()
    total.backward()
    gradients = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    detached = {name: value.detach() for name, value in values.items()}
    return detached, {"features": features.grad, **gradients}


def assert_same(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        for name in one.keys() | other.keys():
            # A parameter that nothing depends on may have no gradient, or zeros.
            zeros = torch.zeros_like(one.get(name, other.get(name)))
            left, right = one.get(name, zeros), other.get(name, zeros)
            assert_close(left, right, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("reads", READS, ids=lambda reads: "+".join(sorted(reads)))
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", HEADS)
def test_dense_is_the_reference(kind, scale, reads):
    head, labels = HEADS[kind](scale).double(), torch.tensor([0, 8, 3, 3, 5, 1, 7])
    features = 2 * torch.randn(7, 6, dtype=torch.double)
    arguments = head, features, labels, reads
    found = numbers_of(dense.dense_split, *arguments)
    assert_same(found, numbers_of(reference_split, *arguments), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["cosine", "cosine of raw features"])
def test_dense_is_the_reference_for_rows_without_a_direction(kind):
    head, labels = HEADS[kind](16.0), torch.tensor([0, 1, 2, 3, 4, 4])
    features = torch.randn(6, 6)
    with torch.no_grad():
        features[0] = 0.0
        features[1] *= 1e25
        features[2] = 3 * head.weight[2]
        features[3] = -head.weight[3]
        head.weight[4] = 0.0
    reads = frozenset(["target", "gap", "others"])
    if kind == "cosine of raw features":
        features[1] /= 1e25
        reads = frozenset(["target", "others"])
    arguments = head, features, labels, reads
    found = numbers_of(dense.dense_split, *arguments)
    assert all(value.isfinite().all() for part in found for value in part.values())
    assert_same(found, numbers_of(reference_split, *arguments), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_second_derivatives_are_those_of_finite_differences(kind):
    head, labels = HEADS[kind](3.0).double(), torch.tensor([0, 8, 3])
    features = torch.randn(3, 6, dtype=torch.double, requires_grad=True)

    def numbers(features, weight):
        problem = head.problem(features)._replace(prototypes=weight)
        split = dense.dense_split(problem, labels, frozenset(["target", "others", "expected"]))
        return split.target, split.others, split.expected

    inputs = features, head.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradgradcheck(numbers, inputs)


MARGINS = [
    Margin(),
    Margin(0.0, 0.35),
    Margin(0.0, -0.2),
    Margin(0.5),
    Margin(-0.3, 0.1),
    Margin(2.5),
]


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("size", [6, 10])
@pytest.mark.parametrize(
    ("kind", "margin"),
    [(k, m) for k in HEADS for m in MARGINS if k == "cosine" or not m.angle],
)
def test_a_cross_entropy_as_one_function_is_that_of_the_reference(kind, margin, size, mean):
    # With more dimensions than classes, the factor of a row is applied to the scores.
    head, labels = HEADS[kind](3.0).double(), torch.tensor([0, 8, 3, 3])
    if size == 10:
        head.weight = torch.nn.Parameter(torch.randn(9, 10, dtype=torch.double))
    features = torch.randn(4, size, dtype=torch.double, requires_grad=True)
    inputs = features, head.weight.detach().clone().requires_grad_()

    def problem(features, weight):
        return head.problem(features)._replace(prototypes=weight)

    def as_one(features, weight):
        given = problem(features, weight)
        loss, copied, count = dense.dense_cross_entropy(given, labels, margin, -100, mean=mean)
        assert count == 4
        assert copied == loss
        return loss

    split = reference_split(problem(*inputs), labels, frozenset(["target", "gap", "others"]))
    target = split.target
    if margin.angle:
        theta = split.target.acos() + margin.angle
        # Continued past pi, and below 0.
        target = torch.where(theta > math.pi, -2 - theta.cos(), theta.cos())
        target = torch.where(theta < 0, 2 - theta.cos(), target)
    losses = cross_entropy(split, target, margin.similarity)
    expected = losses.mean() if mean else losses.sum()
    assert_close(as_one(*inputs), expected, rtol=1e-12, atol=1e-13)
    found = torch.autograd.grad(as_one(*inputs), inputs)
    wanted = torch.autograd.grad(expected, inputs)
    assert_close([*found], [*wanted], rtol=1e-10, atol=1e-11)
    assert torch.autograd.gradgradcheck(as_one, inputs)


@pytest.mark.parametrize(
    ("loss", "margin"),
    [
        (tammes.softmax(), Margin()),
        (tammes.softmax(margin=1.0), Margin(0.0, 1.0)),
        (tammes.normface(), Margin()),
        (tammes.cosface(margin=0.2), Margin(0.0, 0.2)),
        (tammes.arcface(margin=0.3), Margin(0.3)),
        (tammes.combined_margin(1.0, 0.3, 0.2), Margin(0.3, 0.2)),
        (tammes.arcface(extension="linear"), None),
        (tammes.arcface(gradient="detached"), None),
        (tammes.arcface(margin=[0.1] * 5), None),
        (tammes.combined_margin(1.5, 0.0, 0.0), None),
        (tammes.softmax(smoothing=0.1), None),
        (tammes.softmax(margin=[0.1] * 5), None),
        (0.5 * tammes.cosface(), None),
        (tammes.cosface() + tammes.sample_margin(), None),
        (tammes.focal(), None),
    ],
)
def test_losses_that_are_a_cross_entropy_are_known(loss, margin):
    head = tammes.CosineHead(6, 5, scale=4.0)
    criterion = tammes.Criterion(head, loss)
    assert criterion._entropy == margin
    # The same loss by the general path, which knows nothing of it.
    features, labels = torch.randn(7, 6, requires_grad=True), torch.randint(5, (7,))
    found = criterion(features, labels)
    expected = criterion(features, labels, weights=torch.ones(7))
    assert_close(found, expected)
    inputs = features, head.weight
    assert_close(
        [*torch.autograd.grad(found, inputs)],
        [*torch.autograd.grad(expected, inputs)],
        rtol=1e-4,
        atol=1e-6,
    )


def test_an_angular_margin_on_features_with_a_length_is_left_to_the_split():
    head = tammes.CosineHead(6, 5, normalize_features=False)
    assert tammes.Criterion(head, tammes.arcface())._entropy is None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_changed_in_place_leaves_its_terms_alone(reduction):
    criterion = tammes.CosFace(6, 9, reduction=reduction)
    loss = criterion(torch.randn(4, 6), torch.tensor([0, 8, 3, 3]))
    expected = loss.item() / (4 if reduction == "sum" else 1)
    loss /= 8
    assert_close(criterion.terms["cosface"].item(), expected)


def test_a_criterion_pickled_before_some_losses_were_one_function():
    criterion = tammes.CosFace(6, 9)
    features, labels = torch.randn(4, 6), torch.tensor([0, 8, 3, 3])
    expected = criterion(features, labels)
    del vars(criterion)["_entropy"]
    assert_close(criterion(features, labels), expected)


def test_a_second_backward_has_the_same_bits():
    criterion = tammes.CosFace(6, 9)
    features = torch.randn(7, 6, requires_grad=True)
    loss = criterion(features, torch.tensor([0, 8, 3, 3, 5, 1, 7]))
    loss.backward(retain_graph=True)
    first = [features.grad, criterion.head.weight.grad]
    features.grad = criterion.head.weight.grad = None
    loss.backward()
    assert all(
        torch.equal(one, other)
        for one, other in zip(first, [features.grad, criterion.head.weight.grad], strict=True)
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_has_the_derivative_of_the_reference():
    criterion, labels = tammes.CosFace(6, 9).double(), torch.tensor([0, 8, 3])
    features, tangent = torch.randn(2, 3, 6, dtype=torch.double)
    with forward_ad.dual_level():
        loss = criterion(forward_ad.make_dual(features, tangent), labels)
        forward = forward_ad.unpack_dual(loss).tangent
    features.requires_grad_()
    (gradient,) = torch.autograd.grad(criterion(features, labels), features)
    assert_close(forward, (gradient * tangent).sum())


def test_nothing_of_the_batch_is_kept_where_activations_are_checkpointed():
    criterion, labels = tammes.CosFace(6, 9), torch.tensor([0, 8, 3])
    features = torch.randn(3, 6, requires_grad=True)
    kept = []

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        criterion(features, labels)
    # What a hook cannot see, it cannot recompute or move: the scores are among what it sees.
    assert torch.Size([3, 9]) in kept
    plain = criterion(features, labels)
    (expected,) = torch.autograd.grad(plain, features)
    again = checkpoint(criterion, features, labels, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, features)[0], expected)


def test_backward_inside_autocast_is_in_full_precision():
    criterion, labels = tammes.CosFace(64, 9), torch.tensor([0, 8, 3])
    features = torch.randn(3, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(criterion(features, labels), features)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(criterion(features, labels), features)
    assert torch.equal(found, expected)


def test_tiny_weights_keep_their_digits():
    head, labels = tammes.CosineHead(6, 9, scale=64.0), torch.tensor([0, 8, 3])
    features = torch.randn(3, 6)
    weights = torch.tensor([1e-30, 1.0, 1e-25])

    def gradient(dtype):
        x = features.to(dtype).requires_grad_()
        criterion = tammes.Criterion(copy.deepcopy(head).to(dtype), tammes.cosface())
        values = tammes.Criterion(criterion.head, tammes.cosface(), reduction="none")(x, labels)
        (found,) = torch.autograd.grad(values @ weights.to(dtype), x)
        return found.double()

    exact = gradient(torch.double)
    error = (gradient(torch.float) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 1e-4


def test_a_precision_of_one_backend_does_not_stop_a_linear_head():
    before = torch.backends.mkldnn.matmul.fp32_precision
    criterion, labels = tammes.Criterion(HEADS["linear"](1.0), tammes.softmax()), torch.tensor([0])
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert criterion(torch.randn(1, 6), labels).isfinite()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("reads", [[], ["norm"], ["gap", "length"], ["gap", "others"]], ids=str)
def test_any_fields_can_be_read_alone(kind, reads):
    head, features, labels = HEADS[kind](2.0), torch.randn(2, 6), torch.tensor([0, 8])
    found = head.split(features, labels, reads)
    expected = reference_split(head.problem(features), labels, frozenset(reads))
    for name in reads:
        assert_close(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("kind", HEADS)
def test_many_gradients_at_once_are_those_one_by_one(kind):
    head, labels = HEADS[kind](2.0).double(), torch.tensor([0, 8, 3])
    criterion = tammes.Criterion(head, tammes.softmax(), reduction="none")
    features = torch.randn(3, 6, dtype=torch.double, requires_grad=True)
    every = torch.eye(3, dtype=torch.double)
    rows = [torch.autograd.grad(criterion(features, labels), features, row)[0] for row in every]
    values = criterion(features, labels)
    (found,) = torch.autograd.grad(
        values, features, every, is_grads_batched=True, retain_graph=True
    )
    assert_close(found, torch.stack(rows))

    def gradient(row):
        return torch.autograd.grad(values, features, row, retain_graph=True)[0]

    assert_close(torch.func.vmap(gradient)(every), torch.stack(rows))


def test_a_second_derivative_by_a_scale_that_is_learned_alone():
    head = HEADS["cosine"]("learnable").double()
    head.weight.requires_grad_(False)
    loss = tammes.Criterion(head, tammes.cosface())(torch.randn(3, 6).double(), torch.arange(3))
    (first,) = torch.autograd.grad(loss, head.log_scale, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), head.log_scale)
    assert second.isfinite().all()


def test_a_default_device_is_not_that_of_the_batch():
    criterion, features = tammes.CosFace(6, 9), torch.randn(2, 6)
    with torch.device("meta"):
        loss = criterion(features, torch.tensor([0, 8], device="cpu"))
    assert loss.device.type == "cpu"


def test_what_a_term_does_to_its_batch_ends_with_the_call():
    seen = []

    @tammes.term(on="features", reads="")
    def careless(batch):
        seen.append(batch.valid.clone())
        batch.valid.zero_()
        return batch.features.sum(1), torch.ones_like(batch.labels, dtype=torch.bool)

    criterion = tammes.Criterion(tammes.CosineHead(6, 9), tammes.cosface() + careless())
    for _ in range(2):
        criterion(torch.randn(2, 6), torch.tensor([0, 8]))
    assert all(valid.all() for valid in seen)


def test_a_bias_beside_cosines_has_the_gradient_of_the_reference():
    head, features = tammes.CosineHead(6, 9, scale=4.0), torch.randn(3, 6)
    head.bias = torch.nn.Parameter(torch.randn(9))
    features[1] = 0.0
    arguments = head, features, torch.tensor([0, 1, 8]), frozenset(["target", "others", "gap"])
    found = numbers_of(dense.dense_split, *arguments)
    assert_same(found, numbers_of(reference_split, *arguments), rtol=1e-4, atol=1e-5)


def test_long_features_and_long_prototypes_have_a_direction():
    head, labels = tammes.CosineHead(6, 9), torch.tensor([0, 8, 3])
    head.weight.data.mul_(1e8)
    features = torch.nn.functional.normalize(head.weight.detach()[labels]) * 2e38
    assert_close(head.split(features, labels, ["target"]).target, torch.ones(3))


def test_a_similarity_of_ones_own_is_not_taken_for_an_inner_product():
    class Doubled(Similarity):
        def keys(self, prototypes):
            return 2 * prototypes, None

    problem = tammes.LinearHead(6, 9, bias=False).problem(torch.randn(2, 6))
    with pytest.raises(NotImplementedError):
        dense.dense_split(
            problem._replace(similarity=Doubled()), torch.tensor([0, 8]), frozenset(["others"])
        )


def angular_gradients(theta, dtype):
    """Gradients of ArcFace, every example at this angle from its prototype."""
    torch.manual_seed(0)
    own, aside = torch.randn(2, 8, 64, dtype=torch.double)
    own = torch.nn.functional.normalize(own)
    aside = torch.nn.functional.normalize(aside - (aside * own).sum(1, keepdim=True) * own)
    criterion = tammes.ArcFace(64, 8, scale=8.0).to(dtype)
    features = (math.cos(theta) * own + math.sin(theta) * aside).float().to(dtype)
    with torch.no_grad():
        criterion.head.weight.copy_(own.float())
    loss = criterion(features.requires_grad_(), torch.arange(8))
    return torch.autograd.grad(loss, (features, criterion.head.weight))


@pytest.mark.parametrize("end", [0.0, math.pi])
def test_a_margin_of_an_angle_that_goes_through_the_products_keeps_its_digits(end, monkeypatch):
    # Just beyond the angles that are kept out of the products.
    theta = abs(end - 1.02 * math.acos(1 - dense.NEAR))
    calls = []
    scatter = torch.Tensor.scatter_
    monkeypatch.setattr(torch.Tensor, "scatter_", lambda *a: calls.append(a) or scatter(*a))
    found = angular_gradients(theta, torch.float)
    # One hides the target class in forward, the other enters its gradient in backward.
    assert len(calls) == 2
    for one, exact in zip(found, angular_gradients(theta, torch.double), strict=True):
        error = (one.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert error.max() < 1e-5
    calls.clear()
    angular_gradients(abs(end - 0.98 * math.acos(1 - dense.NEAR)), torch.float)
    assert len(calls) == 1
