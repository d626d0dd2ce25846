"""Training on a GPU: exact resumption, graphs, compiling, half precision."""

import contextlib

import pytest
import torch
from lab_runs import SAME

from tammes.lab.config.schema import Config
from tammes.lab.training.loop import TrainingError, train
from tammes.lab.training.progress import Progress
from tammes.lab.training.step import Step

pytestmark = [
    pytest.mark.gpu,
    # Warm-up steps run on streams of their own, which torch remarks upon.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

SMALL = Config(
    data="digits",
    loss="cosface(margin=0.2) + 0.5*sample_margin()",
    # At the default of 30, training amplifies the rounding of TF32 convolutions: a rate changed by
    # 0.1 % moves these losses by 6 %, here by 0.6 %.
    head="cosine(scale=8.0)",
    backbone="mnist_cnn(width=0.5)",
    augment="pad_crop(1)",
    epochs=4,
    # An epoch ends with a shorter batch, which a graph cannot take.
    batch_size=100,
    lr=0.05,
    graphs="off",
)


class Stop(Exception):
    """What interrupts a run."""


class StopAfter(Progress):
    """Interrupts a run when an epoch is over."""

    def __init__(self, epoch):
        self.last = epoch

    def epoch(self, row, *, images_per_second):
        if row["epoch"] == self.last:
            raise Stop


@pytest.fixture
def steps(monkeypatch):
    """The step of every run, in order."""
    from tammes.lab.training import loop as module

    steps = []

    class Watched(module.Step):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            steps.append(self)

    monkeypatch.setattr(module, "Step", Watched)
    return steps


@pytest.fixture
def deterministic():
    yield {"deterministic": True}
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("changes", [{}, {"graphs": "on"}, {"precision": "bf16"}], ids=str)
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path, deterministic, changes):
    config = SMALL.replace(**deterministic, **changes, save_steps=5)
    whole = train(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train(config, tmp_path / "run", progress=StopAfter(2))
    resumed = train(config, tmp_path / "run")
    for name in SAME:
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name


def curve(run):
    return [row["train"]["loss"] for row in run.metrics]


@pytest.mark.filterwarnings("ignore")  # those of the compiler itself
@pytest.mark.parametrize(
    "changes", [{"graphs": "on"}, {"compile": True}, {"compile": True, "graphs": "on"}], ids=str
)
def test_graphs_and_compiling_change_the_speed_only(tmp_path, changes):
    plain, fast = train(SMALL, tmp_path / "plain"), train(SMALL.replace(**changes), tmp_path / "x")
    assert curve(fast) == pytest.approx(curve(plain), rel=2e-2)
    assert fast.final["test"]["accuracy"] == pytest.approx(
        plain.final["test"]["accuracy"], abs=0.02
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_as_well(tmp_path, precision):
    plain = train(SMALL, tmp_path / "plain")
    half = train(SMALL.replace(precision=precision), tmp_path / "half")
    assert half.final["test"]["accuracy"] == pytest.approx(
        plain.final["test"]["accuracy"], abs=0.02
    )


def test_a_gpu_and_a_cpu_train_alike(tmp_path):
    config = SMALL.replace(epochs=1)
    gpu = train(config, tmp_path / "gpu")
    cpu = train(config.replace(accelerator="cpu"), tmp_path / "cpu")
    assert curve(gpu) == pytest.approx(curve(cpu), rel=2e-3)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_works_in_a_graph(tmp_path, optimizer):
    config = SMALL.replace(optimizer=optimizer, lr=1e-3)
    plain = train(config, tmp_path / "plain")
    graph = train(config.replace(graphs="on"), tmp_path / "graph")
    assert curve(graph) == pytest.approx(curve(plain), rel=2e-2)


def test_a_loss_that_waits_for_the_gpu_trains_without_a_graph(tmp_path, monkeypatch):
    from tammes.lab.training.model import Model

    forward = Model.forward

    def waiting(self, *arguments, **options):
        loss, measured = forward(self, *arguments, **options)
        float(loss.detach())
        return loss, measured

    monkeypatch.setattr(Model, "forward", waiting)
    said = []
    progress = Progress()
    progress.say = said.append
    run = train(SMALL.replace(graphs="auto"), tmp_path / "run", progress=progress)
    assert run.final["test"]["accuracy"] > 0.8
    assert any("a CUDA graph cannot record this step" in text for text in said)
    with pytest.raises(ValueError, match="graphs cannot record this step"):
        train(SMALL.replace(graphs="on"), tmp_path / "on")


def test_a_routine_that_breaks_while_it_is_recorded_is_not_broken_afterwards(tmp_path, monkeypatch):
    from tammes.lab.training.model import Model

    forward = Model.forward

    def decomposing(self, *arguments, **options):
        loss, measured = forward(self, *arguments, **options)
        # cuSOLVER cannot be recorded, and does not work again for a thread that has tried.
        torch.linalg.svd(self.criterion.head.weight.detach().double(), driver="gesvd")
        return loss, measured

    monkeypatch.setattr(Model, "forward", decomposing)
    said = []
    progress = Progress()
    progress.say = said.append
    run = train(SMALL.replace(graphs="auto", epochs=1), tmp_path / "run", progress=progress)
    (sentence,) = [text for text in said if "a CUDA graph cannot record this step" in text]
    assert run.environment["graphs"] == sentence


@pytest.mark.parametrize(
    "loss",
    [
        "direct_sum(softmax(), nca())",
        "direct_sum(cosface(), nca())",
        "direct_sum(softmax(), nca(), eps=0.1, detach=False)",
        "spectral_sum(softmax(), nca())",
        "spectral_sum(softmax(), nca(), detach=False)",
    ],
)
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}], ids=str)
def test_direct_and_spectral_sums_train_in_graphs_as_without(tmp_path, steps, loss, changes):
    # Deterministic: in bf16 the order of atomic additions alone moves the second epoch by percents.
    config = SMALL.replace(loss=loss, epochs=2, lr=0.01, deterministic=True, **changes)
    plain = train(config, tmp_path / "plain")
    fast = train(config.replace(graphs="on"), tmp_path / "fast")
    # A graph, the decomposition, and a graph.
    assert len(steps[-1].recording.pieces) == 3
    assert curve(fast) == pytest.approx(curve(plain), rel=2e-2)


