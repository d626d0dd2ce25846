"""Pairs of InsightFace: a pickle that is read, and never run."""

import contextlib
import os
import pickle
import struct

import numpy
import pytest

from tammes.lab.data import DataError
from tammes.lab.data.identities import read_insightface

IMAGES = [b"\xff\xd8 one", b"two" * 200, b"three\n", b"\xff\xd8 one"]


@pytest.fixture
def write(tmp_path):
    def make(content):
        path = tmp_path / "lfw.bin"
        path.write_bytes(content)
        return path

    return make


def python2(images, same):
    """The pickle of Python 2, protocol 2: its strings are bytes."""
    texts = b"".join(b"T" + struct.pack("<i", len(each)) + each + b"q\x02" for each in images)
    flags = b"".join(b"\x88" if each else b"\x89" for each in same)
    return b"\x80\x02]q\x00(" + texts + b"e]q\x01(" + flags + b"e\x86q\x03."


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("outer", [tuple, list])
def test_images_and_pairs_are_read(write, protocol, outer):
    path = write(pickle.dumps(outer([IMAGES, [True, False]]), protocol))
    pairs = read_insightface(path)
    assert [pairs.items.fetch(row) for row in range(4)] == IMAGES
    assert (pairs.left.tolist(), pairs.right.tolist()) == ([0, 2], [1, 3])
    assert pairs.same.tolist() == [True, False]
    assert pairs.items.name(3) == f"{path} image 3"
    assert pairs.sides() is None


def test_files_of_python_2_are_read(write):
    content = python2(IMAGES, [True, False])
    assert pickle.loads(content, encoding="bytes") == (IMAGES, [True, False])
    pairs = read_insightface(write(content))
    assert [pairs.items.fetch(row) for row in range(4)] == IMAGES
    assert pairs.same.tolist() == [True, False]


def test_integers_are_booleans(write):
    assert read_insightface(write(pickle.dumps((IMAGES, (1, 0))))).same.tolist() == [True, False]


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_run(write, tmp_path, protocol):
    sprung = tmp_path / "sprung"
    path = write(pickle.dumps(([*IMAGES[:1], Bomb(sprung)], [True]), protocol))
    with pytest.raises(DataError, match=r"lfw.bin: bytes, lists and booleans are expected, got "):
        read_insightface(path)
    assert not sprung.exists()
    # The file is one that would have run.
    pickle.loads(path.read_bytes())
    assert sprung.exists()


@pytest.mark.parametrize(
    "content",
    [
        (IMAGES, numpy.array([True, False])), ([numpy.zeros(3)] * 4, [True, False]),
        (IMAGES, {True: 1}), (IMAGES, ["yes", "no"]), (IMAGES, [1.0, 0.0]), (IMAGES, None),
    ],
)  # fmt: skip
def test_other_kinds_of_values_are_refused(write, content):
    with pytest.raises(DataError, match=r"which is not read, .*; write the file again from lists"):
        read_insightface(write(pickle.dumps(content)))


@pytest.mark.parametrize(
    "code", [b"c", b"\x93", b"R", b"i", b"o", b"\x81", b"\x92", b"b", b"P", b"Q", b"\x82", b"}"]
)
def test_instructions_that_could_call_are_refused(write, code):
    lines = b"os\nmkdir\n" if code in b"ciP" else b"\x01"
    with pytest.raises(DataError, match="which is not read, as a pickle can run code"):
        read_insightface(write(b"\x80\x04]]" + code + lines + b"."))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (IMAGES, "a list of images and a list of booleans are expected"),
        (([1, 2], [True]), "a list of images as bytes is expected first"),
        ((IMAGES, [True, 2]), "a list of booleans is expected second"),
        ((IMAGES, [True]), "two images for each pair are expected, got 4 images for 1 pairs"),
        (([], []), "got 0 images for 0 pairs"),
        (([b"a", b"", b"b", b""], [True, False]), "2 images have no bytes, the first is 1"),
    ],
)
def test_content_of_another_form_is_refused(write, content, message):
    with pytest.raises(DataError, match=f"lfw.bin: .*{message}"):
        read_insightface(write(pickle.dumps(content)))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x80\x04", b"no pickle", b"\xff\xd8\xff\xe0", pickle.dumps((IMAGES, [True]))[:-30],
        # Stack, mark and memo that are not there; a list that is a number; a length of 8 EiB.
        b".", b"\x86.", b"e.", b"a.", b"h\x07.", b"K\x01K\x02a.", b"q\x00.", b"]]t.",
        b"\x8e" + struct.pack("<Q", 2**63 - 1) + b"abc.",
        b"(]K\x01K\x02e.", b"(]\x86\x86\x86.", b"](K\x010e.",
    ],
)  # fmt: skip
def test_a_damaged_file_is_a_sentence(write, content):
    with pytest.raises(DataError, match=r"lfw.bin: .*(damaged|expected)") as caught:
        read_insightface(write(content))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_or_changed_is_a_sentence_or_pairs(write):
    whole = pickle.dumps(([b"one", b"two"], [True]))
    for place in range(len(whole)):
        # Of all 256 bytes another 7 at each place; all of them have been tried once.
        for byte in range(place % 37, 256, 37):
            content = whole[:place] + bytes([byte]) + whole[place + 1 :]
            with contextlib.suppress(DataError):
                read_insightface(write(content))
        with pytest.raises(DataError):
            read_insightface(write(whole[:place]))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="a file of pairs is expected, got no such file"):
        read_insightface(tmp_path / "lfw.bin")
