"""Worker side of :mod:`.process_pool`: run the cells that arrive on stdin."""

import contextlib
import gc
import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

Emit: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Sends plain values to the parent."""

_REASON = 500
"""Largest length of a reason, in characters."""


def main() -> int:
    """Run cells until stdin closes or one fails."""
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with _events() as emit:
        threading.Thread(target=_read, args=(tasks,), daemon=True).start()
        while work(json.loads(tasks.get()), emit):
            gc.collect()
    return 1


def _read(tasks: "queue.SimpleQueue[bytes]") -> None:
    """Read tasks; exit the process when stdin closes, even during a task.

    Either there is nothing left to do, or the parent is gone and its workers must not outlive it.
    """
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)


def work(task: Mapping[str, Any], emit: Emit) -> bool:
    """Run a cell, and return whether it succeeded."""
    sys.argv = task["argv"]
    torch.set_num_threads(task["threads"])
    try:
        module, _, name = task["work"].partition(":")
        function = getattr(importlib.import_module(module), name)
        function(
            task["payload"],
            Path(task["folder"]),
            lambda values: emit({"event": "progress", "values": dict(values)}),
        )
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())
        emit({"event": "failed", "reason": reason[:_REASON]})
        sys.excepthook(*sys.exc_info())
        return False
    emit({"event": "done"})
    return True


@contextlib.contextmanager
def _events() -> Iterator[Emit]:
    """Open a channel to the parent that is separate from the output of the work."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lock = threading.Lock()

    def emit(values: Mapping[str, Any]) -> None:
        line = json.dumps(values).encode() + b"\n"
        with lock, contextlib.suppress(BrokenPipeError):
            own.write(line)

    with own:
        yield emit
