"""Verdicts for pages and commands: collects their numbers for :mod:`tammes.lab.stats.verdict`."""

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tammes.lab.fewshot.protocol import FewShotResult, Interval, interval
from tammes.lab.measure.measures import Measured
from tammes.lab.recognition.results import Number, Recognition
from tammes.lab.records.run_folder import Run, read_each
from tammes.lab.report.charts.chart import sentence
from tammes.lab.report.load_runs import LoadedRuns
from tammes.lab.report.paper_comparison import PaperComparison
from tammes.lab.reproduce.judge import Comparison
from tammes.lab.reproduce.ledger import Entry
from tammes.lab.stats.paired import resampled_difference
from tammes.lab.stats.seed_groups import Group, Quantity
from tammes.lab.stats.trends import Curve, mean_curve
from tammes.lab.stats.verdict import (
    Contender,
    doctor_found,
    listed,
    remarks,
    seeds_to_decide,
    standing,
    verdict,
)

_MARGINS = {"sample_margin": "sample margin", "class_margin": "class margin"}
"""Margins that may grow while the accuracy does not, the more telling one first."""
_RECOGNISED = ("map", "eer")
"""Quantities of retrieval and of verification whose winner is named."""
_WIDE = 2.0
"""Half-width of an interval, in points, above which more identities are recommended."""
_QUOTED = 100
"""Longest quotation of a claim that fails, in characters."""
_USUAL_RATE = 0.01
"""False acceptance rate for which a threshold is quoted."""


def as_text(sentences: Sequence[str], *, width: int = 100) -> str:
    """Format a verdict for a terminal, in lines of ``width`` characters."""
    text = " ".join(sentences)
    return textwrap.fill(f"verdict: {text}", width, initial_indent="  ", subsequent_indent="    ")


def verdict_on_runs(loaded: LoadedRuns) -> list[str]:
    """Return the verdict on groups of runs."""
    main = loaded.study.main
    contenders = [_of_group(group, loaded, main) for group in loaded.groups]
    if loaded.study.comparable:
        return verdict(contenders, main, _MARGINS)
    first = (
        "Nothing can be concluded: the runs were tested on different images. Make a report for "
        "each set of test images."
    )
    return [first, *remarks(contenders, main)]


def _of_group(group: Group, loaded: LoadedRuns, main: Quantity) -> Contender:
    failures = read_each(group.stopped, "failure")
    diverged = sum(why.get("kind") == "not finite" for _, why in failures)
    curves = [
        {row["epoch"]: value for row in rows if (value := main.read(row)) is not None}
        for rows in (loaded.metrics[run.folder] for run in group.runs.values())
    ]
    return Contender(
        group.label,
        group.values[main.key],
        mean_curve(curves),
        {key: group.values[key] for key in _MARGINS},
        diverged=diverged,
        stopped=len(group.stopped) - diverged,
        chance=_chance(group) if main.key == "accuracy" else None,
        warnings=_warnings(group.every),
    )


def _chance(group: Group) -> float | None:
    """Return the accuracy of random guessing in percent."""
    for _, data in read_each(group.runs.values(), "data"):
        if isinstance(data.get("classes"), list) and data["classes"]:
            return 100 / len(data["classes"])
    return None


def _warnings(runs: Sequence[Run]) -> dict[str, str]:
    """Return the warnings of the doctor in any run: what to change, by name."""
    found: dict[str, str] = {}
    for _, looks in read_each(runs, "health"):
        for look in looks:
            for each in look["findings"]:
                if each["severity"] == "warning":
                    found.setdefault(each["name"], each["change"])
    return found


def verdict_on_reproduction(comparison: PaperComparison) -> list[str]:
    """Return the verdict on a reproduction: its claims, and who is ahead in each column."""
    recipe, ledger = comparison.recipe, comparison.ledger
    if ledger.quick:
        return ["Nothing can be concluded from the quick form."]
    if recipe.rows and not ledger.cells:
        return ["Nothing can be said yet: no cell was run."]
    sentences = [*_claims(comparison), *_over_identities(comparison)]
    if not recipe.rows:
        return sentences or ["There is nothing to train and no claim to judge."]
    main = next((each for each in recipe.quantities if each.better), None)
    if main is None:
        return sentences
    columns = {
        comparison.headings[column]: contenders
        for column in comparison.columns
        if (contenders := [*contenders_of(comparison, column, main)])
    }
    if len(columns) == 1:
        (only,) = columns.values()
        return sentences + verdict(only, main, _MARGINS)
    winners: Counter[str] = Counter()
    for contenders in columns.values():
        found = standing(contenders, main)
        if found is not None and found.level + found.behind:
            winners["" if found.winner is None else found.winner.label] += 1
    total, undecided = winners.total(), winners.pop("", 0)
    parts = [f"{label} in {count}" for label, count in winners.most_common()]
    if parts:
        rest = f", none in {undecided}" if undecided else ""
        text = f"Ahead in {main.name}, of {total} columns: {listed(parts)}{rest}."
        sentences.append(text)
    elif total:
        sentences.append(f"No row is clearly ahead in {main.name} in any of {total} columns.")
    every = [
        Contender(f"{each.label} ({heading})", each.values, each.curve, diverged=each.diverged)
        for heading, contenders in columns.items()
        for each in contenders
    ]
    return sentences + remarks(every, main)


