"""The command ``tammes tune``."""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from tammes.advise.text import table
from tammes.lab.cli.arguments import add_argument
from tammes.lab.config import flags
from tammes.lab.data.sources.loading import say
from tammes.lab.report import verdicts
from tammes.lab.report.pages.tuning_page import tuning_page, tuning_table
from tammes.lab.report.render.html_page import Value, write
from tammes.lab.report.rerun import train_command
from tammes.lab.runner.halving import tune


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes tune`` to a parser."""
    parser.description = (
        "Search for scale, margin and learning rate of a loss by successive halving: train twelve "
        "settings for a ninth of the epochs, the best four for a third, and the best two for all. "
        "This costs five to seven runs. Settings are compared on held-out training images. "
        "Repeating the command resumes an interrupted search."
    )
    add = partial(add_argument, parser)
    add("--out DIR", "directory of the runs and of tuning.html [tuning]", "tuning")
    numbers = "to try, separated by commas"
    add("--scales LIST", f"scales {numbers} [half, all and twice the default]", type=_numbers)
    add("--margins LIST", f"margins {numbers} [0.3 and 1 times the loss's own]", type=_numbers)
    add("--rates LIST", f"learning rates {numbers} [1 and 0.3 times --lr]", type=_numbers)
    parallel = "number of concurrent runs; by default one per core, or six per GPU"
    add("--parallel N", parallel, type=int)
    flags.add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes tune``; return 0, or 130 if it was interrupted."""
    config = flags.read_config(arguments, loss="cosface()")
    try:
        tuning = tune(
            config,
            arguments.out,
            scales=arguments.scales,
            margins=arguments.margins,
            rates=arguments.rates,
            workers=arguments.parallel,
        )
    except KeyboardInterrupt:
        say("interrupted; repeat the command to resume")
        return 130
    columns, rows = tuning_table(tuning)
    texts = [[each.text if isinstance(each, Value) else str(each) for each in row] for row in rows]
    print("\n".join(table([columns, *texts], right=frozenset(range(1, len(columns) - 1)))))
    print("", verdicts.as_text(tuning.sentences()), sep="\n")
    print(f"\n  train with it: {train_command(tuning.final)}")
    page = Path(arguments.out) / "tuning.html"
    write(page, tuning_page(tuning, command=shlex.join(["tammes", *sys.argv[1:]])))
    print(f"  page: {page.resolve()}")
    return 0


def _numbers(text: str) -> list[float]:
    """Parse numbers separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"numbers separated by commas are expected, such as 16,30,64, got {text!r}"
        ) from None
