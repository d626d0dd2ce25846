"""Published numbers and ours beside each other, and what is said of each cell of a table.

The page of a reproduction, its table for a terminal and ``docs/results.md`` all read these.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tammes.lab.claims import Verdict, judge
from tammes.lab.ledger import Entry, Ledger
from tammes.lab.paired import Summary
from tammes.lab.recipes import Published, Recipe
from tammes.lab.statistics import Quantity, spread

ON_REQUEST = "on request"
"""What is said of a cell that is run only where somebody asks for it."""
STATES = ("done", "diverged", "failed", "open")
QUICK = "Quick form: a few images and a narrow network. It shows that it works, and nothing else."


Shown = tuple[Quantity, list[str]]
"""A quantity, and the columns that have something of it to show."""


@dataclass(frozen=True)
class Beside:
    """One quantity in one cell of the table.

    Attributes:
        row: name of the row.
        column: name of the column.
        quantity: what is compared.
        paper: what the paper prints.
        released: what the authors' released code gave.
        ours: over the finished seeds.
        state: what is missing, in words; nothing where every seed is done.
        paper_seeds: over how many seeds the paper's spread is taken to be.
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
        """Ours less the paper's."""
        if self.ours is None or self.paper is None:
            return None
        return self.ours.mean - self.paper.mean

    @property
    def standard_error(self) -> float | None:
        """Of the difference; a paper's number without a spread is taken as it is.

        None for a single seed of ours, and where nothing spreads.
        """
        if self.ours is None or self.paper is None or self.ours.std is None:
            return None
        own = self.ours.std**2 / self.ours.count
        theirs = 0.0 if self.paper.std is None else self.paper.std**2 / self.paper_seeds
        return math.sqrt(own + theirs) or None

    @property
    def errors(self) -> float | None:
        """The difference in standard errors."""
        less, unit = self.difference, self.standard_error
        return None if less is None or unit is None else less / unit

    @property
    def is_expected(self) -> bool:
        """Whether there is a number of ours, or one is missing."""
        return self.ours is not None or self.state not in ("", ON_REQUEST)

    @property
    def ours_in_words(self) -> str:
        """Our mean and deviation, and what is missing."""
        found = spread(self.quantity, self.ours)
        return f"{found} ({self.state})" if found and self.state else found or self.state

    @property
    def difference_in_words(self) -> str:
        """Ours less the paper's, with a sign."""
        less = self.difference
        return "" if less is None else self.quantity.shown(less, sign=True)

    @property
    def errors_in_words(self) -> str:
        """The difference in standard errors, or why there are none."""
        if self.difference is None or self.ours is None or self.paper is None:
            return ""
        if self.ours.std is None:
            return "n = 1"
        if self.errors is None:
            return "no spread"
        return f"{self.errors:+.1f}{' †' if self.paper.std is None else ''}"


ERRORS = (
    "Differences are ours less the paper's; beside them in standard errors, of both together where "
    "the paper prints a spread."
)
VERDICTS = (
    "A claim holds where the whole 95 % interval, paired over seeds, is on the right side; it "
    "leans where only the mean is, where there is one seed, or where some comparisons are still "
    "open; it fails where the mean is not; it is open where nothing is known."
)
DAGGER = "† The paper prints no spread: in standard errors of ours alone."


def published(quantity: Quantity, found: Published | None) -> str:
    """A published number in words.

    Example:
        >>> from tammes.lab.recipes import Published
        >>> from tammes.lab.recipes.quantities import KNOWN
        >>> published(KNOWN["error"], Published(28.6, 0.24)), published(KNOWN["error"], None)
        ('28.60 ± 0.24', '')
    """
    if found is None:
        return ""
    return spread(quantity, Summary(1, found.mean, found.std))


