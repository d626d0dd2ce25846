"""Initial prototypes, drawn in blocks that are the same on every rank."""

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
"""Heads that can be sharded: their prototypes are independent of each other."""
_ROWS = 1024
"""Prototypes drawn together, so that no shard depends on the bounds of the others."""


def draw(
    kind: Kind, size: int, options: dict[str, Any], seed: int, start: int, stop: int
) -> tuple[Head, Tensor, Tensor | None]:
    """Draw rows of a new head: the same values whichever part is requested."""
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
    """Rows of new classes from features, one of each, beside others of a mean length."""
    with _own_numbers():
        like = kind(features.shape[1], 2, **options).to(features)
    with torch.no_grad():
        # What the kind would do, if it had all classes: of them only the mean length matters.
        like.weight.zero_()[..., 0] = length.to(like.weight)
    return like._from_features(features)


@contextlib.contextmanager
def _own_numbers() -> Iterator[None]:
    """Restore torch's CPU generator; that of a GPU is not touched."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
