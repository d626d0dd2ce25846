"""Cells that train on base classes and recognise others, from the recipe to the ledger."""

import json
from dataclasses import replace

import pytest
import torch
from reproduce_work import in_this_process

from tammes.lab.cli.main import main
from tammes.lab.config.schema import Config
from tammes.lab.fewshot import recipe_cells
from tammes.lab.fewshot.class_lists import load_classes
from tammes.lab.fewshot.episodes import draw
from tammes.lab.fewshot.protocol import accuracies, cl2n, l2
from tammes.lab.fewshot.recipe_cells import FewShotSettings, evaluate_run, find_results
from tammes.lab.records.run_folder import Run, write_tensors
from tammes.lab.reproduce import run as module
from tammes.lab.reproduce.collect import collect_entry
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipe_yaml import read
from tammes.lab.reproduce.run import RunnerSettings, Selection, reproduce, run_cell
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.model import load_model
from tammes.metrics.functional import discriminability

PARTS = {"base": ["1", "3", "5", "7"], "validation": ["0", "2", "4"], "novel": ["6", "8", "9"]}
EPISODES = {"way": 3, "shots": [1, 5], "queries": 4, "episodes": 60}


def recipe_of(lists, **changes):
    given = {
        "title": "Tiny",
        "source": "ours",
        "seeds": 1,
        "quantities": ["shot1", "shot5", "validation_shot1", "base_accuracy", "phi_novel"],
        "config": {
            "data": "digits",
            "classes": f"{lists}:base",
            "backbone": "mnist_cnn(width=0.125)",
            "head": "cosine(scale=10)",
            "augment": "none",
            "batch_size": 64,
            "epochs": 1,
            "lr": 0.05,
        },
        "settings": {**EPISODES, "split": str(lists), "method": "l2, cosine(passes=3)"},
        "columns": {
            "near": {"settings": {"analyse": True}},
            "tuned": {
                "settings": {
                    "method": "cosine(margin={fine}, passes=3)",
                    "parts": ["novel", "base"],
                },
                "values": {"fine": 0.1},
            },
            "choice": {"tune": {"sampler": ["random()", "episodes(way=3, shot=4)"]}},
        },
        "rows": {
            "plain": {
                "kind": "fewshot",
                "config": {"loss": "cosface(margin=0)"},
                "overrides": {"choice": {"sampler": "{sampler}"}},
            },
            "whole": {
                "kind": "fewshot",
                "config": {"loss": "cosface(margin=0)", "whole": True},
                "settings": {"analyse": False},
                "columns": ["near"],
            },
            "chosen": {
                "kind": "fewshot",
                "config": {"loss": "cosface(margin={m})"},
                "tune": {"m": [-0.2, 0]},
                "columns": ["near"],
            },
        },
    }
    return read({**given, **changes}, "tiny")


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    path = tmp_path_factory.mktemp("lists") / "lists.json"
    path.write_text(json.dumps(PARTS))
    return path


def run_all(recipe, out, **more):
    """Ledger, and the names of the cells that were run; here, where nothing has to be started."""
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_cells", in_this_process(ran, run_cell))
        (ledger,) = reproduce([Selection(recipe)], out, report=lambda text: None, **more)
    return ledger, ran


@pytest.fixture(scope="module")
def done(lists, tmp_path_factory):
    """Everything of the recipe, run once: recipe, ledger, and its folder."""
    out = tmp_path_factory.mktemp("out")
    recipe = recipe_of(lists)
    ledger, _ = run_all(recipe, out)
    return recipe, ledger, out


def folder_of(done, row, column, **values):
    recipe, ledger, out = done
    values = values or ledger.tuned_settings().get((row, column), {})
    return out / "runs" / recipe.cell(row, column, 0, values=values).folder


def entry_of(done, row, column):
    (found,) = done[1].of(row, column)
    return found


