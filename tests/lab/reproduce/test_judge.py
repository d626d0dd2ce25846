"""What is claimed holds, leans, fails or is open: by intervals over seeds, the right way round."""

import pytest
from ledgers import entry, stop

from tammes.lab.reproduce.judge import judge
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipe_yaml import read

COLUMNS = {"left": {}, "right": {}, "large": {"on_request": True}}
ROWS = {"new": {"title": "New"}, "old": {"title": "Old"}, "third": {"columns": ["right"]}}


def recipe_of(*claims, **changes):
    given = {"title": "T", "source": "s", "quantities": ["error"], "columns": COLUMNS, "rows": ROWS}
    given["curves"] = ["train.bias", "test.bias"]
    named = [{"says": "It is so.", **claim} for claim in claims]
    return read({**given, "claims": named, **changes}, "small")


def ledger_of(values, quantity="error", column="left", **more):
    """Cells of rows with values by seed; None is a seed that diverged."""
    return Ledger(
        "small",
        cells=[
            stop(row, column, seed)
            if value is None
            else entry(row, column, seed, {quantity: value}, **more)
            for row, some in values.items()
            for seed, value in enumerate(some)
        ],
    )


def verdict_of(claim, ledger, **changes):
    (found,) = judge(recipe_of(claim, **changes), ledger)
    return found


def better(**changes):
    return {"better": "new", "than": "old", "columns": ["left"], **changes}


# ---------------------------------------------------------------------------------------- better


@pytest.mark.parametrize(
    ("new", "old", "by", "outcome"),
    [
        # Differences 2.0, 2.1, 2.2: mean 2.1, interval 2.1 ± 4.303 * 0.1 / sqrt(3) = 1.85 to 2.35.
        ([28.0, 27.9, 27.8], [30.0, 30.0, 30.0], 0, "holds"),
        ([28.0, 27.9, 27.8], [30.0, 30.0, 30.0], 1.85, "holds"),
        ([28.0, 27.9, 27.8], [30.0, 30.0, 30.0], 1.86, "leans"),
        ([28.0, 27.9, 27.8], [30.0, 30.0, 30.0], 2.09, "leans"),
        ([28.0, 27.9, 27.8], [30.0, 30.0, 30.0], 2.11, "fails"),
        # Less error is better, and this is more.
        ([30.0, 30.0, 30.0], [28.0, 27.9, 27.8], 0, "fails"),
        # The mean is better and the interval reaches across.
        ([28.0, 31.0, 27.0], [30.0, 30.0, 30.0], 0, "leans"),
        # One seed has no interval.
        ([20.0], [30.0], 0, "leans"),
        ([20.0], [30.0], 10, "leans"),
        ([20.0], [30.0], 11, "fails"),
        # Seeds that all differ by the same have no spread to judge by.
        ([20.0, 21.0, 22.0], [30.0, 31.0, 32.0], 0, "leans"),
        ([20.0, 21.0, 22.0], [30.0, 31.0, 32.0], 11, "fails"),
        # Nothing to compare.
        ([], [30.0], 0, "open"),
        ([20.0], [], 0, "open"),
    ],
)
def test_less_error_is_better_by_the_interval_over_seeds(new, old, by, outcome):
    found = verdict_of(better(by=by), ledger_of({"new": new, "old": old}))
    assert found.outcome == outcome
    assert [part.outcome for part in found.parts] == [outcome]


@pytest.mark.parametrize("quantity", ["accuracy", "class_margin", "sample_margin"])
def test_more_accuracy_and_more_margin_are_better(quantity):
    values = {"new": [62.0, 62.1, 62.2], "old": [60.0, 60.0, 60.0]}
    claim = better(quantity=quantity, by=1)
    assert verdict_of(claim, ledger_of(values, quantity)).outcome == "holds"
    turned = {"new": values["old"], "old": values["new"]}
    assert verdict_of(claim, ledger_of(turned, quantity)).outcome == "fails"


