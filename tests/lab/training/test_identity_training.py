"""Runs whose test identities are no classes of training: trained, measured, kept, fine-tuned."""

import json
import shutil

import pytest
import torch
from PIL import Image

from tammes.lab.cli.main import main
from tammes.lab.config.schema import Config
from tammes.lab.measure import identities
from tammes.lab.measure.identities import (
    identity_intervals,
    identity_resamples,
    measure_identities,
)
from tammes.lab.records.run_folder import RecordError, Run
from tammes.lab.stats.seed_groups import table
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.fine_tuning import start_from
from tammes.lab.training.loop import train
from tammes.lab.training.model import build_model, load_model
from tammes.lab.training.progress import Progress

PARTS = {"train": "abcdef", "novel": "uvwxyz"}


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    """Six identities to train on and six others, told apart by their colours."""
    root = tmp_path_factory.mktemp("data") / "faces"
    generator = torch.Generator().manual_seed(0)
    for part, names in PARTS.items():
        for name in names:
            (root / part / name).mkdir(parents=True)
            colour = torch.randint(60, 196, (1, 1, 3), generator=generator)
            for number in range(12):
                pixels = colour + torch.randint(-50, 50, (8, 8, 3), generator=generator)
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(
                    root / part / name / f"{number}.png"
                )
    return root


@pytest.fixture(scope="module", autouse=True)
def _few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identities, "RESAMPLES", 20)
        yield


@pytest.fixture(scope="module")
def config(faces):
    return Config(
        data=str(faces),
        identities=True,
        loss="cosface(margin=0.1) + triplet()",
        backbone="resnet32(width=0.125)",
        augment="flip() + erase()",
        sampler="pk(classes=4, images=4)",
        flip_test=True,
        epochs=2,
        lr=0.01,
        accelerator="cpu",
    )


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    return train(config, tmp_path_factory.mktemp("runs") / "identities")


def test_test_identities_are_measured_and_kept(run):
    assert run.status == "done"
    assert run.data["classes"] == [*PARTS["train"]]
    assert run.data["identities"] == [*PARTS["novel"]]
    kept = run.tensors("embeddings")
    assert sorted(kept) == ["features", "index", "labels"]
    assert kept["labels"].bincount().tolist() == [12] * 6
    measured = measure_identities(kept["features"], kept["labels"])
    drawn = identity_resamples(kept["features"], kept["labels"])
    assert run.final["test"] == {
        **{name: pytest.approx(value) for name, value in measured.items()},
        "intervals": identity_intervals(drawn),
    }
    assert {name: each.tolist() for name, each in run.tensors("resamples").items()} == {
        name: each.tolist() for name, each in drawn.items()
    }
    for row in run.metrics:
        assert row["test"].keys() == measured.keys()
        assert "accuracy" in row["train"]


def test_features_of_an_image_and_its_mirror_image_are_averaged(run):
    testing = prepare_data(run.config, list)[2]
    model = load_model(run)
    with torch.no_grad():
        both = [model.features(pixels) for pixels in (testing.pixels, testing.pixels.flip(3))]
    assert not both[0].allclose(both[1], atol=1e-3)
    torch.testing.assert_close(run.tensors("embeddings")["features"], (both[0] + both[1]) / 2)


def test_held_out_images_of_trained_classes_still_choose_the_epoch(config, tmp_path):
    run = train(config.replace(validation=0.25, sampler="random()"), tmp_path / "run")
    assert all("accuracy" in row["validation"] for row in run.metrics)
    assert "accuracy" not in run.final["test"]
    assert "per_class_accuracy" in run.final["validation"]


