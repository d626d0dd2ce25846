"""Convert the results of metrics."""

from typing import Any

from torch import Tensor


def scalars(result: Any, prefix: str = "") -> dict[str, float]:
    """Return the scalars of a result by name, for logging; vectors and None are skipped.

    Args:
        result: result of a metric.
        prefix: prefix of each name.

    Returns:
        Numbers by name; names of nested results are joined by a dot.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import prototype_norms, scalars
        >>> scalars(prototype_norms(torch.eye(2)), "norms.")["norms.ratio"]
        1.0
    """
    numbers: dict[str, float] = {}
    for name, value in result._asdict().items():
        if isinstance(value, Tensor):
            if value.ndim == 0:
                numbers[prefix + name] = float(value)
        elif isinstance(value, bool | int | float):
            numbers[prefix + name] = float(value)
        elif hasattr(value, "_asdict"):
            numbers |= scalars(value, f"{prefix}{name}.")
    return numbers
