"""Class-disjoint splits: the first classes of a source for training, the others for testing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tammes.lab.data.images import DataError
from tammes.lab.data.listing import EVERYTHING, Entries, Items, Partitions, hash_of


@dataclass(frozen=True)
class SelectedItems:
    """Images chosen from several partitions; ``places`` has the partition and row of each."""

    parts: tuple[Items, ...]
    places: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.places)

    def fetch(self, row: int) -> bytes | str:
        """Return the bytes of an image, or the path of its file."""
        part, own = self.places[row]
        return self.parts[part].fetch(own)

    def name(self, row: int) -> str:
        """Return the name of an image in its partition."""
        part, own = self.places[row]
        return self.parts[part].name(own)


def split_by_class(title: str, available: Partitions, trained: int) -> Partitions:
    """Split all images of a source by class.

    The images of all partitions are joined; the first ``trained`` classes, in the order of the
    source, make up ``train``, and the others ``test``.
    """

    def entries(test: bool) -> Entries:
        names = [EVERYTHING] if EVERYTHING in available else sorted(available)
        parts = [available[name]() for name in names]
        if any(part.names != parts[0].names for part in parts):
            raise DataError(f"{title}: the same classes are expected in {' and '.join(names)}")
        classes = parts[0].names
        if not trained < len(classes):
            raise DataError(
                f"{title}: more than {trained} classes are expected, got {len(classes)}"
            )
        return _select(parts, range(trained, len(classes)) if test else range(trained))

    return {"train": lambda: entries(False), "test": lambda: entries(True)}


def _select(parts: Sequence[Entries], classes: range) -> Entries:
    """Join entries with the same class names, and keep those of a range of classes."""
    labels = torch.cat([part.labels for part in parts])
    kept = ((labels >= classes.start) & (labels < classes.stop)).nonzero().squeeze(1)
    places = [(number, row) for number, part in enumerate(parts) for row in range(len(part.items))]
    chosen = (classes.start, classes.stop)
    return Entries(
        items=SelectedItems(
            tuple(part.items for part in parts), tuple(places[row] for row in kept.tolist())
        ),
        labels=labels[kept] - classes.start,
        names=parts[0].names[classes.start : classes.stop],
        stamp=hash_of(([part.stamp for part in parts], chosen)),
        origin=hash_of(([part.origin for part in parts], chosen)),
    )