@pytest.mark.parametrize(("graphs", "recorded"), [("auto", True), ("off", False)])
def test_by_default_a_gpu_trains_with_a_graph(tmp_path, steps, graphs, recorded):
    train(SMALL.replace(graphs=graphs), tmp_path / "run")
    assert (steps[0].recording is not None) == recorded


@pytest.mark.parametrize("loss", ["nca()", "large_margin_gaussian()"])
def test_fp16_survives_a_first_step_whose_gradients_overflow(loss, tmp_path):
    # At the initial loss scale of 65,536 the gradients of raw squared distances overflow.
    config = SMALL.replace(loss=loss, precision="fp16", lr=0.01, epochs=1)
    run = train(config, tmp_path)
    assert run.status == "done"
    assert all(parameter.isfinite().all() for parameter in run.tensors("model").values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16", "clip": 1.0},
        {"loss": "adacos()", "head": "auto"},
        {"loss": "direct_sum(softmax(), nca())", "head": "auto", "lr": 0.01},
        {"head": "cosine(scale=8.0, subcenters=3)", "augment": "pad_crop(1) + rotate(10)"},
    ],
    ids=str,
)
def test_batches_together_train_as_one_by_one(tmp_path, monkeypatch, deterministic, changes):
    config = SMALL.replace(**deterministic, epochs=2, **changes)
    apart = train(config, tmp_path / "apart")
    # A deterministic run takes one at a time unless it is made to.
    monkeypatch.setattr(Step, "chunked", True)
    together = train(config, tmp_path / "together")
    name = "model.safetensors"
    assert (together.folder / name).read_bytes() == (apart.folder / name).read_bytes()
    for one, two in zip(apart.metrics, together.metrics, strict=True):
        for part in ("train", "terms"):
            assert two[part] == pytest.approx(one[part], rel=1e-4, abs=1e-5)


def test_batches_are_together_on_a_gpu_without_a_graph_alone(tmp_path, steps):
    for changes in ({}, {"deterministic": True}, {"graphs": "on"}):
        train(SMALL.replace(epochs=1, **changes), tmp_path / str(len(steps)))
    torch.use_deterministic_algorithms(False)
    assert [step.chunked for step in steps] == [True, False, False]


def test_steps_with_batches_together_do_not_wait_for_the_gpu(tmp_path, monkeypatch, unwaited):
    monkeypatch.setattr("tammes.lab.training.step._AT_ONCE", 3)
    call, taken = Step.__call__, []

    def watched(self, *arguments, **options):
        taken.append(1)
        # The first steps choose algorithms and allocate memory.
        with unwaited() if len(taken) > 4 else contextlib.nullcontext():
            call(self, *arguments, **options)

    monkeypatch.setattr(Step, "__call__", watched)
    run = train(SMALL.replace(epochs=1), tmp_path / "run")
    assert len(taken) == 14
    assert run.final["test"]["accuracy"] > 0.3


def test_a_loss_that_is_not_finite_is_found_with_its_step(tmp_path, monkeypatch):
    train_on = Step._step

    def poisoned(self, *batch):
        if self.count == 20:
            with torch.no_grad():
                self.model.criterion.head.weight.fill_(float("nan"))
        return train_on(self, *batch)

    monkeypatch.setattr(Step, "_step", poisoned)
    with pytest.raises(TrainingError, match="not finite at step 21, epoch 2, in cosface"):
        train(SMALL, tmp_path / "run")
