"""Read prototypes, embeddings and labels from files in common formats."""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tammes.lab.measure.formats import FileError, load

IGNORED = -100
"""Label of ignored examples."""

KEYS: dict[str, tuple[str, ...]] = {
    "prototypes": (
        "prototypes",
        "prototype",
        "head.weight",
        "classifier.weight",
        "fc.weight",
        "weight",
        "W",
        "kernel",
    ),
    "embeddings": ("embeddings", "embedding", "features", "feature", "X"),
    "labels": ("labels", "label", "targets", "target", "y"),
    "names": ("class_names", "names", "classes", "name"),
}
"""Keys of each kind of array, in order of preference."""
_ALONE = {"weight", "W", "kernel", "X", "y", "name", "names", "classes", "target", "feature"}
"""Keys too generic to match as the last part of a dotted key."""
_DIMENSIONS = {"prototypes": (2, 3), "embeddings": (2,)}
"""Allowed numbers of dimensions; three are classes, prototypes per class and features."""


@dataclass(frozen=True, eq=False)
class MeasureInput:
    """Prototypes, embeddings and labels read from files.

    Attributes:
        prototypes: shape ``(C, D)``, or ``(C, K, D)`` with several per class, or None.
        embeddings: shape ``(N, D)``, or None.
        names: class names; empty if the files have none.
        sources: file and key of each array, as text.
        ignored: number of examples dropped because their label is -100.
    """

    prototypes: Tensor | None
    embeddings: Tensor | None
    labels: Tensor | None
    names: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    ignored: int = 0

    @property
    def examples(self) -> tuple[Tensor, Tensor] | None:
        """Embeddings and labels, or None; they always come together."""
        if self.embeddings is None or self.labels is None:
            return None
        return self.embeddings, self.labels


