"""What the model of a run measures while it trains, and when its compiled network is used."""

import math

import pytest
import torch
from recipe_cells import noise
from torch.testing import assert_close

from tammes import LinearHead
from tammes.lab.config.schema import Config
from tammes.lab.measure.classification import measure_prototypes
from tammes.lab.training.check_expressions import check_expressions
from tammes.lab.training.model import BATCH_SUMS, IGNORED, build_model
from tammes.metrics import functional

CONFIG = Config(backbone="mnist_cnn(width=0.125)", augment="none", head="linear()")
IMAGES = noise((1, 8, 8), 5, each=4)


@pytest.fixture
def model():
    return build_model(CONFIG, IMAGES, steps_per_epoch=1).model


def test_sums_over_a_batch_have_the_softmax_bias_of_rows_that_count(model):
    labels = IMAGES.labels.clone()
    labels[[0, 7, 19]] = IGNORED
    loss, sums = model.eval()(IMAGES.pixels, labels, IMAGES.index, 0)
    seen = dict(zip(BATCH_SUMS, sums, strict=True))
    count = labels != IGNORED
    scores = model.criterion.head.logits(model.features(IMAGES.pixels))[count].detach()
    bias = functional.softmax_bias(scores, labels[count])
    cosines = torch.nn.functional.normalize(model.features(IMAGES.pixels)[count]).detach()
    cosines = cosines @ torch.nn.functional.normalize(model.criterion.head.weight.detach()).T
    assert_close(seen["bias"], 17 * bias.mean.float(), rtol=1e-4, atol=1e-5)
    assert_close(seen["count"], torch.tensor(17.0))
    rows = torch.nn.functional.cross_entropy(scores, labels[count])
    assert_close(loss.detach(), rows)
    assert_close(
        seen["sample_margin"], 17 * functional.sample_margin(cosines, labels[count]).mean.float(),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_a_compiled_network_is_used_in_training_with_full_batches_alone(model, monkeypatch):
    calls = []

    def compiled(module, *, dynamic):
        assert dynamic is False
        return lambda images: calls.append(len(images)) or module(images)

    monkeypatch.setattr(torch, "compile", compiled)
    before = [*model.state_dict()]
    model.compile_backbone(8)
    assert [*model.state_dict()] == before
    full, part = IMAGES.pixels[:8], IMAGES.pixels[:7]
    model.train()
    model.features(part)
    assert calls == []
    model.features(full)
    assert calls == [8]
    model.eval()
    plain = model.backbone(model.augment(full, IMAGES.index[:8], 0))
    assert_close(model.features(full), plain)
    assert calls == [8]


def test_the_ratio_of_norms_is_the_largest_over_the_smallest():
    head = LinearHead(2, 3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]]))
    found = measure_prototypes(head)
    assert found["norm_ratio"] == pytest.approx(5.0)
    assert (found["norm_min"], found["norm_max"]) == pytest.approx((1.0, 5.0))


def test_where_a_prototype_is_zero_there_is_no_ratio_of_norms():
    head = LinearHead(2, 3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]))
    found = measure_prototypes(head)
    assert "norm_ratio" not in found
    assert math.isfinite(found["norm_max"])


def test_adacos_asks_for_a_head_whose_scale_adapts():
    for head in ("auto", "cosine", "cosine(scale='adaptive')"):
        check_expressions(Config(loss="adacos()", head=head))
    for head in ("cosine(scale=30)", "linear"):
        with pytest.raises(ValueError, match="adacos expects a head with scale='adaptive'"):
            check_expressions(Config(loss="adacos()", head=head))
