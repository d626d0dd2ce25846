"""Recipes of Kobayashi 2024: the paper's numbers are the document's, and every cell can be run."""

import dataclasses
import re

import pytest
import torch
from recipe_cells import document, every_cell, noise, steps

from tammes.lab import backbones
from tammes.lab.config import parse_loss
from tammes.lab.fewshot import class_lists
from tammes.lab.reproduce import judge, recipes
from tammes.lab.reproduce.claims import Better, Near
from tammes.lab.reproduce.run import RunnerSettings, Selection, reproduce

NAMES = ["cifar", "cub", "tiered", "mini", "inat", "spectral"]
SIX = ["way64", "way32", "way16", "way8", "way4", "random"]
ROWS = {
    "SCE": "sce", "BCE": "bce", "NCA": "nca", "Proto": "proto",
    "SCE+NCA": "sce+nca", "SCE+Proto": "sce+proto",
    "BCE+NCA": "bce+nca", "BCE+Proto": "bce+proto",
    "SCE⊕NCA": "sce_direct_nca", "SCE⊕Proto": "sce_direct_proto",
    "BCE⊕NCA": "bce_direct_nca", "BCE⊕Proto": "bce_direct_proto",
}  # fmt: skip
SPECTRAL = {"SCE⊕NCA": "sce_spectral_nca", "SCE⊕Proto": "sce_spectral_proto"}
LOSSES = {
    "sce": ["softmax"], "bce": ["bce"], "nca": ["nca"], "proto": ["proto"],
}  # fmt: skip
CLASSES = {"cifar": 64, "cub": 100, "tiered": 351, "mini": 64, "inat": 908, "spectral": 64}


@pytest.fixture(scope="module")
def loaded():
    return {name: recipes.load(f"kobayashi2024/{name}") for name in NAMES}


# ------------------------------------------------------- numbers, read against the document


def pairs(text):
    """1-shot and 5-shot accuracies in a line of the document."""
    return [(float(one), float(five)) for one, five in re.findall(r"([\d.]+), ([\d.]+)", text)]


def method(cell):
    """What a method is called, whatever the converter made of its signs."""
    text = re.sub(r"\(.*|</?b>|\\text|\\tilde|[${}\s]|_p", "", cell)
    return text.replace("\\oplus", "⊕")


def table(text, width, names):
    """Numbers by row; a line of the document has a method and ``width`` pairs of them."""
    found = {}
    for line in text.splitlines():
        first, _, rest = line.partition("\t")
        if method(first) in names and len(pairs(rest)) == width:
            assert names[method(first)] not in found
            found[names[method(first)]] = pairs(rest)
    return found


def printed(recipe, columns):
    """What a recipe says that the document prints."""
    return {
        row: [
            tuple(recipe.paper[row, column, key].mean for key in ("shot1", "shot5"))
            for column in columns
        ]
        for row in {row: None for row, _, _ in recipe.paper}
    }


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("cub", "\nCUB200 few-shot\t", "\nCifar100 few-shot"),
        ("cifar", "\nCifar100 few-", "Table C"),
    ],
)
def test_tables_b_and_c_have_the_numbers_of_the_document(name, start, end, loaded):
    text = document("001").split("Table B", 1)[1]
    found = table(text.split(start, 1)[1].split(end, 1)[0], 6, ROWS)
    assert len(found) == 12
    assert printed(loaded[name], SIX) == found
    assert [*found] == [*loaded[name].rows]


def test_the_rows_that_survive_have_the_numbers_of_the_document(loaded):
    text = document("001").split("mini-ImageNet\n", 1)[1].split("\nCUB200", 1)[0]
    # Two methods may be in one line, so cut before each.
    cut = re.sub(r"([SB]CE ?[+⊕](?:NCA|Proto)) ", r"\n\1\t", text)
    found = table(cut, 6, ROWS)
    assert printed(loaded["tiered"], SIX) == found
    assert [*found] == [*loaded["tiered"].rows]
    assert found["sce_direct_nca"][1] == (72.20, 86.50)


def test_table_d_has_the_numbers_of_the_document(loaded):
    text = document("001").split("(b) Performance", 1)[1]
    found = table(text, 4, {**ROWS, **SPECTRAL})
    assert printed(loaded["inat"], ["way256", "way128", "way64", "random"]) == found
    assert [*found] == [*loaded["inat"].rows]


