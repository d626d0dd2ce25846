"""The ledger: what came out of each cell, in one file that can be read, compared and believed."""

import json

import pytest
from ledgers import MACHINE, entry, several_seeds, stop

from tammes.lab.records.run_folder import RecordError
from tammes.lab.reproduce.ledger import Entry, Ledger
from tammes.lab.reproduce.recipe_yaml import read

COLUMNS = {"left": {}, "right": {}, "large": {"on_request": True}}
RECIPE = read(
    {
        "title": "T",
        "source": "s",
        "seeds": 2,
        "columns": COLUMNS,
        "rows": {
            "a": {},
            "b": {"config": {"loss": "cosface(margin={m})"}, "tune": {"m": [0.1, 0.2]},
                  "columns": ["right"]},
        },
    },
    "small",
)  # fmt: skip


def full():
    """A ledger in which every field has something in it."""
    cells = [
        entry("b", "right", 1, {"error": 27.5}, optimum={"class_margin": 90.5}),
        entry("a", "right", 1, {"error": 0.0}, kept={"scatter": {"train": {"x": [1.5]}}}),
        entry("a", "right", 0, {"error": 29.25}, machine=None),
        stop("a", "left", 0, reason="the loss was not finite at step 1310 – überall"),
    ]
    return Ledger(
        "small",
        quick=True,
        command="tammes reproduce small",
        machines=[MACHINE],
        cells=cells,
        configs={"a/right": {"lr": 0.1}},
        tuned={"b/right": {"m": 0.2, "tried": [{"m": 0.1, "accuracy": 4.5}, {"m": 0.2}]}},
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "somebody" / "small.json"


# -------------------------------------------------------------------------------------- the file


def test_what_is_written_is_read_again(path):
    ledger = full()
    ledger.write(path)
    again = Ledger.read(path)
    by_place = sorted(ledger.cells, key=lambda e: (e.row, e.column, e.seed))
    assert again == Ledger(**{**vars(ledger), "cells": by_place})


def test_writing_what_was_read_changes_no_byte(path):
    full().write(path)
    before = path.read_bytes()
    Ledger.read(path).write(path)
    assert path.read_bytes() == before


def test_an_empty_ledger_is_one_too(path):
    Ledger("small").write(path)
    assert Ledger.read(path) == Ledger("small")


def test_each_cell_is_a_line_and_its_order_is_that_of_the_table(path):
    full().write(path)
    first = path.read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line.strip(" ,")) for line in first if '"digest"' in line]
    assert [(line["row"], line["column"], line["seed"]) for line in lines] == [
        ("a", "left", 0), ("a", "right", 0), ("a", "right", 1), ("b", "right", 1),
    ]  # fmt: skip
    ledger = full()
    ledger.put(entry("a", "right", 0, {"error": 30.0}))
    ledger.cells.reverse()
    ledger.write(path)
    second = path.read_text(encoding="utf-8").splitlines()
    assert [one == two for one, two in zip(first, second, strict=True)].count(False) == 1


def test_a_line_has_what_there_is_and_no_more(path):
    bare = Entry(row="a", column="left", seed=0, digest="0123abcd", status="failed")
    Ledger("small", cells=[bare]).write(path)
    assert json.loads(path.read_text())["cells"] == [
        {"row": "a", "column": "left", "seed": 0, "digest": "0123abcd", "status": "failed"}
    ]


def test_the_first_machine_is_not_taken_for_none(path):
    full().write(path)
    assert {cell.machine for cell in Ledger.read(path).of("a", "right")} == {None, 0}


def test_letters_stand_as_they_are_unless_they_are_none(path):
    full().write(path)
    assert "überall" in path.read_text(encoding="utf-8")
    odd = full()
    odd.command = "tammes reproduce --out caf\udce9"
    odd.write(path)
    assert Ledger.read(path).command == odd.command


def test_a_number_that_is_none_is_not_written_and_the_file_stays_as_it_was(path):
    full().write(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        Ledger("small", cells=[entry("a", "left", 0, {"error": float("nan")})]).write(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "3",
        lambda text: "null",
        lambda text: '{"recipe": "small"}',
        lambda text: '{"recipe": "small", "cells": 3}',
        lambda text: '{"recipe": "small", "cells": [3]}',
        lambda text: '{"cells": []}',
        lambda text: text.replace('"status": "diverged"', '"status": "won"'),
        lambda text: text.replace('"digest"', '"digset"'),
        lambda text: text.replace('"seed": 0', '"seed": "0"'),
        lambda text: text.replace('"row": "a"', '"row": 5'),
        lambda text: text.replace('"machines"', '"mashines"'),
        lambda text: text.encode("latin-1", "replace"),
    ],
)
def test_a_damaged_file_is_said_to_be_one_in_a_sentence(path, damage):
    full().write(path)
    damaged = damage(path.read_text(encoding="utf-8"))
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises(RecordError, match=r"small\.json: not a ledger, or a damaged one \(.+\)"):
        Ledger.read(path)


