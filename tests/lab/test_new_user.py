"""A new user with own pictures: the usual way works, and each mistake gets a helpful sentence."""

import csv
import json

import numpy
import pytest
import torch
from PIL import Image, ImageDraw

import tammes
from tammes.lab import Config
from tammes.lab.cli.main import main
from tammes.lab.config.flags import DEFAULT_DATA
from tammes.lab.data import DataError, decode_partition, load, write_source
from tammes.lab.measure.files import read
from tammes.lab.measure.formats import scale_of_run
from tammes.lab.measure.measures import measure

FEATURES, LABELS = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
ONE_HOT = torch.nn.functional.one_hot(LABELS, 3)
PAIRS = torch.utils.data.TensorDataset(torch.zeros(4, 8, 8), LABELS)
NAMES = ["coat", "shoe", "bag", "coat"]


def cosface(features, labels):
    return tammes.CosFace(8, 3)(features, labels)


# Each row: a mistake in Python, its error, and the hint that the sentence has to contain.
IN_PYTHON = {
    "one-hot labels": (lambda: cosface(FEATURES, ONE_HOT), ValueError, "use labels.argmax(1)"),
    "one-hot labels of a floating type": (
        lambda: cosface(FEATURES, ONE_HOT.float()),
        TypeError,
        "use labels.argmax(1)",
    ),
    "labels in a column": (
        lambda: cosface(FEATURES, LABELS[:, None]),
        ValueError,
        "labels.squeeze(1)",
    ),
    "floating labels": (lambda: cosface(FEATURES, LABELS.float()), TypeError, "labels.long()"),
    "labels and features swapped": (
        lambda: cosface(LABELS, FEATURES),
        TypeError,
        "criterion(features, labels)",
    ),
    "features in a list": (lambda: cosface(FEATURES.tolist(), LABELS), TypeError, "to be a tensor"),
    "features in an array": (
        lambda: cosface(FEATURES.numpy(), LABELS),
        TypeError,
        "got ndarray; torch.as_tensor",
    ),
    "labels in a list": (
        lambda: cosface(FEATURES, LABELS.tolist()),
        TypeError,
        "a tensor of integers, got list; torch.as_tensor",
    ),
    "class names in a list": (lambda: cosface(FEATURES, NAMES), TypeError, "names.index(label)"),
    "class names in an array": (
        lambda: cosface(FEATURES, numpy.array(NAMES)),
        TypeError,
        "names.index(label)",
    ),
    "labels that count from 1": (
        lambda: cosface(FEATURES, LABELS + 1),
        ValueError,
        "got 1 to 3; classes count from 0",
    ),
    "images in place of features": (
        lambda: cosface(torch.randn(4, 3, 8, 8), LABELS),
        ValueError,
        "images go through a network first",
    ),
    "feature maps in place of features": (
        lambda: cosface(torch.randn(4, 8, 7, 7), LABELS),
        ValueError,
        "pool feature maps first: features.mean((2, 3))",
    ),
    "a device as in torch.nn": (
        lambda: tammes.CosFace(8, 3, device="cpu"),
        TypeError,
        "CosFace has no setting 'device'; .to(device=...) sets it once it is built",
    ),
    "a misspelt name of the package": (
        lambda: tammes.Cosface,
        AttributeError,
        "module 'tammes' has no attribute 'Cosface'; did you mean CosFace?",
    ),
    "one-hot labels for a head": (
        lambda: tammes.CosineHead(8, 3).split(FEATURES, ONE_HOT),
        ValueError,
        "use labels.argmax(1)",
    ),
    "scale by its symbol": (
        lambda: tammes.CosFace(8, 3, s=30.0),
        TypeError,
        "CosFace has no setting 's'; did you mean scale?",
    ),
    "margin by its symbol": (
        lambda: tammes.ArcFace(8, 3, m=0.5),
        TypeError,
        "ArcFace has no setting 'm'; did you mean margin?",
    ),
    "margin of a term by its symbol": (
        lambda: tammes.cosface(m=0.3),
        TypeError,
        "cosface has no setting 'm'; did you mean margin?",
    ),
    "an option that there is not": (
        lambda: tammes.NormFace(8, 3, zzz=1),
        TypeError,
        "it has averaged, class_weights, embedding_size, even, group,",
    ),
    "a size from a division": (
        lambda: tammes.CosFace(16 / 2, 3),
        TypeError,
        "embedding_size to be a whole number, got 8.0",
    ),
    "a number of classes as text": (
        lambda: tammes.CosFace(8, "3"),
        TypeError,
        "num_classes to be a whole number, got '3'",
    ),
    "a scale of None": (lambda: tammes.CosineHead(8, 3, scale=None), TypeError, "'learnable'"),
    "a term called with tensors": (
        lambda: tammes.arcface(FEATURES, LABELS),
        TypeError,
        "criterion = tammes.ArcFace(embedding_size, num_classes)",
    ),
    "a term without ready-made criterion called with tensors": (
        lambda: tammes.triplet(FEATURES, LABELS),
        TypeError,
        "tammes.Criterion(tammes.CosineHead(embedding_size, num_classes), triplet())",
    ),
    "a built term called with tensors": (
        lambda: tammes.lm_softmax()(FEATURES, LABELS),
        TypeError,
        "criterion = tammes.LMSoftmax(embedding_size, num_classes)",
    ),
    "a criterion built from tensors": (
        lambda: tammes.ArcFace(FEATURES, LABELS),
        TypeError,
        "when it is called",
    ),
    "a margin in nested lists": (
        lambda: tammes.cosface(margin=FEATURES.tolist()),
        ValueError,
        "got 4 sequences",
    ),
    "degrees for a cosine margin": (
        lambda: tammes.CosFace(8, 3, margin=28.6),
        ValueError,
        "got 28.6; as an angle in degrees it is arcface(margin=0.4992)",
    ),
    "degrees for an angular margin": (
        lambda: tammes.ArcFace(8, 3, margin=28.6),
        ValueError,
        "28.6 degrees are 0.4992",
    ),
    "arrays in place of a source": (
        lambda: Config(data=FEATURES.numpy()),
        ValueError,
        "got ndarray of shape (4, 8); tammes.lab.data.write_source",
    ),
    "a Dataset in place of a source": (
        lambda: load(torch.utils.data.TensorDataset(FEATURES), "train"),
        ValueError,
        "got TensorDataset; tammes.lab.data.write_source",
    ),
    "a DataLoader in place of its data": (
        lambda: write_source("any.parquet", torch.utils.data.DataLoader(PAIRS, batch_size=2)),
        DataError,
        "a DataLoader yields batches, give its dataset",
    ),
    "normalised images": (
        lambda: write_source("any.parquet", [torch.full((8, 8), -2.0)], [0]),
        DataError,
        "take images before they are normalised",
    ),
    "arrays with channels first": (
        lambda: write_source("any.parquet", numpy.zeros((1, 3, 8, 8), "uint8"), [0]),
        DataError,
        "got (3, 8, 8); with channels first pass a tensor (torch.as_tensor)",
    ),
    "pixels of 64 bits": (
        lambda: write_source("any.parquet", numpy.zeros((1, 8, 8), "int64"), [0]),
        DataError,
        "got int64; convert to uint8",
    ),
    "floating labels of images": (
        lambda: write_source("any.parquet", numpy.zeros((1, 8, 8), "uint8"), numpy.zeros(1)),
        DataError,
        "got float at position 0; convert whole numbers to integers",
    ),
    "one image and one label": (
        lambda: write_source("any.parquet", numpy.zeros((8, 8)), numpy.int64(0)),
        DataError,
        "a label for each image, got 8 images and 0 labels",
    ),
    "the scale given to a term": (
        lambda: tammes.arcface(s=64.0),
        TypeError,
        "arcface has no setting 's'; the scale is the head's",
    ),
    "an unknown setting beside a misspelt one": (
        lambda: tammes.CosFace(8, 3)(torch.ones(2, 8), torch.tensor([0, 1]), aaa=1, margni=0.2),
        TypeError,
        "no setting 'margni'; did you mean margin?",
    ),
    "a term that was not built": (
        lambda: tammes.Criterion(tammes.CosineHead(8, 3), tammes.cosface),
        TypeError,
        "got cosface; cosface() builds it",
    ),
    "a margin that is assigned": (
        lambda: setattr(tammes.CosFace(8, 3), "margin", 0.2),
        AttributeError,
        "criterion.loss = tammes.cosface(margin=...)",
    ),
    "a term in place of the head": (
        lambda: tammes.Criterion(tammes.arcface(), tammes.CosineHead(8, 3)),
        TypeError,
        "such as tammes.CosineHead(embedding_size, num_classes)",
    ),
}


