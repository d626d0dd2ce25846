"""Criterion: what a training loop sees of a head and its terms."""

import pickle

import numpy
import pytest
import torch
import torch.nn.functional as F
from catalogue import CLASSES, FEATURE_TERMS, PROTOTYPE_TERMS, SPLIT_TERMS, TERMS, default_head
from torch import nn
from torch.testing import assert_close

import tammes
from tammes.advise.defaults import (
    FEW_CLASSES_SCALE,
    MANY_CLASSES,
    MANY_CLASSES_SCALE,
    recommended_scale,
)
from tammes.advise.workload import Workload
from tammes.heads import Head

SIZE = 12
READY = {
    "Softmax": (tammes.Softmax, {}, tammes.LinearHead, tammes.softmax()),
    "LSoftmax": (tammes.LSoftmax, {}, tammes.LinearHead, tammes.l_softmax(margin=4.0)),
    "SphereFace": (tammes.SphereFace, {}, tammes.CosineHead, tammes.sphereface(margin=4.0)),
    "NormFace": (tammes.NormFace, {}, tammes.CosineHead, tammes.normface()),
    "CosFace": (tammes.CosFace, {}, tammes.CosineHead, tammes.cosface(margin=0.35)),
    "ArcFace": (tammes.ArcFace, {}, tammes.CosineHead, tammes.arcface(margin=0.5)),
    "CombinedMargin": (
        tammes.CombinedMargin,
        {"m1": 1.2, "m2": 0.1, "m3": 0.3},
        tammes.CosineHead,
        tammes.combined_margin(1.2, 0.1, 0.3),
    ),
    "GMSoftmax": (
        tammes.GMSoftmax,
        {"alpha1": 0.9, "beta1": -0.1, "alpha2": 0.8, "beta2": 0.1},
        tammes.CosineHead,
        tammes.gm_softmax(0.9, -0.1, 0.8, 0.1),
    ),
    "LMSoftmax": (tammes.LMSoftmax, {}, tammes.CosineHead, tammes.lm_softmax()),
    "LDAM": (
        tammes.LDAM,
        {"counts": list(range(1, CLASSES + 1))},
        tammes.CosineHead,
        tammes.ldam(range(1, CLASSES + 1)),
    ),
    "LargeMarginGaussian": (
        tammes.LargeMarginGaussian,
        {},
        tammes.GaussianHead,
        tammes.large_margin_gaussian(),
    ),
}


def a_batch(count=16, dtype=torch.double):
    return torch.randn(count, SIZE, dtype=dtype), torch.randint(CLASSES, (count,))


def build(loss, **options):
    leaves = [term for _, term in loss.leaves()]
    head = tammes.CosineHead(SIZE, CLASSES, scale=5.0)
    if len(leaves) == 1:
        head = default_head(leaves[0], SIZE)
    return tammes.Criterion(head, loss, **options).double().eval()


@pytest.mark.parametrize("name", READY)
def test_a_ready_made_criterion_is_its_head_and_its_term(name):
    make, options, head, loss = READY[name]
    criterion = make(SIZE, CLASSES, **options).double()
    assert criterion.loss == loss
    assert type(criterion.head) is head
    features, labels = a_batch()
    expected = loss(criterion.head.split(features, labels)).mean()
    assert_close(criterion(features, labels), expected)


def test_default_scales_are_those_of_the_one_table():
    scales = {name: make(SIZE, CLASSES, **o).head.scale for name, (make, o, _, _) in READY.items()}
    raw = ("Softmax", "LSoftmax", "SphereFace", "LargeMarginGaussian")
    losses = {name: loss for name, (_, _, _, loss) in READY.items()}
    assert scales == {
        name: 1.0 if name in raw else recommended_scale(losses[name], SIZE, CLASSES)
        for name in READY
    }
    assert scales["LMSoftmax"] == MANY_CLASSES_SCALE.value
    assert tammes.ArcFace(64, MANY_CLASSES).head.scale == MANY_CLASSES_SCALE.value
    assert tammes.ArcFace(64, MANY_CLASSES - 1).head.scale == FEW_CLASSES_SCALE.value


# ------------------------------------------------------------------------------- reduction


