"""Image folders: one folder per class."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tammes.lab.data.csv_rows import TABLES
from tammes.lab.data.images import DataError
from tammes.lab.data.listing import EVERYTHING, Entries, Partitions, file_entries

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)
"""Suffixes of image files."""
PARTITION_WORDS = frozenset(
    {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}
    | {"query", "gallery", "base", "novel", "background", "evaluation"}
)
"""Names of partitions."""


def partitions(folder: Path) -> Partitions:
    """Return the partitions of an image folder.

    ``FOLDER/train/CLASS/...`` has those that its subfolders name; ``FOLDER/CLASS/...`` has none.
    """
    inside = _subfolders(folder)
    own = {name.lower(): folder / name for name in inside if name.lower() in PARTITION_WORDS}
    # A class may also be named "train"; its folder then holds images, not folders.
    if any(name in own and _subfolders(own[name]) for name in ("train", "training")):
        return {name: lambda path=path: list_classes(path) for name, path in own.items()}  # type: ignore[misc]
    return {EVERYTHING: lambda: list_classes(folder)}


def list_tables(folder: Path) -> list[Path]:
    """List the tables of a folder: the CSV files or, if there are none, the TSV files."""
    paths = sorted(folder.iterdir())
    found = ([path for path in paths if path.suffix.lower() == suffix] for suffix in TABLES)
    return next(filter(None, found), [])


def label_table(folder: Path) -> Path | None:
    """Return the table of a folder, or None if it has several, none, or class folders."""
    tables = list_tables(folder)
    return tables[0] if len(tables) == 1 and len(_subfolders(folder)) < 2 else None


def list_classes(folder: Path) -> Entries:
    """List all images of a folder of class folders, sorted by class and path."""
    names = _subfolders(folder)
    if not names:
        loose = sum(is_image(entry.name) for entry in os.scandir(folder))
        got = f"{loose} image{'s' * (loose > 1)} directly in it" if loose else "nothing like that"
        raise DataError(
            f"{folder}: images are expected in one folder for each class (CLASS/IMAGE.png), "
            f"got {got}; labels can also be in a CSV file with the columns path and label, or in "
            f"the file names, as in '{folder}/{{label}}_*.png'"
        )
    paths: list[str] = []
    labels: list[int] = []
    empty: list[str] = []
    for label, name in enumerate(names):
        images = sorted(_walk(folder, name, set()))
        if not images:
            empty.append(name)
        paths += images
        labels += [label] * len(images)
    if not paths:
        raise DataError(f"{folder}: there is no image in it ({', '.join(sorted(SUFFIXES))})")
    if empty:
        shown = ", ".join(repr(str(folder / name)) for name in empty[:4])
        more = f" and {len(empty) - 4} more" if len(empty) > 4 else ""
        raise DataError(f"a class folder is expected to have images, {shown}{more} has none")
    # A file name may not be valid UTF-8.
    classes = tuple(os.fsencode(name).decode("utf-8", "replace") for name in names)
    return file_entries(folder, paths, torch.tensor(labels, dtype=torch.int64), classes)


def walk_images(folder: Path) -> Iterator[str]:
    """Yield the path of every image in or below a folder, sorted, one directory at a time."""
    for path in _walk(folder, "", set()):
        yield os.path.join(folder, path)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as inside:
        return sorted(entry.name for entry in inside if entry.is_dir() and _is_visible(entry.name))


def _is_visible(name: str) -> bool:
    """Whether a name is neither hidden nor metadata of a macOS archive."""
    return not name.startswith(".") and name != "__MACOSX"


def _walk(root: Path, below: str, seen: set[str]) -> Iterator[str]:
    """Yield the relative path of every image below a folder."""
    real = os.path.realpath(root / below)
    if real in seen:
        # A link back to a parent folder.
        return
    seen.add(real)
    folders, names = set(), []
    with os.scandir(root / below) as inside:
        for entry in inside:
            # Names only: a folder may hold a million images.
            if _is_visible(entry.name) and entry.is_dir():
                folders.add(entry.name)
                names.append(entry.name)
            elif _is_visible(entry.name) and is_image(entry.name):
                names.append(entry.name)
    names.sort()
    for name in names:
        path = os.path.join(below, name)
        if name in folders:
            yield from _walk(root, path, seen)
        else:
            yield path


def is_image(name: str) -> bool:
    """Whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in SUFFIXES
