"""Eight classes on the sphere, as an interactive page and as a figure for a paper.

    python examples/sphere_page.py                    # out/sphere.html and out/sphere.png
    python examples/sphere_page.py --out elsewhere

The toy problem of Zhou et al., Learning Towards the Largest Margins, ICLR 2022, Fig. 1, trained as
described in `examples/sphere.py`. Needs `tammes[lab]`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sphere import CLASSES, LOSSES, SCALES, SIZE, final_points, margins, solve

import tammes
from tammes.lab.report.charts import distributions
from tammes.lab.report.render import html_page, matplotlib_charts


def build(scales: Sequence[float], steps: int, out: Path) -> tuple[Path, Path]:
    """Train, and write the page and the figure of the last scale."""
    best = tammes.geometry.largest_class_margin(CLASSES, SIZE).degrees
    rows = []
    for scale in scales:
        found = final_points(scale, steps=steps)
        for name, (prototypes, _) in found.items():
            solved = margins(solve(LOSSES[name], scale)[0])[0]
            rows.append((name, scale, margins(prototypes[None])[0], solved))
    text = (
        "Arrows are prototypes, points are features; every loss was trained from the same random "
        "start. Solved to the optimum instead of trained, all losses of one scale end at the same "
        "class margin: the gap between them is one of training, where the softmax saturates, and "
        "not of what the losses want."
    )
    columns = ("loss", "scale", "trained, degrees", "solved, degrees")
    # A phone can render eight spheres at once, not more: show those of the last scale.
    turnable = html_page.pictures(distributions.spheres.chart(found))
    sections = [
        html_page.Section("", [html_page.Text(text), html_page.Table(columns, rows)]),
        html_page.Section(f"Trained at scale {scale:g}", turnable),
    ]
    lead = [f"The best arrangement of eight directions has a class margin of {best:.2f}°."]
    html, png = out / "sphere.html", out / "sphere.png"
    html_page.write(html, html_page.render("Eight classes on the sphere", sections, lead=lead))
    matplotlib_charts.save(distributions.spheres(found), png)
    return html, png


def main(arguments: Sequence[str] | None = None) -> tuple[Path, Path]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder to write to")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args(arguments)
    written = build(SCALES, options.steps, options.out)
    for path in written:
        print(path)
    return written


if __name__ == "__main__":
    main()
