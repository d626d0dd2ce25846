"""Read tables of values separated by commas, semicolons or tabs."""

import csv
from itertools import islice
from pathlib import Path
from typing import TextIO

from tammes.lab.data.images import DataError

TABLES = (".csv", ".tsv")
"""Suffixes of tables, in order of preference."""


def _delimiter(lines: TextIO) -> str:
    """Return the separator with most columns, equally many in the first two rows; rewinds."""

    def columns(separator: str) -> tuple[bool, int]:
        lines.seek(0)
        rows = islice(filter(None, csv.reader(lines, delimiter=separator)), 2)
        first, *second = [len(row) for row in rows] or [0]
        return first > 1 and all(size == first for size in second), first

    best = max(",;\t", key=columns)
    lines.seek(0)
    return best


def read_csv(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the column names of a table, and the line number and values of each row."""
    rows = []
    line = 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            separator = _delimiter(lines)
            # "a.png, cat" is class "cat".
            reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
            for values in reader:
                if values:
                    rows.append((line, values))
                line = reader.line_num + 1
    except (UnicodeDecodeError, csv.Error) as error:
        message = str(error)[:160]
        raise DataError(
            f"{path} line {line}: values separated by commas, semicolons or tabs, in UTF-8, are "
            f"expected ({message})"
        ) from error
    if not rows:
        raise DataError(f"{path}: a line of column names is expected, got an empty table")
    names = rows.pop(0)[1]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: columns of different names are expected, got {twice[0]!r} twice")
    for line, values in rows:
        if len(values) != len(names):
            raise DataError(
                f"{path} line {line}: {len(names)} values are expected, one for each column, "
                f"got {len(values)}"
            )
    return names, rows
