"""Recipes of Kobayashi 2019: claims, losses, schedules and training as in the paper."""

import pytest
import torch
from recipe_cells import Loaded

from tammes.lab.config import parse_loss, parse_schedules
from tammes.lab.report.charts import paper_figures
from tammes.lab.reproduce.claims import Bound, Course
from tammes.lab.reproduce.run import Selection, reproduce

NAMES = ["table1", "table2", "table3a", "table3b", "table4", "fig3", "fig4", "discussion"]
SMALL = [name for name in NAMES if name not in ("table4", "fig4")]
"""Those that train the 13-layer network alone."""
IMAGES = {"cifar10": 50_000, "svhn": 73_257, "cifar100": 50_000, "imagenet": 1_281_167}


@pytest.fixture(scope="module")
def loaded():
    """Recipes by name, each read when it is asked for."""
    return Loaded("kobayashi2019")


def test_the_claims_asked_for_are_there(loaded):
    first, second, *_ = loaded["table2"].claims
    assert (first.pairs, first.by) == ((("divergence", "softmax"),), 1.0)
    assert (second.near, second.within) == ("released", 0.5)
    assert second.rows == ("softmax", "divergence")
    bounds = [each for each in loaded["discussion"].claims if isinstance(each, Bound)]
    assert [(each.rows, each.at_least) for each in bounds] == [
        (("hard_bias", "crammer_singer"), 90)
    ]
    (course,) = (each for each in loaded["fig3"].claims if isinstance(each, Course))
    assert (course.falls, course.falls_then_rises) == (("softmax",), ("lsr_0.1", "divergence"))
    assert course.curve in loaded["fig3"].curves


@pytest.mark.parametrize("name", SMALL)
def test_the_13_layer_network_is_trained_as_the_paper_says(name, loaded):
    for cell in loaded[name].planned(seeds=1):
        run = cell.config
        given = run.backbone, run.batch_size, run.weight_decay, run.momentum, run.epochs
        assert given == ("layer13", 128, 1e-4, 0.9, 50)
        assert (run.lr, run.lr_schedule) == (0.1, "log(1e-4, per='epoch')")
        assert not run.nesterov
        assert run.optimizer == "sgd"
    assert loaded[name].seeds == 3


def test_degraded_sets_are_those_of_their_columns(loaded):
    for name, fields in (("table3a", "fraction"), ("table3b", "noise")):
        for cell in loaded[name].planned(seeds=1):
            level = cell.column.partition("_")[2]
            found = getattr(cell.config, fields)
            assert str(found) == (level if name == "table3a" else f"symmetric({level})")
            other = cell.config.noise if name == "table3a" else cell.config.fraction
            assert other in ("none", 1.0)


@pytest.mark.parametrize(
    ("row", "weights"),
    [
        ("softmax", {"softmax": 1.0}),
        ("hinge", {"hinge": 1.0}),
        ("modified", {"softmax": 1.0}),
        ("lgm", {"large_margin_gaussian": 1.0}),
        ("l_softmax", {"l_softmax": 1.0}),
        ("divergence", {"softmax": 1.0, "logit_divergence": 0.3}),
        ("modified_divergence", {"softmax": 1.0, "logit_divergence": 0.3}),
    ],
)
def test_losses_of_table4_are_those_of_their_rows(row, weights, loaded):
    loss = parse_loss(loaded["table4"].cell(row, "cifar100", 0).config.loss)
    leaves = list(loss.leaves())
    assert {term.name: weight for weight, term in leaves} == weights
    if row.startswith("modified"):
        assert leaves[0][1].settings["margin"] == 1


def test_losses_of_table1_are_those_of_their_rows(loaded):
    for cell in loaded["table1"].planned(seeds=1):
        (first, softmax), (weight, term) = parse_loss(cell.config.loss).leaves()
        kind, _, value = cell.row.rpartition("_")
        assert (first, softmax.name, term.name) == (1.0, "softmax", "logit_divergence")
        assert (term.settings["kind"], weight) == (kind, float(value))


@pytest.mark.parametrize("column", ["cifar10", "svhn", "cifar100", "vgg16", "vgg16_mod"])
def test_schedules_of_table4_end_where_they_should_however_long_the_training_is(column, loaded):
    recipe = loaded["table4"]
    runs = {row: recipe.cell(row, column, 0).config for row in ("lgm", "l_softmax")}
    per_epoch = -(-IMAGES[runs["lgm"].data] // runs["lgm"].batch_size)
    moments = torch.tensor([0.0, 1 / 12, 1.0]) * per_epoch * runs["lgm"].epochs
    found = {
        row: parse_schedules(run.schedules, steps_per_epoch=per_epoch) for row, run in runs.items()
    }
    start, twelfth, end = found["lgm"]["margin"].at(moments).tolist()
    assert start == pytest.approx(0.1)
    assert twelfth == pytest.approx(0.3, abs=0.01)
    assert end == pytest.approx(0.3)
    start, _, end = found["l_softmax"]["blend"].at(moments).tolist()
    assert start == 1000
    # As in the cifar10+ example, after its 30,000 iterations.
    assert end == pytest.approx(1000 * (1 + 1e-5 * 30_000) ** -45, rel=0.03)
    assert end < 0.01
    assert runs["lgm"].head_lr == 2 * runs["lgm"].lr


def test_fig4_is_a_formula_and_trains_nothing(loaded):
    recipe = loaded["fig4"]
    assert not recipe.planned()
    (figure,) = recipe.figures
    assert figure["draw"] == "formula"
    assert callable(getattr(paper_figures, figure["of"]))


def test_a_recipe_of_a_formula_alone_is_reproduced_at_once(loaded, tmp_path):
    (ledger,) = reproduce([Selection(loaded["fig4"])], tmp_path, quick=True, report=list)
    assert ledger.cells == []
