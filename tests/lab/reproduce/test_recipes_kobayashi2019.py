"""Recipes of Kobayashi 2019: the paper's numbers are the document's, and every cell can be run."""

import dataclasses
import re

import pytest
import torch
from recipe_cells import Loaded, document, every_cell, noise, run_quickly, steps

from tammes.lab.config import parse_loss, parse_schedules
from tammes.lab.report.charts import paper_figures
from tammes.lab.reproduce.claims import Better, Bound, Course, Near
from tammes.lab.reproduce.run import Selection, reproduce

NAMES = ["table1", "table2", "table3a", "table3b", "table4", "fig3", "fig4", "discussion"]
SMALL = [name for name in NAMES if name not in ("table4", "fig4")]
"""Those that train the 13-layer network alone."""
IMAGES = {"cifar10": 50_000, "svhn": 73_257, "cifar100": 50_000, "imagenet": 1_281_167}
LAMBDAS = [f"0.{digit}" for digit in range(1, 10)]


@pytest.fixture(scope="module")
def loaded():
    """Recipes by name, each read when it is asked for."""
    return Loaded("kobayashi2019")


# ------------------------------------------------------- numbers, read against the document


def lines(title, count=None):
    """Lines of the document after a title that have several cells: what they hold."""
    text = document("004").split(title, 1)[1]
    found = [line.split("\t") for line in text.splitlines() if "\t" in line]
    return found[:count]


def number(cell):
    """Mean and deviation in a cell of the document; none for a dash."""
    found = re.fullmatch(r"(\d+\.\d+)(?:\s*(?:\$\\pm\$|±)\s*(\d+\.\d+))?", cell.strip())
    return found and (float(found[1]), None if found[2] is None else float(found[2]))


def printed(recipe, row, columns, source="paper"):
    """What a recipe says the document prints in a row."""
    numbers = getattr(recipe, source)
    found = [numbers.get((row, column, "error")) for column in columns]
    return [None if each is None else (each.mean, each.std) for each in found]


def test_table1_has_the_numbers_of_the_document(loaded):
    recipe = loaded["table1"]
    header, *rows = lines("Table 1:", 4)
    assert header[1:] == LAMBDAS
    kinds = {"u  q": "u_q", "q  u": "q_u", "tilde": "symmetric"}
    for first, *cells in rows:
        kind = next(name for sign, name in kinds.items() if sign in first)
        own = [printed(recipe, f"{kind}_{value}", ["cifar100"])[0] for value in LAMBDAS]
        assert own == [number(cell) for cell in cells], first
    assert len(recipe.paper) == len(recipe.rows) == 27


def test_table2_has_the_numbers_of_the_document(loaded):
    recipe = loaded["table2"]
    found = {}
    for first, cell in lines("Table 2:", 8)[1:]:
        smoothing = re.search(r"lambda = ([\d.]+)", first)
        word = first.split()[0]
        names = {"Softmax": "softmax", "Super-symmetry": "super_symmetry", "Ours": "divergence"}
        found[f"lsr_{smoothing[1]}" if smoothing else names[word]] = number(cell)
    own = {row: printed(recipe, row, ["cifar100"])[0] for row in recipe.rows}
    assert own == found
    assert len(recipe.paper) == 7


@pytest.mark.parametrize(
    ("name", "start", "prefix"),
    [("table3a", "Smaller-scale", "fraction"), ("table3b", "Pollution rate", "noise")],
)
def test_table3_has_the_numbers_of_the_document(name, start, prefix, loaded):
    recipe, found = loaded[name], lines(start)
    # What is left of the first line of (a), or of (b), is no row.
    header = next(cells for cells in found if cells[-1] in ("0.5",))
    rows = found[found.index(header) + 1 :][:4]
    columns = [f"{prefix}_{level}" for level in header[1:]]
    assert columns == [*recipe.columns]
    for (first, *cells), row in zip(rows, recipe.rows, strict=True):
        assert printed(recipe, row, columns) == [number(cell) for cell in cells], first
        value = re.search(r"lambda = ([\d.]+)", first)
        assert row == (f"divergence_{value[1]}" if value else "softmax")
    assert len(recipe.paper) == 20


