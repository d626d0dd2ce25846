"""``tammes.load``: embeddings and predictions of the model of a run."""

import io
import shutil
import sys

import numpy
import pytest
import torch
from messages import pattern
from PIL import Image

import tammes
from tammes.lab.config.schema import Config
from tammes.lab.data import load as load_images
from tammes.lab.inference.exported_files import ExportedNetwork
from tammes.lab.inference.preprocess import UnreadableImage
from tammes.lab.records.run_folder import Run
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.loop import train


@pytest.fixture(scope="module")
def model(photograph_run):
    return tammes.load(photograph_run.folder, device="cpu")


@pytest.fixture(scope="module")
def digits(digits_run):
    return tammes.load(digits_run.folder, device="cpu")


@pytest.fixture
def test_files(photographs):
    return sorted((photographs / "test").rglob("*.*"))


def close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_embeddings_of_files_are_those_of_the_evaluation(model, photograph_run, test_files):
    stored = photograph_run.tensors("embeddings")
    assert len(test_files) == len(stored["features"]) == 12
    close(model.embed(test_files), stored["features"])


def test_embeddings_of_tensors_are_those_of_the_evaluation(digits, digits_run):
    pixels = load_images("digits", "test").pixels
    stored = digits_run.tensors("embeddings")["features"]
    assert len(pixels) == len(stored) > 64
    close(digits.embed(pixels), stored)
    # In batches of the same size they are the same numbers.
    assert torch.equal(digits.embed(pixels, batch_size=512), stored)


def test_predictions_are_those_of_the_evaluation(digits, digits_run):
    pixels = load_images("digits", "test").pixels
    stored = digits_run.tensors("embeddings")["predictions"].tolist()
    found = digits.predict(pixels)
    assert [each.labels[0] for each in found] == stored
    assert [each.image for each in found[:2]] == ["image 0", "image 1"]
    logits = digits.model.criterion.logits(digits.embed(pixels[:1]))[0]
    scores, labels = logits.sort(descending=True)
    assert found[0].labels == tuple(labels[:5].tolist())
    assert found[0].classes == tuple(digits.classes[label] for label in found[0].labels)
    assert found[0].scores == pytest.approx(scores[:5].tolist(), rel=1e-4)
    assert found[0].probabilities == pytest.approx(logits.softmax(0)[labels[:5]].tolist(), rel=1e-4)


def test_a_folder_is_its_images_in_order(model, photographs, test_files):
    batches = [*model.embed_batches(photographs / "test", batch_size=5)]
    assert [name for batch in batches for name in batch.names] == [*map(str, test_files)]
    assert [len(batch.embeddings) for batch in batches] == [5, 5, 2]
    assert [place for batch in batches for place in batch.positions] == [*range(12)]
    close(torch.cat([batch.embeddings for batch in batches]), model.embed(test_files))


def test_images_come_as_paths_pillow_arrays_and_tensors(model, test_files):
    path = next(path for path in test_files if path.name == "b_clear.png")
    opaque = Image.open(path)
    rgba = numpy.asarray(opaque)
    same = [
        str(path),
        path.read_bytes(),
        opaque,
        rgba,
        torch.from_numpy(rgba.copy()).permute(2, 0, 1),
        rgba.astype("float32") / 255,
        torch.from_numpy(rgba.copy()).permute(2, 0, 1).double() / 255,
    ]
    expected = model.embed(path)
    assert expected.shape == (1, model.embedding_size)
    for image in same:
        close(model.embed(image), expected)
    close(model.embed(same), expected.expand(len(same), -1))
    close(model.embed(image for image in same), expected.expand(len(same), -1))
    four = torch.stack([model.preprocess(path)] * 3)
    close(model.embed(four), expected.expand(3, -1))
    close(model.embed(four.permute(0, 2, 3, 1).numpy()), expected.expand(3, -1))


@pytest.mark.parametrize("shape", [(30, 21), (1, 30, 21)])
def test_grey_is_the_same_in_one_channel_or_in_three(model, shape):
    grey = torch.randint(256, shape, dtype=torch.uint8)
    close(model.embed(grey), model.embed(grey.expand(3, 30, 21)))
    close(model.embed(grey), model.embed(grey.reshape(30, 21).numpy()))


def test_sixteen_bits_become_eight(digits):
    wide = numpy.arange(64, dtype="uint16").reshape(8, 8) * 1040
    buffer = io.BytesIO()
    Image.fromarray(wide).save(buffer, "PNG")
    close(digits.embed(wide), digits.embed(buffer.getvalue()))


def test_exif_orientation_is_respected(model, tmp_path, test_files):
    path = next(path for path in test_files if path.name == "a_turned.jpg")
    upright = Image.open(path).transpose(Image.Transpose.ROTATE_270)
    plain = Image.frombytes("RGB", upright.size, upright.tobytes())
    close(model.embed([path, Image.open(path)]), model.embed([plain, plain]))
    asleep = Image.frombytes("RGB", upright.size[::-1], Image.open(path).tobytes())
    assert not torch.allclose(model.embed(asleep), model.embed(path), rtol=1e-3)