def test_tables_pages_and_the_doctor_know_such_runs(run, tmp_path, capsys):
    text = table([run])
    assert "mAP" in text
    assert "EER" in text
    assert "damaged" not in text
    assert main(["report", str(run.folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "damaged" not in capsys.readouterr().out
    assert main(["doctor", str(run.folder)]) in (0, 1)
    assert "identities that were not trained" in capsys.readouterr().out


def test_the_command_prints_numbers_with_their_intervals(run, capsys):
    assert main(["train", "--resume", str(run.folder)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eer")]
    assert "95 % over identities" in line


def test_tammes_evaluate_has_the_numbers_of_the_run(run, capsys, monkeypatch, tmp_path):
    # Fewer pairs than there are: both draw the same ones.
    features, labels = (run.tensors("embeddings")[name] for name in ("features", "labels"))
    pairs = identities.protocol_pairs(labels, identities.IdentityProtocol(), 50)
    monkeypatch.setattr(identities, "protocol_pairs", lambda *_: pairs)
    expected = measure_identities(features, labels)
    for protocol, names, words in (
        ("verification", {"eer": "eer", "auc": "auc"}, ["--max-pairs", "50"]),
        ("retrieval", {"mean_average_precision": "map"}, []),
    ):
        words = ["evaluate", protocol, str(run.folder), "--json", "--out", str(tmp_path), *words]
        assert main(words) == 0
        found = json.loads(capsys.readouterr().out)
        for name, key in names.items():
            assert found["numbers"][key]["value"] == pytest.approx(expected[name])


def test_trained_identities_are_not_tested_on(config, faces, tmp_path):
    root = tmp_path / "faces"
    shutil.copytree(faces, root)
    (root / "novel" / "u").rename(root / "novel" / "b")
    with pytest.raises(ValueError, match=r"but 1 of 6 are, such as 'b'"):
        prepare_data(config.replace(data=str(root)), list)
    said = []
    prepare_data(config.replace(test=str(root)), said.append)
    assert [text for text in said if "1 of 6 identities have the name of a trained class" in text]


@pytest.mark.parametrize("other", [{"whole": True}, {"classes": "cub:base"}])
def test_settings_that_contradict_each_other_are_named(other):
    with pytest.raises(ValueError, match=r"^identities expects test images that are not trained"):
        Config(identities=True, **other)


# ------------------------------------------------------------------- large-margin fine-tuning


class StopAfter(Progress):
    """Interrupts a run after an epoch."""

    def epoch(self, row, *, images_per_second):
        raise KeyboardInterrupt


def tuned(config, run, **changes):
    """A second phase: a larger margin, larger images, a small rate."""
    return config.replace(
        start=str(run.folder), loss="cosface(margin=0.5)", image_size=12, lr=1e-5, **changes
    )


def test_a_second_phase_starts_from_the_weights_of_the_first(config, run, tmp_path):
    second = train(tuned(config, run), tmp_path / "second")
    before, after = (each.tensors("model") for each in (run, second))
    for name, weight in before.items():
        if "running" not in name and "batches" not in name:
            torch.testing.assert_close(after[name], weight, atol=5e-3, rtol=0)
    assert second.data["image"] == [3, 12, 12]
    assert "margin=0.5" in second.environment["loss"]
    fresh = train(tuned(config, run).replace(start=""), tmp_path / "fresh").tensors("model")
    assert not fresh["criterion.head.weight"].allclose(
        before["criterion.head.weight"], atol=5e-3, rtol=0
    )


def test_an_interrupted_second_phase_resumes_without_the_first(config, run, tmp_path):
    first = tmp_path / "first"
    shutil.copytree(run.folder, first)
    settings = tuned(config, Run(first), epochs=2)
    whole = train(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(settings.replace(save_steps=1), tmp_path / "parts", progress=StopAfter())
    shutil.rmtree(first)
    parts = train(settings, tmp_path / "parts")
    assert parts.metrics == whole.metrics
    for name, weight in whole.tensors("model").items():
        assert parts.tensors("model")[name].equal(weight)


def test_a_run_that_does_not_fit_is_rejected(config, run, tmp_path):
    images = prepare_data(config, list)[0]
    model = build_model(config.replace(backbone="resnet32(width=0.25)"), images, steps_per_epoch=1)
    with pytest.raises(RecordError, match=r"the same network and head, got \d+ weights"):
        start_from(model.model, run, run.data["classes"])
    model = build_model(config, images, steps_per_epoch=1).model
    with pytest.raises(RecordError, match=r"on the same 2 classes, got 6 others"):
        start_from(model, run, ["a", "b"])
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run.folder, unfinished)
    (unfinished / "final.json").unlink()
    with pytest.raises(RecordError, match=r"a finished run, got one that is unfinished"):
        start_from(model, Run(unfinished), run.data["classes"])
    with pytest.raises(ValueError, match=r"^start expects a head in one piece, got shard"):
        config.replace(start="first", shard=True)
