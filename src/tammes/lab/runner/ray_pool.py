"""Run cells on a Ray cluster, with the cells, events and results of :mod:`.process_pool`.

A cluster is started on this machine and stopped at the end, or an existing one is used. Its nodes
need not see the folders of the cells: files that the work writes, except checkpoints, come back as
bytes and are written here. A cell whose process or node is lost counts as crashed; retries are left
to the caller, so Ray itself retries nothing.
"""

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tammes
from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.runner import ray_payload
from tammes.lab.runner.gpu_sharing import shared_gpu
from tammes.lab.runner.process_pool import PER_GPU, Cell, Event, Resources, Result, plan_resources
from tammes.optional import require

_POLL = 0.2
"""Seconds between two polls for events."""
_PATIENCE = 10.0
"""Seconds a task has to end."""
_WAIT = 60.0
"""Seconds without a started cell after which a message says what the cells wait for."""
_STORE = 100 * 2**20
"""Size of the object store of a local cluster, in bytes; small, since nodes see the folders."""
_BEGUN = ("config.json", "data.json")
"""Files that identify the run in a folder."""
_LAST = ("final.json", "cell.json")
"""Files that mark a cell as finished; written after the others, in this order."""
_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Disable usage statistics, and warnings that do not concern the user."""


def run_cells_on_ray(
    cells: Sequence[Cell],
    work: str,
    *,
    address: str | None = None,
    at: Resources | None = None,
    per_cell: Mapping[str, float] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> list[Result]:
    """Run all cells on a Ray cluster, as many at a time as its resources allow.

    On an existing cluster, every node needs the same version of Tammes and finds the data under the
    same names.

    Cells, work, events and results are as in :func:`.run_cells`; ``at`` applies to a cluster that
    is started. The address of a cluster is ``"auto"``, ``"host:port"`` or ``"ray://host:port"``, by
    default ``$RAY_ADDRESS``, or the cluster this program is connected to; if there is none, a
    cluster is started on this machine and stopped at the end.

    The resources ``per_cell``, such as ``{"CPU": 2, "GPU": 0.5}``, are by default an equal share of
    a started cluster; on an existing one a CPU and, if it has GPUs, a sixth of one
    (:data:`.PER_GPU`). A cell has as many threads as CPUs.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the cluster cannot be reached.
        KeyboardInterrupt: the user interrupted; all tasks have ended.
    """
    ray = require("ray", extra="ray")
    if not cells:
        return []
    notify = on_event or (lambda event: None)
    address = address or os.environ.get("RAY_ADDRESS") or None
    local = address is None and not ray.is_initialized()
    at = at or plan_resources(len(cells))
    common: dict[str, Any] = {"work": work, "argv": sys.argv, "version": tammes.__version__}
    with contextlib.ExitStack() as stack:
        if local:
            several = bool(at.gpus) and at.workers > len(at.gpus)
            common["variables"] = dict(stack.enter_context(shared_gpu(wanted=several)))
            common |= {"path": sys.path, "cwd": os.getcwd()}
            share = min(1.0, len(at.gpus) / at.workers)
            per_cell = per_cell or {"CPU": at.threads, "GPU": share}
            stack.enter_context(_started(ray, at))
        elif not ray.is_initialized():
            stack.enter_context(_connected(ray, str(address)))
        if not per_cell:
            gpus = ray.cluster_resources().get("GPU", 0)
            per_cell = {"CPU": 1, "GPU": 1 / PER_GPU} if gpus else {"CPU": 1}
        common["threads"] = max(1, int(per_cell.get("CPU", 1)))
        beacons = stack.enter_context(_beacons(cells))
        run = _RayRun(ray, cells, per_cell, notify)
        stack.callback(run.stop)
        run.begin([{**common, **_task(cell, beacons)} for cell in cells])
        return run.results()


class _RayRun:
    """Cells running on a cluster."""

    def __init__(
        self,
        ray: Any,
        cells: Sequence[Cell],
        per_cell: Mapping[str, float],
        notify: Callable[[Event], None],
    ) -> None:
        self.ray, self.cells, self.per_cell, self.notify = ray, cells, per_cell, notify
        self.events = ray.remote(num_cpus=0, max_restarts=-1)(ray_payload.event_queue()).remote()
        self.running: dict[Any, int] = {}
        self.started: dict[int, float] = {}
        self.removals: list[Any] = []

    def begin(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Submit all tasks; the cluster starts each when it has resources for it."""
        resources = dict(self.per_cell)
        # Ray counts in ten-thousandths: six sixths must not exceed one.
        gpus = math.floor(1e4 * resources.pop("GPU", 0)) / 1e4
        run_task = self.ray.remote(ray_payload.run_task()).options(
            num_cpus=resources.pop("CPU", 1),
            num_gpus=gpus,
            resources=resources or None,
            max_retries=0,
        )
        for number, task in enumerate(tasks):
            self.running[run_task.remote({**task, "number": number}, self.events)] = number

    def results(self) -> list[Result]:
        """Wait for all cells."""
        results: dict[int, Result] = {}
        began = time.monotonic()
        while self.running:
            ready, _ = self.ray.wait([*self.running], timeout=_POLL)
            self._listen()
            if not self.started and began and time.monotonic() - began > _WAIT:
                self._say(self.cells[0], self._waiting_message())
                began = 0.0
            for task in ready:
                number = self.running[task]
                result = self._result(number, task)
                del self.running[task]
                results[number] = result
                values = {} if result.ok else {"reason": result.reason}
                self.notify(Event(result.cell, "done" if result.ok else "failed", values))
        return [results[number] for number in range(len(self.cells))]

    def stop(self) -> None:
        """Cancel the running tasks."""
        for task in self.running:
            self.ray.cancel(task, force=True)
        for tasks in ([*self.running], self.removals):
            if tasks:
                self.ray.wait(tasks, num_returns=len(tasks), timeout=_PATIENCE)
        self.ray.kill(self.events)
        for number in self.running.values():
            if number in self.started:
                self.notify(Event(self.cells[number], "stopped"))

    def _listen(self) -> None:
        """Pass on new events; none while the actor is unavailable."""
        received: list[tuple[int, dict[str, Any]]] = []
        with contextlib.suppress(self.ray.exceptions.RayError):
            received = self.ray.get(self.events.drain.remote(), timeout=_PATIENCE)
        for number, event in received:
            if event["event"] == "started":
                self._start(number)
            else:
                self.notify(Event(self.cells[number], "progress", event["values"]))

    def _start(self, number: int) -> None:
        if number not in self.started:
            self.started[number] = time.monotonic()
            self.notify(Event(self.cells[number], "started"))

    def _say(self, cell: Cell, text: str) -> None:
        self.notify(Event(cell, "progress", {"say": text}))

    def _waiting_message(self) -> str:
        available = {name: self.ray.cluster_resources().get(name, 0) for name in self.per_cell}
        return (
            f"no cell has started after {_WAIT:.0f} s; each takes {_in_words(self.per_cell)}, and "
            f"the cluster has {_in_words(available)} in all"
        )

    def _result(self, number: int, task: Any) -> Result:
        """Return the result of a cell, after writing its files here."""
        # A process that was lost immediately has sent no event.
        self._start(number)
        cell, seconds = self.cells[number], time.monotonic() - self.started[number]
        errors = self.ray.exceptions
        try:
            outcome = self.ray.get(task)
        except errors.RayTaskError as error:
            text = " ".join(f"{type(error.cause).__name__}: {error.cause}".split())
            return Result(cell, False, f"its node could not start it ({text})", seconds=seconds)
        except errors.RayError as error:
            return Result(cell, False, _lost(errors, error), crashed=True, seconds=seconds)
        if "files" in outcome:
            write_files(cell.folder, outcome["files"])
            if outcome["left"]:
                names = ", ".join(outcome["left"])
                self._say(cell, f"too large to copy back: {names}, see {outcome['folder']}")
            elif "reason" not in outcome:
                self._remove_remote(outcome)
        seconds = outcome.get("seconds", seconds)
        return Result(cell, "reason" not in outcome, outcome.get("reason", ""), seconds=seconds)

    def _remove_remote(self, outcome: Mapping[str, Any]) -> None:
        """Delete the folder on a node after its files were copied."""
        node = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            outcome["node"], soft=False
        )
        remove = self.ray.remote(ray_payload.remove_folder()).options(
            num_cpus=0, max_retries=0, scheduling_strategy=node
        )
        self.removals.append(remove.remote(outcome["folder"]))


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by relative path to a folder; those that mark it as finished come last."""
    for name in sorted(files, key=lambda name: (name in _LAST and 1 + _LAST.index(name), name)):
        write_atomically(folder / name, files[name])


@contextlib.contextmanager
def _started(ray: Any, at: Resources) -> Iterator[None]:
    """Start a cluster on this machine; it ends with this process."""
    # A short path: socket paths are limited to about 100 characters.
    base = "/tmp" if os.path.isdir("/tmp") else None
    with tempfile.TemporaryDirectory(prefix="ray", dir=base, ignore_cleanup_errors=True) as folder:
        options = {
            "num_cpus": at.workers * at.threads,
            "num_gpus": len(at.gpus),
            "include_dashboard": False,
            "object_store_memory": _STORE,
            "_temp_dir": folder,
        }
        with _connection(ray, "local", **options):
            yield


@contextlib.contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """Connect to an existing cluster, which keeps running afterwards."""
    with contextlib.ExitStack() as stack:
        try:
            _check_reachable(address)
            stack.enter_context(_connection(ray, address))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            message = [type(error).__name__, *str(error).strip().splitlines()][-1].strip()
            raise ValueError(
                f"address is expected to be that of a running Ray cluster, got {address!r} "
                f"({message}); with token authentication set RAY_AUTH_MODE=token here too"
            ) from error
        yield


def _check_reachable(address: str) -> None:
    """Check that something listens at a host and port; Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()


