"""Decoded images on disk: used, rebuilt where damaged, done without where there is no place."""

import os
import shutil

import pytest
import torch
from PIL import Image

from tammes.lab.data import cache, gather, load


@pytest.fixture
def root(image_folder):
    return image_folder({"a": 5, "b": 5})


@pytest.fixture
def read(root, said):
    """Loads everything; what was said since the last time is in `said`."""

    def load_again(**options):
        said.clear()
        return load(root, "train", whole=True, report=said.append, **options)

    return load_again


def test_what_was_decoded_is_not_decoded_again(read, said, root, monkeypatch):
    first = read()
    assert said == [f"{root}: decoding 10 images"]
    monkeypatch.setattr(gather, "decode_all", None)
    second = read()
    assert said == []
    assert second.pixels.equal(first.pixels)
    assert second.digest == first.digest


def test_it_is_where_it_is_said_to_be(read, cache_folder):
    read()
    kinds = sorted(path.suffix for path in cache_folder.iterdir())
    assert kinds == [".json", ".safetensors"]


def test_home_is_the_place_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("TAMMES_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "tammes"


@pytest.mark.parametrize(
    "change",
    [
        lambda root: Image.new("RGB", (10, 10)).save(root / "a" / "000.png"),
        lambda root: shutil.copy(root / "a" / "000.png", root / "a" / "999.png"),
        lambda root: (root / "a" / "000.png").unlink(),
        lambda root: os.utime(root / "a" / "000.png", ns=(0, 0)),
    ],
    ids=["content", "added", "removed", "time"],
)
def test_a_changed_source_is_decoded_again(read, said, root, change):
    read()
    change(root)
    read()
    assert "decoding" in said[0]


def test_another_size_is_another_entry(read, said):
    read()
    assert read(size=5).shape == (3, 5, 5)
    assert "decoding" in said[0]
    assert read().shape == (3, 10, 10)
    assert said == []


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, -1),
        lambda path: flip(path, 30),
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text("[1]"),
    ],
    ids=["end", "start", "truncated", "empty", "object", "list"],
)
def test_a_damaged_entry_is_decoded_again_and_it_is_said(read, said, cache_folder, damage, suffix):
    first = read()
    (path,) = cache_folder.glob(f"*{suffix}")
    damage(path)
    again = read()
    assert again.pixels.equal(first.pixels)
    assert len(said) == 2
    assert said[0].endswith("the cached images are damaged, they are decoded again")
    assert str(cache_folder) in said[0]
    read()
    assert said == []


def test_an_altered_header_is_damaged_too(read, said, cache_folder):
    read()
    (path,) = cache_folder.glob("*.json")
    text = path.read_text()
    assert '"unreadable": []' in text
    path.write_text(text.replace('"unreadable": []', '"unreadable": [[0, "x"]]'))
    assert len(read()) == 10
    assert "damaged" in said[0]


def test_a_missing_part_is_decoded_again(read, said, cache_folder):
    read()
    next(cache_folder.glob("*.safetensors")).unlink()
    assert len(read()) == 10
    assert "damaged" in said[0]


def test_an_entry_is_written_in_parts(read, said, cache_folder, monkeypatch):
    monkeypatch.setattr(cache, "_PART", 1000)
    first = read()
    assert len(list(cache_folder.glob("*.safetensors"))) == 4
    assert read().pixels.equal(first.pixels)
    assert said == []


def test_where_nothing_can_be_written_it_is_said_and_goes_on(read, said, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TAMMES_CACHE", str(tmp_path / "file" / "cache"))
    assert len(read()) == 10
    assert len(said) == 2
    assert said[1].startswith(f"{tmp_path}/file/cache: decoded images cannot be stored there (")
    assert said[1].endswith("), going on without")


def test_a_full_disk_is_said_and_leaves_nothing_behind(read, said, cache_folder, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_atomically", full)
    assert len(read()) == 10
    assert "No space left on device" in said[1]
    assert not cache_folder.exists()


def test_what_could_not_be_read_is_remembered(read, said, root):
    (root / "a" / "002.png").write_bytes(b"no image")
    assert len(read(skip_corrupt=True)) == 9
    left = read(skip_corrupt=True)
    assert left.index.tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert said == [f"1 image could not be read and was left out: {root}/a/002.png (not an image)"]
    with pytest.raises(ValueError, match="1 image of 10 cannot be read"):
        read()


def test_more_memory_than_before_is_used(read, said):
    assert read(memory=10).pixels is None
    assert read().pixels is not None
    # And less: what is stored is left where it is.
    lazy = read(memory=10)
    assert lazy.pixels is None
    assert said == []
    assert lazy.read(3).equal(read().pixels[3])


def test_two_processes_may_write_the_same_entry(read, cache_folder):
    # Both write whole files of the same content: whoever is last changes nothing.
    first = read()
    before = {path.name: path.read_bytes() for path in cache_folder.iterdir()}
    stored = cache.Stored(first.shape, 10, {}, checked=True, mixed=False, pixels=first.pixels)
    (key,) = {path.stem.split("-")[0] for path in cache_folder.iterdir()}
    cache.write(key, stored, report=print)
    assert {path.name: path.read_bytes() for path in cache_folder.iterdir()} == before


def test_pixels_of_the_cache_can_be_written_to(read):
    read()
    pixels = read().pixels
    pixels.add_(1)
    assert not read().pixels.equal(pixels)
    assert pixels.dtype == torch.uint8
