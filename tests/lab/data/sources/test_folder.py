"""Image folders: layouts, what is ignored, what is refused."""

import os
import subprocess
import sys

import pytest
import torch
from PIL import Image

from tammes.lab.data import DataError, load


def test_folders_of_a_split_are_read(image_folder, picture, said):
    root = image_folder({"train/b": 3, "train/a": 2, "test/a": 1, "test/b": 1})
    train = load(root, "train", report=said.append)
    assert train.classes == ("a", "b")
    assert train.labels.tolist() == [0, 0, 1, 1, 1]
    assert train.index.tolist() == [0, 1, 2, 3, 4]
    assert train.shape == (3, 10, 10)
    assert train.source == str(root)
    expected = picture(sum(map(ord, "train/b")) * 1000)
    assert train.read(2).permute(1, 2, 0).numpy().tolist() == expected.tolist()
    assert len(load(root, "test", report=said.append)) == 2
    assert said == [f"{root}: decoding 5 images", f"{root}: decoding 2 images"]


@pytest.mark.parametrize("name", ["val", "validation", "valid", "Val"])
def test_a_validation_folder_is_used_to_test_where_there_is_no_other(image_folder, said, name):
    root = image_folder({"train/a": 2, "train/b": 2, f"{name}/a": 1, f"{name}/b": 1})
    assert len(load(root, "test", report=said.append)) == 2
    assert said[0] == f"{root}: no test partition, so {name.lower()} is used for testing"
    assert len(load(root, "train", report=said.append)) == 4
    assert len(load(root, "validation", report=said.append)) == 2


def test_a_validation_folder_beside_a_test_folder_is_reported_as_unused(image_folder, said):
    root = image_folder({f"{part}/{name}": 2 for part in ("train", "val", "test") for name in "ab"})
    assert len(load(root, "train", report=said.append)) == 4
    assert said[0] == f"{root}: val is not used; validation images are held out of train"
    said.clear()
    assert len(load(root, "test", report=said.append)) == 4
    assert not any("not used" in text for text in said)


def test_class_folders_alone_are_split_the_same_way_every_time(image_folder, said):
    root = image_folder({"a": 10, "b": 20})
    train, test = (load(root, partition, report=said.append) for partition in ("train", "test"))
    assert train.counts() == [8, 16]
    assert test.counts() == [2, 4]
    assert torch.cat([train.index, test.index]).sort().values.tolist() == list(range(30))
    assert load(root, "test", report=said.append).index.equal(test.index)
    assert said[0] == (f"{root}: no test partition, so 20% of every class is held out for testing")


def test_a_training_partition_alone_gives_a_test_partition(image_folder, said):
    root = image_folder({"train/a": 10, "train/b": 10})
    assert len(load(root, "train", report=said.append)) == 16
    assert len(load(root, "test", report=said.append)) == 4
    assert len(load(root, "train", whole=True, report=said.append)) == 20


def test_a_source_that_is_all_for_testing_is_taken_whole(image_folder, said):
    train = load(image_folder({"a": 5, "b": 5, "c": 5}), "train", whole=True, report=said.append)
    other = image_folder({"c": 2, "a": 1}, name="others", width=30, height=20)
    test = load(other, "test", like=train, whole=True, report=said.append)
    assert test.classes == ("a", "b", "c")
    assert test.labels.tolist() == [0, 2, 2]
    assert test.shape == train.shape
    assert not any("64×64" in line for line in said)


def test_a_class_may_be_called_train(image_folder, said):
    root = image_folder({"train": 5, "car": 5})
    assert load(root, "train", report=said.append).classes == ("car", "train")


def test_hidden_and_other_files_are_ignored(image_folder, said):
    root = image_folder({"a": 3, "b": 3})
    (root / ".git").mkdir()
    (root / "__MACOSX").mkdir()
    (root / "a" / ".hidden.png").write_bytes(b"")
    (root / "a" / "notes.txt").write_text("no image")
    (root / "b" / ".thumbs").mkdir()
    (root / "b" / ".thumbs" / "1.png").write_bytes(b"")
    (root / "README.md").write_text("no image")
    assert load(root, "train", whole=True, report=said.append).counts() == [3, 3]


