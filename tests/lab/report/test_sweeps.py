"""Figures of the few-shot recipes: accuracy over the margin, how classes spread, and (12)."""

import math

import pytest
import torch
from ledgers import MACHINE, entry

from tammes.lab.fewshot.margin_analysis import analyse, check_inequality
from tammes.lab.report.charts.chart import Line, Points, Rule
from tammes.lab.report.pages.reproduction_page import reproduction_figures, reproduction_page
from tammes.lab.report.render.matplotlib_charts import draw
from tammes.lab.reproduce.ledger import Ledger
from tammes.lab.reproduce.recipe_yaml import read
from tammes.lab.stats.paired import t_quantile

pytest.importorskip("plotly", reason="pages need plotly")

MARGINS = (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2)
SHOTS = {"shot1": (66.0, 67.5, 67.1, 66.2, 64.0, 61.0), "shot5": (80.1, 81.5, 82.2, 82.0, 80, 77)}
BASE = (71.0, 73.0, 75.0, 76.2, 76.9, 76.1)


def recipe(figures, columns=("one",), series=("ours",)):
    """A table with a row for each margin of each series, and one row without a margin."""
    rows = {"softmax": {"title": "Softmax"}}
    for name in series:
        for margin in MARGINS:
            values = {"margin": margin} | ({} if name == "ours" else {"series": name})
            rows[row(name, margin)] = {"title": f"{name} {margin}", "values": values}
    return read(
        {
            "title": "Margins",
            "source": "Somebody 2020",
            "seeds": 3,
            "quantities": ["shot1", "shot5", "base_accuracy"],
            "columns": {column: {"title": column.capitalize()} for column in columns},
            "rows": rows,
            "figures": figures,
        },
        "somebody2020/sweep",
    )


def row(series, margin):
    return f"{series}_{margin:+g}"