def test_every_cell_is_done(done):
    places = {(entry.row, entry.column): entry.status for entry in done[1].cells}
    assert places == dict.fromkeys(done[0].places(), "done")


@pytest.mark.parametrize(
    ("column", "part", "method", "prefix"),
    [
        ("near", "novel", "l2", ""),
        ("near", "validation", "l2", "validation_"),
        ("tuned", "novel", "cosine(margin=0.1, passes=3)", ""),
    ],
)
def test_accuracies_are_those_of_the_command(done, lists, capsys, column, part, method, prefix):
    run = folder_of(done, "plain", column)
    words = ["evaluate", "fewshot", str(run), "--split", f"{lists}:{part}", "--data", "digits"]
    words += ["--way", "3", "--queries", "4", "--episodes", "60", "--method", method, "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["shot"] for row in rows] == [1, 5]
    entry = entry_of(done, "plain", column)
    for row in rows:
        key = f"{prefix}shot{row['shot']}"
        assert entry.values[key] == pytest.approx(100 * row["accuracy"], rel=1e-6)
        halves = entry.kept["fewshot"]["intervals"]
        assert halves[key] == pytest.approx(100 * row["half"], rel=1e-3)


def test_the_first_method_is_in_the_table_and_the_others_are_kept(done):
    entry = entry_of(done, "plain", "near")
    rows = entry.kept["fewshot"]["rows"]["novel"]
    named = {(row["method"], row["shot"]): row["accuracy"] for row in rows}
    assert {method for method, _ in named} == {"l2", "cosine(passes=3)"}
    assert entry.values["shot1"] == pytest.approx(100 * named["l2", 1], rel=1e-6)
    assert named["l2", 1] != named["cosine(passes=3)", 1]
    assert entry.kept["fewshot"]["settings"]["episodes"] == 60


def test_base_accuracy_is_that_on_the_test_images_of_the_base_classes(done):
    entry = entry_of(done, "plain", "near")
    final = Run(folder_of(done, "plain", "near")).final
    assert entry.values["base_accuracy"] == pytest.approx(100 * final["test"]["accuracy"], rel=1e-6)
    assert entry.values["base_accuracy"] == entry.values["accuracy"]


def test_episodes_of_base_classes_are_of_their_test_images(done):
    entry = entry_of(done, "plain", "tuned")
    assert {"base_shot1", "base_shot5"} <= entry.values.keys()
    assert "validation_shot1" not in entry.values
    # Few-shot over three of four classes it was trained on is easier than over others.
    assert entry.values["base_shot5"] > entry.values["shot5"]


def test_distances_are_measured_where_it_is_asked_for(done):
    keys = {
        f"{what}_{part}" for what in ("d_intra", "d_inter", "phi") for part in ("base", "novel")
    }
    values = entry_of(done, "plain", "near").values
    assert keys | {"p_same"} <= values.keys()
    run = Run(folder_of(done, "plain", "near"))
    novel = load_classes("digits", PARTS["novel"])
    model = load_model(run)
    with torch.no_grad():
        features = model.features(novel.pixels)
        assigned = model.criterion.logits(features).argmax(1)
    tested = run.tensors("embeddings")
    sets = {"base": (tested["features"], tested["labels"]), "novel": (features, novel.labels)}
    for part, (points, labels) in sets.items():
        found = discriminability(points, labels, distinct=True).base
        assert values[f"d_intra_{part}"] == pytest.approx(float(found.intra), rel=1e-5)
        assert values[f"d_inter_{part}"] == pytest.approx(float(found.inter), rel=1e-5)
        ratio = values[f"d_inter_{part}"] / values[f"d_intra_{part}"]
        assert values[f"phi_{part}"] == pytest.approx(ratio, rel=1e-5)
    shares = []
    for label in range(3):
        counts = assigned[novel.labels == label].bincount().double()
        shares.append(float((counts * (counts - 1)).sum() / (counts.sum() * (counts.sum() - 1))))
    assert values["p_same"] == pytest.approx(sum(shares) / 3, rel=1e-5)
    assert not keys & entry_of(done, "plain", "tuned").values.keys()


def test_what_was_trained_on_is_not_called_a_test(done):
    values = entry_of(done, "whole", "near").values
    tested = {"accuracy", "error", "sample_margin", "bias", "base_accuracy"}
    assert tested <= entry_of(done, "plain", "near").values.keys()
    assert not tested & values.keys()
    assert {"shot1", "validation_shot1", "train_error"} <= values.keys()
    assert not {"phi_base", "d_intra_base", "d_inter_base", "p_same"} & values.keys()
    curves = entry_of(done, "whole", "near").curves
    assert "train.loss" in curves
    assert "test.accuracy" not in curves


def test_one_run_is_looked_at_in_several_ways(done):
    near, tuned = (folder_of(done, "plain", column) for column in ("near", "tuned"))
    assert near == tuned
    kept = json.loads((near / recipe_cells.FILE).read_text())
    settings = [each["settings"]["method"] for each in kept.values()]
    assert settings.count("cosine(margin=0.1, passes=3)") == 1
    assert settings.count("l2, cosine(passes=3)") == 2
    digests = {entry_of(done, "plain", column).digest for column in ("near", "tuned")}
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("row", "column", "name", "tried"),
    [
        ("chosen", "near", "m", [-0.2, 0]),
        ("plain", "choice", "sampler", ["random()", "episodes(way=3, shot=4)"]),
    ],
)
def test_settings_are_chosen_by_one_shot_episodes_of_validation_classes(
    done, row, column, name, tried
):
    recipe, ledger, out = done
    found = ledger.tuned[f"{row}/{column}"]
    assert [each[name] for each in found["tried"]] == tried
    for trial, each in zip(recipe.trials(row, column), found["tried"], strict=True):
        # No image is held out for it: it is the run that is used.
        assert trial.config.validation == 0
        kept = find_results(
            Run(out / "runs" / trial.folder), FewShotSettings.from_dict(trial.settings)
        )
        assert each["accuracy"] == pytest.approx(
            100 * kept["measures"]["validation_shot1"], abs=1e-3
        )
    best = max(found["tried"], key=lambda each: each["accuracy"])
    assert found[name] == best[name]
    accuracy = entry_of(done, row, column).values["validation_shot1"]
    assert accuracy == pytest.approx(best["accuracy"], abs=1e-3)


