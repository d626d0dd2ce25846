"""A reproduction runs what is missing and nothing else, and its ledger says what came of it."""

import json
import re
import shutil

import pytest
import torch
from recipe_cells import write_images
from reproduce_work import in_this_process

from tammes.lab.cli.main import main
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce import run as reproduce
from tammes.lab.reproduce.judge import judge
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipe_yaml import read
from tammes.lab.reproduce.run import RunnerSettings, Selection, with_local_data
from tammes.lab.runner import Result

TINY = {
    "backbone": "mnist_cnn(width=0.125, features=2)",
    "augment": "none",
    "batch_size": 50,
    "epochs": 2,
    "limit": 100,
    "precision": "fp32",
    "head": "cosine(scale=8)",
}
GIVEN = {
    "title": "Margins on digits",
    "source": "nowhere",
    "seeds": 2,
    "quantities": ["error"],
    "config": TINY,
    "columns": {"digits": {"title": "Digits", "config": {"data": "digits"}}},
    "rows": {
        "none": {"title": "Softmax", "config": {"loss": "softmax()"}},
        "some": {"title": "CosFace", "config": {"loss": "cosface(margin=0.2)"}},
    },
    "claims": [{"says": "The margin helps.", "better": "some", "than": "none"}],
}


def recipe_of(name="small", **changes):
    return read({**GIVEN, **changes}, name)


def row_with(margin, **more):
    return {"config": {"loss": f"cosface(margin={margin})"}, **more}


@pytest.fixture
def ran(monkeypatch):
    """Names of the cells that are run; nothing is trained."""
    log = []
    monkeypatch.setattr(reproduce, "run_cells", in_this_process(log))
    return log


@pytest.fixture
def run(tmp_path, ran):
    """Reproduce some of recipes; returns what was run, the ledgers, and what was said."""

    def go(*selections, out=tmp_path, **options):
        ran.clear()
        said = []
        given = [each if isinstance(each, Selection) else Selection(each) for each in selections]
        ledgers = reproduce.reproduce(given, out, report=said.append, **options)
        return list(ran), ledgers, said

    return go


# ------------------------------------------------------------------------ what is run and what not


def test_all_cells_are_run_once_and_never_again(run, tmp_path):
    names, (ledger,), _ = run(recipe_of())
    assert names == [f"{row}, digits, seed {seed}" for row in ("none", "some") for seed in (0, 1)]
    assert ledger == Ledger.read(tmp_path / "small.json")
    assert ledger.values("none", "digits", "error") == pytest.approx({0: 10.0, 1: 9.0})
    assert ledger.values("some", "digits", "error") == pytest.approx({0: 12.0, 1: 11.0})
    before = (tmp_path / "small.json").read_bytes()
    names, (again,), said = run(recipe_of())
    assert (names, said) == ([], [])
    assert again.cells == ledger.cells
    assert (tmp_path / "small.json").read_bytes() == before


def test_only_what_is_missing_is_run(run):
    run(Selection(recipe_of(), rows=["some"], seeds=[1]))
    names, (ledger,), said = run(recipe_of())
    assert names == ["none, digits, seed 0", "none, digits, seed 1", "some, digits, seed 0"]
    assert said == [f"3 cells to run in {said[0].split()[5].rstrip(',')}, of 4 selected"]
    assert len(ledger.cells) == 4


def test_a_ledger_that_is_gone_is_filled_from_the_runs_that_are_there(run, tmp_path):
    _, (ledger,), _ = run(recipe_of())
    (tmp_path / "small.json").unlink()
    names, (again,), _ = run(recipe_of())
    assert names == []
    assert again == ledger == Ledger.read(tmp_path / "small.json")


def test_what_a_recipe_keeps_in_addition_is_taken_from_the_run_without_training(run, tmp_path):
    run(recipe_of())
    names, (ledger,), _ = run(recipe_of(curves=["train.bias"]))
    assert names == []
    assert all("train.bias" in cell.curves for cell in ledger.cells)
    assert ledger == Ledger.read(tmp_path / "small.json")


def test_numbers_are_not_given_up_for_a_folder_that_cannot_be_read_any_more(run, tmp_path):
    _, (before,), _ = run(recipe_of())
    for path in (tmp_path / "runs").glob("*/embeddings.safetensors"):
        path.unlink()
    names, (after,), _ = run(recipe_of(keep=["histograms"]))
    assert names == []
    assert after.cells == before.cells
    # Where nothing is known of it yet, it is a failed cell with its reason.
    (tmp_path / "small.json").unlink()
    _, (anew,), _ = run(recipe_of(keep=["histograms"]))
    assert {(cell.status, "embeddings" in cell.reason) for cell in anew.cells} == {("failed", True)}