def contenders_of(
    comparison: PaperComparison, column: str, quantity: Quantity
) -> Iterator[Contender]:
    """Yield the rows of a column that were run."""
    ledger = comparison.ledger

    def curve(entry: Entry) -> Curve:
        known = entry.curve(".".join(quantity.path))
        return {epoch: quantity.convert(value) for epoch, value in known.items()}

    for row, label in comparison.labels.items():
        values, diverged = ledger.values(row, column, quantity.key), ledger.diverged(row, column)
        if values or diverged:
            yield Contender(
                label,
                values,
                mean_curve(map(curve, ledger.of(row, column))),
                {key: ledger.values(row, column, key) for key in _MARGINS},
                diverged=diverged,
            )


def _claims(comparison: PaperComparison) -> Iterator[str]:
    verdicts = comparison.verdicts
    if not verdicts:
        return
    counts = Counter(str(each.outcome) for each in verdicts)
    words = {"holds": "hold", "leans": "lean", "fails": "fail", "open": "are open"}
    singular = {"open": "is open"}
    parts = [
        f"{counts[outcome]} {several if counts[outcome] > 1 else singular.get(outcome, outcome)}"
        for outcome, several in words.items()
        if counts[outcome]
    ]
    total = len(verdicts)
    text = f"Of {total} claims {listed(parts, len(words))}"
    if total == 1:
        text = f"The only claim {parts[0].removeprefix('1 ')}"
    failed = next((each.claim.says for each in verdicts if each.outcome == "fails"), None)
    yield f"{text}." if failed is None else f"{text} (“{textwrap.shorten(failed, _QUOTED)}”)."
    more = [_seeds_missing(each.parts) for each in verdicts if each.outcome == "leans"]
    known = [count for count in more if count]
    if known:
        seeds = "1 more seed" if min(known) == 1 else f"{min(known)} more seeds"
        which = "the one that leans" if len(more) == 1 else "the closest of those that lean"
        yield f"About {seeds} would decide {which}."


def _over_identities(comparison: PaperComparison) -> Iterator[str]:
    """Say who wins retrieval and who verification, and whether other identities would agree."""
    ledger = comparison.ledger
    asked = [each for each in comparison.recipe.quantities if each.key in _RECOGNISED]
    for quantity, column in itertools.product(asked, comparison.columns):
        means = {
            row: quantity.better * found.mean
            for row in comparison.labels
            if ledger.resamples(row, column, quantity.key)
            and (found := ledger.summary(row, column, quantity.key)) is not None
        }
        best, *others = sorted(means, key=lambda row: -means[row]) or [""]
        if not others:
            continue
        first, second = comparison.labels[best], comparison.labels[others[0]]
        drawn = (ledger.resamples(row, column, quantity.key) for row in (best, others[0]))
        ends = resampled_difference(*drawn)
        if ends is None:
            continue
        by = quantity.difference(means[best] - means[others[0]])
        low, high = sorted(quantity.better * end for end in ends)
        between = quantity.shown_ends((low, high))
        word = "as other identities would say too" if low > 0 else "other identities may disagree"
        yield (
            f"In {quantity.name} {first} is best, by {by} over {second}: {word} "
            f"(95 % over identities {between})."
        )


def _seeds_missing(parts: Sequence[Comparison]) -> int | None:
    """Return how many more seeds would decide all leaning comparisons; None if that is unknown."""
    more = [
        None if part.difference is None else seeds_to_decide(part.difference, part.needed)
        for part in parts
        if part.outcome in ("leans", "open")
    ]
    known = [count for count in more if count is not None]
    return max(known) if known and len(known) == len(more) else None


