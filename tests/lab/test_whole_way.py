"""A folder of images goes the whole way on the command line: train, stop, go on, report."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from lab_runs import SAME
from PIL import Image
from sklearn.datasets import load_digits
from test_import import BLOCKER, run

from tammes.lab.cli.main import main
from tammes.lab.records.run_folder import Run
from tammes.lab.training.progress import Lines

SHORT = ["--epochs", "3", "--batch_size", "32", "--lr", "0.05", "--loss", "cosface(margin=0.2)"]
"""A run of a second."""
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def digit_folder(root, names, *, each=30, split="", digits=None):
    """PNG files of handwritten digits, 8×8 grey: a class folder for each name, a digit for each."""
    values = load_digits()
    for digit, name in enumerate(names):
        folder = root / split / name
        folder.mkdir(parents=True)
        pictures = values.images[values.target == (digits[digit] if digits else digit)][:each]
        for number, picture in enumerate(pictures):
            grey = (picture * 255 / 16).round().astype("uint8")
            Image.fromarray(grey).save(folder / f"{number:03}.png")
    return root


def interrupt(monkeypatch, epoch, with_what=KeyboardInterrupt):
    """Runs are stopped at the end of an epoch, before its checkpoint is written."""
    shown = Lines.epoch

    def stop(self, row, **values):
        shown(self, row, **values)
        if row["epoch"] == epoch:
            raise with_what

    monkeypatch.setattr(Lines, "epoch", stop)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return digit_folder(tmp_path_factory.mktemp("data") / "pictures", ["zero", "one", "two"])


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory):
    """A run of these images that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", "--data", str(pictures), *SHORT, "--folder", str(folder)]) == 0
    return Run(folder)


def test_a_run_ends_with_its_measures_and_how_to_see_more(pictures, tmp_path, capsys):
    words = ["train", "--data", str(pictures), *SHORT, "--out", str(tmp_path / "my runs")]
    assert main(words) == 0
    printed = capsys.readouterr()
    folder = next((tmp_path / "my runs").iterdir())
    final = Run(folder).final
    first, *_, last = printed.out.splitlines()
    assert first == f"test accuracy   {100 * final['test']['accuracy']:.2f} %  (last epoch)"
    assert shlex.split(last) == ["page", "tammes", "report", str(folder)]
    for epoch in (1, 2, 3):
        assert f"epoch {epoch}/3  loss " in printed.err


def test_it_learns_the_classes_of_the_folder(whole, pictures):
    assert whole.data["classes"] == ["one", "two", "zero"]
    assert whole.data["source"] == str(pictures)
    # A fifth of every class is held out.
    assert (whole.data["train"], whole.data["test"]) == (72, 18)
    assert whole.final["test"]["accuracy"] > 0.9


