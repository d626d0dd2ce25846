"""Images with labels, in memory or read one by one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tammes.optional import require

_SAMPLE = 10_000
"""Number of images read for mean and standard deviation if they are not in memory."""
_CHUNK = 256


class DataError(ValueError):
    """Data cannot be used; the message is one sentence."""


class ImageReader(Protocol):
    """Reads the images of a partition; picklable for worker processes."""

    def read(self, row: int) -> Tensor:
        """Read the image at a row of the partition, uint8 ``(channels, height, width)``."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images of a partition, or a subset of them.

    Args:
        labels: class of each image, shape ``(N,)``, int64.
        index: index of each image in its source partition, shape ``(N,)``, int64. :meth:`subset`
            keeps it; augmentation is keyed by it.
        classes: class names.
        shape: ``(channels, height, width)`` of every image.
        pixels: all images, uint8 ``(N, channels, height, width)``; None if read one by one.
        source: name of the source.
        digest: hash of origin, classes, shape, labels and indices; computed if empty.
        reader: reads images if there are no pixels.
        origin: hash of names and sizes of the files; part of the digest.
    """

    labels: Tensor = field(repr=False)
    index: Tensor = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
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
        """Return the image at a position, uint8 ``(channels, height, width)``."""
        if self.pixels is not None:
            return self.pixels[position]
        assert self.reader is not None
        return self.reader.read(int(self.index[position]))

    def subset(self, positions: Tensor, labels: Tensor | None = None) -> "Images":
        """Select images, in the order of ``positions``, with new ``labels`` if given."""
        # Do not copy the pixels if all images are selected.
        everything = len(positions) == len(self) and bool(
            (positions == torch.arange(len(self))).all()
        )
        pixels = self.pixels if self.pixels is None or everything else self.pixels[positions]
        labels = self.labels[positions] if labels is None else labels.long()
        index = self.index[positions]
        return replace(self, labels=labels, index=index, pixels=pixels, digest="")

    def counts(self) -> list[int]:
        """Return the number of examples of each class."""
        counts: list[int] = self.labels.bincount(minlength=len(self.classes)).tolist()
        return counts

    def mean_std(self) -> tuple[list[float], list[float]]:
        """Compute mean and standard deviation of each channel, for pixels in [0, 1].

        Computed once, from exact counts of the 256 values, so they are the same on every machine.
        Of images that are not in memory at most 10,000, evenly spaced, are read. A constant channel
        has a deviation of 1, so that dividing by it is safe.
        """
        mean, std = self._mean_std
        # Copies, so that the caller cannot change the cached values.
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
            # numpy, since torch's threads mostly wait for each other on busy cores.
            for row, channel in zip(histogram, chunk.transpose(0, 1).numpy(), strict=True):
                row += numpy.bincount(channel.ravel(), minlength=256)
        value = numpy.arange(256)
        total = (histogram * value).sum(1).tolist()
        squares = (histogram * value * value).sum(1).tolist()
        pixels = count * self.shape[1] * self.shape[2]
        mean = tuple(each / pixels / 255 for each in total)
        # n Σx² − (Σx)² is exact in Python integers, however many pixels there are.
        variance = [
            (pixels * square - each * each) / pixels**2
            for each, square in zip(total, squares, strict=True)
        ]
        return mean, tuple(value**0.5 / 255 if value > 0 else 1.0 for value in variance)

    def match(self, classes: Sequence[str]) -> "Images":
        """Relabel the images to index into ``classes``, matched by name.

        Raises:
            DataError: an image has another class.
        """
        if tuple(classes) == self.classes:
            return self
        numbers = {name: number for number, name in enumerate(classes)}
        lookup = torch.tensor([numbers.get(name, -1) for name in self.classes])
        labels = lookup[self.labels]
        if bool((labels < 0).any()):
            unknown = [self.classes[label] for label in self.labels[labels < 0].unique().tolist()]
            raise DataError(f"{self.source}: {unknown_classes(unknown, len(classes))}")
        return replace(self, labels=labels, classes=tuple(classes), digest="")

    def _digest(self) -> str:
        text = repr((self.origin, self.classes, self.shape)).encode("utf-8", "backslashreplace")
        rows = torch.stack([self.labels.cpu().long(), self.index.cpu().long()])
        return hashlib.sha256(text + rows.numpy().tobytes()).hexdigest()[:16]


def shrink(pixels: Tensor, side: int) -> Tensor:
    """Shrink uint8 images ``(N, C, H, W)`` to at most ``side`` pixels on the longest side."""
    longest = max(pixels.shape[2:])
    if longest <= side or not len(pixels):
        return pixels
    small = F.interpolate(
        pixels.float(), scale_factor=side / longest, mode="bilinear", antialias=True
    )
    return small.round().clamp(0, 255).byte()


def unknown_classes(names: Sequence[str], known: int) -> str:
    """Return the message about classes that only the test images have."""
    shown = ", ".join(map(repr, names[:4])) + (" and others" if len(names) > 4 else "")
    noun = "class" if len(names) == 1 else "classes"
    return (
        f"{len(names)} {noun} of the test images, {shown}, "
        f"{'is' if len(names) == 1 else 'are'} not among the {known} of the training images; "
        "identities tests on classes that are not trained"
    )
