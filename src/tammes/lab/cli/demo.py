"""``tammes demo``: compare a few losses on digits in a minute, and write a page."""

import argparse
import textwrap
from functools import partial
from pathlib import Path

from tammes.lab.cli.arguments import add_argument
from tammes.lab.cli.compare import show
from tammes.lab.config.schema import Config
from tammes.lab.runner.sweep import compare

CONFIG = Config(
    data="digits",
    backbone="mnist_cnn(features=3)",
    batch_size=64,
    epochs=15,
    lr=0.03,
    warmup=1,
    save_every=5,
    accelerator="cpu",
)
"""Configuration with three-dimensional features, which the page can draw without projection."""
LOSSES = (
    "softmax()",
    "cosface(margin=0.2)",
    "lm_softmax()",
    "cosface(margin=0.2) + 0.5*sample_margin()",
)
SEEDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes demo`` to a parser."""
    parser.description = (
        "Train a few losses on 8 x 8 digits with three-dimensional features, print a comparison "
        "and write a page. Takes about a minute on two cores; needs no GPU and no internet."
    )
    add = partial(add_argument, parser)
    add("--out DIR", "directory of the runs and the page [%(default)s]", "out/demo")
    add("--list", "list the losses, heads, networks, data sets and so on, and exit")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes demo`` and return the exit code."""
    if arguments.list:
        print(listing())
        return 0
    out = Path(arguments.out)
    runs = compare(CONFIG, LOSSES, SEEDS, out)
    return show(runs, out / "report.html", title="Tammes: a few losses on digits")


def listing() -> str:
    """List commands, data, losses, heads, networks and everything else that has a name."""
    from tammes.lab import backbones
    from tammes.lab.cli.main import COMMANDS
    from tammes.lab.config import HEADS, SCHEDULES, TERMS
    from tammes.lab.data import augment_ops, corruptions, samplers
    from tammes.lab.data.sources import loading
    from tammes.lab.training import lr_schedules

    parts = {
        "commands": COMMANDS,
        "data": ["digits", *loading.KNOWN],
        "losses": [*TERMS, "direct_sum", "spectral_sum"],
        "heads": HEADS,
        "schedules": SCHEDULES,
        "backbones": backbones.TABLE,
        "augment": augment_ops.OPERATIONS,
        "imbalance": corruptions.IMBALANCE,
        "noise": corruptions.NOISE,
        "samplers": samplers.TABLE,
        "lr_schedule": lr_schedules.TABLE,
    }
    lines = []
    for name, known in parts.items():
        text = ", ".join(known)
        lines.append(
            textwrap.fill(text, 100, initial_indent=f"{name:<12}", subsequent_indent=" " * 12)
        )
    return "\n".join(lines)
