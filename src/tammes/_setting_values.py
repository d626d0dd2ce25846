"""Values of settings: normalize, format and inspect them."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tammes._validation import check_without_gradient


def format_number(weight: float) -> str:
    """Format a number with as few digits as possible without losing precision."""
    short = f"{weight:g}"
    return short if float(short) == weight else repr(float(weight))


def format_setting(value: Any) -> str:
    """Format a setting; a long tuple is abbreviated."""
    if isinstance(value, tuple) and len(value) > 10:
        head = ", ".join(map(repr, value[:3]))
        return f"({head}, ... {len(value)} values)"
    return repr(value)


def is_number(value: Any) -> bool:
    """Whether a setting is a number; booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def on_host(value: Any) -> bool:
    """Whether a value is in host memory, so that reading it does not synchronize."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def normalize_setting(name: str, key: str, value: Any, default: Any) -> Any:
    """Convert a setting to plain numbers or tuples, which can be compared, printed and pickled."""
    hint = f"a call takes one, criterion(..., {key}=...); tammes.states.LearnedNumber learns one"
    check_without_gradient(name, key, value, hint)
    if isinstance(value, Tensor) or hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = tuple(value)
        numbers: Sequence[Any] = value
    else:
        numbers = (value,)
    if is_number(default) and any(
        not isinstance(v, (int, float)) or math.isnan(v) for v in numbers
    ):
        nested = isinstance(value, tuple) and any(isinstance(v, Sequence | Tensor) for v in value)
        shown = f"{len(value)} sequences" if nested else format_setting(value)
        raise ValueError(f"{name} expects {key} to be a number or one per class, got {shown}")
    if isinstance(default, str) and not isinstance(value, str):
        raise ValueError(f"{name} expects {key} to be a string, got {format_setting(value)}")
    return value


def extremes(value: Any) -> tuple[Any, ...]:
    """Return the smallest and the largest of several numbers, or any other value unchanged.

    Example:
        >>> import torch
        >>> extremes((0.3, 0.1, 0.2)), extremes(torch.tensor([2.0, 2.0])), extremes("linear")
        ((0.1, 0.3), (2.0,), ('linear',))
    """
    if isinstance(value, Tensor):
        if not value.numel():
            return ()
        # Both are NaN if any value is.
        lowest, highest = (number.item() for number in value.detach().aminmax())
    elif isinstance(value, tuple) and value:
        lowest, highest = min(value), max(value)
    else:
        return (value,)
    return (lowest,) if lowest == highest else (lowest, highest)
