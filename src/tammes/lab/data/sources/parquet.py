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
    as_labels,
    image_column,
    label_columns,
    letters,
)
from tammes.lab.data.sources.folder import PARTITION_WORDS
from tammes.optional import require

_KEPT = 256 << 20
"""Bytes of encoded images that a process keeps."""


class ParquetImages:
    """Images in a column of parquet files.

    A group of rows is read as a whole, and some groups are kept: all of a small set.

    Args:
        paths: of the files.
        column: of the images.
        rows: which, counted through all files, shape ``(N,)``.
    """

    def __init__(self, paths: Sequence[str], column: str, rows: Tensor) -> None:
        self.paths, self.column, self.rows = tuple(paths), column, rows
        self.groups: list[tuple[int, int]] = []
        starts = [0]
        self.first: list[int] = []
        for number, path in enumerate(self.paths):
            self.first.append(starts[-1])
            metadata = _open(path).metadata
            for group in range(metadata.num_row_groups):
                self.groups.append((number, group))
                starts.append(starts[-1] + metadata.row_group(group).num_rows)
        self.starts = torch.tensor(starts)
        self._forget()

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("paths", "column", "rows", "groups", "starts", "first")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self.files: dict[int, Any] = {}
        self.kept: OrderedDict[int, Any] = OrderedDict()
        self.bytes = 0
        self.process = os.getpid()

    def fetch(self, row: int) -> bytes | str:
        """The bytes of an image, or the path of its file where the table has only that."""
        if self.process != os.getpid():
            # Open files do not survive a fork.
            self._forget()
        place = int(self.rows[row])
        number = int(torch.searchsorted(self.starts, place, right=True)) - 1
        value: Any = self._group(number)[place - int(self.starts[number])].as_py()
        path = None
        if isinstance(value, dict):
            path, value = value.get("path"), value.get("bytes")
        if value is not None:
            return bytes(value)
        # No bytes at all is not an image, and is said to be none.
        folder = os.path.dirname(self.paths[self.groups[number][0]])
        return os.path.join(folder, path) if path else b""

    def _group(self, number: int) -> Any:
        if number in self.kept:
            self.kept.move_to_end(number)
            return self.kept[number]
        file, group = self.groups[number]
        if file not in self.files:
            self.files[file] = _open(self.paths[file])
        table = self.files[file].read_row_group(group, columns=[self.column], use_threads=False)
        column = table.column(self.column)
        self.kept[number] = column
        self.bytes += column.nbytes
        while self.bytes > _KEPT and len(self.kept) > 1:
            self.bytes -= self.kept.popitem(last=False)[1].nbytes
        return column

    def name(self, row: int) -> str:
        """File and row of an image."""
        place = int(self.rows[row])
        number = next(n for n in reversed(range(len(self.paths))) if self.first[n] <= place)
        return f"{self.paths[number]} row {place - self.first[number]}"


def partitions(
    paths: Sequence[Path], *, root: Path | None, report: Callable[[str], None]
) -> Partitions:
    """Splits of parquet files: by their names, or else by a column.

    Args:
        paths: of the files.
        root: the folder they were found in; folders below it may name a split too. None for a file
            that was asked for by itself: its name does not matter.
        report: is told which files are left out.
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
        report(f"left out, as the name tells no split: {', '.join(path.name for path in left)}")
    return {
        name: lambda some=some: _entries(some, None)  # type: ignore[misc]
        for name, some in groups.items()
    }


def _partition_of(path: Path, root: Path) -> str:
    # SPLIT-00000-of-00002 is how the hub names the parts of a split.
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
    """Splits that a column such as ``split`` or ``official_split`` names, and everything."""
    schema = _open(paths[0]).schema_arrow
    types = require("pyarrow.types", extra="lab")
    found: dict[str, Callable[[], Entries]] = {EVERYTHING: lambda: _entries(paths, None)}
    for column in schema.names:
        if column != "split" and not column.endswith("_split"):
            continue
        kind = schema.field(column).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind)):
            continue
        values = _column(paths, column)
        for value in sorted({value for value in values if value}):
            rows = [row for row, each in enumerate(values) if each == value]
            found.setdefault(
                value.lower(),
                lambda rows=rows: _entries(paths, torch.tensor(rows)),  # type: ignore[misc]
            )
    return found


def _entries(paths: Sequence[Path], rows: Tensor | None) -> Entries:
    """The images of some rows of files that have the same columns."""
    where = str(paths[0])
    schema = _open(paths[0]).schema_arrow
    for path in paths[1:]:
        if set(_open(path).schema_arrow.names) != set(schema.names):
            raise DataError(f"{path}: the columns are expected to be those of {where}")
    types = require("pyarrow.types", extra="lab")
    image = image_column(
        where, [f.name for f in schema if _holds_images(f.type, types)], schema.names
    )
    classes = _class_names(schema)
    could = [f.name for f in schema if f.name != image and _holds_labels(f.type, types)]
    named = [name for name in could if name in classes]
    columns = label_columns(where, could, named, schema.names)
    values = _column(paths, columns[0])
    if len(columns) > 1:
        values = list(map("/".join, zip(*(_column(paths, c) for c in columns), strict=True)))
    if rows is None:
        rows = torch.arange(len(values))
    column = f"{where}: column {' and '.join(map(repr, columns))}"
    chosen = [values[row] for row in rows.tolist()]
    labels, names = as_labels(column, chosen, classes.get(columns[0]))
    if not len(labels):
        raise DataError(f"{where}: there is no image in it")
    stats = [os.stat(path) for path in paths]
    which = letters((image, columns, rows.tolist()))
    return Entries(
        items=ParquetImages([str(path) for path in paths], image, rows),
        labels=labels,
        names=names,
        stamp=letters(
            (
                [str(path.absolute()) for path in paths],
                [(stat.st_size, stat.st_mtime_ns) for stat in stats],
                which,
            )
        ),
        origin=letters(([(p.name, s.st_size) for p, s in zip(paths, stats, strict=True)], which)),
    )


def _open(path: str | Path) -> Any:
    parquet = require("pyarrow.parquet", extra="lab")
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        said = str(error).strip().split("\n")[0][:160]
        raise DataError(f"{path}: damaged, or not a parquet file ({said})") from error


def _column(paths: Iterable[Path], name: str) -> list[Any]:
    values: list[Any] = []
    for path in paths:
        try:
            values += _open(path).read(columns=[name]).column(name).to_pylist()
        except (OSError, ValueError) as error:
            said = str(error).strip().split("\n")[0][:160]
            raise DataError(f"{path}: column {name!r} cannot be read ({said})") from error
    return values


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Names of the classes of each column that has them, as Hugging Face writes them."""
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


def _holds_images(kind: Any, types: Any) -> bool:
    if types.is_struct(kind):
        return any(kind.field(number).name == "bytes" for number in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _holds_labels(kind: Any, types: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind))
