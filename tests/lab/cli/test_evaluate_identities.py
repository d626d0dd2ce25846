"""``tammes evaluate retrieval``, ``verification`` and ``openset``: of files and of runs."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from messages import pattern
from pages import body
from PIL import Image
from safetensors.torch import load_file, save_file

from tammes.lab.cli.main import main
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import write_json
from tammes.lab.training.loop import train

PROTOCOLS = ("retrieval", "verification", "openset")
QUICK = ("--resamples", "10")


@pytest.fixture
def file(tmp_path):
    generator = np.random.default_rng(0)
    people = np.repeat(np.arange(12), 6)
    features = generator.normal(size=(12, 8))[people] + 0.8 * generator.normal(size=(72, 8))
    names = np.array([f"bird {number}" for number in people])
    np.savez(tmp_path / "birds.npz", embeddings=features, identities=names)
    return tmp_path / "birds.npz"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "digits"
    train(Config(data="digits", epochs=1, backbone="mnist_cnn(features=3)", augment="none"), folder)
    return folder


def said(capsys, protocol, *words):
    assert main(["evaluate", protocol, *map(str, words), *QUICK]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refused(capsys, protocol, *words):
    assert main(["evaluate", protocol, *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line.removeprefix("tammes evaluate: ")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_text_and_json_say_the_same_and_a_page_is_written(file, tmp_path, capsys, protocol):
    out = tmp_path / "pages"
    text = said(capsys, protocol, file, "--out", out)
    page = out / f"{protocol}.html"
    assert text.endswith(f"\n  page: {page}\n")
    assert page.exists()
    found = json.loads(said(capsys, protocol, file, "--out", out, "--json"))
    assert (found["protocol"], found["source"]) == (protocol, str(file))
    assert found["counts"]["identities"] == 12
    for number in found["numbers"].values():
        assert number["low"] <= number["value"] <= number["high"]
        (line,) = (line for line in text.splitlines() if line.startswith(f"  {number['name']}  "))
        shown = f"{number['value']:.4g}" if "DCF" in line else f"{100 * number['value']:.2f} %"
        assert shown in line
    for note in found["notes"]:
        assert f"  note: {note}\n" in text
    assert bool(found["thresholds"]) == (protocol != "retrieval")
    assert found["failing_identities"][0]["identity"] in text
    assert all(len(curve["x"]) == len(curve["low"]) for curve in found["curves"].values())
    assert max(map(len, text.splitlines())) < 160


def test_the_seed_decides_the_intervals_alone(file, tmp_path, capsys):
    found = [
        json.loads(said(capsys, "retrieval", file, "--out", tmp_path, "--json", "--seed", seed))
        for seed in (0, 0, 1)
    ]
    first, again, other = (each["numbers"]["map"] for each in found)
    assert first == again != other
    assert first["value"] == other["value"]


def test_a_run_is_evaluated_with_its_images(trained, tmp_path, capsys):
    text = said(capsys, "retrieval", trained, "--out", tmp_path)
    assert "449 embeddings of 10 identities" in text
    assert "note: 10 of 10 identities were trained on: the numbers do not say" in text
    page = body((tmp_path / "retrieval.html").read_text())
    # A query and eight items, of five best and five worst queries.
    assert page.count("data:image/png;base64,") == 90
    said(capsys, "verification", trained, "--out", tmp_path)
    said(capsys, "openset", trained, "--out", tmp_path)


def test_a_run_on_identities_has_their_names_cameras_queries_and_pairs(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    data = json.loads((run / "data.json").read_text())
    write_json(run / "data.json", {**data, "identities": [f"person {i}" for i in range(10)]})
    tensors = load_file(run / "embeddings.safetensors")
    del tensors["predictions"]
    rows = torch.arange(len(tensors["labels"]))
    same = tensors["labels"][rows[:-1]] == tensors["labels"][rows[1:]]
    tensors |= {"camera": rows % 3, "query": (rows % 4 == 0).to(torch.uint8)}
    tensors |= {"pairs": torch.stack([rows[:-1], rows[1:]], 1), "same": same.to(torch.uint8)}
    tensors |= {"fold": rows[:-1] % 10}
    (run / "embeddings.safetensors").unlink()
    save_file(tensors, run / "embeddings.safetensors")
    found = json.loads(said(capsys, "retrieval", run, "--out", tmp_path, "--json"))
    assert (found["counts"]["queries"], found["counts"]["gallery"]) == (113, 336)
    assert found["notes"] == []
    assert found["failing_identities"][0]["identity"].startswith("person ")
    text = said(capsys, "retrieval", run, "--out", tmp_path)
    assert "3 cameras, items of the query's identity and camera are ignored" in text
    found = json.loads(said(capsys, "verification", run, "--out", tmp_path, "--json"))
    assert found["counts"]["same"] + found["counts"]["different"] == 448
    assert "fold_accuracy" in found["numbers"]


def test_images_of_a_run_that_have_changed_are_not_shown(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    data = json.loads((run / "data.json").read_text())
    write_json(run / "data.json", {**data, "test_digest": "0"})
    assert main(["evaluate", "retrieval", str(run), "--out", str(tmp_path), *QUICK]) == 0
    page = body((tmp_path / "retrieval.html").read_text())
    assert "data:image/png" not in page
    assert "Images of digits have changed since the run." in page
    assert capsys.readouterr().err == "images of digits have changed since the run\n"


def test_pairs_and_a_gallery_are_read_from_files(file, tmp_path, capsys):
    pairs = tmp_path / "pairs.txt"
    pairs.write_text("".join(f"1 {6 * i} {6 * i + 1}\n0 {6 * i} {6 * i + 7}\n" for i in range(10)))
    text = said(capsys, "verification", file, "--pairs", pairs, "--out", tmp_path)
    assert "10 pairs of one identity, 10 pairs of two" in text
    text = said(capsys, "retrieval", file, "--gallery", file, "--out", tmp_path)
    assert "72 queries, 72 gallery items" in text


def test_cameras_of_one_side_alone_can_be_ignored(file, tmp_path, capsys):
    with np.load(file) as content:
        np.savez(tmp_path / "seen.npz", **content, cameras=np.arange(72))
    words = (file, "--gallery", tmp_path / "seen.npz", "--out", tmp_path)
    assert refused(capsys, "retrieval", *words).endswith("--ignore-cameras does without")
    for protocol in ("retrieval", "verification"):
        said(capsys, protocol, *words, "--ignore-cameras")


def test_the_page_names_the_command_that_wrote_it(file, tmp_path, capsys):
    said(capsys, "retrieval", file, "--ranks", "1,2", "--ignore-cameras", "--out", tmp_path)
    page = (tmp_path / "retrieval.html").read_text()
    words = f"tammes evaluate retrieval {file} --ranks 1,2 --ignore-cameras --resamples 10 --out"
    assert words in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["retrieval", "nowhere"], "nowhere: there is no such run or file"),
        (["retrieval", "{file}", "--gallery", "nowhere"], "nowhere: there is no such run or file"),
        (["retrieval", "{file}", "--ranks", "0"], "--ranks is expected to be numbers such as ..."),
        (["retrieval", "{file}", "--ap", "x"], "retrieval expects ap 'step' or 'trapezoid' ..."),
        (["retrieval", "{file}", "--similarity", "x"], "retrieval expects similarity 'cosine' ..."),
        (["retrieval", "{file}", "--resamples", "0"], "--resamples is expected to be 1 or ..."),
        (["retrieval", "{file}", "{file}.txt"], "{file}.txt: there is no such run or file"),
        (["verification", "{file}", "--far", "x"], "--far is expected to be numbers such as ..."),
        (["verification", "{file}", "--far", "1e-9"], "verification expects 1,000,000,000 ..."),
        (["verification", "{file}", "--p-target", "2"], "min_dcf expects 0 < p_target < 1 ..."),
        (["verification", "{file}", "--similarity", "k_reciprocal"], "... similarity 'cosine' ..."),
        (["openset", "{file}", "--fpir", "0.001"], "openset expects 1,000 unknown probes ..."),
        (["openset", "{file}", "--enrol", "0"], "--enrol is expected to be 1 or more, got 0"),
        (["openset", "{file}", "--enrol", "6"], "... got 0 of 12; --gallery FILE names a gallery"),
        (["retrieval", "{folder}"], "{folder}: not a run, it has no config.json"),
        (["retrieval", "{file}", "--images", "x"], "x: a folder of images is expected ..."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence_and_nothing_is_written(
    file, tmp_path, capsys, words, message
):
    names = {"file": file, "folder": tmp_path}
    words = [word.format(**names) for word in words]
    said = refused(capsys, *words, "--out", tmp_path / "out")
    assert re.search(pattern(message.format(**names)), said), said
    assert not (tmp_path / "out").exists()


def test_flags_of_files_are_refused_with_a_run(trained, capsys):
    said = refused(capsys, "retrieval", trained, "--cameras", "x")
    assert said == "--cameras is for files only; a run has its own"
    assert "one run is expected, got 2 paths" in refused(capsys, "retrieval", trained, trained)


def test_a_run_tells_its_classes_from_another_data_set(trained, tmp_path, capsys):
    for name in "xy":
        (tmp_path / "letters" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "letters" / name / f"{number}.png")
    words = ["evaluate", "openset", str(trained), "--unknown", str(tmp_path / "letters")]
    assert main([*words, "--out", str(tmp_path), "--json", *QUICK]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["counts"]["known"], found["counts"]["unknown"]) == (449, 40)
    right = json.loads((trained / "final.json").read_text())["test"]["accuracy"]
    assert found["numbers"]["rank_1"]["value"] == pytest.approx(right)
    assert [row["score"] for row in found["tables"]["Scores compared"]] == [
        "prototype",
        "softmax",
        "logit",
        "energy",
    ]
    assert "taken for" in body((tmp_path / "openset.html").read_text())
    said = refused(capsys, *words[1:], "--gallery", trained)
    assert said == "--gallery cannot be combined with --unknown, whose classes are known"
    said = refused(capsys, *words[1:], "--scale", "2")
    assert "for a run, --unknown takes one data set and no --scale" in said
