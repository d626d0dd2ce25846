"""Images in batches: from memory or as they are needed, the same ones."""

import pytest
import torch
from lab_runs import SAME

from tammes.lab import data
from tammes.lab.config.schema import Config
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.loop import train
from tammes.lab.training.model import IGNORED
from tammes.lab.training.step import Step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes of small pictures in files."""
    image = pytest.importorskip("PIL.Image")
    numpy = pytest.importorskip("numpy")
    random = numpy.random.default_rng(0)
    root = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 30), ("test", 10)):
        for place, name in enumerate("abc"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 80, (12, 12, 3), dtype=numpy.uint8)
                pixels[:, :, place] += 120
                image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


def test_what_is_read_is_what_is_in_memory(folder):
    held = data.load(str(folder), "train")
    read = data.load(str(folder), "train", memory=0)
    assert held.pixels is not None
    assert read.pixels is None
    batches = [torch.tensor([3, 1]), torch.tensor([89, 0, 44])]
    for workers in (0, 2):
        pairs = zip(
            ImageLoader(held, CPU)(batches),
            ImageLoader(read, CPU, workers=workers)(batches),
            strict=True,
        )
        for one, two in pairs:
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_reads_as_it_goes_ends_in_the_same_bits(folder, tmp_path, workers):
    config = Config(
        data=str(folder), backbone="conv4(width=0.125)", image_size=16, epochs=2, batch_size=20
    )
    held = train(config, tmp_path / "held")
    read = train(config.replace(memory=0.0, workers=workers), tmp_path / "read")
    for name in SAME:
        if name != "config.json":
            assert (held.folder / name).read_bytes() == (read.folder / name).read_bytes(), name


def test_images_that_are_read_from_files_are_augmented_as_they_come(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tammes.lab.training.step._CHUNKED", ("cpu",))
    taken, augmented = [], Step.augmented
    monkeypatch.setattr(Step, "augmented", lambda *args: taken.append(1) or augmented(*args))
    config = Config(
        data=str(folder), backbone="conv4(width=0.125)", image_size=16, epochs=1, batch_size=20
    )
    held = train(config, tmp_path / "held")
    assert taken == [1]
    read = train(config.replace(memory=0.0, workers=0), tmp_path / "read")
    assert taken == [1]
    name = "model.safetensors"
    assert (held.folder / name).read_bytes() == (read.folder / name).read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_cannot_be_read_is_named_in_a_sentence(folder, tmp_path, workers):
    image = pytest.importorskip("PIL.Image")
    root = tmp_path / "pictures"
    for place, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for number in range(5):
            image.new("RGB", (8, 8), (place * 100, 0, 0)).save(root / name / f"{number}.png")
    images = data.load(str(root), "train", memory=0, whole=True)
    bad = root / "b" / "2.png"
    bad.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"b/2\.png") as caught:
        list(ImageLoader(images, CPU, workers=workers)([torch.arange(len(images))]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_shares_are_equally_long_and_every_image_counts_once(folder, length, count):
    images = data.load(str(folder), "train")
    feed, batch = ImageLoader(images, CPU), torch.arange(40, 40 + length)
    shares = [next(feed([batch], rank=rank, world_size=count)) for rank in range(count)]
    assert {len(pixels) for pixels, _, _ in shares} == {-(-length // count)}
    counted = torch.cat([index[labels != IGNORED] for _, labels, index in shares])
    assert torch.equal(counted, batch)
    # What fills up a share is an image of the batch: its statistics are those of images.
    assert set(torch.cat([index for _, _, index in shares]).tolist()) == set(batch.tolist())


def test_feeding_leaves_the_labels_as_they_are(folder):
    images = data.load(str(folder), "train")
    feed = ImageLoader(images, CPU)
    list(feed([torch.arange(3)], rank=0, world_size=2))
    assert torch.equal(feed.labels, images.labels)


def test_all_processes_together_see_every_image_once(folder):
    images = data.load(str(folder), "test")
    feed = ImageLoader(images, CPU)
    for count in (1, 2, 3, 7):
        seen = [
            index
            for rank in range(count)
            for _, _, index in feed.in_order(4, rank=rank, world_size=count)
        ]
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(len(images)))


def test_no_batches_are_no_batches(folder):
    assert list(ImageLoader(data.load(str(folder), "test"), CPU)([])) == []


@pytest.mark.parametrize(
    ("count", "size", "batches"),
    [(5, 2, [2, 3]), (9, 8, [9]), (130, 64, [64, 66]), (136, 64, [64, 64, 8]), (3, 8, [3])],
)
def test_a_last_batch_that_is_too_small_joins_the_one_before_it(count, size, batches):
    sampler = data.samplers.Random(labels=torch.zeros(count), batch_size=size, seed=0)
    found = list(sampler)
    assert [len(batch) for batch in found] == batches
    assert len(sampler) == len(batches)
    assert torch.equal(torch.cat(found).sort().values, torch.arange(count))