@contextlib.contextmanager
def _connection(ray: Any, address: str, **options: Any) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*_VARIABLES, "RAY_AUTH_MODE")}
    first = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.update({k: v for k, v in _VARIABLES.items() if before[k] is None})
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        # Ray would still print lost processes to stdout, although the results report them.
        ray._private.worker._worker_logs_enabled = False
        if first:
            # Ray's own handler prints a traceback and aborts.
            signal.signal(signal.SIGTERM, _end)
        yield
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = True
        for name, value in before.items():
            # Ray sets one of these itself when it starts a cluster.
            if value is None:
                os.environ.pop(name, None)
        if first:
            signal.signal(signal.SIGTERM, handler)


def _end(number: int, frame: object) -> None:
    """Exit cleanly, so that everything this process started is stopped."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _beacons(cells: Sequence[Cell]) -> Iterator[dict[Path, Path]]:
    """Create a file next to the folders of the cells: a node that sees it also sees them."""
    beacons = {parent: parent / f".beacon.{secrets.token_hex(4)}"
               for parent in {cell.folder.absolute().parent for cell in cells}}  # fmt: skip
    try:
        for path in beacons.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        yield beacons
    finally:
        for path in beacons.values():
            path.unlink(missing_ok=True)


def _task(cell: Cell, beacons: Mapping[Path, Path]) -> dict[str, Any]:
    folder = cell.folder.absolute()
    begun = {name: folder / name for name in _BEGUN if (folder / name).exists()}
    return {
        "payload": dict(cell.payload),
        "folder": str(folder),
        "beacon": str(beacons[folder.parent]),
        "begun": {name: path.read_text(encoding="utf-8") for name, path in begun.items()},
    }


def _lost(errors: Any, error: Exception) -> str:
    """Describe why a task was lost."""
    if isinstance(error, errors.OutOfMemoryError):
        return "its node ran out of memory, and Ray killed its process"
    if isinstance(error, errors.NodeDiedError):
        return "its node was lost"
    return (
        f"its process was lost, as when it is killed or its node goes down ({type(error).__name__})"
    )


def _in_words(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount or
                        len(amounts) == 1) or "nothing"  # fmt: skip
