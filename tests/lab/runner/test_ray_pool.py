"""Cells on a Ray cluster end as they do in processes of this machine, and nothing is left over."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cell_work import alive, cell, until

import tammes
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run, write_json
from tammes.lab.runner import (
    Cell,
    Event,
    Resources,
    ray_pool,
    ray_remote,
    run_cells,
    run_cells_on_ray,
)

WORK = "cell_work:work"
TRAIN = "tammes.lab.runner.sweep:train_cell"
TWO = Resources(workers=2, threads=1)
LOST = "its process was lost, as when it is killed or its node goes down (WorkerCrashedError)"
CONFIG = Config(
    data="digits", loss="cosface(margin=0.2)", backbone="mnist_cnn(width=0.25)", epochs=3
)

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)


def slow(test):
    return pytest.mark.slow(needs_ray(test))


@pytest.fixture(scope="module")
def running():
    """A cluster with two workers; what is run in its tests is run there."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # What is installed on its nodes; they do not get our path.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        before = of_ray(), signal.getsignal(signal.SIGTERM)
        with ray_pool._started(ray, TWO):
            yield ray.get_runtime_context().gcs_address
        assert (of_ray(), signal.getsignal(signal.SIGTERM)) == before


def of_ray():
    """Variables of the environment that Ray reads."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


@pytest.fixture
def apart(monkeypatch):
    """No process of the cluster sees the folders of cells, as on nodes without common files."""

    @contextlib.contextmanager
    def nowhere(cells):
        yield {each.folder.parent: Path("/nowhere/.beacon") for each in cells}

    monkeypatch.setattr(ray_pool, "_beacons", nowhere)
    folder = Path(os.environ["TAMMES_CACHE"]) / "cells"
    assert not [*folder.glob("*")]
    yield folder
    assert not [*folder.glob("*")], "nothing is left on the node"


# -- The same as in processes of this machine.


@slow
def test_cells_end_as_they_do_in_processes_of_this_machine(tmp_path, running):
    dos = ("done", "raise", "kill", "bug", "exit", "long", "done")
    ends = []
    for name, run in (("local", run_cells), ("ray", run_cells_on_ray)):
        cells = [cell(tmp_path / name, f"{n} {do}", do=do) for n, do in enumerate(dos)]
        results = run(cells, WORK, at=TWO)
        assert [result.cell for result in results] == cells
        ends.append([(r.ok, r.crashed, "" if r.crashed else r.reason) for r in results])
        crashed = [result.reason for result in results if result.crashed]
    assert ends[0] == ends[1]
    assert crashed == [LOST, LOST]


@slow
def test_events_are_those_of_processes_of_this_machine(tmp_path, running):
    events = []
    one, bad = cell(tmp_path, "one"), cell(tmp_path, "bad", do="raise")
    run_cells_on_ray([one, bad], WORK, on_event=events.append)
    assert [event for event in events if event.cell is one] == [
        Event(one, "started"),
        Event(one, "progress", {"what": "begin", "epochs": 2, "done": 0}),
        Event(one, "progress", {"what": "epoch", "epoch": 1, "accuracy": 0.5}),
        Event(one, "done"),
    ]
    assert [event for event in events if event.cell is bad] == [
        Event(bad, "started"),
        Event(bad, "failed", {"reason": "the learning rate is too large"}),
    ]


@slow
def test_no_event_of_a_flood_is_lost(tmp_path, running):
    events = []
    run_cells_on_ray([cell(tmp_path, do="flood")], WORK, on_event=events.append)
    numbers = [event.values["number"] for event in events if event.kind == "progress"]
    assert numbers == list(range(20_000))


@slow
def test_a_cell_has_its_share_and_waits_for_it(tmp_path, running):
    cells = [cell(tmp_path, str(n), do="surroundings", seconds=1.0) for n in range(3)]
    assert all(result.ok for result in run_cells_on_ray(cells, WORK))
    found = [json.loads((each.folder / "found.json").read_text()) for each in cells]
    assert {(each["threads"], each["omp"]) for each in found} == {(1, "1")}
    assert all(each["argv"] == sys.argv for each in found)
    spans = sorted((each["began"], each["ended"]) for each in found)
    assert spans[1][0] < spans[0][1], "the first two run side by side"
    assert spans[2][0] >= min(spans[0][1], spans[1][1]), "the third waits for one of them"


@slow
def test_a_cell_takes_what_is_asked_for_it(tmp_path, running):
    cells = [cell(tmp_path, str(n), do="surroundings", seconds=0.5) for n in range(2)]
    assert all(result.ok for result in run_cells_on_ray(cells, WORK, per_cell={"CPU": 2}))
    found = [json.loads((each.folder / "found.json").read_text()) for each in cells]
    assert {(each["threads"], each["omp"]) for each in found} == {(2, "2")}
    spans = sorted((each["began"], each["ended"]) for each in found)
    assert spans[1][0] >= spans[0][1], "one after the other"


@slow
def test_what_cannot_start_says_what_it_waits_for(tmp_path, running, monkeypatch):
    monkeypatch.setattr(ray_pool, "_WAIT", 0.5)

    def stop(event):
        said.append(event.values.get("say"))
        raise KeyboardInterrupt

    said = []
    with pytest.raises(KeyboardInterrupt):
        run_cells_on_ray([cell(tmp_path)], WORK, per_cell={"CPU": 64}, on_event=stop)
    assert said == [
        "no cell has started after 0 s; each takes 64 CPU, and the cluster has 2 CPU in all"
    ]


# -- Training.


@slow
def test_a_training_has_the_record_of_one_on_this_machine(tmp_path, running):
    local, ray = (Cell(name, tmp_path / name, {"config": CONFIG.to_dict()}) for name in ("l", "r"))
    assert run_cells([local], TRAIN, at=Resources(1, 1))[0].ok
    assert run_cells_on_ray([ray], TRAIN)[0].ok
    for name in ("config.json", "metrics.jsonl", "final.json", "model.safetensors"):
        assert (local.folder / name).read_bytes() == (ray.folder / name).read_bytes(), name
    assert sorted(p.name for p in local.folder.iterdir()) == sorted(
        p.name for p in ray.folder.iterdir()
    )


@slow
def test_without_common_files_the_record_comes_back(tmp_path, running, apart):
    local, ray = (Cell(name, tmp_path / name, {"config": CONFIG.to_dict()}) for name in ("l", "r"))
    assert run_cells([local], TRAIN, at=Resources(1, 1))[0].ok
    assert run_cells_on_ray([ray], TRAIN)[0].ok
    assert Run(ray.folder).status == "done"
    for path in local.folder.iterdir():
        if path.is_file() and path.name not in (
            ".lock",
            "timing.jsonl",
            "environment.json",
            "look_seconds.json",
        ):
            assert path.read_bytes() == (ray.folder / path.name).read_bytes(), path.name


def train_and_die(payload, folder, emit):
    """Train, but be killed after the first epoch that was saved; once."""
    from tammes.lab.runner.sweep import train_cell

    def watched(values):
        emit(values)
        if values.get("epoch") == 2 and values.get("what") == "epoch":
            mark = Path(payload["mark"])
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    train_cell(payload, folder, watched)


@slow
def test_a_cell_that_was_lost_goes_on_from_its_checkpoint_on_the_node(tmp_path, running, apart):
    config = CONFIG.replace(save_every=1).to_dict()
    payload = {"config": config, "mark": str(tmp_path / "mark")}
    whole, lost = (Cell(name, tmp_path / name, payload) for name in ("whole", "lost"))
    first = run_cells_on_ray([lost], "test_ray_pool:train_and_die")[0]
    assert (first.ok, first.crashed) == (False, True)
    assert not lost.folder.exists()
    begun = []
    again = run_cells_on_ray(
        [lost],
        "test_ray_pool:train_and_die",
        on_event=lambda e: begun.extend([e.values["done"]] if "done" in e.values else []),
    )
    assert again[0].ok
    assert begun[0] >= 1, "it did not start from the beginning"
    assert run_cells_on_ray([whole], "test_ray_pool:train_and_die")[0].ok
    name = "metrics.jsonl"
    assert (lost.folder / name).read_bytes() == (whole.folder / name).read_bytes()


@slow
def test_what_failed_comes_back_too(tmp_path, running, apart):
    config = CONFIG.replace(loss="1e30*softmax()", lr=1e6)
    one = Cell("a", tmp_path / "a", {"config": config.to_dict()})
    result = run_cells_on_ray([one], TRAIN)[0]
    assert (result.ok, result.crashed) == (False, False)
    assert Run(one.folder).failure["kind"] == "not finite"
    assert Run(one.folder).failure["step"] >= 1
    for folder in apart.iterdir():
        # A failed run stays on its node.
        subprocess.run(["rm", "-r", folder], check=True)


@slow
def test_another_run_in_the_folder_is_refused_and_kept(tmp_path, running, apart):
    one = Cell("a", tmp_path / "a", {"config": CONFIG.to_dict()})
    write_json(one.folder / "config.json", CONFIG.replace(loss="softmax()").to_dict())
    (one.folder / "metrics.jsonl").write_text("{}\n")
    result = run_cells_on_ray([one], TRAIN)[0]
    assert "holds a run with loss 'softmax()', got 'cosface(margin=0.2)'" in result.reason
    assert (one.folder / "metrics.jsonl").read_text() == "{}\n"
    for folder in apart.iterdir():
        subprocess.run(["rm", "-r", folder], check=True)


# -- What comes back.


def test_files_come_back_but_checkpoints_and_large_ones(tmp_path):
    for name in ("final.json", "charts/a.svg", "checkpoints/last.pt", ".lock", "big"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1234" if name == "big" else b"123")
    files, left = ray_remote.collect(tmp_path, largest=3)
    assert files == {"final.json": b"123", "charts/a.svg": b"123"}
    assert left == ["big"]
    assert ray_remote.collect(tmp_path / "missing") == ({}, [])


def test_what_says_that_a_cell_is_finished_is_written_last(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(ray_pool, "write_atomically", lambda path, data: written.append(path.name))
    ray_pool.write_files(
        tmp_path, {"cell.json": b"", "final.json": b"", "a": b"", "metrics.jsonl": b""}
    )
    assert written == ["a", "metrics.jsonl", "final.json", "cell.json"]


# -- What goes wrong.


@slow
def test_another_version_on_a_node_is_one_sentence(tmp_path, running, monkeypatch):
    here = tammes.__version__
    monkeypatch.setattr(tammes, "__version__", "9.9.9")
    result = run_cells_on_ray([cell(tmp_path)], WORK)[0]
    assert not result.crashed
    assert result.reason.endswith(
        f"has tammes {here}, and this machine 9.9.9; install the same on both"
    )


def test_without_ray_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'tammes\[ray\]'"):
        run_cells_on_ray([cell(tmp_path)], WORK)


@slow
def test_an_interrupt_ends_what_is_at_work_and_leaves_the_cluster(tmp_path, running):
    cells = [cell(tmp_path, name, do="wait") for name in ("a", "b", "c")]
    kinds = []

    def interrupt(event):
        kinds.append(event.kind)
        if event.kind == "progress" and kinds.count("progress") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells_on_ray(cells, WORK, on_event=interrupt)
    assert kinds.count("stopped") == 2
    for each in cells[:2]:
        for file in ("pid", "child"):
            until(lambda path=each.folder / file: not alive(path))
    assert not cells[2].folder.exists()
    assert not [*tmp_path.glob(".*")]
    assert run_cells_on_ray([cell(tmp_path, "d")], WORK)[0].ok


# -- Clusters.

_SCRIPT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pathlib import Path
from tammes.lab.runner import *
folder, dos, address = Path(sys.argv[2]), sys.argv[3].split(), (sys.argv[4:] or [None])[0]
cells = [Cell(f"{n} {do}", folder / f"{n}", {"do": do}) for n, do in enumerate(dos)]
results = run_cells_on_ray(cells, "cell_work:work", at=Resources(2, 1), address=address)
print(json.dumps([[result.ok, result.crashed] for result in results]))
"""