def test_the_same_again_runs_nothing(done):
    recipe, ledger, out = done
    again, ran = run_all(recipe, out)
    assert not ran
    assert {(e.row, e.column): e.values for e in again.cells} == {
        (e.row, e.column): e.values for e in ledger.cells
    }


def copied(done, path):
    """The folder of one run, to be changed."""
    import shutil

    run = folder_of(done, "plain", "near")
    shutil.copytree(run, path / "runs" / run.name)
    return path / "runs" / run.name


def small(done, lists):
    """A part of the recipe: one cell, whose run is there."""
    recipe = recipe_of(lists)
    return replace(
        recipe, rows={"plain": recipe.rows["plain"]}, columns={"near": recipe.columns["near"]}
    )


def test_a_run_that_was_not_looked_at_yet_is_not_trained_again(done, lists, tmp_path):
    run = copied(done, tmp_path)
    (run / recipe_cells.FILE).unlink()
    before = (run / "model.safetensors").stat().st_mtime_ns
    ledger, ran = run_all(small(done, lists), tmp_path)
    assert ran == ["plain, near, seed 0"]
    assert (run / "model.safetensors").stat().st_mtime_ns == before
    (found,) = ledger.cells
    assert found.values == entry_of(done, "plain", "near").values


def test_what_fails_after_the_training_is_said_and_tried_again(done, lists, tmp_path):
    run = copied(done, tmp_path)
    (run / recipe_cells.FILE).unlink()
    (run / "model.safetensors").rename(tmp_path / "model")
    ledger, _ = run_all(small(done, lists), tmp_path)
    (found,) = ledger.cells
    assert found.status == "failed"
    assert "the run has no model.safetensors" in found.reason
    assert not found.values
    (tmp_path / "model").rename(run / "model.safetensors")
    ledger, ran = run_all(small(done, lists), tmp_path)
    (found,) = ledger.cells
    assert len(ran) == 1
    assert found.status == "done"
    assert not (run / "failure.json").exists()


