"""Compare two losses on your own images and write a report page: docs/tutorial.md in Python.

    python examples/own_folder.py                  # creates and uses a folder of digits
    python examples/own_folder.py path/to/images   # with one subfolder per class

Needs `tammes[lab]`.
"""

import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from tammes.lab import Config, compare
from tammes.lab.report.pages.runs_page import runs_page
from tammes.lab.report.render.html_page import write
from tammes.lab.stats.seed_groups import table


def make_folder(folder):
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).save(path)


def main(folder=None, out="out/own_folder", seeds=3, epochs=10):
    """Train every loss with every seed; returns the runs."""
    out = Path(out)
    if folder is None:
        make_folder(folder := out / "pictures")
    config = Config(data=str(folder), epochs=epochs)
    runs = compare(config, ["softmax", "cosface(margin=0.2)"], seeds, out / "runs")
    print(table(runs))
    write(out / "report.html", runs_page(runs))
    print(f"\n  page: {out / 'report.html'}")
    return runs


if __name__ == "__main__":
    main(*sys.argv[1:2])