def test_a_file_that_is_not_there_is_missed_by_its_name(path):
    with pytest.raises(RecordError, match=r"small\.json: No such file or directory$"):
        Ledger.read(path)


# ---------------------------------------------------------------------------------- what is in it


def test_values_and_their_summary_are_those_of_the_cells_that_are_done():
    _, ledger = several_seeds()
    assert ledger.values("softmax", "cifar100", "error") == {0: 29.3, 1: 29.5, 2: 29.7}
    found = ledger.summary("softmax", "cifar100", "error")
    assert (found.count, found.mean, found.std) == (
        3, pytest.approx(29.5), pytest.approx(0.2),
    )  # fmt: skip
    ledger.put(stop("softmax", "cifar100", 1))
    assert ledger.values("softmax", "cifar100", "error") == {0: 29.3, 2: 29.7}
    assert ledger.values("softmax", "cifar100", "bias") == {}
    assert ledger.summary("softmax", "cifar100", "bias") is None
    assert ledger.summary("softmax", "svhn", "error") is None


def test_cells_come_by_seed_whatever_order_they_were_run_in():
    _, ledger = several_seeds()
    ledger.cells.reverse()
    assert [cell.seed for cell in ledger.of("divergence", "cifar100")] == [0, 1, 2]


def test_what_is_put_down_takes_the_place_of_what_was_there_and_of_no_other():
    ledger = full()
    ledger.put(entry("a", "right", 1, {"error": 5.0}, digest="new"))
    assert ledger.values("a", "right", "error") == {0: 29.25, 1: 5.0}
    assert len(ledger.cells) == 4
    ledger.put(entry("a", "right", 2, {"error": 6.0}))
    assert len(ledger.cells) == 5


def test_a_cell_is_found_by_what_was_run_and_stale_ones_are_open_again():
    planned = RECIPE.cell("a", "right", 1)
    ledger = Ledger("small", cells=[entry("a", "right", 1, {}, digest=planned.digest)])
    assert ledger.find(planned) is ledger.cells[0]
    assert ledger.find(RECIPE.cell("a", "right", 0)) is None
    assert ledger.find(RECIPE.cell("a", "left", 1)) is None
    changed = read({"title": "T", "source": "s", "columns": {"right": {"config": {"lr": 3.0}}},
                    "rows": {"a": {}}}, "small")  # fmt: skip
    assert ledger.find(changed.cell("a", "right", 1)) is None


def test_cells_of_an_earlier_form_of_the_recipe_do_not_count_and_are_not_lost(path):
    cells = [RECIPE.cell("a", column, seed) for column in ("left", "right") for seed in (0, 1)]
    kept = [entry(c.row, c.column, c.seed, {"error": 5.0}, digest=c.digest) for c in cells]
    strange = [entry("gone", "left", 0, {}), entry("b", "left", 0, {})]
    ledger = Ledger("small", cells=[*kept, *strange])
    assert ledger.current(RECIPE).cells == kept
    columns = {"left": {}, "right": {"config": {"lr": 3.0}}}
    given = {"title": "T", "source": "s", "seeds": 2, "rows": {"a": {}}, "columns": columns}
    changed = read(given, "small")
    now = ledger.current(changed)
    assert now.cells == kept[:2]
    assert len(now.former) == 4
    assert now.values("a", "right", "error") == {}
    assert now.open(changed) == [("a", "right", 0), ("a", "right", 1)]
    narrow = read({**given, "rows": {"a": {"columns": ["left"]}}, "columns": COLUMNS}, "small")
    assert ledger.current(narrow).cells == kept[:2]
    # They come back with the recipe.
    now.write(path)
    assert len(Ledger.read(path).current(RECIPE).cells) == 4
    assert len(now.current(RECIPE).cells) == 4
    assert len(ledger.cells) == 6


