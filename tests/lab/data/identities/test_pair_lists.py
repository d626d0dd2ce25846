"""Lists of pairs: LFW and VoxCeleb."""

import re

import pytest
import torch

from tammes.lab.data import DataError
from tammes.lab.data.identities import read_lfw, read_trials
from tammes.metrics.functional import fold_accuracy, intervals, verification

PAIRS = """2\t2
Ann_Lee\t1\t2
Bob\t1\t3
Ann_Lee\t1\tBob\t1
Bob\t3\tCid\t1
Cid\t1\t2
Ann_Lee\t2\t1
Cid\t2\tBob\t1
Ann_Lee\t2\tCid\t1
"""
FACES = ["Ann_Lee/1", "Ann_Lee/2", "Bob/1", "Bob/3", "Cid/1", "Cid/2"]
TRIALS = """1 id10270/a/1.wav id10270/b/1.wav
0 id10270/a/1.wav id10271/c/1.wav
"""


@pytest.fixture
def lfw(tmp_path):
    """Writes pairs.txt beside NAME/NAME_0001.jpg."""

    def make(text=PAIRS, suffix=".jpg", faces=FACES):
        for face in faces:
            name, number = face.split("/")
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{name}_{int(number):04d}{suffix}").write_bytes(b"")
        path = tmp_path / "pairs.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


@pytest.fixture
def trials(tmp_path):
    """Writes a list of trials, and the recordings that the first one names."""

    def make(text=TRIALS):
        for name in re.findall(r"\S+\.wav", TRIALS):
            (tmp_path / "wav" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "wav" / name).write_bytes(b"")
        path = tmp_path / "veri_test.txt"
        path.write_text(text)
        return path, tmp_path / "wav"

    return make


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_lfw_has_pairs_folds_and_names(lfw, suffix):
    path = lfw(suffix=suffix)
    pairs = read_lfw(path)
    assert pairs.same.tolist() == [True, True, False, False] * 2
    assert pairs.folds.tolist() == [0] * 4 + [1] * 4
    # Each image once, although it is in several pairs.
    assert len(pairs.items) == 6
    first, second = pairs.sides()
    assert first[:4] == ["Ann_Lee", "Bob", "Ann_Lee", "Bob"]
    assert second[:4] == ["Ann_Lee", "Bob", "Bob", "Cid"]
    assert pairs.items.fetch(int(pairs.right[1])) == str(path.parent / f"Bob/Bob_0003{suffix}")
    assert pairs.left[5] == pairs.right[0]


def test_metrics_take_what_is_read(lfw):
    pairs = read_lfw(lfw())
    features = torch.eye(3)[[["Ann_Lee", "Bob", "Cid"].index(name) for name in pairs.identities]]
    scores = (features[pairs.left] * features[pairs.right]).sum(1)
    assert float(fold_accuracy(scores, pairs.same, folds=pairs.folds).mean) == 1
    result = verification(scores, pairs.same, identities=pairs.sides())
    assert float(result.eer) == 0
    assert "auc" in intervals(result, lambda r: {"auc": r.auc}, resamples=5)


def test_lists_for_development_have_one_fold(lfw):
    pairs = read_lfw(lfw("\ufeff1\r\nBob 1 3\r\nBob 1 Cid 2\r\n\r\n"))
    assert (pairs.same.tolist(), pairs.folds.tolist()) == ([True, False], [0, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "pairs.txt: a list of pairs is expected, got an empty file"),
        (b"\xff\xfe1", "pairs.txt: text in UTF-8 is expected, got byte 0"),
        ("Bob 1 3", "pairs.txt line 1: FOLDS PAIRS, such as 10 300 is expected, got 'Bob 1 3'"),
        ("0 300", "line 1: FOLDS PAIRS, .* got '0 300'"),
        (
            PAIRS[: PAIRS.rindex("Ann")],
            "pairs.txt: 8 pairs are expected after the line '2 2', got 7",
        ),
        (PAIRS.replace("Bob\t1\t3", "Bob\t1"), "line 3: NAME N N is expected, got 'Bob 1'"),
        (PAIRS.replace("Bob\t1\t3", "Bob\t1\tCid\t1"), "line 3: NAME N N is expected, got"),
        (PAIRS.replace("Bob\t1\t3", "Bob\t1\tx"), "line 3: NAME N N is expected, got 'Bob 1 x'"),
        (PAIRS.replace("Bob\t1\t3", "Bob\t1\t01"), "line 3: NAME N N of two images is expected"),
        (PAIRS.replace("Cid\t2\tBob\t1", "Bob\t2\tBob\t1"), "line 8: .* of two names is expected"),
    ],
)
def test_a_malformed_line_of_lfw_is_named(lfw, text, message):
    with pytest.raises(DataError, match=message):
        read_lfw(lfw(text))


def test_pairs_that_name_missing_images_are_counted(lfw):
    path = lfw(faces=FACES[:4])
    message = (
        f"{path}: 2 of 6 files that it names are missing (named 5 times of 16), the first is "
        f"{str(path.parent / 'Cid/Cid_0001.jpg')!r} in line 5; "
        "images are expected as NAME/NAME_0001.jpg in the folder"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        read_lfw(path)
    with pytest.raises(DataError, match="no: a folder of images is expected, got no such folder"):
        read_lfw(path, path.parent / "no")
    with pytest.raises(DataError, match="Bob: a file of pairs is expected, got a folder"):
        read_lfw(path.parent / "Bob")


def test_trials_have_pairs_and_speakers(trials):
    pairs = read_trials(*trials())
    assert pairs.same.tolist() == [True, False]
    assert (pairs.left.tolist(), pairs.right.tolist()) == ([0, 0], [1, 2])
    assert pairs.sides() == (["id10270", "id10270"], ["id10270", "id10271"])
    assert pairs.folds is None
    assert pairs.items.fetch(2).endswith("wav/id10271/c/1.wav")


def test_paths_without_a_speaker_name_nobody(trials):
    path, folder = trials("1 one.wav two.wav\n")
    for name in ("one.wav", "two.wav"):
        (folder / name).write_bytes(b"")
    assert read_trials(path, folder).sides() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "a list of pairs is expected, got an empty file"),
        (TRIALS + "2 a.wav b.wav", "line 3: 1 FIRST SECOND or 0 FIRST SECOND is expected, got '2 "),
        (TRIALS + "\n1 a.wav", "line 4: 1 FIRST SECOND or 0 FIRST SECOND is expected, got '1 a.w"),
        (TRIALS.replace("0 id", "1 id"), "line 2: .* got 1 for id10270 and id10271"),
        (TRIALS.replace("c/1", "c/2"), "1 of 3 files .* the first is .*c/2.wav' in line 2; the"),
    ],
)
def test_a_malformed_trial_is_named(trials, text, message):
    with pytest.raises(DataError, match=message):
        read_trials(*trials(text))
