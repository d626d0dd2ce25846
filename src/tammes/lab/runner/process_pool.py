"""Run many pieces of work in processes of this machine, one at a time in each.

A cell is a name, a folder and plain values; the work is a function of a module, called as
``function(payload, folder, emit)``. Whatever happens to its process, an error, a lack of memory,
``kill -9``, is the failure of that cell, and the others go on in theirs. What the work emits comes
back as events while it runs.

A process reads cells from its stdin and writes events to its stdout, a line of JSON each; what the
work prints goes to stderr, whose end is kept for the reason of a failure. It takes another cell
after one that went well, since importing all there is takes longer than a small run, but not after
a long time. It ends when its stdin does, so that nothing is left running when the parent is gone.
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
"""Cells at the same time on one GPU."""
_LIFETIME = 300.0
"""Seconds after which a process gets no other cell; a new one costs little then."""
_PATIENCE = 10.0
"""Seconds a process is given to end before it is killed."""
_TAIL = 2000
"""Characters of stderr that are looked at."""


@dataclass(frozen=True)
class Cell:
    """A piece of work.

    Attributes:
        name: how it is called.
        folder: where its results go.
        payload: what the work is given; plain values.
    """

    name: str
    folder: Path
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """What happened to a cell.

    Attributes:
        cell: which one.
        kind: ``progress`` is something the work has emitted.
        values: what it has emitted; for ``failed`` the ``reason``.
    """

    cell: Cell
    kind: Kind
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How a cell ended.

    Attributes:
        cell: which one.
        ok: whether the work returned.
        reason: why not, in a sentence.
        crashed: whether the process ended without saying why, as one that was killed does.
        seconds: how long it took.
    """

    cell: Cell
    ok: bool
    reason: str = ""
    crashed: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Places:
    """Where cells run: how many at a time, with how many threads, on which GPUs."""

    workers: int
    threads: int
    gpus: tuple[str, ...] = ()


def places(cells: int, workers: int | None = None, *, accelerator: str = "auto") -> Places:
    """How many cells run at a time: one for each core, or :data:`PER_GPU` on each GPU.

    Args:
        cells: how many there are in all. Those that are left of an interrupted study are not
            what counts: how the last bit of a sum is rounded may depend on the threads.
        workers: how many at a time, if it is decided.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is expected to be at least 1, got {workers}")
    gpus = () if accelerator == "cpu" else _gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    most = workers or (PER_GPU * len(gpus) if gpus else cores or 1)
    most = max(1, min(most, cells))
    return Places(most, max(1, (cores or 1) // most), gpus)


def run_cells(
    cells: Sequence[Cell],
    work: str,
    *,
    at: Places | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> list[Result]:
    """Run all cells, several at a time.

    Args:
        cells: what to do.
        work: ``"module:function"``.
        at: where; see :func:`places`.
        on_event: called in this thread with whatever happens.

    Returns:
        How each cell ended, in the order of the cells.

    Raises:
        KeyboardInterrupt: when the user interrupts; all processes have ended then.
    """
    at = at or places(len(cells))
    tell = on_event or (lambda event: None)
    several = at.workers > max(len(at.gpus), 1)
    happened: _Happened = queue.SimpleQueue()
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
                            processes[slot] = _Process(slot, at, variables, happened)
                        processes[slot].begin(number, cell, work)
                        tell(Event(cell, "started"))
                process, said = happened.get()
                if said is not None and said.get("event") == "progress":
                    if process.cell is not None:
                        tell(Event(process.cell, "progress", said["values"]))
                    continue
                if said is not None and said.get("event") == "failed":
                    # It is going to end by itself, and is then heard of once more.
                    process.reason = str(said.get("reason"))
                    continue
                result = process.result(ended=said is None)
                if processes.get(process.slot) is process and process.over:
                    retired.append(processes.pop(process.slot))
                if result is not None:
                    results[process.number] = result
                    values = {} if result.ok else {"reason": result.reason}
                    tell(Event(result.cell, "done" if result.ok else "failed", values))
        finally:
            retired += processes.values()
            for process in retired:
                process.stop()
            for process in retired:
                process.wait_or_kill()
            for process in retired:
                if process.cell is not None:
                    tell(Event(process.cell, "stopped"))
    return [results[number] for number in range(len(cells))]


_BEGIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tammes.lab.runner.worker import main
sys.exit(main())
"""


class _Process:
    """A process that works on cells, one after the other.

    Attributes:
        cell: what it works on, if it does.
        over: whether it gets no other.
    """

    def __init__(
        self, slot: int, at: Places, variables: Mapping[str, str], happened: "_Happened"
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
            # With the parent's path and no other: -c would put the current folder first.
            [sys.executable, "-P", "-c", _BEGIN, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            # Ctrl-C is for the parent, which then ends its children in order.
            start_new_session=True,
        )
        self.listener = threading.Thread(target=self._listen, args=(happened,), daemon=True)
        self.watcher = threading.Thread(target=self._watch, args=(happened,), daemon=True)
        self.listener.start()
        self.watcher.start()

    def begin(self, number: int, cell: Cell, work: str) -> None:
        """Hand it a cell."""
        self.number, self.cell, self.reason = number, cell, ""
        self.began, self.said = time.monotonic(), self.errors.seek(0, os.SEEK_END)
        task = {
            "work": work,
            "payload": dict(cell.payload),
            "folder": str(cell.folder),
            "threads": self.threads,
            "argv": sys.argv,
        }
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            # A process that is gone already is noticed when it is waited for.
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()

    def _watch(self, happened: "_Happened") -> None:
        """Hand on what it says, then that it has ended."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
                # What it has left running, such as workers that read images. It is not reaped yet:
                # the number of its group cannot be anybody else's.
                self._signal(signal.SIGKILL)
        self.process.wait()
        self.listener.join(_PATIENCE)
        happened.put((self, None))

    def _listen(self, happened: "_Happened") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    happened.put((self, said))

    def result(self, *, ended: bool) -> Result | None:
        """How its cell went: the process has ended, or has said that it is done."""
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
        """Ask it to end."""
        if self.cell is None:
            self._end_input()
        else:
            self._signal(signal.SIGTERM)

    def _end_input(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def wait_or_kill(self) -> None:
        """Make sure it has ended."""
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
        """Close its files; the end of what it said on stderr about its last cell."""
        self._end_input()
        if self.errors.closed:
            return ""
        if not self.listener.is_alive():
            assert self.process.stdout is not None
            self.process.stdout.close()
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(self.said, size - _TAIL))
        text = self.errors.read().decode(errors="replace")
        self.errors.close()
        return text


_Happened: TypeAlias = queue.SimpleQueue[tuple[_Process, dict[str, Any] | None]]
"""A process and what it said; nothing where it has ended."""


def _died(code: int, tail: str) -> str:
    """Why a process is gone that could not say so itself."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    last = f"; the last it said was {lines[-1][:200]!r}" if lines else ""
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            memory = ", as the system does where memory runs out" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{memory}{last}"
    return f"its process ended with code {code}{last}"


def _gpus() -> tuple[str, ...]:
    """What each GPU is called in ``CUDA_VISIBLE_DEVICES``."""
    if not torch.cuda.is_available():
        return ()
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(count)]
    return tuple(names[:count])
