"""The configuration: one flat table."""

import dataclasses
import inspect
import re

import pytest
from messages import pattern

from tammes.lab.config.schema import Config


def test_a_configuration_survives_the_way_through_plain_values():
    config = Config(loss="cosface()", lr=0.3, epochs=7)
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"epoch": 3}, "a configuration has no 'epoch'; did you mean epochs?"),
        ({"zzz": 3}, "a configuration has no 'zzz'"),
        ({"epochs": 0}, "epochs ... at least 1 ... 0"),
        ({"lr": 0.0}, "lr ... 0.0"),
        ({"lr": float("nan")}, "lr is expected to be a number, got nan"),
        ({"loss": 3}, "loss ... text ... 3"),
        ({"head_lr": -1.0}, "head_lr ... -1.0"),
        ({"fraction": 0.0}, "fraction is expected in (0, 1], got 0.0"),
        ({"validation": 1.0}, "validation ... 1.0"),
        ({"projection": -1}, "projection is expected to be at least 0, got -1"),
        (
            {"validation": 0.1, "select_epoch": "fewshot('cub')"},
            "select_epoch ... with validation, which chooses the epoch too, got validation 0.1",
        ),
        ({"optimizer": "lion"}, "optimizer ... 'lion'"),
        ({"precision": "fp8"}, "precision ... 'fp8'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(values, sentence):
    with pytest.raises(ValueError, match=pattern(sentence)):
        Config.from_dict(values)


def test_the_digest_forgets_how_a_run_is_carried_out_and_nothing_else():
    usual = Config()
    changed = {
        field.name: _other(getattr(usual, field.name), field.name)
        for field in dataclasses.fields(Config)
    }
    digests = {name: usual.replace(**{name: value}).digest for name, value in changed.items()}
    same = {name for name, digest in digests.items() if digest == usual.digest}
    how = {"name", "accelerator", "memory", "workers", "save_every", "save_steps", "loggers"}
    how |= {"mute", "save_seconds"}
    assert same == how


def _other(value, name):
    known = {"optimizer": "adam", "precision": "bf16", "accelerator": "cpu", "graphs": "on"}
    if name in known:
        return known[name]
    if name == "fraction":
        return 0.5
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + (0.25 if isinstance(value, float) else 1)
    numbers = {"test": "x", "image_size": 9, "image_width": 9}
    return "other" if isinstance(value, str) else numbers.get(name, 0.5)


@pytest.mark.parametrize(
    ("one", "two"),
    [("softmax", "softmax()"), ("cosface( margin=.20 )", "cosface(margin=0.2)")],
)
def test_the_same_loss_is_the_same_run_however_it_is_written(one, two):
    assert Config(loss=one).digest == Config(loss=two).digest
    assert Config(loss=one).loss == one


def test_runs_that_differ_in_the_seed_belong_together():
    assert Config(seed=1).group() == Config(seed=2).group()
    assert Config(lr=0.1).group() != Config(lr=0.2).group()


def test_every_field_is_documented():
    documented = set(re.findall(r"^\s{4}(\w+): ", inspect.getdoc(Config), re.MULTILINE))
    assert documented == {field.name for field in dataclasses.fields(Config)}


def test_a_run_is_called_by_its_name_or_else_by_its_loss():
    assert Config(loss="cosface()").label == "cosface()"
    assert Config(loss="cosface()", name="mine").label == "mine"
