"""Run cells in worker processes on this machine, one cell at a time in each.

A cell is a name, a folder and plain values; the work is a module-level function, called as
``function(payload, folder, emit)``. An error, running out of memory or ``kill -9`` in a worker
fails only its cell; the other workers continue. Values that the work emits arrive as events while
it runs.

A worker reads cells from its stdin and writes events to its stdout, one line of JSON each; the
work's own output goes to stderr, whose tail explains a failure. A worker is reused after a
successful cell, since imports take longer than a small run, but replaced after some minutes. It
exits when its stdin closes, so no worker outlives the parent.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import torch

from tammes.lab.runner.gpu_sharing import shared_gpu

Kind: TypeAlias = Literal["started", "progress", "done", "failed", "stopped"]

PER_GPU = 6
"""Concurrent cells on one GPU."""
_LIFETIME = 300.0
"""Seconds after which a worker is given no more cells."""
_PATIENCE = 10.0
"""Seconds a process has to exit before it is killed."""
_TAIL = 2000
"""Characters of stderr that are searched for the reason of a failure."""


@dataclass(frozen=True)
class Cell:
    """A unit of work: its name in messages, the folder of its results, and plain arguments."""

    name: str
    folder: Path
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """An event of a cell.

    ``values`` are those that the work emitted (``progress``), or the ``reason`` of a failure.
    """

    cell: Cell
    kind: Kind
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Result of a cell: whether the work returned, or else the reason in a sentence.

    ``crashed`` means that the process ended without giving a reason, for example if killed.
    """

    cell: Cell
    ok: bool
    reason: str = ""
    crashed: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Resources:
    """Resources for running cells: number of workers, threads of each, GPUs."""

    workers: int
    threads: int
    gpus: tuple[str, ...] = ()


def plan_resources(
    cells: int, workers: int | None = None, *, accelerator: str = "auto"
) -> Resources:
    """Choose the number of workers: one per core, or :data:`PER_GPU` per GPU.

    Args:
        cells: number of all cells, not only those left after an interruption: it determines the
            number of threads, which may affect the rounding of sums.
        workers: number of workers; chosen automatically by default.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is expected to be at least 1, got {workers}")
    gpus = () if accelerator == "cpu" else _gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = workers or (PER_GPU * len(gpus) if gpus else cores or 1)
    count = max(1, min(wanted, cells))
    return Resources(workers=count, threads=max(1, (cores or 1) // count), gpus=gpus)


def run_cells(
    cells: Sequence[Cell],
    work: str,
    *,
    at: Resources | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> list[Result]:
    """Run all cells, several at a time.

    Args:
        cells: cells to run.
        work: ``"module:function"``.
        at: workers, threads and GPUs; see :func:`plan_resources`.
        on_event: called in this thread with every event.

    Returns:
        The results, in the order of the cells.

    Raises:
        KeyboardInterrupt: the user interrupted; all processes have ended.
    """
    at = at or plan_resources(len(cells))
    notify = on_event or (lambda event: None)
    several = at.workers > max(len(at.gpus), 1)
    events: _EventQueue = queue.SimpleQueue()
    waiting, results = list(enumerate(cells))[::-1], dict[int, Result]()
    processes: dict[int, _Process] = {}
    retired: list[_Process] = []
    with shared_gpu(wanted=bool(at.gpus) and several) as variables:
        try:
            while len(results) < len(cells):
                for slot in range(at.workers):
                    if waiting and (slot not in processes or processes[slot].cell is None):
                        number, cell = waiting.pop()
                        if slot not in processes:
                            processes[slot] = _Process(slot, at, variables, events)
                        processes[slot].begin(number, cell, work)
                        notify(Event(cell, "started"))
                process, message = events.get()
                if message is not None and message.get("event") == "progress":
                    if process.cell is not None:
                        notify(Event(process.cell, "progress", message["values"]))
                    continue
                if message is not None and message.get("event") == "failed":
                    # The process exits by itself; its exit arrives as another message.
                    process.reason = str(message.get("reason"))
                    continue
                result = process.result(ended=message is None)
                if processes.get(process.slot) is process and process.over:
                    retired.append(processes.pop(process.slot))
                if result is not None:
                    results[process.number] = result
                    values = {} if result.ok else {"reason": result.reason}
                    notify(Event(result.cell, "done" if result.ok else "failed", values))
        finally:
            retired += processes.values()
            for process in retired:
                process.stop()
            for process in retired:
                process.wait_or_kill()
            for process in retired:
                if process.cell is not None:
                    notify(Event(process.cell, "stopped"))
    return [results[number] for number in range(len(cells))]


_BEGIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tammes.lab.runner.worker import main
sys.exit(main())
"""