def test_a_run_that_is_interrupted_says_how_to_go_on_and_does_so(
    pictures, whole, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "my run"
    words = ["train", "--data", str(pictures), *SHORT, "--folder", str(folder)]
    interrupt(monkeypatch, epoch=2)
    assert main(words) == 130
    printed = capsys.readouterr()
    said = printed.err.splitlines()[-1]
    assert said.startswith("interrupted; resume with ")
    assert said.endswith(f"--resume {shlex.quote(str(folder))}")
    assert printed.out == ""
    assert Run(folder).status == "unfinished"
    monkeypatch.undo()
    # What it said, to the letter.
    again = shlex.split(said.removeprefix("interrupted; resume with "))
    assert again == ["tammes", "train", "--resume", str(folder)]
    assert main(again[1:]) == 0
    printed = capsys.readouterr()
    assert f"{folder}: resuming at epoch 2, step 4" in printed.err
    assert "epoch 1/3" not in printed.err
    assert "test accuracy" in printed.out
    for name in SAME:
        assert (folder / name).read_bytes() == (whole.folder / name).read_bytes(), name


def test_an_interruption_before_training_names_no_run(pictures, tmp_path, capsys, monkeypatch):
    def stop(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("tammes.lab.data.load", stop)
    folder = tmp_path / "run"
    assert main(["train", "--data", str(pictures), *SHORT, "--folder", str(folder)]) == 130
    assert capsys.readouterr().err == "interrupted; repeat the command\n"
    assert not folder.exists()


def test_the_same_command_goes_on_too(pictures, whole, tmp_path, capsys, monkeypatch):
    words = ["train", "--data", str(pictures), *SHORT, "--out", str(tmp_path)]
    interrupt(monkeypatch, epoch=2)
    assert main(words) == 130
    monkeypatch.undo()
    assert main(words) == 0
    assert "resuming at epoch 2" in capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    for name in SAME:
        assert (folder / name).read_bytes() == (whole.folder / name).read_bytes(), name


def test_a_finished_run_is_shown_again_and_not_trained_again(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}
    assert main(["train", "--resume", str(whole.folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("test accuracy")
    assert printed.err == f"{whole.folder}: already finished, nothing to train\n"
    assert {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")} == before


@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own_ends_with_130_and_nothing_else_is_said(pictures, tmp_path):
    """A signal, not a pretended one: whatever catches it on the way must hand it on."""
    folder = tmp_path / "run"
    words = ["train", "--data", str(pictures), "--folder", str(folder), "--epochs", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tammes", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        for line in process.stderr:
            if line.startswith("epoch 2/"):
                break
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == ""
    lines = [line for line in rest.splitlines() if not line.startswith("epoch ")]
    assert lines == [f"interrupted; resume with tammes train --resume {folder}"]
    assert list((folder / "checkpoints").glob("last-*.pt"))


def test_the_run_becomes_a_page(whole, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(whole.folder), "--out", str(page)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "cosface(margin=0.2)" in printed.out
    assert printed.out.splitlines()[-1] == f"  page: {page}"
    text = page.read_text()
    assert all(part in text for part in ("cosface(margin=0.2)", "zero", "one", "two"))


def test_json_is_all_there_is_on_stdout(whole, capsys):
    assert main(["train", "--resume", str(whole.folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"folder": str(whole.folder), **whole.final}


def test_a_run_of_its_own_test_folder_trains_on_everything_else(pictures, tmp_path, capsys):
    other = digit_folder(tmp_path / "other", ["zero", "two"], each=5, digits=[0, 2])
    folder = tmp_path / "run"
    words = ["--data", str(pictures), "--test", str(other), *SHORT, "--folder", str(folder)]
    assert main(["train", *words, "--epochs", "1"]) == 0
    done = Run(folder)
    assert (done.data["train"], done.data["test"]) == (90, 10)
    # A class without a test image has no accuracy, and is no mistake.
    assert done.final["test"]["per_class_accuracy"][0] is None
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0


# -- The configuration.


def test_the_printed_configuration_is_that_of_the_same_run(pictures, tmp_path, capsys):
    words = ["--data", str(pictures), *SHORT, "--seed", "5", "--augment", "flip()"]
    for flag in ("--print_config", "--print-config"):
        with pytest.raises(SystemExit) as end:
            main(["train", *words, flag, "--out", str(tmp_path / "out")])
        assert end.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    first, second = printed.out[: len(printed.out) // 2], printed.out[len(printed.out) // 2 :]
    assert first == second
    assert "seed: 5\n" in first
    assert "loss: cosface(margin=0.2)\n" in first
    assert not (tmp_path / "out").exists()
    (tmp_path / "run.yaml").write_text(first)
    folders = []
    for given in (words, ["--config", str(tmp_path / "run.yaml")]):
        assert main(["train", *given, "--epochs", "1", "--out", str(tmp_path / "runs")]) == 0
        run_line = capsys.readouterr().out.splitlines()[3]
        folders.append(run_line.split(maxsplit=1)[1])
    assert folders[0] == folders[1]


# -- Packages that Tammes does not bring.


def test_a_logger_that_is_installed_gets_the_numbers(pictures, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    words = ["--data", str(pictures), *SHORT, "--epochs", "1", "--loggers", "tensorboard"]
    assert main(["train", *words, "--folder", str(tmp_path / "run")]) == 0
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("tensorboard", ["--loggers", "tensorboard"]),
        ("mlflow", ["--loggers", "mlflow"]),
        ("wandb", ["--loggers", "wandb"]),
        ("timm", ["--backbone", "timm:resnet18"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_package_that_is_missing_is_named_before_anything_is_written(
    tmp_path, capsys, monkeypatch, command, package, words
):
    # An entry of None is what Python has for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "out"
    losses = ["--losses", "softmax", "--seeds", "1"] if command == "compare" else []
    assert main([command, *losses, *words, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"tammes {command}: ")
    assert re.search(rf"\b{package}\b.* could not be imported", said)
    (told,) = re.findall(r"; install it with: pip install (.*)\n", said)
    # What it says to install does bring the package.
    extra = re.fullmatch(r"'tammes\[(\w+)\]'", told)
    brought = [told] if extra is None else EXTRAS.get(extra[1], [])
    assert [each for each in brought if re.match(rf"{package}\b", each)]
    assert not list(out.rglob("config.json"))


def test_the_lab_names_what_to_install_where_a_package_of_its_own_is_missing(tmp_path):
    code = BLOCKER.format(blocked={"lightning"}) + f"""
from tammes.lab.cli import main
sys.exit(main(["train", "--out", {str(tmp_path / "out")!r}]))
"""  # fmt: skip
    result = run(code)
    assert result.returncode == 2
    assert result.stderr.startswith("tammes train: lightning.fabric could not be imported")
    assert result.stderr.endswith("install it with: pip install 'tammes[lab]'\n")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
