"""Groups of runs that differ only in their seed, and their paired differences.

A group has a mean and a standard deviation over its seeds. Two groups are compared seed by seed:
the differences over their common seeds have a mean and a 95 % interval (Student t). A single seed
has no interval.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from tammes.lab.config.expressions import did_you_mean, normal
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import RecordError, Run, number, read_each
from tammes.lab.stats.paired import CONFIDENCE, Difference, Summary, difference, summary

State: TypeAlias = Literal["failed", "unfinished", "damaged", "left out"]

_DRAWN_BY = ("classes", "whole", "identities", "limit")
"""Fields of a configuration that say which images of a source a run is tested on."""


@dataclass(frozen=True)
class Quantity:
    """A number measured in a finished run.

    Attributes:
        key: name in JSON.
        name: name in tables.
        path: keys that lead to it in ``final.json``.
        unit: ``"%"``, ``"°"``, ``"s"`` or empty.
        factor: conversion from the record to the unit, before the offset.
        digits: decimal places shown.
        better: 1 if more is better, -1 if less is, 0 if neither.
    """

    key: str
    name: str
    path: tuple[str, ...]
    unit: str = ""
    factor: float = 1.0
    digits: int = 3
    better: Literal[-1, 0, 1] = 0
    offset: float = 0.0

    @property
    def heading(self) -> str:
        """The name with its unit."""
        return f"{self.name} {self.unit}".rstrip()

    def read(self, final: Mapping[str, Any]) -> float | None:
        """Read the number from ``final.json``; None if it is missing or not finite."""
        value = number(final, self.path)
        return None if value is None else self.convert(value)

    def convert(self, recorded: float) -> float:
        """Convert a recorded number to the unit."""
        return self.offset + self.factor * recorded

    @property
    def way(self) -> int:
        """-1 if less is better, else 1."""
        return -1 if self.better < 0 else 1

    @property
    def suffix(self) -> str:
        """The unit as it follows a number."""
        return f" {self.unit}" if self.unit in ("%", "s") else self.unit

    def shown(self, value: float, *, sign: bool = False) -> str:
        """Format a value, without its unit.

        Example:
            >>> QUANTITIES[0].shown(97.123), QUANTITIES[0].shown(0.4, sign=True)
            ('97.12', '+0.40')
        """
        digits = 0 if self.unit == "s" and abs(value) >= 100 else self.digits
        # A value that rounds to zero has no sign.
        rounded = round(value, digits) + 0.0
        return f"{rounded:{'+' if sign and rounded else ''}.{digits}f}"

    def shown_ends(self, interval: Iterable[float], separator: str = " to ") -> str:
        """Format both ends of an interval of differences, without the unit."""
        return separator.join(self.shown(end, sign=True) for end in interval)

    def difference(self, value: float, *, sign: bool = False) -> str:
        """Format a difference with its unit; percentages differ by points.

        Example:
            >>> QUANTITIES[0].difference(0.4), QUANTITIES[4].difference(3.0, sign=True)
            ('0.40 points', '+3.00°')
        """
        unit = {"%": " points", "°": "°"}.get(self.unit, "")
        return f"{self.shown(value, sign=sign)}{unit}"


QUANTITIES = (
    Quantity("accuracy", "accuracy", ("test", "accuracy"), "%", 100.0, 2, 1),
    Quantity("map", "mAP", ("test", "mean_average_precision"), "%", 100.0, 2, 1),
    Quantity("rank_1", "rank 1", ("test", "recall_at_1"), "%", 100.0, 2, 1),
    Quantity("eer", "EER", ("test", "eer"), "%", 100.0, 2, -1),
    Quantity(
        "class_margin", "class margin", ("prototypes", "class_margin"), "°", digits=2, better=1
    ),
    Quantity("sample_margin", "sample margin", ("test", "sample_margin"), better=1),
    Quantity("bias", "softmax bias", ("test", "bias")),
    Quantity("seconds", "time", ("seconds",), "s", digits=1, better=-1),
)
"""Columns of the table of groups; the first that any run has is the main one."""


@dataclass(frozen=True)
class Trouble:
    """A run that is missing from the means, wholly or in part, and why."""

    run: Run
    label: str
    seed: int | None
    state: State
    reason: str


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seed: finished ones by seed, and failed or unfinished ones.

    The label is unique, and the configuration that of the first run; ``values`` has the known
    values of each quantity by seed.
    """

    label: str
    config: Config
    runs: Mapping[int, Run]
    stopped: tuple[Run, ...]
    values: Mapping[str, Mapping[int, float]]

    @property
    def tested_on(self) -> tuple[Any, ...]:
        """Settings that say which images the runs were tested on."""
        # With test images of their own, runs may have different training images.
        first = self.config.test or self.config.data
        return (first, *(getattr(self.config, key) for key in _DRAWN_BY))

    @cached_property
    def _test_images(self) -> dict[int, tuple[str, Any]]:
        """Digest and shape of the test images, by seed: a limit draws them by it."""
        known = ((run.config.seed, data) for run, data in read_each(self.every, "data"))
        return {
            seed: (data["test_digest"], data.get("image"))
            for seed, data in known
            if data.get("test_digest")
        }

    def shares_test_images(self, other: "Group") -> bool:
        """Whether both were tested on the same images, perhaps under another path."""
        mine, others = self._test_images, other._test_images
        pairs = [(mine[seed], others[seed]) for seed in mine.keys() & others.keys()]
        # The digest of resized images depends on their size.
        same = [one[0] == two[0] for one, two in pairs if one[0] == two[0] or one[1] == two[1]]
        return all(same) if same else self.tested_on == other.tested_on

    @property
    def every(self) -> tuple[Run, ...]:
        """All runs, finished or not."""
        return (*self.runs.values(), *self.stopped)

    def summary(self, key: str) -> Summary | None:
        """Return mean and deviation of a quantity; None if no run has it."""
        return summary(self.values[key].values())


