"""Ledger of a reproduction: the results of all cells, in one self-contained file.

It is written atomically after every cell. A cell with an entry is not run again, even if its run
folder is gone: the ledger has everything that a page shows.
"""

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tammes.lab.records.atomic_io import write_atomically
from tammes.lab.records.run_folder import RecordError
from tammes.lab.reproduce.recipe import Place, PlannedCell, Recipe
from tammes.lab.stats.paired import Summary, summary

CellStatus: TypeAlias = Literal["done", "diverged", "failed"]
_ABOUT_TRIALS = ("tried", "trials")
"""Keys next to the tuned settings: all candidates that were tried, and digests of their runs."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Result of a cell with one seed.

    Attributes:
        digest: see :attr:`.PlannedCell.digest`.
        values: quantities by name, if the cell is done.
        optimum: largest possible class and sample margin.
        step: last step, or the step at which it diverged.
        seconds: training time.
        chosen: epoch that the values are from, in words.
        curves: the epochs under ``epoch``, and the values at these epochs by path.
        kept: extras that the recipe keeps: ``health``, ``histograms``, ``scatter``, ``sphere``,
            ``fewshot``, ``identities``.
        reason: why the cell is not done.
        machine: index into the machines of the ledger.
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

    def curve(self, path: str) -> dict[int, float]:
        """Return the finite values of a curve by epoch."""
        points = zip(self.curves.get("epoch", ()), self.curves.get(path, ()), strict=False)
        known = ((x, y) for x, y in points if x is not None and y is not None)
        return {int(x): y for x, y in known if math.isfinite(y)}


@dataclass
class Ledger:
    """Results of all cells of a recipe.

    Attributes:
        quick: whether all cells are in quick form, whose numbers mean nothing.
        command: last command that wrote the ledger.
        cells: entries, in no particular order.
        configs: configuration fields by ``row/column``.
        tuned: tuned settings by ``row/column``; under ``tried`` all candidates with their
            accuracies, under ``trials`` the digests of the tuning runs.
        former: entries of an earlier version of the recipe, which are ignored; see :meth:`current`.
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
        """Read a ledger from its file.

        Raises:
            RecordError: the file is missing or damaged.
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
        """Read the :meth:`current` ledger of a recipe; without a file, return an empty one."""
        if not path.exists():
            return cls(recipe.name, quick)
        return cls.read(path).current(recipe, quick=quick)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the ledger atomically, one line per cell so that versions can be diffed."""
        try:
            data = self._text(ensure_ascii=False).encode()
        except UnicodeEncodeError:
            # A folder name may contain bytes that are not valid UTF-8.
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
        """Move entries that do not belong to the current version of a recipe to ``former``.

        An entry belongs to the cell with its digest: if the recipe now has that cell in another row
        or column, the entry moves there.

        Raises:
            RecordError: the ledger belongs to another recipe, or only one of the two is quick.
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
        former = [entry for entry in entries if entry not in cells]
        free = _places_without(cells, recipe, {entry.seed for entry in former}, chosen, quick=quick)
        configs, lost = dict(self.configs), []
        for entry in former:
            place = free.pop((entry.digest, entry.seed), None)
            if place is None:
                lost.append(entry)
                continue
            cells.append(replace(entry, row=place[0], column=place[1]))
            config = configs.pop(f"{entry.row}/{entry.column}", None)
            if config is not None:
                configs["/".join(place)] = config
        return replace(self, cells=cells, former=lost, configs=configs)

    def of(self, row: str, column: str) -> list[Entry]:
        """Return the finished entries of a cell, ordered by seed."""
        return sorted(self._ended(row, column, "done"), key=lambda entry: entry.seed)

    def diverged(self, row: str, column: str) -> int:
        """Return the number of seeds of a cell whose loss was not finite."""
        return len(self._ended(row, column, "diverged"))

    def _ended(self, *key: str) -> list[Entry]:
        return [e for e in self.cells if (e.row, e.column, e.status) == key]

    def values(self, row: str, column: str, quantity: str) -> dict[int, float]:
        """Return a quantity of a cell by seed."""
        return {
            entry.seed: entry.values[quantity]
            for entry in self.of(row, column)
            if quantity in entry.values
        }

    def resamples(self, row: str, column: str, quantity: str) -> dict[int, list[float]]:
        """Return a quantity of a cell in every resample of the test identities, by seed."""
        kept = {e.seed: e.kept.get("identities", {}) for e in self.of(row, column)}
        found = {seed: each.get("resamples", {}).get(quantity) for seed, each in kept.items()}
        return {seed: drawn for seed, drawn in found.items() if drawn}

    def summary(self, row: str, column: str, quantity: str) -> Summary | None:
        """Return mean and standard deviation over the seeds of a cell; None if no seed is done."""
        return summary(self.values(row, column, quantity).values())

    def find(self, planned: PlannedCell) -> Entry | None:
        """Return the entry of a cell; None if it has none with this digest."""
        wanted = (planned.row, planned.column, planned.seed, planned.digest)
        here = (e for e in self.cells if (e.row, e.column, e.seed, e.digest) == wanted)
        return next(here, None)

    def put(self, entry: Entry) -> None:
        """Add an entry, replacing an earlier one of the same row, column and seed."""
        place = (entry.row, entry.column, entry.seed)
        self.cells = [e for e in self.cells if (e.row, e.column, e.seed) != place] + [entry]

    def adopt(self, entry: Entry, source: "Ledger") -> None:
        """Add an entry of another ledger, with its machine."""
        machine = entry.machine
        if machine is not None:
            machine = self.machine(source.machines[machine])
        self.put(replace(entry, machine=machine))

    def machine(self, about: dict[str, Any]) -> int:
        """Return the index of a machine, adding it if it is new."""
        if about not in self.machines:
            self.machines.append(about)
        return self.machines.index(about)

    def tuned_settings(self, recipe: Recipe | None = None) -> dict[Place, dict[str, Any]]:
        """Return the tuned settings by row and column.

        With a recipe, only those whose tuning runs it still plans, also for cells tuned as another.
        """
        found = {}
        for name, values in self.tuned.items():
            row, _, column = name.partition("/")
            if recipe is None or values.get("trials") == tuning_digests(
                recipe, row, column, quick=self.quick
            ):
                found[row, column] = {k: v for k, v in values.items() if k not in _ABOUT_TRIALS}
        if recipe is None:
            return found
        for place in recipe.all_places():
            source = recipe.tuned_place(*place)
            if source in found:
                found.setdefault(place, found[source])
        return found

    def open(self, recipe: Recipe, seeds: int | None = None) -> list[tuple[str, str, int]]:
        """Return row, column and seed of all cells without an entry."""
        known = {(entry.row, entry.column, entry.seed) for entry in self.cells}
        return [
            (row, column, seed)
            for row, column in recipe.all_places()
            for seed in range(seeds or recipe.seeds)
            if (row, column, seed) not in known
        ]


def _places_without(
    cells: Sequence[Entry],
    recipe: Recipe,
    seeds: Collection[int],
    chosen: Mapping[Place, Mapping[str, Any]],
    *,
    quick: bool,
) -> dict[tuple[str, int], Place]:
    """Return the places that have no entry yet, by digest and seed of the cell."""
    taken = {(entry.row, entry.column, entry.seed) for entry in cells}
    found: dict[tuple[str, int], Place] = {}
    for place in recipe.all_places() if seeds else ():
        if recipe.tune(*place) and place not in chosen:
            continue
        for seed in seeds:
            if (*place, seed) not in taken:
                planned = recipe.cell(*place, seed, quick=quick, values=chosen.get(place))
                found.setdefault((planned.digest, seed), place)
    return found


def tuning_digests(recipe: Recipe, row: str, column: str, *, quick: bool) -> list[str]:
    """Digests of the tuning runs of a cell."""
    if row not in recipe.rows or column not in recipe.columns:
        return []
    return [trial.digest for trial in recipe.trials(row, column, quick=quick)]


def _short(entry: Entry) -> dict[str, Any]:
    """Return the fields of an entry that differ from their defaults."""
    plain = {each.name: each.default for each in fields(entry)}
    return {k: v for k, v in asdict(entry).items() if v != {} and v != plain[k]}
