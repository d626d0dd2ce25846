"""Metrics as functions of tensors; they need torch only."""

from tammes.metrics.functional.angles import AnglesResult, angles
from tammes.metrics.functional.collapse import (
    NeuralCollapseResult,
    SimplexDeviation,
    nearest_mean,
    neural_collapse,
    simplex_deviation,
)
from tammes.metrics.functional.discriminability import (
    DiscriminabilityResult,
    DiscriminabilityValues,
    discriminability,
)
from tammes.metrics.functional.groups import (
    Confidence,
    GroupAccuracyResult,
    confidence,
    group_accuracy,
)
from tammes.metrics.functional.margins import (
    HardMarginLossResult,
    SampleMarginResult,
    SoftmaxBiasResult,
    hard_margin_loss,
    margins,
    sample_margin,
    softmax_bias,
)
from tammes.metrics.functional.outputs import scalars
from tammes.metrics.functional.prototypes import (
    ClassMarginResult,
    PrototypeNormsResult,
    class_margin,
    prototype_norms,
)

__all__ = [
    "AnglesResult",
    "ClassMarginResult",
    "Confidence",
    "DiscriminabilityResult",
    "DiscriminabilityValues",
    "GroupAccuracyResult",
    "HardMarginLossResult",
    "NeuralCollapseResult",
    "PrototypeNormsResult",
    "SampleMarginResult",
    "SimplexDeviation",
    "SoftmaxBiasResult",
    "angles",
    "class_margin",
    "confidence",
    "discriminability",
    "group_accuracy",
    "hard_margin_loss",
    "margins",
    "nearest_mean",
    "neural_collapse",
    "prototype_norms",
    "sample_margin",
    "scalars",
    "simplex_deviation",
    "softmax_bias",
]
