"""The other end of :mod:`.cluster`: what a process of a Ray cluster does with a cell.

A node that sees the cell's folder, as one of a local cluster or with a common file system does,
works in it. Another one works in a folder of its own, and hands back what is in it.
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
"""Bytes of the largest file that is handed back."""
_CHECKPOINTS = "checkpoints"
"""The folder that stays where the work is done."""


def work(task: Mapping[str, Any], told: Any) -> dict[str, Any]:
    """Work on a cell.

    Args:
        task: ``work``, ``payload``, ``folder``, ``threads`` and ``argv`` as for a process of this
            machine; ``number`` of the cell; ``beacon``, a file that is seen by those who see the
            folder; ``begun``, texts of files that are in the folder and say which run it holds.
        told: the actor that takes in events.

    Returns:
        ``seconds`` it took; the ``reason``, where it failed; where the work was done in a folder of
        its own also ``folder``, the ``files`` in it and the names of those ``left`` there, which
        are too large.
    """
    apart = not Path(task["beacon"]).exists()
    folder = _own_folder(task) if apart else Path(task["folder"])
    reasons: list[str] = []
    began = time.monotonic()
    with _telling(told, task["number"]) as tell:

        def emit(said: Mapping[str, Any]) -> None:
            if said["event"] == "failed":
                reasons.append(said["reason"])
            elif said["event"] == "progress":
                tell(said)

        if apart:
            for name, text in task["begun"].items():
                if not (folder / name).exists():
                    write_atomically(folder / name, text.encode())
        worker.work({**task, "folder": str(folder)}, emit)
    ended: dict[str, Any] = {"reason": reasons[0]} if reasons else {}
    ended["seconds"] = time.monotonic() - began
    if apart:
        files, left = collect(folder)
        ended |= {"folder": str(folder), "files": files, "left": left}
    return ended


def collect(folder: Path, largest: int = LARGEST) -> tuple[dict[str, bytes], list[str]]:
    """Files of a folder, without its checkpoints and what begins with a dot.

    Args:
        folder: need not be there.
        largest: bytes that a file may have.

    Returns:
        What is in them, by their paths in the folder; and the paths of those that are larger.
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
    """The same one for the same cell of the same reproduction: a retry goes on in it."""
    digest = digest_of([task["work"], task["folder"], task["payload"]], 16)
    return cache.folder() / "cells" / f"{Path(task['folder']).name}-{digest}"


@contextlib.contextmanager
def _telling(told: Any, number: int) -> Iterator[Emit]:
    """Hand on that it has started, then what is said; all of it has arrived at the end."""
    ray = require("ray", extra="ray")
    waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def put(said: list[dict[str, Any]]) -> None:
        # A cell is not to fail because nobody hears of it. While ray.get waits, Ray would give the
        # share of this cell to another one; a future is waited for without its knowing.
        with contextlib.suppress(ray.exceptions.RayError):
            told.put.remote([(number, each) for each in said]).future().result()

    def send() -> None:
        over = False
        while not over:
            said = [waiting.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    said.append(waiting.get_nowait())
            over = said[-1] is None
            put([each for each in said if each is not None])

    put([{"event": "started"}])
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        # As JSON, so that what arrives is what arrives from a process of this machine.
        yield lambda said: waiting.put(json.loads(json.dumps(said)))
    finally:
        waiting.put(None)
        thread.join()
