"""Losses times seeds: what is there is kept, what is missing is run, what fails is reported."""

import importlib
import json
import re
import sys

import pytest
import torch
from lab_runs import held_by_another_process
from records import make_run

from tammes.lab.cli import demo
from tammes.lab.cli.main import main
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run, find_runs, write_tensors
from tammes.lab.runner import Event, Result
from tammes.lab.runner import sweep as command
from tammes.lab.runner.sweep import check, compare, plan_configs

SMALL = Config(data="digits", backbone="mnist_cnn(features=2)", epochs=2)
LOSSES = "softmax, cosface(margin=0.2)"


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Runs are pretended, and noted in this file."""
    monkeypatch.setattr(command, "_WORK", "cell_work:pretend_to_train")
    monkeypatch.setenv("CELL_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("CELL_STOP", raising=False)
    (tmp_path / "log").touch()
    return tmp_path / "log"


def ran(log):
    """What was run since it was last asked for."""
    names = log.read_text().split()
    log.write_text("")
    return sorted(re.sub(r"-\w+$", "", name) for name in names)


@pytest.fixture
def here(monkeypatch):
    """Cells run in this process: those of their own are tested with the engines."""

    def run_cells(cells, work, *, at, on_event):
        module, _, name = work.partition(":")
        results = []
        for cell in cells:
            on_event(Event(cell, "started"))
            try:
                getattr(importlib.import_module(module), name)(
                    cell.payload, cell.folder, lambda v, c=cell: on_event(Event(c, "progress", v))
                )
            except Exception as error:
                results.append(Result(cell, False, f"{type(error).__name__}: {error}"))
                on_event(Event(cell, "failed", {"reason": results[-1].reason}))
            else:
                results.append(Result(cell, True))
                on_event(Event(cell, "done"))
        return results

    monkeypatch.setattr(command, "run_cells", run_cells)


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(command, "check", lambda configs, report: {})


# -- Cells.


def test_a_cell_is_a_loss_and_a_seed():
    config = SMALL.replace(seed=4)
    cells = plan_configs(config, LOSSES, 2)
    expected = [("softmax", 4), ("softmax", 5), ("cosface(margin=0.2)", 4),
                ("cosface(margin=0.2)", 5)]  # fmt: skip
    assert [(cell.loss, cell.seed) for cell in cells] == expected
    assert cells[0] == config.replace(loss="softmax")
    assert plan_configs(SMALL, ["bce"], [3, 9])[1] == SMALL.replace(loss="bce", seed=9)


@pytest.mark.parametrize(
    ("losses", "seeds", "name", "message"),
    [
        ("", 3, "", "losses is expected to name at least one loss, got none"),
        ("bce,bce", 3, "", "losses is expected to name each loss once, got 'bce' twice"),
        ("bce", 0, "", "seeds is expected to be at least 1, got 0"),
        ("bce", [1, 1], "", r"seeds is expected to name each seed once, got \[1, 1\]"),
        ("bce", [], "", r"seeds is expected to name each seed once, got \[\]"),
        ("bce,softmax", 1, "mine", "name works with one loss only, got 'mine' for 2"),
        (
            "bce,(softmax",
            1,
            "",
            r"losses: 'bce,\(softmax' cannot be read at character 5: '\(' was never closed",
        ),
    ],
)
def test_cells_that_cannot_be_are_refused(losses, seeds, name, message):
    with pytest.raises(ValueError, match=message):
        plan_configs(SMALL.replace(name=name), losses, seeds)


# -- What is run, and what is not.


@pytest.mark.usefixtures("unchecked", "here")
def test_what_is_finished_is_not_run_again_and_what_is_new_is(log, tmp_path):
    runs = compare(SMALL, LOSSES, 2, tmp_path / "out", workers=2)
    assert [run.status for run in runs] == ["done"] * 4
    assert [(run.config.loss, run.config.seed) for run in runs] == [
        ("softmax", 0), ("softmax", 1), ("cosface(margin=0.2)", 0), ("cosface(margin=0.2)", 1),
    ]  # fmt: skip
    assert len(ran(log)) == 4
    # One more loss, and no seed of the old ones.
    again = compare(SMALL, f"{LOSSES}, bce", 2, tmp_path / "out")
    assert ran(log) == ["bce-seed0", "bce-seed1"]
    assert [run.folder for run in again[:4]] == [run.folder for run in runs]
    # Another learning rate is another run.
    compare(SMALL.replace(lr=0.3), "softmax", 1, tmp_path / "out")
    assert ran(log) == ["softmax-seed0"]
    # How it is carried out is not.
    compare(SMALL.replace(workers=0), "softmax", 2, tmp_path / "out")
    assert ran(log) == []


@pytest.mark.usefixtures("unchecked", "here")
def test_a_folder_says_what_is_in_it(log, tmp_path):
    run = compare(SMALL, ["cosface(margin=0.2) + 0.5*sample_margin()"], [3], tmp_path)[0]
    digest = SMALL.replace(loss="cosface(margin=0.2) + 0.5*sample_margin()", seed=3).digest
    assert run.folder.name == f"cosface_margin_0.2_0.5_sample_margin-seed3-{digest}"


@pytest.mark.usefixtures("unchecked")
def test_a_failed_cell_is_reported_and_tried_again_next_time(log, tmp_path, monkeypatch, capsys):
    stop = {"softmax-seed0": "kill", "softmax-seed1": "disk full", "bce-seed0": "not finite"}
    monkeypatch.setenv("CELL_STOP", json.dumps(stop))
    runs = compare(SMALL, "softmax, bce", 2, tmp_path / "out", workers=2)
    assert [run.status for run in runs] == ["failed", "failed", "failed", "done"]
    assert [run.failure["kind"] for run in runs[:3]] == ["interrupted", "error", "not finite"]
    assert runs[0].failure["message"].startswith("its process was killed by SIGKILL")
    assert runs[1].failure["message"] == "RuntimeError: disk full"
    assert "softmax, seed 0: failed: its process was killed by SIGKILL" in capsys.readouterr().err
    ran(log)
    # The cause is gone. A loss that was not finite would not be finite again.
    monkeypatch.setenv("CELL_STOP", "{}")
    again = compare(SMALL, "softmax, bce", 2, tmp_path / "out")
    said = "bce, seed 0: failed before, --retry-failed retries it: the loss was not finite"
    assert said in capsys.readouterr().err
    assert ran(log) == ["softmax-seed0", "softmax-seed1"]
    assert [run.status for run in again] == ["done", "done", "failed", "done"]
    last = compare(SMALL, "softmax, bce", 2, tmp_path / "out", retry_failed=True)
    assert ran(log) == ["bce-seed0"]
    assert [run.status for run in last] == ["done"] * 4


@pytest.mark.usefixtures("unchecked")
def test_a_cell_that_dies_at_once_is_a_run_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_WORK", "cell_work:nothing")
    run = compare(SMALL, "softmax", 1, tmp_path)[0]
    assert run.status == "failed"
    assert run.config == SMALL.replace(loss="softmax")
    assert "no attribute 'nothing'" in run.failure["message"]


@pytest.mark.usefixtures("unchecked", "log", "here")
def test_an_old_reason_does_not_outlive_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setenv("CELL_STOP", json.dumps({"softmax": "first"}))
    compare(SMALL, "softmax", 1, tmp_path)
    monkeypatch.setenv("CELL_STOP", json.dumps({"softmax": "second"}))
    run = compare(SMALL, "softmax", 1, tmp_path)[0]
    assert run.failure["message"] == "RuntimeError: second"


@pytest.mark.usefixtures("unchecked", "here")
def test_two_comparisons_do_not_work_in_one_folder(log, tmp_path):
    with (
        held_by_another_process(tmp_path),
        pytest.raises(ValueError, match="another comparison is running in this folder"),
    ):
        compare(SMALL, "softmax", 1, tmp_path)
    compare(SMALL, "softmax", 1, tmp_path)
    assert ran(log) == ["softmax-seed0"]


@pytest.mark.usefixtures("unchecked")
def test_torchrun_is_refused(log, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="cannot run under torchrun"):
        compare(SMALL, "softmax", 1, tmp_path)


# -- What is found before anything is trained.


@pytest.mark.parametrize(
    ("change", "losses", "message"),
    [
        ({}, "softmax, cosfce", "loss: there is no 'cosfce' in 'cosfce'; did you mean cosface?"),
        ({}, "softmax, cosface(margn=1)", "cosface has no setting 'margn'; did you mean margin?"),
        ({}, "direct_sum(softmax, nca)", "direct_sum expects more dimensions than classes"),
        ({"backbone": "mnist_cn"}, "softmax", "there is no backbone 'mnist_cn'; did you mean"),
        ({"head": "cosin"}, "softmax", "there is no head 'cosin'; did you mean cosine?"),
        ({"head": "linear"}, "softmax, lm_softmax", "lm_softmax expects a head with unit"),
        ({"sampler": "randm()"}, "softmax", "there is no sampler 'randm'; did you mean random?"),
        ({"augment": "flipp()"}, "softmax", "there is no .* 'flipp'; did you mean flip?"),
        ({"lr_schedule": "cosin()"}, "softmax", "there is no .* 'cosin'; did you mean cosine?"),
        ({"schedules": "margin=WarmUp(0, 1)"}, "cosface", "WarmUp expects steps, got none"),
        ({"noise": "symetric(0.4)"}, "softmax", "did you mean symmetric?"),
        ({"data": "/no/such/folder"}, "softmax", "/no/such/folder"),
    ],
)
def test_a_mistake_is_found_before_the_first_run(log, tmp_path, capsys, change, losses, message):
    flags = [f"--{key}={value}" for key, value in {**SMALL.to_dict(), **change}.items()
             if key not in ("loss", "seed", "name") and value is not None]  # fmt: skip
    words = ["compare", "--losses", losses, "--out", str(tmp_path / "out"), *flags]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err.splitlines()[-1])
    assert printed.err.splitlines()[-1].startswith("tammes compare: ")
    assert printed.out == ""
    assert ran(log) == []
    assert not list((tmp_path / "out").glob("*/config.json"))


def test_checking_leaves_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    heads = check(plan_configs(SMALL, LOSSES, 2), lambda _: None)
    assert torch.equal(torch.rand(2), expected)
    assert list(heads) == ["softmax", "cosface(margin=0.2)"]


def test_a_folder_that_cannot_be_written_is_said(log, tmp_path, capsys, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.touch", forbidden)
    for words in (["compare", "--losses", "softmax"], ["demo"]):
        assert main([*words, "--out", str(tmp_path)]) == 2
        expected = f"{tmp_path} cannot be written to (Permission denied); choose another folder"
        assert expected in capsys.readouterr().err
    monkeypatch.undo()


def test_a_file_where_the_folder_should_be_is_said(log, tmp_path, capsys):
    (tmp_path / "out").touch()
    for words in (["compare", "--losses", "softmax"], ["demo"]):
        assert main([*words, "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert "out cannot be written to (" in said
        assert said.count("\n") == 1
    assert ran(log) == []


# -- The command.


@pytest.mark.usefixtures("unchecked", "log", "here")
def test_command_prints_a_table_writes_a_page_and_tells_success(tmp_path, capsys, monkeypatch):
    pages = []

    def page(loaded, **options):
        pages.append(loaded.groups)
        return "<html>"

    monkeypatch.setattr("tammes.lab.cli.compare.render_runs_page", page)
    words = ["compare", "--losses", LOSSES, "--seeds", "0,2", "--epochs", "2", "--lr", "0.05"]
    words += ["--out", str(tmp_path / "out"), "--parallel", "1", "--baseline", "softmax"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "softmax" in printed
    assert "cosface(margin=0.2)" in printed
    assert printed.splitlines()[-1] == f"  page: {tmp_path / 'out' / 'report.html'}"
    assert (tmp_path / "out" / "report.html").read_text() == "<html>"
    assert "  verdict: " in printed
    runs = [run for group in pages[0] for run in group.runs.values()]
    assert [run.config.seed for run in runs] == [0, 2, 0, 2]
    assert {run.config.lr for run in runs} == {0.05}
    assert pages[0][0].label == "softmax"
    monkeypatch.setenv("CELL_STOP", json.dumps({"bce-seed2": "out of luck"}))
    words[2] = f"{LOSSES}, bce"
    assert main([*words, "--page", str(tmp_path / "page.html")]) == 1
    printed = capsys.readouterr()
    assert "RuntimeError: out of luck" in printed.out
    assert "bce, seed 2: failed: RuntimeError: out of luck" in printed.err
    assert (tmp_path / "page.html").exists()


@pytest.mark.usefixtures("unchecked", "log")
def test_an_interrupt_is_said_in_a_sentence(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_cells", interrupted)
    assert main(["compare", "--losses", "softmax", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.endswith("interrupted; repeat the command to resume\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the following arguments are required: --losses"),
        (["--losses", "bce", "--seeds", "many"], "a number or a list such as 0,1,5 is expected"),
        (["--losses", "bce", "--parallel", "0"], "workers is expected to be at least 1, got 0"),
        (["--losses", "bce", "--baseline", "softmax"], "baseline is expected to be one of the"),
        (["--losses", "bce", "--epochs", "0"], "epochs is expected to be at least 1, got 0"),
        (["--losses", "bce", "--lrate", "0"], "unrecognized arguments: --lrate 0"),
        (["--losses", "bce", "--bach_size", "3"], "did you mean --batch_size?"),
    ],
)
def test_the_command_refuses_what_cannot_be_in_a_sentence(words, sentence, capsys, tmp_path):
    assert main(["compare", "--out", str(tmp_path), *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


# -- With real training.


@pytest.mark.slow
def test_real_runs_are_trained_compared_and_resumed(tmp_path, capsys):
    words = ["compare", "--losses", LOSSES, "--seeds", "2", "--epochs", "2", "--out", str(tmp_path)]
    words += ["--backbone", "mnist_cnn(features=3)", "--batch_size", "64"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert "cosface(margin=0.2): cosine(scale=30.0)" in first.err
    page = (tmp_path / "report.html").read_text()
    assert "cosface(margin=0.2)" in page
    runs = sorted(tmp_path.glob("*-seed*"))
    assert len(runs) == 4
    stamps = [run.stat().st_mtime_ns for run in runs]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[:3] == first.out.splitlines()[:3]
    assert [run.stat().st_mtime_ns for run in runs] == stamps


@pytest.mark.slow
def test_a_cell_in_a_used_process_is_the_same_to_the_last_bit(tmp_path):
    config = SMALL.replace(accelerator="cpu")
    used = compare(config, "softmax, cosface", [0, 1], tmp_path / "used", workers=1)
    fresh = compare(config, "cosface", [1], tmp_path / "fresh", workers=1)
    ours, theirs = used[-1].tensors("model"), fresh[-1].tensors("model")
    assert ours
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert used[-1].metrics == fresh[-1].metrics


def test_the_demo_lists_what_there_is(capsys):
    assert main(["demo", "--list"]) == 0
    printed = capsys.readouterr().out
    for part in ("cosface", "spectral_sum", "simplex", "mnist_cnn", "digits", "WarmUp", "measure"):
        assert part in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_the_demo_is_a_comparison_that_can_be(monkeypatch):
    heads = check(plan_configs(demo.CONFIG, demo.LOSSES, demo.SEEDS), lambda _: None)
    assert list(heads) == list(demo.LOSSES)


@pytest.mark.slow
def test_the_demo_ends_by_naming_its_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "CONFIG", demo.CONFIG.replace(epochs=6))
    monkeypatch.setattr(demo, "SEEDS", 1)
    monkeypatch.setattr(demo, "LOSSES", demo.LOSSES[:2])
    monkeypatch.setattr(sys, "argv", ["tammes", "demo"])
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    page = tmp_path / "out" / "demo" / "report.html"
    assert capsys.readouterr().out.splitlines()[-1] == f"  page: {page}"
    runs = [Run(path.parent) for path in (tmp_path / "out" / "demo").glob("*/final.json")]
    assert len(runs) == 2
    assert all(run.final["test"]["accuracy"] > 0.7 for run in runs)


def test_the_demo_says_which_loss_tells_digits_apart(tmp_path):
    features = torch.nn.functional.one_hot(torch.arange(40) % 10, 10).float()
    for seed in range(4):
        noise = torch.randn(40, 10, generator=torch.Generator().manual_seed(seed))
        for loss, size in (("softmax()", 0.5), ("cosface()", 0.01)):
            run = make_run(tmp_path / f"{loss}{seed}", loss=loss, seed=seed, size=10, examples=40)
            tensors = run.tensors("embeddings") | {"features": features + size * noise}
            write_tensors(run.folder / "embeddings.safetensors", tensors)
    (sentence,) = demo.verified(find_runs([tmp_path]))
    assert sentence.startswith("Do two test images show the same digit, by the cosine of their")
    assert "cosface() is ahead: EER 0.00 %, " in sentence
