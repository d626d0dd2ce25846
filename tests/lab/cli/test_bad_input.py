"""What a user can get wrong ends in one sentence, exit code 2, and nothing half-written."""

import errno
import io
import json
import os
import re
import resource
import shutil
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest
from lab_runs import SAME
from messages import pattern
from PIL import Image
from records import make_run
from test_whole_way import SHORT, digit_folder, interrupt

from tammes.lab.cli.main import main
from tammes.lab.data.sources import hub
from tammes.lab.records.run_folder import Run
from tammes.lab.training.progress import Lines

NAMES = ["one", "two", "zero"]


def sentence(capsys, command, *words):
    """What a call that is refused says of it: the last line, and the only one that is a refusal."""
    assert main([command, *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    lines = printed.err.splitlines()
    assert [line for line in lines if line.startswith("tammes")] == lines[-1:]
    assert lines[-1].startswith(f"tammes {command}: ")
    return lines[-1].removeprefix(f"tammes {command}: ")


def matches(text, said):
    """Whether a sentence has these key words, or is this one where it has no ``...``."""
    return re.search(pattern(text), said)


def written(folder):
    """All files in a folder; the lock of a comparison says nothing of a run."""
    return {path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture(params=["train", "compare"])
def refuse(request, tmp_path, capsys):
    """Calls a command that is to be refused, and returns what it says."""

    def call(*words, loss="softmax", out=tmp_path / "out"):
        losses = ["--loss", loss]
        if request.param == "compare":
            losses = ["--losses", loss, "--seeds", "1", "--parallel", "1"]
        said = sentence(capsys, request.param, *losses, "--epochs", "1", "--out", out, *words)
        assert not written(tmp_path / "out")
        return said

    return call


@pytest.fixture
def pictures(tmp_path):
    return digit_folder(tmp_path / "pictures", NAMES, each=10)


def png(seed=0):
    """An image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    Image.new("L", (8, 8), 10 * seed).save(buffer, "PNG")
    return buffer.getvalue()


def table(path, labels, names=None, *, column="label", images=None):
    """A parquet file of images with these labels."""
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    encoded = images or [png(row) for row in range(len(labels))]
    images = [{"bytes": data, "path": None} for data in encoded]
    made = pyarrow.table({"image": pyarrow.array(images, type=kind), column: labels})
    if names is not None:
        features = {"label": {"_type": "ClassLabel", "names": names}}
        said = json.dumps({"info": {"features": features}})
        made = made.replace_schema_metadata({"huggingface": said})
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(made, path)
    return path


# -- Images.


def test_a_path_that_is_not_there_is_named(refuse, tmp_path):
    said = refuse("--data", tmp_path / "nothing")
    assert matches(f"{tmp_path / 'nothing'}: ... no such file ...", said)


def test_a_path_that_could_be_on_the_hub_and_is_not_is_named(refuse, monkeypatch):
    def unreachable(*_):
        raise ConnectionError("the hub\ncannot be reached")

    fake = types.SimpleNamespace(load_dataset=unreachable)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    said = refuse("--data", "my/pictures")
    assert matches("my/pictures: ... Hugging Face hub ... (ConnectionError: the hub) ...", said)


def test_a_name_that_is_nearly_known_is_answered_with_the_nearest(refuse):
    assert "did you mean mnist?" in refuse("--data", "mnits")


def test_an_empty_class_folder_is_named(refuse, pictures):
    (pictures / "three").mkdir()
    said = refuse("--data", pictures)
    assert said == f"a class folder is expected to have images, '{pictures / 'three'}' has none"


def test_an_empty_class_folder_to_test_on_is_named(refuse, tmp_path):
    root = digit_folder(tmp_path / "pictures", NAMES, each=4, split="train")
    digit_folder(root, NAMES, each=2, split="test")
    shutil.rmtree(root / "test" / "two")
    (root / "test" / "two").mkdir()
    assert f"'{root / 'test' / 'two'}' has none" in refuse("--data", root)


def test_a_folder_without_images_is_named(refuse, tmp_path):
    (tmp_path / "texts" / "one").mkdir(parents=True)
    (tmp_path / "texts" / "one" / "a.txt").write_text("not an image")
    said = refuse("--data", tmp_path / "texts")
    assert matches(f"{tmp_path / 'texts'}: ... no image ... (.bmp, ...", said)


def test_images_without_class_folders_are_counted(refuse, tmp_path):
    (tmp_path / "loose").mkdir()
    for number in range(3):
        (tmp_path / "loose" / f"{number}.png").write_bytes(png())
    said = refuse("--data", tmp_path / "loose")
    assert matches(f"{tmp_path / 'loose'}: ... one folder for each class ... 3 images ...", said)


def test_a_folder_with_nothing_in_it_is_named(refuse, tmp_path):
    (tmp_path / "void").mkdir()
    assert refuse("--data", tmp_path / "void").startswith(f"{tmp_path / 'void'}: ")


def test_a_single_class_is_not_enough(refuse, tmp_path):
    root = digit_folder(tmp_path / "pictures", ["only"], each=6)
    said = refuse("--data", root)
    assert matches(f"{root}: ... 2 classes ... 1 ... 'only' ...", said)


def test_a_single_image_of_each_class_cannot_be_divided(refuse, tmp_path):
    root = digit_folder(tmp_path / "pictures", NAMES, each=1)
    said = refuse("--data", root)
    assert matches(f"{root}: ... 3 images ... 3 classes ... held out ...", said)


def spoil(pictures):
    """Two images that cannot be read: one is none at all, one is cut off."""
    (pictures / "one" / "003.png").write_bytes(b"no image")
    cut = pictures / "two" / "004.png"
    cut.write_bytes(cut.read_bytes()[:60])
    return pictures / "one" / "003.png", cut


def test_corrupt_images_are_named_and_counted(refuse, pictures):
    none, cut = spoil(pictures)
    said = refuse("--data", pictures)
    assert matches(
        f"{pictures}: 2 images of 30 ...: {none} (not an image), {cut} (... skip_corrupt ...", said
    )


@pytest.mark.parametrize("flag", ["--skip-corrupt", "--skip_corrupt"])
def test_corrupt_images_are_left_out_only_when_asked_for(pictures, tmp_path, capsys, flag):
    none, cut = spoil(pictures)
    folder = tmp_path / "run"
    assert main(["train", "--data", str(pictures), *SHORT, flag, "--folder", str(folder)]) == 0
    said = capsys.readouterr().err
    assert f"2 images could not be read and were left out: {none} (not an image), {cut} (" in said
    done = Run(folder)
    assert done.status == "done"
    assert done.data["train"] + done.data["test"] == 28


@pytest.mark.slow
def test_a_comparison_leaves_corrupt_images_out_too(pictures, tmp_path, capsys):
    none, cut = spoil(pictures)
    words = ["--data", str(pictures), "--losses", "softmax", "--seeds", "1", "--epochs", "1"]
    words += ["--skip-corrupt", "--out", str(tmp_path / "out")]
    assert main(["compare", *words]) == 0
    said = capsys.readouterr().err
    assert f"{none} (not an image), {cut} (" in said


def test_a_class_that_cannot_be_read_at_all_is_named(refuse, pictures):
    for path in (pictures / "two").iterdir():
        path.write_bytes(b"no image")
    said = refuse("--data", pictures, "--skip-corrupt")
    assert matches(f"{pictures}: no image ... 'two' ...", said)


def test_a_class_to_test_on_that_was_not_trained_is_named(refuse, tmp_path):
    root = digit_folder(tmp_path / "pictures", NAMES, each=6, split="train")
    digit_folder(root, ["one", "three", "zero"], each=2, split="test")
    said = refuse("--data", root)
    expected = "1 class of the test images, 'three', is not among the 3 of the training images"
    assert said == f"{root}: {expected}; identities tests on classes that are not trained"


def test_a_folder_to_test_on_with_other_classes_is_named(refuse, pictures, tmp_path):
    other = digit_folder(tmp_path / "other", ["eins", "zwei", "zero"], each=3)
    said = refuse("--data", pictures, "--test", other)
    assert matches(f"{other}: 2 classes ... 'eins', 'zwei' ...", said)


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ([0, 1, 2, 1], ["a", "b"], "column 'label' is expected from 0 to 1, got 2"),
        ([0, 1, -1, 1], None, "... 'label' ... -1"),
        ([0, None, 1, None], None, "... 'label' ... 2 empty rows"),
    ],
)
def test_labels_that_do_not_match_are_named(refuse, tmp_path, labels, names, expected):
    path = table(tmp_path / "pictures.parquet", labels, names)
    assert matches(f"{path}: {expected}", refuse("--data", path))


def test_a_table_without_labels_says_what_it_has(refuse, tmp_path):
    path = table(tmp_path / "p.parquet", [0.5, 1.5], column="weight")
    said = refuse("--data", path)
    assert matches(f"{path}: ... column of labels ... 'weight' ...", said)


def test_a_table_to_test_on_with_other_labels_is_named(refuse, tmp_path):
    table(tmp_path / "set" / "train.parquet", ["a", "b"] * 4)
    table(tmp_path / "set" / "test.parquet", ["a", "c"] * 2)
    said = refuse("--data", tmp_path / "set")
    assert matches("...: 1 class ... test ... 'c' ...", said)


def test_a_file_that_is_no_table_is_named(refuse, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing of the kind")
    said = refuse("--data", tmp_path / "a.parquet")
    assert matches(f"{tmp_path / 'a.parquet'}: damaged ... parquet ...", said)
    (tmp_path / "a.zip").write_bytes(b"")
    said = refuse("--data", tmp_path / "a.zip")
    assert matches(f"{tmp_path / 'a.zip'}: ... folder ... .parquet ... .zip", said)


def test_images_too_small_for_the_backbone_are_refused(refuse, pictures):
    said = refuse("--data", pictures, "--backbone", "resnet12")
    assert matches("resnet12 ... 16 x 16 ... 8 x 8", said)


@pytest.mark.parametrize("size", [1, 23])
def test_a_batch_of_one_image_trains_or_is_refused_before_training(
    pictures, tmp_path, capsys, size
):
    """24 images to train on: with 23 in a batch, the last one of an epoch has one."""
    out = tmp_path / "out"
    words = ["--data", str(pictures), "--epochs", "1", "--batch_size", str(size)]
    code = main(["train", *words, "--out", str(out)])
    said = capsys.readouterr().err
    assert "torch.Size" not in said
    assert code == 0 or not written(out)


# -- Names and values.


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("backbone", "mnist_cn", "there is no backbone 'mnist_cn'; did you mean mnist_cnn?"),
        ("backbone", "mnist_cnn(feature=3)", "... 'feature' ... features?"),
        ("augment", "flop()", "... augmentation 'flop' ... flip?"),
        ("sampler", "ballanced()", "... sampler 'ballanced' ... balanced?"),
        ("lr_schedule", "cosin()", "... lr_schedule 'cosin' ... cosine?"),
        ("head", "cosin()", "... head 'cosin' ... cosine?"),
        ("imbalance", "long_tial(9)", "... imbalance 'long_tial' ... long_tail?"),
        ("noise", "symetric(0.1)", "... noise 'symetric' ... symmetric?"),
        ("schedules", "margin=WarmUpp(0, 1)", "... WarmUp?"),
        ("loggers", "tensorbord", "loggers ... tensorboard, mlflow and wandb ... 'tensorbord'"),
        ("backbone", "__import__('os')", "... backbone '__import__' ..."),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(refuse, flag, value, expected):
    assert matches(expected, refuse(f"--{flag}", value))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("cosfce", "loss: there is no 'cosfce' in 'cosfce'; did you mean cosface?"),
        ("cosface(margn=0.2)", "... cosface ... 'margn' ... margin?"),
        ("softmax + 0.5*sampel_margin()", "... sample_margin?"),
        ("cosface(", "...'(' was never closed"),
        ("cross_entropy", "loss: there is no 'cross_entropy' in ...; did you mean softmax?"),
        ("__import__('os').system('true')", "loss ..."),
    ],
)
def test_an_unknown_loss_is_answered_with_the_nearest(refuse, loss, expected):
    assert matches(expected, refuse(loss=loss))


def test_an_unknown_flag_is_answered_with_the_nearest(refuse):
    said = refuse("--bach_size", "3")
    assert said.startswith("unrecognized arguments: --bach_size 3; did you mean --batch_size?")
    assert "; did you mean --lr?" in refuse("--learning-rate", "0.1")


def test_a_folder_without_a_flag_is_taken_for_the_images(refuse):
    said = refuse("pictures")
    assert said.startswith("unrecognized arguments: pictures; did you mean --data pictures?")


@pytest.mark.parametrize(
    "words", [("",), ("--epochs", "3", "5"), ("margin=0.2)",), ("-x",), ("=",)]
)
def test_words_that_are_no_folder_are_not_taken_for_the_images(refuse, words):
    said = refuse(*words)
    assert said.startswith(f"unrecognized arguments: {words[-1]}")
    assert "did you mean" not in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bach_size: 3", "a configuration has no 'bach_size'; did you mean batch_size?"),
        ("batch_size: many", "batch_size ... whole number ... many"),
        ("lr: [0.1]", "lr ... number ... [0.1]"),
        ("skip_corrupt: 3", "skip_corrupt ... 3"),
        ("optimizer: sdg", "optimizer ... sdg"),
        ("epochs: [", "not YAML (..."),
        ("- epochs", "... lr: 0.1 ..."),
        ("data: !!python/object/apply:os.getcwd []", "not YAML (..."),
    ],
)
def test_a_file_of_settings_that_cannot_be_is_named(refuse, tmp_path, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert matches(f"{path}: {expected}", refuse("--config", path))


def test_a_file_of_settings_that_is_not_there_is_named(refuse, tmp_path):
    said = refuse("--config", tmp_path / "run.yaml")
    assert said == f"{tmp_path / 'run.yaml'}: No such file or directory"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--epochs", "three"], "--epochs is expected to be a whole number, got three"),
        (["--epochs", "2.5"], "--epochs ... whole number ... 2.5"),
        (["--epochs", "0"], "epochs ... at least 1 ... 0"),
        (["--lr", "fast"], "--lr ... number ... fast"),
        (["--lr", "nan"], "--lr ... number ... nan"),
        (["--lr", "-0.1"], "lr ... above 0 ... -0.1"),
        (["--fraction", "0"], "fraction ... (0, 1] ... 0.0"),
        (["--validation", "1"], "validation ... [0, 1) ... 1.0"),
        (["--skip-corrupt", "perhaps"], "... true or false ... perhaps"),
        (["--precision", "fp8"], "--precision ... fp16 ... fp8"),
        (["--precision", "fp16", "--accelerator", "cpu"], "... fp16 ... GPU ..."),
        (["--graphs", "on", "--accelerator", "cpu"], "... CUDA graphs ..."),
        (["--warmup", "1"], "warmup ... 1 epochs ... 1.0"),
        (["--lr_schedule", "steps([1], [0.1, 0.2])"], "... 1 epochs ... 2"),
    ],
)
def test_a_value_that_cannot_be_is_named(refuse, words, expected):
    assert matches(expected, refuse(*words))


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ("episodes(way=4, shot=2)", "episodes ... 4 classes ... 3"),
        ("pk(classes=4, images=2)", "pk ... 4 classes ... 3"),
        ("episodes(way=2, shot=9)", "episodes ... 9 examples ... 8 of class 0"),
        ("episodes(way=0, shot=2)", "episodes expects way to be a whole number above 0, got 0"),
    ],
)
def test_more_than_there_is_cannot_be_in_a_batch(refuse, pictures, sampler, expected):
    assert matches(expected, refuse("--data", pictures, "--sampler", sampler))


# -- Folders of runs.


@pytest.mark.parametrize("where", ["a file", "below a file", "/proc/tammes"])
def test_a_folder_that_cannot_be_written_is_named_before_any_work(
    tmp_path, capsys, pictures, where
):
    file = tmp_path / "file"
    file.write_text("mine")
    out = {"a file": file, "below a file": file / "below"}.get(where, where)
    words = ["--data", str(pictures), "--epochs", "1", "--out", str(out)]
    for command, losses in (("compare", ["--losses", "softmax", "--seeds", "1"]), ("train", [])):
        assert main([command, *losses, *words]) == 2
        printed = capsys.readouterr()
        # The only line: images are not decoded for nothing.
        assert printed.err.startswith(f"tammes {command}: {out} cannot be written to (")
        assert printed.err.count("\n") == 1
    assert file.read_text() == "mine"


def test_a_folder_of_another_configuration_is_left_alone(pictures, tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["--data", pictures, *SHORT, "--folder", folder]
    assert main(["train", *map(str, words)]) == 0
    before = {path: path.read_bytes() for path in written(folder)}
    capsys.readouterr()
    said = sentence(capsys, "train", *words, "--lr", "0.3")
    expected = f"{folder}: holds a run with lr 0.05, got 0.3; choose another folder"
    assert said == expected
    assert {path: path.read_bytes() for path in written(folder)} == before


@pytest.mark.parametrize("what", ["nothing", "a folder", "a file"])
def test_what_is_no_run_cannot_go_on(tmp_path, capsys, what):
    path = tmp_path / "run"
    if what == "a folder":
        path.mkdir()
    elif what == "a file":
        path.write_text("")
    assert sentence(capsys, "train", "--resume", path).startswith(f"{path}")
    assert not written(tmp_path) - {path}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "damaged (..."),
        ("[]", "damaged (an object is expected)"),
        ('{"los": "softmax"}', "... 'los' ... loss?"),
        ('{"epochs": "three"}', "epochs ... whole number ... three..."),
        ('{"epochs": 0}', "epochs ... at least 1 ... 0"),
    ],
)
def test_a_damaged_configuration_is_named(tmp_path, capsys, text, expected):
    path = make_run(tmp_path / "run").folder / "config.json"
    path.write_text(text)
    said = sentence(capsys, "train", "--resume", path.parent)
    assert matches(f"{path}: {expected}", said)
    page = tmp_path / "page.html"
    said = sentence(capsys, "report", path.parent, "--out", page)
    assert matches(f"... no run ...: {path}: {expected}", said)
    assert not page.exists()


@pytest.mark.parametrize("name", ["final.json", "metrics.jsonl", "embeddings.safetensors"])
def test_a_page_says_what_is_damaged_and_shows_the_rest(tmp_path, capsys, name):
    make_run(tmp_path / "runs" / "sound", seed=0)
    path = make_run(tmp_path / "runs" / "damaged", seed=1).folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if name == "embeddings.safetensors":
        # Of one run of a group only is looked at closely.
        shutil.rmtree(tmp_path / "runs" / "sound")
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(page)]) == 0
    assert capsys.readouterr().err == ""
    assert f"{path}: damaged (" in page.read_text()


@pytest.mark.parametrize("what", ["nothing", "a folder", "a file"])
def test_a_report_of_no_run_is_refused(tmp_path, capsys, what):
    path = tmp_path / "runs"
    if what == "a folder":
        path.mkdir()
    elif what == "a file":
        path.write_text("")
    said = sentence(capsys, "report", path, "--out", tmp_path / "page.html")
    expected = "there is no such folder" if what == "nothing" else "there is no run in it"
    assert said == f"{path}: {expected}"
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_named(tmp_path, capsys):
    run, file = make_run(tmp_path / "run").folder, tmp_path / "file"
    file.write_text("mine")
    said = sentence(capsys, "report", run, "--out", file / "page.html")
    assert matches(f"{file / 'page.html'}: ... page ... written (...", said)
    words = ["--figures", file, "--out", tmp_path / "page.html"]
    said = sentence(capsys, "report", run, *words)
    assert matches(f"{file}{os.sep}... figure ... written (...", said)
    words = ["compare", "--losses", "softmax", "--page", file / "page.html"]
    said = sentence(capsys, *words, "--out", tmp_path / "out")
    assert matches(f"...{file} ... written to (...", said)
    assert file.read_text() == "mine"


# -- A disk that is full.


def fill(monkeypatch, how, smallest=0):
    """From now on nothing of some size can be written; returns what makes room again."""
    if how == "limit":
        # The system itself refuses, in the middle of a file.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (smallest, hard))
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sync = os.fsync

    def full(descriptor):
        if os.fstat(descriptor).st_size > smallest:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    return lambda: monkeypatch.setattr(os, "fsync", sync)


FULL = pytest.mark.parametrize(
    ("how", "reason"), [("space", "No space left on device"), ("limit", "File too large")]
)


@FULL
@pytest.mark.parametrize(
    ("room", "what"), [(0, "metrics.jsonl"), (20_000, "checkpoints")], ids=["lines", "checkpoint"]
)
def test_full_disk_keeps_what_was_there_and_the_run_is_finished_later(
    pictures, tmp_path, capsys, monkeypatch, how, reason, room, what
):
    """With a little room the lines of an epoch are still written, and its checkpoint is not."""
    words = ["train", "--data", str(pictures), *SHORT]
    assert main([*words, "--folder", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    folder, shown, kept, undo = tmp_path / "run", Lines.epoch, {}, []

    def fill_up(self, row, **values):
        shown(self, row, **values)
        if row["epoch"] == 2:
            kept.update({path: path.read_bytes() for path in written(folder)})
            undo.append(fill(monkeypatch, how, smallest=room))

    monkeypatch.setattr(Lines, "epoch", fill_up)
    try:
        said = sentence(capsys, *words, "--folder", folder)
    finally:
        for make_room in undo:
            make_room()
    monkeypatch.setattr(Lines, "epoch", shown)
    assert reason in said
    assert str(folder / what) in said
    # Nothing half-written beside it, and itself as it was.
    assert written(folder) == {*kept}
    assert len([path for path in kept if path.parent.name == "checkpoints"]) == 1
    lines = {folder / "metrics.jsonl", folder / "timing.jsonl"} if room else set()
    for path in {*kept} - lines:
        assert path.read_bytes() == kept[path], path
    assert Run(folder).status == "unfinished"
    assert main([*words, "--folder", str(folder)]) == 0
    assert "resuming at epoch 2" in capsys.readouterr().err
    for name in SAME:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@FULL
def test_a_disk_that_is_full_from_the_start_leaves_no_run(
    pictures, tmp_path, capsys, monkeypatch, how, reason
):
    make_room = fill(monkeypatch, how)
    try:
        said = sentence(capsys, "train", "--data", pictures, "--out", tmp_path / "out")
    finally:
        make_room()
    assert reason in said
    assert str(tmp_path / "out") in said
    assert not written(tmp_path / "out")


def test_a_full_disk_at_the_end_leaves_a_run_that_is_finished_later(
    pictures, tmp_path, capsys, monkeypatch
):
    """The last checkpoint is there, what comes after it is not."""
    folder, words = tmp_path / "run", ["train", "--data", str(pictures), *SHORT]
    monkeypatch.setattr("tammes.lab.training.loop.write_results", _full)
    said = sentence(capsys, *words, "--folder", folder)
    assert "No space left on device" in said
    monkeypatch.undo()
    assert Run(folder).status == "unfinished"
    assert main([*words, "--folder", str(folder)]) == 0
    assert "epoch 3/3" not in capsys.readouterr().err
    assert Run(folder).status == "done"


def _full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_that_is_interrupted_before_its_first_checkpoint_begins_anew(
    pictures, tmp_path, capsys, monkeypatch
):
    folder, words = tmp_path / "run", ["train", "--data", str(pictures), *SHORT]
    interrupt(monkeypatch, epoch=1)
    assert main([*words, "--folder", str(folder)]) == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert main(["train", "--resume", str(folder)]) == 0
    assert "epoch 1/3" in capsys.readouterr().err
    assert Run(folder).status == "done"
