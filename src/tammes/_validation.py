"""Validate inputs; each error names the caller, the expected and the received value."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tammes.spelling import nearest_name

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def describe(value: Any) -> str:
    """Describe an argument by its type and shape, never by its values.

    Example:
        >>> describe(torch.zeros(2, 3)), describe([1, 2])
        ('a tensor of shape (2, 3)', 'list')
    """
    shape = getattr(value, "shape", None)
    kind = "a tensor" if isinstance(value, Tensor) else type(value).__name__
    return kind if shape is None else f"{kind} of shape {tuple(shape)}"


def check_sizes(name: str, embedding_size: int, num_classes: int) -> None:
    """Raise an error unless there are at least two classes and one dimension, as integers."""
    for key, size in (("embedding_size", embedding_size), ("num_classes", num_classes)):
        if isinstance(size, Tensor) and size.ndim:
            raise TypeError(
                f"{name} expects {key} to be a whole number, got {describe(size)}; "
                "features and labels go to the criterion when it is called"
            )
        whole_number(name, key, size)
    if num_classes < 2:
        raise ValueError(f"{name} expects at least 2 classes, got num_classes={num_classes}")
    if embedding_size < 1:
        raise ValueError(f"{name} expects embedding_size of 1 or more, got {embedding_size}")


def whole_number(name: str, what: str, value: Any) -> int:
    """Convert an integer, such as one of numpy, to ``int``; raise for anything else."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} expects {what} to be a whole number, got {value!r}")


def unknown_setting(name: str, key: str, known: Iterable[str]) -> TypeError:
    """Build the error for an unknown keyword."""
    known = sorted(known)
    near = nearest_name(key, known)
    hint = f"did you mean {near}?" if near else f"it has {', '.join(known) or 'none'}"
    if near is None and nearest_name(key, ["scale"]):
        hint = "the scale is the head's"
    if key in ("device", "dtype"):
        hint = f".to({key}=...) sets it once it is built"
    return TypeError(f"{name} has no setting {key!r}; {hint}")


def check_reduction(reduction: str) -> None:
    """Raise ``ValueError`` for an unknown reduction."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"Criterion expects reduction 'mean', 'sum' or 'none', got {reduction!r}")


def check_tensor(name: str, what: str, value: Any) -> None:
    """Raise ``TypeError`` for a list, an array or anything else that is not a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} expects {what} to be a tensor, got {type(value).__name__}; "
            "torch.as_tensor makes one"
        )


def check_floating(name: str, what: str, value: Any) -> None:
    """Raise ``TypeError`` unless a value is a tensor of a floating type."""
    check_tensor(name, what, value)
    if not value.is_floating_point():
        raise TypeError(f"{name} expects {what} of a floating type, got {value.dtype}")


def check_without_gradient(name: str, what: str, value: Any, hint: str) -> None:
    """Raise ``TypeError`` for a tensor that requires a gradient where only its value is taken."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(
            f"{name} expects {what} without gradient, got a tensor that requires one; {hint}"
        )


def check_features(name: str, features: Tensor, size: int) -> None:
    """Raise an error for features of the wrong type or shape."""
    check_tensor(name, "features", features)
    if not features.is_floating_point():
        hint = "features.float() converts them"
        if features.ndim < 2:
            hint = "features come first and labels second: criterion(features, labels)"
        raise TypeError(f"{name} expects features of a floating type, got {features.dtype}; {hint}")
    if features.ndim != 2 or features.shape[1] != size:
        hint = "; images go through a network first" if features.ndim == 4 else ""
        if features.ndim == 4 and features.shape[1] == size:
            hint = "; pool feature maps first: features.mean((2, 3))"
        raise ValueError(
            f"{name} expects features of shape (N, {size}), got {tuple(features.shape)}{hint}"
        )


def check_labels(name: str, labels: Tensor, features: Tensor, *, several: bool = False) -> None:
    """Raise an error for labels of the wrong type or shape, or on another device.

    Args:
        name: name that the message begins with.
        labels: shape ``(N,)``.
        features: shape ``(N, D)``.
        several: whether an example may have several, shape ``(N, P)``.
    """
    if not isinstance(labels, Tensor):
        hint = "torch.as_tensor makes one"
        if _are_names(labels):
            hint = "number class names first: names = sorted(set(labels)), then names.index(label)"
        raise TypeError(
            f"{name} expects labels to be a tensor of integers, got {type(labels).__name__}; {hint}"
        )
    if labels.dtype not in INTEGERS:
        hint = _label_hint(labels) or "; labels.long() converts them"
        raise TypeError(f"{name} expects labels of an integer type, got {labels.dtype}{hint}")
    if labels.shape[: labels.ndim - (several and labels.ndim == 2)] != features.shape[:1]:
        more = f" or ({len(features)}, P)" if several else ""
        raise ValueError(
            f"{name} expects labels of shape ({len(features)},){more}, got {tuple(labels.shape)}"
            f"{_label_hint(labels)}"
        )
    if labels.device != features.device:
        raise ValueError(
            f"{name} expects labels on the features' device {features.device}, got {labels.device}"
        )


def check_batch(
    name: str,
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    head: str,
    several: bool,
) -> None:
    """Raise an error for features or labels that do not fit a criterion, whatever their values.

    Args:
        name: name that messages begin with.
        features: shape ``(N, D)``.
        labels: shape ``(N,)``.
        prototypes: prototypes of the head, with D dimensions.
        head: name that messages about the shape of features begin with.
        several: whether an example may have several labels, shape ``(N, P)``.
    """
    check_features(head, features, prototypes.shape[-1])
    check_labels(name, labels, features, several=several)
    if features.device != prototypes.device:
        raise ValueError(
            f"{name} expects features on {prototypes.device}, where its prototypes are, "
            f"got {features.device}"
        )


def _are_names(labels: Any) -> bool:
    """Whether labels are class names: strings, in a sequence or an array."""
    dtype = getattr(labels, "dtype", None)
    if dtype is not None:
        return getattr(dtype, "kind", "") in "UOS"
    return isinstance(labels, Sequence) and any(isinstance(label, str) for label in labels)


def _label_hint(labels: Tensor) -> str:
    """Hint, for the end of a message, how to turn 2-D labels into one label per example."""
    if labels.ndim != 2:
        return ""
    if labels.shape[1] == 1:
        return "; labels.squeeze(1) drops the second dimension"
    return "; if the rows are one-hot, use labels.argmax(1)"


def check_weights(name: str, weights: Tensor, labels: Tensor) -> None:
    """Raise an error unless the weights are a tensor with one value per example."""
    check_tensor(name, "weights", weights)
    if weights.shape != labels.shape[:1]:
        raise ValueError(
            f"{name} expects weights of shape ({len(labels)},), got {tuple(weights.shape)}"
        )


def check_class_weights(weights: Sequence[float] | Tensor, classes: int) -> Tensor:
    """Convert class weights to a tensor: one finite weight of 0 or more per class."""
    if isinstance(weights, Tensor) and weights.is_meta:
        raise ValueError("Criterion expects class_weights that have values, got a tensor on meta")
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    checked = torch.as_tensor(weights, device="cpu").to(dtype)
    if checked.shape != (classes,):
        raise ValueError(
            f"Criterion expects class_weights of shape ({classes},), got {tuple(checked.shape)}"
        )
    wrong = checked[~((checked >= 0) & checked.isfinite())]
    if len(wrong):
        raise ValueError(f"Criterion expects class_weights of 0 or more, got {wrong[0].item()}")
    return checked


def transforming() -> bool:
    """Whether this code is being traced or transformed, so that tensors have no values yet."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def batched(gradients: Sequence[Tensor | None]) -> bool:
    """Whether gradients are batched, so that backward must not work in place."""
    return transforming() or any(
        gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)
        for gradient in gradients
    )


