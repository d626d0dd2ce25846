"""Every setting of a run does what it says: seen from outside, in runs of a second."""

import itertools
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from lab_runs import SAME
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tammes.lab import data
from tammes.lab.config.schema import Config
from tammes.lab.data.augment import Augment
from tammes.lab.training import loop as training
from tammes.lab.training.checkpoints import Checkpoints
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.health import HealthLooks
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.loop import train
from tammes.lab.training.lr_schedules import learning_rate
from tammes.lab.training.model import Model, build_model, parameter_groups
from tammes.lab.training.progress import Progress

IMAGES, TESTS = 1348, 449
"""Images of digits to train on and to test on."""
SMALL = Config(
    data="digits",
    loss="softmax()",
    backbone="mnist_cnn(features=4, width=0.25)",
    epochs=2,
    batch_size=200,
    lr=0.05,
    accelerator="cpu",
)
STEPS = 7
"""Of an epoch: 1348 images, 200 at a time."""


@pytest.fixture(autouse=True)
def _unlooked(monkeypatch):
    """Looks of the doctor take steps and batches of their own, which these tests would count."""
    monkeypatch.setattr(HealthLooks, "look", lambda *_: None)


class Stop(Exception):
    """What interrupts a run in these tests."""


class StopAt(Progress):
    """Interrupts a run after some steps."""

    def __init__(self, steps):
        self.left = steps

    def step(self, *, epoch, step, values):
        self.left -= 1
        if not self.left:
            raise Stop


@dataclass
class Watch:
    """What torch's own optimizers were given, at every step."""

    kinds: list = field(default_factory=list)
    groups: list = field(default_factory=list)
    grads: list = field(default_factory=list)
    before: list = field(default_factory=list)
    after: list = field(default_factory=list)

    def rates(self, group):
        return [groups[group]["lr"] for groups in self.groups]

    def norms(self):
        return [float(torch.cat([g.flatten() for g in some]).norm()) for some in self.grads]