def test_a_ledger_that_is_gone_is_written_anew(done, lists, tmp_path):
    copied(done, tmp_path)
    ledger, ran = run_all(small(done, lists), tmp_path)
    assert not ran
    assert ledger.cells[0].values == entry_of(done, "plain", "near").values


def test_other_episodes_are_another_cell_of_the_same_run(lists):
    recipe = recipe_of(lists)
    more = recipe_of(lists, settings={**recipe.settings, "episodes": 61})
    one, two = (each.cell("plain", "near", 0) for each in (recipe, more))
    assert one.folder == two.folder
    assert one.digest != two.digest
    assert one.digest == recipe_of(lists).cell("plain", "near", 0).digest


def test_a_split_that_is_not_there_leaves_the_column_open(lists, tmp_path):
    recipe = recipe_of(lists)
    settings = {**recipe.settings, "split": str(tmp_path / "gone.json")}
    with pytest.raises(ValueError, match=r"gone\.json: there is no such file, folder or known"):
        run_all(recipe_of(lists, settings=settings), tmp_path)


def test_the_work_on_a_folder_has_the_episodes_of_all_its_cells(lists, tmp_path):
    recipe = recipe_of(lists)
    cells = [recipe.cell("plain", column, 0) for column in ("near", "tuned")]
    payload = module._cell(tmp_path, cells).payload
    assert [each["method"] for each in payload["episodes"]] == [
        "l2, cosine(passes=3)",
        "cosine(margin=0.1, passes=3)",
    ]


@pytest.mark.slow
def test_processes_of_their_own_come_to_the_same(done, lists, tmp_path):
    (ledger,) = reproduce(
        [Selection(recipe_of(lists))], tmp_path, engine=RunnerSettings(workers=1), report=list
    )
    assert {(e.row, e.column): e.status for e in ledger.cells} == {
        (e.row, e.column): e.status for e in done[1].cells
    }
    for entry in ledger.cells:
        assert entry.values == pytest.approx(entry_of(done, entry.row, entry.column).values)


# ------------------------------------------------------------------------------- quick form


def test_the_quick_form_has_few_episodes_of_few_images():
    full = FewShotSettings(split="cifar-fs", shots=(1, 5), queries=15, episodes=10_000)
    quick = full.quick()
    assert (quick.episodes, quick.queries, quick.images) == (20, 5, 10)
    assert FewShotSettings(split="cub", queries=2, episodes=3).quick().episodes == 3
    assert (quick.way, quick.shots, quick.method) == (full.way, full.shots, full.method)


def test_the_quick_form_of_a_cell_goes_through(done, lists, tmp_path):
    recipe = small(done, lists)
    ledger, _ = run_all(recipe, tmp_path, quick=True)
    (found,) = ledger.cells
    assert found.status == "done"
    rows = found.kept["fewshot"]["rows"]["novel"]
    assert {row["episodes"] for row in rows} == {20}
    assert Ledger.read(tmp_path / "quick" / "tiny.json").quick