def test_the_difference_of_a_part_is_on_the_scale_on_which_more_is_better():
    (part,) = verdict_of(
        better(by=1), ledger_of({"new": [28.0, 27.9, 27.8], "old": [30.0, 30.0, 30.0]})
    ).parts
    assert part.difference.mean == pytest.approx(2.1)
    assert part.difference.interval == pytest.approx((1.852, 2.348), abs=1e-3)
    assert (part.needed, part.rows, part.column) == (1, ("new", "old"), "left")


def test_rows_are_compared_seed_by_seed():
    # The seeds differ by ten; within a seed the new row is better by about one.
    values = {"new": [19.0, 28.9, 38.8], "old": [20.0, 30.0, 40.0]}
    assert verdict_of(better(), ledger_of(values)).outcome == "holds"


def test_only_seeds_that_both_rows_have_count():
    ledger = ledger_of({"new": [28.0, 27.9], "old": [30.0, 30.0, 10.0]})
    (part,) = verdict_of(better(), ledger).parts
    assert part.difference.seeds == (0, 1)
    assert part.outcome == "holds"


@pytest.mark.parametrize(
    ("new", "old", "outcome", "words"),
    [
        ([28.0, None, 27.8], [30.0] * 3, "fails", "; New diverged with a seed"),
        ([None, None], [30.0] * 2, "fails", "New diverged with 2 seeds"),
        # That the other diverges speaks for the claim, and proves nothing.
        ([28.0, 27.9, 27.8], [30.0, 30.0, None], "leans", "; Old diverged with a seed"),
        ([28.0, 27.9], [None, None], "leans", "Old diverged with 2 seeds"),
        ([32.0, 32.1], [30.0, 30.0, None], "fails", "; Old diverged with a seed"),
        ([None], [None], "fails", "Old diverged with a seed"),
    ],
)
def test_what_diverged_is_worse_than_anything(new, old, outcome, words):
    found = verdict_of(better(), ledger_of({"new": new, "old": old}))
    assert found.outcome == outcome
    assert found.sentence.endswith(words)


def test_a_cell_that_failed_is_no_divergence():
    ledger = ledger_of({"old": [30.0]})
    ledger.put(stop("new", "left", 0, "failed"))
    assert verdict_of(better(), ledger).outcome == "open"


# ------------------------------------------------------------------------------- several parts


def both(left, right):
    """A ledger with a pair of rows in two columns, each better by so much with every seed."""
    ledger = Ledger("small")
    for column, by in (("left", left), ("right", right)):
        if by is not None:
            cells = {"new": [30.0 - by, 29.9 - by], "old": [30.0, 30.0]}
            ledger.cells += ledger_of(cells, column=column).cells
    return ledger


@pytest.mark.parametrize(
    ("left", "right", "outcome"),
    [
        (2, 2, "holds"),
        (2, -2, "fails"),
        (-2, 2, "fails"),
        (2, None, "leans"),
        (None, -2, "fails"),
        (None, None, "open"),
        (2, -0.02, "leans"),
    ],
)
def test_a_claim_is_as_good_as_the_worst_of_its_parts(left, right, outcome):
    found = verdict_of({"better": "new", "than": "old"}, both(left, right))
    assert [part.column for part in found.parts] == ["left", "right"]
    assert found.outcome == outcome


def test_a_claim_is_about_the_columns_it_names():
    assert verdict_of(better(), both(2, -2)).outcome == "holds"
    found = verdict_of(better(columns=["right"]), both(2, -2))
    assert found.outcome == "fails"
    assert len(found.parts) == 1


def test_a_column_on_request_counts_only_where_a_claim_names_it():
    claim = {"better": "new", "than": "old", "columns": ["left", "large"]}
    assert [part.column for part in verdict_of(claim, both(2, 2)).parts] == ["left", "large"]


def test_columns_that_do_not_have_both_rows_are_left_out():
    found = verdict_of({"better": "third", "than": "old"}, both(2, 2))
    assert [part.column for part in found.parts] == ["right"]


