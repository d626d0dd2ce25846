"""The tutorial on few-shot learning is run as it is written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_tutorial import BLOCK, words, write_digits

from tammes.lab.cli.main import main
from tammes.lab.fewshot import class_lists
from tammes.lab.records.run_folder import find_runs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial_fewshot.md").read_text(encoding="utf-8")
BLOCKS = BLOCK.findall(PAGE)
COMMANDS = [text for kind, text in BLOCKS if kind == "sh"]
(LISTS,) = (text for kind, text in BLOCKS if kind == "json")
(CODE,) = (text for kind, text in BLOCKS if kind == "python")


def shown_after(commands):
    """What the page says that commands print, or nothing where it does not say."""
    place = BLOCKS.index(("sh", commands))
    kind, text = BLOCKS[place + 1]
    return text if kind == "text" else None


def prepare(folder, each):
    """A folder of images and the lists of the page."""
    write_digits(folder / "pictures", each=each)
    (folder / "classes.json").write_text(LISTS)


def run_code(folder):
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which everything on the page was run, and what each command printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    prepare(folder, each=60)
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    printed = {}
    for kind, text in BLOCKS:
        if kind == "python":
            run_code(folder)
        if kind != "sh":
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{text}\n{done.stderr[-2000:]}"
        printed[text] = done.stdout
    return folder, printed


@pytest.mark.slow
@pytest.mark.parametrize("commands", [text for text in COMMANDS if shown_after(text)])
def test_what_the_tutorial_shows_is_what_is_printed(followed, commands):
    _, printed = followed
    assert words(shown_after(commands)) == words(printed[commands])


@pytest.mark.slow
def test_its_runs_know_the_base_classes_alone_and_one_was_watched(followed):
    folder, _ = followed
    runs = {run.folder.name: run for run in find_runs([folder / "runs"])}
    assert {run.status for run in runs.values()} == {"done"}
    assert all(run.data["classes"] == json.loads(LISTS)["base"] for run in runs.values())
    assert all(line["gradients"]["largest"] < 1e-5 for line in runs["direct"].metrics)
    assert all("gradients" not in line for line in runs["softmax"].metrics)


def test_the_lists_of_the_tutorial_are_lists_of_the_digits(tmp_path):
    (tmp_path / "classes.json").write_text(LISTS)
    lists = class_lists.read(tmp_path / "classes.json")
    assert sorted((*lists.base, *lists.validation, *lists.novel)) == list("0123456789")


def test_every_evaluation_but_the_last_two_is_on_validation_classes():
    parts = re.findall(r"evaluate fewshot .*?:(\w+)", "".join(COMMANDS))
    assert parts == ["validation", "validation", "novel", "novel"]


def test_features_of_another_network_are_evaluated(tmp_path, monkeypatch, capsys):
    prepare(tmp_path, each=40)
    run_code(tmp_path)
    monkeypatch.chdir(tmp_path)
    (command,) = (text.split() for text in COMMANDS if "pixels.npz" in text)
    capsys.readouterr()
    assert main(command[1:]) == 0
    assert words(capsys.readouterr().out) == words(shown_after(" ".join(command) + "\n"))


@pytest.mark.parametrize("arguments", [["--queries", "500"], ["--way", "5"]])
def test_what_usually_comes_up_is_said_in_these_words(tmp_path, monkeypatch, capsys, arguments):
    prepare(tmp_path, each=10)
    run_code(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", "fewshot", "pixels.npz", "--split", "classes.json:novel", "--way", "3"]
    assert main([*command, *arguments]) == 2
    said = capsys.readouterr().err.strip().removeprefix("tammes evaluate: ")
    _, _, answers = PAGE.partition("## What usually comes up")
    listed = re.findall(r"^\| `(.*?)` \|", answers, re.MULTILINE)
    assert any(said.startswith(text) for text in listed), said
