"""Plots that are folded away have the size of their place once they are unfolded."""

import pytest

from tammes.lab.report.charts.chart import Chart, Line, Panel
from tammes.lab.report.render.html_page import Fold, Section, Text, pictures, render

pytest.importorskip("plotly", reason="pages need plotly")

SIZES = """[...document.querySelectorAll('%s .plot')].map(box => [
  box._fullLayout.width - box.clientWidth, box._fullLayout.height - box.clientHeight,
  box.clientWidth])"""


def line(name):
    chart = Chart([Panel([Line([1, 2, 3], [3, 1, 2], name)], name, "x", "y")])
    return pictures(chart)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page with a plot that is shown, two in a fold, and one in a fold within a fold."""
    inner = Fold("inner", line("four"))
    fold = Fold("outer", [Text("text"), *line("two"), *line("three"), inner])
    path = tmp_path_factory.mktemp("page") / "page.html"
    text = render("Folds", [Section("One", [*line("one"), fold])])
    # Chromium gives a size to what it does not show; other browsers do not.
    hidden = "details:not([open]) > :not(summary) { display: none; }"
    path.write_text(text.replace("</style>", f"{hidden}</style>", 1))
    return path


@pytest.fixture
def screen(chromium, written, request):
    wide = getattr(request, "param", 1280)
    with chromium.open(written, width=wide, height=900) as opened:
        opened.wait_for("document.documentElement.dataset.drawn")
        yield opened


def open_fold(screen, summary):
    screen.run(
        "[...document.querySelectorAll('summary')]"
        f".find(each => each.textContent === '{summary}').click()"
    )


def wait_for_fit(screen, where):
    """Every plot there is as large as its place."""
    fit = f"{SIZES % where}.every(([x, y, w]) => Math.abs(x) < 2 && Math.abs(y) < 2 && w > 200)"
    screen.wait_for(fit, seconds=10)


@pytest.mark.parametrize("screen", [1280, pytest.param(390, marks=pytest.mark.slow)], indirect=True)
def test_plots_in_a_fold_fill_their_place_once_it_is_opened(screen):
    assert screen.run("document.querySelector('details').open") is False
    open_fold(screen, "outer")
    wait_for_fit(screen, "section > details > .plots")
    assert len(screen.run(SIZES % "section > details > .plots")) == 2
    assert screen.run("document.documentElement.scrollWidth <= innerWidth")
    # What is in a fold within it waits for its own turn.
    open_fold(screen, "inner")
    wait_for_fit(screen, "details details .plots")
    assert screen.errors() == []


@pytest.mark.slow
def test_plots_side_by_side_stay_so_in_a_fold(screen):
    open_fold(screen, "outer")
    wait_for_fit(screen, "section > details > .plots")
    one, two = screen.run(
        "[...document.querySelectorAll('section > details > .plots .plot')]"
        ".map(box => box.getBoundingClientRect().top)"
    )
    assert one == two


@pytest.mark.slow
def test_a_fold_that_is_opened_after_the_window_was_made_narrow_fits_too(screen):
    screen.call(
        "Emulation.setDeviceMetricsOverride",
        width=500, height=900, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    open_fold(screen, "outer")
    wait_for_fit(screen, "section > details > .plots")
    assert screen.run("document.documentElement.scrollWidth <= innerWidth")
    assert screen.errors() == []


def test_on_paper_folded_plots_have_the_width_of_the_others(screen):
    screen.run("dispatchEvent(new Event('beforeprint'))")
    boxes = "[...document.querySelectorAll('.plot')]"
    screen.wait_for(f"{boxes}.every(box => box._fullLayout.width === 640)")
    # None reaches into what stands under it.
    assert screen.run(f"{boxes}.every(box => box._fullLayout.height <= box.clientHeight + 1)")
    screen.run("dispatchEvent(new Event('afterprint'))")
    wait_for_fit(screen, "details")
    assert screen.errors() == []