@dataclass(frozen=True, eq=False)
class Reproduced:
    """A recipe, and what its ledger has of it."""

    recipe: Recipe
    ledger: Ledger

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What has become of the claims."""
        return judge(self.recipe, self.ledger)

    @cached_property
    def open(self) -> list[tuple[str, str, int]]:
        """Cells that have still to be run; a row of a column on request is, once it was begun."""
        begun = {(entry.row, entry.column) for entry in self.ledger.cells}
        missing = self.ledger.open(self.recipe, 1 if self.ledger.quick else None)
        usual = {name for name, each in self.recipe.columns.items() if not each.on_request}
        return [place for place in missing if place[1] in usual or place[:2] in begun]

    @cached_property
    def labels(self) -> dict[str, str]:
        """What rows are called; no two the same."""
        return _unique({name: row.title for name, row in self.recipe.rows.items()})

    @cached_property
    def headings(self) -> dict[str, str]:
        """What columns are called; no two the same."""
        return _unique({name: column.title for name, column in self.recipe.columns.items()})

    @cached_property
    def stopped(self) -> list[Entry]:
        """Cells that diverged or failed, in the order of the table."""
        order = {name: place for place, name in enumerate(self.recipe.rows)}
        found = [entry for entry in self.ledger.cells if entry.status != "done"]
        return sorted(found, key=lambda entry: (order.get(entry.row, -1), entry.column, entry.seed))

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many cells are done, diverged, failed and open."""
        found: Counter[str] = Counter(entry.status for entry in self.ledger.cells)
        return {**{state: found[state] for state in STATES[:-1]}, "open": len(self.open)}

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds of everything that was run."""
        return sorted({entry.seed for entry in self.ledger.cells})

    @cached_property
    def columns(self) -> list[str]:
        """Columns that have something to show, in their order: a number, or a cell to be run."""
        shown = {column for _, column, _ in self.recipe.paper} | {
            column for _, column, _ in self.recipe.released
        }
        shown |= {entry.column for entry in self.ledger.cells}
        shown |= {column for _, column, _ in self.open}
        return [name for name in self.recipe.columns if name in shown]

    def beside(self, row: str, column: str, quantity: Quantity) -> Beside:
        """A cell of the table."""
        where = (row, column, quantity.key)
        return Beside(
            row,
            column,
            quantity,
            self.recipe.paper.get(where),
            self.recipe.released.get(where),
            self.ledger.summary(row, column, quantity.key),
            self.state(row, column),
            max(1, self.recipe.seeds),
        )

    def table(self, quantity: Quantity, column: str) -> list[Beside]:
        """The rows of a column that have a number, or will have one."""
        found = [self.beside(row, column, quantity) for row in self.recipe.rows]
        return [each for each in found if each.paper or each.released or each.is_expected]

    def quantities(self, *, begun: bool = False) -> Iterator[Shown]:
        """Quantities with the columns that have something of them to show.

        Args:
            begun: only columns of which something was run, where there is one.
        """
        run = {entry.column for entry in self.ledger.cells} & set(self.columns)
        shown = [name for name in self.columns if name in run or not (begun and run)]
        for place, quantity in enumerate(self.recipe.quantities):
            columns = []
            for column in shown:
                found = self.table(quantity, column)
                # What is open is said once, under the main quantity.
                if any(each.paper or each.released or each.ours for each in found) or (
                    found and not place
                ):
                    columns.append(column)
            if columns:
                yield quantity, columns

    def tables(self, *, begun: bool = False) -> tuple[list[Shown], list[Shown]]:
        """Quantities that have tables of their own, and those that share one.

        Several of which nothing is published share one.

        Args:
            begun: as :meth:`quantities` has it.
        """
        known = {place[1:] for place in (*self.recipe.paper, *self.recipe.released)}
        own: list[Shown] = []
        shared: list[Shown] = []
        for quantity, columns in self.quantities(begun=begun):
            published_too = any((column, quantity.key) in known for column in columns)
            (own if published_too else shared).append((quantity, columns))
        return (own, shared) if len(shared) > 1 else ([*self.quantities(begun=begun)], [])

    def shared_rows(self, given: Sequence[Shown]) -> Iterator[list[Beside]]:
        """Rows of a table that quantities share: each has a cell for every one of them.

        Args:
            given: quantities with their columns.
        """
        shown = {column for _, columns in given for column in columns}
        for column in (name for name in self.recipe.columns if name in shown):
            for row in self.recipe.rows:
                cells = [self.beside(row, column, quantity) for quantity, _ in given]
                if any(cell.is_expected for cell in cells):
                    yield cells

    def state(self, row: str, column: str) -> str:
        """What is missing in a cell, in words."""
        found: dict[str, list[int]] = {}
        for entry in self.stopped:
            if (entry.row, entry.column) == (row, column):
                found.setdefault(stop_in_words(entry), []).append(entry.seed)
        for other_row, other_column, seed in self.open:
            if (other_row, other_column) == (row, column):
                found.setdefault("open", []).append(seed)
        done = self.ledger.of(row, column)
        if not found:
            on_request = self.recipe.columns[column].on_request
            there = on_request and not done and self.recipe.has(row, column)
            return ON_REQUEST if there else ""
        if len(found) == 1 and not done:
            return next(iter(found))
        return "; ".join(f"{seeds_in_words(seeds)} {words}" for words, seeds in found.items())


def stop_in_words(entry: Entry) -> str:
    """How a cell ended that has no number."""
    if entry.status == "diverged":
        return f"diverged at step {entry.step:,}"
    return entry.status


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Seeds as a list.

    Example:
        >>> seeds_in_words([2]), seeds_in_words([0, 1, 2]), seeds_in_words([])
        ('seed 2', 'seeds 0, 1, 2', 'no seed')
    """
    if not seeds:
        return "no seed"
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def counts_in_words(counts: dict[str, int]) -> str:
    """How many cells are in which state.

    Example:
        >>> counts_in_words({"done": 5, "diverged": 1, "failed": 0, "open": 2})
        '8 cells: 5 done, 1 diverged, 2 open'
    """
    total = sum(counts.values())
    parts = [f"{count} {state}" for state, count in counts.items() if count]
    words = f"{total} {'cell' if total == 1 else 'cells'}"
    return f"{words}: {', '.join(parts)}" if parts else words


