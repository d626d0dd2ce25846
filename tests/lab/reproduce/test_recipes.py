"""All recipes of the package: numbers as published, claims that hold for them, cells that run."""

import math
import re

import pytest
from recipe_cells import (
    CLASSES,
    SHAPES,
    every_cell,
    load,
    noise,
    published,
    run_quickly,
    steps,
)

from tammes.lab.fewshot import class_lists
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.claims import Better
from tammes.lab.reproduce.quantities import KNOWN

NAMES = recipes.names()
every_recipe = pytest.mark.parametrize("name", NAMES)


# ------------------------------------------------------------------------- numbers and claims


@every_recipe
@pytest.mark.parametrize("source", ["paper", "released"])
def test_numbers_are_those_that_were_published(name, source):
    recipe, expected = load(name), published(name, source)
    found = {place: (each.mean, each.std) for place, each in getattr(recipe, source).items()}
    assert found == expected
    if source == "released" and found:
        assert recipe.released_source
    if source == "paper":
        rows = dict.fromkeys(row for row, _, _ in expected)
        assert [*rows] == [row for row in recipe.rows if row in rows]


def test_published_numbers_are_of_recipes_that_are_there():
    counts = {
        name: sum(len(published(name, source)) for source in ("paper", "released"))
        for name in NAMES
    }
    assert sum(counts.values()) == 1212
    assert [name for name, count in counts.items() if not count] == [
        "advice/classes",
        "advice/identities",
        "identities/audiomnist",
        "identities/chimpanzees",
        "identities/cub",
        "kobayashi2019/fig4",
        "kobayashi2024/mini",
        "kobayashi2024/spectral",
        "liu2016/fig6",
        "liu2016/fig7",
        "liu2020/fig9",
        "liu2020/sweep",
        "losses/longtail",
        "losses/noise",
    ]


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("kobayashi2019/fig3", "kobayashi2019/table2"),
        ("kobayashi2019/discussion", "kobayashi2019/table2"),
        ("zhou2022/fig9", "zhou2022/table1"),
        ("zhou2022/unstable", "zhou2022/table1"),
    ],
)
def test_numbers_that_stand_twice_are_the_same(name, table):
    assert load(name).paper
    assert load(name).paper.items() <= load(table).paper.items()


COMPARED = {
    "liu2016/lfw": 6,
    "zhou2022/table3": 22,
    "kobayashi2019/discussion": 1,
    "kobayashi2019/table1": 22,
    "kobayashi2019/table2": 8,
    "kobayashi2019/table3a": 25,
    "kobayashi2019/table3b": 25,
    "kobayashi2019/table4": 25,
    "kobayashi2024/cifar": 14,
    "kobayashi2024/cub": 10,
    "kobayashi2024/inat": 8,
    "kobayashi2024/tiered": 2,
    "liu2016/mnist": 9,
    "liu2020/cub": 4,
    "liu2020/table6": 8,
    "zhou2022/fig1": 3,
    "zhou2022/fig9": 2,
    "zhou2022/table1": 54,
    "zhou2022/table2": 45,
    "zhou2022/unstable": 2,
}
"""Pairs of published numbers that claims are about."""


def gains(recipe):
    """Claims with the published gains they are about, and the places."""
    for claim in recipe.claims:
        if not isinstance(claim, Better):
            continue
        for column in claim.columns or recipe.columns:
            for pair in claim.pairs:
                for numbers in (recipe.paper, recipe.released):
                    two = [numbers.get((row, column, claim.quantity)) for row in pair]
                    if None in two or near_optimum(claim, column, two[1].mean):
                        continue
                    gain = KNOWN[claim.quantity].better * (two[0].mean - two[1].mean)
                    yield claim, gain, (column, pair)


def near_optimum(claim, column, margin):
    """Whether a class margin cannot be raised any more, which the claim leaves out."""
    if claim.where_below_optimum is None:
        return False
    optimum = math.degrees(math.acos(-1 / (CLASSES[column] - 1)))
    return margin >= optimum - claim.where_below_optimum


@every_recipe
def test_claims_hold_for_the_published_numbers(name):
    checked = 0
    for claim, gain, place in gains(load(name)):
        assert gain >= claim.by, (claim.says, place)
        assert gain > 0 or claim.by < 0, (claim.says, place)
        checked += 1
    assert checked == COMPARED.get(name, 0)


