"""How far a run is, on a terminal and elsewhere."""

import io

import pytest

from tammes.lab.training import progress
from tammes.lab.training.progress import Bar, Lines, epoch_line

ROW = {
    "epoch": 2,
    "step": 20,
    "lr": 0.1,
    "train": {"loss": 0.5, "accuracy": 0.75, "sample_margin": 0.1},
    "terms": {"cosface": 0.5},
    "validation": {"accuracy": 0.7, "sample_margin": 0.2, "bias": 0.1, "loss": 0.6},
    "test": {"accuracy": 0.6789, "sample_margin": 0.25, "bias": 0.1, "loss": 0.7},
    "prototypes": {"class_margin": 81.25, "class_margin_ratio": 0.9},
}


def test_an_epoch_is_a_line_with_loss_accuracy_margins_speed_and_time_left():
    said = epoch_line(ROW, 1234.5, seconds_left=75)
    assert said == (
        "loss 0.5000  train 75.00 %  validation 70.00 %  margin 0.200  test 67.89 %  margin 0.250"
        "  class margin 81.2°  1,234 images/s  1:15 left"
    )


def test_an_epoch_that_was_not_tested_says_nothing_of_it():
    row = {key: value for key, value in ROW.items() if key not in ("validation", "test")}
    assert "test" not in epoch_line(row, 1.0)


def test_elsewhere_it_is_plain_lines(monkeypatch):
    clock = iter([100.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    lines = Lines(stream)
    lines.say("hello")
    lines.begin(epochs=5, steps=10, done=1)
    lines.step(epoch=2, step=5, values={"loss": 1.0})
    lines.epoch(ROW, images_per_second=10.0)
    lines.end()
    first, second = stream.getvalue().splitlines()
    assert first == "hello"
    assert second.startswith("epoch 2/5  loss 0.5000")
    # One epoch of this run took 30 seconds, and three are left.
    assert second.endswith("1:30 left")
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_it_is_a_bar_that_ends():
    bar = Bar()
    stream = io.StringIO()
    bar.console = bar.bar.live.console = type(bar.console)(
        file=stream, force_terminal=True, width=140
    )
    bar.begin(epochs=5, steps=10, done=1)
    values = {"loss": 1.25, "accuracy": 0.5, "sample_margin": 0.125, "images_per_second": 9876.0}
    bar.step(epoch=2, step=5, values=values)
    bar.bar.refresh()
    assert bar.bar.tasks[0].completed == 15
    bar.epoch(ROW, images_per_second=10.0)
    bar.say("[not markup]")
    bar.end()
    said = stream.getvalue()
    for text in ("epoch 2/5", "loss 1.2500", "accuracy 50.0 %", "margin 0.125", "9,876/s"):
        assert text in said
    assert "[not markup]" in said
    assert bar.bar.finished is False
    assert bar.bar.live.is_started is False


@pytest.mark.parametrize(("terminal", "kind"), [(True, Bar), (False, Lines)])
def test_a_terminal_gets_a_bar_and_a_file_gets_lines(monkeypatch, terminal, kind):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: terminal, raising=False)
    assert type(progress.default_progress()) is kind
