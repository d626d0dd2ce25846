"""Tensors in safetensors files, written and read by blocks of rows, with torch alone.

The format is eight bytes for the length of a header, a header in JSON, and the numbers. Nothing in
it can be run, and a row can be read without the rest.
"""

import contextlib
import ctypes
import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 1 << 24
"""Bytes that are in memory at once while a tensor is written or read."""
_LARGEST = 100_000_000
"""Bytes of a header that the format allows."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one sentence that names the file."""


class Stored(NamedTuple):
    """A tensor in a file, or one that is to be written.

    Attributes:
        dtype: as the format calls it, such as ``"F32"``.
        shape: sizes.
        begin: where in the file its first byte is.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def rows(self) -> int:
        """Length of the first dimension; a single number is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return torch.Size(self.shape[1:]).numel() * DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "Stored":
        """What a tensor will be in a file."""
        if tensor.dtype not in NAMES:
            raise TypeError(f"a checkpoint cannot hold tensors of {tensor.dtype}")
        return cls(NAMES[tensor.dtype], tuple(tensor.shape))


class Written(NamedTuple):
    """A file that was written: how long it is, and a checksum of what it holds."""

    bytes: int
    sha256: str


def write(
    file: IO[bytes],
    tensors: Mapping[str, tuple[Stored, Iterable[Tensor]]],
    metadata: Mapping[str, str],
) -> Written:
    """Write tensors to a file.

    Args:
        file: open and empty.
        tensors: what each will be, and its rows in blocks, which are asked for only when their turn
            comes.
        metadata: texts for the header.
    """
    # Wide numbers first, so that each begins at a multiple of its size.
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0].dtype].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        stored = tensors[name][0]
        begin, end = end, end + stored.rows * stored.row_bytes
        header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, length = hashlib.sha256(), 0

    def put(data: Any) -> None:
        nonlocal length
        file.write(data)
        digest.update(data)
        length += len(data)

    put(len(text).to_bytes(8, "little"))
    put(text)
    for name in order:
        for block in tensors[name][1]:
            # Has to be held: its memory does not know whose it is.
            held = block.detach().cpu().contiguous()
            put(_memory(held))
    file.flush()
    os.fsync(file.fileno())
    assert length == 8 + len(text) + end
    return Written(length, digest.hexdigest())


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The rows of a tensor in memory, some at a time."""
    if tensor.ndim == 0:
        yield tensor
        return
    step = _step(Stored.of(tensor))
    for first in range(0, len(tensor), step):
        yield tensor[first : first + step]


def stored_blocks(path: Path, stored: Stored) -> Iterator[Tensor]:
    """The rows of a tensor in a file, some at a time."""
    with open(path, "rb") as file:
        step = _step(stored)
        for first in range(0, stored.rows, step):
            yield read_rows(file, stored, first, min(first + step, stored.rows))


def copy_rows(file: IO[bytes], stored: Stored, first: int, into: Tensor) -> None:
    """Fill a tensor with rows of a file, from row ``first`` on; its other sizes are the same."""
    if into.ndim == 0:
        into.copy_(read_rows(file, stored, 0, 1).reshape(()))
        return
    step = _step(stored)
    for begin in range(0, len(into), step):
        end = min(begin + step, len(into))
        into[begin:end].copy_(read_rows(file, stored, first + begin, first + end))


def read_rows(file: IO[bytes], stored: Stored, first: int, last: int) -> Tensor:
    """Some rows of a tensor in a file, shape ``(last - first, ...)``."""
    rows = torch.empty((last - first, *stored.shape[1:]), dtype=DTYPES[stored.dtype])
    file.seek(stored.begin + first * stored.row_bytes)
    memory, done = _memory(rows), 0
    assert isinstance(file, io.BufferedIOBase)
    while done < len(memory):
        got = file.readinto(memory[done:])
        if not got:
            raise CheckpointError(f"{file.name}: the file ends too early")
        done += got
    return rows


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """What a file holds, by name, and the texts of its header.

    Raises:
        CheckpointError: one sentence that names the file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST, size - 8):
                raise ValueError("its header is missing or cut off")
            header = json.loads(file.read(length))
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        found = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            stored = Stored(entry["dtype"], tuple(map(int, entry["shape"])), 8 + length + begin)
            if stored.dtype not in DTYPES:
                raise ValueError(f"{name} is of the unknown type {stored.dtype}")
            if min(stored.shape, default=0) < 0 or begin < 0:
                raise ValueError(f"{name} has a negative size")
            if end - begin != stored.rows * stored.row_bytes or 8 + length + end > size:
                raise ValueError(f"{name} is cut off")
            found[name] = stored
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: damaged, or no safetensors file ({' '.join(str(error).split())[:160]})"
        ) from error
    return found, metadata


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes its place when all is written, or leaves the old one."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            # Only what has reached the disk may take the place of what was there.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _step(stored: Stored) -> int:
    return max(_BLOCK // max(stored.row_bytes, 1), 1)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in place: numpy, which could give them, is not needed."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
