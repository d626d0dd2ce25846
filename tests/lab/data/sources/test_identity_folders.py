"""Folders of Market-1501, DukeMTMC and LFW as sources of a run, with their protocols."""

import pytest
import torch
from recipe_cells import write_boxes, write_faces

from tammes.lab.config.schema import Config
from tammes.lab.data import DataError, load
from tammes.lab.data.identities.identity_protocol import IdentityProtocol
from tammes.lab.data.sources.identity_folders import partitions, read_protocol
from tammes.lab.data.sources.loading import identity_protocol
from tammes.lab.training.datasets import prepare_data

FORMS = {
    "market1501": "{person:04d}_c{camera}s1_000451_03.png",
    "dukemtmc": "{person:04d}_c{camera}_f0046182.png",
}


@pytest.fixture(params=FORMS)
def boxes(request, tmp_path):
    write_boxes(tmp_path / request.param, FORMS[request.param])
    return tmp_path / request.param


def test_boxes_have_persons_to_train_on_and_others(boxes):
    train, novel = (partitions(boxes)[name]() for name in ("train", "novel"))
    assert train.names == tuple(map(str, range(1, 19)))
    assert novel.names == tuple(map(str, range(30, 36)))
    assert train.labels.bincount().tolist() == [3] * 18
    # A query and three boxes of the gallery.
    assert novel.labels.bincount().tolist() == [4] * 6
    assert "query" in novel.items.fetch(0)
    protocol = read_protocol(boxes)
    assert protocol.query.tolist() == [True] * 6 + [False] * 18
    assert protocol.cameras.tolist() == [1] * 6 + [1, 2, 3] * 6


def test_junk_of_market_is_left_out_and_distractors_stay(tmp_path):
    write_boxes(tmp_path, FORMS["market1501"])
    before = len(read_protocol(tmp_path).query)
    for name in ("-1_c1s1_000451_03.png", "0000_c1s1_000451_03.png"):
        source = tmp_path / "query" / "0030_c1s1_000451_03.png"
        (tmp_path / "bounding_box_test" / name).write_bytes(source.read_bytes())
    novel = partitions(tmp_path)["novel"]()
    assert novel.names[:2] == ("0", "30")
    assert len(novel.labels) == len(read_protocol(tmp_path).query) == before + 1


def test_a_run_on_boxes_compares_queries_with_the_gallery(boxes, monkeypatch):
    monkeypatch.setenv("TAMMES_DATA", str(boxes.parent))
    config = Config(data=boxes.name, identities=True, image_size=24, image_width=12)
    training, _, testing = prepare_data(config, list)
    assert training.shape == testing.shape == (3, 24, 12)
    protocol = identity_protocol(config.data, testing)
    assert int(protocol.query.sum()) == 6
    limited = prepare_data(config.replace(limit=12), list)[2]
    fewer = identity_protocol(config.data, limited)
    assert len(fewer.query) == len(limited) == 12
    assert fewer.cameras.equal(protocol.cameras[limited.index])


def test_images_of_the_pairs_of_lfw_are_the_novel_ones(tmp_path, said):
    write_faces(tmp_path)
    novel = load(tmp_path / "lfw", "test", whole=True, novel=True, report=said.append)
    assert novel.classes == tuple(f"Person_{number}" for number in range(8))
    protocol = identity_protocol(str(tmp_path / "lfw"), novel)
    assert protocol.pairs.shape == (16, 2)
    same = novel.labels[protocol.pairs[:, 0]] == novel.labels[protocol.pairs[:, 1]]
    assert same.tolist() == ([True] * 4 + [False] * 4) * 2
    assert protocol.folds.tolist() == [0] * 8 + [1] * 8
    # As classes, the folder has all of its images.
    assert len(load(tmp_path / "lfw", "train", whole=True, report=said.append)) == 24


def test_pairs_of_images_that_are_left_out_are_dropped():
    protocol = IdentityProtocol(
        pairs=torch.tensor([[0, 1], [2, 3], [1, 3]]), folds=torch.tensor([0, 1, 2])
    )
    fewer = protocol.select(torch.tensor([3, 1, 0]))
    assert fewer.pairs.tolist() == [[2, 1], [1, 0]]
    assert fewer.folds.tolist() == [0, 2]


def test_a_folder_without_such_a_layout_has_no_protocol(tmp_path):
    assert partitions(tmp_path) is None
    protocol = read_protocol(tmp_path)
    assert (protocol.cameras, protocol.query, protocol.pairs) == (None, None, None)


def test_names_that_are_no_boxes_are_named(tmp_path):
    write_boxes(tmp_path, FORMS["market1501"])
    (tmp_path / "bounding_box_train" / "holiday.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"file names such as .* are expected"):
        partitions(tmp_path)["train"]()


def test_a_width_alone_is_the_height_too(boxes):
    config = Config(data=str(boxes), identities=True, image_width=12)
    assert prepare_data(config, list)[0].shape == (3, 12, 12)
