"""Nested values as JSON with their tensors taken out, and back: what a pickle is not needed for."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors go into ``tensors`` by a name of their own.

    Args:
        value: tensors, numbers, texts, None, and lists, tuples and dictionaries of them.
        name: how the value is called.
        tensors: added to.

    Raises:
        TypeError: a sentence that names what cannot be saved.

    Example:
        >>> tensors = {}
        >>> take_apart({"step": 3, "mean": torch.zeros(2)}, "more", tensors)
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
        items = [take_apart(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        if any(isinstance(key, Tensor) for key in value):
            raise TypeError(f"a checkpoint expects no tensors as keys, got one in {name}")
        return {
            "dict": [
                [take_apart(key, name, {}), take_apart(item, f"{name}.{key}", tensors)]
                for key, item in value.items()
            ]
        }
    raise TypeError(
        "a checkpoint holds tensors, numbers, texts, and lists, tuples and dictionaries of them, "
        f"got {type(value).__name__} as {name}"
    )


def put_together(value: Any, tensors: dict[str, Any]) -> Any:
    """The value that :func:`take_apart` was given.

    Args:
        value: as JSON.
        tensors: by name.
    """
    if isinstance(value, list):
        return [put_together(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "float":
        return float(inner)
    items = [put_together(item, tensors) for item in inner]
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return {key: item for key, item in items}
    raise ValueError(f"{kind!r} is not known")


def names_in(value: Any) -> Iterator[str]:
    """Names of the tensors in a value as JSON."""
    if isinstance(value, list):
        for item in value:
            yield from names_in(item)
    elif isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind == "tensor":
            yield inner
        else:
            yield from names_in(inner)
