"""What holds for every page: it opens from disk on any screen, and no name breaks it."""

import re

import ledgers
import pytest
from pages import (
    EVIL,
    LOSSES,
    NAMES,
    body,
    escaped,
    packed,
    plots,
    write_measure_page,
    write_reproduction_page,
    write_runs_page,
)

import tammes
from tammes.lab.report.pages.reproduction_page import reproduction_figures

pytest.importorskip("plotly", reason="pages need plotly")
pytest.importorskip("PIL", reason="images need Pillow")

WRITE = {
    "runs": write_runs_page,
    "reproduction": write_reproduction_page,
    "measure": write_measure_page,
}
BOXES = "[...document.querySelectorAll('.plot')]"
DRAWN = "'.point, .points path, .heatmaplayer image, .trace, .js-line, canvas'"
both_screens = pytest.mark.parametrize("screen", ["desktop", "phone"])


@pytest.fixture(scope="module", params=WRITE)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def written(name, tmp_path_factory):
    return WRITE[name](tmp_path_factory.mktemp(name))


@pytest.fixture
def opened(screen, desktop, phone):
    """The page on a desktop in light colours or on a phone in dark ones."""
    return {"desktop": desktop, "phone": phone}[screen]


# ----------------------------------------------------------------------------------- the file


def test_the_library_is_inside_once_and_nothing_is_loaded_from_elsewhere(written, name):
    text = written.read_text()
    assert text.count("* plotly.js v") == packed(text, "library").count("* plotly.js v") == 1
    assert "MIT license" in text
    assert "default-src 'none'" in text
    sources = re.findall(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=\"?([^\"]*)", body(text))
    assert bool(sources) == (name == "runs")
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_names_are_escaped_wherever_they_stand(written):
    text = written.read_text()
    for each in (EVIL, "</script><b>", "<i>file"):
        assert each not in body(text)
    assert body(text).count(escaped(EVIL)) > 1
    # The library, the numbers of the plots, the script that draws them.
    assert text.count("</script>") == 3


