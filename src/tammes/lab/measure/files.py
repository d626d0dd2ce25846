"""Read prototypes, embeddings and labels from the files people keep them in."""

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
"""Examples with this label count for nothing."""

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
"""Under which key each thing is looked for, best first."""
_ALONE = {"weight", "W", "kernel", "X", "y", "name", "names", "classes", "target", "feature"}
"""Keys that say too little to be found at the end of a longer one."""


@dataclass(frozen=True, eq=False)
class Given:
    """What a set of files holds.

    Attributes:
        prototypes: shape ``(C, D)``, or None.
        embeddings: shape ``(N, D)``, or None.
        labels: class of each embedding, shape ``(N,)``, or None.
        names: of the classes; empty where nothing names them.
        sources: where each of them was found, in words.
        ignored: examples left out because their label is -100.
    """

    prototypes: Tensor | None
    embeddings: Tensor | None
    labels: Tensor | None
    names: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    ignored: int = 0

    @property
    def examples(self) -> tuple[Tensor, Tensor] | None:
        """Embeddings and labels, or None: there is never one without the other."""
        if self.embeddings is None or self.labels is None:
            return None
        return self.embeddings, self.labels


@dataclass
class _Found:
    """What was found so far, each with the file it came from."""

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
) -> Given:
    """Read prototypes and/or embeddings with labels from one file or several.

    Embeddings and labels of several files are put one after the other, in the order of the files.

    Args:
        paths: ``.npz``, ``.npy``, ``.safetensors``, ``.pt``, ``.pth`` (weights only) or
            ``.parquet``. A file that holds a single array is known by its own name.
        keys: the key of ``"prototypes"``, ``"embeddings"`` or ``"labels"`` where it is not one of
            :data:`KEYS`.
        transpose: prototypes are stored ``(D, C)``.

    Returns:
        What was found, checked: finite, of matching shapes, labels within the classes.

    Raises:
        FileError: one sentence that names the file.
    """
    wanted = {kind: key for kind, key in (keys or {}).items() if key is not None}
    known = {name for names in KEYS.values() for name in names} | set(wanted.values())
    found = _Found()
    for path in map(Path, paths):
        arrays = load(path, known)
        chosen = {kind: _choose(path, kind, arrays, wanted) for kind in KEYS}
        if not any(chosen[kind] for kind in ("prototypes", "embeddings", "labels")):
            shown = ", ".join(map(repr, itertools.islice(arrays, 8))) or "nothing"
            raise FileError(
                f"{path}: neither prototypes, embeddings nor labels are in it, only {shown}; "
                "name the right key with --prototypes, --embeddings or --labels"
            )
        for kind, key in chosen.items():
            if key is not None:
                value = _as_kind(path, kind, key, arrays[key])
                getattr(found, kind).append((path, value))
                shape = " × ".join(map(str, getattr(value, "shape", (len(value),))))
                found.sources.append(f"{kind} {shape} from {path} ({key})")
        # Within one file the two belong together; across files only their totals can be compared.
        if chosen["embeddings"] and chosen["labels"]:
            _check_count(path, len(found.embeddings[-1][1]), len(found.labels[-1][1]))
    return _combine(found, transpose)