@pytest.mark.parametrize("name", ["cifar", "cub", "tiered"])
def test_the_best_of_six_is_that_of_the_best_1_shot_accuracy(name, loaded):
    recipe = loaded[name]
    for row, cells in printed(recipe, SIX).items():
        first = max(one for one, _ in cells)
        fives = [five for one, five in cells if one == first]
        assert recipe.paper[row, "best", "shot1"].mean == first
        found = recipe.paper.get((row, "best", "shot5"))
        # Where two are equally good, the document does not say which is meant.
        assert (None if found is None else found.mean) == (fives[0] if len(fives) == 1 else None)


def test_numbers_at_84_pixels_are_those_of_the_same_batches(loaded):
    recipe = loaded["cifar"]
    same = printed(recipe, ["way32", "way16"])
    assert printed(recipe, ["way32_84", "way16_84"]) == same


def test_what_is_lost_is_not_filled_in(loaded):
    assert not loaded["mini"].paper
    assert "lost" in loaded["mini"].summary
    assert not loaded["spectral"].paper


def test_batches_are_those_of_table_a_and_d(loaded):
    text = document("001")
    for name in ("cifar", "mini", "tiered", "cub", "inat"):
        size = 128 if name == "cub" else 512
        recipe = loaded[name]
        for column in recipe.columns.values():
            given = re.fullmatch(
                r"episodes\(way=(\d+), shot=(\d+)\)", column.values.get("sampler", "")
            )
            if given:
                assert int(given[1]) * int(given[2]) == size
                assert column.name.startswith(f"way{given[1]}")
                assert f"{given[1]}-way {given[2]}-shot" in column.title
        assert recipe.config["batch_size"] == size
    for printed_ in ("64-way 2-shot", "256-way 2-shot", "128-way 4-shot"):
        assert printed_ in text


# ------------------------------------------------------------------------------- claims


def test_what_is_claimed_is_so_in_the_numbers_of_the_paper(loaded):
    checked = 0
    for recipe in loaded.values():
        for claim in recipe.claims:
            if isinstance(claim, Near):
                continue
            assert isinstance(claim, Better)
            for column in claim.columns or recipe.columns:
                for pair in claim.pairs:
                    better, than = (recipe.paper.get((r, column, claim.quantity)) for r in pair)
                    if better and than:
                        assert better.mean - than.mean >= claim.by, (claim.says, column, pair)
                        checked += 1
    assert checked == 34


def test_the_claims_asked_for_are_there(loaded):
    first, second, near, *_ = loaded["cifar"].claims
    assert first.pairs == (("sce_direct_nca", "sce+nca"),)
    assert second.pairs == (("sce_direct_proto", "sce+proto"),)
    for claim in (first, second):
        assert (claim.quantity, claim.by) == ("shot1", 0.0)
        assert {"way32", "way16"} <= {*claim.columns}
    assert (near.near, near.within, near.columns) == ("paper", 2.0, ("way32", "way16"))
    assert near.rows == ("sce", "nca", "sce+nca", "sce_direct_nca")


# ------------------------------------------------------------------------------- the runs


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_their_rows(name, loaded):
    recipe = loaded[name]
    known = {"sce": "softmax", "bce": "bce", "nca": "nca", "proto": "proto"}
    for row in recipe.rows.values():
        loss = parse_loss(recipe.cell(row.name, next(iter(recipe.columns)), 0).config.loss)
        words = re.findall(r"SCE|BCE|NCA|Proto", row.title)
        assert [term.name for _, term in loss.leaves()] == [known[word.lower()] for word in words]
        assert {weight for weight, _ in loss.leaves()} == {1.0}
        within = [term.within for _, term in loss.leaves()]
        assert (within[-1] is not None) == ("⊕" in row.title)
        assert bool(row.config.get("watch")) == (len(words) == 2)


def test_spectral_sums_have_the_exponents_of_the_paper(loaded):
    recipe = loaded["spectral"]
    exponents = [row.values["p"] for row in recipe.rows.values() if "p" in row.values]
    assert exponents == 2 * [0.1, 0.2, 0.3, 0.4, 0.5]
    for row in recipe.rows.values():
        if "p" in row.values:
            config = recipe.cell(row.name, "d64", 0).config
            assert f"p={row.values['p']})" in config.loss
            assert row.name.endswith(f"_{row.values['p']}")
            assert f"p = {row.values['p']}" in row.title
    for row in ("sce_spectral_nca", "sce_spectral_proto"):
        assert "p=0.5" in loaded["inat"].cell(row, "way64", 0).config.loss