def test_table4_has_the_numbers_of_the_document(loaded):
    recipe = loaded["table4"]
    upper, lower = (part.split("\n\n")[0] for part in halves())
    names = {"Softmax": "softmax", "Hinge": "hinge", "Modified": "modified", "LGM": "lgm",
             "LSM": "l_softmax", "Ours": "divergence"}  # fmt: skip
    own = {}
    columns = ["cifar10", "svhn", "vgg16", "vgg16_mod", "mobilenet"]
    for line in upper.splitlines():
        first, *cells = line.split("\t")
        for column, cell in zip(columns, cells, strict=True):
            own[names[first.split()[0]], column] = number(cell)
    softmax, ours = (line.split("\t") for line in lower.splitlines())
    assert softmax[3] == "Modified loss (15) + Ours ( $\\lambda = 0.3$ )"
    for row, cells in (("softmax", softmax), ("divergence", ours)):
        for column, cell in zip(("resnext50", "places"), cells[1:3], strict=True):
            own[row, column] = number(cell)
    for column, cell in zip(("vgg16_mod", "resnext50"), softmax[4:6], strict=True):
        own["modified_divergence", column] = number(cell)
    # LGM has a dash for both VGG networks.
    assert [place for place, each in own.items() if each is None] == [
        ("lgm", "vgg16"),
        ("lgm", "vgg16_mod"),
    ]
    found = {
        (row, column): (each.mean, each.std) for (row, column, _), each in recipe.paper.items()
    }
    assert found == {place: each for place, each in own.items() if each is not None}
    assert len(found) == 34


def halves():
    """Both parts of Table 4 of the document, from their first row on."""
    text = document("004").split("Table 4:", 1)[1]
    return [f"Softmax loss{part}" for part in text.split("\nSoftmax loss")[1:3]]


@pytest.mark.parametrize("name", ["fig3", "discussion"])
def test_numbers_that_stand_twice_are_the_same(name, loaded):
    assert loaded[name].paper
    assert loaded[name].paper.items() <= loaded["table2"].paper.items()


def test_released_numbers_are_those_of_the_authors(loaded):
    # From recipes.md, which read them in the README of the port.
    table2, table4 = loaded["table2"], loaded["table4"]
    assert printed(table2, "softmax", ["cifar100", "cifar10"], "released") == [
        (29.42, 0.19),
        (8.45, 0.27),
    ]
    assert printed(table2, "divergence", ["cifar100", "cifar10"], "released") == [
        (27.61, 0.09),
        (7.81, 0.20),
    ]
    large = ["vgg16_mod", "vgg16", "resnext50"]
    for row, errors in (("softmax", (22.99, 25.04, 22.42)), ("divergence", (22.09, 24.08, 22.27))):
        assert printed(table4, row, large, "released") == [(each, None) for each in errors]
    assert len(table2.released) == 4
    assert len(table4.released) == 6


@pytest.mark.parametrize("name", NAMES)
def test_what_is_claimed_of_rows_is_so_in_the_numbers_of_the_paper(name, loaded):
    recipe = loaded[name]
    for claim in recipe.claims:
        if not isinstance(claim, Better):
            assert isinstance(claim, (Near, Bound, Course))
            continue
        for column in claim.columns or recipe.columns:
            for pair in claim.pairs:
                better, than = (recipe.paper.get((row, column, "error")) for row in pair)
                if better and than:
                    assert than.mean - better.mean >= claim.by, (claim.says, column, pair)


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


# ------------------------------------------------------------------------------- the runs


def digests(recipe, column="cifar100"):
    """Runs of a recipe on CIFAR-100 with all images and right labels, by loss."""
    cells = recipe.planned(columns=[column], seeds=1)
    return {cell.config.loss: cell.digest for cell in cells}


