"""Folders of Market-1501 and DukeMTMC: identities and cameras of file names."""

import re

import pytest
import torch

from tammes.lab.data import DataError
from tammes.lab.data.identities import read_dukemtmc, read_market1501
from tammes.metrics.functional import retrieval

MARKET = {
    "bounding_box_train": ["0002_c1s1_000451_03.jpg", "0002_c2s1_000451_03.jpg"],
    "query": ["1501_c6s4_001902_00.jpg", "0003_c1s6_015971_00.jpg"],
    "bounding_box_test": [
        "-1_c1s1_000401_03.jpg",
        "0000_c2s1_000476_06.jpg",
        "0003_c1s6_015996_02.jpg",
        "0003_c4s6_015641_03.jpg",
        "1501_c5s3_065187_01.jpg",
        "Thumbs.db",
        "._0003_c4s6_015641_03.jpg",
    ],
}


@pytest.fixture
def make_folders(tmp_path):
    """Writes FOLDER/NAME for given names; the files have no pixels, as readers do not look."""

    def make(layout):
        for folder, names in layout.items():
            (tmp_path / folder).mkdir()
            for name in names:
                (tmp_path / folder / name).write_bytes(b"")
        return tmp_path

    return make


def test_market_has_identities_cameras_and_junk(make_folders):
    root = make_folders(MARKET)
    gallery = read_market1501(root, "gallery")
    assert gallery.identities == [-1, 0, 3, 3, 1501]
    assert gallery.cameras == [1, 2, 1, 4, 5]
    assert gallery.junk.tolist() == [True, False, False, False, False]
    assert gallery.items.fetch(4) == str(root / "bounding_box_test" / "1501_c5s3_065187_01.jpg")
    assert read_market1501(root, "query").identities == [3, 1501]
    assert read_market1501(str(root), "train").cameras == [1, 2]


def test_retrieval_takes_what_is_read(make_folders):
    root = make_folders(MARKET)
    query, gallery = (read_market1501(root, name) for name in ("query", "gallery"))
    # Query 3 of camera 1: junk and its own camera are ignored, the distractor is ahead of the
    # match. Query 1501: the match is first.
    similarity = torch.tensor([[0.9, 0.8, 0.99, 0.7, 0.1], [0.9, 0.2, 0.1, 0.1, 0.5]])
    result = retrieval(
        torch.ones(len(query), 2),
        torch.ones(len(gallery), 2),
        query.identities,
        gallery.identities,
        query.cameras,
        gallery.cameras,
        gallery.junk,
        similarity,
    )
    assert result.per_query.first_rank.tolist() == [2, 1]
    assert result.junk == 1
    assert float(result.mean_average_precision) == 0.75


def test_duke_has_identities_and_cameras(make_folders):
    root = make_folders({"query": ["0005_c2_f0046985.jpg", "7140_c8_f0186440.jpg"]})
    query = read_dukemtmc(root, "query")
    assert (query.identities, query.cameras) == ([5, 7140], [2, 8])
    assert query.junk.tolist() == [False, False]


@pytest.mark.parametrize("read", [read_market1501, read_dukemtmc])
def test_a_file_name_that_does_not_parse_is_named(make_folders, read):
    root = make_folders({"query": ["0005_c2_f0046985.jpg", "0002_c1s1_000451_03.jpg", "cat.jpg"]})
    example, first, count = {
        read_market1501: ("0002_c1s1_000451_03.jpg", "0005_c2_f0046985.jpg", 2),
        read_dukemtmc: ("0001_c2_f0046182.jpg", "0002_c1s1_000451_03.jpg", 2),
    }[read]
    message = (
        f"{root / 'query'}: file names such as {example} are expected, got {count} others of 3, "
        f"the first is {first!r}"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        read(root, "query")


def test_missing_folders_and_partitions_are_named(make_folders, tmp_path):
    root = make_folders({"query": [], "Market-1501-v15.09.15": []})
    for folder, partition, message in [
        (tmp_path / "no", "query", "no: a folder of .* is expected, got no such folder"),
        (root, "train", "'bounding_box_train' is expected in it, got 'Market-1501-v15.09.15', 'q"),
        (root, "query", "query: there is no image in it"),
    ]:
        with pytest.raises(DataError, match=message):
            read_market1501(folder, partition)
    with pytest.raises(ValueError, match="train, query or gallery, got 'galery'; did you mean gal"):
        read_market1501(root, "galery")
