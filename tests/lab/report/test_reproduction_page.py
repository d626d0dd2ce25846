"""The page of a reproduction says what the ledger has, no more, and opens anywhere."""

import math
import re
from dataclasses import replace

import ledgers
import pytest
from ledgers import EVIL, entry, stop
from pages import body, escaped, layers, plots
from rich.cells import cell_len

from tammes.lab.report.charts import paper_figures
from tammes.lab.report.charts.chart import Ball, Bars, Line, Points, Rule
from tammes.lab.report.pages.reproduction_page import reproduction_figures, reproduction_page
from tammes.lab.report.paper_comparison import PaperComparison
from tammes.lab.report.paper_comparison_writers import print_table
from tammes.lab.report.render.matplotlib_charts import draw
from tammes.lab.reproduce import recipes
from tammes.lab.reproduce.judge import judge
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.quantities import KNOWN
from tammes.lab.reproduce.recipe_yaml import read
from tammes.lab.stats.paired import t_quantile

pytest.importorskip("plotly", reason="pages need plotly")

MADE = {
    made.__name__: made
    for made in (
        ledgers.several_seeds,
        ledgers.one_seed,
        ledgers.stopped,
        ledgers.large,
        ledgers.drawn,
    )
}
ERROR = KNOWN["error"]


def cells(text, column):
    """What a column of the tables shows, from top to bottom."""
    return re.findall(rf'<td[^>]*data-column="{re.escape(column)}"[^>]*>([^<]*)</td>', text)


# ------------------------------------------------------------------------------- the numbers


def test_intervals_over_identities_are_shown_as_means_over_seeds():
    recipe = recipes.load("identities/chimpanzees")
    ends = ([10.0, 20.0], [12.0, 24.0])
    kept = [{"identities": {"intervals": {"eer": pair}}} for pair in ends]
    done = [
        entry("softmax", "chimpanzees", seed, {"map": 40.0, "eer": 15.0}, kept=each)
        for seed, each in enumerate(kept)
    ]
    text = reproduction_page(recipe, Ledger(recipe.name, machines=[ledgers.MACHINE], cells=done))
    assert "Intervals over identities" in text
    assert "11.00 to 22.00" in text
    plain = reproduction_page(*ledgers.several_seeds())
    assert "Intervals over identities" not in plain


def test_a_difference_is_told_in_standard_errors_of_both():
    found = PaperComparison(*ledgers.several_seeds()).cell("softmax", "cifar100", ERROR)
    # Ours 29.5 ± 0.2 and the paper's 28.62 ± 0.24, three seeds each.
    assert found.difference == pytest.approx(0.88)
    assert found.errors == pytest.approx(0.88 / math.sqrt(0.2**2 / 3 + 0.24**2 / 3))
    assert found.value("standard errors").text == "+4.9"


def test_a_paper_without_a_spread_is_marked_and_ours_alone_counts():
    found = PaperComparison(*ledgers.several_seeds()).cell("divergence", "cifar100", ERROR)
    assert found.errors == pytest.approx(0.53 / (0.1 / math.sqrt(3)))
    assert found.value("standard errors").text == "+9.2 †"


def test_from_one_seed_no_standard_errors_are_told():
    for row in ("softmax", "divergence"):
        found = PaperComparison(*ledgers.one_seed()).cell(row, "cifar100", ERROR)
        assert found.errors is None
        assert found.value("standard errors").text == "n = 1"


def test_where_nothing_spreads_no_standard_errors_are_told():
    recipe, ledger = ledgers.several_seeds()
    ledger.cells = [entry("divergence", "cifar100", seed, {"error": 28.0}) for seed in range(3)]
    found = PaperComparison(recipe, ledger).cell("divergence", "cifar100", ERROR)
    assert found.errors is None
    assert found.value("standard errors").text == "no spread"


def test_what_is_missing_in_a_cell_is_said():
    found = PaperComparison(*ledgers.stopped())
    states = {
        (row, column): found.cell(row, column, ERROR).value("ours or missing").text
        for row in found.recipe.rows
        for column in found.recipe.columns
    }
    assert states == {
        ("softmax", "cifar100"): "29.20 ± 0.28 (seed 2 diverged at step 1,310)",
        ("divergence", "cifar100"): "diverged at step 1,310",
        ("softmax", "svhn"): "seed 0 failed; seeds 1, 2 open",
        ("divergence", "svhn"): "open",
        ("softmax", "imagenet"): "on request",
        ("divergence", "imagenet"): "on request",
        ("tuned", "cifar100"): "",
        ("tuned", "svhn"): "open",
        ("tuned", "imagenet"): "",
    }
    assert found.counts == {"done": 2, "diverged": 4, "failed": 1, "open": 8}


