"""A claim about where a quantity is best among rows that differ in one value."""

import pytest
from ledgers import entry, stop

from tammes.lab.reproduce.judge import judge
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipe_yaml import read

MARGINS = {"low": -0.2, "middle": 0, "high": 0.2}
ROWS = {name: {"values": {"margin": margin}} for name, margin in MARGINS.items()}
NOVEL = {"quantity": "shot1", "peak": "margin", "rows": [*ROWS]}


def recipe_of(claim, **changes):
    given = {"title": "T", "source": "s", "quantities": ["shot1"], "columns": {"all": {}}}
    return read({**given, "rows": ROWS, "claims": [{"says": "So.", **claim}], **changes}, "small")


def ledger_of(**quantities):
    """Cells of the three rows from lists by seed; None is a seed that diverged."""
    cells = []
    for place, row in enumerate(ROWS):
        seeds = {key: each[place] for key, each in quantities.items()}
        for seed in range(max(map(len, seeds.values()))):
            values = {key: each[seed] for key, each in seeds.items() if seed < len(each)}
            if None in values.values():
                cells.append(stop(row, "all", seed))
            else:
                cells.append(entry(row, "all", seed, values))
    return Ledger("small", cells=cells)


def verdict_of(claim, ledger):
    (found,) = judge(recipe_of(claim), ledger)
    return found


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([[70, 70], [69, 69], [60, 60]], "holds"),
        ([[69, 69], [70, 70], [60, 60]], "holds"),
        # With the second seed it is best above 0, on the mean it is not.
        ([[70, 68], [69, 69], [60, 70]], "leans"),
        ([[60, 60], [61, 61], [62, 62]], "fails"),
        # Best below 0 with one seed of two, but not on the mean.
        ([[70, 60], [60, 60], [69, 69]], "fails"),
        # One seed never holds.
        ([[70], [69], [60]], "leans"),
        ([[60], [61], [62]], "fails"),
        # Seeds that not all rows have do not count.
        ([[70, 10], [69, 20], [60]], "leans"),
        ([[70], [69], []], "open"),
        # What diverged is no peak, and what is left decides.
        ([[70, 70], [69, 69], [None, None]], "holds"),
        ([[None, None], [60, 60], [69, 69]], "fails"),
    ],
)
def test_a_peak_is_judged_with_each_seed_and_on_the_mean(values, outcome):
    assert verdict_of({**NOVEL, "at_most": 0}, ledger_of(shot1=values)).outcome == outcome


def test_a_peak_may_be_claimed_from_a_value_on():
    values = [[60, 60], [70, 71], [69, 69]]
    claim = {**NOVEL, "at_least": 0}
    assert verdict_of(claim, ledger_of(shot1=values)).outcome == "holds"
    assert verdict_of(claim, ledger_of(shot1=values[::-1])).outcome == "holds"
    assert verdict_of({**NOVEL, "at_least": 0.1}, ledger_of(shot1=values)).outcome == "fails"


def test_less_is_best_where_less_is_better():
    values = [[30, 30], [20, 20], [10, 10]]
    claim = {**NOVEL, "quantity": "error", "at_most": 0}
    assert verdict_of(claim, ledger_of(error=values)).outcome == "fails"
    assert verdict_of(claim, ledger_of(error=values[::-1])).outcome == "holds"


@pytest.mark.parametrize(
    ("base", "novel", "outcome"),
    [
        ([[70, 70], [80, 80], [90, 90]], [[50, 50], [60, 60], [40, 40]], "holds"),
        # At the same place is not before.
        ([[70, 70], [80, 80], [60, 60]], [[50, 50], [60, 60], [40, 40]], "holds"),
        ([[90, 90], [80, 80], [70, 70]], [[50, 50], [60, 60], [40, 40]], "fails"),
        ([[70, 90], [95, 89], [60, 60]], [[50, 50], [60, 60], [40, 40]], "leans"),
        ([[70], [80], [90]], [[50], [60], [40]], "leans"),
    ],
)
def test_a_peak_is_compared_with_that_of_another_quantity(base, novel, outcome):
    claim = {**NOVEL, "quantity": "base_accuracy", "not_before": "shot1"}
    ledger = ledger_of(base_accuracy=base, shot1=novel)
    assert verdict_of(claim, ledger).outcome == outcome


def test_a_seed_needs_both_quantities():
    claim = {**NOVEL, "quantity": "base_accuracy", "not_before": "shot1"}
    assert verdict_of(claim, ledger_of(base_accuracy=[[70], [80], [90]])).outcome == "open"


def test_the_sentence_says_where_both_are_best():
    claim = {**NOVEL, "quantity": "base_accuracy", "not_before": "shot1"}
    values = {"base_accuracy": [[7, 7], [8, 8], [9, 9]], "shot1": [[5, 5], [4, 4], [3, 3]]}
    assert verdict_of(claim, ledger_of(**values)).sentence == (
        "accuracy on base classes is best at margin 0.2 and 1-shot accuracy is best at margin "
        "-0.2, as claimed with 2 of 2 seeds"
    )


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        (NOVEL, "claim 1 is expected to say at_least, at_most or not_before of its peak"),
        (
            {**NOVEL, "not_before": "shot2"},
            "there is no quantity 'shot2'; did you mean",
        ),
        (
            {**NOVEL, "peak": "scale", "at_most": 0},
            "scale of row low, along which a claim looks for a peak, is expected to be a number",
        ),
        ({**NOVEL, "peak": 3, "at_most": 0}, "peak of claim 1 is expected to be text, got 3"),
    ],
)
def test_a_peak_that_cannot_be_judged_is_refused_in_a_sentence(claim, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        recipe_of(claim)
