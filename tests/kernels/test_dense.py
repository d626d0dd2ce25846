"""The dense kernel against its reference, and the ways autograd may ask for gradients."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tammes
from tammes.kernels import dense
from tammes.kernels.reference import reference_split
from tammes.split import ALONGSIDE, REDUCED

HEADS = {
    "linear": lambda scale: tammes.LinearHead(6, 9, scale=scale),
    "linear without bias": lambda scale: tammes.LinearHead(6, 9, bias=False, scale=scale),
    "cosine": lambda scale: tammes.CosineHead(6, 9, scale=scale),
    "cosine of raw features": lambda scale: tammes.CosineHead(
        6, 9, scale=scale, normalize_features=False
    ),
    "gaussian": lambda scale: tammes.GaussianHead(6, 9, scale=scale),
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
    frozenset(["target", "excess"]),
    frozenset([*REDUCED, *ALONGSIDE, "excess", "softplus"]),
]
SCALES = [1.0, 7.0, "learnable"]


def hinge_threshold(split):
    return split.scale * split.target - 1


def numbers_of(made, head, features, labels, reads):
    """Numbers that are read, and gradients of a sum of them with different weights."""
    head, features = copy.deepcopy(head), features.clone().requires_grad_()
    threshold = hinge_threshold if "excess" in reads else None
    split = made(head.problem(features), labels, reads, threshold)
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