def test_folders_in_a_class_and_links_are_followed_but_not_in_circles(image_folder, said):
    root = image_folder({"a": 2, "b": 2, "b/more": 1})
    elsewhere = image_folder({"kept": 3}, name="elsewhere")
    (root / "c").symlink_to(elsewhere / "kept")
    (root / "a" / "link.PNG").symlink_to(root / "b" / "000.png")
    (root / "a" / "circle").symlink_to(root / "a")
    images = load(root, "train", whole=True, report=said.append)
    assert images.classes == ("a", "b", "c")
    assert images.counts() == [3, 3, 3]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "猫", "a b'c\"", "%s{0}", "ß"])
def test_a_class_may_have_any_name(image_folder, said, name):
    name = name.replace("/", "∕")
    root = image_folder({name: 3, "other": 3})
    assert name in load(root, "train", whole=True, report=said.append).classes


def test_a_name_that_is_no_text_is_shown_as_well_as_can_be(image_folder, said):
    root = image_folder({"a": 3, "b": 3})
    os.rename(root / "b", os.fsencode(root) + b"/b\xff")
    images = load(root, "train", whole=True, report=said.append)
    assert images.classes == ("a", "b�")
    assert images.counts() == [3, 3]


def test_grey_images_stay_grey_unless_one_has_colour(image_folder, picture, said):
    root = image_folder({"a": 3, "b": 3}, grey=True)
    assert load(root, "train", whole=True, report=said.append).shape == (1, 10, 10)
    Image.fromarray(picture(5)).save(root / "b" / "002.png")
    assert load(root, "train", whole=True, report=said.append).shape == (3, 10, 10)


def test_images_of_different_sizes_are_made_64_and_it_is_said(image_folder, picture, said):
    root = image_folder({"a": 300, "b": 3})
    # Not among those the shape is guessed from.
    Image.fromarray(picture(5, width=12)).save(root / "a" / "006.png")
    images = load(root, "train", whole=True, report=said.append)
    assert images.shape == (3, 64, 64)
    line = (
        f"{root}: the images differ in size, so all are resized to 64×64; "
        "image_size sets another size"
    )
    assert said.count(line) == 1
    load(root, "train", whole=True, report=said.append)
    assert said.count(line) == 2
    said.clear()
    assert load(root, "train", whole=True, size=7, report=said.append).shape == (3, 7, 7)
    assert line not in said


def test_images_of_one_oblong_size_keep_it(image_folder, said):
    root = image_folder({"a": 3, "b": 3}, width=8, height=16)
    assert load(root, "train", whole=True, report=said.append).shape == (3, 16, 8)


def test_images_that_cannot_be_read_are_named_and_counted(image_folder, said):
    root = image_folder({"a": 5, "b": 5})
    (root / "a" / "001.png").write_bytes(b"")
    (root / "b" / "002.png").write_bytes((root / "b" / "002.png").read_bytes()[:100])
    (root / "b" / "link.png").symlink_to(root / "nowhere.png")
    for _ in range(2):
        with pytest.raises(DataError) as raised:
            load(root, "train", whole=True, report=said.append)
        text = str(raised.value)
        assert text.startswith(f"{root}: 3 images of 11 cannot be read: ")
        assert f"{root}/a/001.png (not an image)" in text
        assert f"{root}/b/link.png (no such file or directory)" in text
        assert text.endswith("; skip_corrupt leaves them out")
        assert "\n" not in text
    images = load(root, "train", whole=True, skip_corrupt=True, report=said.append)
    assert images.counts() == [4, 4]
    assert images.index.tolist() == [0, 2, 3, 4, 5, 6, 8, 9]
    assert said[-1].startswith("3 images could not be read and were left out: ")
    assert f"{root}/a/001.png (not an image)" in said[-1]
    # What is left is what belongs there.
    whole = Image.open(root / "b" / "003.png")
    assert images.read(6).permute(1, 2, 0).numpy().tolist() == list(
        map(list, [[list(whole.getpixel((x, y))) for x in range(10)] for y in range(10)])
    )


def test_many_images_that_cannot_be_read_are_counted_and_some_named(image_folder, said):
    root = image_folder({"a": 10, "b": 5})
    for number in range(8):
        (root / "a" / f"{number:03}.png").write_bytes(b"x")
    load(root, "train", whole=True, skip_corrupt=True, report=said.append)
    assert said[-1].startswith("8 images could not be read and were left out: ")
    assert said[-1].endswith("004.png (not an image) and 3 more")