def test_the_images_given_stay_as_they_are(model):
    image = Image.new("RGB", (300, 200), "red")
    tensor = torch.rand(3, 40, 30)
    before = tensor.clone()
    model.embed([image, tensor])
    assert image.size == (300, 200)
    assert torch.equal(tensor, before)


def test_preprocessing_is_stated(model):
    text = str(model.preprocess)
    assert "cover 20×20" in text
    assert "crop the centre, 0.8 of each side, resized to 16×16" in text
    described = model.preprocess.as_dict()
    assert described["shape"] == [3, 20, 20]
    assert described["mean"] == model.run.data["mean"]
    assert described["steps"] == text
    assert model.preprocess(Image.new("L", (5, 90))).shape == (3, 20, 20)


def test_attributes_are_those_of_the_run(model, photograph_run):
    assert model.classes == ("ape", "bee", "cat")
    assert isinstance(model.loss, tammes.Loss)
    assert repr(model.loss).startswith("softmax(")
    assert "3 classes, embedding_size=8, loss=softmax(" in repr(model)


def test_the_digest_is_of_backbone_and_preprocessing(model, photograph_run, tmp_path, digits):
    assert len(model.digest) == 16
    assert model.digest == tammes.load(photograph_run, device="cpu").digest != digits.digest
    moved = tmp_path / "moved"
    shutil.copytree(photograph_run.folder, moved)
    assert tammes.load(moved, device="cpu").digest == model.digest
    changed = tammes.load(moved, device="cpu")
    with torch.no_grad():
        next(changed.model.backbone.parameters()).view(-1)[0] += 1e-3
    assert changed.digest != model.digest
    data = (moved / "data.json").read_text()
    first = repr(photograph_run.data["mean"][0])
    assert first in data
    (moved / "data.json").write_text(data.replace(first, "0.25"))
    assert tammes.load(moved, device="cpu").digest != model.digest


def test_no_images_give_no_rows(model):
    assert model.embed([]).shape == (0, model.embedding_size)
    assert model.predict([]) == []


def test_top_is_at_most_the_number_of_classes(model, test_files):
    (found,) = model.predict(test_files[0], top=9)
    assert sorted(found.classes) == ["ape", "bee", "cat"]
    assert sum(found.probabilities) == pytest.approx(1)


def test_a_masked_class_is_not_predicted(photograph_run, test_files):
    model = tammes.load(photograph_run, device="cpu")
    with torch.no_grad():
        model.model.criterion.head.bias[1] = -torch.inf
    (found,) = model.predict(test_files[0])
    assert sorted(found.classes) == ["ape", "cat"]


def test_images_stream(model):
    seen = []

    def endless():
        for number in range(10**6):
            seen.append(number)
            yield torch.full((3, 20, 20), number % 256, dtype=torch.uint8)

    batches = model.embed_batches(endless(), batch_size=8)
    assert next(batches).positions == [*range(8)]
    assert next(batches).positions == [*range(8, 16)]
    # One batch ahead, no more.
    assert len(seen) == 24
    batches.close()


