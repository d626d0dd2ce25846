"""The page opens from disk on any screen, draws everything, and says nothing in the console."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import escaped

import tammes
from tammes.lab.cli.measure import main
from tammes.lab.report.charts import distributions, paper_figures
from tammes.lab.report.render import html_page

pytest.importorskip("plotly", reason="pages need plotly")

NAMES = [
    "<script>alert(1)</script>",
    "a & b",
    "$title",
    "\"quoted\" 'name'",
    "</script><b>bold",
    "plain",
    "Ärger",
    "8",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page of eight classes on the sphere, with names that try to break it."""
    folder = tmp_path_factory.mktemp("page")
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(8, 3, generator=generator)
    labels = torch.arange(8).repeat(20)
    embeddings = prototypes[labels] + 0.3 * torch.randn(160, 3, generator=generator)
    np.savez(
        folder / "<i>file.npz",
        prototypes=prototypes.numpy(),
        embeddings=embeddings.numpy(),
        labels=labels.numpy(),
        class_names=np.array(NAMES),
    )
    assert main([str(folder / "<i>file.npz"), "--out", str(folder)]) == 0
    return folder / "measure.html"


def test_the_library_is_inside_once_and_nothing_is_loaded_from_elsewhere(written):
    text = written.read_text()
    assert text.count("* plotly.js v") == 1
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=", text)
    assert "default-src 'none'" in text


def test_names_are_escaped_wherever_they_stand(written):
    text = written.read_text()
    without_library = re.sub(r"<script>/\*\*\n\* plotly.*?</script>", "", text, flags=re.DOTALL)
    for name in NAMES[:2]:
        assert name not in without_library
        assert escaped(name) in without_library
    assert "<i>file" not in without_library
    assert "</script><b>" not in without_library


def test_no_text_ends_the_script_it_stands_in():
    chart = distributions.during_training.chart(
        {"</script><b>run": [1.0]}, quantity="</script>loss"
    )
    text = html_page.render(
        "title", [html_page.Section("", html_page.pictures(chart, title="</script><b>"))]
    )
    # The library, the numbers, the script that draws them.
    assert text.count("</script>") == 3
    assert "<b>" not in text.rpartition('id="plots">')[2]


def test_a_page_without_plots_is_small():
    text = html_page.render("title", [html_page.Section("one", [html_page.Text("two")])])
    assert "plotly.js" not in text
    assert len(text) < 20_000


def test_a_number_that_is_not_finite_cannot_get_into_a_plot():
    chart = distributions.during_training.chart({"run": [1.0, 2.0]}, quantity="loss")
    (figure,) = html_page.pictures(chart)
    figure.plot.data[0].y = [1.0, float("nan")]
    text = html_page.render("title", [html_page.Section("", [figure])])
    assert re.search(r'"y":\[1\.0,null\]', text)


def test_a_table_shows_numbers_to_be_sorted_by():
    table = html_page.Table(("class", "margin"), [("a", 0.123456789), ("b", 2), ("c", None)])
    text = html_page.render("title", [html_page.Section("", [table])])
    assert 'data-sort="0.123456789">0.1235</td>' in text
    assert 'data-sort="2">2</td>' in text


def test_several_panels_become_several_figures():
    figures = html_page.pictures(paper_figures.decision_geometry.chart())
    assert len(figures) == 3
    assert figures[0].title.startswith("‖W1‖ = ‖W2‖")


def test_nothing_is_said_in_the_console_and_nothing_asked_of_the_network(desktop):
    assert desktop.errors() == []
    assert desktop.requests() == []


def test_every_plot_is_drawn(desktop):
    drawn = desktop.run(
        "[...document.querySelectorAll('.plot')].map(box => box.querySelectorAll("
        "'.point, .points path, .heatmaplayer image, .trace, canvas').length)"
    )
    # The sphere, the heat map, similarities, margins, angles.
    assert len(drawn) == 5
    assert min(drawn) > 0
    sizes = desktop.run(
        "[...document.querySelectorAll('.plot .main-svg')].map(box => box.clientHeight)"
    )
    assert min(sizes) > 200


