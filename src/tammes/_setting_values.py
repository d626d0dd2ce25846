"""The value of a setting: in its plain form, in print, and what a check has to see of it."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def digits(weight: float) -> str:
    """A number with as many digits as it takes to read it back."""
    short = f"{weight:g}"
    return short if float(short) == weight else repr(float(weight))


def show(value: Any) -> str:
    """A setting as it is printed: of many values the first."""
    if isinstance(value, tuple) and len(value) > 10:
        head = ", ".join(map(repr, value[:3]))
        return f"({head}, ... {len(value)} values)"
    return repr(value)


def is_number(value: Any) -> bool:
    """Whether a setting is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def seen(value: Any) -> bool:
    """Whether a value can be looked at without waiting for an accelerator."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def normalise(name: str, key: str, value: Any, default: Any) -> Any:
    """A setting in its plain form: numbers and tuples of numbers compare, print and pickle."""
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
        raise ValueError(f"{name} expects {key} to be a number or one per class, got {value!r}")
    if isinstance(default, str) and not isinstance(value, str):
        raise ValueError(f"{name} expects {key} to be a string, got {value!r}")
    return value


def extremes(value: Any) -> tuple[Any, ...]:
    """The smallest and the largest of several numbers; anything else as it is.

    Example:
        >>> import torch
        >>> extremes((0.3, 0.1, 0.2)), extremes(torch.tensor([2.0, 2.0])), extremes("linear")
        ((0.1, 0.3), (2.0,), ('linear',))
    """
    if isinstance(value, Tensor):
        if not value.numel():
            return ()
        # NaN if one of them is.
        lowest, highest = (number.item() for number in value.detach().aminmax())
    elif isinstance(value, tuple) and value:
        lowest, highest = min(value), max(value)
    else:
        return (value,)
    return (lowest,) if lowest == highest else (lowest, highest)
