"""A run as a folder: what is read, and what is said of damage."""

import json

import pytest
import torch

from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import (
    RecordError,
    Run,
    find_runs,
    write_json,
    write_lines,
    write_tensors,
)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "one"
    write_json(folder / "config.json", Config(loss="cosface()").to_dict())
    write_lines(folder / "metrics.jsonl", [{"epoch": 1}, {"epoch": 2}])
    write_tensors(folder / "prototypes.safetensors", {"prototypes": torch.eye(3)})
    return Run(folder)


def test_a_run_reads_what_was_written(run):
    assert run.config == Config(loss="cosface()")
    assert [row["epoch"] for row in run.metrics] == [1, 2]
    assert torch.equal(run.tensors("prototypes")["prototypes"], torch.eye(3))
    assert run.timing == []


def test_the_status_follows_from_the_files(run):
    assert run.status == "unfinished"
    write_json(run.folder / "failure.json", {"kind": "error", "message": "no"})
    assert run.status == "failed"
    write_json(run.folder / "final.json", {"epoch": 2})
    assert run.status == "done"


def test_runs_are_found_in_folders_of_runs_once_each(run, tmp_path):
    other = tmp_path / "runs" / "two"
    write_json(other / "config.json", Config().to_dict())
    assert [found.folder.name for found in find_runs([tmp_path, run.folder])] == ["one", "two"]


def test_a_page_beside_the_runs_is_none(run):
    page = run.folder.parent / "report.html"
    page.touch()
    assert [found.folder for found in find_runs([run.folder, page])] == [run.folder]
    with pytest.raises(RecordError, match="there is no run in it"):
        find_runs([page])
    with pytest.raises(RecordError, match="there is no run in it"):
        find_runs([page, page])


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("nowhere", "there is no such folder"), ("empty", "there is no run in it")],
)
def test_where_there_is_no_run_it_is_said(tmp_path, path, sentence):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match=sentence):
        find_runs([tmp_path / path])


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("config.json", b"{", lambda run: run.config),
        ("config.json", b'{"epochz": 1}', lambda run: run.config),
        ("config.json", b"[]", lambda run: run.config),
        ("metrics.jsonl", b'{"epoch": 1}\n{"ep', lambda run: run.metrics),
        ("prototypes.safetensors", b"\x00" * 20, lambda run: run.tensors("prototypes")),
    ],
)
def test_a_damaged_file_is_named(run, name, content, read):
    (run.folder / name).write_bytes(content)
    with pytest.raises(RecordError, match=name):
        read(Run(run.folder))


def test_a_missing_file_is_named(run):
    with pytest.raises(RecordError, match=r"the run has no embeddings\.safetensors"):
        run.tensors("embeddings")
    with pytest.raises(RecordError, match=r"not a run, it has no final\.json"):
        _ = run.final


def test_numbers_that_json_does_not_know_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_names_keep_their_letters(tmp_path):
    write_json(tmp_path / "x.json", {"classes": ["é", "<script>"]})
    assert "é" in (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "x.json").read_bytes())["classes"] == ["é", "<script>"]


def test_a_name_that_is_no_text_survives(tmp_path):
    write_json(tmp_path / "x.json", {"classes": ["caf\udce9"]})
    assert json.loads((tmp_path / "x.json").read_bytes())["classes"] == ["caf\udce9"]
