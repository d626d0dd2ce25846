"""Training: what a run writes, how it goes on, what it refuses."""

import json
import re
import shutil

import pytest
import torch
from cover import slow
from lab_runs import SAME, held_by_another_process

from tammes.lab import data
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import RecordError, Run
from tammes.lab.training import loop as training
from tammes.lab.training.loop import TrainingError, train
from tammes.lab.training.model import load_model
from tammes.lab.training.progress import Progress

SMALL = Config(data="digits", loss="cosface(margin=0.2)", epochs=3, batch_size=200, lr=0.05)
"""A run of a second."""


class Stop(Exception):
    """What interrupts a run in these tests."""


class StopAt(Progress):
    """Interrupts a run after some steps; what it said is kept."""

    def __init__(self, steps=None):
        self.steps, self.said, self.shown = steps, [], 0

    def say(self, text):
        self.said.append(text)

    def step(self, *, epoch, step, values):
        self.shown += 1
        if self.shown == self.steps:
            raise Stop


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupted."""
    return train(SMALL, tmp_path_factory.mktemp("whole"))


def assert_same(one, two):
    for name in SAME:
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes(), name


def test_a_run_writes_its_whole_record(whole):
    assert whole.status == "done"
    assert [row["epoch"] for row in whole.metrics] == [1, 2, 3]
    assert whole.config == SMALL
    assert whole.data["classes"] == [str(digit) for digit in range(10)]
    assert whole.environment["backbone"]["name"] == "mnist_cnn"
    for name in ("prototypes", "embeddings", "examples", "model", "subset"):
        assert whole.tensors(name)
    assert len(whole.timing) == 3


def test_it_learns(whole):
    assert whole.final["test"]["accuracy"] > 0.9
    assert whole.metrics[-1]["train"]["loss"] < whole.metrics[0]["train"]["loss"]


def test_a_term_and_a_measure_of_the_same_name_are_kept_apart(tmp_path):
    config = SMALL.replace(loss="cosface(margin=0.2) + 0.5*sample_margin()")
    last = train(config, tmp_path / "run").metrics[-1]
    # The term is the margin that is wanted, with the other sign.
    assert last["terms"]["sample_margin"] == pytest.approx(-last["train"]["sample_margin"])
    assert last["train"]["sample_margin"] > 0.2


def test_the_last_line_and_the_final_measures_are_of_the_same_model(whole):
    for key in ("accuracy", "sample_margin", "bias", "loss"):
        assert whole.metrics[-1]["test"][key] == whole.final["test"][key]


def test_the_measures_follow_from_the_embeddings_and_prototypes(whole):
    kept, prototypes = whole.tensors("embeddings"), whole.tensors("prototypes")["prototypes"]
    unit = torch.nn.functional.normalize
    cosine = unit(kept["features"].double()) @ unit(prototypes.double()).T
    rows = torch.arange(len(cosine))
    own = cosine[rows, kept["labels"]]
    rest = cosine.clone()
    rest[rows, kept["labels"]] = -2
    assert whole.final["test"]["sample_margin"] == pytest.approx(
        float((own - rest.amax(1)).mean()), abs=1e-6
    )
    assert torch.equal(cosine.argmax(1), kept["predictions"])
    right = (kept["predictions"] == kept["labels"]).double()
    assert whole.final["test"]["accuracy"] == pytest.approx(float(right.mean()))
    by_class = [float(right[kept["labels"] == label].mean()) for label in range(10)]
    assert whole.final["test"]["per_class_accuracy"] == pytest.approx(by_class)
    # All classes have as many training examples.
    assert "accuracy_many" not in whole.final["test"]


def test_the_model_comes_back_without_its_images_and_makes_the_kept_features(whole):
    kept, tests = whole.tensors("embeddings"), data.load("digits", "test")
    model = load_model(whole)
    features = model.features(tests.pixels)
    assert torch.allclose(features, kept["features"], atol=1e-5)
    assert torch.equal(model.criterion.logits(features).argmax(1), kept["predictions"])


@pytest.mark.parametrize(
    "loss",
    [
        "ldam()",
        "large_margin_gaussian()",
        "center() + softmax()",
        "elasticface(std=0.1) + 0.1*vs_softmax() + curricularface()",
        "arcface(margin=margins_from_counts()) + logit_adjustment()",
        "arpl() + 0.1*uniface()",
        "proxy_anchor()",
    ],
)
def test_a_model_with_counts_or_a_memory_comes_back_too(tmp_path, loss):
    config = SMALL.replace(
        loss=loss, epochs=1, imbalance="long_tail(15)", augment="resized_crop(0.5, 1.0, size=12)"
    )
    run = train(config, tmp_path / "run")
    tested, counts = run.final["test"], run.data["counts"]
    groups = {
        "many": [n > 100 for n in counts],
        "medium": [20 <= n <= 100 for n in counts],
        "few": [n < 20 for n in counts],
    }
    for name, chosen in groups.items():
        accuracies = [
            a for a, is_in in zip(tested["per_class_accuracy"], chosen, strict=True) if is_in
        ]
        assert tested[f"accuracy_{name}"] == pytest.approx(sum(accuracies) / len(accuracies))
    features = load_model(run).features(data.load("digits", "test").pixels)
    assert torch.allclose(features, run.tensors("embeddings")["features"], atol=1e-4)


def test_a_run_with_several_prototypes_per_class_says_which_ones_its_images_use(tmp_path):
    head = "cosine(scale=16, subcenters=3)"
    run = train(SMALL.replace(head=head, epochs=1, noise="symmetric(0.4)"), tmp_path / "run")
    kept, weight = run.tensors("embeddings"), run.tensors("prototypes")["prototypes"]
    assert weight.shape == (10, 3, kept["features"].shape[1])
    own = torch.cosine_similarity(kept["features"][:, None], weight[kept["labels"]], dim=2)
    assert torch.equal(kept["subcenters"], own.argmax(1))
    model = load_model(run)
    assert torch.equal(model.criterion.logits(kept["features"]).argmax(1), kept["predictions"])
    assert model.criterion.head.weight.shape == weight.shape
    assert 1 / 3 <= run.final["subcenters"]["share_dominant"] <= 1
    assert 1 <= run.final["subcenters"]["used"] <= 3
    assert 0 <= run.final["test"]["accuracy_dominant"] <= 1


def test_the_same_configuration_gives_the_same_bits(whole, tmp_path):
    assert_same(train(SMALL, tmp_path / "again"), whole)


def test_another_seed_gives_another_run(whole, tmp_path):
    other = train(SMALL.replace(seed=1, epochs=1), tmp_path / "other")
    assert other.metrics[0]["train"] != whole.metrics[0]["train"]


def test_a_finished_run_is_not_trained_again(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}
    train(SMALL, whole.folder)
    assert {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        *[(0, 1), slow(0, 7), (0, 10), slow(0, 15), slow(0, 21)],
        *[slow(2, 1), (2, 7), slow(2, 10), (2, 15), (2, 21)],
    ],
)
def test_an_interrupted_run_ends_in_the_same_bits(whole, tmp_path, every, steps):
    config = SMALL.replace(save_steps=every)
    with pytest.raises(Stop):
        train(config, tmp_path / "run", progress=StopAt(steps))
    resumed = train(SMALL, tmp_path / "run")
    assert_same(resumed, whole)


def test_a_resumed_run_does_not_begin_anew(tmp_path):
    with pytest.raises(Stop):
        train(SMALL, tmp_path / "run", progress=StopAt(15))
    progress = StopAt()
    train(SMALL, tmp_path / "run", progress=progress)
    assert any("resuming at epoch 3, step 15" in text for text in progress.said)
    assert progress.shown == 21 - 14


def test_truncated_checkpoint_is_noticed_and_the_one_before_is_used(whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(SMALL, folder, progress=StopAt(16))
    newest = max((folder / "checkpoints").glob("last-*"))
    newest.write_bytes(newest.read_bytes()[:-100])
    progress = StopAt()
    resumed = train(SMALL, folder, progress=progress)
    assert any(newest.name in text and "checksum" in text for text in progress.said)
    assert_same(resumed, whole)


def test_the_best_epoch_on_the_validation_images_is_kept(tmp_path):
    config = SMALL.replace(validation=0.2, lr_schedule="constant()", epochs=4)
    run = train(config, tmp_path / "run")
    accuracies = [row["validation"]["accuracy"] for row in run.metrics]
    best = accuracies.index(max(accuracies))
    assert run.final["epoch"] == best + 1
    assert run.final["chosen"] == "best epoch on the validation images"
    assert run.final["test"]["accuracy"] == run.metrics[best]["test"]["accuracy"]


def test_the_best_epoch_survives_an_interruption(tmp_path):
    config = SMALL.replace(validation=0.2, lr_schedule="constant()", epochs=4)
    undisturbed = train(config, tmp_path / "one")
    steps = undisturbed.metrics[-1]["step"]
    for at in range(1, steps, 7):
        folder = tmp_path / f"at{at}"
        with pytest.raises(Stop):
            train(config, folder, progress=StopAt(at))
        assert_same(train(config, folder), undisturbed)


def test_another_configuration_does_not_go_into_the_same_folder(whole):
    with pytest.raises(
        RecordError, match=r"holds a run with lr 0\.05, got 0\.1; choose another folder"
    ):
        train(SMALL.replace(lr=0.1), whole.folder)


def test_a_loss_that_is_not_finite_stops_the_run_and_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    config = SMALL.replace(loss="cosface(margin=0.2) + 0.5*sample_margin()")
    forward = training.Step._step

    def poisoned(self, pixels, labels, index):
        if self.count == 9:
            with torch.no_grad():
                self.model.criterion.head.weight.fill_(float("nan"))
        return forward(self, pixels, labels, index)

    monkeypatch.setattr(training.Step, "_step", poisoned)
    with pytest.raises(TrainingError, match="not finite at step 10, epoch 2, in cosface"):
        train(config, folder)
    run = Run(folder)
    assert run.status == "failed"
    assert run.failure["step"] == 10
    assert run.failure["terms"] == ["cosface", "sample_margin"]
    assert len(run.failure["batch"]) == 200
    monkeypatch.undo()
    assert_same(train(config, folder), train(config, tmp_path / "undisturbed"))


@pytest.mark.parametrize("loss", ["cosface(margin=0.2)", "softmax()", "nca()"])
def test_a_run_that_diverges_says_so_and_is_not_taken_for_one_to_go_on_with(tmp_path, loss):
    with pytest.raises(TrainingError, match=r"not finite (at|after) step \d+"):
        train(SMALL.replace(loss=loss, lr=1e30, weight_decay=0.1), tmp_path / "run")
    run = Run(tmp_path / "run")
    assert (run.status, run.failure["kind"]) == ("failed", "not finite")
    assert run.failure["step"] >= 1


def test_weights_that_the_last_step_of_an_epoch_breaks_are_noticed(tmp_path, monkeypatch):
    work = training.Step._step

    def breaking(self, *batch):
        row = work(self, *batch)
        if self.count == 6:
            with torch.no_grad():
                next(self.model.backbone.parameters()).fill_(float("inf"))
        return row

    monkeypatch.setattr(training.Step, "_step", breaking)
    with pytest.raises(TrainingError, match="the weights are not finite after step 7, epoch 1"):
        train(SMALL, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_damaged_best_checkpoint_does_not_end_the_run(tmp_path, monkeypatch):
    config = SMALL.replace(validation=0.2, lr_schedule="constant()", epochs=4)
    accuracies = iter([0.5, 0.9, 0.6, 0.7])
    is_best = training._is_best

    def chosen(row, work):
        row["validation"]["accuracy"] = next(accuracies)
        return is_best(row, work)

    monkeypatch.setattr(training, "_is_best", chosen)

    def crash(*_, **__):
        for path in (tmp_path / "run" / "checkpoints").glob("best-*"):
            path.write_bytes(b"")
        raise Stop

    monkeypatch.setattr(training, "write_results", crash)
    with pytest.raises(Stop):
        train(config, tmp_path / "run")
    monkeypatch.undo()
    progress = StopAt()
    run = train(config, tmp_path / "run", progress=progress)
    assert run.final["epoch"] == 4
    assert "best one is missing or damaged" in run.final["chosen"]
    assert any("best one is missing or damaged" in text for text in progress.said)


@pytest.fixture
def pictures(tmp_path):
    """A folder of two classes, plain colours."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "pictures"
    for place, name in enumerate("ab"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            colour = (place * 150, number * 5, 0)
            image.new("RGB", (16, 16), colour).save(folder / name / f"{number}.png")
    return folder


def add_a_picture(pictures):
    shutil.copy(pictures / "a" / "0.png", pictures / "a" / "new.png")


def test_images_that_have_changed_are_noticed(tmp_path, pictures):
    config = SMALL.replace(data=str(pictures), batch_size=8, lr=0.01)
    with pytest.raises(Stop):
        train(config, tmp_path / "run", progress=StopAt(6))
    add_a_picture(pictures)
    with pytest.raises(RecordError, match=r"the images of .*pictures have changed since"):
        train(config, tmp_path / "run")


def test_runs_on_other_images_are_not_compared(tmp_path, pictures):
    from tammes.lab.runner.sweep import compare

    config = SMALL.replace(data=str(pictures), loss="softmax", batch_size=8, epochs=1)
    train(config, tmp_path / "runs" / config.folder)
    add_a_picture(pictures)
    with pytest.raises(ValueError, match="have changed since this run; choose another"):
        compare(config, "softmax", 2, tmp_path / "runs", report=lambda text: None)


def test_with_very_many_classes_margins_are_left_out_of_the_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr("tammes.lab.training.model.MEASURED", 5)
    monkeypatch.setattr(training, "MEASURED", 5)
    progress = StopAt()
    run = train(SMALL, tmp_path / "run", progress=progress)
    assert set(run.metrics[0]["train"]) == {"loss"}
    assert "class_margin" not in run.metrics[0]["prototypes"]
    assert run.metrics[0]["terms"] == {"cosface": pytest.approx(run.metrics[0]["train"]["loss"])}
    assert run.final["prototypes"]["class_margin"] > 0


def test_last_batch_of_one_image_passes_batch_normalisation(tmp_path):
    # 1348 images for training: one more than three times 449.
    run = train(SMALL.replace(batch_size=449, epochs=1), tmp_path / "run")
    assert run.metrics[0]["step"] == 3


def test_a_full_disk_keeps_the_checkpoint_before_and_the_run_goes_on_later(
    whole, tmp_path, monkeypatch
):
    import errno

    from tammes.lab.records import atomic_io

    folder, writes = tmp_path / "run", []
    fsync = atomic_io.os.fsync

    def full(descriptor):
        writes.append(1)
        if len(writes) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(atomic_io.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        train(SMALL, folder)
    monkeypatch.undo()
    assert Run(folder).status == "unfinished"
    assert_same(train(SMALL, folder), whole)


def test_corruptions_are_saved_with_the_run(tmp_path):
    config = SMALL.replace(noise="symmetric(0.4)", fraction=0.5, epochs=1)
    run = train(config, tmp_path / "run")
    used = run.tensors("subset")
    clean = train(SMALL.replace(epochs=1), tmp_path / "clean").tensors("subset")
    truth = dict(zip(clean["index"].tolist(), clean["labels"].tolist(), strict=True))
    pairs = zip(used["index"].tolist(), used["labels"].tolist(), strict=True)
    wrong = [truth[index] != label for index, label in pairs]
    assert len(wrong) == pytest.approx(len(truth) / 2, abs=6)
    assert sum(wrong) == round(0.4 * len(wrong))


@pytest.mark.parametrize(
    "loss",
    [
        "softmax(smoothing=0.1)",
        "lm_softmax()",
        "direct_sum(softmax(), nca())",
        "nca()",
        "ldam()",
        "cosface() + 0.5*sample_margin() + zero_centroid()",
        "large_margin_gaussian()",
    ],
)
def test_every_kind_of_loss_trains(tmp_path, loss):
    progress = StopAt()
    run = train(SMALL.replace(loss=loss, epochs=1), tmp_path / "run", progress=progress)
    assert run.status == "done"
    said = any("no term classifies, so accuracies" in text for text in progress.said)
    assert said == (loss == "nca()")
    if said:
        # The prototypes of a run to start from may classify.
        progress = StopAt()
        train(
            SMALL.replace(loss=loss, epochs=1, start=str(tmp_path / "run")),
            tmp_path / "next",
            progress=progress,
        )
        assert not any("no term classifies" in text for text in progress.said)
    assert set(run.metrics[0]["terms"]) <= set(re.findall(r"\w+", loss))


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "lr": 1e-3},
        {"optimizer": "adamw", "lr": 1e-3, "clip": 1.0},
        {"precision": "bf16"},
        {"sampler": "balanced()"},
        {"sampler": "episodes(way=5, shot=8)"},
        {"sampler": "pk(classes=5, images=8)"},
        {"schedules": "margin=WarmUp(0.0, 0.2, epochs=1)"},
        {"backbone": "mnist_cnn(features=3, norm='group')", "decay_norms": False},
        {"augment": "pad_crop(1) + rotate(10)"},
        {"imbalance": "long_tail(10)", "evaluate_every": 2, "nesterov": True},
    ],
    ids=str,
)
def test_every_setting_trains(tmp_path, settings):
    run = train(SMALL.replace(epochs=1, **settings), tmp_path / "run")
    assert run.status == "done"
    assert 0 <= run.final["test"]["accuracy"] <= 1