@pytest.mark.parametrize("name", TERMS)
def test_the_mean_of_the_rows_is_the_mean_and_their_sum_the_sum(name):
    features, labels = a_batch()
    values = {}
    for reduction in ("none", "mean", "sum"):
        torch.manual_seed(0)
        values[reduction] = build(TERMS[name], reduction=reduction)(features, labels)
    assert values["none"].shape == labels.shape
    assert_close(values["none"].mean(), values["mean"])
    assert_close(values["none"].sum(), values["sum"])


@pytest.mark.parametrize("name", PROTOTYPE_TERMS)
def test_a_prototype_term_is_added_to_every_row(name):
    features, labels = a_batch()
    criterion = build(TERMS[name], reduction="none")
    value = TERMS[name](criterion.head.prototypes)
    assert_close(criterion(features, labels), value.expand(len(labels)))


def test_weights_weigh_examples_and_the_mean_is_over_their_sum():
    features, labels = a_batch()
    weights = torch.rand(len(labels), dtype=torch.double)
    criterion = build(tammes.cosface())
    rows = build_rows(criterion, features, labels)
    expected = (weights * rows).sum() / weights.sum()
    assert_close(criterion(features, labels, weights=weights), expected)


def build_rows(criterion, features, labels):
    reduction, criterion.reduction = criterion.reduction, "none"
    rows = criterion(features, labels)
    criterion.reduction = reduction
    return rows


def test_class_weights_and_ignored_labels_are_those_of_cross_entropy():
    features, labels = a_batch()
    labels[::3] = -100
    by_class = torch.rand(CLASSES, dtype=torch.double)
    for reduction in ("mean", "sum", "none"):
        criterion = tammes.Softmax(
            SIZE, CLASSES, class_weights=by_class, reduction=reduction
        ).double()
        criterion.class_weights.copy_(by_class)
        expected = F.cross_entropy(
            criterion.logits(features), labels, weight=by_class, reduction=reduction
        )
        assert_close(criterion(features, labels), expected)


SUMS = {
    "direct_sum": tammes.direct_sum(tammes.softmax(), tammes.nca()),
    "spectral_sum": tammes.spectral_sum(tammes.softmax(), tammes.triplet()),
    "both": tammes.softmax() + tammes.center() + tammes.contrastive(),
}


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
@pytest.mark.parametrize("name", [*TERMS, *SUMS])
def test_an_ignored_example_is_as_good_as_absent_whatever_it_holds(name, implementation):
    loss = (TERMS | SUMS)[name]
    features, labels = a_batch()
    marked = labels.clone()
    marked[[1, 5, 6]] = -100
    there = marked != -100
    torch.manual_seed(0)
    whole = build(loss, validate=None, implementation=implementation).train()
    x = features.clone()
    x[1], x[5, 3], x[6, 2] = torch.nan, torch.inf, -1e300
    x.requires_grad_()
    whole(x, marked).backward()
    torch.manual_seed(0)
    part = build(loss, implementation=implementation).train()
    y = features[there].clone().requires_grad_()
    part(y, labels[there]).backward()
    assert_close(whole.terms, part.terms)
    if x.grad is not None:
        assert_close(x.grad[there], y.grad)
        assert not x.grad[~there].any()
    for left, right in zip(whole.parameters(), part.parameters(), strict=True):
        if left.grad is not None or right.grad is not None:
            assert_close(left.grad, right.grad)
    assert_close(whole.state_dict(), part.state_dict())


def test_values_of_an_ignored_example_are_not_checked():
    features, labels = a_batch()
    labels[2] = -100
    features[2] = torch.nan
    assert build(tammes.cosface())(features, labels).isfinite()


HUGE = {
    "cosface": (tammes.cosface(), tammes.CosineHead),
    "arcface": (tammes.arcface(), tammes.CosineHead),
    "sample_margin": (tammes.sample_margin(), tammes.LinearHead),
    "nca": (tammes.nca(normalize=True), tammes.LinearHead),
}


