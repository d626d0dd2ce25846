"""Parquet files in the layout of Hugging Face ``datasets``, read with pyarrow alone."""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tammes.lab.data.images import DataError
from tammes.lab.data.listing import (
    EVERYTHING,
    Entries,
    Partitions,
    hash_of,
    image_column,
    read_labels,
)
from tammes.lab.data.sources.folder import PARTITION_WORDS
from tammes.optional import require

_KEPT = 256 << 20
"""Largest number of bytes of encoded images that a process caches."""


class ParquetImages:
    """Images in a column of parquet files.

    Row groups are read as a whole, and recent ones are cached: all of them if the set is small.
    ``rows`` has the row of each image, counted over all files.
    """

    def __init__(self, paths: Sequence[str], column: str, rows: Tensor) -> None:
        self.paths, self.column, self.rows = tuple(paths), column, rows
        self.groups: list[tuple[int, int]] = []
        starts = [0]
        self.first: list[int] = []
        for number, path in enumerate(self.paths):
            self.first.append(starts[-1])
            metadata = open_parquet(path).metadata
            for group in range(metadata.num_row_groups):
                self.groups.append((number, group))
                starts.append(starts[-1] + metadata.row_group(group).num_rows)
        self.starts = torch.tensor(starts)
        self._clear_cache()

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("paths", "column", "rows", "groups", "starts", "first")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear_cache()

    def _clear_cache(self) -> None:
        self.files: dict[int, Any] = {}
        self.kept: OrderedDict[int, Any] = OrderedDict()
        self.bytes = 0
        self.process = os.getpid()

    def fetch(self, row: int) -> bytes | str:
        """Return the bytes of an image, or the path of its file if the table has only that."""
        if self.process != os.getpid():
            # Open files do not survive a fork.
            self._clear_cache()
        position = int(self.rows[row])
        number = int(torch.searchsorted(self.starts, position, right=True)) - 1
        value: Any = self._group(number)[position - int(self.starts[number])].as_py()
        path = None
        if isinstance(value, dict):
            path, value = value.get("path"), value.get("bytes")
        if value is not None:
            return bytes(value)
        # Empty bytes will be reported as unreadable.
        folder = os.path.dirname(self.paths[self.groups[number][0]])
        return os.path.join(folder, path) if path else b""

    def _group(self, number: int) -> Any:
        if number in self.kept:
            self.kept.move_to_end(number)
            return self.kept[number]
        file, group = self.groups[number]
        if file not in self.files:
            self.files[file] = open_parquet(self.paths[file])
        table = self.files[file].read_row_group(group, columns=[self.column], use_threads=False)
        column = table.column(self.column)
        self.kept[number] = column
        self.bytes += column.nbytes
        while self.bytes > _KEPT and len(self.kept) > 1:
            self.bytes -= self.kept.popitem(last=False)[1].nbytes
        return column

    def name(self, row: int) -> str:
        """Return the file and row of an image."""
        position = int(self.rows[row])
        number = next(n for n in reversed(range(len(self.paths))) if self.first[n] <= position)
        return f"{self.paths[number]} row {position - self.first[number]}"


def partitions(
    paths: Sequence[Path], *, root: Path | None, report: Callable[[str], None]
) -> Partitions:
    """Return the partitions of parquet files: by file name, or else by a column.

    Subfolders of ``root``, the folder of the files, may name partitions too; None is for a single
    file, whose name does not matter.
    """
    groups: dict[str, list[Path]] = {}
    for path in sorted(paths):
        groups.setdefault(EVERYTHING if root is None else _partition_of(path, root), []).append(
            path
        )
    if set(groups) == {EVERYTHING}:
        return _by_column(groups[EVERYTHING])
    left = groups.pop(EVERYTHING, [])
    if left:
        report(
            f"left out, as the name contains no partition: {', '.join(path.name for path in left)}"
        )
    return {
        name: lambda some=some: _entries(some, None)  # type: ignore[misc]
        for name, some in groups.items()
    }


