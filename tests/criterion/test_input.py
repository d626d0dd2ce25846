"""Bad input is refused in one sentence: who expects what, got what; and nothing is lost by it."""

import copy

import pytest
import torch
from messages import pattern
from torch import nan

import tammes
from tammes.schedules import DeferredReweighting, LambdaAnnealing, LambdaDecay, WarmUp

SIZE, CLASSES, ROWS = 12, 9, 6
FEATURES = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 8, 3, 3, 1, 5])


def cosine(**options):
    return tammes.CosineHead(SIZE, CLASSES, **{"scale": 8.0} | options)


def linear(**options):
    return tammes.LinearHead(SIZE, CLASSES, **options)


def criterion(term=None, head=None, **options):
    return tammes.Criterion(head or cosine(), term or tammes.cosface(), **options)


def masked(*classes):
    head = linear()
    with torch.no_grad():
        head.bias[[*classes]] = -torch.inf
    return criterion(tammes.softmax(), head)


def broken(value, rows=1):
    features = FEATURES.clone()
    features[:rows, 3] = value
    return features


def optimizer_of(*parameters):
    return torch.optim.SGD(parameters, lr=0.1)


# Each row: what is done, the error, its text: in full once in a section, else by key words.
REFUSED = {
    # ----------------------------------------------------------------------------- features
    "features of another size": (
        lambda: criterion()(FEATURES[:, :5], LABELS),
        ValueError,
        "CosineHead expects features of shape (N, 12), got (6, 5)",
    ),
    "one feature without a batch": (
        lambda: criterion()(FEATURES[0], LABELS[:1]),
        ValueError,
        "CosineHead ... features ... (12,)",
    ),
    "features with one dimension too many": (
        lambda: criterion()(FEATURES[None], LABELS[None]),
        ValueError,
        "CosineHead ... features ... (1, 6, 12)",
    ),
    "integer features": (
        lambda: criterion()(FEATURES.long(), LABELS),
        TypeError,
        "CosineHead ... features ... torch.int64",
    ),
    "features in a list": (
        lambda: criterion()(FEATURES.tolist(), LABELS),
        TypeError,
        "CosineHead ... features ... list",
    ),
    "a feature that is NaN": (
        lambda: criterion()(broken(nan), LABELS),
        ValueError,
        "Criterion ... features ... NaN or infinity ... 1 of 6 ...",
    ),
    "features that are infinite": (
        lambda: criterion()(broken(torch.inf, rows=2), LABELS),
        ValueError,
        "Criterion ... features ... NaN or infinity ... 2 of 6 ...",
    ),
    "infinities that cancel": (
        lambda: criterion()(torch.cat([broken(torch.inf)[:1], broken(-torch.inf)[:1]]), LABELS[:2]),
        ValueError,
        "Criterion ... features ... NaN or infinity ... 2 of 2 ...",
    ),
    # --------------------------------------------------------- tensors that require a gradient
    "a margin that requires a gradient": (
        lambda: tammes.cosface(margin=torch.tensor(0.3, requires_grad=True)),
        TypeError,
        "cosface expects margin without gradient, got a tensor that requires one; a call takes "
        "one, criterion(..., margin=...); tammes.states.LearnedNumber learns one",
    ),
    "margins of classes that require a gradient": (
        lambda: tammes.CosFace(SIZE, CLASSES, margin=torch.nn.Parameter(torch.zeros(CLASSES))),
        TypeError,
        "cosface ... margin ... gradient ...",
    ),
    "a scale that requires a gradient": (
        lambda: cosine(scale=torch.tensor(8.0, requires_grad=True)),
        TypeError,
        "CosineHead expects scale without gradient, got a tensor that requires one; "
        "scale='learnable' learns it",
    ),
    "an assigned scale that requires a gradient": (
        lambda: setattr(linear(), "scale", torch.ones((), requires_grad=True)),
        TypeError,
        "LinearHead ... scale ... gradient ...",
    ),
    "a temperature that requires a gradient": (
        lambda: cosine(
            subcenters=2, pooling="soft", temperature=torch.nn.Parameter(torch.ones(()))
        ),
        TypeError,
        "CosineHead ... temperature ... gradient ...",
    ),
    "anchors that require a gradient": (
        lambda: tammes.DistanceHead(3, 3, anchors=torch.nn.Parameter(torch.ones(()))),
        TypeError,
        "DistanceHead ... anchors ... gradient ...",
    ),
    # ---------------------------------------------------------------------- places and sizes
    "features on another device": (
        lambda: criterion()(FEATURES.to("meta"), LABELS.to("meta")),
        ValueError,
        "Criterion ... features ... meta",
    ),
    "logits of another size": (
        lambda: criterion().logits(FEATURES[:, :5]),
        ValueError,
        "CosineHead ... features ... (6, 5)",
    ),
    "a split of another size": (
        lambda: cosine().split(FEATURES[:, :5], LABELS),
        ValueError,
        "CosineHead ... features ... (6, 5)",
    ),
    # ------------------------------------------------------------------------------- labels
    "a label too high": (
        lambda: criterion()(FEATURES, LABELS + 1),
        ValueError,
        "Criterion expects labels from 0 to 8 or ignore_index=-100, got 1 to 9; "
        "classes count from 0",
    ),
    "a label below zero": (
        lambda: criterion()(FEATURES, LABELS - 1),
        ValueError,
        "Criterion ... labels ... -1 to 7",
    ),
    "a label that another criterion would ignore": (
        lambda: criterion(ignore_index=-1)(FEATURES, LABELS.masked_fill(LABELS == 3, -100)),
        ValueError,
        "Criterion ... labels ... -100 to 8",
    ),
    "a label whose class is masked": (
        lambda: masked(3)(FEATURES, LABELS),
        ValueError,
        "Criterion ... masked ... class 3 ... 2 of 6 ...",
    ),
    "a split by a label whose class is masked": (
        lambda: masked(8).head.split(FEATURES, LABELS),
        ValueError,
        "LinearHead ... masked ... class 8 ... 1 of 6 ...",
    ),
    "all classes but one masked": (
        lambda: masked(0, 1, 2, 4, 5, 6, 7, 8)(FEATURES[2:4], LABELS[2:4]),
        ValueError,
        "Criterion ... masked ... 1",
    ),
    "similarities whose own class is masked": (
        lambda: tammes.split(torch.tensor([[0.1, -torch.inf]]), torch.tensor([1])),
        ValueError,
        "split ... masked ... class 1 ... 1 of 1 ...",
    ),
    "float labels": (
        lambda: criterion()(FEATURES, LABELS.float()),
        TypeError,
        "Criterion ... labels ... torch.float32",
    ),
    "boolean labels": (
        lambda: criterion()(FEATURES, LABELS > 2),
        TypeError,
        "Criterion ... labels ... torch.bool",
    ),
    "labels in a list": (
        lambda: criterion()(FEATURES, LABELS.tolist()),
        TypeError,
        "Criterion ... labels ... list",
    ),
    "too few labels": (
        lambda: criterion()(FEATURES, LABELS[:3]),
        ValueError,
        "Criterion ... labels ... (3,)",
    ),
    "one-hot labels": (
        lambda: criterion()(FEATURES, torch.eye(CLASSES).long()[LABELS]),
        ValueError,
        "Criterion ... labels ... (6, 9)",
    ),
    "labels on another device": (
        lambda: criterion()(FEATURES, LABELS.to("meta")),
        ValueError,
        "Criterion ... labels ... meta",
    ),
    # ------------------------------------------------------------------------------ weights
    "weights of another shape": (
        lambda: criterion()(FEATURES, LABELS, weights=torch.ones(ROWS, 1)),
        ValueError,
        "Criterion expects weights of shape (6,), got (6, 1)",
    ),
    "weights in a list": (
        lambda: criterion()(FEATURES, LABELS, weights=[1.0] * ROWS),
        TypeError,
        "Criterion ... weights ... list",
    ),
    "too few class weights": (
        lambda: criterion(class_weights=[1.0] * 8),
        ValueError,
        "Criterion ... class_weights ... (8,)",
    ),
    "a negative class weight": (
        lambda: criterion(class_weights=[1.0] * 8 + [-2.0]),
        ValueError,
        "Criterion ... class_weights ... -2.0",
    ),
    "a class weight that is NaN": (
        lambda: criterion(class_weights=[1.0] * 8 + [nan]),
        ValueError,
        "Criterion ... class_weights ... nan",
    ),
    # -------------------------------------------------------------------------------- heads
    "one class": (
        lambda: tammes.CosineHead(SIZE, 1),
        ValueError,
        "CosineHead expects at least 2 classes, got num_classes=1",
    ),
    "no dimension": (
        lambda: tammes.LinearHead(0, CLASSES),
        ValueError,
        "LinearHead ... embedding_size ... 0",
    ),
    "scale zero": (
        lambda: cosine(scale=0.0),
        ValueError,
        "CosineHead ... scale ... 0.0",
    ),
    "a negative scale": (
        lambda: tammes.ArcFace(SIZE, CLASSES, scale=-64.0),
        ValueError,
        "CosineHead ... scale ... -64.0",
    ),
    "a scale that is NaN": (
        lambda: tammes.GaussianHead(SIZE, CLASSES, scale=nan),
        ValueError,
        "GaussianHead ... scale ... nan",
    ),
    "an infinite scale": (
        lambda: linear(scale=torch.inf),
        ValueError,
        "LinearHead ... scale ... inf",
    ),
    "a scale by an unknown name": (
        lambda: cosine(scale="learned"),
        ValueError,
        "CosineHead ... scale ... 'learned'",
    ),
    "an unknown implementation": (
        lambda: cosine(implementation="sparse"),
        ValueError,
        "CosineHead ... implementation ... 'sparse'",
    ),
    # ---------------------------------------------------------------------------- criterion
    "an unknown reduction": (
        lambda: criterion(reduction="avg"),
        ValueError,
        "Criterion expects reduction 'mean', 'sum' or 'none', got 'avg'",
    ),
    "a builder in place of a term": (
        lambda: tammes.Criterion(cosine(), tammes.cosface),
        TypeError,
        "Criterion ... loss ... cosface",
    ),
    "a head and a loss the wrong way round": (
        lambda: tammes.Criterion(tammes.cosface(), cosine()),
        TypeError,
        "Criterion ... head ... Term",
    ),
    "l_softmax with a bias": (
        lambda: criterion(tammes.l_softmax(), linear()),
        ValueError,
        "l_softmax ... head ... LinearHead with bias",
    ),
    "arcface on distances": (
        lambda: criterion(tammes.arcface(), tammes.GaussianHead(SIZE, CLASSES)),
        ValueError,
        "arcface ... head ... GaussianHead",
    ),
    "lm_softmax on inner products": (
        lambda: criterion(tammes.lm_softmax(), linear(bias=False)),
        ValueError,
        "lm_softmax ... head ... LinearHead",
    ),
    "lm_softmax on features that keep their length": (
        lambda: criterion(tammes.lm_softmax(), cosine(normalize_features=False)),
        ValueError,
        "lm_softmax ... head ... CosineHead",
    ),
    "a term that does not fit, in a sum": (
        lambda: criterion(tammes.softmax() + 0.5 * tammes.normface(), linear()),
        ValueError,
        "normface ... head ... LinearHead",
    ),
    "a direct sum without room": (
        lambda: criterion(
            tammes.direct_sum(tammes.softmax(), tammes.nca()),
            tammes.LinearHead(CLASSES, CLASSES, bias=False),
        ),
        ValueError,
        "direct_sum ... embedding_size=9 ... num_classes=9",
    ),
    # -------------------------------------------------------------------- settings of terms
    "too few margins": (
        lambda: criterion(tammes.cosface(margin=[0.1, 0.2])),
        ValueError,
        "cosface expects one margin for each of 9 classes, got 2",
    ),
    "too few counts": (
        lambda: tammes.LDAM(SIZE, CLASSES, counts=[10, 5]),
        ValueError,
        "ldam ... counts ... 2",
    ),
    "a count of zero": (
        lambda: tammes.ldam([10, 0]),
        ValueError,
        "ldam ... count ... (10, 0)",
    ),
    "a margin that is no number": (
        lambda: tammes.cosface(margin="0.3"),
        ValueError,
        "cosface ... margin ... '0.3'",
    ),
    "a margin that is NaN": (
        lambda: tammes.arcface(margin=nan),
        ValueError,
        "arcface ... margin ... nan",
    ),
    "a setting by an unknown name": (
        lambda: tammes.cosface(m=0.3),
        TypeError,
        "cosface has no setting 'm'; did you mean margin?",
    ),
    "an unknown extension": (
        lambda: tammes.arcface(extension="cut"),
        ValueError,
        "... extension ... 'cut'",
    ),
    "an unknown gradient": (
        lambda: tammes.combined_margin(gradient="none"),
        ValueError,
        "... gradient ... 'none'",
    ),
    "a linear extension of a multiplied angle": (
        lambda: tammes.combined_margin(2.0, 0.1, extension="linear"),
        ValueError,
        "... 'linear' ... m1=2.0",
    ),
    "an unknown kind": (
        lambda: tammes.logit_divergence(kind="kl"),
        ValueError,
        "logit_divergence ... kind ... 'kl'",
    ),
    "smoothing above one": (
        lambda: tammes.softmax(smoothing=1.5),
        ValueError,
        "softmax ... smoothing ... 1.5",
    ),
    "negative smoothing": (
        lambda: tammes.Softmax(SIZE, CLASSES, smoothing=-0.1),
        ValueError,
        "softmax ... smoothing ... -0.1",
    ),
    "a negative exponent": (
        lambda: tammes.focal(gamma=-1.0),
        ValueError,
        "focal ... gamma ... -1.0",
    ),
    "a multiplicative margin below one": (
        lambda: tammes.sphereface(margin=0.5),
        ValueError,
        "... multiplicative margin ... 0.5",
    ),
    "a negative blend": (
        lambda: tammes.l_softmax(blend=-1.0),
        ValueError,
        "blend ... -1.0",
    ),
    "centres that do not move": (
        lambda: tammes.center(rate=0.0),
        ValueError,
        "center ... rate ... 0.0",
    ),
    "averages that overshoot": (
        lambda: tammes.adaface(momentum=2.0),
        ValueError,
        "adaface ... momentum ... 2.0",
    ),
    "an infinite weight of a term": (
        lambda: torch.inf * tammes.cosface(),
        ValueError,
        "... weight ... inf",
    ),
    # ----------------------------------------------------------------- settings at the call
    "an unknown setting at the call": (
        lambda: criterion()(FEATURES, LABELS, m=0.3),
        TypeError,
        "the criterion has no setting 'm'; did you mean margin?",
    ),
    "a margin that is assigned": (
        lambda: setattr(tammes.CosFace(SIZE, CLASSES), "margin", 0.1),
        AttributeError,
        "CosFace has no attribute 'margin'; criterion.loss = ...",
    ),
    "a scale that is assigned": (
        lambda: setattr(criterion(), "scale", 8.0),
        AttributeError,
        "Criterion has no attribute 'scale'; criterion.head.scale = ... changes it",
    ),
    "a loss that is assigned and is none": (
        lambda: setattr(criterion(), "loss", tammes.cosface),
        TypeError,
        "Criterion expects a loss made of terms ... got cosface; cosface() builds it",
    ),
    "a loss that is assigned without the setting of a schedule": (
        lambda: setattr(
            criterion().schedule(margin=WarmUp(0.0, 0.3, steps=9)), "loss", tammes.lm_softmax()
        ),
        ValueError,
        "Criterion.schedule expects a setting of lm_softmax(), got 'margin'",
    ),
    "parameters in place of a network": (
        lambda: criterion().param_groups(torch.nn.Linear(2, 2).parameters(), lr=0.1),
        TypeError,
        "param_groups expects backbone to be a module, got generator; give the network itself, "
        "not its parameters",
    ),
    "a margin for each class at the call": (
        lambda: criterion()(FEATURES, LABELS, margin=torch.rand(CLASSES)),
        ValueError,
        "the criterion ... margin ... (9,)",
    ),
    "an unknown extension at the call": (
        lambda: criterion(tammes.arcface())(FEATURES, LABELS, extension="cut"),
        ValueError,
        "... extension ... 'cut'",
    ),
    "an unknown gradient at the call": (
        lambda: criterion(tammes.arcface())(FEATURES, LABELS, gradient="none"),
        ValueError,
        "... gradient ... 'none'",
    ),
    "an unknown kind at the call": (
        lambda: criterion(tammes.logit_divergence())(FEATURES, LABELS, kind="kl"),
        ValueError,
        "logit_divergence ... kind ... 'kl'",
    ),
    "smoothing out of range at the call": (
        lambda: criterion(tammes.softmax())(FEATURES, LABELS, smoothing=1.5),
        ValueError,
        "softmax ... smoothing ... 1.5",
    ),
    # -------------------------------------------------------------------------------- sums
    "a direct sum the wrong way round": (
        lambda: tammes.direct_sum(tammes.nca(), tammes.softmax()),
        ValueError,
        "direct_sum expects a classification loss on split or prototypes or proxies, "
        "got nca(scale=1.0, normalize=False)",
    ),
    "a spectral sum of two classifiers": (
        lambda: tammes.spectral_sum(tammes.softmax(), tammes.zero_centroid()),
        ValueError,
        "spectral_sum ... metric ... zero_centroid(normalize=True)",
    ),
    "a ridge of zero": (
        lambda: tammes.direct_sum(tammes.softmax(), tammes.nca(), eps=0.0),
        ValueError,
        "direct_sum ... eps ... 0.0",
    ),
    "a negative exponent of the spectrum": (
        lambda: tammes.spectral_sum(tammes.softmax(), tammes.nca(), p=-0.3),
        ValueError,
        "spectral_sum ... p of ... -0.3",
    ),
    # ------------------------------------------------------------------------------- split
    "a split of too few labels": (
        lambda: tammes.split(torch.zeros(2, 3), torch.tensor([0])),
        ValueError,
        "split expects similarity of shape (N, C) and labels of shape (N,), got (2, 3) and (1,)",
    ),
    "a split of one class": (
        lambda: tammes.split(torch.zeros(1, 1), torch.tensor([0])),
        ValueError,
        "split ... classes ... C=1",
    ),
    "a dense term on a split without scores": (
        lambda: tammes.hinge()(tammes.split(torch.zeros(1, 3), torch.tensor([0]))),
        ValueError,
        "... split ... rest ...",
    ),
    # ------------------------------------------------------------- classes that come and go
    "no class to add": (
        lambda: criterion().add_classes(0),
        ValueError,
        "add_classes expects n of 1 or more, got 0",
    ),
    "features of another number of new classes": (
        lambda: criterion().add_classes(2, torch.randn(3, SIZE)),
        ValueError,
        "add_classes ... from_features ... (3, 12)",
    ),
    "new classes without their margins": (
        lambda: criterion(tammes.cosface(margin=[0.1] * CLASSES)).add_classes(2),
        ValueError,
        "add_classes ... ['margin'] ... {}",
    ),
    "new classes with too few weights": (
        lambda: criterion(class_weights=[1.0] * CLASSES).add_classes(2, class_weights=[1.0]),
        ValueError,
        "add_classes ... ['class_weights'] ... {'class_weights': 1}",
    ),
    "new classes with margins nobody asked for": (
        lambda: criterion().add_classes(1, margin=[0.3]),
        ValueError,
        "add_classes ... [] ... {'margin': 1}",
    ),
    "removing a class that is not there": (
        lambda: criterion().remove_classes([3, 9]),
        ValueError,
        "remove_classes ... classes ... 3 to 9",
    ),
    "removing a class from the end": (
        lambda: criterion().remove_classes([-1]),
        ValueError,
        "remove_classes ... classes ... -1 to -1",
    ),
    "removing all classes but one": (
        lambda: criterion().remove_classes(range(8)),
        ValueError,
        "remove_classes ... 2 classes ... 1",
    ),
    "removing classes by a mask": (
        lambda: criterion().remove_classes(torch.arange(CLASSES) > 6),
        TypeError,
        "remove_classes ... indices ... torch.bool",
    ),
    "removing classes by floats": (
        lambda: criterion().remove_classes([0.5]),
        TypeError,
        "remove_classes ... indices ... torch.float32",
    ),
    # --------------------------------------------------------------------------- schedules
    "a schedule for an unknown setting": (
        lambda: criterion().schedule(blend=WarmUp(0.0, 1.0, steps=3)),
        ValueError,
        "Criterion.schedule expects a setting of cosface(margin=0.35), got 'blend'",
    ),
    "a number in place of a schedule": (
        lambda: criterion().schedule(margin=0.3),
        TypeError,
        "Criterion.schedule ... Schedule ... margin ... 0.3",
    ),
    "a schedule for a word": (
        lambda: criterion(tammes.arcface()).schedule(extension=WarmUp(0.0, 1.0, steps=3)),
        ValueError,
        "Criterion.schedule ... setting ... 'extension'",
    ),
    "scheduled weights of another number of classes": (
        lambda: criterion().schedule(class_weights=DeferredReweighting([5, 1], start=3)),
        ValueError,
        "Criterion.schedule ... class_weights ... (2,)",
    ),
    "a warm-up without steps": (
        lambda: WarmUp(0.0, 1.0, steps=0),
        ValueError,
        "WarmUp ... steps=0 ... delay=0",
    ),
    "a warm-up of an unknown shape": (
        lambda: WarmUp(0.0, 1.0, steps=3, shape="quadratic"),
        ValueError,
        "WarmUp ... shape ... 'quadratic'",
    ),
    "an annealing that would grow": (
        lambda: LambdaAnnealing(base=1.0, minimum=5.0),
        ValueError,
        "LambdaAnnealing ... base=1.0 ... minimum=5.0 ...",
    ),
    "a decay over more than all of the training": (
        lambda: LambdaDecay(100, fraction=1.5),
        ValueError,
        "LambdaDecay ... fraction=1.5",
    ),
    "re-weighting by a count of zero": (
        lambda: DeferredReweighting([5, 0], start=3),
        ValueError,
        "DeferredReweighting ... count ... [5, 0]",
    ),
    "re-weighting by a beta of one": (
        lambda: DeferredReweighting([5, 1], start=3, beta=1.0),
        ValueError,
        "DeferredReweighting ... beta ... 3 ... 1.0",
    ),
    # ---------------------------------------------------------------------------- geometry
    "a simplex of too many points": (
        lambda: tammes.geometry.simplex(5, 3),
        ValueError,
        "simplex expects 2 <= count <= size + 1, got count=5 and size=3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_sentence(name):
    do, error, text = REFUSED[name]
    with pytest.raises(error, match=pattern(text)) as caught:
        do()
    assert type(caught.value) is error  # not something more special that happens to inherit


@pytest.mark.parametrize(
    "operation",
    [
        lambda: tammes.cosface() + 1,
        lambda: tammes.cosface() * tammes.normface(),
        lambda: tammes.cosface() + tammes.normface,
    ],
)
def test_only_losses_add_and_only_numbers_weigh(operation):
    with pytest.raises(TypeError, match="unsupported operand"):
        operation()


@pytest.mark.parametrize("implementation", ["dense", "streamed"])
def test_a_batch_of_nothing_has_loss_zero(implementation):
    # Not an error: the last batch of an epoch may hold nothing that counts.
    head = cosine(implementation=implementation)
    for features, labels in [
        (FEATURES[:0], LABELS[:0]),
        (FEATURES, torch.full_like(LABELS, -100)),
    ]:
        loss = criterion(head=head)(features, labels)
        loss.backward()
        assert loss == 0
        assert (head.weight.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integer_type_count_the_same(dtype):
    ours = criterion()
    assert torch.equal(ours(FEATURES, LABELS.to(dtype)), ours(FEATURES, LABELS))


# -------------------------------------------------------------------------- nothing is lost


def remembering():
    """A criterion with all there is to lose."""
    loss = tammes.adaface() + 0.1 * tammes.center() + tammes.cosface(margin=[0.1] * CLASSES)
    return criterion(loss, class_weights=[1.0] * CLASSES).schedule(
        concentration=WarmUp(0.0, 1.0, steps=10)
    )


BAD_CALLS = {
    "features of another size": lambda c: c(FEATURES[:, :5], LABELS),
    "NaN": lambda c: c(broken(nan), LABELS),
    "labels out of range": lambda c: c(FEATURES, LABELS + 1),
    "float labels": lambda c: c(FEATURES, LABELS.float()),
    "weights of another shape": lambda c: c(FEATURES, LABELS, weights=torch.ones(3)),
    "an unknown setting": lambda c: c(FEATURES, LABELS, m=0.3),
    "margins of another shape": lambda c: c(FEATURES, LABELS, margin=torch.rand(CLASSES)),
    "add no class": lambda c: c.add_classes(0, margin=[], class_weights=[]),
    "add a class without its margin": lambda c: c.add_classes(1, class_weights=[1.0]),
    "add a class from wrong features": lambda c: c.add_classes(
        1, torch.randn(2, SIZE), margin=[0.1], class_weights=[1.0]
    ),
    "add a class with another optimizer": lambda c: c.add_classes(
        1, margin=[0.1], class_weights=[1.0], optimizer=optimizer_of(torch.zeros(1))
    ),
    "remove a class that is not there": lambda c: c.remove_classes([9]),
    "remove a class with another optimizer": lambda c: c.remove_classes(
        [1], optimizer=optimizer_of(torch.zeros(1))
    ),
    "schedule one good and one bad": lambda c: c.schedule(
        margin=WarmUp(0.0, 1.0, steps=3), blend=WarmUp(0.0, 1.0, steps=3)
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_after_a_refused_call_a_criterion_goes_on_as_if_nothing_had_happened(name):
    refused = remembering()
    refused(FEATURES, LABELS)
    twin = copy.deepcopy(refused)
    with pytest.raises((ValueError, TypeError)):
        BAD_CALLS[name](refused)
    assert refused.state_dict().keys() == twin.state_dict().keys()
    for key, value in twin.state_dict().items():
        assert torch.equal(refused.state_dict()[key], value), key
    assert refused.loss == twin.loss
    assert torch.equal(refused.class_weights, twin.class_weights)
    assert torch.equal(refused(FEATURES, LABELS), twin(FEATURES, LABELS))


def test_an_optimizer_that_holds_only_some_parameters_leaves_the_head_whole():
    head = linear()
    weight, bias = head.weight, head.bias
    optimizer = optimizer_of(head.weight)
    with pytest.raises(ValueError, match="expects an optimizer that holds"):
        head.add_classes(1, optimizer=optimizer)
    assert head.weight is weight
    assert head.bias is bias
    assert optimizer.param_groups[0]["params"] == [weight]


@pytest.mark.parametrize(
    "change", [lambda c: c.add_classes(1), lambda c: c.remove_classes([0])], ids=["add", "remove"]
)
def test_classes_stay_as_they_are_while_a_schedule_has_a_weight_for_each(change):
    # Else a new class ends in an IndexError, and a removed one silently shifts all the weights.
    ours = criterion().schedule(class_weights=DeferredReweighting(range(1, 10), start=0))
    with pytest.raises(ValueError, match="class_weights"):
        change(ours)
    assert ours.head.num_classes == CLASSES


def test_bad_input_is_never_modified():
    given = broken(nan), LABELS + 1, torch.ones(3)
    copies, versions = [t.clone() for t in given], [t._version for t in given]
    features, labels, weights = given
    for options in ({}, {"weights": weights}, {"m": 0.3}):
        with pytest.raises((ValueError, TypeError)):
            criterion()(features, labels, **options)
    for tensor, copied, version in zip(given, copies, versions, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), copied.nan_to_num(7.0))
        assert tensor._version == version


def test_values_are_not_looked_at_under_a_transform():
    # There is nothing to look at yet; shapes are refused all the same.
    ours = criterion()
    batches = torch.stack([broken(nan), FEATURES])
    losses = torch.func.vmap(ours)(batches, LABELS.expand(2, ROWS))
    assert losses.isnan().tolist() == [True, False]
    with pytest.raises(ValueError, match="expects labels of shape"):
        torch.func.vmap(ours)(batches, LABELS[:3].expand(2, 3))


def test_validate_is_not_needed_on_the_cpu():
    for validate in (False, True):
        with pytest.raises(ValueError, match="expects finite features"):
            criterion(validate=validate)(broken(nan), LABELS)
