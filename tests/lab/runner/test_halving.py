"""Successive halving finds the best of made accuracies, keeps what was given, and resumes."""

import json
import math
import runpy
from pathlib import Path

import pytest

from tammes.lab.cli import main
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run, write_json
from tammes.lab.report.pages.tuning_page import tuning_page
from tammes.lab.runner import halving
from tammes.lab.runner.halving import Setting, tune, with_setting

ROOT = Path(__file__).parents[3]
GIVEN = Setting(30.0, 0.35, 0.1)


def made(monkeypatch, accuracy, head="cosine(scale=30.0)"):
    """Replace training: a run has the accuracy of a function of its configuration."""
    trained = []

    def train_all(configs, folder, *, at, report):
        trained.append(configs)
        runs = []
        for each in configs:
            place = folder / each.folder
            place.mkdir()
            (place / "data.json").write_text(json.dumps({"validation": 400}))
            found = accuracy(each)
            if found is None:
                (place / "failure.json").write_text('{"kind": "not finite", "message": "NaN"}')
            else:
                (place / "final.json").write_text("{}")
                line = json.dumps({"validation": {"accuracy": found}})
                (place / "metrics.jsonl").write_text(line + "\n")
            runs.append(Run(place))
        return runs

    monkeypatch.setattr(halving, "train_all", train_all)
    monkeypatch.setattr(halving, "check", lambda configs, report: {configs[0].loss: head})
    return trained


def near(margin, scale, rate):
    """Accuracy that is largest at a setting, and grows with the epochs."""

    def accuracy(config):
        s = float(config.head.partition("scale=")[2].rstrip(")"))
        m = float(config.loss.partition("margin=")[2].rstrip(")"))
        off = abs(math.log(s / scale)) + abs(m - margin) + abs(math.log(config.lr / rate))
        return 0.9 - 0.05 * off - 0.1 / config.epochs

    return accuracy


@pytest.mark.parametrize("best", [GIVEN, Setting(15.0, 0.1, 0.03), Setting(60.0, 0.35, 0.1)])
def test_the_best_setting_is_found_in_rounds_of_a_third(monkeypatch, tmp_path, best):
    trained = made(monkeypatch, near(best.margin, best.scale, best.rate))
    found = tune(Config(loss="cosface(margin=0.35)", epochs=20), tmp_path)
    assert (found.given, found.best) == (GIVEN, best)
    assert [each.epochs for each in found.rounds] == [3, 7, 20]
    counts = [len(each.runs) for each in found.rounds]
    assert counts[0] == 12
    assert counts[1] in (4, 5)
    assert counts[2] in (2, 3)
    assert all(GIVEN in each.runs for each in found.rounds)
    assert found.cost <= 7
    # Held-out images choose, all with the same share, and none is held out at last.
    assert {config.validation for configs in trained for config in configs} == {0.1}
    assert found.final.validation == 0
    assert found.final.epochs == 20
    assert found.final.lr == best.rate
    assert found.final.head == f"cosine(scale={best.scale})"


def test_the_search_is_compared_with_its_whole_grid(monkeypatch, tmp_path):
    accuracy = near(0.1, 15, 0.03)
    made(monkeypatch, accuracy)
    found = tune(Config(loss="cosface(margin=0.35)", epochs=18, warmup=2), tmp_path)
    assert len(found.grid) == 12
    # What the search has trained for all epochs is not trained again.
    for setting, run in found.rounds[-1].runs.items():
        assert found.grid[setting].folder == run.folder.name
    runs = []
    for number, (setting, config) in enumerate(found.grid.items()):
        for seed in (0, 1):
            folder = tmp_path / f"{number} {seed}"
            folder.mkdir()
            if setting.scale != 60:
                test = accuracy(config) + 0.01 * seed
                write_json(folder / "final.json", {"test": {"accuracy": test}})
            runs.append(Run(folder))
    script = runpy.run_path(str(ROOT / "results" / "tune_h200.py"))
    compared = script["compared"]
    result = compared(found, runs, 2)
    assert result["found"] == result["best"] == "scale 15, margin 0.1, lr 0.03"
    assert (result["points_behind"], result["holds"]) == (0, True)
    assert result["share_of_the_cost"] == pytest.approx(found.cost / 24)
    assert result["share_of_one_seed"] == pytest.approx(found.cost / 12)
    assert result["test_accuracy"]["scale 60, margin 0.1, lr 0.1"] is None
    for run in runs[:2]:
        write_json(run.folder / "final.json", {"test": {"accuracy": 1.0}})
    worse = compared(found, [Run(run.folder) for run in runs], 2)
    assert worse["best"] == str(GIVEN)
    assert worse["points_behind"] > 0.5
    assert worse["holds"] is False
    about = {"device": "a GPU", "torch": "2", "tammes": "0", "commit": "c", "threads": 1}
    write_json(runs[0].folder / "environment.json", about)
    replaced = {
        "tune": lambda *given, **options: found,
        "train_all": lambda *given, **options: runs,
    }
    script["main"].__globals__.update(replaced)
    record = tmp_path / "record.json"
    assert script["main"](["--data", "digits", "--record", str(record)]) == 0
    written = json.loads(record.read_text())
    assert (written["found"], written["machine"]["device"]) == (result["found"], "a GPU")


def test_short_rounds_have_their_whole_schedule(monkeypatch, tmp_path):
    trained = made(monkeypatch, near(0.35, 30, 0.1))
    config = Config(loss="cosface()", epochs=90, warmup=9, lr_schedule="steps([45], 0.1)")
    tune(config.replace(loss="cosface(margin=0.35)"), tmp_path)
    first = trained[0][0]
    assert (first.epochs, first.warmup, first.lr_schedule) == (10, 1.0, "steps([5.0], 0.1)")


