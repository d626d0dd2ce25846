"""The real sets, where they are: rows, classes and published means."""

import pytest
import torch

from tammes.lab.data import load


@pytest.fixture(autouse=True)
def _real(shared_data, monkeypatch):
    monkeypatch.setenv("TAMMES_DATA", str(shared_data))


def test_mnist_is_the_published_one(said):
    test = load("mnist", "test", report=said.append)
    assert test.shape == (1, 28, 28)
    assert test.classes == tuple("0123456789")
    assert test.counts() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    # The first test image is a seven.
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_cifar100_has_its_names_in_the_official_order(said):
    test = load("cifar100", "test", report=said.append)
    assert test.shape == (3, 32, 32)
    assert test.counts() == [100] * 100
    assert (test.classes[0], test.classes[99]) == ("apple", "worm")


def test_cub_has_official_and_fewshot_partitions(said):
    lazily = {"memory": 0, "report": said.append}
    train, test = (load("cub", partition, **lazily) for partition in ("train", "test"))
    assert (len(train), len(test), len(train.classes)) == (5994, 5794, 200)
    assert train.classes == test.classes
    novel = load("cub", "novel", **lazily)
    assert (len(novel), len(novel.classes)) == (2953, 50)
    assert all(int(name[:3]) % 4 == 0 for name in novel.classes)
    assert train.read(0).shape == (3, 96, 96)


def test_omniglot_classes_are_characters_of_alphabets(said):
    lazily = {"memory": 0, "report": said.append}
    train, test = (load("omniglot", partition, **lazily) for partition in ("train", "test"))
    assert train.counts() == [16] * 1623
    assert test.counts() == [4] * 1623
    assert train.shape == (1, 105, 105)
    background = load("omniglot", "background", **lazily)
    assert (len(background), len(background.classes)) == (19_280, 964)
    assert train.read(5).unique().tolist() == [0, 255]


@pytest.mark.slow
def test_cifar100_has_the_published_mean_and_deviation(said):
    train = load("cifar100", "train", report=said.append)
    assert len(train) == 50_000
    mean, std = train.mean_std()
    torch.testing.assert_close(mean, [0.50707516, 0.48654887, 0.44091784], rtol=0, atol=5e-9)
    torch.testing.assert_close(std, [0.26733429, 0.25643846, 0.27615047], rtol=0, atol=5e-9)
    again = load("cifar100", "train", report=said.append)
    assert again.pixels.equal(train.pixels)
