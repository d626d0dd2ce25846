"""MarginModule: Lightning trains, saves and resumes the prototypes; the callback logs margins."""

import importlib
import sys

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tammes
from tammes.integrations.lightning import MarginCallback, MarginModule
from tammes.schedules import WarmUp

# Lightning's advice on data loaders; these data are in memory.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Lightning itself uses what torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


def data(n=64):
    """Four clusters in the plane."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 4
    centers = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    points = centers[labels] + 0.1 * torch.randn(n, 2, generator=generator)
    return TensorDataset(points, labels)


def module(criterion=None, **settings):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8))
    criterion = criterion or tammes.CosFace(8, 4, margin=0.1, scale=8.0)
    return MarginModule(backbone, criterion, **({"lr": 0.01} | settings))


def trainer(folder, **settings):
    given = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "log_every_n_steps": 1,
    }
    return lightning.Trainer(**(given | settings))


def loader(**settings):
    return DataLoader(data(), batch_size=16, **settings)


def test_it_trains_backbone_and_prototypes_and_logs_them(tmp_path):
    model = module(tammes.NormFace(8, 4, scale="learnable"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = trainer(tmp_path, max_epochs=10, callbacks=[MarginCallback()])
    training.fit(model, loader(), loader())
    changed = [name for name, value in model.state_dict().items() if (value != before[name]).any()]
    assert {"backbone.0.weight", "criterion.head.weight"} <= set(changed)
    logged = training.callback_metrics
    assert logged["val_accuracy"] > 0.95
    torch.testing.assert_close(logged["terms/normface"], logged["train_loss"])
    assert 0 < logged["class_margin"] < 180
    torch.testing.assert_close(logged["scale"], model.criterion.head.scale.detach())
    (tested,) = training.test(model, loader(), verbose=False)
    assert tested["test_accuracy"] > 0.95
    logits = torch.cat(training.predict(model, loader()))
    assert (logits.argmax(1) == data().tensors[1]).float().mean() > 0.95


def test_rates_optimizer_and_scheduler_are_as_asked():
    model = module(
        head_lr=0.5,
        weight_decay=0.1,
        optimizer=lambda groups: torch.optim.SGD(groups, momentum=0.9),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    )
    (optimizer,), (scheduler,) = model.configure_optimizers()
    backbone, head = optimizer.param_groups
    assert (backbone["lr"], head["lr"]) == (0.01, 0.5)
    assert (head["weight_decay"], head["momentum"]) == (0.1, 0.9)
    assert head["params"][0] is model.criterion.head.weight
    assert scheduler.step_size == 3


def test_a_resumed_training_is_bit_identical_and_the_checkpoint_loads(tmp_path):
    def model():
        torch.manual_seed(0)
        criterion = tammes.CosFace(8, 4, scale=8.0)
        return module(criterion.schedule(margin=WarmUp(0.0, 0.2, steps=8)))

    whole, half, resumed = model(), model(), model()
    trainer(tmp_path, max_epochs=2).fit(whole, loader())
    training = trainer(tmp_path, max_epochs=1)
    training.fit(half, loader())
    training.save_checkpoint(tmp_path / "half.ckpt")
    trainer(tmp_path, max_epochs=2).fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert int(resumed.criterion.schedules["margin"].steps) == 8
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    parts = model()
    loaded = MarginModule.load_from_checkpoint(
        tmp_path / "half.ckpt", backbone=parts.backbone, criterion=parts.criterion
    )
    assert torch.equal(loaded.criterion.head.weight, half.criterion.head.weight)


def test_the_callback_steps_schedules_once_for_each_optimizer_step(tmp_path):
    warm_up = WarmUp(0.0, 0.2, steps=10)
    criterion = tammes.CosFace(8, 4, scale=8.0).schedule(by_hand=True, margin=warm_up)
    training = trainer(
        tmp_path,
        max_epochs=3,
        accumulate_grad_batches=2,
        callbacks=[MarginCallback(step_schedules=True)],
    )
    training.fit(module(criterion), loader())
    # 4 batches in an epoch.
    assert int(warm_up.steps) == training.global_step == 6


def test_it_says_what_is_wrong(monkeypatch):
    with pytest.raises(TypeError, match=r"MarginModule expects a criterion, .* got Term"):
        MarginModule(nn.Linear(2, 8), tammes.cosface())
    with pytest.raises(ValueError, match="reduction 'mean' or 'sum', got 'none'"):
        MarginModule(nn.Linear(2, 8), tammes.CosFace(8, 4, reduction="none"))
    monkeypatch.delitem(sys.modules, "tammes.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match=r"pip install 'tammes\[lightning\]'"):
        importlib.import_module("tammes.integrations.lightning")
