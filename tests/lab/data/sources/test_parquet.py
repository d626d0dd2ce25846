"""Parquet: layouts of Hugging Face, partitions, random access, what is refused."""

import multiprocessing
import pickle
import subprocess
import sys

import pyarrow
import pytest
import torch
from torch.utils.data import DataLoader

from tammes.lab.data import DataError, load
from tammes.lab.data.sources import parquet


@pytest.fixture
def rows(picture, encode):
    """Bytes of images 0, 1, 2..."""

    def make(count, **options):
        return [encode(picture(number, **options)) for number in range(count)]

    return make


def pixels_of(picture, number):
    return torch.from_numpy(picture(number)).permute(2, 0, 1)


def test_files_named_by_their_split_are_read_with_names_of_classes(
    tmp_path, rows, write_table, picture, said
):
    names = ["zebra", "<script>"]
    columns = {"image": rows(4), "label": [1, 0, 1, 0]}
    write_table(tmp_path / "x-train-0.parquet", columns, names=names)
    write_table(tmp_path / "x-train-1.parquet", columns, names=names)
    write_table(tmp_path / "x-test.parquet", {"image": rows(1), "label": [0]}, names=names)
    train = load(tmp_path, "train", report=said.append)
    # The order of the names is that of the file, not of the alphabet.
    assert train.classes == ("zebra", "<script>")
    assert train.labels.tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert train.read(5).equal(pixels_of(picture, 1))
    test = load(tmp_path, "test", report=said.append)
    assert (len(test), test.labels.tolist()) == (1, [0])


@pytest.mark.parametrize(
    "name", ["data/train-00000-of-00001.parquet", "train/0000.parquet", "my_train_set.parquet"]
)
def test_the_split_is_in_the_name_of_file_or_folder(tmp_path, rows, write_table, said, name):
    write_table(tmp_path / name, {"image": rows(4), "label": [0, 1, 0, 1]})
    write_table(tmp_path / name.replace("train", "test"), {"image": rows(2), "label": [0, 1]})
    assert len(load(tmp_path, "train", report=said.append)) == 4
    assert len(load(tmp_path, "test", report=said.append)) == 2


def test_parts_of_one_set_are_put_together_and_held_out(tmp_path, rows, write_table, said):
    for part in range(2):
        columns = {"image": rows(5), "label": [0, 1, 0, 1, 0]}
        write_table(tmp_path / f"part-{part}.parquet", columns)
    assert len(load(tmp_path, "train", report=said.append)) == 8
    assert "held out" in said[0]


def test_files_whose_name_tells_no_split_are_left_out_and_named(tmp_path, rows, write_table, said):
    write_table(tmp_path / "train.parquet", {"image": rows(4), "label": [0, 1, 0, 1]})
    write_table(tmp_path / "test.parquet", {"image": rows(4), "label": [0, 1, 0, 1]})
    write_table(tmp_path / "other.parquet", {"image": rows(4), "label": [0, 1, 0, 1]})
    assert len(load(tmp_path, "train", report=said.append)) == 4
    assert said[0] == "left out, as the name contains no partition: other.parquet"


def test_a_single_file_is_split_whatever_its_name(tmp_path, rows, write_table, said):
    path = write_table(tmp_path / "train.parquet", {"image": rows(10), "label": [0, 1] * 5})
    assert len(load(path, "train", report=said.append)) == 8
    assert len(load(path, "test", report=said.append)) == 2
    assert len(load(path, "train", whole=True, report=said.append)) == 10


def test_a_test_file_alone_is_not_trained_on(tmp_path, rows, write_table, said):
    write_table(tmp_path / "test.parquet", {"image": rows(4), "label": [0, 1, 0, 1]})
    with pytest.raises(DataError, match="there is no partition 'train', it has test"):
        load(tmp_path, "train", report=said.append)


def test_columns_of_splits_are_used(tmp_path, rows, write_table, said):
    path = write_table(
        tmp_path / "set.parquet",
        {
            "image": rows(8),
            "label": [0, 1, 2, 3, 0, 1, 2, 3],
            "official_split": ["train"] * 4 + ["test"] * 4,
            "fewshot_split": ["base", "base", "novel", "novel"] * 2,
        },
        names=["a", "b", "c", "d"],
    )
    train, test = (load(path, partition, report=said.append) for partition in ("train", "test"))
    assert (len(train), len(test)) == (4, 4)
    assert test.classes == ("a", "b", "c", "d")
    novel = load(path, "novel", report=said.append)
    assert novel.classes == ("c", "d")
    assert novel.labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match="no partition 'x', it has base, novel, test, train"):
        load(path, "x", report=said.append)


