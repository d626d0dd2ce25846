"""Verdicts in a few sentences: who is ahead, how certain that is, and what to do next.

Pure functions of numbers and curves. ``docs/verdict.md`` has the rule behind each sentence.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tammes.lab.stats.paired import Difference, difference, summary, t_quantile
from tammes.lab.stats.seed_groups import Quantity
from tammes.lab.stats.trends import Curve, collapse, crossing, rise

_POWER = 0.8
"""Probability with which the advised number of seeds decides a difference of the measured size."""
_MANY_SEEDS = 30
"""Groups that this many more seeds would not tell apart may be level."""
_LEVEL = 2.0
"""Largest difference of level groups, in points, at either end of its interval."""
_CLOSE = 2 / 3
"""Share of the leader's class margin below which a group's own explains why it is behind."""
_LISTED = 3
"""Largest number of groups named in a sentence."""


@dataclass(frozen=True)
class Contender:
    """Numbers of one group of runs, as far as they are known.

    Attributes:
        values: main quantity by seed, of finished runs.
        curve: main quantity by epoch, mean over the seeds.
        margins: margins by seed, by the name of the margin.
        diverged: number of runs whose loss was not finite.
        stopped: number of runs that failed in another way or are unfinished.
        chance: value of the main quantity when guessing.
        warnings: changes that the doctor recommends, by name of the finding.
    """

    label: str
    values: Mapping[int, float] = field(default_factory=dict)
    curve: Curve = field(default_factory=dict)
    margins: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    diverged: int = 0
    stopped: int = 0
    chance: float | None = None
    warnings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Standing:
    """Order of the contenders; differences are positive in favour of the leader.

    Attributes:
        leader: the contender with the best mean.
        level: the others that are not clearly behind, the best first.
        behind: those that are clearly behind, the best first.
        differences: leader minus each of the others, by label; None without a common seed.
    """

    leader: Contender
    level: tuple[Contender, ...]
    behind: tuple[Contender, ...]
    differences: Mapping[str, Difference | None]

    @property
    def winner(self) -> Contender | None:
        """The leader, if all others are clearly behind it."""
        return None if self.level or not self.behind else self.leader


def standing(contenders: Sequence[Contender], quantity: Quantity) -> Standing | None:
    """Order contenders by a quantity; None if none can be compared.

    A contender is behind if the 95 % interval of its paired difference from the leader excludes
    zero. One without values, or with a diverged seed, is not compared.
    """
    able = [each for each in contenders if each.values and not each.diverged]
    if not able:
        return None
    way = quantity.way
    order = sorted(able, key=lambda each: -way * statistics.fmean(each.values.values()))
    leader, *others = order
    oriented = {
        each.label: {seed: way * value for seed, value in each.values.items()} for each in order
    }
    differences = {
        each.label: difference(oriented[leader.label], oriented[each.label]) for each in others
    }

    def is_behind(each: Contender) -> bool:
        paired = differences[each.label]
        return paired is not None and paired.clear and paired.mean > 0

    return Standing(
        leader,
        tuple(each for each in others if not is_behind(each)),
        tuple(each for each in others if is_behind(each)),
        differences,
    )


def seeds_to_decide(paired: Difference, needed: float = 0.0) -> int | None:
    """Return how many more seeds would decide a difference of the measured size and spread.

    Args:
        paired: difference over at least two seeds.
        needed: value that the interval is to exclude.

    Returns:
        Number of further seeds after which the interval excludes ``needed`` with a probability of
        about 80 %; None if more than 30 are needed or the spread is not known.

    Example:
        >>> seeds_to_decide(difference({0: 1.0, 1: 0.2}, {0: 0.0, 1: 0.0}))
        8
    """
    count = len(paired.seeds)
    if paired.interval is None or not paired.has_spread:
        return None
    low, high = paired.interval
    std = (high - low) / 2 / t_quantile(count - 1) * math.sqrt(count)
    for total in range(count + 1, count + _MANY_SEEDS + 1):
        both = t_quantile(total - 1) + t_quantile(total - 1, 2 * _POWER - 1)
        if abs(paired.mean - needed) >= both * std / math.sqrt(total):
            return total - count
    return None


def verdict(
    contenders: Sequence[Contender], quantity: Quantity, margins: Mapping[str, str] | None = None
) -> list[str]:
    """Return the verdict on groups of runs, as sentences.

    ``margins`` maps keys of :attr:`Contender.margins` to names; they are compared with those of the
    first contender. Curves are used only if the quantity is a percentage.
    """
    found = standing(contenders, quantity)
    first = _standing(found, quantity) if found else _nothing(contenders)
    return [first, *remarks(contenders, quantity, margins, found)]


def remarks(
    contenders: Sequence[Contender],
    quantity: Quantity,
    margins: Mapping[str, str] | None = None,
    found: Standing | None = None,
) -> list[str]:
    """Return the sentences of :func:`verdict` after the first one, which is about ``found``."""
    return [
        *_stopped(contenders),
        *_failed_to_learn(contenders, quantity),
        *_only_margins(contenders, quantity, margins or {}),
        *(_training_length(contenders, found, quantity) if quantity.unit == "%" else ()),
        *doctor_found({each.label: each.warnings for each in contenders}),
    ]


def doctor_found(warnings: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a sentence about the warnings of the doctor, by group and name of the finding."""
    names = dict.fromkeys(name for own in warnings.values() for name in own)
    parts = []
    for name in list(names)[:2]:
        labels = [label for label, own in warnings.items() if name in own]
        change = next(own[name] for own in warnings.values() if name in own)
        parts.append(f"{name} in {listed(labels)}: {change}")
    more = f"; and {len(names) - 2} more" if len(names) > 2 else ""
    return [f"The doctor warns of {'; and of '.join(parts)}{more}."] if parts else []


