"""Labels in a CSV table, or in the names of the files."""

import csv

import pytest
from PIL import Image

from tammes.lab.data import DataError, load


@pytest.fixture
def flat(tmp_path, picture):
    """A folder of coat_0.png to shoe_4.png, and the files with their classes."""
    folder = tmp_path / "flat"
    folder.mkdir()
    files = [(f"{name}_{number}.png", name) for name in ("coat", "shoe") for number in range(5)]
    for seed, (file, _) in enumerate(files):
        Image.fromarray(picture(seed)).save(folder / file)
    return folder, files


def table(path, columns, rows, delimiter=","):
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([columns, *rows])
    return path


@pytest.mark.parametrize(
    "columns",
    [
        ("path", "label"),
        ("filename", "class"),
        ("file_name", "type of thing"),
        ("Image", "Class"),
        ("Image Path", " Label"),
    ],
)
def test_a_table_of_paths_and_labels_is_a_source(flat, said, columns):
    folder, files = flat
    path = table(
        folder.parent / "all.csv", columns, [(f"flat/{file}", name) for file, name in files]
    )
    train, test = (load(path, part, report=said.append) for part in ("train", "test"))
    assert train.classes == ("coat", "shoe")
    assert (train.counts(), test.counts()) == ([4, 4], [1, 1])


@pytest.mark.parametrize(("name", "delimiter"), [("labels.csv", ","), ("labels.tsv", "\t")])
def test_a_flat_folder_with_a_table_is_a_source_and_the_table_is_named(flat, said, name, delimiter):
    folder, files = flat
    table(folder / name, ("file", "label"), files, delimiter)
    assert load(folder, "train", report=said.append).counts() == [4, 4]
    assert said[0] == f"{folder}: the labels are in {name}"


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ";"), ("a.tsv", "\t")])
def test_values_may_be_separated_by_semicolons_and_tabs(flat, said, name, delimiter):
    folder, files = flat
    rows = [(file, f"{label}, old") for file, label in files]
    path = table(folder / name, ("image_id", "label"), rows, delimiter)
    assert load(path, "train", report=said.append).classes == ("coat, old", "shoe, old")


def test_an_image_id_beside_the_image_is_no_path(flat, said):
    folder, files = flat
    rows = [(number, file, name) for number, (file, name) in enumerate(files)]
    path = table(folder / "labels.csv", ("image_id", "image", "label"), rows)
    assert load(path, "train", report=said.append).counts() == [4, 4]


@pytest.mark.parametrize(
    ("header", "separator"),
    [('"path","label; of; it"', ","), ("\npath;label", ";"), ("path;label, of, it", ";")],
)
def test_the_separator_is_the_one_that_the_rows_agree_on(flat, said, header, separator):
    folder, files = flat
    path = folder / "labels.csv"
    path.write_text("\n".join([header, *(separator.join(row) for row in files)]))
    assert load(path, "train", report=said.append).counts() == [4, 4]


def test_a_column_split_names_the_partitions(flat, said):
    folder, files = flat
    rows = [(file, name, "Test" if "4" in file else "train") for file, name in files]
    table(folder / "labels.csv", ("file", "label", "split"), rows)
    assert load(folder, "train", report=said.append).counts() == [4, 4]
    assert load(folder, "test", report=said.append).counts() == [1, 1]
    assert not any("held out" in text for text in said)


def test_numbers_are_classes_in_their_order(flat, said):
    folder, files = flat
    rows = [(file, 10 if name == "coat" else 2) for file, name in files]
    path = table(folder / "labels.csv", ("path", "label"), rows)
    assert load(path, "train", report=said.append).classes == ("2", "10")


@pytest.mark.parametrize("index", ["", "Unnamed: 0"])
def test_an_index_of_pandas_is_no_column(flat, said, index):
    folder, files = flat
    rows = [(number, file, name) for number, (file, name) in enumerate(files)]
    path = table(folder / "labels.csv", (index, "path", "type of thing"), rows)
    assert load(path, "train", report=said.append).classes == ("coat", "shoe")


def test_whole_numbers_with_a_point_are_the_same_classes(flat, said):
    folder, files = flat
    rows = [(file, "10.0" if name == "coat" else "2.0") for file, name in files]
    path = table(folder / "labels.csv", ("path", "label"), rows)
    assert load(path, "train", report=said.append).classes == ("2", "10")


def test_spaces_after_separators_and_paths_of_windows_are_read(flat, said):
    folder, files = flat
    rows = [(f"flat\\{file}", f" {name}") for file, name in files]
    path = table(folder.parent / "labels.csv", ("path", " label"), rows)
    assert load(path, "train", report=said.append).classes == ("coat", "shoe")


def test_files_in_several_rows_are_reported(flat, said):
    folder, files = flat
    path = table(folder / "labels.csv", ("path", "label"), [*files, files[1]])
    load(path, "train", report=said.append)
    assert said[0].startswith(f"{path}: 1 of 11 rows repeat a file, such as 'coat_1.png'; it may")
    path = table(folder / "torn.csv", ("path", "label"), [*files, files[1], ("coat_2.png", "shoe")])
    said.clear()
    load(path, "train", report=said.append)
    assert "2 of 12 rows repeat a file, 1 file with different labels, such as 'coat_2" in said[0]