# ------------------------------------------------------------------------------------- cells


@every_recipe
def test_no_two_cells_of_a_recipe_are_the_same_run(name):
    recipe = load(name)
    fixed = [each for each in recipe.all_places() if not recipe.trials(*each)]
    assert len({recipe.cell(*place, 0).digest for place in fixed}) == len(fixed)


@pytest.mark.parametrize(
    ("name", "other", "count"),
    [
        ("kobayashi2019/fig3", "kobayashi2019/table2", 3),
        ("kobayashi2019/discussion", "kobayashi2019/table2", 3),
        ("kobayashi2019/table4", "kobayashi2019/table2", 2),
        ("kobayashi2019/table1", "kobayashi2019/table2", 1),
        ("liu2016/fig6", "liu2016/cifar", 4),
        ("liu2016/fig7", "liu2016/cifar", 1),
        ("zhou2022/fig1", "zhou2022/table1", 3),
        ("zhou2022/fig9", "zhou2022/table1", 4),
        ("zhou2022/unstable", "zhou2022/table1", 6),
    ],
)
def test_cells_that_two_recipes_have_are_the_same_runs(name, other, count):
    own, known = ({cell.digest: cell for cell in load(n).planned(seeds=1)} for n in (name, other))
    shared = own.keys() & known.keys()
    assert len(shared) == count
    for digest in shared:
        assert own[digest].config.loss == known[digest].config.loss
        assert own[digest].config.data == known[digest].config.data


SIX = ["way64", "way32", "way16", "way8", "way4", "random", "best"]
ON_REQUEST = {
    # Data that few have, what the paper does not have, and former settings.
    "kobayashi2019/table4": ["vgg16", "vgg16_mod", "mobilenet", "resnext50", "places"],
    "kobayashi2024/cifar": [
        "way32_cold", "way16_cold", "way32_crop8", "way32_crop30", "way32_long", "way32_84",
        "way16_84", "way32_sibling",
    ],
    "kobayashi2024/cub": ["way32_former"],
    "kobayashi2024/inat": ["way256", "way128", "way64", "random"],
    "kobayashi2024/mini": SIX,
    "kobayashi2024/tiered": SIX,
    "liu2016/lfw": ["lfw"],
    "liu2020/cub": ["resnet12_adam", "resnet18"],
    "losses/noise": ["clean"],
    "liu2020/fig9": ["cifar"],
    "liu2020/table6": ["mini"],
    "zhou2022/table1": ["cifar100_long"],
    "zhou2022/unstable": ["short"],
    "zhou2022/table3": ["market", "duke"],
}  # fmt: skip
ROWS_ON_REQUEST = {
    "kobayashi2019/table4": ["lgm_warm"],
    "kobayashi2024/cifar": ["bce_mean", "bce_mean+nca", "bce_bias", "bce_quarter"],
    "liu2020/table6": ["cosine", "smoothing", "negative"],
}


@every_recipe
def test_rows_and_columns_on_request_are_these_and_no_other(name):
    columns, rows = load(name).columns.values(), load(name).rows.values()
    assert [each.name for each in columns if each.on_request] == ON_REQUEST.get(name, [])
    assert [each.name for each in rows if each.on_request] == ROWS_ON_REQUEST.get(name, [])


# ---------------------------------------------------------------------------------- training

LARGE = {
    "imagenet": ((3, 64, 64), 12),
    "places365": ((3, 64, 64), 12),
    "omniglot": ((1, 28, 28), 64),
    "audiomnist": ((1, 32, 32), 12),
}
TRAINED = {
    "advice/classes": 24,
    "advice/identities": 6,
    "liu2016/lfw": 5,
    "zhou2022/table3": 13,
    "identities/audiomnist": 9,
    "identities/chimpanzees": 9,
    "identities/cub": 9,
    "kobayashi2019/table1": 3,
    "kobayashi2019/table2": 8,
    "kobayashi2019/table3a": 2,
    "kobayashi2019/table3b": 2,
    "kobayashi2019/table4": 41,
    "kobayashi2019/fig3": 3,
    "kobayashi2019/discussion": 7,
    "kobayashi2024/cifar": 16,
    "kobayashi2024/cub": 12,
    "kobayashi2024/spectral": 21,
    "liu2016/mnist": 8,
    "liu2016/cifar": 15,
    "liu2016/fig6": 4,
    "liu2016/fig7": 4,
    "liu2020/table6": 8,
    "liu2020/sweep": 3,
    "zhou2022/table1": 69,
    "zhou2022/table2": 32,
    "zhou2022/fig1": 3,
    "zhou2022/fig9": 4,
    "zhou2022/unstable": 10,
    "losses/longtail": 7,
    "losses/noise": 6,
}
"""Kinds of runs of a recipe."""
EXACT = ("liu2016/", "zhou2022/")
"""Numbers in the loss, and augmentations, make another kind."""
SLOW = ["kobayashi2019/table4", "kobayashi2024/cub", "zhou2022/table1", "zhou2022/table2"]
"""Recipes of many kinds, nearly all of which other recipes have too."""


