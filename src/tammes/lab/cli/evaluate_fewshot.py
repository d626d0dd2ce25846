"""The command ``tammes evaluate fewshot``."""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tammes.lab.cli.arguments import add_argument
from tammes.lab.data.sources.loading import say
from tammes.lab.fewshot import class_lists, protocol
from tammes.lab.fewshot.episodes import check_numbers
from tammes.lab.fewshot.features import ClassPart, check_way, from_file, from_run, on_device
from tammes.lab.fewshot.protocol import FewShotResult, LabelledFeatures, Method
from tammes.lab.recognition.results import Listing, counted
from tammes.lab.report.verdicts import as_text as verdict_text
from tammes.lab.report.verdicts import verdict_on_fewshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes evaluate fewshot`` to a parser."""
    parser.description = (
        "Recognise classes that were not trained on from a few images of each, over many "
        "few-shot episodes."
    )
    add = partial(add_argument, parser)
    add(
        "model RUN|FILE",
        "directory of a finished run, or a file of embeddings and labels in a format of "
        "`tammes measure`",
    )
    add("--against RUN|FILE", "second model, compared on the same episodes")
    add(
        "--split NAME:PART",
        "classes to recognise: a class split (cifar-fs, fc100, mini-imagenet, cub, omniglot, "
        "or your own JSON file or folder of lists) and its part :novel, :validation or :base",
    )
    add("--data DATA", "data set with the novel classes, for a run (default: that of the split)")
    add(
        "--base FILE", "features of the base classes, if cl2n or centred_cosine is used with a file"
    )
    add("--way N", "classes per episode (%(default)s)", 5)
    add("--shot K,...", "labelled images per class (%(default)s)", "1,5")
    add("--queries Q", "images to recognise per class (%(default)s)", 15)
    add("--episodes E", "number of episodes (%(default)s)", 10_000)
    add(
        "--method TEXT",
        f"classifiers, separated by commas: {', '.join(protocol.TABLE)}; "
        "the last two take settings, as in cosine(scale=10) (%(default)s)",
        "centroid,l2",
    )
    add("--seed", "seed of the episodes (%(default)s)", 0)
    add("--json", "print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes evaluate fewshot`` and return the exit code."""
    # Invalid settings are reported before anything is computed.
    methods = protocol.methods(arguments.method)
    shots = _parse_shots(arguments.shot)
    for shot in shots:
        check_numbers(
            way=arguments.way, shot=shot, queries=arguments.queries, episodes=arguments.episodes
        )
    split_part = _split_part(arguments)
    if split_part is not None:
        check_way(arguments.way, *split_part)
    if arguments.base is not None and not protocol.needs_base_mean(methods):
        say(f"--base {arguments.base}: not used, as no method subtracts the base mean")
    examples = _examples(arguments.model, arguments, split_part, methods)
    against = None
    if arguments.against is not None:
        against = _examples(arguments.against, arguments, split_part, methods)
    rows = protocol.evaluate(
        examples,
        way=arguments.way,
        shots=shots,
        queries=arguments.queries,
        episodes=arguments.episodes,
        method=arguments.method,
        seed=arguments.seed,
        against=against,
    )
    verdict = verdict_on_fewshot(rows, arguments.model, arguments.against)
    if arguments.json:
        found = _settings(rows, examples, arguments) | {"rows": [row.as_dict() for row in rows]}
        found["verdict"] = verdict
        print(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(f"{as_text(rows, examples, arguments)}\n\n{verdict_text(verdict)}")
    return 0


def _split_part(arguments: argparse.Namespace) -> ClassPart | None:
    return None if arguments.split is None else class_lists.parse(arguments.split)


def _examples(
    model: str,
    arguments: argparse.Namespace,
    split_part: ClassPart | None,
    methods: Mapping[str, Method],
) -> LabelledFeatures:
    path = Path(model)
    if not model or not path.exists():
        raise ValueError(f"{model or repr(model)}: there is no such run or file")
    centred, outside = protocol.needs_base_mean(methods), protocol.needs_prototypes(methods)
    if path.is_dir():
        if arguments.base is not None:
            raise ValueError("--base is for files only; a run has its own training images")
        return on_device(
            from_run(
                path, source=arguments.data, classes=split_part, base=centred, prototypes=outside
            )
        )
    if arguments.data is not None:
        raise ValueError("--data is for runs only; a file has its features already")
    if outside:
        raise ValueError(f"{model}: complement expects a run, whose head has prototypes")
    found = from_file(path, classes=split_part, base=arguments.base if centred else None)
    if centred and found.base_mean is None:
        name = next(each for each, own in methods.items() if protocol.needs_base_mean({each: own}))
        raise ValueError(
            f"{model}: {name} expects features of the base classes, given by --base FILE or by "
            "a --split whose base classes are in the file too"
        )
    return on_device(found)


def _parse_shots(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--shot is expected to be numbers such as 1,5, got {text!r}") from None


def as_text(
    rows: Sequence[FewShotResult], examples: LabelledFeatures, arguments: argparse.Namespace
) -> str:
    """Format accuracies as a table for a terminal."""
    settings = _settings(rows, examples, arguments)
    compared = arguments.against is not None
    heading = ("method", "shots", "accuracy %", *(("against %", "difference") if compared else ()))
    table: list[tuple[str, ...]] = []
    for row in rows:
        cells = [row.method, str(row.shot), row.accuracy.shown()]
        if row.difference is not None and row.against is not None:
            other = type(row)(row.method, row.shot, row.against)
            # If the interval includes zero, neither model is better.
            verdict = "" if row.difference.clear else "  (not clear)"
            cells += [other.accuracy.shown(), row.difference.shown(sign=True) + verdict]
        table.append(tuple(cells))
    lines = [f"  {settings['model']}"]
    lines += [f"  against {arguments.against}, on the same episodes"] if compared else []
    lines += [
        f"  {settings['images']:,} images of {settings['classes']} classes"
        f"{f' ({arguments.split})' if arguments.split else ''}"
        f"{', held out of training' if settings['held_out'] else ''}; {arguments.way}-way, "
        f"{counted(arguments.queries, 'query', 'queries')}, "
        f"{counted(arguments.episodes, 'episode')}, seed {arguments.seed}; "
        "± is 95 % over episodes",
        "",
    ]
    return "\n".join([*lines, *Listing(heading, table).lines()])


def _settings(
    rows: Sequence[FewShotResult], examples: LabelledFeatures, arguments: argparse.Namespace
) -> dict[str, Any]:
    split_part = _split_part(arguments)
    return {
        "model": arguments.model,
        "against": arguments.against,
        "split": arguments.split,
        "images": len(examples.labels),
        "classes": len(examples.labels.unique()),
        # Base classes of a run are evaluated on images it was not trained on.
        "held_out": Path(arguments.model).is_dir()
        and split_part is not None
        and split_part[1] == "base",
        "way": arguments.way,
        "queries": arguments.queries,
        "episodes": len(rows[0].accuracies),
        "seed": arguments.seed,
    }