def test_labels_may_be_texts_numbers_or_two_columns(tmp_path, rows, write_table, said):
    def classes(name, **columns):
        path = write_table(tmp_path / f"{name}.parquet", {"image": rows(4), **columns})
        images = load(path, "train", whole=True, report=said.append)
        return images.classes, images.labels.tolist()

    assert classes("texts", label=["b", "a", "b", "c"]) == (("a", "b", "c"), [1, 0, 1, 2])
    coded = pyarrow.array(["b", "a", "b", "c"]).dictionary_encode()
    assert classes("coded", species=coded) == (("a", "b", "c"), [1, 0, 1, 2])
    # Numbers in the order of numbers, without those that do not occur.
    assert classes("numbers", label=[10, 9, 10, 2]) == (("2", "9", "10"), [2, 1, 2, 0])
    two = {"alphabet": ["x", "x", "y", "y"], "character": ["1", "2", "1", "1"]}
    assert classes("two", **two) == (("x/1", "x/2", "y/1"), [0, 1, 2, 2])


def test_classes_are_those_with_training_examples(tmp_path, rows, write_table, said):
    path = write_table(
        tmp_path / "x.parquet", {"image": rows(4), "label": [3, 1, 3, 1]}, names=list("abcd")
    )
    images = load(path, "train", whole=True, report=said.append)
    assert images.classes == ("b", "d")
    assert images.labels.tolist() == [1, 0, 1, 0]


def test_images_may_be_bytes_alone_or_paths_beside_the_file(
    tmp_path, rows, write_table, picture, said
):
    plain = pyarrow.array(rows(2), type=pyarrow.binary())
    path = write_table(tmp_path / "plain.parquet", {"img": plain, "label": [0, 1]})
    assert load(path, "train", whole=True, report=said.append).read(1).equal(pixels_of(picture, 1))
    (tmp_path / "1.png").write_bytes(rows(2)[1])
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    paths = pyarrow.array([{"bytes": None, "path": "1.png"}] * 2, type=kind)
    path = write_table(tmp_path / "paths.parquet", {"image": paths, "label": [0, 1]})
    assert load(path, "train", whole=True, report=said.append).read(0).equal(pixels_of(picture, 1))


def test_a_row_that_cannot_be_read_is_named(tmp_path, rows, write_table, said):
    images = rows(9)
    images[4], images[7] = b"", images[7][:70]
    for name in ("x-train-0", "x-train-1"):
        write_table(tmp_path / f"{name}.parquet", {"image": images, "label": [0, 1, 2] * 3})
    with pytest.raises(DataError) as raised:
        load(tmp_path, "train", whole=True, report=said.append)
    assert "4 images of 18 cannot be read" in str(raised.value)
    assert f"{tmp_path}/x-train-1.parquet row 4 (not an image)" in str(raised.value)
    left = load(tmp_path, "train", whole=True, skip_corrupt=True, report=said.append)
    assert len(left) == 14


@pytest.fixture
def streamed(tmp_path, rows, write_table, said):
    columns = {"image": rows(20), "label": [0, 1] * 10}
    path = write_table(tmp_path / "x.parquet", columns, rows_per_group=3)
    return load(path, "train", whole=True, memory=100, report=said.append)


def test_what_does_not_fit_in_memory_is_read_one_by_one(streamed, picture):
    assert streamed.pixels is None
    assert streamed.shape == (3, 10, 10)
    for position in (19, 0, 7, 8):
        assert streamed.read(position).equal(pixels_of(picture, position))
    chosen = streamed.subset(torch.tensor([5, 2]))
    assert chosen.read(0).equal(pixels_of(picture, 5))
    assert chosen.read(1).dtype == torch.uint8


def test_only_some_groups_of_rows_are_kept(streamed, picture, monkeypatch):
    monkeypatch.setattr(parquet, "_KEPT", 1)
    streamed = pickle.loads(pickle.dumps(streamed))
    items = streamed.reader.items
    for position in range(20):
        assert streamed.read(position).equal(pixels_of(picture, position))
        assert len(items.kept) == 1