def held(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def watching():
    """Look at every step of every optimizer, just before and just after it."""
    seen = Watch()

    def before(optimizer, args, kwargs):
        seen.kinds.append(type(optimizer))
        seen.groups.append(
            [{**group, "lr": float(group["lr"])} for group in optimizer.param_groups]
        )
        seen.grads.append([p.grad.double() for p in held(optimizer)])
        seen.before.append([p.detach().double() for p in held(optimizer)])

    def after(optimizer, args, kwargs):
        seen.after.append([p.detach().double() for p in held(optimizer)])

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.fixture
def batches(monkeypatch):
    """Labels, identities and state of the generator at every batch the model is trained on."""
    seen, forward = [], Model.forward

    def spy(self, pixels, labels, index, epoch, **options):
        seen.append((labels.clone(), index.clone(), torch.get_rng_state()))
        return forward(self, pixels, labels, index, epoch, **options)

    monkeypatch.setattr(Model, "forward", spy)
    return seen


# The epoch that is kept.


def test_best_epoch_is_chosen_on_validation_images_and_its_weights_kept(tmp_path, monkeypatch):
    told = {270: [0.3, 0.9, 0.9, 0.5], TESTS: [0.2, 0.1, 0.4, 0.8]}
    evaluate, weights, calls = training.evaluate, [], dict.fromkeys(told, 0)

    def fake(*args, **kwargs):
        outcome = evaluate(*args, **kwargs)
        size = len(outcome.labels)
        calls[size] += 1
        if size == 270:
            model = next(arg for arg in args if isinstance(arg, Model))
            weights.append({name: value.clone() for name, value in model.state_dict().items()})
        accuracy = told[size][min(calls[size], 4) - 1]
        return outcome._replace(measures={**outcome.measures, "accuracy": accuracy})

    monkeypatch.setattr(training, "evaluate", fake)
    config = SMALL.replace(validation=0.2, epochs=4, lr_schedule="constant()")
    run = train(config, tmp_path / "run")
    assert [row["validation"]["accuracy"] for row in run.metrics] == told[270]
    assert [row["test"]["accuracy"] for row in run.metrics] == told[TESTS]
    # The first of two that are as good.
    assert run.final["epoch"] == 2
    for name, kept in run.tensors("model").items():
        assert torch.equal(kept, weights[1][name]), name


# Rates, decays, momentum, clipping.


def test_every_step_has_the_rate_of_its_schedule_and_so_has_a_run_that_goes_on(tmp_path):
    config = SMALL.replace(head_lr=0.5, epochs=3, warmup=1, save_steps=4)
    rate = learning_rate(config, STEPS)
    expected = [rate(step) for step in range(3 * STEPS)]
    assert len(set(expected)) > 15
    with watching() as first, pytest.raises(Stop):
        train(config, tmp_path / "run", progress=StopAt(10))
    with watching() as second:
        run = train(config, tmp_path / "run")
    assert (len(first.groups), len(second.groups)) == (10, 3 * STEPS - 8)
    for seen, wanted in ((first, expected[:10]), (second, expected[8:])):
        assert seen.rates(0) == pytest.approx(wanted, rel=1e-12)
        # The prototypes, and the bias of their head.
        for group in (1, 2):
            assert seen.rates(group) == pytest.approx([10 * value for value in wanted], rel=1e-12)
    assert [row["lr"] for row in run.metrics] == pytest.approx(expected[STEPS - 1 :: STEPS])


MAPS = ("backbone.stage1.0.weight", "backbone.stage2.0.weight", "backbone.embedding.0.weight")
FLAT = (
    "backbone.stage1.1.weight", "backbone.stage1.1.bias", "backbone.stage2.1.weight",
    "backbone.stage2.1.bias", "backbone.embedding.0.bias", "backbone.embedding.1.weight",
    "backbone.embedding.1.bias",
)  # fmt: skip
"""Biases and normalisation layers of the backbone."""


@pytest.mark.parametrize(
    ("settings", "maps", "flat", "prototypes", "bias"),
    [
        ({}, (0.05, 5e-4), (0.05, 5e-4), (0.05, 5e-4), (0.05, 0)),
        ({"lr": 0.3}, (0.3, 5e-4), (0.3, 5e-4), (0.3, 5e-4), (0.3, 0)),
        ({"head_lr": 0.7}, (0.05, 5e-4), (0.05, 5e-4), (0.7, 5e-4), (0.7, 0)),
        ({"weight_decay": 0.02}, (0.05, 0.02), (0.05, 0.02), (0.05, 0.02), (0.05, 0)),
        ({"head_weight_decay": 0.03}, (0.05, 5e-4), (0.05, 5e-4), (0.05, 0.03), (0.05, 0)),
        ({"head_weight_decay": 0.0}, (0.05, 5e-4), (0.05, 5e-4), (0.05, 0), (0.05, 0)),
        ({"decay_norms": False}, (0.05, 5e-4), (0.05, 0), (0.05, 5e-4), (0.05, 0)),
    ],
    ids=str,
)
def test_every_parameter_has_the_rate_and_decay_of_its_kind(settings, maps, flat, prototypes, bias):
    config = SMALL.replace(**settings)
    model = build_model(config, prepare_data(config)[0], steps_per_epoch=STEPS).model
    expected = {
        **dict.fromkeys(MAPS, maps),
        **dict.fromkeys(FLAT, flat),
        "criterion.head.weight": prototypes,
        "criterion.head.bias": bias,
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, config)
    found = [
        (names[id(p)], (group["lr"], group["weight_decay"]))
        for group in groups
        for p in group["params"]
    ]
    assert len(found) == len(expected)
    assert dict(found) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.0, "head_weight_decay": 0.5},
        {"momentum": 0.9, "head_lr": 0.5, "decay_norms": False, "weight_decay": 0.5},
    ],
    ids=str,
)
def test_a_run_follows_sgd_as_worked_by_hand(tmp_path, settings):
    config = SMALL.replace(epochs=1, **{"weight_decay": 0.1, **settings})
    with watching() as seen:
        train(config, tmp_path / "run")
    assert len(seen.groups) == STEPS
    rate = learning_rate(config, STEPS)
    head_decay = config.head_weight_decay
    head_decay = config.weight_decay if head_decay is None else head_decay
    velocity = [torch.zeros_like(grad) for grad in seen.grads[0]]
    for step in range(STEPS):
        for place, grad in enumerate(seen.grads[step]):
            weight = seen.before[step][place]
            # Nothing but the head has one row for each class.
            head = len(weight) == 10
            decay = head_decay if head else config.weight_decay
            if weight.ndim == 1 and (head or not config.decay_norms):
                decay = 0.0
            grad = grad + decay * weight
            velocity[place] = config.momentum * velocity[place] + grad
            move = velocity[place]
            if config.nesterov:
                move = grad + config.momentum * velocity[place]
            size = rate(step) * ((config.head_lr or config.lr) / config.lr if head else 1)
            expected = weight - size * move
            assert torch.allclose(seen.after[step][place], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)],
)
def test_the_optimizer_is_the_one_that_is_named(tmp_path, name, kind):
    with watching() as seen:
        train(SMALL.replace(optimizer=name, lr=1e-3, epochs=1), tmp_path / "run")
    assert set(seen.kinds) == {kind}