def test_settings_that_diverge_are_dropped_and_the_given_one_may_be_among_them(
    monkeypatch, tmp_path
):
    def accuracy(config):
        return None if "scale=30" in config.head else near(0.35, 30, 0.1)(config)

    made(monkeypatch, accuracy)
    found = tune(Config(loss="cosface(margin=0.35)", epochs=9), tmp_path)
    assert found.best.scale != 30
    assert GIVEN not in found.rounds[1].runs
    assert "the given setting did not train" in found.sentences()[0]
    assert "did not train" in tuning_page(found, command="tammes tune")


def test_nothing_that_trains_is_said_with_the_reason(monkeypatch, tmp_path):
    made(monkeypatch, lambda config: None)
    with pytest.raises(ValueError, match="no setting trained 1 epoch: NaN"):
        tune(Config(loss="cosface(margin=0.35)", epochs=9), tmp_path)


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (0.0, "Keep scale 30, margin 0.35, lr 0.1: 90.00 % of 400 held-out images (± 1.50)"),
        (0.01, "1.00 points above the given setting. That is less than a standard error"),
        (0.05, "Take scale 60, margin 0.35, lr 0.1: 95.00 % of 400 held-out images (± 1.09), "
               "5.00 points above the given setting."),
        (0.1, "Take scale 60, margin 0.35, lr 0.1: 100.00 % of 400 held-out images (± 0.25), "
              "10.00 points above the given setting."),
    ],
)  # fmt: skip
def test_the_answer_says_how_certain_it_is(monkeypatch, tmp_path, gain, words):
    def accuracy(config):
        if "scale=60" in config.head and "0.35" in config.loss and config.lr == 0.1:
            return 0.9 + gain if gain else 0.5
        return 0.9 if "scale=30" in config.head and "0.35" in config.loss else 0.5

    made(monkeypatch, accuracy)
    found = tune(Config(loss="cosface(margin=0.35)", epochs=9), tmp_path)
    sentence = found.sentences()[0]
    assert words in sentence
    assert ("cannot be told apart" in sentence) is (gain == 0.01)
    page = tuning_page(found, command="tammes tune")
    assert "±" in page
    assert f'<p class="verdict"><strong>{sentence}' in page
    assert "Tuning of cosface(margin=0.35) on digits" in page
    # Settings that were dropped leave their later rounds empty, and the column one of numbers.
    assert page.count('<th class="number">') == len(found.rounds)


def test_only_what_the_loss_and_the_head_have_is_tuned(monkeypatch, tmp_path):
    trained = made(monkeypatch, lambda config: 0.5 + config.lr, head="linear(bias=True, scale=1.0)")
    found = tune(Config(loss="softmax()", epochs=9), tmp_path / "raw", rates=[0.05, 0.2])
    assert found.best == Setting(None, None, 0.2)
    assert len(trained[0]) == 3
    assert {config.head for config in trained[0]} == {"auto"}
    with pytest.raises(ValueError, match="expects no margins for softmax"):
        tune(Config(loss="softmax()", epochs=9), tmp_path / "other", margins=[0.1])
    with pytest.raises(ValueError, match="held-out images of trained classes, got identities"):
        tune(Config(identities=True), tmp_path / "third")


def test_a_scheduled_margin_is_left_alone(monkeypatch, tmp_path):
    trained = made(monkeypatch, lambda config: 0.5)
    schedules = "margin=WarmUp(0, 0.35, epochs=9)"
    found = tune(Config(loss="cosface()", schedules=schedules, epochs=9), tmp_path)
    assert found.given.margin is None
    assert {config.loss for config in trained[0]} == {"cosface()"}
    assert "epochs=1.0" in trained[0][0].schedules


@pytest.mark.parametrize(
    ("loss", "term", "name", "expected"),
    [
        ("cosface", "cosface", "margin", "cosface(margin=0.1)"),
        ("cosface(0.3)", "cosface", "margin", "cosface(0.1)"),
        ("ldam([5, 1], max_margin=0.5)", "ldam", "max_margin", "ldam([5, 1], max_margin=0.1)"),
        ("direct_sum(arcface(margin=0.5), nca)", "arcface", "margin",
         "direct_sum(arcface(margin=0.1), nca)"),
        ("normface + 2*cosface(margin=0.2)", "cosface", "margin",
         "normface + 2 * cosface(margin=0.1)"),
    ],
)  # fmt: skip
def test_a_setting_is_replaced_within_an_expression(loss, term, name, expected):
    assert with_setting(loss, term, name, 0.1) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--scales", "16,many"], "numbers separated by commas are expected"),
        (["--parallel", "0"], "workers is expected to be at least 1, got 0"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_a_sentence(capsys, words, sentence):
    assert main(["tune", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_on_digits_ends_with_a_command_and_resumes(tmp_path, capsys):
    words = ["tune", "--data", "digits", "--epochs", "2", "--limit", "150", "--out", str(tmp_path)]
    words += ["--backbone", "mnist_cnn(width=0.125)", "--scales", "16,30", "--margins", "0.2"]
    words += ["--rates", "0.1"]
    for repeated in (False, True):
        assert main(words) == 0
        said = capsys.readouterr()
        assert "train with it: tammes train" in said.out
        assert ("3 of them already finished" in said.err) is repeated
    assert "held-out images" in (tmp_path / "tuning.html").read_text()
