"""The ledger of a reproduction: what came out of each cell, in one file that needs no other.

It is written after every cell, in one step. A cell that is in it is not run again, even where its
run is gone: what a page shows is all here.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.records.run_folder import RecordError
from tammes.lab.reproduce.recipe import Place, PlannedCell, Recipe
from tammes.lab.stats.paired import Summary, summary

CellStatus: TypeAlias = Literal["done", "diverged", "failed"]
_ABOUT_TRIALS = ("tried", "trials")
"""What stands beside values that were chosen: all that were tried, and by which runs."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What came out of a cell with one seed.

    Attributes:
        row: of the table.
        column: of the table.
        seed: of the run.
        digest: of what was run; see :attr:`.PlannedCell.digest`.
        status: how it ended.
        values: quantities by name, if it is done.
        optimum: the best class and sample margin there can be.
        epochs: how long it trained.
        step: the last one, or the one it diverged at.
        seconds: that training took.
        chosen: which epoch the values are of.
        curves: ``epoch``, and values at these epochs by path.
        kept: what else the recipe asked for: ``histograms``, ``scatter``, ``sphere``,
            ``fewshot``.
        reason: why it is not done.
        machine: which of the ledger's machines it ran on.
        command: that it was run by.
    """

    row: str
    column: str
    seed: int
    digest: str
    status: CellStatus
    values: Mapping[str, float] = field(default_factory=dict)
    optimum: Mapping[str, float] = field(default_factory=dict)
    epochs: int = 0
    step: int = 0
    seconds: float = 0.0
    chosen: str = ""
    curves: Mapping[str, list[float | None]] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    machine: int | None = None
    command: str = ""


@dataclass
class Ledger:
    """Everything that is known of the cells of a recipe.

    Attributes:
        recipe: its name.
        quick: whether all cells are in the quick form, whose numbers mean nothing.
        command: that filled it last.
        machines: what cells ran on.
        cells: in no order.
        configs: fields of the configuration by ``row/column``.
        tuned: by ``row/column``, the values that were chosen; under ``tried`` all of them with
            their accuracies, under ``trials`` the digests of their runs.
        former: cells of an earlier form of the recipe, which count for nothing; :meth:`current`
            tells them apart.
    """

    recipe: str
    quick: bool = False
    command: str = ""
    machines: list[dict[str, Any]] = field(default_factory=list)
    cells: list[Entry] = field(default_factory=list)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    tuned: dict[str, dict[str, Any]] = field(default_factory=dict)
    former: list[Entry] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Ledger":
        """A ledger from its file.

        Raises:
            RecordError: it is not there, or damaged.
        """
        path = Path(path)
        try:
            values = json.loads(path.read_bytes())
            cells = [Entry(**each) for each in values.pop("cells")]
            ledger = cls(**values, cells=cells)
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordError(f"{path}: not a ledger, or a damaged one ({error})") from error
        for entry in cells:
            named = isinstance(entry.row, str) and isinstance(entry.column, str)
            if not named or type(entry.seed) is not int or entry.status not in get_args(CellStatus):
                raise RecordError(f"{path}: not a ledger, or a damaged one ({entry.row!r})")
        return ledger

    @classmethod
    def at(cls, path: Path, recipe: Recipe, *, quick: bool = False) -> "Ledger":
        """The ledger of a recipe as it is now; an empty one where there is none."""
        if not path.exists():
            return cls(recipe.name, quick)
        return cls.read(path).current(recipe, quick=quick)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it, in one step; a line for each cell, so that versions can be compared."""
        try:
            data = self._text(ensure_ascii=False).encode()
        except UnicodeEncodeError:
            # The name of a folder need not be text in any encoding.
            data = self._text(ensure_ascii=True).encode()
        write_atomically(path, data)

    def _text(self, *, ensure_ascii: bool) -> str:
        def plain(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)

        names = [each.name for each in fields(self) if each.name not in ("cells", "former")]
        head = plain({name: getattr(self, name) for name in names}, indent=1)
        ordered = sorted([*self.cells, *self.former], key=lambda e: (e.row, e.column, e.seed))
        lines = ",\n  ".join(plain(_short(entry)) for entry in ordered)
        inside = f"\n  {lines}\n " if lines else ""
        return f'{head[:-2]},\n "cells": [{inside}]\n}}\n'

    def current(self, recipe: Recipe, *, quick: bool = False) -> "Ledger":
        """The same, where only cells count that are those of a recipe as it is now.

        Args:
            recipe: of the ledger.
            quick: whether that is its quick form.

        Raises:
            RecordError: it is the ledger of another recipe, or of another form of it.
        """
        if (self.recipe, self.quick) != (recipe.name, quick):
            forms = {True: " in quick form", False: ""}
            raise RecordError(
                f"a ledger of {recipe.name}{forms[quick]} is expected, "
                f"got that of {self.recipe}{forms[self.quick]}"
            )
        chosen = self.tuned_settings(recipe)

        def counts(entry: Entry) -> bool:
            place = (entry.row, entry.column)
            if entry.row not in recipe.rows or entry.column not in recipe.columns:
                return False
            if not recipe.has(*place) or (recipe.tune(*place) and place not in chosen):
                return False
            cell = recipe.cell(*place, entry.seed, quick=quick, values=chosen.get(place))
            return entry.digest == cell.digest

        entries = [*self.cells, *self.former]
        cells = [entry for entry in entries if counts(entry)]
        return replace(self, cells=cells, former=[e for e in entries if e not in cells])

    def of(self, row: str, column: str) -> list[Entry]:
        """What is done of a cell, by seed."""
        found = [
            entry
            for entry in self.cells
            if (entry.row, entry.column, entry.status) == (row, column, "done")
        ]
        return sorted(found, key=lambda entry: entry.seed)

    def diverged(self, row: str, column: str) -> int:
        """Seeds of a cell whose loss was not finite."""
        place = (row, column, "diverged")
        return sum((entry.row, entry.column, entry.status) == place for entry in self.cells)

    def values(self, row: str, column: str, quantity: str) -> dict[int, float]:
        """A quantity of a cell by seed."""
        return {
            entry.seed: entry.values[quantity]
            for entry in self.of(row, column)
            if quantity in entry.values
        }

    def summary(self, row: str, column: str, quantity: str) -> Summary | None:
        """Mean and deviation over the seeds of a cell; None where nothing is done."""
        return summary(self.values(row, column, quantity).values())

    def find(self, planned: PlannedCell) -> Entry | None:
        """What came out of a cell; None where it is open, or something else was run before."""
        for entry in self.cells:
            here = (entry.row, entry.column, entry.seed, entry.digest)
            if here == (planned.row, planned.column, planned.seed, planned.digest):
                return entry
        return None

    def put(self, entry: Entry) -> None:
        """Write down what came out of a cell, in place of what was there."""
        place = (entry.row, entry.column, entry.seed)
        self.cells = [e for e in self.cells if (e.row, e.column, e.seed) != place] + [entry]

    def machine(self, about: dict[str, Any]) -> int:
        """The number of a machine, which is added where it is new."""
        if about not in self.machines:
            self.machines.append(about)
        return self.machines.index(about)

    def tuned_settings(self, recipe: Recipe | None = None) -> dict[Place, dict[str, Any]]:
        """Values that were chosen, by row and column.

        Args:
            recipe: leave out what was chosen among other runs than it says now.
        """
        found = {}
        for name, values in self.tuned.items():
            row, _, column = name.partition("/")
            if recipe is None or values.get("trials") == tuning_digests(
                recipe, row, column, quick=self.quick
            ):
                found[row, column] = {k: v for k, v in values.items() if k not in _ABOUT_TRIALS}
        return found

    def open(self, recipe: Recipe, seeds: int | None = None) -> list[tuple[str, str, int]]:
        """Row, column and seed of all cells that nothing is known of.

        Args:
            recipe: of the ledger.
            seeds: how many of each; as many as the recipe says by default.
        """
        known = {(entry.row, entry.column, entry.seed) for entry in self.cells}
        return [
            (row, column, seed)
            for row, column in recipe.places(columns=[*recipe.columns] or None)
            for seed in range(seeds or recipe.seeds)
            if (row, column, seed) not in known
        ]


def tuning_digests(recipe: Recipe, row: str, column: str, *, quick: bool) -> list[str]:
    """What the runs are known by that settings of a cell are chosen by."""
    if row not in recipe.rows or column not in recipe.columns:
        return []
    return [trial.digest for trial in recipe.trials(row, column, quick=quick)]


def _short(entry: Entry) -> dict[str, Any]:
    """An entry without what it does not have."""
    plain = {each.name: each.default for each in fields(entry)}
    return {k: v for k, v in asdict(entry).items() if v != {} and v != plain[k]}
