"""Data of the lab: images from anywhere, made worse on purpose if asked, in batches.

:func:`load` reads a split, :func:`limit` takes a few of it, :func:`corrupt` thins it out or gets
labels wrong, :func:`hold_out` splits off a share, :mod:`.samplers` choose what makes a batch, and
:mod:`.augment` changes the images on the device.
"""

from tammes.lab.data import samplers
from tammes.lab.data.corruptions import corrupt
from tammes.lab.data.images import DataError, Images
from tammes.lab.data.sources.loading import load
from tammes.lab.data.subsets import hold_out, limit

__all__ = ["DataError", "Images", "corrupt", "hold_out", "limit", "load", "samplers"]
