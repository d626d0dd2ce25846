"""A recipe: how cells come of rows, columns and values, and what is said of one that is none."""

import pytest
from messages import pattern

from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.claims import Better, Bound, Course, Near
from tammes.lab.reproduce.quantities import KNOWN, read_all
from tammes.lab.reproduce.recipe import VALIDATION_SHARE, Published, fill
from tammes.lab.reproduce.recipe_yaml import _DRAWN, RecipeError, read

SMALL = {
    "title": "Two losses",
    "source": "nowhere",
    "config": {"epochs": 4, "lr": 0.2},
    "columns": {"left": {"config": {"data": "digits"}}, "right": {"config": {"batch_size": 32}}},
    "rows": {"a": {}, "b": {"config": {"loss": "cosface()"}}},
}


def small(**changes):
    return read({**SMALL, **changes}, "small")


def one_row(row, **changes):
    """A recipe with a single row beside a plain one."""
    return small(rows={"a": {}, "b": row}, **changes)


def field(recipe, name, row="b", column="left", **options):
    return getattr(recipe.cell(row, column, 0, **options).config, name)


# ------------------------------------------------------------------------------ what a cell is


def test_a_row_stands_above_a_column_and_a_column_above_the_recipe():
    columns = {"left": {"config": {"epochs": 5, "lr": 0.5}}, "right": {}}
    recipe = one_row({"config": {"epochs": 6}}, columns=columns)
    assert field(recipe, "epochs", "a", "right") == 4
    assert field(recipe, "epochs", "a", "left") == 5
    assert field(recipe, "epochs", "b", "left") == 6
    assert field(recipe, "lr", "b", "left") == 0.5
    assert field(recipe, "lr", "b", "right") == 0.2


def test_an_override_stands_above_everything_in_its_column_alone():
    recipe = one_row({"config": {"lr": 0.3}, "overrides": {"right": {"lr": 0.7}}})
    assert field(recipe, "lr", column="left") == 0.3
    assert field(recipe, "lr", column="right") == 0.7


def test_values_are_filled_in_and_a_row_s_own_stand_above_a_column_s():
    columns = {"left": {"values": {"k2": 100, "r": 1}}, "right": {"values": {"k2": 10000}}}
    row = {"config": {"loss": "softmax() + {r}*{k2}*zero_centroid()"}, "values": {"r": 5}}
    recipe = one_row(row, columns=columns)
    assert field(recipe, "loss", column="left") == "softmax() + 5*100*zero_centroid()"
    assert field(recipe, "loss", column="right") == "softmax() + 5*10000*zero_centroid()"


def test_values_reach_the_fields_of_the_recipe_and_of_the_column_too():
    columns = {"left": {"config": {"head": "cosine(scale={s})"}}}
    rows = {"b": {"values": {"s": 7}}}
    recipe = small(rows=rows, columns=columns, config={"name": "at {s}"})
    cell = recipe.cell("b", "left", 0)
    assert (cell.config.head, cell.config.name) == ("cosine(scale=7)", "at 7")


def test_a_text_that_is_nothing_but_a_name_becomes_the_value_itself():
    assert fill({"lr": "{x}", "loss": "{x}*a()", "n": 3}, {"x": 0.5}, "") == {
        "lr": 0.5,
        "loss": "0.5*a()",
        "n": 3,
    }


def test_a_row_starts_with_what_its_base_has():
    rows = {
        "a": {
            "title": "A",
            "config": {"loss": "cosface(margin={m})", "lr": 0.3},
            "overrides": {"right": {"epochs": 9}},
            "values": {"m": 0.1, "n": 1},
            "tune": {"s": [1, 2]},
            "columns": ["left"],
            "note": "A note.",
        },
        "b": {"base": "a", "config": {"lr": 0.4}, "values": {"m": 0.2}},
        "c": {"base": "b", "tune": {}},
    }
    recipe = small(rows=rows)
    row = recipe.rows["b"]
    assert row.config == {"loss": "cosface(margin={m})", "lr": 0.4}
    assert row.overrides == {"right": {"epochs": 9}}
    assert row.values == {"m": 0.2, "n": 1}
    assert row.tune == {"s": [1, 2]}
    # These are the row's own.
    assert (row.title, row.note, row.columns) == ("b", "", ())
    assert recipe.rows["c"].tune == {}
    assert recipe.rows["c"].values == {"m": 0.2, "n": 1}


