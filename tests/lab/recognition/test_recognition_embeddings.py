"""Embeddings with identities are read from files and runs, and nothing is dropped silently."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from messages import pattern
from safetensors.torch import save_file

from tammes.lab.measure.formats import FileError
from tammes.lab.recognition.embeddings import read_embeddings

FEATURES = np.arange(12.0, dtype=np.float32).reshape(6, 2) + 1
NAMES = ["ann", "ann", "bob", "bob", "eve", "eve"]


def npz(path, **columns):
    np.savez(path, **{"embeddings": FEATURES, "identities": np.array(NAMES), **columns})
    return path


def test_the_formats_hold_the_same(tmp_path):
    first = read_embeddings([npz(tmp_path / "a.npz", camera=np.arange(6) % 2)])
    table = pyarrow.table(
        {"embedding": FEATURES.tolist(), "identity": NAMES, "camera": np.arange(6) % 2}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    second = read_embeddings([tmp_path / "a.parquet"])
    assert first.identities == second.identities == NAMES
    assert first.cameras == second.cameras == [0, 1, 0, 1, 0, 1]
    assert torch.equal(first.features, second.features.float())
    numbers = torch.tensor([3, 3, 4, 4, 5, 5])
    tensors = {"features": torch.from_numpy(FEATURES), "ids": numbers, "camids": numbers + 1}
    save_file(tensors, tmp_path / "a.safetensors")
    third = read_embeddings([tmp_path / "a.safetensors"])
    assert (third.identities, third.cameras) == (numbers.tolist(), (numbers + 1).tolist())


def test_files_are_joined_and_one_may_hold_a_single_column(tmp_path):
    np.save(tmp_path / "embeddings.npy", FEATURES)
    np.save(tmp_path / "identities.npy", np.array(NAMES))
    found = read_embeddings([tmp_path / "embeddings.npy", tmp_path / "identities.npy"])
    assert found.identities == NAMES
    twice = read_embeddings([npz(tmp_path / "a.npz"), npz(tmp_path / "b.npz")])
    assert len(twice) == 12


def test_labels_take_the_class_names_of_the_file(tmp_path):
    columns = {"embeddings": FEATURES, "labels": np.array([0, 0, 1, 1, 2, 2])}
    np.savez(tmp_path / "a.npz", **columns, class_names=np.array(["ann", "bob", "eve"]))
    assert read_embeddings([tmp_path / "a.npz"]).identities == NAMES


def test_a_split_column_tells_queries_from_the_gallery_and_counts_the_others(tmp_path):
    split = np.array(["query", "gallery", "query", "gallery", "train", "gallery"])
    found = read_embeddings([npz(tmp_path / "a.npz", split=split)])
    assert found.query.tolist() == [True, False, True, False, False]
    assert found.identities == ["ann", "ann", "bob", "bob", "eve"]
    assert "1 rows of split train are left out" in found.notes
    query, gallery = found.sides()
    assert (query.tolist(), gallery.tolist()) == ([0, 2], [1, 3, 4])


def test_a_partition_is_selected_or_all_rows_are_used_with_a_note(tmp_path):
    split = np.array(["train"] * 4 + ["test"] * 2)
    file = npz(tmp_path / "a.npz", split=split)
    assert read_embeddings([file], partition="test").identities == ["eve", "eve"]
    everything = read_embeddings([file])
    assert len(everything) == 6
    assert "all rows are used, of split test, train; --partition" in everything.notes[0]


def test_a_gallery_of_another_file_is_joined_to_the_queries(tmp_path):
    split = np.array(["query"] * 6)
    query = npz(tmp_path / "q.npz", split=split)
    found = read_embeddings([query], gallery=[npz(tmp_path / "g.npz")])
    assert found.query.tolist() == [True] * 6 + [False] * 6
    assert found.title == f"{query} in {tmp_path / 'g.npz'}"


def test_junk_is_given_by_a_column_or_by_the_identity_of_market(tmp_path):
    given = read_embeddings([npz(tmp_path / "a.npz", junk=np.array([0, 1, 0, 0, 0, 0]))])
    assert given.junk.tolist() == [False, True, False, False, False, False]
    market = npz(tmp_path / "b.npz", identities=np.array([2, 2, -1, 0, 0, -1]))
    found = read_embeddings([market])
    assert found.junk.tolist() == [False, False, True, False, False, True]
    assert "2 examples of identity -1 or -100 are junk, as in Market-1501" in found.notes
    # Junk is not searched for.
    assert found.sides()[0].tolist() == [0, 1, 3, 4]


def test_named_keys_come_first(tmp_path):
    file = npz(tmp_path / "a.npz", pose=np.array([5, 5, 6, 6, 7, 7]))
    assert read_embeddings([file], keys={"identities": "pose"}).identities == [5, 5, 6, 6, 7, 7]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"embeddings": np.full((6, 2), np.nan, dtype=np.float32)},
            {},
            "... hold NaN or infinity in 6 of 6 rows...",
        ),
        ({"embeddings": FEATURES[:0]}, {}, "... matrix of rows, got shape (0, 2)..."),
        ({"identities": np.array(NAMES[:5])}, {}, "...identities of 5 examples ... 6 embeddings"),
        ({"identities": np.arange(6) + 0.5}, {}, "... whole numbers or texts"),
        ({"cameras": np.zeros((6, 2))}, {}, "...one value for each example, got shape (6, 2)"),
        ({"junk": np.arange(6)}, {}, "...expected to be 0 and 1, got other numbers"),
        ({"paths": np.arange(6)}, {}, "...paths ('paths') are expected to be texts..."),
        ({"split": np.array(["query"] * 6)}, {}, "...6 rows of query and none of gallery..."),
        ({}, {"partition": "test"}, "...a column split is expected with --partition..."),
        ({}, {"keys": {"identities": "identitys"}}, "...no 'identitys'...did you mean identities?"),
        ({}, {"images": "."}, "...a column of paths is expected with --images..."),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_sentence(tmp_path, columns, options, message):
    file = npz(tmp_path / "a.npz", **columns)
    with pytest.raises(FileError, match=pattern(message)):
        read_embeddings([file], **options)


def test_files_that_do_not_go_together_are_refused(tmp_path):
    query = npz(tmp_path / "q.npz")
    wide = npz(tmp_path / "w.npz", embeddings=np.ones((6, 3), dtype=np.float32))
    with pytest.raises(FileError, match=r"gallery of 3 dimensions .* queries of 2 .* one network"):
        read_embeddings([query], gallery=[wide])
    with pytest.raises(FileError, match=r"of one dimension are expected, got \[2, 3\]"):
        read_embeddings([query, wide])
    numbered = npz(tmp_path / "n.npz", identities=np.arange(6))
    with pytest.raises(FileError, match="identities are expected to be texts or numbers in both"):
        read_embeddings([query], gallery=[numbered])
    with pytest.raises(FileError, match="some identities are texts and some are numbers"):
        read_embeddings([query, numbered])
    seen = npz(tmp_path / "c.npz", cameras=np.arange(6))
    with pytest.raises(FileError, match=r"cameras are expected .* got none; --ignore-cameras"):
        read_embeddings([query], gallery=[seen])
    np.savez(tmp_path / "e.npz", embeddings=FEATURES)
    with pytest.raises(FileError, match=r"an identity of each embedding is expected, got none; "):
        read_embeddings([tmp_path / "e.npz"])
    np.savez(tmp_path / "x.npz", x=FEATURES)
    with pytest.raises(FileError, match="no embeddings or identities in it, only 'x'; name the"):
        read_embeddings([tmp_path / "x.npz"])
