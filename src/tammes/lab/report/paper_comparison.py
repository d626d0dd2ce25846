"""Comparison of published numbers and ours, with claims and missing cells.

:mod:`.paper_comparison_writers` writes it as a page and as a table for a terminal,
``scripts/results_document.py`` as ``docs/results.md``.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from tammes.lab.report.render.html_page import Value
from tammes.lab.reproduce.judge import Verdict, judge
from tammes.lab.reproduce.ledger import Entry, Ledger
from tammes.lab.reproduce.recipes import Published, Recipe
from tammes.lab.stats.paired import Summary
from tammes.lab.stats.seed_groups import Quantity, format_mean

ON_REQUEST = "on request"
"""State of a cell that is run only if its row or column is named."""
QUICK = "Quick form: few images and a narrow network. A smoke test; its numbers mean nothing."
ERRORS = (
    "Differences are ours minus the paper's, also in standard errors: those of both combined where "
    "the paper prints a spread."
)
VERDICTS = (
    "A claim holds if the whole 95 % interval, paired over seeds, is on the claimed side; it leans "
    "if only the mean is, if there is one seed, or if some comparisons are still open; it fails if "
    "the mean is on the other side; it is open if nothing was run."
)
DAGGER = "† The paper prints no spread: in standard errors of ours only."

Head = Literal["paper", "released", "ours", "ours or missing", "n", "difference",
               "difference and errors", "standard errors", "missing"]  # fmt: skip
"""Columns that a table can have."""
_TITLES = {"ours or missing": "ours", "difference and errors": "difference"}
Shown = tuple[Quantity, list[str]]
"""Quantity, and the columns of the recipe with something to show for it."""


@dataclass(frozen=True)
class ComparedCell:
    """One quantity of one cell of the paper's table.

    Attributes:
        paper: number in the paper.
        released: number from the authors' released code.
        ours: our summary over the finished seeds.
        state: missing seeds in words; empty if every seed is done.
        paper_seeds: assumed number of seeds behind the paper's spread.
    """

    row: str
    column: str
    quantity: Quantity
    paper: Published | None
    released: Published | None
    ours: Summary | None
    state: str
    paper_seeds: int

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        if self.ours is None or self.paper is None:
            return None
        return self.ours.mean - self.paper.mean

    @property
    def standard_error(self) -> float | None:
        """Standard error of the difference; a paper's number without a spread counts as exact.

        None if we have a single seed, or if the spread is zero.
        """
        if self.ours is None or self.paper is None or self.ours.std is None:
            return None
        own = self.ours.std**2 / self.ours.count
        theirs = 0.0 if self.paper.std is None else self.paper.std**2 / self.paper_seeds
        return math.sqrt(own + theirs) or None

    @property
    def errors(self) -> float | None:
        """The difference in standard errors."""
        difference, unit = self.difference, self.standard_error
        return None if difference is None or unit is None else difference / unit

    @property
    def is_expected(self) -> bool:
        """Whether we have a number, or are going to."""
        return self.ours is not None or self.state not in ("", ON_REQUEST)

    def value(self, head: Head) -> Value:
        """Return the text of the cell in a column of the table, with its sort key."""
        quantity, ours = self.quantity, self.ours
        match head:
            case "paper" | "released":
                theirs = self.paper if head == "paper" else self.released
                return Value(published(quantity, theirs), theirs.mean if theirs else None)
            case "ours":
                return Value(format_mean(quantity, ours), ours.mean if ours else None)
            case "ours or missing":
                own = self.value("ours")
                both = f"{own.text} ({self.state})" if own.text and self.state else ""
                return Value(both or own.text or self.state, own.sort)
            case "n":
                return Value(str(ours.count), ours.count) if ours else Value("")
            case "difference":
                less = self.difference
                return Value("" if less is None else quantity.shown(less, sign=True), less)
            case "difference and errors":
                less_text, errors = self.value("difference").text, self.value("standard errors")
                unit = "" if errors.sort is None else " s.e."
                return Value(f"{less_text} ({errors.text}{unit})" if errors.text else less_text)
            case "standard errors":
                return Value(self._errors(), self.errors)
        return Value(self.state)

    def _errors(self) -> str:
        """Format the difference in standard errors, or why there is none."""
        if self.ours is None or self.paper is None:
            return ""
        if self.ours.std is None:
            return "n = 1"
        if self.errors is None:
            return "no spread"
        return f"{self.errors:+.1f}{' †' if self.paper.std is None else ''}"


def published(quantity: Quantity, number: Published | None) -> str:
    """Format a published number.

    Example:
        >>> from tammes.lab.reproduce.recipes import Published
        >>> from tammes.lab.reproduce.quantities import KNOWN
        >>> published(KNOWN["error"], Published(28.6, 0.24)), published(KNOWN["error"], None)
        ('28.60 ± 0.24', '')
    """
    return "" if number is None else format_mean(quantity, Summary(1, number.mean, number.std))


class ResultRow(NamedTuple):
    """Row of a table of results: name in the recipe, titles of row and column, cells."""

    name: str
    label: str
    column: str
    values: list[Value]


@dataclass(frozen=True)
class ResultTable:
    """Table of results, ready to be written, with its rows ordered by column of the recipe.

    A ``shared`` one combines several quantities without published numbers.
    """

    title: str
    heads: list[str]
    rows: list[ResultRow]
    shared: bool = False

    def by_column(self) -> list[tuple[str, list[ResultRow]]]:
        """Return the rows of each column of the recipe, with the column's title."""
        columns: dict[str, list[ResultRow]] = {}
        for row in self.rows:
            columns.setdefault(row.column, []).append(row)
        return [*columns.items()]


