"""Judge the claims of a paper by the cells of a ledger.

Rows are compared paired by seed. A claim *holds* if the whole 95 % interval of the difference is on
the claimed side, and *leans* that way if only the mean is. A single seed has no interval, so it
leans at most, and so do seeds with identical differences. A diverged seed counts against a claim
that its row is good, and for a claim that it is worse. A claim of several comparisons is as good as
the worst of them. For cells tested on identities, the interval over identities is quoted next to
that over seeds: seeds show whether a row is better on these identities, identities whether it would
be on others.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args

from tammes.lab.reproduce.claims import Better, Bound, Claim, Course, Near, Peak
from tammes.lab.reproduce.ledger import Entry, Ledger
from tammes.lab.reproduce.quantities import KNOWN
from tammes.lab.reproduce.recipe import Recipe
from tammes.lab.stats.paired import Difference, difference, resampled_difference
from tammes.lab.stats.seed_groups import Quantity

Outcome: TypeAlias = Literal["holds", "leans", "fails", "open"]

_LATE = 0.1
"""Share of the epochs that counts as the end of training."""
_LITTLE = 0.05
"""Largest rise after the minimum of a falling curve, as a share of the fall."""


@dataclass(frozen=True)
class Comparison:
    """One comparison within a claim, in words, and its verdict.

    ``difference`` is positive in favour of the claim, and None for curves and peaks; ``needed`` is
    the smallest that is claimed. For :class:`.Near` they are ours minus the published number, and
    the largest deviation allowed.
    """

    rows: tuple[str, ...]
    column: str
    text: str
    outcome: Outcome
    difference: Difference | None = None
    needed: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim."""

    claim: Claim
    outcome: Outcome
    parts: tuple[Comparison, ...]

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if not self.parts:
            return "no cells to judge it by"
        if len(self.parts) == 1:
            return self.parts[0].text
        counted = Counter(part.outcome for part in self.parts)
        counts = [f"{counted[word]} {word}" for word in get_args(Outcome) if counted[word]]
        worst = next((part for part in self.parts if part.outcome == self.outcome), None)
        example = ""
        if worst and self.outcome in ("leans", "fails"):
            several = len({part.column for part in self.parts}) > 1
            example = f"; {worst.text}{f' ({worst.column})' if several else ''}"
        return f"of {len(self.parts)} comparisons: {', '.join(counts)}{example}"


def judge(recipe: Recipe, ledger: Ledger) -> list[Verdict]:
    """Judge all claims of a recipe by the ledger of its cells."""
    return [_judge(claim, recipe, ledger) for claim in recipe.claims]


def _judge(claim: Claim, recipe: Recipe, ledger: Ledger) -> Verdict:
    parts = tuple(_KINDS[type(claim)](claim, recipe, ledger))
    outcomes = {part.outcome for part in parts}
    if not outcomes or outcomes == {"open"}:
        return Verdict(claim, "open", parts)
    if "fails" in outcomes:
        return Verdict(claim, "fails", parts)
    return Verdict(claim, "holds" if outcomes == {"holds"} else "leans", parts)


def _better(claim: Better, recipe: Recipe, ledger: Ledger) -> Iterator[Comparison]:
    quantity = KNOWN[claim.quantity]
    for better, than in claim.pairs:
        for column in _columns(claim, recipe, ledger, better, than):
            rows, first, second = (better, than), *(recipe.rows[r].title for r in (better, than))
            ours, theirs = (ledger.values(row, column, claim.quantity) for row in rows)
            if claim.where_below_optimum is not None and theirs:
                optimum = ledger.of(than, column)[0].optimum.get(claim.quantity)
                mean = sum(theirs.values()) / len(theirs)
                if optimum is not None and mean >= optimum - claim.where_below_optimum:
                    continue
            part = Comparison(rows, column, f"{first} and {second}: open", "open", needed=claim.by)
            diff = difference(ours, theirs)
            if diff is not None:
                drawn = (ledger.resamples(row, column, claim.quantity) for row in rows)
                said = in_words(diff, quantity, resampled_difference(*drawn))
                text = f"{first}: {quantity.name} {said} against {second}"
                if claim.by:
                    word = "claimed" if claim.by > 0 else "allowed"
                    text += f", {quantity.difference(quantity.way * claim.by, sign=True)} {word}"
                diff = diff if quantity.way > 0 else _negated(diff)
                outcome = _outcome(diff, claim.by)
                part = replace(part, text=text, outcome=outcome, difference=diff)
            # A diverged run is worse than any other.
            yield _without_diverged(
                part, ledger, counts_against=better, counts_for=than, recipe=recipe
            )


