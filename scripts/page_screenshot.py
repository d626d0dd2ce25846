"""Draw docs/images/page.png: the top of the page of ``tammes demo``, as a browser shows it.

``python scripts/page_screenshot.py`` trains the runs of the demo, a minute on two cores, and opens
their page in Chromium.
"""

import base64
import sys
import tempfile
from pathlib import Path

from tammes.lab.cli.main import main

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "images" / "page.png"
SIZE = {"width": 1280, "height": 1060}


def draw(page: Path, out: Path = OUT) -> None:
    """Write the top of a page as a PNG."""
    sys.path.append(str(ROOT / "tests"))
    import browser

    with browser.Browser(browser.find()) as chromium, chromium.open(page, **SIZE) as opened:
        opened.wait_for("document.documentElement.dataset.drawn")
        image = opened.call("Page.captureScreenshot", format="png")
    out.write_bytes(base64.b64decode(image["data"]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if main(["demo", "--out", folder]) == 0:
            draw(Path(folder) / "report.html")
            print(OUT)