def test_a_group_of_rows_is_read_once(streamed, monkeypatch):
    streamed = pickle.loads(pickle.dumps(streamed))
    streamed.read(0)
    monkeypatch.setattr(streamed.reader.items, "files", None)
    streamed.read(2)
    with pytest.raises(DataError, match="row 3 cannot be read"):
        streamed.read(3)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_what_this_process_reads(streamed, picture, method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    streamed.read(0)
    loader = DataLoader(
        Positions(streamed), batch_size=4, num_workers=1, multiprocessing_context=method
    )
    together = torch.cat(list(loader))
    assert together.equal(torch.stack([pixels_of(picture, number) for number in range(20)]))


class Positions:
    """Images for a DataLoader."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, position):
        return self.images.read(position)


def test_images_survive_pickling(streamed, picture):
    streamed.read(0)
    copy = pickle.loads(pickle.dumps(streamed))
    assert copy.read(11).equal(pixels_of(picture, 11))
    assert copy.digest == streamed.digest


def test_mean_and_deviation_of_what_is_streamed_are_those_of_what_is_in_memory(
    streamed, tmp_path, said
):
    whole = load(tmp_path / "x.parquet", "train", whole=True, report=said.append)
    assert whole.pixels is not None
    assert whole.mean_std() == streamed.mean_std()
    assert whole.digest == streamed.digest


def test_a_streamed_image_that_cannot_be_read_is_named_when_it_is_needed(
    tmp_path, rows, write_table, said
):
    images = rows(6)
    images[4] = images[4][:70]
    path = write_table(tmp_path / "x.parquet", {"image": images, "label": [0, 1] * 3})
    lazy = load(path, "train", whole=True, memory=1, report=said.append)
    assert len(lazy) == 6
    with pytest.raises(DataError, match=r"x\.parquet row 4 cannot be read \(.*truncated"):
        lazy.read(4)
    # To leave them out, all have to be decoded once.
    for _ in range(2):
        left = load(path, "train", whole=True, memory=1, skip_corrupt=True, report=said.append)
        assert left.index.tolist() == [0, 1, 2, 3, 5]
        assert left.pixels is None
    assert "1 image could not be read and was left out" in said[-1]


def test_a_second_look_at_what_is_streamed_takes_no_time(streamed, tmp_path, said):
    assert any("checking" in line for line in said)
    said.clear()
    load(tmp_path / "x.parquet", "train", whole=True, memory=100, report=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("columns", "names", "message"),
    [
        ({"a": [1], "b": ["x"]}, None, "a column of encoded images .* got the columns 'a', 'b'"),
        (
            {"image": 1, "size": [1.5]},
            None,
            "a column of labels .* got the columns 'image', 'size'",
        ),
        ({"image": 1, "label": [-1]}, None, "column 'label' is expected to be 0 or more, got -1"),
        ({"image": 1, "label": [5]}, list("ab"), "'label' is expected from 0 to 1, got 5"),
        ({"image": 1, "label": [-1]}, list("ab"), "'label' is expected from 0 to 1, got -1"),
        ({"image": 2, "label": [1, None]}, None, "column 'label' has 1 empty rows"),
        ({"image": 2, "label": [1, 1]}, None, r"2 classes or more are needed, got 1 \('1'\)"),
        ({"image": 2, "label": [1.0, 2.0]}, None, "a column of labels is expected"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(
    tmp_path, rows, write_table, said, columns, names, message
):
    if isinstance(columns.get("image"), int):
        columns = {**columns, "image": rows(columns["image"])}
    path = write_table(tmp_path / "x.parquet", columns, names=names)
    with pytest.raises(DataError, match=message) as raised:
        load(path, "train", whole=True, report=said.append)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_table_without_rows_says_so(tmp_path, write_table, said):
    empty = pyarrow.array([], type=pyarrow.binary())
    path = write_table(
        tmp_path / "x.parquet", {"image": empty, "label": pyarrow.array([], pyarrow.int64())}
    )
    with pytest.raises(DataError, match="there is no image in it"):
        load(path, "train", report=said.append)


def test_a_damaged_file_is_named(tmp_path, rows, write_table, said):
    path = write_table(tmp_path / "x.parquet", {"image": rows(3), "label": [0, 1, 0]})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"x\.parquet: damaged, or not a parquet file"):
        load(path, "train", report=said.append)


def test_files_of_different_columns_do_not_go_together(tmp_path, rows, write_table, said):
    write_table(tmp_path / "train-0.parquet", {"image": rows(2), "label": [0, 1]})
    write_table(tmp_path / "train-1.parquet", {"image": rows(2), "other": [0, 1]})
    with pytest.raises(DataError, match=r"train-1\.parquet: the columns are expected to be those"):
        load(tmp_path, "train", report=said.append)


def test_labels_of_train_and_test_are_matched_by_name(tmp_path, rows, write_table, said):
    write_table(
        tmp_path / "train.parquet", {"image": rows(2), "label": [0, 1]}, names=["cat", "dog"]
    )
    write_table(
        tmp_path / "test.parquet", {"image": rows(2), "label": [0, 1]}, names=["dog", "cat"]
    )
    test = load(tmp_path, "test", report=said.append)
    assert [test.classes[label] for label in test.labels.tolist()] == ["dog", "cat"]
    assert test.classes == ("cat", "dog")


def test_pyarrow_and_pillow_are_all_it_takes_and_only_when_they_are_needed(
    tmp_path, rows, write_table
):
    path = write_table(tmp_path / "x.parquet", {"image": rows(4), "label": [0, 1, 0, 1]})
    program = (
        "import sys\n"
        "for name in ('datasets', 'pandas', 'torchvision', 'sklearn'): sys.modules[name] = None\n"
        "from tammes.lab.data import load\n"
        "print({'PIL', 'pyarrow', 'safetensors'} & set(sys.modules))\n"
        f"print(len(load({str(path)!r}, 'train', whole=True)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n4\n", done.stderr
