"""Classes by name: the published lists, a user's own, and what is wrong with them."""

import hashlib

import pytest
import torch
from recipe_cells import superclasses

from tammes.lab.data import DataError, load
from tammes.lab.data.sources.loading import KNOWN
from tammes.lab.fewshot import class_lists
from tammes.lab.fewshot.class_lists import ClassLists, load_classes, parse, read, select_classes

SIZES = {
    "cifar-fs": (64, 16, 20),
    "fc100": (60, 20, 20),
    "mini-imagenet": (64, 16, 20),
    "cub": (100, 50, 50),
    "omniglot": (1028, 172, 423),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_shipped_lists_have_the_published_sizes(name):
    lists = read(name)
    assert (len(lists.base), len(lists.validation), len(lists.novel)) == SIZES[name]
    assert lists.source in KNOWN


def test_mini_imagenet_is_a_set_of_its_own():
    # 600 images of each class, not all of ImageNet.
    assert read("mini-imagenet").source == "mini-imagenet"


def test_every_shipped_list_is_named():
    assert class_lists.names() == list(SIZES)


PUBLISHED = {
    "cifar-fs": ["e40c037757741c61", "e02b317c48c94270", "2a35675fcdddfebb"],
    "fc100": ["af96f5ba1e118915", "746350fa6cdcb340", "9df56bf75fee16f6"],
    "cub": ["2d722db6b72d1c60", "a3c78978123bb85b", "4d217f7926cdc28b"],
    "omniglot": ["c350ea5778649d32", "d3f56052fbd17195", "bbbdc01c73fd2d34"],
}
"""SHA-256 of the sorted names of each part, computed from the lists that come with the data."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shipped_lists_are_the_published_ones(name):
    texts = ["\n".join(sorted(read(name).part(part))) for part in class_lists.PARTS]
    found = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    assert found == PUBLISHED[name]


def test_fc100_keeps_superclasses_together():
    coarse, lists = superclasses(), read("fc100")
    parts = [{coarse[name] for name in lists.part(part)} for part in class_lists.PARTS]
    assert [len(part) for part in parts] == [12, 4, 4]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]


def test_cub_goes_by_the_number_of_the_class():
    lists = read("cub")
    numbers = [int(name[:3]) - 1 for name in lists.novel]
    assert all(number % 4 == 3 for number in numbers)


def test_lists_in_the_data_folder_are_found_by_their_name(tmp_path, monkeypatch):
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "mine.json").write_text('{"train": ["a"], "test": ["b", "c"]}')
    monkeypatch.setenv("TAMMES_DATA", str(tmp_path))
    assert read("mine").novel == ("b", "c")
    assert read("mine").validation == ()


def test_three_text_files_are_class_lists(tmp_path):
    for name, classes in (("base", "a\nb\n"), ("validation", "c\n\n"), ("novel", " d \ne")):
        (tmp_path / f"{name}.txt").write_text(classes)
    lists = read(tmp_path)
    assert (lists.base, lists.validation, lists.novel) == (("a", "b"), ("c",), ("d", "e"))


@pytest.mark.parametrize(
    ("text", "part", "first"),
    [
        ("cifar-fs", "novel", "baby"),
        ("cifar-fs:novel", "novel", "baby"),
        ("cifar-fs:test", "novel", "baby"),
        ("cifar-fs:val", "validation", "beetle"),
        ("cifar-fs:train", "base", "apple"),
    ],
)
def test_a_part_is_named_behind_a_colon(text, part, first):
    lists, found = parse(text)
    assert found == part
    assert lists.part(found)[0] == first or first in lists.part(found)


def test_the_part_that_is_meant_where_none_is_named_may_be_another():
    assert parse("cifar-fs", default="base")[1] == "base"
    assert parse("cifar-fs:valid", default="base")[1] == "validation"


def test_a_file_with_a_colon_in_its_name_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "my:lists.json").write_text('{"base": ["a"], "novel": ["b"]}')
    monkeypatch.chdir(tmp_path)
    assert parse("my:lists.json")[0].novel == ("b",)
    assert parse("my:lists.json:base")[1] == "base"


def test_a_path_with_a_colon_is_a_path(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "lists.json").write_text('{"base": ["a"], "novel": ["b"]}')
    assert parse(f"{folder}/lists.json")[1] == "novel"
    assert parse(f"{folder}/lists.json:base")[1] == "base"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"base": ["a", "b"], "novel": ["b"]}', "got 'b' of novel in base too"),
        ('{"base": ["a", "a"], "novel": ["b"]}', "got 'a' of base twice in base"),
        ('{"train": ["a"], "base": ["b"]}', "base is given twice, once as 'base'"),
        ('{"base": ["a", 3]}', "names of classes are expected, got 3"),
        ('{"base": [5], "classes": ["a", "b"]}', "class 5 is not among its 2 classes"),
        ('{"base": "abc"}', "a list of classes is expected, got 'abc'"),
        ('{"other": ["a"]}', "lists base, validation and novel are expected, got none of them"),
        ("[1, 2]", "lists base, validation and novel are expected, got none of them"),
        ("{nonsense", "not JSON"),
        ('{"base": ["a"], "nove": ["b"]}', "got 'nove'; did you mean novel?"),
        ('{"base": ["a"], "zzz": 1}', "got 'zzz'; it may have base, classes, novel"),
    ],
)
def test_lists_that_cannot_be_are_refused(tmp_path, text, message):
    path = tmp_path / "lists.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cifarfs", "known class list; did you mean cifar-fs?"),
        ("qqqq", "the known ones are cifar-fs, cub, fc100, mini-imagenet, omniglot"),
        ("cifar-fs:nove", "there is no part 'nove'; did you mean novel?"),
    ],
)
def test_unknown_lists_or_parts_are_answered_with_the_nearest(text, message):
    with pytest.raises(DataError) as refused:
        parse(text)
    assert message in str(refused.value)


@pytest.mark.parametrize("text", ["", ":novel"])
def test_an_empty_name_is_not_the_current_folder(text, tmp_path, monkeypatch):
    (tmp_path / "novel.txt").write_text("a\nb\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^class lists are expected, .*, got none$"):
        parse(text)


def test_a_list_that_is_no_text_is_named(tmp_path):
    (tmp_path / "base.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"base\.txt: not a text in UTF-8"):
        read(tmp_path)


def test_an_empty_part_is_refused():
    with pytest.raises(DataError, match="there is no class in its part validation"):
        ClassLists("mine", ("a",), (), ("b",)).part("validation")


# ------------------------------------------------------------------------------------- images


def test_images_of_some_classes_are_labelled_in_the_order_asked_for():
    images = load("digits", "train")
    some = select_classes(images, ["7", "2"])
    assert some.classes == ("7", "2")
    for label, old in enumerate((7, 2)):
        assert some.index[some.labels == label].equal(images.index[images.labels == old])
    assert some.read(3).equal(images.read(int((images.index == some.index[3]).nonzero())))
    assert some.digest != images.digest
    assert some.digest != select_classes(images, ["2", "7"]).digest


def test_a_class_that_the_images_do_not_have_is_named():
    with pytest.raises(DataError, match=r"no class 'sevn' and 1 more among its 10$"):
        select_classes(load("digits", "train"), ["1", "sevn", "x"])


def test_all_images_of_a_class_are_taken_whichever_partition_they_are_in():
    images = load_classes("digits", ["3", "4"])
    parts = [
        select_classes(load("digits", partition), ["3", "4"]) for partition in ("train", "test")
    ]
    assert len(images) == sum(map(len, parts))
    assert len(images.index.unique()) == len(images)
    assert images.pixels.equal(torch.cat([part.pixels for part in parts]))
    assert images.labels.equal(torch.cat([part.labels for part in parts]))


def test_a_source_without_a_test_partition_is_loaded_once(tmp_path):
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.new("L", (4, 4), color=20 * number).save(tmp_path / name / f"{number}.png")
    images = load_classes(tmp_path, report=lambda text: None)
    assert images.counts() == [5, 5]


@pytest.mark.parametrize("in_memory", [(False, False), (True, False)])
def test_images_that_are_read_one_by_one_are_joined_too(tmp_path, in_memory):
    from PIL import Image

    parts = []
    for place, keep in enumerate(in_memory):
        for name in ("a", "b"):
            folder = tmp_path / str(place) / name
            folder.mkdir(parents=True)
            for number in range(3):
                color = 100 * place + 10 * number + (name == "b")
                Image.new("L", (4, 4), color=color).save(folder / f"{number}.png")
        memory = 4 << 30 if keep else 0
        images = load(
            tmp_path / str(place), "train", whole=True, memory=memory, report=lambda text: None
        )
        assert (images.pixels is not None) == keep
        parts.append(images)
    joined = class_lists._join([select_classes(part, ["b", "a"]) for part in parts])
    shown = [int(joined.read(place)[0, 0, 0]) for place in range(len(joined))]
    assert sorted(shown) == sorted([*(c + 10 * n for n in range(3) for c in (0, 1, 100, 101))])
    assert [value % 10 == 1 for value in shown] == (joined.labels == 0).tolist()
