"""Recipes of Liu 2020: the paper's numbers are the document's, and every cell can be run."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from recipe_cells import document, every_cell, noise, steps

from tammes.lab.config import parse_loss
from tammes.lab.reproduce import judge, recipes
from tammes.lab.reproduce.claims import Better, Peak
from tammes.lab.reproduce.run import RunnerSettings, Selection, reproduce

NAMES = ["table6", "fig9", "sweep", "cub"]
TABLE6 = ["base_shot1", "base_shot5", "validation_shot1", "validation_shot5"]


@pytest.fixture(scope="module")
def loaded():
    return {name: recipes.load(f"liu2020/{name}") for name in NAMES}


# ------------------------------------------------------- numbers, read against the document


def numbers(text):
    """Means and halves of intervals in a line of a document."""
    plain = re.sub(r"\\textbf|\\pm|[${}]", lambda sign: "±" if sign[0] == "\\pm" else "", text)
    return [(float(a), float(b)) for a, b in re.findall(r"(\d+\.\d+)\s*±+\s*(\d+\.\d+)", plain)]


def test_table6_has_the_numbers_of_the_document(loaded):
    recipe = loaded["table6"]
    text = document("000").split("Smoothing\tMargin", 1)[1].split("Table 6", 1)[0]
    lines = [line for line in text.splitlines() if len(numbers(line)) == 4]
    ticks = [line.split("\t")[:2] for line in lines]
    names = {(False, False): "cosine", (True, False): "smoothing", (False, True): "negative"}
    found = {
        names[tuple("checkmark" in tick for tick in both)]: numbers(line)
        for both, line in zip(ticks, lines, strict=True)
    }
    own = {
        row: [
            (recipe.paper[row, "mini", key].mean, recipe.paper[row, "mini", key].std)
            for key in TABLE6
        ]
        for row in names.values()
    }
    assert own == found
    assert len(recipe.paper) == 12


def test_released_numbers_are_those_that_were_read(loaded):
    path = Path(__file__).resolve().parents[4] / "shared" / "recipes.md"
    if not path.exists():
        pytest.skip("needs ../shared/recipes.md, which is not there")
    text = path.read_text(encoding="utf-8")
    line = text.split("- ResNet-18, 1-/5-shot:", 1)[1].split("\n", 1)[0]
    birds = line.split("CUB ", 1)[1].split("mini→CUB", 1)[0]
    recipe = loaded["cub"]
    own = [
        recipe.released[row, "resnet18", key]
        for row in ("softmax", "cosine", "negative_softmax", "negative_cosine")
        for key in ("shot1", "shot5")
    ]
    assert [(each.mean, each.std) for each in own] == numbers(birds)
    other = [recipe.released["negative_cosine", "resnet12", key].mean for key in ("shot1", "shot5")]
    assert other == [78.54, 90.19]
    assert "78.54/90.19 CUB" in text
    assert len(recipe.released) == 10


@pytest.mark.parametrize("name", ["fig9", "sweep", "cub"])
def test_nothing_is_filled_in_that_the_document_does_not_print(name, loaded):
    assert not loaded[name].paper


# ------------------------------------------------------------------------------- claims


def test_what_is_claimed_is_so_in_the_numbers_that_were_published(loaded):
    checked = 0
    for name in ("table6", "cub"):
        recipe = loaded[name]
        published = {**recipe.paper, **recipe.released}
        for claim in recipe.claims:
            if isinstance(claim, Better):
                for column in recipe.columns:
                    for pair in claim.pairs:
                        two = [published.get((row, column, claim.quantity)) for row in pair]
                        if None not in two:
                            assert two[0].mean > two[1].mean, (claim.says, pair)
                            checked += 1
    assert checked == 12


@pytest.mark.parametrize("kind", ["cosine", "inner"])
def test_the_claims_asked_for_are_there(kind, loaded):
    recipe = loaded["sweep"]
    peaks = [
        each for each in recipe.claims if isinstance(each, Peak) and each.rows[0].startswith(kind)
    ]
    novel, base = peaks
    assert (novel.quantity, novel.peak, novel.at_most) == ("shot1", "margin", 0)
    assert (base.quantity, base.peak, base.not_before) == ("base_accuracy", "margin", "shot1")
    margins = [recipe.rows[row].values["margin"] for row in novel.rows]
    assert novel.rows == base.rows
    assert margins == sorted(margins)
    assert len(margins) >= 7
    assert {0} < {margin for margin in margins if margin >= 0}
    assert min(margins) < 0


# ------------------------------------------------------------------------------- the runs


def test_losses_of_the_sweep_are_those_of_their_rows(loaded):
    recipe = loaded["sweep"]
    for row in recipe.rows.values():
        if "margin" not in row.values:
            continue
        config = recipe.cell(row.name, "cifar", 0).config
        ((weight, term),) = parse_loss(config.loss).leaves()
        kind, margin = row.name.split("_")
        assert (weight, term.settings["margin"]) == (1.0, float(margin))
        assert row.values["margin"] == float(margin)
        expected = ("cosface", "cosine(scale=30)", "cosine")
        if kind == "inner":
            expected = ("softmax", "linear(bias=False, scale=10)", "linear")
        assert (term.name, config.head, row.values["method"]) == expected
        assert row.title.endswith(f"m = {margin.removeprefix('+')}")


def test_margins_are_chosen_among_those_of_the_sweep(loaded):
    recipe = loaded["sweep"]
    for chosen, kind in (("negative_cosine", "cosine"), ("negative_softmax", "inner")):
        rows = [row for row in recipe.rows if row.startswith(f"{kind}_-")]
        own = {recipe.cell(row, "cifar", 0).folder for row in rows}
        trials = recipe.trials(chosen, "cifar")
        assert {cell.folder for cell in trials} == own
        assert all(cell.tried["m"] < 0 for cell in trials)


def test_one_training_is_shared_by_the_table_the_figure_and_the_sweep(loaded):
    table, figure, sweep = (loaded[name] for name in ("table6", "fig9", "sweep"))
    for prefix, column, kind in (("", "cifar", "cosine"), ("inner_", "inner", "inner")):
        cells = figure.planned(columns=[column], seeds=1)
        folders = {cell.folder for cell in cells}
        folders.add(table.cell(f"{prefix}negative", "cifar", 0).folder)
        folders.add(sweep.cell(f"{kind}_-0.3", "cifar", 0).folder)
        assert len(folders) == 1
        plain = [table.cell(kind, "cifar", 0), sweep.cell(f"{kind}_0", "cifar", 0)]
        assert len({cell.folder for cell in plain}) == 1
        assert len({cell.digest for cell in cells}) == len(figure.rows) == 7


def test_heads_are_fine_tuned_as_the_released_code_does(loaded):
    for name in NAMES:
        for cell in [*every_cell(loaded[name])]:
            full = loaded[name].cell(
                cell.row, cell.column, 0,
                values={key: tried[0] for key, tried in loaded[name].tune(*cell.place).items()},
            )  # fmt: skip
            assert (full.settings["way"], full.settings["queries"]) == (5, 16)
            head = "cosine" if full.config.head.startswith("cosine") else "linear"
            assert full.settings["method"].startswith(head)
    for cell in loaded["fig9"].planned(seeds=1):
        margin = cell.row.removeprefix("tuned_").removeprefix("+")
        head = {"cifar": "cosine", "inner": "linear"}[cell.column]
        assert cell.settings["method"] == f"{head}(margin={margin})"


@pytest.mark.parametrize("name", NAMES)
def test_training_is_explicit_and_as_the_released_code_has_it(name, loaded):
    recipe = loaded[name]
    for cell in every_cell(recipe):
        tried = {key: each[0] for key, each in recipe.tune(*cell.place).items()}
        run = recipe.cell(*cell.place, 0, values=tried).config
        assert (run.optimizer, run.lr, run.batch_size) == ("adam", 3e-3, 256)
        assert (run.lr_schedule, run.warmup_start) == ("cosine(1e-6)", 1 / 16)
        assert run.warmup == run.epochs / 4
        assert (run.precision, run.compile) == ("bf16", True)
        assert run.whole == (name == "cub")
        assert run.classes == f"{cell.settings['split']}:base"
        assert "jitter(0.4, 0.4, 0.4)" in run.augment
        assert "zoom=1.15" in run.augment


def test_large_images_are_on_request_and_nothing_else_is(loaded):
    for name in NAMES:
        for column in loaded[name].columns.values():
            assert column.on_request == (column.name in ("mini", "resnet18")), column.name


@pytest.mark.parametrize("name", ["table6", "sweep"])
def test_every_kind_of_cell_trains_a_few_steps_and_stays_finite(name, loaded):
    seen = set()
    for cell in every_cell(loaded[name]):
        run = cell.config
        kind = re.sub(r"-?\d+(\.\d+)?", "#", run.loss), run.head, run.backbone
        if kind in seen:
            continue
        seen.add(kind)
        side = 64 if "224" in run.backbone else 32
        augment = run.augment.replace("size=224", "size=64")
        small = dataclasses.replace(run, image_size=None, augment=augment)
        losses, model = steps(small, noise((3, side, side), 64), 2)
        assert all(torch.isfinite(torch.tensor(losses))), (cell.place, losses)
        assert model.criterion.head.num_classes == 64
    assert len(seen) == {"table6": 8, "sweep": 3}[name]


@pytest.mark.slow
def test_rows_run_end_to_end_in_quick_form(loaded, shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("TAMMES_DATA", str(shared_data))
    chosen = [
        Selection(loaded["table6"], None, ["cifar"], 1),
        Selection(loaded["sweep"], ["cosine_-0.3", "cosine_0", "inner_0"], None, 1),
    ]
    ledgers = reproduce(
        chosen, tmp_path, quick=True, engine=RunnerSettings(workers=2), report=lambda text: None
    )
    for ledger, count in zip(ledgers, (6, 3), strict=True):
        assert len(ledger.cells) == count
        for cell in ledger.cells:
            assert cell.status == "done", cell.reason
            assert {"shot1", "validation_shot5", "base_accuracy"} <= cell.values.keys()
    assert {"base_shot1", "base_shot5"} <= ledgers[0].cells[0].values.keys()
    assert {"phi_base", "phi_novel", "p_same"} <= ledgers[1].cells[0].values.keys()
    for selection, ledger in zip(chosen, ledgers, strict=True):
        outcomes = {verdict.outcome for verdict in judge.judge(selection.recipe, ledger)}
        assert outcomes <= {"open", "leans", "fails"}
