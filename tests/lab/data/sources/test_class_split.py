"""Class-disjoint splits by name, and images of classes that are not trained on."""

import pytest

from tammes.lab.data import DataError, load
from tammes.lab.data.sources.class_split import split_by_class
from tammes.lab.data.sources.folder import partitions


def counts(images):
    return dict(zip(images.classes, images.counts(), strict=True))


@pytest.fixture
def birds(image_folder):
    """Three classes in two partitions."""
    return image_folder(
        {f"{part}/{name}": 2 + (part == "test") for part in ("train", "test") for name in "abc"}
    )


def test_a_split_by_class_has_all_images_of_a_class_on_one_side(birds):
    split = split_by_class("birds", partitions(birds), 2)
    train, test = (split[name]() for name in ("train", "test"))
    assert (train.names, train.labels.bincount().tolist()) == (("a", "b"), [5, 5])
    assert (test.names, test.labels.tolist()) == (("c",), [0] * 5)
    files = {
        entries.items.fetch(row) for entries in (train, test) for row in range(len(entries.items))
    }
    assert len(files) == 15
    assert {file.split("/")[-2] for file in map(test.items.fetch, range(5))} == {"c"}
    assert test.items.name(4) == test.items.fetch(4)
    assert train.stamp != test.stamp
    assert train.origin != test.origin


def test_a_split_needs_a_class_to_test_on(birds):
    with pytest.raises(DataError, match=r"birds: more than 3 classes are expected, got 3"):
        split_by_class("birds", partitions(birds), 3)["train"]()


def test_a_split_needs_the_same_classes_everywhere(image_folder):
    odd = image_folder({"train/a": 1, "train/b": 1, "test/c": 1})
    with pytest.raises(DataError, match=r"the same classes are expected in test and train"):
        split_by_class("odd", partitions(odd), 1)["test"]()


def test_novel_images_keep_their_own_classes_and_get_the_shape(image_folder, said):
    folder = image_folder({"train/a": 3, "train/b": 3, "test/c": 4, "test/d": 2})
    train = load(folder, "train", size=6, report=said.append)
    novel = load(folder, "test", like=train, novel=True, report=said.append)
    assert counts(train) == {"a": 3, "b": 3}
    assert counts(novel) == {"c": 4, "d": 2}
    assert novel.shape == train.shape == (3, 6, 6)
    # As a test partition they would have to be trained classes.
    with pytest.raises(DataError, match=r"c'.* not among the 2 of the training images; identities"):
        load(folder, "test", report=said.append)


def test_the_partition_novel_comes_before_a_test_partition(image_folder, said):
    folder = image_folder(
        {"train/a": 3, "train/b": 3, "test/a": 1, "test/b": 1, "novel/c": 2, "novel/d": 2}
    )
    assert counts(load(folder, "test", novel=True, report=said.append)) == {"c": 2, "d": 2}


def test_a_source_of_novel_images_alone_is_whole(image_folder, said):
    folder = image_folder({"c": 2, "d": 2})
    novel = load(folder, "test", whole=True, novel=True, report=said.append)
    assert counts(novel) == {"c": 2, "d": 2}
    assert not [text for text in said if "held out" in text]


@pytest.mark.parametrize(
    ("name", "train", "novel"),
    [
        ("cub:retrieval", (5864, 100), (5924, 100)),
        ("chimpanzees", (4126, 59), (2620, 29)),
        ("audiomnist", (6000, 40), (3000, 20)),
    ],
)
def test_the_identities_at_hand_are_split_by_class(
    name, train, novel, shared_data, monkeypatch, said
):
    monkeypatch.setenv("TAMMES_DATA", str(shared_data))
    options = {"whole": True, "novel": True, "memory": 0, "report": said.append}
    parts = [load(name, partition, **options) for partition in ("train", "test")]
    assert [(len(part), len(part.classes)) for part in parts] == [train, novel]
    assert not set(parts[0].classes) & set(parts[1].classes)
    if name == "cub:retrieval":
        assert [part.classes[0][:3] for part in parts] == ["001", "101"]
        # Of the last image of the file too, the pixels are its own.
        assert parts[1].read(len(parts[1]) - 1).float().std() > 1
