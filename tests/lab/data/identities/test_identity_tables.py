"""Tables with identities: metadata.csv of wildlife-datasets, and parquet."""

import re

import pytest
import torch

from tammes.lab.data import DataError
from tammes.lab.data.identities import read_parquet, read_table
from tammes.metrics.functional import retrieval

TABLE = """,image_id,identity,path,split,date
0,a1,Fred,images/1.jpg,train,2020
1,a2,"Ann, the old",images/2.jpg,test,
2,a3,unknown,images/3.jpg,test,2021
3,a4,Fred,images/4.jpg,test,2021
"""


@pytest.fixture
def wildlife(tmp_path):
    """Writes metadata.csv beside images/NUMBER.jpg."""

    def make(text=TABLE, images=4):
        (tmp_path / "images").mkdir()
        for number in range(1, images + 1):
            (tmp_path / "images" / f"{number}.jpg").write_bytes(b"")
        path = tmp_path / "metadata.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def test_paths_and_identities_are_read(wildlife):
    path = wildlife()
    examples = read_table(path)
    assert examples.identities == ["Fred", "Ann, the old", "unknown", "Fred"]
    assert examples.junk.tolist() == [False, False, True, False]
    assert examples.cameras is None
    assert examples.items.fetch(3) == str(path.parent / "images/4.jpg")
    assert not read_table(path, unknown=None).junk.any()


def test_a_partition_is_read(wildlife):
    path = wildlife()
    train, test = (read_table(path, partition=name) for name in ("train", "test"))
    assert (train.identities, test.identities[2]) == (["Fred"], "Fred")
    assert test.items.fetch(0) == str(path.parent / "images/2.jpg")
    result = retrieval(
        torch.ones(1, 2), torch.ones(3, 2), train.identities, test.identities, None, None, test.junk
    )
    assert (result.junk, result.queries_without_match) == (1, 0)


def test_columns_have_other_names_and_cameras(wildlife, tmp_path):
    text = TABLE.replace("identity,path", "name,file").replace("date", "camera")
    path = wildlife(text.replace("test,\n", "test,2019\n"))
    moved = tmp_path / "tables" / "metadata.csv"
    moved.parent.mkdir()
    path.rename(moved)
    examples = read_table(moved, folder=tmp_path, file="file", identity="name")
    assert examples.cameras == ["2020", "2019", "2021", "2021"]
    other = read_table(moved, folder=tmp_path, file="file", identity="name", camera="split")
    assert other.cameras == ["train", "test", "test", "test"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "a line of column names is expected, got an empty table"),
        (TABLE.split("\n")[0], {}, "rows are expected, got an empty table"),
        (
            b"path,identity\na\xff,1\n",
            {},
            "line .*: values separated by commas, semicolons or tabs, in UTF-8, are expected",
        ),
        (TABLE + '4,"a5\n', {}, "line 6: values separated by commas"),
        (TABLE + "4,a5\n", {}, "line 6: 6 values are expected, one for each column, got 2"),
        (TABLE.replace("date", "path"), {}, "of different names are expected, got 'path' twice"),
        (TABLE, {"identity": "identiy"}, "no column 'identiy' of identities; did you mean identit"),
        (TABLE, {"file": "zzz"}, "no column 'zzz' of paths; there are , date, identity, image_id"),
        (TABLE, {"camera": "cam"}, "no column 'cam' of cameras; there are"),
        (TABLE, {"split": "spilt", "partition": "test"}, "no column 'spilt' .* did you mean split"),
        (TABLE, {"partition": "tets"}, "'split' has no partition 'tets'; did you mean test?"),
        (
            TABLE,
            {"camera": "date"},
            "'date' of cameras is empty in 1 of 4 rows, the first is line 3",
        ),
        (
            TABLE.replace("Fred", ""),
            {},
            "'identity' .* is empty in 2 of 4 rows, the first is line 2",
        ),
        (TABLE.replace("4.jpg", "1.jpg"), {}, "in one row, got 'images/1.jpg' in 2 rows; if they"),
    ],
)
def test_a_table_that_cannot_be_used_is_a_sentence(wildlife, text, options, message):
    with pytest.raises(DataError, match=f"metadata.csv.*{message}"):
        read_table(wildlife(text), **options)