def test_unreadable_images_are_left_out_on_request(model, test_files, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(test_files[0].read_bytes()[:200])
    empty = tmp_path / "empty.png"
    empty.touch()
    images = [test_files[0], broken, empty, tmp_path / "none.png", test_files[1]]
    reported = []
    (batch,) = model.embed_batches(images, unreadable=reported.append)
    assert batch.positions == [0, 4]
    close(batch.embeddings, model.embed(test_files[:2]))
    assert [(each.name, each.why) for each in reported[1:]] == [
        (str(empty), "not an image"),
        (str(tmp_path / "none.png"), "no such file or directory"),
    ]
    assert reported[0].name == str(broken)
    assert [*model.embed_batches([broken], unreadable=reported.append)] == []


BAD = [
    (
        lambda: torch.zeros(2, 9, 9),
        "image 0 cannot be read (a tensor of shape ([channels, ]height, width) with 1, 3 or 4 "
        "channels is expected, got (2, 9, 9))",
    ),
    (lambda: torch.zeros(9, 9, 3), "image 0 ... tensor ... got (9, 9, 3))"),
    (lambda: torch.zeros(2, 1, 3, 4, 4), "image 0 ... tensor ... got (2, 1, 3, 4, 4))"),
    (
        lambda: numpy.zeros((9, 9, 5), "uint8"),
        "image 0 cannot be read (an array of shape (height, width[, channels]) with 1, 3 or 4 "
        "channels is expected, got (9, 9, 5))",
    ),
    (
        lambda: numpy.zeros((3, 9, 9), "uint8"),
        "image 0 ... array ... got (3, 9, 9); with channels first pass a tensor ...)",
    ),
    (lambda: numpy.zeros(9, "uint8"), "image 0 ... array ... got (9,))"),
    (lambda: torch.zeros(3, 0, 9), "image 0 cannot be read (it has no pixels)"),
    (lambda: Image.new("RGB", (0, 9)), "image 0 cannot be read (it has no pixels)"),
    (lambda: torch.full((3, 9, 9), 255.0), "image 0 ... in [0, 1], got 255 to 255; divide by 255)"),
    (lambda: torch.full((3, 9, 9), torch.nan), "image 0 ... in [0, 1], got nan to nan)"),
    (lambda: torch.zeros(3, 9, 9, dtype=torch.int32), "image 0 ... got int32; convert to uint8)"),
    (lambda: [torch.zeros(9, 9), None], "image 1 ... a path, a Pillow image ... got NoneType)"),
    (lambda: 7, "image 0 ... got int)"),
    (lambda: b"nothing", "image 0 cannot be read (not an image)"),
    (lambda: "none.png", "none.png cannot be read (no such file or directory)"),
]


@pytest.mark.parametrize(("images", "message"), BAD, ids=[message[-30:] for _, message in BAD])
def test_images_that_cannot_be_used_are_named(model, images, message):
    with pytest.raises(UnreadableImage, match=pattern(message)):
        model.embed(images())


def test_a_folder_without_images_is_refused(model, tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(ValueError, match="there is no image in it"):
        model.embed(tmp_path)


@pytest.mark.parametrize("top", [0, -1, 1.5, True])
def test_a_top_below_one_is_refused(model, top):
    with pytest.raises(ValueError, match=pattern(f"predict expects top ... 1 or more, got {top}")):
        model.predict([], top=top)


@pytest.mark.parametrize("size", [0, 2.5])
def test_a_batch_size_below_one_is_refused(model, size):
    with pytest.raises(ValueError, match=pattern(f"embed expects batch_size ... got {size}")):
        model.embed([], batch_size=size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(photograph_run):
    with pytest.raises(ValueError, match="load expects a device that torch finds, got 'cuda'"):
        tammes.load(photograph_run, device="cuda")


@pytest.mark.parametrize("device", ["gpu", 1.5])
def test_a_device_that_does_not_exist_is_refused(photograph_run, device):
    with pytest.raises(ValueError, match=f"load expects a device that torch finds, got {device!r}"):
        tammes.load(photograph_run, device=device)


@pytest.mark.parametrize("unreadable", [None, print])
def test_a_missing_package_is_not_an_unreadable_image(model, test_files, monkeypatch, unreadable):
    for name in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"install it with: pip install 'tammes\[lab\]'"):
        list(model.embed_batches(test_files[0].parent, unreadable=unreadable))


def test_an_unfinished_run_is_refused(photograph_run, tmp_path):
    with pytest.raises(ValueError, match=r"not a run, it has no config.json"):
        tammes.load(tmp_path)
    shutil.copy(photograph_run.folder / "config.json", tmp_path)
    message = pattern(f"{tmp_path}: the run has no model.safetensors, it is unfinished")
    with pytest.raises(ValueError, match=message):
        tammes.load(tmp_path)
    (tmp_path / "failure.json").write_text("{}")
    with pytest.raises(ValueError, match="it is failed"):
        tammes.load(Run(tmp_path))


def test_a_loss_that_does_not_classify_embeds_but_does_not_predict(tmp_path):
    config = Config(data="digits", loss="triplet()", backbone="mnist_cnn(features=4)", epochs=1)
    run = train(config.replace(limit=100), tmp_path)
    model = tammes.load(run, device="cpu")
    assert model.embed(torch.zeros(8, 8)).shape == (1, 4)
    with pytest.raises(ValueError, match=r"predict expects a loss that classifies, got triplet\("):
        model.predict(torch.zeros(8, 8))


def test_a_run_in_bf16_is_embedded_in_float32(tmp_path):
    config = Config(
        data="digits", loss="cosface()", backbone="mnist_cnn(features=8)", epochs=1, limit=100
    )
    run = train(config.replace(precision="bf16"), tmp_path)
    model = tammes.load(run, device="cpu")
    stored = run.tensors("embeddings")
    pixels = prepare_data(run.config, lambda text: None)[2].pixels
    found = model.embed(pixels)
    assert found.dtype == torch.float32
    off = (found - stored["features"]).norm(dim=1) / stored["features"].norm(dim=1)
    assert 0 < off.max() < 0.02


def test_a_run_tested_on_mirror_images_is_embedded_alike(tmp_path):
    config = Config(data="digits", backbone="mnist_cnn(features=8)", epochs=1, limit=100)
    run = train(config.replace(flip_test=True), tmp_path)
    model = tammes.load(run, device="cpu")
    pixels = prepare_data(run.config, lambda text: None)[2].pixels
    close(model.embed(pixels), run.tensors("embeddings")["features"])
    close(model.embed(pixels.flip(3)), model.embed(pixels))
    assert str(model.preprocess).endswith("of the image and of its mirror image")
    network = ExportedNetwork(model.model, logits=True, flip=model.preprocess.flip)
    close(network(pixels)[0].detach(), model.embed(pixels))


@pytest.mark.gpu
def test_embeddings_on_a_gpu_are_those_on_the_cpu(photograph_run, model, test_files):
    there = tammes.load(photograph_run, device="cuda")
    assert there.embed(test_files).device.type == "cpu"
    torch.testing.assert_close(
        there.embed(test_files), model.embed(test_files), rtol=0.02, atol=0.02
    )
    assert there.digest == model.digest
