"""The queue: next open cells in their order, call after call, and how much is left."""

import importlib.util
import signal
from dataclasses import replace
from pathlib import Path

import cell_queue
import pytest
from cell_queue import QueueLine, Remaining, remaining, run_queue, take_over
from ledgers import MACHINE, entry
from reproduce_work import in_this_process

from tammes.lab.reproduce import run as reproduction
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipe_yaml import read
from tammes.lab.reproduce.run import RunnerSettings, Selection
from tammes.lab.training import loop

ROOT = Path(__file__).parents[3]
ONE = RunnerSettings(workers=1)
PLAIN = {
    "title": "T",
    "source": "s",
    "seeds": 1,
    "config": {
        "backbone": "mnist_cnn(width=0.125)", "augment": "none", "batch_size": 200,
        "lr_schedule": "constant()", "optimizer": "sgd", "lr": 0.01,
    },
    "columns": {
        "short": {"config": {"data": "digits", "epochs": 1}},
        "long": {"config": {"data": "digits", "epochs": 4}},
        "gone": {"config": {"data": "/nowhere/at/all", "epochs": 1}},
    },
    "rows": {
        "a": {"config": {"loss": "softmax()"}},
        "b": {"config": {"loss": "cosface(margin={m})"}, "tune": {"m": [0.1, 0.2]}},
    },
}  # fmt: skip
RECIPE = read(PLAIN, "made/small")
OTHER = read({**PLAIN, "title": "other"}, "made/other")


def line(rows=("a",), columns=("short",), seeds=1, minutes=1.0, recipe=RECIPE):
    return QueueLine(Selection(recipe, list(rows), list(columns), seeds), minutes)


def done(cell, **more):
    return entry(cell.row, cell.column, cell.seed, {"error": 5.0}, digest=cell.digest, **more)


def write(out, *cells, recipe=RECIPE, **more):
    configs = {f"{cell.row}/{cell.column}": cell.config.group() for cell, _ in cells}
    ledger = Ledger(recipe.name, machines=[MACHINE], configs=configs,
                    cells=[done(cell, **with_) for cell, with_ in cells], **more)  # fmt: skip
    (out / recipe.name).parent.mkdir(parents=True, exist_ok=True)
    ledger.write(out / f"{recipe.name}.json")


# -------------------------------------------------------------------------------- what is left


def test_open_cells_are_counted_once_and_their_time_is_that_of_similar_ones(tmp_path):
    first = RECIPE.cell("a", "short", 0)
    write(tmp_path, (first, {"seconds": 30.0, "epochs": 1}))
    lines = [line(seeds=3), line(seeds=3, recipe=OTHER)]
    left = remaining(lines, tmp_path, workers=2)
    # Two seeds of 30 s; the other recipe has the same runs, one of them not in its ledger.
    assert left == Remaining(cells=3, trials=0, minutes=0.75, guessed=0)
    assert str(left) == "about 1 minutes remain: 3 cells"
    longer = remaining([*lines, line(columns=["long"])], tmp_path, workers=2)
    # An epoch costs the same, and no worker helps another with its cell.
    assert (longer.cells, longer.minutes) == (4, 2.0)


def test_the_time_is_a_guess_where_nothing_similar_was_run(tmp_path):
    left = remaining([line(seeds=2, minutes=7)], tmp_path, workers=1)
    assert left == Remaining(cells=2, trials=0, minutes=14.0, guessed=2)
    assert str(left) == "about 14 minutes remain: 2 cells; the time of 2 is a guess"
    assert str(Remaining(0, 0, 0.0, 0)) == "nothing is open"


def test_a_line_has_the_times_of_the_lines_beside_it(tmp_path):
    write(tmp_path, (RECIPE.cell("a", "short", 0), {"seconds": 30.0, "epochs": 1}))
    own = line(columns=["long"], recipe=OTHER)
    assert remaining([own], tmp_path, workers=1).guessed == 1
    left = remaining([own], tmp_path, workers=1, beside=[line(), own])
    assert left == Remaining(cells=1, trials=0, minutes=2.0, guessed=0)


def test_tuning_runs_are_counted_until_their_settings_are_known(tmp_path):
    both = [line(rows=["b"])]
    assert remaining(both, tmp_path, workers=1).trials == 2
    assert remaining(both, tmp_path, workers=1).cells == 3
    trials = [trial.digest for trial in RECIPE.trials("b", "short")]
    write(tmp_path, tuned={"b/short": {"m": 0.2, "trials": trials}})
    assert remaining(both, tmp_path, workers=1) == Remaining(1, 0, 1.0, 1)


# -------------------------------------------------------------------------------- the order


@pytest.fixture
def called(monkeypatch):
    """Selections of each call of ``reproduce``, which does nothing."""
    calls = []

    def spy(selections, *_, **__):
        calls.append([(each.recipe.name, each.rows, each.columns) for each in selections])

    monkeypatch.setattr(cell_queue, "reproduce", spy)
    return calls