def test_a_base_on_the_sphere_makes_a_row_on_the_sphere():
    rows = {
        "a": {"kind": "sphere", "settings": {"loss": "lm_softmax()", "scale": 5}},
        "b": {"base": "a", "settings": {"scale": 9}},
    }
    recipe = small(rows=rows)
    assert recipe.cell("b", "left", 0).kind == "sphere"
    assert recipe.cell("b", "left", 0).settings == {"loss": "lm_softmax()", "scale": 9}


def test_settings_on_the_sphere_are_filled_in_and_the_seed_makes_the_digest():
    row = {"kind": "sphere", "settings": {"loss": "{l}", "scale": 5}, "values": {"l": "normface()"}}
    recipe = one_row(row)
    first, second = (recipe.cell("b", "left", seed) for seed in (0, 1))
    assert first.config is None
    assert first.settings == {"loss": "normface()", "scale": 5}
    assert first.digest != second.digest
    assert first.folder == f"sphere_b-seed0-{first.digest}"
    assert recipe.cell("b", "right", 0).digest == first.digest


# -------------------------------------------------------------------------------- which are run


def places(recipe, *args, **options):
    return [(cell.row, cell.column, cell.seed) for cell in recipe.planned(*args, **options)]


def test_all_cells_are_planned_row_by_row_with_as_many_seeds_as_the_recipe_says():
    assert places(small(seeds=2)) == [
        (row, column, seed) for row in "ab" for column in ("left", "right") for seed in (0, 1)
    ]
    assert len(places(small())) == 2 * 2 * 3


def test_quick_is_one_seed_where_none_are_asked_for():
    assert places(small(), ["a"], ["left"], quick=True) == [("a", "left", 0)]
    assert len(places(small(), ["a"], ["left"], 2, quick=True)) == 2


def test_rows_columns_and_seeds_can_be_chosen():
    assert places(small(), ["b"], ["right"], 2) == [("b", "right", 0), ("b", "right", 1)]
    assert places(small(), ["b"], ["right"], [4, 2]) == [("b", "right", 4), ("b", "right", 2)]
    assert [cell.config.seed for cell in small().planned(["b"], ["right"], [4, 2])] == [4, 2]


def test_a_column_on_request_is_planned_only_where_it_is_named():
    columns = {"left": {}, "large": {"on_request": True}}
    recipe = small(columns=columns, seeds=1)
    assert places(recipe) == [("a", "left", 0), ("b", "left", 0)]
    assert places(recipe, ["a"], ["large"]) == [("a", "large", 0)]
    assert recipe.all_places() == [("a", "left"), ("a", "large"), ("b", "left"), ("b", "large")]


def test_a_row_on_request_is_planned_only_where_it_is_named():
    recipe = small(rows={"a": {}, "b": {"on_request": True}}, columns={"left": {}}, seeds=1)
    assert places(recipe) == [("a", "left", 0)]
    assert places(recipe, ["b"]) == [("b", "left", 0)]
    assert recipe.all_places() == [("a", "left"), ("b", "left")]
    assert (recipe.on_request("a", "left"), recipe.on_request("b", "left")) == (False, True)


def test_a_row_is_in_the_columns_it_names_and_no_other():
    recipe = one_row({"columns": ["right"]}, seeds=1)
    assert places(recipe) == [("a", "left", 0), ("a", "right", 0), ("b", "right", 0)]
    assert not recipe.has("b", "left")
    assert recipe.has("a", "left")
    assert places(recipe, ["b"], ["left"]) == []


TUNED = {
    "config": {"head": "cosine(scale={s})", "loss": "cosface(margin={m})"},
    "values": {"s": 1},
    "tune": {"s": [5, 10], "m": [0.1, 0.2, 0.3]},
    "columns": ["left"],
}