def _filled(
    title: str, heads: Sequence[str], rows: Sequence[ResultRow], *, shared: bool = False
) -> ResultTable:
    """Build a table without its empty columns."""
    places = [p for p in range(len(heads)) if any(row.values[p].text for row in rows)]
    kept = [row._replace(values=[row.values[p] for p in places]) for row in rows]
    return ResultTable(title, [heads[p] for p in places], kept, shared)


@dataclass(frozen=True, eq=False)
class PaperComparison:
    """Recipe with the results in its ledger."""

    recipe: Recipe
    ledger: Ledger

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the claims."""
        return judge(self.recipe, self.ledger)

    @cached_property
    def open(self) -> list[tuple[str, str, int]]:
        """Cells still to be run, with those on request only if another seed of theirs was run."""
        begun = {(entry.row, entry.column) for entry in self.ledger.cells}
        missing = self.ledger.open(self.recipe, 1 if self.ledger.quick else None)
        return [
            (row, column, seed)
            for row, column, seed in missing
            if (row, column) in begun or not self.recipe.on_request(row, column)
        ]

    @cached_property
    def labels(self) -> dict[str, str]:
        """Distinct titles of the rows."""
        return _unique({name: row.title for name, row in self.recipe.rows.items()})

    @cached_property
    def headings(self) -> dict[str, str]:
        """Distinct titles of the columns."""
        return _unique({name: column.title for name, column in self.recipe.columns.items()})

    @cached_property
    def stopped(self) -> list[Entry]:
        """Cells that diverged or failed, in the order of the table."""
        order = {name: place for place, name in enumerate(self.recipe.rows)}
        found = [entry for entry in self.ledger.cells if entry.status != "done"]
        return sorted(found, key=lambda entry: (order.get(entry.row, -1), entry.column, entry.seed))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of done, diverged, failed and open cells."""
        found: Counter[str] = Counter(entry.status for entry in self.ledger.cells)
        found["open"] = len(self.open)
        return {state: found[state] for state in ("done", "diverged", "failed", "open")}

    @cached_property
    def columns(self) -> list[str]:
        """Columns with a published number or a cell that was or will be run, in order."""
        known = (*self.recipe.paper, *self.recipe.released, *self.open)
        shown = {column for _, column, _ in known} | self._begun
        return [name for name in self.recipe.columns if name in shown]

    @cached_property
    def _begun(self) -> set[str]:
        return {entry.column for entry in self.ledger.cells}

    def cell(self, row: str, column: str, quantity: Quantity) -> ComparedCell:
        """Return a cell of the table."""
        where = (row, column, quantity.key)
        return ComparedCell(
            row,
            column,
            quantity,
            self.recipe.paper.get(where),
            self.recipe.released.get(where),
            self.ledger.summary(row, column, quantity.key),
            self.state(row, column),
            max(1, self.recipe.seeds),
        )

    def cells(self, quantity: Quantity, column: str) -> list[ComparedCell]:
        """Return the cells of a column that have a number or will have one."""
        found = [self.cell(row, column, quantity) for row in self.recipe.rows]
        return [each for each in found if each.paper or each.released or each.is_expected]

    def quantities(self, *, begun: bool = False) -> Iterator[Shown]:
        """Yield each quantity with the columns that have something to show for it.

        With ``begun``, only columns with a cell that was run count, if there are any.
        """
        run = self._begun & set(self.columns)
        shown = [name for name in self.columns if name in run or not (begun and run)]
        for place, quantity in enumerate(self.recipe.quantities):
            columns = []
            for column in shown:
                found = self.cells(quantity, column)
                # Open cells are shown once, under the main quantity.
                if any(each.paper or each.released or each.ours for each in found) or (
                    found and not place
                ):
                    columns.append(column)
            if columns:
                yield quantity, columns

    def tables(self, heads: Sequence[Head], *, begun: bool = False) -> Iterator[ResultTable]:
        """Yield the tables of all :meth:`quantities`; unpublished ones share the last table."""
        known = {place[1:] for place in (*self.recipe.paper, *self.recipe.released)}
        unpublished: list[Shown] = []
        every = [*self.quantities(begun=begun)]
        for quantity, columns in every:
            if not any((column, quantity.key) in known for column in columns):
                unpublished.append((quantity, columns))
        shared = unpublished if len(unpublished) > 1 else []
        yield from (self.table(*each, heads) for each in every if each not in shared)
        if shared:
            yield self._shared(shared, heads)

    def table(
        self, quantity: Quantity, columns: Sequence[str], heads: Sequence[Head]
    ) -> ResultTable:
        """Build the table of a quantity in some columns of the recipe."""
        cells = [cell for column in columns for cell in self.cells(quantity, column)]
        titles = {**_TITLES, "released": self.recipe.released_title}
        rows = [self._row(cell, [cell.value(head) for head in heads]) for cell in cells]
        return _filled(quantity.heading, [titles.get(head, head) for head in heads], rows)

    def _shared(self, quantities: Sequence[Shown], heads: Sequence[Head]) -> ResultTable:
        """Build a table of several quantities side by side."""
        rows = []
        wanted = {column for _, columns in quantities for column in columns}
        more: list[Head] = ["n", "missing"] if "n" in heads else ["missing"]
        for column in (name for name in self.recipe.columns if name in wanted):
            for row in self.recipe.rows:
                cells = [self.cell(row, column, quantity) for quantity, _ in quantities]
                if any(cell.is_expected for cell in cells):
                    most = max(cells, key=lambda cell: cell.ours.count if cell.ours else 0)
                    values = [cell.value("ours") for cell in cells]
                    rows.append(self._row(most, [*values, *map(most.value, more)]))
        names = [quantity.heading for quantity, _ in quantities]
        return _filled("ours", [*names, *more], rows, shared=True)

    def _row(self, cell: ComparedCell, values: list[Value]) -> ResultRow:
        return ResultRow(cell.row, self.labels[cell.row], self.headings[cell.column], values)

    def state(self, row: str, column: str) -> str:
        """Describe the missing seeds of a cell."""
        found: dict[str, list[int]] = {}
        for entry in self.stopped:
            if (entry.row, entry.column) == (row, column):
                found.setdefault(_ending(entry), []).append(entry.seed)
        for other_row, other_column, seed in self.open:
            if (other_row, other_column) == (row, column):
                found.setdefault("open", []).append(seed)
        done = self.ledger.of(row, column)
        if not found:
            there = self.recipe.has(row, column) and self.recipe.on_request(row, column)
            return ON_REQUEST if there and not done else ""
        if len(found) == 1 and not done:
            return next(iter(found))
        return "; ".join(f"{seeds_in_words(seeds)} {words}" for words, seeds in found.items())

    @property
    def summary(self) -> str:
        """Number of cells by state, seeds and machines, in words."""
        words = [counts_in_words(self.counts) if self.recipe.rows else "nothing to train"]
        if self.ledger.cells:
            words.append(seeds_in_words(sorted({entry.seed for entry in self.ledger.cells})))
        used = {entry.machine for entry in self.ledger.cells}
        machines = [
            str(machine.get("device") or machine.get("platform") or "an unnamed machine")
            for place, machine in enumerate(self.ledger.machines)
            if place in used
        ]
        return "; ".join([*words, *filter(None, [", ".join(dict.fromkeys(machines))])])

    @property
    def commands(self) -> list[str]:
        """Commands that ran the cells, or else the last one that wrote the ledger."""
        found = [entry.command or self.ledger.command for entry in self.ledger.cells]
        return [*dict.fromkeys(filter(None, found))] or [f"tammes reproduce {self.recipe.name}"]

    def stopped_in_words(self) -> Iterator[tuple[str, str, int, str, str]]:
        """Yield row, column, seed, state and reason of cells that diverged or failed."""
        for entry in self.stopped:
            row = self.labels.get(entry.row, entry.row)
            column = self.headings.get(entry.column, entry.column)
            yield row, column, entry.seed, _ending(entry), entry.reason

    def open_in_words(self) -> Iterator[tuple[str, str]]:
        """Yield columns with open cells, each with its rows and seeds in words."""
        for column in self.recipe.columns:
            seeds: dict[str, list[int]] = {}
            for row, other, seed in self.open:
                if other == column:
                    seeds.setdefault(row, []).append(seed)
            alike: dict[tuple[int, ...], list[str]] = {}
            for row, missing in seeds.items():
                alike.setdefault(tuple(missing), []).append(row)
            every = sum(self.recipe.has(row, column) for row in self.recipe.rows)
            parts = []
            for own_seeds, rows in alike.items():
                shown = ", ".join(self.labels[row] for row in rows)
                if len(rows) == every > 1:
                    shown = f"all {every} rows"
                parts.append(f"{shown} ({seeds_in_words(own_seeds)})")
            if parts:
                yield self.headings[column], "; ".join(parts)


def _ending(entry: Entry) -> str:
    """Describe the state of a cell without a number."""
    return f"diverged at step {entry.step:,}" if entry.status == "diverged" else entry.status


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Format a list of seeds.

    Example:
        >>> seeds_in_words([2]), seeds_in_words([0, 1, 2])
        ('seed 2', 'seeds 0, 1, 2')
    """
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def counts_in_words(counts: dict[str, int]) -> str:
    """Format the number of cells in each state.

    Example:
        >>> counts_in_words({"done": 5, "diverged": 1, "failed": 0, "open": 2})
        '8 cells: 5 done, 1 diverged, 2 open'
    """
    total = sum(counts.values())
    parts = [f"{count} {state}" for state, count in counts.items() if count]
    words = f"{total} {'cell' if total == 1 else 'cells'}"
    return f"{words}: {', '.join(parts)}" if parts else words


def _unique(titles: dict[str, str]) -> dict[str, str]:
    count = Counter(titles.values())
    return {
        name: title if count[title] == 1 else f"{title} ({name})" for name, title in titles.items()
    }
