"""The command ``tammes report``."""

import argparse
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tammes.lab.cli.arguments import add_argument
from tammes.lab.records.run_folder import find_runs
from tammes.lab.report.charts.chart import Chart
from tammes.lab.report.load_runs import load_runs
from tammes.lab.report.pages.runs_page import charts_of_runs, render_runs_page
from tammes.lab.report.render.html_page import write
from tammes.lab.report.render.matplotlib_charts import draw, save
from tammes.lab.report.verdicts import as_text, verdict_on_runs
from tammes.lab.stats.seed_groups import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes report`` to a parser."""
    parser.description = (
        "Write one page about a set of runs, from their records alone: results, margins, "
        "features, training curves, classes, configuration."
    )
    add = partial(add_argument, parser)
    add("runs RUNS", "run directories, or directories that contain runs at any depth", nargs="+")
    add("--out FILE", "page to write (%(default)s)", "out/report.html")
    baseline = "group that the others are compared with: its name or loss (default: the first)"
    add("--baseline LABEL", baseline)
    add("--figures DIR", "also write every chart as PNG and SVG to this directory")
    add("--title TEXT", "title of the page")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes report`` and return the exit code."""
    runs = find_runs(arguments.runs)
    loaded = load_runs(runs, arguments.baseline)
    page = Path(arguments.out)
    write(page, render_runs_page(loaded, title=arguments.title, command=_command(arguments)))
    if arguments.figures is not None:
        count = write_figures(charts_of_runs(loaded), Path(arguments.figures))
    print(table(runs, arguments.baseline))
    print(f"\n{as_text(verdict_on_runs(loaded))}")
    print(f"\n  page: {page}")
    if arguments.figures is not None:
        print(f"  figures: {count} as PNG and SVG in {arguments.figures}")
    return 0


def write_figures(charts: Mapping[str, Chart], folder: Path) -> int:
    """Write charts, given by file name, as PNG and SVG to a folder; return their number."""
    for name, chart in charts.items():
        figure = draw(chart)
        for suffix in ("png", "svg"):
            save(figure, folder / f"{name}.{suffix}")
    return len(charts)


def _command(arguments: argparse.Namespace) -> str:
    words = ["tammes", "report", *arguments.runs, "--out", arguments.out]
    for name in ("baseline", "figures", "title"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", value]
    return shlex.join(words)
