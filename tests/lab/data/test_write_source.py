"""Images that a program holds become a source: paths, arrays, tensors, a Dataset."""

import re

import numpy
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from tammes.lab.data import DataError, load, write_source

PIXELS = numpy.random.default_rng(0).integers(0, 256, (6, 9, 7, 3), dtype="uint8")
LABELS = [0, 1, 0, 1, 0, 1]


class Pictures(Dataset):
    """A Dataset of torch with names of classes, which are not in alphabetical order."""

    classes = ("shoe", "coat")

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, row):
        # An iteration ends where an index fails, and this one never does.
        return Image.fromarray(PIXELS[row % 6]), LABELS[row % 6]


def whole(path):
    return load(path, "train", whole=True, report=lambda text: None)


GIVEN = {
    "an array": (PIXELS, LABELS),
    "floating pixels": (PIXELS.astype("float64") / 255, torch.tensor(LABELS)),
    "a tensor": (torch.from_numpy(PIXELS).permute(0, 3, 1, 2), numpy.array(LABELS)),
    "images of Pillow": ([Image.fromarray(pixels) for pixels in PIXELS], LABELS),
    "a Dataset": (Pictures(), None),
    "pairs": ([*zip(PIXELS, LABELS, strict=True)], None),
    "pairs one by one": (zip(PIXELS, LABELS, strict=True), None),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_images_of_a_program_are_read_back_pixel_by_pixel(kind, tmp_path):
    images = whole(write_source(tmp_path / "mine.parquet", *GIVEN[kind]))
    assert images.labels.tolist() == LABELS
    assert images.classes == (("shoe", "coat") if kind == "a Dataset" else ("0", "1"))
    assert torch.equal(images.pixels, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_list_of_paths_and_labels_is_a_table_or_a_file_of_images(image_folder, tmp_path, suffix):
    files = sorted(image_folder({"cat": 2, "dog": 3}).rglob("*.png"))
    labels = [file.parent.name for file in files]
    path = write_source(tmp_path / "elsewhere" / f"mine.{suffix}", files, labels)
    images = whole(path)
    assert images.classes == ("cat", "dog")
    assert images.counts() == [2, 3]
    names = write_source(tmp_path / f"named.{suffix}", files, [0, 0, 1, 1, 1], classes=["b", "a"])
    assert whole(names).counts() == ([3, 2] if suffix == "csv" else [2, 3])


def test_files_of_partitions_are_a_folder(tmp_path):
    for part, rows in (("train", slice(0, 4)), ("test", slice(4, 6))):
        write_source(tmp_path / "mine" / f"{part}.parquet", PIXELS[rows], LABELS[rows])
    train = load(tmp_path / "mine", "train")
    assert train.counts() == [2, 2]
    assert load(tmp_path / "mine", "test", like=train).counts() == [1, 1]


REFUSED = {
    "another format": (("a.zip", PIXELS, LABELS), "ends in .csv or .parquet is expected"),
    "too few labels": (("a.parquet", PIXELS, LABELS[:2]), "got 6 images and 2 labels"),
    "no labels": (("a.parquet", PIXELS), "expects labels, or images as pairs (image, label)"),
    "one-hot labels": (("a.parquet", PIXELS, numpy.eye(6)), "if it is one-hot, use argmax(1)"),
    "some names": (("a.parquet", PIXELS, [0, 1, 2, "a", 1, 0]), "got some of each"),
    "pixels in a table": (("a.csv", PIXELS, LABELS), "a .parquet file holds images"),
    "pixels up to 255": (("a.parquet", PIXELS * 1.0, LABELS), "expected in [0, 1], got"),
    "no image": (("a.parquet", [None] * 6, LABELS), "a Pillow image, an array or a tensor"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_images_that_cannot_be_written_are_refused_and_nothing_is_left(given, tmp_path):
    (name, *images), message = REFUSED[given]
    with pytest.raises(DataError, match=re.escape(message)):
        write_source(tmp_path / name, *images)
    assert not [*tmp_path.iterdir()]


def test_a_label_without_a_name_is_refused(tmp_path):
    with pytest.raises(DataError, match="labels from 0 to 0, got 1"):
        write_source(tmp_path / "a.parquet", PIXELS, LABELS, classes=["shoe"])