def test_episodes_of_a_batch_are_smaller_in_the_quick_form(lists):
    for given, quick in (
        ("episodes(way=16, shot=32)", "episodes(way=16, shot=2)"),
        ("episodes(way=64, shot=8)", "episodes(way=25, shot=2)"),
        ("random()", "random()"),
    ):
        recipe = recipe_of(lists)
        cell = recipe.cell("plain", "choice", 0, quick=True, values={"sampler": given})
        assert cell.config.sampler == quick


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "fewshot is expected to have split, got none"),
        ({"split": "cub", "ways": 5}, "fewshot has no 'ways'; did you mean way?"),
        ({"split": "cub", "way": 1}, "way of fewshot is expected to be at least 2, got 1"),
        (
            {"split": "cub", "episodes": 2.5},
            "episodes of fewshot is expected to be a whole number, got 2.5",
        ),
        ({"split": "cub", "shots": 5}, "shots of fewshot is expected to be a list, got 5"),
        (
            {"split": "cub", "shots": []},
            r"shots of fewshot is expected not to be empty, got \(\)",
        ),
        (
            {"split": "cub", "shots": [0]},
            "a part of shots of fewshot is expected to be at least 1, got 0",
        ),
        (
            {"split": "cub", "parts": []},
            r"parts of fewshot is expected not to be empty, got \(\)",
        ),
        (
            {"split": "cub", "parts": ["novell"]},
            "a part of parts of fewshot is expected to be novel, validation or base, got 'novell'",
        ),
        ({"split": "cub", "analyse": "yes"}, "analyse of fewshot is expected to be true or false"),
        (
            {"split": "cub", "method": "l3"},
            "there is no method 'l3'; there are centred_cosine, centroid",
        ),
        ({"split": "cub", "method": 3}, "method of fewshot is expected to be text, got 3"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        FewShotSettings.from_dict(settings)


@pytest.mark.parametrize("settings", [{"parts": ["base"]}, {"analyse": True}])
def test_base_images_that_were_trained_on_are_not_looked_at(lists, settings):
    rows = {"plain": {"kind": "fewshot", "config": {"whole": True}}}
    columns = {"near": {"settings": settings}}
    with pytest.raises(
        ValueError, match="tiny, row plain, column near: fewshot expects images held out of"
    ):
        recipe_of(lists, rows=rows, columns=columns)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"way": 4}, "4-way episodes expect at least 4 classes, got 3 of .*:novel"),
        ({"split": "digits.json"}, "novel classes are expected to be other than the base classes"),
        ({"split": "small.json"}, "small.json: there is no class in its part validation"),
    ],
)
def test_classes_that_cannot_be_are_noticed_before_training(
    lists, tmp_path, monkeypatch, settings, sentence
):
    monkeypatch.chdir(tmp_path)
    mixed = {"base": list("012"), "validation": list("789"), "novel": list("456")}
    (tmp_path / "digits.json").write_text(json.dumps(mixed))
    (tmp_path / "small.json").write_text(json.dumps({**PARTS, "validation": []}))
    columns = {"near": {"settings": settings}}
    with pytest.raises(ValueError, match=f"tiny, row plain, column near: .*{sentence}"):
        recipe_of(lists, columns=columns, rows={"plain": {"kind": "fewshot"}})


def test_nothing_is_chosen_by_novel_classes(lists):
    rows = {"plain": {"kind": "fewshot", "tune": {"m": [0, 1]}}}
    columns = {"near": {"settings": {"parts": ["novel"]}}}
    with pytest.raises(ValueError, match="expects the part validation and 1 among its shots"):
        recipe_of(lists, rows=rows, columns=columns)


def test_what_is_missing_or_damaged_is_open(done, lists, tmp_path):
    run = Run(copied(done, tmp_path))
    planned = done[0].cell("plain", "near", 0)
    shots = FewShotSettings.from_dict(planned.settings)
    assert find_results(run, shots) is not None
    assert find_results(run, replace(shots, seed=5)) is None
    (run.folder / recipe_cells.FILE).unlink()
    assert find_results(run, shots) is None
    assert collect_entry(done[0], planned, run.folder, Ledger("tiny")) is None
    for text in ("[]", "{"):
        (run.folder / recipe_cells.FILE).write_text(text)
        assert find_results(run, shots) is None
    evaluate_run(run, [shots], list)
    again = find_results(run, shots)
    before = find_results(Run(folder_of(done, "plain", "near")), shots)
    assert again == before
    # Nothing is computed twice: the model is not needed any more.
    (run.folder / "model.safetensors").unlink()
    evaluate_run(run, [shots], list)


