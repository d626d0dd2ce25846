"""Draws that are functions of a key: the same on every device and rank, and after resuming."""

from torch import Tensor

GOLDEN = -0x61C8864680B583EB
"""Distance of neighbouring keys, so that none has few bits."""
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def mix(words: Tensor) -> Tensor:
    """Scramble int64 words, no two to the same: the finaliser of SplitMix64.

    Signed shifts are masked, and products wrap as unsigned ones do. (The lab has the same for its
    images, :mod:`tammes.lab.data.keyed_random`.)
    """
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _FIRST
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _SECOND
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def step_key(seed: Tensor, steps: Tensor) -> Tensor:
    """Key of one step of a sequence of draws."""
    return mix(mix(seed + GOLDEN) + steps)


def uniform(key: Tensor, places: Tensor) -> Tensor:
    """Draw numbers between -1 and 1, neither included, one for each place.

    Args:
        key: see :func:`step_key`.
        places: int64, any shape.

    Returns:
        Odd multiples of 2^-23 in float32, which holds them exactly.
    """
    bits = (mix(places * GOLDEN + key) >> 41) & ((1 << 23) - 1)
    return (2 * bits + 1 - (1 << 23)).float() / (1 << 23)
