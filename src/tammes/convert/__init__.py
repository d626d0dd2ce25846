"""Migrate from other libraries: load heads trained with them, or use drop-in replacements.

Only torch is needed: the functions read a saved state dict or the attributes of a live module, and
never import the other library.
"""

from tammes.convert.drop_in import (
    AdditiveAngularMargin,
    AddMarginProduct,
    AngularMargin,
    ArcMarginProduct,
    PartialFC_V2,
)
from tammes.convert.trained_heads import from_insightface, from_pytorch_metric_learning

__all__ = [
    "AddMarginProduct",
    "AdditiveAngularMargin",
    "AngularMargin",
    "ArcMarginProduct",
    "PartialFC_V2",
    "from_insightface",
    "from_pytorch_metric_learning",
]