@pytest.mark.parametrize("implementation", ["dense", "streamed", "fused"])
@pytest.mark.parametrize("name", HUGE)
def test_directions_of_features_whose_squares_overflow_are_right(name, implementation):
    if implementation == "fused":
        pytest.importorskip("triton", reason="no triton here")
    loss, kind = HUGE[name]
    head = kind(SIZE, CLASSES, implementation=implementation, scale=5.0)
    criterion = tammes.Criterion(head, loss)
    features, labels = torch.randn(12, SIZE), torch.arange(12) % 4
    found = {}
    # Powers of two, so that not a digit may differ.
    for size in (1.0, 2.0**63, 2.0**120):
        x = (size * features).requires_grad_()
        value = criterion(x, labels)
        (gradient,) = torch.autograd.grad(value, x)
        found[size] = value.detach(), gradient.double() * size
    for size in (2.0**63, 2.0**120):
        assert_close(found[size][0], found[1.0][0])
        # The gradient is too small for all digits where a feature is nearly as large as can be.
        assert_close(found[size][1], found[1.0][1], rtol=1e-4, atol=1e-5 if size < 1e30 else 1e-2)


def test_the_weight_of_an_ignored_example_does_not_count():
    features, labels = a_batch()
    weights = torch.rand(len(labels), dtype=torch.double)
    criterion = build(tammes.cosface())
    expected = criterion(features[2:], labels[2:], weights=weights[2:])
    labels[:2] = -100
    assert_close(criterion(features, labels, weights=weights), expected)


def test_a_setting_of_an_ignored_example_does_not_count_even_if_it_is_nan():
    features, labels = a_batch()
    labels[0] = -100
    margin = torch.full(labels.shape, 0.1, dtype=torch.double)
    criterion = build(tammes.cosface())
    expected = criterion(features, labels, margin=margin)
    margin[0] = float("nan")
    assert_close(criterion(features, labels, margin=margin), expected)


def test_a_label_in_a_small_integer_type_is_not_mistaken_for_the_ignored_one():
    # -100 is 156 in eight bits.
    criterion = tammes.CosFace(SIZE, 200, reduction="none")
    features, labels = a_batch(count=2, dtype=torch.float)[0], torch.tensor([156, 3])
    assert_close(criterion(features, labels.to(torch.uint8)), criterion(features, labels))


@pytest.mark.parametrize("name", TERMS)
def test_an_empty_batch_has_loss_zero(name):
    empty = torch.empty(0, SIZE, dtype=torch.double), torch.empty(0, dtype=torch.long)
    assert build(TERMS[name])(*empty) == 0


@tammes.term(on="features", reads="")
def distance_from_first(batch):
    rows = (batch.features - batch.features[0]).square().sum(1)
    return rows, batch.labels > 0


def test_what_a_term_says_of_examples_that_are_no_anchors_does_not_count():
    features, labels = a_batch()
    rows, anchors = distance_from_first()(tammes.Batch(features, labels, labels >= 0))
    assert_close(build(distance_from_first())(features, labels), rows[anchors].mean())


@pytest.mark.parametrize("name", TERMS)
def test_a_batch_in_which_nothing_counts_has_loss_and_gradient_zero(name):
    features, labels = a_batch()
    criterion = build(TERMS[name])
    features.requires_grad_()
    loss = criterion(features, torch.full_like(labels, -100))
    assert loss == 0
    if loss.requires_grad:
        loss.backward()
        gradients = [features.grad, *(p.grad for p in criterion.parameters())]
        assert all(g is None or not g.any() for g in gradients)


# ------------------------------------------------------------------------ terms and settings


def test_the_loss_is_the_weighted_sum_of_its_terms():
    loss = tammes.cosface() + 0.5 * tammes.sample_margin() + 2 * tammes.zero_centroid()
    loss = loss + 0.1 * tammes.nca()
    for reduction in ("mean", "sum", "none"):
        criterion = build(loss, reduction=reduction)
        value = criterion(*a_batch()).sum()
        weights = {"cosface": 1, "sample_margin": 0.5, "zero_centroid": 2, "nca": 0.1}
        assert list(criterion.terms) == list(weights)
        total = sum(weights[name] * term for name, term in criterion.terms.items())
        assert_close(value, total * (1 if reduction == "mean" else 16))
        assert not any(term.requires_grad for term in criterion.terms.values())


def test_two_terms_of_one_name_are_told_apart():
    criterion = build(tammes.cosface(margin=0.1) + tammes.cosface(margin=0.4))
    criterion(*a_batch())
    assert list(criterion.terms) == ["cosface", "cosface_2"]
    assert criterion.terms["cosface_2"] > criterion.terms["cosface"]


