"""Checkpoints: one step, a checksum, the one before kept."""

import errno

import pytest
import torch

from tammes.lab.records import atomic_io
from tammes.lab.training.checkpoints import KEPT, Checkpoints


def state(value):
    return {"model": {"weight": torch.full((3,), float(value))}, "step": value, "history": "[]"}


@pytest.fixture
def said():
    return []


@pytest.fixture
def checkpoints(tmp_path, said):
    return Checkpoints(tmp_path / "checkpoints", said.append)


def files(checkpoints, pattern="*"):
    return sorted(checkpoints.folder.glob(pattern))


def test_nothing_saved_is_nothing_to_go_on_from(checkpoints):
    assert checkpoints.load_last() is None


def test_the_newest_state_comes_back(checkpoints):
    for step in (9, 10, 100):
        checkpoints.save("last", step, state(step))
    loaded = checkpoints.load_last()
    assert loaded["step"] == 100
    assert torch.equal(loaded["model"]["weight"], torch.full((3,), 100.0))


def test_as_many_are_kept_as_promised_and_the_newest(checkpoints):
    for step in range(5):
        checkpoints.save("last", step, state(step))
    assert [int(path.name.split("-")[1]) for path in files(checkpoints)] == [3, 4]
    assert len(files(checkpoints)) == KEPT


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(checkpoints, said, damage):
    checkpoints.save("last", 1, state(1))
    checkpoints.save("last", 2, state(2))
    newest = files(checkpoints)[-1]
    data = bytearray(newest.read_bytes())
    if damage == "truncate":
        data = data[:-7]
    elif damage == "flip":
        data[len(data) // 2] ^= 1
    else:
        data = b""
    newest.write_bytes(data)
    assert checkpoints.load_last()["step"] == 1
    assert len(said) == 1
    assert newest.name in said[0]
    assert "checksum" in said[0]


def test_a_damaged_checkpoint_is_put_aside_so_that_it_never_counts_again(checkpoints, said):
    checkpoints.save("last", 1, state(1))
    checkpoints.save("last", 2, state(2))
    files(checkpoints)[-1].write_bytes(b"x")
    checkpoints.load_last()
    checkpoints.save("last", 2, state(2))
    assert checkpoints.load_last()["step"] == 2
    assert len(said) == 1


def test_all_damaged_is_nothing_to_go_on_from(checkpoints, said):
    checkpoints.save("last", 1, state(1))
    files(checkpoints)[0].write_bytes(b"")
    assert checkpoints.load_last() is None
    assert len(said) == 1


def test_what_a_killed_process_had_begun_is_cleared_away(checkpoints):
    checkpoints.save("last", 1, state(1))
    half = checkpoints.folder / ".last-000000002-0123456789abcdef.pt.deadbeef"
    half.write_bytes(b"half")
    checkpoints.load_last()
    assert not half.exists()


def test_a_full_disk_leaves_the_old_checkpoint_in_place(checkpoints, monkeypatch):
    checkpoints.save("last", 1, state(1))

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_io.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save("last", 2, state(2))
    monkeypatch.undo()
    assert len(list(checkpoints.folder.iterdir())) == 1
    assert checkpoints.load_last()["step"] == 1


def test_the_best_is_found_by_its_step_and_the_others_can_be_dropped(checkpoints):
    checkpoints.save("best", 1, state(1))
    checkpoints.save("best", 2, state(2))
    assert checkpoints.load_best(1)["step"] == 1
    checkpoints.keep_best(2)
    assert checkpoints.load_best(2)["step"] == 2
    assert checkpoints.load_best(1) is None


def test_a_damaged_best_is_none(checkpoints):
    checkpoints.save("best", 1, state(1))
    files(checkpoints)[0].write_bytes(b"x")
    assert checkpoints.load_best(1) is None


def test_a_checkpoint_holds_no_code(checkpoints, monkeypatch):
    checkpoints.save("last", 1, state(1))
    seen = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: seen.append(k) or load(*a, **k))
    checkpoints.load_last()
    assert [options["weights_only"] for options in seen] == [True]
