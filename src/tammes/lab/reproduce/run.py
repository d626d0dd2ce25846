"""Run the missing cells of tables and figures, and keep a ledger of each.

All cells of all selected recipes go into one queue; a cell that several recipes share is run once.
The ledger is written after every cell, so that repeating the call resumes an interrupted one.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from tammes.lab.data import DataError
from tammes.lab.data.sources.loading import say
from tammes.lab.fewshot import class_lists
from tammes.lab.fewshot.recipe_cells import FewShotSettings, evaluate_run
from tammes.lab.records.atomic_io import locked, writable
from tammes.lab.records.run_folder import RecordError, Run, write_json
from tammes.lab.reproduce.collect import CELL, collect_entry, failed_entry, lacks, tuning_score
from tammes.lab.reproduce.ledger import Ledger, tuning_digests
from tammes.lab.reproduce.recipe import PlannedCell, Recipe
from tammes.lab.reproduce.sphere import run_sphere
from tammes.lab.runner import Cell, Emit, Event, Result, plan_resources, run_cells
from tammes.lab.runner.progress_table import ProgressTable
from tammes.lab.runner.sweep import check, is_open, prepare, record_failures, train_cell
from tammes.lab.training.provenance import command, environment, without_place

EngineName: TypeAlias = Literal["local", "ray"]
_WORK = "tammes.lab.reproduce.run:run_cell"
"""Import path of the function that runs a cell in a worker process."""
_SAVED = 20
"""Smallest number of checkpoints per run, approximately."""
_SAVE_SECONDS = 45.0
"""Seconds between two checkpoints, so that an interrupted cell loses less than a minute."""


class NothingToRun(ValueError):
    """No cell can be run, as no data are available; the message is one sentence."""


@dataclass(frozen=True)
class Selection:
    """Selected cells of a recipe; by default all but those on request, with the recipe's seeds."""

    recipe: Recipe
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    seeds: int | Sequence[int] | None = None


@dataclass(frozen=True)
class RunnerSettings:
    """Runner of the cells: processes on this machine, or a Ray cluster.

    The address is as in :func:`.run_cells_on_ray`. By default there is one worker per core, or six
    per GPU; a cell whose process crashed is retried ``retries`` times.
    """

    name: EngineName = "local"
    address: str | None = None
    workers: int | None = None
    retries: int = 2


