"""What is said of groups of runs: means, deviations, paired differences, and what is not said."""

import json
import math

import pytest
from records import make_run, make_study

from tammes.lab.records.run_folder import RecordError, Run
from tammes.lab.stats.paired import difference, summary, t_quantile
from tammes.lab.stats.seed_groups import as_json, study, table


def accuracies(root, by_loss, **how):
    """Runs with given accuracies, by loss and seed."""
    return [
        make_run(
            root / f"{place}-{seed}", loss=loss, seed=seed, accuracy=value, pictures=False, **how
        )
        for place, (loss, values) in enumerate(by_loss.items())
        for seed, value in values.items()
    ]


def test_the_quantiles_of_student_are_those_in_the_tables():
    # Fisher and Yates, two-sided 5 %.
    for degrees, expected in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228)):
        assert t_quantile(degrees) == pytest.approx(expected, abs=5e-4)


def within(t, degrees):
    """P(|T| <= t) as a finite sum: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(1 + odd, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * power / (power + 1)
    return (2 / math.pi * (angle + math.sin(angle) * total)) if odd else math.sin(angle) * total


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 29, 30, 200])
def test_quantiles_of_student_invert_the_distribution(degrees, confidence):
    assert within(t_quantile(degrees, confidence), degrees) == pytest.approx(confidence, rel=1e-12)


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_a_quantile_that_is_not_there_is_refused(degrees, confidence):
    with pytest.raises(ValueError, match=f"at least 1 degree.*got {degrees} and {confidence}"):
        t_quantile(degrees, confidence)


def test_mean_and_deviation_by_hand():
    found = summary([1.0, 2.0, 6.0])
    # Squares of -2, -1 and 3 are 14, over n - 1 = 2.
    assert (found.count, found.mean, found.std) == (3, 3.0, pytest.approx(math.sqrt(7)))
    assert found.half == pytest.approx(4.30265273 * math.sqrt(7) / math.sqrt(3))


def test_a_single_value_has_no_deviation_and_no_value_no_mean():
    assert summary([5.0]).std is None
    assert summary([5.0]).half is None
    assert summary([]) is None


def test_a_paired_difference_by_hand():
    found = difference({0: 5.0, 1: 7.0, 2: 9.0}, {0: 4.0, 1: 5.0, 2: 6.0})
    # Differences 1, 2, 3: mean 2, deviation 1, t(2) = 4.3027.
    assert found.mean == 2.0
    half = 4.30265273 / math.sqrt(3)
    assert found.interval == pytest.approx((2 - half, 2 + half))
    assert not found.clear


def test_a_paired_difference_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats", reason="compared with scipy")
    one = {seed: value for seed, value in enumerate([97.1, 97.4, 96.8, 97.9, 97.2])}
    two = {seed: value for seed, value in enumerate([96.6, 97.0, 96.7, 97.1, 96.9])}
    found = difference(one, two)
    expected = stats.ttest_rel(list(one.values()), list(two.values())).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.clear


def test_only_common_seeds_are_paired():
    found = difference({0: 1.0, 1: 3.0, 5: 100.0}, {1: 2.0, 0: 0.5, 9: -100.0})
    assert found.seeds == (0, 1)
    assert found.mean == 0.75
    assert difference({0: 1.0}, {1: 1.0}) is None


def test_nothing_is_clear_from_one_seed():
    found = difference({3: 99.0}, {3: 1.0})
    assert (found.mean, found.interval, found.clear) == (98.0, None, False)


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_differences_without_any_spread_are_not_clear(step):
    found = difference({0: 1.0 + step, 1: 2.0 + step}, {0: 1.0, 1: 2.0})
    assert found.interval == (step, step)
    assert not found.clear


def test_rounding_is_no_spread():
    one, two = {0: 0.95, 1: 0.87}, {0: 0.92, 1: 0.84}
    assert one[0] - two[0] != one[1] - two[1]
    assert not difference(one, two).clear


def test_runs_that_differ_only_in_their_seed_are_a_group(tmp_path):
    groups = study(make_study(tmp_path, seeds=2)).groups
    assert [group.label for group in groups] == [
        "softmax()",
        "cosface(margin=0.2)",
        "lm_softmax()",
    ]
    assert [list(group.runs) for group in groups] == [[0, 1]] * 3


def test_how_a_run_is_carried_out_makes_no_group(tmp_path):
    runs = [make_run(tmp_path / str(n), seed=n, workers=n, pictures=False) for n in range(3)]
    assert len(study(runs).groups) == 1


def test_groups_of_the_same_label_are_told_apart_by_what_differs(tmp_path):
    runs = [
        make_run(tmp_path / "a", lr=0.1, pictures=False),
        make_run(tmp_path / "b", lr=0.01, optimizer="adam", pictures=False),
        make_run(tmp_path / "c", name="mine", lr=0.1, pictures=False),
    ]
    labels = [group.label for group in study(runs).groups]
    assert labels == [
        "softmax() [optimizer=sgd, lr=0.1]",
        "softmax() [optimizer=adam, lr=0.01]",
        "mine",
    ]


def test_a_group_has_mean_and_deviation_over_its_seeds(tmp_path):
    runs = accuracies(tmp_path, {"softmax()": {0: 0.90, 1: 0.92, 2: 0.97}})
    (group,) = study(runs).groups
    found = group.summary("accuracy")
    assert found.mean == pytest.approx(93.0)
    assert found.std == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert group.summary("bias").mean == pytest.approx(0.7)


def test_time_is_that_of_all_epochs_where_the_record_does_not_say(tmp_path):
    run = make_run(tmp_path, epochs=4, pictures=False)
    final = json.loads((tmp_path / "final.json").read_text())
    del final["seconds"]
    (tmp_path / "final.json").write_text(json.dumps(final))
    (group,) = study([run]).groups
    assert group.summary("seconds").mean == 4 * 1.5


def test_a_seed_that_is_there_twice_counts_once(tmp_path):
    runs = [
        make_run(tmp_path / "a", accuracy=0.5, pictures=False),
        make_run(tmp_path / "b", accuracy=0.9, pictures=False),
    ]
    found = study(runs)
    assert found.groups[0].values["accuracy"] == {0: 50.0}
    (trouble,) = found.troubles
    assert (trouble.state, trouble.run) == ("left out", runs[1])
    assert str(tmp_path / "a") in trouble.reason


def test_runs_without_a_result_are_named_with_their_reason(tmp_path):
    runs = [
        make_run(tmp_path / "a", seed=0, pictures=False),
        make_run(tmp_path / "b", seed=1, state="failed"),
        make_run(tmp_path / "c", seed=2, state="unfinished", epochs=6),
    ]
    found = study(runs)
    assert list(found.groups[0].runs) == [0]
    assert [(each.seed, each.state, each.reason) for each in found.troubles] == [
        (1, "failed", "not finite: the loss is nan"),
        (2, "unfinished", "stopped after epoch 5 of 6, and can be resumed"),
    ]


def test_a_run_that_has_just_started_has_no_epoch(tmp_path):
    run = make_run(tmp_path, state="unfinished")
    (tmp_path / "metrics.jsonl").unlink()
    (trouble,) = study([run]).troubles
    assert trouble.reason == "no epoch is finished yet"


@pytest.mark.parametrize("name", ["config.json", "final.json"])
def test_a_damaged_run_is_named_and_the_rest_is_counted(tmp_path, name):
    good = make_run(tmp_path / "good", seed=0, pictures=False)
    make_run(tmp_path / "bad", seed=1, pictures=False)
    (tmp_path / "bad" / name).write_text('{"half": ')
    found = study([good, Run(tmp_path / "bad")])
    assert list(found.groups[0].runs) == [0]
    (trouble,) = found.troubles
    assert trouble.state == "damaged"
    assert str(tmp_path / "bad" / name) in trouble.reason


def test_a_result_without_accuracy_is_damaged(tmp_path):
    run = make_run(tmp_path, pictures=False)
    (tmp_path / "final.json").write_text('{"test": {"accuracy": NaN}}')
    (trouble,) = study([run]).troubles
    assert trouble.reason == f"{tmp_path / 'final.json'}: damaged (it has no test accuracy)"


def test_the_baseline_is_the_first_group_or_the_one_asked_for(tmp_path):
    runs = make_study(tmp_path, seeds=1)
    assert study(runs).groups[0].label == "softmax()"
    chosen = study(runs, "lm_softmax")
    labels = [group.label for group in chosen.groups]
    assert labels == ["lm_softmax()", "softmax()", "cosface(margin=0.2)"]


def test_a_baseline_is_found_without_the_settings_that_tell_groups_apart(tmp_path):
    runs = [
        *accuracies(tmp_path / "a", {"softmax()": {0: 0.5}}, data="mnist"),
        *accuracies(tmp_path / "b", {"cosface()": {0: 0.8}}, data="birds"),
        *accuracies(tmp_path / "c", {"softmax()": {0: 0.9}}, data="birds"),
    ]
    assert study(runs, "cosface").groups[0].label == "cosface() [data=birds]"
    assert study(runs, "softmax() [data=birds]").groups[0].config.data == "birds"
    with pytest.raises(RecordError, match="no group of runs is called 'softmax'"):
        study(runs, "softmax")


def test_an_unknown_baseline_is_refused_with_a_near_one(tmp_path):
    runs = make_study(tmp_path, seeds=1)
    with pytest.raises(RecordError, match=r"'lm_sofmax\(\)'; did you mean lm_softmax\(\)\?"):
        study(runs, "lm_sofmax()")
    with pytest.raises(RecordError, match=r"'xyz'; there are .*softmax\(\)"):
        study(runs, "xyz")


def test_one_seed_claims_no_winner(tmp_path):
    runs = accuracies(tmp_path, {"softmax()": {0: 0.5}, "cosface()": {0: 0.99}})
    text = table(runs)
    assert "One seed: no interval and no winner for n = 1." in text
    assert "+49.00" in text
    assert "*" not in text.replace("* excludes 0", "")


def test_a_clear_difference_is_marked_and_an_unclear_one_is_not(tmp_path):
    runs = accuracies(
        tmp_path,
        {
            "softmax()": {0: 0.90, 1: 0.91, 2: 0.92},
            "cosface()": {0: 0.95, 1: 0.9605, 2: 0.97},
            "arcface()": {0: 0.95, 1: 0.85, 2: 0.92},
        },
    )
    _, _, below = table(runs).partition("difference from softmax()")
    lines = {line.split()[0]: line for line in below.splitlines() if line.strip()}
    assert "+5.02 [+4.94, +5.09]*" in lines["cosface()"]
    assert "-0.33 [" in lines["arcface()"]
    assert "-0.33*" not in lines["arcface()"]


def test_many_comparisons_come_with_a_warning(tmp_path):
    losses = [f"cosface(margin=0.{n})" for n in range(1, 5)]
    found = study(make_study(tmp_path, seeds=2, losses=losses, pictures=False))
    assert any("one interval in twenty" in remark for remark in found.remarks())


def test_groups_without_a_common_seed_are_not_compared(tmp_path):
    runs = accuracies(tmp_path, {"softmax()": {0: 0.5}, "cosface()": {1: 0.9}})
    found = study(runs)
    assert found.difference(found.groups[1], "accuracy") is None
    assert found.remarks() == ["Groups without a common seed are not compared."]


def test_groups_tested_on_different_images_are_told_apart_and_not_compared(tmp_path):
    quick = {"limit": 500}
    runs = [
        *accuracies(tmp_path / "a", {"softmax()": {0: 0.5, 1: 0.51}}, data="mnist", **quick),
        *accuracies(tmp_path / "b", {"cosface()": {0: 0.8, 1: 0.82}}, data="mnist", **quick),
        *accuracies(tmp_path / "c", {"arcface()": {0: 0.9, 1: 0.92}}, data="birds", **quick),
    ]
    found = study(runs)
    labels = ["softmax() [data=mnist]", "cosface() [data=mnist]", "arcface() [data=birds]"]
    assert [group.label for group in found.groups] == labels
    assert found.difference(found.groups[1], "accuracy") is not None
    assert found.difference(found.groups[2], "accuracy") is None
    assert found.remarks() == ["Groups tested on different images are not compared."]


def test_images_under_another_path_are_known_by_their_digest(tmp_path):
    runs = [
        *accuracies(tmp_path / "a", {"softmax()": {0: 0.5}}, data="pictures"),
        *accuracies(tmp_path / "b", {"cosface()": {0: 0.8}}, data="/home/me/pictures"),
    ]
    for run in runs:
        set_test_digest(run, "89abcdef")
    found = study(runs)
    assert found.difference(found.groups[1], "accuracy") is not None
    assert found.comparable


def set_test_digest(run, digest):
    path = run.folder / "data.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "test_digest": digest}))


@pytest.mark.parametrize(
    ("digests", "same"),
    [
        (("one", "two", "three", "four"), False),
        (("one", "two", "one", "four"), False),
        (("one", "two", "three", "two"), False),
        # A limit draws the images by seed.
        (("one", "two", "one", "two"), True),
        ((None, "two", "three", "two"), True),
    ],
)
def test_images_that_may_have_changed_under_a_path_are_known_by_their_digest(
    tmp_path, digests, same
):
    runs = accuracies(tmp_path, {"softmax()": {0: 0.5, 1: 0.51}, "cosface()": {0: 0.8, 1: 0.82}})
    for run, digest in zip(runs, digests, strict=True):
        set_test_digest(run, digest)
    found = study(runs)
    assert found.comparable == same
    assert (found.difference(found.groups[1], "accuracy") is not None) == same


def test_an_unfinished_run_on_other_images_does_not_stop_the_comparison(tmp_path):
    runs = accuracies(tmp_path, {"softmax()": {0: 0.5}, "cosface()": {0: 0.8}}, data="mnist")
    runs += accuracies(tmp_path / "b", {"nca()": {0: 0.1}}, data="birds", state="failed")
    assert study(runs).comparable


def test_groups_with_the_same_test_images_and_other_training_images_are_compared(tmp_path):
    runs = [
        *accuracies(tmp_path / "a", {"softmax()": {0: 0.5}}, data="few.csv", test="test.csv"),
        *accuracies(tmp_path / "b", {"cosface()": {0: 0.8}}, data="all.csv", test="test.csv"),
    ]
    found = study(runs)
    assert [group.label for group in found.groups] == [
        "softmax() [data=few.csv]",
        "cosface() [data=all.csv]",
    ]
    assert found.difference(found.groups[1], "accuracy") is not None


def test_the_table_fits_the_terminal_and_shows_every_number(tmp_path):
    losses = (
        "softmax()",
        "arcface(margin=0.5) + 0.25*sample_margin() + 0.1*zero_centroid()",
        "gm_softmax(alpha=0.4, beta=0.3)",
    )
    runs = make_study(tmp_path, losses=losses, seeds=3)
    runs.append(make_run(tmp_path / "x", seed=9, loss="softmax()", state="failed",
                         failure={"kind": "error", "message": "word " * 60}))  # fmt: skip
    text = table(runs)
    assert max(map(len, text.splitlines())) <= 100
    for loss in losses:
        assert text.count(loss) == 2 or loss == "softmax()"
    shown = study(runs).quantities
    assert [q.key for q in shown] == [
        "accuracy",
        "class_margin",
        "sample_margin",
        "bias",
        "seconds",
    ]
    for quantity in shown:
        assert quantity.heading in text
    assert "90.80 ± 0.80" in text
    assert "softmax(), seed 9: failed: error: word" in text


def test_a_single_group_has_a_table_without_differences(tmp_path):
    text = table([make_run(tmp_path, accuracy=0.9, pictures=False)])
    assert "90.00" in text
    assert "±" not in text.splitlines()[1]
    assert "less" not in text


def test_only_stopped_runs_give_a_table_of_reasons(tmp_path):
    text = table([make_run(tmp_path, state="failed")])
    assert text.splitlines()[-1].strip() == "softmax(), seed 0: failed: not finite: the loss is nan"


def test_what_the_table_shows_is_there_as_plain_values(tmp_path):
    runs = make_study(tmp_path, seeds=3)
    runs.append(make_run(tmp_path / "x", seed=7, state="failed"))
    found = json.loads(json.dumps(as_json(runs), allow_nan=False))
    assert found["baseline"] == "softmax()"
    first, second, _ = found["groups"]
    assert first["quantities"]["accuracy"]["seeds"] == {
        "0": 90.0,
        "1": pytest.approx(90.8),
        "2": pytest.approx(91.6),
    }
    assert "difference" not in first["quantities"]["accuracy"]
    less = second["quantities"]["accuracy"]["difference"]
    assert less["seeds"] == [0, 1, 2]
    assert less["interval"][0] < less["mean"] < less["interval"][1]
    assert found["troubles"][0]["folder"] == str(tmp_path / "x")


def test_one_seed_has_no_interval_as_plain_values(tmp_path):
    found = as_json(make_study(tmp_path, seeds=1))
    less = found["groups"][1]["quantities"]["accuracy"]["difference"]
    assert less["interval"] is None
    assert less["clear"] is False
