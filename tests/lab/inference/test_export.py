"""Files of trained models for other programs: ONNX and ``torch.export``."""

import json
import sys
import warnings

import pytest
import torch
from messages import pattern

import tammes
from tammes.lab.config.schema import Config
from tammes.lab.data import load as load_images
from tammes.lab.inference import exported_files as export
from tammes.lab.inference.exported_files import (
    METADATA,
    ExportedNetwork,
    export_onnx,
    export_torch,
    same_ranking,
    write_checked,
)
from tammes.lab.training.loop import train

HEADS = {
    "linear": {"head": "linear(bias=True)", "loss": "softmax()"},
    "cosine": {"head": "cosine(scale=16)", "loss": "cosface()"},
    "learned scale": {"head": "cosine(scale='learnable')", "loss": "arcface()"},
    "subcenters": {"head": "cosine(scale=16, subcenters=2)", "loss": "cosface()"},
    "length and angle": {"head": "cosine(normalize_features=False)", "loss": "sphereface()"},
    "gaussian": {"head": "gaussian()", "loss": "large_margin_gaussian()"},
    "simplex": {"head": "simplex()", "loss": "softmax()"},
    "sharded": {"head": "cosine(scale=16)", "loss": "cosface()", "shard": True},
    "mirror images": {"head": "cosine(scale=16)", "loss": "cosface()", "flip_test": True},
    "masked": {"head": "linear(bias=True)", "loss": "softmax()"},
}
EXPORT = {".onnx": export_onnx, ".pt2": export_torch}


def run_of(folder, **settings):
    """A short run on digits."""
    config = Config(data="digits", limit=200, backbone="mnist_cnn(features=8)", epochs=1)
    return train(config.replace(**settings), folder)


@pytest.fixture(scope="module")
def model(digits_run):
    return tammes.load(digits_run, device="cpu")


@pytest.fixture(scope="module")
def pixels():
    return load_images("digits", "test").pixels


def read(path):
    """Outputs of a file as a function of pixels, and its metadata."""
    if path.suffix == ".pt2":
        extra = {METADATA: ""}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(path, extra_files=extra)
        return program.module(), json.loads(extra[METADATA])
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type) == ("pixels", "tensor(uint8)")
    assert given.shape[0] == "batch"

    def compute(pixels):
        found = session.run(None, {"pixels": pixels.numpy()})
        return tuple(torch.from_numpy(each) for each in found)

    return compute, session.get_modelmeta().custom_metadata_map


def agrees(model, compute, pixels):
    """Embeddings within 1e-4 and the same ranking, on images of the test set."""
    for size in (1, 7):
        batch = pixels[:size]
        embedding, logits = compute(batch)
        expected = model.embed(batch)
        assert embedding.shape == expected.shape
        assert (embedding - expected).abs().max() < 1e-4
        with torch.no_grad():
            scores = model.model.criterion.logits(expected)
        torch.testing.assert_close(logits, scores, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argsort(1, descending=True), scores.argsort(1, descending=True))


def described(model, metadata):
    """Metadata state classes, scale, threshold and preprocessing."""
    assert json.loads(metadata["classes"]) == list(model.classes)
    assert json.loads(metadata["preprocessing"]) == model.preprocess.as_dict()
    with torch.no_grad():
        assert float(metadata["scale"]) == float(model.model.criterion.head.scale)
    assert float(metadata["threshold"]) == 0.25
    assert metadata["digest"] == model.digest
    shape = ", ".join(map(str, model.preprocess.shape))
    assert metadata["input"] == f"pixels, uint8, (batch, {shape}); normalised by the model"


@pytest.mark.slow
# Both are written from the same program, so one format shows the heads.
@pytest.mark.parametrize(
    ("name", "suffix"), [*((name, ".onnx") for name in HEADS), ("gaussian", ".pt2")]
)
def test_every_head_is_exported(tmp_path, pixels, name, suffix):
    model = tammes.load(run_of(tmp_path / "run", **HEADS[name]), device="cpu")
    if name == "masked":
        with torch.no_grad():
            model.model.criterion.head.bias[3] = -torch.inf
    path = tmp_path / f"model{suffix}"
    written = EXPORT[suffix](model, path, threshold=0.25)
    assert written.outputs == ("embedding", "logits")
    assert written.size == path.stat().st_size
    compute, metadata = read(path)
    agrees(model, compute, pixels)
    described(model, metadata)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", EXPORT)
def test_the_centre_crop_of_evaluation_is_inside(photograph_run, photographs, tmp_path, suffix):
    model = tammes.load(photograph_run, device="cpu")
    path = tmp_path / f"model{suffix}"
    EXPORT[suffix](model, path)
    files = sorted((photographs / "test").rglob("*.*"))
    compute, metadata = read(path)
    agrees(model, compute, torch.stack([model.preprocess(file) for file in files]))
    assert "threshold" not in metadata


