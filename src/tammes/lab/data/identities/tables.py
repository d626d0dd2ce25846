"""Tables with a column of identities: ``metadata.csv`` of wildlife-datasets, parquet files."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.data.csv_rows import read_csv
from tammes.lab.data.identities.examples import (
    IdentityExamples,
    existing_file,
    existing_files,
    existing_folder,
)
from tammes.lab.data.images import DataError
from tammes.lab.data.listing import image_column
from tammes.lab.data.sources.parquet import (
    ParquetImages,
    holds_images,
    open_parquet,
    read_column,
    read_schema,
)
from tammes.optional import require


def read_table(
    path: str | os.PathLike[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    file: str = "path",
    identity: str = "identity",
    camera: str | None = None,
    split: str = "split",
    partition: str | None = None,
    unknown: str | None = "unknown",
) -> IdentityExamples:
    """Read a table of files and identities, such as ``metadata.csv`` of wildlife-datasets.

    Args:
        path: path of the table, a CSV file whose first line names the columns.
        folder: folder that the files are relative to; by default the folder of the table.
        file: column of the paths.
        identity: column of the identities.
        camera: column of the cameras; by default ``camera`` if there is one.
        split: column of the partitions; not read if ``partition`` is None.
        partition: partition to read, a value of that column; by default all rows are read.
        unknown: identity given to unidentified animals, which are junk: two of them may or may not
            be the same. None if there is no such identity.

    Returns:
        The examples; identities and cameras are strings.
    """
    source = existing_file(path, "rows")
    root = existing_folder(source.parent if folder is None else folder, "images")
    names, rows = read_csv(source)

    def read(column: str) -> list[str]:
        place = names.index(column)
        return [values[place] for _, values in rows]

    selection = _Selection(str(source), names, read, [f"line {line}" for line, _ in rows])
    selection.choose(split, partition)
    identities, cameras = selection.identities(identity, camera)
    paths = selection.values(file, "paths")
    lines = [rows[row][0] for row in selection.rows]
    used = list(zip(paths, lines, strict=True))
    items, known = existing_files(source, root, used, "its paths are relative to the folder")
    if len(known) != len(paths):
        # The same image twice would be a trivial match.
        twice, uses = Counter(paths).most_common(1)[0]
        raise DataError(
            f"{source}: each file is expected in one row, got {twice!r} in {uses} rows; "
            "if they are parts of one image, crop them into files first"
        )
    return IdentityExamples(items, identities, cameras, _junk(identities, unknown))


def read_parquet(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    identity: str = "identity",
    camera: str | None = None,
    split: str = "split",
    partition: str | None = None,
    unknown: str | None = "unknown",
) -> IdentityExamples:
    """Read parquet files with columns of encoded images and identities.

    There may be several files with the same columns. The images are in a column of bytes or of
    ``{bytes, path}``, as :func:`tammes.lab.data.load` expects them; identities are integers or
    strings. The other arguments are those of :func:`read_table`.

    Returns:
        The examples, in the order of the rows. Images are read from the files on demand.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    files = [existing_file(path, "rows") for path in given]
    if not files:
        raise DataError("read_parquet expects one file or more, got none")
    title, schema = str(files[0]), read_schema(files)
    types = require("pyarrow.types", extra="lab")
    count = sum(open_parquet(path).metadata.num_rows for path in files)
    selection = _Selection(
        title,
        schema.names,
        lambda column: read_column(files, column),
        [f"row {row}" for row in range(count)],
    )
    selection.choose(split, partition)
    identities, cameras = selection.identities(identity, camera)
    images = [field.name for field in schema if holds_images(field.type, types)]
    column = image_column(title, images, schema.names)
    items = ParquetImages([str(path) for path in files], column, torch.tensor(selection.rows))
    return IdentityExamples(items, identities, cameras, _junk(identities, unknown))


class _Selection:
    """Selected rows of a table; ``places`` names all of its rows in messages."""

    def __init__(
        self,
        title: str,
        names: Collection[str],
        read: Callable[[str], list[Any]],
        places: Sequence[str],
    ) -> None:
        if not places:
            raise DataError(f"{title}: rows are expected, got an empty table")
        self.title, self.names, self.read, self.places = title, names, read, places
        self.rows = list(range(len(places)))

    def choose(self, column: str, partition: str | None) -> None:
        """Keep the rows of a partition."""
        if partition is None:
            return
        values = [str(value) for value in self.values(column, "partitions", empty=True)]
        self.rows = [row for row, value in enumerate(values) if value == partition]
        if not self.rows:
            known = sorted(filter(None, set(values)))
            hint = did_you_mean(partition, known, otherwise="there are")
            raise DataError(f"{self.title}: column {column!r} has no partition {partition!r}{hint}")

    def identities(self, identity: str, camera: str | None) -> tuple[list[Any], list[Any] | None]:
        """Return identities and cameras of the rows."""
        if camera is None:
            camera = "camera" if "camera" in self.names else None
        return (
            self.values(identity, "identities", kinds=(int, str)),
            None if camera is None else self.values(camera, "cameras", kinds=(int, str)),
        )

    def values(
        self, column: str, what: str, *, empty: bool = False, kinds: tuple[type, ...] = (object,)
    ) -> list[Any]:
        """Return the values of a column in these rows; ``what`` names them in messages."""
        if column not in self.names:
            hint = did_you_mean(column, self.names, otherwise="there are")
            raise DataError(f"{self.title}: there is no column {column!r} of {what}{hint}")
        read = self.read(column)
        values = [read[row] for row in self.rows]
        blank = [row for row, value in zip(self.rows, values, strict=True) if value in (None, "")]
        if blank and not empty:
            raise DataError(
                f"{self.title}: column {column!r} of {what} is empty in {len(blank):,} of "
                f"{len(values):,} rows, the first is {self.places[blank[0]]}"
            )
        strange = [value for value in values if not isinstance(value, kinds)]
        if strange:
            raise DataError(
                f"{self.title}: column {column!r} of {what} is expected to have integers or "
                f"strings, got {strange[0]!r}"
            )
        return values


def _junk(identities: list[Any], unknown: str | None) -> torch.Tensor:
    return torch.tensor([unknown is not None and value == unknown for value in identities])
