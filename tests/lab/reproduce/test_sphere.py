"""Cells of the kind sphere: points that move freely, and what is written down of them."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.sphere import run_sphere

SHORT = {"loss": "normface()", "scale": 20.0, "steps": 30}


@pytest.fixture(scope="module")
def found():
    return run_sphere({**SHORT, "features": 3}, seed=1)


def test_what_is_found_is_plain_and_has_what_a_ledger_keeps(found):
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == {"values", "optimum", "sphere"}
    assert found["values"].keys() == found["optimum"].keys() == {"class_margin", "sample_margin"}
    assert found["optimum"]["class_margin"] == pytest.approx(74.8585, abs=1e-3)


def test_points_are_on_the_sphere_and_labels_are_theirs(found):
    sphere = {key: torch.tensor(value) for key, value in found["sphere"].items()}
    assert sphere["prototypes"].shape == (8, 3)
    assert sphere["features"].shape == (24, 3)
    assert sphere["labels"].tolist() == [number // 3 for number in range(24)]
    for points in (sphere["prototypes"], sphere["features"]):
        torch.testing.assert_close(points.norm(dim=1), torch.ones(len(points)), atol=1e-5, rtol=0)


def test_the_margins_are_those_of_the_points(found):
    sphere = {key: torch.tensor(value).double() for key, value in found["sphere"].items()}
    prototypes, features = sphere["prototypes"], sphere["features"]
    between = (prototypes @ prototypes.T).fill_diagonal_(-1)
    angle = math.degrees(math.acos(between.max()))
    assert found["values"]["class_margin"] == pytest.approx(angle, abs=1e-3)
    cosines, labels = features @ prototypes.T, sphere["labels"].long()
    own = cosines.gather(1, labels[:, None]).squeeze(1)
    others = cosines.scatter(1, labels[:, None], -2.0).amax(1)
    assert found["values"]["sample_margin"] == pytest.approx(float((own - others).mean()), abs=1e-5)


def test_a_seed_is_one_arrangement():
    assert run_sphere(SHORT, 0) == run_sphere(SHORT, 0)
    assert run_sphere(SHORT, 0)["sphere"] != run_sphere(SHORT, 1)["sphere"]


@pytest.mark.parametrize(
    ("name", "loss"), [("LM-Softmax", "lm_softmax()"), ("ArcFace 0.5", "arcface(margin=0.5)")]
)
def test_it_is_the_toy_of_the_example(name, loss):
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "sphere.py"))
    prototypes, _ = example["train"](example["LOSSES"][name], 20.0, seeds=2, steps=60)
    own = [run_sphere({"loss": loss, "scale": 20.0, "steps": 60}, seed) for seed in range(2)]
    margins = [each["values"]["class_margin"] for each in own]
    assert margins == pytest.approx(example["margins"](prototypes), abs=1e-4)


def test_lm_softmax_comes_near_the_optimum_and_normface_does_not():
    settings = {"scale": 30.0, "steps": 600}
    ends = {
        loss: run_sphere({**settings, "loss": loss}, 0)["values"]["class_margin"]
        for loss in ("lm_softmax()", "normface()")
    }
    assert ends["lm_softmax()"] == pytest.approx(74.467, abs=0.05)
    assert ends["normface()"] < 60


@pytest.mark.slow
def test_the_recipe_ends_at_the_papers_margin_for_lm_softmax_and_in_its_order():
    recipe = recipes.load("zhou2022/fig1")
    rows = ["normface", "cosface", "arcface", "lm_softmax"]
    cells = recipe.planned(rows, ["sphere"], seeds=1)
    ends = {
        cell.row: run_sphere(cell.settings, cell.seed)["values"]["class_margin"] for cell in cells
    }
    assert ends["lm_softmax"] == pytest.approx(74.46, abs=0.02)
    assert ends["lm_softmax"] > ends["cosface"] > max(ends["normface"], ends["arcface"]) > 60


def test_all_settings_are_written_down_in_the_recipe_and_quick_cuts_the_steps():
    from dataclasses import fields

    from tammes.lab.reproduce.sphere import SphereSettings

    cells = recipes.load("zhou2022/fig1").planned(columns=["sphere"], quick=True)
    assert len(cells) == 8
    for cell in cells:
        assert cell.settings.keys() == {field.name for field in fields(SphereSettings)}
        assert cell.settings["steps"] == 50
    assert len({cell.digest for cell in cells}) == 8


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step": 5}, "sphere has no 'step'; did you mean steps?"),
        ({"steps": 0}, "steps of sphere is expected to be at least 1, got 0"),
        ({"features": 2.0}, "features of sphere is expected to be a whole number, got 2.0"),
        ({"scale": 0}, "scale of sphere is expected to be above 0, got 0"),
        ({"lr": math.nan}, "lr of sphere is expected to be a number, got nan"),
        ({"optimizer": "lion"}, "optimizer of sphere is expected to be sgd or adam, got 'lion'"),
        ({"loss": "center()"}, "sphere expects a loss without a memory, got center()"),
        ({"loss": "nromface()"}, "loss: there is no 'nromface' in 'nromface()'; did you mean"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(change, sentence):
    with pytest.raises(ValueError, match=r"sphere|loss") as error:
        run_sphere({**SHORT, **change}, 0)
    assert str(error.value).startswith(sentence)


def test_loss_and_scale_must_be_given():
    with pytest.raises(ValueError, match="sphere is expected to have scale, got loss"):
        run_sphere({"loss": "normface()"}, 0)
