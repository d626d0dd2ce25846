"""Images with their labels: in memory, or read one by one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from tammes.optional import require

_SAMPLE = 10_000
"""Images that mean and deviation are taken from where all of them would have to be read."""
_CHUNK = 256


class DataError(ValueError):
    """Data cannot be used; the message is one sentence."""


class ImageReader(Protocol):
    """Reads the images of a split; it travels to worker processes."""

    def read(self, row: int) -> Tensor:
        """The image at a row of the split, uint8 ``(channels, height, width)``."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one split, or some of them.

    Args:
        labels: class of each, shape ``(N,)``, int64.
        index: which example of its source split each is, shape ``(N,)``, int64. It stays with the
            example in :meth:`subset`; augmentation is keyed by it.
        classes: their names.
        shape: ``(channels, height, width)`` of every image.
        pixels: all of them, uint8 ``(N, channels, height, width)``; None: they are read one by one.
        source: where they are from, as the user named it.
        digest: a few letters that stand for which images with which labels; computed if empty.
        reader: reads them where there are no pixels.
        origin: names and sizes of the files, as a few letters; part of the digest.
    """

    labels: Tensor
    index: Tensor
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    pixels: Tensor | None = field(repr=False)
    source: str = ""
    digest: str = ""
    reader: ImageReader | None = field(default=None, repr=False)
    origin: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        count = len(self.labels)
        if len(self.index) != count or (self.pixels is not None and len(self.pixels) != count):
            pixels = None if self.pixels is None else len(self.pixels)
            raise ValueError(
                "Images expects as many labels as indices and images, "
                f"got {count}, {len(self.index)} and {pixels}"
            )
        if self.pixels is None and self.reader is None:
            raise ValueError("Images expects pixels or a reader, got neither")
        if not self.digest:
            object.__setattr__(self, "digest", self._digest())

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, position: int) -> Tensor:
        """The image at a position, uint8 ``(channels, height, width)``."""
        if self.pixels is not None:
            return self.pixels[position]
        assert self.reader is not None
        return self.reader.read(int(self.index[position]))

    def subset(self, positions: Tensor, labels: Tensor | None = None) -> "Images":
        """Some of the images, in the order of ``positions``.

        Args:
            positions: which, shape ``(M,)``.
            labels: their labels, if they are not to keep their own, shape ``(M,)``.
        """
        # A copy of all pixels would only cost memory.
        everything = len(positions) == len(self) and bool(
            (positions == torch.arange(len(self))).all()
        )
        pixels = self.pixels if self.pixels is None or everything else self.pixels[positions]
        return Images(
            labels=self.labels[positions] if labels is None else labels.long(),
            index=self.index[positions],
            classes=self.classes,
            shape=self.shape,
            pixels=pixels,
            source=self.source,
            reader=self.reader,
            origin=self.origin,
        )

    def counts(self) -> list[int]:
        """Examples of each class."""
        found: list[int] = self.labels.bincount(minlength=len(self.classes)).tolist()
        return found

    def mean_std(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, pixels being in [0, 1].

        Computed from counts of the 256 values, so they are the same on every machine. Images that
        are not in memory are represented by at most 10,000 of them, evenly spread. A channel that
        is the same everywhere has deviation 1: it can be divided by. Computed when first asked for.
        """
        mean, std = self._mean_std
        # Lists of the caller's own: what is kept stays as it is.
        return list(mean), list(std)

    @cached_property
    def _mean_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        count = len(self)
        if self.pixels is None:
            count = min(count, _SAMPLE)
            chosen = torch.arange(count) * len(self) // count
            chunks = (self.read(position)[None] for position in chosen.tolist())
        else:
            chunks = iter(self.pixels.split(_CHUNK))
        numpy = require("numpy", extra="lab")
        histogram = numpy.zeros((self.shape[0], 256), dtype="int64")
        for chunk in chunks:
            # Not torch: on busy cores its threads wait for each other longer than they work.
            for row, channel in zip(histogram, chunk.transpose(0, 1).numpy(), strict=True):
                row += numpy.bincount(channel.ravel(), minlength=256)
        value = numpy.arange(256)
        total = (histogram * value).sum(1).tolist()
        squares = (histogram * value * value).sum(1).tolist()
        pixels = count * self.shape[1] * self.shape[2]
        mean = tuple(each / pixels / 255 for each in total)
        # n Σx² − (Σx)² is exact in Python's whole numbers, however many pixels there are.
        variance = [
            (pixels * square - each * each) / pixels**2
            for each, square in zip(total, squares, strict=True)
        ]
        return mean, tuple(value**0.5 / 255 if value > 0 else 1.0 for value in variance)

    def match(self, classes: Sequence[str]) -> "Images":
        """The same images with labels that mean these classes, found by name.

        Args:
            classes: names, those of the training images.

        Raises:
            DataError: where an image is of another class.
        """
        if tuple(classes) == self.classes:
            return self
        place = {name: number for number, name in enumerate(classes)}
        lookup = torch.tensor([place.get(name, -1) for name in self.classes])
        labels = lookup[self.labels]
        if bool((labels < 0).any()):
            unknown = [self.classes[label] for label in self.labels[labels < 0].unique().tolist()]
            raise DataError(f"{self.source}: {unknown_classes(unknown, len(classes))}")
        return Images(
            labels=labels,
            index=self.index,
            classes=tuple(classes),
            shape=self.shape,
            pixels=self.pixels,
            source=self.source,
            reader=self.reader,
            origin=self.origin,
        )

    def _digest(self) -> str:
        text = repr((self.origin, self.classes, self.shape)).encode("utf-8", "backslashreplace")
        rows = torch.stack([self.labels.cpu().long(), self.index.cpu().long()])
        return hashlib.sha256(text + rows.numpy().tobytes()).hexdigest()[:16]


def unknown_classes(names: Sequence[str], known: int) -> str:
    """What is said of classes that occur in the test images only."""
    shown = ", ".join(map(repr, names[:4])) + (" and others" if len(names) > 4 else "")
    what = "class" if len(names) == 1 else "classes"
    return (
        f"{len(names)} {what} of the test images, {shown}, "
        f"{'is' if len(names) == 1 else 'are'} not among the {known} of the training images"
    )
