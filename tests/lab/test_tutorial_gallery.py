"""The tutorial on recognising individuals is run as it is written, on digits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from test_tutorial import BLOCK, write_digits

import tammes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial_gallery.md").read_text(encoding="utf-8")
BLOCKS = BLOCK.findall(PAGE)
COMMANDS = [text for kind, text in BLOCKS if kind == "sh"]
(CODE,) = (text for kind, text in BLOCKS if kind == "python")
SMALLER = {
    "--image-size 32": "--image-size 8",
    "pad_crop(3)": "pad_crop(1)",
    '"conv4(width=0.5)"': '"mnist_cnn(features=16)"',
    "--epochs 10 --evaluate-every 10": "--epochs 3",
    # Four digits are not as many as 29 chimpanzees.
    "--far 0.01": "--far 0.1",
    "examples/gallery_accuracy.py": f"{ROOT / 'examples/gallery_accuracy.py'} "
    "--individuals 3 --far 0.1 --draws 5",
}
"""What the test changes in the commands."""


def write_table(folder):
    """The digits as the parquet file that the page reads: six to train on, four others."""
    write_digits(folder / "pictures", each=30)
    files = sorted((folder / "pictures").rglob("*.png"))
    names = [f"Zoo/{path.parent.name}" for path in files]
    table = {
        "image": [{"bytes": path.read_bytes()} for path in files],
        "identity": names,
        "split": ["train" if name < "Zoo/6" else "novel" for name in names],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "chimpanzee-faces-112px.parquet")


def smaller(text):
    for before, after in SMALLER.items():
        text = text.replace(before, after)
    return text


def test_everything_that_the_test_changes_is_on_the_page():
    missing = [text for text in SMALLER if text not in "".join(COMMANDS)]
    assert not missing


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which everything on the page was run, and what each command printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    write_table(folder)
    done = subprocess.run([sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    printed = {}
    for text in COMMANDS:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", smaller(text)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{text}\n{done.stderr[-2000:]}"
        printed[text.split()[:3][-1]] = done.stdout
    return folder, printed


@pytest.mark.slow
def test_every_command_of_the_tutorial_does_what_it_says(followed):
    folder, printed = followed
    assert "4 individuals, 20 images, template mean" in printed["build"]
    assert "threshold" in printed["build"]
    # Four others of 30 images each, five of which are enrolled.
    assert len((folder / "found.txt").read_text().splitlines()) == 4 * 25 + 2
    assert (folder / "out" / "faces.html").read_text().count("<img src=") == 4 * 25 * 4
    gallery = tammes.Gallery.load(folder / "faces.safetensors", tammes.load(folder / "runs/faces"))
    assert gallery.ids == ["Zoo-6", "Zoo-7", "Zoo-8", "Zoo-9"]
    measured = json.loads((folder / "accuracy.json").read_text())
    # Chance is a third.
    assert measured["numbers"]["accuracy"]["mean_of_draws"] > 50
    assert measured["counts"]["unknown"] == 1


def test_what_usually_comes_up_is_said_in_these_words():
    gallery = tammes.Gallery("abc")
    gallery.enrol(torch.eye(3), ["a", "b", "c"])
    calls = (
        lambda: gallery.use_model("def"),
        lambda: gallery.enrol(torch.eye(3), ["a", "b", "c"]),
        lambda: gallery.threshold(0.01, torch.eye(3), ["a", "b", "c"]),
    )
    listed = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)
    assert len(listed) == len(calls)
    for call, text in zip(calls, listed, strict=True):
        with pytest.raises(ValueError, match=re.escape(text)):
            call()
