"""A run is looked at before the first step, after the first epochs and at the end."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from lab_runs import SAME
from messages import pattern

import tammes
from tammes.lab import backbones
from tammes.lab.cli.main import main
from tammes.lab.config.schema import Config
from tammes.lab.data import load
from tammes.lab.records.run_folder import RecordError, Run, write_json
from tammes.lab.report.pages.runs_page import runs_page
from tammes.lab.training.health import HealthLooks, diagnose_run
from tammes.lab.training.loop import TrainingError, train
from tammes.lab.training.lr_schedules import learning_rate
from tammes.lab.training.progress import Progress

SMALL = Config(
    data="digits",
    limit=300,
    loss="cosface()",
    backbone="mnist_cnn(width=0.5)",
    augment="pad_crop(1)",
    batch_size=64,
    epochs=4,
)
NEGATIVE = SMALL.replace(loss="cosface(margin=-0.3)", head="cosine(scale=30)", epochs=2)
OLD = Path(__file__).parents[2] / "fixtures" / "before_the_map" / "finished"


class Said(Progress):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return train(SMALL, tmp_path_factory.mktemp("runs") / "healthy")


@pytest.fixture(scope="module")
def ill(tmp_path_factory):
    said = Said()
    run = train(NEGATIVE, tmp_path_factory.mktemp("runs") / "ill", progress=said)
    return run, said.lines


def names(look):
    return [finding["name"] for finding in look["findings"]]


def test_a_healthy_run_is_looked_at_and_has_no_findings(healthy):
    steps = healthy.metrics[0]["step"]
    assert [(look["epoch"], look["step"]) for look in healthy.health] == [
        (0, 0),
        (1, steps),
        (2, 2 * steps),
        (4, 4 * steps),
    ]
    assert all(look["healthy"] and not look["findings"] for look in healthy.health)
    losses = [look["measured"]["loss"] for look in healthy.health]
    assert losses == sorted(losses, reverse=True)
    first, *later = healthy.health[0]["measured"]["trial"]
    assert first == pytest.approx(losses[0], rel=1e-5)
    assert max(later) < first


def test_looking_changes_no_bit_of_a_run(healthy, tmp_path, monkeypatch):
    monkeypatch.setattr(HealthLooks, "look", lambda *_: None)
    alone = train(SMALL, tmp_path)
    assert not alone.health
    for name in SAME:
        assert (alone.folder / name).read_bytes() == (healthy.folder / name).read_bytes(), name


def test_the_duration_of_every_look_is_recorded_beside_the_looks(healthy):
    assert [*healthy.look_seconds] == ["0", "1", "2", "4"]
    assert all(seconds > 0 for seconds in healthy.look_seconds.values())
    assert Run(OLD).look_seconds == {}


def test_a_look_does_not_let_cudnn_time_its_algorithms(tmp_path, monkeypatch):
    seen, batch = [], HealthLooks._batch

    def spy(self, rows):
        seen.append(torch.backends.cudnn.benchmark)
        return batch(self, rows)

    monkeypatch.setattr(HealthLooks, "_batch", spy)
    # On a GPU it is on in training.
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    train(SMALL.replace(epochs=1), tmp_path)
    assert seen == [False] * 3
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize("stop_at", [3, 5, 7, 10])
def test_an_interrupted_run_has_the_same_looks(healthy, tmp_path, stop_at):
    class Stop(Progress):
        steps = 0

        def step(self, **_):
            self.steps += 1
            if self.steps == stop_at:
                raise KeyboardInterrupt

    config = SMALL.replace(save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, progress=Stop())
    resumed = train(config, tmp_path)
    assert resumed.health == healthy.health
    assert resumed.look_seconds.keys() == healthy.look_seconds.keys()


def test_a_look_that_was_due_at_the_checkpoint_is_caught_up_on(healthy, tmp_path, monkeypatch):
    look = HealthLooks.look

    def stop(self, epoch, *rest):
        if epoch == 2:
            raise KeyboardInterrupt
        look(self, epoch, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(HealthLooks, "look", stop)
        with pytest.raises(KeyboardInterrupt):
            train(SMALL, tmp_path)
    assert [each["epoch"] for each in Run(tmp_path).health] == [0, 1]
    assert train(SMALL, tmp_path).health == healthy.health


def test_a_finding_is_said_once_and_recorded_at_every_look(ill):
    run, said = ill
    assert all("negative-margin" in names(look) for look in run.health)
    lines = [line for line in said if "negative-margin" in line]
    assert len(lines) == 1
    assert lines[0].startswith("doctor, before the first step: negative-margin: ")


def test_muting_leaves_a_finding_out_and_the_digest_as_it_is(ill, tmp_path):
    run, _ = ill
    muted = NEGATIVE.replace(mute="negative-margin, saturated")
    assert muted.digest == NEGATIVE.digest
    quiet = train(muted, tmp_path)
    assert not any("negative-margin" in names(look) for look in quiet.health)
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (quiet.folder / name).read_bytes() == (run.folder / name).read_bytes()


def test_names_to_mute_must_exist(tmp_path):
    with pytest.raises(ValueError, match=pattern("mute expects names among ... got 'colapse'")):
        train(SMALL.replace(mute="colapse"), tmp_path)


# ----------------------------------------------------------------------- the command, the page


def test_the_doctor_says_that_a_run_is_healthy(healthy, capsys):
    assert main(["doctor", str(healthy.folder)]) == 0
    assert capsys.readouterr().out == f"{healthy.folder}: healthy (done)\n"


def test_the_doctor_names_what_is_wrong(ill, capsys):
    run, _ = ill
    assert main(["doctor", str(run.folder)]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{run.folder}: ill (done)"
    assert second.startswith("  negative-margin, before the first step: ")


def test_the_doctor_speaks_json_and_mutes(ill, healthy, capsys):
    run, _ = ill
    assert main(["doctor", str(run.folder), str(healthy.folder), "--json"]) == 1
    found = {each["run"]: each for each in json.loads(capsys.readouterr().out)}
    assert found[str(healthy.folder)]["healthy"]
    wrong = found[str(run.folder)]
    assert not wrong["healthy"]
    assert {"name", "when", "measured", "why", "change", "severity"} == {*wrong["findings"][0]}
    all_of_them = ",".join(each["name"] for each in wrong["findings"])
    assert main(["doctor", str(run.folder), "--mute", all_of_them]) == 0
    assert main(["doctor", str(run.folder), "--mute", "colapse"]) == 2


def test_a_run_of_an_older_version_is_diagnosed_from_its_record(capsys):
    run = Run(OLD)
    assert run.health == []
    assert diagnose_run(run).measured["classes"] == len(run.data["classes"])
    assert main(["doctor", str(OLD)]) in (0, 1)
    assert str(OLD) in capsys.readouterr().out
    assert "Health" not in runs_page([run])


def test_the_finished_model_of_a_run_without_looks_is_diagnosed(ill, tmp_path, capsys):
    run, _ = ill
    shutil.copytree(run.folder, tmp_path / "old")
    (tmp_path / "old" / "health.json").unlink()
    assert main(["doctor", str(tmp_path / "old")]) == 1
    assert "negative-margin, finished model: " in capsys.readouterr().out
    (tmp_path / "old" / "model.safetensors").unlink()
    assert main(["doctor", str(tmp_path / "old")]) == 0
    assert "was not examined: " in capsys.readouterr().out


def test_a_failed_run_is_ill(tmp_path, capsys):
    config = SMALL.replace(loss="softmax()", lr=1e8, head_lr=1e8, epochs=2)
    with pytest.raises(TrainingError):
        train(config, tmp_path)
    assert main(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "learning-rate, before the first step: " in out
    assert "failed, at its end: the loss was not finite" in out


def test_a_damaged_record_is_named(healthy, tmp_path, capsys):
    shutil.copytree(healthy.folder, tmp_path / "run")
    write_json(tmp_path / "run" / "health.json", {"looks": 3})
    with pytest.raises(RecordError, match=r"health.json: damaged \(a list is expected\)"):
        _ = Run(tmp_path / "run").health
    assert main(["doctor", str(tmp_path / "run")]) == 2
    assert "health.json" in capsys.readouterr().err
    # The page is written all the same.
    assert "Results" in runs_page([Run(tmp_path / "run")])


def test_health_is_on_top_of_the_page(healthy, ill):
    page = runs_page([healthy, ill[0]])
    titles = re.findall(r"<h2[^>]*>([^<]+)<", page)
    assert titles[0] == "Health"
    assert "negative-margin" in page
    assert "No findings in 1 run." in runs_page([healthy])


# --------------------------------------------------------------------------- healthy runs


OMNIGLOT = {"limit": 2000, "image_size": 28, "backbone": "conv4", "epochs": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"data": "digits", "loss": "softmax()", "epochs": 3},
        {"data": "digits", "loss": "bce()", "epochs": 3},
        {"data": "digits", "loss": "arcface()", "epochs": 3},
        {"data": "digits", "loss": "lm_softmax()", "epochs": 3},
        {"data": "digits", "loss": "softmax() + 0.5*sample_margin()", "epochs": 3},
        {"data": "digits", "loss": "large_margin_gaussian()", "epochs": 3},
        {"data": "mnist", "limit": 1000, "loss": "softmax()", "epochs": 2},
        {"data": "mnist", "limit": 1000, "loss": "cosface()", "epochs": 2},
        {"data": "omniglot", "loss": "softmax()", **OMNIGLOT},
        # At the default of 30 so short a training on two images per class has not spread features.
        {"data": "omniglot", "loss": "cosface()", "head": "cosine(scale=16.0)", **OMNIGLOT},
    ],
    ids=lambda changes: f"{changes['data']} {changes['loss']}",
)
def test_healthy_runs_raise_no_alarm(shared_data, changes, tmp_path):
    run = train(Config(**changes), tmp_path)
    warnings = [f for look in run.health for f in look["findings"] if f["severity"] == "warning"]
    assert not warnings
    assert diagnose_run(run).healthy


@pytest.mark.slow
def test_the_first_gradient_of_nca_on_resnet12_needs_a_warm_up(shared_data):
    images = load("cifar100", "test")
    chosen = torch.arange(64)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in images.mean_std())
    pixels = (images.pixels[chosen] / 255 - mean) / std
    network = backbones.build("resnet12", shape=(3, 32, 32))
    with torch.no_grad():
        features = network(pixels)
    # Four examples of each of 16 classes, as episodes have them.
    labels = chosen % 16
    criterion = tammes.Criterion(tammes.LinearHead(features.shape[1], 100), tammes.nca())
    for warmup, expected in ((0, True), (5, False)):
        rate = learning_rate(Config(lr=0.1, warmup=warmup), steps_per_epoch=300)
        found = tammes.diagnose(criterion, features, labels, lr=rate(0)).findings
        assert ("first-gradient" in [each.name for each in found]) == expected
