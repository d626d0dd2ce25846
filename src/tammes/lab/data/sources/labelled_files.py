"""Image files with labels in a CSV table, or in the names of the files."""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tammes.lab.data.csv_rows import read_csv
from tammes.lab.data.images import DataError
from tammes.lab.data.listing import (
    EVERYTHING,
    IMAGE_COLUMNS,
    Entries,
    Partitions,
    as_labels,
    file_entries,
    read_labels,
)
from tammes.lab.data.sources.folder import walk_images

PATH_COLUMNS = (
    *("path", "file", "filename", "file_name", "filepath", "image_path"),
    *(*IMAGE_COLUMNS, "image_id"),
)
"""Names of path columns, in order of preference."""
_FIELDS = {
    "{label}": r"(?P<label>[^/]+?)",
    "{split}": r"(?P<split>[^/]+?)",
    "{number}": r"\d+",
    "*": r"[^/]*",
}
"""Fields of a pattern, and the regular expression of each."""
_FIELD = re.compile("|".join(map(re.escape, _FIELDS)))


def table_partitions(table: Path, report: Callable[[str], None]) -> Partitions:
    """Return the partitions of a CSV table of paths and labels.

    Paths are relative to the folder of the table. Each value of a column ``split`` is a partition.
    Column names may have capitals and spaces; unnamed columns, such as the index that pandas
    writes, are left out. Files in several rows are reported.
    """
    names, rows = read_csv(table)
    if not rows:
        raise DataError(f"{table}: a line for each image is expected, got none below the names")
    columns: dict[str, list[str]] = {}
    for place, name in enumerate(names):
        key = name.strip().lower().replace(" ", "_")
        if key in columns:
            raise DataError(f"{table}: two columns are named {key}, up to capitals and spaces")
        if key and not name.startswith("Unnamed: "):
            columns[key] = [row[place] for _, row in rows]
    file = next((name for name in PATH_COLUMNS if name in columns), None)
    if file is None:
        raise DataError(
            f"{table}: columns of paths and of labels are expected, named in the first line, such "
            f"as path and label, got {', '.join(map(repr, names))}"
        )
    paths, splits = columns.pop(file), columns.pop("split", None)
    if "" in paths:
        line = rows[paths.index("")][0]
        raise DataError(f"{table} line {line}: a path is expected in column {file!r}, got none")
    if len(columns) == 1:
        # The only other column holds the labels, whatever its name.
        columns = {"label": next(iter(columns.values()))}
    _, labels, classes = read_labels(
        str(table), list(columns), {}, names, lambda name: _values(columns[name])
    )
    if not _any_exists(table.parent, paths):
        # The table may have been written on Windows.
        paths, given = [path.replace("\\", "/") for path in paths], paths
        if not _any_exists(table.parent, paths):
            ending = "" if Path(given[0]).suffix else ", with the ending of the file, such as .jpg"
            raise DataError(
                f"{table}: none of its {len(paths):,} files is there, such as {given[0]!r}; its "
                f"paths are expected to be relative to {table.absolute().parent}{ending}"
            )
    _report_repeated(str(table), paths, labels.tolist(), report)
    return _partitions(table.parent, paths, labels, classes, splits)


def _any_exists(root: Path, paths: Sequence[str]) -> bool:
    return any((root / path).exists() for path in paths)


def _report_repeated(
    table: str, paths: Sequence[str], labels: Sequence[int], report: Callable[[str], None]
) -> None:
    """Report files in several rows: training and test images may share them."""
    classes: dict[str, set[int]] = {}
    for path, label in zip(paths, labels, strict=True):
        classes.setdefault(path, set()).add(label)
    twice = len(paths) - len(classes)
    if not twice:
        return
    torn = [path for path, some in classes.items() if len(some) > 1]
    example = torn[0] if torn else next(path for path, n in Counter(paths).items() if n > 1)
    what = f", {len(torn):,} file{'s' * (len(torn) > 1)} with different labels" if torn else ""
    report(
        f"{table}: {twice:,} of {len(paths):,} rows repeat a file{what}, such as {example!r}; it "
        "may be in the training and in the test images"
    )


def pattern_partitions(pattern: str, report: Callable[[str], None]) -> Partitions:
    """Return the partitions of files with labels in their names.

    A pattern is a path with the fields ``{label}`` and optionally ``{split}`` (as short as
    possible), ``{number}`` (digits) and ``*`` (anything but a slash): ``photos/{label}_*.jpg``.
    The classes found and the number of files that do not match are reported.
    """
    parts = re.split(f"({_FIELD.pattern})", Path(pattern).expanduser().as_posix())
    once = parts.count("{label}") == 1 and parts.count("{split}") < 2
    if not once or "{" in "".join(parts[::2]):
        raise DataError(
            f"{pattern}: a pattern is expected to have {{label}} once, and {{split}}, {{number}} "
            "and * where needed, as in photos/{label}_*.png"
        )
    folder, slash, parts[0] = parts[0].rpartition("/")
    root = Path(folder or slash or ".")
    if not root.is_dir():
        raise DataError(f"{pattern}: there is no folder {str(root)!r}")
    expression = re.compile("".join(_FIELDS.get(part) or re.escape(part) for part in parts))
    files = [os.path.relpath(path, root) for path in walk_images(root)]
    found = [(path, expression.fullmatch(path.replace(os.sep, "/"))) for path in files]
    matches = [(path, match) for path, match in found if match is not None]
    if not matches:
        got = f"such as {files[0]!r}" if files else "since there is none"
        raise DataError(f"{pattern}: no image in {str(root)!r} matches, {got}")
    labels, classes = as_labels(pattern, _values([match["label"] for _, match in matches]), None)
    shown = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
    rest = len(files) - len(matches)
    left = f"; {rest:,} do not match and are left out" if rest else ""
    report(f"{pattern}: {len(matches):,} images of {len(classes)} classes, {shown}{left}")
    splits = [match["split"] for _, match in matches] if "{split}" in parts else None
    return _partitions(root, [path for path, _ in matches], labels, classes, splits)


def _values(texts: Sequence[str]) -> list[str | int | None]:
    """Convert values to integers if all are whole numbers, so that class 10 comes after class 2.

    ``10.0`` is one too: pandas writes the integers of a column with gaps like that.
    """
    whole = [text.removesuffix(".0") for text in texts]
    if all(text.isdecimal() and str(int(text)) == text for text in whole):
        return [int(text) for text in whole]
    return [text or None for text in texts]


def _partitions(
    root: Path,
    paths: Sequence[str],
    labels: Tensor,
    classes: tuple[str, ...],
    splits: Sequence[str] | None,
) -> Partitions:
    """Return the partitions of labelled files below a folder, by the split of each file."""

    def entries(rows: Sequence[int]) -> Entries:
        chosen = [paths[row] for row in rows]
        return file_entries(root, chosen, labels[torch.tensor(rows)], classes)

    rows = {EVERYTHING: list(range(len(paths)))}
    for row, name in enumerate(splits or ()):
        rows.setdefault(name.strip().lower(), []).extend([row] if name.strip() else [])
    return {name: lambda some=some: entries(some) for name, some in rows.items()}  # type: ignore[misc]
