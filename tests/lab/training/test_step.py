"""One training step: what it computes, and what it does once and not in every step."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tammes
from tammes.lab.config.schema import Config
from tammes.lab.training.epoch_sums import EpochSums
from tammes.lab.training.loop import train

SMALL = Config(
    data="digits",
    loss="cosface(margin=0.2)",
    backbone="mnist_cnn(width=0.25)",
    epochs=1,
    # Six batches, and a shorter one.
    batch_size=200,
    lr=0.05,
    accelerator="cpu",
)


class Operations(TorchDispatchMode):
    """Lists the operations of torch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


def weights(run):
    return (run.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_scaled_loss_trains_the_same_weights(tmp_path, monkeypatch, clip):
    precision = pytest.importorskip("lightning.fabric.plugins.precision.precision").Precision
    config = SMALL.replace(clip=clip)
    plain = train(config, tmp_path / "plain")
    # A power of two: scaling rounds nothing.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    monkeypatch.setattr(precision, "scaler", scaler, raising=False)
    assert weights(train(config, tmp_path / "scaled")) == weights(plain)
    assert scaler.get_scale() == 2.0**17


def test_a_step_that_overflows_is_skipped(tmp_path, monkeypatch):
    precision = pytest.importorskip("lightning.fabric.plugins.precision.precision").Precision
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    monkeypatch.setattr(precision, "scaler", scaler, raising=False)
    run = train(SMALL, tmp_path)
    assert all(tensor.isfinite().all() for tensor in run.tensors("model").values())
    assert scaler.get_scale() == 2.0**27


def test_autocast_is_built_once(tmp_path, monkeypatch):
    fabric = pytest.importorskip("lightning.fabric").Fabric
    built, autocast = [], fabric.autocast
    monkeypatch.setattr(fabric, "autocast", lambda self: built.append(1) or autocast(self))
    counts = []
    for epochs in (1, 2):
        built.clear()
        # Looks of the doctor and evaluations build their own.
        config = SMALL.replace(precision="bf16", epochs=epochs, evaluate_every=epochs)
        train(config, tmp_path / str(epochs))
        counts.append(len(built))
    # A second epoch of seven steps adds only the look after it.
    assert counts[1] - counts[0] <= 1


def test_deferring_a_batch_only_copies_the_head():
    head = tammes.LinearHead(6, 5)
    sums = EpochSums(tammes.Criterion(head, tammes.softmax()))
    features, labels, loss = torch.randn(8, 6), torch.randint(5, (8,)), torch.tensor(1.0)
    with Operations() as operations:
        sums.defer(0, [loss], features, labels, at_once=2)
    assert operations.names == ["aten.clone.default"] * 2
    # Later changes of the head do not reach the copies.
    before = head.weight.detach().clone()
    with torch.no_grad():
        head.weight += 1
    assert torch.equal(sums.deferred[0].head[0], before)


def test_the_backward_pass_of_a_step_needs_no_thread_of_its_own(tmp_path, monkeypatch):
    backward, threads = torch.Tensor.backward, []

    def noted(loss):
        threads.append(torch.autograd.is_multithreading_enabled())
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", noted)
    train(SMALL, tmp_path)
    # Seven steps; the doctor looks at a batch by itself.
    assert threads.count(False) == 7
    assert torch.autograd.is_multithreading_enabled()
