"""Run many pieces of work on a Ray cluster; the same cells, events and results as in :mod:`.local`.

A cluster is started on this machine and stopped in the end, or one that is there is used. Its nodes
need not see the folders of the cells: what the work writes, but for its checkpoints, comes back as
bytes and is written here. A cell whose process or node is lost is a crashed one; whether it is
tried again is for the caller to say, so Ray itself tries nothing twice.
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
from tammes.lab.runner.process_pool import PER_GPU, Cell, Event, Places, Result, places
from tammes.optional import require

_POLL = 0.2
"""Seconds between two looks at what has been said."""
_PATIENCE = 10.0
"""Seconds a task is given to end."""
_WAIT = 60.0
"""Seconds without any cell at work, after which it is said what they wait for."""
_STORE = 100 * 2**20
"""Bytes for results on their way in a local cluster, which needs few: folders are seen there."""
_BEGUN = ("config.json", "data.json")
"""Files that say which run a folder holds."""
_LAST = ("final.json", "cell.json")
"""Files that say that a cell is finished; they are written after the others, in this order."""
_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Ray is to report nothing to its makers, and to warn of nothing that is not the user's doing."""


def run_cells_on_ray(
    cells: Sequence[Cell],
    work: str,
    *,
    address: str | None = None,
    at: Places | None = None,
    per_cell: Mapping[str, float] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> list[Result]:
    """Run all cells on a Ray cluster, as many at a time as it has room for.

    On a cluster that is there, Tammes of the same version is installed on every node, and the data
    are found under the same names.

    Args:
        cells: what to do.
        work: ``"module:function"``.
        address: of a cluster: ``"auto"``, ``"host:port"`` or ``"ray://host:port"``. By default that
            of ``$RAY_ADDRESS``, or that which this program is connected to; where there is none, a
            cluster is started on this machine and stopped in the end.
        at: how many run at a time, with how many threads, in a cluster that is started; see
            :func:`.places`.
        per_cell: what a cell takes of a node, such as ``{"CPU": 2, "GPU": 0.5}``. By default its
            share of a cluster that is started; of another one a CPU, and where it has GPUs, a sixth
            of one (:data:`.PER_GPU`). As many threads as CPUs.
        on_event: called in this thread with whatever happens.

    Returns:
        How each cell ended, in the order of the cells.

    Raises:
        ImportError: Ray is not installed.
        ValueError: the cluster cannot be reached.
        KeyboardInterrupt: when the user interrupts; nothing of ours is running then.
    """
    ray = require("ray", extra="ray")
    if not cells:
        return []
    tell = on_event or (lambda event: None)
    address = address or os.environ.get("RAY_ADDRESS") or None
    local = address is None and not ray.is_initialized()
    at = at or places(len(cells))
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
        per_cell = per_cell or _usual_share(ray)
        common["threads"] = max(1, int(per_cell.get("CPU", 1)))
        beacons = stack.enter_context(_beacons(cells))
        study = _Study(ray, cells, per_cell, tell)
        stack.callback(study.stop)
        study.begin([{**common, **_task(cell, beacons)} for cell in cells])
        return study.results()


class _Study:
    """Cells at work on a cluster."""

    def __init__(
        self,
        ray: Any,
        cells: Sequence[Cell],
        per_cell: Mapping[str, float],
        tell: Callable[[Event], None],
    ) -> None:
        self.ray, self.cells, self.per_cell, self.tell = ray, cells, per_cell, tell
        self.told = ray.remote(num_cpus=0, max_restarts=-1)(ray_payload.told()).remote()
        self.running: dict[Any, int] = {}
        self.started: dict[int, float] = {}
        self.forgotten: list[Any] = []

    def begin(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Hand all tasks to the cluster, which starts each when there is room for it."""
        asked = dict(self.per_cell)
        # Ray counts in ten-thousandths: six sixths must not be more than one.
        gpus = math.floor(1e4 * asked.pop("GPU", 0)) / 1e4
        begin = self.ray.remote(ray_payload.begin()).options(
            num_cpus=asked.pop("CPU", 1), num_gpus=gpus, resources=asked or None, max_retries=0
        )
        for number, task in enumerate(tasks):
            self.running[begin.remote({**task, "number": number}, self.told)] = number

    def results(self) -> list[Result]:
        """Wait for all cells."""
        found: dict[int, Result] = {}
        began = time.monotonic()
        while self.running:
            ready, _ = self.ray.wait([*self.running], timeout=_POLL)
            self._listen()
            if not self.started and began and time.monotonic() - began > _WAIT:
                self._say(self.cells[0], self._waited())
                began = 0.0
            for task in ready:
                number = self.running[task]
                result = self._result(number, task)
                del self.running[task]
                found[number] = result
                values = {} if result.ok else {"reason": result.reason}
                self.tell(Event(result.cell, "done" if result.ok else "failed", values))
        return [found[number] for number in range(len(self.cells))]

    def stop(self) -> None:
        """End what is still at work."""
        for task in self.running:
            self.ray.cancel(task, force=True)
        for tasks in ([*self.running], self.forgotten):
            if tasks:
                self.ray.wait(tasks, num_returns=len(tasks), timeout=_PATIENCE)
        self.ray.kill(self.told)
        for number in self.running.values():
            if number in self.started:
                self.tell(Event(self.cells[number], "stopped"))

    def _listen(self) -> None:
        """Hand on what was said since the last time; nothing where the actor is lost for now."""
        said: list[tuple[int, dict[str, Any]]] = []
        with contextlib.suppress(self.ray.exceptions.RayError):
            said = self.ray.get(self.told.take.remote(), timeout=_PATIENCE)
        for number, each in said:
            if each["event"] == "started":
                self._start(number)
            else:
                self.tell(Event(self.cells[number], "progress", each["values"]))

    def _start(self, number: int) -> None:
        if number not in self.started:
            self.started[number] = time.monotonic()
            self.tell(Event(self.cells[number], "started"))

    def _say(self, cell: Cell, text: str) -> None:
        self.tell(Event(cell, "progress", {"say": text}))

    def _waited(self) -> str:
        room = {name: self.ray.cluster_resources().get(name, 0) for name in self.per_cell}
        return (
            f"no cell has started after {_WAIT:.0f} s; each takes {_in_words(self.per_cell)}, and "
            f"the cluster has {_in_words(room)} in all"
        )

    def _result(self, number: int, task: Any) -> Result:
        """How a cell went, after what it wrote has been brought here."""
        # Where a process was lost at once, this is the first that is heard of it.
        self._start(number)
        cell, seconds = self.cells[number], time.monotonic() - self.started[number]
        errors = self.ray.exceptions
        try:
            ended = self.ray.get(task)
        except errors.RayTaskError as error:
            text = " ".join(f"{type(error.cause).__name__}: {error.cause}".split())
            return Result(cell, False, f"its node could not begin it ({text})", seconds=seconds)
        except errors.RayError as error:
            return Result(cell, False, _lost(errors, error), crashed=True, seconds=seconds)
        if "files" in ended:
            bring(cell.folder, ended["files"])
            if ended["left"]:
                names = ", ".join(ended["left"])
                self._say(cell, f"too large to come back: {names}, see {ended['folder']}")
            elif "reason" not in ended:
                self._forget(ended)
        seconds = ended.get("seconds", seconds)
        return Result(cell, "reason" not in ended, ended.get("reason", ""), seconds=seconds)

    def _forget(self, ended: Mapping[str, Any]) -> None:
        """Take away the folder on a node, now that all that was in it is here."""
        place = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ended["node"], soft=False
        )
        forget = self.ray.remote(ray_payload.forget()).options(
            num_cpus=0, max_retries=0, scheduling_strategy=place
        )
        self.forgotten.append(forget.remote(ended["folder"]))


def bring(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to a folder; those that say that it is finished come last.

    Args:
        folder: what is in it and has another name stays.
        files: what is in them, by their paths in the folder.
    """
    for name in sorted(files, key=lambda name: (name in _LAST and 1 + _LAST.index(name), name)):
        write_atomically(folder / name, files[name])


@contextlib.contextmanager
def _started(ray: Any, at: Places) -> Iterator[None]:
    """A cluster on this machine; it ends with this process, however that ends."""
    # A short path: that of a socket may have about 100 letters.
    base = "/tmp" if os.path.isdir("/tmp") else None
    with tempfile.TemporaryDirectory(prefix="ray", dir=base, ignore_cleanup_errors=True) as folder:
        how = {
            "num_cpus": at.workers * at.threads,
            "num_gpus": len(at.gpus),
            "include_dashboard": False,
            "object_store_memory": _STORE,
            "_temp_dir": folder,
        }
        with _connection(ray, "local", **how):
            yield


@contextlib.contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """A cluster that is there, and goes on without us."""
    with contextlib.ExitStack() as stack:
        try:
            _knock(address)
            stack.enter_context(_connection(ray, address))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            said = [type(error).__name__, *str(error).strip().splitlines()][-1].strip()
            raise ValueError(
                f"address is expected to be that of a running Ray cluster, got {address!r} "
                f"({said}); one that wants a token expects RAY_AUTH_MODE=token here too"
            ) from error
        yield


def _knock(address: str) -> None:
    """See that somebody listens at a host and port; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()


@contextlib.contextmanager
def _connection(ray: Any, address: str, **how: Any) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*_VARIABLES, "RAY_AUTH_MODE")}
    first = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.update({k: v for k, v in _VARIABLES.items() if before[k] is None})
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **how)
        # It would still say on stdout, at length, that a process was lost. We say so ourselves.
        ray._private.worker._worker_logs_enabled = False
        if first:
            # Ray's own prints a trace and ends in an abort.
            signal.signal(signal.SIGTERM, _end)
        yield
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = True
        for name, value in before.items():
            # Ray too sets one, where it starts a cluster.
            if value is None:
                os.environ.pop(name, None)
        if first:
            signal.signal(signal.SIGTERM, handler)


def _end(number: int, frame: object) -> None:
    """End this process in order: what it has started is ended on the way out."""
    sys.exit(128 + number)


def _usual_share(ray: Any) -> dict[str, float]:
    gpus = ray.cluster_resources().get("GPU", 0)
    return {"CPU": 1, "GPU": 1 / PER_GPU} if gpus else {"CPU": 1}


@contextlib.contextmanager
def _beacons(cells: Sequence[Cell]) -> Iterator[dict[Path, Path]]:
    """A file beside the folders of the cells: who sees it, sees them."""
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
    """Why a task is gone that could not say so itself."""
    if isinstance(error, errors.OutOfMemoryError):
        return "its node ran out of memory, and Ray ended its process"
    if isinstance(error, errors.NodeDiedError):
        return "its node was lost"
    return (
        "its process was lost, as one is that is killed or whose node goes "
        f"({type(error).__name__})"
    )


def _in_words(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount or
                        len(amounts) == 1) or "nothing"  # fmt: skip
