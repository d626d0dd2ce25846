"""The tutorial is run as it is written: its commands, its code, its output, its example."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lab_runs import SAME
from PIL import Image
from sklearn.datasets import load_digits

from tammes.lab import data
from tammes.lab.cli import train as train_command
from tammes.lab.cli.main import _Parser, main
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run, find_runs
from tammes.lab.training.loop import train

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(PAGE)
COMMANDS = [text for kind, text in BLOCKS if kind == "sh"]


def shown_after(commands):
    """What the page says that commands print, or nothing where it does not say."""
    place = BLOCKS.index(("sh", commands))
    kind, text = BLOCKS[place + 1] if place + 1 < len(BLOCKS) else ("", "")
    return text if kind == "text" else None


def words(text):
    """Lines without numbers, which differ with the images, and without how they are aligned."""
    # A folder's name has a digest of the configuration, and a path says where it was run.
    text = re.sub(r"-[0-9a-f]{8}\b|/\S*/", "", text)
    # A verdict follows from the numbers.
    text = re.sub(r"verdict: .*?(\n\n|\Z)", r"verdict: \1", text, flags=re.DOTALL)
    text = re.sub(r"\[[^]%]*\]\*?|[-+]?\d[\d.,]*\*?|±", "", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def write_digits(folder, each):
    """A small image folder: some digits of every class."""
    digits, seen = load_digits(), dict.fromkeys(range(10), 0)
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if seen[label] < each:
            seen[label] += 1
            path = folder / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15).astype("uint8")).save(path)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which all commands of the tutorial were run, and what each of them printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    write_digits(folder / "pictures", each=40)
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }
    printed = {}
    for commands in COMMANDS:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{commands}\n{done.stderr[-2000:]}"
        printed[commands] = done.stdout
    return folder, printed


def test_the_tutorial_trains_compares_reports_and_advises():
    used = {line.split()[1] for text in COMMANDS for line in text.splitlines()}
    assert used == {"train", "compare", "report", "advise"}


@pytest.mark.slow
@pytest.mark.parametrize("commands", [text for text in COMMANDS if shown_after(text)])
def test_what_the_tutorial_shows_is_what_is_printed(followed, commands):
    _, printed = followed
    assert words(shown_after(commands)) == words(printed[commands])


def test_the_tutorial_shows_the_output_of_training_and_of_comparing():
    shown = [commands.split()[1] for commands in COMMANDS if shown_after(commands)]
    assert shown == ["train", "compare"]


@pytest.mark.slow
def test_every_run_of_the_tutorial_is_done_and_learns(followed):
    folder, _ = followed
    runs = find_runs([folder])
    assert len(runs) == 2 + 3 * 3
    assert {run.status for run in runs} == {"done"}
    accuracies = [run.final["test"]["accuracy"] for run in runs]
    # Of 320 images and ten classes; the first run is the shortest.
    assert min(accuracies) > 0.3
    assert sorted(accuracies)[len(accuracies) // 2] > 0.8


@pytest.mark.slow
def test_the_pages_and_figures_that_the_tutorial_names_are_there(followed):
    folder, printed = followed
    for page in ("compared/report.html", "page.html"):
        assert "cosface(margin=0.2)" in (folder / page).read_text(encoding="utf-8")
    assert list((folder / "figures").glob("*.png"))
    assert any(str(folder / "compared" / "report.html") in text for text in printed.values())


@pytest.mark.slow
def test_the_sections_that_the_tutorial_points_to_are_on_the_page(followed):
    folder, _ = followed
    page = (folder / "page.html").read_text(encoding="utf-8")
    _, _, section = PAGE.partition("## 5. Look at the page")
    named = re.findall(r"^- \*\*(.+?)\*\*:", section, re.MULTILINE)
    assert len(named) == 4
    for name in named:
        assert re.search(rf"<h2[^>]*>\s*{re.escape(name)}\s*<", page), name


@pytest.mark.slow
def test_the_file_of_settings_is_what_the_run_was_trained_with(followed):
    folder, _ = followed
    (run,) = (run for run in find_runs([folder / "runs"]) if run.config.seed == 1)
    assert run.config.loss == "cosface(margin=0.35)"
    assert (run.config.batch_size, run.config.augment) == (64, "pad_crop(1)")


def test_the_code_of_the_tutorial_makes_the_folder_it_promises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = (text for kind, text in BLOCKS if kind == "python")
    exec(compile(code, "tutorial.md", "exec"), {})
    assert len(list((tmp_path / "pictures").glob("*/*.png"))) == 1797
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == list("0123456789")


def test_every_flag_in_the_answers_is_one_of_train():
    parser = _Parser(prog="tammes train")
    train_command.add_arguments(parser)
    _, _, answers = PAGE.partition("## What usually comes up")
    flags = re.findall(r"`(--[^`]+)`", answers)
    assert len(flags) >= 7
    for text in flags:
        # Spelt out: argparse takes the beginning of a flag too.
        assert text.split()[0] in parser._option_string_actions, text
        parser.parse_args(re.findall(r'"[^"]*"|\S+', text))


@pytest.mark.slow
def test_the_example_compares_two_losses_on_a_folder_and_writes_the_page(tmp_path, capsys):
    write_digits(tmp_path / "pictures", each=20)
    example = runpy.run_path(str(ROOT / "examples" / "own_folder.py"))
    runs = example["main"](tmp_path / "pictures", tmp_path / "out", seeds=1, epochs=2)
    assert [run.config.loss for run in runs] == ["softmax", "cosface(margin=0.2)"]
    assert [Run(run.folder).status for run in runs] == ["done", "done"]
    printed = capsys.readouterr().out
    assert f"page: {tmp_path / 'out' / 'report.html'}" in printed
    assert "cosface(margin=0.2)" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_the_example_makes_the_folder_of_the_tutorial(tmp_path, monkeypatch):
    make = runpy.run_path(str(ROOT / "examples" / "own_folder.py"))["make_folder"]
    make(tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    (code,) = (text for kind, text in BLOCKS if kind == "python")
    exec(compile(code, "tutorial.md", "exec"), {})

    def content(folder):
        return {p.relative_to(folder): p.read_bytes() for p in folder.glob("*/*.png")}

    assert content(tmp_path / "theirs") == content(tmp_path / "pictures")


# ------------------------------------------------------------------------ the page on training

TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that `runs/softmax`, a finished run, is in."""
    folder = tmp_path_factory.mktemp("trained")
    train(Config(data="digits", epochs=1), folder / "runs" / "softmax")
    return folder