@pytest.mark.parametrize("name", NAMES)
def test_training_is_explicit_and_on_all_images_of_base_classes(name, loaded):
    recipe = loaded[name]
    for place in recipe.places(columns=[*recipe.columns]):
        tried = recipe.trials(*place)
        cell = recipe.cell(*place, 0, values=tried[0].tried if tried else None)
        run = cell.config
        assert cell.kind == "fewshot"
        assert run.whole
        assert run.classes == f"{cell.settings['split']}:base"
        assert run.head == "linear(bias=False)"
        if cell.column == "omniglot":
            # For a CPU.
            expected = ("adam", 0.003, "conv4(width=0.5)", "fp32", False)
        else:
            assert (run.momentum, run.weight_decay) == (0.9, 5e-4)
            expected = ("sgd", 0.1, run.backbone, "bf16", True)
            assert run.backbone.startswith("resnet12_basic")
        found = (run.optimizer, run.lr, run.backbone, run.precision, run.compile)
        assert found == expected
        settings = cell.settings
        assert (settings["way"], settings["queries"]) == (5, 15)
        assert (settings["shots"], settings["episodes"]) == ([1, 5], 10_000)
        assert settings["method"].startswith("l2")
    needed = {"backbone", "augment", "batch_size", "epochs", "lr_schedule", "precision", "sampler"}
    assert needed <= recipe.config.keys()


def test_the_best_of_six_is_chosen_among_the_runs_of_the_six_columns(loaded):
    recipe = loaded["cifar"]
    for row in recipe.rows:
        trials = {cell.digest for cell in recipe.trials(row, "best")}
        cells = {recipe.cell(row, column, 0).digest for column in SIX}
        assert trials == cells
        assert len(cells) == 6


def test_large_data_and_what_the_paper_does_not_have_are_on_request_and_nothing_else(loaded):
    ours = ("_84", "_long", "_crop8", "_crop30")
    for name in NAMES:
        for column in loaded[name].columns.values():
            asked = name in ("tiered", "mini", "inat") or column.name.endswith(ours)
            assert column.on_request == asked, (name, column.name)


def test_features_are_no_more_than_classes_where_spectral_sums_are_needed(loaded):
    recipe = loaded["spectral"]
    for cell in recipe.planned(columns=["d64", "d32"], seeds=1):
        size = int(re.search(r"features=(\d+)", cell.config.backbone)[1])
        assert size <= CLASSES["spectral"]
        assert str(size) == cell.column[1:]
    own = recipe.columns["omniglot"].config["backbone"]
    assert backbones.build(own, shape=(1, 28, 28)).num_features == 32
    assert len(class_lists.read("omniglot").base) > 32


# ------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["cifar", "spectral", pytest.param("cub", marks=pytest.mark.slow)])
def test_every_loss_trains_a_few_steps_and_stays_finite(name, loaded):
    seen = set()
    for cell in every_cell(loaded[name]):
        run = cell.config
        kind = re.sub(r"p=[\d.]+", "p=#", run.loss)
        if kind in seen:
            continue
        seen.add(kind)
        augment = run.augment.replace("size=84", "size=32")
        small = dataclasses.replace(run, image_size=None, augment=augment)
        images = noise((3, 32, 32), CLASSES[name])
        # Two of each of six classes.
        order = images.labels.argsort(stable=True)
        losses, model = steps(small, images.subset(order), 2)
        assert all(torch.isfinite(torch.tensor(losses))), (cell.place, losses)
        assert model.criterion.head.num_classes == CLASSES[name]
    assert len(seen) == {"cifar": 12, "cub": 12, "spectral": 7}[name]


@pytest.mark.slow
def test_two_rows_run_end_to_end_in_quick_form(loaded, shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("TAMMES_DATA", str(shared_data))
    recipe, rows = loaded["cifar"], ["nca", "sce_direct_nca"]
    (ledger,) = reproduce(
        [Selection(recipe, rows, ["way32", "way16", "best"], 1)],
        tmp_path,
        quick=True,
        engine=RunnerSettings(workers=2),
        report=lambda text: None,
    )
    assert len(ledger.cells) == 6
    for cell in ledger.cells:
        assert cell.status == "done", cell.reason
        assert 0 <= cell.values["shot1"] <= 100
        assert {"shot5", "validation_shot1", "validation_shot5"} <= cell.values.keys()
        assert "base_accuracy" not in cell.values
    assert len(ledger.tuned["nca/best"]["tried"]) == 6
    (followed,) = ledger.of("sce_direct_nca", "way32")
    assert max(followed.curves["gradients.cosine"]) < 1e-5
    outcomes = {verdict.outcome for verdict in judge.judge(recipe, ledger)}
    assert outcomes <= {"open", "leans", "fails"}
