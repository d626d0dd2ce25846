"""Random numbers that are functions of a key: equal on all devices and ranks, and on resuming."""

from torch import Tensor

GOLDEN = -0x61C8864680B583EB
"""Increment between consecutive keys, so that their bits are well distributed."""
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def mix(words: Tensor) -> Tensor:
    """Hash int64 words, one to one, with the finaliser of SplitMix64.

    Signed shifts are masked, and products wrap like unsigned ones. (For images, the lab has the
    same in :mod:`tammes.lab.data.keyed_random`.)
    """
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _FIRST
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _SECOND
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def step_key(seed: Tensor, steps: Tensor) -> Tensor:
    """Key for the draws of one step."""
    return mix(mix(seed + GOLDEN) + steps)


def uniform(key: Tensor, places: Tensor) -> Tensor:
    """Draw numbers strictly between -1 and 1, one for each position.

    Args:
        key: see :func:`step_key`.
        places: int64, any shape.

    Returns:
        Odd multiples of 2^-23, which are exact in float32.
    """
    bits = (mix(places * GOLDEN + key) >> 41) & ((1 << 23) - 1)
    return (2 * bits + 1 - (1 << 23)).float() / (1 << 23)
