"""Processes for the tests of runs; trained runs; a browser for pages: `written` is their page."""

import multiprocessing

import browser
import pytest


@pytest.fixture(scope="module")
def processes():
    """Processes of their own, from a server that has imported already what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tammes.lab.training.loop", "lightning.fabric", "sklearn.datasets"]
    )
    return context


@pytest.fixture(scope="module")
def written_sets(tmp_path_factory):
    from recipe_cells import write_identities, write_images

    folder = tmp_path_factory.mktemp("data")
    write_images(folder)
    write_identities(folder)
    return folder


@pytest.fixture
def small_sets(written_sets, monkeypatch):
    """Sets of the papers with a few images of every class, found by their names."""
    monkeypatch.setenv("TAMMES_DATA", str(written_sets))


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """A run on digits."""
    from tammes.lab.config.schema import Config
    from tammes.lab.training.loop import train

    folder = tmp_path_factory.mktemp("digits")
    config = Config(data="digits", loss="cosface()", backbone="mnist_cnn(features=8)", epochs=1)
    return train(config, folder)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """A folder of photographs, test images apart."""
    from photographs import write_photographs

    root = tmp_path_factory.mktemp("photographs")
    for part, start in (("train", 0), ("test", 500)):
        for number, name in enumerate(("ape", "bee", "cat")):
            write_photographs(root / part / name, first=start + 10 * number)
    return root


@pytest.fixture(scope="session")
def photograph_run(photographs, tmp_path_factory):
    """A run on photographs whose evaluation crops the centre."""
    from tammes.lab.config.schema import Config
    from tammes.lab.training.loop import train

    config = Config(
        data=str(photographs),
        image_size=20,
        augment="resized_crop(0.5, 1.0, size=16, zoom=1.25) + flip()",
        backbone="mnist_cnn(features=8)",
        loss="softmax()",
        batch_size=4,
        epochs=2,
        lr=0.01,
    )
    return train(config, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def chromium():
    path = browser.find()
    if path is None:
        pytest.skip("no browser is installed: the page was not opened")
    with browser.Browser(path) as running:
        yield running


@pytest.fixture(scope="module")
def desktop(chromium, written):
    with chromium.open(written) as opened:
        opened.wait_for("document.documentElement.dataset.drawn")
        yield opened


@pytest.fixture(scope="module")
def phone(chromium, written):
    with chromium.open(written, width=390, height=844, dark=True) as opened:
        opened.wait_for("document.documentElement.dataset.drawn")
        yield opened