def start(*arguments):
    """A program with a session of its own, so that what it leaves running is found."""
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, json.dumps(sys.path), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def session(number):
    """Processes of a session that are there and no zombies, but for the first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, owner = path.read_text().rpartition(")")[2].split()[:4]
            if int(owner) == number and state != "Z" and path.parent.name != str(number):
                found.append((path.parent / "cmdline").read_text())
    return found


@slow
def test_a_cluster_is_started_says_nothing_and_is_gone_in_the_end(tmp_path):
    program = start(tmp_path, "done raise kill leave")
    out, errors = program.communicate(timeout=180)
    assert json.loads(out) == [[True, False], [False, False], [False, True], [True, False]]
    assert errors == ""
    until(lambda: not session(program.pid))


@slow
def test_a_cluster_that_is_there_is_used_and_goes_on(tmp_path, running):
    program = start(tmp_path, "done raise kill", running)
    out, errors = program.communicate(timeout=180)
    assert json.loads(out) == [[True, False], [False, False], [False, True]]
    assert errors == ""
    until(lambda: not session(program.pid))
    assert run_cells_on_ray([cell(tmp_path)], WORK)[0].ok


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere"])
def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path, address, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ValueError, match="address is expected to be that of a running Ray cluster"):
        run_cells_on_ray([cell(tmp_path)], WORK, address=address)
    assert not [*tmp_path.iterdir()]


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_running_when_the_program_is_ended(tmp_path, number):
    program = start(tmp_path, "wait wait wait")
    files = [tmp_path / str(n) / "child" for n in range(2)]
    try:
        until(lambda: all(file.exists() and file.read_text() for file in files), 120)
    finally:
        program.send_signal(number)
        program.communicate(timeout=120)
    until(lambda: not session(program.pid))
    assert not any(alive(file) for file in files)
    assert not (tmp_path / "2").exists()
