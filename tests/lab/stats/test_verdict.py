"""Each made case gives its sentence: the rules of docs/verdict.md."""

import random
import re
from pathlib import Path

import pytest

from tammes.lab.stats.paired import difference
from tammes.lab.stats.seed_groups import QUANTITIES, Quantity
from tammes.lab.stats.trends import collapse, crossing, mean_curve, rise
from tammes.lab.stats.verdict import Contender, doctor_found, seeds_to_decide, standing, verdict

ACCURACY = QUANTITIES[0]
ERROR = Quantity("error", "error", ("test", "accuracy"), "%", -100.0, 2, -1, offset=100.0)
FLAT = dict.fromkeys(range(1, 16), 95.0)
PAGE = Path(__file__).parents[3] / "docs" / "verdict.md"


def group(label, *values, **more):
    return Contender(label, dict(enumerate(values)), **more)


def said(*contenders, quantity=ACCURACY, **more):
    return " ".join(verdict(contenders, quantity, **more))


# ------------------------------------------------------------------------------- who is ahead


def test_the_winner_is_named_with_its_lead_and_the_certainty():
    text = said(group("softmax", 95.0, 95.2, 94.9), group("cosface", 97.0, 97.1, 97.0))
    assert text == (
        "cosface is ahead: accuracy 97.03 %, 2.00 points above softmax (95 % interval +1.75 to "
        "+2.25, 3 seeds)."
    )


def test_less_error_is_ahead():
    groups = (group("softmax", 5.0, 4.8, 5.1), group("cosface", 3.0, 2.9, 3.0))
    assert "cosface is ahead: error 2.97 %, 2.00 points below softmax" in said(
        *groups, quantity=ERROR
    )


def test_a_lead_within_the_spread_has_no_winner_and_a_number_of_seeds():
    text = said(group("softmax", 95.0, 95.4), group("cosface", 96.0, 95.6))
    assert text == (
        "No winner in accuracy among cosface and softmax: the first leads the second by 0.60 "
        "points (95 % interval -4.48 to +5.68, 2 seeds); about 8 more seeds would decide a "
        "difference of this size."
    )


def test_groups_that_many_seeds_would_not_tell_apart_are_level():
    text = said(group("softmax", 95.0, 95.4, 95.1), group("cosface", 95.2, 95.1, 95.25))
    assert "cosface and softmax are level in accuracy: the first two differ by 0.02 points" in text
    assert "which 30 more seeds would hardly decide" in text


def test_groups_whose_seeds_differ_widely_are_not_called_level():
    text = said(group("softmax", 12.5, 12.5), group("cosface", 23.3, 6.7))
    assert "No winner in accuracy among cosface and softmax: the first two differ by" in text
    assert "2 seeds); seeds differ so much that 30 more would hardly decide it." in text
    assert "level" not in text


def test_equal_numbers_are_level():
    assert "are level in accuracy" in said(
        group("softmax", 95.0, 96.0), group("cosface", 95.0, 96.0)
    )


def test_one_seed_decides_nothing():
    text = said(group("softmax", 95.0), group("cosface", 97.0))
    assert text == (
        "cosface has the best accuracy, 97.00 %, 2.00 points above softmax, but one seed cannot "
        "decide it: train at least 2 more."
    )


def test_without_a_common_seed_nothing_is_compared():
    other = Contender("cosface", {7: 97.0, 8: 97.1})
    assert "no seed in common with softmax: they cannot be compared" in said(
        group("softmax", 95.0, 95.1), other
    )


def test_equal_differences_have_no_spread():
    text = said(group("softmax", 95.0, 96.0), group("cosface", 96.0, 97.0))
    assert "1.00 points above softmax in accuracy with each of 2 seeds: equal differences" in text


def test_who_is_clearly_behind_is_named_though_there_is_no_winner():
    text = said(
        group("softmax", 95.0, 95.4, 95.1),
        group("cosface", 95.4, 95.3, 95.5),
        group("lm", 90.0, 90.3, 90.1),
    )
    assert "No winner in accuracy among cosface and softmax" in text
    assert "Clearly behind: lm (5.27 points)." in text


