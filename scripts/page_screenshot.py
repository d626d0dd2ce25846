"""Draw the pictures of the page of ``tammes demo`` in docs/images, as a browser shows it.

``python scripts/page_screenshot.py`` trains the runs of the demo, a minute on two cores, and opens
their page in Chromium; with the page of a demo as argument it trains nothing.
"""

import base64
import sys
import tempfile
from pathlib import Path

from tammes.lab.cli.main import main

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SHOTS = {"page": (1060, ""), "page_features": (662, "features")}
"""Height in pixels and section of every picture; the top of the page without a section."""


def draw(page: Path, folder: Path = IMAGES) -> None:
    """Write all pictures of a page as PNG."""
    sys.path.append(str(ROOT / "tests"))
    import browser

    with browser.Browser(browser.find()) as chromium:
        for name, (height, section) in SHOTS.items():
            with chromium.open(page, width=1280, height=height) as opened:
                opened.wait_for("document.documentElement.dataset.drawn")
                # Spheres are drawn a moment later.
                opened.run("new Promise(done => setTimeout(done, 2000))")
                if section:
                    opened.run(f"document.getElementById({section!r}).scrollIntoView()")
                image = opened.call("Page.captureScreenshot", format="png")
            (folder / f"{name}.png").write_bytes(base64.b64decode(image["data"]))
            print(folder / f"{name}.png")


if __name__ == "__main__":
    if sys.argv[1:]:
        draw(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            if main(["demo", "--out", folder]) == 0:
                draw(Path(folder) / "report.html")
