"""Recipes of Zhou 2022: the paper's numbers are the document's, and every cell can be run."""

import re

import pytest
import torch
from recipe_cells import CLASSES, SHAPES, Loaded, document, every_cell, noise, run_quickly, steps

from tammes.lab.config import parse_loss
from tammes.lab.training.model import build_model

NAMES = ["table1", "table2", "fig1", "fig9", "unstable"]
RAN = ["table1", "table2", "fig1", "fig9", "unstable"]
"""Those whose data anybody can have."""
DASH = "—"


@pytest.fixture(scope="module")
def loaded():
    """Recipes by name, each read when it is asked for."""
    return Loaded("zhou2022")


def table(title):
    """Rows of a table of the document: what stands left of the numbers, and the numbers."""
    text = document("002").split(title, 1)[1]
    rows = {}
    for line in text.splitlines():
        first, *cells = line.replace("<b>", "").replace("</b>", "").split("\t")
        cells = [cell.strip().rstrip("°") for cell in cells]
        if cells and all(cell == DASH or re.fullmatch(r"\d+\.\d+", cell) for cell in cells):
            rows[first.replace("$", "").replace("{sm}", "sm").strip()] = [
                None if cell == DASH else float(cell) for cell in cells
            ]
        elif rows:
            return rows
    return rows


def plain(title):
    """A title without what only says how it is set."""
    return re.sub(r"[\s*]", "", title)


def published(recipe, row, columns, quantities):
    found = [recipe.paper.get((row, column, key)) for column in columns for key in quantities]
    return [None if each is None else each.mean for each in found]


def test_table1_has_every_number_of_the_paper(loaded):
    recipe, found = loaded["table1"], table("Table 1:")
    assert len(found) == 20
    titles = {plain(row.title): name for name, row in recipe.rows.items()}
    keys = ["accuracy", "class_margin", "sample_margin"]
    for title, numbers in found.items():
        name = titles[plain(title)]
        assert published(recipe, name, ["mnist", "cifar10", "cifar100"], keys) == numbers, title
    given = sum(number is not None for numbers in found.values() for number in numbers)
    assert len(recipe.paper) == given == 168


def test_table2_has_every_number_of_the_paper(loaded):
    recipe, found = loaded["table2"], table("Table 2:")
    assert len(found) == 12
    titles = {re.sub(r"\s", "", row.title): name for name, row in recipe.rows.items()}
    columns = [f"cifar10_{kind}{ratio}" for kind in ("lt", "step") for ratio in (100, 10)]
    columns += ["cifar100_lt100", "cifar100_lt10"]
    for title, numbers in found.items():
        name = titles[re.sub(r"[\s\\]", "", title)]
        assert published(recipe, name, columns, ["accuracy", "class_margin"]) == numbers, title
    assert len(recipe.paper) == 12 * 12


def test_the_sphere_has_the_margins_of_the_caption(loaded):
    text = document("002")
    caption = text[text.index("learning with the losses NormFace, CosFace") :].split("respectively")
    numbers = [float(number) for number in re.findall(r"\$(\d+\.\d+)\^", caption[0])]
    rows = ["normface", "cosface", "arcface", "lm_softmax"]
    paper = loaded["fig1"].paper
    assert [paper[row, "sphere", "class_margin"].mean for row in rows] == numbers
    assert len(paper) == 4


@pytest.mark.parametrize("name", ["fig9", "unstable"])
def test_numbers_that_stand_twice_are_the_same(name, loaded):
    assert loaded[name].paper
    assert loaded[name].paper.items() <= loaded["table1"].paper.items()


@pytest.mark.parametrize("name", ["fig1", "fig9", "unstable"])
def test_cells_that_table1_has_too_are_the_same_runs(name, loaded):
    recipe, whole = loaded[name], loaded["table1"]
    own = {cell.place: cell.digest for cell in recipe.planned() if cell.row in whole.rows}
    own = {place: digest for place, digest in own.items() if place[1] in whole.columns}
    shared = {cell.place: cell.digest for cell in whole.planned()}
    assert len(own) == {"fig1": 3, "fig9": 4, "unstable": 4}[name]
    assert own.items() <= shared.items()


def test_table1_has_the_rows_of_ours_and_no_two_rows_are_the_same_run(loaded):
    recipe = loaded["table1"]
    assert len(recipe.rows) == 23
    assert {row for row, *_ in recipe.paper} == {
        row for row in recipe.rows if not row.startswith("lm_softmax")
    }
    assert len({cell.digest for cell in recipe.planned()}) == 23 * 3


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


def test_scales_are_chosen_but_that_of_ldam(loaded):
    for name, row in loaded["table2"].rows.items():
        plain_or_ldam = name in ("ce", "focal", "ldam", "ldam_zc")
        assert row.tune == ({} if plain_or_ldam else {"s": [5, 10, 20, 30]}), name


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_trains_a_few_steps_and_stays_finite(name, loaded):
    seen = set()
    for cell in every_cell(loaded[name]):
        if cell.config is None:
            continue
        # Of what the steps depend on; the sets differ in their sizes only.
        source = cell.config.data
        shape, classes = SHAPES.get(source, (3, 64, 64)), CLASSES.get(source, 12)
        kind = cell.config.loss, cell.config.head, cell.config.backbone, shape, classes
        if kind in seen:
            continue
        seen.add(kind)
        losses, _ = steps(cell.config, noise(shape, classes))
        assert all(torch.isfinite(torch.tensor(losses))), (cell.place, losses)
    assert len(seen) == {"table1": 69, "table2": 32, "fig1": 3, "fig9": 4}.get(name, 6)


CHOSEN = {
    "table1": (["ce_sm", "arcface_64"], ["mnist", "cifar10", "cifar100"]),
    "table2": (["lm_softmax_zc", "ldam_zc"], ["cifar10_lt100", "cifar100_step10"]),
    "fig1": (["ce", "lm_softmax"], ["mnist", "sphere"]),
    "fig9": (["cosface_20", "cosface_20_sm"], ["cifar100"]),
    "unstable": (["rsm", "ce_sm"], ["mnist", "cifar100"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RAN)
def test_two_rows_run_end_to_end_in_quick_form(name, loaded, small_sets, tmp_path):
    rows, columns = CHOSEN[name]
    recipe = loaded[name]
    ledger = run_quickly(recipe, rows, columns, tmp_path)
    for cell in ledger.cells:
        assert cell.optimum["class_margin"] > cell.values["class_margin"] > 0
        assert ("histograms" in cell.kept) == (name == "fig9")
        assert ("sphere" in cell.kept) == (cell.column == "sphere")
    tuned = {place for place in recipe.places(rows, columns) if recipe.rows[place[0]].tune}
    assert {*ledger.tuned_settings()} == tuned