def test_missing_files_are_counted(wildlife):
    path = wildlife(images=2)
    message = (
        f"{path}: 2 of 4 files that it names are missing (named 2 times of 4), the first is "
        f"{str(path.parent / 'images/3.jpg')!r} in line 4; its paths are relative to the folder"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        read_table(path)
    with pytest.raises(DataError, match="a file of rows is expected, got no such file"):
        read_table(path.parent / "no.csv")


def test_a_table_of_excel_begins_with_a_mark(wildlife):
    assert read_table(wildlife("\ufeffpath,identity\nimages/1.jpg,a\n")).identities == ["a"]


def test_a_line_is_counted_as_an_editor_does(wildlife):
    text = TABLE.replace("Ann, the old", "Ann,\nthe old").replace("3,a4", "\n3,a4") + "x\n"
    with pytest.raises(DataError, match="line 8: 6 values"):
        read_table(wildlife(text))


@pytest.fixture
def columns(picture, encode):
    images = [encode(picture(number)) for number in range(4)]
    return {
        "image": images,
        "identity": [7, 7, -2, 9],
        "camera": ["north", "south", "north", "north"],
        "split": ["query", "gallery", "gallery", "gallery"],
    }


def test_parquet_has_images_identities_and_cameras(write_table, tmp_path, columns):
    path = write_table(tmp_path / "a.parquet", columns)
    everything = read_parquet(path)
    assert everything.identities == [7, 7, -2, 9]
    assert everything.cameras == ["north", "south", "north", "north"]
    assert not everything.junk.any()
    gallery = read_parquet(str(path), partition="gallery")
    assert gallery.identities == [7, -2, 9]
    assert gallery.items.fetch(2) == columns["image"][3]
    assert read_parquet(path, identity="camera", camera="identity").cameras == [7, 7, -2, 9]


def test_parquet_files_are_read_one_after_the_other(write_table, tmp_path, columns):
    paths = [write_table(tmp_path / f"{name}.parquet", columns) for name in "ab"]
    both = read_parquet(paths, partition="query", identity="camera", unknown="north")
    assert both.identities == ["north", "north"]
    assert both.junk.tolist() == [True, True]
    assert both.items.fetch(1) == columns["image"][0]
    del columns["camera"]
    other = write_table(tmp_path / "c.parquet", columns)
    with pytest.raises(DataError, match=r"c.parquet: the columns are expected .* of .*a.parq"):
        read_parquet([paths[0], other])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"identity": "identiti"}, "no column 'identiti' of identities; did you mean identity"),
        ({}, {"partition": "train"}, "has no partition 'train'; there are gallery, query"),
        ({"identity": [1, None, 2, None]}, {}, "empty in 2 of 4 rows, the first is row 1"),
        ({"identity": [1.5, 2.0, 2.0, 1.0]}, {}, "to have integers or strings, got 1.5"),
        ({"image": ["1.jpg"] * 4}, {}, "a column of encoded images is expected"),
    ],
)
def test_parquet_that_cannot_be_used_is_a_sentence(
    write_table, tmp_path, columns, changes, options, message
):
    path = write_table(tmp_path / "a.parquet", columns | changes)
    with pytest.raises(DataError, match=f"a.parquet: .*{message}"):
        read_parquet(path, **options)


def test_parquet_that_is_empty_missing_or_damaged_is_a_sentence(write_table, tmp_path, columns):
    path = write_table(tmp_path / "a.parquet", {"image": [], "identity": []})
    with pytest.raises(DataError, match="rows are expected, got an empty table"):
        read_parquet(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="damaged, or not a parquet file"):
        read_parquet(path)
    with pytest.raises(DataError, match="got no such file"):
        read_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="one file or more, got none"):
        read_parquet([])
