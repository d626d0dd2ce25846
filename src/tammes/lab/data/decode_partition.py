"""From the entries of a split to images: in one shape, in memory if they fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from tammes.lab.data import cache
from tammes.lab.data.decode import Look, Shape, decode, decode_all, reason
from tammes.lab.data.images import DataError, Images
from tammes.lab.data.listing import Entries, Items
from tammes.optional import require

_SIDE = 64
"""Side of the images where theirs differ and none is asked for."""
_SAMPLE = 256
"""Images that a shape is guessed from before all are decoded."""


@dataclass(frozen=True)
class Decoding:
    """Reads images as they are needed.

    Attributes:
        items: encoded images.
        shape: to decode to.
    """

    items: Items
    shape: Shape

    def read(self, row: int) -> Tensor:
        """The image at a row of the split."""
        try:
            _, pixels = decode(self.items.fetch(row), self.shape)
        except Exception as error:
            raise DataError(
                f"{self.items.name(row)} cannot be read ({reason(error)}); "
                "with skip_corrupt all such images are left out"
            ) from error
        return torch.from_numpy(pixels.copy())


def gather(
    source: str,
    entries: Entries,
    *,
    size: int | None,
    shape: Shape | None,
    skip_corrupt: bool,
    memory: int,
    report: Callable[[str], None],
) -> Images:
    """Decode the images of a split, or take them from the cache.

    Args:
        source: as the user named it.
        entries: the split.
        size: side of the square images; their own if they all have one, else 64.
        shape: exact shape, where it is known; goes before ``size``.
        skip_corrupt: leave out what cannot be read.
        memory: most bytes of pixels to hold; where there are more, images are read one by one.
        report: is told what the user should know.
    """
    require("PIL.Image", extra="lab")
    require("numpy", extra="lab")
    stored = _stored(entries, size, shape, skip_corrupt, memory, report)
    if stored is None:
        stored = _decode(source, entries.items, size, shape, skip_corrupt, memory, report)
        cache.write(_key(entries, shape or size), stored, report=report)
    if stored.mixed and size is None and shape is None:
        report(
            f"{source}: the images differ in size, so all are made {_SIDE}×{_SIDE}; "
            "image_size sets another"
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
        reader=Decoding(entries.items, stored.shape) if pixels is None else None,
        origin=entries.origin,
    )


def _key(entries: Entries, asked: Shape | int | None) -> str:
    return cache.key(entries.stamp, len(entries.items), asked)


def _stored(
    entries: Entries,
    size: int | None,
    shape: Shape | None,
    skip_corrupt: bool,
    memory: int,
    report: Callable[[str], None],
) -> cache.CachedImages | None:
    """What the cache has of a split, if that is all that is needed."""
    asked: list[Shape | int | None] = [shape or size]
    if shape is not None:
        # Pixels depend on the shape alone. Where the same images were loaded to train, it was not
        # known yet: they are stored under the size that was asked for, or none.
        asked += [*dict.fromkeys((size, None, shape[1]))]
    for each in asked:
        stored = cache.read(_key(entries, each), memory=memory, report=report, shape=shape)
        if stored is None or not _enough(stored, memory, skip_corrupt):
            continue
        # The shape may be another with the images that were missing, so all are decoded again.
        return None if _readable_again(entries.items, stored) else stored
    return None


def _readable_again(items: Items, stored: cache.CachedImages) -> bool:
    """Whether an image can be read that could not: a disk or a network was to blame, not it."""
    shape = stored.shape if stored.checked else None
    return any(
        isinstance(decode_all(items.fetch, [row], shape, None, processes=0)[0], Look)
        for row in stored.unreadable
    )


def _enough(stored: cache.CachedImages, memory: int, skip_corrupt: bool) -> bool:
    """Whether an entry has what is needed: the pixels, or which images can be read."""
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
        report(f"{source}: {'decoding' if full else 'looking at'} {len(rows):,} images")
        out = numpy.zeros((len(rows), *guess), dtype="uint8") if fits else None
        found = decode_all(items.fetch, rows, guess if full else None, out)
        right, mixed = _shape_of(found, size, shape)
        # Once all are seen the shape is right: where the sample misled, there is a second pass.
        if right == guess or attempt == 2:
            break
        guess = right
    return cache.CachedImages(
        shape=guess,
        rows=len(rows),
        unreadable={row: each for row, each in enumerate(found) if isinstance(each, str)},
        checked=full,
        mixed=mixed,
        pixels=None if out is None else torch.from_numpy(out),
    )


def _shape_of(found: list[Look | str], size: int | None, shape: Shape | None) -> tuple[Shape, bool]:
    """The shape for these images, and whether they differ in size."""
    # Where none can be read, any shape will do; that is an error later on.
    seen = {each for each in found if not isinstance(each, str)} or {Look(True, 1, 1)}
    mixed = len({(each.width, each.height) for each in seen}) > 1
    if shape is not None:
        return shape, mixed
    channels = 1 if all(each.grey for each in seen) else 3
    one = next(iter(seen))
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
    named = [f"{items.name(row)} ({why})" for row, why in islice(unreadable.items(), 5)]
    more = f" and {len(unreadable) - 5:,} more" if len(unreadable) > 5 else ""
    what = f"{len(unreadable):,} image{'s' if len(unreadable) > 1 else ''}"
    if not skip_corrupt or len(unreadable) == rows:
        raise DataError(
            f"{source}: {what} of {rows:,} cannot be read: {', '.join(named)}{more}"
            + ("" if len(unreadable) == rows else "; skip_corrupt leaves them out")
        )
    were = "were" if len(unreadable) > 1 else "was"
    report(f"{what} could not be read and {were} left out: {', '.join(named)}{more}")


def _check_classes(source: str, entries: Entries, kept: Tensor) -> None:
    lost = set(entries.labels.tolist()) - set(entries.labels[kept].tolist())
    if lost:
        raise DataError(f"{source}: no image of class {entries.names[min(lost)]!r} can be read")
