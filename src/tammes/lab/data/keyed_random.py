"""Counter-based random numbers, keyed by seed, epoch, example and draw.

The numbers of a generator depend on all earlier draws. Here a number is a hash of its key, so an
example gets the same numbers in any batch, order or process, on any device, and resuming needs no
state.

The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014). PyTorch has no unsigned
64-bit shifts: signed ones are masked, and products wrap as unsigned ones do.
"""

import torch
from torch import Tensor

BITS = 24
"""Bits of a random number, as many as a float32 holds exactly."""

_MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    """Reinterpret 64 bits as a signed integer."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
GOLDEN, _EPOCH = _signed(0x9E3779B97F4A7C15), _signed(0xD1B54A32D192ED03)


def mix(words: Tensor) -> Tensor:
    """Scramble int64 words: each bit depends on all bits, and different words stay different."""
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _FIRST
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _SECOND
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def mix_int(word: int) -> int:
    """Apply :func:`mix` to one Python integer.

    Example:
        >>> mix_int(1) == int(mix(torch.tensor(1)))
        True
    """
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return _signed(word ^ (word >> 31))


def keys(seed: int, epoch: int | Tensor, index: Tensor) -> Tensor:
    """Compute the key of each example, int64 ``(N,)``, which determines its draws.

    ``seed`` is expected to be scrambled by :func:`mix_int`; ``index``, the index of each example,
    and a tensor ``epoch`` are int64 on the same device.
    """
    if isinstance(epoch, int):
        epoch = torch.full((), epoch, dtype=torch.int64, device=index.device)
    return mix(index * GOLDEN + (epoch * _EPOCH + seed))


def bits(key: Tensor, draws: Tensor) -> Tensor:
    """Draw random numbers in ``[0, 2**24)``, the same on every device.

    With the keys ``(N,)`` of examples and the numbers ``(D,)`` of draws, the shape is ``(N, D)``.
    """
    words = mix(key[:, None] + (draws + 1) * GOLDEN)
    return (words >> (64 - BITS)) & ((1 << BITS) - 1)


def uniform(bits: Tensor) -> Tensor:
    """Convert random bits to float32 numbers in ``[0, 1)``, the same on every device."""
    return bits.float() * 2.0**-BITS


def below(bits: Tensor, count: int | Tensor) -> Tensor:
    """Convert random bits to integers in ``[0, count)``, without division or rounding.

    The probabilities of two numbers differ by at most a factor of ``1 + count / 2**24``.
    """
    return (bits * count) >> BITS
