"""A page is rendered of sections: scripts, tables, plots."""

import runpy
from pathlib import Path

import pytest
from pages import packed

from tammes.lab.report.charts import distributions, paper_figures
from tammes.lab.report.render import html_page

pytest.importorskip("plotly", reason="pages need plotly")


def test_no_text_ends_the_script_it_stands_in():
    chart = distributions.during_training.chart(
        {"</script><b>run": [1.0]}, quantity="</script>loss"
    )
    text = html_page.render(
        "title", [html_page.Section("", html_page.pictures(chart, title="</script><b>"))]
    )
    # The library, the numbers, the script that draws them.
    assert text.count("</script>") == 3
    assert "<b>" not in text


def test_a_page_without_plots_is_small():
    text = html_page.render("title", [html_page.Section("one", [html_page.Text("two")])])
    assert "plotly.js" not in text
    assert len(text) < 20_000


def test_a_number_that_is_not_finite_cannot_get_into_a_plot():
    chart = distributions.during_training.chart({"run": [1.0, 2.0]}, quantity="loss")
    (figure,) = html_page.pictures(chart)
    figure.plot.data[0].y = [1.0, float("nan")]
    text = html_page.render("title", [html_page.Section("", [figure])])
    assert '"y":[1.0,null]' in packed(text, "plots")


def test_a_table_shows_numbers_to_be_sorted_by():
    table = html_page.Table(("class", "margin"), [("a", 0.123456789), ("b", 2), ("c", None)])
    text = html_page.render("title", [html_page.Section("", [table])])
    assert 'data-sort="0.123456789">0.1235</td>' in text
    assert 'data-sort="2">2</td>' in text


def test_several_panels_become_several_figures():
    figures = html_page.pictures(paper_figures.decision_geometry.chart())
    assert len(figures) == 3
    assert figures[0].title.startswith("‖W1‖ = ‖W2‖")


def test_the_sphere_example_writes_a_sphere_for_every_loss(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the figure of the example needs matplotlib")
    examples = Path(__file__).parents[3] / "examples"
    monkeypatch.syspath_prepend(examples)
    import sphere

    # Solving takes its time, and is tested with the example that does it.
    monkeypatch.setattr(
        sphere, "solve", lambda term, scale: sphere.train(term, scale, seeds=1, steps=2)
    )
    main = runpy.run_path(str(examples / "sphere_page.py"))["main"]
    written, figure = main(["--out", str(tmp_path), "--steps", "2"])
    text = written.read_text()
    assert text.count('<div class="plot"') == len(sphere.LOSSES)
    for name, (prototypes, _) in sphere.final_points(64.0, steps=2).items():
        assert f"<h3>{name}: {sphere.margins(prototypes[None])[0]:.2f}°</h3>" in text
    assert text.count("<tr>") == 1 + len(sphere.LOSSES) * len(sphere.SCALES)
    assert figure.read_bytes().startswith(b"\x89PNG")
