"""Groups of runs that differ only in their seed, and what can be said of their differences.

A group has a mean and a standard deviation over its seeds. Two groups are compared seed by seed:
the differences over the seeds they have in common have a mean and a 95 % interval (Student t).
From a single seed nothing is claimed.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from tammes.lab.config.expressions import did_you_mean, normal
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import RecordError, Run, number
from tammes.lab.stats.paired import CONFIDENCE, Difference, Summary, difference, summary

State: TypeAlias = Literal["failed", "unfinished", "damaged", "left out"]


@dataclass(frozen=True)
class Quantity:
    """A number of a finished run.

    Attributes:
        key: its name in JSON.
        name: its name in words.
        path: where ``final.json`` has it.
        unit: ``"%"``, ``"°"``, ``"s"`` or nothing.
        factor: from the record to the unit.
        offset: added to that.
        digits: shown behind the point.
        better: 1 where more is better, -1 where less is, 0 where neither is.
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
        """The number in a ``final.json``; None where it is not there or not finite."""
        value = number(final, self.path)
        return None if value is None else self.offset + self.factor * value

    def shown(self, value: float, *, sign: bool = False) -> str:
        """A value in words, without its unit.

        Example:
            >>> QUANTITIES[0].shown(97.123), QUANTITIES[0].shown(0.4, sign=True)
            ('97.12', '+0.40')
        """
        digits = 0 if self.unit == "s" and abs(value) >= 100 else self.digits
        # What rounds to zero has no sign.
        rounded = round(value, digits) + 0.0
        return f"{rounded:{'+' if sign and rounded else ''}.{digits}f}"


QUANTITIES = (
    Quantity("accuracy", "accuracy", ("test", "accuracy"), "%", 100.0, 2, 1),
    Quantity(
        "class_margin", "class margin", ("prototypes", "class_margin"), "°", digits=2, better=1
    ),
    Quantity("sample_margin", "sample margin", ("test", "sample_margin"), better=1),
    Quantity("bias", "softmax bias", ("test", "bias")),
    Quantity("seconds", "time", ("seconds",), "s", digits=1, better=-1),
)
"""What a table shows of every group."""


@dataclass(frozen=True)
class Trouble:
    """A run that is not in the numbers, or only in part, and why."""

    run: Run
    label: str
    seed: int | None
    state: State
    reason: str


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seed.

    Attributes:
        label: how the group is called; no two are called the same.
        config: of its first run.
        runs: the finished ones by seed.
        stopped: those that failed or are not finished.
        values: of each quantity by seed, as far as they are known.
    """

    label: str
    config: Config
    runs: Mapping[int, Run]
    stopped: tuple[Run, ...]
    values: Mapping[str, Mapping[int, float]]

    def summary(self, key: str) -> Summary | None:
        """Mean and deviation of a quantity, None where no run has it."""
        return summary(self.values[key].values())


@dataclass(frozen=True, eq=False)
class Study:
    """Groups in the order of their first runs, the baseline first, and what went wrong."""

    groups: tuple[Group, ...]
    troubles: tuple[Trouble, ...]

    @property
    def baseline(self) -> Group | None:
        """What the others are compared with."""
        return self.groups[0] if self.groups else None

    def difference(self, group: Group, key: str) -> Difference | None:
        """A group minus the baseline; None where they have no seed in common."""
        return difference(group.values[key], self.groups[0].values[key])

    @cached_property
    def quantities(self) -> tuple[Quantity, ...]:
        """Those that some run has."""
        return tuple(q for q in QUANTITIES if any(group.values[q.key] for group in self.groups))

    def remarks(self) -> list[str]:
        """What a reader must know before believing a difference."""
        if len(self.groups) < 2:
            return []
        found = [self.difference(group, "accuracy") for group in self.groups[1:]]
        counts = [0 if each is None else len(each.seeds) for each in found]
        remarks = []
        if 1 in counts:
            which = "With one seed" if max(counts) == 1 else "Where there is one common seed"
            remarks.append(
                f"{which} nothing is known of the spread: no winner is claimed from n = 1."
            )
        if 0 in counts:
            remarks.append("Groups without a common seed are not compared.")
        several = sum(count > 1 for count in counts)
        if several >= 3:
            remarks.append(
                f"{several} groups are compared with the first: about one interval in twenty "
                "excludes zero by chance."
            )
        return remarks


def summarise(runs: Sequence[Run]) -> list[Group]:
    """Groups of runs that differ only in their seed, in the order of their first runs."""
    return list(study(runs).groups)


def study(runs: Sequence[Run], baseline: str | None = None) -> Study:
    """Group runs and find what is wrong with them.

    Args:
        runs: in any state; a damaged one is named among the troubles.
        baseline: label of the group that the others are compared with; the first by default.

    Raises:
        RecordError: where no group is called like the baseline.
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
        place = _place(baseline, labels)
        groups.insert(0, groups.pop(place))
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
            found = {quantity.key: quantity.read(run.final) for quantity in QUANTITIES}
            if found["seconds"] is None:
                found["seconds"] = _seconds(run)
            if found["accuracy"] is None:
                raise RecordError(f"{run.folder / 'final.json'}: damaged (no test accuracy in it)")
        except RecordError as error:
            trouble(run, "damaged", str(error))
            continue
        if seed in finished:
            trouble(run, "left out", f"seed {seed} is there already, in {finished[seed].folder}")
            continue
        finished[seed] = run
        for key, value in found.items():
            if value is not None:
                values[key][seed] = value
    return Group(label, runs[0].config, finished, tuple(stopped), values)


