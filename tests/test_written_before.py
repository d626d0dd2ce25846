"""Runs, checkpoints and state dicts written by commit a0807f0, before modules moved, still load.

`tests/fixtures/before_the_map` was written by that commit: a finished run, the same run stopped
after its first epoch, the state of two criteria with their losses, and a sharded checkpoint.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import tammes
from tammes import checkpoint, schedules

BEFORE = Path(__file__).parent / "fixtures" / "before_the_map"


def criteria():
    torch.manual_seed(1)
    terms = (
        tammes.cosface(margin=[0.1, 0.2, 0.3, 0.2, 0.1]) + 0.1 * tammes.center() + tammes.adaface()
    )
    head = tammes.CosineHead(4, 5, scale="learnable")
    criterion = tammes.Criterion(head, terms, class_weights=[1.0, 2.0, 1.0, 0.5, 1.0])
    return criterion, tammes.LSoftmax(4, 5).schedule(blend=schedules.LambdaDecay(10))


def test_state_dicts_give_the_losses_they_gave():
    stored = torch.load(BEFORE / "criterion.pt")
    for criterion, name, loss in zip(
        criteria(), ("criterion", "lsoftmax"), stored["losses"], strict=True
    ):
        criterion.load_state_dict(stored[name])
        assert_close(criterion.eval()(stored["features"], stored["labels"]).detach(), loss)


def test_a_sharded_checkpoint_gives_the_loss_it_gave():
    stored = torch.load(BEFORE / "criterion.pt")
    criterion, _ = criteria()
    checkpoint.load(BEFORE / "checkpoint", criterion)
    assert_close(
        criterion.eval()(stored["features"], stored["labels"]).detach(), stored["losses"][0]
    )


def test_a_finished_run_loads():
    pytest.importorskip("lightning.fabric")
    from tammes.lab.records.run_folder import Run
    from tammes.lab.training.model import load_model

    run = Run(BEFORE / "finished")
    assert run.status == "done"
    model = load_model(run)
    assert_close(model.criterion.head.weight.detach(), run.tensors("prototypes")["prototypes"])


def test_a_finished_run_has_the_head_it_was_trained_with():
    pytest.importorskip("safetensors")
    from tammes.lab import load_model
    from tammes.lab.records.run_folder import Run

    run = Run(BEFORE / "finished")
    assert run.config.head == "auto"
    assert run.environment["head"] == "cosine(scale=8.0)"
    assert load_model(run).criterion.head.scale == 8.0


def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path):
    pytest.importorskip("lightning.fabric")
    pytest.importorskip("sklearn")
    from tammes.lab.config.schema import Config
    from tammes.lab.records.run_folder import Run
    from tammes.lab.training.loop import train

    shutil.copytree(BEFORE / "interrupted", tmp_path / "run")
    config = Config.from_dict(json.loads((BEFORE / "interrupted" / "config.json").read_text()))
    again, before = train(config, tmp_path / "run"), BEFORE / "finished"
    expected = json.loads((before / "final.json").read_text())
    assert again.final["test"]["accuracy"] == expected["test"]["accuracy"]
    model = Run(before).tensors("model")
    for name, value in again.tensors("model").items():
        assert_close(value, model[name].view_as(value))