def test_row_on_request_is_open_once_it_was_begun():
    recipe, ledger = ledgers.stopped()
    ledger.put(entry("softmax", "imagenet", 0, {"error": 31.0}))
    found = PaperComparison(recipe, ledger)
    assert found.state("softmax", "imagenet") == "seeds 1, 2 open"
    assert found.state("divergence", "imagenet") == "on request"
    assert found.counts["open"] == 8 + 2


def test_a_row_on_request_without_a_number_is_not_in_the_table():
    recipe, ledger = ledgers.stopped()
    ledger.put(entry("softmax", "imagenet", 0, {"error": 31.0}))
    found = PaperComparison(replace(recipe, paper={}, released={}), ledger)
    assert [each.row for each in found.cells(recipe.quantities[0], "imagenet")] == ["softmax"]


def test_in_quick_form_one_seed_is_all():
    _, ledger = ledgers.one_seed()
    ledger.quick = True
    assert PaperComparison(ledgers.several_seeds()[0], ledger).open == []


def test_a_column_of_which_nothing_was_run_is_open_as_a_whole():
    recipe, ledger = ledgers.stopped()
    ledger.cells = [cell for cell in ledger.cells if cell.column == "cifar100"]
    text = print_table(recipe, ledger)
    assert text.endswith("\n\nopen\n  SVHN: all 3 rows (seeds 0, 1, 2)")
    # Its published numbers are on the page, and in the way on a terminal.
    assert "31.40" not in text
    assert "31.40" in reproduction_page(recipe, ledger)


def test_a_column_without_a_single_value_is_left_out():
    recipe, ledger = ledgers.several_seeds()
    heads = ("paper", "released", "ours", "difference", "missing")
    full = PaperComparison(recipe, ledger).table(ERROR, ["cifar100"], heads)
    empty = PaperComparison(recipe, Ledger(recipe.name)).table(ERROR, ["cifar100"], heads)
    assert full.heads == ["paper", "released code", "ours", "difference"]
    assert empty.heads == ["paper", "released code", "missing"]
    assert [value.text for value in empty.rows[1].values] == ["27.27", "", "open"]


def test_rows_of_the_same_title_are_told_apart():
    given = {**ledgers.TABLE2, "rows": {k: {"title": "Same"} for k in ledgers.TABLE2["rows"]}}
    found = PaperComparison(read(given, "x"), Ledger("x"))
    assert list(found.labels.values()) == ["Same (softmax)", "Same (divergence)"]


# ---------------------------------------------------------------------------------- the page


def test_the_page_has_a_part_for_everything():
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", reproduction_page(*ledgers.stopped()))
    assert headings == [
        "Claims",
        "Paper and ours",
        "Figures",
        "Differences from the paper",
        "Open, diverged and failed",
        "Training",
        "Configuration",
        "How to continue",
        "Glossary",
    ]


def test_the_table_has_paper_released_ours_and_the_difference():
    text = body(reproduction_page(*ledgers.several_seeds()))
    assert cells(text, "paper")[:2] == ["28.62 ± 0.24", "27.27"]
    assert cells(text, "released code") == ["29.42 ± 0.19", ""]
    assert cells(text, "ours")[:2] == ["29.50 ± 0.20", "27.80 ± 0.10"]
    assert cells(text, "difference") == ["+0.88", "+0.53"]
    assert cells(text, "standard errors") == ["+4.9", "+9.2 †"]


def test_the_claims_come_first_with_verdict_and_numbers():
    recipe, ledger = ledgers.several_seeds()
    text = body(reproduction_page(recipe, ledger))
    assert re.findall(r"</i>(holds|leans|fails)</span>", text) == ["holds", "leans", "holds"]
    said = [escaped(verdict.sentence) for verdict in judge(recipe, ledger)]
    assert cells(text, "what was found") == said
    assert "1.70" in said[0]
    assert text.index("The divergence is better by 1.") < text.index("28.62 ± 0.24")


def test_from_one_seed_no_claim_holds():
    text = body(reproduction_page(*ledgers.one_seed()))
    assert ">holds<" not in text
    assert text.count("leans</span>") == 3
    assert cells(text, "standard errors") == ["n = 1", "n = 1"]


