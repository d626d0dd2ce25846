"""docs/use.md: its code runs, its sentences are those of the program."""

import re
import runpy
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from photographs import photograph
from PIL import Image, ImageOps

import tammes
from tammes.lab.cli.main import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def place(photograph_run, photographs, tmp_path, monkeypatch):
    """A working directory with the run and the photographs of the page."""
    shutil.copytree(photograph_run.folder, tmp_path / "runs" / "softmax")
    shutil.copytree(photographs / "test" / "cat", tmp_path / "photos")
    (tmp_path / "photos" / "d_large.jpg").rename(tmp_path / "photos" / "1.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_block_runs(place, capsys):
    names = {}
    exec(compile(BLOCKS[0], "use.md", "exec"), names)
    assert names["embeddings"].shape == (4, 8)
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_files_are_read_without_tammes(place, capsys):
    words = ["--onnx", "model.onnx", "--torch", "model.pt2"]
    assert main(["export", "runs/softmax", *words]) == 0
    capsys.readouterr()
    names = {}
    for block in BLOCKS[1:]:
        assert "tammes" not in block
        exec(compile(block, "use.md", "exec"), names)
    model = tammes.load("runs/softmax", device="cpu")
    (found,) = model.predict(names["pixels"][0].transpose(1, 2, 0))
    assert capsys.readouterr().out.splitlines() == [found.classes[0]]
    # The last block repeats by torch what ONNX Runtime computed.
    expected = model.embed(names["pixels"][0].transpose(1, 2, 0))
    torch.testing.assert_close(names["embedding"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(50, 30), (30, 51), (20, 20), (11, 9), (333, 40)])
def test_pillow_alone_decodes_as_the_page_says(size, photograph_run):
    shape = tuple(photograph_run.data["image"])
    image = Image.fromarray(photograph(3, size))
    fitted = ImageOps.fit(image, shape[:0:-1], Image.Resampling.BILINEAR)
    pixels = tammes.load(photograph_run, device="cpu").preprocess(image)
    off = numpy.asarray(fitted).transpose(2, 0, 1).astype(int) - pixels.numpy()
    assert abs(off).max() <= 1


@pytest.mark.slow
def test_the_example_predicts_and_exports(tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "use_model.py"))["main"]
    predictions, written = example(out=tmp_path)
    assert len(predictions) == 5
    assert written.outputs == ("embedding", "logits")
    assert "preprocessing: rotate as EXIF says" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt2", "run"]
