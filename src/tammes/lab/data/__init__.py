"""Images of the lab: sources, optional noise and imbalance, batch samplers, augmentation.

:func:`load` reads a partition of a source, :func:`write_source` writes images in memory to a new
source, :func:`limit` keeps a few images, :func:`corrupt` adds imbalance and label noise,
:func:`hold_out` splits off a share, :mod:`.samplers` compose batches, and :mod:`.augment` augments
them on the device.
"""

from tammes.lab.data import samplers
from tammes.lab.data.corruptions import corrupt
from tammes.lab.data.images import DataError, Images
from tammes.lab.data.sources.loading import load
from tammes.lab.data.subsets import hold_out, limit
from tammes.lab.data.write_source import write_source

__all__ = [
    "DataError",
    "Images",
    "corrupt",
    "hold_out",
    "limit",
    "load",
    "samplers",
    "write_source",
]
