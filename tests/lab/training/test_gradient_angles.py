"""Watched during training: the two gradients of a direct sum are orthogonal, of others not."""

import json
import math
import re

import pytest
import torch
from lab_runs import SAME, some_of_cifar100
from test_several_processes import run_with
from torch.testing import assert_close

import tammes
from tammes.lab.cli.main import main
from tammes.lab.config.schema import Config
from tammes.lab.data import load
from tammes.lab.records.run_folder import Run
from tammes.lab.reproduce.collect import _curves
from tammes.lab.training.datasets import make_sampler
from tammes.lab.training.gradient_angles import GradientAngles, cosines, split_loss
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.loop import train
from tammes.lab.training.model import build_model

CLASSES, EACH = 10, 24
DIGITS = Config(
    data="digits",
    limit=200,
    backbone="mnist_cnn(width=0.25)",
    head="linear(bias=False)",
    sampler="episodes(way=8, shot=4)",
    epochs=2,
    lr=0.02,
    watch="gradients",
)


@pytest.fixture(scope="module")
def few(shared_data, tmp_path_factory):
    return some_of_cifar100(shared_data, tmp_path_factory.mktemp("cifar"), CLASSES, EACH)


@pytest.fixture(scope="module")
def watched(few, tmp_path_factory):
    """Lines of real trainings on real images, one for each kind of sum."""
    sums = {
        "plain": "softmax() + nca()",
        "direct": "direct_sum(softmax(), nca())",
        "with proto": "direct_sum(bce(), proto())",
        "spectral": "spectral_sum(softmax(), nca(), p=0.3)",
    }
    config = DIGITS.replace(
        data=str(few),
        limit=0,
        epochs=3,
        backbone="conv4(width=0.25)",
        sampler="episodes(way=8, shot=6)",
    )
    return {
        name: train(config.replace(loss=loss), tmp_path_factory.mktemp("run")).metrics
        for name, loss in sums.items()
    }


def values(lines, key):
    return [line["gradients"][key] for line in lines]


@pytest.mark.parametrize("name", ["direct", "with proto"])
def test_in_a_direct_sum_the_two_gradients_are_orthogonal_after_every_epoch(watched, name):
    lines = watched[name]
    assert len(lines) == 3
    assert max(values(lines, "largest")) < 1e-5
    # Of 8 classes with 6 images each; a few may be so far from all others that nothing pulls.
    assert 40 < min(values(lines, "examples")) <= 48


def test_without_the_projection_they_are_not(watched):
    assert min(values(watched["plain"], "cosine")) > 0.05


def test_in_a_spectral_sum_they_are_in_between(watched):
    spectral, plain = (values(watched[name], "cosine") for name in ("spectral", "plain"))
    assert min(spectral) > 1e-4
    assert all(one < other for one, other in zip(spectral, plain, strict=True))


def test_the_largest_cosine_is_above_the_mean_and_no_more_than_one(watched):
    for lines in watched.values():
        for line in lines:
            found = line["gradients"]
            assert 0 <= found["cosine"] < found["largest"] <= 1


# ----------------------------------------------------------------------------- what is measured


def prepared(loss, **more):
    config = DIGITS.replace(loss=loss, **more)
    images = load("digits", "train", report=lambda text: None)
    sampler = make_sampler(config, images)
    model = build_model(config, images, steps_per_epoch=len(sampler)).model
    return model, ImageLoader(images, torch.device("cpu")), sampler


def by_hand(model, parts, pixels, labels):
    """Mean and largest cosine, from losses that are written out."""
    with torch.no_grad():
        features = model.eval().features(pixels)
    found = []
    for part in parts:
        leaf = features.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(part(leaf, labels), leaf)
        found.append(gradient.double())
    products = torch.cosine_similarity(*found, dim=1).abs()
    return float(products.mean()), float(products.max())


def softmax(model):
    weight = model.criterion.head.weight.detach()
    return lambda x, labels: torch.nn.functional.cross_entropy(x @ weight.T, labels)


def nca(x, labels):
    apart = -torch.cdist(x, x).square().masked_fill(torch.eye(len(x)).bool(), math.inf)
    same = labels[:, None] == labels
    own = apart.masked_fill(~same, -math.inf).logsumexp(1)
    return (apart.logsumexp(1) - own).mean()


def test_it_is_the_cosine_between_the_gradients_of_softmax_and_nca():
    model, feed, sampler = prepared("softmax() + 0.3*nca()")
    found = GradientAngles(model, feed, sampler)()
    some = sampler.draw(0)(0)
    pixels, labels = feed.images.pixels[some], feed.images.labels[some]
    mean, largest = by_hand(model, (softmax(model), nca), pixels, labels)
    assert found == pytest.approx({"cosine": mean, "largest": largest, "examples": 32}, rel=1e-4)


def test_regularisers_of_the_prototypes_are_in_neither_part():
    loss = tammes.softmax() + 3.0 * tammes.zero_centroid() + 0.5 * tammes.proto()
    named = [[term.name for _, term in part.leaves()] for part in split_loss(loss)]
    assert named == [["softmax"], ["proto"]]


def test_the_metric_part_of_a_direct_sum_keeps_its_projection_and_its_weight():
    loss = 2.0 * tammes.direct_sum(tammes.softmax(), 0.5 * tammes.nca())
    ((weight, term),) = split_loss(loss)[1].leaves()
    assert weight == 1.0
    assert term.within == tammes.losses.subspace.OrthogonalComplement()


