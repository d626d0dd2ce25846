"""The command ``tammes train``."""

import argparse
import json
import os
import shlex
from functools import partial
from pathlib import Path

from tammes.lab.cli.arguments import add_argument
from tammes.lab.config.flags import DEFAULT_DATA, add_config, read_config
from tammes.lab.records.atomic_io import writable
from tammes.lab.records.run_folder import Run
from tammes.lab.training.progress import default_progress
from tammes.optional import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes train`` to a parser."""
    parser.description = (
        "Train one model and write its record to a run directory. Repeating the command resumes "
        "an interrupted run. Under torchrun all processes train one model together."
    )
    add = partial(add_argument, parser)
    add("--out DIR", "parent directory of the runs [%(default)s]", "runs")
    add("--folder DIR", "run directory, instead of one under --out")
    add("--resume RUN", "run directory to resume; its configuration replaces the defaults")
    add("--json", "print the final measures as JSON")
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes train`` and return the exit code."""
    if arguments.resume is not None:
        folder = Path(arguments.resume)
        config = read_config(arguments, **Run(folder).config.to_dict())
    else:
        config = read_config(arguments)
        if arguments.folder is not None:
            folder = writable(_run_folder(arguments.folder), flag="--folder")
        else:
            folder = writable(Path(arguments.out), flag="--out") / config.folder

    from tammes.lab.training.check_expressions import check_expressions
    from tammes.lab.training.fabric import check_machine
    from tammes.lab.training.loop import train

    progress = default_progress()
    if arguments.uses_default_data and int(os.environ.get("RANK", 0)) == 0:
        # After the checks, so that the message about a mistake stands alone.
        check_expressions(config)
        require("lightning.fabric", extra="lab")
        check_machine(config)
        progress.say(DEFAULT_DATA)
    try:
        done = train(config, folder, progress=progress)
    except KeyboardInterrupt:
        # Before training begins there is nothing to resume.
        again = shlex.join(["tammes", "train", "--resume", str(folder)])
        begun = (folder / "config.json").exists()
        progress.say(f"interrupted; {f'resume with {again}' if begun else 'repeat the command'}")
        return 130
    if int(os.environ.get("RANK", 0)) > 0:
        return 0
    if arguments.json:
        print(json.dumps({"folder": str(folder), **done.final}, indent=2, allow_nan=False))
    else:
        print(_summary(done))
    return 0


def _run_folder(text: str) -> Path:
    """Return the folder of a run; reject one with the user's data in it."""
    from tammes.lab.data.csv_rows import TABLES
    from tammes.lab.data.sources.folder import is_image

    folder = Path(text)
    inside = [*folder.iterdir()] if folder.is_dir() else []
    # Logs may be there already, and a run that failed before training leaves a folder tensorboard.
    others = sorted(
        path.name
        for path in inside
        if path.name[0] != "."
        and (path.is_dir() or is_image(path.name) or path.suffix.lower() in (*TABLES, ".parquet"))
        and path.name != "tensorboard"
    )
    if others and not (folder / "config.json").exists():
        raise ValueError(
            f"--folder is expected to be new, empty or a run, got {text} with {others[0]!r} in "
            "it; --data names the images"
        )
    return folder


def _summary(done: Run) -> str:
    final, tested = done.final, done.final["test"]
    best = final["optimum"]
    lines = []
    if "accuracy" in tested:
        lines += [
            f"test accuracy   {100 * tested['accuracy']:.2f} %  ({final['chosen']})",
            f"sample margin   {tested['sample_margin']:.4f}  (at most {best['sample_margin']:.4f})",
        ]
    for name, (low, high) in tested.get("intervals", {}).items():
        ends = f"[{100 * low:.2f}, {100 * high:.2f}]"
        lines.append(f"{name:<23} {100 * tested[name]:.2f} %  {ends}, 95 % over identities")
    return "\n".join(
        [
            *lines,
            f"class margin    {final['prototypes']['class_margin']:.2f}°  "
            f"(at most {best['class_margin']:.2f}°)",
            f"run             {done.folder}",
            f"page            tammes report {shlex.quote(str(done.folder))}",
        ]
    )