def test_a_row_that_is_tuned_is_planned_once_its_settings_are_chosen():
    recipe = one_row(TUNED, seeds=1)
    assert places(recipe) == [("a", "left", 0), ("a", "right", 0)]
    found = recipe.planned(["b"], tuned={("b", "left"): {"s": 10, "m": 0.2}})
    assert [(cell.config.head, cell.config.loss) for cell in found] == [
        ("cosine(scale=10)", "cosface(margin=0.2)")
    ]
    assert found[0].config.validation == 0.0
    assert found[0].tried == {}


def test_trials_are_all_combinations_with_a_tenth_of_images_held_out():
    trials = one_row(TUNED).trials("b", "left")
    assert [trial.tried for trial in trials] == [
        {"s": s, "m": m} for s in (5, 10) for m in (0.1, 0.2, 0.3)
    ]
    assert {trial.config.validation for trial in trials} == {VALIDATION_SHARE} == {0.1}
    assert {trial.seed for trial in trials} == {trial.config.seed for trial in trials} == {0}
    assert trials[4].config.loss == "cosface(margin=0.2)"
    assert len({trial.digest for trial in trials}) == 6


def test_tuning_of_a_column_holds_for_its_rows_unless_they_say_otherwise():
    columns = {"left": {"tune": {"lr": [0.1, 0.2]}, "config": {"lr": "{lr}"}}, "right": {}}
    rows = {"a": {}, "b": {"tune": {"lr": [0.3, 0.4]}, "columns": ["left"]}}
    recipe = small(columns=columns, rows=rows, seeds=1)
    assert [trial.config.lr for trial in recipe.trials("a", "left")] == [0.1, 0.2]
    assert [trial.config.lr for trial in recipe.trials("b", "left")] == [0.3, 0.4]
    assert recipe.trials("a", "right") == []
    assert places(recipe) == [("a", "right", 0)]


def test_a_row_that_is_not_tuned_has_no_trials():
    assert one_row(TUNED).trials("a", "left") == []


def test_trials_in_quick_form_hold_images_out_as_well():
    trial = one_row(TUNED).trials("b", "left", quick=True)[0]
    assert (trial.config.validation, trial.config.limit) == (0.1, 300)


def test_the_same_run_has_the_same_digest_and_folder_in_every_recipe():
    first = small()
    rows = {"other": {"title": "Another", "config": {"loss": "cosface( )", "epochs": 4, "lr": 0.2}}}
    second = read({**SMALL, "config": {}, "rows": rows}, "second")
    one, two = first.cell("b", "left", 1), second.cell("other", "left", 1)
    assert one.digest == two.digest
    assert one.digest != second.cell("other", "left", 0).digest
    assert one.digest != second.cell("other", "right", 1).digest


def test_a_digest_is_for_ever():
    # Ledgers know their cells by it. A field that is new has its line in config._LATER.
    from tammes.lab.config.schema import Config

    assert Config(loss="cosface()", lr=0.3).digest == "0d4b6b60"
    assert Config(loss="cosface()", lr=0.4).digest != "0d4b6b60"
    assert Config(loss="cosface()", lr=0.3, limit=5).digest != "0d4b6b60"


def test_a_recipe_without_rows_has_no_cells():
    recipe = read(
        {"title": "T", "source": "s", "figures": [{"draw": "formula", "of": "divergences"}]}, "fig"
    )
    assert recipe.planned() == []
    assert recipe.seeds == 3
    assert [quantity.key for quantity in recipe.quantities] == ["accuracy"]


# ---------------------------------------------------------------------------- numbers and claims


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("28.62 ± 0.24", Published(28.62, 0.24)),
        ("28.62±0.24", Published(28.62, 0.24)),
        (27.27, Published(27.27)),
        (90, Published(90.0)),
        ("-1.5", Published(-1.5)),
    ],
)
def test_a_published_number_may_have_a_deviation(text, number):
    recipe = small(paper={"a": {"left": {"error": text}}})
    assert recipe.paper == {("a", "left", "error"): number}
    assert recipe.released == {}


