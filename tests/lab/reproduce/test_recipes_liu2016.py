"""Recipes of Liu 2016: the margin of a row, the annealing of lambda, the filters."""

import re

import pytest
import torch
from recipe_cells import Loaded, noise, steps

from tammes.lab.config import parse_loss, parse_schedules

NAMES = ["mnist", "cifar", "fig6", "fig7"]


@pytest.fixture(scope="module")
def loaded():
    """Recipes by name, each read when it is asked for."""
    return Loaded("liu2016")


@pytest.mark.parametrize("name", NAMES)
def test_lambda_begins_at_1000_and_is_below_a_hundredth_in_the_end(name, loaded):
    annealed = 0
    for cell in loaded[name].planned(seeds=1):
        config = cell.config
        schedule = parse_schedules(config.schedules, steps_per_epoch=100).get("blend")
        if cell.row == "m1":
            assert (config.loss, schedule) == ("softmax()", None)
            continue
        blend = schedule.at(torch.tensor([0.0, 30.0 * config.epochs, 100.0 * config.epochs]))
        assert blend[0] == pytest.approx(1000)
        # It is no jump: at a third of the training it is under way.
        assert 1 < blend[1] < 200
        floor = 5.0 if cell.row == "m4_floor" else 0.0
        assert blend[2] == pytest.approx(floor, abs=0.01)
        annealed += 1
    assert annealed == {"mnist": 6, "cifar": 12, "fig6": 3, "fig7": 4}[name]


def test_m_is_that_of_the_row(loaded):
    for name in ("mnist", "cifar", "fig6"):
        for cell in loaded[name].planned(seeds=1):
            ((_, term),) = parse_loss(cell.config.loss).leaves()
            assert term.settings.get("margin") == (int(cell.row[1]) if cell.row != "m1" else 0)
            assert cell.config.head == "linear(bias=False)"


def test_figure_7_has_the_filters_it_says(loaded):
    recipe = loaded["fig7"]
    for name, row in recipe.rows.items():
        config = recipe.cell(name, "cifar100", 0).config
        _, model = steps(config.replace(loss="softmax()", schedules=""), noise((3, 32, 32), 2), 0)
        filters = [model.backbone.get_submodule(f"stage{n}")[0].out_channels for n in (1, 2, 3)]
        assert filters == [int(each) for each in re.findall(r"\d+", row.title)]
        assert filters[0] == row.values["filters"]