def test_a_gradient_longer_than_clip_is_cut_to_it_and_a_shorter_one_is_left(tmp_path):
    with watching() as free:
        train(SMALL, tmp_path / "free")
    with watching() as clipped:
        train(SMALL.replace(clip=1.2), tmp_path / "clipped")
    assert max(free.norms()) > 1.3
    assert max(clipped.norms()) == pytest.approx(1.2, rel=1e-5)
    assert min(clipped.norms()) < 1.1
    # The first step starts from the same weights: the direction is kept.
    for long, short in zip(free.grads[0], clipped.grads[0], strict=True):
        assert torch.allclose(short, long * 1.2 / free.norms()[0], rtol=1e-4, atol=1e-8)


# Augmentation.


@pytest.fixture
def augmented(monkeypatch):
    """Every call of the augmentation: mode, epoch, identities, pixels, images."""
    seen, forward = [], Augment.forward

    def spy(self, pixels, index, epoch):
        images = forward(self, pixels, index, epoch)
        seen.append((self.training, int(epoch), index.clone(), pixels.clone(), images.clone()))
        return images

    monkeypatch.setattr(Augment, "forward", spy)
    return seen


def in_order(calls):
    """Identities, pixels and images of some calls, by identity."""
    index, pixels, images = (torch.cat([call[part] for call in calls]) for part in (2, 3, 4))
    order = index.argsort()
    return index[order], pixels[order], images[order]


def test_training_images_are_augmented_anew_in_every_epoch(tmp_path, augmented):
    config = SMALL.replace(augment="pad_crop(2)", fraction=0.5, validation=0.2, epochs=3)
    images, _, _ = prepare_data(config)
    train(config, tmp_path / "run")
    assert {call[1] for call in augmented if call[0]} == {0, 1, 2}
    pictures = []
    for epoch in range(3):
        index, pixels, made = in_order([c for c in augmented if c[0] and c[1] == epoch])
        assert torch.equal(index, images.index)
        assert torch.equal(pixels, images.pixels)
        pictures.append(made)
    by_hand = Augment(
        "pad_crop(2)", mean=images.mean_std()[0], std=images.mean_std()[1], shape=(1, 8, 8), seed=0
    )
    still = by_hand.eval()(images.pixels, images.index, 0)
    for one, two in ((0, 1), (1, 2), (0, 2)):
        # 25 crops: the same one comes back for few images.
        same = (pictures[one] == pictures[two]).flatten(1).all(1)
        assert same.double().mean() < 0.2
    assert all((made == still).flatten(1).all(1).double().mean() < 0.2 for made in pictures)
    assert torch.equal(pictures[1], by_hand.train()(images.pixels, images.index, 1))


