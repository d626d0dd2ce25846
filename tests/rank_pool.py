"""Run functions on several gloo ranks, in processes that are started once for a whole session.

``everywhere(3, work, 5)`` calls ``work(group, 5)`` on three ranks and returns what each returned.
Functions have to be at the top of a module; what they take and return is pickled.
"""

import atexit
import datetime
import functools
import multiprocessing
import tempfile
import traceback
from pathlib import Path

import torch

LARGEST = 4
SECONDS = 120


class Failure(Exception):
    """What went wrong on a rank: the kind of the error and what it says."""


def everywhere(size, work, *args):
    """What a function returns on each of the first ``size`` ranks."""
    outcomes = _pool().ask(size, work, args)
    for fine, value, trace in outcomes:
        if not fine:
            raise Failure(f"{value}\n{trace}")
    return [value for _, value, _ in outcomes]


def failures(size, work, *args):
    """What a function is expected to raise on each rank, as ``"ValueError: ..."``."""
    outcomes = _pool().ask(size, work, args)
    assert all(not fine for fine, _, _ in outcomes), outcomes
    return [value for _, value, _ in outcomes]


@functools.cache
def _pool():
    return _Pool()


class _Pool:
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store"
        self.pipes, self.processes = [], []
        for rank in range(LARGEST):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self.pipes.append(pipe)
            self.processes.append(process)
        atexit.register(self.close)

    def ask(self, size, work, args):
        for pipe in self.pipes[:size]:
            pipe.send((size, work, args))
        outcomes = []
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} of {size} did not answer")
            outcomes.append(pipe.recv())
        return outcomes

    def close(self):
        _pool.cache_clear()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank, store, pipe):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=LARGEST,
        timeout=datetime.timedelta(seconds=SECONDS / 2),
    )
    groups = {size: torch.distributed.new_group(range(size)) for size in range(1, LARGEST + 1)}
    while True:
        try:
            size, work, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(rank)
        try:
            pipe.send((True, work(groups[size], *args), ""))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}", traceback.format_exc()))
