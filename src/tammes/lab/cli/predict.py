"""The command ``tammes predict``."""

import argparse
import json
from functools import partial
from pathlib import Path

from tammes.lab.cli.arguments import add_argument
from tammes.lab.data.images import DataError
from tammes.lab.inference.preprocess import named_images
from tammes.lab.inference.progress_bar import watched_images
from tammes.lab.inference.trained_model import Prediction, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes predict`` to a parser."""
    parser.description = (
        "Predict the classes of images with the model of a finished run. A line for each image is "
        "printed as soon as it is known, so a folder of any size can be read."
    )
    add = partial(add_argument, parser)
    add("model RUN", "directory of a finished run")
    add("images IMAGE|FOLDER", "images, and folders with images in and below them", nargs="+")
    add("--top K", "number of classes for each image (%(default)s)", 5)
    add("--json", "print a JSON object per line, with scores and labels")
    add("--skip-corrupt", "leave out images that cannot be read, and name them")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes predict`` and return the exit code."""
    for path in arguments.images:
        if not Path(path).exists():
            raise DataError(f"{path}: there is no such image or folder")
    if arguments.top < 1:
        raise ValueError(f"--top is expected to be 1 or more, got {arguments.top}")
    model = load(arguments.model)
    model.check_classifies("predict")
    # Only names are counted here; images are decoded as they are needed.
    predicted, total = 0, sum(1 for _ in named_images(arguments.images))
    with watched_images(total, skip=arguments.skip_corrupt) as (watched, unreadable):
        images = watched(image for _, image in named_images(arguments.images))
        for found in model.predict_each(images, arguments.top, unreadable=unreadable):
            line = json.dumps(found.as_dict()) if arguments.json else as_text(found)
            print(line, flush=True)
            predicted += 1
    if not predicted:
        raise DataError(f"none of the {total:,} images can be read")
    return 0


def as_text(found: Prediction) -> str:
    """Format a prediction as a line."""
    shares = zip(found.classes, found.probabilities, strict=True)
    return "  ".join([found.image, *(f"{name} {100 * share:.1f} %" for name, share in shares)])
