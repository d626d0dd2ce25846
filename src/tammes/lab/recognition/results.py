"""Result of an evaluation: numbers with intervals, tables, curves, ranked examples."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from tammes.metrics.functional import BootstrapInterval, intervals
from tammes.metrics.functional.operating_points import OperatingPoints, smallest_threshold

P = ParamSpec("P")
LEVEL = 0.95
"""Share of the resamples that an interval contains."""
FAILING = 10
"""Number of identities listed as failing most."""


class Number(NamedTuple):
    """A number with its interval over identities; rates are fractions, shown in percent."""

    key: str
    name: str
    value: float
    low: float | None
    high: float | None
    percent: bool = True

    def shown(self) -> str:
        """Format the value."""
        return f"{percent(self.value)} %" if self.percent else f"{self.value:.4g}"

    def shown_interval(self) -> str:
        """Format the interval; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        ends = (self.low, self.high)
        low, high = (percent(end) if self.percent else f"{end:.4g}" for end in ends)
        return f"{low} to {high}"


def percent(share: float) -> str:
    """Format a rate in percent without the sign, a small one with two significant digits.

    Example:
        >>> percent(0.12345), percent(0.0000123)
        ('12.35', '0.0012')
    """
    if not math.isfinite(share):
        return "undefined"
    value = 100 * share
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