@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_a_mistake_in_python_gets_a_hint_in_one_short_sentence(mistake):
    attempt, error, hint = IN_PYTHON[mistake]
    with pytest.raises(error) as raised:
        attempt()
    said = str(raised.value)
    assert hint in said
    assert "\n" not in said
    assert len(said) < 260


CLASSES = ("bag", "boot", "coat", "shirt", "trousers")


def garment(kind, seed):
    """A grey picture of 28 by 28 pixels, as Fashion-MNIST has them: a shape of its class."""
    draw = numpy.random.default_rng([CLASSES.index(kind), seed])
    left, top = draw.integers(3, 8, 2).tolist()
    right, bottom = (28 - draw.integers(3, 8, 2)).tolist()
    middle = (left + right) // 2
    image = Image.fromarray(draw.integers(0, 40, (28, 28)).astype("uint8"))
    pen, ink = ImageDraw.Draw(image), int(draw.integers(140, 255))
    if kind == "bag":
        pen.rectangle((left, 14, right, bottom), fill=ink)
        pen.arc((left + 3, top, right - 3, 20), 180, 360, fill=ink, width=2)
    elif kind == "boot":
        pen.polygon([(left, top), (middle, top), (right, bottom), (left, bottom)], fill=ink)
    elif kind == "coat":
        pen.rectangle((left, top, middle - 2, bottom), fill=ink)
        pen.rectangle((middle + 1, top, right, bottom), fill=ink)
    elif kind == "shirt":
        pen.rectangle((middle - 4, top, middle + 4, bottom), fill=ink)
        pen.rectangle((left, top, right, top + 5), fill=ink)
    else:
        pen.rectangle((left + 2, top, left + 6, bottom), fill=ink)
        pen.rectangle((right - 6, top, right - 2, bottom), fill=ink)
        pen.rectangle((left + 2, top, right - 2, top + 4), fill=ink)
    return image