def small_form(cell):
    """Configuration on small images with schedules that end within a few steps, and the images."""
    run = cell.config
    shape, classes = LARGE.get(run.data, (SHAPES.get(run.data, (3, 32, 32)), None))
    side = 32
    if "224" in run.backbone:
        shape, side = (3, 64, 64), 64
    if classes is None:
        classes = CLASSES.get(run.data, 10)
    if cell.kind == "fewshot" and run.data != "omniglot":
        classes = len(class_lists.read(cell.settings["split"]).base)
    run = run.replace(
        image_size=None,
        image_width=None,
        augment=re.sub(r"size=(84|224)", f"size={side}", run.augment),
        schedules=re.sub(r"epochs=[\d.]+", "epochs=1", run.schedules),
    )
    return run, shape, classes


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in TRAINED]
)
def test_every_kind_of_cell_trains_a_few_steps_and_stays_finite(name):
    seen = set()
    for cell in every_cell(load(name)):
        if cell.config is None:
            continue
        run, shape, classes = small_form(cell)
        what = run.loss, run.augment
        if not name.startswith(EXACT):
            what = re.sub(r"-?\d+(\.\d+)?", "#", run.loss)
        kind = what, run.head, run.backbone, run.schedules, shape, classes
        if kind in seen:
            continue
        seen.add(kind)
        images = noise(shape, classes)
        # Two of each class one after the other, as losses of pairs need.
        images = images.subset(images.labels.argsort(stable=True))
        losses, model = steps(run, images, 4 if run.schedules else 2)
        assert all(map(math.isfinite, losses)), (cell.place, losses)
        assert model.criterion.head.num_classes == classes
        if "blend=LambdaDecay" in run.schedules:
            # The margin acts at last.
            assert model.criterion.schedules["blend"].value <= 5.1
    assert len(seen) == TRAINED[name]


# ----------------------------------------------------------------------------- the quick form

CHOSEN = {
    "advice/classes": (["cosface_30", "arcface_30_warm"], ["mnist", "cifar100"]),
    "advice/identities": (["arcface_30_adamw", "arcface_30_head"], None),
    "liu2016/lfw": (["softmax", "contrastive"], ["lfw"]),
    "zhou2022/table3": (["ce", "lm_softmax_20"], ["market", "duke"]),
    "identities/audiomnist": (["softmax", "lm_softmax"], None),
    "identities/chimpanzees": (["softmax_sm", "arcface"], None),
    "identities/cub": (["cosface", "normface_sm"], None),
    "kobayashi2019/table1": (["u_q_0.1", "symmetric_0.3"], ["cifar100"]),
    "kobayashi2019/table2": (["super_symmetry", "divergence"], ["cifar100", "cifar10"]),
    "kobayashi2019/table3a": (["softmax", "divergence_1"], ["fraction_0.5"]),
    "kobayashi2019/table3b": (["softmax", "divergence_0.5"], ["noise_0.4"]),
    "kobayashi2019/table4": (["lgm", "l_softmax"], ["cifar100"]),
    "kobayashi2019/fig3": (["softmax", "lsr_0.1"], ["cifar100"]),
    "kobayashi2019/discussion": (["hard_bias", "center_divergence"], ["cifar100"]),
    "kobayashi2024/cifar": (["nca", "sce_direct_nca"], ["way32", "way16", "best"]),
    "liu2016/mnist": (["m1", "m4"], ["full", "plane"]),
    "liu2016/cifar": (["m1", "m3"], ["cifar100", "cifar10_plus"]),
    "liu2016/fig6": (["m1", "m2"], ["cifar100"]),
    "liu2016/fig7": (["filters_16", "filters_96"], ["cifar100"]),
    "liu2020/table6": (None, ["cifar"]),
    "liu2020/sweep": (["cosine_-0.3", "cosine_0", "inner_0"], None),
    "zhou2022/table1": (["ce_sm", "arcface_64"], ["mnist", "cifar10", "cifar100"]),
    "zhou2022/table2": (["lm_softmax_zc", "ldam_zc"], ["cifar10_lt100", "cifar100_step10"]),
    "zhou2022/fig1": (["ce", "lm_softmax"], ["mnist", "sphere"]),
    "zhou2022/fig9": (["cosface_20", "cosface_20_sm"], ["cifar100"]),
    "zhou2022/unstable": (["rsm", "ce_sm"], ["mnist", "cifar100"]),
    "losses/longtail": (["ldam_drw", "vs_softmax", "arcface_counts"], None),
    "losses/noise": (["arcface", "subcenter_arcface", "soft_triple"], ["symmetric"]),
}


