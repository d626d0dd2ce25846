"""Quantities that recipes compare: numbers of a finished run, by name."""

from collections.abc import Mapping
from typing import Any

from tammes.lab.stats.seed_groups import QUANTITIES, Quantity
from tammes.metrics.functional.groups import GROUPS

_FEWSHOT = {
    "shot1": "1-shot accuracy",
    "shot5": "5-shot accuracy",
    "validation_shot1": "1-shot accuracy on validation classes",
    "validation_shot5": "5-shot accuracy on validation classes",
    "base_shot1": "1-shot accuracy on base classes",
    "base_shot5": "5-shot accuracy on base classes",
    "base_accuracy": "accuracy on base classes",
}
"""Accuracies, on novel classes unless named otherwise; base images are held out of training."""
_ANALYSED = {
    "d_intra_base": "D_intra on base classes",
    "d_inter_base": "D_inter on base classes",
    "phi_base": "phi on base classes",
    "d_intra_novel": "D_intra on novel classes",
    "d_inter_novel": "D_inter on novel classes",
    "phi_novel": "phi on novel classes",
    "p_same": "P^s",
}
"""Distances between and within classes; probability that two novel images share a base class."""
_IDENTITIES = {
    "rank_5": ("rank 5", "recall_at_5"),
    "map_at_r": ("MAP@R", "map_at_r"),
    "minp": ("mINP", "minp"),
    "auc": ("AUC", "auc"),
    "tar_far_1e-2": ("TAR at FAR 1 %", "tar_at_far_1e-2"),
    "tar_far_1e-3": ("TAR at FAR 0.1 %", "tar_at_far_1e-3"),
    "verification_accuracy": ("verification accuracy", "verification_accuracy"),
    "identification": ("rank 1 in 1:N", "identification_rank_1"),
    "tpir_fpir_1e-2": ("TPIR at FPIR 1 %", "tpir_at_fpir_1e-2"),
}
"""Name, and key in ``final.json``, of measures on identities unseen in training."""

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
        key: Quantity(key, f"accuracy, {key}", ("test", f"accuracy_{key}"), "%", 100.0, 2, 1)
        for key in GROUPS
    },
    "dominant": Quantity(
        "dominant", "accuracy, dominant centres", ("test", "accuracy_dominant"), "%", 100.0, 2, 1
    ),
    **{
        key: Quantity(key, name, ("fewshot", key), "%", 100.0, 2, 1)
        for key, name in _FEWSHOT.items()
    },
    **{key: Quantity(key, name, ("fewshot", key)) for key, name in _ANALYSED.items()},
    **{
        key: Quantity(key, name, ("test", path), "%", 100.0, 2, 1)
        for key, (name, path) in _IDENTITIES.items()
    },
}
"""Quantities by their names in recipes."""


def read_intervals(final: Mapping[str, Any]) -> dict[str, list[float]]:
    """Read the intervals over identities of a ``final.json``, in the units of the quantities.

    Example:
        >>> read_intervals({"test": {"eer": 0.1, "intervals": {"eer": [0.0625, 0.125]}}})
        {'eer': [6.25, 12.5]}
    """
    intervals = final.get("test", {}).get("intervals", {})
    return {
        key: [*map(quantity.convert, intervals[quantity.path[1]])]
        for key, quantity in KNOWN.items()
        if quantity.path[0] == "test" and quantity.path[1] in intervals
    }


def read_all(final: Mapping[str, Any]) -> dict[str, float]:
    """Read all quantities of a ``final.json``, with those of episodes under ``fewshot``.

    Example:
        >>> read_all({"test": {"accuracy": 0.75}})
        {'accuracy': 75.0, 'error': 25.0}
    """
    found = {key: quantity.read(final) for key, quantity in KNOWN.items()}
    return {key: value for key, value in found.items() if value is not None}
