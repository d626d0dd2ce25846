"""Read and write safetensors files by blocks of rows, with torch alone.

The format is eight bytes for the length of a header, a header in JSON, and the data. It contains no
code, and a row can be read without the rest.
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
"""Bytes held in memory at once while a tensor is written or read."""
_LARGEST = 100_000_000
"""Largest header that the format allows, in bytes."""


class CheckpointError(ValueError):
    """Raised when a checkpoint cannot be used; the message names the file."""


class TensorInfo(NamedTuple):
    """Entry of a tensor in the header of a file.

    Attributes:
        dtype: name of the dtype in the format, such as ``"F32"``.
        shape: shape of the tensor.
        begin: position of its first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return torch.Size(self.shape[1:]).numel() * DTYPES[self.dtype].itemsize

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "TensorInfo":
        """Entry for a tensor that is to be written."""
        if tensor.dtype not in NAMES:
            raise TypeError(f"a checkpoint cannot hold tensors of {tensor.dtype}")
        return cls(NAMES[tensor.dtype], tuple(tensor.shape))


class WrittenFile(NamedTuple):
    """Length and checksum of a file that was written."""

    bytes: int
    sha256: str


def write(
    file: IO[bytes],
    tensors: Mapping[str, tuple[TensorInfo, Iterable[Tensor]]],
    metadata: Mapping[str, str],
) -> WrittenFile:
    """Write tensors to a file.

    Args:
        file: an open, empty file.
        tensors: entry and rows of each tensor; the rows come in blocks, which are produced lazily.
        metadata: strings for the header.
    """
    # Wide dtypes first, so that every tensor is aligned to its item size.
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0].dtype].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        info = tensors[name][0]
        begin, end = end, end + info.rows * info.row_bytes
        header[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
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
            # Keep a reference: the memoryview does not own the memory.
            contiguous = block.detach().cpu().contiguous()
            put(byte_view(contiguous))
    file.flush()
    os.fsync(file.fileno())
    assert length == 8 + len(text) + end
    return WrittenFile(length, digest.hexdigest())


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a tensor in blocks."""
    if tensor.ndim == 0:
        yield tensor
        return
    step = _step(TensorInfo.from_tensor(tensor))
    for first in range(0, len(tensor), step):
        yield tensor[first : first + step]


def read_blocks(path: Path, info: TensorInfo) -> Iterator[Tensor]:
    """Yield the rows of a tensor in a file in blocks."""
    with open(path, "rb") as file:
        step = _step(info)
        for first in range(0, info.rows, step):
            yield read_rows(file, info, first, min(first + step, info.rows))


def copy_rows(file: IO[bytes], info: TensorInfo, first: int, target: Tensor) -> None:
    """Fill ``target`` with the rows of a tensor in a file, from row ``first`` on."""
    if target.ndim == 0:
        target.copy_(read_rows(file, info, 0, 1).reshape(()))
        return
    step = _step(info)
    for begin in range(0, len(target), step):
        end = min(begin + step, len(target))
        target[begin:end].copy_(read_rows(file, info, first + begin, first + end))


def read_rows(file: IO[bytes], info: TensorInfo, first: int, last: int) -> Tensor:
    """Read rows of a tensor in a file, shape ``(last - first, ...)``."""
    rows = torch.empty((last - first, *info.shape[1:]), dtype=DTYPES[info.dtype])
    file.seek(info.begin + first * info.row_bytes)
    memory, done = byte_view(rows), 0
    assert isinstance(file, io.BufferedIOBase)
    while done < len(memory):
        got = file.readinto(memory[done:])
        if not got:
            raise CheckpointError(f"{file.name}: the file ends too early")
        done += got
    return rows


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read the entries of the tensors in a file, and the metadata of its header.

    Raises:
        CheckpointError: the file is missing, damaged, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST, size - 8):
                raise ValueError("its header is missing or cut off")
            header = json.loads(file.read(length))
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        entries = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            info = TensorInfo(entry["dtype"], tuple(map(int, entry["shape"])), 8 + length + begin)
            if info.dtype not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {info.dtype}")
            if min(info.shape, default=0) < 0 or begin < 0:
                raise ValueError(f"{name} has a negative size")
            if end - begin != info.rows * info.row_bytes or 8 + length + end > size:
                raise ValueError(f"{name} is cut off")
            entries[name] = info
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (IsADirectoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: damaged, or not a safetensors file ({' '.join(str(error).split())[:160]})"
        ) from error
    return entries, metadata


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces ``path`` only if everything was written."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            # The data must be on disk before it replaces the old file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _step(info: TensorInfo) -> int:
    return max(_BLOCK // max(info.row_bytes, 1), 1)


def byte_view(tensor: Tensor) -> memoryview:
    """View of the bytes of a CPU tensor, without numpy."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
