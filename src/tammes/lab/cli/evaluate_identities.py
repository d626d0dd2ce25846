"""The commands ``tammes evaluate retrieval``, ``verification`` and ``openset``."""

import argparse
import json
import math
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from tammes.advise.advice import plain_values
from tammes.lab.cli.arguments import add_argument
from tammes.lab.data.sources.loading import say
from tammes.lab.measure.identity_pairs import MAX_PAIRS
from tammes.lab.recognition.embeddings import (
    KEYS,
    IdentityEmbeddings,
    read_embeddings,
    run_embeddings,
)
from tammes.lab.recognition.evaluate_openset import evaluate_openset
from tammes.lab.recognition.evaluate_retrieval import evaluate_retrieval
from tammes.lab.recognition.evaluate_verification import evaluate_verification
from tammes.lab.recognition.pair_lists import read_pairs
from tammes.lab.recognition.results import Listing, Number, Recognition
from tammes.lab.recognition.unknown_classes import (
    SCORES,
    ClassifiedExamples,
    classified_by_files,
    classified_by_run,
    evaluate_unknown,
)
from tammes.lab.report.pages.recognition_page import recognition_page
from tammes.lab.report.render.html_page import write
from tammes.lab.report.verdicts import as_text as verdict_text
from tammes.lab.report.verdicts import verdict_on_recognition

_DESCRIPTIONS = {
    "retrieval": "Rank a gallery for each query, with the rules of Market-1501.",
    "verification": "Verify whether two examples are of one identity, and choose a threshold.",
    "openset": "Search probes in a gallery that may not have their identity (1:N), and choose a "
    "threshold.",
}
_COLUMNS = tuple(kind for kind in KEYS if kind != "names")
_SHOWN = 5
"""Number of identities that fail most to list in the text."""


def add_arguments(parser: argparse.ArgumentParser, protocol: str) -> None:
    """Add the arguments of a protocol to a parser."""
    parser.description = _DESCRIPTIONS[protocol] + " Prints numbers with intervals over identities."
    add = partial(add_argument, parser)
    add(
        "model RUN|FILE",
        "directory of a finished run, or files of embeddings and identities in a format of "
        "`tammes measure`; files are combined",
        nargs="+",
    )
    add("--gallery FILE", "files of the gallery; the others are the queries", nargs="+")
    add("--partition NAME", "use the rows of the files whose split is NAME")
    if protocol == "retrieval":
        add("--ranks K,...", "ranks of recall@k (%(default)s)", "1,5,10")
        add("--ap FORM", "average precision: step, or trapezoid as in the Matlab code", "step")
    if protocol == "verification":
        add("--pairs FILE", "pairs: pairs.txt of LFW, or lines `1 FIRST SECOND`, `0 FIRST SECOND`")
        add("--max-pairs N", "largest number of pairs of each kind (%(default)s)", MAX_PAIRS)
        add("--far RATE,...", "false acceptance rates (default: 0.1, 0.01, ... if measurable)")
        add("--p-target P", "prior of a same pair, for minDCF (%(default)s)", 0.01)
    if protocol == "openset":
        add(
            "--enrol K", "examples of each identity in a gallery, if none is given (%(default)s)", 1
        )
        add("--fpir RATE,...", "false positive rates (default: 0.3, 0.1, ... if measurable)")
        add(
            "--unknown DATA|FILE",
            "examples of no known class, to be told from the test images of a run that classifies, "
            "or from a file with prototypes",
            nargs="+",
        )
        add("--score NAME", f"with --unknown: {', '.join(SCORES)} (%(default)s)", "prototype")
        scale = "with --unknown: scale of a cosine head (default: logits are inner products)"
        add("--scale S", scale, type=float)
    others = "" if protocol == "verification" else ", k_reciprocal"
    add("--similarity NAME", f"cosine, dot, euclidean{others} (%(default)s)", "cosine")
    if protocol != "openset":
        add("--ignore-cameras", "count items and pairs of one identity and camera too")
    add("--resamples N", "resamples of the intervals (%(default)s)", 200)
    add("--seed", "seed of resamples and samples (%(default)s)", 0)
    add("--images DIR", "directory that the paths of images are relative to")
    add("--out DIR", "directory of the page (%(default)s)", "out")
    add("--json", "print JSON instead of a table")
    for kind in _COLUMNS:
        add(f"--{kind} KEY", f"key of the {kind} in the files")


def run(arguments: argparse.Namespace) -> int:
    """Run an evaluation and return the exit code; after an error nothing is written."""
    common = {
        "similarity": arguments.similarity,
        "resamples": arguments.resamples,
        "seed": arguments.seed,
    }
    if arguments.resamples < 1:
        raise ValueError(f"--resamples is expected to be 1 or more, got {arguments.resamples}")
    if arguments.protocol == "openset" and arguments.unknown is not None:
        given = _classified(arguments)
        examples = given.examples
        found = evaluate_unknown(
            given,
            score=arguments.score,
            fpirs=_rates("--fpir", arguments.fpir),
            resamples=arguments.resamples,
            seed=arguments.seed,
        )
        return _report(arguments, found, examples)
    examples = _examples(arguments)
    if arguments.protocol == "retrieval":
        ranks = [int(rank) for rank in _numbers("--ranks", arguments.ranks, "1,5,10", int)]
        found = evaluate_retrieval(examples, ranks=ranks, ap=arguments.ap, **common)
    elif arguments.protocol == "verification":
        found = evaluate_verification(
            examples,
            pairs=None if arguments.pairs is None else read_pairs(arguments.pairs, examples),
            max_pairs=arguments.max_pairs,
            fars=_rates("--far", arguments.far),
            p_target=arguments.p_target,
            **common,
        )
    else:
        rates = _rates("--fpir", arguments.fpir)
        found = evaluate_openset(examples, enrol=arguments.enrol, fpirs=rates, **common)
    return _report(arguments, found, examples)


