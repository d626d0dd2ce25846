"""Random draws keyed by names, for whole data sets.

The same names give the same numbers on every machine and in every version of torch, independent of
other draws. The hash is that of :mod:`.keyed_random`, which keys single examples.
"""

import hashlib

import torch
from torch import Tensor

from tammes.lab.data.keyed_random import GOLDEN, mix


def numbers(count: int, *names: int | str) -> Tensor:
    """Draw uniform integers in [0, 2^63), keyed by names such as a seed, a word and an epoch.

    A longer result begins with a shorter one.

    Example:
        >>> numbers(3, 0, "order")[:2].equal(numbers(2, 0, "order"))
        True
    """
    digest = hashlib.sha256(repr(names).encode()).digest()
    start = int.from_bytes(digest[:8], "little", signed=True)
    return mix(torch.arange(1, count + 1) * GOLDEN + start) & 0x7FFF_FFFF_FFFF_FFFF


def permutation(count: int, *names: int | str) -> Tensor:
    """Draw a permutation of 0 to ``count - 1``.

    Example:
        >>> permutation(5, 0, "order").sort().values
        tensor([0, 1, 2, 3, 4])
    """
    return numbers(count, *names).argsort(stable=True)


def below(high: int | Tensor, count: int, *names: int | str) -> Tensor:
    """Draw uniform integers from 0 to ``high - 1``; ``high`` may be a tensor of bounds."""
    return numbers(count, *names) % high