def test_lines_run_together_in_their_order_and_finished_ones_not_at_all(tmp_path, called):
    write(tmp_path, (RECIPE.cell("a", "short", 0), {}))
    lines = [line(), line(columns=["long"]), line(seeds=2, recipe=OTHER)]
    run_queue(lines, tmp_path, seconds=600, engine=ONE)
    assert called == [[("made/small", ["a"], ["long"]), ("made/other", ["a"], ["short"])]]


def test_a_line_that_is_tuned_begins_a_stage(tmp_path, called):
    lines = [line(), line(rows=["b"]), line(recipe=OTHER)]
    run_queue(lines, tmp_path, seconds=600, engine=ONE)
    assert [len(stage) for stage in called] == [1, 2]


def test_no_more_lines_are_prepared_than_there_is_time_for(tmp_path, called):
    lines = [line(minutes=30), line(columns=["long"]), line(recipe=OTHER)]
    run_queue(lines, tmp_path, seconds=600, engine=ONE)
    assert [len(stage) for stage in called] == [1, 2]


# -------------------------------------------------------------------------------- the runs


@pytest.fixture
def ran(monkeypatch):
    """Names of the cells that are run; nothing is trained."""
    log = []
    monkeypatch.setattr(reproduction, "run_cells", in_this_process(log))
    return log


def test_a_queue_goes_on_where_it_stopped_and_passes_by_what_has_no_data(tmp_path, ran):
    said = []
    lines = [line(columns=["gone"]), line(rows=["b"], seeds=2), line(columns=["long"])]

    def call(*chosen):
        ran.clear()
        return run_queue(chosen, tmp_path, seconds=600, engine=ONE, report=said.append).cells

    assert call(lines[0]) == 1
    assert any("/nowhere/at/all" in text for text in said)
    assert call(*lines[:2]) == 1
    assert ran == [
        "b, short, m = 0.1, seed 0", "b, short, m = 0.2, seed 0", "b, short, seed 0",
        "b, short, seed 1",
    ]  # fmt: skip
    assert call(*lines) == 1
    assert ran == ["a, long, seed 0"]
    assert call(*lines) == 1
    assert ran == []
    ledger = Ledger.at(tmp_path / "made/small.json", RECIPE)
    assert len(ledger.cells) == 3


def test_lines_of_one_recipe_that_run_together_have_one_ledger(tmp_path, ran):
    lines = [line(), line(columns=["long"]), line(seeds=2)]
    run_queue(lines, tmp_path, seconds=600, engine=ONE)
    assert ran == ["a, short, seed 0", "a, long, seed 0", "a, short, seed 1"]
    assert len(Ledger.at(tmp_path / "made/small.json", RECIPE).cells) == 3


def test_when_time_is_up_the_next_call_resumes_from_the_checkpoint(tmp_path, monkeypatch):
    # As often as the clock can tell.
    monkeypatch.setattr(reproduction, "_SAVE_SECONDS", 1e-9)
    monkeypatch.setattr(reproduction, "run_cells", in_this_process([], reproduction.run_cell))
    save, saved, said = loop._TrainingState.save, [], []

    def stop_within_an_epoch(work):
        save(work)
        saved.append(work.steps)
        if len(saved) == 10:
            # What the alarm does.
            raise KeyboardInterrupt

    monkeypatch.setattr(loop._TrainingState, "save", stop_within_an_epoch)
    chosen = [line(columns=["long"])]
    assert run_queue(chosen, tmp_path, seconds=600, report=said.append).cells == 1
    assert said[-1] == "time is up; call again to go on"
    assert run_queue(chosen, tmp_path, seconds=600, report=said.append).cells == 0
    # An epoch has 7 steps, and is saved once more at its end.
    assert saved[:10] == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9]
    assert saved[10:12] == [10, 11]
    (cell,) = Ledger.at(tmp_path / "made/small.json", RECIPE).cells
    assert (cell.status, cell.step) == ("done", 28)


def test_time_is_up_after_so_many_seconds_and_not_later():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), cell_queue.time_limit(0.01):
        signal.pause()
    with cell_queue.time_limit(600):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_cell_saves_a_checkpoint_within_a_minute():
    cell = reproduction._cell(Path("run"), [RECIPE.cell("a", "long", 0)])
    assert 0 < cell.payload["config"]["save_seconds"] < 60


# -------------------------------------------------------------------------------- other ledgers


