"""Losses; calling one builds a term."""

from tammes.losses.adaptive import adacos, adaface, elasticface, magface
from tammes.losses.angular import (
    arcface,
    combined_margin,
    cosface,
    l_softmax,
    normface,
    sphereface,
)
from tammes.losses.hard_negatives import (
    circle,
    curricularface,
    inter_topk,
    interclass_filter,
    mv_softmax,
    sface,
)
from tammes.losses.imbalance import ldam, logit_adjustment, vs_softmax
from tammes.losses.largest_margin import gm_softmax, lm_softmax
from tammes.losses.one_against_all import sphereface2, uniface
from tammes.losses.open_set import arpl, cac
from tammes.losses.pairwise import center, contrastive, nca, proto, triplet
from tammes.losses.proxies import multi_positive, proxy_anchor
from tammes.losses.regularizers import (
    logit_divergence,
    sample_margin,
    subcenter_spread,
    super_symmetry,
    zero_centroid,
)
from tammes.losses.softmax import (
    bce,
    crammer_singer,
    focal,
    hard_bias,
    hinge,
    large_margin_gaussian,
    softmax,
)

__all__ = [
    "adacos",
    "adaface",
    "arcface",
    "arpl",
    "bce",
    "cac",
    "center",
    "circle",
    "combined_margin",
    "contrastive",
    "cosface",
    "crammer_singer",
    "curricularface",
    "elasticface",
    "focal",
    "gm_softmax",
    "hard_bias",
    "hinge",
    "inter_topk",
    "interclass_filter",
    "l_softmax",
    "large_margin_gaussian",
    "ldam",
    "lm_softmax",
    "logit_adjustment",
    "logit_divergence",
    "magface",
    "multi_positive",
    "mv_softmax",
    "nca",
    "normface",
    "proto",
    "proxy_anchor",
    "sample_margin",
    "sface",
    "softmax",
    "sphereface",
    "sphereface2",
    "subcenter_spread",
    "super_symmetry",
    "triplet",
    "uniface",
    "vs_softmax",
    "zero_centroid",
]
