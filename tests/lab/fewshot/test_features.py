"""Which features episodes are drawn from: of a run's model, and from files."""

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from tammes.lab.config.schema import Config
from tammes.lab.data import load
from tammes.lab.fewshot import class_lists
from tammes.lab.fewshot.features import from_file, from_run
from tammes.lab.records.run_folder import Run
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.loop import train
from tammes.lab.training.model import load_model

PARTS = {"base": ["1", "3", "5", "7"], "validation": ["0", "2", "4"], "novel": ["6", "8", "9"]}


def quietly(text):
    """Nothing is said."""


def tiny(folder, **settings):
    config = Config(backbone="mnist_cnn(width=0.125)", augment="none", epochs=1, **settings)
    return train(config, folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Lists of digits, and two runs on the base ones: one of them on the test images too."""
    place = tmp_path_factory.mktemp("features")
    lists = place / "lists.json"
    lists.write_text(json.dumps(PARTS))
    tiny(place / "run", classes=str(lists), limit=300)
    tiny(place / "whole", classes=str(lists), limit=300, whole=True)
    return place


@pytest.fixture
def run(place, tmp_path):
    """A copy of the run with nothing kept in it."""
    shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("fewshot*"))
    return Run(tmp_path / "run")


def of(run, place, part="novel", **more):
    return from_run(run.folder, classes=f"{place}/lists.json:{part}", report=quietly, **more)


# ------------------------------------------------------------------------------------- of a run


def test_base_classes_are_those_of_the_images_a_run_held_out(run, place):
    found, tested = of(run, place, "base"), run.tensors("embeddings")
    assert found.classes == tuple(PARTS["base"])
    assert found.labels.equal(tested["labels"])
    assert_close(found.features, tested["features"], atol=1e-5, rtol=1e-5)


def test_a_run_on_all_images_has_none_of_base_classes_left(place):
    with pytest.raises(ValueError, match="expected in images held out of training, got a run with"):
        of(Run(place / "whole"), place, "base")


def test_images_of_base_classes_from_elsewhere_are_refused(run, place):
    with pytest.raises(ValueError, match="in the images that it held out of digits, got mnist"):
        of(run, place, "base", source="mnist")
    assert len(of(run, place, "base", source="digits").labels) == run.data["test"]


def test_at_most_so_many_images_of_each_class_are_taken(run, place):
    everything, some = of(run, place), of(run, place, images=7)
    assert some.labels.bincount().tolist() == [7, 7, 7]
    for label in range(3):
        first = everything.features[everything.labels == label][:7]
        assert_close(some.features[some.labels == label], first, atol=1e-5, rtol=1e-5)


def test_a_mean_is_of_all_images_it_was_trained_on_however_few_are_taken(run, place):
    training = prepare_data(run.config, list)[0]
    with torch.no_grad():
        expected = load_model(run).features(training.pixels).mean(0)
    found = of(run, place, images=7, base=True)
    assert_close(found.base_mean, expected, atol=1e-5, rtol=1e-5)
    assert of(run, place).base_mean is None


def test_prototypes_are_those_of_the_head(run, place):
    found = of(run, place, images=2, prototypes=True)
    assert found.prototypes.equal(load_model(run).criterion.head.weight)
    assert of(run, place, images=2).prototypes is None


def test_prototypes_of_a_loss_that_takes_counts_are_those_of_the_head(run, place):
    about = json.loads((run.folder / "config.json").read_bytes())
    (run.folder / "config.json").write_text(json.dumps({**about, "loss": "logit_adjustment()"}))
    assert of(Run(run.folder), place, images=2, prototypes=True).prototypes is not None


def test_prototypes_that_no_loss_has_trained_are_refused(run, place):
    about = json.loads((run.folder / "config.json").read_bytes())
    (run.folder / "config.json").write_text(json.dumps({**about, "loss": "nca()"}))
    with pytest.raises(
        ValueError, match=r"got the loss nca\(\), which has no part that classifies"
    ):
        of(run, place, images=2, prototypes=True)


def test_a_part_may_be_named_or_given(run, place):
    chosen = class_lists.parse(f"{place}/lists.json:validation")
    given = from_run(run.folder, classes=chosen, report=quietly)
    assert given.classes == tuple(PARTS["validation"])
    assert given.features.equal(of(run, place, "validation").features)


def test_features_of_other_images_are_not_taken_for_these(run, place):
    # As many of them, of the same model: what is kept is found by the images.
    novel, other = (of(run, place, part, images=20).features for part in ("novel", "validation"))
    assert novel.shape == other.shape
    assert not novel.equal(other)
    assert len(list(run.folder.glob("fewshot-*"))) == 2


def test_features_of_fewer_images_are_not_taken_for_all(run, place):
    found = of(run, place).features
    (kept,) = run.folder.glob("fewshot-*")
    save_file({"features": found[:-1].clone()}, kept)
    assert of(run, place).features.equal(found)


def test_novel_classes_of_lists_that_were_trained_on_are_refused(run, tmp_path):
    mixed = {"base": PARTS["novel"], "novel": ["0", "5", "2"]}
    (tmp_path / "mixed.json").write_text(json.dumps(mixed))
    with pytest.raises(ValueError, match="got 1 of 3 that are both, such as '5'"):
        from_run(run.folder, classes=f"{tmp_path}/mixed.json", report=quietly)


@pytest.mark.parametrize(
    ("classes", "source", "where"),
    [("lists.json", None, "digits"), ("", None, "elsewhere"), ("lists.json", "given", "given")],
)
def test_images_come_from_where_those_of_the_run_or_of_the_lists_are(
    run, place, tmp_path, monkeypatch, classes, source, where
):
    (tmp_path / "lists.json").write_text(json.dumps({**PARTS, "source": "elsewhere"}))
    config = json.loads((run.folder / "config.json").read_text())
    config["classes"] = str(tmp_path / classes) if classes else ""
    (run.folder / "config.json").write_text(json.dumps(config))
    asked, load_classes = [], class_lists.load_classes

    def loaded(source, *given, **more):
        asked.append(source)
        return load_classes("digits", *given, **more)

    monkeypatch.setattr(class_lists, "load_classes", loaded)
    chosen = f"{tmp_path}/lists.json:novel"
    from_run(run.folder, source=source, classes=chosen, images=2, report=quietly)
    assert asked == [where]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Two tables of digits with the labels 0 to 4 in both, and no names; one with names."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from PIL import Image

    place, digits = tmp_path_factory.mktemp("tables"), load("digits", "train")
    for name, first, names in (
        ("base", 0, range(5)),
        ("novel", 5, range(5)),
        ("named", 5, "abcde"),
    ):
        rows = {"image": [], "label": []}
        for label in range(5):
            for position in (digits.labels == first + label).nonzero()[:20, 0].tolist():
                file = io.BytesIO()
                Image.fromarray(digits.read(position)[0].numpy()).save(file, "PNG")
                rows["image"].append({"bytes": file.getvalue(), "path": None})
                rows["label"].append(names[label])
        parquet.write_table(pyarrow.table(rows), place / f"{name}.parquet")
    tiny(place / "run", data=str(place / "base.parquet"))
    return place


def test_numbers_of_another_table_are_no_names(tables):
    told = []
    found = from_run(tables / "run", source=str(tables / "novel.parquet"), report=told.append)
    assert found.classes == tuple("01234")
    assert any("its classes are numbers, assumed to differ from those of" in text for text in told)


def test_numbers_of_the_same_table_are_the_same_classes(tables):
    with pytest.raises(ValueError, match="got 5 of 5 that are both, such as '0'"):
        from_run(tables / "run", source=str(tables / "base.parquet"), report=quietly)


def test_names_of_another_table_are_names(tables, tmp_path):
    shutil.copytree(tables / "run", tmp_path / "run")
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    (tmp_path / "run" / "data.json").write_text(json.dumps({**data, "classes": [*"uvwxa"]}))
    with pytest.raises(ValueError, match="got 1 of 5 that are both, such as 'a'"):
        from_run(tmp_path / "run", source=str(tables / "named.parquet"), report=quietly)


# ------------------------------------------------------------------------------------ of a file


def named(path, names, *, seed=0):
    """A file of features whose classes have names; features and labels."""
    import numpy as np

    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(names)).repeat(4)
    features = torch.randn(len(labels), 6, generator=generator)
    np.savez(path, features=features, labels=labels, class_names=np.array(list(names)))
    return features, labels


def test_the_base_mean_of_a_file_is_that_of_its_base_classes(tmp_path):
    features, labels = named(tmp_path / "f.npz", "abcdef")
    (tmp_path / "l.json").write_text(json.dumps({"base": ["a", "b"], "novel": ["d", "c"]}))
    found = from_file(tmp_path / "f.npz", classes=f"{tmp_path}/l.json")
    assert_close(found.base_mean, features[labels < 2].mean(0))
    assert found.features.equal(features[(labels == 2) | (labels == 3)])
    assert found.classes == ("d", "c")


@pytest.mark.parametrize("base", [[], ["a", "z"]])
def test_without_all_base_classes_in_a_file_there_is_no_mean(tmp_path, base):
    named(tmp_path / "f.npz", "abcdef")
    (tmp_path / "l.json").write_text(json.dumps({"base": base, "novel": ["d", "c"]}))
    assert from_file(tmp_path / "f.npz", classes=f"{tmp_path}/l.json").base_mean is None


def test_base_features_of_novel_classes_are_refused(tmp_path):
    named(tmp_path / "f.npz", "abcdef")
    named(tmp_path / "base.npz", "xyd")
    (tmp_path / "l.json").write_text(json.dumps({"novel": ["d", "c"]}))
    with pytest.raises(ValueError, match=r"base\.npz: novel .* got 1 of 2 that are both, .* 'd'"):
        from_file(tmp_path / "f.npz", classes=f"{tmp_path}/l.json", base=tmp_path / "base.npz")