def test_close_prototypes_explain_who_is_behind():
    def margins(degrees):
        return {"class_margin": dict.fromkeys(range(3), degrees)}

    groups = [
        group("softmax", 95.0, 95.4, 95.1, margins=margins(50.0)),
        group("cosface", 95.4, 95.3, 95.5, margins=margins(58.0)),
    ]
    far = group("lm", 90.0, 90.3, 90.1, margins=margins(26.0))
    assert "lm (5.27 points; its closest classes are 26° apart, the leader's 58°)." in said(
        *groups, far
    )
    near = group("lm", 90.0, 90.3, 90.1, margins=margins(45.0))
    assert "lm (5.27 points)." in said(*groups, near)
    assert "above lm; its closest classes are 26° apart" in said(groups[1], far)


def test_one_group_is_compared_with_nothing():
    assert said(group("softmax", 95.0, 95.4)) == (
        "softmax: accuracy 95.20 % ± 0.28 over 2 seeds; there is nothing to compare it with."
    )


def test_no_finished_run_says_nothing():
    assert said(Contender("softmax", stopped=2)) == (
        "Nothing can be said yet: no run is finished. 2 runs are unfinished or failed, and not "
        "counted."
    )


def test_a_winner_is_rarely_found_where_there_is_none():
    """The best of several is compared with all others, and needs no wider interval."""
    chance = random.Random(0)
    for count in (2, 5):
        wins = 0
        for _ in range(400):
            drawn = [group(str(k), *(chance.gauss(0, 1) for _ in range(3))) for k in range(count)]
            wins += standing(drawn, ACCURACY).winner is not None
        assert wins / 400 < 0.08


def test_the_advised_number_of_seeds_decides_with_four_fifths_of_the_studies():
    measured = difference({0: 0.2, 1: 1.2, 2: 2.2}, dict.fromkeys(range(3), 0.0))
    total = 3 + seeds_to_decide(measured)
    chance = random.Random(0)
    studies = [{seed: chance.gauss(1.2, 1.0) for seed in range(total)} for _ in range(400)]
    decided = [difference(each, dict.fromkeys(each, 0.0)).clear for each in studies]
    assert 0.75 < sum(decided) / 400 < 0.9


# ------------------------------------------------------------------ what went wrong in training


def test_a_group_that_diverged_is_not_compared():
    text = said(group("softmax", 95.0, 95.1), Contender("arcface", {0: 99.0}, diverged=2))
    assert text == (
        "softmax: accuracy 95.05 % ± 0.07 over 2 seeds; there is nothing to compare it with. "
        "Diverged: arcface (2 of 3 seeds), which is not compared."
    )


def test_if_all_diverged_nothing_can_be_compared():
    assert said(Contender("arcface", {}, diverged=2)).startswith("Nothing can be compared")


def test_a_curve_that_fell_collapsed():
    curve = {1: 60.0, 2: 81.0, 3: 40.0, 4: 10.0}
    assert collapse(curve) == 2
    assert "Collapsed: arcface (81.00 to 10.00 % after epoch 2)." in said(
        group("softmax", 95.0), group("arcface", 10.0, curve=curve)
    )
    errors = {epoch: 100 - value for epoch, value in curve.items()}
    assert "Collapsed: arcface (19.00 to 90.00 % after epoch 2)." in said(
        group("arcface", 90.0, curve=errors), quantity=ERROR
    )


def test_a_group_near_guessing_did_not_learn():
    text = said(group("softmax", 95.0, chance=10.0), group("arcface", 12.0, chance=10.0))
    assert "Did not learn: arcface (12.00 %, chance is 10.00 %)." in text
    assert "learn" not in said(group("good", 20.0, chance=10.0))
    assert "learn" not in said(group("many classes", 1.0, chance=0.1))


def test_warnings_of_the_doctor_are_said_with_their_cure():
    text = said(
        group("softmax", 95.0),
        group("arcface", 12.0, warnings={"prototypes-collapsed": "a third of the learning rate"}),
    )
    assert text.endswith(
        "The doctor warns of prototypes-collapsed in arcface: a third of the learning rate."
    )
    three = dict.fromkeys(("one", "two", "three"), "cure")
    assert doctor_found({"a": three, "b": three}) == [
        "The doctor warns of one in a and b: cure; and of two in a and b: cure; and 1 more."
    ]


# -------------------------------------------------------------------------- margins, and curves


