"""A reproduction that is killed goes on where it was: no finished cell twice, none lost."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tammes.lab.reproduce import recipes
from tammes.lab.reproduce import run as reproduce
from tammes.lab.reproduce.judge import judge
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.run import RunnerSettings, Selection
from tammes.lab.runner import Result

RECIPE = """
title: Two losses on digits
source: nowhere
seeds: 2
quantities: [error, class_margin]
config:
  backbone: mnist_cnn(width=0.25)
  augment: none
  batch_size: 64
  optimizer: sgd
  lr: 0.05
  precision: fp32
  head: cosine(scale=16)
columns:
  digits: {title: Digits, config: {data: digits}}
rows:
  short: {title: Softmax, config: {loss: softmax(), epochs: 2}}
  softmax: {title: Softmax, config: {loss: softmax(), epochs: 40}}
  cosface: {title: CosFace, config: {loss: cosface(margin=0.2), epochs: 40}}
claims:
  - {says: The margin helps., better: cosface, than: softmax}
"""
SAME = (
    "row",
    "column",
    "seed",
    "digest",
    "status",
    "values",
    "optimum",
    "epochs",
    "step",
    "curves",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "digits.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    """What comes out where nothing happens."""
    out = tmp_path_factory.mktemp("undisturbed")
    program = start(recipe, out)
    _, said = program.communicate(timeout=300)
    assert program.returncode == 0, said
    return entries(out, recipe)


def start(recipe, out, *more):
    """``tammes reproduce`` in a session of its own, three cells at a time."""
    command = ["reproduce", str(recipe), "--out", str(out), "--parallel", "3", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "tammes", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def entries(out, recipe):
    """What the ledger says of every cell, but for seconds and machines."""
    cells = json.loads((out / f"{recipe.stem}.json").read_text())["cells"]
    return [{key: cell.get(key) for key in SAME} for cell in cells]


def begun(text):
    """Cells that a program has said it works on."""
    return re.findall(r"\] (.*, seed \d): running$", text, re.MULTILINE)


def finished(out):
    """When each cell that is finished was."""
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("runs/*/final.json")}


def in_the_middle(out):
    """Folders of cells that have trained for an epoch or more and are not finished."""
    return [
        path.parent
        for path in out.glob("runs/*/metrics.jsonl")
        if path.stat().st_size and not (path.parent / "final.json").exists()
    ]


def wait_for_the_middle(program, out, seconds=120):
    """Wait until two cells train and two or more, the short ones, are finished."""
    end = time.monotonic() + seconds
    while len(in_the_middle(out)) < 2 or len(finished(out)) < 2:
        assert program.poll() is None, "it ended before it was in the middle of two cells"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def workers(number):
    """Processes that a program has started, by the order of their numbers."""
    found = []
    for task in Path(f"/proc/{number}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return sorted(found)


@pytest.mark.slow
def test_killed_reproduction_resumes_bit_identically(tmp_path, recipe, undisturbed):
    program = start(recipe, tmp_path)
    try:
        wait_for_the_middle(program, tmp_path)
        children = workers(program.pid)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        _, first = program.communicate(timeout=60)
    assert 2 <= len(children) <= 3
    for child in children:
        # It ends by itself, as its parent is gone.
        end = time.monotonic() + 30
        while Path(f"/proc/{child}").exists() and "Z" not in state(child):
            assert time.monotonic() < end, "a process is left running"
            time.sleep(0.05)
    before = finished(tmp_path)
    assert 2 <= len(before) <= 4
    assert len(before) + len(children) >= len(set(begun(first))) >= len(before) + 2

    program = start(recipe, tmp_path)
    _, second = program.communicate(timeout=300)
    assert program.returncode == 0, second
    after = finished(tmp_path)
    assert len(after) == 6
    assert {name: after[name] for name in before} == before, "a finished cell was run again"
    assert len(begun(second)) == len(set(begun(second))) == 6 - len(before)
    assert entries(tmp_path, recipe) == undisturbed
    assert [cell["status"] for cell in undisturbed] == ["done"] * 6

    program = start(recipe, tmp_path)
    _, third = program.communicate(timeout=300)
    assert program.returncode == 0
    assert begun(third) == []
    assert finished(tmp_path) == after


def state(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.slow
def test_killed_cell_is_retried_bit_identically(tmp_path, recipe, undisturbed):
    program = start(recipe, tmp_path)
    try:
        wait_for_the_middle(program, tmp_path)
        os.kill(workers(program.pid)[0], signal.SIGKILL)
        _, said = program.communicate(timeout=300)
    finally:
        program.kill()
    assert program.returncode == 0, said
    assert said.count("retrying, as its process was killed by SIGKILL") == 1
    started = begun(said)
    assert len(set(started)) == 6
    assert len(started) == 7, "one cell began twice, the others once"
    assert entries(tmp_path, recipe) == undisturbed


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_on_a_ray_cluster_the_ledger_is_the_same(tmp_path, recipe, undisturbed):
    program = start(recipe, tmp_path, "--engine", "ray")
    _, said = program.communicate(timeout=300)
    assert program.returncode == 0, said
    assert entries(tmp_path, recipe) == undisturbed


@pytest.mark.slow
def test_a_cell_that_diverges_is_recorded_with_its_step_and_is_no_number(tmp_path):
    recipe = tmp_path / "diverges.yaml"
    text = RECIPE.replace("epochs: 40", "epochs: 1").replace("seeds: 2", "seeds: 1")
    recipe.write_text(text.replace("cosface(margin=0.2)", "1e30*cosface(margin=0.2)"))
    program = start(recipe, tmp_path, "--rows", "softmax,cosface")
    out, said = program.communicate(timeout=300)
    assert "the loss was not finite at step" in said
    assert "retrying" not in said
    ledger = Ledger.read(tmp_path / "diverges.json")
    by_row = {entry.row: entry for entry in ledger.cells}
    assert by_row["softmax"].status == "done"
    bad = by_row["cosface"]
    assert (bad.status, bad.values, bad.curves) == ("diverged", {}, {})
    assert bad.step >= 1
    assert f"step {bad.step}" in bad.reason
    assert ledger.values("cosface", "digits", "error") == {}
    assert "diverged" in out
    assert [verdict.outcome for verdict in judge(recipes.load(recipe), ledger)] == ["fails"]

    program = start(recipe, tmp_path, "--rows", "softmax,cosface")
    _, again = program.communicate(timeout=300)
    assert begun(again) == [], "it would end in the same place"
    assert Ledger.read(tmp_path / "diverges.json").cells == ledger.cells


@pytest.mark.slow
def test_the_recipe_in_the_guide_runs(tmp_path):
    guide = Path(__file__).parents[3] / "docs" / "reproduce.md"
    (text,) = re.findall(r"```yaml\n(# smoothing.yaml\n.*?)```", guide.read_text(), re.DOTALL)
    recipe = tmp_path / "smoothing.yaml"
    recipe.write_text(text.replace("epochs: 5", "epochs: 1"))
    program = start(recipe, tmp_path)
    out, said = program.communicate(timeout=300)
    assert program.returncode == 0, said
    ledger = Ledger.read(tmp_path / "smoothing.json")
    assert [entry.status for entry in ledger.cells] == ["done"] * 10
    assert len(judge(recipes.load(recipe), ledger)) == 2
    assert (tmp_path / "smoothing.html").exists()
    assert "open" not in out.replace(str(tmp_path), "")


# -- Who runs what, without any training.


@pytest.fixture
def asked(monkeypatch):
    """What the engine is asked to run: cells and places, call by call; all of them crash."""
    calls = []

    def run(cells, work, *, at, on_event):
        calls.append(([cell.name for cell in cells], at))
        return [Result(cell, False, "it was killed", crashed=True) for cell in cells]

    monkeypatch.setattr(reproduce, "run_cells", run)
    return calls


def test_cell_that_always_crashes_is_retried_and_then_failed(tmp_path, recipe, asked):
    said = []
    ledger = reproduce.reproduce(
        [Selection(recipes.load(recipe), rows=["short"], seeds=1)],
        tmp_path,
        engine=RunnerSettings(retries=2),
        report=said.append,
    )[0]
    assert [names for names, _ in asked] == [["short, digits, seed 0"]] * 3
    assert said.count("short, digits, seed 0: retrying, as it was killed") == 2
    assert [(entry.status, entry.reason) for entry in ledger.cells] == [("failed", "it was killed")]
    # There is hope for it: it is tried again the next time.
    reproduce.reproduce(
        [Selection(recipes.load(recipe), rows=["short"], seeds=1)],
        tmp_path,
        engine=RunnerSettings(retries=0),
        report=said.append,
    )
    assert len(asked) == 4


def test_what_is_left_runs_with_as_many_threads_as_all_would(tmp_path, recipe, asked, monkeypatch):
    """How the last bit of a sum is rounded may depend on the threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    selection = Selection(recipes.load(recipe))
    for out, left in ((tmp_path / "all", 6), (tmp_path / "one", 1)):
        if left == 1:
            for planned in selection.recipe.planned()[1:]:
                pretend(out / "runs" / planned.folder, planned.config)
        reproduce.reproduce(
            [selection], out, engine=RunnerSettings(retries=0), report=lambda text: None
        )
        assert len(asked[-1][0]) == left
    assert asked[0][1].threads == asked[1][1].threads


def pretend(folder, config):
    """A finished run, as far as a ledger looks."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "final.json").write_text(
        json.dumps({"test": {"accuracy": 0.9}, "step": 1, "chosen": "last", "optimum": {}})
    )
