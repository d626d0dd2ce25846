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
    for row, column in recipe.all_places():
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
