"""What is where in a checkpoint: ``index.json``, which makes a folder of files one thing."""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tammes.checkpoint.safetensors_io import (
    DTYPES,
    CheckpointError,
    Stored,
    checksum,
    read_header,
    replacing,
)

FILE = "index.json"
PART = re.compile(r"part-\d{5}-of-\d{5}-[0-9a-f]{8}\.safetensors")
_LEFT_OVER = re.compile(r"\.index\.json\.[0-9a-f]{8}")
"""What a process that was killed had begun to write."""
_FORMAT = "tammes checkpoint 1"


class Chunk(NamedTuple):
    """Where a piece of a tensor belongs.

    Attributes:
        offset: place of its first element in the whole tensor.
        shape: of the piece.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Part:
    """A file of a checkpoint.

    Attributes:
        bytes: how long it is.
        sha256: of what it holds.
        holds: pieces of tensors, by their names.
    """

    bytes: int
    sha256: str
    holds: dict[str, Chunk] = field(default_factory=dict)


@dataclass
class Index:
    """What ``index.json`` says.

    Attributes:
        tammes: version that wrote it.
        head: kind, sizes and settings of the head.
        loss: terms with their settings, or none where only a head was saved.
        tensors: type and whole shape of each tensor.
        parts: the files, by name.
        optimizer: groups and state; tensors are named.
        more: what was saved beside; tensors are named.
    """

    tammes: str
    head: dict[str, Any]
    loss: dict[str, Any] | None
    tensors: dict[str, Stored]
    parts: dict[str, Part] = field(default_factory=dict)
    optimizer: Any = None
    more: Any = None

    def chunks(self, name: str) -> list[tuple[str, Chunk]]:
        """The pieces of a tensor and the files they are in, in the order of their rows."""
        found = [
            (file, part.holds[name]) for file, part in self.parts.items() if name in part.holds
        ]
        return sorted(found, key=lambda entry: entry[1].offset)

    def write(self, folder: Path) -> None:
        """Make the folder this checkpoint, in one step; files of the one before go after it."""
        content: dict[str, Any] = {"format": _FORMAT, **asdict(self)}
        content["tensors"] = {
            name: {"dtype": stored.dtype, "shape": stored.shape}
            for name, stored in self.tensors.items()
        }
        for part in content["parts"].values():
            part["holds"] = {
                name: {"offset": chunk[0], "shape": chunk[1]}
                for name, chunk in part["holds"].items()
            }
        content["checksum"] = _checksum(content)
        with replacing(folder / FILE) as file:
            file.write(json.dumps(content, indent=1).encode())
        for path in folder.iterdir():
            if _LEFT_OVER.fullmatch(path.name) or (
                PART.fullmatch(path.name) and path.name not in self.parts
            ):
                # The new checkpoint is there, whether the old one can be taken away or not.
                with contextlib.suppress(OSError):
                    path.unlink()


def read(folder: Path) -> Index:
    """What a folder holds; its files are not looked at yet.

    Raises:
        CheckpointError: one sentence that names the folder.
    """
    path = folder / FILE
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: this is no checkpoint, it has no {FILE}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: this is not the index of a {_FORMAT!r}")
    if content.pop("checksum", None) != _checksum(content):
        raise CheckpointError(f"{path}: damaged, its checksum does not match")
    del content["format"]
    try:
        index = Index(**_parsed(content))
        _check_whole(index)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged ({' '.join(str(error).split())})") from error
    return index


def _parsed(content: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        name: Stored(entry["dtype"], tuple(entry["shape"]))
        for name, entry in content["tensors"].items()
    }
    parts = {}
    for name, entry in content["parts"].items():
        if not PART.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a part")
        holds = {
            held: Chunk(tuple(chunk["offset"]), tuple(chunk["shape"]))
            for held, chunk in entry["holds"].items()
        }
        parts[name] = Part(entry["bytes"], entry["sha256"], holds)
    return {**content, "tensors": tensors, "parts": parts}


def _check_whole(index: Index) -> None:
    """Refuse an index whose pieces do not make up its tensors."""
    for name, stored in index.tensors.items():
        if stored.dtype not in DTYPES:
            raise ValueError(f"{name} is of the unknown type {stored.dtype}")
        pieces = sum(math.prod(chunk.shape) for _, chunk in index.chunks(name))
        if pieces != math.prod(stored.shape):
            raise ValueError(f"pieces of {name} are missing")


def check_parts(folder: Path, index: Index, *, share: int = 0, of: int = 1) -> None:
    """Refuse files that are missing or not what was written.

    Args:
        folder: of the checkpoint.
        index: its index.
        share: which of the files are read through; of the others the length is looked at.
        of: into how many shares the reading is divided.

    Raises:
        CheckpointError: one sentence that names the file.
    """
    for name, part in index.parts.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: this part of the checkpoint is missing")
        size = path.stat().st_size
        if size != part.bytes:
            raise CheckpointError(
                f"{path}: this part of the checkpoint is damaged, "
                f"it has {size} bytes of {part.bytes}"
            )
    for number, (name, part) in enumerate(index.parts.items()):
        if number % of == share and checksum(folder / name) != part.sha256:
            raise CheckpointError(
                f"{folder / name}: this part of the checkpoint is damaged, "
                "its checksum does not match"
            )


def places(folder: Path, index: Index) -> dict[tuple[str, tuple[int, ...]], tuple[Path, Stored]]:
    """Where each piece is: by name of the tensor and offset, its file and what it is there."""
    found = {}
    for name, part in index.parts.items():
        header, _ = read_header(folder / name)
        for held, chunk in part.holds.items():
            stored = header.get(held)
            if stored is None or stored.shape != chunk.shape:
                raise CheckpointError(f"{folder / name}: {held} is not in it as the index says")
            found[held, chunk.offset] = (folder / name, stored)
    return found


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def part_name(rank: int, ranks: int, token: str) -> str:
    """Name of a rank's file; no two saves have one in common."""
    return f"part-{rank + 1:05d}-of-{ranks:05d}-{token}.safetensors"


def shard_metadata(offsets: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """What the header of a part says, so that torch's own reader of safetensors knows it too."""
    where = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(where)}