@pytest.mark.parametrize("name", ["scale", "nca.scale"])
def test_settings_that_change_are_those_of_the_moment(name):
    model, feed, sampler = prepared("softmax() + nca()")
    warm_up = tammes.schedules.WarmUp(1.0, 0.1, steps=2)
    model.criterion.schedule(**{name: warm_up})
    watch = GradientAngles(model, feed, sampler)
    before = watch()
    assert warm_up() == 1.0
    model.criterion.step()
    model.criterion.step()
    fixed, _, _ = prepared("softmax() + nca(scale=0.1)")
    expected = GradientAngles(fixed, feed, sampler)()
    assert watch() == pytest.approx(expected, rel=1e-4)
    assert before["cosine"] != pytest.approx(expected["cosine"], rel=1e-2)


def test_what_a_term_remembers_is_read_and_left_alone():
    model, feed, sampler = prepared("softmax() + center()")
    centers = model.criterion.states["center"]
    for buffer in centers.buffers():
        if buffer.is_floating_point():
            buffer.normal_(generator=torch.Generator().manual_seed(0))
    before = {name: buffer.clone() for name, buffer in centers.named_buffers()}
    watch = GradientAngles(model, feed, sampler)
    first = watch()
    assert_close(dict(centers.named_buffers()), before, rtol=0, atol=0)
    for buffer in centers.buffers():
        if buffer.is_floating_point():
            buffer.neg_()
    assert watch()["cosine"] != pytest.approx(first["cosine"], rel=1e-3)


def test_a_row_without_a_gradient_does_not_count():
    one = torch.tensor([[3.0, 4.0], [1.0, 0.0], [1e-9, 0.0]])
    two = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert cosines(one, two).tolist() == pytest.approx([0.6])
    assert cosines(one[1:2], two[1:2]).tolist() == []
    assert cosines(one[:0], two[:0]).tolist() == []


# ------------------------------------------------------------------------------ as part of a run


def test_looking_changes_nothing_else(tmp_path):
    config = DIGITS.replace(loss="direct_sum(softmax(), nca())")
    with_it = train(config, tmp_path / "with")
    without = train(config.replace(watch=""), tmp_path / "without")
    lines = [{k: v for k, v in line.items() if k != "gradients"} for line in with_it.metrics]
    assert lines == without.metrics
    for name in SAME:
        if name not in ("config.json", "metrics.jsonl"):
            assert (with_it.folder / name).read_bytes() == (without.folder / name).read_bytes()


def test_a_run_that_is_watched_is_another_run():
    # Otherwise one that is finished would be taken for it, and have nothing to show.
    assert DIGITS.digest != DIGITS.replace(watch="").digest


def test_it_is_a_curve_that_a_recipe_can_name(tmp_path):
    run = train(DIGITS.replace(loss="softmax() + nca()", epochs=3), tmp_path)
    kept = _curves(run, ["gradients.cosine", "gradients.largest"])
    assert kept["epoch"] == [1, 2, 3]
    assert kept["gradients.cosine"] == pytest.approx(values(run.metrics, "cosine"), rel=1e-4)
    assert None not in kept["gradients.largest"]


@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        ("softmax()", "metric"),
        ("cosface() + 0.5*zero_centroid()", "metric"),
        ("nca()", "classification"),
    ],
)
def test_a_loss_of_one_part_is_refused_in_a_sentence(tmp_path, capsys, loss, missing):
    words = ["train", "--data", "digits", "--loss", loss, "--watch", "gradients", "--folder"]
    assert main([*words, str(tmp_path / "run")]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()[-1:]
    sentence = "watch: gradients expects a loss with a classification part and a metric part"
    assert re.search(f"{sentence}, such as .*, got no {missing} part in", said)
    assert not list(tmp_path.glob("run/*.jsonl"))


@pytest.mark.slow
def test_two_processes_see_what_one_sees(tmp_path):
    # 15 images of a batch are 7 and 8.
    config = DIGITS.replace(
        loss="softmax() + nca()",
        backbone="mnist_cnn(width=0.25, norm='group')",
        sampler="episodes(way=5, shot=3)",
        epochs=1,
        accelerator="cpu",
    )
    one, two = (run_with(count, config, tmp_path).metrics for count in (1, 2))
    assert values(two, "examples") == values(one, "examples")
    assert values(two, "cosine") == pytest.approx(values(one, "cosine"), rel=1e-3, abs=1e-6)
    assert values(two, "largest") == pytest.approx(values(one, "largest"), rel=1e-3, abs=1e-6)


def test_something_else_to_watch_is_refused_in_a_sentence(tmp_path, capsys):
    assert main(["train", "--data", "digits", "--watch", "weights", "--folder", str(tmp_path)]) == 2
    assert "watch is expected to be gradients or nothing, got 'weights'" in capsys.readouterr().err


def test_a_line_of_the_record_is_plain_json(tmp_path):
    run = train(DIGITS.replace(loss="softmax() + nca()", epochs=1), tmp_path)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["gradients"].keys() == {"cosine", "largest", "examples"}
    assert Run(tmp_path).metrics == run.metrics


def test_the_page_of_a_run_that_was_watched_draws_it(tmp_path, capsys):
    pytest.importorskip("plotly", reason="pages need plotly")
    config = DIGITS.replace(loss="softmax() + nca()", name="watched")
    train(config, tmp_path / "watched")
    train(config.replace(watch="", name="other"), tmp_path / "other")
    shown = "Angle between the two gradients"
    for name, there in (("watched", True), ("other", False)):
        page = tmp_path / f"{name}.html"
        assert main(["report", str(tmp_path / name), "--out", str(page)]) == 0
        assert (f"<h3>{shown}</h3>" in page.read_text(encoding="utf-8")) is there
