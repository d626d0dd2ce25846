"""docs/results.md is made of the ledgers under results/, and says what they say.

``.venv/bin/make docs`` writes it.
"""

import csv
import io
import itertools
import re
from pathlib import Path

import ledgers
import pytest
from ledgers import EVIL
from results_document import main, results_csv, results_document

from tammes.lab.records.run_folder import RecordError
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.judge import judge
from tammes.lab.reproduce.ledger import Ledger

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Ledgers of four recipes, which are found by their names."""
    made = [ledgers.several_seeds(), ledgers.stopped(), ledgers.large(), ledgers.drawn()]
    known = {recipe.name: recipe for recipe, _ in made}
    monkeypatch.setattr(recipes, "load", known.__getitem__)
    for recipe, ledger in made:
        ledgers.as_of(recipe, ledger).write(tmp_path / f"{recipe.name}.json")
    (tmp_path / "other.json").write_text("[]")
    return tmp_path


def section(text, name):
    return re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def test_the_page_is_what_comes_out_of_the_ledgers():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == results_document(ROOT / "results"), "make docs"


def test_the_file_of_all_numbers_is_what_comes_out_of_the_ledgers():
    written = (ROOT / "results" / "results.csv").read_text(encoding="utf-8")
    assert written == results_csv(ROOT / "results"), "make docs"


def test_the_figures_of_the_page_are_those_that_its_recipes_request():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    linked = {*re.findall(r"\]\(\.\./results/(\S+\.png)\)", page)}
    there = {
        path.relative_to(ROOT / "results").as_posix()
        for path in (ROOT / "results").glob("*/*/figure-*.png")
    }
    assert linked == there
    for path in (ROOT / "results").glob("*/*.json"):
        recipe = recipes.load(Ledger.read(path).recipe)
        own = {name for name in there if name.startswith(f"{recipe.name}/")}
        assert len(own) <= len(recipe.figures)


def test_every_number_of_every_cell_is_a_line(folder):
    lines = [*csv.DictReader(io.StringIO(results_csv(folder)))]
    assert [*lines[0]] == [
        "recipe", "row", "column", "seed", "quantity", "value", "paper", "commit", "machine",
    ]  # fmt: skip
    for recipe, ledger in (ledgers.several_seeds(), ledgers.stopped()):
        own = [line for line in lines if line["recipe"] == recipe.name]
        keys = {quantity.key for quantity in recipe.quantities}
        for cell in ledger.cells:
            place = (cell.row, cell.column, str(cell.seed))
            here = [x for x in own if (x["row"], x["column"], x["seed"]) == place]
            if cell.status != "done":
                assert [line["value"] for line in here] == [cell.status]
                continue
            found = {line["quantity"]: float(line["value"]) for line in here}
            assert found == {key: cell.values[key] for key in keys & cell.values.keys()}
            assert {line["machine"] for line in here} == {ledgers.MACHINE["device"]}
            assert {line["commit"] for line in here} == {ledgers.MACHINE["commit"] or ""}
    softmax = next(
        x for x in lines if (x["recipe"], x["row"]) == ("somebody2019/table2", "softmax")
    )
    assert float(softmax["paper"]) == 28.62


FRONT = """
papers:
  somebody2019:
    title: Somebody 2019
    short: It is {somebody2019/table2 divergence cifar100 error} %.
    holds: An error of {somebody2019/table2 divergence cifar100 error} %.
    fails: Nothing; {somebody2019/table2 divergence minus softmax cifar100 error}.
    open: The rest.
findings:
  - title: Less is more
    text: It is {somebody2019/table2 softmax cifar100 error}.
    figure: a/b.png
