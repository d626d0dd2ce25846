"""``tammes demo``: compare a few losses on digits in a minute, and write a page."""

import argparse
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from tammes.lab.cli.arguments import add_argument
from tammes.lab.cli.compare import show
from tammes.lab.config.schema import Config
from tammes.lab.records.run_folder import Run
from tammes.lab.runner.sweep import compare
from tammes.lab.stats.seed_groups import QUANTITIES, study
from tammes.lab.stats.verdict import Contender, verdict
from tammes.metrics.functional import verification
from tammes.similarity import unit

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
"""Three-dimensional features, which the page can draw without projection."""
LOSSES = ("softmax()", "cosface(margin=0.3)", "lm_softmax()")
SEEDS = 5


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
    title = "Tammes: a few losses on digits"
    return show(runs, out / "report.html", title=title, more=verified(runs))


def verified(runs: Sequence[Run]) -> list[str]:
    """Say which loss tells best whether two test images show the same digit.

    Pairs are scored by the cosine of their features, as in face verification.
    """
    eer = next(quantity for quantity in QUANTITIES if quantity.key == "eer")
    groups = [
        Contender(
            group.label,
            {seed: 100 * _equal_error_rate(run) for seed, run in group.runs.items()},
            margins={"class_margin": group.values["class_margin"]},
        )
        for group in study(runs).groups
    ]
    first, *_ = verdict(groups, eer)
    return [f"Do two test images show the same digit, by the cosine of their features? {first}"]


def _equal_error_rate(run: Run) -> float:
    tested = run.tensors("embeddings")
    features, labels = unit(tested["features"].float()), tested["labels"]
    first, second = torch.triu_indices(len(labels), len(labels), 1)
    scores = (features @ features.T)[first, second]
    return float(verification(scores, labels[first] == labels[second]).eer)


def listing() -> str:
    """List commands, data, losses, heads, networks and everything else that has a name."""
    from tammes.lab import backbones
    from tammes.lab.cli.main import COMMANDS
    from tammes.lab.config import HEADS, SCHEDULES, TERMS
    from tammes.lab.config.loss_expressions import SUMS
    from tammes.lab.data import augment_ops, corruptions, samplers
    from tammes.lab.data.sources import loading
    from tammes.lab.training import lr_schedules

    parts = {
        "commands": COMMANDS,
        "data": ["digits", *loading.KNOWN],
        "losses": [*TERMS, *SUMS],
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
