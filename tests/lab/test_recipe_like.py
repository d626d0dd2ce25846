"""A recipe may start from another one."""

import pytest

from tammes.lab import recipes
from tammes.lab.recipes import RecipeError, files

FIRST = """
title: First
source: Somebody 2019
config: {data: digits, loss: softmax(), epochs: 3, lr: 0.1}
settings: {split: cub, analyse: true}
quick: {limit: 20}
columns: {left: {}}
rows: {a: {}}
protocol:
  - {what: Epochs, paper: 100, ours: 3, why: time}
  - {what: Rate, paper: not said, ours: "0.1", why: usual}
"""
SECOND = """
title: Second
source: Somebody 2019
like: first.yaml
config: {epochs: 5, lr: null}
settings: {analyse: null}
columns: {right: {}}
rows: {b: {config: {loss: hinge()}}}
protocol:
  - {what: Network, paper: large, ours: small, why: time}
  - {what: Epochs, paper: "100", ours: "5", why: time}
  - {what: Rate}
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes recipes into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text.replace("paper: 100", 'paper: "100"'))

    write(first=FIRST, second=SECOND)
    return write


def test_a_recipe_has_what_it_says_and_takes_over_the_rest(written):
    found = recipes.load("second.yaml")
    assert dict(found.config) == {"data": "digits", "loss": "softmax()", "epochs": 5}
    assert dict(found.settings) == {"split": "cub"}
    assert dict(found.quick) == {"limit": 20}


def test_rows_and_columns_are_its_own(written):
    found = recipes.load("second.yaml")
    assert [*found.rows] == ["b"]
    assert [*found.columns] == ["right"]
    assert found.cell("b", "right", 0).config.loss == "hinge()"


def test_a_line_of_the_protocol_is_replaced_left_out_or_added(written):
    lines = recipes.load("second.yaml").protocol
    assert [(line["what"], line["ours"]) for line in lines] == [
        ("Epochs", "5"),
        ("Network", "small"),
    ]


def test_one_may_be_like_another_that_is_like_a_third(written):
    written(third="title: Third\nsource: s\nlike: second.yaml\ncolumns: {c: {}}\nrows: {r: {}}\n")
    assert dict(recipes.load("third.yaml").config)["epochs"] == 5


@pytest.mark.parametrize(
    ("like", "sentence"),
    [
        ("kobayashi2019/table22", "there is no recipe 'kobayashi2019/table22'; did you mean kob"),
        ("3", "like is expected to be the name of a recipe, got 3"),
        ("other.yaml", "other.yaml: No such file or directory"),
        ("mine.yaml", "mine: like goes round in a circle: mine.yaml, mine.yaml"),
    ],
)
def test_what_cannot_be_taken_over_is_said_in_a_sentence(like, sentence, written):
    written(mine=f"title: t\nsource: s\nlike: {like}\n")
    with pytest.raises(RecipeError, match=sentence):
        recipes.load("mine.yaml")


def test_no_recipe_of_the_package_says_again_what_it_could_take_over():
    checked = 0
    for name in recipes.names():
        given = files.values_of(files.find(name)[0])
        if "like" not in given:
            continue
        other = files.start_from(files.values_of(files.find(given["like"])[0]))
        for key in ("config", "settings", "quick"):
            own, taken = given.get(key, {}), other.get(key, {})
            assert not [each for each in own if each in taken and own[each] == taken[each]], name
        assert not [line for line in given.get("protocol", []) if line in other["protocol"]], name
        checked += 1
    assert checked >= 14
