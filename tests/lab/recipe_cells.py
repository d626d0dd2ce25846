"""Helpers of the tests of recipes: the published numbers, and small images."""

import csv
import json
from functools import cache
from pathlib import Path

import torch
from PIL import Image

from tammes.lab.data import Images
from tammes.lab.fewshot import class_lists
from tammes.lab.reproduce import judge, recipes
from tammes.lab.reproduce.run import RunnerSettings, Selection, reproduce
from tammes.lab.training.model import build_model

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
CLASSES = {"mnist": 10, "cifar10": 10, "cifar100": 100}
EACH = {"mnist": (30, 10), "cifar10": (30, 10), "cifar100": (8, 10)}
"""Images of a class to train and to test on: enough for five shots and five queries."""


PUBLISHED = Path(__file__).parent / "reproduce" / "published"

load = cache(recipes.load)
"""Recipes by name, each read once."""


class Loaded:
    """Recipes of a paper by name, each read when it is asked for."""

    def __init__(self, paper):
        self.paper = paper

    def __getitem__(self, name):
        return load(f"{self.paper}/{name}")


def published(name, source):
    """Numbers that a paper prints, or its authors released: mean and deviation by place."""
    paper, _, recipe = name.partition("/")
    with (PUBLISHED / f"{paper}.csv").open(newline="") as file:
        return {
            (line["row"], line["column"], line["quantity"]): (
                float(line["mean"]),
                float(line["std"]) if line["std"] else None,
            )
            for line in csv.DictReader(file)
            if (line["recipe"], line["source"]) == (recipe, source)
        }


def every_cell(recipe):
    """All cells in quick form with seed 0, also those run on request; settings to choose: first."""
    for row, column in recipe.places(columns=[*recipe.columns]):
        tried = recipe.trials(row, column, quick=True)
        yield recipe.cell(row, column, 0, quick=True, values=tried[0].tried if tried else None)


def noise(shape, classes, each=2):
    """Images of every class that show nothing."""
    labels = torch.arange(classes).repeat(each)
    generator = torch.Generator().manual_seed(0)
    return Images(
        labels=labels,
        index=torch.arange(len(labels)),
        classes=tuple(f"class {number:03d}" for number in range(classes)),
        shape=shape,
        pixels=torch.randint(256, (len(labels), *shape), dtype=torch.uint8, generator=generator),
        source="noise",
    )


def steps(config, images, count=2):
    """Train a few steps on the first images; the losses and the model."""
    torch.manual_seed(0)
    model = build_model(config, images, steps_per_epoch=count).model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=min(config.lr, 0.1))
    losses = []
    for epoch in range(count):
        chosen = slice(0, 12)
        loss, _ = model(images.pixels[chosen], images.labels[chosen], images.index[chosen], epoch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    return losses, model


def cifar100_names():
    """The 100 classes of CIFAR-100, whose parts are the classes of CIFAR-FS."""
    lists = class_lists.read("cifar-fs")
    return sorted([*lists.base, *lists.validation, *lists.novel])


def superclasses():
    """The superclass of each class of CIFAR-100."""
    path = Path(__file__).parent.parent / "fixtures" / "cifar100_superclasses.json"
    groups = json.loads(path.read_text())
    return {name: group for group, names in groups.items() for name in names}


def write_images(folder):
    """Image folders under the short names of sets, with all of their classes and little else."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        classes = CLASSES[name]
        names = [f"c{number:03d}" for number in range(classes)]
        names = cifar100_names() if name == "cifar100" else names
        # What tells the classes apart is their colour: something can be learned.
        colours = torch.randint(60, 196, (classes, shape[0], 1, 1), generator=generator)
        for split, each in zip(("train", "test"), EACH[name], strict=True):
            for number, label in enumerate(names):
                place = folder / name / split / label
                place.mkdir(parents=True)
                for image in range(each):
                    pixels = colours[number] + torch.randint(-60, 60, shape, generator=generator)
                    array = pixels.to(torch.uint8).permute(1, 2, 0).squeeze(2).numpy()
                    Image.fromarray(array).save(place / f"{image}.png")


IDENTITIES = {
    "cub": {"": 104},
    "chimpanzees": {"train": 6, "novel": 5},
    "audiomnist": {"train": 5, "novel": 4},
}
"""Sets of identities, with the number of identities in each partition."""


def write_identities(folder):
    """Image folders under the short names of sets of identities, 4 images of each identity."""
    write_boxes(folder / "market1501", "{person:04d}_c{camera}s1_000451_03.png")
    write_boxes(folder / "dukemtmc", "{person:04d}_c{camera}_f0046182.png")
    write_faces(folder)
    generator = torch.Generator().manual_seed(0)
    for name, parts in IDENTITIES.items():
        shape = (32, 32) if name == "audiomnist" else (32, 32, 3)
        for part, count in parts.items():
            for number in range(count):
                place = folder / name / part / f"{part}{number:03d}"
                place.mkdir(parents=True)
                colour = torch.randint(60, 196, shape[2:], generator=generator)
                for image in range(4):
                    pixels = colour + torch.randint(-60, 60, shape, generator=generator)
                    Image.fromarray(pixels.to(torch.uint8).numpy()).save(place / f"{image}.png")


def write_boxes(folder, form):
    """Boxes of persons in the layout of Market-1501 or DukeMTMC: 18 to train on, 6 to test on."""
    generator = torch.Generator().manual_seed(0)
    parts = {"bounding_box_train": range(1, 19), "query": range(30, 36)}
    parts["bounding_box_test"] = range(30, 36)
    for part, persons in parts.items():
        (folder / part).mkdir(parents=True)
        for person in persons:
            colour = 60 + 37 * person % 130
            for camera in (1,) if part == "query" else (1, 2, 3):
                pixels = colour + torch.randint(-40, 40, (32, 16, 3), generator=generator)
                name = form.format(person=person, camera=camera)
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / part / name)


def write_faces(folder):
    """Faces to train on in a folder for each person, and LFW with its pairs."""
    generator = torch.Generator().manual_seed(0)
    names = [f"Person_{number}" for number in range(8)]
    for place, persons, form in (
        ("webface", range(70), "{number}.png"),
        ("lfw", names, "{person}_{number:04d}.png"),
    ):
        for person in persons:
            (folder / place / str(person)).mkdir(parents=True)
            colour = torch.randint(60, 196, (3,), generator=generator)
            for number in range(1, 4):
                pixels = colour + torch.randint(-60, 60, (32, 32, 3), generator=generator)
                path = folder / place / str(person) / form.format(person=person, number=number)
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(path)
    lines = ["2 4"]
    for fold in (names[:4], names[4:]):
        others = [*fold[1:], fold[0]]
        lines += [f"{name} 1 2" for name in fold]
        lines += [f"{name} 1 {other} 3" for name, other in zip(fold, others, strict=True)]
    (folder / "lfw" / "pairs.txt").write_text("\n".join(lines) + "\n")


def run_quickly(recipe, rows, columns, folder):
    """The ledger of some cells in quick form with one seed, all of which must have run."""
    said = []
    (ledger,) = reproduce(
        [Selection(recipe, rows, columns, 1)],
        folder,
        quick=True,
        engine=RunnerSettings(workers=2),
        report=said.append,
    )
    found = {(cell.row, cell.column): cell.status for cell in ledger.cells}
    assert found == dict.fromkeys(recipe.places(rows, columns), "done"), said
    # What these rows do not say is open, and nothing holds by one seed.
    outcomes = {verdict.outcome for verdict in judge.judge(recipe, ledger)}
    assert outcomes <= {"open", "leans", "fails"}
    return ledger
