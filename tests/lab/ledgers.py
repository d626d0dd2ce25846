"""Recipes and ledgers built by hand, for tests of what is drawn and written from them."""

import math
import random
from dataclasses import replace

from tammes.lab.reproduce.ledger import Entry, Ledger
from tammes.lab.reproduce.recipe_yaml import read

EVIL = "<script>alert(1)</script>"
MACHINE = {"device": "NVIDIA H200", "torch": "2.11", "python": "3.12", "tammes": "0.1",
           "commit": "abc1234", "platform": "Linux"}  # fmt: skip

TABLE2 = {
    "title": "Two losses",
    "source": "Somebody 2019, Table 2",
    "summary": "Two losses are compared.",
    "seeds": 3,
    "quantities": ["error"],
    "config": {"backbone": "layer13", "epochs": 5},
    "columns": {"cifar100": {"title": "CIFAR-100", "config": {"data": "cifar100"}}},
    "rows": {
        "softmax": {"title": "Softmax loss", "config": {"loss": "softmax()"}},
        "divergence": {
            "title": "Divergence",
            "config": {"loss": "softmax() + 0.3*logit_divergence()"},
            "note": "A note on it.",
        },
    },
    "paper": {
        "softmax": {"cifar100": {"error": "28.62 ± 0.24"}},
        "divergence": {"cifar100": {"error": 27.27}},
    },
    "released": {"softmax": {"cifar100": {"error": "29.42 ± 0.19"}}},
    "released_source": "Read in their repository.",
    "claims": [
        {
            "says": "The divergence is better by 1.",
            "better": "divergence",
            "than": "softmax",
            "by": 1.0,
        },
        {
            "says": "Softmax is near the released code.",
            "near": "released",
            "within": 0.5,
            "rows": ["softmax"],
        },
        {"says": "The bias falls.", "curve": "train.bias", "falls": ["softmax"]},
    ],
    "curves": ["train.bias"],
    "figures": [{"draw": "curves", "of": "train.bias", "title": "Bias"}],
    "protocol": [{"what": "Epoch", "paper": "the best", "ours": "the last", "why": "it is honest"}],
}


def entry(row, column, seed, values, **more):
    """A cell that is done, with curves that end at its values."""
    accuracy = values.get("accuracy", 100 - values.get("error", 50.0)) / 100
    curves = {
        "epoch": [1, 2, 3, 4, 5],
        "test.accuracy": [accuracy * (1 - 0.5 / epoch**2) for epoch in range(1, 5)] + [accuracy],
        "train.loss": [3.0 / epoch for epoch in range(1, 6)],
        "train.bias": [2.0, 1.5, None, 1.2, 1.0 + 0.01 * seed],
    }
    given = {
        "row": row,
        "column": column,
        "seed": seed,
        "digest": "0123abcd",
        "status": "done",
        "values": values,
        "epochs": 5,
        "step": 100,
        "seconds": 36.0,
        "chosen": "last epoch",
        "curves": curves,
        "machine": 0,
    }
    return Entry(**(given | more))


def stop(row, column, seed, status="diverged", **more):
    """A cell that ended without a number."""
    given = {"epochs": 0, "step": 1310, "reason": "the loss is nan", "curves": {}}
    return entry(row, column, seed, {}, status=status, **(given | more))


def several_seeds():
    """Three seeds of two rows, all done: softmax 29.5 ± 0.2, divergence 27.8 ± 0.1."""
    recipe = read(TABLE2, "somebody2019/table2")
    errors = {"softmax": (29.3, 29.5, 29.7), "divergence": (27.7, 27.8, 27.9)}
    cells = [
        entry(row, "cifar100", seed, {"error": value, "accuracy": 100 - value})
        for row, values in errors.items()
        for seed, value in enumerate(values)
    ]
    configs = {
        f"{row}/cifar100": {"data": "cifar100", "loss": recipe.rows[row].config["loss"], "seed": 0}
        for row in errors
    }
    ledger = Ledger(
        recipe.name,
        command="tammes reproduce somebody2019/table2",
        machines=[MACHINE],
        cells=cells,
        configs=configs,
    )
    return recipe, ledger


