"""Recipe of a table: its rows and columns, and the run of each cell."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeAlias

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.config.schema import Config, digest_of
from tammes.lab.config.typecheck import at_least, check_names, seed_numbers
from tammes.lab.fewshot.recipe_cells import FewShotSettings
from tammes.lab.reproduce.claims import Claim
from tammes.lab.reproduce.quick import quick_config, quick_settings
from tammes.lab.stats.seed_groups import Quantity


def _check_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    check_names(values, [each.name for each in fields(Config)], "has no")
    for key in ("seed", "validation"):
        if key in values:
            raise ValueError(f"is not expected to set {key}, got {values[key]!r}")
    return values


def _check_tune(tune: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
    for key, tried in tune.items():
        if len(tried) < 2:
            raise ValueError(f"is expected to have 2 values or more of {key}, got {tried}")
    return tune


Values: TypeAlias = Mapping[str, Any]
Fields: TypeAlias = Annotated[Values, _check_config]
Tune: TypeAlias = Annotated[Mapping[str, list[Any]], _check_tune]
Text: TypeAlias = Annotated[str, str.strip]
Place: TypeAlias = tuple[str, str]
"""Row and column."""
Kind: TypeAlias = Literal["train", "fewshot", "sphere"]

ALWAYS = ("test.accuracy", "train.loss")
"""Curves kept for every run."""
VALIDATION_SHARE = 0.1
"""Share of the training images held out in tuning runs."""


@dataclass(frozen=True)
class Published:
    """Published number, with its standard deviation if given."""

    mean: float
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class _RowOrColumn:
    """Settings that the cells of a row or column share.

    Attributes:
        name: name on the command line.
        title: name in the paper.
        config: fields of the configuration.
        values: values of the placeholders in braces.
        tune: placeholders to tune, with their candidates.
        tuned_as: row or column whose tuned settings are used; by default it is tuned itself.
        settings: settings of the episodes or of the toy problem.
        on_request: whether its cells are run only if it is named.
    """

    name: str
    title: Text
    config: Fields = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    tune: Tune = field(default_factory=dict)
    tuned_as: str = ""
    settings: Values = field(default_factory=dict)
    on_request: bool = False


@dataclass(frozen=True, kw_only=True)
class Row(_RowOrColumn):
    """Row of a table.

    Attributes:
        overrides: further fields of the configuration, by column.
        columns: columns that have this row; by default all.
        kind: kind of the cells: ``train``, ``fewshot`` (training and few-shot evaluation), or
            ``sphere`` (the toy problem on the sphere).
        note: remark for the page.
    """

    overrides: Mapping[str, Fields] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    kind: Kind = "train"
    note: Text = ""


@dataclass(frozen=True, kw_only=True)
class Column(_RowOrColumn):
    """Column of a table."""


@dataclass(frozen=True)
class PlannedCell:
    """Cell of a table with one seed, before it is run.

    Attributes:
        config: configuration of the run, if it trains a network.
        settings: settings of the episodes or of the toy problem.
        tried: candidate values of a tuning run, which is not part of the table.
        known_as: digest under the recipe's own data source, if the data are read from elsewhere.
    """

    row: str
    column: str
    seed: int
    kind: Kind = "train"
    config: Config | None = None
    settings: Values = field(default_factory=dict)
    tried: Values = field(default_factory=dict)
    known_as: str = ""

    @property
    def place(self) -> Place:
        """Row and column."""
        return self.row, self.column

    @property
    def digest(self) -> str:
        """Digest of the cell, the same in every recipe that has it."""
        if self.known_as:
            return self.known_as
        if self.config is not None and self.kind == "train":
            return self.config.digest
        given: dict[str, Any] = {"kind": self.kind, "seed": self.seed, **self.settings}
        if self.config is not None:
            # One run may be evaluated with several settings.
            given = {"run": self.config.digest, **self.settings}
        return digest_of(given)

    @property
    def folder(self) -> str:
        """Name of the run folder."""
        if self.config is not None:
            return self.config.folder
        return f"{self.kind}_{self.row}-seed{self.seed}-{self.digest}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe of a table or figure; ``docs/reproduce.md`` describes its YAML.

    Attributes:
        name: such as ``kobayashi2019/table2``.
        source: publication.
        seeds: default number of seeds.
        quantities: quantities to compare, the main one first.
        config: configuration fields of all cells.
        settings: settings of all episodes.
        paper: published numbers by row, column and quantity.
        released: numbers of the authors' released code, in the same form.
        released_source: origin of the released numbers.
        released_title: heading of the released numbers in tables.
        curves: paths in the lines of ``metrics.jsonl`` that the ledger keeps.
        keep: extras that the ledger keeps.
        protocol: differences from the paper, with reasons.
        quick: configuration fields of the quick form.
    """

    name: str
    title: Text
    source: Text
    summary: Text = ""
    seeds: Annotated[int, at_least(1)] = 3
    quantities: tuple[Quantity, ...] = ()
    config: Fields = field(default_factory=dict)
    settings: Values = field(default_factory=dict)
    rows: Mapping[str, Row] = field(default_factory=dict)
    columns: Mapping[str, Column] = field(default_factory=dict)
    paper: Mapping[tuple[str, str, str], Published] = field(default_factory=dict)
    released: Mapping[tuple[str, str, str], Published] = field(default_factory=dict)
    released_source: Text = ""
    released_title: Text = "released code"
    claims: tuple[Claim, ...] = ()
    curves: tuple[str, ...] = ()
    keep: tuple[Literal["health", "histograms", "scatter"], ...] = ()
    figures: tuple[Values, ...] = ()
    protocol: tuple[Mapping[str, Text], ...] = ()
    quick: Fields = field(default_factory=dict)

    def tune(self, row: str, column: str) -> Mapping[str, Sequence[Any]]:
        """Return the placeholders to tune in a cell, with their candidates."""
        if self.rows[row].kind == "sphere":
            return {}
        return {**self.columns[column].tune, **self.rows[row].tune}

    def tuned_place(self, row: str, column: str) -> Place:
        """Return row and column of the cell that is tuned for this one."""
        return self.rows[row].tuned_as or row, self.columns[column].tuned_as or column

    def has(self, row: str, column: str) -> bool:
        """Return whether the table has this cell."""
        only = self.rows[row].columns
        return not only or column in only

    def on_request(self, row: str, column: str) -> bool:
        """Return whether a cell is run only if its row or column is named."""
        return self.rows[row].on_request or self.columns[column].on_request

    def all_places(self) -> list[Place]:
        """Return row and column of all cells, including those run only on request."""
        return [(row, each) for row in self.rows for each in self.columns if self.has(row, each)]

    def places(
        self, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[Place]:
        """Yield row and column of the selected cells; by default all but those on request."""
        check_names(rows or (), self.rows, f"{self.name} has no row")
        check_names(columns or (), self.columns, f"{self.name} has no column")
        usual_rows = [name for name, row in self.rows.items() if not row.on_request]
        usual_columns = [name for name, each in self.columns.items() if not each.on_request]
        for row in rows or usual_rows:
            yield from ((row, each) for each in columns or usual_columns if self.has(row, each))

    def planned(
        self,
        rows: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        seeds: int | Sequence[int] | None = None,
        *,
        quick: bool = False,
        tuned: Mapping[Place, Values] | None = None,
    ) -> list[PlannedCell]:
        """Plan the cells of :meth:`places` with all seeds, except cells that are not tuned yet.

        ``seeds`` is their number or a list; ``tuned`` has the tuned settings by row and column.
        """
        which = self.seed_numbers(seeds, quick=quick)
        chosen = tuned or {}
        return [
            self.cell(*place, seed, quick=quick, values=chosen.get(place, {}))
            for place in self.places(rows, columns)
            if not self.tune(*place) or place in chosen
            for seed in which
        ]

    def seed_numbers(
        self, seeds: int | Sequence[int] | None, *, quick: bool = False
    ) -> Sequence[int]:
        """Return the seeds of a cell; by default as in the recipe, or one in quick form."""
        return seed_numbers((1 if quick else self.seeds) if seeds is None else seeds)

    def trials(self, row: str, column: str, *, quick: bool = False) -> list[PlannedCell]:
        """Plan the tuning runs of a cell, one for each combination of candidates.

        They train on a part of the training images and are compared on the rest. Few-shot cells
        train on all images and are compared on the validation classes.
        """
        row, column = self.tuned_place(row, column)
        runs: list[Values] = [{}]
        for name, tried in self.tune(row, column).items():
            runs = [{**run, name: value} for run in runs for value in tried]
        if not self.tune(row, column):
            return []
        return [
            self.cell(row, column, 0, quick=quick, values=values, validation=VALIDATION_SHARE)
            for values in runs
        ]

    def cell(
        self,
        row: str,
        column: str,
        seed: int,
        *,
        quick: bool = False,
        values: Values | None = None,
        validation: float | None = None,
    ) -> PlannedCell:
        """Plan one cell with one seed, and with the values of the tuned placeholders.

        ``validation`` is the share of the training images that a tuning run holds out.
        """
        this, beside, chosen = self.rows[row], self.columns[column], dict(values or {})
        known = {**beside.values, **this.values, **chosen}
        where = f"{self.name}, row {row}, column {column}"
        tried = chosen if validation is not None else {}
        settings: Values = {}
        if this.kind == "fewshot":
            settings = fill({**self.settings, **beside.settings, **this.settings}, known, where)
        elif this.kind == "sphere":
            settings = fill(this.settings, known, where)
            settings = quick_settings(settings) if quick else settings
            return PlannedCell(row, column, seed, this.kind, settings=settings, tried=tried)
        fields = {**self.config, **beside.config, **this.config, **this.overrides.get(column, {})}
        fields = {**fill(fields, known, where), "seed": seed}
        try:
            config = Config.from_dict(fields)
            if quick:
                config = quick_config(config, fill(self.quick, known, where))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        if this.kind == "fewshot":
            try:
                shots = FewShotSettings.from_dict(settings)
                shots.check(config, tried=bool(tried))
                settings = (shots.quick() if quick else shots).to_dict()
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        elif validation is not None:
            config = config.replace(validation=validation)
        return PlannedCell(row, column, seed, this.kind, config, settings, tried)


def fill(fields: Values, values: Values, where: str) -> dict[str, Any]:
    """Replace placeholders in braces; a text that is a single placeholder becomes the value itself.

    Example:
        >>> fill({"loss": "{r}*{k}*zero_centroid()", "lr": "{lr}"}, {"r": 5, "k": 9, "lr": 0.1}, "")
        {'loss': '5*9*zero_centroid()', 'lr': 0.1}
    """

    def value(name: str) -> Any:
        if name not in values:
            raise ValueError(
                f"{where}: there is no value for {{{name}}}{did_you_mean(name, values)}"
            )
        return values[name]

    def filled(text: str) -> Any:
        only = re.fullmatch(r"\{(\w+)\}", text)
        if only:
            return value(only[1])
        return re.sub(r"\{(\w+)\}", lambda found: str(value(found[1])), text)

    return {key: filled(v) if isinstance(v, str) else v for key, v in fields.items()}