def test_a_margin_per_class_is_looked_up_by_label():
    margins = torch.rand(CLASSES, dtype=torch.double)
    features, labels = a_batch()
    criterion = build(tammes.cosface(margin=margins), reduction="none")
    plain = tammes.Criterion(criterion.head, tammes.cosface(), reduction="none")
    for row, label in enumerate(labels):
        alone = plain(features[row, None], label[None], margin=margins[label].item())
        assert_close(criterion(features, labels)[row, None], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_settings_can_be_given_per_example_at_the_call(implementation):
    features, labels = a_batch()
    keys = ("alpha1", "beta1", "alpha2", "beta2")
    given = {key: torch.rand(len(labels), dtype=torch.double) for key in keys}
    criterion = build(tammes.gm_softmax(), reduction="none")
    criterion.head.implementation = implementation
    together = criterion(features, labels, **given)
    for row in range(len(labels)):
        own = {key: values[row].item() for key, values in given.items()}
        alone = criterion(features[row, None], labels[row, None], **own)
        assert_close(together[row, None], alone)


def test_a_setting_at_the_call_goes_to_every_term_that_has_it():
    features, labels = a_batch()
    both = build(tammes.cosface(margin=0.1) + tammes.arcface(margin=0.1))
    other = build(tammes.cosface(margin=0.3) + tammes.arcface(margin=0.3))
    other.load_state_dict(both.state_dict())
    assert_close(both(features, labels, margin=0.3), other(features, labels))


def test_direct_sum_adds_the_metric_loss_of_the_projected_features():
    loss = tammes.direct_sum(tammes.softmax(), 0.5 * tammes.nca())
    criterion = tammes.Criterion(tammes.LinearHead(SIZE, CLASSES, bias=False), loss).double()
    features, labels = a_batch()
    basis, _ = torch.linalg.qr(criterion.head.weight.detach().T)
    left = features - features @ basis @ basis.T
    rows, anchors = tammes.nca()(tammes.Batch(left, labels, torch.ones(16, dtype=torch.bool)))
    plain = F.cross_entropy(criterion.logits(features), labels)
    assert_close(criterion(features, labels), plain + 0.5 * rows[anchors].mean())
    assert list(criterion.terms) == ["softmax", "nca"]


def test_a_pickled_direct_sum_still_projects():
    loss = tammes.direct_sum(tammes.softmax(), tammes.nca())
    criterion = tammes.Criterion(tammes.LinearHead(SIZE, CLASSES, bias=False), loss).double()
    copy = pickle.loads(pickle.dumps(criterion))
    batch = a_batch()
    assert_close(copy(*batch), criterion(*batch))


def test_features_may_be_projected_twice_in_different_ways():
    loss = tammes.direct_sum(tammes.softmax(), tammes.nca())
    loss = loss + tammes.spectral_sum(tammes.softmax(), tammes.nca(), p=0.5) + tammes.nca()
    criterion = tammes.Criterion(tammes.LinearHead(SIZE, CLASSES, bias=False), loss).double()
    criterion(*a_batch())
    values = [criterion.terms[name] for name in ("nca", "nca_2", "nca_3")]
    assert len({round(value.item(), 6) for value in values}) == 3


# ---------------------------------------------------------------------- what a loop relies on


def test_gradients_come_in_the_dtype_of_what_they_belong_to():
    criterion = tammes.CosFace(SIZE, CLASSES)
    features, labels = a_batch(dtype=torch.bfloat16)
    for implementation in ("dense", "streamed"):
        criterion.head.implementation = implementation
        features.grad, criterion.head.weight.grad = None, None
        loss = criterion(features.requires_grad_(), labels)
        loss.backward()
        assert loss.dtype == torch.float32
        assert features.grad.dtype == torch.bfloat16
        assert criterion.head.weight.grad.dtype == torch.float32


def test_param_groups_hold_every_parameter_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, SIZE)
            self.criterion = tammes.Softmax(SIZE, CLASSES, scale="learnable")

    model = Model()
    groups = model.criterion.param_groups(
        model, lr=0.1, head_lr=1.0, weight_decay=1e-3, head_weight_decay=1e-2
    )
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    by_lr = [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups]
    assert by_lr == [(0.1, 1e-3, 2), (1.0, 1e-2, 1), (1.0, 0.0, 2)]
    torch.optim.SGD(groups, lr=0.5).step()


