"""Images in memory, and the embedded digits."""

import pickle

import pytest
import torch
from torch.testing import assert_close

from tammes.lab.data import DataError, Images, load


@pytest.fixture
def few():
    return Images(
        labels=torch.tensor([0, 2, 2, 1]),
        index=torch.tensor([10, 11, 12, 13]),
        classes=("a", "b", "c"),
        shape=(2, 3, 5),
        pixels=torch.randint(0, 256, (4, 2, 3, 5), dtype=torch.uint8),
        source="here",
    )


def test_digits_are_split_evenly_and_always_the_same_way():
    train, test = load("digits", "train"), load("digits", "test")
    assert (len(train), len(test)) == (1348, 449)
    assert train.shape == test.shape == (1, 8, 8)
    assert train.classes == tuple("0123456789")
    assert torch.cat([train.index, test.index]).sort().values.equal(torch.arange(1797))
    for inside, outside in zip(test.counts(), train.counts(), strict=True):
        assert abs(inside / (inside + outside) - 0.25) < 0.01
    # Written down once: other images would make every result on digits another.
    assert (train.digest, test.digest) == ("d23d4bba2fb3ca9e", "459b6eaa8c7c7bbf")


def test_digits_use_all_256_values():
    pixels = load("digits", "train").pixels
    assert pixels.dtype == torch.uint8
    assert (int(pixels.min()), int(pixels.max())) == (0, 255)
    # 8 of 16 is 127.5, and half is rounded to even.
    assert sorted(pixels.unique().tolist())[7:10] == [112, 128, 143]


def test_digits_come_in_another_size():
    assert load("digits", "test", size=16).pixels.shape == (449, 1, 16, 16)


def test_digits_come_in_the_shape_of_others():
    like = load("digits", "train", size=12)
    assert load("digits", "test", like=like).shape == (1, 12, 12)
    colour = Images(like.labels, like.index, like.classes, (3, 8, 8), like.pixels)
    assert load("digits", "test", like=colour).pixels.shape == (449, 3, 8, 8)


def test_digits_have_no_other_partition():
    with pytest.raises(DataError, match="no partition 'val', it has train and test"):
        load("digits", "val")


def test_a_subset_keeps_identity_and_pixels(few):
    some = few.subset(torch.tensor([3, 1]))
    assert some.labels.tolist() == [1, 2]
    assert some.index.tolist() == [13, 11]
    assert some.read(1).equal(few.read(1))
    assert (some.classes, some.shape, some.source) == (few.classes, few.shape, few.source)


def test_a_subset_may_have_other_labels(few):
    some = few.subset(torch.tensor([0, 1, 2, 3]), torch.tensor([1, 1, 1, 1]))
    assert some.labels.tolist() == [1, 1, 1, 1]
    assert few.labels.tolist() == [0, 2, 2, 1]
    # All of them in their order need no second copy.
    assert some.pixels is few.pixels


def test_counts_are_of_all_classes(few):
    assert few.counts() == [1, 1, 2]
    assert few.subset(torch.tensor([1])).counts() == [0, 0, 1]


def test_mean_and_deviation_are_those_of_torch(few):
    mean, std = few.mean_std()
    values = few.pixels.double() / 255
    assert_close(torch.tensor(mean).double(), values.mean((0, 2, 3)), rtol=1e-6, atol=0)
    expected = values.transpose(0, 1).flatten(1).std(1, correction=0)
    assert_close(torch.tensor(std).double(), expected, rtol=1e-6, atol=0)


def test_the_deviation_of_one_value_can_be_divided_by(few):
    flat = Images(few.labels, few.index, few.classes, few.shape, torch.full_like(few.pixels, 51))
    assert flat.mean_std() == ([0.2, 0.2], [1.0, 1.0])


class Counting:
    """Reads grey images, and counts how many."""

    def __init__(self):
        self.reads = 0

    def read(self, row):
        self.reads += 1
        return torch.full((1, 2, 2), row, dtype=torch.uint8)


@pytest.fixture
def streamed():
    return Images(
        torch.tensor([0, 1, 1]), torch.arange(3), ("a", "b"), (1, 2, 2), None, reader=Counting()
    )


def test_mean_and_deviation_are_computed_once(streamed):
    first = streamed.mean_std()
    first[0].append(9.0)
    assert streamed.mean_std() == ([1 / 255], [(2 / 3) ** 0.5 / 255])
    assert streamed.reader.reads == 3


def test_mean_and_deviation_of_a_subset_are_its_own(streamed):
    streamed.mean_std()
    assert streamed.subset(torch.tensor([2])).mean_std() == ([2 / 255], [1.0])
    assert streamed.subset(torch.tensor([0, 2])).mean_std() == ([1 / 255], [1 / 255])


def test_images_survive_pickling_with_their_mean_and_deviation(streamed):
    expected = streamed.mean_std()
    copy = pickle.loads(pickle.dumps(streamed))
    assert copy.mean_std() == expected
    # The copy was given what was known.
    assert copy.reader.reads == 3


def test_the_digest_tells_labels_and_identity_apart(few):
    same = few.subset(torch.arange(4))
    assert same.digest == few.digest
    others = [
        few.subset(torch.tensor([1, 0, 2, 3])),
        few.subset(torch.arange(3)),
        few.subset(torch.arange(4), torch.tensor([0, 2, 1, 1])),
    ]
    assert len({few.digest, *(other.digest for other in others)}) == 4


def test_classes_are_matched_by_name(few):
    matched = few.match(["c", "x", "b", "a"])
    assert matched.labels.tolist() == [3, 0, 0, 2]
    assert matched.classes == ("c", "x", "b", "a")
    with pytest.raises(
        DataError, match="here: 1 class of the test images, 'c', is not among the 2"
    ):
        few.match(["a", "b"])


def test_images_survive_pickling_in_memory(few):
    copy = pickle.loads(pickle.dumps(few))
    assert copy.pixels.equal(few.pixels)
    assert copy.digest == few.digest


def test_images_that_do_not_go_with_their_labels_are_refused(few):
    with pytest.raises(ValueError, match="got 3, 4 and 4"):
        Images(few.labels[:3], few.index, few.classes, few.shape, few.pixels)
    with pytest.raises(ValueError, match="pixels or a reader, got neither"):
        Images(few.labels, few.index, few.classes, few.shape, None)
