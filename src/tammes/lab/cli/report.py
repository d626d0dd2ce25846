"""The command ``tammes report``."""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tammes.lab.records.run_folder import find

if TYPE_CHECKING:
    from tammes.lab.report.charts.chart import Chart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes report`` to a parser."""
    parser.description = (
        "Write one page about a set of runs, from their records alone: results, margins, "
        "features, training curves, classes, configuration."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUNS",
        help="run directories, or directories that contain runs at any depth",
    )
    parser.add_argument(
        "--out", default="out/report.html", metavar="FILE", help="page to write (%(default)s)"
    )
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="group that the others are compared with: its name or loss (default: the first)",
    )
    parser.add_argument(
        "--figures", metavar="DIR", help="also write every chart as PNG and SVG to this directory"
    )
    parser.add_argument("--title", metavar="TEXT", help="title of the page")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes report``.

    Args:
        arguments: parsed with :func:`add_arguments`.

    Returns:
        The exit code.

    Raises:
        ValueError: no run can be read.
        OSError: the page or a figure cannot be written.
    """
    from tammes.lab.report.load_runs import load_runs
    from tammes.lab.report.pages.runs_page import charts_of_runs, render_runs_page
    from tammes.lab.report.render.html_page import write
    from tammes.lab.stats.seed_groups import table

    runs = find(arguments.runs)
    loaded = load_runs(runs, arguments.baseline)
    page = Path(arguments.out)
    try:
        write(page, render_runs_page(loaded, title=arguments.title, command=_command(arguments)))
    except OSError as error:
        raise OSError(f"{page}: the page cannot be written ({error.strerror or error})") from error
    if arguments.figures is not None:
        count = write_figures(charts_of_runs(loaded), Path(arguments.figures))
    print(table(runs, arguments.baseline))
    print(f"\n  page: {page}")
    if arguments.figures is not None:
        print(f"  figures: {count} as PNG and SVG in {arguments.figures}")
    return 0


def write_figures(charts: "Mapping[str, Chart]", folder: Path) -> int:
    """Write charts as PNG and SVG.

    Args:
        charts: charts by file name.
        folder: target folder, created if missing.

    Returns:
        Number of charts.
    """
    from tammes.lab.report.render.matplotlib_charts import draw, save

    for name, chart in charts.items():
        figure = draw(chart)
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            try:
                save(figure, path)
            except OSError as error:
                reason = error.strerror or error
                raise OSError(f"{path}: the figure cannot be written ({reason})") from error
    return len(charts)


def _command(arguments: argparse.Namespace) -> str:
    words = ["tammes", "report", *arguments.runs, "--out", arguments.out]
    for name in ("baseline", "figures", "title"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", value]
    return shlex.join(words)