@dataclass(frozen=True, eq=False)
class Study:
    """Groups in the order of their first runs, the baseline first, and excluded runs."""

    groups: tuple[Group, ...]
    troubles: tuple[Trouble, ...]

    def difference(self, group: Group, key: str) -> Difference | None:
        """Compare a group with the baseline; None without a common seed or common test images."""
        baseline = self.groups[0]
        if not group.shares_test_images(baseline):
            return None
        return difference(group.values[key], baseline.values[key])

    @property
    def comparable(self) -> bool:
        """Whether all groups that have a finished run were tested on the same images."""
        tested = [group for group in self.groups if group.runs]
        return all(group.shares_test_images(tested[0]) for group in tested)

    @cached_property
    def quantities(self) -> tuple[Quantity, ...]:
        """Quantities that at least one run has."""
        return tuple(q for q in QUANTITIES if any(group.values[q.key] for group in self.groups))

    @property
    def main(self) -> Quantity:
        """Quantity that groups are judged by: accuracy, or mAP in tests on identities."""
        return self.quantities[0] if self.quantities else QUANTITIES[0]

    def remarks(self) -> list[str]:
        """Return caveats about the differences."""
        if len(self.groups) < 2:
            return []
        alike = [g for g in self.groups[1:] if g.shares_test_images(self.groups[0])]
        differences = [self.difference(group, self.main.key) for group in alike]
        counts = [0 if each is None else len(each.seeds) for each in differences]
        remarks = []
        if not self.comparable:
            remarks.append("Groups tested on different images are not compared.")
        if 1 in counts:
            which = "One seed" if max(counts) == 1 else "One common seed in some groups"
            remarks.append(f"{which}: no interval and no winner for n = 1.")
        if 0 in counts:
            remarks.append("Groups without a common seed are not compared.")
        several = sum(count > 1 for count in counts)
        if several >= 3:
            remarks.append(
                f"{several} groups are compared with the first: about one interval in twenty "
                "excludes zero by chance."
            )
        return remarks