def test_validation_and_test_images_are_not_augmented(tmp_path, augmented):
    config = SMALL.replace(augment="pad_crop(2)", validation=0.2, epochs=2)
    images, held_out, testing = prepare_data(config)
    train(config, tmp_path / "run")
    mean, std = images.mean_std()
    by_hand = Augment("none", mean=mean, std=std, shape=(1, 8, 8), seed=0)
    calls = [call for call in augmented if not call[0]]
    looked_at, times = torch.cat([call[2] for call in calls]).unique(return_counts=True)
    assert torch.equal(looked_at, torch.cat([held_out.index, testing.index]).sort().values)
    # After each epoch, and maybe once more with the best weights.
    assert times.unique().tolist() in ([2], [3])
    for _, _, index, pixels, made in calls:
        assert torch.equal(made, by_hand(pixels, index, 0))


# Data.


WORSE = {"noise": "symmetric(0.4)", "imbalance": "long_tail(10)", "fraction": 0.5}


@pytest.mark.parametrize("setting", WORSE)
def test_corruption_is_of_training_images_after_validation_is_held_out(
    tmp_path, monkeypatch, setting
):
    evaluate, seen = training.evaluate, {}

    def spy(*args, **kwargs):
        images = next(arg for arg in args if isinstance(arg, ImageLoader)).images
        seen[len(images)] = images
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(training, "evaluate", spy)
    config = SMALL.replace(validation=0.2, epochs=1)
    worse = config.replace(**{setting: WORSE[setting]})
    clean, held_out, testing = prepare_data(config)
    run = train(worse, tmp_path / "run")
    # A fifth of all there are, with the labels they came with.
    assert (run.data["validation"], run.data["test"]) == (round(0.2 * IMAGES), TESTS)
    assert set(seen) == {270, TESTS}
    whole = data.load("digits", "train")
    truth = dict(zip(whole.index.tolist(), whole.labels.tolist(), strict=True))
    assert [truth[place] for place in seen[270].index.tolist()] == seen[270].labels.tolist()
    for images, wanted in ((seen[270], held_out), (seen[TESTS], testing)):
        assert torch.equal(images.index, wanted.index)
        assert torch.equal(images.labels, wanted.labels)
    used = run.tensors("subset")
    assert not set(used["index"].tolist()) & set(held_out.index.tolist())
    assert set(used["index"].tolist()) <= set(clean.index.tolist())
    wrong = [
        truth[place] != label
        for place, label in zip(used["index"].tolist(), used["labels"].tolist(), strict=True)
    ]
    share = 0.4 if setting == "noise" else 0.0
    assert sum(wrong) == round(share * len(wrong))
    if setting != "noise":
        assert len(wrong) <= round(0.5 * len(clean))


# Chance: dropout, seed, sampler, batch.


DROPS = SMALL.replace(
    backbone="resnet12(width=0.125, drop_rate=0.3)",
    image_size=16,
    fraction=0.1,
    batch_size=40,
    save_steps=2,
)
"""8 steps with dropout."""


def test_a_run_with_dropout_that_goes_on_ends_in_the_same_bits(tmp_path):
    undisturbed = train(DROPS, tmp_path / "one")
    with pytest.raises(Stop):
        train(DROPS, tmp_path / "two", progress=StopAt(7))
    resumed = train(DROPS, tmp_path / "two")
    for name in SAME:
        same = (resumed.folder / name).read_bytes() == (undisturbed.folder / name).read_bytes()
        assert same, name


def test_dropout_is_another_at_every_step_and_with_every_seed(tmp_path, batches):
    # What it draws follows from the state of the generator when a step begins.
    for seed in (0, 1):
        train(SMALL.replace(seed=seed), tmp_path / str(seed))
    states = {state.numpy().tobytes() for *_, state in batches}
    assert len(states) == len(batches) == 4 * STEPS


