"""Recipes of Liu 2020: claims, margins and training as in the released code."""

import pytest
from recipe_cells import Loaded, every_cell

from tammes.lab.config import parse_loss
from tammes.lab.reproduce.claims import Peak

NAMES = ["table6", "fig9", "sweep", "cub"]


@pytest.fixture(scope="module")
def loaded():
    """Recipes by name, each read when it is asked for."""
    return Loaded("liu2020")


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


def test_a_margin_of_minus_0_3_is_claimed_with_inner_products_alone(loaded):
    # At scale 30 it adds 9 to the logit of the own class, and nothing is left to train.
    table, figure = loaded["table6"], loaded["fig9"]
    assert [row for row, each in table.rows.items() if each.on_request] == [
        "cosine", "smoothing", "negative",
    ]  # fmt: skip
    claimed = {row for claim in table.claims for pair in claim.pairs for row in pair}
    assert claimed == {"inner", "inner_smoothing", "inner_negative"}
    assert {row for row, *_ in table.paper} == claimed
    assert all(claim.columns == ("inner",) for claim in figure.claims)
    assert {column for _, column in figure.places()} == {"inner"}


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
        assert (run.precision, run.compile) == ("bf16", True)
        if cell.column == "resnet12":
            # As mmfewshot: 92 steps in each of 200 epochs, 3,000 of them with a rising rate.
            assert (run.optimizer, run.lr, run.batch_size) == ("sgd", 0.05, 64)
            assert (run.epochs, run.lr_schedule) == (200, "steps([60, 120], 0.1)")
            assert (round(92 * run.warmup), run.warmup_start) == (2999, 0.25)
            assert run.weight_decay == 1e-4
            assert "drop_rate=0.0" in run.backbone
            assert not run.head.startswith("cosine") or run.head == "cosine(scale=10)"
        else:
            assert (run.optimizer, run.lr, run.batch_size) == ("adam", 3e-3, 256)
            assert (run.lr_schedule, run.warmup_start) == ("cosine(1e-6)", 1 / 16)
            assert run.warmup == run.epochs / 4
        assert run.whole == (name == "cub")
        assert run.classes == f"{cell.settings['split']}:base"
        assert "jitter(0.4, 0.4, 0.4)" in run.augment
        assert "zoom=1.15" in run.augment
