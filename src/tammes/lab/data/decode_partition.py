"""Decode the entries of a partition to images of one shape, in memory if they fit."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from tammes.lab.data import cache
from tammes.lab.data.decode import ImageInfo, Shape, decode, decode_all, reason
from tammes.lab.data.images import DataError, Images
from tammes.lab.data.listing import Entries, Items
from tammes.optional import require

_SIDE = 64
"""Default side of images whose sizes differ."""
_SAMPLE = 256
"""Number of images from which the shape is guessed before all are decoded."""
_REPORT_SECONDS = 10.0
"""Seconds between two reports of how many images are decoded."""


@dataclass(frozen=True)
class LazyDecoder:
    """Decodes images to a given shape on demand."""

    items: Items
    shape: Shape

    def read(self, row: int) -> Tensor:
        """Decode the image at a row of the partition."""
        try:
            _, pixels = decode(self.items.fetch(row), self.shape)
        except Exception as error:
            raise DataError(
                f"{self.items.name(row)} cannot be read ({reason(error)}); "
                "skip_corrupt leaves such images out"
            ) from error
        return torch.from_numpy(pixels.copy())


@dataclass(frozen=True, kw_only=True)
class PartitionDecoder:
    """Decodes the images of a partition, or reads them from the cache.

    Args:
        size: side of the square images, or height and width; by default that of the images if all
            have the same, else 64.
        shape: exact shape, if known; takes precedence over ``size``.
        skip_corrupt: leave out unreadable images.
        memory: largest size of the pixels in bytes; images of larger sets are decoded on demand.
        report: called with one-line messages.
    """

    source: str
    entries: Entries
    size: int | tuple[int, int] | None
    shape: Shape | None
    skip_corrupt: bool
    memory: int
    report: Callable[[str], None]

    def images(self) -> Images:
        """Return the images of the partition."""
        require("PIL.Image", extra="lab")
        require("numpy", extra="lab")
        entries, stored = self.entries, self._cached()
        if stored is None:
            stored = self._decode()
            cache.write(self._key(self.shape or self.size), stored, report=self.report)
        if stored.mixed and self.size is None and self.shape is None:
            self.report(
                f"{self.source}: the images differ in size, so all are resized to "
                f"{_SIDE}×{_SIDE}; image_size sets another size"
            )
        kept = torch.ones(stored.rows, dtype=torch.bool)
        if stored.unreadable:
            self._report_unreadable(stored)
            kept[torch.tensor(list(stored.unreadable))] = False
        lost = set(entries.labels.tolist()) - set(entries.labels[kept].tolist())
        if lost:
            name = entries.names[min(lost)]
            raise DataError(f"{self.source}: no image of class {name!r} can be read")
        index, pixels = kept.nonzero().squeeze(1), stored.pixels
        if pixels is not None and stored.unreadable:
            pixels = pixels[index]
        return Images(
            labels=entries.labels[index],
            index=index,
            classes=entries.names,
            shape=stored.shape,
            pixels=pixels,
            source=self.source,
            reader=LazyDecoder(entries.items, stored.shape) if pixels is None else None,
            origin=entries.origin,
        )

    def _key(self, size: Shape | tuple[int, int] | int | None) -> str:
        return cache.key(self.entries.stamp, len(self.entries.items), size)

    def _cached(self) -> cache.CachedImages | None:
        """Return the cached images if they suffice, else None."""
        shape = self.shape
        sizes: list[Shape | tuple[int, int] | int | None] = [self.shape or self.size]
        if shape is not None:
            # Pixels depend on the shape alone. When the same images were loaded for training, their
            # shape was not known yet, so they are cached under a size or none.
            sizes += [*dict.fromkeys((self.size, None, shape[1]))]
        for each in sizes:
            stored = cache.read(
                self._key(each), memory=self.memory, report=self.report, shape=shape
            )
            if stored is not None and self._suffices(stored):
                # Images that have become readable may change the shape, so all are decoded again.
                return None if self._readable_again(stored) else stored
        return None

    def _suffices(self, stored: cache.CachedImages) -> bool:
        """Whether a cache entry has the pixels if they fit, and all unreadable images if needed."""
        if stored.pixels is None and self._fits(stored.shape):
            return False
        return stored.checked or not self.skip_corrupt

    def _fits(self, shape: Shape) -> bool:
        return len(self.entries.items) * math.prod(shape) <= self.memory

    def _readable_again(self, stored: cache.CachedImages) -> bool:
        """Whether an unreadable image can be read now, such as after a disk or network failure."""
        fetch, shape = self.entries.items.fetch, stored.shape if stored.checked else None
        return any(
            isinstance(decode_all(fetch, [row], shape, None, processes=0)[0], ImageInfo)
            for row in stored.unreadable
        )

    def _decode(self) -> cache.CachedImages:
        numpy = require("numpy", extra="lab")
        fetch, rows = self.entries.items.fetch, range(len(self.entries.items))
        few = min(len(rows), _SAMPLE)
        sample = [number * len(rows) // few for number in range(few)]
        guess, _ = self._shape_of(decode_all(fetch, sample, None, None, processes=0))
        for attempt in range(3):
            fits = self._fits(guess)
            full = fits or self.skip_corrupt
            verb = "decoding" if full else "checking"
            self.report(f"{self.source}: {verb} {len(rows):,} images")
            out = numpy.zeros((len(rows), *guess), dtype="uint8") if fits else None
            results = decode_all(fetch, rows, guess if full else None, out, advance=self._pace())
            actual, mixed = self._shape_of(results)
            # If the sample was misleading, decode again, to the shape of all images.
            if actual == guess or attempt == 2:
                break
            guess = actual
        unreadable = {row: each for row, each in enumerate(results) if isinstance(each, str)}
        pixels = None if out is None else torch.from_numpy(out)
        return cache.CachedImages(guess, len(rows), unreadable, full, mixed, pixels)

    def _pace(self) -> Callable[[int], None]:
        """Return a function that reports the number of decoded images, and the time left."""
        started = reported = time.monotonic()

        def advance(done: int) -> None:
            nonlocal reported
            now, total = time.monotonic(), len(self.entries.items)
            if now - reported >= _REPORT_SECONDS:
                reported = now
                minutes, seconds = divmod(round((now - started) / done * (total - done)), 60)
                self.report(
                    f"{self.source}: {done:,} of {total:,} images, {minutes}:{seconds:02} left"
                )

        return advance

    def _shape_of(self, results: list[ImageInfo | str]) -> tuple[Shape, bool]:
        """Return the shape to decode images to, and whether they differ in size."""
        # If no image is readable, any shape will do: that is an error later on.
        infos = {each for each in results if not isinstance(each, str)} or {ImageInfo(True, 1, 1)}
        mixed = len({(each.width, each.height) for each in infos}) > 1
        if self.shape is not None:
            return self.shape, mixed
        channels = 1 if all(each.grey for each in infos) else 3
        one = next(iter(infos))
        size = self.size or (_SIDE if mixed else (one.height, one.width))
        height, width = (size, size) if isinstance(size, int) else size
        return (channels, height, width), mixed

    def _report_unreadable(self, stored: cache.CachedImages) -> None:
        unreadable, count = stored.unreadable, len(stored.unreadable)
        name = self.entries.items.name
        some = ", ".join(f"{name(row)} ({why})" for row, why in islice(unreadable.items(), 5))
        some += f" and {count - 5:,} more" if count > 5 else ""
        images = f"{count:,} image{'s' if count > 1 else ''}"
        if not self.skip_corrupt or count == stored.rows:
            hint = "" if count == stored.rows else "; skip_corrupt leaves them out"
            raise DataError(
                f"{self.source}: {images} of {stored.rows:,} cannot be read: {some}{hint}"
            )
        were = "were" if count > 1 else "was"
        self.report(f"{images} could not be read and {were} left out: {some}")
