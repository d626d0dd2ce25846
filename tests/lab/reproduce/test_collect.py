"""What a ledger takes from the folder of a cell: numbers, curves, looks, histograms, points."""

import json
from dataclasses import replace

import pytest
import torch
from records import make_run

from tammes.lab.records.run_folder import RecordError, Run, write_json, write_lines, write_tensors
from tammes.lab.reproduce import collect
from tammes.lab.reproduce.collect import CELL, collect_entry
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipe_yaml import read

GIVEN = {
    "title": "T",
    "source": "s",
    "config": {"epochs": 6},
    "columns": {"left": {}},
    "rows": {"a": {}, "ball": {"kind": "sphere", "settings": {"loss": "normface()", "scale": 5}}},
    "curves": ["train.accuracy", "prototypes.class_margin", "train.nothing", "train"],
}
RECIPE = read(GIVEN, "small")
PLANNED = RECIPE.cell("a", "left", 0)


def taken_from(folder, recipe=RECIPE, planned=PLANNED):
    ledger = Ledger("small")
    return collect_entry(recipe, planned, folder, ledger), ledger


# --------------------------------------------------------------------------------- how it ended


def test_a_finished_run_is_an_entry_with_its_numbers(tmp_path):
    make_run(tmp_path, accuracy=0.912345678912, class_margin=61.0, sample_margin=0.5)
    entry, ledger = taken_from(tmp_path)
    assert (entry.row, entry.column, entry.seed, entry.status) == ("a", "left", 0, "done")
    assert entry.digest == PLANNED.digest
    assert (entry.epochs, entry.step, entry.seconds, entry.chosen) == (6, 66, 9.0, "last")
    assert entry.values == {
        "accuracy": 91.23457,
        "error": 8.765432,
        "class_margin": 61.0,
        "sample_margin": 0.5,
        "bias": 0.7,
    }
    # Whether it is a bound is no number.
    assert entry.optimum == {"class_margin": 70.0, "sample_margin": 1.05}
    assert (entry.reason, entry.kept) == ("", {})
    assert ledger.cells == []


def test_the_machine_is_noted_without_what_else_is_known_of_the_run(tmp_path):
    make_run(tmp_path)
    entry, ledger = taken_from(tmp_path)
    assert entry.machine == 0
    assert ledger.machines == [
        {
            "device": "cpu",
            "torch": "2.13.0",
            "python": "3.11.2",
            "tammes": "0.1.0.dev0",
            "commit": "23a4f1a",
            "platform": "Linux",
        }
    ]


def test_a_run_that_says_nothing_of_its_machine_has_none(tmp_path):
    make_run(tmp_path)
    (tmp_path / "environment.json").unlink()
    entry, ledger = taken_from(tmp_path)
    assert entry.machine is None
    assert ledger.machines == []


@pytest.mark.parametrize(
    ("failure", "status", "step"),
    [
        ({"kind": "not finite", "message": "it is nan", "step": 33}, "diverged", 33),
        ({"kind": "error", "message": "no memory"}, "failed", 0),
        ({"kind": "interrupted", "message": "it was killed"}, "failed", 0),
    ],
)
def test_a_run_that_stopped_has_a_reason_and_no_number(tmp_path, failure, status, step):
    make_run(tmp_path, state="failed", failure=failure)
    entry, _ = taken_from(tmp_path)
    assert (entry.status, entry.step, entry.reason) == (status, step, failure["message"])
    assert (entry.values, entry.curves, entry.kept, entry.epochs) == ({}, {}, {}, 0)


def test_nothing_is_taken_from_a_run_that_is_not_finished_or_not_there(tmp_path):
    make_run(tmp_path / "begun", state="unfinished")
    for name in ("begun", "nowhere"):
        entry, ledger = taken_from(tmp_path / name)
        assert entry is None
        assert ledger == Ledger("small")