"""


def test_the_front_page_says_what_the_ledgers_say(folder):
    (folder / "findings.yaml").write_text(FRONT)
    text = results_document(folder)
    front = section(text, "In a minute")
    assert "| Somebody 2019 | It is 27.80 ± 0.10 %. | 2 holds, 1 leans, 1 fails |" in front
    assert "**Somebody 2019**\n\n- **Holds:** An error of 27.80 ± 0.10 %.\n- **Fails:**" in front
    assert "Nothing; -1.70 points (95 % interval -1.95 to -1.45)." in front
    assert (
        "### 1. Less is more\n\nIt is 29.50 ± 0.20.\n\n![Less is more](../results/a/b.png)" in front
    )
    assert text.index("## In a minute") < text.index("## All recipes")
    for row in ("table2 softmax", "minus softmax"):
        gone = f"{row.split()[0]} gone"
        (folder / "findings.yaml").write_text(FRONT.replace(row, gone))
        with pytest.raises(ValueError, match=f"a number of a ledger, got .*{gone}"):
            results_document(folder)


def test_the_front_page_has_every_paper_and_three_findings_with_figures():
    text = section((ROOT / "docs" / "results.md").read_text(encoding="utf-8"), "In a minute")
    papers = {path.parent.name for path in (ROOT / "results").glob("*/*.json")}
    assert text.count("\n| ") == 1 + len(papers)
    figures = re.findall(r"\n### \d\. .+\n\n.+\n\n!\[.+\]\(\.\./results/(.+)\)", text)
    assert len(figures) == 3
    for figure in figures:
        assert (ROOT / "results" / figure).exists()


def test_without_ledgers_it_says_so(tmp_path):
    assert results_document(tmp_path).endswith("\nNothing has been reproduced yet.\n")


def test_every_recipe_has_its_numbers_claims_seeds_machine_and_command(folder):
    text = section(results_document(folder), "somebody2019/table2")
    for line in (
        "Two losses. Somebody 2019, Table 2.",
        "- 6 cells: 6 done; seeds 0, 1, 2; NVIDIA H200",
        "- `tammes reproduce somebody2019/table2`",
        "- released code: Read in their repository.",
        "| error % | paper | released code | ours | difference |",
        "| Softmax loss | 28.62 ± 0.24 | 29.42 ± 0.19 | 29.50 ± 0.20 | +0.88 (+4.9 s.e.) |",
        "| Divergence | 27.27 |  | 27.80 ± 0.10 | +0.53 (+9.2 † s.e.) |",
    ):
        assert f"\n{line}\n" in text
    said = judge(*ledgers.several_seeds())[0].sentence
    assert f"\n| The divergence is better by 1. | **holds** | {said} |\n" in text


def test_what_is_missing_is_named(folder):
    text = section(results_document(folder), "somebody2019/stopped")
    assert "| Divergence | CIFAR-100 | 27.27 | diverged at step 1,310 |  |" in text
    assert "- Softmax loss, SVHN, seed 0: failed. the worker was killed" in text
    assert (
        "\nOpen:\n\n- SVHN: Softmax loss (seeds 1, 2); Divergence, Tuned (seeds 0, 1, 2)\n" in text
    )


def test_a_list_at_the_top_leads_to_every_recipe(folder):
    text = results_document(folder)
    top = section(text, "All recipes")
    for name, anchor in (
        ("somebody2019/table2", "somebody2019table2"),
        ("somebody/figures", "somebodyfigures"),
    ):
        assert f"[{name}](#{anchor})" in top
        assert f"\n## {name}\n" in text
    assert "| 2 done, 4 diverged, 1 failed, 8 open | 1 fails |" in top


def test_names_are_shown_as_they_are(folder):
    text = results_document(folder)
    outside = re.sub(r"`[^`\n]*`", "", text)
    assert EVIL not in outside
    assert "&lt;script&gt;" in outside
    assert r"$B$ \| \*b\* \_b\_" in outside


def test_every_line_of_a_table_has_as_many_cells_as_its_head(folder):
    lines = results_document(folder).splitlines()
    counts = [len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0 for line in lines]
    assert sum(map(bool, counts)) > 27 * 3 * 3
    for before, after in itertools.pairwise(counts):
        assert not (before and after) or before == after


def test_the_quick_form_is_no_result(tmp_path):
    recipe, ledger = ledgers.several_seeds()
    ledger.quick = True
    ledger.write(tmp_path / f"{recipe.name}.json")
    with pytest.raises(ValueError, match=r"table2.json is a ledger in quick form, whose numbers"):
        results_document(tmp_path)


def test_a_damaged_ledger_is_named(tmp_path):
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "table.json").write_text('{"cells": ')
    with pytest.raises(RecordError, match=r"paper/table.json: not a ledger"):
        results_document(tmp_path)


def test_it_is_written_and_a_missing_folder_is_said(folder, tmp_path, capsys):
    page = tmp_path / "docs" / "results.md"
    assert main(folder, page) == 0
    assert page.read_text() == results_document(folder)
    assert (folder / "results.csv").read_text() == results_csv(folder)
    assert main(tmp_path / "nowhere", page) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/*.json")), ids=lambda p: p.stem)
def test_every_cell_under_results_is_one_of_its_recipe_as_it_is(path):
    ledger = Ledger.read(path)
    now = ledger.current(recipes.load(ledger.recipe))
    assert now.former == []
    assert now.cells == ledger.cells
