"""Recipes of Zhou 2022: rows, scales and regularisers as in the paper."""

import re

import pytest
import torch
from recipe_cells import Loaded, noise

from tammes.lab.config import parse_loss
from tammes.lab.training.model import build_model


@pytest.fixture(scope="module")
def loaded():
    """Recipes by name, each read when it is asked for."""
    return Loaded("zhou2022")


TITLES = {
    "ce": "CE",
    "focal": "Focal",
    "cosface": "CosFace",
    "arcface": "ArcFace",
    "normface": "NormFace",
    "ldam": "LDAM",
    "lm_softmax": "LM-Softmax",
}


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_titles_of_rows_say_what_their_names_do(name, loaded):
    for key, row in loaded[name].rows.items():
        loss, scale, sm, zc, r = re.fullmatch(r"([a-z_]+?)(_\d+)?(_sm)?(_zc)?(_\d+)?", key).groups()
        title = TITLES[loss] + (f" (s = {scale[1:]})" if scale else "")
        title += (" + 0.5 R_sm" if sm else "") + ("*" if zc else "")
        assert row.title == title + (f", r = {r[1:]}" if r else "")


def test_table1_has_our_rows_beside_those_of_the_paper(loaded):
    recipe = loaded["table1"]
    assert len(recipe.rows) == 23
    assert {row for row, *_ in recipe.paper} == {
        row for row in recipe.rows if not row.startswith("lm_softmax")
    }


def test_what_is_plain_in_the_name_of_a_row_is_in_its_run(loaded):
    for cell in loaded["table1"].planned():
        scale = re.search(r"_(\d+)", cell.row)
        head = f"cosine(scale={scale[1]})" if scale else "linear(bias=False)"
        assert cell.config.head == head
        assert cell.config.loss.endswith("+ 0.5*sample_margin()") == cell.row.endswith("_sm")
        name = cell.row.removesuffix("_sm").split("_")[0]
        first = {"ce": "softmax", "lm": "lm_softmax"}.get(name, name)
        assert cell.config.loss.startswith(f"{first}(")


def test_the_regulariser_beside_ce_is_on_cosines(loaded):
    cell = loaded["table1"].cell("ce_sm", "mnist", 0, quick=True)
    criterion = build_model(cell.config, noise((1, 28, 28), 10), steps_per_epoch=1).model.criterion
    features, labels = torch.randn(6, criterion.head.embedding_size), torch.arange(6)
    seen = []
    for length in (1.0, 10.0):
        criterion(length * features, labels)
        seen.append(criterion.terms["sample_margin"])
    torch.testing.assert_close(*seen)
    assert -2 <= seen[0] <= 2


@pytest.mark.parametrize(("column", "classes"), [("cifar10_lt100", 10), ("cifar100_step10", 100)])
def test_the_weight_of_zero_centroid_is_that_of_the_sum_form(column, classes, loaded):
    recipe = loaded["table2"]
    rows = {row: each.values["r"] for row, each in recipe.rows.items() if "_zc" in row}
    assert sorted(rows.values()) == [1, 1, 5, 5, 5, 5, 5, 20, 20]
    for row, r in rows.items():
        cell = recipe.cell(row, column, 0, values={"s": 10})
        loss = parse_loss(cell.config.loss, counts=[2] * classes)
        weights = {term.name: weight for weight, term in loss.leaves()}
        # r |sum of w|^2 is r k^2 |mean of w|^2.
        assert weights["zero_centroid"] == r * classes**2


def test_the_dash_at_arcface_is_claimed_to_be_a_collapse(loaded):
    for name, columns in {"table1": ("cifar100",), "unstable": ("cifar100", "short")}.items():
        (claim,) = [c for c in loaded[name].claims if getattr(c, "rows", ()) == ("arcface_64",)]
        assert (claim.quantity, claim.columns, claim.at_most) == ("class_margin", columns, 5)
        assert "collapses" in claim.says
        assert not any("trains on CIFAR" in each.says for each in loaded[name].claims)
    recipe = loaded["unstable"]
    assert {"draw": "curves", "of": "prototypes.class_margin"}.items() <= recipe.figures[1].items()
    assert "arcface_64" in recipe.rows


def test_scales_are_chosen_but_that_of_ldam(loaded):
    for name, row in loaded["table2"].rows.items():
        plain_or_ldam = name in ("ce", "focal", "ldam", "ldam_zc")
        assert row.tune == ({} if plain_or_ldam else {"s": [5, 10, 20, 30]}), name


def test_a_scale_is_chosen_once_for_each_loss_and_set(loaded):
    recipe = loaded["table2"]
    trials = {
        trial.folder: trial.place for each in recipe.places() for trial in recipe.trials(*each)
    }
    losses = ("cosface", "arcface", "normface", "lm_softmax")
    assert {*trials.values()} == {
        (loss, column) for loss in losses for column in ("cifar10_lt100", "cifar100_lt100")
    }
    assert len(trials) == 4 * 2 * 4