class _Process:
    """A worker process, which runs cells one after another.

    Attributes:
        cell: current cell, or None.
        over: whether the worker is given no more cells.
    """

    def __init__(
        self, slot: int, at: Resources, variables: Mapping[str, str], events: "_EventQueue"
    ) -> None:
        self.slot, self.threads = slot, at.threads
        self.born = time.monotonic()
        self.cell: Cell | None = None
        self.over = False
        self.errors: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        environment = {
            **os.environ,
            **variables,
            "OMP_NUM_THREADS": str(at.threads),
            "MKL_NUM_THREADS": str(at.threads),
        }
        if at.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = at.gpus[slot % len(at.gpus)]
        self.process = subprocess.Popen(
            # Exactly the parent's sys.path: -c alone would put the current folder first.
            [sys.executable, "-P", "-c", _BEGIN, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            # Ctrl-C goes to the parent, which then stops its workers.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self.watcher = threading.Thread(target=self._watch, args=(events,), daemon=True)
        self.listener.start()
        self.watcher.start()

    def begin(self, number: int, cell: Cell, work: str) -> None:
        """Start a cell."""
        self.number, self.cell, self.reason = number, cell, ""
        self.began, self.errors_start = time.monotonic(), self.errors.seek(0, os.SEEK_END)
        task = {
            "work": work,
            "payload": dict(cell.payload),
            "folder": str(cell.folder),
            "threads": self.threads,
            "argv": sys.argv,
        }
        with contextlib.suppress(OSError):
            # If the process has already exited, the watcher notices.
            self.stdin.write(json.dumps(task).encode() + b"\n")
            self.stdin.flush()

    def _watch(self, events: "_EventQueue") -> None:
        """Wait for the process to exit, then report it."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
                # Kill its children, such as data loader workers. The process is not reaped yet, so
                # its group id cannot be reused.
                self._signal(signal.SIGKILL)
        self.process.wait()
        self.listener.join(_PATIENCE)
        events.put((self, None))

    def _listen(self, events: "_EventQueue") -> None:
        for line in self.stdout:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    events.put((self, message))

    def result(self, *, ended: bool) -> Result | None:
        """Return the result of the cell, after the process exited or reported that it is done."""
        cell, self.cell = self.cell, None
        now = time.monotonic()
        self.over = ended or now - self.born > _LIFETIME
        if cell is None:
            self._close()
            return None
        seconds = now - self.began
        if not ended:
            if self.over:
                self._end_input()
            return Result(cell, True, seconds=seconds)
        code, tail = self.process.wait(), self._close()
        if self.reason:
            return Result(cell, False, self.reason, seconds=seconds)
        return Result(cell, False, _died(code, tail), crashed=True, seconds=seconds)

    def stop(self) -> None:
        """Ask the process to exit."""
        if self.cell is None:
            self._end_input()
        else:
            self._signal(signal.SIGTERM)

    def _end_input(self) -> None:
        with contextlib.suppress(OSError):
            self.stdin.close()

    def wait_or_kill(self) -> None:
        """Wait for the process to exit, and kill it if it does not."""
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
            self.process.wait()
        self.watcher.join(2 * _PATIENCE)
        self._close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)
            else:
                self.process.terminate()

    def _close(self) -> str:
        """Close the pipes, and return the tail of stderr of the last cell."""
        self._end_input()
        if self.errors.closed:
            return ""
        if not self.listener.is_alive():
            self.stdout.close()
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(self.errors_start, size - _TAIL))
        text = self.errors.read().decode(errors="replace")
        self.errors.close()
        return text


_EventQueue: TypeAlias = queue.SimpleQueue[tuple[_Process, dict[str, Any] | None]]
"""Pairs of a process and its message; None when the process exited."""


def _died(code: int, tail: str) -> str:
    """Describe why a process exited without reporting a reason."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    last = f"; its last output was {lines[-1][:200]!r}" if lines else ""
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            memory = ", as happens when memory runs out" if name == "SIGKILL" else ""
            return f"its process was killed by {name}{memory}{last}"
    return f"its process exited with code {code}{last}"


def _gpus() -> tuple[str, ...]:
    """Return the names of the GPUs in ``CUDA_VISIBLE_DEVICES``."""
    if not torch.cuda.is_available():
        return ()
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return tuple(names[:count])
