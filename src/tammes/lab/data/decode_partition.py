"""Decode the entries of a partition to images of one shape, in memory if they fit."""

from collections.abc import Callable, Mapping
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
"""Images from which the shape is guessed before all are decoded."""


@dataclass(frozen=True)
class LazyDecoder:
    """Decodes images when they are read.

    Attributes:
        items: encoded images.
        shape: shape of the decoded images.
    """

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


def decode_entries(
    source: str,
    entries: Entries,
    *,
    size: int | None,
    shape: Shape | None,
    skip_corrupt: bool,
    memory: int,
    report: Callable[[str], None],
) -> Images:
    """Decode the images of a partition, or read them from the cache.

    Args:
        source: name of the source, for messages.
        entries: entries of the partition.
        size: side of the square images; by default their own if it is the same for all, else 64.
        shape: exact shape, if known; takes precedence over ``size``.
        skip_corrupt: leave out unreadable images.
        memory: largest size of the pixels in bytes; larger sets are decoded image by image.
        report: called with one-line messages.
    """
    require("PIL.Image", extra="lab")
    require("numpy", extra="lab")
    stored = _read_cache(entries, size, shape, skip_corrupt, memory, report)
    if stored is None:
        stored = _decode(source, entries.items, size, shape, skip_corrupt, memory, report)
        cache.write(_key(entries, shape or size), stored, report=report)
    if stored.mixed and size is None and shape is None:
        report(
            f"{source}: the images differ in size, so all are resized to {_SIDE}×{_SIDE}; "
            "image_size sets another size"
        )
    _check_readable(source, entries.items, stored.unreadable, stored.rows, skip_corrupt, report)
    kept = torch.ones(stored.rows, dtype=torch.bool)
    kept[torch.tensor(list(stored.unreadable), dtype=torch.int64)] = False
    _check_classes(source, entries, kept)
    index = kept.nonzero().squeeze(1)
    pixels = stored.pixels
    if pixels is not None and stored.unreadable:
        pixels = pixels[index]
    return Images(
        labels=entries.labels[index],
        index=index,
        classes=entries.names,
        shape=stored.shape,
        pixels=pixels,
        source=source,
        reader=LazyDecoder(entries.items, stored.shape) if pixels is None else None,
        origin=entries.origin,
    )


def _key(entries: Entries, size: Shape | int | None) -> str:
    return cache.key(entries.stamp, len(entries.items), size)


def _read_cache(
    entries: Entries,
    size: int | None,
    shape: Shape | None,
    skip_corrupt: bool,
    memory: int,
    report: Callable[[str], None],
) -> cache.CachedImages | None:
    """Return the cached images if they suffice, else None."""
    sizes: list[Shape | int | None] = [shape or size]
    if shape is not None:
        # Pixels depend on the shape alone. If the same images were loaded for training before, the
        # shape was not known yet, and they are cached under their size or none.
        sizes += [*dict.fromkeys((size, None, shape[1]))]
    for each in sizes:
        stored = cache.read(_key(entries, each), memory=memory, report=report, shape=shape)
        if stored is None or not _enough(stored, memory, skip_corrupt):
            continue
        # The shape may change with the images that were missing, so all are decoded again.
        return None if _readable_again(entries.items, stored) else stored
    return None


def _readable_again(items: Items, stored: cache.CachedImages) -> bool:
    """Whether an unreadable image can be read now, after a failure of disk or network."""
    shape = stored.shape if stored.checked else None
    return any(
        isinstance(decode_all(items.fetch, [row], shape, None, processes=0)[0], ImageInfo)
        for row in stored.unreadable
    )


def _enough(stored: cache.CachedImages, memory: int, skip_corrupt: bool) -> bool:
    """Whether a cache entry suffices: it has the pixels, and knows the readable images."""
    if stored.pixels is None and _bytes(stored.rows, stored.shape) <= memory:
        return False
    return stored.checked or not skip_corrupt


def _bytes(rows: int, shape: Shape) -> int:
    return rows * shape[0] * shape[1] * shape[2]


def _decode(
    source: str,
    items: Items,
    size: int | None,
    shape: Shape | None,
    skip_corrupt: bool,
    memory: int,
    report: Callable[[str], None],
) -> cache.CachedImages:
    numpy = require("numpy", extra="lab")
    rows = range(len(items))
    few = min(len(rows), _SAMPLE)
    sample = [number * len(rows) // few for number in range(few)]
    guess, _ = _shape_of(decode_all(items.fetch, sample, None, None, processes=0), size, shape)
    for attempt in range(3):
        fits = _bytes(len(rows), guess) <= memory
        full = fits or skip_corrupt
        report(f"{source}: {'decoding' if full else 'checking'} {len(rows):,} images")
        out = numpy.zeros((len(rows), *guess), dtype="uint8") if fits else None
        results = decode_all(items.fetch, rows, guess if full else None, out)
        actual, mixed = _shape_of(results, size, shape)
        # The shape of all images is right; if the sample misled, there is a second pass.
        if actual == guess or attempt == 2:
            break
        guess = actual
    return cache.CachedImages(
        shape=guess,
        rows=len(rows),
        unreadable={row: each for row, each in enumerate(results) if isinstance(each, str)},
        checked=full,
        mixed=mixed,
        pixels=None if out is None else torch.from_numpy(out),
    )


def _shape_of(
    results: list[ImageInfo | str], size: int | None, shape: Shape | None
) -> tuple[Shape, bool]:
    """Return the common shape of images, and whether they differ in size."""
    # If none is readable, any shape will do; that is an error later on.
    infos = {each for each in results if not isinstance(each, str)} or {ImageInfo(True, 1, 1)}
    mixed = len({(each.width, each.height) for each in infos}) > 1
    if shape is not None:
        return shape, mixed
    channels = 1 if all(each.grey for each in infos) else 3
    one = next(iter(infos))
    if size is not None:
        return (channels, size, size), mixed
    return ((channels, _SIDE, _SIDE) if mixed else (channels, one.height, one.width)), mixed


def _check_readable(
    source: str,
    items: Items,
    unreadable: Mapping[int, str],
    rows: int,
    skip_corrupt: bool,
    report: Callable[[str], None],
) -> None:
    if not unreadable:
        return
    examples = [f"{items.name(row)} ({why})" for row, why in islice(unreadable.items(), 5)]
    more = f" and {len(unreadable) - 5:,} more" if len(unreadable) > 5 else ""
    count = f"{len(unreadable):,} image{'s' if len(unreadable) > 1 else ''}"
    if not skip_corrupt or len(unreadable) == rows:
        raise DataError(
            f"{source}: {count} of {rows:,} cannot be read: {', '.join(examples)}{more}"
            + ("" if len(unreadable) == rows else "; skip_corrupt leaves them out")
        )
    were = "were" if len(unreadable) > 1 else "was"
    report(f"{count} could not be read and {were} left out: {', '.join(examples)}{more}")


def _check_classes(source: str, entries: Entries, kept: Tensor) -> None:
    lost = set(entries.labels.tolist()) - set(entries.labels[kept].tolist())
    if lost:
        raise DataError(f"{source}: no image of class {entries.names[min(lost)]!r} can be read")