def test_texts_of_plots_hold_no_markup(written):
    def texts(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            # What is grouped is compared and never shown; a template is ours.
            for key, each in value.items():
                if key not in ("legendgroup", "hovertemplate"):
                    yield from texts(each)
        elif isinstance(value, list):
            for each in value:
                yield from texts(each)

    found = [text for plot in plots(written.read_text()) for text in texts([plot["data"],
             plot["layout"]])]  # fmt: skip
    assert not [text for text in found if "<" in text]
    assert any("&lt;script&gt;" in text for text in found)


def test_the_page_names_the_version_that_wrote_it(written):
    assert f"tammes {tammes.__version__}" in written.read_text()


def test_columns_are_defined_on_the_page(written, name):
    heads = re.findall(r"<th( [^>]*)?><button[^>]*>([^<]*)</button>", body(written.read_text()))
    undefined = {text for attributes, text in heads if "title=" not in attributes}
    # What a recipe, a file or a loss names is not a word of ours.
    if name == "runs":
        known = {"what", "value", "meaning", "term"}
        assert undefined - known <= {*map(escaped, (EVIL, *LOSSES)), "name", "backbone", "loss"}
    assert any("title=" in attributes for attributes, _ in heads)
    glossary = body(written.read_text()).split('id="glossary"')[1]
    for attributes, text in heads:
        assert "title=" not in attributes or f">{text}</td>" in glossary


# ------------------------------------------------------------------------------- in a browser


@both_screens
def test_console_and_network_stay_silent(opened, screen):
    assert opened.run("innerWidth") == {"desktop": 1280, "phone": 390}[screen]
    assert opened.errors() == []
    assert opened.requests() == []


@both_screens
def test_every_plot_is_drawn(opened, screen, written, name):
    drawn = opened.run(f"{BOXES}.map(box => box.querySelectorAll({DRAWN}).length)")
    assert len(drawn) == len(plots(written.read_text()))
    if name == "measure":
        # The sphere, the heat map, similarities, margins, angles.
        assert len(drawn) == 5
    elif name == "reproduction":
        charts = reproduction_figures(*ledgers.drawn()).values()
        assert len(drawn) == sum(len(chart.panels) for chart in charts) == 24
    else:
        assert len(drawn) > 20
    assert min(drawn) > 0
    sizes = opened.run("[...document.querySelectorAll('.plot .main-svg')].map(b => b.clientHeight)")
    assert len(sizes) == 3 * len(drawn)
    assert name != "measure" or min(sizes) > 200
    images = opened.run("[...document.images].map(image => image.naturalWidth)")
    assert set(images) == ({8} if name == "runs" else set())


def test_the_last_plot_is_as_wide_as_the_others(desktop):
    rows = "[...document.querySelectorAll('.plots')].filter(row => row.clientWidth)"
    widths = desktop.run(f"{rows}.map(row => [...row.children].map(each => each.clientWidth))")
    assert any(len(row) % 2 for row in widths)
    assert all(len({*row}) == 1 and row[0] < 1180 / 2 for row in widths)


@both_screens
def test_nothing_is_wider_than_the_screen(opened, screen, name):
    opened.run("document.querySelectorAll('details').forEach(box => box.open = true)")
    assert opened.run("document.documentElement.scrollWidth <= innerWidth")
    wide = "[...document.querySelectorAll('.scroll')].filter(t => t.scrollWidth > t.clientWidth)"
    if screen == "desktop" or name == "runs":
        # Elsewhere a wide table may scroll in its box on a phone.
        assert opened.run(f"{wide}.length") == 0
    assert opened.run(
        "[...document.querySelectorAll('.plot .main-svg')]"
        ".every(box => box.clientWidth <= box.closest('figure').clientWidth)"
    )


def test_names_reach_the_reader_as_they_are(desktop, name):
    cells = desktop.run("[...document.querySelectorAll('td')].map(cell => cell.textContent)")
    expected = {f"A {EVIL}"} if name == "reproduction" else set(NAMES)
    assert expected <= set(cells)
    texts = desktop.run("[...document.querySelectorAll('.plot text')].map(t => t.textContent)")
    assert [text for text in texts if EVIL in text]
    titles = {
        "runs": f"title {EVIL}",
        "reproduction": f"Title {EVIL}",
        "measure": "Margins: <i>file.npz",
    }
    assert desktop.run("document.querySelector('h1').textContent") == titles[name]
    assert desktop.run("document.querySelectorAll('main b, main script').length") == 0
    # Other pages have signs of their own.
    assert name != "measure" or desktop.run("document.querySelectorAll('main i').length") == 0


def test_legends_name_every_entry(desktop):
    names = desktop.run("[...document.querySelectorAll('.legendtext')].map(t => t.textContent)")
    assert all(name.strip() for name in names)


def test_every_plot_can_be_downloaded_and_none_is_sent_away(desktop, written):
    titles = desktop.run(
        "[...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title)"
    )
    assert titles.count("Download plot") == len(plots(written.read_text()))
    assert not [title for title in titles if re.search("share|cloud|edit", title, re.IGNORECASE)]


def test_the_sphere_turns_when_it_is_dragged(desktop):
    # A page behind another one draws, and answers, much later.
    desktop.call("Page.bringToFront")
    sphere = f"{BOXES}.find(box => box._fullLayout.scene)"
    desktop.run(f"{sphere}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    eye = f"JSON.stringify({sphere}._fullLayout.scene._scene.getCamera().eye)"
    before = desktop.run(eye)
    x, y = desktop.run(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        f"({sphere}.querySelector('canvas').getBoundingClientRect())"
    )
    events = [("mousePressed", 0), ("mouseMoved", 40), ("mouseMoved", 80), ("mouseReleased", 80)]
    for kind, shift in events:
        desktop.call("Input.dispatchMouseEvent", type=kind, x=x + shift, y=y + shift / 2,
                     button="left", buttons=1, clickCount=1)  # fmt: skip
    desktop.wait_for(f"{eye} !== {before!r}", seconds=20)


SORTED = {"runs": (0, 2, 3), "reproduction": (2, 1, 2), "measure": (-2, 3, 8)}
"""A table of the page, one of its columns, and how many numbers there are."""


@both_screens
def test_tables_sort_by_a_click_on_the_head(opened, name):
    number, column, count = SORTED[name]
    table = f"[...document.querySelectorAll('table')].at({number})"
    button = f"{table}.tHead.rows[0].cells[{column}].querySelector('button')"
    if name == "runs":
        assert opened.run(f"{button}.textContent") == "accuracy %"
        assert opened.run(f"{button}.getBoundingClientRect().left >= 0")
    shown = f"[...{table}.tBodies[0].rows].map(row => row.cells[{column}].dataset.sort)"
    shown += ".filter(each => each !== undefined).map(Number)"
    opened.run(f"{button}.click()")
    values = opened.run(shown)
    assert len(values) == count
    assert values == sorted(values)
    opened.run(f"{button}.click()")
    assert opened.run(shown) == sorted(values, reverse=True)


def test_dark_mode_reaches_the_page_and_its_plots(desktop, phone):
    light, dark = (
        each.run(
            "[getComputedStyle(document.body).backgroundColor,"
            f" {BOXES}.every(box => box.layout.font.color === {BOXES}[0].layout.font.color),"
            f" {BOXES}[0].layout.font.color]"
        )
        for each in (desktop, phone)
    )
    assert light == ["rgb(255, 255, 255)", True, "#1b1f24"]
    assert dark == ["rgb(20, 23, 27)", True, "#e6e9ed"]
    balls = f"{BOXES}.flatMap(box => box.data).filter(trace => trace.type === 'surface')"
    assert {*desktop.run(f"{balls}.map(ball => ball.colorscale[0][1])")} == {"#e3e7ec"}
    assert {*phone.run(f"{balls}.map(ball => ball.colorscale[0][1])")} == {"#2d333b"}


@pytest.mark.slow
def test_printed_tables_are_as_wide_as_the_paper(chromium, written):
    with chromium.open(written, width=718, height=1000, media="print") as paper:
        paper.run("document.querySelectorAll('details').forEach(box => box.open = true)")
        assert paper.run("document.documentElement.scrollWidth") == 718


def test_printed_it_is_light_and_everything_is_unfolded(phone):
    phone.run("document.querySelectorAll('details').forEach(box => box.open = false)")
    phone.run("dispatchEvent(new Event('beforeprint'))")
    phone.wait_for(f"{BOXES}.every(box => box._fullLayout.width === 640)")
    assert phone.run(f"{BOXES}.every(box => box.layout.font.color === '#1b1f24')")
    assert phone.run("[...document.querySelectorAll('details')].every(box => box.open)")
    phone.run("dispatchEvent(new Event('afterprint'))")
    phone.wait_for(f"{BOXES}.every(box => box._fullLayout.width < 390)")
    assert phone.errors() == []