def study(runs: Sequence[Run], baseline: str | None = None) -> Study:
    """Group runs in any state, and list those that are excluded, such as damaged ones.

    ``baseline`` is the label of the group that the others are compared with, by default the first.

    Raises:
        RecordError: no group has the label of the baseline.
    """
    troubles: list[Trouble] = []
    members: dict[str, list[Run]] = {}
    for run in runs:
        try:
            config = run.config
        except RecordError as error:
            troubles.append(Trouble(run, run.folder.name, None, "damaged", str(error)))
            continue
        key = repr((config.label, sorted(config.group().items())))
        members.setdefault(key, []).append(run)
    parts = list(members.values())
    labels = _labels([part[0].config for part in parts])
    groups = [_group(*pair, troubles) for pair in zip(labels, parts, strict=True)]
    if baseline is not None and groups:
        groups.insert(0, groups.pop(_index(baseline, groups)))
    return Study(tuple(groups), tuple(troubles))


def _group(label: str, runs: Sequence[Run], troubles: list[Trouble]) -> Group:
    finished: dict[int, Run] = {}
    stopped: list[Run] = []
    values: dict[str, dict[int, float]] = {quantity.key: {} for quantity in QUANTITIES}

    def trouble(run: Run, state: State, reason: str) -> None:
        troubles.append(Trouble(run, label, run.config.seed, state, reason))

    for run in sorted(runs, key=lambda run: run.config.seed):
        seed = run.config.seed
        try:
            if run.status != "done":
                stopped.append(run)
                trouble(run, run.status, why_stopped(run))
                continue
            measured = {quantity.key: quantity.read(run.final) for quantity in QUANTITIES}
            if measured["seconds"] is None:
                measured["seconds"] = _seconds(run)
            if measured["accuracy"] is None and not run.config.identities:
                raise RecordError(f"{run.folder / 'final.json'}: damaged (it has no test accuracy)")
        except RecordError as error:
            trouble(run, "damaged", str(error))
            continue
        if seed in finished:
            trouble(run, "left out", f"duplicate of seed {seed} in {finished[seed].folder}")
            continue
        finished[seed] = run
        for key, value in measured.items():
            if value is not None:
                values[key][seed] = value
    return Group(label, runs[0].config, finished, tuple(stopped), values)


def _seconds(run: Run) -> float | None:
    """Return the total time of all epochs; None if one of them is unknown."""
    try:
        return math.fsum(row["seconds"] for row in run.timing) if run.timing else None
    except (RecordError, LookupError, TypeError):
        return None


def why_stopped(run: Run) -> str:
    """Describe in a sentence why a run has no result."""
    if run.status == "failed":
        failure = run.failure
        kind, message = failure.get("kind"), failure.get("message")
        return ": ".join(str(part) for part in (kind, message) if part) or "no reason is recorded"
    done = len(run.metrics)
    if not done:
        return "no epoch is finished yet"
    return f"stopped after epoch {done} of {run.config.epochs}, and can be resumed"


def _labels(configs: Sequence[Config]) -> list[str]:
    """Return unique labels of groups, with the settings in which equal labels or tests differ."""
    labels = [config.label for config in configs]
    unique = list(labels)
    tested_on = ("data", "test", *_DRAWN_BY)
    tests = {key for key in tested_on if len({repr(getattr(each, key)) for each in configs}) > 1}
    for label in set(labels):
        indices = [index for index, each in enumerate(labels) if each == label]
        settings = [configs[index].group() for index in indices]
        keys = [
            key
            for key in settings[0]
            if key in tests or len({repr(each[key]) for each in settings}) > 1
        ]
        for index, values in zip(indices, settings, strict=True):
            shown = ", ".join(f"{key}={values[key]}" for key in keys)
            unique[index] = f"{label} [{shown}]" if shown else label
    return unique


def _index(baseline: str, groups: Sequence[Group]) -> int:
    labels = [group.label for group in groups]
    # Without the settings in brackets, if that is enough to tell.
    for names in (labels, [group.config.label for group in groups]):
        written = [normal(name) for name in names]
        if written.count(normal(baseline)) == 1:
            return written.index(normal(baseline))
    hint = did_you_mean(baseline, labels, otherwise="there are")
    raise RecordError(f"no group of runs is called {baseline!r}{hint}")


