"""Learning rates over time, against values worked by hand."""

import math

import pytest

from tammes.lab.config.schema import Config
from tammes.lab.training.lr_schedules import learning_rate


def rates(steps_per_epoch=1, **settings):
    config = Config(**settings)
    rate = learning_rate(config, steps_per_epoch)
    return [rate(step) for step in range(config.epochs * steps_per_epoch)]


def test_cosine_starts_at_the_rate_is_half_in_the_middle_and_ends_near_zero():
    values = rates(10, lr=0.2, epochs=4, lr_schedule="cosine()")
    assert values[0] == pytest.approx(0.2)
    assert values[20] == pytest.approx(0.1)
    assert values[-1] == pytest.approx(0.1 * (1 + math.cos(math.pi * 39 / 40)))


def test_cosine_per_epoch_is_constant_within_an_epoch():
    values = rates(3, lr=0.2, epochs=4, lr_schedule="cosine(per='epoch')")
    assert values[0] == values[1] == values[2] != values[3]


def test_cosine_goes_to_the_end_it_is_given():
    rate = learning_rate(Config(lr=1.0, epochs=2, lr_schedule="cosine(0.25)"), 5)
    assert rate(10) == pytest.approx(0.25)


def test_log_is_numpys_logspace_over_the_epochs():
    values = rates(2, lr=0.1, epochs=50, lr_schedule="log(1e-4)")
    for epoch in range(50):
        assert values[2 * epoch] == pytest.approx(10 ** (-1 - 3 * epoch / 49))
        assert values[2 * epoch] == values[2 * epoch + 1]


def test_steps_multiply_at_their_epochs():
    values = rates(1, lr=1.0, epochs=6, lr_schedule="steps([2, 4], 0.1)")
    assert values == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_steps_can_have_a_factor_each():
    values = rates(1, lr=1.0, epochs=4, lr_schedule="steps([1, 3], [0.5, 0.1])")
    assert values == pytest.approx([1, 0.5, 0.5, 0.05])


def test_constant_is_constant():
    assert set(rates(2, lr=0.3, epochs=3, lr_schedule="constant()")) == {0.3}


def test_warm_up_is_linear_and_reaches_the_rate_with_its_last_step():
    values = rates(4, lr=0.8, epochs=3, warmup=1, lr_schedule="constant()")
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_warm_up_starts_at_the_share_it_is_given():
    values = rates(4, lr=1.0, epochs=2, warmup=1, warmup_start=0.5, lr_schedule="constant()")
    assert values[:4] == pytest.approx([0.625, 0.75, 0.875, 1.0])


def test_cosine_runs_over_what_warm_up_leaves():
    values = rates(10, lr=1.0, epochs=5, warmup=1, lr_schedule="cosine()")
    assert values[10] == pytest.approx(1.0)
    assert values[30] == pytest.approx(0.5)


def test_epochs_of_steps_count_from_the_beginning_whatever_the_warm_up():
    values = rates(1, lr=1.0, epochs=5, warmup=2, lr_schedule="steps([3], 0.1)")
    assert values == pytest.approx([0.5, 1.0, 1.0, 0.1, 0.1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr_schedule": "cosin()"}, "did you mean cosine"),
        ({"lr_schedule": "log(0)"}, "lr_schedule log expects an end above 0, got 0"),
        ({"lr_schedule": "cosine(per='week')"}, "per='step' or 'epoch', got 'week'"),
        ({"lr_schedule": "steps([1, 2], [0.1])"}, "a factor for each of 2 epochs, got 1"),
        ({"warmup": 20.0}, "warmup is expected to be shorter than the 20 epochs, got 20"),
    ],
)
def test_a_rate_that_cannot_be_is_refused_in_a_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(").replace("[", r"\[")):
        learning_rate(Config(**settings), 10)
