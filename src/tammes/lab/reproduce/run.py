"""Run what is missing of tables and figures of the papers, and keep a ledger of each.

All cells of all recipes that are asked for go into one queue; one that several of them have is run
once. A ledger is written after every cell, so that whatever happens, the same call goes on from
there.
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
from tammes.lab.fewshot.recipe_cells import FewShot, evaluate_run
from tammes.lab.records.atomic_io import locked, writable
from tammes.lab.records.run_folder import RecordError, Run, write_json
from tammes.lab.reproduce.collect import CELL, failed, lacks, score, take
from tammes.lab.reproduce.ledger import Ledger, trial_digests
from tammes.lab.reproduce.recipe import Planned, Recipe
from tammes.lab.runner import Cell, Emit, Event, Result, plan_resources, run_cells
from tammes.lab.runner.progress_table import ProgressTable
from tammes.lab.runner.sweep import check, is_open, prepare, record_failures, train_cell
from tammes.lab.training.provenance import command, environment

EngineName: TypeAlias = Literal["local", "ray"]
_WORK = "tammes.lab.reproduce.run:run_cell"
"""What a process does with a cell."""
_SAVED = 20
"""Checkpoints of a run, about."""


@dataclass(frozen=True)
class Selection:
    """What is asked for of a recipe.

    Attributes:
        recipe: which one.
        rows: names; all by default.
        columns: names; by default all but those that are run on request.
        seeds: how many, or which; what the recipe says by default.
    """

    recipe: Recipe
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    seeds: int | Sequence[int] | None = None


@dataclass(frozen=True)
class Engine:
    """Where cells run.

    Attributes:
        name: processes of this machine, or a Ray cluster.
        address: of the cluster; one is started on this machine where there is none.
        workers: cells at a time; by default one for each core, or six on a GPU.
        retries: how often a cell is tried again whose process ended without saying why.
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
    engine: Engine | None = None,
    retry_failed: bool = False,
    report: Callable[[str], None] | None = None,
) -> list[Ledger]:
    """Run what is missing of some recipes.

    Args:
        selections: recipes, and what of them.
        out: folder of the ledgers, and of the runs in ``runs``.
        quick: in the form that only shows that it works; it has ledgers of its own.
        sources: where data are, by the name that recipes have for them.
        engine: where cells run.
        retry_failed: try those again whose loss was not finite.
        report: is told what is worth knowing; prints to stderr by default.

    Returns:
        The ledger of each, complete or not.

    Raises:
        ValueError: nothing was run, and the sentence says why.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("reproduce starts its own processes, and is not to be run by torchrun")
    base = writable(Path(out), flag="--out") / ("quick" if quick else "")
    desk = _Desk(base, quick, sources or {}, engine or Engine(), retry_failed, report or say)
    with locked(base, "another reproduction is at work in it"):
        tables = [_Table(each, desk) for each in selections]
        missing = [reason for table in tables for reason in table.leave_out_what_has_no_data()]
        if missing and not any(table.places for table in tables):
            raise ValueError(missing[0])
        desk.run([(table, trial) for table in tables for trial in table.trials()])
        for table in tables:
            table.choose()
        desk.run([(table, cell) for table in tables for cell in table.planned()])
    return [table.ledger for table in tables]


@dataclass
class _Desk:
    """What all recipes of a reproduction share."""

    base: Path
    quick: bool
    sources: Mapping[str, str]
    engine: Engine
    retry_failed: bool
    report: Callable[[str], None]
    known: dict[str, str | None] = field(default_factory=dict)
    """Why the images of a source cannot be had, or None where they can."""

    def folder(self, planned: Planned) -> Path:
        """Of the run of a cell."""
        return self.base / "runs" / planned.folder

    def run(self, wanted: Sequence[tuple["_Table", Planned]]) -> None:
        """Run cells that are open, each once, and write down what comes of them."""
        users: defaultdict[Path, list[tuple[_Table, Planned]]] = defaultdict(list)
        for table, planned in wanted:
            if not table.is_settled(planned):
                users[self.folder(planned)].append((table, planned))
            elif table.lacks(planned):
                table.note(planned)

        def note(folder: Path) -> bool:
            return all([table.note(planned) for table, planned in users[folder]])

        for folder in [*users]:
            # It may have been run for another recipe, or its ledger may be gone.
            if _ended(folder, self.retry_failed) and note(folder):
                del users[folder]
        cells = [_cell(folder, [planned for _, planned in some]) for folder, some in users.items()]
        if not cells:
            return
        self.report(f"{len(cells)} cells to run in {self.base}, {len(wanted)} asked for")
        prepare(cells)
        # Of all that was asked for, not of what is left: rounding may depend on the threads.
        several = len({self.folder(planned) for _, planned in wanted})
        self._run(cells, several, note)

    def _run(self, cells: Sequence[Cell], several: int, note: Callable[[Path], bool]) -> None:
        left = list(cells)
        for attempt in range(self.engine.retries + 1):
            crashed = []
            with ProgressTable(left) as board:

                def seen(event: Event, board: ProgressTable = board) -> None:
                    board(event)
                    if event.kind == "done":
                        note(event.cell.folder)

                for result in self._results(left, several, seen):
                    if result.crashed and attempt < self.engine.retries:
                        crashed.append(result.cell)
                        self.report(f"{result.cell.name}: tried again, as {result.reason}")
                    elif not result.ok:
                        record_failures([result])
                        note(result.cell.folder)
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
    """A recipe with its ledger, while it is worked on."""

    def __init__(self, selection: Selection, desk: _Desk) -> None:
        self.selection, self.recipe, self.desk = selection, selection.recipe, desk
        self.path = desk.base / f"{self.recipe.name}.json"
        self.ledger = Ledger.at(self.path, self.recipe, quick=desk.quick)
        if self.ledger.former:
            desk.report(
                f"{self.path}: {len(self.ledger.former)} cells are of an earlier form of the "
                "recipe, and do not count"
            )
        self.ledger.command = command()
        self.places = [*self.recipe.places(selection.rows, selection.columns)]

    def planned(self) -> list[Planned]:
        """Cells of the table that are asked for and whose settings are known."""
        tuned = self.ledger.chosen(self.recipe)
        given = self.selection.seeds
        found = self.recipe.planned(
            self.selection.rows, self.selection.columns, given, quick=self.desk.quick, tuned=tuned
        )
        cells = [self._sourced(cell) for cell in found if cell.place in self.places]
        for cell in cells:
            if cell.config is not None:
                self.ledger.configs["/".join(cell.place)] = cell.config.group()
        return cells

    def trials(self) -> list[Planned]:
        """Runs that settings are still to be chosen by."""
        chosen = self.ledger.chosen(self.recipe)
        return [
            self._sourced(trial)
            for place in self.places
            if place not in chosen
            for trial in self.recipe.trials(*place, quick=self.desk.quick)
        ]

    def _sourced(self, cell: Planned) -> Planned:
        return sourced(cell, self.desk.sources)

    def leave_out_what_has_no_data(self) -> list[str]:
        """See that images can be had and models built, column by column; why not, where not."""
        missing: list[str] = []
        for column in dict.fromkeys(column for _, column in self.places):
            rows = [row for row, other in self.places if other == column]
            if self._is_complete(rows, column):
                # Nothing is going to be run, so nobody need ask a hub for images.
                continue
            reason = self._unavailable([self._first(row, column) for row in rows])
            if reason is not None:
                self.places = [place for place in self.places if place[1] != column]
                missing.append(reason)
                self.desk.report(f"{self.recipe.name}: column {column} stays open: {reason}")
        return missing

    def _is_complete(self, rows: Sequence[str], column: str) -> bool:
        """Whether all cells of some rows are in the ledger."""
        chosen = self.ledger.chosen(self.recipe)
        if any(self.recipe.tune(row, column) and (row, column) not in chosen for row in rows):
            return False
        cells = self.recipe.planned(
            rows, [column], self.selection.seeds, quick=self.desk.quick, tuned=chosen
        )
        return all(self.is_settled(self._sourced(cell)) for cell in cells)

    def _first(self, row: str, column: str) -> Planned:
        """A cell, or the first trial of one whose settings are not chosen."""
        values = self.ledger.chosen(self.recipe).get((row, column))
        tried = self.recipe.trials(row, column, quick=self.desk.quick)
        if tried and values is None:
            return self._sourced(tried[0])
        return self._sourced(self.recipe.cell(row, column, 0, quick=self.desk.quick, values=values))

    def _unavailable(self, cells: Sequence[Planned]) -> str | None:
        """Why the images of a column cannot be had; other mistakes are raised."""
        configs = [cell.config for cell in cells if cell.config is not None]
        if not configs:
            return None
        first = configs[0]
        known, source = self.desk.known, f"{first.data}, {first.test}, {first.classes}"
        if known.get(source) is None:
            try:
                for name in {cell.settings["split"] for cell in cells if cell.kind == "fewshot"}:
                    class_lists.read(name)
                check(configs, self.desk.report)
                known[source] = None
            except DataError as error:
                known[source] = str(error)
        return known[source]

    def is_settled(self, planned: Planned) -> bool:
        """Whether a cell need not be run: it is done, or would diverge again."""
        if planned.tried:
            return False
        entry = self.ledger.find(planned)
        if entry is None or entry.status == "failed":
            return False
        return entry.status == "done" or not self.desk.retry_failed

    def lacks(self, planned: Planned) -> bool:
        """Whether the recipe keeps more of a cell by now than its entry has, and its run has it."""
        entry, run = self.ledger.find(planned), Run(self.desk.folder(planned))
        return entry is not None and lacks(self.recipe, entry) and run.status == "done"

    def note(self, planned: Planned) -> bool:
        """Write down what came of a cell; whether anything did."""
        if planned.tried:
            return score(planned, Run(self.desk.folder(planned))) is not None
        try:
            entry = take(self.recipe, planned, self.desk.folder(planned), self.ledger)
        except RecordError as error:
            if self.is_settled(planned):
                # What is known of it already is not given up for a folder that cannot be read.
                return True
            # Otherwise that is the failure of its cell; the others go on.
            entry = failed(planned, str(error))
        if entry is not None:
            self.ledger.put(entry)
            self.write()
        return entry is not None

    def choose(self) -> None:
        """Choose settings by the accuracy on images held out, or on validation classes."""
        chosen_already = self.ledger.chosen(self.recipe)
        for place in self.places:
            trials = self.recipe.trials(*place, quick=self.desk.quick)
            if not trials or place in chosen_already:
                continue
            tried = []
            for trial in map(self._sourced, trials):
                found = score(trial, Run(self.desk.folder(trial)))
                if found is not None:
                    tried.append({**trial.tried, **found})
            done = [each for each in tried if "accuracy" in each]
            # One that failed for another reason than its settings may do better the next time.
            ended = [each for each in tried if each.get("failed", "not finite") == "not finite"]
            if len(ended) == len(trials) and done:
                best = max(done, key=lambda each: each["accuracy"])
                chosen = {key: v for key, v in best.items() if key != "accuracy"}
                known = trial_digests(self.recipe, *place, quick=self.desk.quick)
                self.ledger.tuned["/".join(place)] = {**chosen, "tried": tried, "trials": known}
                self.write()

    def write(self) -> None:
        """Write the ledger."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.ledger.write(self.path)


