"""A run whose prototypes are spread over processes: the same on any number, and after a kill."""

import os
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from rank_pool import everywhere

import tammes
from tammes.checkpoint import CheckpointError
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run
from tammes.lab.training.checkpoints import ShardedCheckpoints
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.fabric import check_machine
from tammes.lab.training.loop import train
from tammes.lab.training.model import build_model, load_model
from tammes.lab.training.progress import Progress
from tammes.lab.training.sharded_head import clip_global_norm, gather_head

CONFIG = Config(
    data="digits",
    backbone="mnist_cnn(norm='group', width=0.5)",
    augment="pad_crop(1)",
    loss="cosface(margin=0.2) + 0.1*zero_centroid()",
    # Few and small steps: what differs is rounding, and a long training would blow it up.
    fraction=0.3,
    epochs=3,
    lr=0.05,
    # The last batch of an epoch has 26 images, which no number of processes divides.
    batch_size=63,
    accelerator="cpu",
    shard=True,
    save_steps=5,
    clip=1.0,
)


def train_as(environment, config, folder):
    """What ``torchrun`` starts on a rank."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    train(Config.from_dict(config), Path(folder))


def start(processes, size, config, out):
    """The ranks of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }
    running = []
    for rank in range(size):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = (environment, config.to_dict(), str(out))
        running.append(processes.Process(target=train_as, args=arguments, daemon=True))
        running[-1].start()
    return running


def finish(processes, size, config, out):
    running = start(processes, size, config, out)
    for process in running:
        process.join(300)
    assert [process.exitcode for process in running] == [0] * size
    return Run(out)


def kill_at(step, running, out):
    """Kill all processes of a run once a checkpoint of a step is there."""
    ends = time.monotonic() + 150
    try:
        while not [*out.glob(f"checkpoints/last-{step:09d}/index.json")]:
            assert time.monotonic() < ends, "no checkpoint came"
            assert all(process.is_alive() for process in running), "it ended before"
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
            process.join()


def curve(run):
    rows = []
    for row in run.metrics:
        rows += [row["train"]["loss"], row["train"]["sample_margin"], *row["terms"].values()]
        rows += [row["test"]["loss"], row["test"]["sample_margin"]]
        rows += row["prototypes"].values()
    return rows


@pytest.mark.slow
def test_run_killed_on_four_processes_resumes_on_two_and_on_three(tmp_path, processes):
    whole = finish(processes, 4, CONFIG, tmp_path / "whole")
    assert whole.environment["world_size"] == 4
    assert len(whole.metrics) == 3
    killed = tmp_path / "killed"
    # In the middle of the second epoch.
    kill_at(10, start(processes, 4, CONFIG, killed), killed)
    for size in (2, 3):
        again = tmp_path / f"on{size}"
        shutil.copytree(killed, again)
        run = finish(processes, size, CONFIG, again)
        assert run.environment["world_size"] == size
        assert curve(run) == pytest.approx(curve(whole), rel=2e-4, abs=2e-5)
        weights, expected = run.tensors("model"), whole.tensors("model")
        assert weights["criterion.head.weight"].shape[0] == 10
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4, msg=name)


class Stop(Progress):
    """Interrupts a run after its first epoch, and hears what it says."""

    def __init__(self, stop=True):
        self.stop, self.said = stop, []

    def say(self, text):
        self.said.append(text)

    def epoch(self, row, *, images_per_second):
        if self.stop:
            raise KeyboardInterrupt


def test_one_process_goes_on_in_the_same_bits_and_its_model_is_a_plain_one(tmp_path):
    config = CONFIG.replace(validation=0.2)
    whole = train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", progress=Stop())
    heard = Stop(stop=False)
    parts = train(config, tmp_path / "parts", progress=heard)
    assert any("resuming at epoch 1, step" in text for text in heard.said)
    for name, value in whole.tensors("model").items():
        assert torch.equal(parts.tensors("model")[name], value), name
    model = load_model(parts)
    assert type(model.criterion.head) is tammes.CosineHead
    _, _, tests = prepare_data(config)
    features = model.features(tests.pixels, tests.index, 0)
    torch.testing.assert_close(features.detach(), parts.tensors("embeddings")["features"])
    scores = model.criterion.logits(features)
    assert torch.equal(scores.argmax(1), parts.tensors("embeddings")["predictions"])


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_it_taken(tmp_path):
    criterion = tammes.Criterion(tammes.ShardedHead(tammes.CosineHead, 3, 5), tammes.cosface())
    optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1, momentum=0.9)
    said = []
    saved = ShardedCheckpoints(tmp_path, criterion, optimizer, said.append)
    assert saved.load_last() is None
    for step in (1, 2, 3):
        with torch.no_grad():
            criterion.head.weight.fill_(step)
        backbone = {"backbone.weight": torch.tensor(float(step))}
        model = {**backbone, "criterion.head.weight": criterion.head.weight}
        saved.save("last", step, {"model": model, "optimizer": None, "step": step})
        saved.save("best", step, {"model": model})
    assert sorted(path.name for path in tmp_path.glob("last*")) == [
        "last-000000002",
        "last-000000003",
    ]
    saved.keep_best(2)
    assert [path.name for path in tmp_path.glob("best*")] == ["best-000000002"]
    (part,) = (tmp_path / "last-000000003").glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1])
    (tmp_path / "last-000000009").mkdir()
    found = saved.load_last()
    assert found["step"] == 2
    assert found["model"]["backbone.weight"] == 2
    assert bool((criterion.head.weight == 2).all())
    assert "resuming from the previous one" in said[0]
    assert part.name in said[0]
    assert (tmp_path / "last-000000003.damaged").exists()
    assert saved.load_best(2)["model"]["backbone.weight"] == 2
    assert saved.load_best(3) is None