def test_a_cell_that_diverged_is_no_number_anywhere():
    recipe, ledger = ledgers.stopped()
    values = {"error": 77.77, "accuracy": 22.23}
    ledger.cells = [
        cell if cell.status == "done" else replace(cell, values=values) for cell in ledger.cells
    ]
    assert "77.7" not in body(reproduction_page(recipe, ledger))
    assert "77.7" not in print_table(recipe, ledger)
    for chart in reproduction_figures(recipe, ledger).values():
        assert not [x for points in layers(chart, Points) for x in points.x if 77 < x < 78]


def test_stopped_and_open_cells_are_named_with_their_reasons():
    text = body(reproduction_page(*ledgers.stopped()))
    assert escaped(f"not finite: {EVIL}") in text
    assert "the worker was killed" in text
    assert (
        '<td data-column="open">Softmax loss (seeds 1, 2); Divergence, Tuned (seeds 0, 1, 2)</td>'
        in text
    )
    assert "15 cells: 2 done, 4 diverged, 1 failed, 8 open" in text


def test_what_was_tuned_is_shown_with_what_was_tried():
    text = body(reproduction_page(*ledgers.stopped()))
    assert ">Tuned, SVHN</td>" in text
    assert ">w = 2</td>" in text
    assert "w = 1: 41.25; w = 2: no number" in text


def test_protocol_notes_configuration_machines_and_command_are_there():
    text = body(reproduction_page(*ledgers.several_seeds()))
    for words in ("it is honest", "A note on it.", "Read in their repository.", "NVIDIA H200"):
        assert words in text
    common = re.search(r"all cells share \(YAML\)</summary><pre>(.*?)</pre>", text, re.DOTALL)[1]
    assert common == "data: cifar100\n"
    assert "<pre>loss: softmax()\n</pre>" in text
    assert "<pre>tammes reproduce somebody2019/table2</pre>" in text
    assert "0.06 hours" in text


def test_the_command_is_the_last_one_of_the_ledger():
    recipe, ledger = ledgers.several_seeds()
    text = body(reproduction_page(recipe, replace(ledger, command="tammes reproduce --seeds 9")))
    assert "<pre>tammes reproduce --seeds 9</pre>" in text


def test_the_quick_form_says_loudly_that_it_is_no_result():
    recipe, ledger = ledgers.one_seed()
    assert "Quick form" not in reproduction_page(recipe, ledger)
    ledger.quick = True
    text = body(reproduction_page(recipe, ledger))
    assert "<h1>Quick form, no result: Two losses</h1>" in text
    assert "A smoke test; its numbers mean nothing" in text
    assert "A smoke test; its numbers mean nothing" in print_table(recipe, ledger)


def test_many_rows_columns_and_quantities_stay_readable():
    text = reproduction_page(*ledgers.large())
    tables = re.findall(r"<table.*?</table>", body(text), re.DOTALL)
    compact = [table for table in tables if "[paper]" in table]
    assert len(compact) == 3
    assert all(
        table.count("<tr>") == 28 and len(re.findall("<th[ >]", table)) == 4 for table in compact
    )
    # Every number with its difference is there too, folded.
    assert body(text).count("every number with its difference from the paper</summary>") == 3
    assert body(text).count('data-column="standard errors"') == 27 * 3 * 3
    assert len(text) < 6_500_000


def test_what_is_run_on_request_is_in_the_long_table_alone():
    text = reproduction_page(*ledgers.stopped()).partition('id="glossary"')[0]
    tables = re.findall(r"<table.*?</table>", text, re.DOTALL)
    (compact,) = [table for table in tables if "[paper]" in table]
    (long,) = [table for table in tables if "standard errors" in table]
    assert "ImageNet" not in compact
    assert "ImageNet" in long
    assert "31.40" in long


def bare(recipe, quantities):
    """A recipe of which nothing is published."""
    own = tuple(KNOWN[name] for name in quantities)
    return replace(recipe, paper={}, released={}, claims=(), quantities=own)


def test_quantities_of_which_nothing_is_published_share_a_table():
    recipe, ledger = ledgers.several_seeds()
    text = reproduction_page(bare(recipe, ["error", "accuracy"]), ledger)
    text = text.partition('id="glossary"')[0]
    shared = [t for t in re.findall(r"<table.*?</table>", text, re.DOTALL) if "accuracy %" in t]
    (table,) = shared
    heads = re.findall(r">([^<>]+)<", table.partition("</thead>")[0])
    assert heads[-3:] == ["error %", "accuracy %", "n"]
    assert "minus the paper" not in body(text)


