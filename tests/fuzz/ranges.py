"""Ranges of the settings of every term that the fuzz draws from."""

from dataclasses import dataclass

STEP = 64
"""Settings are multiples of one over this number, so that float32 holds each of them exactly."""


@dataclass(frozen=True)
class Number:
    """A setting that is a number.

    Attributes:
        low: smallest value the term accepts.
        high: largest value to draw.
        usual: a narrower range, drawn from most of the time.
        zero: probability of exactly zero.
        per_class: whether the term accepts one value per class.
        at_call: whether a call or a schedule may change it.
        infinite: probability of minus infinity.
    """

    low: float
    high: float
    usual: tuple[float, float] | None = None
    zero: float = 0.1
    per_class: bool = True
    at_call: bool = True
    infinite: float = 0.0

    def draw(self, random):
        if self.infinite and random.random() < self.infinite:
            return float("-inf")
        if self.low <= 0 <= self.high and random.random() < self.zero:
            return 0.0
        low, high = self.low, self.high
        if self.usual is not None and random.random() < 0.7:
            low, high = self.usual
        return on_grid(random, low, high)


@dataclass(frozen=True)
class Choice:
    """A setting that is one of a few."""

    values: tuple


@dataclass(frozen=True)
class Counts:
    """One whole number of examples per class."""