def test_what_a_cell_on_the_sphere_wrote_is_taken_as_it_is(tmp_path):
    planned = RECIPE.cell("ball", "left", 2)
    assert taken_from(tmp_path, planned=planned)[0] is None
    found = {
        "status": "done",
        "values": {"class_margin": 74.5},
        "kept": {"sphere": {"labels": [0]}},
    }
    write_json(tmp_path / CELL, found)
    entry, _ = taken_from(tmp_path, planned=planned)
    assert (entry.row, entry.seed, entry.digest) == ("ball", 2, planned.digest)
    assert {key: getattr(entry, key) for key in found} == found


# ---------------------------------------------------------------------------------------- curves


def test_curves_are_those_of_the_recipe_and_two_more_at_tested_epochs(tmp_path):
    make_run(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows[0::2]:
        del row["test"]
    rows[1]["prototypes"]["class_margin"] = 12.3456789
    rows[3]["prototypes"] = {}
    write_lines(tmp_path / "metrics.jsonl", rows)
    curves = taken_from(tmp_path)[0].curves
    assert curves.keys() == {"epoch", "test.accuracy", "train.loss", *GIVEN["curves"]}
    assert curves["epoch"] == [2, 4, 6]
    assert curves["prototypes.class_margin"][:2] == [12.346, None]
    assert curves["train.nothing"] == curves["train"] == [None] * 3
    assert curves["test.accuracy"] == pytest.approx(
        [rows[place]["test"]["accuracy"] for place in (1, 3, 5)], rel=1e-4
    )


def test_a_run_that_was_never_tested_on_the_way_has_curves_all_the_same(tmp_path):
    make_run(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", [{"epoch": 1, "train": {"loss": 2}}, {"epoch": 2}])
    curves = taken_from(tmp_path)[0].curves
    assert curves["epoch"] == [1, 2]
    assert curves["train.loss"] == [2.0, None]
    assert curves["test.accuracy"] == [None, None]


def test_a_ledger_does_not_say_where_the_runs_lay(tmp_path):
    make_run(tmp_path)
    around = json.loads((tmp_path / "environment.json").read_bytes())
    typed = "tammes reproduce small --out '/a place/here' --seeds 3"
    write_json(tmp_path / "environment.json", {**around, "command": typed})
    assert taken_from(tmp_path)[0].command == "tammes reproduce small --seeds 3"


# --------------------------------------------------------------------------------------- looks


def test_looks_are_kept_with_their_findings_and_their_duration(tmp_path):
    make_run(tmp_path)
    found = {"name": "prototypes-collapsed", "severity": "warning", "measured": "0.5 degrees"}
    measured = {"loss": 4.751234, "prototype_cosine": 0.97, "terms": {}}
    looks = [
        {"epoch": epoch, "step": epoch, "findings": [found] * epoch, "measured": measured}
        for epoch in (0, 1)
    ]
    write_json(tmp_path / "health.json", {"looks": looks})
    write_json(tmp_path / "look_seconds.json", {"0": 0.5})
    timing = [{"epoch": e, "seconds": s} for e, s in ((1, 9.0), (2, 2.0), (3, 4.0))]
    write_lines(tmp_path / "timing.jsonl", timing)
    entry, _ = taken_from(tmp_path, recipe=replace(RECIPE, keep=("health",)))
    numbers = {"loss": 4.751, "prototype_cosine": 0.97}
    assert entry.kept["health"] == {
        "looks": [
            {"epoch": 0, "findings": [], **numbers, "seconds": 0.5},
            {"epoch": 1, "findings": ["prototypes-collapsed"], **numbers, "seconds": None},
        ],
        "epoch_seconds": 4.0,
    }


# ----------------------------------------------------------------------------------- identities


def test_resamples_of_identities_are_kept_for_the_quantities_of_the_recipe(tmp_path):
    make_run(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    write_json(tmp_path / "config.json", {**config, "identities": True})
    recipe = read({**GIVEN, "quantities": ["map", "eer", "tar_far_1e-2"]}, "small")
    assert "resamples" not in taken_from(tmp_path, recipe=recipe)[0].kept["identities"]
    nan = float("nan")
    drawn = {
        "mean_average_precision": [0.5, 0.123456],
        "eer": [0.1, 0.2],
        "minp": [0.1, 0.1],
        "tar_at_far_1e-2": [0.1, nan],
    }
    tensors = {name: torch.tensor(each, dtype=torch.double) for name, each in drawn.items()}
    write_tensors(tmp_path / "resamples.safetensors", tensors)
    kept = taken_from(tmp_path, recipe=recipe)[0].kept["identities"]
    assert kept["resamples"] == {"map": [50.0, 12.35], "eer": [10.0, 20.0]}


# ------------------------------------------------------------------------------ histograms by hand


def test_histograms_by_hand(tmp_path):
    # Prototypes to the right and up; lengths are to make no difference.
    prototypes = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
    features = torch.tensor([[3.0, 0.0], [0.0, 1.0], [-4.0, 0.0], [0.6, 0.8]])
    labels = torch.tensor([0, 0, 0, 1])
    make_run(tmp_path, classes=("right", "up"), size=2)
    write_tensors(tmp_path / "prototypes.safetensors", {"prototypes": prototypes})
    known = {"features": features, "labels": labels}
    write_tensors(tmp_path / "embeddings.safetensors", known)
    entry, _ = taken_from(tmp_path, recipe=replace(RECIPE, keep=("histograms",)))
    found = entry.kept["histograms"]

    def filled(name):
        return {place: count for place, count in enumerate(found[name]) if count}

    assert found.keys() == {"edges_cosine", "own", "hardest", "edges_margin", "margin"}
    assert len(found["own"]) == len(found["hardest"]) == len(found["margin"]) == 80
    edges = found["edges_cosine"]
    assert (len(edges), edges[0], edges[1], edges[40], edges[-1]) == (81, -1.0, -0.975, 0.0, 1.0)
    edges = found["edges_margin"]
    assert (len(edges), edges[0], edges[1], edges[40], edges[-1]) == (81, -2.0, -1.95, 0.0, 2.0)
    # Cosines to the own prototype: 1, 0, -1, 0.8; to the other: 0, 1, 0, 0.6.
    assert filled("own") == {79: 1, 40: 1, 0: 1, 72: 1}
    assert filled("hardest") == {40: 2, 79: 1, 64: 1}
    # Margins: 1, -1, -1, 0.2.
    assert filled("margin") == {60: 1, 20: 2, 44: 1}


def test_every_image_is_counted_once(tmp_path):
    make_run(tmp_path, examples=137)
    found = taken_from(tmp_path, recipe=replace(RECIPE, keep=("histograms",)))[0].kept["histograms"]
    assert sum(found["own"]) == sum(found["hardest"]) == sum(found["margin"]) == 137
    assert all(type(count) is int for count in found["own"])


def test_a_run_without_features_is_missed_by_its_file(tmp_path):
    make_run(tmp_path, embeddings=False)
    with pytest.raises(RecordError, match=r"the run has no embeddings\.safetensors"):
        taken_from(tmp_path, recipe=replace(RECIPE, keep=("histograms",)))


# -------------------------------------------------------------------------------------- scatter


def test_points_have_four_digits_and_their_labels():
    features = torch.tensor([[1.23456, -0.000123456, 9.0], [1234.56, 2.0, 9.0]])
    assert collect._points(features, torch.tensor([3, 1])) == {
        "x": [1.235, 1235.0],
        "y": [-0.0001235, 2.0],
        "label": [3, 1],
    }


def test_features_that_are_not_two_are_not_scattered(tmp_path):
    make_run(tmp_path, size=3)
    entry, _ = taken_from(tmp_path, recipe=replace(RECIPE, keep=("scatter",)))
    assert (entry.status, entry.kept) == ("done", {})


def test_of_many_images_a_thousand_are_drawn_from_all_over():
    assert collect._evenly_spaced(5).tolist() == [0, 1, 2, 3, 4]
    chosen = collect._evenly_spaced(60_000)
    assert (len(chosen), int(chosen[0]), int(chosen[-1])) == (1000, 0, 59_999)
    assert chosen.unique().numel() == 1000
    steps = chosen.diff()
    assert int(steps.min()) >= 59
    assert int(steps.max()) <= 62


def test_the_run_is_not_changed_by_looking_at_it(tmp_path):
    make_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    taken_from(tmp_path, recipe=replace(RECIPE, keep=("histograms",)))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert Run(tmp_path).status == "done"
