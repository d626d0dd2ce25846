"""Arrangements of points on the sphere, bounds on their angles, and theorems on margin losses."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tammes.geometry.bounds import LargestClassMargin, largest_class_margin
from tammes.geometry.hull import LargestSampleMargin, largest_sample_margin
from tammes.geometry.packing import Packing, pack, riesz_energy
from tammes.geometry.simplex import orthoplex, simplex
from tammes.geometry.theory import (
    combined_margin_lower_bound,
    cosface_lower_bound,
    lm_softmax_lower_bound,
    negative_margin_wins,
    normface_lower_bound,
    novel_ratio,
    risk_lower_bound,
    same_class_probability,
    sample_margin_lower_bound,
    smallest_alpha1,
)

if TYPE_CHECKING:
    from tammes.advise import Advice, advise

__all__ = [
    "Advice",
    "LargestClassMargin",
    "LargestSampleMargin",
    "Packing",
    "advise",
    "combined_margin_lower_bound",
    "cosface_lower_bound",
    "largest_class_margin",
    "largest_sample_margin",
    "lm_softmax_lower_bound",
    "negative_margin_wins",
    "normface_lower_bound",
    "novel_ratio",
    "orthoplex",
    "pack",
    "riesz_energy",
    "risk_lower_bound",
    "same_class_probability",
    "sample_margin_lower_bound",
    "simplex",
    "smallest_alpha1",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Moved to tammes.advise, which itself imports this package.
        if name in ("Advice", "advise"):
            return getattr(import_module("tammes.advise"), name)
        raise AttributeError(f"module 'tammes.geometry' has no attribute {name!r}")
