"""Queue of cells from many recipes, worked off in calls of limited time.

The ledgers are the state of the queue: a call takes the next open cells in the order of the lines,
and a later call goes on where it stopped.
"""

import math
import os
import shutil
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tammes.lab.data.sources.loading import say
from tammes.lab.records.atomic_io import writable
from tammes.lab.reproduce.collect import lacks, lacks_curves
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipe import PlannedCell
from tammes.lab.reproduce.run import NothingToRun, RunnerSettings, Selection, reproduce
from tammes.lab.runner import plan_resources

_MANY = 1000
"""More cells than there are workers."""
_COSTS = (
    "data", "classes", "whole", "image_size", "fraction", "imbalance", "limit", "backbone",
    "batch_size", "compile",
)  # fmt: skip
"""Fields that decide how long an epoch takes."""


@dataclass(frozen=True)
class QueueLine:
    """Selected cells of a recipe.

    ``minutes`` is a guess of what a cell takes beside the others, if no similar one was run.
    """

    selection: Selection
    minutes: float


@dataclass(frozen=True)
class Remaining:
    """Open cells of a queue, tuning runs among them, and minutes with all workers busy.

    The time of ``guessed`` cells is a guess, as no similar one was run.
    """

    cells: int
    trials: int
    minutes: float
    guessed: int

    def __str__(self) -> str:
        if not self.cells:
            return "nothing is open"
        tuning = f" ({self.trials} of them tuning runs)" if self.trials else ""
        guess = f"; the time of {self.guessed} is a guess" if self.guessed else ""
        return f"about {math.ceil(self.minutes)} minutes remain: {self.cells} cells{tuning}{guess}"


def run_queue(
    lines: Sequence[QueueLine],
    out: str | os.PathLike[str],
    *,
    seconds: float,
    known: str | os.PathLike[str] | None = None,
    quick: bool = False,
    engine: RunnerSettings | None = None,
    report: Callable[[str], None] = say,
) -> Remaining:
    """Run the next open cells of a queue until they are done or time is up.

    When time is up all processes end, as after Ctrl-C: finished cells are in the ledgers, and the
    others resume from their checkpoints, which are less than a minute old.

    Args:
        lines: lines of the queue, the first ones first.
        out: folder of the ledgers, with the runs in ``runs``.
        seconds: time limit of this call.
        known: folder of further ledgers; their entries are taken over first.
        quick: run the quick form.
        engine: runner of the cells.
        report: called with messages.
    """
    engine, out = engine or RunnerSettings(), writable(Path(out), flag="--out")
    if known is not None and not quick and Path(known).resolve() != out.resolve():
        take_over(lines, Path(known), out)
    try:
        with time_limit(seconds):
            stages = _stages(lines, out, quick=quick, seconds=seconds, workers=engine.workers)
            for stage in stages:
                selections = [line.selection for line in stage]
                try:
                    reproduce(selections, out, quick=quick, engine=engine, report=report)
                except NothingToRun as error:
                    report(f"{', '.join(each.recipe.name for each in selections)}: {error}")
    except KeyboardInterrupt:
        report("time is up; call again to go on")
    return remaining(lines, out, quick=quick, workers=engine.workers)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt when time is up."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _stages(
    lines: Sequence[QueueLine], out: Path, *, quick: bool, seconds: float, workers: int | None
) -> Iterator[Sequence[QueueLine]]:
    """Yield lines with open cells that run together, which keeps all workers busy.

    A line with tuning runs begins a stage, as these are run before all cells of the stage. A stage
    with more work than a call has time for ends, as preparing further lines takes time too.
    """
    stage: list[QueueLine] = []
    work = 0.0
    for line in lines:
        share_entries(line.selection, lines, out, quick=quick)
        left = remaining([line], out, quick=quick, workers=1, beside=lines)
        if stage and (left.trials or work > 2 * seconds * _workers(workers)):
            yield stage
            stage, work = [], 0.0
        if left.cells:
            stage.append(line)
            work += 60 * left.minutes
    if stage:
        yield stage


def _workers(workers: int | None) -> int:
    return plan_resources(_MANY, workers).workers


def remaining(
    lines: Sequence[QueueLine],
    out: str | os.PathLike[str],
    *,
    quick: bool = False,
    workers: int | None = None,
    beside: Sequence[QueueLine] = (),
) -> Remaining:
    """Count the open cells of a queue, and estimate the time that they take.

    A cell is taken to need as long per epoch as the median of cells with the same network, images
    and batches in the ledgers of the queue and of the lines ``beside`` it.
    """
    known = _epoch_times([*lines, *beside], Path(out), quick=quick)
    seen: dict[str, tuple[PlannedCell, float, bool]] = {}
    for line in lines:
        for cell in _open_cells(line.selection, Path(out), quick=quick):
            if cell.folder not in seen:
                time = _estimate(cell, known)
                seen[cell.folder] = cell, 60 * line.minutes if time is None else time, time is None
    times = [time for _, time, _ in seen.values()]
    return Remaining(
        cells=len(seen),
        trials=sum(bool(cell.tried) for cell, _, _ in seen.values()),
        minutes=max([sum(times) / _workers(workers), *times], default=0.0) / 60,
        guessed=sum(guessed for _, _, guessed in seen.values()),
    )


