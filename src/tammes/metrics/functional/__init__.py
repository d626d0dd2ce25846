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
from tammes.metrics.functional.identities import BootstrapInterval, intervals
from tammes.metrics.functional.margins import (
    HardMarginLossResult,
    SampleMarginResult,
    SoftmaxBiasResult,
    hard_margin_loss,
    margins,
    sample_margin,
    softmax_bias,
)
from tammes.metrics.functional.openset import (
    IdentificationResult,
    OpenSetAccuracy,
    OpenSetResult,
    identification,
    open_set_accuracy,
    openset,
)
from tammes.metrics.functional.openset_scores import (
    GaussianClasses,
    cac_score,
    energy_score,
    gaussian_classes,
    knn_score,
    logit_score,
    mahalanobis_score,
    prototype_score,
    softmax_score,
)
from tammes.metrics.functional.outputs import scalars
from tammes.metrics.functional.prototypes import (
    ClassMarginResult,
    PrototypeNormsResult,
    class_margin,
    prototype_norms,
)
from tammes.metrics.functional.reranking import k_reciprocal
from tammes.metrics.functional.retrieval import QueryValues, RetrievalResult, retrieval
from tammes.metrics.functional.subcenters import SubcenterUsageResult, subcenter_usage
from tammes.metrics.functional.verification import (
    FoldAccuracy,
    VerificationResult,
    fold_accuracy,
    normalize_scores,
    verification,
)

__all__ = [
    "AnglesResult",
    "BootstrapInterval",
    "ClassMarginResult",
    "Confidence",
    "DiscriminabilityResult",
    "DiscriminabilityValues",
    "FoldAccuracy",
    "GaussianClasses",
    "GroupAccuracyResult",
    "HardMarginLossResult",
    "IdentificationResult",
    "NeuralCollapseResult",
    "OpenSetAccuracy",
    "OpenSetResult",
    "PrototypeNormsResult",
    "QueryValues",
    "RetrievalResult",
    "SampleMarginResult",
    "SimplexDeviation",
    "SoftmaxBiasResult",
    "SubcenterUsageResult",
    "VerificationResult",
    "angles",
    "cac_score",
    "class_margin",
    "confidence",
    "discriminability",
    "energy_score",
    "fold_accuracy",
    "gaussian_classes",
    "group_accuracy",
    "hard_margin_loss",
    "identification",
    "intervals",
    "k_reciprocal",
    "knn_score",
    "logit_score",
    "mahalanobis_score",
    "margins",
    "nearest_mean",
    "neural_collapse",
    "normalize_scores",
    "open_set_accuracy",
    "openset",
    "prototype_norms",
    "prototype_score",
    "retrieval",
    "sample_margin",
    "scalars",
    "simplex_deviation",
    "softmax_bias",
    "softmax_score",
    "subcenter_usage",
    "verification",
]
