"""Every example runs, learns, and saves the prototypes with the rest."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tammes
from tammes import checkpoint

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

CHANCE = 0.1


@pytest.fixture
def one_thread():
    # The problems are so small that more threads only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def main_of(name):
    return runpy.run_path(str(EXAMPLES / name))["main"]


def run_elsewhere(name, **arguments):
    """Result of an example's main in a process of its own, where libraries may warn."""
    code = (
        "import json, runpy, sys; "
        f"main = runpy.run_path({str(EXAMPLES / name)!r})['main']; "
        f"print(json.dumps(main(**{arguments!r})))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_quickstart_learns_and_shows_the_largest_margins_for_lm_softmax(one_thread):
    runs = main_of("quickstart.py")(seeds=1, epochs=4)
    assert all(result["accuracy"] > 90 for (result,) in runs.values())
    means = {name: result["mean"] for name, (result,) in runs.items()}
    assert means["softmax"] < means["CosFace"] < means["LM-Softmax"]
    margins = {name: result["class margin"] for name, (result,) in runs.items()}
    assert max(margins["softmax"], margins["CosFace"]) < margins["LM-Softmax"] < 96.4


def test_quickstart_prints_each_loss_the_optimum_and_where_to_go_next(one_thread, capsys):
    runs = main_of("quickstart.py")(seeds=2, epochs=1)
    printed = capsys.readouterr().out
    for name, results in runs.items():
        (line,) = (line for line in printed.splitlines() if line.startswith(name))
        mean = sum(result["accuracy"] for result in results) / 2
        assert line.removeprefix(name).split()[:2] == [f"{mean:.1f}", "±"]
    (optimum,) = (line for line in printed.splitlines() if line.startswith("optimum"))
    assert optimum.split()[1:] == ["100.0", "96.4", "1.11", "1.11"]
    last = printed.splitlines()[-1]
    assert last.startswith("Next: ")
    assert all(line.rstrip() == line and len(line) < 80 for line in printed.splitlines())


def test_plain_torch_learns_and_its_checkpoint_holds_prototypes_and_schedule(one_thread, tmp_path):
    path = tmp_path / "checkpoint.pt"
    assert main_of("plain_torch.py")(epochs=4, path=path) > CHANCE + 0.7
    saved = torch.load(path, weights_only=True)
    assert saved["criterion"]["head.weight"].shape == (10, 32)
    # Saved half way: 2 of 4 epochs of 22 batches.
    assert saved["criterion"]["schedules.margin.steps"] == 44
    assert len(saved["optimizer"]["param_groups"]) == 2


def test_plain_torch_goes_on_where_its_margin_was(one_thread, capsys):
    main_of("plain_torch.py")(epochs=4)
    lines = capsys.readouterr().out.splitlines()
    margins = [float(line.split()[-1]) for line in lines if "margin" in line]
    # Complete after half of the training, and not begun again by the new objects.
    assert margins == [0.17, 0.35, 0.35, 0.35]


def check_sharded(folder):
    """The checkpoint of half of two epochs loads on one process, whatever number wrote it."""
    head = tammes.ShardedHead(tammes.CosineHead, 32, 1000, scale=16.0, sample_rate=0.2)
    saved = checkpoint.load(folder, head)
    assert saved["epoch"] == 1
    assert saved["backbone"]["2.weight"].shape == (32, 128)
    # 8,000 pictures in batches of 60.
    assert head.sampler.steps == 134


def test_sharded_learns_alone_with_a_fifth_of_the_classes_in_a_step(one_thread, tmp_path):
    assert main_of("sharded.py")(epochs=2, path=tmp_path) > 0.5
    check_sharded(tmp_path)


def accuracy_on_two_processes(name, *arguments):
    """Accuracy that an example prints last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.slow
def test_sharded_learns_on_two_processes(tmp_path):
    assert accuracy_on_two_processes("sharded.py", "--epochs", "2", "--path", str(tmp_path)) > 0.5
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    check_sharded(tmp_path)


@pytest.mark.slow
def test_lightning_learns_and_its_checkpoint_holds_the_prototypes(tmp_path):
    path = tmp_path / "model.ckpt"
    accuracy = run_elsewhere("lightning_module.py", epochs=4, path=str(path))
    assert accuracy > CHANCE + 0.7
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"]["criterion.head.weight"].shape == (10, 32)
    momentum = saved["optimizer_states"][0]["state"]
    assert any(entry["momentum_buffer"].shape == (10, 32) for entry in momentum.values())


@pytest.mark.slow
def test_hugging_face_learns_and_its_model_holds_the_prototypes(tmp_path):
    accuracy = run_elsewhere("hugging_face_trainer.py", epochs=4, path=str(tmp_path))
    assert accuracy > CHANCE + 0.7
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["criterion.head.weight"].shape == (10, 32)


@pytest.mark.slow
def test_accelerate_learns_alone_and_on_two_processes_and_saves_the_prototypes(tmp_path):
    accuracy = run_elsewhere("accelerate_loop.py", epochs=4, path=str(tmp_path))
    assert accuracy > CHANCE + 0.7
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["criterion.head.weight"].shape == (10, 32)
    assert accuracy_on_two_processes("accelerate_loop.py") > CHANCE + 0.7


@pytest.mark.slow
def test_gallery_recognises_digits_that_were_not_trained_on(one_thread, tmp_path):
    known, unknown = main_of("gallery.py")(folder=tmp_path, epochs=5)
    # Chance is a third of those that are accepted.
    assert known > 0.4
    assert unknown > 0.4
    assert len(tammes.Gallery.load(tmp_path / "gallery.safetensors")) == 3


def test_choose_threshold_prints_thresholds_that_rise_as_the_rate_falls(
    one_thread, tmp_path, capsys
):
    found = main_of("choose_threshold.py")(out=str(tmp_path), count=150)
    assert list(found) == [0.1, 0.01, 0.001]
    assert list(found.values()) == sorted(found.values())
    lines = capsys.readouterr().out.splitlines()
    assert all(
        line.startswith(f"accept at {t:.3f}") for line, t in zip(lines, found.values(), strict=True)
    )
    assert (tmp_path / "verification.html").exists()


@pytest.mark.slow
def test_out_of_scope_queries_are_rejected_with_scikit_learn(shared_data, tmp_path):
    path = tmp_path / "measured.json"
    results = main_of("sklearn_out_of_scope.py")(
        shared_data, path, epochs=2, seeds=1, training=3000
    )
    assert json.loads(path.read_text())["results"] == results
    for name, measured in results.items():
        # Of 30 intents with 100 queries each; the other 120 are not known.
        assert 0.15 < measured["accuracy"][0] < 0.21, name