def test_a_schedule_goes_on_where_it_was(tmp_path):
    config = SMALL.replace(schedules="margin=WarmUp(0.0, 0.3, epochs=3)")
    undisturbed = train(config, tmp_path / "one")
    with pytest.raises(Stop):
        train(config, tmp_path / "two", progress=StopAt(12))
    assert_same(train(config, tmp_path / "two"), undisturbed)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"backbone": "mnist_cn"}, "did you mean mnist_cnn"),
        ({"loss": "cosfase()"}, "did you mean cosface"),
        ({"sampler": "radnom()"}, "did you mean random"),
        ({"augment": "flop()"}, "did you mean flip"),
        ({"precision": "fp16", "accelerator": "cpu"}, "precision fp16 needs a GPU"),
        ({"graphs": "on", "accelerator": "cpu"}, "graphs are CUDA graphs"),
        ({"loggers": "tensorbord"}, "loggers are tensorboard, mlflow and wandb"),
        ({"data": "no/such/place"}, "no/such/place"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_a_sentence(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        train(SMALL.replace(**settings), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_do_not_train_one_run(tmp_path):
    with (
        held_by_another_process(tmp_path / "run"),
        pytest.raises(ValueError, match="another process is training this run"),
    ):
        train(SMALL, tmp_path / "run")


def test_a_gpu_without_enough_memory_is_said_in_a_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And more.")

    monkeypatch.setattr(training.Step, "_step", full)
    sentence = r"ran out of memory.*batch_size.*\(CUDA out of memory\)$"
    with pytest.raises(TrainingError, match=sentence):
        train(SMALL, tmp_path / "run")
    assert Run(tmp_path / "run").failure["kind"] == "out of memory"


def test_a_record_is_plain_files(whole):
    assert not [path for path in whole.folder.rglob("*") if path.suffix in (".pkl", ".pickle")]
    for path in whole.folder.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))


def test_a_copied_folder_is_the_same_run(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "copy")
    assert train(SMALL, tmp_path / "copy").final == whole.final