def test_a_quantity_is_read_off_a_finished_run_in_its_unit():
    found = read_all(
        {
            "test": {"accuracy": 0.75, "sample_margin": 0.5, "bias": 1.5},
            "train": {"accuracy": 0.9},
            "prototypes": {"class_margin": 80.0, "norm_ratio": 1.25},
            "seconds": 3.0,
        }
    )
    assert found == pytest.approx(
        {
            "accuracy": 75.0,
            "error": 25.0,
            "train_error": 10.0,
            "class_margin": 80.0,
            "sample_margin": 0.5,
            "bias": 1.5,
            "norm_ratio": 1.25,
        }
    )
    assert read_all({"test": {"accuracy": float("nan")}}) == {}


@pytest.mark.parametrize(
    ("key", "better"),
    [
        ("accuracy", 1),
        ("error", -1),
        ("train_error", -1),
        ("class_margin", 1),
        ("sample_margin", 1),
    ],
)
def test_a_quantity_knows_which_way_is_better(key, better):
    assert KNOWN[key].better == better


def test_claims_are_read_as_what_they_are():
    recipe = small(
        quantities=["error", "class_margin"],
        curves=["train.bias"],
        paper={"a": {"left": {"error": 5}}},
        claims=[
            {"says": "One.", "better": "b", "than": "a", "by": 1},
            {"says": "Two.", "pairs": [["b", "a"]], "quantity": "class_margin",
             "where_below_optimum": 1.0, "columns": ["left"]},
            {"says": "Three.", "near": "paper", "within": 0.5},
            {"says": "Four.", "rows": ["a"], "at_least": 90},
            {"says": "Five.", "rows": ["a"], "at_most": 9, "quantity": "class_margin"},
            {"says": "Six.", "curve": "train.bias", "falls": ["a"], "falls_then_rises": ["b"]},
        ],
    )  # fmt: skip
    assert recipe.claims == (
        Better(says="One.", quantity="error", pairs=(("b", "a"),), by=1),
        Better(says="Two.", quantity="class_margin", columns=("left",), pairs=(("b", "a"),),
               where_below_optimum=1.0),
        Near(says="Three.", quantity="error", near="paper", within=0.5),
        Bound(says="Four.", quantity="error", rows=("a",), at_least=90),
        Bound(says="Five.", quantity="class_margin", rows=("a",), at_most=9),
        Course(says="Six.", curve="train.bias", falls=("a",), falls_then_rises=("b",)),
    )  # fmt: skip


# ---------------------------------------------------------------------------------- what is wrong

CLAIM = {"says": "So.", "better": "b", "than": "a"}


def claim(**changes):
    values = {**CLAIM, **changes}
    return {"claims": [{key: value for key, value in values.items() if value is not None}]}


