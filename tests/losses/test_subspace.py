"""Direct and spectral sums: what is left of the features, and who feels whose gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import tammes
from tammes.losses.subspace import OrthogonalComplement, SpectralComplement

METRIC = {
    "nca": tammes.nca(),
    "proto": tammes.proto(),
    "sum": 0.5 * tammes.proto() + tammes.triplet(),
}


def with_spectrum(values, count, size, seed=0):
    """Prototypes ``(count, size)`` with these singular values, and their directions ``(size, R)``.

    Directions beyond the values complete the basis.
    """
    draw = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(count, count, dtype=torch.double, generator=draw))
    right, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.double, generator=draw))
    values = torch.tensor(values, dtype=torch.double)
    rank = len(values)
    return left[:, :rank] * values @ right[:, :rank].T, right


def matrix(complement, prototypes):
    """The projection as a matrix: what is left of every basis vector."""
    return complement.project(torch.eye(prototypes.shape[1]).to(prototypes), prototypes)


# ------------------------------------------------------------------------ orthogonal complement


def test_the_projections_by_hand():
    prototypes = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    features = torch.tensor([[1.0, 1.0, 1.0]])
    for complement, left in (
        (OrthogonalComplement(), [0, 0, 1]),
        # eps / (eps + singular value squared)
        (OrthogonalComplement(eps=1.0), [1 / 5, 1 / 2, 1]),
        # 1 - relative singular value to the power p
        (SpectralComplement(p=2.0), [0, 3 / 4, 1]),
        (SpectralComplement(p=0.0), [0, 0, 1]),
    ):
        assert_close(complement.project(features, prototypes), torch.tensor([left]).float())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(c=st.integers(2, 6), extra=st.integers(1, 9), seed=st.integers(0, 999))
def test_the_exact_complement_is_the_orthogonal_projector_beside_the_prototypes(c, extra, seed):
    draw = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(c, c + extra, dtype=torch.double, generator=draw)
    q = matrix(OrthogonalComplement(), prototypes)
    want = torch.eye(c + extra, dtype=torch.double) - torch.linalg.pinv(prototypes) @ prototypes
    assert_close(q, want, rtol=1e-7, atol=1e-9)


def test_exact_complement_is_orthogonal_to_prototypes_in_float32():
    prototypes = torch.nn.functional.normalize(torch.randn(64, 512))
    features = torch.nn.functional.normalize(torch.randn(100, 512))
    for complement in (OrthogonalComplement(), SpectralComplement(p=0.0)):
        left = complement.project(features, prototypes)
        assert (left.double() @ prototypes.double().T).abs().max() < 1e-6
        assert left.norm() > 5


@pytest.mark.parametrize("eps", [1e-3, 0.1, 2.0])
@pytest.mark.parametrize("count", [3, 4], ids=["independent", "dependent"])
def test_the_ridge_form_weighs_each_direction_by_its_squared_singular_value(eps, count):
    values = [3.0, 1.0, 0.2]
    prototypes, basis = with_spectrum(values, count, 5)
    q = matrix(OrthogonalComplement(eps=eps), prototypes)
    squares = torch.tensor([*(v**2 for v in values), 0, 0], dtype=torch.double)
    identity = torch.eye(5, dtype=torch.double)
    assert_close(q, identity - basis @ (squares / (eps + squares)).diag() @ basis.T)
    # Pushed through: the same from the D x D side.
    pushed = eps * torch.linalg.inv(prototypes.T @ prototypes + eps * identity)
    assert_close(q, pushed)
    exact = basis[:, 3:] @ basis[:, 3:].T
    off = torch.linalg.matrix_norm(q - exact, ord=2)
    assert_close(off.item(), eps / (eps + 0.2**2))


def test_the_ridge_form_goes_to_the_exact_one():
    prototypes, _ = with_spectrum([3.0, 1.0, 0.2], 3, 5)
    exact = matrix(OrthogonalComplement(), prototypes)
    off = [
        (matrix(OrthogonalComplement(eps=eps), prototypes) - exact).abs().max()
        for eps in (1e-2, 1e-5, 1e-8, 1e-11)
    ]
    assert off == sorted(off, reverse=True)
    assert off[-1] < 1e-8


@pytest.mark.parametrize(("eps", "error"), [(1e-2, 1e-6), (1e-4, 5e-5)])
def test_ridge_form_keeps_digits_at_a_condition_of_ten_thousand(eps, error):
    values = torch.logspace(0, -4, 16).tolist()
    prototypes, _ = with_spectrum(values, 16, 64)
    complement = OrthogonalComplement(eps=eps)
    single = matrix(complement, prototypes.float()).double()
    assert (single - matrix(complement, prototypes.float().double())).abs().max() < error


@pytest.mark.parametrize("complement", [OrthogonalComplement(), SpectralComplement(p=0.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_prototypes_that_depend_on_each_other_take_away_only_their_span(complement, dtype):
    # Four of rank two: those of a simplex, or of classes that have collapsed, depend too.
    prototypes, basis = with_spectrum([2.0, 1.0], 4, 7)
    q = matrix(complement, prototypes.to(dtype)).double()
    assert_close(q, basis[:, 2:] @ basis[:, 2:].T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-4, 1e-6])
def test_exact_complement_is_exact_for_nearly_dependent_prototypes(smallest):
    prototypes, basis = with_spectrum([1.0, 0.7, smallest], 3, 8)
    q = matrix(OrthogonalComplement(), prototypes)
    assert_close(q, basis[:, 3:] @ basis[:, 3:].T, rtol=0, atol=1e-9)


def test_prototypes_after_two_that_are_equal_take_away_only_their_span():
    # A QR has a direction of its own making for the second one.
    first, last = torch.randn(2, 6, dtype=torch.double)
    q = matrix(OrthogonalComplement(), torch.stack([first, first, last]))
    assert_close(q, matrix(OrthogonalComplement(), torch.stack([first, last])))


def test_hidden_dependence_of_prototypes_still_takes_away_their_span():
    # Ones on the diagonal, and a smallest singular value that is rounding in single precision.
    triangle = torch.eye(40, dtype=torch.double) - torch.ones(40, 40).double().triu(1)
    rotation = torch.linalg.qr(torch.randn(50, 50, dtype=torch.double))[0]
    prototypes = (triangle.T @ rotation[:40]).float()
    exact = matrix(SpectralComplement(p=0.0), prototypes)
    assert_close(matrix(OrthogonalComplement(), prototypes), exact)


@pytest.mark.parametrize("build", [tammes.direct_sum, tammes.spectral_sum])
def test_shapes_go_through_where_there_are_no_values(build):
    loss = build(tammes.softmax(), tammes.nca())
    criterion = tammes.Criterion(tammes.LinearHead(16, 3, bias=False), loss).to("meta")
    found = criterion(torch.randn(5, 16, device="meta"), torch.zeros(5).long().to("meta"))
    assert found.shape == ()
    with FakeTensorMode():
        left = OrthogonalComplement().project(torch.randn(5, 16), torch.randn(3, 16))
    assert left.shape == (5, 16)


def test_prototypes_far_from_depending_on_each_other_need_no_singular_values(monkeypatch):
    prototypes = torch.randn(12, 64)
    want = matrix(SpectralComplement(p=0.0), prototypes)

    def refused(*given, **options):
        raise AssertionError("singular values were asked for")

    monkeypatch.setattr(torch.linalg, "svd", refused)
    assert_close(matrix(OrthogonalComplement(), prototypes), want)


# -------------------------------------------------------------------------- spectral complement


@pytest.mark.parametrize("p", [0.1, 0.3, 1.0, 2.0])
@pytest.mark.parametrize(("count", "size", "rank"), [(3, 5, 3), (5, 5, 5), (8, 5, 5), (6, 5, 2)])
def test_the_spectral_form_has_the_eigenvalues_and_the_overlap_of_its_formula(count, size, rank, p):
    values = [2.0, 1.5, 1.1, 0.4, 0.1][:rank]
    prototypes, basis = with_spectrum(values, count, size)
    ratio = torch.tensor(values + [0.0] * (size - rank), dtype=torch.double) / 2
    weight = torch.where(ratio > 0, ratio**p, 0.0)
    q = matrix(SpectralComplement(p=p), prototypes)
    assert_close(q, basis @ (1 - weight).diag() @ basis.T)
    overlap = torch.linalg.matrix_norm(prototypes @ q, ord=2).item()
    assert_close(overlap, 2 * (ratio * (1 - weight)).max().item())
    assert overlap <= 2 * p * (1 + p) ** -(1 + 1 / p) + 1e-12


@pytest.mark.parametrize("p", [0.3, 1.0, 3.0])
def test_the_largest_possible_overlap_is_reached(p):
    prototypes, _ = with_spectrum([2.0, 2 * (1 + p) ** (-1 / p)], 2, 4)
    overlap = torch.linalg.matrix_norm(prototypes @ matrix(SpectralComplement(p=p), prototypes), 2)
    assert_close(overlap.item(), 2 * p * (1 + p) ** -(1 + 1 / p))


def test_spectral_form_at_power_zero_is_the_exact_complement():
    prototypes = torch.randn(3, 7, dtype=torch.double)
    q = matrix(SpectralComplement(p=0.0), prototypes)
    assert_close(q, matrix(OrthogonalComplement(), prototypes))
    assert_close(q.trace().item(), 4.0)


@pytest.mark.parametrize("count", [5, 8])
def test_at_power_zero_nothing_is_left_where_the_prototypes_span_everything(count):
    prototypes = torch.randn(count, 5, dtype=torch.double)
    q = matrix(SpectralComplement(p=0.0), prototypes)
    assert_close(q, torch.zeros(5, 5, dtype=torch.double))


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_both_routes_through_few_and_many_classes_agree(dtype):
    # The triangular factor has the same Gram matrix, in as many rows as columns.
    many = torch.randn(40, 6, dtype=torch.double)
    few = torch.linalg.qr(many).R
    left, right = (matrix(SpectralComplement(p=0.3), w.to(dtype)) for w in (many, few))
    assert_close(left, right, rtol=0, atol=2e-6 if dtype == torch.float else 1e-12)
    assert left.dtype == right.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("count", [3, 7, 12])
def test_what_is_left_does_not_depend_on_who_gets_a_gradient(count, p, dtype):
    prototypes = torch.randn(count, 7).to(dtype)
    detached, tracked = (
        matrix(SpectralComplement(p, detach), prototypes) for detach in (True, False)
    )
    assert_close(tracked, detached, rtol=0, atol=2e-6 if dtype == torch.float else 1e-12)


@pytest.mark.parametrize(("count", "error"), [(8, 3e-5), (60, 2e-7)])
def test_small_singular_values_keep_their_power_in_single_precision(count, error):
    prototypes, _ = with_spectrum(torch.logspace(0, -4, 8).tolist(), count, 24)
    prototypes = prototypes.float()
    single = matrix(SpectralComplement(p=0.3), prototypes).double()
    _, values, basis = torch.linalg.svd(prototypes.double(), full_matrices=False)
    # What rounding to single precision adds to the rank of eight is no direction.
    weight = torch.where(values > 1e-5, values / values[0], 0.0) ** 0.3
    exact = torch.eye(24, dtype=torch.double) - basis.T * weight @ basis
    assert (single - exact).abs().max() < error


@pytest.mark.parametrize("complement", [OrthogonalComplement(eps=1e-3), SpectralComplement()])
def test_zero_prototypes_take_nothing_away(complement):
    features = torch.randn(3, 4)
    assert_close(complement.project(features, torch.zeros(2, 4)), features)


# ------------------------------------------------------------------------------------- gradients

THROUGH = {
    "exact": OrthogonalComplement(detach=False),
    "ridge": OrthogonalComplement(eps=0.3, detach=False),
    "spectral": SpectralComplement(p=0.3, detach=False),
    "spectral_2": SpectralComplement(p=2.0, detach=False),
    "spectral_0": SpectralComplement(p=0.0, detach=False),
}


# The exact form is for fewer prototypes than dimensions.
@pytest.mark.parametrize(
    ("name", "count"), [(n, c) for n in THROUGH for c in (2, 4, 6) if n != "exact" or c < 4]
)
def test_the_gradient_through_the_projection_is_that_of_finite_differences(name, count):
    prototypes = torch.randn(count, 4, dtype=torch.double, requires_grad=True)
    features = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(THROUGH[name].project, (features, prototypes))


@pytest.mark.parametrize("name", ["ridge", "spectral", "spectral_0"])
def test_repeated_singular_values_below_the_largest_do_not_break_the_gradient(name):
    prototypes, _ = with_spectrum([2.0, 1.0, 1.0], 3, 5)
    features = torch.randn(3, 5, dtype=torch.double)
    project = THROUGH[name].project
    assert torch.autograd.gradcheck(lambda w: project(features, w), prototypes.requires_grad_())


@pytest.mark.parametrize("name", THROUGH)
@pytest.mark.parametrize("count", [3, 5])
def test_equal_singular_values_have_a_finite_gradient(name, count):
    prototypes = torch.eye(count, 6).requires_grad_()
    features = torch.randn(4, 6, requires_grad=True)
    left = THROUGH[name].project(features, prototypes)
    for grad in torch.autograd.grad(left.square().sum(), (features, prototypes)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("build", [tammes.direct_sum, tammes.spectral_sum])
@pytest.mark.parametrize("detach", [True, False])
def test_the_metric_loss_moves_the_prototypes_only_if_it_is_let(build, detach):
    head = tammes.LinearHead(6, 4, bias=False)
    loss = build(0.0 * tammes.softmax(), tammes.nca(), detach=detach)
    criterion = tammes.Criterion(head, loss)
    features = torch.randn(8, 6, requires_grad=True)
    criterion(features, torch.arange(8) % 4).backward()
    assert features.grad.norm() > 1e-3
    moved = 0 if head.weight.grad is None else head.weight.grad.norm()
    assert moved == 0 if detach else moved > 1e-3


@pytest.mark.parametrize("name", METRIC)
def test_in_a_direct_sum_the_two_gradients_are_orthogonal(name):
    head = tammes.LinearHead(9, 4, bias=False).double()
    features = torch.randn(8, 9, dtype=torch.double, requires_grad=True)
    labels = torch.arange(8) % 4
    both = tammes.Criterion(head, tammes.direct_sum(tammes.softmax(), METRIC[name]))
    alone = tammes.Criterion(head, tammes.softmax())
    (of_both,) = torch.autograd.grad(both(features, labels), features)
    (of_softmax,) = torch.autograd.grad(alone(features, labels), features)
    of_metric = of_both - of_softmax
    assert of_metric.norm() > 1e-3
    assert (of_softmax @ of_metric.T).abs().max() < 1e-14
    span = torch.linalg.pinv(head.weight.detach()) @ head.weight.detach()
    assert_close(of_softmax @ span, of_softmax)


@pytest.mark.parametrize(
    ("build", "complement"),
    [
        (tammes.direct_sum, OrthogonalComplement()),
        (tammes.spectral_sum, SpectralComplement(p=0.3)),
    ],
    ids=["direct", "spectral"],
)
@pytest.mark.parametrize("head", [tammes.LinearHead(9, 4), tammes.CosineHead(9, 4)], ids=str)
def test_a_sum_is_the_loss_on_the_features_plus_the_metric_loss_on_what_is_left(
    build, complement, head
):
    features, labels = torch.randn(8, 9), torch.arange(8) % 4
    loss = tammes.Criterion(head, build(tammes.softmax(), 0.5 * tammes.nca()))(features, labels)
    left = complement.project(features, head.prototypes)
    valid = torch.ones(8, dtype=torch.bool)
    metric, _ = tammes.nca()(tammes.Batch(left, labels, valid))
    plain = tammes.softmax()(head.split(features, labels))
    assert_close(loss, plain.mean() + 0.5 * metric.mean())


# ------------------------------------------------------------------------------ words and errors


@pytest.mark.parametrize("size", [3, 4])
def test_direct_sum_refuses_too_many_classes_and_names_spectral_sum(size):
    loss = tammes.direct_sum(tammes.softmax(), tammes.nca())
    with pytest.raises(ValueError, match=f"embedding_size={size} and num_classes=4.*spectral_sum"):
        tammes.Criterion(tammes.LinearHead(size, 4), loss)
    tammes.Criterion(
        tammes.LinearHead(size, 4), tammes.spectral_sum(tammes.softmax(), METRIC["sum"])
    )


@pytest.mark.parametrize("size", [3, 4])
def test_a_spectral_sum_with_power_zero_refuses_what_would_leave_only_rounding(size):
    head = tammes.LinearHead(size, 4)
    loss = tammes.spectral_sum(tammes.softmax(), tammes.nca(), p=0)
    with pytest.raises(ValueError, match=f"p=0 expects .*embedding_size={size} and num_classes=4"):
        tammes.Criterion(head, loss)
    tammes.Criterion(tammes.LinearHead(5, 4), loss)


@pytest.mark.parametrize("build", [tammes.direct_sum, tammes.spectral_sum])
@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((tammes.nca(), tammes.nca()), ValueError, "classification loss on split or prototypes"),
        ((tammes.softmax(), tammes.softmax()), ValueError, "metric loss on features"),
        ((tammes.softmax(), tammes.nca() + tammes.zero_centroid()), ValueError, "metric loss on"),
        ((tammes.softmax, tammes.nca()), TypeError, "classification loss to be made of terms"),
        ((tammes.softmax(), 3.0), TypeError, "metric loss to be made of terms, got 3.0"),
    ],
)
def test_a_part_in_the_wrong_place_is_refused(build, parts, error, message):
    with pytest.raises(error, match=f"{build.__name__} expects .*{message}"):
        build(*parts)


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (tammes.direct_sum, {"eps": 0.0}, "eps above 0, or None .* got 0.0"),
        (tammes.direct_sum, {"eps": -1e-3}, "eps above 0"),
        (tammes.spectral_sum, {"p": -0.1}, "p of 0 or more, got -0.1"),
        (tammes.spectral_sum, {"p": math.inf}, "p of 0 or more, got inf"),
    ],
)
def test_a_setting_out_of_range_is_refused(build, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tammes.softmax(), tammes.nca(), **settings)


def test_a_sum_prints_as_it_is_written():
    loss = tammes.direct_sum(tammes.normface(), 0.5 * tammes.nca(), eps=0.1)
    assert repr(loss) == (
        "direct_sum(normface(), 0.5*nca(scale=1.0, normalize=False), eps=0.1, detach=True)"
    )
    loss = tammes.spectral_sum(tammes.normface() + tammes.zero_centroid(), tammes.nca(), p=0.2)
    assert repr(loss) == (
        "spectral_sum(normface() + zero_centroid(normalize=True), "
        "nca(scale=1.0, normalize=False), p=0.2, detach=True)"
    )
