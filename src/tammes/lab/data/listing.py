"""What a source lists before any image is decoded."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tammes.lab.data.images import DataError

IMAGE_COLUMNS = ("image", "img", "images", "picture", "photo", "jpg", "png", "webp")
"""Columns that hold images, best first."""
LABEL_COLUMNS = (
    ("label",), ("labels",), ("fine_label",), ("class",), ("cls",), ("target",), ("category",),
    ("class_name",), ("label_name",), ("species",), ("identity",), ("pid",), ("person_id",),
    ("alphabet", "character"),
)  # fmt: skip
"""Columns that hold labels, best first; where there are two, a class is named by both."""
EVERYTHING = ""
"""Under which name everything is, in a source that does not say what is for training."""


class Items(Protocol):
    """Encoded images; they travel to worker processes."""

    def __len__(self) -> int: ...

    def fetch(self, row: int) -> bytes | str:
        """The bytes of an image, or the path of its file."""

    def name(self, row: int) -> str:
        """How an image is called in a message."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Images of a split, not decoded, with their labels.

    Attributes:
        items: the images.
        labels: class of each, shape ``(N,)``.
        names: of the classes; some may have no image.
        stamp: letters that change when a file does.
        origin: letters that stand for names and sizes of the files, the same on every machine.
    """

    items: Items
    labels: Tensor
    names: tuple[str, ...]
    stamp: str
    origin: str

    def present(self) -> list[str]:
        """Classes that have an image, in their order."""
        return [self.names[label] for label in self.labels.unique().tolist()]


Partitions = Mapping[str, Callable[[], Entries]]
"""What gives the entries of each split a source has."""


def letters(parts: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def label_columns(
    where: str, labels: Collection[str], named: Collection[str], columns: Collection[str]
) -> tuple[str, ...]:
    """Which of the columns of a table hold the labels.

    Args:
        where: the table, for the message.
        labels: those that could be.
        named: those of them whose classes have names.
        columns: all of them.
    """
    for wanted in LABEL_COLUMNS:
        if set(wanted) <= set(labels):
            return wanted
    if len(named) == 1:
        return tuple(named)
    raise DataError(f"{where}: a column of labels is expected, such as label, {_it_has(columns)}")


def image_column(where: str, images: Sequence[str], columns: Collection[str]) -> str:
    """Which of the columns of a table holds the images.

    Args:
        where: the table, for the message.
        images: those that could be.
        columns: all of them.
    """
    for wanted in IMAGE_COLUMNS:
        if wanted in images:
            return wanted
    if images:
        return images[0]
    raise DataError(
        f"{where}: a column of encoded images is expected, such as image, {_it_has(columns)}"
    )


def _it_has(columns: Collection[str]) -> str:
    shown = ", ".join(map(repr, list(columns)[:8])) or "none"
    return f"got the columns {shown}{' and others' if len(columns) > 8 else ''}"


def as_labels(
    where: str, values: Iterable[Any], names: Sequence[str] | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Values of a column as labels.

    Args:
        where: the column, for the message.
        values: whole numbers, or texts.
        names: of the classes that the numbers mean; without them a number is its own name.

    Returns:
        Labels, and the names of the classes: those given, or all that occur, sorted.
    """
    values = list(values)
    empty = sum(value is None for value in values)
    if empty:
        raise DataError(f"{where} has {empty} empty rows")
    if values and isinstance(values[0], str):
        known = tuple(sorted(set(values)))
        place = {name: number for number, name in enumerate(known)}
        return torch.tensor([place[value] for value in values], dtype=torch.int64), known
    labels = torch.tensor(values, dtype=torch.int64)
    if names is not None:
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(names):
            wrong = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
            raise DataError(f"{where} is expected from 0 to {len(names) - 1}, got {wrong}")
        return labels, tuple(names)
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"{where} is expected to be 0 or more, got {int(labels.min())}")
    present, dense = labels.unique(return_inverse=True)
    return dense, tuple(str(number) for number in present.tolist())
