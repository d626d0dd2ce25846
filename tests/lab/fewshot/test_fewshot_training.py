"""N-way K-shot batches of real images train every loss of the direct-sum paper.

The two gradients of a direct sum are orthogonal at every step of it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lab_runs import some_of_cifar100

import tammes
from tammes.lab.config.schema import Config
from tammes.lab.data import load
from tammes.lab.training.datasets import make_sampler
from tammes.lab.training.loop import train
from tammes.lab.training.model import build_model

LOSSES = {
    "nca": "nca()",
    "proto": "proto()",
    "sum": "softmax() + nca()",
    "direct sum": "direct_sum(softmax(), nca())",
    "direct sum with proto": "direct_sum(bce(), proto())",
    "spectral sum": "spectral_sum(softmax(), proto(), p=0.3)",
}
SLOW = {"proto", "sum", "direct sum with proto"}
CLASSES, EACH = 12, 30


@pytest.fixture(scope="module")
def few(shared_data, tmp_path_factory):
    return some_of_cifar100(shared_data, tmp_path_factory.mktemp("cifar"), CLASSES, EACH)


def settings(few, loss, **more):
    return Config(
        **{
            "data": str(few),
            "loss": loss,
            "head": "linear(bias=False)",
            "backbone": "resnet12_basic(width=0.125)",
            "sampler": "episodes(way=8, shot=6)",
            "lr": 0.02,
            "epochs": 4,
            **more,
        }
    )


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, loss in LOSSES.items()
    ],
)
def test_every_loss_learns_from_episodes_of_real_images(few, tmp_path, loss):
    run = train(settings(few, loss), tmp_path)
    losses = [line["train"]["loss"] for line in run.metrics]
    # 24 images of 12 classes: six batches of 48 an epoch.
    assert run.final["step"] == 24
    assert losses[-1] < losses[0]
    assert run.tensors("embeddings")["features"].isfinite().all()


def gradients(criterion, features, labels):
    """Of the classification loss and of the metric loss in the sum, apart."""
    found = []
    sum_ = criterion.loss
    if isinstance(sum_, tammes.losses.subspace.ProjectedSum):
        none = 0.0 * sum_.classification
        alone = type(sum_)(none, sum_.metric, sum_.within)
    else:
        alone = tammes.nca()
    for loss in (tammes.softmax(), alone):
        leaf = features.detach().requires_grad_()
        one = tammes.Criterion(criterion.head, loss)
        (gradient,) = torch.autograd.grad(one(leaf, labels), leaf)
        found.append(gradient)
    return found


def alignment(one, two):
    """Largest cosine between a row of one and any row of the other."""
    one, two = (each[each.norm(dim=1) > 1e-3 * each.norm(dim=1).max()] for each in (one, two))
    one, two = (torch.nn.functional.normalize(each.double(), dim=1) for each in (one, two))
    return float((one @ two.T).abs().max())


def followed(few, loss):
    """Alignment of the two gradients at every step of a training on real images."""
    config = settings(few, loss, epochs=2)
    images = load(config.data, "train", report=lambda text: None)
    sampler = make_sampler(config, images)
    model = build_model(config, images, steps_per_epoch=len(sampler)).model
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    found = []
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        for some in sampler:
            features = model.features(images.pixels[some], images.index[some], epoch)
            assert features.dtype == torch.float32
            labels = images.labels[some]
            found.append(alignment(*gradients(model.criterion, features, labels)))
            optimizer.zero_grad()
            model.criterion(features, labels).backward()
            optimizer.step()
    assert len(found) == 12
    return found


def test_the_two_gradients_of_a_direct_sum_are_orthogonal_throughout_training(few):
    assert max(followed(few, "direct_sum(softmax(), nca())")) < 1e-5


def test_without_the_projection_the_two_gradients_are_not_orthogonal(few):
    assert min(followed(few, "softmax() + nca()")) > 0.05


def test_a_spectral_sum_is_orthogonal_only_up_to_its_exponent(few):
    found = followed(few, "spectral_sum(softmax(), nca(), p=0.3)")
    assert min(found) > 1e-4
    assert max(followed(few, "spectral_sum(softmax(), nca(), p=0)")) < 1e-5


@pytest.mark.slow
def test_the_example_recognises_new_characters_of_omniglot(shared_data, tmp_path):
    path = Path(__file__).resolve().parents[3] / "examples" / "fewshot_omniglot.py"
    lines = path.read_text().split('"""')[2].splitlines()
    assert len([line for line in lines if line]) <= 10
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "TAMMES_DATA": str(shared_data), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    accuracy = {(method, shot): float(mean) for method, shot, mean, *_ in found}
    assert 80 < accuracy["l2", "1-shot"] < accuracy["l2", "5-shot"]
    assert 90 < accuracy["centroid", "5-shot"] < 100
