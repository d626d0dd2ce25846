"""Entries of a source: encoded images with labels."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Entries:
    """Encoded images of a partition, with labels.

    Attributes:
        items: encoded images.
        labels: class of each image, shape ``(N,)``.
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


Partitions = Mapping[str, Callable[[], Entries]]
"""Loaders of the entries of each partition, by name."""


def hash_of(values: Any) -> str:
    """Hash plain values."""
    return hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def label_columns(
    table: str, labels: Collection[str], named: Collection[str], columns: Collection[str]
) -> tuple[str, ...]:
    """Return the columns of a table that hold the labels.

    Args:
        table: name of the table, for messages.
        labels: candidate columns.
        named: candidates whose classes have names.
        columns: all columns.
    """
    for wanted in LABEL_COLUMNS:
        if set(wanted) <= set(labels):
            return wanted
    if len(named) == 1:
        return tuple(named)
    raise DataError(
        f"{table}: a column of labels is expected, such as label, {_got_columns(columns)}"
    )


def image_column(table: str, images: Sequence[str], columns: Collection[str]) -> str:
    """Return the column of a table that holds the images.

    Args:
        table: name of the table, for messages.
        images: candidate columns.
        columns: all columns.
    """
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
    column: str, values: Iterable[Any], names: Sequence[str] | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Convert the values of a column to labels.

    Args:
        column: name of the column, for messages.
        values: integers or strings.
        names: class names of the integers; without them an integer is its own name.

    Returns:
        Labels and class names: the given ones, or all that occur, sorted.
    """
    values = list(values)
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
