"""Cells run in processes of their own: what happens to one does not happen to the others."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from cell_work import alive, cell, until

from tammes.lab import runner
from tammes.lab.runner import Event, Resources, gpu_sharing, plan_resources, run_cells
from tammes.lab.runner.progress_table import CellStatus, ProgressTable, status_line

WORK = "cell_work:work"
TWO = Resources(workers=2, threads=1)


def test_a_cell_that_fails_leaves_the_others_alone(tmp_path):
    cells = [
        cell(tmp_path, "raised", do="raise"),
        cell(tmp_path, "killed", do="kill"),
        cell(tmp_path, "left", do="exit"),
        cell(tmp_path, "bug", do="bug"),
        cell(tmp_path, "long", do="long"),
        cell(tmp_path, "fine"),
    ]
    results = run_cells(cells, WORK, at=TWO)
    assert [result.cell for result in results] == cells
    assert [result.ok for result in results] == [False] * 5 + [True]
    assert [result.crashed for result in results] == [False, True, True, False, False, False]
    reasons = [result.reason for result in results]
    assert reasons[0] == "the learning rate is too large"
    assert reasons[1].startswith(
        "its process was killed by SIGKILL, as happens when memory runs out"
    )
    assert reasons[1].endswith("; its last output was 'a last word'")
    assert reasons[2].startswith("its process exited with code 7")
    assert reasons[3] == "KeyError: 'somewhere'"
    assert reasons[4].startswith("RuntimeError: word word")
    assert len(reasons[4]) == 500
    assert reasons[5] == ""


def test_events_come_in_order_to_the_callers_thread_and_hold_what_was_emitted(tmp_path):
    events, threads = [], set()
    one = cell(tmp_path)

    def take(event):
        events.append(event)
        threads.add(threading.current_thread())

    run_cells([one], WORK, on_event=take)
    assert threads == {threading.current_thread()}
    assert events == [
        Event(one, "started"),
        Event(one, "progress", {"what": "begin", "epochs": 2, "done": 0}),
        Event(one, "progress", {"what": "epoch", "epoch": 1, "accuracy": 0.5}),
        Event(one, "done"),
    ]


def test_no_event_of_a_flood_is_lost(tmp_path):
    events = []
    run_cells([cell(tmp_path, do="flood")], WORK, on_event=events.append)
    numbers = [event.values["number"] for event in events if event.kind == "progress"]
    assert numbers == list(range(20_000))


def test_as_many_run_at_a_time_as_there_are_workers(tmp_path):
    cells = [cell(tmp_path, str(n), do="surroundings", seconds=3.0) for n in range(3)]
    assert all(result.ok for result in run_cells(cells, WORK, at=TWO))
    found = [json.loads((each.folder / "found.json").read_text()) for each in cells]
    spans = sorted((each["began"], each["ended"]) for each in found)
    assert spans[1][0] < spans[0][1], "the first two run side by side"
    assert spans[2][0] >= min(spans[0][1], spans[1][1]), "the third waits for one of them"


def test_a_process_has_its_share_of_threads_the_parents_path_and_its_command(tmp_path):
    one = cell(tmp_path, do="surroundings")
    assert run_cells([one], WORK, at=Resources(1, 2, ("5",)))[0].ok
    found = json.loads((one.folder / "found.json").read_text())
    assert (found["threads"], found["omp"], found["gpu"]) == (2, "2", "5")
    assert found["argv"] == sys.argv
    assert found["path"] == sys.path


def test_a_module_in_the_current_folder_is_not_taken_for_ours(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('taken')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert run_cells([cell(tmp_path)], WORK)[0].ok


def test_what_a_cell_leaves_running_is_ended(tmp_path):
    one = cell(tmp_path, do="leave")
    assert run_cells([one], WORK)[0].ok
    until(lambda: not alive(one.folder / "child"))


def test_a_process_takes_the_next_cell_after_one_that_went_well_and_no_other(tmp_path):
    dos = ["done", "done", "raise", "done", "kill", "done"]
    cells = [cell(tmp_path, str(n), do=do) for n, do in enumerate(dos)]
    results = run_cells(cells, WORK, at=Resources(1, 1))
    assert [result.ok for result in results] == [do == "done" for do in dos]
    numbers = [(each.folder / "pid").read_text() for each in cells]
    assert numbers[0] == numbers[1] == numbers[2]
    assert numbers[3] == numbers[4]
    assert len(set(numbers)) == 3
    # What an earlier cell said is not taken for the last word of a later one.
    assert results[4].reason.count("a last word") == 1
    assert "too large" not in results[4].reason


@pytest.mark.slow
def test_a_process_that_has_worked_for_long_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("tammes.lab.runner.process_pool._LIFETIME", 0.0)
    cells = [cell(tmp_path, str(n)) for n in range(3)]
    assert all(result.ok for result in run_cells(cells, WORK, at=Resources(1, 1)))
    files = [each.folder / "pid" for each in cells]
    assert len({file.read_text() for file in files}) == 3
    assert not any(alive(file) for file in files)


def test_work_that_is_not_there_is_a_failed_cell(tmp_path):
    result = run_cells([cell(tmp_path)], "cell_work:nothing")[0]
    assert result.reason.startswith("AttributeError: module 'cell_work' has no attribute")


def test_an_interrupt_ends_all_processes(tmp_path):
    cells = [cell(tmp_path, name, do="wait") for name in ("a", "b", "c")]
    kinds = []

    def interrupt(event):
        kinds.append(event.kind)
        if event.kind == "progress" and kinds.count("progress") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells(cells, WORK, at=TWO, on_event=interrupt)
    assert kinds.count("stopped") == 2
    for each in cells[:2]:
        for file in ("pid", "child"):
            until(lambda path=each.folder / file: not alive(path))
    assert not cells[2].folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_running_when_the_parent_is_ended(tmp_path, number):
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from tammes.lab.runner import *
cells = [Cell(n, Path({str(tmp_path)!r}) / n, {{"do": "wait"}}) for n in "ab"]
run_cells(cells, "cell_work:work", at=Resources(2, 1))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    files = [tmp_path / name / "child" for name in "ab"]
    try:
        until(lambda: all(file.exists() and file.read_text() for file in files))
    finally:
        parent.send_signal(number)
        parent.wait(60)
    for name in "ab":
        until(lambda name=name: not alive(tmp_path / name / "pid"))
        child = tmp_path / name / "child"
        if number == signal.SIGINT:
            until(lambda child=child: not alive(child))
        else:
            # What the work itself has started is beyond reach then; end it by its number.
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child.read_text()), signal.SIGKILL)


# -- Resources.


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("cells", "workers", "expected"),
    [
        (12, None, Resources(4, 1)),
        (2, None, Resources(2, 2)),
        (1, None, Resources(1, 4)),
        (12, 3, Resources(3, 1)),
        (12, 8, Resources(8, 1)),
        (0, None, Resources(1, 4)),
    ],
)
@pytest.mark.usefixtures("four_cores")
def test_cores_are_divided_among_the_workers(cells, workers, expected):
    assert plan_resources(cells, workers, accelerator="cpu") == expected


@pytest.mark.parametrize(
    ("cells", "visible", "expected"),
    [
        (4, None, Resources(4, 1, ("0",))),
        (20, None, Resources(6, 1, ("0",))),
        (20, "3", Resources(6, 1, ("3",))),
    ],
)
@pytest.mark.usefixtures("four_cores")
def test_six_cells_share_a_gpu(monkeypatch, cells, visible, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plan_resources(cells) == expected


def test_cells_are_spread_over_several_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = plan_resources(20)
    assert (found.workers, found.gpus) == (2 * runner.PER_GPU, ("0", "1"))


def test_no_workers_is_refused():
    with pytest.raises(ValueError, match="workers is expected to be at least 1, got 0"):
        plan_resources(3, 0)


# -- Sharing a GPU.


def fake_control(folder, script):
    path = folder / "nvidia-cuda-mps-control"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(folder)


def test_the_service_is_started_probed_and_stopped(tmp_path, monkeypatch):
    log = tmp_path / "log"
    script = f'echo "$1" >> {log}; [ -n "$1" ] || cat >> {log}'
    monkeypatch.setenv("PATH", fake_control(tmp_path, script) + ":" + os.environ["PATH"])
    monkeypatch.setattr(gpu_sharing, "_PROBE", f"open({str(log)!r}, 'a').write('probed\\n')")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with gpu_sharing.shared_gpu(wanted=True) as variables:
        folder = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder)
        assert len(folder) < 60
    assert log.read_text().split() == ["-d", "probed", "quit"]
    assert not os.path.exists(folder)


@pytest.mark.parametrize("script", ["exit 1", "exit 0"])
def test_a_service_that_does_not_work_is_done_without(tmp_path, monkeypatch, script):
    # Here there is no GPU: the probe fails even where the service says that it started.
    monkeypatch.setenv("PATH", fake_control(tmp_path, script) + ":" + os.environ["PATH"])
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(gpu_sharing, "_PROBE", "raise SystemExit(1)")
    with gpu_sharing.shared_gpu(wanted=True) as variables:
        assert variables == {}


def test_a_service_that_is_running_already_is_left_alone(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", fake_control(tmp_path, f"echo x >> {log}"))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with gpu_sharing.shared_gpu(wanted=True) as variables:
        assert variables == {}
    assert not log.exists()


# -- Showing it.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def events_of(one, other):
    return [
        Event(one, "started"),
        Event(other, "started"),
        Event(one, "progress", {"what": "begin", "epochs": 20, "done": 5}),
        Event(one, "progress", {"say": "the cache was damaged"}),
        Event(one, "progress", {"what": "epoch", "epoch": 6, "accuracy": 0.9317}),
        Event(one, "done"),
        Event(other, "failed", {"reason": "its process [ended] with code 7"}),
    ]


def test_without_a_terminal_there_are_plain_lines(tmp_path):
    one, other = cell(tmp_path, "cosface, seed 0"), cell(tmp_path, "softmax, seed 0")
    stream = io.StringIO()
    with ProgressTable([one, other], stream) as board:
        for event in events_of(one, other):
            board(event)
    assert stream.getvalue().splitlines() == [
        "[0/2] cosface, seed 0: running",
        "[0/2] softmax, seed 0: running",
        "cosface, seed 0: the cache was damaged",
        "[1/2] cosface, seed 0: done, epoch 6/20, accuracy 93.17 %",
        "[2/2] softmax, seed 0: failed: its process [ended] with code 7",
    ]


def test_a_long_run_says_now_and_then_how_far_it_is(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 7))
    monkeypatch.setattr("tammes.lab.runner.progress_table.time.monotonic", lambda: next(clock))
    one, stream = cell(tmp_path), io.StringIO()
    with ProgressTable([one], stream) as board:
        board(Event(one, "started"))
        board(Event(one, "progress", {"what": "begin", "epochs": 4, "done": 0}))
        for epoch in (1, 2, 3):
            board(Event(one, "progress", {"what": "epoch", "epoch": epoch, "accuracy": 0.5}))
    assert stream.getvalue().splitlines() == [
        "[0/1] a: running",
        "[0/1] a: running, epoch 1/4, accuracy 50.00 %, 0:21 left",
        "[0/1] a: running, epoch 3/4, accuracy 50.00 %, 0:07 left",
    ]


def test_a_terminal_gets_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    one, other = cell(tmp_path, "cosface[0], seed 0"), cell(tmp_path, "softmax, seed 0")
    stream = Terminal()
    with ProgressTable([one, other], stream) as board:
        for event in events_of(one, other):
            board(event)
    shown = stream.getvalue()
    for part in ("cosface[0], seed 0", "6/20", "93.17 %", "done", "failed", "process [ended] with"):
        assert part in shown


def test_a_table_of_many_runs_shows_those_at_work_and_counts_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    cells = [cell(tmp_path, f"run {n}") for n in range(100)]
    stream = Terminal()
    with ProgressTable(cells, stream) as board:
        board(Event(cells[99], "started"))
    assert "run 99" in stream.getvalue()
    assert "and 76 waiting" in stream.getvalue()


def test_the_time_left_counts_only_epochs_that_were_run():
    row = CellStatus("a", state="running")
    row.update({"what": "begin", "epochs": 20, "done": 10}, now=100.0)
    assert row.left is None
    row.update({"what": "epoch", "epoch": 12, "accuracy": 0.5}, now=106.0)
    assert row.left == pytest.approx(24.0)
    assert status_line(row).endswith("0:24 left")
    row.seconds = 2 * 3700 / 8
    assert status_line(row).endswith("1:01:40 left")