def test_a_missing_file_is_named_counted_and_left_out_on_request(flat, said):
    folder, files = flat
    path = table(folder / "labels.csv", ("path", "label"), [*files, ("lost.png", "coat")])
    with pytest.raises(DataError, match=r"1 image of 11 cannot be read: .*lost.png .*skip_corrupt"):
        load(path, "train", report=said.append)
    images = load(path, "train", skip_corrupt=True, whole=True, report=said.append)
    assert images.counts() == [5, 5]
    assert "1 image could not be read and was left out" in said[-1]


def test_columns_that_differ_in_capitals_only_are_refused(flat, said):
    folder, files = flat
    rows = [(file, label, "x") for file, label in files]
    path = table(folder / "labels.csv", ("path", "Label", "label"), rows)
    with pytest.raises(DataError, match="two columns are named label, up to capitals and spaces"):
        load(path, "train", report=said.append)


def test_classes_of_very_different_sizes_are_reported(flat, said, picture):
    folder, files = flat
    Image.fromarray(picture(0)).save(folder / "hat_0.png")
    rows = [(files[0][0], "coat")] + [(file, "any") for file, _ in files[:]]
    path = table(folder / "labels.csv", ("path", "label"), [*rows, ("hat_0.png", "hat")])
    load(path, "train", whole=True, report=said.append)
    assert f"{path}: the classes differ in size, from 1 of 'coat' to 10 of 'any'" in said[-1]
    assert said[-1].endswith("the loss logit_adjustment() may help")


@pytest.mark.parametrize(
    ("pattern", "classes"),
    [
        ("flat/{label}_*.png", ("coat", "shoe")),
        ("flat/{label}_{number}.png", ("coat", "shoe")),
        ("flat/*_{label}.png", ("0", "1", "2", "3", "4")),
        ("{label}/*.png", None),
    ],
)
def test_a_pattern_finds_the_label_in_the_name(flat, said, pattern, classes):
    folder, _ = flat
    source = f"{folder.parent}/{pattern}"
    if classes is None:
        with pytest.raises(DataError, match="2 classes or more are needed, got 1"):
            load(source, "train", report=said.append)
    else:
        assert load(source, "train", report=said.append).classes == classes
        shown = ", ".join(classes)
        assert said[0] == f"{source}: 10 images of {len(classes)} classes, {shown}"


def test_a_pattern_may_name_the_partition_and_says_what_does_not_match(flat, said):
    folder, files = flat
    for file, _ in files:
        target = folder / ("test" if "4" in file else "train") / file
        target.parent.mkdir(exist_ok=True)
        (folder / file).rename(target)
    (folder / "train" / "readme.png").write_bytes(b"")
    source = f"{folder}/{{split}}/{{label}}_{{number}}.png"
    assert load(source, "test", report=said.append).counts() == [1, 1]
    assert said[0].endswith("classes, coat, shoe; 1 do not match and are left out")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("flat/{lable}_*.png", r"expected to have \{label\} once, .* as in photos/"),
        ("flat/{label}_{label}.png", r"expected to have \{label\} once"),
        ("flat/{label}-*.png", r"no image in '.*flat' matches, such as 'coat_0.png'"),
        ("round/{label}.png", r"there is no folder '.*round'"),
        (
            "flat",
            r"got 10 images directly in it; .* a CSV file with .* path and label, .*\{label\}",
        ),
        ("one.csv", r"columns of paths and of labels are expected, .* got 'name', 'kind'"),
        ("two.csv", r"a column of labels is expected, such as label, got the columns 'path', 'a'"),
        ("three.csv", r"none of its 1 files is there, such as 'x.png'; .* relative to /"),
        ("four.csv", r"four.csv line 3: a path is expected in column 'path', got none"),
        ("five.csv", r"column 'label' has 1 empty rows"),
        ("six.csv", r"six.csv: a line for each image is expected, got none below the names"),
        ("seven.csv", r"such as 'coat_0'; .* with the ending of the file, such as .jpg"),
    ],
)
def test_a_table_or_pattern_that_cannot_be_used_is_one_sentence(flat, said, source, message):
    folder, _ = flat
    here = folder.parent
    table(here / "one.csv", ("name", "kind"), [("flat/coat_0.png", "coat")])
    table(here / "two.csv", ("path", "a", "b"), [("flat/coat_0.png", "coat", "c")])
    table(here / "three.csv", ("path", "label"), [("x.png", "coat")])
    table(here / "four.csv", ("path", "label"), [("flat/coat_0.png", "coat"), ("", "coat")])
    table(here / "five.csv", ("path", "label"), [("flat/coat_0.png", "coat"), ("x.png", "")])
    table(here / "six.csv", ("path", "label"), [])
    table(here / "seven.csv", ("image_id", "label"), [("coat_0", "coat"), ("shoe_0", "shoe")])
    with pytest.raises(DataError, match=message):
        load(here / source, "train", report=said.append)