def test_runs_that_are_gone_are_not_missed_where_the_ledger_has_them(run, tmp_path):
    _, (ledger,), _ = run(recipe_of())
    shutil.rmtree(tmp_path / "runs")
    names, (again,), _ = run(recipe_of())
    assert names == []
    assert again.cells == ledger.cells


def test_a_cell_whose_configuration_has_changed_is_run_again_and_replaced(run):
    _, (before,), _ = run(recipe_of())
    rows = {**GIVEN["rows"], "some": row_with(0.3)}
    names, (after,), _ = run(recipe_of(rows=rows))
    assert names == ["some, digits, seed 0", "some, digits, seed 1"]
    assert len(after.cells) == 4
    assert after.of("none", "digits") == before.of("none", "digits")
    assert after.values("some", "digits", "error") == pytest.approx({0: 13.0, 1: 12.0})


def test_two_recipes_that_share_a_cell_run_it_once(run, tmp_path):
    other = {"same": {"title": "The same", **GIVEN["rows"]["some"]}, "more": row_with(0.4)}
    first, second = recipe_of(), recipe_of("second", rows=other, claims=[])
    names, (one, two), said = run(first, second)
    assert [name for name in names if "seed 0" in name] == [
        "none, digits, seed 0", "some, digits, seed 0", "more, digits, seed 0",
    ]  # fmt: skip
    assert "6 cells to run" in said[0]
    assert "of 8 selected" in said[0]
    assert one.values("some", "digits", "error") == two.values("same", "digits", "error")
    assert {cell.row for cell in two.cells} == {"same", "more"}
    two.cells.sort(key=lambda cell: (cell.row, cell.seed))
    assert Ledger.read(tmp_path / "second.json") == two


def test_a_cell_that_was_run_for_another_recipe_before_is_taken_from_it(run):
    run(recipe_of())
    other = recipe_of("second", rows={"same": GIVEN["rows"]["some"]}, claims=[])
    names, (ledger,), _ = run(other)
    assert names == []
    assert ledger.values("same", "digits", "error") == pytest.approx({0: 12.0, 1: 11.0})


def test_the_ledger_is_written_after_every_cell(tmp_path, monkeypatch):
    log, seen = [], []
    inner = in_this_process(log)

    def watched(cells, work, *, at, on_event):
        def tell(event):
            on_event(event)
            if event.kind == "done":
                seen.append(len(Ledger.read(tmp_path / "small.json").cells))

        return inner(cells, work, at=at, on_event=tell)

    monkeypatch.setattr(reproduce, "run_cells", watched)
    reproduce.reproduce([Selection(recipe_of())], tmp_path, report=lambda text: None)
    assert seen == [1, 2, 3, 4]


