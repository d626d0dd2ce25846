"""The quick form of a run is the same run, short, narrow and on few images."""

import pytest

from tammes.lab.config.schema import Config
from tammes.lab.reproduce.quick import quick_config, quick_settings
from tammes.lab.reproduce.recipe_yaml import read
from tammes.lab.training.lr_schedules import learning_rate

FULL = Config(
    data="cifar100",
    loss="cosface(margin=0.2)",
    backbone="layer13",
    batch_size=128,
    epochs=50,
    lr=0.3,
    lr_schedule="steps([25, 40], 0.1)",
    warmup=5.0,
    precision="bf16",
    compile=True,
    evaluate_every=10,
    seed=7,
)


def test_what_makes_it_quick_is_changed_and_nothing_else():
    quick = quick_config(FULL, {})
    changed = {key: value for key, value in quick.to_dict().items() if FULL.to_dict()[key] != value}
    assert changed == {
        "limit": 300,
        "epochs": 2,
        "batch_size": 50,
        "backbone": "layer13(width=0.125)",
        "warmup": 0.2,
        "lr_schedule": "steps([1.0, 1.6], 0.1)",
        "precision": "fp32",
        "compile": False,
        "evaluate_every": 1,
    }


def test_a_small_batch_stays_small():
    assert quick_config(FULL.replace(batch_size=20), {}).batch_size == 20


@pytest.mark.parametrize(
    ("full", "quick"),
    [
        ("mnist_cnn(features=3)", "mnist_cnn(features=3, width=0.125)"),
        ("layer13(width=2)", "layer13(width=0.25)"),
        ("auto", "auto"),
        ("timm:resnet18", "timm:resnet18"),
    ],
)
def test_a_network_of_ours_is_an_eighth_as_wide(full, quick):
    assert quick_config(FULL.replace(backbone=full), {}).backbone == quick


@pytest.mark.parametrize(
    ("full", "quick"),
    [
        ("steps([25], [0.1])", "steps([1.0], [0.1])"),
        ("steps(at=[25, 50], factor=0.2)", "steps([1.0, 2.0], factor=0.2)"),
        ("steps([25], factor=0.2)", "steps([1.0], factor=0.2)"),
        ("cosine()", "cosine()"),
        ("log(1e-4)", "log(1e-4)"),
    ],
)
def test_steps_come_at_the_same_share_of_the_training(full, quick):
    found = quick_config(FULL.replace(lr_schedule=full), {}).lr_schedule
    assert Config(lr_schedule=found).digest == Config(lr_schedule=quick).digest


def test_the_learning_rate_of_both_forms_is_the_same_at_the_same_share():
    full, quick = learning_rate(FULL, 100), learning_rate(quick_config(FULL, {}), 100)
    for share in (0.2, 0.45, 0.55, 0.75, 0.85):
        assert quick(round(share * 200)) == pytest.approx(full(round(share * 5000)))


def test_a_recipe_may_say_what_else_is_otherwise_and_the_steps_follow():
    quick = quick_config(FULL, {"epochs": 1, "limit": 40, "lr": 0.01})
    assert (quick.epochs, quick.limit, quick.lr) == (1, 40, 0.01)
    assert (quick.lr_schedule, quick.warmup) == ("steps([0.5, 0.8], 0.1)", 0.1)


def test_quick_settings_of_a_recipe_are_filled_in_for_the_quick_form_alone():
    recipe = read(
        {
            "title": "T",
            "source": "s",
            "quick": {"head": "cosine(scale={s})"},
            "columns": {"left": {}},
            "rows": {"a": {"values": {"s": 3}, "config": {"backbone": "layer13"}}},
        },
        "small",
    )
    quick, full = (recipe.cell("a", "left", 0, quick=form).config for form in (True, False))
    assert (quick.head, quick.limit) == ("cosine(scale=3)", 300)
    assert (full.head, full.limit) == ("auto", 0)


def test_a_toy_on_the_sphere_takes_few_steps():
    assert quick_settings({"scale": 4}) == {"scale": 4, "steps": 50}
    assert quick_settings({"steps": 3000})["steps"] == 50
    assert quick_settings({"steps": 7})["steps"] == 7


def test_a_backbone_that_is_none_is_refused_with_its_cell():
    recipe = {
        "title": "T",
        "source": "s",
        "columns": {"left": {}},
        "rows": {"a": {"config": {"backbone": "layer13("}}},
    }
    with pytest.raises(ValueError, match=r"^small, row a, column left: backbone"):
        read(recipe, "small")