def test_frozen_parameters_are_in_no_group():
    criterion = tammes.CosFace(SIZE, CLASSES).requires_grad_(False)
    assert criterion.param_groups(lr=0.1) == []


def test_the_saved_state_is_prototypes_and_memory_and_nothing_else():
    loss = tammes.cosface(margin=[0.1] * CLASSES) + tammes.center()
    criterion = tammes.Criterion(tammes.CosineHead(SIZE, CLASSES), loss, class_weights=[1] * 9)
    assert list(criterion.state_dict()) == ["head.weight", "states.center.centers"]


def test_a_call_does_not_change_its_inputs():
    features, labels = a_batch()
    labels[0] = -100
    before = features.clone(), labels.clone()
    loss = tammes.direct_sum(tammes.softmax(), tammes.nca()) + tammes.center()
    head: Head = tammes.LinearHead(SIZE, CLASSES, bias=False, implementation="streamed")
    tammes.Criterion(head, loss).double()(features, labels)
    assert torch.equal(features, before[0])
    assert torch.equal(labels, before[1])


# ----------------------------------------------------------------------- classes come and go


def test_classes_are_added_to_everything_that_has_one_value_each():
    loss = tammes.ldam(counts=range(1, CLASSES + 1)) + tammes.center()
    criterion = tammes.Criterion(
        tammes.CosineHead(SIZE, CLASSES), loss, class_weights=[1.0] * CLASSES
    )
    features, labels = a_batch(dtype=torch.float)
    criterion(features, labels)
    centers = criterion.states["center"].centers.clone()
    criterion.add_classes(2, counts=[7, 8], class_weights=[2.0, 3.0])
    assert criterion.loss == tammes.ldam(counts=[*range(1, CLASSES + 1), 7, 8]) + tammes.center()
    assert criterion.class_weights.tolist() == [1.0] * CLASSES + [2.0, 3.0]
    assert torch.equal(criterion.states["center"].centers[:CLASSES], centers)
    criterion(features, torch.full_like(labels, CLASSES + 1))
    criterion.remove_classes([0, CLASSES])
    kept = [*range(2, CLASSES + 1), 8]
    assert criterion.loss == tammes.ldam(counts=kept) + tammes.center()
    assert torch.equal(criterion.states["center"].centers[: CLASSES - 1], centers[1:])
    assert criterion.class_weights.tolist() == [1.0] * (CLASSES - 1) + [3.0]
    criterion(features, torch.full_like(labels, CLASSES - 1))


def test_direct_sum_without_room_for_new_classes_changes_nothing():
    head = tammes.LinearHead(4, 3, bias=False)
    criterion = tammes.Criterion(head, tammes.direct_sum(tammes.softmax(), tammes.nca()))
    with pytest.raises(ValueError, match="use spectral_sum"):
        criterion.add_classes(1)
    assert head.num_classes == 3


def test_half_precision_leaves_margins_and_memories_alone():
    loss = tammes.cosface(margin=[0.35] * CLASSES) + tammes.adaface()
    criterion = tammes.Criterion(tammes.CosineHead(SIZE, CLASSES), loss).bfloat16()
    assert criterion.head.weight.dtype == torch.bfloat16
    assert all(b.dtype == torch.float32 for b in criterion.settings.buffers())
    assert all(b.dtype == torch.float32 for b in criterion.states.buffers())
    assert criterion(torch.randn(4, SIZE).bfloat16(), torch.arange(4)).isfinite()


def test_a_scale_may_be_set_and_an_implementation_chosen():
    criterion = tammes.CosFace(SIZE, CLASSES, implementation="streamed")
    assert criterion.head.implementation == "streamed"
    criterion.head.scale = 30.0
    assert criterion.head.scale == 30.0
    with pytest.raises(ValueError, match="expects scale above 0, got -1"):
        criterion.head.scale = -1
    criterion.head.implementation = "streamd"
    with pytest.raises(ValueError, match=r"expects implementation 'auto', .* got 'streamd'"):
        criterion(*a_batch(dtype=torch.float))


