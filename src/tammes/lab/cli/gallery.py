"""The command ``tammes gallery``."""

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tammes.gallery import CalibratedThreshold, Gallery
from tammes.lab.cli.arguments import add_argument
from tammes.lab.data.images import DataError
from tammes.lab.data.sources.folder import list_classes
from tammes.lab.inference.preprocess import named_images
from tammes.lab.inference.progress_bar import watched_images
from tammes.lab.inference.trained_model import EmbeddedBatch, load
from tammes.lab.recognition.results import counted
from tammes.lab.report.pages.gallery_page import SHOWN, Answer, render_gallery_page
from tammes.lab.report.render.html_page import write
from tammes.metrics.functional.operating_points import check_rate

_CALIBRATED = 2_000
"""Largest number of images held out to calibrate the threshold."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tammes gallery`` to a parser."""
    parser.description = (
        "Enrol individuals from images with the model of a finished run, and recognise them in "
        "other images. Individuals need not be classes of the training."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    folder = "folder with a subfolder of images for each individual, named by its id"
    corrupt = "leave out images that cannot be read, and name them"

    build = actions.add_parser("build", help="enrol a folder of individuals in a new gallery")
    add = partial(add_argument, build)
    add("model RUN", "directory of a finished run")
    add("images FOLDER", folder)
    add("gallery GALLERY.safetensors", "file to write")
    add(
        "--template",
        "compare with the mean of an individual's images, or with the nearest (%(default)s)",
        "mean",
        choices=("mean", "nearest"),
    )
    far = (
        "set the threshold of unknown individuals so that this share of pairs of different "
        "individuals is accepted, measured on an image of each individual that is held out first "
        "(default: no threshold)"
    )
    add("--far X", far, type=float)
    add("--skip-corrupt", corrupt)

    more = actions.add_parser("add", help="enrol more individuals, or more images of them")
    add = partial(add_argument, more)
    add("gallery GALLERY.safetensors", "gallery to change")
    add("model RUN", "run that the gallery was built with")
    add("images FOLDER", folder)
    existing = "individuals that are enrolled already: refuse them, add to their images or replace"
    add("--existing", f"{existing} them (%(default)s)", "refuse", choices=_EXISTING)
    add("--skip-corrupt", corrupt)

    remove = actions.add_parser("remove", help="remove individuals")
    add = partial(add_argument, remove)
    add("gallery GALLERY.safetensors", "gallery to change")
    add("ids ID", "individuals to remove", nargs="+")

    query = actions.add_parser("query", help="recognise individuals in images")
    add = partial(add_argument, query)
    add("gallery GALLERY.safetensors", "gallery to search")
    add("model RUN", "run that the gallery was built with")
    add("images IMAGE|FOLDER", "images, and folders with images in and below them", nargs="+")
    add("--top K", "number of individuals for each image (%(default)s)", 5)
    add(
        "--threshold X",
        "smallest similarity of a known individual (default: the gallery's)",
        type=float,
    )
    add("--json", "print a JSON object per line")
    add("--page FILE", "also write a page with the images and the ranked individuals")
    add("--skip-corrupt", corrupt)


_EXISTING = ("refuse", "add", "replace")


def run(arguments: argparse.Namespace) -> int:
    """Run ``tammes gallery`` and return the exit code; after an error no file is changed."""
    return _ACTIONS[arguments.action](arguments)


class _Listed(NamedTuple):
    """Images and their individuals."""

    paths: list[str]
    ids: list[str]


def _list(folder: str) -> _Listed:
    if not Path(folder).is_dir():
        raise DataError(f"{folder}: a folder with a subfolder for each individual is expected")
    entries = list_classes(Path(folder))
    paths = [entries.items.fetch(row) for row in range(len(entries.items))]
    return _Listed(
        [str(path) for path in paths], [entries.names[label] for label in entries.labels.tolist()]
    )


def _build(arguments: argparse.Namespace) -> int:
    path = _gallery_path(arguments.gallery)
    if path.exists():
        raise DataError(f"{path}: a new file is expected; `tammes gallery add` adds to a gallery")
    listed = _list(arguments.images)
    rest, probes = (listed, _Listed([], [])) if arguments.far is None else _hold_out(listed)
    if arguments.far is not None:
        # Checked before embedding the images, which may take hours.
        _check_far(arguments.far, len(probes.ids), len({*rest.ids}))
    model = load(arguments.model)
    gallery = Gallery(model, template=arguments.template)
    calibration = None
    with watched_images(len(listed.paths), skip=arguments.skip_corrupt) as (watched, unreadable):
        gallery.enrol(watched(rest.paths), rest.ids, unreadable=unreadable)
        if arguments.far is not None:
            batches = list(model.embed_batches(watched(probes.paths), unreadable=unreadable))
            calibration = _calibrate(gallery, batches, probes.ids, arguments.far)
    gallery.save(path)
    print(f"  {path}: {_contents(gallery)}")
    if calibration is not None:
        print(f"  {_threshold(calibration, arguments.far)}")
    return 0


def _hold_out(listed: _Listed) -> tuple[_Listed, _Listed]:
    """Hold out the last image of each individual with two or more, of at most 2,000."""
    rows: dict[str, list[int]] = {}
    for row, identity in enumerate(listed.ids):
        rows.setdefault(identity, []).append(row)
    last = [own[-1] for own in rows.values() if len(own) > 1]
    count = min(len(last), _CALIBRATED)
    held = {last[place * len(last) // count] for place in range(count)}

    def part(inside: bool) -> _Listed:
        chosen = [row for row in range(len(listed.ids)) if (row in held) == inside]
        return _Listed([listed.paths[row] for row in chosen], [listed.ids[row] for row in chosen])

    return part(False), part(True)


def _check_far(far: float, probes: int, individuals: int) -> None:
    """Reject a false acceptance rate that is too small to measure on the held-out images."""
    if not probes:
        raise DataError(
            "--far expects individuals with two images or more, of which one is held out, got none"
        )
    different = probes * (individuals - 1)
    check_rate("Gallery.threshold", "FAR", far, different, "pairs of different identities")


def _calibrate(
    gallery: Gallery, batches: Sequence[EmbeddedBatch], ids: Sequence[str], far: float
) -> CalibratedThreshold:
    """Calibrate the threshold on images that are not enrolled, then enrol them too."""
    own = [ids[position] for batch in batches for position in batch.positions]
    _check_far(far, len(own), len(gallery))
    embeddings = torch.cat([batch.embeddings for batch in batches])
    calibration = gallery.threshold(far, embeddings, own)
    names = [name for batch in batches for name in batch.names]
    gallery.enrol(embeddings, own, existing="add", sources=names)
    return calibration


def _add(arguments: argparse.Namespace) -> int:
    path = _gallery_path(arguments.gallery)
    listed = _list(arguments.images)
    gallery = Gallery.load(path, load(arguments.model))
    with watched_images(len(listed.paths), skip=arguments.skip_corrupt) as (watched, unreadable):
        gallery.enrol(
            watched(listed.paths), listed.ids, existing=arguments.existing, unreadable=unreadable
        )
    gallery.save(path)
    print(f"  {path}: {_contents(gallery)}")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    path = _gallery_path(arguments.gallery)
    gallery = Gallery.load(path)
    # A gallery made in Python may have integers as ids.
    known = {str(identity): identity for identity in gallery.ids}
    gallery.remove([known.get(text, text) for text in arguments.ids])
    if not len(gallery):
        raise DataError(
            f"{path}: these are all its individuals, and a gallery needs one; "
            "delete the file instead"
        )
    gallery.save(path)
    print(f"  {path}: {_contents(gallery)}")
    return 0


def _query(arguments: argparse.Namespace) -> int:
    for path in arguments.images:
        if not Path(path).exists():
            raise DataError(f"{path}: there is no such image or folder")
    model = load(arguments.model)
    gallery = Gallery.load(_gallery_path(arguments.gallery), model)
    total = sum(1 for _ in named_images(arguments.images))
    shown: list[Answer] = []
    answered = 0
    with watched_images(total, skip=arguments.skip_corrupt) as (watched, unreadable):
        images = watched(image for _, image in named_images(arguments.images))
        for batch in model.embed_batches(images, unreadable=unreadable):
            for answer in _answers(gallery, batch, arguments):
                line = json.dumps(answer.as_dict()) if arguments.json else as_text(answer)
                print(line, flush=True)
                answered += 1
                if len(shown) < SHOWN:
                    shown.append(answer)
    if not answered:
        raise DataError(f"none of the {total:,} images can be read")
    if arguments.page is not None:
        threshold = gallery.accept_at if arguments.threshold is None else arguments.threshold
        command = _command(arguments)
        text = render_gallery_page(shown, answered, gallery, threshold, command)
        write(arguments.page, text)
        if not arguments.json:
            print(f"\n  page: {arguments.page}")
    return 0


def _answers(
    gallery: Gallery, batch: EmbeddedBatch, arguments: argparse.Namespace
) -> Iterator[Answer]:
    found = gallery.identify(batch.embeddings, arguments.top, threshold=arguments.threshold)
    rows = zip(
        batch.names,
        found.known.tolist(),
        found.ids,
        found.scores.tolist(),
        found.sources,
        strict=True,
    )
    return (Answer(*row) for row in rows)


def as_text(answer: Answer) -> str:
    """Format the answer to a query as a line."""
    ranked = zip(answer.ids, answer.scores, strict=False)
    first = [] if answer.known else ["unknown, nearest:"]
    return "  ".join([answer.image, *first, *(f"{each} {score:.3f}" for each, score in ranked)])


def _contents(gallery: Gallery) -> str:
    images = sum(gallery.images(identity) for identity in gallery.ids)
    individuals = counted(len(gallery), "individual")
    return f"{individuals}, {counted(images, 'image')}, template {gallery.template}"


def _threshold(calibration: CalibratedThreshold, far: float) -> str:
    return (
        f"threshold {calibration.threshold:.3f} for a FAR of {100 * far:g} %: accepts "
        f"{100 * calibration.far:.2f} % of {calibration.different:,} pairs of different "
        "individuals "
        f"and {100 * calibration.tar:.1f} % of {calibration.same:,} of the same"
    )


def _gallery_path(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".safetensors":
        raise ValueError(f"{text}: a gallery with the suffix .safetensors is expected")
    return path


def _command(arguments: argparse.Namespace) -> str:
    words = ["tammes", "gallery", "query", arguments.gallery, arguments.model, *arguments.images]
    words += ["--top", str(arguments.top), "--page", arguments.page]
    if arguments.threshold is not None:
        words += ["--threshold", str(arguments.threshold)]
    if arguments.skip_corrupt:
        words.append("--skip-corrupt")
    return shlex.join(words)


_ACTIONS = {"build": _build, "add": _add, "remove": _remove, "query": _query}