@pytest.mark.slow
def test_a_loss_that_does_not_classify_has_no_logits(tmp_path, pixels):
    model = tammes.load(run_of(tmp_path / "run", loss="triplet()"), device="cpu")
    path = tmp_path / "model.onnx"
    assert export_onnx(model, path).outputs == ("embedding",)
    (embedding,) = read(path)[0](pixels[:7])
    assert (embedding - model.embed(pixels[:7])).abs().max() < 1e-4
    with pytest.raises(ValueError, match=r"export with logits expects a loss that classifies"):
        export_onnx(model, path, logits=True)


@pytest.fixture
def network(model):
    return ExportedNetwork(model.model, logits=True).eval()


def test_a_network_of_pixels_is_the_model(model, network, pixels):
    embedding, logits = network(pixels[:7])
    torch.testing.assert_close(embedding.detach(), model.embed(pixels[:7]))
    assert logits.argmax(1).tolist() == [each.labels[0] for each in model.predict(pixels[:7])]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda embedding, logits: (embedding + 2e-3, logits), "embeddings deviate by up to 0.002"),
        (lambda embedding, logits: (embedding * torch.nan, logits), "deviate by up to nan"),
        (lambda embedding, logits: (embedding, logits.flip(1)), "ranks the classes differently"),
        (lambda embedding, logits: (embedding, logits[:, :4]), "ranks the classes differently"),
    ],
)
def test_a_file_that_does_not_agree_is_not_kept(network, tmp_path, change, reason):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match=rf"model.onnx: the exported file was not kept.*{reason}"):
        write_checked(path, b"after", network, lambda pixels: change(*network(pixels)))
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_agrees_is_kept(network, tmp_path):
    written = write_checked(tmp_path / "model.onnx", b"after", network, network)
    assert written.path.read_bytes() == b"after"
    assert (written.size, written.deviation) == (5, 0.0)


def test_the_smallest_batch_is_compared_too(network, tmp_path):
    def compute(pixels):
        embedding, logits = network(pixels)
        return (embedding + 1, logits) if len(pixels) == 1 else (embedding, logits)

    with pytest.raises(ValueError, match=r"for a batch of 1 \(embeddings deviate by up to 1\)"):
        write_checked(tmp_path / "model.onnx", b"after", network, compute)


@pytest.mark.parametrize(
    ("found", "same"),
    [
        ([[3.0, 2.0, 1.0]], True),
        ([[3.1, 2.5, -9.0]], True),
        ([[2.0, 3.0, 1.0]], False),
        ([[3.0, 1.0, 2.0]], False),
        ([[3.0, 2.0, torch.nan]], False),
        ([[3.0, 2.0, -torch.inf]], False),
    ],
)
def test_rankings_are_compared(found, same):
    assert same_ranking(torch.tensor(found), torch.tensor([[3.0, 2.0, 1.0]])) is same


def test_classes_that_are_equal_up_to_rounding_may_change_places():
    expected = torch.tensor([[5.0, 5.00001, 1.0, -torch.inf]])
    assert same_ranking(torch.tensor([[5.00001, 5.0, 1.0, -torch.inf]]), expected)


def test_a_model_beyond_two_gib_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_LIMIT", 1000)
    message = "... an ONNX file holds at most 2 GiB ... the model has 0.0 GiB ... --no-logits ..."
    with pytest.raises(ValueError, match=pattern(message)):
        export_onnx(model, tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


def test_without_logits_the_prototypes_are_left_out(model):
    with_head, alone = (ExportedNetwork(model.model, logits=each) for each in (True, False))
    kept = {name for name in with_head.state_dict() if not name.startswith("head.")}
    assert {*alone.state_dict()} == kept < {*with_head.state_dict()}
    assert not any("criterion" in name for name in kept)
    # The model that was given still has them.
    assert model.model.criterion.head.weight.shape == (10, 8)


@pytest.mark.parametrize("suffix", EXPORT)
def test_bad_arguments_are_refused(model, tmp_path, suffix):
    message = pattern(f"{tmp_path}/model.bin: a file name that ends in {suffix} is expected")
    with pytest.raises(ValueError, match=message):
        EXPORT[suffix](model, tmp_path / "model.bin")
    with pytest.raises(ValueError, match="threshold to be a finite number, got nan"):
        EXPORT[suffix](model, tmp_path / f"model{suffix}", threshold=float("nan"))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named(model, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"{package} could not be imported .* pip install 'tammes\[export\]'"
    with pytest.raises(ImportError, match=message):
        export_onnx(model, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("where", "suffix", "kind"),
    [(torch.export, ".pt2", "torch.export"), (torch.onnx, ".onnx", "ONNX")],
)
def test_a_network_that_cannot_be_exported_is_named(
    model, tmp_path, monkeypatch, where, suffix, kind
):
    def fails(*_, **__):
        raise ValueError("a page of advice") from RuntimeError("no such thing\nand much more")

    if kind == "ONNX":
        # What comes before has succeeded.
        monkeypatch.setattr(export, "_program", lambda *_: None)
    monkeypatch.setattr(where, "export", fails)
    message = (
        f"{model.run.folder}: the network mnist_cnn(features=8) cannot be exported by {kind} "
        "(RuntimeError: no such thing)"
    )
    with pytest.raises(ValueError, match=pattern(message)):
        EXPORT[suffix](model, tmp_path / f"model{suffix}")
    assert not [*tmp_path.iterdir()]