def one_seed():
    """One seed of each row."""
    recipe, ledger = several_seeds()
    ledger.cells = [cell for cell in ledger.cells if cell.seed == 0]
    return read({**TABLE2, "seeds": 1}, recipe.name), ledger


def stopped():
    """Cells that diverged, failed, are open, or are run on request only."""
    columns = {
        **TABLE2["columns"],
        "svhn": {"title": "SVHN", "config": {"data": "svhn"}},
        "imagenet": {"title": "ImageNet", "on_request": True, "config": {"data": "imagenet"}},
    }
    paper = {
        "softmax": {"cifar100": {"error": 28.62}, "imagenet": {"error": 31.4}},
        "divergence": {"cifar100": {"error": 27.27}, "imagenet": {"error": 30.9}},
    }
    tune = {"config": {"loss": "{w}*softmax()"}, "tune": {"w": [1, 2]}, "columns": ["svhn"]}
    rows = {**TABLE2["rows"], "tuned": {"title": "Tuned", **tune}}
    given = {**TABLE2, "columns": columns, "rows": rows, "paper": paper, "released": {}}
    given["claims"] = TABLE2["claims"][:1]
    recipe = read(given, "somebody2019/stopped")
    cells = [
        entry("softmax", "cifar100", 0, {"error": 29.0}),
        entry("softmax", "cifar100", 1, {"error": 29.4}),
        stop("softmax", "cifar100", 2, reason=f"not finite: {EVIL}"),
        *(stop("divergence", "cifar100", seed) for seed in range(3)),
        stop("softmax", "svhn", 0, "failed", reason="the worker was killed"),
    ]
    tuned = {"tuned/svhn": {"w": 2, "tried": [{"w": 1, "accuracy": 41.25}, {"w": 2}]}}
    return recipe, Ledger(recipe.name, machines=[MACHINE], cells=cells, tuned=tuned)


def large(seeds=2):
    """27 rows, 3 columns, 3 quantities."""
    generator = random.Random(0)
    rows = {
        f"row{place}": {
            "title": f"CosFace, s = {place}" if place % 2 else f"CosFace, s = {place} + 0.5 R_sm",
            "values": {"s": place, "series": "with R_sm" if place % 2 == 0 else "without"},
        }
        for place in range(27)
    }
    columns = {
        name: {"title": title, "config": {"data": name}}
        for name, title in (("mnist", "MNIST"), ("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100"))
    }
    levels = {"mnist": 99.2, "cifar10": 93.0, "cifar100": 73.0}
    paper, cells = {}, []
    for place, row in enumerate(rows):
        for column, level in levels.items():
            published = {
                "accuracy": round(level - 0.02 * place + generator.gauss(0, 0.1), 2),
                "class_margin": round(60 + 1.2 * place + generator.gauss(0, 1), 2),
                "sample_margin": round(0.3 + 0.02 * place, 3),
            }
            paper.setdefault(row, {})[column] = published
            for seed in range(seeds):
                values = {k: v + generator.gauss(0, 0.005 * v) for k, v in published.items()}
                optimum = {"class_margin": 96.38, "sample_margin": 1.11}
                cells.append(entry(row, column, seed, values, optimum=optimum))
    given = {
        "title": "Margins",
        "source": "Somebody 2022, Table 1",
        "seeds": seeds,
        "quantities": ["accuracy", "class_margin", "sample_margin"],
        "rows": rows,
        "columns": columns,
        "paper": paper,
        "claims": [
            {
                "says": "The regulariser raises the sample margin in every row.",
                "quantity": "sample_margin",
                "pairs": [[f"row{place + 1}", f"row{place}"] for place in range(0, 26, 2)],
            }
        ],
        "figures": [{"draw": "by", "x": "s", "of": "class_margin", "title": "By scale"}],
    }
    recipe = read(given, "somebody2022/table1")
    return recipe, Ledger(recipe.name, machines=[MACHINE], cells=cells)


