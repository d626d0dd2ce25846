"""The same numbers as pytorch-metric-learning 2.9 and torch, where they compute the same thing."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses
from torch.testing import assert_close

import tammes

SIZE, CLASSES, ROWS = 16, 11, 24
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}

both_dtypes = pytest.mark.parametrize("dtype", [torch.float, torch.double], ids=["float", "double"])
both_kernels = pytest.mark.parametrize("implementation", ["dense", "streamed"])


def batch(dtype):
    """Features of every kind: near their prototype, opposite to it, and anywhere."""
    features = torch.randn(ROWS, SIZE, dtype=dtype)
    labels = torch.arange(ROWS) % CLASSES
    prototypes = torch.randn(CLASSES, SIZE, dtype=dtype)
    features[:6] = 2 * prototypes[labels[:6]] + 0.3 * features[:6]
    features[6:12] = -prototypes[labels[6:12]] + 0.2 * features[6:12]
    return features, labels, prototypes


PEERS = {
    "arcface": (
        lambda **sizes: losses.ArcFaceLoss(**sizes, margin=28.6, scale=16),
        lambda **options: tammes.CosineHead(SIZE, CLASSES, scale=16.0, **options),
        tammes.arcface(margin=math.radians(28.6), extension="linear"),
    ),
    "cosface": (
        lambda **sizes: losses.CosFaceLoss(**sizes, margin=0.35, scale=16),
        lambda **options: tammes.CosineHead(SIZE, CLASSES, scale=16.0, **options),
        tammes.cosface(margin=0.35),
    ),
    "sphereface": (
        lambda **sizes: losses.SphereFaceLoss(**sizes, margin=4, scale=1),
        lambda **options: tammes.CosineHead(
            SIZE, CLASSES, scale=1.0, normalize_features=False, **options
        ),
        tammes.sphereface(margin=4),
    ),
    "normface": (
        lambda **sizes: losses.NormalizedSoftmaxLoss(**sizes, temperature=0.05),
        lambda **options: tammes.CosineHead(SIZE, CLASSES, scale=20.0, **options),
        tammes.normface(),
    ),
    "l_softmax": (
        lambda **sizes: losses.LargeMarginSoftmaxLoss(**sizes, margin=3, scale=1),
        lambda **options: tammes.LinearHead(SIZE, CLASSES, bias=False, **options),
        tammes.l_softmax(margin=3),
    ),
}
"""Their loss, our head and our term, for what both compute."""


@both_dtypes
@both_kernels
@pytest.mark.parametrize("name", PEERS)
def test_value_and_gradients_agree_with_pytorch_metric_learning(name, implementation, dtype):
    make_theirs, make_head, term = PEERS[name]
    with warnings.catch_warnings():
        # Theirs hands tensors to scipy, which numpy 2 frowns upon.
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = make_theirs(num_classes=CLASSES, embedding_size=SIZE)
    head = make_head(implementation=implementation)
    features, labels, prototypes = batch(dtype)
    ours = tammes.Criterion(head, term).to(dtype)
    with torch.no_grad():
        head.weight.copy_(prototypes)
        theirs.W.data = prototypes.T.clone()
    x, x_theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
    loss, loss_theirs = ours(x, labels), theirs(x_theirs, labels)
    loss.backward()
    loss_theirs.backward()
    assert_close(loss, loss_theirs, **TOLERANCE)
    assert_close(x.grad, x_theirs.grad, **TOLERANCE)
    assert_close(head.weight.grad, theirs.W.grad.T, **TOLERANCE)


def test_the_batch_reaches_the_continuation_of_arcface():
    # Otherwise the agreement above would say nothing about it.
    features, labels, prototypes = batch(torch.double)
    cosine = (F.normalize(features) * F.normalize(prototypes[labels])).sum(1)
    past = cosine.acos() + math.radians(28.6) > math.pi
    assert 3 <= int(past.sum()) < ROWS


@both_dtypes
@pytest.mark.parametrize(("normalize", "scale"), [(True, 8.0), (False, 0.05)])
def test_nca_agrees_with_pytorch_metric_learning(normalize, scale, dtype):
    # At larger scales their probabilities underflow in single precision, and examples drop out.
    distance = distances.LpDistance(normalize_embeddings=normalize, power=2)
    theirs = losses.NCALoss(softmax_scale=scale, distance=distance)
    features, labels, _ = batch(dtype)
    labels[[1, 12]] = 9  # example 23 is alone in class 1: no anchor, but a neighbour
    assert (labels == labels[23]).sum() == 1
    ours = tammes.Criterion(
        tammes.LinearHead(SIZE, CLASSES), tammes.nca(scale=scale, normalize=normalize)
    ).to(dtype)
    x, x_theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
    loss, loss_theirs = ours(x, labels), theirs(x_theirs, labels)
    loss.backward()
    loss_theirs.backward()
    assert_close(loss, loss_theirs, **TOLERANCE)
    assert_close(x.grad, x_theirs.grad, **TOLERANCE)


# ------------------------------------------------------------------------------------------ torch


def compare_with_torch(criterion, expected, features, labels, dtype):
    """Value and gradients of a criterion on a linear head, and of a function of its scores."""
    criterion = criterion.to(dtype)
    parameters = [p.detach().clone().requires_grad_() for p in criterion.parameters()]
    x, x_torch = features.clone().requires_grad_(), features.clone().requires_grad_()
    ours, theirs = criterion(x, labels), expected(F.linear(x_torch, *parameters))
    upstream = torch.linspace(0.5, 2, ours.numel(), dtype=dtype).reshape(ours.shape)
    (ours * upstream).sum().backward()
    (theirs * upstream).sum().backward()
    assert_close(ours, theirs, **TOLERANCE)
    assert_close(x.grad, x_torch.grad, **TOLERANCE)
    for parameter, plain in zip(criterion.parameters(), parameters, strict=True):
        assert_close(parameter.grad, plain.grad, **TOLERANCE)


def linear(implementation):
    return tammes.LinearHead(SIZE, CLASSES, implementation=implementation)


@both_dtypes
@both_kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_softmax_agrees_with_cross_entropy(smoothing, reduction, implementation, dtype):
    features, labels, _ = batch(dtype)
    labels[[2, 7]] = -100
    criterion = tammes.Criterion(
        linear(implementation), tammes.softmax(smoothing=smoothing), reduction=reduction
    )

    def expected(scores):
        return F.cross_entropy(scores, labels, reduction=reduction, label_smoothing=smoothing)

    compare_with_torch(criterion, expected, features, labels, dtype)


@both_dtypes
@both_kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_class_weights_agree_with_cross_entropy(ignore_index, reduction, implementation, dtype):
    # The mean divides by the sum of the weights of the examples that count.
    features, labels, _ = batch(dtype)
    labels[[2, 7]] = ignore_index
    weight = torch.linspace(0, 3, CLASSES)
    criterion = tammes.Criterion(
        linear(implementation),
        tammes.softmax(),
        reduction=reduction,
        class_weights=weight,
        ignore_index=ignore_index,
    )

    def expected(scores):
        return F.cross_entropy(
            scores, labels, weight.to(dtype), ignore_index=ignore_index, reduction=reduction
        )

    compare_with_torch(criterion, expected, features, labels, dtype)


def test_class_weights_weigh_examples_and_not_the_classes_inside_the_smoothing():
    # torch weighs each class inside the smoothing too; there we differ, and mean to.
    features, labels, _ = batch(torch.double)
    weight = torch.linspace(0.5, 3, CLASSES, dtype=torch.double)
    head = linear("dense").double()
    criterion = tammes.Criterion(head, tammes.softmax(smoothing=0.2), class_weights=weight)
    criterion.double()
    scores = head.logits(features)
    rows = F.cross_entropy(scores, labels, label_smoothing=0.2, reduction="none")
    loss = criterion(features, labels)
    assert_close(loss, (rows * weight[labels]).sum() / weight[labels].sum(), **TOLERANCE)
    theirs = F.cross_entropy(scores, labels, weight, label_smoothing=0.2)
    assert abs(loss.item() - theirs.item()) > 1e-2


@both_dtypes
@pytest.mark.parametrize("margin", [1.0, 0.4])
def test_hinge_agrees_with_multi_margin_loss(margin, dtype):
    # torch divides by C, the paper by C - 1.
    features, labels, _ = batch(dtype)
    criterion = tammes.Criterion(linear("auto"), tammes.hinge(margin=margin))

    def expected(scores):
        return CLASSES / (CLASSES - 1) * F.multi_margin_loss(scores, labels, margin=margin)

    compare_with_torch(criterion, expected, features, labels, dtype)


@both_dtypes
@pytest.mark.parametrize("margin", [0.3, 5.0])
def test_triplet_agrees_with_triplet_margin_loss_on_the_hardest_pairs(margin, dtype):
    features, labels, _ = batch(dtype)
    x, x_torch = features.clone().requires_grad_(), features.clone().requires_grad_()
    criterion = tammes.Criterion(linear("auto"), tammes.triplet(margin=margin)).to(dtype)
    loss = criterion(x, labels)

    positives, negatives = [], []
    for i in range(ROWS):
        distance = (features[i] - features).norm(dim=1)
        company = [j for j in range(ROWS) if labels[j] == labels[i] and j != i]
        strangers = [j for j in range(ROWS) if labels[j] != labels[i]]
        positives.append(max(company, key=lambda j, d=distance: d[j].item()))
        negatives.append(min(strangers, key=lambda j, d=distance: d[j].item()))
    theirs = F.triplet_margin_loss(x_torch, x_torch[positives], x_torch[negatives], margin=margin)
    loss.backward()
    theirs.backward()
    assert loss > 0
    assert_close(loss, theirs, **TOLERANCE)
    assert_close(x.grad, x_torch.grad, **TOLERANCE)
