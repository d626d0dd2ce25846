"""Verdicts of pages and commands; those on the ledgers agree with the claims as judged."""

import functools
from pathlib import Path

import ledgers
import pytest
import torch
from pages import EVIL, body, escaped, write_measure_page, write_reproduction_page, write_runs_page
from records import make_run, make_study

from tammes.lab.cli.main import main
from tammes.lab.fewshot.protocol import FewShotResult
from tammes.lab.recognition.results import Listing, Number, OperatingPoint, Recognition
from tammes.lab.records.run_folder import write_json
from tammes.lab.report.load_runs import load_runs
from tammes.lab.report.paper_comparison import PaperComparison
from tammes.lab.report.verdicts import (
    as_text,
    contenders_of,
    verdict_on_fewshot,
    verdict_on_recognition,
    verdict_on_reproduction,
    verdict_on_runs,
)
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.claims import Better
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.quantities import KNOWN
from tammes.lab.stats.verdict import standing, verdict

RESULTS = Path(__file__).parents[3] / "results"
NAMES = sorted(str(p.relative_to(RESULTS).with_suffix("")) for p in RESULTS.glob("*/*.json"))


# --------------------------------------------------------------------------------- ledgers


@functools.cache
def read(name):
    recipe = recipes.load(name)
    return PaperComparison(recipe, Ledger.at(RESULTS / f"{name}.json", recipe))


@pytest.fixture(params=NAMES)
def reproduced(request):
    return read(request.param)


def compared_pairs(comparison):
    """Parts of claims that one row is better than another, each with its quantity."""
    for judged in comparison.verdicts:
        if isinstance(judged.claim, Better) and judged.claim.by == 0:
            quantity = KNOWN[judged.claim.quantity]
            yield from ((part, quantity) for part in judged.parts if part.difference is not None)


def test_verdicts_on_two_rows_agree_with_the_claims_as_judged(reproduced):
    for part, quantity in compared_pairs(reproduced):
        titles = [reproduced.labels[row] for row in part.rows]
        two = [
            each
            for each in contenders_of(reproduced, part.column, quantity)
            if each.label in titles
        ]
        found = standing(two, quantity)
        winner = None if found is None or found.winner is None else found.winner.label
        assert (winner == titles[0]) == (part.outcome == "holds"), part.text
        sentence = verdict(two, quantity)[0]
        assert (f"{titles[0]} is ahead" in sentence) == (part.outcome == "holds"), part.text
        if part.outcome == "leans":
            assert winner is None


def test_whoever_is_ahead_of_all_is_not_behind_in_a_claim(reproduced):
    for part, quantity in compared_pairs(reproduced):
        found = standing([*contenders_of(reproduced, part.column, quantity)], quantity)
        if found is not None and found.winner is not None:
            worse = reproduced.labels[part.rows[1]]
            assert not (part.outcome == "holds" and found.winner.label == worse)
            behind = {each.label for each in found.behind}
            assert part.outcome != "holds" or reproduced.labels[part.rows[0]] in {
                found.winner.label,
                *behind,
            }


def test_some_claims_were_compared():
    outcomes = {part.outcome for name in NAMES for part, _ in compared_pairs(read(name))}
    assert outcomes >= {"holds", "leans", "fails"}


def test_the_first_sentence_counts_the_claims_as_judged(reproduced):
    first = verdict_on_reproduction(reproduced)[0]
    outcomes = [each.outcome for each in reproduced.verdicts]
    forms = {"holds": "hold", "leans": "lean", "fails": "fail", "open": "are open"}
    if len(outcomes) > 1:
        for outcome, several in forms.items():
            count = outcomes.count(outcome)
            if count > 1:
                assert f"{count} {several}" in first
            elif count == 1:
                assert f"1 {outcome.replace('open', 'is open')}" in first
            else:
                assert outcome not in first.split(" (“")[0]
    for judged in reproduced.verdicts:
        if judged.outcome == "fails":
            assert "(“" in first


def test_a_made_ledger_has_a_verdict():
    recipe, ledger = ledgers.several_seeds()
    sentences = verdict_on_reproduction(PaperComparison(recipe, ledger))
    assert sentences[0].startswith("Of 3 claims ")
    empty = PaperComparison(recipe, Ledger(recipe.name))
    assert verdict_on_reproduction(empty) == ["Nothing can be said yet: no cell was run."]
    quick = PaperComparison(recipe, Ledger(recipe.name, True))
    assert verdict_on_reproduction(quick) == ["Nothing can be concluded from the quick form."]


# ------------------------------------------------------------------------------------ runs


