"""Random numbers that are looked up instead of drawn.

A generator gives what is next, so its numbers depend on who asked before. Here a number is a hash
of what it is for: a seed, an epoch, an example and the number of the draw. An example gets the same
ones in any batch, order or process, on any device, and nothing has to be saved to go on with them.

The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014). PyTorch has no unsigned
64-bit shifts: signed ones are masked, and products wrap as unsigned ones do.
"""

import torch
from torch import Tensor

BITS = 24
"""Random bits of a number: as many as a float32 holds exactly."""

_MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    """The same 64 bits as a signed number."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_GOLDEN, _EPOCH = _signed(0x9E3779B97F4A7C15), _signed(0xD1B54A32D192ED03)


def mix(words: Tensor) -> Tensor:
    """Scramble int64 words so that every bit of a word depends on all of its bits.

    Args:
        words: int64, any shape.

    Returns:
        Scrambled words, one for each, no two the same.
    """
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _FIRST
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _SECOND
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def mix_int(word: int) -> int:
    """:func:`mix` of one Python number, in 64 bits.

    Example:
        >>> mix_int(1) == int(mix(torch.tensor(1)))
        True
    """
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return _signed(word ^ (word >> 31))


def keys(seed: int, epoch: int | Tensor, index: Tensor) -> Tensor:
    """A word for each example, from which its draws follow.

    Args:
        seed: of the run, scrambled by :func:`mix_int`.
        epoch: a number, or an int64 tensor without dimensions on the device of ``index``.
        index: identity of each example, int64, shape ``(N,)``.

    Returns:
        Keys, int64, shape ``(N,)``.
    """
    if isinstance(epoch, int):
        epoch = torch.full((), epoch, dtype=torch.int64, device=index.device)
    return mix(index * _GOLDEN + (epoch * _EPOCH + seed))


def bits(key: Tensor, draws: Tensor) -> Tensor:
    """Random numbers of 24 bits.

    Args:
        key: of each example, shape ``(N,)``.
        draws: numbers of the draws, int64, shape ``(D,)``.

    Returns:
        Numbers in ``[0, 2**24)``, int64, shape ``(N, D)``; the same on every device.
    """
    words = mix(key[:, None] + (draws + 1) * _GOLDEN)
    return (words >> (64 - BITS)) & ((1 << BITS) - 1)


def uniform(bits: Tensor) -> Tensor:
    """Numbers in ``[0, 1)`` from random bits: float32, exactly the same on every device."""
    return bits.float() * 2.0**-BITS


def below(bits: Tensor, count: int | Tensor) -> Tensor:
    """Whole numbers in ``[0, count)`` from random bits; no division, so no rounding.

    The chances of two numbers differ by at most ``count / 2**24`` of themselves.
    """
    return (bits * count) >> BITS