def test_table_of_files_has_every_file_and_says_which_are_reproducible(trained):
    rows = re.findall(r"^\| `([\w./]+)` \|.*\| *(yes|no|) *\|$", TRAINING, re.MULTILINE)
    listed = {name.rstrip("/") for name, _ in rows}
    files = {path.name for path in (trained / "runs" / "softmax").iterdir()}
    # A lock may be taken away with the process that held it.
    assert listed - {"failure.json", ".lock"} == files - {".lock"}
    same_again = {*SAME, "health.json", "checkpoints/"}
    assert {name for name, same in rows if same == "yes"} == same_again


def test_the_code_of_the_page_on_training_makes_the_model_again(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    (code,) = (text for kind, text in BLOCK.findall(TRAINING) if kind == "python")
    names = {"pixels": data.load("digits", "test").pixels}
    exec(compile(code, "training.md", "exec"), names)
    kept = Run(trained / "runs" / "softmax").tensors("embeddings")
    assert torch.equal(names["scores"].argmax(1), kept["predictions"])
    assert torch.allclose(names["features"], kept["features"], atol=1e-5)
    assert capsys.readouterr().out.strip().endswith(str(kept["predictions"][0].item()))


def test_a_run_that_diverges_says_at_which_step_and_leaves_a_record_of_it(tmp_path, capsys):
    """By itself, as it happens to users: the rate is too large, and nothing is replaced."""
    folder = tmp_path / "run"
    words = ["train", "--data", "digits", "--epochs", "2", "--lr", "1e30", "--folder", str(folder)]
    assert main(words) == 2
    assert re.search(r"not finite at step \d+, epoch 1", capsys.readouterr().err)
    failure = Run(folder).failure
    assert failure["kind"] == "not finite"
    assert len(failure["batch"]) == 128
