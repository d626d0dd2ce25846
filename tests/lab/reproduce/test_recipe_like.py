"""A recipe may start from another one."""

import pytest

from tammes.lab.config.yaml_file import read_yaml
from tammes.lab.reproduce import recipe_files, recipes
from tammes.lab.reproduce.recipes import RecipeError

FIRST = """
title: First
source: Somebody 2019
config: {data: digits, loss: softmax(), epochs: 3, lr: 0.1}
settings: {split: cub, analyse: true}
quick: {limit: 20}
columns: {left: {}}
rows: {a: {}}
protocol:
  - {what: Epochs, paper: many, ours: few, why: time}
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
            (tmp_path / f"{name}.yaml").write_text(text)

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


MINE = "title: t\nsource: s\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("like: kobayashi2019/table22", "there is no recipe 'kobayashi2019/table22'; did you mean"),
        ("like: 3", "mine: like is expected to be the name of a recipe, got 3"),
        ("like: other.yaml", "other.yaml: No such file or directory"),
        ("like: mine.yaml", "like has a cycle: mine.yaml, mine.yaml"),
        ("like: list.yaml", r"like list: the recipe is expected to be a table .* got \[1\]"),
        ("like: empty.yaml", "like empty: the recipe is expected to be a table .* got None"),
        ("like: broken.yaml", "like broken: broken.yaml: not YAML"),
        ("like: text.yaml", "like text: config is expected to be a table .* got 'x'"),
        ("like: bare.yaml", "like bare: each line of the protocol is expected to have its what"),
        ("like: word.yaml", "like word: protocol is expected to be a list, got 'x'"),
        ("like: first.yaml\nconfig: {epoch: null}",
         "config has no 'epoch' to leave out; did you mean epochs?"),
        ("like: first.yaml\nprotocol: [{what: Epoch}]",
         "protocol has no 'Epoch' to leave out; did you mean Epochs?"),
        ("like: first.yaml\nprotocol: [{what: A, ours: a}, {what: A, ours: b}]",
         "each line of the protocol is expected to have its what, got 'A'"),
        ("like: first.yaml\nprotocol: [{what: [a]}]",
         r"each line of the protocol is expected to have its what, got \['a'\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over_is_said_in_a_sentence(text, sentence, written):
    written(
        mine=MINE + text, list="[1]", empty="", broken="a: [", text=f"{MINE}config: x",
        bare=f"{MINE}protocol: [{{ours: a}}]", word=f"{MINE}protocol: x",
    )  # fmt: skip
    with pytest.raises(RecipeError, match=sentence):
        recipes.load("mine.yaml")


def test_a_file_is_looked_for_beside_the_recipe(written, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "first.yaml").write_text(FIRST.replace("epochs: 3", "epochs: 7"))
    (tmp_path / "below" / "mine.yaml").write_text(f"{MINE}like: first.yaml\n")
    assert recipes.load("below/mine.yaml").config["epochs"] == 7


def test_no_recipe_of_the_package_says_again_what_it_could_take_over():
    checked = 0
    for name in recipes.names():
        given = read_yaml(recipe_files.find_recipe(name)[0])
        if "like" not in given:
            continue
        path = recipe_files.find_recipe(given["like"])[0]
        other = recipe_files.inherit(read_yaml(path), path.parent)
        for key in ("config", "settings", "quick"):
            own, taken = given.get(key, {}), other.get(key, {})
            assert not [each for each in own if each in taken and own[each] == taken[each]], name
        assert not [line for line in given.get("protocol", []) if line in other["protocol"]], name
        checked += 1
    assert checked >= 14
