"""Batches that are augmented and measured several at once, as on a GPU without CUDA graphs."""

import pytest
import torch
from rank_pool import everywhere

import tammes
from tammes.lab.config.schema import Config
from tammes.lab.data.augment import Augment
from tammes.lab.training import epoch_sums, loop, step
from tammes.lab.training.epoch_sums import EpochSums
from tammes.lab.training.health import HealthLooks
from tammes.lab.training.loop import TrainingError, train
from tammes.lab.training.model import IGNORED, batch_sums
from tammes.lab.training.progress import Progress

SMALL = Config(
    data="digits",
    loss="cosface(margin=0.2) + 0.5*sample_margin()",
    backbone="mnist_cnn(width=0.5)",
    augment="pad_crop(1)",
    epochs=2,
    # Six batches, and a shorter one.
    batch_size=200,
    lr=0.05,
    accelerator="cpu",
)


class Chunks:
    """Sizes of the batches that were augmented in training, and of those that were measured."""

    def __init__(self):
        self.augmented, self.measured = [], []


@pytest.fixture
def chunks(monkeypatch):
    """Make a CPU work on several batches at once, as a GPU does."""
    seen, forward, measure = Chunks(), Augment.forward, epoch_sums.vmap
    monkeypatch.setattr(step, "_CHUNKED", ("cpu",))
    monkeypatch.setattr(loop, "_CHECK_EVERY", {"cpu": 50})
    # Looks of the doctor augment too.
    monkeypatch.setattr(HealthLooks, "due", lambda self, epoch: False)

    def augment(self, pixels, index, epoch):
        if self.training:
            seen.augmented.append(len(pixels))
        return forward(self, pixels, index, epoch)

    def counted(function, **options):
        def call(module, state, batches):
            seen.measured.append(len(batches[0]))
            return measure(function, **options)(module, state, batches)

        return call

    monkeypatch.setattr(Augment, "forward", augment)
    monkeypatch.setattr(epoch_sums, "vmap", counted)
    return seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run that takes one batch at a time."""
    return train(SMALL, tmp_path_factory.mktemp("plain"))


def weights(run):
    return (run.folder / "model.safetensors").read_bytes()


def numbers(run):
    """What is measured in training."""
    return [
        value for row in run.metrics for part in ("train", "terms") for value in row[part].values()
    ]


def assert_alike(run, plain):
    """The same weights; what is measured differs by rounding only."""
    assert weights(run) == weights(plain)
    assert [[*row["train"]] for row in run.metrics] == [[*row["train"]] for row in plain.metrics]
    assert numbers(run) == pytest.approx(numbers(plain), rel=1e-5)


@pytest.mark.parametrize(
    ("at_once", "augmented", "measured"),
    [
        # An epoch is shorter than a chunk; the last batch has another size.
        (50, [1348], [6, 1]),
        (3, [600, 600, 148], [3, 3, 1]),
        (4, [800, 548], [4, 2, 1]),
        # Too large for two at once: each batch is measured in its step.
        (1, [200] * 6 + [148], []),
    ],
)
def test_batches_together_train_as_one_by_one(
    tmp_path, plain, chunks, monkeypatch, at_once, augmented, measured
):
    monkeypatch.setattr(step, "_AT_ONCE", at_once)
    run = train(SMALL, tmp_path / "run")
    assert chunks.augmented == augmented * 2
    assert chunks.measured == measured * 2
    assert_alike(run, plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "direct_sum(softmax(), nca())", "lr": 0.01},
        {"loss": "adacos()"},
        {"loss": "arcface(margin=0.1)", "head": "cosine(scale='learnable')", "clip": 1.0},
        {"head": "cosine(scale=16, subcenters=3)", "precision": "bf16"},
        {"sampler": "pk(classes=5, images=8)"},
        {"shard": True},
    ],
    ids=str,
)
def test_every_kind_of_run_trains_alike_with_batches_together(
    tmp_path, chunks, monkeypatch, changes
):
    config = SMALL.replace(epochs=1, **changes)
    together = train(config, tmp_path / "together")
    # Prototypes of several processes are measured in each step.
    assert bool(chunks.measured) != config.shard
    monkeypatch.setattr(step, "_CHUNKED", ())
    assert_alike(together, train(config, tmp_path / "apart"))


def test_images_are_augmented_alike_in_any_chunk(tmp_path, chunks, monkeypatch):
    # On a CPU the last bits of sines and powers depend on the place in memory.
    config = SMALL.replace(augment="rotate(10) + resized_crop(0.5, 1.0, size=12) + erase()")
    together = train(config.replace(epochs=1), tmp_path / "together")
    monkeypatch.setattr(step, "_CHUNKED", ())
    apart = train(config.replace(epochs=1), tmp_path / "apart")
    assert chunks.augmented == [1348] + [200] * 6 + [148]
    assert numbers(together) == pytest.approx(numbers(apart), rel=1e-4)


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"compile": True}], ids=str)
def test_a_deterministic_or_compiled_run_takes_one_batch_at_a_time(
    tmp_path, plain, chunks, monkeypatch, changes
):
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    run = train(SMALL.replace(**changes), tmp_path / "run")
    assert max(chunks.augmented) == 200
    assert not chunks.measured
    assert_alike(run, plain)


def test_many_numbers_are_processed_in_small_chunks():
    assert [step._at_once(size) for size in (1, 2**20, 2**23, 2**24, 2**30)] == [50, 16, 2, 1, 1]


def test_a_chunk_is_small_if_images_are_large_before_or_after_they_are_resized(
    tmp_path, chunks, monkeypatch
):
    monkeypatch.setattr(step, "_NUMBERS", 3 * 200 * 16**2)
    for number, (size, text) in enumerate(
        [(16, "resized_crop(size=8)"), (8, "resized_crop(size=16)")]
    ):
        config = SMALL.replace(image_size=size, augment=text, epochs=1)
        train(config, tmp_path / str(number))
        assert chunks.augmented == [600, 600, 148]
        chunks.augmented.clear()


class Stop(Exception):
    """What interrupts a run."""


class StopAt(Progress):
    """Interrupts a run after a step."""

    def __init__(self, step):
        self.last = step

    def step(self, *, epoch, step, values):
        if step == self.last:
            raise Stop


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_run_interrupted_within_a_chunk_ends_in_the_same_weights(
    tmp_path, plain, chunks, monkeypatch, every
):
    monkeypatch.setattr(step, "_AT_ONCE", 4)
    monkeypatch.setattr(loop, "_CHECK_EVERY", {"cpu": 3})
    with pytest.raises(Stop):
        train(SMALL.replace(save_steps=every), tmp_path / "run", progress=StopAt(6))
    said = StopAt(None)
    said.say = lambda text: setattr(said, "text", text)
    assert_alike(train(SMALL, tmp_path / "run", progress=said), plain)
    assert f"resuming at epoch 1, step {5 // every * every + 1}" in said.text


def test_a_loss_that_is_not_finite_within_a_chunk_is_found_with_its_step(
    tmp_path, chunks, monkeypatch
):
    train_on = step.Step._step

    def poisoned(self, *batch):
        if self.count == 9:
            with torch.no_grad():
                self.model.criterion.head.weight.fill_(float("nan"))
        return train_on(self, *batch)

    monkeypatch.setattr(step.Step, "_step", poisoned)
    with pytest.raises(TrainingError, match="not finite at step 10, epoch 2, in cosface"):
        train(SMALL, tmp_path / "run")
    # All that follow are not finite either; they were measured together with it.
    assert chunks.measured[-2:] == [6, 1]


HEADS = {
    "cosine": tammes.CosineHead(6, 5),
    "learnable": tammes.CosineHead(6, 5, scale="learnable"),
    "adaptive": tammes.CosineHead(6, 5, scale="adaptive"),
    "subcenters": tammes.CosineHead(6, 5, subcenters=2),
    "soft subcenters": tammes.CosineHead(6, 5, subcenters=2, pooling="soft"),
    "linear": tammes.LinearHead(6, 5),
    "without bias": tammes.LinearHead(6, 5, bias=False),
    "gaussian": tammes.GaussianHead(6, 5),
    "simplex": tammes.SimplexHead(6, 5),
    "distance": tammes.DistanceHead(6, 5),
}


def batch(rows, dtype=torch.float32):
    labels = torch.randint(5, (rows,))
    labels[-2:] = IGNORED
    return torch.randn(rows, 6, dtype=dtype), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_a_batch_is_measured_against_the_head_of_its_own_step(name, dtype):
    head = HEADS[name]
    criterion = tammes.Criterion(head, tammes.zero_centroid(), ignore_index=IGNORED)
    one, many = EpochSums(criterion), EpochSums(criterion)
    for number, rows in enumerate([8, 8, 8, 8, 8, 7, 9, 9]):
        features, labels = batch(rows, dtype)
        values = [torch.tensor(1.5 + number), torch.tensor(0.5)]
        row = torch.cat([batch_sums(head, features, labels), torch.stack(values)])
        if number == 6:
            # Among the others, one that was measured in its step.
            many.add(number, row)
        else:
            many.defer(number, values, features, labels, at_once=3)
        one.add(number, row)
        with torch.no_grad():
            for tensor in (*head.parameters(), *head.buffers()):
                tensor += 0.3 * torch.rand_like(tensor)
    # The last one is not measured yet.
    assert many.steps == [*range(7)]
    assert many.read() == pytest.approx(one.read(), rel=1e-5)
    assert many.read()[0] == 5 * 6 + 5 + 2 * 7


def test_a_class_with_a_bias_of_minus_infinity_is_masked_in_batches_together():
    head = tammes.LinearHead(6, 5)
    with torch.no_grad():
        head.bias[4] = -torch.inf
    sums = EpochSums(tammes.Criterion(head, tammes.softmax()))
    features, labels = batch(40)
    labels = labels.clamp(max=3)
    for number in range(2):
        sums.defer(number, [torch.tensor(1.0)] * 2, features, labels, at_once=2)
    _, _, accuracy, *_ = sums.read()
    scores = features @ head.weight[:4].T + head.bias[:4]
    assert accuracy == 2 * int((scores.argmax(1) == labels).sum()) > 0


def summed(group, deferred):
    """What all ranks read, of which each has its own examples."""
    torch.manual_seed(0)
    head = tammes.CosineHead(6, 5)
    criterion = tammes.Criterion(head, tammes.softmax(), ignore_index=IGNORED)
    sums, rank = EpochSums(criterion), torch.distributed.get_rank(group)
    for number in range(5):
        features, labels = (tensor.chunk(4)[rank] for tensor in batch(12))
        values = [torch.tensor(1.0), torch.tensor(2.0)]
        if deferred:
            sums.defer(number, values, features, labels, at_once=3)
        else:
            row = torch.cat([batch_sums(head, features, labels), torch.stack(values)])
            sums.add(number, row)
    return sums.read()


def test_sums_over_processes_are_those_of_all_examples():
    torch.manual_seed(0)
    head = tammes.CosineHead(6, 5)
    whole = sum(batch_sums(head, *batch(12)).double() for _ in range(5))
    for deferred in (True, False):
        ranks = everywhere(4, summed, deferred)
        assert ranks[1:] == ranks[:1] * 3
        count, loss, *measured, term = ranks[0]
        assert (count, loss, term) == (50.0, 50.0, 100.0)
        assert measured == pytest.approx(whole[1:].tolist(), rel=1e-5)