def check_identities(name, cell):
    assert {"map", "rank_1", "map_at_r", "eer", "auc", "identification"} <= cell.values.keys()
    assert "accuracy" not in cell.values
    low, high = cell.kept["identities"]["intervals"]["eer"]
    assert 0 <= low <= cell.values["eer"] <= high <= 100
    assert len(cell.curves["test.mean_average_precision"]) == len(cell.curves["epoch"]) == 2


def check_advice(name, cell):
    if name == "advice/identities":
        assert {"rank_1", "map", "eer"} <= cell.values.keys()
    else:
        assert 0 <= cell.values["accuracy"] <= 100


def check_kobayashi2019(name, cell):
    assert 0 <= cell.values["error"] <= 100
    assert len(cell.curves["train.bias"]) == len(cell.curves["epoch"]) == 2


def check_kobayashi2024(name, cell):
    assert 0 <= cell.values["shot1"] <= 100
    assert {"shot5", "validation_shot1", "validation_shot5"} <= cell.values.keys()
    assert "base_accuracy" not in cell.values
    if (cell.row, cell.column) == ("sce_direct_nca", "way32"):
        assert max(cell.curves["gradients.cosine"]) < 1e-5


def check_liu2016(name, cell):
    if name == "liu2016/lfw":
        assert {"verification_accuracy", "eer"} <= cell.values.keys()
        assert "map" not in cell.values
        return
    assert {"error", "train_error", "sample_margin"} <= cell.values.keys()
    # Points are kept of features in a plane.
    assert ("scatter" in cell.kept) == (cell.column == "plane")
    if cell.column == "plane":
        assert [len(point) for point in cell.kept["scatter"]["prototypes"]] == [2] * 10


def check_liu2020(name, cell):
    assert {"shot1", "validation_shot5", "base_accuracy"} <= cell.values.keys()
    further = {"base_shot1", "base_shot5"}
    if name == "liu2020/sweep":
        further = {"phi_base", "phi_novel", "p_same"}
    assert further <= cell.values.keys()


def check_losses(name, cell):
    assert 0 <= cell.values["accuracy"] <= 100


def check_zhou2022(name, cell):
    if name == "zhou2022/table3":
        assert {"map", "rank_1", "rank_5"} <= cell.values.keys()
        assert cell.kept["identities"]["intervals"].keys() >= {"map", "rank_1", "rank_5"}
        return
    assert cell.optimum["class_margin"] > cell.values["class_margin"] > 0
    assert ("histograms" in cell.kept) == (name == "zhou2022/fig9")
    assert ("sphere" in cell.kept) == (cell.column == "sphere")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_some_rows_run_end_to_end_in_quick_form(name, small_sets, tmp_path):
    recipe, (rows, columns) = load(name), CHOSEN[name]
    ledger = run_quickly(recipe, rows, columns, tmp_path)
    check = globals()[f"check_{name.partition('/')[0]}"]
    for cell in ledger.cells:
        check(name, cell)
    places = [place for place in recipe.places(rows, columns) if recipe.trials(*place)]
    tuned = {recipe.tuned_place(*place) for place in places}
    assert {*ledger.tuned_settings()} == tuned
    for row, column in tuned:
        assert len(ledger.tuned[f"{row}/{column}"]["tried"]) == len(recipe.trials(row, column))
