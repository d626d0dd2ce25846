"""``tammes evaluate fewshot``: of a run, of a file, of two, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tammes.lab.cli.main import main
from tammes.lab.config.schema import Config
from tammes.lab.data import load
from tammes.lab.fewshot import class_lists
from tammes.lab.fewshot import features as fewshot_features
from tammes.lab.fewshot.episodes import draw
from tammes.lab.fewshot.features import from_run
from tammes.lab.fewshot.finetuned_heads import CosineTuning
from tammes.lab.fewshot.protocol import TABLE, accuracies, cl2n, l2
from tammes.lab.records.run_folder import write_json
from tammes.lab.training.loop import train
from tammes.lab.training.model import load_model

NOVEL = ("5", "6", "7", "8", "9")
QUICK = ("--way", "3", "--shot", "1,5", "--queries", "6", "--episodes", "60")


def quietly(text):
    """Nothing is said."""


def write_folder(folder, classes):
    from PIL import Image

    images = class_lists.load_classes("digits", classes)
    for place, label in enumerate(images.labels.tolist()):
        path = folder / images.classes[label] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.read(place)[0].numpy()).save(path)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders of base and of novel digits, lists of them, and two runs on the base digits."""
    place = tmp_path_factory.mktemp("fewshot")
    write_folder(place / "base", "01234")
    write_folder(place / "novel", NOVEL)
    write_json(place / "lists.json", {"base": list("01234"), "novel": list(NOVEL)})
    for name, loss in (("one", "softmax()"), ("two", "cosface(margin=-0.1)")):
        train(Config(data=str(place / "base"), loss=loss, epochs=1), place / name)
    return place


