"""Processes for the tests of runs; a browser for those of pages: `written` is their page."""

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