@dataclass
class _Arrays:
    """Arrays read so far, each with its file."""

    prototypes: list[tuple[Path, Tensor]] = field(default_factory=list)
    embeddings: list[tuple[Path, Tensor]] = field(default_factory=list)
    labels: list[tuple[Path, Any]] = field(default_factory=list)
    names: list[tuple[Path, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def read(
    paths: Iterable[str | os.PathLike[str]],
    *,
    keys: Mapping[str, str | None] | None = None,
    transpose: bool = False,
) -> MeasureInput:
    """Read prototypes and/or embeddings with labels from one file or several.

    Embeddings and labels of several files are concatenated in the order of the files.

    Args:
        paths: ``.npz``, ``.npy``, ``.safetensors``, ``.pt``, ``.pth`` (weights only) or
            ``.parquet``. The key of a single array is the name of its file.
        keys: key of ``"prototypes"``, ``"embeddings"`` or ``"labels"`` if it is not one of
            :data:`KEYS`.
        transpose: whether prototypes are stored as ``(D, C)``.

    Returns:
        The arrays, checked: finite, of matching shapes, labels within the classes.

    Raises:
        FileError: one sentence that names the file.
    """
    wanted = {kind: key for kind, key in (keys or {}).items() if key is not None}
    known = {name for names in KEYS.values() for name in names} | set(wanted.values())
    arrays = _Arrays()
    for path in map(Path, paths):
        content = load(path, known)
        chosen = {kind: find_key(path, kind, content, wanted) for kind in KEYS}
        if not any(chosen[kind] for kind in ("prototypes", "embeddings", "labels")):
            shown = ", ".join(map(repr, itertools.islice(content, 8))) or "nothing"
            raise FileError(
                f"{path}: no prototypes, embeddings or labels in it, only {shown}; "
                "name the right key with --prototypes, --embeddings or --labels"
            )
        for kind, key in chosen.items():
            if key is not None:
                value = _as_kind(path, kind, key, content[key])
                getattr(arrays, kind).append((path, value))
                shape = " × ".join(map(str, getattr(value, "shape", (len(value),))))
                arrays.sources.append(f"{kind} {shape} from {path} ({key})")
        # Within a file the counts must match; across files only the totals.
        if chosen["embeddings"] and chosen["labels"]:
            _check_count(path, len(arrays.embeddings[-1][1]), len(arrays.labels[-1][1]))
    return _combine(arrays, transpose)


def find_key(
    path: Path,
    kind: str,
    content: Mapping[str, Any],
    wanted: Mapping[str, str],
    keys: Mapping[str, Sequence[str]] = KEYS,
) -> str | None:
    """Return the key of a kind of array, or None; ``wanted`` has the keys that the user named."""
    if kind in wanted:
        return wanted[kind] if wanted[kind] in content else None
    reserved = set(wanted.values())
    for name in keys[kind]:
        if name in content and name not in reserved:
            return name
    for name in keys[kind]:
        matches = [
            key
            for key, value in content.items()
            if key.endswith(f".{name}") and key not in reserved and _fits(kind, value)
        ]
        if name in _ALONE or not matches:
            continue
        if len(matches) > 1:
            raise FileError(
                f"{path}: {' and '.join(map(repr, matches[:4]))} could all be the {kind}; "
                f"say which with --{kind} KEY"
            )
        return matches[0]
    return None


def _fits(kind: str, value: Any) -> bool:
    return kind not in _DIMENSIONS or getattr(value, "ndim", 0) in _DIMENSIONS[kind]


def _as_kind(path: Path, kind: str, key: str, value: Any) -> Any:
    """Convert a loaded value to a matrix, labels or strings."""
    if kind == "names" or (kind == "labels" and is_text(value)):
        if not is_text(value):
            raise FileError(f"{path}: {key!r} is expected to hold texts, got something else")
        return [str(text) for text in value]
    if kind == "labels":
        return _as_labels(path, key, as_tensor(path, key, value))
    return as_matrix(path, kind, key, value)


def as_tensor(path: Path, key: str, value: Any) -> Tensor:
    """Convert a loaded value to a tensor."""
    try:
        return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise FileError(
            f"{path}: {key!r} is expected to hold numbers, got something else"
        ) from None


def as_matrix(path: Path, kind: str, key: str, value: Any) -> Tensor:
    """Convert a loaded value to a matrix of finite numbers."""
    tensor = as_tensor(path, key, value)
    if tensor.ndim not in _DIMENSIONS.get(kind, (2,)) or 0 in tensor.shape:
        raise FileError(
            f"{path}: {kind} ({key!r}) are expected to be a matrix of rows, "
            f"got shape {tuple(tensor.shape)}"
        )
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise FileError(f"{path}: {kind} ({key!r}) are expected to be real, got {tensor.dtype}")
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    broken = int((~tensor.flatten(1).isfinite().all(1)).sum())
    if broken:
        raise FileError(
            f"{path}: {kind} ({key!r}) hold NaN or infinity in {broken:,} of {len(tensor):,} rows; "
            "leave these rows out, or look at the network that wrote them"
        )
    return tensor


def is_text(value: Any) -> bool:
    """Return whether a loaded value is a list of strings."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(text, str) for text in value)
    return getattr(getattr(value, "dtype", None), "kind", "") == "U"


def _as_labels(path: Path, key: str, tensor: Tensor) -> Tensor:
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim != 1:
        raise FileError(
            f"{path}: labels ({key!r}) are expected to be one number for each example, "
            f"got shape {tuple(tensor.shape)}"
        )
    if tensor.is_complex() or tensor.dtype == torch.bool or bool((tensor != tensor.long()).any()):
        raise FileError(f"{path}: labels ({key!r}) are expected to be whole numbers")
    tensor = tensor.long()
    if bool(((tensor < 0) & (tensor != IGNORED)).any()):
        raise FileError(
            f"{path}: labels ({key!r}) are expected to be 0 or more, or {IGNORED} to leave an "
            f"example out, got {int(tensor.min())}"
        )
    return tensor


def _check_count(path: Path, embeddings: int, labels: int) -> None:
    if embeddings != labels:
        raise FileError(f"{path}: {embeddings} embeddings do not go with {labels} labels")


def _combine(arrays: _Arrays, transpose: bool) -> MeasureInput:
    if len(arrays.prototypes) > 1:
        files = " and ".join(str(path) for path, _ in arrays.prototypes[:2])
        raise FileError(f"{files}: only one file may hold prototypes")
    prototypes = None
    if arrays.prototypes:
        where, prototypes = arrays.prototypes[0]
        if transpose and prototypes.ndim == 3:
            raise FileError(
                f"{where}: --transpose expects prototypes of shape (D, C), got (C, K, D)"
            )
        prototypes = prototypes.T.contiguous() if transpose else prototypes
        if len(prototypes) < 2:
            raise FileError(f"{where}: prototypes of 2 classes or more are needed, got 1")
    names = _names(arrays, prototypes)
    if not arrays.embeddings and not arrays.labels:
        return MeasureInput(prototypes, None, None, names, tuple(arrays.sources))
    if not arrays.labels:
        raise FileError(f"{arrays.embeddings[0][0]}: embeddings without labels cannot be measured")
    if not arrays.embeddings:
        raise FileError(f"{arrays.labels[0][0]}: labels without embeddings cannot be measured")
    embeddings = _join_embeddings(arrays, prototypes)
    labels, names = _join_labels(arrays, names, prototypes)
    _check_count(arrays.labels[0][0], len(embeddings), len(labels))
    known = labels != IGNORED
    ignored = int((~known).sum())
    if ignored:
        embeddings, labels = embeddings[known], labels[known]
    where = arrays.labels[0][0]
    if not len(labels):
        raise FileError(f"{where}: no example has a label")
    _check_labels(arrays, labels, prototypes, names)
    return MeasureInput(prototypes, embeddings, labels, names, tuple(arrays.sources), ignored)


def _names(arrays: _Arrays, prototypes: Tensor | None) -> tuple[str, ...]:
    if not arrays.names:
        return ()
    where, names = arrays.names[0]
    # A table of examples may have one name per row, which is no list of class names.
    if prototypes is not None and len(names) != len(prototypes):
        if arrays.labels and arrays.labels[0][0] == where:
            return ()
        raise FileError(f"{where}: {len(names)} names do not go with {len(prototypes)} prototypes")
    return tuple(names) if len(set(names)) == len(names) else ()


def _join_embeddings(arrays: _Arrays, prototypes: Tensor | None) -> Tensor:
    first, head = arrays.embeddings[0]
    for path, rows in arrays.embeddings:
        if rows.shape[1] != head.shape[1]:
            raise FileError(
                f"{path}: embeddings of {rows.shape[1]} dimensions do not go with the "
                f"{head.shape[1]} of {first}"
            )
    if prototypes is not None and prototypes.shape[-1] != head.shape[1]:
        hint = "; with --transpose they would" if prototypes.shape[0] == head.shape[1] else ""
        raise FileError(
            f"{first}: embeddings of {head.shape[1]} dimensions do not go with prototypes of "
            f"{prototypes.shape[-1]} in {arrays.prototypes[0][0]}{hint}"
        )
    return torch.cat([rows for _, rows in arrays.embeddings])


def _join_labels(
    arrays: _Arrays, names: tuple[str, ...], prototypes: Tensor | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Concatenate labels; strings become the index of their class name."""
    texts = [isinstance(values, list) for _, values in arrays.labels]
    where = arrays.labels[0][0]
    if not any(texts):
        labels = torch.cat([values for _, values in arrays.labels])
        return (labels, names) if prototypes is not None else _dense(labels, names)
    if not all(texts):
        raise FileError(f"{where}: some labels are texts and some are numbers")
    strings = [text for _, values in arrays.labels for text in values]
    if not names:
        if prototypes is not None:
            raise FileError(
                f"{where}: labels are strings, and no class_names map them to prototypes"
            )
        names = tuple(sorted(set(strings)))
    indices = {name: index for index, name in enumerate(names)}
    unknown = next((text for text in strings if text not in indices), None)
    if unknown is not None:
        raise FileError(f"{where}: label {unknown!r} is not among the class names")
    return torch.tensor([indices[text] for text in strings]), names


def _dense(labels: Tensor, names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """Renumber labels, if there are no prototypes, by the classes that occur, in order."""
    known = labels[labels != IGNORED]
    if names and len(known) and int(known.max()) >= len(names):
        return labels, names
    present, dense = known.unique(return_inverse=True)
    renamed = labels.clone()
    renamed[labels != IGNORED] = dense
    return renamed, tuple(names[label] if names else str(label) for label in present.tolist())


def _check_labels(
    arrays: _Arrays, labels: Tensor, prototypes: Tensor | None, names: Sequence[str]
) -> None:
    largest = int(labels.max())
    where = next(
        (path for path, values in arrays.labels if largest in set(_plain(values))),
        arrays.labels[0][0],
    )
    if prototypes is not None and largest >= len(prototypes):
        raise FileError(
            f"{where}: label {largest} is beyond the {len(prototypes)} prototypes of "
            f"{arrays.prototypes[0][0]}, whose classes are 0 to {len(prototypes) - 1}"
        )
    if prototypes is None and len(labels.unique()) < 2:
        raise FileError(f"{where}: examples of 2 classes or more are needed, got 1")
    if names and largest >= len(names):
        raise FileError(f"{where}: label {largest} is beyond the {len(names)} class names")


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else []
