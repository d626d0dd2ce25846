"""Move from other libraries: load heads that were trained with them, or replace a class of theirs.

All of it needs torch only: it reads a saved state dict or the attributes of a live module, and
never imports the other library.
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
