"""Schedules: the right value at every step, and nothing forgotten on the way."""

import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes.schedules import DeferredReweighting, LambdaAnnealing, LambdaDecay, WarmUp


def values(schedule, steps):
    return schedule.at(torch.as_tensor(steps, dtype=torch.get_default_dtype()))


def test_annealing_follows_the_law_of_the_released_code():
    # Values of the MNIST example of L-Softmax at 1, 5, 10 and 20 thousand iterations.
    got = values(LambdaAnnealing(1000.0, gamma=2.5e-5, power=35.0), [1e3, 5e3, 1e4, 2e4])
    assert_close(got, torch.tensor([421.0, 16.2, 0.41, 6.9e-4]), rtol=2e-2, atol=0)


def test_annealing_stops_at_its_minimum():
    assert_close(values(LambdaAnnealing(minimum=5.0), [1e6]), torch.tensor([5.0]))


def test_decay_reaches_its_end_at_its_share_of_the_training():
    decay = LambdaDecay(1000, start=1000.0, end=5.0, fraction=0.8)
    assert_close(values(decay, [0, 800, 1000]), torch.tensor([1000.0, 5.0, 5.0]))
    middle = values(decay, [400])
    assert_close(1 + middle, torch.tensor([(1001.0 * 6.0) ** 0.5]))


@pytest.mark.parametrize(
    ("shape", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 1 / (torch.tensor(2.5).exp().item() + 1))],
)
def test_warm_up_goes_from_start_to_end(shape, half):
    warm_up = WarmUp(-0.3, 0.5, steps=100, shape=shape, delay=10)
    got = values(warm_up, [0, 10, 60, 110, 1000])
    assert_close(got, torch.tensor([-0.3, -0.3, -0.3 + 0.8 * half, 0.5, 0.5]))
    steps = values(warm_up, torch.arange(10, 111))
    assert (steps.diff() >= 0).all()


def test_deferred_weights_set_in_at_their_step_and_average_one():
    schedule = DeferredReweighting([1000, 100, 10], start=3, beta=0.999)
    assert_close(values(schedule, 2.0), torch.ones(3))
    weights = values(schedule, 3.0)
    assert_close(weights.mean(), torch.tensor(1.0))
    effective = torch.tensor([1 - 0.999**n for n in (1000, 100, 10)])
    assert_close(weights * effective, (weights * effective)[0].expand(3))


def criterion_with(**schedules):
    torch.manual_seed(0)
    return tammes.CosFace(4, 3, scale=8.0).schedule(**schedules)


BATCH = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 2, 0, 1])


def test_an_attached_schedule_sets_the_margin_and_steps_with_every_call():
    criterion = criterion_with(margin=WarmUp(0.0, 0.4, steps=4))
    fixed = criterion_with()
    for step in range(6):
        expected = fixed(*BATCH, margin=0.1 * min(step, 4))
        assert_close(criterion(*BATCH), expected)


def test_a_schedule_stands_still_in_evaluation_and_without_gradient():
    criterion = criterion_with(margin=WarmUp(0.0, 0.4, steps=4)).eval()
    criterion(*BATCH)
    criterion.train()
    with torch.no_grad():
        criterion(*BATCH)
    assert criterion.schedules["margin"].steps == 0


def test_a_schedule_by_hand_steps_only_when_told():
    criterion = criterion_with(margin=WarmUp(0.0, 0.4, steps=4), by_hand=True)
    criterion(*BATCH)
    assert criterion.schedules["margin"].steps == 0
    criterion.step()
    assert_close(criterion.schedules["margin"].value, torch.tensor(0.1))


def test_a_schedule_may_be_used_without_being_attached():
    warm_up = WarmUp(0.0, 0.4, steps=4)
    warm_up.step()
    criterion = criterion_with()
    assert_close(criterion(*BATCH, margin=warm_up.value), criterion(*BATCH, margin=0.1))


def test_one_schedule_for_two_settings_steps_once():
    warm_up = WarmUp(0.0, 0.4, steps=4)
    criterion = tammes.CombinedMargin(4, 3).schedule(m2=warm_up, m3=warm_up)
    criterion(*BATCH)
    assert warm_up.steps == 1


