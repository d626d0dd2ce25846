"""Cache of decoded images on disk.

An entry is a small ``KEY.json``, written last, and ``KEY-0.safetensors`` and so on with the pixels,
whose checksums are in the JSON file. A damaged entry is ignored. The cache can be deleted at any
time. Leftovers of killed processes are deleted by the next write after a day.
"""

import contextlib
import hashlib
import json
import math
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
"""Increased when decoding gives different pixels for the same images."""
_PART = 256 << 20
"""Size of a part in bytes; a part is held in memory twice while it is written."""
_DAY = 24 * 60 * 60
"""Age in seconds after which no process is assumed to be still writing a file."""
_OURS = re.compile(r"(\.?)([0-9a-f]{32})(-\d+\.safetensors|\.json)(\.[0-9a-f]{8})?")
"""Names of cache files, and of the temporary files of :func:`.write_atomically`."""


@dataclass(frozen=True, eq=False)
class CachedImages:
    """Decoded images of a partition.

    Attributes:
        rows: number of images, including unreadable ones.
        unreadable: reason for each unreadable row.
        checked: whether every image was decoded, not only its header.
        mixed: whether the sizes differed.
        pixels: uint8 ``(rows, *shape)``, 0 for unreadable images; None if not stored.
    """

    shape: tuple[int, int, int]
    rows: int
    unreadable: dict[int, str]
    checked: bool
    mixed: bool
    pixels: Tensor | None


def folder() -> Path:
    """Return the folder of the cache: ``$TAMMES_CACHE``, or ``~/.cache/tammes``."""
    chosen = os.environ.get("TAMMES_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tammes"


def key(*parts: Any) -> str:
    """Return the key of an entry."""
    text = repr((VERSION, *parts)).encode("utf-8", "backslashreplace")
    return hashlib.sha256(text).hexdigest()[:32]


def read(
    name: str,
    *,
    memory: int,
    report: Callable[[str], None],
    shape: tuple[int, int, int] | None = None,
) -> CachedImages | None:
    """Read an entry by its key; None if there is no intact one, or if it has another shape.

    Pixels of more than ``memory`` bytes are not read.
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
        channels, height, width = header["shape"]
        own = (channels, height, width)
        if shape is not None and own != shape:
            return None
        rows, parts = header["rows"], header["parts"]
        pixels = None
        if parts and rows * math.prod(own) <= memory:
            pixels = torch.empty((rows, *own), dtype=torch.uint8)
            for part, (start, stop) in enumerate(_parts(rows, own)):
                data = _part_path(name, part).read_bytes()
                if _checksum(data) != parts[part]:
                    raise ValueError("checksum")
                loaded = require("safetensors.torch", extra="lab").load(data)
                pixels[start:stop] = loaded["pixels"]
        unreadable = dict(header["unreadable"])
        return CachedImages(own, rows, unreadable, header["checked"], header["mixed"], pixels)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError):
        report(f"{path}: the cached images are damaged and are decoded again")
        return None


def write(name: str, stored: CachedImages, *, report: Callable[[str], None]) -> None:
    """Write an entry; a failure is reported, not raised."""
    safetensors = require("safetensors.torch", extra="lab")
    _clear_leftovers()
    try:
        checksums = []
        if stored.pixels is not None:
            for part, (start, stop) in enumerate(_parts(stored.rows, stored.shape)):
                data = safetensors.save({"pixels": stored.pixels[start:stop].contiguous()})
                checksums.append(_checksum(data))
                write_atomically(_part_path(name, part), data)
        header = {**vars(stored), "unreadable": [*stored.unreadable.items()], "parts": checksums}
        del header["pixels"]
        header["checksum"] = _checksum(_plain(header))
        write_atomically(folder() / f"{name}.json", _plain(header))
    except OSError as error:
        why = error.strerror or type(error).__name__
        report(f"{folder()}: decoded images cannot be stored there ({why}), continuing without")


def _clear_leftovers() -> None:
    """Delete leftovers of killed processes: temporary files, and parts without a header."""
    # An error here must not prevent writing an entry.
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
                # Another process may still be writing newer files.
                if time.time() - path.stat().st_mtime > _DAY:
                    path.unlink()


def _parts(rows: int, shape: tuple[int, int, int]) -> Iterator[tuple[int, int]]:
    size = max(1, _PART // math.prod(shape))
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


def _part_path(name: str, part: int) -> Path:
    return folder() / f"{name}-{part}.safetensors"


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _plain(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()
