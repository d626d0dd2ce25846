"""Pages of retrieval, verification and open sets: curves, images, names that try to break them."""

import numpy as np
import pytest
import torch
from pages import EVIL, NAMES, body, escaped, plots

from tammes.lab.cli.main import main
from tammes.lab.recognition.results import MeasuredCurve
from tammes.lab.report.charts import recognition as charts

pytest.importorskip("plotly", reason="pages need plotly")
images = pytest.importorskip("PIL.Image", reason="images need Pillow")

PROTOCOLS = ("retrieval", "verification", "openset")
BOXES = "[...document.querySelectorAll('.plot')]"


def write_images(folder):
    """Embeddings of 8 identities, with an image of each example in a file."""
    generator = np.random.default_rng(0)
    people = np.repeat(np.arange(8), 6)
    features = generator.normal(size=(8, 6))[people] + 0.8 * generator.normal(size=(48, 6))
    paths = [f"{number}.png" for number in range(48)]
    for number, path in enumerate(paths):
        size = (64, 160) if number % 2 else (40, 20)
        images.new("RGB", size, (5 * number, 30 * int(people[number]), 99)).save(folder / path)
    names = np.array(NAMES)[people]
    np.savez(folder / "<i>.npz", embeddings=features, identities=names, paths=np.array(paths))
    return folder / "<i>.npz"


@pytest.fixture(scope="module", params=PROTOCOLS)
def protocol(request):
    return request.param


@pytest.fixture(scope="module")
def written(protocol, tmp_path_factory):
    folder = tmp_path_factory.mktemp(protocol)
    file = write_images(folder)
    words = ["evaluate", protocol, str(file), "--out", str(folder), "--resamples", "20"]
    assert main(words) == 0
    return folder / f"{protocol}.html"


@pytest.fixture(params=["desktop", "phone"])
def opened(request, desktop, phone):
    return {"desktop": desktop, "phone": phone}[request.param]


def test_names_are_escaped_and_images_are_inside(written):
    text = body(written.read_text())
    for each in (EVIL, "</script><b>", "<i>"):
        assert each not in text.replace("<i class", "")
    assert text.count(escaped(EVIL)) > 1
    assert text.count('<img src="data:image/') > 20
    assert "default-src 'none'" in text


def test_curves_have_bands_and_rates_logarithmic_axes(written, protocol):
    drawn = {plot["name"]: plot for plot in plots(written.read_text())}
    expected = {
        "retrieval": {"CMC", "Scores"},
        "verification": {"ROC", "DET", "Scores"},
        "openset": {"Identification", "Known or unknown", "Scores"},
    }
    assert set(drawn) == expected[protocol]
    for name, plot in drawn.items():
        names = [trace.get("name") for trace in plot["data"]]
        assert ("95 % interval over identities" in names) == (name != "Scores")
        log = name not in ("CMC", "Scores")
        assert (plot["layout"]["xaxis"].get("type") == "log") == log
        assert (plot["layout"]["yaxis"].get("type") == "log") == (name == "DET")
    if protocol == "verification":
        roc, det = (drawn[name]["data"][1] for name in ("ROC", "DET"))
        raised = 0.5 / 120
        assert det["y"] == pytest.approx([max(1 - tar, raised) for tar in roc["y"]])
        # The range is in logarithms of the rates.
        assert drawn["ROC"]["layout"]["xaxis"]["range"][1] == 0


def test_the_page_is_drawn_on_any_screen_in_silence(opened, written):
    assert opened.errors() == []
    assert opened.requests() == []
    sizes = opened.run(f"{BOXES}.map(box => box.querySelectorAll('.trace, .points path').length)")
    assert len(sizes) == len(plots(written.read_text()))
    assert min(sizes) > 0
    assert opened.run("document.documentElement.scrollWidth <= innerWidth")
    assert opened.run("[...document.images].every(image => image.naturalWidth > 0)")
    # An image keeps its proportions, and none is larger than needed.
    widths = opened.run("[...new Set([...document.images].map(i => i.naturalWidth))]")
    assert set(widths) == {38, 40}


def test_pairs_stand_side_by_side_on_a_wide_screen(desktop, protocol):
    tops = desktop.run(
        "[...document.querySelectorAll('.gallery.pair')].map(g => g.getBoundingClientRect().top)"
    )
    assert bool(tops) == (protocol == "verification")
    assert len(set(tops)) < len(tops) or not tops


def test_without_images_rankings_are_rows_and_missing_files_are_counted(tmp_path, capsys):
    file = write_images(tmp_path)
    for path in tmp_path.glob("*.png"):
        if int(path.stem) > 20:
            path.unlink()
    words = ["evaluate", "retrieval", str(file), "--out", str(tmp_path), "--resamples", "5"]
    assert main(words) == 0
    message = capsys.readouterr().err
    assert "images could not be shown, the first is " in message
    assert "no such file or directory" in message
    text = body((tmp_path / "retrieval.html").read_text())
    assert "ranked items" in text
    np.savez(tmp_path / "plain.npz", **{k: v for k, v in np.load(file).items() if k != "paths"})
    words[2] = str(tmp_path / "plain.npz")
    assert main(words) == 0
    text = body((tmp_path / "retrieval.html").read_text())
    assert "<img" not in text
    assert "1. " in text
    assert capsys.readouterr().err == ""


def test_figures_for_papers_have_the_same_axes_and_curves():
    x = torch.logspace(-3, 0, 20, dtype=torch.double)
    curve = MeasuredCurve(x, x.sqrt(), 0.9 * x.sqrt(), (1.1 * x.sqrt()).clamp_max(1))
    roc, det = (charts.roc(curve).axes[0], charts.det(curve, 100).axes[0])
    assert (roc.get_xscale(), roc.get_yscale()) == ("log", "linear")
    assert (det.get_xscale(), det.get_yscale()) == ("log", "log")
    assert roc.lines[0].get_ydata() == pytest.approx(curve.y.numpy())
    assert det.lines[0].get_ydata() == pytest.approx((1 - curve.y).clamp_min(0.005).numpy())
    assert roc.get_xlim() == pytest.approx((1e-3, 1))
    assert len(roc.patches) == 1