def commands_of(ledger: Ledger) -> list[str]:
    """What its cells were run by; what filled it last, where they do not say."""
    found = [entry.command or ledger.command for entry in ledger.cells]
    return [*dict.fromkeys(filter(None, found))] or [f"tammes reproduce {ledger.recipe}"]


def machines_in_words(ledger: Ledger) -> str:
    """The machines that cells were run on."""
    used = {entry.machine for entry in ledger.cells}
    names = [
        str(machine.get("device") or machine.get("platform") or "an unnamed machine")
        for place, machine in enumerate(ledger.machines)
        if place in used
    ]
    return ", ".join(dict.fromkeys(names))


def open_by_name(found: Reproduced) -> list[tuple[str, str]]:
    """Columns with open cells, each with its rows and their seeds in words."""
    seeds: dict[str, dict[str, list[int]]] = {}
    for row, column, seed in found.open:
        seeds.setdefault(column, {}).setdefault(row, []).append(seed)
    words = []
    for column in found.recipe.columns:
        alike: dict[tuple[int, ...], list[str]] = {}
        for row, missing in seeds.get(column, {}).items():
            alike.setdefault(tuple(missing), []).append(row)
        parts = []
        for own_seeds, rows in alike.items():
            every = [row for row in found.recipe.rows if found.recipe.has(row, column)]
            shown = ", ".join(found.labels[row] for row in rows)
            if len(every) > 1 and len(rows) == len(every):
                shown = f"all {len(every)} rows"
            parts.append(f"{shown} ({seeds_in_words(own_seeds)})")
        if parts:
            words.append((found.headings[column], "; ".join(parts)))
    return words


def _unique(titles: dict[str, str]) -> dict[str, str]:
    count = Counter(titles.values())
    return {
        name: title if count[title] == 1 else f"{title} ({name})" for name, title in titles.items()
    }
