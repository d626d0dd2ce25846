"""The other end of :mod:`.local`: a process that works on cells as they come in on its stdin."""

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
"""Tells the parent something; plain values."""

_REASON = 500
"""Characters a reason may have; the frameworks below can say a lot."""


def main() -> int:
    """Work on cells as they come in."""
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with _events() as emit:
        threading.Thread(target=_read, args=(tasks,), daemon=True).start()
        while work(json.loads(tasks.get()), emit):
            gc.collect()
    return 1


def _read(tasks: "queue.SimpleQueue[bytes]") -> None:
    """Take in tasks; the end of them is the end of the process, whatever it is at.

    Either there is nothing left to do, or the parent is gone and nothing is to go on without it.
    """
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)


def work(task: Mapping[str, Any], emit: Emit) -> bool:
    """Work on a cell; whether it went well."""
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
    """A way to the parent that nothing the work prints gets into."""
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