def verdict_on_recognition(found: Recognition, run: Path | None = None) -> list[str]:
    """Return the verdict on an evaluation of identities; ``run`` is the folder of its model."""
    first = found.numbers[0]
    identities = found.counts.get("identities")
    sentences = [_measured(first, identities)]
    points = found.thresholds
    usual = [point for point in points if point.target <= _USUAL_RATE * (1 + 1e-9)]
    point = max(usual, key=lambda each: each.target) if usual else points[-1] if points else None
    if point is not None:
        false, true = found.rates
        alone = len(point.thresholds) == 1
        where = f" (accept from {point.thresholds[0]:.4g} on)" if alone else ""
        sentences.append(
            f"At {false} {100 * point.target:g} %{where} {true} is {point.accepted.shown()}."
        )
    if found.failing.rows:
        kind, name = found.failing.columns[0], found.failing.rows[0][0]
        sentences.append(f"{sentence(kind)} {name} fails most.")
    if run is not None:
        sentences += doctor_found({"this run": _warnings([Run(run)])})
    return sentences


def _measured(number: Number, identities: int | None) -> str:
    text = f"{number.name} is {number.shown()}"
    if number.low is None or number.high is None:
        return f"{text}; without identities its certainty is not known."
    over = "" if identities is None else f" over {identities:,} identities"
    text += f" (95 % interval {number.shown_interval()}{over})"
    half = 50 * (number.high - number.low)
    if identities is None or not number.percent or half <= _WIDE:
        return f"{text}."
    # The width of an interval falls with the square root of the number of identities.
    needed = float(f"{identities * half**2:.2g}")
    return f"{text}: about {needed:,.0f} identities would narrow that to ± 1 point."


def verdict_on_fewshot(rows: Sequence[FewShotResult], model: str, against: str | None) -> list[str]:
    """Return the verdict on few-shot episodes: two models, or the methods of one."""
    if against is not None:
        compared = [(row, row.difference) for row in rows if row.difference is not None]
        return _two_models([each for _, each in compared], model, against)
    sentences = []
    for shot in dict.fromkeys(row.shot for row in rows):
        order = sorted(
            (row for row in rows if row.shot == shot), key=lambda row: -row.accuracy.mean
        )
        best, shots = order[0], f"{shot} {'shot' if shot == 1 else 'shots'}"
        text = f"{best.method} has {best.accuracy.shown()} % with {shots}"
        if len(order) > 1:
            gap = interval(best.accuracies - order[1].accuracies)
            ahead = "ahead of" if gap.clear else "not clearly ahead of"
            text += f", {ahead} {order[1].method} ({gap.shown(sign=True)} points)"
        sentences.append(f"{text}.")
    return sentences


def _two_models(differences: Sequence[Interval], model: str, against: str) -> list[str]:
    gains = [each for each in differences if each.clear and each.mean > 0]
    losses = [each for each in differences if each.clear and each.mean < 0]
    total = len(differences)
    ahead, behind, ours, theirs = model, against, gains, losses
    if len(losses) > len(gains):
        ahead, behind, ours, theirs = against, model, losses, gains
    if not ours:
        text = f"It cannot be said whether {model} or {against} is better: "
        return [f"{text}no interval over episodes excludes zero."]
    if theirs:
        text = f"{ahead} is ahead in {len(ours)} of {total} settings, {behind} in {len(theirs)}"
    else:
        ends = sorted({f"{100 * abs(each.mean):.2f}" for each in ours}, key=float)
        by = " to ".join(dict.fromkeys([ends[0], ends[-1]]))
        where = "" if total == 1 else f" in {len(ours)} of {total} settings"
        text = f"{ahead} is ahead of {behind}{where}, by {by} points"
    return [
        f"{text}.",
        "The intervals are over episodes: they do not say what another training would give.",
    ]


def verdict_on_margins(measured: Measured) -> list[str]:
    """Return the verdict on measured margins."""
    parts, shares = [], []
    for key in ("class_margin.angle", "sample_margin.mean"):
        found = measured.measure(key)
        share = None if found is None else found.of_optimum
        shares.append(share)
        if found is not None:
            of = "" if share is None else f", {100 * share:.0f} % of the optimum"
            parts.append(f"{found.name} {found.shown()}{of}")
    sentences = [f"{sentence('; '.join(parts))}."] if parts else []
    accuracy = measured.measure("accuracy")
    if accuracy is not None:
        sentences.append(f"The nearest prototype is right for {accuracy.shown()} of the examples.")
    apart, close = shares
    if apart is not None and close is not None and close < apart / 2:
        sentences.append("The prototypes are well apart, but the examples are far from them.")
    return sentences
