"""Convert nested values to JSON with their tensors kept aside, and back, without pickle."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor


def to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON; its tensors are added to ``tensors`` under unique names.

    Args:
        value: tensors, numbers, strings, None, and lists, tuples and dictionaries of them.
        name: name of the value, a prefix of the names of its tensors.
        tensors: collects the tensors by name.

    Raises:
        TypeError: the value holds something that cannot be saved.

    Example:
        >>> tensors = {}
        >>> to_json({"step": 3, "mean": torch.zeros(2)}, "more", tensors)
        {'dict': [['step', 3], ['mean', {'tensor': 'more.mean'}]]}
        >>> list(tensors)
        ['more.mean']
    """
    if isinstance(value, Tensor):
        while name in tensors:
            name += "_"
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        if any(isinstance(key, Tensor) for key in value):
            raise TypeError(f"a checkpoint expects no tensors as keys, got one in {name}")
        return {
            "dict": [
                [to_json(key, name, {}), to_json(item, f"{name}.{key}", tensors)]
                for key, item in value.items()
            ]
        }
    raise TypeError(
        "a checkpoint holds tensors, numbers, strings, and lists, tuples and dictionaries of them, "
        f"got {type(value).__name__} as {name}"
    )


def from_json(value: Any, tensors: dict[str, Any]) -> Any:
    """Restore the value that :func:`to_json` converted, with its tensors by name."""
    if isinstance(value, list):
        return [from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "float":
        return float(inner)
    items = [from_json(item, tensors) for item in inner]
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return dict(items)
    raise ValueError(f"{kind!r} is an unknown kind of value")


def tensor_names(value: Any) -> Iterator[str]:
    """Yield the names of the tensors in the JSON of a value."""
    if isinstance(value, list):
        for item in value:
            yield from tensor_names(item)
    elif isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind == "tensor":
            yield inner
        else:
            yield from tensor_names(inner)