def test_another_loss_may_be_assigned_and_memories_of_terms_that_stay_are_kept():
    torch.manual_seed(0)
    features, labels = torch.randn(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    criterion = tammes.Criterion(tammes.CosineHead(8, 3, scale=8.0), tammes.curricularface())
    criterion(features, labels)
    memory = criterion.state_dict()["states.curricularface.mean"].clone()
    criterion.loss = tammes.curricularface() + tammes.zero_centroid()
    assert criterion.state_dict()["states.curricularface.mean"].equal(memory)
    criterion.loss = tammes.arcface(margin=0.2)
    fresh = tammes.Criterion(criterion.head, tammes.arcface(margin=0.2))
    assert criterion(features, labels).equal(fresh(features, labels))
    assert [*criterion.state_dict()] == [*fresh.state_dict()]


def test_a_loss_assigned_in_evaluation_is_evaluated_in_the_precision_of_the_criterion():
    features, labels = torch.randn(6, 8).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    criterion = tammes.CosFace(8, 3).double().eval()
    criterion.loss = tammes.elasticface(margin=0.4)
    built = tammes.Criterion(criterion.head, tammes.elasticface(margin=0.4)).double().eval()
    assert criterion(features, labels).equal(built(features, labels))
    criterion.loss = tammes.curricularface()
    assert criterion.states["curricularface"].mean.dtype == torch.double


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", torch.nn.CrossEntropyLoss()),
        ("margin", torch.nn.Parameter(torch.ones(()))),
        ("scale", torch.nn.Identity()),
    ],
)
def test_modules_and_parameters_are_refused_where_numbers_are(name, value):
    criterion = tammes.CosFace(8, 3)
    with pytest.raises((TypeError, AttributeError), match=r"Criterion expects a loss|no attribute"):
        setattr(criterion, name, value)
    assert [*criterion.state_dict()] == ["head.weight"]

    class Own(tammes.Criterion):
        pass

    own = Own(tammes.CosineHead(8, 3), tammes.cosface())
    own.margin = torch.nn.Parameter(torch.ones(()))
    own.scale = 2.0
    assert "margin" in own.state_dict()
    del own.scale
    assert not hasattr(own, "scale")


def test_class_weights_survive_another_loss_on_meta():
    with torch.device("meta"):
        criterion = tammes.CosFace(8, 3, class_weights=[1.0, 2.0, 3.0])
    criterion.loss = tammes.arcface()
    criterion.to_empty(device="cpu")
    assert criterion.class_weights.tolist() == [1.0, 2.0, 3.0]


def test_a_pickle_of_a_head_without_constants_can_be_cast():
    head = tammes.CosineHead(8, 3)
    del head._constants
    assert pickle.loads(pickle.dumps(head)).double().weight.dtype == torch.double


def test_integers_of_numpy_are_sizes_like_others():
    head = tammes.CosineHead(numpy.int64(4), numpy.int32(3), subcenters=numpy.int64(2))
    assert repr(head) == "CosineHead(4, 3, scale=64, subcenters=2)"
    kept = tammes.heads.drop_subcenters(head, torch.ones(3, 2), keep=numpy.int64(1))
    assert kept.weight.shape == (3, 4)
    job = Workload(classes=numpy.int64(9), dim=numpy.int64(4), batch=numpy.int64(8))
    assert type(job.classes) is int


def test_new_classes_without_their_settings_are_refused_and_nothing_changes():
    criterion = tammes.LDAM(SIZE, CLASSES, counts=[1] * CLASSES)
    with pytest.raises(ValueError, match=r"expects 2 new values of each of \['counts'\], got \{\}"):
        criterion.add_classes(2)
    assert criterion.head.num_classes == CLASSES


@pytest.mark.parametrize("name", [*SPLIT_TERMS, *FEATURE_TERMS])
def test_a_term_reads_no_more_than_it_says(name):
    # Fields that a term does not declare hold NaN, which would show in the loss.
    features, labels = a_batch()
    for implementation in ("dense", "streamed"):
        criterion = build(TERMS[name])
        criterion.head.implementation = implementation
        assert criterion(features, labels).isfinite()
