"""What is assigned to a criterion is checked where it is assigned, and counts from then on."""

import copy
import pickle
import sys

import numpy
import pytest
import torch
from torch.func import functional_call

import tammes
from tammes.schedules import DeferredReweighting, WarmUp

SIZE, CLASSES = 8, 5
FEATURES = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


def cosine(classes=CLASSES, size=SIZE, **options):
    return tammes.CosineHead(size, classes, **{"scale": 8.0} | options)


def linear(**options):
    return tammes.LinearHead(SIZE, CLASSES, **options)


SWAPS = {
    # Terms on scores and on cosines are one group on a cosine head, and two on another.
    "groups": (cosine, linear, tammes.softmax() + tammes.sample_margin()),
    "groups the other way": (linear, cosine, tammes.softmax() + tammes.sample_margin()),
    "one function of the batch": (cosine, linear, tammes.softmax()),
    "more classes": (cosine, lambda: cosine(CLASSES + 2), tammes.cosface()),
    "several prototypes": (cosine, lambda: cosine(subcenters=2), tammes.arcface()),
    "a map": (cosine, lambda: cosine(scale="learnable"), tammes.curricularface()),
    "one process": (
        lambda: tammes.ShardedHead(tammes.CosineHead, SIZE, CLASSES),
        cosine,
        tammes.cosface(),
    ),
    "centres": (cosine, lambda: cosine(CLASSES + 2), tammes.cosface() + 0.1 * tammes.center()),
    "a learned number": (cosine, lambda: cosine(CLASSES + 2), tammes.uniface()),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_criterion_with_another_head_is_one_built_with_it(name):
    torch.manual_seed(0)
    before, after, loss = SWAPS[name]
    criterion = tammes.Criterion(before(), loss).double().eval()
    criterion(FEATURES.double(), LABELS)
    criterion.head = after().double()
    built = tammes.Criterion(criterion.head, loss).double().eval()
    for one in (criterion, copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert one(FEATURES.double(), LABELS).equal(built(FEATURES.double(), LABELS))
        assert [*one.state_dict()] == [*built.state_dict()]
    assert (criterion.global_batch is None) == (built.global_batch is None)
    found = functional_call(criterion, dict(built.named_parameters()), (FEATURES.double(), LABELS))
    assert found.equal(built(FEATURES.double(), LABELS))


def test_terms_keep_their_states_with_a_head_of_the_same_size_only():
    criterion = tammes.Criterion(cosine(), tammes.curricularface())
    criterion(FEATURES, LABELS)
    memory = criterion.states["curricularface"].mean.clone()
    criterion.head = cosine()
    assert criterion.states["curricularface"].mean.equal(memory)
    criterion.head = cosine(CLASSES + 1)
    assert criterion.states["curricularface"].mean.item() == 0


def test_prototypes_of_another_head_are_watched_again():
    criterion = tammes.Criterion(cosine(), tammes.cosface())
    criterion._watch.done = True
    criterion.head = cosine()
    assert not criterion._watch.done


UNFIT = {
    "an angle": (tammes.arcface(), {}, linear, "arcface expects a head whose similarity is"),
    "unit features": (
        tammes.curricularface(),
        {},
        linear,
        "curricularface expects a head with unit features",
    ),
    "a large margin": (
        tammes.cosface(margin=4.0),
        {},
        cosine,
        "cosface expects margin to be a difference of cosines",
    ),
    "a margin per class": (
        tammes.cosface(margin=[0.1] * CLASSES),
        {},
        lambda: cosine(CLASSES + 1),
        "cosface expects one margin for each of 6 classes, got 5",
    ),
    "class weights": (
        tammes.cosface(),
        {"class_weights": [1.0] * CLASSES},
        lambda: cosine(CLASSES + 1),
        r"Criterion expects class_weights of shape \(6,\), got \(5,\)",
    ),
    "a schedule": (
        tammes.cosface(),
        {"class_weights": DeferredReweighting([3] * CLASSES, start=2)},
        lambda: cosine(CLASSES + 1),
        r"Criterion.schedule expects class_weights of shape \(6,\)",
    ),
    "a layer": (
        tammes.cosface(),
        {},
        lambda: torch.nn.Linear(SIZE, CLASSES),
        "Criterion expects a head, such as .* got Linear",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_head_that_does_not_fit_is_refused_and_nothing_changes(name):
    loss, options, other, message = UNFIT[name]
    head = linear() if name == "a large margin" else cosine()
    criterion = tammes.Criterion(head, loss)
    if name == "a schedule":
        criterion.schedule(**options)
    elif options:
        criterion = tammes.Criterion(head, loss, **options)
    parts = [criterion.settings, criterion.states, criterion._watch]
    with pytest.raises((TypeError, ValueError), match=message):
        criterion.head = other()
    assert criterion.head is head
    now = [criterion.settings, criterion.states, criterion._watch]
    assert all(one is other for one, other in zip(now, parts, strict=True))


def test_a_schedule_goes_on_with_another_head():
    criterion = tammes.Criterion(cosine(), tammes.cosface())
    criterion.schedule(margin=WarmUp(0.0, 0.4, steps=4))
    criterion(FEATURES, LABELS)
    criterion.head = cosine()
    built = tammes.Criterion(criterion.head, tammes.cosface(margin=0.1))
    assert criterion(FEATURES, LABELS).allclose(built(FEATURES, LABELS))


@pytest.mark.parametrize("start", [0.0, 28.6])
def test_a_scheduled_margin_in_degrees_is_refused_on_a_cosine_head(start):
    criterion = tammes.Criterion(cosine(), tammes.cosface())
    with pytest.raises(ValueError, match=r"difference of cosines, .* got 28\.6; as an angle"):
        criterion.schedule(margin=WarmUp(start, 28.6 - start, steps=4))
    assert not criterion.schedules
    free = tammes.Criterion(linear(), tammes.cosface())
    free.schedule(margin=WarmUp(start, 28.6 - start, steps=4))
    with pytest.raises(ValueError, match="difference of cosines"):
        free.head = cosine()


REFUSED = {
    "reduction": ("average", ValueError, "reduction 'mean', 'sum' or 'none', got 'average'"),
    "ignore_index": (None, TypeError, "Criterion expects ignore_index to be a whole number"),
    "implementation": (
        "dense",
        AttributeError,
        r"criterion\.head\.implementation = \.\.\. changes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_value_is_refused_where_it_is_assigned(name):
    value, error, message = REFUSED[name]
    criterion = tammes.CosFace(SIZE, CLASSES)
    before = dict(vars(criterion))
    with pytest.raises(error, match=message):
        setattr(criterion, name, value)
    assert vars(criterion) == before


def test_a_wrong_ignored_label_is_refused_from_the_beginning():
    with pytest.raises(TypeError, match=r"ignore_index to be a whole number, got 0\.5"):
        tammes.CosFace(SIZE, CLASSES, ignore_index=0.5)
    criterion = tammes.CosFace(SIZE, CLASSES, ignore_index=numpy.int64(2))
    assert type(criterion.ignore_index) is int


def test_own_criteria_may_have_an_attribute_implementation():
    class Own(tammes.Criterion):
        pass

    own = Own(cosine(), tammes.cosface())
    own.implementation = "mine"
    assert own.implementation == "mine"


# ------------------------------------------------------------ classes of the head alone changed


def without_two(criterion):
    criterion.head.remove_classes([0, 1])
    return criterion(FEATURES, LABELS % (CLASSES - 2))


OWNING = {
    "margin": (tammes.cosface(margin=[0.1] * CLASSES), {}),
    "counts": (tammes.logit_adjustment(counts=[2] * CLASSES), {}),
    "class_weights": (tammes.cosface(), {"class_weights": [1.0] * CLASSES}),
    "a schedule": (tammes.cosface(), {}),
    "center": (tammes.cosface() + tammes.center(), {}),
}


@pytest.mark.parametrize("name", OWNING)
def test_values_of_classes_that_only_the_head_dropped_are_not_used(name):
    loss, options = OWNING[name]
    criterion = tammes.Criterion(cosine(), loss, **options)
    if name == "a schedule":
        criterion.schedule(class_weights=DeferredReweighting([3] * CLASSES, start=2))
        name = "class_weights"
    with pytest.raises(ValueError, match=f"a head of 5 classes, since it has {name} for each, got"):
        without_two(criterion)


@pytest.mark.parametrize("loss", [tammes.cosface(), tammes.adaface(), tammes.uniface()])
def test_classes_of_the_head_alone_may_change_where_nothing_has_a_value_for_each(loss):
    criterion = tammes.Criterion(cosine(), loss).eval()
    criterion.head.add_classes(2)
    built = tammes.Criterion(criterion.head, loss).eval()
    for name, state in built.states.items():
        state.load_state_dict(criterion.states[name].state_dict())
    for labels in (LABELS + 2, torch.cat([LABELS[1:] + 2, torch.tensor([-100])])):
        assert criterion(FEATURES, labels).equal(built(FEATURES, labels))


def test_replicas_of_data_parallel_take_their_own_heads(monkeypatch):
    from torch.nn.parallel import replicate

    def copies(tensors, devices, detach=False):
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(sys.modules[replicate.__module__], "_broadcast_coalesced_reshape", copies)
    criterion = tammes.Criterion(cosine(), tammes.cosface() + 0.1 * tammes.center()).eval()
    states = dict(criterion.states.items())
    replicas = replicate(criterion, [0, 1])
    assert dict(criterion.states.items()) == states
    for replica in replicas:
        assert replica.head is not criterion.head
        assert replica.states["center"] is not states["center"]
        assert replica(FEATURES, LABELS).equal(criterion(FEATURES, LABELS))