def test_claim_about_columns_without_its_rows_has_nothing_to_judge():
    found = verdict_of({"better": "third", "than": "old", "columns": ["left"]}, both(2, 2))
    assert (found.outcome, found.parts, found.sentence) == ("open", (), "no cells to judge it by")


def test_all_pairs_are_judged():
    claim = {"pairs": [["new", "old"], ["old", "new"]], "columns": ["left"]}
    found = verdict_of(claim, both(2, None))
    assert [(part.rows, part.outcome) for part in found.parts] == [
        (("new", "old"), "holds"),
        (("old", "new"), "fails"),
    ]
    assert found.outcome == "fails"


@pytest.mark.parametrize(
    ("old", "count"),
    [
        ([88.0, 89.0], 1),
        ([89.0, 89.0], 0),
        ([88.0, 89.9], 1),
        ([89.5, 89.5], 0),
    ],
)
def test_only_pairs_whose_second_row_is_far_enough_below_the_optimum_are_judged(old, count):
    # The optimum is 90: with a mean of 89 or more the second row is no more than 1 below.
    claim = better(quantity="class_margin", where_below_optimum=1.0)
    ledger = ledger_of(
        {"new": [80.0, 80.5], "old": old}, "class_margin", optimum={"class_margin": 90.0}
    )
    found = verdict_of(claim, ledger)
    assert len(found.parts) == count
    assert found.outcome == ("fails" if count else "open")


def test_a_pair_whose_optimum_is_not_known_is_judged():
    claim = better(quantity="class_margin", where_below_optimum=1.0)
    ledger = ledger_of({"new": [80.0, 80.5], "old": [89.9, 89.9]}, "class_margin")
    assert verdict_of(claim, ledger).outcome == "fails"
    assert verdict_of(claim, Ledger("small")).outcome == "open"


# ------------------------------------------------------------------------------------------ near