def test_a_class_without_a_readable_image_is_named(image_folder, said):
    root = image_folder({"a": 3, "b": 1})
    (root / "b" / "000.png").write_bytes(b"")
    with pytest.raises(DataError, match="no image of class 'b' can be read"):
        load(root, "train", whole=True, skip_corrupt=True, report=said.append)


def test_where_no_image_can_be_read_nothing_is_left_to_skip(image_folder, said):
    root = image_folder({"a": 1, "b": 1})
    for name in "ab":
        (root / name / "000.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 images of 2 cannot be read: .*\(not an image\)$"):
        load(root, "train", skip_corrupt=True, report=said.append)


@pytest.mark.parametrize(
    ("layout", "partition", "message"),
    [
        ({"a": 3, "b": 0}, "train", "a class folder is expected to have images, '.*/b' has none"),
        ({"train/a": 1, "train/b": 1, "test/a": 0, "test/b": 1}, "test", "'.*/test/a' has none"),
        ({"a": 3}, "train", r"images of 2 classes or more are needed, got 1 \('a'\)"),
        ({"a": 0, "b": 0}, "train", r"there is no image in it \(\.bmp, .*\.webp\)"),
        ({"": 4}, "train", r"one folder for each class .*, got 4 images directly in it"),
        ({"": 0}, "train", "one folder for each class .*, got nothing like that"),
        (
            {"a": 3, "b": 3},
            "query",
            "no partition 'query', it has none, so train and test are made",
        ),
        (
            {"train/a": 1, "train/b": 1, "test/a": 1},
            "novel",
            "there is no partition 'novel', it has test, train",
        ),
        (
            {"train/a": 1, "train/b": 1, "test/a": 1, "test/c": 1},
            "test",
            "1 class of the test images, 'c', is not among the 2 of the training images",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(image_folder, said, layout, partition, message):
    root = image_folder(layout)
    with pytest.raises(DataError, match=message) as raised:
        load(root, partition, report=said.append)
    assert "\n" not in str(raised.value)


def test_classes_only_in_another_test_source_are_named(image_folder, said):
    train = load(image_folder({"a": 3, "b": 3}), "train", report=said.append)
    other = image_folder({"a": 1, "x": 1, "y": 2}, name="others")
    with pytest.raises(DataError, match="2 classes of the test images, 'x', 'y', are not among"):
        load(other, "test", like=train, whole=True, report=said.append)


def test_a_test_split_may_lack_a_class(image_folder, said):
    root = image_folder({"train/a": 1, "train/b": 1, "train/c": 1, "test/b": 2})
    test = load(root, "test", report=said.append)
    assert test.classes == ("a", "b", "c")
    assert test.counts() == [0, 2, 0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/folder", "no/such/folder: there is no such file, folder or known name"),
        ("./nowhere", "nowhere: there is no such file, folder"),
        ("a/nowhere.parquet", "nowhere.parquet: there is no such file"),
        ("cifar1000", "did you mean cifar100"),
        ("Digits", "did you mean digits"),
        ("qqqq", "a name on the hub is OWNER/NAME"),
    ],
)
def test_what_is_not_there_is_named(source, message, said):
    with pytest.raises(DataError, match=message):
        load(source, "train", report=said.append)


def test_a_file_of_another_kind_is_refused(tmp_path, said):
    (tmp_path / "pictures.zip").write_bytes(b"PK")
    with pytest.raises(
        DataError, match=r"a folder, a \.csv, \.tsv or \.parquet file is expected, got \.zip"
    ):
        load(tmp_path / "pictures.zip", "train", report=said.append)


def test_a_size_below_one_is_refused(image_folder):
    with pytest.raises(ValueError, match="a size of at least 1, got 0"):
        load(image_folder({"a": 1, "b": 1}), "train", size=0)


def test_what_is_said_goes_to_stderr_by_default(image_folder, capsys):
    load(image_folder({"a": 5, "b": 5}), "train")
    captured = capsys.readouterr()
    assert "20% of every class is held out" in captured.err
    assert captured.out == ""


def test_loading_works_at_the_top_of_a_script(image_folder, tmp_path, cache_folder):
    # Processes that start the script anew would start processes anew.
    root = image_folder({"a": 400, "b": 400})
    script = tmp_path / "script.py"
    script.write_text(
        "from tammes.lab.data import decode, load\n"
        "decode._WORTH = 0\n"
        f"print(len(load({str(root)!r}, 'train', whole=True)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "800\n"