@pytest.mark.parametrize(("name", "shared"), [("fig3", 3), ("discussion", 3), ("table4", 2)])
def test_what_another_table_has_too_is_the_same_run(name, shared, loaded):
    known, own = digests(loaded["table2"]), digests(loaded[name])
    both = [loss for loss in own if loss in known]
    assert len(both) == shared
    assert {"softmax()", "softmax() + 0.3*logit_divergence()"} <= {*both}
    for loss in both:
        assert own[loss] == known[loss], loss


def test_the_symmetric_divergence_of_table1_is_a_run_of_table2(loaded):
    (own,) = loaded["table1"].planned(["symmetric_0.3"], seeds=1)
    (known,) = loaded["table2"].planned(["divergence"], ["cifar100"], 1)
    assert own.digest == known.digest


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fig4"])
def test_no_two_cells_of_a_table_are_the_same_run(name, loaded):
    recipe = loaded[name]
    cells = [recipe.cell(*place, 0) for place in recipe.places(columns=[*recipe.columns])]
    assert len({cell.digest for cell in cells}) == len(cells)


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


def test_large_data_are_on_request_and_nothing_else_is(loaded):
    for name in NAMES:
        for column in loaded[name].columns.values():
            large = column.values.get("images") in ("imagenet", "places365")
            assert column.on_request == large, column


def test_fig4_is_a_formula_and_trains_nothing(loaded):
    recipe = loaded["fig4"]
    assert not recipe.planned()
    (figure,) = recipe.figures
    assert figure["draw"] == "formula"
    assert callable(getattr(paper_figures, figure["of"]))


# ------------------------------------------------------------------------------- training

SHAPES = {
    "cifar100": ((3, 32, 32), 100),
    "imagenet": ((3, 64, 64), 12),
    "places365": ((3, 64, 64), 12),
}
TRAINED = {
    "table1": 3,
    "table2": 8,
    "table3a": 2,
    "table3b": 2,
    "table4": 41,
    "fig3": 3,
    "discussion": 7,
}
"""How many kinds of runs a table has, apart from numbers in the loss."""


@pytest.mark.parametrize("name", TRAINED)
def test_every_kind_of_cell_trains_a_few_steps_and_stays_finite(name, loaded):
    seen = set()
    for cell in every_cell(loaded[name]):
        run = cell.config
        shape, classes = SHAPES.get(run.data, ((3, 32, 32), 10))
        loss = re.sub(r"\d+(\.\d+)?", "#", run.loss)
        kind = loss, run.head, run.backbone, run.schedules, shape, classes
        if kind in seen:
            continue
        seen.add(kind)
        # Large images are made smaller: what is tested are the texts.
        augment = run.augment.replace("size=224", "size=32")
        small = dataclasses.replace(run, image_size=None, augment=augment)
        losses, model = steps(small, noise(shape, classes), 2)
        assert all(torch.isfinite(torch.tensor(losses))), (cell.place, losses)
        assert model.criterion.head.num_classes == classes
    assert len(seen) == TRAINED[name]


CHOSEN = {
    "table1": (["u_q_0.1", "symmetric_0.3"], ["cifar100"]),
    "table2": (["super_symmetry", "divergence"], ["cifar100", "cifar10"]),
    "table3a": (["softmax", "divergence_1"], ["fraction_0.5"]),
    "table3b": (["softmax", "divergence_0.5"], ["noise_0.4"]),
    "table4": (["lgm", "l_softmax"], ["cifar100"]),
    "fig3": (["softmax", "lsr_0.1"], ["cifar100"]),
    "discussion": (["hard_bias", "center_divergence"], ["cifar100"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_two_rows_run_end_to_end_in_quick_form(name, loaded, small_sets, tmp_path):
    recipe, (rows, columns) = loaded[name], CHOSEN[name]
    ledger = run_quickly(recipe, rows, columns, tmp_path)
    for cell in ledger.cells:
        assert 0 <= cell.values["error"] <= 100
        assert len(cell.curves["train.bias"]) == len(cell.curves["epoch"]) == 2


def test_a_recipe_of_a_formula_alone_is_reproduced_at_once(loaded, tmp_path):
    (ledger,) = reproduce([Selection(loaded["fig4"])], tmp_path, quick=True, report=list)
    assert ledger.cells == []
