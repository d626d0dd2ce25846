"""One example of everything there is, for tests that go through all of it."""

import tammes

CLASSES = 9

SPLIT_TERMS = {
    "softmax": tammes.softmax(),
    "softmax_smoothed_margin": tammes.softmax(smoothing=0.1, margin=0.2),
    "hard_bias": tammes.hard_bias(),
    "crammer_singer": tammes.crammer_singer(),
    "focal": tammes.focal(),
    "large_margin_gaussian": tammes.large_margin_gaussian(),
    "normface": tammes.normface(),
    "cosface": tammes.cosface(),
    "cosface_negative": tammes.cosface(margin=-0.3),
    "cosface_per_class": tammes.cosface(margin=[0.1 * c for c in range(CLASSES)]),
    "arcface": tammes.arcface(),
    "arcface_linear": tammes.arcface(extension="linear"),
    "arcface_detached": tammes.arcface(gradient="detached"),
    "combined_margin": tammes.combined_margin(1.5, 0.3, 0.2),
    "l_softmax": tammes.l_softmax(margin=3),
    "l_softmax_real_blend": tammes.l_softmax(margin=2.5, blend=0.5),
    "sphereface": tammes.sphereface(margin=1.7),
    "gm_softmax": tammes.gm_softmax(0.9, -0.1, 0.6, 0.2),
    "gm_softmax_without_target": tammes.gm_softmax(beta2=float("-inf")),
    "lm_softmax": tammes.lm_softmax(),
    "ldam": tammes.ldam(counts=[50, 40, 30, 20, 10, 5, 4, 3, 2]),
    "logit_adjustment": tammes.logit_adjustment(counts=[50, 40, 30, 20, 10, 5, 4, 3, 2], tau=1.5),
    "vs_softmax": tammes.vs_softmax(counts=[50, 40, 30, 20, 10, 5, 4, 3, 2]),
    "logit_divergence": tammes.logit_divergence(),
    "logit_divergence_q_u": tammes.logit_divergence(kind="q_u"),
    "logit_divergence_u_q": tammes.logit_divergence(kind="u_q"),
    "sample_margin": tammes.sample_margin(),
    "adacos": tammes.adacos(),
    "adaface": tammes.adaface(),
    "magface": tammes.magface(min_norm=0.5, max_norm=2.0, norm_weight=0.5),
    "magface_linear": tammes.magface(min_norm=1.0, max_norm=9.0, extension="linear"),
    "elasticface": tammes.elasticface(std=0.1),
    "elasticface_cos": tammes.elasticface(margin=0.35, std=0.1, kind="cos", seed=1),
    "mv_softmax": tammes.mv_softmax(),
    "mv_softmax_arc_fixed": tammes.mv_softmax(margin=0.3, emphasis=0.4, kind="arc", adaptive=False),
    "curricularface": tammes.curricularface(momentum=0.3),
    "inter_topk": tammes.inter_topk(top_k=2, penalty=0.3),
    "circle": tammes.circle(),
    "sface": tammes.sface(steepness=8.0),
    "interclass_filter": tammes.interclass_filter(threshold=0.3),
    "hinge": tammes.hinge(),
    "bce": tammes.bce(),
    "uniface": tammes.uniface(),
    "sphereface2": tammes.sphereface2(),
    "cac": tammes.cac(),
    "arpl": tammes.arpl(),
}
"""Every term on a split, with the settings that take another way through the code."""

DETACHED = ("arcface_detached", "circle", "sface", "sphereface2")
"""Terms whose gradient is not that of their value, since some factors have none."""

PROTOTYPE_TERMS = {
    "zero_centroid": tammes.zero_centroid(),
    "zero_centroid_raw": tammes.zero_centroid(normalize=False),
    "super_symmetry": tammes.super_symmetry(),
    "subcenter_spread": tammes.subcenter_spread(),
}

FEATURE_TERMS = {
    "nca": tammes.nca(),
    "nca_unit": tammes.nca(scale=4.0, normalize=True),
    "proto": tammes.proto(),
    "triplet": tammes.triplet(),
    "contrastive": tammes.contrastive(),
    "center": tammes.center(),
}

PROXY_TERMS = {
    "proxy_anchor": tammes.proxy_anchor(scale=8.0),
    "multi_positive": tammes.multi_positive(scale=8.0),
    "multi_positive_cos": tammes.multi_positive(scale=8.0, margin=0.2, kind="cos"),
    "mlcd": tammes.mlcd(scale=8.0),
}

TERMS = {**SPLIT_TERMS, **PROTOTYPE_TERMS, **FEATURE_TERMS, **PROXY_TERMS}

HEADS = {
    "linear": lambda size, classes, **kw: tammes.LinearHead(size, classes, **kw),
    "linear_no_bias": lambda size, classes, **kw: tammes.LinearHead(
        size, classes, bias=False, **kw
    ),
    "cosine": lambda size, classes, **kw: tammes.CosineHead(size, classes, **{"scale": 8.0} | kw),
    "cosine_adaptive": lambda size, classes, **kw: tammes.CosineHead(
        size, classes, **kw | {"scale": "adaptive"}
    ),
    "cosine_raw_features": lambda size, classes, **kw: tammes.CosineHead(
        size, classes, normalize_features=False, **{"scale": 2.0} | kw
    ),
    "cosine_subcenters": lambda size, classes, **kw: tammes.CosineHead(
        size, classes, subcenters=3, **{"scale": 8.0} | kw
    ),
    "gaussian": lambda size, classes, **kw: tammes.GaussianHead(size, classes, **kw),
    "distance": lambda size, classes, **kw: tammes.DistanceHead(size, classes, **kw),
    "reciprocal": lambda size, classes, **kw: tammes.DistanceHead(
        size, classes, reciprocal=True, **kw
    ),
    "simplex": lambda size, classes, **kw: tammes.SimplexHead(size, classes, **{"scale": 8.0} | kw),
}
"""A maker of every head: ``HEADS[name](embedding_size, num_classes, scale=...)``."""

DENSE_HEADS = ("distance", "reciprocal")
"""Heads that have all scores in memory."""
KERNEL_HEADS = [name for name in HEADS if name not in ("simplex", *DENSE_HEADS)]
"""Heads of learned prototypes that every kernel serves."""


def fits(term, head):
    """Whether a criterion accepts this term on this head."""
    requires = term.definition.requires
    if requires == "cosine":
        return head.similarity.is_cosine
    if requires == "product":
        return head.similarity.is_product
    if requires == "adaptive":
        return head.adaptive_scale is not None
    return requires != "angle" or head.has_angle


def numbers_read(term, head):
    """What a kernel computes for a term: every number it reads on this head, and the term itself.

    To be used with ``cover``, where a kernel is compared on all terms and the heads that they fit.
    """
    return [repr(term), *((head, number) for number in term.definition.reads)]


def default_head(term, size=6, classes=CLASSES, **kw):
    """The first head a term fits on."""
    names = ["linear", "linear_no_bias", "cosine", "cosine_adaptive"]
    heads = (HEADS[name](size, classes, **kw) for name in names)
    return next(head for head in heads if fits(term, head))