MISTAKES = [
    ({"title": None}, "title of the recipe is expected to be text, got None"),
    ({"source": 3}, "source ... text ... 3"),
    ({"colums": {}}, "the recipe has no 'colums'; did you mean columns?"),
    ({"seeds": 0}, "seeds of the recipe is expected to be at least 1, got 0"),
    ({"seeds": True}, "seeds of the recipe is expected to be a whole number, got True"),
    ({"seeds": 2.0}, "seeds ... whole number ... 2.0"),
    ({"quantities": "error"}, "quantities ... list ... 'error'"),
    ({"quantities": ["eror"]}, "there is no quantity 'eror'; did you mean error?"),
    ({"config": {"epoch": 3}}, "config ... recipe ... 'epoch' ... epochs ..."),
    ({"quick": {"limits": 3}}, "quick ... recipe ... 'limits' ... limit ..."),
    ({"config": [1]}, "config ... table ... [1]"),
    ({"columns": {}}, "a recipe with rows is expected to have columns"),
    ({"columns": {"left": None}}, "column left ... table ... None"),
    ({"columns": {"left": {"titel": "x"}}}, "column left ... 'titel' ... title ..."),
    ({"columns": {"left": {"on_request": "no"}}},
     "on_request of column left is expected to be true or false, got 'no'"),
    ({"columns": {"le/ft": {}}},
     "names are expected to have letters, digits and _ . + -, got 'le/ft'"),
    ({"rows": {"a,b": {}}}, "names ... letters ... 'a,b'"),
    ({"rows": {"": {}}}, "names ... letters ... ''"),
    ({"rows": {"a": {"confg": {}}}}, "row a ... 'confg' ... config ..."),
    ({"rows": {"a": {"config": {"los": "x"}}}}, "config ... row a ... 'los' ... loss ..."),
    ({"rows": {"a": {"base": "b"}, "b": {}}}, "base of row a names no row above it: 'b'"),
    ({"rows": {"soft": {}, "b": {"base": "sotf"}}},
     "base of row b names no row above it: 'sotf'; did you mean soft?"),
    ({"rows": {"a": {"columns": ["lef"]}}}, "row a ... 'lef' ... left ..."),
    ({"rows": {"a": {"tuned_as": "b"}}}, "tuned_as names no row 'b'; it has a"),
    ({"rows": {"a": {}, "b": {"tune": {"s": [1, 2]}, "tuned_as": "a"}}},
     "row b, column left ... row a, column left ... candidates {'s': [1, 2]}, got {}"),
    ({"rows": {"a": {}, "b": {"tuned_as": "a"}, "c": {"tuned_as": "b"}}},
     "row c, column left ... tuned as row b, column left ... tuned itself, got ... row a ..."),
    ({"rows": {"a": {"columns": ["zzz"]}}}, "row a names no column 'zzz'; it has left, right"),
    ({"rows": {"a": {"columns": "left"}}}, "columns ... row a ... list ... 'left'"),
    ({"rows": {"a": {"overrides": {"rigth": {}}}}}, "row a ... 'rigth' ... right ..."),
    ({"rows": {"a": {"overrides": {"right": {"lrr": 1}}}}},
     "right ... overrides ... row a ... 'lrr' ... lr ..."),
    ({"rows": {"a": {"kind": "shpere"}}},
     "kind of row a is expected to be train, fewshot or sphere, got 'shpere'"),
    ({"rows": {"a": {"tune": {"s": 5}}}}, "s ... tune ... row a ... list ... 5"),
    ({"rows": {"a": {"tune": {"s": [5]}}}}, "tune ... row a ... 2 ... [5]"),
    ({"rows": {"a": {"kind": "sphere", "tune": {"s": [5, 6]}}}},
     "row a is of the kind sphere, which cannot be tuned, got tune"),
    ({"rows": {"a": {"config": {"lr": "{scal}"}, "values": {"scale": 1}}}},
     "small, row a, column left: there is no value for {scal}; did you mean scale?"),
    ({"rows": {"a": {"config": {"epochs": 0}}}},
     "small, row a, column left: epochs ... at least 1 ... 0"),
    ({"rows": {"a": {"config": {"epochs": "{e}"}, "tune": {"e": [3, "four"]}}}},
     "small, row a, column left: epochs ... whole number ... 'four'"),
    ({"paper": {"c": {}}}, "paper ... 'c' ... a, b"),
    ({"paper": {"a": {"lft": {}}}}, "paper ... 'lft' ... left ..."),
    ({"released": {"a": {"left": {"err": 1}}}}, "... quantity ... 'err' ... error ..."),
    *(({"paper": {"a": {"left": {"error": value}}}},
       f"paper of a in left is expected to be a number such as 28.62 ± 0.24, got {value!r}")
      for value in ("about 5", True, "1.2.3", "5 ±", None)),
    (claim(than="c"), "... claim ... 'c' ... a, b"),
    (claim(columns=["lefd"]), "... claim ... 'lefd' ... left ..."),
    (claim(quantity="eror"), "... quantity ... 'eror' ... error ..."),
    (claim(quantity=5), "quantity ... claim 1 ... text ... 5"),
    (claim(columns="left"), "columns ... claim 1 ... list ... 'left'"),
    (claim(by="much"), "by ... claim 1 ... number ... 'much'"),
    (claim(by=float("nan")), "by ... claim 1 ... number ... nan"),
    (claim(by=True), "by ... claim 1 ... number ... True"),
    (claim(better=None, than=None, pairs=5), "pairs ... claim 1 ... list ... 5"),
    (claim(better=None, than=None, pairs=["ab"]), "... pairs ... claim 1 ... list ... 'ab'"),
    (claim(better=None, than=None, pairs=[["a"]]), "... pairs ... claim 1 ... list of 2 ... ['a']"),
    (claim(better=None, than=None), "claim 1 ... better ... says"),
    (claim(says=None), "claim 1 ... says ... quantity, pairs"),
    (claim(within=1), "claim 1 ... 'within' ... by ..."),
    ({"claims": [{"says": "x", "at_least": 3}]}, "claim 1 ... rows ... quantity, says, at_least"),
    ({"claims": [{"says": "x", "rows": ["a"], "at_least": 3, "at_most": 4}]},
     "claim 1 ... at_least ... both"),
    ({"claims": [{"says": "x", "near": "us", "within": 3}]},
     "near of claim 1 is expected to be paper or released, got 'us'"),
    ({"claims": [{"says": "x", "curve": 3}]}, "curve ... claim 1 ... text ... 3"),
    ({"claims": [{"says": "x", 1: 2}]}, "claim 1 ... better ... says, 1"),
    ({"claims": [CLAIM, {**CLAIM, "says": 1}]}, "says ... claim 2 ... text ... 1"),
    ({"claims": [{"says": "x", "curve": "train.bias", "falls": ["a"]}]},
     "a claim is about a curve that is not kept: 'train.bias'; did you mean train.loss?"),
    ({"claims": [{"says": "x", "near": "paper", "within": 3}]},
     "a claim is about numbers of paper, which has none"),
    ({"figures": [{"draw": "curves"}]}, "... figure ... curves ... of ... none"),
    ({"keep": ["histogram"]},
     "a part of keep ... is expected to be health, histograms or scatter, got 'histogram'"),
    ({"keep": "scatter"}, "keep ... list ... 'scatter'"),
    ({"curves": "train.bias"}, "curves ... list ... 'train.bias'"),
    ({"figures": [{"draw": "curve"}]},
     f"draw of a figure is expected to be one of {', '.join(_DRAWN)}, got {{'draw': 'curve'}}"),
    ({"figures": [{"draw": "histograms", "rows": ["c"]}]}, "... figure ... 'c' ... a, b"),
    ({"figures": [{"draw": "histograms", "columns": ["c"]}]}, "... figure ... 'c' ... left, right"),
    ({"figures": [{"draw": "histograms", "rows": 3}]}, "rows ... figure ... list ... 3"),
    ({"protocol": [{"what": 3}]}, "what ... protocol ... text ... 3"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), MISTAKES, ids=lambda value: str(value)[:50])
