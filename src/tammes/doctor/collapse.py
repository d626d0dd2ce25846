"""Checks of prototypes and features: collapsed, zero, dead."""

import math

from tammes.doctor.finding import Finding, check
from tammes.doctor.snapshot import Snapshot

SAME_DIRECTION = 0.5
"""Mean cosine of two prototypes above which they have collapsed. It is 0 for random prototypes and
-1/(C-1) at the optimum. Cosine losses stay below 0.1 on digits, and CosFace with s = 64 below 0.25
in its first epochs on CIFAR-100 (conv4). ArcFace with s = 64 on overlapping clusters is at 0.76
after 150 steps and at 0.97 after 300 (scripts/doctor_curves.py)."""
LEARNED = 0.5
"""Training accuracy from which prototypes that share a direction do no harm."""
SAME_FEATURE = 0.98
"""Mean cosine of two features above which they have collapsed, after training has begun. Untrained
networks of the lab have 0 to 0.8, trained ones 0.2 to 0.8; a deep network without normalisation may
begin at 1."""
ZERO_FEATURES = 0.02
"""Fraction of exactly zero features that is reported. LM-Softmax on MNIST at lr 0.1 and weight
decay 1e-3 has 0.29; healthy runs have none."""
LIVE_SHARE = 0.5
"""Fraction that must be alive of the min(C - 1, D) dimensions that C classes can use."""


@check("prototypes-collapsed")
def prototypes_collapsed(snapshot: Snapshot) -> Finding | None:
    """Find prototypes that all point in one direction."""
    cosine, accuracy = snapshot.prototype_cosine, snapshot.accuracy
    # A direction common to all prototypes does not matter for inner products, and binary cross
    # entropy uses it as a bias.
    meaningful = snapshot.is_cosine and snapshot.main.term.name != "bce"
    if cosine is None or accuracy is None or not meaningful:
        return None
    if cosine < SAME_DIRECTION or accuracy >= LEARNED:
        return None
    angle = math.degrees(math.acos(min(cosine, 1.0)))
    why = "all classes have nearly the same score, so nothing can be told apart"
    if any(each.name.startswith("arcface") for each in snapshot.terms):
        why += (
            "; an angular margin costs only s(1 - cos m) where everything is in one place, so that "
            "place attracts"
        )
    return Finding(
        f"the mean angle between two prototypes is {angle:.2f}°, where random ones have 90°",
        why,
        "use cosface, whose margin costs the same everywhere, or start again with half the scale "
        "or a fifth of the learning rate",
    )


@check("features-collapsed")
def features_collapsed(snapshot: Snapshot) -> Finding | None:
    """Find features that all point in one direction after training has begun."""
    if not snapshot.started or snapshot.feature_cosine < SAME_FEATURE:
        return None
    return Finding(
        f"the mean cosine of two features is {snapshot.feature_cosine:.4f}, over all classes",
        "the network gives nearly the same feature to every image",
        "lower the learning rate or warm it up, and check that the images are normalised",
    )


@check("features-zero")
def features_zero(snapshot: Snapshot) -> Finding | None:
    """Find features that are exactly zero."""
    share = snapshot.zero_features
    if share < ZERO_FEATURES:
        return None
    return Finding(
        f"{100 * share:.0f} % of the features are exactly zero",
        "a zero feature has the same score for every class and passes no gradient back, so its "
        "class is lost",
        "lower the learning rate or the weight decay, or end the network without a ReLU",
    )


@check("features-dead")
def features_dead(snapshot: Snapshot) -> Finding | None:
    """Find features that use fewer dimensions than the classes need."""
    useful = min(snapshot.classes - 1, snapshot.dim)
    if snapshot.live_dimensions >= LIVE_SHARE * useful:
        return None
    return Finding(
        f"{snapshot.live_dimensions} of {snapshot.dim} dimensions are not zero in every feature",
        f"{snapshot.classes} classes need up to {useful} dimensions to be far apart, and a "
        "dimension that is zero everywhere passes no gradient back",
        "lower the learning rate or the weight decay, or end the network without a ReLU",
    )