def check_range(name: str, labels: Tensor, classes: int, ignore: int | None = None) -> bool:
    """Raise ``ValueError`` for labels out of range; synchronizes on a GPU.

    Returns:
        Whether no label is the ignored one.
    """
    if not labels.numel():
        return True
    low, high = map(int, torch.aminmax(labels))
    within = low >= 0 and high < classes
    if within and (ignore is None or not 0 <= ignore < classes):
        return True
    known = labels if ignore is None else labels[labels != ignore]
    if known.numel() and not within:
        low, high = map(int, torch.aminmax(known))
        if low < 0 or high >= classes:
            or_ignored = "" if ignore is None else f" or ignore_index={ignore}"
            hint = "; classes count from 0" if (low, high) == (1, classes) else ""
            raise ValueError(
                f"{name} expects labels from 0 to {classes - 1}{or_ignored}, "
                f"got {low} to {high}{hint}"
            )
    return known.shape[0] == labels.shape[0]


def check_unmasked(name: str, masked: Tensor, labels: Tensor) -> None:
    """Raise ``ValueError`` for examples whose target class is masked; synchronizes on a GPU.

    Args:
        name: name that the message begins with.
        masked: whether the target class of each example is masked, shape ``(N,)``.
        labels: shape ``(N,)``.
    """
    if masked.any():
        raise ValueError(
            f"{name} expects labels of classes that are not masked, got class "
            f"{int(labels[masked][0])}, which is -inf, in {int(masked.sum())} of {len(labels)} rows"
        )


def check_classes(
    name: str, labels: Tensor, classes: int, masked: Tensor | None, ignore: int | None = None
) -> bool:
    """Raise ``ValueError`` for labels out of range or masked; synchronizes on a GPU.

    Args:
        name: name that the message begins with.
        labels: shape ``(N,)``.
        classes: number of classes C.
        masked: mask of the classes, shape ``(C,)``, or ``None``.
        ignore: label of examples that do not count.

    Returns:
        Whether no label is the ignored one.
    """
    none_ignored = check_range(name, labels, classes, ignore)
    if masked is None or not masked.any():
        return none_ignored
    left = classes - int(masked.sum())
    if left < 2:
        raise ValueError(f"{name} expects at least 2 classes that are not masked, got {left}")
    counts = torch.ones_like(labels, dtype=torch.bool) if ignore is None else labels != ignore
    check_unmasked(name, masked[torch.where(counts, labels, 0)] & counts, labels)
    return none_ignored


def check_values(
    name: str,
    features: Tensor,
    labels: Tensor,
    classes: int,
    masked: Tensor | None,
    ignore: int,
) -> bool:
    """Raise ``ValueError`` for labels out of range or masked, and for non-finite features.

    Synchronizes on a GPU; see :func:`check_classes` for the arguments and the result.
    """
    none_ignored = check_classes(name, labels, classes, masked, ignore)
    # Summing is cheaper than testing every element, and a non-finite one makes the sum so.
    wide = torch.float32 if features.dtype.itemsize < 4 else features.dtype
    if not math.isfinite(features.detach().sum(dtype=wide).item()):
        counts = labels != ignore
        counts = counts if counts.ndim == 1 else counts.any(1)
        broken = int((~features.detach().isfinite().all(1) & counts).sum())
        if broken:
            raise ValueError(
                f"{name} expects finite features, "
                f"got NaN or infinity in {broken} of {len(features)} rows"
            )
    return none_ignored
