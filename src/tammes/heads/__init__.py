"""Heads: prototypes and a scale, from which a batch of features is split."""

from tammes.heads.adaptive_scale import adacos_scale
from tammes.heads.cosine import CosineHead
from tammes.heads.distance import DistanceHead
from tammes.heads.gaussian import GaussianHead
from tammes.heads.head import Head
from tammes.heads.linear import LinearHead
from tammes.heads.sharded import ShardedHead, Top
from tammes.heads.simplex import SimplexHead
from tammes.heads.subcenters import drop_subcenters
from tammes.optim.state_transfer import carry_over

__all__ = [
    "CosineHead",
    "DistanceHead",
    "GaussianHead",
    "Head",
    "LinearHead",
    "ShardedHead",
    "SimplexHead",
    "Top",
    "adacos_scale",
    "carry_over",
    "drop_subcenters",
]