def _report(arguments: argparse.Namespace, found: Recognition, examples: IdentityEmbeddings) -> int:
    """Write the page, and print text or JSON."""
    page = Path(arguments.out) / f"{arguments.protocol}.html"
    model = Path(arguments.model[0])
    verdict = verdict_on_recognition(found, model if model.is_dir() else None)
    write(page, recognition_page(found, examples, _command(arguments), verdict=verdict))
    for note in [] if examples.pictures is None else examples.pictures.notes():
        say(note)
    if arguments.json:
        plain = as_json(found, page) | {"verdict": verdict}
        print(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(f"{as_text(found)}\n\n{verdict_text(verdict)}")
        print(f"\n  page: {page}")
    return 0


def _classified(arguments: argparse.Namespace) -> ClassifiedExamples:
    """Classify the examples of a run or of files, and the unknown ones."""
    for flag in ("gallery", "partition", "images", *_COLUMNS):
        if getattr(arguments, flag) is not None:
            raise ValueError(f"--{flag} cannot be combined with --unknown, whose classes are known")
    if Path(arguments.model[0]).is_dir():
        if len(arguments.model) + len(arguments.unknown) > 2 or arguments.scale is not None:
            raise ValueError(
                f"{arguments.model[0]}: for a run, --unknown takes one data set and no --scale, "
                "since a run has its own"
            )
        return classified_by_run(arguments.model[0], arguments.unknown[0])
    return classified_by_files(arguments.model, arguments.unknown, scale=arguments.scale)


def _examples(arguments: argparse.Namespace) -> IdentityEmbeddings:
    """Read the embeddings of a run or of files."""
    models, ignore = arguments.model, getattr(arguments, "ignore_cameras", False)
    for path in (*models, *(arguments.gallery or ())):
        if not path or not Path(path).exists():
            raise ValueError(f"{path or repr(path)}: there is no such run or file")
    keys = {kind: getattr(arguments, kind) for kind in _COLUMNS}
    if Path(models[0]).is_dir():
        if len(models) > 1:
            raise ValueError(f"{models[0]}: one run is expected, got {len(models)} paths")
        for flag in ("gallery", "partition", "images", *_COLUMNS):
            if getattr(arguments, flag) is not None:
                raise ValueError(f"--{flag} is for files only; a run has its own")
        examples = run_embeddings(models[0])
    else:
        examples = read_embeddings(
            models,
            gallery=arguments.gallery or (),
            keys=keys,
            partition=arguments.partition,
            images=arguments.images,
            need_identities=getattr(arguments, "pairs", None) is None,
            need_cameras=not ignore and arguments.protocol != "openset",
        )
    return examples.without_cameras() if ignore else examples


def _numbers(flag: str, text: str, example: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"{flag} is expected to be numbers such as {example}, got {text!r}")
    return values


def _rates(flag: str, text: str | None) -> list[float] | None:
    return None if text is None else _numbers(flag, text, "0.01,0.001", float)


def _command(arguments: argparse.Namespace) -> str:
    """Return the command line, without settings at their defaults."""
    words = ["tammes", "evaluate", arguments.protocol, *arguments.model]
    for name, value in vars(arguments).items():
        if name in ("model", "protocol", "run", "parser") or value == arguments.parser.get_default(
            name
        ):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)


def as_json(found: Recognition, page: Path) -> Any:
    """Return a result as plain values; non-finite ones become null."""

    def interval(number: Number) -> dict[str, Any]:
        return {"value": number.value, "low": number.low, "high": number.high}

    def rows(listing: Listing) -> list[dict[str, Any]]:
        return [dict(zip(listing.columns, row, strict=True)) for row in listing.rows]

    values = {
        "protocol": found.protocol,
        "source": found.title,
        "counts": found.counts,
        "notes": found.notes,
        "numbers": {
            number.key: {"name": number.name, **interval(number)} for number in found.numbers
        },
        "thresholds": [
            {
                "target": point.target,
                "thresholds": point.thresholds,
                found.rates[0]: interval(point.reached),
                found.rates[1]: interval(point.accepted),
            }
            for point in found.thresholds
        ],
        "failing_identities": rows(found.failing),
        "tables": {heading: rows(table) for heading, table in found.tables.items()},
        "curves": {
            name: {
                key: None if part is None else part.tolist()
                for key, part in curve._asdict().items()
            }
            for name, curve in found.curves.items()
        },
        "page": str(page),
    }
    return plain_values(values)


def as_text(found: Recognition) -> str:
    """Format a result as tables for a terminal."""
    lines = [f"  {found.title}", *(f"  {text}" for text in found.summary)]
    lines += [f"  note: {note}" for note in found.notes]
    numbers = [(number.name, number.shown(), number.shown_interval()) for number in found.numbers]
    lines += ["", *Listing(("", "value", "95 % over identities"), numbers).lines()]
    for heading, table in found.tables.items():
        lines += ["", f"  {heading.lower()}", *table.lines()]
    if found.thresholds:
        lines += ["", "  thresholds", *found.threshold_listing().lines()]
    if found.failing.rows:
        some = found.failing._replace(rows=found.failing.rows[:_SHOWN])
        lines += ["", "  identities that fail most", *some.lines()]
    return "\n".join(line.rstrip() for line in lines)