def test_initial_weights_and_augmentation_depend_on_the_seed_and_on_it_alone():
    images, _, _ = prepare_data(SMALL)

    def made(seed, elsewhere):
        torch.manual_seed(elsewhere)
        config = SMALL.replace(seed=seed, augment="pad_crop(2)")
        model = build_model(config, images, steps_per_epoch=STEPS).model
        weights = {name: p.detach() for name, p in model.named_parameters() if p.ndim > 1}
        return {**weights, "images": model.augment.train()(images.pixels, images.index, 0)}

    first, again, other = made(0, 3), made(0, 4), made(1, 3)
    assert {*MAPS, "criterion.head.weight", "images"} == set(first)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert not torch.equal(value, other[name]), name


def test_the_order_of_images_depends_on_the_seed_and_the_epoch(tmp_path, batches):
    for seed in (0, 1):
        train(SMALL.replace(seed=seed), tmp_path / str(seed))
    orders = [
        torch.cat([index for _, index, _ in batches[at : at + STEPS]])
        for at in range(0, 4 * STEPS, STEPS)
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert all(torch.equal(order.sort().values, orders[0].sort().values) for order in orders)


def test_batches_have_the_size_that_is_asked_for(tmp_path, batches):
    train(SMALL.replace(epochs=1, batch_size=300), tmp_path / "run")
    assert [len(labels) for labels, *_ in batches] == [300, 300, 300, 300, 148]


def test_batches_are_those_of_the_sampler_that_is_asked_for(tmp_path, batches):
    train(SMALL.replace(epochs=1, sampler="pk(classes=5, images=8)"), tmp_path / "run")
    counts = [labels.unique(return_counts=True)[1].tolist() for labels, *_ in batches]
    assert counts == [[8] * 5] * 2


# Precision, tests, checkpoints.


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_products_have_the_precision_that_is_asked_for_and_weights_have_fp32(
    tmp_path, precision, dtype
):
    seen = set()

    def note(module, args, output):
        if isinstance(module, nn.Conv2d | nn.Linear):
            seen.add((module.training, output.dtype, module.weight.dtype))

    hook = register_module_forward_hook(note)
    try:
        train(SMALL.replace(precision=precision, epochs=1), tmp_path / "run")
    finally:
        hook.remove()
    assert seen == {(True, dtype, torch.float32), (False, dtype, torch.float32)}


def test_a_run_is_tested_every_so_many_epochs_and_after_the_last(tmp_path):
    run = train(SMALL.replace(epochs=5, evaluate_every=2, validation=0.2), tmp_path / "run")
    for kind in ("test", "validation"):
        assert [row["epoch"] for row in run.metrics if kind in row] == [2, 4, 5]
    assert len(run.metrics) == 5


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [7, 14, 21, 28, 35]),
        ({"save_every": 2}, [14, 28, 35]),
        ({"save_every": 9}, [35]),
        ({"save_every": 2, "save_steps": 10}, [10, 14, 20, 28, 30, 35]),
        ({"save_every": 2, "save_seconds": 60.0}, [6, 12, 14, 20, 26, 28, 34, 35]),
    ],
    ids=str,
)
def test_checkpoints_are_written_every_few_epochs_and_steps_and_last(
    tmp_path, monkeypatch, settings, steps
):
    saved, save = [], Checkpoints.save

    def spy(self, kind, step, state):
        saved.append((kind, step))
        save(self, kind, step, state)

    monkeypatch.setattr(Checkpoints, "save", spy)
    # A clock that goes on by ten seconds with each look at it.
    ticks = itertools.count(0.0, 10.0)
    clock = SimpleNamespace(
        monotonic=lambda: next(ticks), perf_counter=time.perf_counter, time=time.time
    )
    monkeypatch.setattr(training, "time", clock)
    train(SMALL.replace(epochs=5, **settings), tmp_path / "run")
    assert saved == [("last", step) for step in steps]