def _choose(
    path: Path, kind: str, arrays: Mapping[str, Any], wanted: Mapping[str, str]
) -> str | None:
    """The key that holds a kind of thing, or None."""
    if kind in wanted:
        return wanted[kind] if wanted[kind] in arrays else None
    taken = set(wanted.values())
    for name in KEYS[kind]:
        if name in arrays and name not in taken:
            return name
    for name in KEYS[kind]:
        matches = [
            key
            for key, value in arrays.items()
            if key.endswith(f".{name}") and key not in taken and _fits(kind, value)
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
    return kind in ("labels", "names") or getattr(value, "ndim", 0) == 2


def _as_kind(path: Path, kind: str, key: str, value: Any) -> Any:
    """A loaded value as what it is meant to be: rows of numbers, classes, or texts."""
    if kind == "names" or (kind == "labels" and _is_text(value)):
        if not _is_text(value):
            raise FileError(f"{path}: {key!r} is expected to hold texts, got something else")
        return [str(text) for text in value]
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise FileError(
            f"{path}: {key!r} is expected to hold numbers, got something else"
        ) from None
    if kind == "labels":
        return _as_labels(path, key, tensor)
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise FileError(
            f"{path}: {kind} ({key!r}) are expected to be a matrix of rows, "
            f"got shape {tuple(tensor.shape)}"
        )
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise FileError(f"{path}: {kind} ({key!r}) are expected to be real, got {tensor.dtype}")
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    broken = int((~tensor.isfinite().all(1)).sum())
    if broken:
        raise FileError(
            f"{path}: {kind} ({key!r}) hold NaN or infinity in {broken} of {len(tensor)} rows"
        )
    return tensor


def _is_text(value: Any) -> bool:
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


def _combine(found: _Found, transpose: bool) -> Given:
    if len(found.prototypes) > 1:
        files = " and ".join(str(path) for path, _ in found.prototypes[:2])
        raise FileError(f"{files}: only one file may hold prototypes")
    prototypes = None
    if found.prototypes:
        where, prototypes = found.prototypes[0]
        prototypes = prototypes.T.contiguous() if transpose else prototypes
        if len(prototypes) < 2:
            raise FileError(f"{where}: prototypes of 2 classes or more are needed, got 1")
    names = _names(found, prototypes)
    if not found.embeddings and not found.labels:
        return Given(prototypes, None, None, names, tuple(found.sources))
    if not found.labels:
        raise FileError(f"{found.embeddings[0][0]}: embeddings without labels cannot be measured")
    if not found.embeddings:
        raise FileError(f"{found.labels[0][0]}: labels without embeddings cannot be measured")
    embeddings = _join_embeddings(found, prototypes)
    labels, names = _join_labels(found, names, prototypes)
    _check_count(found.labels[0][0], len(embeddings), len(labels))
    known = labels != IGNORED
    ignored = int((~known).sum())
    if ignored:
        embeddings, labels = embeddings[known], labels[known]
    where = found.labels[0][0]
    if not len(labels):
        raise FileError(f"{where}: no example has a label")
    _check_labels(found, labels, prototypes, names)
    return Given(prototypes, embeddings, labels, names, tuple(found.sources), ignored)


def _names(found: _Found, prototypes: Tensor | None) -> tuple[str, ...]:
    if not found.names:
        return ()
    where, names = found.names[0]
    # A table of examples may name the class of each; only names of classes are names here.
    if prototypes is not None and len(names) != len(prototypes):
        if found.labels and found.labels[0][0] == where:
            return ()
        raise FileError(f"{where}: {len(names)} names do not go with {len(prototypes)} prototypes")
    return tuple(names) if len(set(names)) == len(names) else ()


def _join_embeddings(found: _Found, prototypes: Tensor | None) -> Tensor:
    first, head = found.embeddings[0]
    for path, rows in found.embeddings:
        if rows.shape[1] != head.shape[1]:
            raise FileError(
                f"{path}: embeddings of {rows.shape[1]} dimensions do not go with the "
                f"{head.shape[1]} of {first}"
            )
    if prototypes is not None and prototypes.shape[1] != head.shape[1]:
        hint = "; with --transpose they would" if prototypes.shape[0] == head.shape[1] else ""
        raise FileError(
            f"{first}: embeddings of {head.shape[1]} dimensions do not go with prototypes of "
            f"{prototypes.shape[1]} in {found.prototypes[0][0]}{hint}"
        )
    return torch.cat([rows for _, rows in found.embeddings])


def _join_labels(
    found: _Found, names: tuple[str, ...], prototypes: Tensor | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as classes; texts become the place of their name."""
    texts = [isinstance(values, list) for _, values in found.labels]
    where = found.labels[0][0]
    if not any(texts):
        labels = torch.cat([values for _, values in found.labels])
        return (labels, names) if prototypes is not None else _dense(labels, names)
    if not all(texts):
        raise FileError(f"{where}: some labels are texts and some are numbers")
    said = [text for _, values in found.labels for text in values]
    if not names:
        if prototypes is not None:
            raise FileError(
                f"{where}: labels are texts, and no class_names say which prototype is whose"
            )
        names = tuple(sorted(set(said)))
    place = {name: index for index, name in enumerate(names)}
    unknown = next((text for text in said if text not in place), None)
    if unknown is not None:
        raise FileError(f"{where}: label {unknown!r} is not among the class names")
    return torch.tensor([place[text] for text in said]), names


def _dense(labels: Tensor, names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """Without prototypes a label is a name only: classes are those that occur, in order."""
    known = labels[labels != IGNORED]
    if names and len(known) and int(known.max()) >= len(names):
        return labels, names
    present, places = known.unique(return_inverse=True)
    renamed = labels.clone()
    renamed[labels != IGNORED] = places
    return renamed, tuple(names[label] if names else str(label) for label in present.tolist())


def _check_labels(
    found: _Found, labels: Tensor, prototypes: Tensor | None, names: Sequence[str]
) -> None:
    largest = int(labels.max())
    where = next(
        (path for path, values in found.labels if largest in set(_plain(values))),
        found.labels[0][0],
    )
    if prototypes is not None and largest >= len(prototypes):
        raise FileError(
            f"{where}: label {largest} is beyond the {len(prototypes)} prototypes of "
            f"{found.prototypes[0][0]}, whose classes are 0 to {len(prototypes) - 1}"
        )
    if prototypes is None and len(labels.unique()) < 2:
        raise FileError(f"{where}: examples of 2 classes or more are needed, got 1")
    if names and largest >= len(names):
        raise FileError(f"{where}: label {largest} is beyond the {len(names)} class names")


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else []