def _partition_of(path: Path, root: Path) -> str:
    # The hub names the shards of a split SPLIT-00000-of-00002.
    shard = re.fullmatch(r"(\w+)-\d+-of-\d+.*", path.stem)
    if shard:
        return shard[1].lower()
    below = path.relative_to(root).parts if path.is_relative_to(root) else (path.name,)
    for part in reversed((*below[:-1], path.stem)):
        words = [word for word in re.split(r"[\W_]+", part.lower()) if word in PARTITION_WORDS]
        if words:
            return words[0]
    return EVERYTHING


def _by_column(paths: list[Path]) -> Partitions:
    """Return partitions named by a column such as ``split`` or ``official_split``."""
    schema = open_parquet(paths[0]).schema_arrow
    types = require("pyarrow.types", extra="lab")
    named: dict[str, Callable[[], Entries]] = {EVERYTHING: lambda: _entries(paths, None)}
    for column in schema.names:
        if column != "split" and not column.endswith("_split"):
            continue
        kind = schema.field(column).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind)):
            continue
        values = read_column(paths, column)
        for value in sorted({value for value in values if value}):
            rows = [row for row, each in enumerate(values) if each == value]
            named.setdefault(
                value.lower(),
                lambda rows=rows: _entries(paths, torch.tensor(rows)),  # type: ignore[misc]
            )
    return named


def _entries(paths: Sequence[Path], rows: Tensor | None) -> Entries:
    """List the images of some rows of files with the same columns."""
    first, schema = str(paths[0]), read_schema(paths)
    types = require("pyarrow.types", extra="lab")
    image = image_column(
        first, [f.name for f in schema if holds_images(f.type, types)], schema.names
    )
    candidates = [f.name for f in schema if f.name != image and _holds_labels(f.type, types)]

    def read(column: str) -> list[Any]:
        values = read_column(paths, column)
        return values if rows is None else [values[row] for row in rows.tolist()]

    columns, labels, names = read_labels(
        first, candidates, _class_names(schema), schema.names, read
    )
    if not len(labels):
        raise DataError(f"{first}: there is no image in it")
    stats = [os.stat(path) for path in paths]
    rows = torch.arange(len(labels)) if rows is None else rows
    which = hash_of((image, columns, rows.tolist()))
    return Entries(
        items=ParquetImages([str(path) for path in paths], image, rows),
        labels=labels,
        names=names,
        stamp=hash_of(
            (
                [str(path.absolute()) for path in paths],
                [(stat.st_size, stat.st_mtime_ns) for stat in stats],
                which,
            )
        ),
        origin=hash_of(([(p.name, s.st_size) for p, s in zip(paths, stats, strict=True)], which)),
    )


def open_parquet(path: str | Path) -> Any:
    """Open a parquet file; a damaged one raises ``DataError``."""
    parquet = require("pyarrow.parquet", extra="lab")
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        message = str(error).strip().split("\n")[0][:160]
        raise DataError(f"{path}: damaged, or not a parquet file ({message})") from error


def read_schema(paths: Sequence[Path]) -> Any:
    """Return the Arrow schema of files, which must have the same columns."""
    schema = open_parquet(paths[0]).schema_arrow
    for path in paths[1:]:
        if set(open_parquet(path).schema_arrow.names) != set(schema.names):
            raise DataError(f"{path}: the columns are expected to be those of {paths[0]}")
    return schema


def read_column(paths: Iterable[Path], name: str) -> list[Any]:
    """Read a column of several files, one after the other."""
    values: list[Any] = []
    for path in paths:
        try:
            values += open_parquet(path).read(columns=[name]).column(name).to_pylist()
        except (OSError, ValueError) as error:
            message = str(error).strip().split("\n")[0][:160]
            raise DataError(f"{path}: column {name!r} cannot be read ({message})") from error
    return values


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the class names of each column, from the Hugging Face metadata."""
    try:
        written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = written["info"]["features"]
        return {
            name: [str(each) for each in feature["names"]]
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("names")
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def holds_images(kind: Any, types: Any) -> bool:
    """Whether a column of an Arrow type holds encoded images: bytes, or ``{bytes, path}``."""
    if types.is_struct(kind):
        return any(kind.field(number).name == "bytes" for number in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _holds_labels(kind: Any, types: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind))
