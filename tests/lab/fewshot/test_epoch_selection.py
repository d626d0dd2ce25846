"""The epoch that is kept may be the best in few-shot episodes; a projection trains, no more."""

import json

import pytest
import torch
from torch.testing import assert_close

from tammes.lab.config.schema import Config
from tammes.lab.fewshot import features as few_shot
from tammes.lab.fewshot.epoch_selection import ValidationEpisodes, parse_selection
from tammes.lab.fewshot.protocol import accuracies, methods
from tammes.lab.records.run_folder import Run
from tammes.lab.training import loop as training
from tammes.lab.training.loop import train
from tammes.lab.training.model import load_model

PARTS = {"base": ["1", "3", "5", "7"], "validation": ["0", "2", "4"], "novel": ["6", "8", "9"]}
SMALL = Config(
    data="digits", loss="softmax()", backbone="mnist_cnn(features=8, width=0.25)", augment="none",
    epochs=3, batch_size=100, limit=300, accelerator="cpu",
)  # fmt: skip


@pytest.fixture
def small(tmp_path):
    """A configuration on some digits; the others are left to choose by."""
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps(PARTS))
    return SMALL.replace(classes=f"{lists}:base")


def chosen_by(small, more=""):
    lists = small.classes.removesuffix(":base")
    return small.replace(select_epoch=f"fewshot('{lists}:validation', way=3, episodes=50{more})")


def novel(folder, small):
    lists = small.classes.removesuffix(":base")
    return few_shot.from_run(folder, classes=f"{lists}:novel", report=lambda text: None)


# ------------------------------------------------------------------------------- the epoch


@pytest.mark.parametrize("method", ["l2", "cl2n"])
def test_the_accuracy_of_an_epoch_is_that_of_its_model(small, tmp_path, method):
    config = chosen_by(small, f", method='{method}'").replace(epochs=1)
    run = train(config, tmp_path / "run")
    (row,) = run.metrics
    lists = config.classes.removesuffix(":base")
    examples = few_shot.from_run(
        run.folder, classes=f"{lists}:validation", base=True, report=lambda text: None
    )
    episodes = parse_selection(config.select_epoch)
    # The images are a share of those that from_run takes, so that only the way there is compared.
    images = episodes.load_images(config, few_shot.prepare_data(config, print)[0], print)
    model = load_model(run)
    features = few_shot.model_features(model, images)
    found = episodes.accuracy(features, images, examples.base_mean)
    assert_close(row["fewshot"]["accuracy"], found)
    drawn = episodes._draw(images, 50)
    (one,) = methods(method).values()
    by_hand = accuracies(features, drawn, one, base_mean=examples.base_mean).mean()
    assert found == float(by_hand)
    assert 0.3 < found < 1


def test_the_best_epoch_in_episodes_is_kept(small, tmp_path, monkeypatch):
    scores = iter([0.5, 0.75, 0.625])
    monkeypatch.setattr(ValidationEpisodes, "accuracy", lambda *_: next(scores))
    run = train(chosen_by(small), tmp_path / "run")
    assert [row["fewshot"]["accuracy"] for row in run.metrics] == [0.5, 0.75, 0.625]
    assert run.final["epoch"] == 2
    assert run.final["chosen"] == "best epoch on the validation classes, in few-shot episodes"
    assert run.final["test"]["accuracy"] == run.metrics[1]["test"]["accuracy"]
    assert run.final["test"] != run.metrics[2]["test"]


def test_choosing_changes_nothing_in_the_training(small, tmp_path):
    without, chosen = (
        train(config, tmp_path / name)
        for name, config in (("without", small), ("chosen", chosen_by(small)))
    )
    rows = [{k: v for k, v in row.items() if k != "fewshot"} for row in chosen.metrics]
    assert rows == without.metrics


def test_an_interrupted_run_chooses_the_same_epoch(small, tmp_path, monkeypatch):
    config = chosen_by(small)
    whole = train(config, tmp_path / "whole")
    end_epoch = training._end_epoch

    def stop(work):
        end_epoch(work)
        if work.epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "_end_epoch", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "again")
    monkeypatch.undo()
    again = train(config, tmp_path / "again")
    assert again.metrics == whole.metrics
    assert again.final == whole.final


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fewshot('LISTS:base')", "novel classes are expected to be other than the base classes"),
        ("fewshot('LISTS:validation', way=4)", "4 classes"),
        ("fewshot('LISTS:validation', way=3, queries=500)", "501"),
        ("fewshot('LISTS:validation', method='l2, cl2n')", "one method .* got l2, cl2n"),
        ("fewshot('LISTS:validation', method='complement')", "no prototypes, got complement"),
        ("fewshot('LISTS:validation', shot=0)", "shot of select_epoch fewshot .* at least 1"),
        ("best('LISTS:validation')", "there is no select_epoch 'best'"),
    ],
)
def test_what_cannot_choose_is_refused_before_the_training(small, tmp_path, text, sentence):
    text = text.replace("LISTS", small.classes.removesuffix(":base"))
    with pytest.raises(ValueError, match=sentence):
        train(small.replace(select_epoch=text), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ------------------------------------------------------------------------------- the projection


def test_a_projection_is_trained_and_left_out_of_few_shot_features(small, tmp_path):
    run = train(small.replace(projection=5), tmp_path / "run")
    model = load_model(run)
    assert run.tensors("embeddings")["features"].shape[1] == 5
    assert run.tensors("prototypes")["prototypes"].shape == (4, 5)
    found = novel(run.folder, small)
    assert found.features.shape[1] == model.num_features(projected=False) == 8
    assert model.num_features() == 5
    pixels = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        assert_close(model.project(model.features(pixels, projected=False)), model.features(pixels))
    names = {"backbone.layer.weight", "backbone.layer.bias"}
    assert names <= run.tensors("model").keys()


def test_the_projection_moves_with_the_rest(small, tmp_path):
    one, two = (
        load_model(train(small.replace(projection=5, epochs=epochs), tmp_path / str(epochs)))
        for epochs in (1, 2)
    )
    assert not torch.equal(one.backbone.layer.weight, two.backbone.layer.weight)


def test_prototypes_of_a_projection_are_none_of_the_features(small, tmp_path):
    run = train(small.replace(projection=5, epochs=1), tmp_path / "run")
    lists = small.classes.removesuffix(":base")
    with pytest.raises(ValueError, match="got those of a run with projection 5"):
        few_shot.from_run(
            run.folder, classes=f"{lists}:novel", prototypes=True, report=lambda text: None
        )


def test_without_a_projection_features_are_as_they_were(small, tmp_path):
    model = load_model(train(small.replace(epochs=1), tmp_path / "run"))
    pixels = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        features = model.features(pixels)
        assert model.features(pixels, projected=False).equal(features)
    assert model.project(features) is features
    assert all(
        name.startswith(("backbone.", "criterion."))
        for name in Run(tmp_path / "run").tensors("model")
    )