def test_the_ledger_says_with_what_configuration_by_what_command_and_where(run, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/tammes", "reproduce", "a table"])
    _, (ledger,), _ = run(recipe_of())
    assert ledger.command == "tammes reproduce 'a table'"
    # All that the result depends on, but for the seed.
    same = Config(**TINY, loss="cosface(margin=0.2)").group()
    assert ledger.configs["some/digits"] == same
    assert ledger.configs.keys() == {"none/digits", "some/digits"}
    assert not {"seed", "workers"} & same.keys()
    assert len(ledger.machines) == 1
    assert {cell.machine for cell in ledger.cells} == {0}


def test_quick_cells_have_a_folder_and_a_ledger_of_their_own(run, tmp_path):
    names, (quick,), _ = run(recipe_of(), quick=True)
    assert len(names) == 2
    assert quick.quick
    assert Ledger.read(tmp_path / "quick" / "small.json") == quick
    assert not (tmp_path / "small.json").exists()
    assert not (tmp_path / "runs").exists()
    assert Run(next((tmp_path / "quick" / "runs").iterdir())).config.limit == 300
    names, (full,), _ = run(recipe_of())
    assert len(names) == 4
    assert not full.quick


def test_checkpoints_are_about_twenty(run, tmp_path):
    run(Selection(recipe_of(config={**TINY, "epochs": 90}), rows=["none"], seeds=1))
    (folder,) = (tmp_path / "runs").iterdir()
    assert Run(folder).config.save_every == 4


# ------------------------------------------------------------------------------- what goes wrong


def test_a_cell_that_diverges_is_recorded_with_its_step_and_left_alone(run):
    rows = {**GIVEN["rows"], "some": row_with(0.8)}
    names, (ledger,), _ = run(recipe_of(rows=rows, seeds=1))
    assert len(names) == 2
    (bad,) = (cell for cell in ledger.cells if cell.row == "some")
    assert (bad.status, bad.step, bad.values) == ("diverged", 3, {})
    assert bad.reason == "the loss was not finite at step 3"
    assert run(recipe_of(rows=rows, seeds=1))[0] == []


def test_a_cell_that_diverged_is_tried_again_where_that_is_asked_for(run, tmp_path):
    rows = {"some": row_with(0.8)}
    recipe = recipe_of(rows=rows, seeds=1, claims=[])
    run(recipe)
    assert run(recipe, retry_failed=True)[0] == ["some, digits, seed 0"]
    (tmp_path / "small.json").unlink()
    assert run(recipe, retry_failed=True)[0] == ["some, digits, seed 0"]
    # Where only the ledger is gone it is known from the run.
    (tmp_path / "small.json").unlink()
    names, (ledger,), _ = run(recipe)
    assert names == []
    assert [cell.status for cell in ledger.cells] == ["diverged"]


def test_a_cell_that_diverged_is_known_from_the_ledger_where_its_run_is_gone(run, tmp_path):
    recipe = recipe_of(rows={"some": row_with(0.8)}, seeds=1, claims=[])
    run(recipe)
    shutil.rmtree(tmp_path / "runs")
    assert run(recipe)[0] == []


def test_a_cell_that_is_done_is_not_run_again_where_failed_ones_are(run):
    run(recipe_of())
    assert run(recipe_of(), retry_failed=True)[0] == []


def test_a_cell_that_failed_is_recorded_and_tried_again_the_next_time(run):
    recipe = recipe_of(rows={"some": row_with(0.7), "none": row_with(0.1)}, seeds=1)
    names, (ledger,), _ = run(recipe)
    assert len(names) == 2
    by_row = {cell.row: cell for cell in ledger.cells}
    assert (by_row["some"].status, by_row["some"].reason) == ("failed", "there is no memory left")
    assert by_row["none"].status == "done"
    assert run(recipe)[0] == ["some, digits, seed 0"]


def test_why_a_cell_failed_before_is_not_why_it_failed_now(run, monkeypatch):
    recipe = recipe_of(rows={"some": row_with(0.7)}, seeds=1, claims=[])
    run(recipe)

    def fails(cells, work, *, at, on_event):
        return [Result(cell, False, "the disk is full") for cell in cells]

    monkeypatch.setattr(reproduce, "run_cells", fails)
    _, (ledger,), _ = run(recipe)
    assert [cell.reason for cell in ledger.cells] == ["the disk is full"]


@pytest.mark.slow
def test_a_cell_whose_process_is_killed_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "_WORK", "reproduce_work:pretend")
    recipe = recipe_of(rows={"none": row_with(0.1), "some": row_with(0.9)}, seeds=1)
    said = []
    (ledger,) = reproduce.reproduce(
        [Selection(recipe)], tmp_path, engine=RunnerSettings(workers=2), report=said.append
    )
    again = [text for text in said if "retrying" in text]
    assert len(again) == 1
    assert again[0].startswith("some, digits, seed 0: retrying, as its process was killed by SIG")
    assert {cell.row: cell.status for cell in ledger.cells} == {"none": "done", "some": "done"}


def test_a_column_without_data_stays_open_with_its_reason_while_others_run(run, tmp_path):
    columns = {**GIVEN["columns"], "gone": {"config": {"data": str(tmp_path / "nowhere")}}}
    names, (ledger,), said = run(recipe_of(columns=columns, seeds=1))
    assert names == ["none, digits, seed 0", "some, digits, seed 0"]
    assert said[0].startswith(f"small: column gone stays open: {tmp_path / 'nowhere'}")
    assert {cell.column for cell in ledger.cells} == {"digits"}
    assert ledger.open(recipe_of(columns=columns, seeds=1)) == [
        ("none", "gone", 0), ("some", "gone", 0),
    ]  # fmt: skip


def test_where_no_column_has_data_nothing_is_run_and_the_reason_is_said(run, tmp_path):
    gone = {"gone": {"config": {"data": str(tmp_path / "nowhere")}}}
    with pytest.raises(ValueError, match=r"nowhere"):
        run(recipe_of(columns=gone))
    assert not (tmp_path / "small.json").exists()


def test_where_a_column_is_to_be_tuned_its_data_are_looked_for_first(run, ran, tmp_path):
    place = str(tmp_path / "nowhere")
    gone = {"gone": {"config": {"data": place, "lr": "{lr}"}, "tune": {"lr": [0.1, 0.2]}}}
    with pytest.raises(ValueError, match="nowhere"):
        run(recipe_of(columns=gone))
    assert ran == []