def test_names_reach_the_reader_as_they_are(desktop):
    cells = desktop.run("[...document.querySelectorAll('td')].map(cell => cell.textContent)")
    assert set(NAMES) <= set(cells)
    legend = desktop.run("[...document.querySelectorAll('.legendtext')].map(t => t.textContent)")
    assert "<script>alert(1)</script>" in legend
    assert desktop.run("document.querySelector('h1').textContent") == "Margins: <i>file.npz"
    assert desktop.run("document.querySelectorAll('main b, main i').length") == 0


def test_no_button_sends_data_away_and_every_plot_can_be_downloaded(desktop):
    titles = desktop.run(
        "[...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title)"
    )
    assert not [title for title in titles if re.search("share|cloud|edit", title, re.IGNORECASE)]
    assert titles.count("Download plot") == 5


def test_the_sphere_turns_when_it_is_dragged(desktop):
    desktop.run("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    eye = "JSON.stringify(document.querySelector('.plot')._fullLayout.scene._scene.getCamera().eye)"
    before = desktop.run(eye)
    x, y = desktop.run(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        "(document.querySelector('.plot canvas').getBoundingClientRect())"
    )
    events = [("mousePressed", 0), ("mouseMoved", 40), ("mouseMoved", 80), ("mouseReleased", 80)]
    for kind, shift in events:
        desktop.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x + shift,
            y=y + shift / 2,
            button="left",
            buttons=1,
            clickCount=1,
        )
    desktop.wait_for(f"{eye} !== {before!r}", seconds=20)


def test_a_table_sorts_by_a_click_on_its_head(desktop):
    column = (
        "[...[...document.querySelectorAll('table')].at(-1).tBodies[0].rows]"
        ".map(row => +row.cells[3].dataset.sort)"
    )
    head = "[...document.querySelectorAll('table')].at(-1).tHead.rows[0].cells[3]"
    desktop.run(f"{head}.querySelector('button').click()")
    values = desktop.run(column)
    assert len(values) == 8
    assert values == sorted(values)
    desktop.run(f"{head}.querySelector('button').click()")
    assert desktop.run(column) == sorted(values, reverse=True)
    assert desktop.run(f"{head}.getAttribute('aria-sort')") == "descending"


@pytest.mark.parametrize("screen", ["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(screen, request):
    opened = request.getfixturevalue(screen)
    assert opened.run("document.documentElement.scrollWidth <= innerWidth")
    assert opened.run(
        "[...document.querySelectorAll('.plot .main-svg')]"
        ".every(box => box.clientWidth <= box.closest('figure').clientWidth)"
    )


def test_on_a_phone_it_is_as_clean(phone):
    assert phone.run("innerWidth") == 390
    assert phone.errors() == []
    assert phone.run("document.querySelectorAll('.plot .main-svg').length") == 15


def test_dark_mode_reaches_the_page_and_its_plots(desktop, phone):
    light, dark = (
        opened.run(
            "[getComputedStyle(document.body).backgroundColor,"
            " document.querySelectorAll('.plot')[2].layout.font.color]"
        )
        for opened in (desktop, phone)
    )
    assert light == ["rgb(255, 255, 255)", "#1b1f24"]
    assert dark == ["rgb(20, 23, 27)", "#e6e9ed"]


def test_printed_it_is_light_and_fits_on_paper(phone):
    phone.run("dispatchEvent(new Event('beforeprint'))")
    boxes = "[...document.querySelectorAll('.plot')]"
    phone.wait_for(f"{boxes}.every(box => box._fullLayout.width === 640)")
    assert phone.run(f"{boxes}.every(box => box.layout.font.color === '#1b1f24')")
    assert phone.run("[...document.querySelectorAll('details')].every(box => box.open)")
    phone.run("dispatchEvent(new Event('afterprint'))")
    phone.wait_for(f"{boxes}.every(box => box._fullLayout.width < 390)")
    assert phone.errors() == []


def test_the_page_names_the_version_that_wrote_it(written):
    assert f"tammes {tammes.__version__}" in written.read_text()


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