def _near(claim: Near, recipe: Recipe, ledger: Ledger) -> Iterator[Comparison]:
    quantity = KNOWN[claim.quantity]
    published = recipe.paper if claim.near == "paper" else recipe.released
    for (row, column, key), number in published.items():
        named = row in (claim.rows or recipe.rows) and column in _columns(
            claim, recipe, ledger, row
        )
        if key != claim.quantity or not named:
            continue
        title, values = recipe.rows[row].title, ledger.values(row, column, key)
        part = Comparison((row,), column, f"{title}: open", "open", needed=claim.within)
        diff = difference(values, dict.fromkeys(values, number.mean))
        if diff is not None:
            inside = all(abs(end) <= claim.within for end in diff.interval or ())
            outside: Outcome = "fails" if abs(diff.mean) > claim.within else "leans"
            outcome = "holds" if inside and diff.has_spread else outside
            text = f"{title}: {in_words(diff, quantity)} against {quantity.shown(number.mean)}, "
            text += f"{quantity.difference(claim.within)} allowed"
            part = replace(part, text=text, outcome=outcome, difference=diff)
        yield _without_diverged(part, ledger, counts_against=row, recipe=recipe)


def _bound(claim: Bound, recipe: Recipe, ledger: Ledger) -> Iterator[Comparison]:
    quantity = KNOWN[claim.quantity]
    low = claim.at_least is not None
    bound = claim.at_least if claim.at_least is not None else claim.at_most
    assert bound is not None
    claimed = f"at {'least' if low else 'most'} {quantity.difference(bound)} claimed"
    # A claim that training goes wrong is supported by divergence.
    wrong = quantity.better != 0 and low == (quantity.better < 0)
    for row in claim.rows:
        for column in _columns(claim, recipe, ledger, row):
            title, values = recipe.rows[row].title, ledger.values(row, column, claim.quantity)
            part = Comparison((row,), column, f"{title}: open", "open")
            diff = difference(values, dict.fromkeys(values, bound))
            if diff is not None:
                text = f"{title}: {quantity.difference(diff.mean + bound)}, {claimed}"
                diff = diff if low else _negated(diff)
                part = replace(part, text=text, outcome=_outcome(diff, 0.0), difference=diff)
            which = {"counts_for": row} if wrong else {"counts_against": row}
            yield _without_diverged(part, ledger, recipe=recipe, **which)


def _course(claim: Course, recipe: Recipe, ledger: Ledger) -> Iterator[Comparison]:
    for rows, words in (
        (claim.falls, "falls"),
        (claim.falls_then_rises, "falls and then rises"),
    ):
        for row in rows:
            for column in _columns(claim, recipe, ledger, row):
                title = recipe.rows[row].title
                courses = [_curve_shape(entry, claim.curve) for entry in ledger.of(row, column)]
                part = Comparison((row,), column, f"{title}: open", "open")
                if courses and None not in courses:
                    right = sum(course == words for course in courses)
                    outcome: Outcome = "holds" if len(courses) > 1 else "leans"
                    outcome = outcome if right == len(courses) else "fails"
                    text = f"{title}: {words} with {right} of {len(courses)} seeds"
                    part = replace(part, text=text, outcome=outcome)
                yield _without_diverged(part, ledger, counts_against=row, recipe=recipe)


def _peak(claim: Peak, recipe: Recipe, ledger: Ledger) -> Iterator[Comparison]:
    """Locate the best value for each common seed, and for the mean over them."""
    along = {row: float(recipe.rows[row].values[claim.peak]) for row in claim.rows}
    keys = [key for key in (claim.quantity, claim.not_before) if key is not None]
    for column in _columns(claim, recipe, ledger, *claim.rows):
        part = Comparison(claim.rows, column, f"the peak along {claim.peak}: open", "open")
        values = {key: {row: ledger.values(row, column, key) for row in claim.rows} for key in keys}
        gone = {
            (entry.row, entry.seed)
            for entry in ledger.cells
            if entry.column == column and entry.status == "diverged"
        }
        # A diverged run is worse than any other and cannot be the peak.
        known = [
            seed
            for seed in sorted({seed for by_seed in values[keys[0]].values() for seed in by_seed})
            if all(
                seed in by_seed or (row, seed) in gone
                for of_rows in values.values()
                for row, by_seed in of_rows.items()
            )
        ]
        if known:
            peaks = [[_best(values[key], along, key, [seed]) for key in keys] for seed in known]
            together = [_best(values[key], along, key, known) for key in keys]
            right = sum(_is_there(claim, each) for each in peaks)
            places = zip(keys, together, strict=True)
            text = " and ".join(
                f"{KNOWN[key].name} is best at {claim.peak} {place:g}" for key, place in places
            )
            text += f", as claimed with {right} of {len(known)} seed{'s' * (len(known) > 1)}"
            outcome: Outcome = "holds" if right == len(known) > 1 else "leans"
            outcome = outcome if _is_there(claim, together) else "fails"
            part = replace(part, text=text, outcome=outcome)
        yield part