NEAR = {"near": "paper", "within": 0.5}
PAPER = {"paper": {"new": {"left": {"error": 29.0, "class_margin": 3.0}}},
         "released": {"new": {"left": {"error": 32.0}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("new", "outcome"),
    [
        # ± 4.303 * 0.1 / sqrt(3) = 0.248
        ([29.1, 29.2, 29.3], "holds"),
        ([28.7, 28.8, 28.9], "holds"),
        ([29.2, 29.3, 29.4], "leans"),
        ([28.6, 28.7, 28.8], "leans"),
        ([29.45, 29.55, 29.65], "fails"),
        ([28.35, 28.45, 28.55], "fails"),
        ([29.0], "leans"),
        ([29.0, 29.0, 29.0], "leans"),
        ([29.6], "fails"),
        ([29.0, None, 29.1], "fails"),
        ([], "open"),
    ],
)
def test_a_row_is_near_a_number_where_its_whole_interval_is_on_either_side(new, outcome):
    found = verdict_of(NEAR, ledger_of({"new": new}), **PAPER)
    assert [part.rows for part in found.parts] == [("new",)]
    assert found.outcome == outcome


def test_near_the_paper_is_not_near_the_released_code():
    ledger = ledger_of({"new": [32.0, 32.1, 31.9]})
    assert verdict_of(NEAR, ledger, **PAPER).outcome == "fails"
    assert verdict_of({**NEAR, "near": "released"}, ledger, **PAPER).outcome == "holds"


def test_near_is_about_the_rows_and_columns_it_names_and_the_numbers_there_are():
    numbers = {
        "new": {"left": {"error": 1}, "right": {"error": 2}, "large": {"error": 3}},
        "old": {"left": {"error": 4}, "right": {"class_margin": 5}},
        "third": {"left": {"error": 6}},
    }

    def places(**claim):
        found = verdict_of({**NEAR, **claim}, Ledger("small"), paper=numbers)
        return [(*part.rows, part.column) for part in found.parts]

    assert places() == [("new", "left"), ("new", "right"), ("old", "left")]
    assert places(rows=["old"]) == [("old", "left")]
    assert places(columns=["right", "large"]) == [("new", "right"), ("new", "large")]
    assert places(quantity="class_margin") == [("old", "right")]


# ----------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("claim", "values", "outcome"),
    [
        ({"at_least": 90}, [99.0, 98.0, 99.0], "holds"),
        ({"at_least": 90}, [99.0, 85.0, 92.0], "leans"),
        ({"at_least": 90}, [89.0, 85.0, 87.0], "fails"),
        ({"at_least": 90}, [99.0], "leans"),
        ({"at_least": 90}, [99.0, 99.0], "leans"),
        ({"at_most": 90}, [80.0, 81.0, 80.0], "holds"),
        ({"at_most": 90}, [80.0, 99.0, 81.0], "leans"),
        ({"at_most": 90}, [99.0, 98.0, 99.0], "fails"),
        ({"at_most": 90}, [], "open"),
        # It is claimed that it goes wrong; what diverged did.
        ({"at_least": 90}, [None, None, None], "leans"),
        ({"at_least": 90}, [99.0, 98.0, 99.0, None], "leans"),
        ({"at_least": 90}, [20.0, None], "fails"),
        ({"at_most": 90}, [80.0, 81.0, None], "fails"),
    ],
)
def test_a_bound_is_kept_by_the_whole_interval(claim, values, outcome):
    claim = {**claim, "rows": ["new"], "columns": ["left"]}
    assert verdict_of(claim, ledger_of({"new": values})).outcome == outcome


@pytest.mark.parametrize(
    ("claim", "outcome"),
    [
        ({"quantity": "accuracy", "at_most": 5}, "leans"),
        ({"quantity": "accuracy", "at_least": 5}, "fails"),
        ({"quantity": "bias", "at_most": 5}, "fails"),
        ({"quantity": "bias", "at_least": 5}, "fails"),
    ],
)
def test_divergence_supports_only_a_bound_that_predicts_failure(claim, outcome):
    claim = {**claim, "rows": ["new"], "columns": ["left"]}
    assert verdict_of(claim, ledger_of({"new": [None]})).outcome == outcome


# ----------------------------------------------------------------------------------------- courses


def courses(*curves, name="train.bias"):
    cells = [
        entry("new", "left", seed, {}, curves={"epoch": [1, 2, 3], name: curve})
        for seed, curve in enumerate(curves)
    ]
    return Ledger("small", cells=cells)


FALLS = [5.0, 4.0, 3.0, 2.0, 1.0]
RETURNS = [5.0, 2.0, 1.0, 2.0, 3.0]


def course(way, *curves):
    claim = {"curve": "train.bias", way: ["new"], "columns": ["left"]}
    return verdict_of(claim, courses(*curves)).outcome


@pytest.mark.parametrize(
    ("curve", "way"),
    [
        (FALLS, "falls"),
        (RETURNS, "falls_then_rises"),
        # Up by less than a twentieth of the fall is no rise.
        ([5.0, 3.0, 1.0, 1.1, 1.19], "falls"),
        ([5.0, 3.0, 1.0, 1.1, 1.21], "falls_then_rises"),
        # Lowest in the last tenth is at the end.
        ([30.0 - n for n in range(19)] + [11.0, 25.0], "falls"),
        ([30.0 - n for n in range(18)] + [25.0, 25.0, 25.0], "falls_then_rises"),
        ([5.0, None, 3.0, None, 1.0], "falls"),
        ([1.0, 2.0, 3.0], None),
        ([2.0, 2.0, 2.0], None),
    ],
)
def test_a_curve_goes_one_way(curve, way):
    for each in ("falls", "falls_then_rises"):
        assert course(each, curve, curve) == ("holds" if each == way else "fails")


def test_a_course_holds_where_all_of_several_seeds_go_that_way():
    assert course("falls", FALLS) == "leans"
    assert course("falls", FALLS, FALLS) == "holds"
    assert course("falls", FALLS, RETURNS, FALLS) == "fails"
    assert course("falls") == "open"


def test_a_curve_that_is_not_kept_or_too_short_is_open():
    assert course("falls", FALLS, [3.0, None, 1.0]) == "open"
    claim = {"curve": "test.bias", "falls": ["new"], "columns": ["left"]}
    assert verdict_of(claim, courses(FALLS, FALLS)).outcome == "open"


def test_a_seed_that_diverged_did_not_go_that_way():
    ledger = courses(FALLS, FALLS)
    ledger.put(stop("new", "left", 2))
    claim = {"curve": "train.bias", "falls": ["new"], "columns": ["left"]}
    assert verdict_of(claim, ledger).outcome == "fails"


# --------------------------------------------------------------------------------------- sentences


def test_a_comparison_says_how_much_of_what_against_whom_and_what_was_asked():
    ledger = ledger_of({"new": [28.0, 27.9, 27.8], "old": [30.0, 30.0, 30.0]})
    assert verdict_of(better(by=1), ledger).sentence == (
        "New: error -2.10 points (95 % interval -2.35 to -1.85) against Old, -1.00 points claimed"
    )
    assert verdict_of(better(), ledger_of({"new": [28.0], "old": [30.0]})).sentence == (
        "New: error -2.00 points (one seed) against Old"
    )
    ledger = ledger_of({"new": [62.0], "old": [60.0]}, "class_margin")
    assert verdict_of(better(quantity="class_margin", by=1), ledger).sentence == (
        "New: class margin +2.00° (one seed) against Old, +1.00° claimed"
    )
    ledger = ledger_of({"new": [0.5], "old": [0.25]}, "sample_margin")
    assert verdict_of(better(quantity="sample_margin"), ledger).sentence == (
        "New: sample margin +0.250 (one seed) against Old"
    )
    assert verdict_of(better(), Ledger("small")).sentence == "New and Old: open"


def test_the_other_kinds_say_what_is_claimed():
    ledger = ledger_of({"new": [29.5]})
    assert verdict_of(NEAR, ledger, **PAPER).sentence == (
        "New: +0.50 points (one seed) against 29.00, 0.50 points allowed"
    )
    assert verdict_of(NEAR, Ledger("small"), **PAPER).sentence == "New: open"
    bound = {"rows": ["new"], "columns": ["left"]}
    assert verdict_of({**bound, "at_least": 20}, ledger).sentence == (
        "New: 29.50 points, at least 20.00 points claimed"
    )
    assert verdict_of({**bound, "at_most": 20}, ledger).sentence == (
        "New: 29.50 points, at most 20.00 points claimed"
    )
    claim = {"curve": "train.bias", "falls_then_rises": ["new"], "columns": ["left"]}
    assert verdict_of(claim, courses(RETURNS, FALLS)).sentence == (
        "New: falls and then rises with 1 of 2 seeds"
    )


def test_several_comparisons_are_counted_and_the_worst_is_told():
    claim = {"better": "new", "than": "old"}
    assert verdict_of(claim, both(2, 2)).sentence == "of 2 comparisons: 2 holds"
    assert verdict_of(claim, both(2, -2)).sentence == (
        "of 2 comparisons: 1 holds, 1 fails; New: error +1.95 points "
        "(95 % interval +1.31 to +2.59) against Old (right)"
    )
    # Where it leans for what is missing, there is no example to tell.
    assert verdict_of(claim, both(2, None)).sentence == "of 2 comparisons: 1 holds, 1 open"
    assert verdict_of(claim, both(None, None)).sentence == "of 2 comparisons: 2 open"


def test_claims_are_judged_in_their_order():
    recipe = recipe_of(better(by=1), {"at_most": 9, "rows": ["new"], "columns": ["left"]})
    found = judge(recipe, ledger_of({"new": [28.0, 27.9, 27.8], "old": [30.0] * 3}))
    assert [verdict.claim for verdict in found] == list(recipe.claims)
    assert [verdict.outcome for verdict in found] == ["holds", "fails"]
