"""``tammes compare`` on MNIST, as anybody would run it, with a fiftieth of the training images."""

import contextlib
import io
import re
import shutil
from typing import NamedTuple

import pytest

from tammes.lab.cli.main import main
from tammes.lab.records.run_folder import Run, find_runs

pytestmark = pytest.mark.slow

LOSSES = ["softmax", "cosface(margin=0.2)", "lm_softmax"]
WORDS = ["--data", "mnist", "--backbone", "mnist_cnn", "--losses", ", ".join(LOSSES)]
WORDS += ["--seeds", "1", "--fraction", "0.02", "--epochs", "3", "--evaluate_every", "3"]
WORDS += ["--batch_size", "64", "--lr", "0.05", "--accelerator", "cpu"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


def compare(out):
    """Call the command; what it printed is kept, for fixtures have no ``capsys``."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(["compare", *WORDS, "--out", str(out)])
    return Said(code, stdout.getvalue(), stderr.getvalue())


@pytest.fixture(scope="module", autouse=True)
def _real(shared_data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAMMES_DATA", str(shared_data))
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("mnist") / "out"


@pytest.fixture(scope="module")
def first(out):
    """The first call, which trains everything."""
    return compare(out)


def stamps(out):
    return {
        path: path.stat().st_mtime_ns for run in find_runs([out]) for path in run.folder.rglob("*")
    }


def test_three_losses_are_trained_on_mnist_and_compared(first, out):
    assert first.code == 0, first.err
    assert "3 runs in " in first.err
    assert ", 0 of them already finished; " in first.err
    runs = find_runs([out])
    assert sorted(run.config.loss for run in runs) == sorted(LOSSES)
    for run in runs:
        assert run.status == "done"
        assert run.data["classes"] == list("0123456789")
        assert run.data["image"] == [1, 28, 28]
        assert (run.data["train"], run.data["test"]) == (pytest.approx(1200, abs=10), 10_000)
        assert run.environment["backbone"]["name"] == "mnist_cnn"


def test_they_learn_to_read_digits(first, out):
    accuracies = {run.config.loss: run.final["test"]["accuracy"] for run in find_runs([out])}
    assert min(accuracies.values()) > 0.8, accuracies
    assert accuracies["softmax"] > 0.9


def test_the_table_has_the_numbers_of_the_records(first, out):
    for run in find_runs([out]):
        shown = f"{100 * run.final['test']['accuracy']:.2f}"
        row = rf"^  {re.escape(run.config.loss)} +1 +{re.escape(shown)} "
        assert re.search(row, first.out, re.MULTILINE), first.out


def test_one_seed_names_no_winner(first):
    assert "no interval and no winner for n = 1" in first.out
    # A star at a difference would be a claim.
    assert not re.search(r"\d\]?\*", first.out)


def test_the_page_is_written_and_has_every_loss(first, out):
    assert first.out.splitlines()[-1] == f"  page: {out / 'report.html'}"
    text = (out / "report.html").read_text()
    assert all(loss in text for loss in LOSSES)


def test_a_second_call_trains_nothing_and_a_deleted_cell_is_trained_alone(first, out):
    before, page = stamps(out), out / "report.html"
    page.unlink()
    again = compare(out)
    assert again.code == 0
    assert "3 runs in " in again.err
    assert ", 3 of them already finished; " in again.err
    assert "running" not in again.err
    assert again.out == first.out
    assert page.exists()
    assert stamps(out) == before

    gone = next(run for run in find_runs([out]) if run.config.loss == "lm_softmax")
    expected = gone.final
    shutil.rmtree(gone.folder)
    last = compare(out)
    assert last.code == 0, last.err
    assert ", 2 of them already finished; " in last.err
    assert "lm_softmax, seed 0: done" in last.err
    assert not re.search(r"(?<!lm_)softmax, seed 0", last.err)
    assert "cosface(margin=0.2), seed 0" not in last.err
    kept = {path: time for path, time in stamps(out).items() if gone.folder not in path.parents}
    assert kept == {path: before[path] for path in before if gone.folder not in path.parents}
    # The same numbers once more.
    assert Run(gone.folder).final == expected