def test_margins_that_grew_without_the_accuracy_are_told():
    margins = {"sample_margin": {0: 0.30, 1: 0.31, 2: 0.32}}
    larger = {"sample_margin": {0: 0.40, 1: 0.42, 2: 0.41}}
    names = {"sample_margin": "sample margin"}
    base = group("softmax", 95.0, 95.2, 94.9, margins=margins)
    level = group("cosface", 95.1, 95.0, 95.2, margins=larger)
    assert (
        "Margins grew, accuracy did not: cosface has a larger sample margin than softmax, but no "
        "clearly better accuracy."
    ) in said(base, level, margins=names)
    better = group("cosface", 97.0, 97.1, 97.0, margins=larger)
    assert "Margins" not in said(base, better, margins=names)
    assert "Margins" not in said(base, group("cosface", 95.1, 95.0, 95.2, margins=margins))


def test_a_rising_curve_asks_for_longer_training():
    rising = {epoch: 60.0 + 2 * epoch for epoch in range(1, 16)}
    text = said(group("softmax", 90.0, curve=rising), group("cosface", 95.0, curve=FLAT))
    assert (
        "Still rising in the last third of training: softmax (8.00 points); train longer." in text
    )
    assert "rising" not in said(group("softmax", 95.0, curve=FLAT))
    falling = {epoch: 100 - value for epoch, value in rising.items()}
    assert "Still rising" in said(group("softmax", 10.0, curve=falling), quantity=ERROR)


@pytest.mark.parametrize(
    "curve",
    [
        FLAT,
        {1: 60.0, 2: 70.0, 3: 80.0},
        {epoch: 60.0 + 20 * (epoch > 25) + 0.001 * epoch for epoch in range(1, 31)},
        dict(enumerate([*[90.0] * 10, 92.0, 90.0, 93.0, 91.5, 94.0])),
        {epoch: 70.0 + epoch for epoch in range(1, 31)},
        {epoch: 95.0 + 0.3 * (-1) ** epoch for epoch in range(1, 31)},
        {epoch: 95 + 0.01 * epoch for epoch in range(1, 31)},
        {epoch: 95 - epoch for epoch in range(1, 31)},
    ],
    ids=[
        "flat",
        "three points",
        "a step of the learning rate",
        "up and down",
        "to 100",
        "noise",
        "slowly",
        "falling",
    ],
)
def test_these_curves_do_not_rise(curve):
    assert rise(curve) is None


def test_a_small_rise_counts_where_few_errors_are_left():
    def curve(end):
        return {epoch: end - 0.02 * (30 - epoch) for epoch in range(1, 31)}

    assert rise(curve(99.5)) == pytest.approx(0.18)
    assert rise(curve(90.0)) is None


def test_curves_that_crossed_late_or_will_cross_are_told():
    slow = {epoch: 6.0 * epoch for epoch in range(1, 16)}
    early = {epoch: 80 * (1 - 0.6**epoch) for epoch in range(1, 16)}
    assert crossing(slow, early) == ("overtaken", 13)
    text = said(group("early", 80.0, curve=early), group("slow", 90.0, curve=slow))
    assert "early was ahead of slow until epoch 13: the order may change again" in text
    ahead = dict.fromkeys(range(1, 16), 95.0)
    assert crossing(ahead, slow) == ("catching up", 1)
    text = said(group("early", 95.0, curve=ahead), group("slow", 90.0, curve=slow))
    assert "slow is catching up with early: at this rate it takes about 1 more epoch." in text
    assert crossing(ahead, early) is None
    assert crossing({}, early) is None
    dips = {epoch: value + (2.0 if epoch != 13 else -2.0) for epoch, value in early.items()}
    assert crossing(dips, early) is None


def test_the_mean_of_curves_is_over_common_epochs():
    assert mean_curve([{1: 1.0, 2: 2.0}, {2: 4.0, 3: 9.0}, {}]) == {2: 3.0}
    assert mean_curve([]) == {}


def test_the_page_has_the_rule_behind_each_sentence():
    text = PAGE.read_text(encoding="utf-8")
    sentences = (
        "is ahead, No winner, are level, one seed cannot decide, Clearly behind, Diverged, "
        "Collapsed, Did not learn, Margins grew, Still rising, was ahead of, is catching up, "
        "The doctor warns, would decide, its closest classes"
    )
    for phrase in sentences.split(", "):
        assert re.search(rf"^\| .*{phrase}.* \| .+ \|$", text, re.MULTILINE), phrase
