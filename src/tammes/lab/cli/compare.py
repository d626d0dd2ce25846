"""The command ``tammes compare``."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tammes.lab.cli.arguments import add_argument, seeds
from tammes.lab.config import flags, normal, split_list
from tammes.lab.data.sources.loading import say
from tammes.lab.records.atomic_io import writable
from tammes.lab.records.run_folder import Run
from tammes.lab.report.load_runs import load_runs
from tammes.lab.report.pages.runs_page import render_runs_page
from tammes.lab.report.render.html_page import write
from tammes.lab.report.verdicts import as_text, verdict_on_runs
from tammes.lab.runner.sweep import compare
from tammes.lab.stats.seed_groups import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes compare`` to a parser."""
    parser.description = (
        "Train several losses with several seeds and compare them. Repeating the command resumes "
        "an interrupted comparison. The exit code is 1 if a run failed."
    )
    add = partial(add_argument, parser)
    losses = 'losses, separated by commas: "softmax, cosface(margin=0.2), lm_softmax"'
    add("--losses TEXT", losses, required=True)
    add("--seeds N", "number of seeds, or a list: 0,1,5 [3]", 3, type=seeds)
    add("--out DIR", "directory of the runs [runs]", "runs")
    parallel = "number of concurrent runs; by default one per core, or six per GPU"
    add("--parallel N", parallel, type=int)
    add("--page FILE", "page to write [report.html in the directory of the runs]")
    add("--baseline LOSS", "loss that the others are compared with; by default the first")
    retry = "also retry runs whose loss was not finite (other failures are always retried)"
    add("--retry-failed", retry)
    flags.add_config(parser, leave_out=("loss",))


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes compare``; return 0, 1 if a run failed, 130 if it was interrupted."""
    config = flags.read_config(arguments)
    if arguments.page is not None:
        writable(Path(arguments.page).parent, flag="--page")
    if arguments.baseline is not None:
        texts = [normal(text) for text in split_list(arguments.losses, what="losses")]
        if normal(arguments.baseline) not in texts:
            given = arguments.baseline
            raise ValueError(f"baseline is expected to be one of the losses, got {given!r}")
    try:
        runs = compare(
            config,
            arguments.losses,
            arguments.seeds,
            arguments.out,
            workers=arguments.parallel,
            retry_failed=arguments.retry_failed,
            report=_after(flags.DEFAULT_DATA) if arguments.uses_default_data else say,
        )
    except KeyboardInterrupt:
        say("interrupted; repeat the command to resume")
        return 130
    page = Path(arguments.page or Path(arguments.out) / "report.html")
    return show(runs, page, baseline=arguments.baseline)


def _after(opening: str) -> Callable[[str], None]:
    """Return a function that prints messages, with an opening before the first."""
    waiting = [opening]

    def report(text: str) -> None:
        while waiting:
            say(waiting.pop())
        say(text)

    return report


def show(
    runs: Sequence[Run],
    page: Path,
    *,
    baseline: str | None = None,
    title: str | None = None,
    more: Sequence[str] = (),
) -> int:
    """Print the table of runs and the verdict, with ``more`` sentences, and write the page.

    Returns:
        1 if a run is not finished, else 0.
    """
    print(table(runs, baseline), flush=True)
    command = shlex.join(["tammes", *sys.argv[1:]])
    loaded = load_runs(runs, baseline)
    verdict = [*verdict_on_runs(loaded), *more]
    write(page, render_runs_page(loaded, title=title, command=command, verdict=verdict))
    print(f"\n{as_text(verdict)}")
    print(f"\n  page: {page.resolve()}")
    return 0 if all(run.status == "done" for run in runs) else 1