def said(capsys, *words):
    """What the command prints."""
    assert main(["evaluate", "fewshot", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    """The sentence it refuses with."""
    assert main(["evaluate", "fewshot", *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[-1].startswith("tammes evaluate: ")
    return lines[-1].removeprefix("tammes evaluate: ")


def embeddings(path, *, classes=6, each=20, names=None, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat(each)
    points = torch.randn(classes, 12, generator=generator)
    features = points[labels] + torch.randn(len(labels), 12, generator=generator)
    save_file({"features": features, "labels": labels, **more}, path)
    return path


# ------------------------------------------------------------------------------------- of a run


def test_a_run_is_judged_by_the_features_of_its_model(place, capsys):
    words = [place / "one", "--split", f"{place}/lists.json:novel", "--data", place / "novel"]
    found = json.loads(said(capsys, *words, *QUICK, "--method", "l2", "--json"))
    assert (found["images"], found["classes"]) == (896, 5)
    run = fewshot_features.Run(place / "one")
    images = class_lists.load_classes(place / "novel", NOVEL, report=quietly)
    with torch.no_grad():
        features = load_model(run).features(images.pixels)
    for row in found["rows"]:
        drawn = draw(images.labels, way=3, shot=row["shot"], queries=6, episodes=60)
        expected = accuracies(features, drawn, l2())
        assert row["accuracy"] == pytest.approx(float(expected.mean()), abs=2e-3)
        assert row["episodes"] == 60
    assert 0.4 < found["rows"][0]["accuracy"] < found["rows"][1]["accuracy"]


def test_features_are_kept_with_the_run_and_not_computed_again(place, monkeypatch):
    for old in (place / "one").glob("fewshot*"):
        old.unlink()
    first = from_run(place / "one", source=str(place / "novel"), report=quietly)
    (kept,) = (place / "one").glob("fewshot-*.safetensors")
    assert load_file(kept)["features"].equal(first.features)

    def not_again(*arguments):
        raise AssertionError("computed again")

    monkeypatch.setattr(fewshot_features, "load_model", not_again)
    again = from_run(place / "one", source=str(place / "novel"), report=quietly)
    assert again.features.equal(first.features)


def test_features_of_another_model_do_not_do(place, tmp_path):
    shutil.copytree(place / "one", tmp_path / "run")
    before = from_run(tmp_path / "run", source=str(place / "novel"), report=quietly)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    save_file({k: v * 1.5 for k, v in weights.items()}, tmp_path / "run" / "model.safetensors")
    after = from_run(tmp_path / "run", source=str(place / "novel"), report=quietly)
    assert not after.features.equal(before.features)


def test_damaged_features_are_computed_again(place, tmp_path):
    shutil.copytree(place / "one", tmp_path / "run")
    before = from_run(tmp_path / "run", source=str(place / "novel"), report=quietly)
    for kept in (tmp_path / "run").glob("fewshot-*.safetensors"):
        # Not in place: what was read from it before still lies there.
        kept.unlink()
        kept.write_bytes(b"nonsense")
    told = []
    after = from_run(tmp_path / "run", source=str(place / "novel"), report=told.append)
    assert after.features.equal(before.features)
    assert any("is damaged, features are computed again" in text for text in told)


def test_the_base_mean_of_a_run_is_that_of_its_training_images(place):
    found = from_run(place / "one", source=str(place / "novel"), base=True, report=quietly)
    training = load(place / "base", "train", report=quietly)
    with torch.no_grad():
        features = load_model(fewshot_features.Run(place / "one")).features(training.pixels)
    assert_close(found.base_mean, features.mean(0), atol=1e-5, rtol=1e-5)
    drawn = draw(found.labels, way=3, shot=5, queries=5, episodes=50)
    centred = accuracies(found.features, drawn, cl2n(), base_mean=found.base_mean)
    assert not centred.equal(accuracies(found.features, drawn, l2()))


def test_two_runs_are_compared_on_the_same_episodes(place, capsys):
    words = ["--data", place / "novel", *QUICK, "--method", "l2"]
    both = said(capsys, place / "one", *words, "--against", place / "two", "--json")
    other = json.loads(said(capsys, place / "two", *words, "--json"))
    for row, alone in zip(json.loads(both)["rows"], other["rows"], strict=True):
        assert row["against"]["accuracy"] == alone["accuracy"]
        difference = row["accuracy"] - alone["accuracy"]
        assert row["difference"]["mean"] == pytest.approx(difference)


def test_the_table_has_a_line_for_each_method_and_shot(place, capsys):
    words = [place / "one", "--data", place / "novel", *QUICK]
    method = "centroid, l2, cl2n, linear(passes=3), cosine(passes=3, scale=10)"
    printed = said(capsys, *words, "--method", method, "--against", place / "two")
    lines = printed.splitlines()
    assert "896 images of 5 classes; 3-way, 6 queries, 60 episodes, seed 0" in lines[2]
    assert lines[4].split() == ["method", "shots", "accuracy", "%", "against", "%", "difference"]
    assert lines[15] == ""
    assert lines[16].startswith("  verdict: ")
    assert all(line.count("±") == 3 for line in lines[5:15])


def test_base_classes_of_a_run_are_recognised_in_images_it_held_out(place, capsys):
    words = [place / "one", "--split", f"{place}/lists.json:base", *QUICK, "--method", "l2"]
    run = fewshot_features.Run(place / "one")
    found = json.loads(said(capsys, *words, "--json"))
    assert (found["classes"], found["images"], found["held_out"]) == (5, run.data["test"], True)
    assert f"{run.data['test']} images of 5 classes" in said(capsys, *words)
    assert ":base), held out of training; 3-way" in said(capsys, *words)
    new = [place / "one", "--data", place / "novel", *QUICK]
    assert "held out" not in said(capsys, *new)


def test_another_seed_gives_other_episodes(place, capsys):
    words = [place / "one", "--data", place / "novel", *QUICK, "--method", "l2", "--json"]
    found = json.loads(said(capsys, *words, "--seed", "1"))
    examples = from_run(place / "one", source=str(place / "novel"), report=quietly)
    drawn = draw(examples.labels, way=3, shot=1, queries=6, episodes=60, seed=1)
    expected = accuracies(examples.features, drawn, l2())
    assert found["rows"][0]["accuracy"] == pytest.approx(float(expected.mean()))
    assert found["rows"][0]["accuracy"] != json.loads(said(capsys, *words))["rows"][0]["accuracy"]


def test_a_run_is_judged_outside_the_span_of_its_prototypes(place, capsys):
    words = [place / "one", "--data", place / "novel", *QUICK, "--method", "complement", "--json"]
    found = json.loads(said(capsys, *words))
    examples = from_run(place / "one", source=str(place / "novel"), report=quietly)
    weight = load_file(place / "one" / "model.safetensors")["criterion.head.weight"]
    left = examples.features - examples.features @ torch.linalg.pinv(weight) @ weight
    drawn = draw(examples.labels, way=3, shot=1, queries=6, episodes=60)
    expected = accuracies(left, drawn, l2())
    assert found["rows"][0]["accuracy"] == pytest.approx(float(expected.mean()), abs=2e-3)


# ------------------------------------------------------------------------------------ of a file


def test_a_file_of_features_and_labels_is_enough(tmp_path, capsys):
    path = embeddings(tmp_path / "mine.safetensors")
    found = json.loads(said(capsys, path, *QUICK, "--method", "centroid,linear", "--json"))
    assert [(row["method"], row["shot"]) for row in found["rows"]] == [
        ("centroid", 1),
        ("linear", 1),
        ("centroid", 5),
        ("linear", 5),
    ]
    data = load_file(path)
    drawn = draw(data["labels"], way=3, shot=5, queries=6, episodes=60)
    (centroid,) = (r for r in found["rows"] if (r["method"], r["shot"]) == ("centroid", 5))
    from tammes.lab.fewshot import protocol

    expected = accuracies(data["features"], drawn, protocol.centroid())
    assert centroid["accuracy"] == float(expected.mean())


def test_a_split_takes_the_named_classes_of_a_file(tmp_path, capsys):
    import numpy as np

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(8).repeat(15)
    features = torch.randn(8, 12, generator=generator)[labels]
    features = features + 0.5 * torch.randn(len(labels), 12, generator=generator)
    names = np.array([f"class {n}" for n in range(8)])
    np.savez(tmp_path / "f.npz", features=features, labels=labels, class_names=names)
    lists = {"base": list(names[:4]), "novel": [str(name) for name in names[:3:-1]]}
    write_json(tmp_path / "lists.json", {k: [str(x) for x in v] for k, v in lists.items()})
    words = [tmp_path / "f.npz", "--split", tmp_path / "lists.json", *QUICK]
    found = json.loads(said(capsys, *words, "--method", "cl2n", "--json"))
    assert (found["classes"], found["images"]) == (4, 60)
    # Their labels count from the last name down; the base classes give the mean.
    novel = labels >= 4
    drawn = draw(7 - labels[novel], way=3, shot=5, queries=6, episodes=60)
    mean = features[labels < 4].mean(0)
    expected = accuracies(features[novel], drawn, cl2n(), base_mean=mean)
    assert found["rows"][1]["accuracy"] == pytest.approx(float(expected.mean()))


def test_base_features_may_come_from_a_file_of_their_own(tmp_path, capsys):
    path = embeddings(tmp_path / "novel.safetensors")
    base = embeddings(tmp_path / "base.safetensors", seed=1)
    found = said(capsys, path, *QUICK, "--base", base, "--method", "cl2n", "--json")
    data = load_file(path)
    drawn = draw(data["labels"], way=3, shot=1, queries=6, episodes=60)
    mean = load_file(base)["features"].mean(0)
    expected = accuracies(data["features"], drawn, cl2n(), base_mean=mean)
    assert json.loads(found)["rows"][0]["accuracy"] == pytest.approx(float(expected.mean()))


def test_base_features_that_no_method_needs_are_said_to_be_so(tmp_path, capsys):
    path = embeddings(tmp_path / "novel.safetensors")
    words = [path, "--against", path, *QUICK, "--base", tmp_path / "gone.safetensors"]
    assert main(["evaluate", "fewshot", *map(str, words), "--method", "l2"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("gone.safetensors: not used, as no method subtracts the base mean")


def test_one_is_not_written_as_several(tmp_path, capsys):
    path = embeddings(tmp_path / "mine.safetensors")
    printed = said(capsys, path, "--way", "3", "--episodes", "1", "--queries", "1")
    assert "3-way, 1 query, 1 episode, seed 0" in printed


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--way", "7"], "7-way episodes expect at least 7 classes, got 6"),
        (
            ["--queries", "30"],
            "1-shot episodes with 30 queries expect 31 images of every class, got 20 of class '0'",
        ),
        (["--shot", "one"], "--shot is expected to be numbers such as 1,5, got 'one'"),
        (["--shot", "0"], "episodes expect shot to be a whole number of at least 1, got 0"),
        (["--method", "consine"], "did you mean cosine?"),
        (["--method", "cl2n"], "cl2n expects features of the base classes, given by --base FILE"),
        (["--split", "cifar-fs:nvel"], "there is no part 'nvel'; did you mean novel?"),
        (
            ["--split", "cifar-fs"],
            "class_names are expected to find cifar-fs:novel by, got numbers alone",
        ),
        (["--split", ""], "class lists are expected, such as cifar-fs, got none"),
        (["--split", ":novel"], "class lists are expected, such as cifar-fs, got none"),
        (["--method", "cosine(5)"], "cosine takes keyword settings only, such as scale, got"),
        (["--method", "complement"], "complement expects a run, whose head has prototypes"),
        (["--data", "digits"], "--data is for runs only; a file has its features already"),
        (["--against", "nowhere"], "nowhere: there is no such run or file"),
        (["--against", ""], "'': there is no such run or file"),
    ],
)
def test_of_a_file_what_cannot_be_is_said_in_a_sentence(tmp_path, capsys, words, sentence):
    path = embeddings(tmp_path / "mine.safetensors")
    assert sentence in refused(capsys, path, *words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--way", "1"], "episodes expect way to be a whole number of at least 2, got 1"),
        (["--queries", "0"], "episodes expect queries to be a whole number of at least 1, got 0"),
        (["--episodes", "0"], "to be a whole number of at least 1, got 0"),
        (["--shot", "1,0"], "episodes expect shot to be a whole number of at least 1, got 0"),
        (["--way", "6"], "6-way episodes expect at least 6 classes, got 5 of"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_features_are_computed(
    place, capsys, monkeypatch, words, sentence
):
    monkeypatch.setattr(fewshot_features, "from_run", None)
    chosen = ["--split", f"{place}/lists.json", "--data", place / "novel"]
    assert sentence in refused(capsys, place / "one", *chosen, *words)


def test_files_of_other_images_are_not_compared(tmp_path, capsys):
    one = embeddings(tmp_path / "one.safetensors")
    two = embeddings(tmp_path / "two.safetensors", each=21)
    assert "features of the same images in the same order" in refused(
        capsys, one, "--against", two, *QUICK
    )


def test_prototypes_alone_are_no_examples(tmp_path, capsys):
    save_file({"prototypes": torch.eye(5)}, tmp_path / "p.safetensors")
    said = refused(capsys, tmp_path / "p.safetensors")
    assert "embeddings with labels are expected, got prototypes only" in said


def test_base_features_of_another_size_are_refused(tmp_path, capsys):
    one = embeddings(tmp_path / "one.safetensors")
    save_file(
        {"features": torch.randn(4, 7), "labels": torch.arange(4)}, tmp_path / "two.safetensors"
    )
    said = refused(capsys, one, "--base", tmp_path / "two.safetensors", "--method", "cl2n")
    assert "base features of 7 dimensions do not go with the 12" in said


def test_overlapping_lists_are_refused(place, tmp_path, capsys):
    write_json(tmp_path / "lists.json", {"base": ["1", "2"], "novel": ["2", "3"]})
    said = refused(capsys, place / "one", "--split", tmp_path / "lists.json", *QUICK)
    assert "a class is expected in one part only, got '2' of novel in base too" in said


def test_classes_that_were_trained_on_are_not_novel(place, capsys):
    said = refused(capsys, place / "one", "--data", place / "base", *QUICK)
    assert "novel classes are expected to be other than the base classes" in said
    assert "got 5 of 5 that are both, such as '0'" in said


def test_classes_that_were_trained_on_are_not_novel_elsewhere(place, tmp_path, capsys):
    # Folders have names, if they are numbers too.
    shutil.copytree(place / "base", tmp_path / "copy")
    said = refused(capsys, place / "one", "--data", tmp_path / "copy", *QUICK)
    assert "got 5 of 5 that are both, such as '0'" in said


def test_a_run_without_new_images_is_refused(place, capsys):
    said = refused(capsys, place / "one", *QUICK)
    assert "images of new classes are expected, named by --split or --data" in said


def test_a_run_without_a_model_is_refused(place, tmp_path, capsys):
    shutil.copytree(place / "one", tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    (tmp_path / "run" / "final.json").unlink()
    said = refused(capsys, tmp_path / "run", "--data", place / "novel", *QUICK)
    assert said.endswith("the run has no model.safetensors, it is unfinished")


def test_a_folder_that_is_no_run_is_refused(place, tmp_path, capsys):
    said = refused(capsys, tmp_path, "--data", place / "novel", *QUICK)
    assert said.endswith("not a run, it has no config.json")


def test_images_of_another_kind_are_refused(place, tmp_path, capsys):
    from PIL import Image

    for name in ("red", "blue", "green"):
        (tmp_path / name).mkdir()
        for number in range(8):
            picture = Image.new("RGB", (8, 8), color=(name))
            picture.putpixel((number, 0), (1, 2, 3))
            picture.save(tmp_path / name / f"{number}.png")
    said = refused(capsys, place / "one", "--data", tmp_path, *QUICK)
    assert "its model takes images of 1×8×8, got 3×8×8" in said


def test_the_base_of_a_run_is_not_given_twice(place, tmp_path, capsys):
    base = embeddings(tmp_path / "base.safetensors")
    words = ["--data", place / "novel", "--base", base, *QUICK]
    assert "--base is for files only" in refused(capsys, place / "one", *words)


# ------------------------------------------------------------------------------------- the page


PAGE = (Path(__file__).parents[3] / "docs" / "fewshot.md").read_text()


def test_the_code_in_the_docs_runs(capsys):
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/fewshot.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("±") == 6
    assert "(12) predicts that phi on the novel classes is" in printed


def test_the_docs_name_every_flag_method_and_split(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "fewshot", "--help"])
    flags = set(re.findall(r"--[a-z]+", capsys.readouterr().out)) - {"--help"}
    assert len(flags) > 9
    for name in (*flags, *TABLE, *class_lists.names()):
        assert name in PAGE, name


def test_settings_in_the_docs_are_the_defaults():
    shown = re.search(r"The last two take (.*?), the settings", PAGE, re.DOTALL)[1]
    stated = dict(part.split("=") for part in re.findall(r"`(\w+=[\d.]+)`", shown))
    assert {name: float(value) for name, value in stated.items()} == vars(CosineTuning())