def listed(labels: Sequence[str], most: int = _LISTED) -> str:
    """Join labels in words, naming the first few.

    Example:
        >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e"])
        ('a and b', 'a, b, c and 2 more')
    """
    shown = [*labels[:most]]
    if len(labels) > most:
        shown.append(f"{len(labels) - most} more")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def interval(paired: Difference, quantity: Quantity) -> str:
    """Format the interval of a difference with its number of seeds."""
    if paired.interval is None:
        return "one seed"
    return f"95 % interval {quantity.shown_ends(paired.interval)}, {len(paired.seeds)} seeds"


def _standing(found: Standing, quantity: Quantity) -> str:
    leader, name = found.leader, quantity.name
    mean = summary(leader.values.values())
    assert mean is not None
    value = f"{quantity.shown(mean.mean)}{quantity.suffix}"
    if not found.level and not found.behind:
        spread = (
            "" if mean.std is None else f" ± {quantity.shown(mean.std)} over {mean.count} seeds"
        )
        return f"{leader.label}: {name} {value}{spread}; there is nothing to compare it with."
    side = "below" if quantity.better < 0 else "above"
    if found.winner is not None:
        closest = found.behind[0]
        paired = found.differences[closest.label]
        assert paired is not None
        why = _why(closest, leader)
        by = f"{quantity.difference(paired.mean)} {side} {closest.label}{why}"
        return f"{leader.label} is ahead: {name} {value}, {by} ({interval(paired, quantity)})."
    text = _undecided(found, quantity, value, side)
    if found.behind:
        parts = [
            f"{each.label} ({quantity.difference(paired.mean)}{_why(each, leader)})"
            for each in found.behind
            if (paired := found.differences[each.label]) is not None
        ]
        text += f" Clearly behind: {listed(parts)}."
    return text


def _why(each: Contender, leader: Contender) -> str:
    """Explain why a group is behind if its prototypes are much closer than the leader's."""
    own, best = (
        summary(group.margins.get("class_margin", {}).values()) for group in (each, leader)
    )
    if own is None or best is None or own.mean > _CLOSE * best.mean:
        return ""
    return f"; its closest classes are {own.mean:.0f}° apart, the leader's {best.mean:.0f}°"


def _undecided(found: Standing, quantity: Quantity, value: str, side: str) -> str:
    leader, closest, name = found.leader, found.level[0], quantity.name
    paired = found.differences[closest.label]
    if paired is None:
        return (
            f"{leader.label} has the best {name}, {value}, but no seed in common with "
            f"{closest.label}: they cannot be compared."
        )
    by = quantity.difference(paired.mean)
    if paired.interval is None:
        return (
            f"{leader.label} has the best {name}, {value}, {by} {side} {closest.label}, but one "
            "seed cannot decide it: train at least 2 more."
        )
    if not paired.has_spread and paired.mean > 0:
        return (
            f"{leader.label} is {by} {side} {closest.label} in {name} with each of "
            f"{len(paired.seeds)} seeds: equal differences have no spread to judge by."
        )
    certainty = f"{by} ({interval(paired, quantity)})"
    more = seeds_to_decide(paired) if paired.mean > 0 else None
    level = listed([leader.label, *(each.label for each in found.level)])
    if more is None and quantity.unit == "%" and max(map(abs, paired.interval)) > _LEVEL:
        return (
            f"No winner in {name} among {level}: the first two differ by {certainty}; seeds differ "
            f"so much that {_MANY_SEEDS} more would hardly decide it."
        )
    if more is None:
        return (
            f"{level} are level in {name}: the first two differ by {certainty}, which "
            f"{_MANY_SEEDS} more seeds would hardly decide."
        )
    seeds = "1 more seed" if more == 1 else f"{more} more seeds"
    return (
        f"No winner in {name} among {level}: the first leads the second by {certainty}; about "
        f"{seeds} would decide a difference of this size."
    )


