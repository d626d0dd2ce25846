"""Tammes: large-margin losses, heads and metrics for PyTorch.

Read in this order: :mod:`tammes.split`, :mod:`tammes.losses.angular`, :mod:`tammes.heads.cosine`,
:mod:`tammes.criterion.criterion`. Importing the package imports torch and nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tammes import convert, geometry, losses, metrics, schedules
from tammes.criterion.criterion import Criterion
from tammes.criterion.presets import (
    LDAM,
    ArcFace,
    CombinedMargin,
    CosFace,
    GMSoftmax,
    LargeMarginGaussian,
    LMSoftmax,
    LSoftmax,
    NormFace,
    Softmax,
    SphereFace,
)
from tammes.heads import (
    CosineHead,
    DistanceHead,
    GaussianHead,
    Head,
    LinearHead,
    ShardedHead,
    SimplexHead,
    carry_over,
)
from tammes.losses import *  # noqa: F403
from tammes.losses.aliases import (
    a_softmax,
    aam_softmax,
    am_softmax,
    balanced_softmax,
    lmcl,
    mlcd,
    proxy_nca,
    proxy_nca_pp,
    sphereface_r,
)
from tammes.losses.imbalance import adjust_logits, margins_from_counts
from tammes.losses.subspace import direct_sum, spectral_sum
from tammes.spelling import nearest_name
from tammes.split import Split, quadratic_above, split
from tammes.term_decorator import term
from tammes.terms import Batch, Loss, Sum, Term

if TYPE_CHECKING:
    from tammes import advise as advise
    from tammes.doctor.diagnose import diagnose as diagnose
    from tammes.gallery.gallery import Gallery as Gallery
    from tammes.lab.inference.trained_model import load as load

__version__ = "0.1.0"

__all__ = [
    "LDAM",
    "ArcFace",
    "Batch",
    "CombinedMargin",
    "CosFace",
    "CosineHead",
    "Criterion",
    "DistanceHead",
    "GMSoftmax",
    "Gallery",
    "GaussianHead",
    "Head",
    "LMSoftmax",
    "LSoftmax",
    "LargeMarginGaussian",
    "LinearHead",
    "Loss",
    "NormFace",
    "ShardedHead",
    "SimplexHead",
    "Softmax",
    "SphereFace",
    "Split",
    "Sum",
    "Term",
    "a_softmax",
    "aam_softmax",
    "adjust_logits",
    "am_softmax",
    "balanced_softmax",
    "carry_over",
    "convert",
    "diagnose",
    "direct_sum",
    "geometry",
    "lmcl",
    "load",
    "margins_from_counts",
    "metrics",
    "mlcd",
    "proxy_nca",
    "proxy_nca_pp",
    "quadratic_above",
    "schedules",
    "spectral_sum",
    "sphereface_r",
    "split",
    "term",
]
__all__ += losses.__all__


_LAZY = {
    "Gallery": "tammes.gallery",
    "diagnose": "tammes.doctor",
    "load": "tammes.lab.inference.trained_model",
}
"""Modules of the names that are imported on first use."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "advise":
            return import_module("tammes.advise")
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        # Losses are there twice: as a criterion (CosFace) and as a term (cosface).
        alike = [each for each in __all__ if each[0].isupper() == name[:1].isupper()]
        near = None if name[:1] in ("", "_") else nearest_name(name, alike)
        hint = f"; did you mean {near}?" if near else ""
        raise AttributeError(f"module 'tammes' has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        hidden = {"Any", "TYPE_CHECKING", "import_module", "nearest_name"}
        return sorted({*globals(), *__all__, "advise"} - hidden)