def test_one_quantity_of_which_nothing_is_published_has_its_own_table():
    recipe, ledger = ledgers.several_seeds()
    text = reproduction_page(bare(recipe, ["error"]), ledger)
    assert ">accuracy %<" not in text
    assert "Error %, mean ± standard deviation." in text


def test_at_most_four_columns_are_beside_each_other():
    columns = {f"c{place}": {"title": f"Column {place}"} for place in range(6)}
    given = {**ledgers.TABLE2, "columns": columns, "paper": {}, "released": {}, "claims": []}
    recipe = read(given, "x")
    cells_of = [entry("softmax", column, 0, {"error": 1.0}) for column in columns]
    text = reproduction_page(recipe, Ledger("x", cells=cells_of))
    tables = re.findall(r"<table.*?</table>", text, re.DOTALL)
    heads = [re.findall(r">(Column \d)<", t.partition("</thead>")[0]) for t in tables]
    assert [head for head in heads if head] == [
        ["Column 0", "Column 1", "Column 2", "Column 3"],
        ["Column 4", "Column 5"],
    ]


def test_a_recipe_of_formulas_alone_has_a_page():
    given = {"title": "t", "source": "s", "figures": [{"draw": "formula", "of": "divergences"}]}
    recipe = read(given, "x")
    text = reproduction_page(recipe, Ledger("x"))
    assert len(plots(text)) == 1
    assert "Paper and ours" not in text
    assert (
        reproduction_figures(recipe, Ledger("x"))["figure-1"] == paper_figures.divergences.chart()
    )


def test_a_formula_that_is_not_there_is_said_with_a_hint():
    given = {"title": "t", "source": "s", "figures": [{"draw": "formula", "of": "divergence"}]}
    with pytest.raises(ValueError, match="no figure 'divergence' of a formula; did you mean diver"):
        reproduction_page(read(given, "x"), Ledger("x"))


def test_an_empty_ledger_has_a_page_on_which_all_is_open():
    recipe, _ = ledgers.several_seeds()
    text = body(reproduction_page(recipe, Ledger(recipe.name)))
    assert cells(text, "ours")[:2] == ["open", "open"]
    assert "6 cells: 6 open" in text
    assert re.findall(r">(holds|leans|fails|open)</td>", text).count("open") >= 3


def test_cells_of_rows_that_the_recipe_has_no_more_do_no_harm():
    recipe, ledger = ledgers.several_seeds()
    ledger.put(entry("gone", "elsewhere", 0, {"error": 1.0}))
    ledger.put(stop("gone", "elsewhere", 1))
    assert "gone" in reproduction_page(recipe, ledger)
    assert "gone" in print_table(recipe, ledger)


# ------------------------------------------------------------------------------- the figures


def test_an_interval_is_held_against_what_the_claim_asks():
    charts = reproduction_figures(*ledgers.several_seeds())
    (points,) = layers(charts["claim-1"], Points)
    assert points.name == "holds"
    half = t_quantile(2) * 0.1 / math.sqrt(3)
    assert list(points.x) == pytest.approx([1.7])
    assert [*points.low, *points.high] == pytest.approx([1.7 - half, 1.7 + half])
    assert [rule.at for rule in layers(charts["claim-1"], Rule)] == [0.0, 1.0]
    assert [rule.at for rule in layers(charts["claim-2"], Rule)] == [-0.5, 0.0, 0.5]
    # A course has no difference.
    assert "claim-3" not in charts


def test_a_claim_from_one_seed_is_hollow():
    (points,) = layers(reproduction_figures(*ledgers.one_seed())["claim-1"], Points)
    assert points.hollow
    assert points.name == "leans"
    assert not points.low


def test_a_claim_has_a_panel_for_each_column():
    chart = reproduction_figures(*ledgers.large())["claim-1"]
    assert [panel.title for panel in chart.panels] == [
        "Claim 1, MNIST",
        "Claim 1, CIFAR-10",
        "Claim 1, CIFAR-100",
    ]
    assert [len(panel.rows) for panel in chart.panels] == [13] * 3


def test_a_few_comparisons_are_in_one_panel_and_name_their_column():
    (panel,) = reproduction_figures(*ledgers.drawn())["claim-1"].panels
    against = f"$B$ | *b* _b_ against A {EVIL}"
    assert list(panel.rows) == [f"One {EVIL}: {against}", f"Two & more: {against}"]


