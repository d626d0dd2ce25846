"""Metrics of margins, angles, prototypes, neural collapse and recognition.

:mod:`tammes.metrics.functional` has the metrics as functions and needs torch only. The classes here
accumulate over batches and ranks; they are torchmetrics metrics, and torchmetrics is imported when
the first of them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tammes.metrics import functional

if TYPE_CHECKING:
    from tammes.metrics.collapse import NeuralCollapse
    from tammes.metrics.discriminability import Discriminability
    from tammes.metrics.groups import Calibration, GroupAccuracy
    from tammes.metrics.margins import Angles, HardMarginLoss, SampleMargin, SoftmaxBias
    from tammes.metrics.openset import Identification, OpenSet
    from tammes.metrics.prototypes import ClassMargin, PrototypeNorms
    from tammes.metrics.retrieval import Retrieval
    from tammes.metrics.verification import Verification

__all__ = [
    "Angles",
    "Calibration",
    "ClassMargin",
    "Discriminability",
    "GroupAccuracy",
    "HardMarginLoss",
    "Identification",
    "NeuralCollapse",
    "OpenSet",
    "PrototypeNorms",
    "Retrieval",
    "SampleMargin",
    "SoftmaxBias",
    "Verification",
    "functional",
]

_MODULES = (
    "collapse",
    "discriminability",
    "groups",
    "margins",
    "openset",
    "prototypes",
    "retrieval",
    "verification",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _MODULES:
            value = getattr(import_module(f"tammes.metrics.{home}"), name, None)
            if value is not None:
                globals()[name] = value
                return value
    raise AttributeError(f"module 'tammes.metrics' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
