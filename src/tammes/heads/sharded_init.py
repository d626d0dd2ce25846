"""Initial prototypes, drawn in blocks so that they do not depend on the number of ranks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tammes.heads.cosine import CosineHead
from tammes.heads.gaussian import GaussianHead
from tammes.heads.head import Head
from tammes.heads.linear import LinearHead

Kind = type[CosineHead] | type[LinearHead] | type[GaussianHead]
KINDS: tuple[Kind, ...] = (CosineHead, LinearHead, GaussianHead)
"""Heads that can be sharded: their prototypes are drawn independently of each other."""
_ROWS = 1024
"""Prototypes drawn from one seed, so that values do not depend on the bounds of the shards."""


def draw(
    kind: Kind, size: int, options: dict[str, Any], seed: int, start: int, stop: int
) -> tuple[Head, Tensor, Tensor | None]:
    """Draw the rows from ``start`` to ``stop`` of a new head; the same in any partition."""
    where = torch.get_default_device()
    with _own_numbers(), torch.device("cpu"):
        like = kind(size, 2, **options)
        weights, biases = [like.weight.detach()[:0]], [] if like.bias is None else [like.bias[:0]]
        for block in range(start // _ROWS, -(-stop // _ROWS)):
            torch.default_generator.manual_seed((seed + 0x9E3779B97F4A7C15 * (block + 1)) % 2**63)
            part = kind(size, _ROWS, **options)
            rows = slice(max(start - block * _ROWS, 0), min(stop - block * _ROWS, _ROWS))
            weights.append(part.weight.detach()[rows])
            if part.bias is not None:
                biases.append(part.bias[rows])
    bias = torch.cat(biases).detach().to(where) if biases else None
    return like, torch.cat(weights).to(where), bias


def draw_from(kind: Kind, options: dict[str, Any], features: Tensor, length: Tensor) -> Tensor:
    """Prototypes of new classes from one feature each, given the mean norm of the existing ones."""
    with _own_numbers():
        like = kind(features.shape[1], 2, **options).to(features)
    with torch.no_grad():
        # Stands in for a head with all classes, of which only the mean norm matters.
        like.weight.zero_()[..., 0] = length.to(like.weight)
    return like._from_features(features)


@contextlib.contextmanager
def _own_numbers() -> Iterator[None]:
    """Restore torch's CPU generator on exit; that of a GPU is not touched."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
