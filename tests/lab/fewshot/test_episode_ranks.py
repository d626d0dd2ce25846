"""N-way K-shot batches on two ranks: the gradients are those of one process with the whole batch.

Half of a batch is no batch: classes are cut in two, and a metric loss compares every image with
every other. So ranks gather their features before they compare them.
"""

import itertools

import pytest
import torch
from cover import cover
from rank_pool import everywhere
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tammes
from tammes.distributed.process_group import RankGroup
from tammes.lab.config.schema import Config
from tammes.lab.data import load
from tammes.lab.training.datasets import make_sampler
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.model import IGNORED, build_model

LOSSES = {
    "nca": "nca()",
    "proto": "proto()",
    "sum with nca": "softmax() + nca()",
    "sum with proto": "softmax() + 0.5*proto()",
    "direct sum with nca": "direct_sum(softmax(), nca())",
    "direct sum with proto": "direct_sum(bce(), proto())",
    "spectral sum with nca": "spectral_sum(softmax(), nca(), p=0.3)",
    "spectral sum with proto": "spectral_sum(bce(), proto(), p=0.5)",
}
SAMPLERS = {"even": "episodes(way=6, shot=4)", "odd": "episodes(way=5, shot=3)"}
"""24 images are 12 and 12; of 15 the ranks have 7 and 8, and one class is in both halves."""
STEPS = 3


class Losses(nn.Module):
    """Pixels to a loss, in double precision, as one module to be wrapped."""

    def __init__(self, model):
        super().__init__()
        self.augment, self.backbone, self.criterion = model.augment, model.backbone, model.criterion

    def forward(self, pixels, labels, index):
        images = self.augment(pixels, index, 0).double()
        return self.criterion(self.backbone(images), labels)


@pytest.fixture(scope="module")
def digits():
    # Read here and handed on: importing scikit-learn takes a rank seconds.
    return load("digits", "train", report=lambda text: None)


def prepared(images, loss, sampler, group=None, *, gathers=True):
    """The lab's model, feed and sampler; the same weights on every rank."""
    config = Config(
        data="digits",
        loss=loss,
        head="linear(bias=False)",
        # Batch statistics are of a rank; this normalisation is of an image.
        backbone="mnist_cnn(width=0.25, norm='group')",
        augment="pad_crop(1)",
        sampler=sampler,
    )
    ranks = RankGroup(group) if group is not None else None
    rank, size = (ranks.rank, ranks.world_size) if ranks else (0, 1)
    draws = make_sampler(config, images, rank=rank, world_size=size)
    model = build_model(config, images, steps_per_epoch=len(draws)).model
    model.criterion = tammes.Criterion(
        model.criterion.head,
        model.criterion.loss,
        ignore_index=IGNORED,
        validate=None,
        group=group if gathers else None,
        even=gathers and group is not None,
    )
    return Losses(model).double(), ImageLoader(images, torch.device("cpu")), draws


def train(group, images, loss, sampler, gathers=True):
    """Losses and gradients of some batches, which are added up."""
    model, feed, draws = prepared(images, loss, sampler, group, gathers=gathers)
    wrapped = model
    if group is not None:
        wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    batches = feed(draws.global_batches(), rank=draws.rank, world_size=draws.world_size)
    losses, counted = [], []
    for _, (pixels, labels, index) in zip(range(STEPS), batches, strict=False):
        value = wrapped(pixels, labels, index)
        value.backward()
        losses.append(value.detach())
        counted.append(index[labels != IGNORED].tolist())
    # Prototypes have none where no part classifies.
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, counted


@pytest.mark.parametrize(
    ("loss", "sampler"), cover(itertools.product(LOSSES, SAMPLERS), lambda *case: case)
)
def test_two_ranks_have_the_gradients_of_one_process(digits, loss, sampler):
    loss, sampler = LOSSES[loss], SAMPLERS[sampler]
    expected, gradients, images = train(None, digits, loss, sampler)
    one, two = everywhere(2, train, digits, loss, sampler)
    for mine, own, _ in (one, two):
        assert_close(mine, expected, rtol=1e-11, atol=1e-12)
        assert_close(own, gradients, rtol=1e-9, atol=1e-12)
    # Together they had the images of one process, none of them twice.
    assert [a + b for a, b in zip(one[2], two[2], strict=True)] == images


@pytest.mark.parametrize("loss", ["nca()", "direct_sum(softmax(), nca())"])
def test_without_gathering_they_have_others(digits, loss):
    # Or the test above would show nothing.
    _, gradients, _ = train(None, digits, loss, SAMPLERS["even"])
    (_, found, _), _ = everywhere(2, train, digits, loss, SAMPLERS["even"], False)
    name = next(name for name in gradients if name.startswith("backbone"))
    assert not torch.allclose(found[name], gradients[name], rtol=1e-2)


def test_a_class_of_an_odd_batch_is_in_both_halves(digits):
    _, feed, draws = prepared(digits, "nca()", SAMPLERS["odd"])
    labels = feed.images.labels[draws.draw(0)(0)]
    assert len(labels) == 15
    assert set(labels[:7].tolist()) & set(labels[7:].tolist())
