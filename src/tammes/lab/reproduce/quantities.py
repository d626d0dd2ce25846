"""What recipes compare: numbers of a finished run, under the names that tables have for them."""

from collections.abc import Mapping
from typing import Any

from tammes.lab.stats.seed_groups import QUANTITIES, Quantity

_FEWSHOT = {
    "shot1": "1-shot accuracy",
    "shot5": "5-shot accuracy",
    "validation_shot1": "1-shot accuracy on validation classes",
    "validation_shot5": "5-shot accuracy on validation classes",
    "base_shot1": "1-shot accuracy on base classes",
    "base_shot5": "5-shot accuracy on base classes",
    "base_accuracy": "accuracy on base classes",
}
"""Shares of images: novel classes where none are named, and base images held out of training."""
_ANALYSED = {
    "d_intra_base": "D_intra on base classes",
    "d_inter_base": "D_inter on base classes",
    "phi_base": "phi on base classes",
    "d_intra_novel": "D_intra on novel classes",
    "d_inter_novel": "D_inter on novel classes",
    "phi_novel": "phi on novel classes",
    "p_same": "P^s",
}
"""Distances between and within classes; how often two images of a novel class share a base one."""

KNOWN: dict[str, Quantity] = {
    **{quantity.key: quantity for quantity in QUANTITIES if quantity.key != "seconds"},
    "error": Quantity("error", "error", ("test", "accuracy"), "%", -100.0, 2, -1, offset=100.0),
    "train_error": Quantity(
        "train_error", "training error", ("train", "accuracy"), "%", -100.0, 2, -1, offset=100.0
    ),
    "norm_ratio": Quantity(
        "norm_ratio", "ratio of prototype norms", ("prototypes", "norm_ratio"), better=-1
    ),
    **{
        key: Quantity(key, name, ("fewshot", key), "%", 100.0, 2, 1)
        for key, name in _FEWSHOT.items()
    },
    **{key: Quantity(key, name, ("fewshot", key)) for key, name in _ANALYSED.items()},
}
"""Quantities by the name a recipe has for them."""


def read_all(final: Mapping[str, Any]) -> dict[str, float]:
    """All quantities that a ``final.json`` has; those of episodes are under ``fewshot``.

    Example:
        >>> read_all({"test": {"accuracy": 0.75}})
        {'accuracy': 75.0, 'error': 25.0}
    """
    found = {key: quantity.read(final) for key, quantity in KNOWN.items()}
    return {key: value for key, value in found.items() if value is not None}