def test_the_paper_is_drawn_over_ours_with_intervals_and_names():
    chart = reproduction_figures(*ledgers.several_seeds())["paper-against-ours"]
    (points,) = layers(chart, Points)
    assert list(points.x) == pytest.approx([29.5, 27.8])
    assert list(points.y) == [28.62, 27.27]
    half = t_quantile(2) / math.sqrt(3)
    assert list(points.high) == pytest.approx([29.5 + 0.2 * half, 27.8 + 0.1 * half])
    assert points.texts[0] == "Softmax loss: ours 29.50 ± 0.20, paper 28.62 ± 0.24"
    diagonal, theirs = layers(chart, Line)
    assert diagonal.x == diagonal.y
    assert theirs.y == pytest.approx([28.62 - 0.24 * half, 28.62 + 0.24 * half])


def test_there_is_a_panel_of_paper_against_ours_for_each_quantity():
    chart = reproduction_figures(*ledgers.large())["paper-against-ours"]
    assert [panel.x for panel in chart.panels] == [
        "ours: accuracy %",
        "ours: class margin °",
        "ours: sample margin",
    ]
    assert all(len(points.x) == 27 for points in layers(chart, Points))


def test_a_curve_is_the_mean_over_seeds_where_it_was_measured():
    lines = layers(reproduction_figures(*ledgers.several_seeds())["figure-1"], Line)
    assert [line.thin for line in lines] == [True, True, True, False] * 2
    assert list(lines[3].x) == [1, 2, 4, 5]
    assert lines[3].y == pytest.approx([2.0, 1.5, 1.2, 1.01])


def test_test_accuracy_is_drawn_in_percent_though_nobody_asked():
    lines = layers(reproduction_figures(*ledgers.several_seeds())["test-accuracy"], Line)
    assert lines[3].y[-1] == pytest.approx(70.5)


def test_a_stopped_cell_is_dotted_and_not_in_the_mean():
    recipe, ledger = ledgers.several_seeds()
    curves = {"epoch": [1, 2], "test.accuracy": [0.01, 0.01]}
    ledger.cells = [cell for cell in ledger.cells if cell.row == "softmax" and cell.seed < 2]
    ledger.put(stop("softmax", "cifar100", 2, curves=curves))
    lines = layers(reproduction_figures(recipe, ledger)["test-accuracy"], Line)
    assert [line.dash for line in lines] == ["solid", "solid", "dotted", "solid"]
    assert lines[-1].y[-1] == pytest.approx(70.6)


def test_every_figure_that_is_asked_for_is_drawn():
    charts = reproduction_figures(*ledgers.drawn())
    assert [f"figure-{number}" for number in range(1, 8)] == [
        name for name in charts if name.startswith("figure")
    ]
    by_rows = layers(charts["figure-2"], Line)
    named = {line.name: line for line in by_rows if line.name}
    assert named["ours"].x == [1, 2]
    assert named["ours"].y == pytest.approx([10.05, 9.05])
    assert (named["paper"].y, named["paper"].dash) == ([10, 9], "dashed")
    by_columns = {line.name: line for line in layers(charts["figure-3"], Line) if line.name}
    assert by_columns[f"A {EVIL}"].x == [0.5, 0.9]
    assert by_columns[f"A {EVIL}"].y == pytest.approx([10.05, 11.05])
    assert by_columns[f"A {EVIL}, paper"].y == [10, 8]
    assert all(sum(bars.heights) == pytest.approx(1) for bars in layers(charts["figure-4"], Bars))
    # Own and hardest cosines and the margins of two rows in two columns.
    assert len(layers(charts["figure-4"], Bars)) == 3 * 4
    assert len(charts["figure-5"].panels) == 4
    assert charts["figure-5"].panels[0].title == f"$B$ | *b* _b_, One {EVIL}, training images"
    (ball,) = layers(charts["figure-7"], Ball)
    assert len(ball.features) == 8
    assert charts["figure-7"].panels[0].title == f"Ball, One {EVIL}: 74.50°"


def test_a_single_seed_of_a_line_by_a_setting_has_no_span():
    recipe, ledger = ledgers.drawn()
    several = layers(reproduction_figures(recipe, ledger)["figure-2"], Line)
    ledger.cells = [cell for cell in ledger.cells if cell.seed == 0]
    single = layers(reproduction_figures(recipe, ledger)["figure-2"], Line)
    assert sum(line.thin for line in several) == 2
    assert sum(line.thin for line in single) == 0


@pytest.mark.parametrize("name", MADE)
def test_every_chart_can_be_drawn_for_paper(name):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    for chart in reproduction_figures(*MADE[name]()).values():
        draw(chart).canvas.draw()