def on_grid(random, low, high):
    """A multiple of ``1 / STEP`` within a range."""
    return random.randint(int(-(-low * STEP // 1)), int(high * STEP // 1)) / STEP


_MARGIN = Number(-1.5, 1.5, usual=(-0.5, 0.6))
_JUMP = Number(0.125, 1.5, usual=(0.125, 0.6), zero=0.0)
"""Margin of a loss that jumps where another class is as near as it: none are so in a batch."""
_ANGLE = Number(-3.125, 3.125, usual=(-0.5, 0.8))
_GRADIENT = Choice(("exact", "exact", "detached"))
_EXTENSION = Choice(("monotone", "monotone", "linear"))
_UNIT = Choice((False, True))
_MULTIPLE = {
    "margin": Number(1.0, 5.0, usual=(1.0, 2.0)),
    "blend": Number(0.0, 8.0, usual=(0.0, 1.0), zero=0.4),
    "gradient": _GRADIENT,
}
_STRENGTH = Number(-1.0, 2.0, usual=(0.0, 1.0), per_class=False, at_call=False)
_SCALE = Number(0.125, 3.0, per_class=False)
_DISTANCE = Number(-1.0, 3.0, usual=(0.0, 1.0), per_class=False)

SETTINGS = {
    "softmax": {"smoothing": Number(0.0, 1.0, zero=0.5, per_class=False), "margin": _MARGIN},
    "hard_bias": {"margin": _MARGIN},
    "crammer_singer": {"margin": _MARGIN},
    "focal": {"gamma": Number(0.0, 4.0), "margin": _MARGIN},
    "hinge": {"margin": _MARGIN},
    "bce": {"average": Choice((False, True))},
    "uniface": {"margin": _MARGIN, "negative_weight": Number(0.0, 2.0)},
    "sphereface2": {
        "margin": _MARGIN,
        "balance": Number(0.0625, 0.9375, zero=0.0),
        "power": Number(0.5, 4.0, zero=0.0),
    },
    "cac": {"anchor": Number(0.0, 1.0)},
    "arpl": {"bound": Number(0.0, 1.0), "margin": _MARGIN},
    "large_margin_gaussian": {"margin": Number(-0.5, 1.0), "likelihood": Number(0.0, 1.0)},
    "normface": {},
    "cosface": {"margin": _MARGIN},
    "arcface": {"margin": _ANGLE, "extension": _EXTENSION, "gradient": _GRADIENT},
    "combined_margin": {
        "m1": Number(0.25, 4.0, usual=(0.75, 2.0)),
        "m2": _ANGLE,
        "m3": _MARGIN,
        "extension": _EXTENSION,
        "gradient": _GRADIENT,
    },
    "l_softmax": _MULTIPLE,
    "sphereface": _MULTIPLE,
    "gm_softmax": {
        "alpha1": Number(0.5, 1.5),
        "beta1": _MARGIN,
        "alpha2": Number(-0.5, 1.5),
        "beta2": Number(-1.5, 1.5, infinite=0.2),
    },
    "lm_softmax": {},
    "ldam": {"counts": Counts(), "max_margin": Number(0.0, 1.0, per_class=False)},
    "logit_adjustment": {"counts": Counts(), "tau": _STRENGTH},
    "vs_softmax": {"counts": Counts(), "gamma": _STRENGTH, "tau": _STRENGTH},
    "logit_divergence": {"kind": Choice(("symmetric", "q_u", "u_q"))},
    "sample_margin": {},
    "adacos": {},
    "adaface": {
        "margin": Number(-1.0, 1.0, usual=(0.0, 0.5)),
        "concentration": Number(0.0, 1.0),
        "momentum": Number(0.0, 1.0, per_class=False, at_call=False),
    },
    "magface": {
        "min_margin": _ANGLE,
        "max_margin": _ANGLE,
        "min_norm": Number(0.125, 1.0, per_class=False, at_call=False),
        "max_norm": Number(1.5, 8.0, per_class=False, at_call=False),
        "norm_weight": Number(0.0, 4.0),
        "extension": _EXTENSION,
    },
    "elasticface": {
        "margin": _ANGLE,
        "std": Number(0.0, 0.5),
        "kind": Choice(("arc", "cos")),
        "seed": Choice((0, 7)),
    },
    "mv_softmax": {
        "margin": _JUMP,
        "emphasis": Number(0.0, 1.0),
        "kind": Choice(("am", "arc")),
        "adaptive": Choice((False, True)),
    },
    "curricularface": {
        "margin": _JUMP,
        "momentum": Number(0.0, 1.0, per_class=False, at_call=False),
    },
    "inter_topk": {
        "margin": _ANGLE,
        "top_k": Choice((1, 2, 5)),
        "penalty": Number(0.0, 0.5, per_class=False),
    },
    "circle": {"margin": _MARGIN},
    "sface": {
        "own_angle": Number(0.25, 2.5),
        "other_angle": Number(0.25, 2.5),
        "steepness": Number(1.0, 16.0),
    },
    "interclass_filter": {
        "threshold": Number(0.0625, 0.9375, usual=(0.1875, 0.6), zero=0.0),
        "m1": Number(0.25, 4.0, usual=(0.75, 2.0)),
        "m2": _ANGLE,
        "m3": _MARGIN,
        "extension": _EXTENSION,
        "gradient": _GRADIENT,
    },
    "zero_centroid": {"normalize": _UNIT},
    "super_symmetry": {},
    "multi_positive": {
        "scale": Number(0.5, 32.0, per_class=False),
        "margin": Number(-0.5, 0.75, per_class=False),
        "kind": Choice(("arc", "cos")),
        "form": Choice(("each", "pairs", "apart")),
    },
    "proxy_anchor": {
        "scale": Number(0.5, 32.0, per_class=False),
        "margin": Number(-0.5, 0.5, per_class=False),
    },
    "subcenter_spread": {},
    "nca": {"scale": _SCALE, "normalize": _UNIT},
    "proto": {"scale": _SCALE, "normalize": _UNIT},
    "triplet": {"margin": _DISTANCE, "normalize": _UNIT},
    "contrastive": {"margin": _DISTANCE, "normalize": _UNIT},
    "center": {"rate": Number(0.125, 1.0, per_class=False, at_call=False)},
}
"""Settings of every term by name."""

FEATURE_TERMS = ("nca", "proto", "triplet", "contrastive", "center")
PROXY_TERMS = ("proxy_anchor", "multi_positive")
PROTOTYPE_TERMS = ("zero_centroid", "super_symmetry", "subcenter_spread")
STATEFUL_TERMS = ("adaface", "curricularface", "elasticface", "center")
COSINE_TERMS = (
    *("normface", "lm_softmax", "mv_softmax", "curricularface", "inter_topk"),
    *("circle", "sface", "interclass_filter", "sphereface2"),
)
ANGLE_TERMS = (
    *("arcface", "combined_margin", "l_softmax", "sphereface"),
    *("adaface", "magface", "elasticface"),
)

COSINE_HEADS = ("cosine", "cosine_adaptive", "cosine_subcenters", "simplex")
ANGLE_HEADS = ("linear_no_bias", "cosine_raw", *COSINE_HEADS)
DISTANCE_HEADS = ("distance", "reciprocal")
HEADS = (
    *("linear", "linear_no_bias", "cosine", "cosine_adaptive", "cosine_raw"),
    *("cosine_subcenters", "gaussian", "simplex"),
    *DISTANCE_HEADS,
)
CENTERS = {"cosine_subcenters": 2}
"""Prototypes per class, where there are several."""


def fits(term, head):
    """Whether a term has a meaning on a head."""
    if term == "adacos":
        return head == "cosine_adaptive"
    if term in COSINE_TERMS:
        return head in COSINE_HEADS
    if term == "vs_softmax":
        return head not in ("gaussian", *DISTANCE_HEADS)
    return term not in ANGLE_TERMS or head in ANGLE_HEADS
