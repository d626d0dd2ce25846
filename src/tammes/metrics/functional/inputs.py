"""Validate the inputs of metrics: splits, similarities or features with labels, prototypes."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tammes._validation import check_floating, check_labels
from tammes.split import Split, split

IGNORED = -100
"""Label of examples that are ignored, as in torch's losses."""


def wide(values: Tensor) -> Tensor:
    """Detach values, and convert half precision to float32."""
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


def as_split(
    name: str,
    source: Split | Tensor,
    labels: Tensor | None,
    *,
    reads: Iterable[str],
    scale: float = 1.0,
    classes: int | None = None,
) -> Split:
    """Check a split, or make one from similarities and labels; values must be finite.

    Args:
        name: name that messages begin with.
        source: a split, or similarities of shape ``(N, C)``.
        labels: class of each example, shape ``(N,)``; with similarities only. Examples labelled
            -100 are dropped.
        reads: fields that are needed.
        scale: factor of the similarities; a split has its own.
        classes: expected number of classes.

    Returns:
        The split, with its fields in float32 or wider.
    """
    reads = tuple(reads)
    if isinstance(source, Split):
        if labels is not None:
            raise ValueError(f"{name} expects a split alone or similarity and labels, got both")
        numbers: dict[str, Any] = {field: wide(getattr(source, field)) for field in reads}
        checked = source._replace(**numbers)
    else:
        checked = _split_of_matrix(name, source, labels, reads, scale)
    if classes is not None and checked.classes != classes:
        raise ValueError(f"{name} expects {classes} classes, got {checked.classes}")
    for field in reads:
        if not bool(getattr(checked, field).isfinite().all()):
            raise ValueError(
                f"{name} expects finite numbers, got NaN or infinity in the split's {field!r}; "
                f"a field that was not requested with reads= is NaN"
            )
    return checked


def _split_of_matrix(
    name: str, similarity: Tensor, labels: Tensor | None, reads: tuple[str, ...], scale: float
) -> Split:
    check_floating(name, "a Split or similarity", similarity)
    if labels is None:
        raise ValueError(f"{name} expects labels with similarity, got none")
    if similarity.ndim != 2 or similarity.shape[1] < 2:
        raise ValueError(
            f"{name} expects similarity of shape (N, C) with 2 classes or more, "
            f"got {tuple(similarity.shape)}"
        )
    check_labels(name, labels, similarity)
    similarity, labels = _drop_ignored(name, similarity, labels, similarity.shape[1])
    return split(wide(similarity), labels, scale=scale, reads=reads)


def as_examples(
    name: str, features: Tensor, labels: Tensor, classes: int, size: int
) -> tuple[Tensor, Tensor]:
    """Check features of shape ``(N, D)`` and their labels, and convert them to float64."""
    check_floating(name, "features", features)
    if features.ndim != 2 or features.shape[1] != size:
        raise ValueError(
            f"{name} expects features of shape (N, {size or 'D'}), got {tuple(features.shape)}"
        )
    check_labels(name, labels, features)
    features, labels = _drop_ignored(name, features, labels, classes)
    if not bool(features.isfinite().all()):
        raise ValueError(f"{name} expects finite features, got NaN or infinity")
    return features.detach().double(), labels


def check_features(name: str, what: str, features: Tensor) -> None:
    """Raise an error unless there are rows of finite features."""
    check_floating(name, f"{what} features", features)
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(
            f"{name} expects {what} features of shape (N, D) with a row or more, "
            f"got {tuple(features.shape)}"
        )
    wrong = int((~features.isfinite()).any(1).sum())
    if wrong:
        raise ValueError(
            f"{name} expects finite features, got NaN or infinity in {wrong:,} of "
            f"{len(features):,} rows of the {what}"
        )


def check_one_space(name: str, query: Tensor, others: Tensor, what: str) -> None:
    """Raise ``ValueError`` for features of different dimensions or on different devices."""
    if others.shape[1] != query.shape[1] or others.device != query.device:
        raise ValueError(
            f"{name} expects query and {what} of one dimension and device, got {query.shape[1]} "
            f"on {query.device} and {others.shape[1]} on {others.device}"
        )


def count_classes(labels: Tensor) -> int:
    """Return one more than the largest label."""
    return int(labels.max()) + 1 if bool((labels >= 0).any()) else 1


def as_prototypes(name: str, prototypes: Tensor, *, several: bool = False) -> Tensor:
    """Check prototypes of shape ``(C, D)``; where a class may have several, ``(C, K, D)``."""
    check_floating(name, "prototypes", prototypes)
    if prototypes.ndim not in ((2, 3) if several else (2,)) or 0 in prototypes.shape:
        shapes = "(C, D) or (C, K, D)" if several else "(C, D)"
        raise ValueError(
            f"{name} expects prototypes of shape {shapes}, got {tuple(prototypes.shape)}"
        )
    return prototypes.detach()


def _drop_ignored(name: str, rows: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    labels = labels.long()
    valid = labels != IGNORED
    if not bool(valid.all()):
        rows, labels = rows[valid], labels[valid]
    if len(labels):
        low, high = (int(end) for end in labels.aminmax())
        if low < 0 or high >= classes:
            raise ValueError(
                f"{name} expects labels from 0 to {classes - 1} or {IGNORED}, got {low} to {high}"
            )
    return rows, labels


def warn_undefined(name: str, why: str) -> None:
    """Warn that a part of a result is NaN, and why."""
    warnings.warn(f"{name}: {why}", stacklevel=4)


def warn_absent(name: str, counts: Tensor) -> None:
    """Warn if classes have no example."""
    absent = int((counts == 0).sum())
    if absent:
        warn_undefined(
            name, f"{absent} of {len(counts)} classes have no example; their entries are NaN"
        )