def reproduce(
    selections: Sequence[Selection],
    out: str | os.PathLike[str] = "reproductions",
    *,
    quick: bool = False,
    sources: Mapping[str, str] | None = None,
    engine: RunnerSettings | None = None,
    retry_failed: bool = False,
    report: Callable[[str], None] | None = None,
) -> list[Ledger]:
    """Run the missing cells of some recipes.

    Args:
        selections: selected cells of each recipe.
        out: folder of the ledgers, with the runs in ``runs``.
        quick: run the quick form, which has separate ledgers.
        sources: folders of data sets, by their names in recipes.
        engine: runner of the cells.
        retry_failed: also retry cells whose loss was not finite; other failures are always retried.
        report: called with messages; by default they are printed to stderr.

    Returns:
        The ledger of each recipe, complete or not.

    Raises:
        NothingToRun: no cell can be run, as no data are available.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("reproduce starts its own processes and cannot run under torchrun")
    base = writable(Path(out), flag="--out") / ("quick" if quick else "")
    session = _Session(
        base, quick, sources or {}, engine or RunnerSettings(), retry_failed, report or say
    )
    with locked(base, "another reproduction is running in it"):
        tables = [_Table(each, session) for each in selections]
        missing = [reason for table in tables for reason in table.drop_unavailable_columns()]
        if missing and not any(table.places for table in tables):
            raise NothingToRun(missing[0])
        session.run([(table, trial) for table in tables for trial in table.trials()])
        for table in tables:
            table.select_tuned_settings()
        session.run([(table, cell) for table in tables for cell in table.planned()])
    return [table.ledger for table in tables]


@dataclass
class _Session:
    """State shared by all recipes of a reproduction."""

    base: Path
    quick: bool
    sources: Mapping[str, str]
    engine: RunnerSettings
    retry_failed: bool
    report: Callable[[str], None]
    known: dict[str, str | None] = field(default_factory=dict)
    """Reason why a data source is not available, or None if it is."""
    ledgers: dict[Path, Ledger] = field(default_factory=dict)
    """Ledgers by path: selections of one recipe write to the same one."""

    def ledger(self, path: Path, recipe: Recipe) -> Ledger:
        """Return the ledger of a recipe, read once."""
        if path not in self.ledgers:
            self.ledgers[path] = ledger = Ledger.at(path, recipe, quick=self.quick)
            ledger.command = without_place(command())
            if ledger.former:
                self.report(
                    f"{path}: {len(ledger.former)} cells are from an earlier version of the "
                    "recipe and are ignored"
                )
        return self.ledgers[path]

    def folder(self, planned: PlannedCell) -> Path:
        """Return the run folder of a cell."""
        return self.base / "runs" / planned.folder

    def run(self, wanted: Sequence[tuple["_Table", PlannedCell]]) -> None:
        """Run the open cells, each once, and write their entries."""
        users: defaultdict[Path, list[tuple[_Table, PlannedCell]]] = defaultdict(list)
        for table, planned in wanted:
            if not table.is_settled(planned):
                users[self.folder(planned)].append((table, planned))
            elif table.lacks(planned):
                table.record(planned)

        def record(folder: Path) -> bool:
            return all([table.record(planned) for table, planned in users[folder]])

        for folder in [*users]:
            # Another recipe may have run it, or the ledger may have been deleted.
            if _is_finished(folder, self.retry_failed) and record(folder):
                del users[folder]
        cells = [_cell(folder, [planned for _, planned in some]) for folder, some in users.items()]
        if not cells:
            return
        self.report(f"{len(cells)} cells to run in {self.base}, of {len(wanted)} selected")
        prepare(cells)
        # The number of threads follows from this and may affect rounding: resuming must not change
        # it, so all selected cells count, not only those left.
        several = len({self.folder(planned) for _, planned in wanted})
        self._run(cells, several, record)

    def _run(self, cells: Sequence[Cell], several: int, record: Callable[[Path], bool]) -> None:
        left = list(cells)
        for attempt in range(self.engine.retries + 1):
            crashed = []
            with ProgressTable(left) as board:

                def seen(event: Event, board: ProgressTable = board) -> None:
                    board(event)
                    if event.kind == "done":
                        record(event.cell.folder)

                for result in self._results(left, several, seen):
                    if result.crashed and attempt < self.engine.retries:
                        crashed.append(result.cell)
                        self.report(f"{result.cell.name}: retrying, as {result.reason}")
                    elif not result.ok:
                        record_failures([result])
                        record(result.cell.folder)
            left = crashed
            if not left:
                return

    def _results(
        self, cells: Sequence[Cell], several: int, seen: Callable[[Event], None]
    ) -> list[Result]:
        at = plan_resources(several, self.engine.workers)
        if self.engine.name == "ray":
            from tammes.lab.runner.ray_pool import run_cells_on_ray

            return run_cells_on_ray(cells, _WORK, address=self.engine.address, at=at, on_event=seen)
        return run_cells(cells, _WORK, at=at, on_event=seen)


class _Table:
    """Recipe with its ledger during a reproduction."""

    def __init__(self, selection: Selection, session: _Session) -> None:
        self.selection, self.recipe, self.session = selection, selection.recipe, session
        self.path = session.base / f"{self.recipe.name}.json"
        self.ledger = session.ledger(self.path, self.recipe)
        self.places = [*self.recipe.places(selection.rows, selection.columns)]

    def planned(self) -> list[PlannedCell]:
        """Plan the selected cells whose settings are known."""
        tuned, given = self.ledger.tuned_settings(self.recipe), self.selection
        found = self.recipe.planned(
            given.rows, given.columns, given.seeds, quick=self.session.quick, tuned=tuned
        )
        cells = [self._with_local_data(cell) for cell in found if cell.place in self.places]
        for cell in cells:
            if cell.config is not None:
                self.ledger.configs["/".join(cell.place)] = cell.config.group()
        return cells

    def trials(self) -> list[PlannedCell]:
        """Plan the tuning runs of cells that are not tuned yet."""
        chosen = self.ledger.tuned_settings(self.recipe)
        return [
            self._with_local_data(trial)
            for place in self.places
            if place not in chosen
            for trial in self.recipe.trials(*place, quick=self.session.quick)
        ]

    def _with_local_data(self, cell: PlannedCell) -> PlannedCell:
        return with_local_data(cell, self.session.sources)

    def drop_unavailable_columns(self) -> list[str]:
        """Drop columns whose data or models are not available; return the reasons."""
        missing: list[str] = []
        for column in dict.fromkeys(column for _, column in self.places):
            rows = [row for row, other in self.places if other == column]
            if self._is_complete(rows, column):
                # Nothing is left to run, so the data are not needed.
                continue
            reason = self._unavailable([self._first(row, column) for row in rows])
            if reason is not None:
                self.places = [place for place in self.places if place[1] != column]
                missing.append(reason)
                self.session.report(f"{self.recipe.name}: column {column} stays open: {reason}")
        return missing

    def _is_complete(self, rows: Sequence[str], column: str) -> bool:
        """Return whether all cells of some rows are in the ledger."""
        chosen = self.ledger.tuned_settings(self.recipe)
        if any(self.recipe.tune(row, column) and (row, column) not in chosen for row in rows):
            return False
        cells = self.recipe.planned(
            rows, [column], self.selection.seeds, quick=self.session.quick, tuned=chosen
        )
        return all(self.is_settled(self._with_local_data(cell)) for cell in cells)

    def _first(self, row: str, column: str) -> PlannedCell:
        """Plan a cell with seed 0, or its first tuning run if it is not tuned yet."""
        values = self.ledger.tuned_settings(self.recipe).get((row, column))
        tried = self.recipe.trials(row, column, quick=self.session.quick)
        if tried and values is None:
            return self._with_local_data(tried[0])
        return self._with_local_data(
            self.recipe.cell(row, column, 0, quick=self.session.quick, values=values)
        )

    def _unavailable(self, cells: Sequence[PlannedCell]) -> str | None:
        """Return why the data of a column are not available; raise on any other error."""
        configs = [cell.config for cell in cells if cell.config is not None]
        if not configs:
            return None
        first = configs[0]
        known, source = self.session.known, f"{first.data}, {first.test}, {first.classes}"
        if known.get(source) is None:
            try:
                for name in {cell.settings["split"] for cell in cells if cell.kind == "fewshot"}:
                    class_lists.read(name)
                check(configs, self.session.report)
                known[source] = None
            except DataError as error:
                known[source] = str(error)
        return known[source]

    def is_settled(self, planned: PlannedCell) -> bool:
        """Return whether a cell need not be run: it is done, or would diverge again."""
        if planned.tried:
            return False
        entry = self.ledger.find(planned)
        if entry is None or entry.status == "failed":
            return False
        return entry.status == "done" or not self.session.retry_failed

    def lacks(self, planned: PlannedCell) -> bool:
        """Return whether an entry lacks data that the recipe now keeps and the run can provide."""
        entry, run = self.ledger.find(planned), Run(self.session.folder(planned))
        return entry is not None and lacks(self.recipe, entry) and run.status == "done"

    def record(self, planned: PlannedCell) -> bool:
        """Write the entry of a cell; return whether there is one."""
        if planned.tried:
            return tuning_score(planned, Run(self.session.folder(planned))) is not None
        try:
            entry = collect_entry(self.recipe, planned, self.session.folder(planned), self.ledger)
        except RecordError as error:
            if self.is_settled(planned):
                # Keep the existing entry, although its folder is damaged.
                return True
            # The cell has failed; the others continue.
            entry = failed_entry(planned, str(error))
        if entry is not None:
            self.ledger.put(entry)
            self.ledger.write(self.path)
        return entry is not None

    def select_tuned_settings(self) -> None:
        """Choose tuned settings by accuracy on held-out images or on validation classes."""
        chosen_already = self.ledger.tuned_settings(self.recipe)
        for place in dict.fromkeys(self.recipe.tuned_place(*each) for each in self.places):
            trials = self.recipe.trials(*place, quick=self.session.quick)
            if not trials or place in chosen_already:
                continue
            tried = []
            for trial in map(self._with_local_data, trials):
                found = tuning_score(trial, Run(self.session.folder(trial)))
                if found is not None:
                    tried.append({**trial.tried, **found})
            done = [each for each in tried if "accuracy" in each]
            # Failures other than divergence are retried by the next call, so nothing is chosen yet.
            ended = [each for each in tried if each.get("failed", "not finite") == "not finite"]
            if len(ended) == len(trials) and done:
                best = max(done, key=lambda each: each["accuracy"])
                chosen = {key: v for key, v in best.items() if key != "accuracy"}
                known = tuning_digests(self.recipe, *place, quick=self.session.quick)
                self.ledger.tuned["/".join(place)] = {**chosen, "tried": tried, "trials": known}
                self.ledger.write(self.path)


def with_local_data(cell: PlannedCell, sources: Mapping[str, str]) -> PlannedCell:
    """Replace the data source of a cell by the user's own, if ``sources`` has one for its name."""
    config = cell.config
    if config is None or not {config.data, config.test} & sources.keys():
        return cell
    test = None if config.test is None else sources.get(config.test, config.test)
    moved = config.replace(data=sources.get(config.data, config.data), test=test)
    return replace(cell, config=moved, known_as=cell.digest)