def test_an_entry_moves_with_its_cell_to_another_row_or_column():
    given = {"title": "T", "source": "s", "rows": {"a": {}, "b": {"config": {"lr": 0.2}}},
             "columns": {"left": {"config": {"epochs": 3}}}}  # fmt: skip
    before = read(given, "small")
    cells = [before.cell(row, "left", seed) for row in "ab" for seed in (0, 1)]
    kept = [entry(c.row, c.column, c.seed, {"error": 5.0}, digest=c.digest) for c in cells]
    configs = {f"{c.row}/left": c.config.group() for c in cells}
    ledger = Ledger("small", cells=kept, configs=configs)
    columns = {"left": {"config": {"epochs": 4}}, "short": {"config": {"epochs": 3}}}
    changed = read({**given, "columns": columns}, "small")
    now = ledger.current(changed)
    assert now.former == []
    assert {(e.row, e.column, e.seed) for e in now.cells} == {
        (row, "short", seed) for row in "ab" for seed in (0, 1)
    }
    assert now.values("b", "short", "error") == {0: 5.0, 1: 5.0}
    assert now.values("b", "left", "error") == {}
    assert now.configs == {f"{row}/short": configs[f"{row}/left"] for row in "ab"}
    for cell in changed.planned(columns=["short"], seeds=2):
        assert now.find(cell) is not None
    # One that was run twice has one place.
    twice = Ledger("small", cells=[kept[0]], former=[kept[0]])
    assert (len(twice.current(changed).cells), len(twice.current(changed).former)) == (1, 1)
    # The ledger that was read is as it was.
    assert ledger.cells == kept
    assert ledger.configs == configs


def test_a_tuned_cell_counts_while_its_settings_are_those_that_were_chosen():
    cell = RECIPE.cell("b", "right", 0, values={"m": 0.2})
    entries = [entry("b", "right", 0, {}, digest=cell.digest)]
    trials = [trial.digest for trial in RECIPE.trials("b", "right")]
    for tuned, count in (
        ({"m": 0.2, "trials": trials}, 1),
        ({"m": 0.1, "trials": trials}, 0),
        # Chosen among others, or by runs of an earlier form of the recipe.
        ({"m": 0.2, "trials": [*trials, "another"]}, 0),
        ({"m": 0.2}, 0),
        (None, 0),
    ):
        ledger = Ledger("small", cells=entries, tuned={"b/right": tuned} if tuned else {})
        assert len(ledger.current(RECIPE).cells) == count


def test_a_cell_of_a_column_that_is_tuned_counts_once_its_settings_are_chosen():
    columns = {"left": {"config": {"lr": "{lr}"}, "tune": {"lr": [0.1, 0.2]}}}
    given = {"title": "T", "source": "s", "rows": {"a": {}}, "columns": columns}
    recipe = read(given, "small")
    cell = recipe.cell("a", "left", 0, values={"lr": 0.2})
    ledger = Ledger("small", cells=[entry("a", "left", 0, {}, digest=cell.digest)])
    assert ledger.current(recipe).cells == []
    trials = [trial.digest for trial in recipe.trials("a", "left")]
    ledger.tuned = {"a/left": {"lr": 0.2, "trials": trials}}
    assert ledger.current(recipe).cells == ledger.cells


@pytest.mark.parametrize(
    ("ledger", "quick", "sentence"),
    [
        (Ledger("small", quick=True), False, "small is expected, got that of small in quick form"),
        (Ledger("small"), True, "small in quick form is expected, got that of small"),
        (Ledger("large"), False, "small is expected, got that of large"),
    ],
)
def test_a_ledger_is_not_taken_for_another(ledger, quick, sentence):
    with pytest.raises(RecordError, match=f"^a ledger of {sentence}$"):
        ledger.current(RECIPE, quick=quick)


def test_open_are_all_cells_nothing_is_known_of_also_those_on_request():
    ledger = full()
    assert ledger.open(RECIPE) == [
        ("a", "left", 1), ("a", "large", 0), ("a", "large", 1), ("b", "right", 0),
    ]  # fmt: skip
    assert ledger.open(RECIPE, 1) == [("a", "large", 0), ("b", "right", 0)]
    assert len(Ledger("small").open(RECIPE)) == 8


def test_a_recipe_without_rows_has_nothing_open():
    assert Ledger("f").open(read({"title": "T", "source": "s"}, "f")) == []


def test_a_machine_is_written_down_once():
    ledger = Ledger("small")
    other = {**MACHINE, "device": "cpu"}
    assert [ledger.machine(dict(each)) for each in (MACHINE, other, MACHINE)] == [0, 1, 0]
    assert ledger.machines == [MACHINE, other]


def test_what_was_chosen_is_known_by_row_and_column_without_what_was_tried():
    assert full().tuned_settings() == {("b", "right"): {"m": 0.2}}