def _seconds(run: Run) -> float | None:
    """How long all epochs took; None where one of them is not known."""
    try:
        return math.fsum(row["seconds"] for row in run.timing) if run.timing else None
    except (RecordError, LookupError, TypeError):
        return None


def why_stopped(run: Run) -> str:
    """Why a run has no result, in a sentence."""
    if run.status == "failed":
        failure = run.failure
        kind, message = failure.get("kind"), failure.get("message")
        return ": ".join(str(part) for part in (kind, message) if part) or "no reason is recorded"
    done = len(run.metrics)
    if not done:
        return "no epoch is finished yet"
    return f"stopped after epoch {done} of {run.config.epochs}, and can be resumed"


def _labels(configs: Sequence[Config]) -> list[str]:
    """Labels of groups; where two are the same, what differs is added."""
    labels = [config.label for config in configs]
    unique = list(labels)
    for label in {label for label in labels if labels.count(label) > 1}:
        places = [place for place, each in enumerate(labels) if each == label]
        parts = [configs[place].group() for place in places]
        keys = [key for key in parts[0] if len({repr(part[key]) for part in parts}) > 1]
        for place, part in zip(places, parts, strict=True):
            shown = ", ".join(f"{key}={part[key]}" for key in keys)
            unique[place] = f"{label} [{shown}]"
    return unique


def _place(baseline: str, labels: Sequence[str]) -> int:
    if baseline in labels:
        return labels.index(baseline)
    written = [normal(label) for label in labels]
    if normal(baseline) in written:
        return written.index(normal(baseline))
    hint = did_you_mean(baseline, labels, otherwise="there are")
    raise RecordError(f"no group of runs is called {baseline!r}{hint}")


def table(runs: Sequence[Run], baseline: str | None = None, *, width: int = 100) -> str:
    """Groups of runs as a table for a terminal.

    Args:
        runs: in any state.
        baseline: label of the group that the others are compared with; the first by default.
        width: letters in a line; long labels are broken.
    """
    found = study(runs, baseline)
    lines: list[str] = []
    if found.quantities:
        heads = ["", "n", *(quantity.heading for quantity in found.quantities)]
        rows = [
            [group.label, str(len(group.runs)), *_means(found, group)] for group in found.groups
        ]
        lines += [*_aligned([heads, *rows], width), "", "  mean ± standard deviation over n seeds"]
    compared = [quantity for quantity in found.quantities if quantity.better > 0]
    if compared and len(found.groups) > 1:
        heads = [f"difference from {found.groups[0].label}", "n", *(q.heading for q in compared)]
        rows = [[group.label, *_differences(found, group, compared)] for group in found.groups[1:]]
        lines += ["", *_aligned([heads, *rows], width), ""]
        lines.append(
            f"  mean difference over n common seeds [{CONFIDENCE:.0%} interval], * excludes 0"
        )
        lines += [line for text in found.remarks() for line in _wrapped(text, width)]
    if found.troubles:
        lines += ["", "not in the numbers, or only in part"]
        for each in found.troubles:
            seed = "" if each.seed is None else f", seed {each.seed}"
            lines += _wrapped(f"{each.label}{seed}: {each.state}: {each.reason}", width)
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def _means(found: Study, group: Group) -> list[str]:
    return [spread(q, group.summary(q.key)) for q in found.quantities]


def _differences(found: Study, group: Group, compared: Sequence[Quantity]) -> list[str]:
    parts = [found.difference(group, quantity.key) for quantity in compared]
    count = max((len(part.seeds) for part in parts if part is not None), default=0)
    return [str(count), *map(interval, compared, parts)]


def spread(quantity: Quantity, found: Summary | None) -> str:
    """A mean and its deviation in words."""
    if found is None:
        return ""
    deviation = "" if found.std is None else f" ± {quantity.shown(found.std)}"
    return f"{quantity.shown(found.mean)}{deviation}"


def interval(quantity: Quantity, found: Difference | None) -> str:
    """A difference and its interval in words."""
    if found is None:
        return ""
    mean = quantity.shown(found.mean, sign=True)
    if found.low is None or found.high is None:
        return mean
    ends = f"{quantity.shown(found.low, sign=True)}, {quantity.shown(found.high, sign=True)}"
    return f"{mean} [{ends}]{'*' if found.clear else ' '}"


def _aligned(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Columns under their heads, the first to the left; a long label has a line of its own."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(0, min(widths[0], width - sum(widths[1:]) - 2 * len(widths)))
    lines = []
    for label, *cells in rows:
        if len(label) > room:
            lines += _wrapped(label, width)
            label = ""
        numbers = "".join(f"  {cell:>{size}}" for cell, size in zip(cells, widths[1:], strict=True))
        lines.append(f"  {label:<{room}}{numbers}")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


def as_json(runs: Sequence[Run], baseline: str | None = None) -> dict[str, Any]:
    """Everything that :func:`table` shows, as plain values."""
    found = study(runs, baseline)

    def numbers(group: Group) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for quantity in found.quantities:
            mean, less = group.summary(quantity.key), found.difference(group, quantity.key)
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
            if group is not found.baseline and less is not None:
                values[quantity.key]["difference"] = {
                    "seeds": list(less.seeds),
                    "mean": less.mean,
                    "interval": None if less.low is None else [less.low, less.high],
                    "clear": less.clear,
                }
        return values

    return {
        "baseline": None if found.baseline is None else found.baseline.label,
        "groups": [
            {"label": g.label, "seeds": list(g.runs), "quantities": numbers(g)}
            for g in found.groups
        ],
        "troubles": [
            {
                "folder": str(each.run.folder),
                "label": each.label,
                "seed": each.seed,
                "state": each.state,
                "reason": each.reason,
            }
            for each in found.troubles
        ],
        "remarks": found.remarks(),
    }