def test_what_cannot_be_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=pattern(sentence)):
        small(**changes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rows": ["soft"]}, "small has no row 'soft'; it has a, b"),
        ({"columns": ["lift"]}, "small has no column 'lift'; did you mean left?"),
        ({"seeds": 0}, "seeds is expected to be at least 1, got 0"),
        ({"seeds": [1, 1]}, "seeds is expected to name each seed once, got [1, 1]"),
        ({"seeds": []}, "seeds ... name ... []"),
        ({"seeds": [-1]}, "small, row a, column left: seed ... at least 0 ... -1"),
    ],
)
def test_what_is_asked_for_and_not_there_is_refused_in_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=pattern(sentence)):
        small().planned(**options)


# ------------------------------------------------------------------------------------------ files

YAML = """
title: A table
source: nowhere
columns: {left: {}}
rows: {a: {}}
"""


def load(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return recipes.load(path)


def test_a_file_of_one_s_own_is_called_by_its_stem(tmp_path):
    recipe = load(tmp_path, YAML)
    assert (recipe.name, recipe.title) == ("mine", "A table")
    assert recipes.load(str(tmp_path / "mine.yaml")) == recipe


def test_a_table_can_take_over_another_and_change_it(tmp_path):
    text = YAML + "config: &all {lr: 0.3, epochs: 5}\nquick: {<<: *all, epochs: 1}\n"
    assert load(tmp_path, text).quick == {"lr": 0.3, "epochs": 1}


@pytest.mark.parametrize("text", ["5e-4", "5E-4", "0.5e-3", "5.e-4", ".5e-3", "+5e-4", "0.0005"])
def test_a_number_may_be_written_as_everywhere(tmp_path, text):
    assert load(tmp_path, f"{YAML}config: {{lr: {text}}}").config == {"lr": 0.0005}


def test_a_text_that_looks_like_a_number_stays_one_in_quotes(tmp_path):
    assert load(tmp_path, f"{YAML}summary: '5e-4'").summary == "5e-4"
    assert load(tmp_path, f"{YAML}summary: 5e-4x").summary == "5e-4x"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (YAML + "title: Again", r".*mine\.yaml: the key 'title' appears twice in a table"),
        (YAML.replace("{a: {}}", "{a: {}, b: {}, a: {}}"),
         r".*mine\.yaml: the key 'a' appears twice in a table"),
        (YAML.replace("{a: {}}", "{1: {}, '1': {}}"), r".*mine\.yaml: the key '1' appears .*"),
        (YAML.replace("{a: {}}", "{'1': {}, 1: {}}"), r".*mine\.yaml: the key 1 appears twice .*"),
        (YAML + "config: {[1, 2]: 3}",
         r".*mine\.yaml: a key of a table is expected to be text, got .*"),
        ("title: [", r".*mine\.yaml: not YAML \(.*\)"),
        ("a: b: c", r".*mine\.yaml: not YAML \(.*\)"),
        ("- 1", r"mine: the recipe is expected to be a table of names and values, got \[1\]"),
        ("", "mine: the recipe is expected to be a table of names and values, got None"),
        ("title: A", "mine: the recipe is expected to have source, got title"),
        (b"title: \xff", r".*mine\.yaml: not YAML \(it is not text\)"),
        ("[" * 5000, r".*mine\.yaml: not YAML \(.*\)"),
        (YAML + "config: &a {b: *a}", r".*mine\.yaml: not YAML \(.*\)"),
        (YAML + "seeds: 0", "mine: seeds of the recipe is expected to be at least 1, got 0"),
        (YAML.replace("a: {}", "a: {config: {lr: '{x}'}}"),
         r"mine, row a, column left: there is no value for \{x\}"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_said_to_be_none_in_one_sentence(tmp_path, text, sentence):
    with pytest.raises(RecipeError, match=f"^{sentence}$") as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch PLACE']",
        "!!python/object/new:os.system ['touch PLACE']",
        "!!python/name:os.system ''",
        "{title: !!python/module:antigravity ''}",
    ],
)
def test_nothing_in_a_file_is_called(tmp_path, text):
    touched = tmp_path / "touched"
    with pytest.raises(RecipeError, match=r"mine\.yaml: not YAML \(.*python"):
        load(tmp_path, text.replace("PLACE", str(touched)))
    assert not touched.exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("kobayashi2019/tabel2", "there is no recipe 'kobayashi2019/tabel2'; did you mean "
         "kobayashi2019/table2?"),
        ("xxxxxx", "there is no recipe 'xxxxxx'; `tammes reproduce` lists them"),
        ("../recipes/kobayashi2019/table2", None),
        ("", "there is no recipe ''; `tammes reproduce` lists them"),
        ("nowhere/mine.yaml", "nowhere/mine.yaml: No such file or directory"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_not_there_is_missed_in_one_sentence(name, sentence):
    with pytest.raises(RecipeError, match=pattern(sentence) if sentence else "^there is"):
        recipes.load(name)


def test_every_recipe_of_ours_is_listed_by_its_paper_and_loads():
    names = recipes.names()
    assert names == sorted(names)
    assert {"kobayashi2019/table2", "zhou2022/table1", "liu2016/mnist"} <= set(names)
    for name in names:
        assert recipes.load(name).name == name
