"""Write labelled images in memory to a file, to be used like any other source."""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tammes.lab.data.array_images import as_pillow
from tammes.lab.data.images import DataError
from tammes.lab.records.atomic_io import write_atomically
from tammes.optional import require

_GROUP = 1000
"""Images in a row group of a parquet file."""


def write_source(
    path: str | os.PathLike[str],
    images: Any,
    labels: Iterable[Any] | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> Path:
    """Write images and labels to a file that :func:`load` reads, and return its path.

    Args:
        path: ``.csv`` for a table of paths, ``.parquet`` for a file that holds the images. Files
            ``FOLDER/train.parquet`` and ``FOLDER/test.parquet`` are the partitions of ``FOLDER``.
        images: paths, encoded bytes, Pillow images, arrays ``(height, width[, channels])`` or
            tensors ``([channels, ]height, width)``, uint8 or floating-point in [0, 1]; one array or
            tensor of all images; or, without labels, a ``torch.utils.data.Dataset`` (or any
            iterable) of pairs ``(image, label)``.
        labels: class number or class name of each image.
        classes: names of the class numbers; by default those of ``images.classes``, if any.

    Example:
        >>> import numpy, tempfile
        >>> from tammes.lab.data import load
        >>> pixels = numpy.random.default_rng(0).random((10, 8, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_source(f"{folder}/mine.parquet", pixels, ["cat", "dog"] * 5)
        ...     load(path, "train", report=lambda text: None).classes
        ('cat', 'dog')
    """
    target = Path(path)
    if target.suffix.lower() not in (".csv", ".parquet"):
        raise DataError(f"{target}: a file name that ends in .csv or .parquet is expected")
    known = getattr(images, "classes", None) if classes is None else classes
    names = [str(name) for name in known] if isinstance(known, list | tuple) else None
    rows = _rows(images, labels, names)
    data = _table(target, rows) if target.suffix.lower() == ".csv" else _parquet(rows, names)
    write_atomically(target, data)
    return target


def _rows(
    images: Any, labels: Iterable[Any] | None, names: Sequence[str] | None
) -> Iterator[tuple[Any, str | int]]:
    """Yield each image with its label: a class name, or a number if there are no names."""
    if labels is None:
        # By index if possible: iterating over a Dataset need not stop at its end.
        sized = hasattr(images, "__len__") and hasattr(images, "__getitem__")
        pairs = (images[row] for row in range(len(images))) if sized else iter(images)
    else:
        given = [*labels] if getattr(labels, "ndim", 1) else []
        if hasattr(images, "__len__") and len(images) != len(given):
            raise DataError(
                f"write_source expects a label for each image, got {len(images):,} images and "
                f"{len(given):,} labels"
            )
        pairs = zip(images, given, strict=True)
    for position, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            many = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
            raise DataError(
                f"write_source expects labels, or images as pairs (image, label), got "
                f"{type(pair).__name__}{many} at position {position}"
            )
        image, label = pair
        if getattr(label, "ndim", None) == 0:
            label = label.item()
        if not isinstance(label, int | str) or isinstance(label, bool):
            hint = "; if it is one-hot, use argmax(1)" if getattr(label, "ndim", 0) == 1 else ""
            if isinstance(label, float):
                hint = "; convert whole numbers to integers"
            if hasattr(images, "batch_size") and hasattr(images, "dataset"):
                hint = "; a DataLoader yields batches, give its dataset"
            raise DataError(
                "write_source expects labels that are class numbers or class names, got "
                f"{type(label).__name__} at position {position}{hint}"
            )
        if names is not None and isinstance(label, int):
            if not 0 <= label < len(names):
                raise DataError(
                    f"write_source expects labels from 0 to {len(names) - 1}, got {label}"
                )
            label = names[label]
        yield image, label


def _table(target: Path, rows: Iterator[tuple[Any, str | int]]) -> bytes:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["path", "label"])
    for image, label in rows:
        if not isinstance(image, str | os.PathLike):
            raise DataError(
                f"{target}: a .csv file holds paths, got {type(image).__name__}; a .parquet file "
                "holds images"
            )
        table.writerow([os.path.relpath(image, target.parent), label])
    return text.getvalue().encode()


def _parquet(rows: Iterator[tuple[Any, str | int]], names: Sequence[str] | None) -> bytes:
    pyarrow = require("pyarrow", extra="lab")
    images: list[dict[str, Any]] = []
    labels: list[Any] = []
    for position, (image, label) in enumerate(rows):
        images.append({"bytes": _encode(image, position), "path": None})
        labels.append(label)
    if len({type(label) for label in labels}) > 1:
        raise DataError("write_source expects class numbers or class names, got some of each")
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    metadata = None
    if names is not None and set(labels) <= set(names):
        # Store numbers and class names, so that the classes keep their order.
        labels = [names.index(label) for label in labels]
        features = {"label": {"names": list(names), "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.table({"image": pyarrow.array(images, kind), "label": labels})
    table = table.replace_schema_metadata(metadata)
    buffer = io.BytesIO()
    require("pyarrow.parquet", extra="lab").write_table(table, buffer, row_group_size=_GROUP)
    return buffer.getvalue()


def _encode(image: Any, position: int) -> bytes:
    """Return the bytes of an image file; pixels become a PNG file."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    try:
        picture = as_pillow(image)
    except ValueError as error:
        raise DataError(f"image {position} cannot be written ({error})") from error
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