class Listing(NamedTuple):
    """Table of plain values, for a terminal, a page and JSON."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    caption: str = ""

    def texts(self, row: tuple[Any, ...]) -> list[str]:
        """Format the values of a row; columns that end with a percent sign hold percentages."""
        return [
            f"{value:,}"
            if isinstance(value, int)
            else str(value)
            if not isinstance(value, float)
            else percent(value / 100)
            if column.endswith("%")
            else f"{value:.4g}"
            for column, value in zip(self.columns, row, strict=True)
        ]

    def lines(self) -> list[str]:
        """Format rows under their columns for a terminal; numbers are aligned to the right."""
        columns = [*zip(self.columns, *map(self.texts, self.rows), strict=True)]
        numeric = [
            all(isinstance(value, int | float) for value in column)
            for column in zip(*self.rows, strict=True)
        ]
        padded = [
            [f"{cell:{'>' if right else '<'}{max(map(len, column))}}" for cell in column]
            for column, right in zip(columns, numeric or [False] * len(columns), strict=True)
        ]
        return [f"  {'   '.join(cells)}".rstrip() for cells in zip(*padded, strict=True)]


class OperatingPoint(NamedTuple):
    """Thresholds to deploy for a target rate of false acceptances.

    They are the smallest that keep the target, for each gallery or for all pairs; there the rate of
    false acceptances is ``reached``, and that of true acceptances ``accepted``.
    """

    target: float
    thresholds: tuple[float, ...]
    reached: Number
    accepted: Number


class MeasuredCurve(NamedTuple):
    """Curve with a confidence band, all of shape ``(P,)``; the band is None without identities."""

    x: Tensor
    y: Tensor
    low: Tensor | None
    high: Tensor | None


class RankedItem(NamedTuple):
    """Gallery item of a ranking: its row, similarity, and whether it is a match."""

    row: int
    similarity: float
    match: bool


class Ranking(NamedTuple):
    """A query and the first items of its ranking, with a remark."""

    query: int
    items: tuple[RankedItem, ...]
    remark: str


@dataclass(frozen=True, eq=False)
class Recognition:
    """Result of an evaluation.

    Attributes:
        protocol: ``retrieval``, ``verification`` or ``openset``.
        title: run or files.
        summary: what was evaluated, in sentences.
        counts: number of examples, identities, queries, pairs...
        notes: sentences about what was left out or may surprise.
        failing: identities that fail most.
        rates: names of the rates of false and of true acceptances.
        scores: scores by the name of their group.
        rankings: ranked examples by heading.
        tables: further tables by heading.
    """

    protocol: str
    title: str
    summary: tuple[str, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]
    numbers: tuple[Number, ...]
    failing: Listing
    rates: tuple[str, str] = ("FAR", "TAR")
    thresholds: tuple[OperatingPoint, ...] = ()
    curves: dict[str, MeasuredCurve] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)
    rankings: dict[str, list[Ranking]] = field(default_factory=dict)
    tables: dict[str, Listing] = field(default_factory=dict)

    def threshold_listing(self) -> Listing:
        """Return the thresholds as a table."""
        false, true = self.rates
        several = any(len(point.thresholds) > 1 for point in self.thresholds)
        columns = ("for", "threshold", f"{false} %", "interval", f"{true} %", f"interval of {true}")
        rows = [
            (
                f"{false} {100 * point.target:g} %",
                ", ".join(f"{value:.4g}" for value in point.thresholds)
                if several
                else point.thresholds[0],
                100 * point.reached.value,
                point.reached.shown_interval(),
                100 * point.accepted.value,
                point.accepted.shown_interval(),
            )
            for point in self.thresholds
        ]
        caption = f"Accept at or above the threshold{' of the gallery' if several else ''}. The "
        caption += f"interval of {false} is at this threshold; that of {true} is at a threshold "
        caption += f"chosen anew for the {false}."
        return Listing(columns, rows, caption)


def failing_identities(
    columns: tuple[str, ...],
    names: Sequence[Any],
    asked: tuple[Tensor, Tensor],
    wrong: tuple[Tensor, Tensor],
    caption: str,
) -> Listing:
    """List the identities with the largest share of wrong decisions, over both kinds.

    The columns are the identity, then for each kind the number of decisions and the percentage
    wrong.
    """
    shares = [w / count.clamp_min(1) for w, count in zip(wrong, asked, strict=True)]
    badness = (shares[0] + shares[1]).tolist()
    order = sorted(filter(badness.__getitem__, range(len(names))), key=lambda i: -badness[i])
    rows: list[tuple[Any, ...]] = []
    for i in order[:FAILING]:
        kinds = ((int(a[i]), 100 * float(s[i])) for a, s in zip(asked, shares, strict=True))
        rows.append((str(names[i]), *itertools.chain.from_iterable(kinds)))
    return Listing(columns, rows, caption)


def operating_points(
    targets: Sequence[float],
    rates: tuple[str, str],
    thresholds: Tensor,
    found: Mapping[str, BootstrapInterval | float],
) -> tuple[OperatingPoint, ...]:
    """Return the thresholds to deploy, shape ``(galleries, rates)``, with both rates at each.

    The rates FAR and TAR, for example, are ``far.0``, ``tar.0`` and so on in ``found``.
    """
    keys = [rate.lower() for rate in rates]
    return tuple(
        OperatingPoint(
            target,
            tuple(thresholds[:, place].tolist()),
            *(
                as_number(f"{key}_at_{target:g}", name, found[f"{key}.{place}"])
                for key, name in zip(keys, rates, strict=True)
            ),
        )
        for place, target in enumerate(targets)
    )


def without_warnings(evaluate: Callable[P, Recognition]) -> Callable[P, Recognition]:
    """Silence the warnings of the metrics, which an evaluation reports as notes or errors."""

    @functools.wraps(evaluate)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> Recognition:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return evaluate(*args, **kwargs)

    return quiet


Measure = Callable[[Any], Mapping[str, Any]]


def measured(
    result: Any, measure: Measure, notes: list[str], *, resamples: int, seed: int
) -> dict[str, BootstrapInterval | float]:
    """Measure numbers of a result, with intervals over identities if it knows them.

    Resamples in which a number is undefined are counted in a note.
    """
    if result.identities is None:
        return {name: float(value) for name, value in measure(result).items()}
    generator = torch.Generator().manual_seed(seed)
    found = intervals(result, measure, resamples=resamples, level=LEVEL, generator=generator)
    undefined = max(interval.undefined for interval in found.values())
    note = (
        f"{undefined:,} of {resamples:,} resamples leave a number undefined, and are left out of "
        "its interval: there are few identities"
    )
    if undefined and note not in notes:
        notes.append(note)
    return dict(found)


def as_number(
    key: str, name: str, value: BootstrapInterval | float, *, percent: bool = True
) -> Number:
    """Return a number with its name."""
    if isinstance(value, float):
        return Number(key, name, value, None, None, percent)
    return Number(key, name, value.value, value.low, value.high, percent)


def as_curve(x: Tensor, values: Sequence[BootstrapInterval | float]) -> MeasuredCurve:
    """Return a curve through measured numbers."""
    rows = [(v, v, v) if isinstance(v, float) else v[:3] for v in values]
    y, low, high = torch.tensor(rows, dtype=torch.double).T
    banded = bool(values) and not isinstance(values[0], float)
    return MeasuredCurve(x, y, low if banded else None, high if banded else None)


def grid(negatives: int) -> Tensor:
    """Return the rates of a curve, from the smallest measurable with so many negatives up to 1.

    They are spaced logarithmically, and between 0.1 and 1 also linearly.
    """
    smallest = -math.log10(max(negatives, 2))
    small = torch.logspace(smallest, 0, 60, dtype=torch.double)
    return torch.cat([small, torch.linspace(0.1, 1, 37, dtype=torch.double)]).unique()


def positives_at(points: OperatingPoints, rates: Tensor) -> Tensor:
    """Return the share of positives accepted at each rate of accepted negatives."""
    return points.positives[smallest_threshold(points, rates)] / points.all_positives


def measurable(rates: Sequence[float], negatives: int) -> list[float]:
    """Return the rates that can be measured with a number of negatives."""
    return [rate for rate in rates if negatives * rate >= 1 - 1e-9]


def counted(count: int, one: str, several: str | None = None) -> str:
    """Format a number with its noun."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"
