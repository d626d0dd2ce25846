"""Read and write a gallery as a safetensors file, in blocks of rows."""

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tammes.checkpoint.safetensors_io import (
    CheckpointError,
    TensorInfo,
    atomic_write,
    blocks,
    byte_view,
    copy_rows,
    read_header,
    read_rows,
    write,
)
from tammes.gallery.ids import Id, pack_strings, unpack_strings
from tammes.gallery.row_blocks import RowBlocks
from tammes.gallery.templates import Templates

_FORMAT = "tammes gallery 1"


def write_gallery(
    path: str | os.PathLike[str], templates: Templates, settings: dict[str, Any]
) -> None:
    """Write a gallery to a file; an existing file is replaced only once everything is written.

    The settings are the kind of template, the digest of the model and the threshold.
    """
    small = {
        "images": torch.tensor(templates.images, dtype=torch.long),
        "lengths": torch.tensor(templates.lengths, dtype=torch.float32),
        "owners": torch.tensor(templates.owners, dtype=torch.long),
    }
    small["sources"], small["source_ends"] = pack_strings(templates.sources)
    if isinstance(templates.ids[0], str):
        small["ids"], small["id_ends"] = pack_strings([str(each) for each in templates.ids])
    else:
        small["ids"] = torch.tensor(templates.ids, dtype=torch.long)
    tensors: dict[str, Any] = {
        name: (TensorInfo.from_tensor(tensor), blocks(tensor)) for name, tensor in small.items()
    }
    shape = (len(templates.rows), templates.rows.size)
    tensors["rows"] = (TensorInfo("F32", shape), templates.rows.blocks())
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": _FORMAT, "gallery": json.dumps(settings)}
    with atomic_write(Path(path)) as file:
        write(file, tensors, metadata)


def read_gallery(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[Templates, dict[str, Any]]:
    """Read templates and settings from a file.

    Raises:
        CheckpointError: the file is missing, damaged, or not a gallery.
    """
    file = Path(path)
    entries, metadata = read_header(file)
    if metadata.get("format") != _FORMAT:
        got = metadata.get("format", "a safetensors file without its mark")
        raise CheckpointError(f"{file}: a gallery ({_FORMAT}) is expected, got {got}")
    try:
        return _read(file, entries, json.loads(metadata["gallery"]), device)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: the gallery is damaged ({error})") from error


def _read(
    path: Path, entries: dict[str, TensorInfo], settings: dict[str, Any], device: Any
) -> tuple[Templates, dict[str, Any]]:
    missing = {"template", "model", "accept_at"} - {*settings}
    if missing or settings["template"] not in ("mean", "nearest"):
        raise ValueError("its settings are incomplete or wrong")
    with open(path, "rb") as file:

        def whole(name: str) -> Tensor:
            return read_rows(file, entries[name], 0, entries[name].rows)

        count, size = entries["rows"].shape
        rows = RowBlocks(size, device)
        rows.extend(count)
        for number, block in enumerate(rows.blocks()):
            copy_rows(file, entries["rows"], number * rows.step, block)
            if not bool(block.sum(dtype=torch.double).isfinite()):
                raise ValueError("it holds NaN or infinity")
        sources = unpack_strings(whole("sources"), whole("source_ends"))
        if "id_ends" in entries:
            ids: Sequence[Id] = unpack_strings(whole("ids"), whole("id_ends"))
        else:
            ids = whole("ids").tolist()
        stored = Templates(
            settings["template"],
            rows,
            list(ids),
            _array("q", whole("images")),
            _array("f", whole("lengths")),
            _array("q", whole("owners")),
            sources,
        )
    _check(stored)
    return stored, settings


def _check(stored: Templates) -> None:
    """Raise ``ValueError`` if the parts of a gallery are inconsistent."""
    rows, identities = len(stored.rows), len(stored.ids)
    mean = stored.kind == "mean"
    expected = {
        "sources": (len(stored.sources), rows),
        "images": (len(stored.images), identities),
        "lengths": (len(stored.lengths), identities if mean else 0),
        "owners": (len(stored.owners), 0 if mean else rows),
        "rows": (rows, identities if mean else sum(stored.images)),
        "different ids": (len(set(stored.ids)), identities),
        "ids": (min(identities, 1), 1),
        "dimensions": (min(stored.rows.size, 1), 1),
    }
    for name, (got, wanted) in expected.items():
        if got != wanted:
            raise ValueError(f"{wanted} {name} are expected, got {got}")
    if stored.owners and not 0 <= min(stored.owners) <= max(stored.owners) < identities:
        raise ValueError("a row belongs to no identity")


def _array(kind: str, values: Tensor) -> "array[Any]":
    filled = array(kind)
    filled.frombytes(byte_view(values))
    return filled