def sourced(cell: Planned, sources: Mapping[str, str]) -> Planned:
    """A cell whose data are where the user says.

    Args:
        cell: as its recipe has it.
        sources: where data are, by the name that recipes have for them.
    """
    config = cell.config
    if config is None or config.data not in sources:
        return cell
    moved = config.replace(data=sources[config.data])
    return replace(cell, config=moved, known_as=cell.digest)


def run_cell(payload: Mapping[str, Any], folder: Path, emit: Emit) -> None:
    """Work on one cell; called in a process of its own."""
    if payload["kind"] != "sphere":
        train_cell(payload, folder, emit)
        several = [FewShot.from_dict(each) for each in payload["episodes"]]
        evaluate_run(Run(folder), several, lambda text: emit({"say": text}))
        return
    from tammes.lab.reproduce.sphere import run_sphere

    found = run_sphere(payload["settings"], payload["seed"])
    kept = {"sphere": found.pop("sphere")}
    around = environment(torch.device("cpu"), 1)
    write_json(folder / CELL, {"status": "done", **found, "kept": kept, "environment": around})


def _cell(folder: Path, several: Sequence[Planned]) -> Cell:
    """The work on a folder, for all cells that it is the run of."""
    planned = several[0]
    tried = "".join(f", {key} = {value}" for key, value in planned.tried.items())
    name = f"{planned.row}, {planned.column}{tried}, seed {planned.seed}"
    payload: dict[str, Any] = {"kind": planned.kind, "seed": planned.seed}
    if planned.config is None:
        return Cell(name, folder, payload | {"settings": dict(planned.settings)})
    config = planned.config.replace(save_every=max(1, planned.config.epochs // _SAVED))
    episodes = [dict(each.settings) for each in several if each.kind == "fewshot"]
    return Cell(name, folder, payload | {"config": config.to_dict(), "episodes": episodes})


def _ended(folder: Path, retry_failed: bool) -> bool:
    """Whether a cell need not be run: it is done, or would diverge again."""
    run = Run(folder)
    # A run that is trained may have failed when it was looked at.
    good = run.status != "done" or not (folder / "failure.json").exists()
    return (folder / CELL).exists() or (good and not is_open(run, retry_failed))
