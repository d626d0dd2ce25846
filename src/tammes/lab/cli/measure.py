"""The command ``tammes measure``."""

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from tammes.advise.advice import plain_values
from tammes.lab.cli.arguments import add_argument
from tammes.lab.measure.files import read
from tammes.lab.measure.formats import FileError, scale_of_run
from tammes.lab.measure.measures import Measured, measure
from tammes.lab.report.pages.measure_page import margins_page
from tammes.lab.report.render.html_page import write
from tammes.lab.report.verdicts import as_text as verdict_text
from tammes.lab.report.verdicts import verdict_on_margins


def as_json(measured: Measured, page: Path | None = None) -> Any:
    """Return all measures as plain values; non-finite ones become null."""
    given = measured.given
    values = {
        "sources": given.sources,
        "classes": len(measured.directions),
        "dimensions": measured.directions.shape[-1],
        "examples": 0 if given.labels is None else len(given.labels),
        "scale": measured.scale,
        "measures": {
            m.key: {
                "value": m.value,
                "optimum": m.optimum,
                "bound": m.bound,
                "ratio": m.of_optimum,
                "unit": m.unit,
                "note": m.note,
            }
            for _, group in measured.groups
            for m in group
        },
        "closest_pairs": [
            {"angle": angle, "classes": [measured.name(i), measured.name(j)]}
            for angle, i, j in measured.pairs
        ],
        "notes": measured.notes,
        "page": None if page is None else str(page),
    }
    return plain_values(values)


def as_text(measured: Measured) -> str:
    """Format all measures as a table for a terminal."""
    lines = [f"  {source}" for source in measured.given.sources]
    lines += [f"  note: {note}" for note in measured.notes]
    width = max(len(m.name) for _, group in measured.groups for m in group)
    for heading, group in measured.groups:
        lines += ["", f"{heading:<{width + 2}}  {'value':>9}  {'optimum':>15}  % of optimum"]
        for m in group:
            numbers = f"{m.shown():>9}  {m.shown_optimum():>15}  {_percent(m.of_optimum):>12}"
            lines.append(f"  {m.name:<{width}}  {numbers}  {m.note}".rstrip())
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None or not math.isfinite(share) else f"{100 * share:.1f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes measure`` to a parser."""
    parser.description = (
        "Measure the margins of prototypes, of labelled embeddings, or of both, compare them "
        "with the optimum, and write a page with plots."
    )
    add = partial(add_argument, parser)
    formats = "folder of a run, .npz, .npy, .safetensors, .pt, .pth (weights only) or .parquet; "
    add("files FILE", formats + "files are combined", nargs="+")
    add("--out DIR", "directory of the page (%(default)s)", "out")
    scale = (
        "scale of a cosine head, for the softmax bias (default: that of the run, or else logits "
        "are inner products)"
    )
    add("--scale S", scale, type=float)
    add("--json", "print JSON instead of a table")
    for kind in ("prototypes", "embeddings", "labels"):
        add(f"--{kind} KEY", f"key of the {kind} in the files")
    add("--transpose", "read prototypes of shape (dimensions, classes)")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes measure`` and return the exit code; after an error nothing is written."""
    if arguments.scale is not None and not 0 < arguments.scale < math.inf:
        raise FileError(f"--scale is expected to be above 0, got {arguments.scale:g}")
    keys = {kind: getattr(arguments, kind) for kind in ("prototypes", "embeddings", "labels")}
    given = read(arguments.files, keys=keys, transpose=arguments.transpose)
    scales = {scale_of_run(Path(path)) for path in arguments.files}
    scale = scales.pop() if len(scales) == 1 else None
    try:
        measured = measure(given, scale=scale if arguments.scale is None else arguments.scale)
    except TypeError as error:
        raise FileError(str(error)) from error
    page = Path(arguments.out) / "measure.html"
    write(page, margins_page(measured, arguments.files))
    if arguments.json:
        print(json.dumps(as_json(measured, page), indent=2, allow_nan=False))
    else:
        print(f"{as_text(measured)}\n\n{verdict_text(verdict_on_margins(measured))}")
        print(f"\n  page: {page}")
    return 0