def test_data_of_a_column_that_is_complete_are_not_looked_for(run, monkeypatch):
    run(recipe_of())

    def never(*args):
        raise AssertionError("somebody asked for images")

    monkeypatch.setattr(reproduce, "check", never)
    names, (ledger,), _ = run(recipe_of())
    assert names == []
    assert len(ledger.cells) == 4


def test_a_recipe_without_data_does_not_keep_another_from_running(run, tmp_path):
    gone = recipe_of("gone", columns={"gone": {"config": {"data": str(tmp_path / "nowhere")}}})
    names, (empty, full), said = run(gone, recipe_of())
    assert len(names) == len(full.cells) == 4
    assert empty.cells == []
    assert said[0].startswith("gone: column gone stays open: ")


def test_a_loss_that_is_none_is_found_before_anything_is_run(run, ran):
    rows = {**GIVEN["rows"], "some": {"config": {"loss": "cosfaces()"}}}
    with pytest.raises(ValueError, match=r"did you mean cosface\?"):
        run(recipe_of(rows=rows))
    assert ran == []


def test_a_damaged_ledger_is_not_overwritten(run, tmp_path):
    (tmp_path / "small.json").write_text("{")
    with pytest.raises(ValueError, match=r"small\.json: not a ledger, or a damaged one"):
        run(recipe_of())
    assert (tmp_path / "small.json").read_text() == "{"