def features(spread, novel_spread, seed):
    """Base and novel classes, the first tight and the second wide; real numbers to measure."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(14, 24, generator=generator)
    labels = torch.arange(14).repeat_interleave(12)
    noise = torch.randn(168, 24, generator=generator)
    wide = torch.where(labels < 8, spread, novel_spread)[:, None]
    found = centres[labels] + wide * noise
    base = labels < 8
    return (found[base], labels[base]), (found[~base], labels[~base])


def analysed(place, seed):
    """What is measured with a margin: base classes tighten with it, novel ones do up to a place."""
    return analyse(*features(1.4 - 0.18 * place, 1.0 + 0.1 * abs(place - 2), seed))


def measured(place, seed):
    return analysed(place, seed).measures()


def filled(made, seeds=1, columns=("one",), series=("ours",), analysis=True):
    """A ledger in which every margin was run."""
    cells = []
    for column in columns:
        for line in series:
            for place, margin in enumerate(MARGINS):
                for seed in range(seeds):
                    more = 0.3 * (seed - (seeds - 1) / 2)
                    values = {key: each[place] + more for key, each in SHOTS.items()}
                    values["base_accuracy"] = BASE[place] + more
                    values |= measured(place, seed) if analysis else {}
                    kept = {"fewshot": {"intervals": {"shot1": 0.21, "shot5": 0.15}}}
                    cells.append(entry(row(line, margin), column, seed, values, kept=kept))
    return Ledger(made.name, machines=[MACHINE], cells=cells)


SWEEP = {"draw": "sweep", "x": "margin"}
ANALYSIS = {"draw": "analysis", "x": "margin"}


def swept(seeds=1, figure=SWEEP, **more):
    made = recipe([figure], **more)
    return reproduction_figures(made, filled(made, seeds, analysis=False, **more))["figure-1"]


def of(panel, kind):
    return [layer for layer in panel.layers if isinstance(layer, kind)]


def lines(panel):
    return {line.name: line for line in of(panel, Line) if not line.thin}


# --------------------------------------------------------------------------------------- a sweep


def test_a_sweep_has_a_panel_for_base_accuracy_and_for_each_number_of_shots():
    chart = swept()
    titles = ["Accuracy on base classes", "1-shot accuracy", "5-shot accuracy"]
    assert [panel.title for panel in chart.panels] == titles
    for panel, values in zip(chart.panels, (BASE, *SHOTS.values()), strict=True):
        assert lines(panel)["ours"].x == list(MARGINS)
        assert lines(panel)["ours"].y == pytest.approx(values)
        assert (panel.x, panel.y[-1]) == ("margin", "%")
        # Marks at the ends are not cut.
        assert panel.x_range[0] < -0.3 < 0.2 < panel.x_range[1]


def test_the_peak_of_every_line_is_marked_and_named():
    peaks = [of(panel, Points) for panel in swept(seeds=3).panels]
    assert [(each.x, each.y) for (each,) in peaks] == [
        ([0.1], [pytest.approx(76.9)]),
        ([-0.2], [pytest.approx(67.5)]),
        ([-0.1], [pytest.approx(82.2)]),
    ]
    assert [each.name for (each,) in peaks] == [
        "ours: best at 0.1",
        "ours: best at -0.2",
        "ours: best at -0.1",
    ]
    assert [each.texts[0] for (each,) in peaks][1] == "ours: best at -0.2, 67.50 %"


def test_intervals_are_those_over_seeds_where_there_are_several():
    panel = swept(seeds=3).panels[1]
    spans = [line for line in of(panel, Line) if line.thin]
    # Seeds are 0.3 apart: that is the deviation of three.
    half = t_quantile(2) * 0.3 / math.sqrt(3)
    assert len(spans) == len(MARGINS)
    assert spans[0].x == [-0.3, -0.3]
    assert spans[0].y == pytest.approx([66.0 - half, 66.0 + half])


def test_intervals_of_a_single_seed_are_those_over_its_episodes():
    base, one, five = swept(seeds=1).panels
    spans = [[line.y for line in of(panel, Line) if line.thin] for panel in (base, one, five)]
    # Base accuracy is no mean over episodes.
    assert spans[0] == []
    assert spans[1][0] == pytest.approx([66.0 - 0.21, 66.0 + 0.21])
    assert spans[2][0] == pytest.approx([80.1 - 0.15, 80.1 + 0.15])


def test_a_margin_that_was_not_run_leaves_a_gap_and_nothing_else():
    made = recipe([SWEEP])
    ledger = filled(made, analysis=False)
    ledger.cells = [cell for cell in ledger.cells if cell.row != row("ours", -0.2)]
    panel = reproduction_figures(made, ledger)["figure-1"].panels[1]
    assert lines(panel)["ours"].x == [-0.3, -0.1, 0.0, 0.1, 0.2]
    assert of(panel, Points)[0].x == [-0.1]
    ledger.cells = []
    assert "figure-1" not in reproduction_figures(made, ledger)


def test_series_are_lines_of_one_panel_and_columns_are_panels():
    chart = swept(columns=("one", "two"), series=("Cosine", "Inner"))
    assert len(chart.panels) == 6
    assert chart.panels[0].title == "Accuracy on base classes: One"
    assert chart.panels[3].title == "Accuracy on base classes: Two"
    assert [*lines(chart.panels[1])] == ["Cosine", "Inner"]
    assert len(of(chart.panels[1], Points)) == 2


def test_a_sweep_shows_what_the_figure_names():
    figure = {**SWEEP, "of": ["shot5"], "title": "ResNet-12"}
    assert [panel.title for panel in swept(figure=figure).panels] == ["ResNet-12, 5-shot accuracy"]


# ------------------------------------------------------------------------------------- analysis


@pytest.fixture(scope="module")
def charts():
    made = recipe([SWEEP, ANALYSIS])
    return reproduction_figures(made, filled(made, seeds=2))


def test_distances_and_their_ratio_are_drawn_on_base_and_on_novel_classes(charts):
    titles = [panel.title for panel in charts["figure-2"].panels]
    assert [title.split(",")[0].split(" ")[0] for title in titles] == [
        "D_intra", "D_inter", "φ", "φ", "P^s",
    ]  # fmt: skip
    found = [[analysed(place, seed) for seed in (0, 1)] for place in range(len(MARGINS))]

    def means(name):
        return pytest.approx([sum(getattr(e, name) for e in each) / 2 for each in found])

    intra, inter, base, novel, share = charts["figure-2"].panels
    assert lines(intra)["base"].y == means("base_intra")
    assert lines(intra)["novel"].y == means("novel_intra")
    assert lines(inter)["base"].y == means("base_inter")
    assert lines(inter)["novel"].y == means("novel_inter")
    assert lines(base)["base"].y == means("base_ratio")
    assert lines(novel)["novel"].y == means("novel_ratio")
    assert lines(novel)["by (11)"].y == means("predicted_ratio")
    assert lines(share)["ours"].y == means("same_base_class")
    assert all(line.x == list(MARGINS) for line in lines(novel).values())


def test_every_two_margins_are_judged_by_12_with_every_seed(charts):
    (panel,) = charts["figure-2-inequality-1"].panels
    points = {each.name: each for each in of(panel, Points)}
    verdicts = [
        check_inequality(analysed(one, seed), analysed(two, seed))
        for one in range(len(MARGINS))
        for two in range(one + 1, len(MARGINS))
        for seed in (0, 1)
    ]
    right = [each for each in verdicts if each.agrees]
    # Both kinds are there, or the test would show little.
    assert 0 < len(right) < len(verdicts) == 30
    assert len(points["(12) is right"].x) == len(right)
    assert len(points["(12) is wrong"].x) == len(verdicts) - len(right)
    assert points["(12) is right"].x == pytest.approx([v.right - v.left for v in right])
    differences = [v.first.novel_ratio - v.second.novel_ratio for v in right]
    assert points["(12) is right"].y == pytest.approx(differences)
    assert {rule.axis for rule in of(panel, Rule)} == {"x", "y"}


def test_what_is_right_has_the_same_sign_on_both_axes(charts):
    (panel,) = charts["figure-2-inequality-1"].panels
    for points in of(panel, Points):
        same = [(x > 0) == (y > 0) for x, y in zip(points.x, points.y, strict=True)]
        assert set(same) == {points.name == "(12) is right"}


def test_a_sentence_says_whether_12_tells_which_margin_wins(charts):
    made = recipe([SWEEP, ANALYSIS])
    text = reproduction_page(made, filled(made, seeds=2))
    right = len(of(charts["figure-2-inequality-1"].panels[0], Points)[0].x)
    novel = lines(charts["figure-2"].panels[3])
    said, best = (MARGINS[novel[x].y.index(max(novel[x].y))] for x in ("by (11)", "novel"))
    assert f"(12) is right in {right} of 30 cases." in text
    assert f"largest at {said:g} by (11), and at {best:g} as measured" in text
    assert "1-shot accuracy is best at -0.2." in text


def test_series_are_judged_apart():
    more = {"series": ("Cosine", "Inner")}
    made = recipe([ANALYSIS], **more)
    charts = reproduction_figures(made, filled(made, **more))
    panels = [charts[f"figure-1-inequality-{number}"].panels[0] for number in (1, 2)]
    assert [panel.title.split(": ")[1] for panel in panels] == ["Cosine", "Inner"]
    assert sum(len(points.x) for points in of(panels[0], Points)) == 15
    assert [*lines(charts["figure-1"].panels[0])] == [
        "Cosine, base", "Cosine, novel", "Inner, base", "Inner, novel",
    ]  # fmt: skip


def test_where_nothing_was_analysed_nothing_is_drawn():
    made = recipe([ANALYSIS])
    charts = reproduction_figures(made, filled(made, analysis=False))
    assert not [name for name in charts if name.startswith("figure")]


def test_a_single_margin_is_drawn_and_nothing_is_judged():
    made = recipe([ANALYSIS])
    ledger = filled(made)
    ledger.cells = [cell for cell in ledger.cells if cell.row == row("ours", 0.1)]
    charts = reproduction_figures(made, ledger)
    assert "figure-1" in charts
    assert "figure-1-inequality-1" not in charts


def test_every_chart_can_be_drawn_for_paper(charts):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    for chart in charts.values():
        draw(chart).canvas.draw()


# ------------------------------------------------------------------- the angle between gradients


def watched():
    """Curves of a plain sum and of a direct sum, one of which was once exactly orthogonal."""
    given = {"draw": "curves", "of": "gradients.cosine", "title": "Angle"}
    rows = {name: {"title": name.capitalize()} for name in ("plain", "direct")}
    made = read(
        {
            "title": "Sums",
            "source": "Somebody 2024",
            "seeds": 1,
            "quantities": ["shot1"],
            "columns": {"one": {"title": "One"}},
            "rows": rows,
            "curves": ["gradients.cosine", "gradients.largest"],
            "figures": [given],
        },
        "somebody2024/sums",
    )
    cosines = {"plain": [0.1, 0.2, 0.1], "direct": [1e-8, 0.0, 1e-7]}
    cells = [
        entry(name, "one", 0, {"shot1": 60.0}, curves={
            "epoch": [1, 2, 3], "gradients.cosine": each, "gradients.largest": each,
        })
        for name, each in cosines.items()
    ]  # fmt: skip
    return made, Ledger(made.name, cells=cells)


def test_the_angle_of_gradients_is_drawn_by_its_order_of_magnitude():
    charts = reproduction_figures(*watched())
    (panel,) = charts["figure-1"].panels
    assert lines(panel)["Plain"].y == pytest.approx([-1, math.log10(0.2), -1])
    # What is exactly zero has no logarithm.
    assert (lines(panel)["Direct"].x, lines(panel)["Direct"].y) == ([1, 3], [-8, -7])
    assert panel.y == "log₁₀ |cosine|"
    (limit,) = of(panel, Rule)
    assert (limit.at, limit.axis, limit.name) == (-5, "y", "1e-05")


def test_curves_that_no_figure_shows_are_folded_into_the_section_on_training():
    text = reproduction_page(*watched())
    charts = reproduction_figures(*watched())
    assert "gradients-largest" in charts
    assert "gradients-cosine" not in charts
    assert text.index("<summary>Training curves") < text.index("<h3>gradients.largest</h3>")
