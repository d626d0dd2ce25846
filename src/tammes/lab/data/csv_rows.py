"""Read tables of values separated by commas, semicolons or tabs."""

import csv
from pathlib import Path
from typing import TextIO

from tammes.lab.data.images import DataError


def _delimiter(lines: TextIO) -> str:
    """Return the separator that the line of column names has most of, and rewind."""
    first = lines.readline()
    lines.seek(0)
    return max(",;\t", key=first.count)


def read_csv(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the columns of a table, and line and values of each row."""
    rows = []
    line = 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=_delimiter(lines), strict=True)
            for values in reader:
                if values:
                    rows.append((line, values))
                line = reader.line_num + 1
    except (UnicodeDecodeError, csv.Error) as error:
        message = str(error)[:160]
        raise DataError(
            f"{path} line {line}: values separated by commas, in UTF-8, are expected ({message})"
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