def _nothing(contenders: Sequence[Contender]) -> str:
    if any(each.diverged for each in contenders):
        return "Nothing can be compared: no group finished with all its seeds."
    return "Nothing can be said yet: no run is finished."


def _stopped(contenders: Sequence[Contender]) -> list[str]:
    sentences = []
    parts = [
        f"{each.label} ({each.diverged} of {each.diverged + each.stopped + len(each.values)} seeds)"
        for each in contenders
        if each.diverged
    ]
    if parts:
        left_out = "is" if len(parts) == 1 else "are"
        sentences.append(f"Diverged: {listed(parts)}, which {left_out} not compared.")
    count = sum(each.stopped for each in contenders)
    if count:
        runs = "1 run is" if count == 1 else f"{count} runs are"
        sentences.append(f"{runs} unfinished or failed, and not counted.")
    return sentences


def _failed_to_learn(contenders: Sequence[Contender], quantity: Quantity) -> list[str]:
    if quantity.unit != "%":
        return []
    collapsed, guessing = [], []
    for each in contenders:
        best = collapse(_upwards(each.curve, quantity))
        mean = summary(each.values.values())
        if best is not None:
            ends = (each.curve[epoch] for epoch in (best, max(each.curve)))
            change = " to ".join(map(quantity.shown, ends))
            collapsed.append(f"{each.label} ({change} % after epoch {best})")
        elif mean is not None and each.chance is not None:
            # Four times chance or, if less, a tenth of the way from chance to perfect.
            least = min(4 * each.chance, each.chance + 0.1 * (100 - each.chance))
            if mean.mean <= least:
                shown = (quantity.shown(value) for value in (mean.mean, each.chance))
                guessing.append(f"{each.label} ({' %, chance is '.join(shown)} %)")
    return [
        f"{kind}: {listed(parts)}."
        for kind, parts in (("Collapsed", collapsed), ("Did not learn", guessing))
        if parts
    ]


def _only_margins(
    contenders: Sequence[Contender], quantity: Quantity, margins: Mapping[str, str]
) -> list[str]:
    baseline, *others = contenders or [Contender("")]
    way = quantity.way
    found: dict[str, list[str]] = {}
    for each in others:
        gained = difference(each.values, baseline.values)
        if gained is None or (gained.clear and way * gained.mean > 0):
            continue
        for key, name in margins.items():
            paired = difference(each.margins.get(key, {}), baseline.margins.get(key, {}))
            if paired is not None and paired.clear and paired.mean > 0:
                found.setdefault(name, []).append(each.label)
                break
    return [
        f"Margins grew, {quantity.name} did not{'' if way > 0 else ' fall'}: {listed(labels)} "
        f"{'has a' if len(labels) == 1 else 'have'} larger {name}"
        f"{'' if len(labels) == 1 else 's'} than {baseline.label}, but no clearly better "
        f"{quantity.name}."
        for name, labels in found.items()
    ]


def _training_length(
    contenders: Sequence[Contender], found: Standing | None, quantity: Quantity
) -> list[str]:
    curves = {each.label: _upwards(each.curve, quantity) for each in contenders}
    rises = {label: gain for label, curve in curves.items() if (gain := rise(curve)) is not None}
    sentences = []
    if rises:
        parts = [f"{label} ({quantity.difference(gain)})" for label, gain in rises.items()]
        sentences.append(
            f"Still rising in the last third of training: {listed(parts)}; train longer."
        )
    if found is None:
        return sentences
    leader = found.leader
    for each in (*found.level, *found.behind):
        crossed = crossing(curves[leader.label], curves[each.label])
        if crossed is None:
            continue
        kind, epochs = crossed
        if kind == "overtaken":
            text = f"{each.label} was ahead of {leader.label} until epoch {epochs}"
            sentences.append(f"{text}: the order may change again with longer training.")
        else:
            text = f"{each.label} is catching up with {leader.label}: at this rate it takes about"
            sentences.append(f"{text} {epochs} more epoch{'s' if epochs > 1 else ''}.")
        break
    return sentences


def _upwards(curve: Curve, quantity: Quantity) -> Curve:
    """Return a curve of percentages, complemented if less is better."""
    if quantity.better >= 0:
        return curve
    return {epoch: 100 - value for epoch, value in curve.items()}
