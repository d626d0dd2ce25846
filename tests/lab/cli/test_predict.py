"""``tammes predict``: the classes of images, a line for each."""

import io
import json
import shutil
import sys

import pytest
from test_bad_input import sentence

import tammes
from tammes.lab.cli.main import main
from tammes.lab.inference import progress_bar as progress
from tammes.lab.inference.progress_bar import ImageProgress


@pytest.fixture
def images(photographs, tmp_path):
    """A folder of photographs that a test may change."""
    return shutil.copytree(photographs / "test" / "bee", tmp_path / "images")


def predict(capsys, run, *words):
    assert main(["predict", str(run.folder), *map(str, words)]) == 0
    return capsys.readouterr()


def test_a_line_for_each_image_in_order(photograph_run, images, capsys):
    lines = predict(capsys, photograph_run, images, "--top", 2).out.splitlines()
    found = tammes.load(photograph_run, device="cpu").predict(images, top=2)
    assert len(lines) == len(found) == 4
    for line, each in zip(lines, found, strict=True):
        name, first, second = line.split("  ")
        assert name == each.image
        assert first == f"{each.classes[0]} {100 * each.probabilities[0]:.1f} %"
        assert second.startswith(each.classes[1])


def test_json_has_a_line_for_each_image(photograph_run, images, capsys):
    paths = sorted(images.iterdir())
    out = predict(capsys, photograph_run, *paths[:2], images, "--json").out
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["image"] for row in rows] == [*map(str, paths[:2]), *map(str, paths)]
    (found,) = tammes.load(photograph_run, device="cpu").predict(paths[0])
    assert rows[0]["predictions"][0]["class"] == found.classes[0]
    assert rows[0]["predictions"][0]["label"] == found.labels[0]
    assert [each["score"] for each in rows[0]["predictions"]] == pytest.approx(
        list(found.scores), rel=1e-4
    )
    assert len(rows[0]["predictions"]) == 3


def test_an_unreadable_image_is_named_and_what_came_before_is_kept(photograph_run, images, capsys):
    broken = images / "b_clear.png"
    broken.write_bytes(broken.read_bytes()[:100])
    assert main(["predict", str(photograph_run.folder), str(images)]) == 2
    printed = capsys.readouterr()
    assert [line.split("  ")[0] for line in printed.out.splitlines()] == [
        str(images / "a_turned.jpg")
    ]
    (said,) = printed.err.splitlines()
    assert said.startswith(f"tammes predict: {broken} cannot be read (")
    assert said.endswith("; --skip-corrupt leaves such images out")


def test_skip_corrupt_goes_on_and_names_what_it_left_out(photograph_run, images, capsys):
    (images / "b_clear.png").write_bytes(b"none")
    (images / "e.jpg").touch()
    printed = predict(capsys, photograph_run, images, "--skip-corrupt")
    assert len(printed.out.splitlines()) == 3
    assert printed.err.splitlines() == [
        f"{images / name} cannot be read (not an image), it is left out"
        for name in ("b_clear.png", "e.jpg")
    ]


def test_nothing_readable_is_an_error(photograph_run, tmp_path, capsys):
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    words = (photograph_run.folder, tmp_path, "--skip-corrupt")
    assert sentence(capsys, "predict", *words) == "none of the 2 images can be read"


def test_bad_input_is_one_sentence(photograph_run, tmp_path, capsys):
    image, run = tmp_path / "none.png", photograph_run.folder
    assert sentence(capsys, "predict", run, image) == f"{image}: there is no such image or folder"
    words = (run, tmp_path, "--top", "0")
    assert sentence(capsys, "predict", *words) == "--top is expected to be 1 or more, got 0"
    assert "there is no image in it" in sentence(capsys, "predict", run, tmp_path)
    assert sentence(capsys, "predict", tmp_path, tmp_path).endswith(
        "not a run, it has no config.json"
    )
    shutil.copy(run / "config.json", tmp_path)
    assert sentence(capsys, "predict", tmp_path, tmp_path).endswith(
        "the run has no model.safetensors, it is unfinished"
    )


def test_progress_is_a_line_every_few_seconds_without_a_terminal(monkeypatch):
    clock = iter([0.0, 4.0, 11.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with ImageProgress(2000, stream) as shown:
        shown.advance()
        shown.done = 1099
        shown.advance()
        shown.advance()
    assert stream.getvalue() == "1,100 of 2,000 images, 100 images/s\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_leaves_piped_results_alone(monkeypatch):
    stream, results = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", results)
    with ImageProgress(3, stream) as shown:
        print("one result")
        shown.advance()
        shown.say("a message")
    assert results.getvalue() == "one result\n"
    assert "a message" in stream.getvalue()
    assert "1/3" in stream.getvalue()
