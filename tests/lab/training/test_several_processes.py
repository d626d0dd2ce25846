"""Several processes under ``torchrun`` train as one does on the same global batches."""

import os
import subprocess
import sys

import pytest
import torch

from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run, write_json
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.model import build_model

SCRIPT = """
import atexit, json, os, sys, torch
from pathlib import Path
from tammes.lab.config.schema import Config
from tammes.lab.training import loop, step
if "TOGETHER" in os.environ:
    # Several batches at once, as on a GPU.
    step._CHUNKED, loop._CHECK_EVERY = ("cpu",), {"cpu": 50}
# Registered first, so called last: threads of a group that is still there can abort the process.
# A file each: what two processes print to one pipe can come out mixed.
left = Path(f"{sys.argv[2]}.left{os.environ.get('RANK', 0)}")
atexit.register(lambda: left.write_text(str(not torch.distributed.is_initialized())))
torch.set_num_threads(1)
loop.train(Config.from_dict(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
"""
CONFIG = Config(
    data="digits",
    backbone="mnist_cnn(norm='group', width=0.5)",
    augment="pad_crop(1)",
    epochs=2,
    # The last batch of an epoch has 25 images: odd, so that the shares of two processes differ.
    batch_size=63,
    accelerator="cpu",
)


def run_with(processes, config, folder, **variables):
    script, settings = folder / "script.py", folder / "settings.json"
    script.write_text(SCRIPT)
    write_json(settings, config.to_dict())
    out = folder / f"on{processes}"
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [*launcher, str(script), str(settings), str(out)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    left = [path.read_text() for path in folder.glob(f"{out.name}.left*")]
    assert left == ["True"] * processes, "a process ended while its group was still there"
    return Run(out)


@pytest.mark.slow
def test_batch_normalisation_survives_uneven_batches_in_the_kept_model(tmp_path):
    # The last batch has 39 images: the shares are 19 and 20.
    config = CONFIG.replace(backbone="mnist_cnn(width=0.5)", batch_size=187, epochs=3, lr=0.05)
    one, two = run_with(1, config, tmp_path), run_with(2, config, tmp_path)
    assert two.final["test"]["accuracy"] > one.final["test"]["accuracy"] - 0.05
    images, _, tests = prepare_data(config)
    model = build_model(config, images, steps_per_epoch=1).model.eval()
    model.load_state_dict(two.tensors("model"), strict=False)
    features = model.features(tests.pixels, tests.index, 0)
    assert torch.allclose(features, two.tensors("embeddings")["features"], atol=1e-5)


def curve(run):
    rows = []
    for row in run.metrics:
        rows += [row["train"]["loss"], row["train"]["sample_margin"], row["test"]["sample_margin"]]
        rows += [row["test"]["loss"]] if "loss" in row["test"] else []
        rows += row["terms"].values()
    return rows


@pytest.mark.parametrize(
    ("loss", "sampler", "processes"),
    [
        ("cosface(margin=0.2) + 0.5*zero_centroid()", "random()", 2),
        ("direct_sum(softmax(), nca())", "episodes(way=10, shot=5)", 2),
        ("softmax()", "random()", 3),
        ("nca()", "pk(classes=5, images=9)", 2),
    ],
)
@pytest.mark.slow
def test_the_loss_curve_does_not_depend_on_the_number_of_processes(
    tmp_path, loss, sampler, processes
):
    config = CONFIG.replace(loss=loss, sampler=sampler)
    one, several = run_with(1, config, tmp_path), run_with(processes, config, tmp_path)
    assert several.environment["world_size"] == processes
    assert curve(several) == pytest.approx(curve(one), rel=2e-4, abs=2e-5)
    assert several.final["test"]["accuracy"] == pytest.approx(
        one.final["test"]["accuracy"], abs=2 / 450
    )


@pytest.mark.slow
def test_several_processes_measure_batches_together_as_one_by_one(tmp_path):
    config = CONFIG.replace(loss="cosface(margin=0.2)", save_steps=7)
    (tmp_path / "apart").mkdir()
    (tmp_path / "together").mkdir()
    apart = run_with(2, config, tmp_path / "apart")
    together = run_with(2, config, tmp_path / "together", TOGETHER="yes")
    name = "model.safetensors"
    assert (together.folder / name).read_bytes() == (apart.folder / name).read_bytes()
    assert curve(together) == pytest.approx(curve(apart), rel=1e-5)