def test_by_hand_holds_until_it_is_said_otherwise():
    criterion = criterion_with(margin=WarmUp(0.0, 0.4, steps=4), by_hand=True)
    criterion.schedule(class_weights=DeferredReweighting([3, 2, 1], start=9))
    criterion(*BATCH)
    assert criterion.schedules["margin"].steps == 0


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        (tammes.cosface(margin=[0.1, 0.2, 0.3]), "margin"),
        (tammes.ldam([3, 2, 1]), "counts"),
        (tammes.adaface(), "momentum"),
    ],
)
def test_what_is_per_class_or_fixed_cannot_be_scheduled(loss, key):
    criterion = tammes.Criterion(tammes.CosineHead(4, 3), loss)
    with pytest.raises(ValueError, match=f"one number and free to change, got {key}"):
        criterion.schedule(**{key: WarmUp(0.0, 0.4, steps=4)})


@pytest.mark.parametrize(
    ("loss", "key"), [(tammes.ldam([3, 2, 1]), "counts"), (tammes.adaface(), "momentum")]
)
def test_what_is_fixed_cannot_be_changed_at_the_call(loss, key):
    criterion = tammes.Criterion(tammes.CosineHead(4, 3), loss)
    with pytest.raises(TypeError, match=f"expects {key} from the beginning"):
        criterion(*BATCH, **{key: 0.5})


def test_a_schedule_prints_its_numbers():
    assert repr(WarmUp(0.0, 0.4, steps=4)).startswith("WarmUp(start=0.0, end=0.4, length=4")


def test_a_value_at_the_call_wins_over_the_schedule():
    criterion = criterion_with(margin=WarmUp(0.3, 0.4, steps=4))
    assert_close(criterion(*BATCH, margin=0.0), criterion_with()(*BATCH, margin=0.0))


def test_a_resumed_run_goes_on_where_it_stopped():
    whole = criterion_with(margin=WarmUp(0.0, 0.4, steps=10, shape="cosine"))
    losses = [whole(*BATCH).item() for _ in range(8)]
    first = criterion_with(margin=WarmUp(0.0, 0.4, steps=10, shape="cosine"))
    before = [first(*BATCH).item() for _ in range(4)]
    resumed = criterion_with(margin=WarmUp(0.0, 0.4, steps=10, shape="cosine"))
    resumed.load_state_dict(first.state_dict())
    after = [resumed(*BATCH).item() for _ in range(4)]
    assert before + after == losses


def test_class_weights_can_be_scheduled():
    criterion = criterion_with(class_weights=DeferredReweighting([100, 10, 1], start=1))
    plain = criterion_with()
    assert_close(criterion(*BATCH), plain(*BATCH))
    weights = DeferredReweighting([100, 10, 1], start=0).value
    assert_close(criterion(*BATCH), plain(*BATCH, weights=weights[BATCH[1]]))


def test_blend_is_annealed_from_softmax_to_the_full_margin():
    torch.manual_seed(0)
    criterion = tammes.LSoftmax(4, 3, margin=3)
    softmax = tammes.Criterion(criterion.head, tammes.softmax())(*BATCH)
    full = criterion(*BATCH)
    criterion.schedule(blend=LambdaDecay(10, start=1e7, end=0.0, fraction=1.0))
    losses = torch.stack([criterion(*BATCH) for _ in range(11)])
    assert_close(losses[0], softmax)
    assert_close(losses[-1], full)
    assert (losses.diff() > 0).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LambdaAnnealing(1.0, minimum=2.0), "base >= minimum >= 0"),
        (lambda: LambdaDecay(0), "total_steps >= 1"),
        (lambda: WarmUp(0, 1, steps=0), "steps >= 1 and delay >= 0, got steps=0"),
        (lambda: WarmUp(0, 1, steps=1, shape="square"), "got 'square'"),
        (lambda: DeferredReweighting([1, 0], start=0), "a positive count for each class"),
        (lambda: DeferredReweighting([1, 2], start=0, beta=1.0), "0 <= beta < 1"),
        (lambda: criterion_with(blend=WarmUp(0, 1, steps=1)), "a setting of cosface.*got 'blend'"),
    ],
)
def test_a_wrong_schedule_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