def test_it_does_not_run_under_torchrun(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^reproduce starts its own processes"):
        run(recipe_of())


# ------------------------------------------------------------------------------- what is chosen

TUNED = {
    "none": GIVEN["rows"]["none"],
    "some": {"config": {"loss": "cosface(margin={m})"}, "tune": {"m": [0.1, 0.3, 0.2]}},
}


def test_settings_are_chosen_on_images_held_out_and_then_all_are_trained_on(run, tmp_path):
    names, (ledger,), _ = run(recipe_of(rows=TUNED))
    assert names == [
        *(f"some, digits, m = {m}, seed 0" for m in (0.1, 0.3, 0.2)),
        *(f"{row}, digits, seed {seed}" for row in ("none", "some") for seed in (0, 1)),
    ]
    # 0.1 is best on the test images, 0.3 on those that were held out.
    assert ledger.tuned == {
        "some/digits": {
            "m": 0.3,
            "tried": [
                {"m": 0.1, "accuracy": 60.0},
                {"m": 0.3, "accuracy": 80.0},
                {"m": 0.2, "accuracy": 70.0},
            ],
            "trials": [trial.digest for trial in recipe_of(rows=TUNED).trials("some", "digits")],
        }
    }
    assert ledger.configs["some/digits"]["loss"] == "cosface(margin=0.3)"
    assert ledger.configs["some/digits"]["validation"] == 0.0
    assert ledger.values("some", "digits", "error") == pytest.approx({0: 13.0, 1: 12.0})
    shares = [Run(folder).config.validation for folder in (tmp_path / "runs").iterdir()]
    assert sorted(shares) == [0.0] * 4 + [0.1] * 3
    # A trial is in no table.
    assert len(ledger.cells) == 4


def test_a_row_has_the_settings_that_were_chosen_for_another(run, tmp_path):
    rows = {
        **TUNED,
        "more": {"base": "some", "tuned_as": "some", "config": {"loss": "1.5*cosface(margin={m})"}},
    }
    recipe = recipe_of(rows=rows, seeds=1)
    names, (ledger,), _ = run(Selection(recipe, rows=["more"]))
    trials = [f"some, digits, m = {m}, seed 0" for m in (0.1, 0.3, 0.2)]
    assert names == [*trials, "more, digits, seed 0"]
    assert ledger.tuned.keys() == {"some/digits"}
    assert ledger.configs["more/digits"]["loss"] == "1.5 * cosface(margin=0.3)"
    # On another machine, which has the ledger alone.
    shutil.rmtree(tmp_path / "runs")
    names, (ledger,), _ = run(Selection(recipe, rows=["some", "more"]))
    assert names == ["some, digits, seed 0"]
    assert not ledger.former


def test_what_was_chosen_stays_chosen_without_the_trials(run, tmp_path):
    run(recipe_of(rows=TUNED))
    shutil.rmtree(tmp_path / "runs")
    names, (ledger,), _ = run(Selection(recipe_of(rows=TUNED), seeds=3))
    assert names == ["none, digits, seed 2", "some, digits, seed 2"]
    assert ledger.configs["some/digits"]["loss"] == "cosface(margin=0.3)"


def test_trials_that_were_run_are_not_run_again_where_the_ledger_is_gone(run, tmp_path):
    run(recipe_of(rows=TUNED))
    (tmp_path / "small.json").unlink()
    names, (ledger,), _ = run(recipe_of(rows=TUNED))
    assert names == []
    assert ledger.tuned["some/digits"]["m"] == 0.3


def test_other_values_to_choose_among_are_tried_out(run):
    run(recipe_of(rows=TUNED))
    rows = {**TUNED, "some": {**TUNED["some"], "tune": {"m": [0.1, 0.3, 0.4]}}}
    names, (ledger,), _ = run(recipe_of(rows=rows))
    assert names == ["some, digits, m = 0.4, seed 0",
                     "some, digits, seed 0", "some, digits, seed 1"]  # fmt: skip
    assert ledger.tuned["some/digits"]["m"] == 0.4


def test_a_value_that_diverges_is_not_chosen_and_is_written_down(run):
    rows = {"some": {**TUNED["some"], "tune": {"m": [0.1, 0.8]}}}
    _, (ledger,), _ = run(recipe_of(rows=rows, claims=[]))
    tuned = ledger.tuned["some/digits"]
    assert tuned["m"] == 0.1
    assert tuned["tried"] == [{"m": 0.1, "accuracy": 60.0}, {"m": 0.8, "failed": "not finite"}]


def test_nothing_is_chosen_before_all_values_were_tried(run, ran, monkeypatch):
    inner = in_this_process(ran)

    def some(cells, work, *, at, on_event):
        return inner([c for c in cells if "m = 0.3" not in c.name], work, at=at, on_event=on_event)

    monkeypatch.setattr(reproduce, "run_cells", some)
    names, (ledger,), _ = run(recipe_of(rows=TUNED, seeds=1))
    assert ledger.tuned == {}
    assert names[2:] == ["none, digits, seed 0"]


def test_where_no_value_trains_the_cell_stays_open_and_others_run(run):
    rows = {**TUNED, "some": {**TUNED["some"], "tune": {"m": [0.8, 0.7]}}}
    recipe = recipe_of(rows=rows, seeds=1)
    names, (ledger,), _ = run(recipe)
    assert names[2:] == ["none, digits, seed 0"]
    assert ledger.tuned == {}
    assert ledger.open(recipe) == [("some", "digits", 0)]
    # What diverged would again; there is hope for the other.
    assert run(recipe)[0] == ["some, digits, m = 0.7, seed 0"]


# --------------------------------------------------------------------------------- where data are


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


def test_data_are_taken_from_where_the_user_says(run, images, tmp_path):
    columns = {"mnist": {"config": {"data": "mnist"}}}
    place = str(images / "mnist")
    names, (ledger,), _ = run(recipe_of(columns=columns, seeds=1), sources={"mnist": place})
    assert len(names) == 2
    assert {Run(folder).config.data for folder in (tmp_path / "runs").iterdir()} == {place}
    assert ledger.configs["none/mnist"]["data"] == place


# ------------------------------------------------------------------------------ the command line


@pytest.fixture
def command(tmp_path, ran, capsys):
    """Call ``tammes reproduce`` on a recipe in a file; its exit code and what it printed."""

    def go(*words, **changes):
        path = tmp_path / "small.yaml"
        path.write_text(json.dumps({**GIVEN, **changes}))
        ran.clear()
        code = main(["reproduce", str(path), *words, "--out", str(tmp_path / "out")])
        said = capsys.readouterr()
        return code, said.out, said.err

    return go


def test_the_command_prints_a_table_and_writes_a_page_and_ends_with_0(command, ran, tmp_path):
    code, out, _ = command()
    assert code == 0
    assert len(ran) == 4
    assert "Margins on digits" in out
    assert "CosFace" in out
    page = tmp_path / "out" / "small.html"
    assert f"page: {page}" in out
    assert "CosFace" in page.read_text(encoding="utf-8")


def test_what_is_done_and_open_is_said_without_running_anything(command, ran, tmp_path):
    code, out, _ = command("--plan")
    assert (code, ran) == (0, [])
    assert not (tmp_path / "out").exists()
    assert out.splitlines() == [
        "small: Margins on digits",
        "  none, digits, seed 0: open",
        "  none, digits, seed 1: open",
        "  some, digits, seed 0: open",
        "  some, digits, seed 1: open",
        "  4 of 4 cells are open",
    ]
    command("--rows", "some", "--seeds", "1")
    code, out, _ = command("--plan", "--rows", "some")
    assert out.splitlines()[1:] == [
        "  some, digits, seed 0: done, 3 s",
        "  some, digits, seed 1: open",
        "  1 of 2 cells are open; a cell took 3 s",
    ]


def test_a_plan_knows_what_is_stale_what_is_to_be_chosen_and_what_failed(command):
    command()
    rows = {"none": GIVEN["rows"]["none"], "some": TUNED["some"]}
    _, out, _ = command("--plan", "--seeds", "1", rows=rows)
    assert out.splitlines()[1:] == [
        "  none, digits, seed 0: done, 3 s",
        "  some, digits, seed 0: open",
        "  1 of 2 cells are open, and 3 tuning runs; a cell took 3 s",
    ]
    command("--seeds", "1", rows=rows)
    _, out, _ = command("--plan", "--seeds", "1", rows=rows)
    assert out.endswith("  0 of 2 cells are open; a cell took 3 s\n")
    changed = {**GIVEN["rows"], "some": row_with(0.7)}
    _, out, _ = command("--plan", "--seeds", "1", rows=changed)
    assert "some, digits, seed 0: open" in out
    command("--seeds", "1", rows=changed)
    _, out, _ = command("--plan", "--seeds", "1", rows=changed)
    assert "some, digits, seed 0: failed, 0 s" in out
    assert "1 of 2 cells are open" in out


def test_the_exit_code_says_whether_something_is_missing(command, tmp_path):
    gone = {**GIVEN["columns"], "gone": {"config": {"data": str(tmp_path / "nowhere")}}}
    assert command(columns=gone)[0] == 1
    assert command("--columns", "digits", columns=gone)[0] == 0
    # One that diverged is what came out; one that failed is run again.
    assert command(rows={**GIVEN["rows"], "some": row_with(0.8)})[0] == 0
    assert command(rows={**GIVEN["rows"], "some": row_with(0.7)})[0] == 1
    untrained = {**TUNED, "some": {**TUNED["some"], "tune": {"m": [0.8, 0.7]}}}
    assert command(rows=untrained)[0] == 1


def test_cells_that_are_stale_and_could_not_be_run_are_missing(command, tmp_path):
    data = {"digits": {"config": {"data": str(tmp_path / "nowhere")}}, "more": {}}
    assert command()[0] == 0
    assert command(columns=data)[0] == 1


def test_an_interrupt_ends_with_130(command, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "run_cells", interrupted)
    code, _, err = command()
    assert code == 130
    assert err.endswith("interrupted; repeat the command to resume\n")


def test_rows_columns_and_seeds_are_chosen_on_the_command_line(command, ran):
    assert command("--rows", "some, none,", "--columns", "digits", "--seeds", "3,1")[0] == 0
    assert ran == ["some, digits, seed 3", "some, digits, seed 1",
                   "none, digits, seed 3", "none, digits, seed 1"]  # fmt: skip
    command("--rows", "some,some", "--seeds", "1")
    assert ran == ["some, digits, seed 0"]


def test_data_may_be_a_folder_or_a_name_with_its_place(command, ran, images, monkeypatch):
    # The command sets it; it is put back after the test.
    monkeypatch.setenv("TAMMES_DATA", str(images / "nothing"))
    columns = {"mnist": {"config": {"data": "mnist"}}}
    assert command("--seeds", "1", "--data", f"mnist={images / 'mnist'}", columns=columns)[0] == 0
    assert len(ran) == 2
    _, out, _ = command(
        "--plan", "--seeds", "1", "--data", f"mnist={images / 'mnist'}", columns=columns
    )
    assert "0 of 2 cells are open" in out
    # They are the same cells wherever their data are.
    assert command("--seeds", "1", columns=columns)[0] == 0
    assert ran == []
    assert command("--seeds", "2", "--data", str(images), columns=columns)[0] == 0
    assert ran == ["none, mnist, seed 1", "some, mnist, seed 1"]


def test_a_recipe_is_named_twice_and_run_once(command, ran, tmp_path):
    assert command(str(tmp_path / "small.yaml"), "--seeds", "1")[0] == 0
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rows", "sme"], "small has no row 'sme'; did you mean some?"),
        (["--columns", "xxx"], "small has no column 'xxx'; it has digits"),
        (["--rows", ","], "names separated by commas are expected, got ','"),
        (["--seeds", "0"], "seeds is expected to be at least 1, got 0"),
        (["--seeds", "1,1"], "seeds is expected to name each seed once, got [1, 1]"),
        (["--seeds", "many"], "argument --seeds: a number or a list such as 0,1,5 is expected, "
         "got 'many'; see tammes reproduce --help"),
        (["--data", "nowhere/at/all"], "--data expects a folder or NAME=FOLDER, got "
         "'nowhere/at/all'"),
        (["--data", "cifar=x"], "--data: there is no data set 'cifar'; did you mean cifar10?"),
        (["--data", "cifar10="], "--data expects a folder or NAME=FOLDER, got 'cifar10='"),
        (
            ["--address", "here:1"],
            "--address is the address of a Ray cluster and expects --engine ray",
        ),
        (["--retries", "-1"], "--retries is expected to be at least 0, got -1"),
        (["--parallel", "0"], "--parallel is expected to be at least 1, got 0"),
        (["--engine", "slurm"], None),
        (["--row", "some"], None),
        (["kobayashi2019/table2", "--rows", "some"], "--rows is for one recipe, got 2"),
        (["kobayashi2019/table2", "--columns", "x"], "--columns is for one recipe, got 2"),
        (["kobayashi2019/tabl2"], "there is no recipe 'kobayashi2019/tabl2'; did you mean "
         "kobayashi2019/table2?"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_in_one_sentence(command, ran, words, sentence):
    code, out, err = command(*words)
    assert (code, out, ran) == (2, "", [])
    said = err.splitlines()
    assert len(said) == 1
    if sentence is not None:
        assert said == [f"tammes reproduce: {sentence}"]


def test_rows_and_columns_that_have_no_cell_between_them_are_refused(command):
    rows = {"none": {}, "some": {"columns": ["more"]}}
    columns = {"digits": {}, "more": {"on_request": True}}
    _, _, err = command("--rows", "some", "--columns", "digits", rows=rows, columns=columns)
    assert err == "tammes reproduce: small has no cell in these rows and columns\n"
    _, _, err = command("--rows", "some", rows=rows, columns=columns)
    assert err == (
        "tammes reproduce: small has no cell in these rows and columns; try --columns digits,more\n"
    )


def test_a_recipe_without_rows_is_shown_and_complete(command, ran):
    figures = [{"draw": "formula", "of": "divergences"}]
    code, out, _ = command(rows={}, columns={}, claims=[], figures=figures)
    assert (code, ran) == (0, [])
    assert "Margins on digits" in out


def test_without_a_name_all_recipes_are_listed(capsys):
    assert main(["reproduce"]) == 0
    out = capsys.readouterr().out
    for name in recipes.names():
        assert re.search(rf"^{name} +\S", out, re.MULTILINE)
    assert "vgg16 (on request)" in out


# ---------------------------------------------------------------------------------- really trained


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A recipe that is trained: one row plain, one tuned, one that diverges, two on the sphere."""
    out = tmp_path_factory.mktemp("trained")
    rows = {
        "none": GIVEN["rows"]["none"],
        "some": {
            "title": "CosFace",
            "config": {"loss": "cosface(margin=0.2)", "head": "cosine(scale={s})"},
            "tune": {"s": [8, 1e-6]},
        },
        "bad": {"config": {"loss": "1e30*softmax()", "lr": 1e30, "head": "linear()"}},
        "ball": {"kind": "sphere", "settings": {"loss": "lm_softmax()", "scale": 5, "steps": 20}},
    }
    given = {
        **GIVEN,
        "rows": rows,
        "seeds": 1,
        "curves": ["train.bias", "test.bias"],
        "keep": ["histograms", "scatter"],
    }
    path = out / "real.yaml"
    path.write_text(json.dumps(given))
    with pytest.MonkeyPatch.context() as patch:
        # Processes of their own have tests of their own.
        patch.setattr(reproduce, "run_cells", in_this_process([], reproduce.run_cell))
        code = main(["reproduce", str(path), "--out", str(out)])
    return code, out, recipes.load(path), Ledger.read(out / "real.json")


def folder_of(out, ledger, row):
    (entry,) = (cell for cell in ledger.cells if cell.row == row)
    (folder,) = (out / "runs").glob(f"*-seed0-{entry.digest}")
    return entry, folder


def test_every_cell_of_a_real_reproduction_ended_as_it_should(trained):
    code, out, recipe, ledger = trained
    assert code == 0
    assert {cell.row: cell.status for cell in ledger.cells} == {
        "none": "done", "some": "done", "bad": "diverged", "ball": "done",
    }  # fmt: skip
    assert (out / "real.html").exists()
    (verdict,) = judge(recipe, ledger)
    better = (
        ledger.values("some", "digits", "error")[0] <= ledger.values("none", "digits", "error")[0]
    )
    assert verdict.outcome == ("leans" if better else "fails")


def test_real_settings_were_chosen_by_the_images_held_out(trained):
    _, out, _, ledger = trained
    tuned = ledger.tuned["some/digits"]
    assert [each["s"] for each in tuned["tried"]] == [8, 1e-6]
    for each in tuned["tried"]:
        found = [
            Run(folder)
            for folder in (out / "runs").iterdir()
            if (folder / "config.json").exists()
            and Run(folder).config.validation
            and Run(folder).config.head == f"cosine(scale={each['s']})"
        ]
        assert len(found) == 1
        run = found[0]
        assert (run.data["validation"], run.data["train"]) == (10, 90)
        last = run.metrics[-1]["validation"]["accuracy"]
        assert each["accuracy"] == pytest.approx(100 * last, abs=1e-3)
    best = max(tuned["tried"], key=lambda each: each["accuracy"])
    assert tuned["s"] == best["s"]
    _, folder = folder_of(out, ledger, "some")
    assert Run(folder).config.head == f"cosine(scale={tuned['s']})"
    assert Run(folder).data["train"] == 100


def test_real_numbers_are_those_of_the_run(trained):
    _, out, _, ledger = trained
    entry, folder = folder_of(out, ledger, "none")
    run = Run(folder)
    assert entry.values["error"] == pytest.approx(100 - 100 * run.final["test"]["accuracy"])
    prototypes = run.tensors("prototypes")["prototypes"]
    norms = prototypes.norm(dim=1)
    assert entry.values["norm_ratio"] == pytest.approx(float(norms.max() / norms.min()), rel=1e-5)
    assert entry.values["train_error"] == pytest.approx(
        100 - 100 * run.metrics[-1]["train"]["accuracy"]
    )
    assert entry.optimum["class_margin"] == pytest.approx(36.0)
    assert (entry.epochs, entry.step) == (2, 4)
    assert ledger.machines[entry.machine]["torch"] == torch.__version__
    assert entry.curves["epoch"] == [1, 2]
    assert all(isinstance(value, float) for value in entry.curves["train.bias"])
    assert run.data["test"] == 100


def test_a_real_divergence_has_a_step_and_no_number(trained):
    _, _, _, ledger = trained
    (bad,) = (cell for cell in ledger.cells if cell.row == "bad")
    assert bad.step >= 1
    assert f"step {bad.step}" in bad.reason
    assert (bad.values, bad.kept) == ({}, {})


def test_a_real_scatter_has_the_features_of_the_images(trained):
    from tammes.lab.training.datasets import prepare_data
    from tammes.lab.training.model import load_model

    _, out, _, ledger = trained
    entry, folder = folder_of(out, ledger, "none")
    run, scatter = Run(folder), entry.kept["scatter"]
    kept = run.tensors("embeddings")
    assert scatter["test"]["x"] == pytest.approx(kept["features"][:, 0].tolist(), rel=1e-3)
    assert scatter["test"]["y"] == pytest.approx(kept["features"][:, 1].tolist(), rel=1e-3)
    assert scatter["test"]["label"] == kept["labels"].tolist()
    training, _, _ = prepare_data(run.config, lambda text: None)
    pixels = torch.stack([training.read(place) for place in range(len(training))])
    with torch.no_grad():
        features = load_model(run).features(pixels)
    assert scatter["train"]["label"] == training.labels.tolist()
    assert scatter["train"]["x"] == pytest.approx(features[:, 0].tolist(), rel=1e-2, abs=1e-4)
    prototypes = run.tensors("prototypes")["prototypes"]
    assert torch.allclose(torch.tensor(scatter["prototypes"]), prototypes, rtol=1e-3)
    assert sum(entry.kept["histograms"]["own"]) == 100


def test_a_real_cell_on_the_sphere_keeps_its_points(trained):
    _, _, _, ledger = trained
    (ball,) = (cell for cell in ledger.cells if cell.row == "ball")
    assert ball.kept["sphere"].keys() == {"prototypes", "features", "labels"}
    assert ball.values.keys() == {"class_margin", "sample_margin"}


def test_a_real_reproduction_that_is_complete_runs_nothing(trained, monkeypatch):
    _, out, _, ledger = trained

    def never(*args, **options):
        raise AssertionError("something was run")

    monkeypatch.setattr(reproduce, "run_cells", never)
    assert main(["reproduce", str(out / "real.yaml"), "--out", str(out)]) == 0
    assert Ledger.read(out / "real.json").cells == ledger.cells
    # Also where the ledger is gone.
    (out / "real.json").rename(out / "kept.json")
    assert main(["reproduce", str(out / "real.yaml"), "--out", str(out)]) == 0
    again = Ledger.read(out / "real.json")
    assert sorted(again.cells, key=lambda cell: cell.row) == sorted(
        ledger.cells, key=lambda cell: cell.row
    )
    assert again.tuned == ledger.tuned


def test_a_test_set_of_its_own_is_read_from_elsewhere_too():
    cell = recipes.load("liu2016/lfw").cell("softmax", "lfw", 0)
    moved = with_local_data(cell, {"lfw": "/disk/lfw"})
    assert (moved.config.data, moved.config.test) == ("webface", "/disk/lfw")
    assert moved.digest == cell.digest
    assert with_local_data(cell, {"cub": "/disk/cub"}) is cell