@pytest.mark.parametrize("name", recipes.names())
def test_every_figure_of_a_shipped_recipe_is_drawn_once_it_has_run(name):
    recipe = recipes.load(name)
    _, full = ledgers.drawn()
    kept = {key: value for cell in full.cells for key, value in cell.kept.items()}
    values = dict.fromkeys(KNOWN, 0.5) | {"accuracy": 70.0, "error": 30.0, "class_margin": 80.0}
    ledger = Ledger(recipe.name)
    for row, column in recipe.all_places():
        curves = {path: [0.3, 0.2, 0.4] for path in (*recipe.curves, "test.accuracy")}
        curves["epoch"] = [1, 2, 3]
        asked = ("sphere",) if recipe.rows[row].kind == "sphere" else recipe.keep
        # No figure is of the looks.
        own = {key: kept[key] for key in asked if key != "health"}
        ledger.put(entry(row, column, 0, values, curves=curves, kept=own))
    charts = reproduction_figures(recipe, ledger)
    assert {f"figure-{number}" for number in range(1, len(recipe.figures) + 1)} <= set(charts)
    assert max(map(cell_len, print_table(recipe, ledger).splitlines())) <= 120
    assert f"<h1>{escaped(recipe.title)}</h1>" in reproduction_page(recipe, ledger)


# ------------------------------------------------------------------------------ the terminal


def test_the_table_for_a_terminal_says_the_same():
    assert print_table(*ledgers.several_seeds()).splitlines()[:6] == [
        "Two losses (Somebody 2019, Table 2)",
        "  somebody2019/table2; 6 cells: 6 done; seeds 0, 1, 2; NVIDIA H200",
        "",
        "  error %              paper  released code          ours  difference  standard errors",
        "  Softmax loss  28.62 ± 0.24   29.42 ± 0.19  29.50 ± 0.20       +0.88             +4.9",
        "  Divergence           27.27                 27.80 ± 0.10       +0.53           +9.2 †",
    ]
    text = print_table(*ledgers.several_seeds())
    said = judge(*ledgers.several_seeds())[0].sentence
    assert f"  HOLDS  The divergence is better by 1.\n         {said}\n" in text


def test_the_table_for_a_terminal_names_what_is_missing():
    text = print_table(*ledgers.stopped())
    assert re.search(r"^  Divergence    27\.27 +diverged at step 1,310$", text, re.MULTILINE)
    assert text.endswith(
        "\n\nopen\n  SVHN: Softmax loss (seeds 1, 2); Divergence, Tuned (seeds 0, 1, 2)"
    )
    assert "  Softmax loss, SVHN, seed 0: failed: the worker was killed" in text


@pytest.mark.parametrize("name", MADE)
def test_the_table_for_a_terminal_is_120_letters_wide_at_most(name):
    assert max(map(cell_len, print_table(*MADE[name]()).splitlines())) <= 120


def test_a_long_title_is_wrapped_beside_its_numbers():
    given = {**ledgers.TABLE2, "rows": {**ledgers.TABLE2["rows"]}}
    given["rows"]["softmax"] = {"title": "A very long title " * 12}
    text = print_table(read(given, "x"), ledgers.several_seeds()[1])
    assert max(map(cell_len, text.splitlines())) <= 120
    lines = r"^  A very long title .* 29\.42 ± 0\.19  29\.50 ± 0\.20 .*\n  very long title"
    assert re.search(lines, text, re.MULTILINE)


def test_a_terminal_obeys_nothing_that_a_ledger_says():
    recipe, ledger = ledgers.several_seeds()
    ledger.put(stop("softmax", "cifar100", 0, "failed", reason="a\x1b[2Jb\nc"))
    assert "failed: a [2Jb c" in print_table(recipe, ledger)


# ------------------------------------------------------------------------------- the browser


def test_a_large_table_fits_on_both_screens(chromium, tmp_path):
    path = tmp_path / "large.html"
    path.write_text(reproduction_page(*ledgers.large(seeds=1)))
    for width in (1280, 390):
        with chromium.open(path, width=width) as opened:
            opened.wait_for("document.documentElement.dataset.drawn")
            assert opened.errors() == []
            assert opened.run("document.documentElement.scrollWidth <= innerWidth")
            opened.run("for (const box of document.querySelectorAll('details')) box.open = true")
            assert opened.run(
                "[...document.querySelectorAll('.scroll')].every("
                "box => box.scrollWidth <= box.clientWidth)"
            )
