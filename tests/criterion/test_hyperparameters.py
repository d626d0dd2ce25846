"""Settings: which values are refused, wherever they are said, and whom a name reaches."""

import re

import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes import checkpoint
from tammes.schedules import LambdaAnnealing, LambdaDecay, Schedule, WarmUp


def batch(count=6, classes=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % classes


# ------------------------------------------------------------------------------ ranges

RADIANS = "a margin expects radians, at most pi either way, got 28.6"


@pytest.mark.parametrize("margin", [28.6, torch.tensor(28.6), [0.5, 28.6, 0.5]])
def test_a_margin_in_degrees_is_refused_when_a_criterion_is_made(margin):
    with pytest.raises(ValueError, match=RADIANS):
        tammes.ArcFace(4, 3, margin=margin)


TENSORS = [torch.tensor(28.6), torch.tensor([0.5, 28.6, 0.5, 0.5, 0.5, 0.5])]


@pytest.mark.parametrize("margin", TENSORS, ids=["one", "per_example"])
def test_a_margin_in_degrees_is_refused_when_it_is_said_at_a_call(margin):
    criterion = tammes.ArcFace(4, 3)
    with pytest.raises(ValueError, match=RADIANS):
        criterion(*batch(), margin=margin)
    features, labels = batch()
    split = criterion.head.split(features, labels)
    with pytest.raises(ValueError, match=RADIANS):
        tammes.arcface()(split, margin=margin)


def test_a_margin_that_is_no_number_is_refused_at_a_call():
    criterion = tammes.CosFace(4, 3)
    with pytest.raises(ValueError, match="expects margin to be a number or one per class, got nan"):
        criterion(*batch(), margin=torch.tensor([0.1, torch.nan, 0.1, 0.1, 0.1, 0.1]))


def test_the_margin_of_an_ignored_example_is_not_looked_at():
    criterion = tammes.ArcFace(4, 3)
    features, labels = batch()
    margin = torch.full((6,), 0.3)
    for dtype in (torch.int64, torch.int8):
        ignored = labels.to(dtype)
        ignored[[1, 4]] = -100
        wrong = margin.clone()
        wrong[1], wrong[4] = torch.nan, 28.6
        expected = criterion(features, ignored, margin=0.3)
        assert_close(criterion(features, ignored, margin=wrong), expected)
        nobody = torch.full_like(ignored, -100)
        assert criterion(features, nobody, margin=wrong) == 0


def test_nothing_is_looked_at_where_nobody_is_to_look():
    tammes.ArcFace(4, 3, validate=None)(*batch(), margin=torch.tensor(28.6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tammes.l_softmax(blend=[-1.0, 0.0, 0.0]), "blend is expected to be 0 or more"),
        (lambda: tammes.l_softmax(margin=[4.0, 0.5, 4.0]), "expected to be 1 or more, got 0.5"),
        (lambda: tammes.focal(gamma=[2.0, -2.0, 0.0]), "gamma of 0 or more, got -2"),
        (lambda: tammes.softmax(smoothing=[0.1, 1.5, 0.0]), "between 0 and 1, got 1.5"),
        (
            lambda: tammes.combined_margin(m1=[1.0, 1.2, 1.0], extension="linear"),
            "expects m1=1, got m1=1.2",
        ),
    ],
)
def test_a_value_per_class_is_held_to_the_range_of_one(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _check_even(power, order, kind):
    assert isinstance(power, (int, float))
    assert isinstance(order, (int, float))
    if power * order > 4:
        raise ValueError(f"even expects power times order up to 4, got {power * order}")


@tammes.term(reads="target", check=_check_even)
def even(split, *, power=1.0, order=2.0, kind="plain"):
    """A term of somebody else, whose check knows of numbers only."""
    return split.target * power * order


def test_a_check_of_an_author_is_called_with_numbers_alone():
    message = "even expects power times order up to 4, got 6"
    with pytest.raises(ValueError, match=message):
        even(power=[1.0, 2.0, 1.0], order=[2.0, 1.0, 3.0])
    criterion = tammes.Criterion(tammes.CosineHead(4, 3), even(power=[1.0, 2.0, 1.0]))
    criterion(*batch())
    with pytest.raises(ValueError, match=message):
        criterion(*batch(), order=torch.tensor(3.0))
    with pytest.raises(ValueError, match=message):
        criterion.schedule(order=WarmUp(1.0, 3.0, steps=10))


@pytest.mark.parametrize(
    "schedule", [WarmUp(28.6, 0.5, steps=9), WarmUp(0.0, 28.6, steps=10**6)], ids=["start", "end"]
)
def test_a_schedule_that_leaves_the_range_is_refused_when_it_is_attached(schedule):
    criterion = tammes.ArcFace(4, 3)
    with pytest.raises(ValueError, match=RADIANS):
        criterion.schedule(margin=schedule)
    assert not criterion.schedules
    with pytest.raises(ValueError, match="expected to be 1 or more, got 0"):
        tammes.LSoftmax(4, 3).schedule(margin=LambdaDecay(100, start=2.0, end=0.0))
    criterion.schedule(margin=WarmUp(0.0, 0.5, steps=10))
    tammes.LSoftmax(4, 3).schedule(blend=LambdaAnnealing(gamma=0.0))


class Rising(Schedule):
    def at(self, step):
        return 2.0 * step


def test_a_schedule_that_leaves_the_range_later_is_refused_by_the_call():
    criterion = tammes.ArcFace(4, 3).schedule(margin=Rising())
    criterion(*batch())
    criterion(*batch())
    with pytest.raises(ValueError, match="at most pi either way, got 4"):
        criterion(*batch())


# ------------------------------------------------------------------------------ names


def two(**options):
    torch.manual_seed(0)
    loss = tammes.cosface(margin=0.1) + tammes.arcface(margin=0.2) + tammes.cosface(margin=0.3)
    return tammes.Criterion(tammes.CosineHead(4, 3, scale=8.0), loss, **options)


def expected_terms(*margins):
    """Each term of a loss that is made with the margins."""
    criterion = two()
    (_, first), (_, second), (_, third) = criterion.loss.parts
    names = ("cosface", "arcface", "cosface_2")
    terms = {}
    for name, term, margin in zip(names, (first, second, third), margins, strict=True):
        one = tammes.Criterion(criterion.head, term.altered(margin=margin))
        terms[name] = one(*batch())
    return {name: value.detach() for name, value in terms.items()}


@pytest.mark.parametrize(
    ("settings", "margins"),
    [
        ({}, (0.1, 0.2, 0.3)),
        ({"margin": 0.5}, (0.5, 0.5, 0.5)),
        ({"cosface.margin": 0.5}, (0.5, 0.2, 0.3)),
        ({"cosface_2.margin": 0.5}, (0.1, 0.2, 0.5)),
        ({"arcface.margin": 0.4, "margin": 0.5}, (0.5, 0.4, 0.5)),
        ({"margin": 0.5, "arcface.margin": 0.4}, (0.5, 0.4, 0.5)),
    ],
    ids=str,
)
def test_a_name_reaches_every_term_that_has_it_or_the_one_it_names(settings, margins):
    criterion = two()
    criterion(*batch(), **settings)
    assert_close(criterion.terms, expected_terms(*margins))


def test_a_setting_of_one_term_may_have_a_value_per_example():
    criterion = two()
    criterion(*batch(), **{"arcface.margin": torch.full((6,), 0.4)})
    assert_close(criterion.terms, expected_terms(0.1, 0.4, 0.3))


@pytest.mark.parametrize("name", ["sphereface.margin", "cosface.gamma", "cosface_3.margin"])
def test_a_name_that_reaches_nobody_is_refused(name):
    criterion = two()
    with pytest.raises(TypeError, match=f"no setting {re.escape(repr(name))}"):
        criterion(*batch(), **{name: 0.1})
    with pytest.raises(ValueError, match=f"a setting of .*, got {re.escape(repr(name))}"):
        criterion.schedule(**{name: WarmUp(0.0, 0.1, steps=2)})


def test_a_schedule_may_be_of_one_term_and_is_saved_with_the_criterion(tmp_path):
    def make():
        rising = WarmUp(0.0, 0.4, steps=2)
        return two().schedule(**{"arcface.margin": rising, "margin": WarmUp(0.6, 0.0, steps=2)})

    criterion = make()
    for _ in range(2):
        criterion(*batch())
    assert_close(criterion.terms, expected_terms(0.3, 0.2, 0.3))
    # What a call says goes before what is scheduled, also where it says it of all.
    criterion.eval()
    criterion(*batch(), margin=0.1)
    assert_close(criterion.terms, expected_terms(0.1, 0.1, 0.1))
    assert "arcface.margin follows WarmUp" in repr(criterion)
    state = criterion.state_dict()
    assert state["schedules.arcface.margin.steps"] == state["schedules.margin.steps"] == 2
    again = make()
    again.load_state_dict(state)
    checkpoint.save(tmp_path, criterion)
    third = make()
    checkpoint.load(tmp_path, third)
    for loaded in (again, third):
        loaded(*batch())
        assert_close(loaded.terms, expected_terms(0.0, 0.4, 0.0))
    with pytest.raises(checkpoint.CheckpointError, match=r"arcface\.margin"):
        checkpoint.load(tmp_path, two().schedule(**{"margin": WarmUp(0.6, 0.0, steps=2)}))


def test_one_schedule_that_drives_several_settings_steps_once():
    shared = WarmUp(0.0, 0.4, steps=2)
    criterion = two().schedule(**{"arcface.margin": shared, "cosface.margin": shared})
    criterion(*batch())
    assert shared.steps == 1