def test_other_classes_in_a_list_of_the_same_name_are_looked_at_anew(done, tmp_path):
    run, mine = Run(copied(done, tmp_path)), tmp_path / "mine.json"
    shots = FewShotSettings(split=str(mine), way=2, queries=4, episodes=20, parts=("novel",))
    found = []
    for novel in (["6", "8", "9"], ["6", "8"], ["6", "8"]):
        mine.write_text(json.dumps({"base": PARTS["base"], "novel": novel}))
        # The second list is not taken for the first, the third is taken for the second.
        assert (find_results(run, shots) is None) == (len(found) < 2)
        evaluate_run(run, [shots], list)
        found.append(find_results(run, shots)["measures"])
    assert found[0] != found[1] == found[2]
    # What is known is not given up for a list that is not here.
    mine.unlink()
    assert find_results(run, shots)["measures"] == found[1]


@pytest.mark.parametrize("images", [0, 9])
def test_the_mean_of_the_training_images_is_taken_away(done, lists, tmp_path, images):
    run = Run(copied(done, tmp_path))
    shots = FewShotSettings(
        split=str(lists), way=3, queries=4, episodes=40, method="cl2n", images=images
    )
    evaluate_run(run, [shots], list)
    model, novel = load_model(run), load_classes("digits", PARTS["novel"])
    training = prepare_data(run.config, list)[0]
    with torch.no_grad():
        features, mean = model.features(novel.pixels), model.features(training.pixels).mean(0)
    places = torch.cat([(novel.labels == n).nonzero()[: images or None, 0] for n in range(3)])
    places = places if images else torch.arange(len(novel))
    drawn = draw(novel.labels[places], way=3, shot=1, queries=4, episodes=40)
    expected = accuracies(features[places], drawn, cl2n(), base_mean=mean)
    measured = find_results(run, shots)["measures"]["shot1"]
    assert measured == pytest.approx(float(expected.mean()), abs=3e-3)
    assert measured != pytest.approx(float(accuracies(features[places], drawn, l2()).mean()))


@pytest.mark.filterwarnings("ignore:discriminability")
def test_accuracies_of_a_model_that_collapsed_are_kept(done, lists, tmp_path):
    run = Run(copied(done, tmp_path))
    weights = run.tensors("model")
    write_tensors(
        run.folder / "model.safetensors", {name: 0 * each for name, each in weights.items()}
    )
    shots = FewShotSettings(
        split=str(lists), way=3, queries=4, episodes=5, method="l2", analyse=True
    )
    evaluate_run(run, [shots], list)
    measures = find_results(run, shots)["measures"]
    assert measures["shot1"] == pytest.approx(1 / 3)
    assert measures["d_intra_novel"] == 0
    assert "phi_novel" not in measures


def test_a_run_of_the_novel_classes_is_refused(done, lists, tmp_path):
    run = Run(copied(done, tmp_path))
    swapped = tmp_path / "swapped.json"
    swapped.write_text(json.dumps({"base": PARTS["novel"], "novel": PARTS["base"]}))
    shots = FewShotSettings(split=str(swapped), way=3, queries=4, episodes=5, parts=("novel",))
    with pytest.raises(ValueError, match="novel classes are expected to be other than the base"):
        evaluate_run(run, [shots], list)
    quick = shots.quick()
    with pytest.raises(ValueError, match="novel classes are expected to be other than the base"):
        evaluate_run(run, [quick], list)


def test_a_check_of_settings_leaves_other_runs_alone():
    FewShotSettings(split="cub", parts=("base",)).check(Config())
    FewShotSettings(split="cub").check(Config(whole=True), tried=True)