def _epoch_times(
    lines: Sequence[QueueLine], out: Path, *, quick: bool
) -> dict[tuple[Any, ...], list[float]]:
    """Return the seconds per epoch of all cells that are done, by :func:`_workload`."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for selection in {line.selection.recipe.name: line.selection for line in lines}.values():
        ledger = _ledger(selection, out, quick=quick)
        for entry in ledger.cells:
            config = ledger.configs.get(f"{entry.row}/{entry.column}")
            if config is not None and entry.status == "done" and entry.epochs:
                time = entry.seconds / entry.epochs
                found.setdefault(_workload(config), []).append(time)
    return found


def _workload(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields of a configuration that the time of an epoch depends on most."""
    return tuple(config.get(key) for key in _COSTS)


def _estimate(cell: PlannedCell, known: Mapping[tuple[Any, ...], list[float]]) -> float | None:
    """Return the seconds of a cell by similar ones, or None if there are none."""
    if cell.config is None:
        return 0.0
    times = known.get(_workload(cell.config.group()))
    return statistics.median(times) * cell.config.epochs if times else None


def _open_cells(selection: Selection, out: Path, *, quick: bool) -> list[PlannedCell]:
    """Return the cells that are not in the ledger, and tuning runs of those that are not tuned.

    Cells that wait for tuning are counted with the first candidates.
    """
    recipe, ledger = selection.recipe, _ledger(selection, out, quick=quick)
    tuned = ledger.tuned_settings(recipe)
    found: list[PlannedCell] = []
    for place in recipe.places(selection.rows, selection.columns):
        trials = [] if place in tuned else recipe.trials(*place, quick=quick)
        found += trials
        values = tuned.get(place) or (trials[0].tried if trials else None)
        for seed in recipe.seed_numbers(selection.seeds, quick=quick):
            cell = recipe.cell(*place, seed, quick=quick, values=values)
            entry = ledger.find(cell)
            if entry is None or entry.status == "failed":
                found.append(cell)
    return found


def _ledger(selection: Selection, out: Path, *, quick: bool) -> Ledger:
    return Ledger.at(_path(selection, out, quick=quick), selection.recipe, quick=quick)


def _path(selection: Selection, out: Path, *, quick: bool) -> Path:
    return out / ("quick" if quick else "") / f"{selection.recipe.name}.json"


def share_entries(
    selection: Selection, lines: Sequence[QueueLine], out: Path, *, quick: bool = False
) -> None:
    """Copy entries of runs that other recipes of a queue have into the ledger of a selection.

    Claims about extras that such an entry lacks stay open.
    """
    recipe, path = selection.recipe, _path(selection, out, quick=quick)
    others = {_path(line.selection, out, quick=quick) for line in lines} - {path}
    entries = [
        (ledger, entry)
        for ledger in (Ledger.read(other) for other in sorted(others) if other.exists())
        for entry in ledger.cells
        if entry.status == "done" and not lacks_curves(recipe, entry)
    ]
    # Entries that lack nothing come last, and replace others of the same run.
    entries.sort(key=lambda pair: not lacks(recipe, pair[1]))
    done = {(entry.digest, entry.seed): (ledger, entry) for ledger, entry in entries}
    own = _ledger(selection, out, quick=quick)
    shared = [
        (cell, *done[cell.digest, cell.seed])
        for cell in _open_cells(selection, out, quick=quick)
        if (cell.digest, cell.seed) in done and not cell.tried
    ]
    for cell, ledger, entry in shared:
        own.adopt(replace(entry, row=cell.row, column=cell.column), ledger)
        if cell.config is not None:
            own.configs["/".join(cell.place)] = cell.config.group()
    if shared:
        own.write(path)


def take_over(lines: Sequence[QueueLine], known: Path, out: Path) -> None:
    """Copy the entries of other ledgers that the ledgers of a queue do not have yet."""
    for recipe in {line.selection.recipe.name: line.selection.recipe for line in lines}.values():
        source, target = (folder / f"{recipe.name}.json" for folder in (known, out))
        if not source.exists():
            continue
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            continue
        theirs, own = (Ledger.at(path, recipe) for path in (source, target))
        own.tuned = {**theirs.tuned, **own.tuned}
        own = own.current(recipe)
        there = {(entry.row, entry.column, entry.seed) for entry in own.cells}
        for entry in theirs.cells:
            if (entry.row, entry.column, entry.seed) not in there:
                own.adopt(entry, theirs)
        own.configs = {**theirs.configs, **own.configs}
        own.write(target)
