"""Draw the pictures of the page of ``tammes demo`` in docs/images, as a browser shows it.

``python scripts/page_screenshot.py`` trains the runs of the demo, a minute on two cores, and opens
their page in Chromium; with the page of a demo as argument it trains nothing.
"""

import base64
import sys
import tempfile
from pathlib import Path
from typing import Any

from tammes.lab.cli.main import main

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DESKTOP, PHONE = {"width": 1280, "height": 1060}, {"width": 390, "height": 844, "dark": True}
SHOTS: dict[str, tuple[dict[str, Any], str]] = {
    "page": (DESKTOP, ""),
    "page_features": (DESKTOP, "features"),
    "page_phone": (PHONE, ""),
}
"""Screen and section of every picture; the top of the page without a section."""


def draw(page: Path, folder: Path = IMAGES) -> None:
    """Write all pictures of a page as PNG."""
    sys.path.append(str(ROOT / "tests"))
    import browser

    with browser.Browser(browser.find()) as chromium:
        for name, (screen, section) in SHOTS.items():
            with chromium.open(page, **screen) as opened:
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
