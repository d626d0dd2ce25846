"""Files that are there as a whole, and folders that one process has to itself."""

import pytest
from lab_runs import held_by_another_process

from tammes.lab.records.atomic_io import clear_leftovers, locked, write_atomically


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no"):
        write_atomically(path, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"old"


def test_folders_made_in_vain_are_taken_away(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no"):
        write_atomically(tmp_path / "a" / "b" / "x", b"new")
    assert list(tmp_path.iterdir()) == []


def test_only_one_process_has_a_folder(tmp_path):
    folder = tmp_path / "run"
    with (
        held_by_another_process(folder),
        pytest.raises(ValueError, match=r"run: taken$"),
        locked(folder, "taken"),
    ):
        pass
    # A process that was killed holds nothing.
    with locked(folder, "taken"):
        pass


def test_a_folder_that_nothing_came_of_is_taken_away(tmp_path):
    with locked(tmp_path / "a" / "run", "taken"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_or_was_written_to_stays(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    with locked(there, "taken"):
        pass
    with locked(tmp_path / "new", "taken"):
        (tmp_path / "new" / "x").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "there"]


def test_what_killed_processes_had_begun_is_taken_away_and_nothing_else(tmp_path):
    for name in (".metrics.jsonl.deadbeef", ".lock", "metrics.jsonl", ".hidden"):
        (tmp_path / name).touch()
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "metrics.jsonl", ".hidden"}
