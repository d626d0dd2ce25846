"""Image folders: a folder for each class."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tammes.lab.data.images import DataError
from tammes.lab.data.listing import EVERYTHING, Entries, Partitions, letters

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)
"""Files that are taken for images."""
PARTITION_WORDS = frozenset(
    {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}
    | {"query", "gallery", "base", "novel", "background", "evaluation"}
)
"""Names that mean a split."""


@dataclass(frozen=True)
class Files:
    """Images that are files.

    Attributes:
        root: their folder.
        paths: of each, from there.
    """

    root: str
    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, row: int) -> str:
        """The path of an image."""
        return os.path.join(self.root, self.paths[row])

    def name(self, row: int) -> str:
        """The path of an image."""
        return self.fetch(row)


def partitions(folder: Path) -> Partitions:
    """Splits of an image folder.

    ``FOLDER/train/CLASS/...`` has those its subfolders name; ``FOLDER/CLASS/...`` has none.
    """
    inside = _subfolders(folder)
    own = {name.lower(): folder / name for name in inside if name.lower() in PARTITION_WORDS}
    # A class may be called "train" too; its folder has images in it, not folders.
    if any(name in own and _subfolders(own[name]) for name in ("train", "training")):
        return {name: lambda path=path: list_classes(path) for name, path in own.items()}  # type: ignore[misc]
    return {EVERYTHING: lambda: list_classes(folder)}


def list_classes(folder: Path) -> Entries:
    """All images of a folder of class folders, sorted by class and path."""
    names = _subfolders(folder)
    if not names:
        loose = sum(Path(entry.name).suffix.lower() in SUFFIXES for entry in os.scandir(folder))
        got = f"{loose} image{'s' * (loose > 1)} directly in it" if loose else "nothing like that"
        raise DataError(
            f"{folder}: images are expected in one folder for each class (CLASS/IMAGE.png), "
            f"got {got}"
        )
    paths: list[str] = []
    labels: list[int] = []
    stats: list[tuple[int, int]] = []
    empty: list[str] = []
    for label, name in enumerate(names):
        found = sorted(_images(folder, name, set()))
        if not found:
            empty.append(name)
        paths += [path for path, _, _ in found]
        stats += [(size, changed) for _, size, changed in found]
        labels += [label] * len(found)
    if not paths:
        raise DataError(f"{folder}: there is no image in it ({_suffixes()})")
    if empty:
        shown = ", ".join(repr(str(folder / name)) for name in empty[:4])
        more = f" and {len(empty) - 4} more" if len(empty) > 4 else ""
        raise DataError(f"a class folder is expected to have images, {shown}{more} has none")
    posix = [path.replace(os.sep, "/") for path in paths]
    return Entries(
        items=Files(str(folder), tuple(paths)),
        labels=torch.tensor(labels, dtype=torch.int64),
        names=tuple(map(_readable, names)),
        stamp=letters((str(folder.absolute()), paths, stats)),
        origin=letters((posix, [size for size, _ in stats])),
    )


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as inside:
        return sorted(entry.name for entry in inside if entry.is_dir() and _counts(entry.name))


def _counts(name: str) -> bool:
    """Hidden files are no data, nor is what archives of a Mac bring along."""
    return not name.startswith(".") and name != "__MACOSX"


def _images(root: Path, below: str, seen: set[str]) -> Iterator[tuple[str, int, int]]:
    """Path from the root, size and time of change of every image below a folder."""
    real = os.path.realpath(root / below)
    if real in seen:
        # A link that leads back to a folder above it.
        return
    seen.add(real)
    with os.scandir(root / below) as inside:
        entries = sorted(inside, key=lambda entry: entry.name)
    for entry in entries:
        path = os.path.join(below, entry.name)
        if not _counts(entry.name):
            continue
        if entry.is_dir():
            yield from _images(root, path, seen)
        elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
            try:
                stat = entry.stat()
                yield path, stat.st_size, stat.st_mtime_ns
            except OSError:
                # A link to nowhere; it is named with what else cannot be read.
                yield path, -1, -1


def _readable(name: str) -> str:
    """A file name as text, also where its bytes are none."""
    return os.fsencode(name).decode("utf-8", "replace")


def _suffixes() -> str:
    return ", ".join(sorted(SUFFIXES))