def write_pictures(root, each):
    """The same pictures three times: folders of classes, a CSV table, labels in the file names."""
    rows = []
    (root / "flat").mkdir(parents=True)
    for kind in CLASSES:
        (root / "pictures" / kind).mkdir(parents=True)
        for number in range(each):
            image = garment(kind, number)
            image.save(root / "pictures" / kind / f"{number:04}.png")
            image.save(root / "flat" / f"{kind}_{number}.png")
            rows.append((f"flat/{kind}_{number}.png", kind))
    with open(root / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return root


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with 60 pictures of one's own, and tables with slips in them."""
    root = write_pictures(tmp_path_factory.mktemp("desk"), each=12)
    lines = (root / "labels.csv").read_text().splitlines()
    for name, text in {
        "no_labels.csv": ["path,date,size", "flat/bag_0.png,today,3"],
        "no_paths.csv": ["name,label", "flat/bag_0.png,bag"],
        "elsewhere.csv": ["path,label", *(f"photos/{line}" for line in lines[1:])],
        "lost.csv": [*lines, "flat/bag_99.png,bag"],
        "ragged.csv": [*lines, "flat/bag_0.png"],
        "no_names.csv": lines[1:],
        "names.csv": lines[:1],
        "kaggle.csv": ["image_id,label", "bag_0,bag", "boot_0,boot"],
        "notes.txt": ["bag"],
    }.items():
        (root / name).write_text("\n".join(text))
    (root / "empty").mkdir()
    (root / "tables" / "images").mkdir(parents=True)
    garment("bag", 0).save(root / "tables" / "images" / "1.png")
    for name in ("a.csv", "b.csv"):
        (root / "tables" / name).write_text("path,label\nimages/1.png,bag\n")
    for kind in CLASSES:
        (root / "single" / kind).mkdir(parents=True)
        garment(kind, 0).save(root / "single" / kind / "1.png")
    broken = root / "broken" / "bag"
    broken.mkdir(parents=True)
    (broken / "1.png").write_bytes((root / "flat" / "bag_1.png").read_bytes()[:60])
    return root


# Each row: words after `tammes`, and the hint that the sentence has to contain.
ON_THE_COMMAND_LINE = {
    "a command misspelt": ("trian --data pictures", "did you mean train?"),
    "a flag misspelt": ("train --dat pictures", "did you mean --data?"),
    "a number in words": ("train --data pictures --epochs ten", "a whole number, got ten"),
    "a network of timm": ("train --data pictures --backbone resnet50", "timm:resnet50"),
    "a network misspelt": ("train --data pictures --backbone resnt18", "did you mean resnet18?"),
    "a loss misspelt": ("train --data pictures --loss arcfac", "did you mean arcface?"),
    "the symbol of a margin": ("train --data pictures --loss arcface(m=0.5)", "mean margin?"),
    "a cosine margin in degrees": (
        "train --data pictures --loss cosface(margin=28.6)",
        "arcface(margin=0.4992)",
    ),
    "an angular margin in degrees": (
        "compare --data pictures --losses softmax,arcface(margin=28.6)",
        "28.6 degrees are 0.4992",
    ),
    "the symbol of a scale": ("train --data pictures --head cosine(s=30)", "did you mean scale?"),
    "an augmentation misspelt": ("train --data pictures --augment flop()", "did you mean flip?"),
    "a sampler's setting misspelt": (
        "train --data pictures --sampler pk(clases=4)",
        "did you mean classes?",
    ),
    "a schedule misspelt": ("train --data pictures --lr_schedule cosin", "did you mean cosine?"),
    "noise misspelt": ("train --data pictures --noise symetric(0.2)", "did you mean symmetric?"),
    "a data set misspelt": ("train --data mnits", "did you mean mnist?"),
    "a folder misspelt": ("train --data ./picture", "there is no such file, folder"),
    "a flat folder": ("train --data flat", "a CSV file with the columns path and label, or in"),
    "an empty folder": ("train --data empty", "got nothing like that"),
    "a pattern misspelt": ("train --data flat/{lable}_*.png", "{label} once"),
    "a pattern that matches nothing": ("train --data flat/{label}-*.png", "such as 'bag_0.png'"),
    "a text file": (
        "train --data notes.txt",
        "a .csv, .tsv or .parquet file is expected, got .txt",
    ),
    "a table without labels": ("train --data no_labels.csv", "such as label"),
    "a table without paths": ("train --data no_paths.csv", "such as path and label"),
    "paths from elsewhere": ("train --data elsewhere.csv", "to be relative to"),
    "a lost file": ("train --data lost.csv", "1 image of 61 cannot be read"),
    "a line too short": ("train --data ragged.csv", "line 62: 2 values are expected"),
    "one class alone": ("train --data broken", "2 classes or more are needed, got 1 ('bag')"),
    "a folder of images beside two tables": ("train --data tables", "a.csv may have the labels"),
    "a table without names of columns": ("train --data no_names.csv", "named in the first line"),
    "a pattern without a label": ("train --data flat/*.png", "has {label} where the class is"),
    "the images in place of the run": (
        "train --folder pictures",
        "got pictures with 'bag' in it; --data names the images",
    ),
    "a table of names alone": ("train --data names.csv", "a line for each image is expected"),
    "names of files without ending": ("train --data kaggle.csv", "the ending of the file"),
    "one image of each class": ("train --data single", "each class needs 2 images or more"),
    "a protocol in two words": ("evaluate open-set runs/one", "did you mean openset?"),
    "a machine misspelt": (
        "advise --classes 10 --dim 8 --machine rtx490",
        "did you mean rtx4090?",
    ),
    "a number with a comma": (
        "advise --classes 1,000 --dim 8",
        "--classes: a whole number such as 1000 is expected, got '1,000'",
    ),
    "settings in the name of a loss": (
        "advise --classes 10 --dim 8 --loss cosface(margin=0.2)",
        "names of losses alone, got 'cosface(margin=0.2)'; margin and scale",
    ),
    "a run that is none": ("predict runs/one pictures", "runs/one: not a run"),
    "pictures to measure": ("measure pictures", "the folder of a finished run is expected"),
    "pictures to report": ("report pictures", "pictures"),
}


@pytest.fixture
def at_desk(desk, tmp_path, monkeypatch):
    monkeypatch.chdir(desk)
    monkeypatch.setenv("TAMMES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TAMMES_DATA", str(tmp_path / "data"))
    return desk


@pytest.mark.parametrize("mistake", ON_THE_COMMAND_LINE)
def test_a_mistake_on_the_command_line_gets_a_hint_in_one_sentence(
    mistake, at_desk, tmp_path, capsys
):
    words, hint = ON_THE_COMMAND_LINE[mistake]
    trains = words.startswith(("train", "compare")) and "--folder" not in words
    out = ["--out", str(tmp_path / "out")] if trains else []
    assert main([*words.split(), *out]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith("tammes")
    assert hint in last
    assert "Traceback" not in printed.err
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").rglob("*.json")]


def _of_expressions():
    flags = ("--backbone", "--loss", "--head", "--augment", "--sampler", "--lr", "--noise")
    return [
        key for key, (words, _) in ON_THE_COMMAND_LINE.items() if any(f in words for f in flags)
    ]


@pytest.mark.parametrize("mistake", _of_expressions())
def test_a_wrong_expression_is_refused_before_any_image_is_decoded(
    mistake, at_desk, tmp_path, monkeypatch, capsys
):
    decoded = []
    monkeypatch.setattr(decode_partition, "decode_all", lambda *given, **more: decoded.append(1))
    assert main([*ON_THE_COMMAND_LINE[mistake][0].split(), "--out", str(tmp_path / "out")]) == 2
    assert not decoded
    assert "decoding" not in capsys.readouterr().err


def test_a_path_is_a_source_as_its_text_is(at_desk):
    assert Config(data=at_desk / "pictures") == Config(data=str(at_desk / "pictures"))
    images = load(at_desk / "pictures", "train", report=lambda text: None)
    # Neither labels nor names of a thousand classes.
    assert len(repr(images)) < 300 + len(str(at_desk))


def test_the_default_data_set_is_announced_in_the_first_line(at_desk, tmp_path, capsys):
    words = ["train", "--epochs", "1", "--limit", "60", "--folder", str(tmp_path / "run")]
    assert main(words) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "data: digits, the default; --data names your own"
    assert main([*words[:-1], str(tmp_path / "again"), "--data", "digits"]) == 0
    assert "the default" not in capsys.readouterr().err


def test_a_comparison_announces_the_default_data_set_before_its_first_message(monkeypatch, capsys):
    def stop(*given, report, **options):
        report("a message")
        raise ValueError("enough")

    monkeypatch.setattr("tammes.lab.cli.compare.compare", stop)
    for words, opening in (([], [DEFAULT_DATA]), (["--data", "digits"], [])):
        assert main(["compare", "--losses", "softmax", *words]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said == [*opening, "a message", "tammes compare: enough"]


def accuracy(folder):
    return json.loads((folder / "final.json").read_text())["test"]["accuracy"]


FORMS = {"folders": "pictures", "table": "labels.csv", "names": "flat/{label}_{number}.png"}


def the_usual_way(out, capsys, forms, *flags):
    """Train on pictures in several forms, then measure and predict; return the accuracies."""
    found = {}
    for name, source in forms.items():
        words = ["--data", source, "--loss", "cosface()", "--folder", str(out / name), *flags]
        assert main(["train", *words]) == 0
        found[name] = accuracy(out / name)
    run = str(out / "table")
    capsys.readouterr()
    assert main(["measure", run, "--json", "--out", str(out / "measured")]) == 0
    measured = json.loads(capsys.readouterr().out)
    final = json.loads((out / "table" / "final.json").read_text())
    margin = measured["measures"]["class_margin.angle"]["value"]
    assert margin == pytest.approx(final["prototypes"]["class_margin"], abs=1e-3)
    assert {name for pair in measured["closest_pairs"] for name in pair["classes"]} == set(CLASSES)
    assert main(["predict", run, "flat", "--top", "1", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["predictions"][0]["class"] for line in lines} <= set(CLASSES)
    return found


def test_ones_own_pictures_go_the_usual_way(at_desk, tmp_path, capsys):
    the_usual_way(tmp_path, capsys, {"table": FORMS["table"]}, "--epochs", "1")


@pytest.mark.slow
def test_two_thousand_pictures_are_learned_in_every_form(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TAMMES_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(write_pictures(tmp_path / "desk", each=400))
    found = the_usual_way(tmp_path / "out", capsys, FORMS, "--epochs", "3", "--lr", "0.05")
    assert min(found.values()) > 0.9
    assert main(["report", str(tmp_path / "out" / "table"), "--out", str(tmp_path / "page")]) == 0


def test_the_measures_of_embeddings_alone_are_named_after_class_means(digits_run):
    alone = measure(read([digits_run.folder / "embeddings.safetensors"]))
    whole = measure(read([digits_run.folder]))
    first, second = (
        {(m.key, m.name) for heading, group in each.groups[:2] for m in group}
        for each in (alone, whole)
    )
    assert not {key for key, _ in first} & {key for key, _ in second}
    assert not {name for _, name in first} & {name for _, name in second}
    assert alone.measure("class_margin.angle").key == "class_means.class_margin.angle"
    assert scale_of_run(digits_run.folder) == digits_run.tensors("prototypes")["scale"]
