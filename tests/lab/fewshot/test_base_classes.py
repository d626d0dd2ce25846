"""A run on some of the classes of a set, or on its test images too."""

import json

import pytest
import torch

from tammes.lab.config.schema import Config
from tammes.lab.data import DataError, load
from tammes.lab.training.datasets import classes_of, prepare_data
from tammes.lab.training.loop import train
from tammes.lab.training.model import load_model

PARTS = {"base": ["1", "3", "5", "7"], "validation": ["0", "2", "4"], "novel": ["6", "8", "9"]}


@pytest.fixture
def lists(tmp_path):
    path = tmp_path / "lists.json"
    path.write_text(json.dumps(PARTS))
    return path


def prepared(**settings):
    said = []
    return prepare_data(Config(**settings), said.append), said


@pytest.mark.parametrize("part", PARTS)
def test_a_run_has_the_images_of_its_classes_alone(lists, part):
    (training, held_out, testing), said = prepared(classes=f"{lists}:{part}")
    assert held_out is None
    assert not said
    for images, partition in ((training, "train"), (testing, "test")):
        everything = load("digits", partition)
        assert images.classes == tuple(PARTS[part])
        labels = [int(name) for name in PARTS[part]]
        kept = torch.isin(everything.labels, torch.tensor(labels))
        assert torch.tensor(labels)[images.labels].equal(everything.labels[kept])
        assert images.pixels.equal(everything.pixels[kept])
        assert images.index.equal(everything.index[kept])


def test_base_classes_are_meant_where_no_part_is_named(lists):
    assert classes_of(str(lists)) == tuple(PARTS["base"])
    assert classes_of("cub:val")[0] == "002.Laysan_Albatross"
    assert len(classes_of("cifar-fs")) == 64


def test_a_part_has_the_names_that_it_has_elsewhere():
    assert classes_of("cifar-fs:training") == classes_of("cifar-fs:base")
    assert classes_of("cifar-fs:valid") == classes_of("cifar-fs:validation")
    with pytest.raises(DataError, match="there is no part 'nov'; did you mean novel"):
        classes_of("cifar-fs:nov")


def test_the_whole_of_a_set_is_trained_on_with_its_test_images(lists):
    (training, _, testing), said = prepared(classes=f"{lists}:base", whole=True)
    (rest, _, same), _ = prepared(classes=f"{lists}:base")
    assert len(training) == len(rest) + len(same)
    assert training.pixels.equal(torch.cat([rest.pixels, same.pixels]))
    assert training.labels.equal(torch.cat([rest.labels, same.labels]))
    assert testing.pixels.equal(same.pixels)
    # Augmentation is keyed by the index: no two images have the same.
    assert len(training.index.unique()) == len(training)
    assert said == ["digits: training includes the test images, so test accuracies mean nothing"]


def test_the_whole_of_a_set_without_a_test_split_is_each_of_its_images_once(tmp_path):
    pytest.importorskip("PIL")
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(5):
            image = Image.new("L", (8, 8), 40 * number + (name == "b"))
            image.save(tmp_path / "set" / name / f"{number}.png")
    (training, _, testing), _ = prepared(data=str(tmp_path / "set"), whole=True)
    assert len(training) == len(testing) == 10
    assert len(training.pixels.flatten(1).unique(dim=0)) == 10
    (training, _, testing), _ = prepared(data=str(tmp_path / "set"))
    assert (len(training), len(testing)) == (8, 2)


@pytest.mark.parametrize("whole", [False, True])
def test_the_record_says_whether_the_test_images_were_trained_on(lists, tmp_path, whole):
    config = Config(
        classes=f"{lists}:base",
        whole=whole,
        backbone="mnist_cnn(width=0.125)",
        augment="none",
        epochs=1,
        limit=80,
    )
    run = train(config, tmp_path / "run")
    assert run.data.get("test_is_trained_on", False) is whole
    assert run.data["classes"] == PARTS["base"]
    model = load_model(run)
    images = prepare_data(config, list)[2]
    features = model.features(images.pixels)
    assert model.criterion.logits(features).shape == (len(images), 4)
    right = (model.criterion.logits(features).argmax(1) == images.labels).double().mean()
    assert float(right) == pytest.approx(run.final["test"]["accuracy"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"whole": True, "test": "mnist"},
            "whole expects the test images to be a partition of data, got test 'mnist'",
        ),
        (
            {"whole": True, "skip_corrupt": True},
            "whole expects images that can all be read, got skip_corrupt",
        ),
    ],
)
def test_what_does_not_go_with_the_whole_of_a_set_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Config(**settings)


@pytest.mark.parametrize("whole", [False, True])
def test_classes_that_a_set_has_not_are_refused_in_a_sentence(whole):
    with pytest.raises(DataError, match="digits: there is no class 'apple' and 63 more among"):
        prepared(classes="cifar-fs:base", whole=whole)
    with pytest.raises(
        DataError, match="cifar-fz: there is no such file, folder or known class list"
    ):
        prepared(classes="cifar-fz:base", whole=whole)


@pytest.mark.slow
def test_all_600_images_of_a_class_of_cifar_fs_are_trained_on(shared_data, monkeypatch):
    monkeypatch.setenv("TAMMES_DATA", str(shared_data))
    (training, _, testing), _ = prepared(data="cifar100", classes="cifar-fs:base", whole=True)
    assert training.counts() == [600] * 64
    assert testing.counts() == [100] * 64
    (training, _, testing), _ = prepared(data="cifar100", classes="cifar-fs:base")
    assert training.counts() == [500] * 64
    assert testing.counts() == [100] * 64