def test_entries_of_other_ledgers_are_taken_over(tmp_path):
    known, out = tmp_path / "known", tmp_path / "out"
    zero, one, two = (RECIPE.cell("a", "short", seed) for seed in range(3))
    write(known, (zero, {"machine": 0}), (one, {"machine": 0}))
    take_over([line()], known, out)
    assert (out / "made/small.json").read_bytes() == (known / "made/small.json").read_bytes()
    other = {**MACHINE, "device": "another"}
    ledger = Ledger(
        RECIPE.name, machines=[other], cells=[done(two, machine=0), done(zero, machine=0)]
    )
    ledger.cells[1] = replace(ledger.cells[1], values={"error": 7.0})
    ledger.write(out / "made/small.json")
    take_over([line()], known, out)
    merged = Ledger.at(out / "made/small.json", RECIPE)
    assert merged.values("a", "short", "error") == {0: 7.0, 1: 5.0, 2: 5.0}
    machines = {e.seed: merged.machines[e.machine]["device"] for e in merged.cells}
    assert machines == {0: "another", 1: MACHINE["device"], 2: "another"}
    assert merged.configs.keys() == {"a/short"}
    # Nothing changes the ledgers that were read.
    assert len(Ledger.read(known / "made/small.json").cells) == 2


def test_a_run_that_another_recipe_has_is_not_run_again(tmp_path, ran):
    write(tmp_path, (RECIPE.cell("a", "short", 0), {"machine": 0}))
    lines = [line(), line(seeds=2, recipe=OTHER)]
    assert run_queue(lines, tmp_path, seconds=600, engine=ONE).cells == 0
    assert ran == ["a, short, seed 1"]
    ledger = Ledger.at(tmp_path / "made/other.json", OTHER)
    assert ledger.values("a", "short", "error")[0] == 5.0
    assert ledger.machines[ledger.of("a", "short")[0].machine] == MACHINE
    assert ledger.configs.keys() == {"a/short"}


def test_an_entry_without_the_curves_of_a_recipe_is_not_copied_to_it(tmp_path, called):
    drawn = read({**PLAIN, "curves": ["test.accuracy"]}, "made/drawn")
    write(tmp_path, (RECIPE.cell("a", "short", 0), {"curves": {"epoch": [1]}}))
    assert run_queue([line(), line(recipe=drawn)], tmp_path, seconds=600, engine=ONE).cells == 1
    assert called == [[("made/drawn", ["a"], ["short"])]]


def test_an_entry_without_the_extras_of_a_recipe_is_copied_to_it(tmp_path, called):
    watching = read({**PLAIN, "keep": ["health"]}, "made/watching")
    write(tmp_path, (RECIPE.cell("a", "short", 0), {}))
    assert run_queue([line(), line(recipe=watching)], tmp_path, seconds=600, engine=ONE).cells == 0
    assert called == []


def test_of_two_entries_of_a_run_the_one_with_the_extras_is_copied(tmp_path, called):
    first = read(PLAIN, "made/first")
    watching = read({**PLAIN, "keep": ["health"]}, "made/watching")
    write(tmp_path, (first.cell("a", "short", 0), {"kept": {"health": {}}}), recipe=first)
    write(tmp_path, (RECIPE.cell("a", "short", 0), {}))
    run_queue(
        [line(recipe=first), line(), line(recipe=watching)], tmp_path, seconds=600, engine=ONE
    )
    (copied,) = Ledger.read(tmp_path / "made/watching.json").cells
    assert "health" in copied.kept


# -------------------------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("h200", ROOT / "results" / "reproduce_h200.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_line_of_the_script_selects_cells(script):
    lines = [line for several in (script.QUEUE, *script.PHASES.values()) for line in several]
    for each in script.queue_lines(lines):
        selection = each.selection
        assert [*selection.recipe.places(selection.rows, selection.columns)], selection
        assert each.minutes > 0


def test_the_queue_begins_with_the_sums_on_cifar(script):
    lines = [line for line in script.QUEUE if line not in script.SEEDS]
    names = [*dict.fromkeys(name for name, *_ in lines)]
    assert names[:4] == [
        "kobayashi2024/cifar", "zhou2022/table1", "zhou2022/unstable", "zhou2022/table2",
    ]  # fmt: skip
    first = [each.selection for each in script.queue_lines(lines[:3])]
    places = [{*each.recipe.places(each.rows, each.columns)} for each in first]
    assert [len(each) for each in places] == [6, 12, 12]
    assert len(set.union(*places)) == 24
    assert {each.seeds for each in first} == {3}


def test_the_script_says_how_much_is_open_without_running_anything(script, capsys, tmp_path):
    assert script.main(["mnist", "--plan", "--out", str(tmp_path), "--parallel", "1"]) == 1
    said = capsys.readouterr().out
    left = "about 12 minutes remain: 23 cells; the time of 23 is a guess\n"
    assert said == f"zhou2022/table1, mnist: {left}{left}"
    assert script.main(["mnist", "--plan"]) == 0
    assert capsys.readouterr().out == "zhou2022/table1, mnist: nothing is open\nnothing is open\n"
    assert not [*tmp_path.iterdir()]
