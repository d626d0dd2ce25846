"""What to do with an answer."""

from typing import Any

from torch import Tensor


def scalars(result: Any, prefix: str = "") -> dict[str, float]:
    """The single numbers of a result by name, for a log; vectors and what is None are left out.

    Args:
        result: what a measure returned.
        prefix: put before each name.

    Returns:
        Names, with those of nested results joined by a dot, and numbers.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import prototype_norms, scalars
        >>> scalars(prototype_norms(torch.eye(2)), "norms.")["norms.ratio"]
        1.0
    """
    found: dict[str, float] = {}
    for name, value in result._asdict().items():
        if isinstance(value, Tensor):
            if value.ndim == 0:
                found[prefix + name] = float(value)
        elif isinstance(value, bool | int | float):
            found[prefix + name] = float(value)
        elif hasattr(value, "_asdict"):
            found |= scalars(value, f"{prefix}{name}.")
    return found
