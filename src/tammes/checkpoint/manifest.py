"""The index of a checkpoint, ``index.json``: which tensor is in which file."""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tammes.checkpoint.safetensors_io import (
    DTYPES,
    CheckpointError,
    TensorInfo,
    atomic_write,
    checksum,
    read_header,
)

FILE = "index.json"
PART = re.compile(r"part-\d{5}-of-\d{5}-[0-9a-f]{8}\.safetensors")
_LEFT_OVER = re.compile(r"\.index\.json\.[0-9a-f]{8}")
"""Unfinished index of a process that was killed."""
_FORMAT = "tammes checkpoint 1"


@dataclass(frozen=True)
class Chunk:
    """Position of a piece in its tensor.

    Attributes:
        offset: index of its first element in the whole tensor.
        shape: shape of the piece.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class PartFile:
    """File of a checkpoint.

    Attributes:
        bytes: length of the file.
        sha256: checksum of its content.
        holds: pieces of tensors, by the names of the tensors.
    """

    bytes: int
    sha256: str
    holds: dict[str, Chunk] = field(default_factory=dict)


@dataclass
class Index:
    """Content of ``index.json``.

    Attributes:
        tammes: version that wrote it.
        head: kind, sizes and settings of the head.
        loss: terms with their settings, or ``None`` if only a head was saved.
        tensors: dtype and full shape of each tensor.
        parts: files by name.
        optimizer: groups and state of the optimizer; tensors are referred to by name.
        more: other values that were saved; tensors are referred to by name.
    """

    tammes: str
    head: dict[str, Any]
    loss: dict[str, Any] | None
    tensors: dict[str, TensorInfo]
    parts: dict[str, PartFile] = field(default_factory=dict)
    optimizer: Any = None
    more: Any = None

    def chunks(self, name: str) -> list[tuple[str, Chunk]]:
        """Pieces of a tensor with the names of their files, in the order of the rows."""
        chunks = [
            (file, part.holds[name]) for file, part in self.parts.items() if name in part.holds
        ]
        return sorted(chunks, key=lambda entry: entry[1].offset)

    def write(self, folder: Path) -> None:
        """Replace the checkpoint in the folder atomically, then remove the files of the old one."""
        content: dict[str, Any] = {"format": _FORMAT, **asdict(self)}
        content["tensors"] = {
            name: {"dtype": info.dtype, "shape": info.shape} for name, info in self.tensors.items()
        }
        content["checksum"] = _checksum(content)
        with atomic_write(folder / FILE) as file:
            file.write(json.dumps(content, indent=1).encode())
        for path in folder.iterdir():
            if _LEFT_OVER.fullmatch(path.name) or (
                PART.fullmatch(path.name) and path.name not in self.parts
            ):
                # The new checkpoint is valid even if the old files cannot be removed.
                with contextlib.suppress(OSError):
                    path.unlink()


def read(folder: Path) -> Index:
    """Read the index of a folder, without opening its other files.

    Raises:
        CheckpointError: the folder has no valid index.
    """
    path = folder / FILE
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: not a checkpoint, it has no {FILE}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: not the index of a {_FORMAT!r}")
    if content.pop("checksum", None) != _checksum(content):
        raise CheckpointError(f"{path}: damaged, its checksum does not match")
    del content["format"]
    try:
        index = Index(**_parsed(content))
        _check_complete(index)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged ({' '.join(str(error).split())})") from error
    return index


def _parsed(content: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        name: TensorInfo(entry["dtype"], tuple(entry["shape"]))
        for name, entry in content["tensors"].items()
    }
    parts = {}
    for name, entry in content["parts"].items():
        if not PART.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a part")
        holds = {
            tensor: Chunk(tuple(chunk["offset"]), tuple(chunk["shape"]))
            for tensor, chunk in entry["holds"].items()
        }
        parts[name] = PartFile(entry["bytes"], entry["sha256"], holds)
    return {**content, "tensors": tensors, "parts": parts}


def _check_complete(index: Index) -> None:
    """Raise ``ValueError`` unless the pieces make up the tensors."""
    for name, info in index.tensors.items():
        if info.dtype not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {info.dtype}")
        pieces = sum(math.prod(chunk.shape) for _, chunk in index.chunks(name))
        if pieces != math.prod(info.shape):
            raise ValueError(f"pieces of {name} are missing")


def check_parts(folder: Path, index: Index, *, rank: int = 0, world_size: int = 1) -> None:
    """Check that the files of a checkpoint are there and undamaged.

    Args:
        folder: folder of the checkpoint.
        index: its index.
        rank: rank of this process; each rank compares the checksums of its share of the files,
            and the lengths of all.
        world_size: number of ranks that divide the files among themselves.

    Raises:
        CheckpointError: a file is missing or damaged.
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
        if number % world_size == rank and checksum(folder / name) != part.sha256:
            raise CheckpointError(
                f"{folder / name}: this part of the checkpoint is damaged, "
                "its checksum does not match"
            )


def locate_chunks(
    folder: Path, index: Index
) -> dict[tuple[str, tuple[int, ...]], tuple[Path, TensorInfo]]:
    """Map tensor name and offset of each piece to its file and its entry in that file."""
    chunks = {}
    for name, part in index.parts.items():
        header, _ = read_header(folder / name)
        for tensor, chunk in part.holds.items():
            info = header.get(tensor)
            if info is None or info.shape != chunk.shape:
                raise CheckpointError(f"{folder / name}: {tensor} is not in it as the index says")
            chunks[tensor, chunk.offset] = (folder / name, info)
    return chunks


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def part_name(rank: int, world_size: int, token: str) -> str:
    """Name of a rank's file, different for every save."""
    return f"part-{rank + 1:05d}-of-{world_size:05d}-{token}.safetensors"


def shard_metadata(offsets: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Metadata for the header of a part that torch's own safetensors reader understands."""
    where = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(where)}
