"""Decoded images on disk, so that they are decoded once.

An entry is a small ``KEY.json``, written last, and ``KEY-0.safetensors`` and so on with the pixels;
each part has its checksum in the former. An entry that is damaged is as good as none. All of it can
be deleted at any time. What a process left behind that was killed while it wrote is deleted by the
next one that writes, a day later.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tammes.lab.records.atomic_io import write_atomically
from tammes.optional import require

VERSION = 1
"""Changes when the same images would be decoded to other pixels."""
_PART = 256 << 20
"""Bytes of a part: what is held twice while it is written."""
_DAY = 24 * 60 * 60
"""Seconds after which nobody is still writing a file."""
_OURS = re.compile(r"(\.?)([0-9a-f]{32})(-\d+\.safetensors|\.json)(\.[0-9a-f]{8})?")
"""Names of our files; with a dot in front and letters behind while one is being written."""


@dataclass(frozen=True, eq=False)
class CachedImages:
    """What is known of the images of a split.

    Attributes:
        shape: of every image.
        rows: how many there are, with those that cannot be read.
        unreadable: why, for each row that cannot be read.
        checked: every image was decoded, not only looked at.
        mixed: they were of different sizes.
        pixels: uint8 ``(rows, *shape)``, 0 where an image cannot be read; None if not stored.
    """

    shape: tuple[int, int, int]
    rows: int
    unreadable: dict[int, str]
    checked: bool
    mixed: bool
    pixels: Tensor | None


def folder() -> Path:
    """Where the cache is: ``$TAMMES_CACHE``, or ``~/.cache/tammes``."""
    given = os.environ.get("TAMMES_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tammes"


def key(*parts: Any) -> str:
    """The name of an entry."""
    text = repr((VERSION, *parts)).encode("utf-8", "backslashreplace")
    return hashlib.sha256(text).hexdigest()[:32]


def read(
    name: str,
    *,
    memory: int,
    report: Callable[[str], None],
    shape: tuple[int, int, int] | None = None,
) -> CachedImages | None:
    """An entry, if there is a sound one.

    Args:
        name: its key.
        memory: most bytes of pixels to read; where there are more, they are left where they are.
        report: is told where an entry is damaged.
        shape: of the images that are wanted; an entry of another is none.
    """
    path = folder() / f"{name}.json"
    try:
        text = path.read_bytes()
    except OSError:
        return None
    try:
        header = json.loads(text)
        if header.pop("checksum") != _checksum(_plain(header)):
            raise ValueError("checksum")
        own = (int(header["shape"][0]), int(header["shape"][1]), int(header["shape"][2]))
        if shape is not None and own != shape:
            return None
        rows, parts = int(header["rows"]), header["parts"]
        pixels = None
        if parts and rows * own[0] * own[1] * own[2] <= memory:
            pixels = torch.empty((rows, *own), dtype=torch.uint8)
            for part, (start, stop) in enumerate(_parts(rows, own)):
                pixels[start:stop] = _read_part(_part_path(name, part), parts[part])
        return CachedImages(
            shape=own,
            rows=rows,
            unreadable={int(row): str(why) for row, why in header["unreadable"]},
            checked=bool(header["checked"]),
            mixed=bool(header["mixed"]),
            pixels=pixels,
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError):
        report(f"{path}: the cached images are damaged, they are decoded again")
        return None


def write(name: str, stored: CachedImages, *, report: Callable[[str], None]) -> None:
    """Store an entry; where that is not possible, say so and go on."""
    safetensors = require("safetensors.torch", extra="lab")
    _clear_leftovers()
    try:
        checksums = []
        if stored.pixels is not None:
            for part, (start, stop) in enumerate(_parts(stored.rows, stored.shape)):
                data = safetensors.save({"pixels": stored.pixels[start:stop].contiguous()})
                checksums.append(_checksum(data))
                write_atomically(_part_path(name, part), data)
        header = {
            "shape": stored.shape,
            "rows": stored.rows,
            "unreadable": list(stored.unreadable.items()),
            "checked": stored.checked,
            "mixed": stored.mixed,
            "parts": checksums,
        }
        header["checksum"] = _checksum(_plain(header))
        write_atomically(folder() / f"{name}.json", _plain(header))
    except OSError as error:
        why = error.strerror or type(error).__name__
        report(f"{folder()}: decoded images cannot be stored there ({why}), going on without")


def _clear_leftovers() -> None:
    """Delete what killed processes left: half a file, or parts of an entry without its header."""
    # Whatever goes wrong here is no reason not to store an entry.
    with contextlib.suppress(OSError):
        files = [(path, _OURS.fullmatch(path.name)) for path in folder().iterdir()]
        headers = {path.name for path, _ in files}
        for path, ours in files:
            if ours is None:
                continue
            dot, name, _, unfinished = ours.groups()
            if bool(dot) != bool(unfinished) or (not dot and f"{name}.json" in headers):
                continue
            with contextlib.suppress(OSError):
                # Another process may be at work on younger ones.
                if time.time() - path.stat().st_mtime > _DAY:
                    path.unlink()


def _parts(rows: int, shape: tuple[int, int, int]) -> Iterator[tuple[int, int]]:
    size = max(1, _PART // (shape[0] * shape[1] * shape[2]))
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


def _part_path(name: str, part: int) -> Path:
    return folder() / f"{name}-{part}.safetensors"


def _read_part(path: Path, checksum: str) -> Tensor:
    data = path.read_bytes()
    if _checksum(data) != checksum:
        raise ValueError("checksum")
    pixels: Tensor = require("safetensors.torch", extra="lab").load(data)["pixels"]
    return pixels


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _plain(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()