def drawn():
    """Every kind of figure, with names that try to break the page."""
    edges = [round(-1 + place / 40, 4) for place in range(81)]
    wide = [2 * edge for edge in edges]
    histograms = {
        "edges_cosine": edges,
        "own": [0] * 60 + [5] * 20,
        "hardest": [0] * 30 + [5] * 20 + [0] * 30,
        "edges_margin": wide,
        "margin": [0] * 38 + [2, 8, 40, 50] + [0] * 38,
    }
    turn = [math.radians(36 * place) for place in range(10)]
    points = {
        "x": [5 * math.cos(angle) for angle in turn],
        "y": [5 * math.sin(angle) for angle in turn],
        "label": list(range(10)),
    }
    directions = [[math.cos(angle), math.sin(angle)] for angle in turn]
    scatter = {"train": points, "test": points, "prototypes": directions}
    axes = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]
    sphere = {"prototypes": axes, "features": axes + axes, "labels": [0, 1, 2, 3] * 2}
    given = {
        "title": f"Title {EVIL}",
        "source": f"Source {EVIL}",
        "summary": f"Summary {EVIL}",
        "seeds": 2,
        "quantities": ["error"],
        "columns": {
            "one": {"title": f"One {EVIL}", "values": {"share": 0.5}},
            "two": {"title": "Two & more", "values": {"share": 0.9}},
        },
        "rows": {
            "a": {"title": f"A {EVIL}", "values": {"m": 1}, "note": f"Note {EVIL}"},
            "b": {"title": "$B$ | *b* _b_", "values": {"m": 2}},
            "ball": {
                "title": "Ball",
                "kind": "sphere",
                "columns": ["one"],
                "settings": {"loss": "lm_softmax()", "scale": 12},
            },
        },
        "paper": {"a": {"one": {"error": 10}, "two": {"error": 8}}, "b": {"one": {"error": 9}}},
        "claims": [{"says": f"Claim {EVIL}", "better": "b", "than": "a"}],
        "figures": [
            {"draw": "curves", "of": "train.bias", "title": f"Bias {EVIL}"},
            {"draw": "by", "x": "m", "of": "error", "title": "Error by m", "columns": ["one"]},
            {"draw": "by", "x": "share", "of": "error", "rows": ["a", "b"]},
            {"draw": "histograms"},
            {"draw": "scatter", "rows": ["b"]},
            {"draw": "formula", "of": "divergences"},
            {"draw": "spheres"},
        ],
        "protocol": [{"what": f"What {EVIL}", "paper": "x", "ours": "y", "why": "z"}],
    }
    recipe = read(given, "somebody/figures")
    cells = [
        entry(
            row,
            column,
            seed,
            {"error": 10.0 - place + 0.1 * seed + (column == "two")},
            kept={"histograms": histograms, "scatter": scatter},
            optimum={"sample_margin": 1.1},
        )
        for place, row in enumerate(("a", "b"))
        for column in ("one", "two")
        for seed in (0, 1)
    ]
    cells.append(
        entry("ball", "one", 0, {"class_margin": 74.5}, curves={}, kept={"sphere": sphere})
    )
    machine = MACHINE | {"device": f"Device {EVIL}"}
    ledger = Ledger(recipe.name, command=f"tammes '{EVIL}'", machines=[machine], cells=cells)
    ledger.configs = {"a/one": {"loss": EVIL, "lr": 0.1}, "b/one": {"loss": "b", "lr": 0.1}}
    return recipe, ledger


def as_of(recipe, ledger):
    """The same ledger, whose cells are those of the recipe as it is."""
    chosen = ledger.tuned_settings(recipe)

    def digest(each):
        values = chosen.get((each.row, each.column))
        return recipe.cell(each.row, each.column, each.seed, values=values).digest

    return replace(ledger, cells=[replace(each, digest=digest(each)) for each in ledger.cells])
