"""Remote side of :mod:`.ray_pool`: run a cell in a process of a Ray cluster.

A node that sees the folder of the cell, on this machine or through a shared file system, works in
it. Another node works in a local folder and returns its files.
"""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tammes.lab.config.schema import digest_of
from tammes.lab.data import cache
from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.runner import worker
from tammes.lab.runner.worker import Emit
from tammes.optional import require

LARGEST = 64 * 2**20
"""Size limit of a returned file, in bytes."""
_CHECKPOINTS = "checkpoints"
"""Folder that is not returned."""


def work(task: Mapping[str, Any], events: Any) -> dict[str, Any]:
    """Run a cell, and send its events to an actor.

    A task has ``work``, ``payload``, ``folder``, ``threads`` and ``argv`` as for a local process;
    the ``number`` of the cell; ``beacon``, a file that a node can read only if it sees the folder;
    and ``begun``, the contents of the files that identify the run in the folder.

    Returns:
        ``seconds``; the ``reason`` of a failure; if the work was done in a local folder, also that
        ``folder``, its ``files`` and the names of those ``left`` there because of their size.
    """
    remote = not Path(task["beacon"]).exists()
    folder = _own_folder(task) if remote else Path(task["folder"])
    reasons: list[str] = []
    began = time.monotonic()
    with _sender(events, task["number"]) as send:

        def emit(event: Mapping[str, Any]) -> None:
            if event["event"] == "failed":
                reasons.append(event["reason"])
            elif event["event"] == "progress":
                send(event)

        if remote:
            for name, text in task["begun"].items():
                if not (folder / name).exists():
                    write_atomically(folder / name, text.encode())
        worker.work({**task, "folder": str(folder)}, emit)
    outcome: dict[str, Any] = {"reason": reasons[0]} if reasons else {}
    outcome["seconds"] = time.monotonic() - began
    if remote:
        files, left = collect(folder)
        outcome |= {"folder": str(folder), "files": files, "left": left}
    return outcome


def collect(folder: Path, largest: int = LARGEST) -> tuple[dict[str, bytes], list[str]]:
    """Read the files of a folder, which need not exist, without checkpoints and hidden files.

    Returns:
        Contents by relative path, and the paths of files larger than ``largest`` bytes.
    """
    files, left = dict[str, bytes](), list[str]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] == _CHECKPOINTS or any(part.startswith(".") for part in name.parts):
            continue
        if path.is_file():
            if path.stat().st_size > largest:
                left.append(name.as_posix())
            else:
                files[name.as_posix()] = path.read_bytes()
    return files, left


def _own_folder(task: Mapping[str, Any]) -> Path:
    """Return the local folder of a cell, the same for every attempt so that a retry resumes."""
    digest = digest_of([task["work"], task["folder"], task["payload"]], 16)
    return cache.folder() / "cells" / f"{Path(task['folder']).name}-{digest}"


@contextlib.contextmanager
def _sender(events: Any, number: int) -> Iterator[Emit]:
    """Report that the cell started, then its events; all have arrived when the context exits."""
    ray = require("ray", extra="ray")
    waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def put(batch: list[dict[str, Any]]) -> None:
        # A lost event must not fail the cell. During ray.get Ray would lend the resources of this
        # cell to another one; waiting for a future does not.
        with contextlib.suppress(ray.exceptions.RayError):
            events.put.remote([(number, event) for event in batch]).future().result()

    def forward() -> None:
        over = False
        while not over:
            batch = [waiting.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(waiting.get_nowait())
            over = batch[-1] is None
            put([event for event in batch if event is not None])

    put([{"event": "started"}])
    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        # Convert through JSON, so that events equal those of a local process.
        yield lambda event: waiting.put(json.loads(json.dumps(event)))
    finally:
        waiting.put(None)
        thread.join()
