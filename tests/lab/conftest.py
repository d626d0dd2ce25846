"""A browser for the tests of pages: `written` is the page that a module tests."""

import browser
import pytest


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