def test_a_checkpoint_of_another_loss_is_refused_and_stays_where_it_is(tmp_path):
    head = tammes.ShardedHead(tammes.CosineHead, 3, 5)
    saved = {}
    for margin in (0.1, 0.2):
        criterion = tammes.Criterion(head, tammes.cosface(margin=margin))
        optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1)
        saved[margin] = ShardedCheckpoints(tmp_path, criterion, optimizer)
    model = {"criterion.head.weight": head.weight}
    saved[0.1].save("last", 1, {"model": model, "optimizer": None, "step": 1})
    with pytest.raises(CheckpointError, match="was saved with another loss"):
        saved[0.2].load_last()
    assert saved[0.1].load_last()["step"] == 1


def clipped(group):
    """Norms after clipping a gradient of all ranks, of which each has a part."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    head = tammes.ShardedHead(tammes.LinearHead, 2, 8)
    model = torch.nn.ModuleDict({"backbone": torch.nn.Linear(2, 2), "head": head})
    whole = torch.arange(24.0).view(8, 3)
    head.weight.grad = whole[head.start : head.stop, :2].clone()
    head.bias.grad = whole[head.start : head.stop, 2].clone()
    for parameter in model["backbone"].parameters():
        parameter.grad = torch.ones_like(parameter)
    assert (rank, size) == (head.group.rank, head.group.world_size)
    clip_global_norm(model, head, 2.0)
    return [p.grad.numpy() for p in (head.weight, head.bias, *model["backbone"].parameters())]


def test_gradients_are_clipped_by_the_norm_of_all_processes():
    ranks = everywhere(4, clipped)
    head, backbone = tammes.LinearHead(2, 8), torch.nn.Linear(2, 2)
    whole = torch.arange(24.0).view(8, 3)
    head.weight.grad, head.bias.grad = whole[:, :2].clone(), whole[:, 2].clone()
    for parameter in backbone.parameters():
        parameter.grad = torch.ones_like(parameter)
    parameters = [head.weight, head.bias, *backbone.parameters()]
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    for number, parameter in enumerate(parameters):
        parts = [torch.from_numpy(grads[number]) for grads in ranks]
        got = torch.cat(parts) if number < 2 else parts[0]
        torch.testing.assert_close(got, parameter.grad)
        if number >= 2:
            assert all(torch.equal(part, parts[0]) for part in parts)


def gathered(group):
    torch.manual_seed(0)
    head = tammes.ShardedHead(tammes.LinearHead, 2, 7, scale="learnable")
    whole = gather_head(head)
    assert torch.equal(whole.weight[head.start : head.stop], head.weight)
    assert torch.equal(whole.bias[head.start : head.stop], head.bias)
    return type(whole).__name__, whole.num_classes, whole.scale.item() == head.scale.item()


def test_the_head_that_is_kept_is_plain_and_has_all_classes():
    assert everywhere(4, gathered) == [("LinearHead", 7, True)] * 4


@pytest.mark.parametrize("head", ["simplex()", "simplex(scale=3)"])
def test_prototypes_that_are_placed_together_are_not_spread(head):
    config = CONFIG.replace(head=head)
    training, _, _ = prepare_data(config)
    with pytest.raises(ValueError, match="shard expects a cosine, linear or gaussian head"):
        build_model(config, training, steps_per_epoch=1)


def test_fp16_with_skipped_steps_is_refused_on_several_processes(monkeypatch):
    config = CONFIG.replace(precision="fp16", accelerator="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_machine(config) == "cuda"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="shard expects precision fp32 or bf16, got fp16"):
        check_machine(config)


@pytest.mark.parametrize(
    ("head", "loss", "kind"),
    [
        ("auto", "softmax()", tammes.LinearHead),
        ("linear(bias=False, scale=2.0)", "softmax()", tammes.LinearHead),
        ("cosine(scale='learnable', normalize_features=False)", "softmax()", tammes.CosineHead),
        ("gaussian()", "large_margin_gaussian()", tammes.GaussianHead),
    ],
)
def test_the_head_of_a_sharded_run_is_the_one_that_is_asked_for(head, loss, kind):
    config = CONFIG.replace(head=head, loss=loss)
    training, _, _ = prepare_data(config)
    parts = build_model(config, training, steps_per_epoch=1)
    plain = build_model(config.replace(shard=False), training, steps_per_epoch=1)
    made, expected = parts.model.criterion.head, plain.model.criterion.head
    assert parts.head == plain.head
    assert made.kind is kind
    assert type(made.similarity) is type(expected.similarity)
    assert made.similarity.is_cosine == expected.similarity.is_cosine
    assert made.has_angle == expected.has_angle
    assert made.state_dict().keys() == expected.state_dict().keys()
    if made.log_scale is None:
        assert made.scale == expected.scale
