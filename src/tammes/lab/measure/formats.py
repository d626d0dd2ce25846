"""Read the arrays of a file by key, in the supported formats."""

import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tammes.lab.records.run_folder import Run
from tammes.optional import require


class FileError(ValueError):
    """A file cannot be used; the message is one sentence that names it."""


def load(path: Path, columns: Collection[str]) -> dict[str, Any]:
    """Load all arrays of a file, by key; raises FileError in one sentence that names the file.

    The suffix of the file gives its format; a folder is that of a finished run. Only the
    ``columns`` of a table are read, as it may hold images too; if it has none of them, all column
    names are returned without values. Nested keys are joined by a dot. The key of a single array is
    the name of the file.
    """
    if path.is_dir():
        return _read_run(path)
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise FileError(
            f"{path}: files of {', '.join(_READERS)} can be read, got {suffix or 'no suffix'}"
        )
    if not path.exists():
        raise FileError(f"{path}: there is no such file")
    if not path.is_file():
        raise FileError(f"{path}: this is not a file")
    try:
        arrays = _READERS[suffix](path, columns)
    except (FileError, ImportError):
        raise
    except Exception as error:
        # Readers raise many types of errors, some with long messages: keep the first line.
        message = str(error).strip().split("\n")[0].rstrip(".:;")
        if suffix in (".pt", ".pth") and "weights_only" in str(error).lower().replace(" ", "_"):
            message = "it holds more than tensors, and only weights are loaded"
        reason = f"{type(error).__name__}: {message[:160]}" if message else type(error).__name__
        raise FileError(f"{path}: damaged, or not a {suffix} file ({reason})") from error
    return arrays


def _read_run(path: Path) -> dict[str, Any]:
    """Read prototypes, test embeddings, labels and class names of a finished run."""
    run = Run(path)
    if run.status != "done":
        state = "the run is not finished" if (path / "config.json").exists() else "it is no run"
        raise FileError(f"{path}: a file or the folder of a finished run is expected, {state}")
    embeddings = run.tensors("embeddings")
    arrays: dict[str, Any] = {key: embeddings[key] for key in ("features", "labels")}
    if "identities" in run.data:
        # The test identities are not the classes of the prototypes.
        return arrays | {"class_names": run.data["identities"]}
    prototypes = run.tensors("prototypes")["prototypes"]
    return arrays | {"prototypes": prototypes, "class_names": run.data["classes"]}


def scale_of_run(path: Path) -> float | None:
    """Return the scale of the cosine head of a run; None for another head or another file."""
    if not path.is_dir() or not str(Run(path).environment["head"]).startswith("cosine"):
        return None
    return float(Run(path).tensors("prototypes")["scale"])


def _read_npz(path: Path, columns: Collection[str]) -> dict[str, Any]:
    numpy = require("numpy", extra="lab")
    if not zipfile.is_zipfile(path):
        raise FileError(f"{path}: damaged, or not a .npz file (it is no zip archive)")
    with numpy.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def _read_npy(path: Path, columns: Collection[str]) -> dict[str, Any]:
    return {path.stem: require("numpy", extra="lab").load(path, allow_pickle=False)}


def _read_safetensors(path: Path, columns: Collection[str]) -> dict[str, Any]:
    loaded: dict[str, Any] = require("safetensors.torch", extra="lab").load_file(path)
    return loaded


def _read_torch(path: Path, columns: Collection[str]) -> dict[str, Any]:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, Mapping):
        return dict(_flatten(loaded, ""))
    return {path.stem: loaded}


def _flatten(tree: Mapping[Any, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _read_parquet(path: Path, columns: Collection[str]) -> dict[str, Any]:
    parquet = require("pyarrow.parquet", extra="lab")
    with parquet.ParquetFile(path) as file:
        present = [name for name in file.schema_arrow.names if name in columns]
        if not present:
            return dict.fromkeys(file.schema_arrow.names)
        table = file.read(columns=present)
    return {name: _column(path, name, table.column(name)) for name in present}


def _column(path: Path, name: str, chunked: Any) -> Any:
    """Convert a column to an array, or to a list of strings."""
    types = require("pyarrow.types", extra="lab")
    if chunked.null_count:
        raise FileError(f"{path}: column {name!r} has {chunked.null_count} empty rows")
    if types.is_dictionary(chunked.type):
        chunked = chunked.cast(chunked.type.value_type)
    if types.is_string(chunked.type) or types.is_large_string(chunked.type):
        return chunked.to_pylist()
    column = chunked.combine_chunks()
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if not any(is_list(column.type) for is_list in lists):
        return column.to_numpy(zero_copy_only=False, writable=True)
    lengths = set(require("pyarrow.compute", extra="lab").list_value_length(column).to_pylist())
    if len(lengths) != 1:
        raise FileError(f"{path}: the rows of column {name!r} have different lengths")
    return column.flatten().to_numpy(zero_copy_only=False, writable=True).reshape(len(column), -1)


_READERS: dict[str, Callable[[Path, Collection[str]], dict[str, Any]]] = {
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".parquet": _read_parquet,
}
