"""Decoded images on disk: used, rebuilt where damaged, done without where there is no place."""

import errno
import os
import shutil
import time

import pytest
import torch
from PIL import Image

from tammes.lab.data import cache, decode, decode_partition, load


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
    monkeypatch.setattr(decode_partition, "decode_all", None)
    second = read()
    assert said == []
    assert second.pixels.equal(first.pixels)
    assert second.digest == first.digest


def test_long_decoding_reports_how_far_it_is_and_the_time_left(read, said, root, monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 4)
    monkeypatch.setattr(decode_partition, "_REPORT_SECONDS", 0.0)
    read()
    assert said[1].startswith(f"{root}: 8 of 10 images, 0:0")
    assert said[1].endswith(" left")


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
    assert said[0].endswith("the cached images are damaged and are decoded again")
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
    assert said[1].endswith("), continuing without")


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


@pytest.fixture
def trouble(monkeypatch):
    """Makes images of some names unreadable, as too many open files do; no names end it."""
    opens = decode._open

    def begin(*names):
        def fail(data):
            if os.path.basename(data) in names:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return opens(data)

        monkeypatch.setattr(decode, "_open", fail)

    return begin


@pytest.mark.parametrize("memory", [4 << 30, 10], ids=["held", "streamed"])
@pytest.mark.parametrize("skip_corrupt", [False, True])
def test_images_that_could_not_be_read_for_a_while_are_there_again(
    read, said, trouble, monkeypatch, memory, skip_corrupt
):
    trouble("002.png")
    if skip_corrupt:
        assert len(read(memory=memory, skip_corrupt=True)) == 8
    else:
        with pytest.raises(ValueError, match=r"2 images of 10 .*too many open files"):
            read(memory=memory)
    trouble()
    whole = read(memory=memory, skip_corrupt=skip_corrupt)
    assert whole.index.tolist() == list(range(10))
    # And the entry is a good one from then on.
    monkeypatch.setattr(decode_partition, "decode_all", None)
    again = read(memory=memory, skip_corrupt=skip_corrupt)
    assert said == []
    assert again.digest == whole.digest
    assert all(again.read(row).equal(whole.read(row)) for row in range(10))


def test_trouble_with_every_image_passes_too(read, trouble):
    trouble(*(f"{number:03}.png" for number in range(5)))
    with pytest.raises(ValueError, match="10 images of 10 cannot be read"):
        read()
    trouble()
    assert read().pixels.shape == (10, 3, 10, 10)


def test_an_image_that_is_there_again_may_change_the_shape(read, root, trouble):
    Image.new("RGB", (30, 20)).save(root / "a" / "only.png")
    trouble("only.png")
    assert read(skip_corrupt=True).shape == (3, 10, 10)
    trouble()
    assert read(skip_corrupt=True).pixels.shape == (11, 3, 64, 64)


def test_an_image_that_is_damaged_for_good_costs_no_second_decoding_of_others(read, said, root):
    data = (root / "a" / "002.png").read_bytes()
    # Its header can be read, its pixels cannot.
    (root / "a" / "002.png").write_bytes(data[:60])
    assert len(read(skip_corrupt=True)) == 9
    assert len(read(skip_corrupt=True)) == 9
    assert not any("decoding" in line for line in said)


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("memory", [4 << 30, 10], ids=["held", "streamed"])
def test_a_source_without_a_test_split_is_decoded_once(root, said, cache_folder, size, memory):
    options = {"size": size, "memory": memory, "report": said.append}
    train = load(root, "train", **options)
    test = load(root, "test", like=train, **options)
    assert sum("10 images" in line for line in said) == 1
    assert len(list(cache_folder.glob("*.json"))) == 1
    assert torch.cat([train.index, test.index]).sort().values.tolist() == list(range(10))
    fresh = load(root, "test", size=size, report=said.append)
    assert all(test.read(row).equal(fresh.read(row)) for row in range(len(test)))


def test_images_of_another_shape_are_not_taken_for_those_asked_for(read, said):
    small = read(size=5)
    assert read().shape == (3, 10, 10)
    assert read(like=small).pixels.equal(small.pixels)
    assert said == []
    assert read(like=read(size=6)).shape == (3, 6, 6)


def aged(path, seconds):
    path.write_bytes(b"half")
    os.utime(path, (time.time() - seconds,) * 2)
    return path


HOUR = 60 * 60


@pytest.mark.parametrize(
    "name",
    [
        f".{'a' * 32}-0.safetensors.0123abcd",
        f".{'a' * 32}.json.0123abcd",
        f"{'a' * 32}-3.safetensors",
    ],
    ids=["half a part", "half a header", "a part without a header"],
)
def test_what_a_killed_process_left_is_cleared_after_a_day(read, cache_folder, name):
    cache_folder.mkdir()
    left = aged(cache_folder / name, 25 * HOUR)
    read()
    assert not left.exists()


@pytest.mark.parametrize(
    ("name", "hours"),
    [
        (f".{'a' * 32}-0.safetensors.0123abcd", 23),
        (f"{'a' * 32}-0.safetensors", 23),
        ("mine.safetensors", 1000),
        (".notes.json.0123abcd", 1000),
        (f"{'a' * 32}-0.safetensors.0123abcd", 1000),
    ],
    ids=["being written", "header to come", "not ours", "not ours either", "a copy"],
)
def test_what_may_be_in_use_or_is_not_ours_is_not_cleared(read, cache_folder, name, hours):
    cache_folder.mkdir()
    left = aged(cache_folder / name, hours * HOUR)
    read()
    assert left.read_bytes() == b"half"


def test_whole_entries_are_not_cleared_however_old(read, said, cache_folder):
    read()
    for path in cache_folder.iterdir():
        os.utime(path, (0, 0))
    read(size=5)
    read()
    assert said == []


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
    stored = cache.CachedImages(first.shape, 10, {}, checked=True, mixed=False, pixels=first.pixels)
    (key,) = {path.stem.split("-")[0] for path in cache_folder.iterdir()}
    cache.write(key, stored, report=print)
    assert {path.name: path.read_bytes() for path in cache_folder.iterdir()} == before


def test_pixels_of_the_cache_can_be_written_to(read):
    read()
    pixels = read().pixels
    pixels.add_(1)
    assert not read().pixels.equal(pixels)
    assert pixels.dtype == torch.uint8