def test_the_verdict_on_runs_reads_their_records(tmp_path):
    runs = [
        make_run(tmp_path / f"{loss}{seed}", loss=loss, seed=seed, accuracy=accuracy)
        for loss, accuracies in (("softmax()", (0.8, 0.81)), ("cosface()", (0.9, 0.909)))
        for seed, accuracy in enumerate(accuracies)
    ]
    runs.append(make_run(tmp_path / "gone", loss="arcface()", state="failed"))
    finding = {"name": "scale-small", "severity": "warning", "change": "a scale of 30"}
    note = {"name": "few-examples", "severity": "note", "change": "more examples"}
    looks = [{"epoch": 0, "step": 0, "findings": [finding, note]}]
    write_json(runs[0].folder / "health.json", {"looks": looks})
    text = " ".join(verdict_on_runs(load_runs(runs)))
    assert "cosface() is ahead: accuracy 90.45 %, 9.95 points above softmax()" in text
    assert "Diverged: arcface() (1 of 1 seeds), which is not compared." in text
    assert "Still rising in the last third of training" in text
    assert text.endswith("The doctor warns of scale-small in softmax(): a scale of 30.")


def test_a_run_with_an_accuracy_of_guessing_did_not_learn(tmp_path):
    runs = [make_run(tmp_path / "one", accuracy=0.11)]
    assert "Did not learn: softmax() (11.00 %, chance is 10.00 %)." in " ".join(
        verdict_on_runs(load_runs(runs))
    )


def test_commands_print_the_verdict_before_the_page(tmp_path, capsys):
    make_study(tmp_path / "runs", seeds=2)
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("  verdict: ") < printed.index(f"  page: {out}")
    assert all(len(line) <= 100 for line in printed.splitlines() if "page:" not in line)
    assert as_text(["One.", "Two."]) == "  verdict: One. Two."


@pytest.mark.parametrize(
    "write",
    [write_runs_page, write_reproduction_page, write_measure_page],
    ids=lambda f: f.__name__,
)
def test_every_page_has_a_verdict_on_top(write, tmp_path):
    text = body(write(tmp_path).read_text())
    verdict_at = text.index('<p class="verdict">')
    assert text.index("<h1>") < verdict_at < text.index("<main>")
    inside = text[verdict_at:].split("</p>")[0]
    assert "<script" not in inside
    assert (escaped(EVIL) in inside) == (write is not write_measure_page)


# ------------------------------------------------------------------------------ evaluations


def recognised(low, high, **more):
    return Recognition(
        "verification",
        "a <run>",
        (),
        {"identities": 40},
        (),
        (Number("eer", "EER", 0.1, low, high),),
        Listing(("identity",), more.pop("failing", [])),
        **more,
    )


def test_a_wide_interval_asks_for_more_identities():
    assert verdict_on_recognition(recognised(0.05, 0.15)) == [
        "EER is 10.00 % (95 % interval 5.00 to 15.00 over 40 identities): about 1,000 identities "
        "would narrow that to ± 1 point."
    ]
    assert verdict_on_recognition(recognised(0.09, 0.11)) == [
        "EER is 10.00 % (95 % interval 9.00 to 11.00 over 40 identities)."
    ]
    assert verdict_on_recognition(recognised(None, None)) == [
        "EER is 10.00 %; without identities its certainty is not known."
    ]


def test_the_threshold_of_one_percent_is_quoted():
    def point(target, threshold):
        reached = Number("far", "FAR", target, None, None)
        return OperatingPoint(target, (threshold,), reached, Number("tar", "TAR", 0.9, None, None))

    points = (point(0.1, 0.3), point(0.01, 0.42), point(0.001, 0.6))
    found = verdict_on_recognition(
        recognised(0.09, 0.11, thresholds=points, failing=[("anna",), ("bo",)])
    )
    assert found[1:] == [
        "At FAR 1 % (accept from 0.42 on) TAR is 90.00 %.",
        "Identity anna fails most.",
    ]


def fewshot(method, mean, other=None, shot=1):
    # Accuracies alternate around their mean, so that paired differences have a small spread.
    noise = torch.tensor([0.1, -0.1] * 50)
    against = None if other is None else other + noise * 0.9
    return FewShotResult(method, shot, mean + noise, against)


def test_two_models_are_compared_over_episodes():
    rows = [fewshot("l2", 0.7, 0.6), fewshot("l2", 0.8, 0.75, shot=5)]
    first, second = verdict_on_fewshot(rows, "one", "two")
    assert first == "one is ahead of two in 2 of 2 settings, by 5.00 to 10.00 points."
    assert "another training" in second
    rows = [fewshot("l2", 0.5, 0.6)]
    assert verdict_on_fewshot(rows, "one", "two")[0] == "two is ahead of one, by 10.00 points."
    rows = [fewshot("l2", 0.6001, 0.6)]
    assert verdict_on_fewshot(rows, "one", "two")[0].startswith("It cannot be said whether one")


def test_methods_of_one_model_are_compared():
    rows = [fewshot("l2", 0.7), fewshot("centroid", 0.6)]
    rows[1].accuracies[0] += 0.1
    (text,) = verdict_on_fewshot(rows, "one", None)
    assert text == ("l2 has 70.00 ± 1.97 % with 1 shot, ahead of centroid (+9.90 ± 0.20 points).")