def _best(
    values: Mapping[str, Mapping[int, float]],
    along: Mapping[str, float],
    key: str,
    seeds: Sequence[int],
) -> float:
    """Return the location of the best mean over some seeds, among rows that have all of them."""
    means = {
        row: sum(by_seed[seed] for seed in seeds) / len(seeds)
        for row, by_seed in values.items()
        if all(seed in by_seed for seed in seeds)
    }
    return along[max(means, key=lambda row: KNOWN[key].way * means[row])] if means else float("nan")


def _is_there(claim: Peak, places: Sequence[float]) -> bool:
    """Return whether the peak is where it is claimed; ``places[1]`` is that of ``not_before``."""
    least = claim.at_least if claim.at_least is not None else -float("inf")
    most = claim.at_most if claim.at_most is not None else float("inf")
    # Without a peak the place is NaN, and every comparison is false.
    return least <= places[0] <= most and (len(places) == 1 or places[0] >= places[1])


def _without_diverged(
    part: Comparison,
    ledger: Ledger,
    *,
    recipe: Recipe,
    counts_against: str | None = None,
    counts_for: str | None = None,
) -> Comparison:
    """Adjust a comparison for diverged seeds, which count against the claim or for it."""
    for row, outcome in ((counts_against, "fails"), (counts_for, "leans")):
        count = 0 if row is None else ledger.diverged(row, part.column)
        if row is not None and count:
            seeds = "a seed" if count == 1 else f"{count} seeds"
            note = f"{recipe.rows[row].title} diverged with {seeds}"
            text = note if part.outcome == "open" else f"{part.text}; {note}"
            worse = outcome if part.outcome != "fails" else part.outcome
            part = replace(part, text=text, outcome=cast(Outcome, worse))
    return part


def _curve_shape(entry: Entry, curve: str) -> str | None:
    """Classify the shape of a curve; None if it has too few points."""
    values = [value for value in entry.curves.get(curve, []) if value is not None]
    if len(values) < 3:
        return None
    lowest = min(values)
    place = values.index(lowest)
    if place == 0:
        return "rises"
    rise, fall = values[-1] - lowest, values[0] - lowest
    late = place >= (1 - _LATE) * (len(values) - 1)
    return "falls" if late or rise <= _LITTLE * fall else "falls and then rises"


def _columns(claim: Claim, recipe: Recipe, ledger: Ledger, *rows: str) -> list[str]:
    """Return the columns of a claim: those it names, or all that run by default or were run."""
    run = {entry.column for entry in ledger.cells}
    usual = [name for name, each in recipe.columns.items() if not each.on_request or name in run]
    named = claim.columns or usual
    return [column for column in named if all(recipe.has(row, column) for row in rows)]


def _outcome(diff: Difference, needed: float) -> Outcome:
    if diff.interval is not None and diff.has_spread and diff.interval[0] >= needed:
        return "holds"
    return "leans" if diff.mean >= needed else "fails"


def _negated(diff: Difference) -> Difference:
    interval = None if diff.interval is None else (-diff.interval[1], -diff.interval[0])
    return replace(diff, mean=-diff.mean, interval=interval)


def in_words(diff: Difference, quantity: Quantity, over: tuple[float, float] | None = None) -> str:
    """Format a difference, its unit and its interval for a sentence.

    ``over`` is its interval over identities.
    """
    shown = "one seed"
    if diff.interval is not None:
        shown = f"95 % interval {quantity.shown_ends(diff.interval)}"
    if over is not None:
        shown += f"; over identities {quantity.shown_ends(over)}"
    return f"{quantity.difference(diff.mean, sign=True)} ({shown})"


_KINDS: dict[type, Callable[..., Iterator[Comparison]]] = {
    Better: _better,
    Near: _near,
    Bound: _bound,
    Course: _course,
    Peak: _peak,
}
