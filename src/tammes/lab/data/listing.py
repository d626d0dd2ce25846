"""Entries of a source: encoded images with labels."""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tammes.lab.data.images import DataError

IMAGE_COLUMNS = ("image", "img", "images", "picture", "photo", "jpg", "png", "webp")
"""Names of image columns, in order of preference."""
LABEL_COLUMNS = (
    ("label",), ("labels",), ("fine_label",), ("class",), ("cls",), ("target",), ("category",),
    ("class_name",), ("label_name",), ("species",), ("identity",), ("pid",), ("person_id",),
    ("alphabet", "character"),
)  # fmt: skip
"""Names of label columns, in order of preference; two columns name a class together."""
EVERYTHING = ""
"""Name of the only partition of a source without partitions."""


class Items(Protocol):
    """Encoded images; picklable for worker processes."""

    def __len__(self) -> int: ...

    def fetch(self, row: int) -> bytes | str:
        """Return the bytes of an image, or the path of its file."""

    def name(self, row: int) -> str:
        """Return the name of an image, for messages."""


@dataclass(frozen=True)
class Files:
    """Image files: their common folder, and their paths relative to it."""

    root: str
    paths: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, row: int) -> str:
        """Return the path of a file."""
        return os.path.join(self.root, self.paths[row])

    def name(self, row: int) -> str:
        """Return the path of a file."""
        return self.fetch(row)


@dataclass(frozen=True, eq=False)
class Entries:
    """Encoded images of a partition, with labels.

    Attributes:
        names: class names; a class may have no image.
        stamp: hash that changes when a file does.
        origin: hash of names and sizes of the files, the same on every machine.
    """

    items: Items
    labels: Tensor
    names: tuple[str, ...]
    stamp: str
    origin: str

    def present(self) -> list[str]:
        """Return the classes that have an image, in order."""
        return [self.names[label] for label in self.labels.unique().tolist()]


def file_entries(
    root: Path, paths: Sequence[str], labels: Tensor, names: tuple[str, ...]
) -> Entries:
    """List files below a folder with their labels."""
    stats = [_size_and_time(root / path) for path in paths]
    posix = [path.replace(os.sep, "/") for path in paths]
    return Entries(
        items=Files(str(root), tuple(paths)),
        labels=labels,
        names=names,
        stamp=hash_of((str(root.absolute()), [*paths], stats)),
        origin=hash_of((posix, [size for size, _ in stats])),
    )


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        # Broken links and missing files are reported with the unreadable images.
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


Partitions = Mapping[str, Callable[[], Entries]]
"""Loaders of the entries of each partition, by name."""


def hash_of(values: Any) -> str:
    """Hash plain values."""
    return hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def read_labels(
    table: str,
    candidates: Collection[str],
    classes: Mapping[str, Sequence[str]],
    columns: Collection[str],
    read: Callable[[str], list[Any]],
) -> tuple[tuple[str, ...], Tensor, tuple[str, ...]]:
    """Read the labels of a table: their columns, the labels and the class names.

    ``candidates`` are those of all ``columns`` that may hold labels; ``classes`` are the class
    names of columns that declare them, and ``read`` returns the values of a column.
    """
    named = tuple(name for name in candidates if name in classes)
    known = [wanted for wanted in LABEL_COLUMNS if set(wanted) <= set(candidates)]
    if not known and len(named) != 1:
        raise DataError(
            f"{table}: a column of labels is expected, such as label, {_got_columns(columns)}"
        )
    chosen = known[0] if known else named
    values = read(chosen[0])
    if len(chosen) > 1:
        values = list(map("/".join, zip(*map(read, chosen), strict=True)))
    where = f"{table}: column {' and '.join(map(repr, chosen))}"
    return chosen, *as_labels(where, values, classes.get(chosen[0]))


def image_column(table: str, images: Sequence[str], columns: Collection[str]) -> str:
    """Return the column of a table that holds the images; ``images`` are the candidates."""
    for wanted in IMAGE_COLUMNS:
        if wanted in images:
            return wanted
    if images:
        return images[0]
    raise DataError(
        f"{table}: a column of encoded images is expected, such as image, {_got_columns(columns)}"
    )


def _got_columns(columns: Collection[str]) -> str:
    shown = ", ".join(map(repr, list(columns)[:8])) or "none"
    return f"got the columns {shown}{' and others' if len(columns) > 8 else ''}"


def as_labels(
    column: str, values: list[Any], names: Sequence[str] | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Convert integers or strings to labels and class names.

    Strings are their own names; integers have the given ``names``, or else their decimal form.
    """
    empty = sum(value is None for value in values)
    if empty:
        raise DataError(f"{column} has {empty} empty rows")
    if values and isinstance(values[0], str):
        known = tuple(sorted(set(values)))
        numbers = {name: number for number, name in enumerate(known)}
        return torch.tensor([numbers[value] for value in values], dtype=torch.int64), known
    labels = torch.tensor(values, dtype=torch.int64)
    if names is not None:
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(names):
            wrong = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
            raise DataError(f"{column} is expected from 0 to {len(names) - 1}, got {wrong}")
        return labels, tuple(names)
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"{column} is expected to be 0 or more, got {int(labels.min())}")
    present, dense = labels.unique(return_inverse=True)
    return dense, tuple(str(number) for number in present.tolist())