def table(runs: Sequence[Run], baseline: str | None = None, *, width: int = 100) -> str:
    """Format groups of runs as a table for a terminal, in lines of ``width`` characters.

    The baseline is that of :func:`study`.
    """
    result = study(runs, baseline)
    lines: list[str] = []
    shown = result.quantities
    if shown:
        rows = [["", "n", *(quantity.heading for quantity in shown)]]
        for group in result.groups:
            means = (format_mean(q, group.summary(q.key)) for q in shown)
            rows.append([group.label, str(len(group.runs)), *means])
        lines += [*_aligned(rows, width), "", "  mean ± standard deviation over n seeds"]
    compared = [quantity for quantity in shown if quantity.better > 0]
    if compared and len(result.groups) > 1:
        rows = [["", "n", *(quantity.heading for quantity in compared)]]
        for group in result.groups[1:]:
            parts = [result.difference(group, quantity.key) for quantity in compared]
            count = max((len(part.seeds) for part in parts if part is not None), default=0)
            rows.append([group.label, str(count), *map(format_difference, compared, parts)])
        lines += ["", *_wrapped(f"difference from {result.groups[0].label}", width)]
        lines += [*_aligned(rows, width), ""]
        lines.append(
            f"  mean difference over n common seeds [{CONFIDENCE:.0%} interval], * excludes 0"
        )
        lines += [line for text in result.remarks() for line in _wrapped(text, width)]
    if result.troubles:
        lines += ["", "excluded from the means, wholly or in part"]
        for each in result.troubles:
            seed = "" if each.seed is None else f", seed {each.seed}"
            lines += _wrapped(f"{each.label}{seed}: {each.state}: {each.reason}", width)
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def format_mean(quantity: Quantity, values: Summary | None) -> str:
    """Format a mean and its standard deviation; empty without values."""
    if values is None:
        return ""
    deviation = "" if values.std is None else f" ± {quantity.shown(values.std)}"
    return f"{quantity.shown(values.mean)}{deviation}"


def format_difference(quantity: Quantity, paired: Difference | None) -> str:
    """Format a difference and its interval; empty without common seeds."""
    if paired is None:
        return ""
    mean = quantity.shown(paired.mean, sign=True)
    if paired.interval is None:
        return mean
    return f"{mean} [{quantity.shown_ends(paired.interval, ', ')}]{'*' if paired.clear else ' '}"


def _aligned(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Align columns, the first to the left; a long label gets its own line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    label_width = max(0, min(widths[0], width - sum(widths[1:]) - 2 * len(widths)))
    lines = []
    for label, *cells in rows:
        if len(label) > label_width:
            lines += _wrapped(label, width)
            label = ""
        numbers = "".join(f"  {cell:>{size}}" for cell, size in zip(cells, widths[1:], strict=True))
        lines.append(f"  {label:<{label_width}}{numbers}")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


def as_json(runs: Sequence[Run], baseline: str | None = None) -> dict[str, Any]:
    """Return everything that :func:`table` shows as plain values."""
    result = study(runs, baseline)

    def numbers(group: Group) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for quantity in result.quantities:
            mean, paired = group.summary(quantity.key), result.difference(group, quantity.key)
            if mean is None:
                continue
            own = group.values[quantity.key]
            values[quantity.key] = {
                "unit": quantity.unit,
                "n": mean.count,
                "mean": mean.mean,
                "std": mean.std,
                "seeds": {str(seed): value for seed, value in own.items()},
            }
            if group is not result.groups[0] and paired is not None:
                values[quantity.key]["difference"] = {
                    "seeds": list(paired.seeds),
                    "mean": paired.mean,
                    "interval": None if paired.interval is None else [*paired.interval],
                    "clear": paired.clear,
                }
        return values

    return {
        "baseline": result.groups[0].label if result.groups else None,
        "groups": [
            {"label": g.label, "seeds": list(g.runs), "quantities": numbers(g)}
            for g in result.groups
        ],
        "troubles": [
            {
                "folder": str(each.run.folder),
                "label": each.label,
                "seed": each.seed,
                "state": each.state,
                "reason": each.reason,
            }
            for each in result.troubles
        ],
        "remarks": result.remarks(),
    }