def run_cell(payload: Mapping[str, Any], folder: Path, emit: Emit) -> None:
    """Run one cell in a worker process."""
    if payload["kind"] != "sphere":
        train_cell(payload, folder, emit)
        several = [FewShotSettings.from_dict(each) for each in payload["episodes"]]
        evaluate_run(Run(folder), several, lambda text: emit({"say": text}))
        return
    result = run_sphere(payload["settings"], payload["seed"])
    kept = {"sphere": result.pop("sphere")}
    around = environment(torch.device("cpu"), 1)
    write_json(folder / CELL, {"status": "done", **result, "kept": kept, "environment": around})


def _cell(folder: Path, several: Sequence[PlannedCell]) -> Cell:
    """Describe the work in a run folder, for all cells that share it."""
    planned = several[0]
    tried = "".join(f", {key} = {value}" for key, value in planned.tried.items())
    name = f"{planned.row}, {planned.column}{tried}, seed {planned.seed}"
    payload: dict[str, Any] = {"kind": planned.kind, "seed": planned.seed}
    if planned.config is None:
        return Cell(name, folder, payload | {"settings": dict(planned.settings)})
    config = planned.config.replace(
        save_every=max(1, planned.config.epochs // _SAVED), save_seconds=_SAVE_SECONDS
    )
    episodes = [dict(each.settings) for each in several if each.kind == "fewshot"]
    return Cell(name, folder, payload | {"config": config.to_dict(), "episodes": episodes})


def _is_finished(folder: Path, retry_failed: bool) -> bool:
    """Return whether a run need not be repeated: it is done, or would diverge again."""
    run = Run(folder)
    # A trained run may have failed in its few-shot evaluation.
    good = run.status != "done" or not (folder / "failure.json").exists()
    return (folder / CELL).exists() or (good and not is_open(run, retry_failed))
