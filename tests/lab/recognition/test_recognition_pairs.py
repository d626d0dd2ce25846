"""Pairs to verify: listed ones name examples, all pairs are counted and sampled."""

import itertools

import pytest
import torch

from tammes.lab.measure.formats import FileError
from tammes.lab.recognition.embeddings import IdentityEmbeddings
from tammes.lab.recognition.pair_lists import read_pairs


def examples(identities, *, cameras=None, query=None, junk=None, names=None):
    count = len(identities)
    generator = torch.Generator().manual_seed(0)
    return IdentityEmbeddings(
        "file",
        torch.randn(count, 4, generator=generator),
        identities,
        cameras,
        torch.zeros(count, dtype=torch.bool) if junk is None else torch.tensor(junk),
        None if query is None else torch.tensor(query),
        names or [f"row {row}" for row in range(count)],
        names is not None,
    )


def listed(pairs, same):
    return sorted(map(tuple, pairs.rows[pairs.is_same == same].tolist()))


def test_all_pairs_are_those_of_a_double_loop():
    people = list("aabbbcd")
    found = examples(people).sample_pairs(100, 0)
    expected = list(itertools.combinations(range(7), 2))
    assert listed(found, True) == [(i, j) for i, j in expected if people[i] == people[j]]
    assert listed(found, False) == [(i, j) for i, j in expected if people[i] != people[j]]
    assert (found.same, found.different, found.one_camera) == (4, 17, 0)


def test_pairs_of_sides_cameras_and_junk_are_those_of_a_double_loop():
    people, cameras = list("aaabbbcd"), [1, 1, 2, 1, 2, 2, 1, 1]
    query = [True, False, True, False, True, False, True, False]
    junk = [False] * 5 + [True] + [False] * 2
    given = examples(people, cameras=cameras, query=query, junk=junk)
    found = given.sample_pairs(100, 0)
    pairs = [
        (i, j)
        for i, j in itertools.product(range(8), repeat=2)
        if query[i] and not query[j] and not junk[i] and not junk[j]
    ]
    alike = [(i, j) for i, j in pairs if people[i] == people[j]]
    assert listed(found, True) == [(i, j) for i, j in alike if cameras[i] != cameras[j]]
    assert listed(found, False) == [(i, j) for i, j in pairs if people[i] != people[j]]
    assert found.one_camera == len(alike) - found.same == 1


@pytest.mark.parametrize("query", [None, [True] * 40 + [False] * 60])
@pytest.mark.parametrize("limit", [60, 1500])
def test_a_sample_has_no_pair_twice_and_knows_how_many_there_are(query, limit):
    people = [place % 10 for place in range(100)]
    given = examples(people, query=query)
    found, every = given.sample_pairs(limit, 3), given.sample_pairs(10**6, 3)
    assert (found.same, found.different) == (every.same, every.different)
    for same, total in ((True, every.same), (False, every.different)):
        pairs = listed(found, same)
        assert len(pairs) == len(set(pairs)) == min(limit, total)
        assert set(pairs) <= set(listed(every, same))
    assert listed(given.sample_pairs(limit, 3), False) == listed(found, False)
    assert limit > 1000 or listed(given.sample_pairs(limit, 4), False) != listed(found, False)


def test_a_list_names_paths_with_and_without_folder_and_suffix(tmp_path):
    names = ["set/ann/ann_0001.jpg", "set/ann/ann_0002.jpg", "set/bob/bob_0001.jpg"]
    given = examples(["ann", "ann", "bob"], names=names)
    trials = tmp_path / "trials.txt"
    trials.write_text("1 set/ann/ann_0001.jpg ann/ann_0002\n0 set/ann/ann_0001 bob/bob_0001\n")
    found = read_pairs(str(trials), given)
    assert found.rows.tolist() == [[0, 1], [0, 2]]
    assert found.same.tolist() == [True, False]
    assert found.folds is None
    lfw = tmp_path / "pairs.txt"
    lfw.write_text("1\nann 1 2\nann 2 bob 1\n")
    found = read_pairs(str(lfw), given)
    assert found.rows.tolist() == [[0, 1], [1, 2]]
    assert found.folds.tolist() == [0, 0]


def test_rows_are_named_by_number_where_there_are_no_paths(tmp_path):
    (tmp_path / "trials.txt").write_text("1 0 1\n0 0 2\n")
    found = read_pairs(str(tmp_path / "trials.txt"), examples(list("aab")))
    assert found.rows[:, 1].tolist() == [1, 2]


def test_names_without_an_embedding_are_counted_and_the_first_is_named(tmp_path):
    trials = tmp_path / "trials.txt"
    trials.write_text("1 a.jpg b.jpg\n0 a.jpg x.jpg\n0 y.jpg x.jpg\n")
    given = examples(list("aab"), names=["a.jpg", "b.jpg", "c.jpg"])
    message = r"2 of 4 images that it names have no embedding \(named 3 times of 6\), the first is "
    with pytest.raises(FileError, match=message + r"'x.jpg' in line 2"):
        read_pairs(str(trials), given)
    with pytest.raises(
        FileError, match=r"'a.jpg' in line 1; without a column of paths, pairs name"
    ):
        read_pairs(str(trials), examples(list("aab")))


def test_a_short_name_of_two_examples_is_not_guessed(tmp_path):
    (tmp_path / "trials.txt").write_text("1 ann/1 one/ann/1.jpg\n")
    given = examples(["ann", "ann"], names=["one/ann/1.jpg", "two/ann/1.jpg"])
    with pytest.raises(FileError, match="'ann/1' in line 1"):
        read_pairs(str(tmp_path / "trials.txt"), given)
