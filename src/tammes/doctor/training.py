"""Checks of the course of training: no start, no progress, no gradient, jumps."""

import math
from statistics import fmean

from tammes.advise.feasibility import KINDS, PLAIN, bent, margins_of
from tammes.doctor.finding import Finding, check
from tammes.doctor.snapshot import Snapshot

NEAR = 0.05
"""Largest relative distance from the loss of guessing. A collapsed ArcFace with s = 64 plateaus 3 %
above log C."""
REST = 0.02
"""Largest relative change of a plateau from one diagnosis or epoch to the next. ArcFace that trains
slowly (200 overlapping classes, scripts/doctor_curves.py) changes by 3 % in 20 steps."""
LONG = 200
"""Number of steps before which a plateau is normal: Omniglot with two images of each of 1,623
classes is still at log C after 46."""
LOW = 0.1
"""Fraction of the way from chance to 1 below which an accuracy is low."""
RESTING = 3
"""Number of losses needed to judge a plateau: the first step and two epochs in the lab."""
NO_GRADIENT = 0.01
"""Sensitivity in nats below which a loss no longer trains. A softmax that is wrong on one example
in ten has ten times as much."""
LEARNED = 0.9
"""Accuracy from which a vanishing gradient means that training is done."""
JUMP = 0.5
"""Rise of the loss, relative to the first one or to 1 nat, that counts as a jump. A step of a
healthy training lowers the loss of its own batch."""
FIRST = 5
"""Number of first losses that are checked for a jump."""


@check("not-finite")
def not_finite(snapshot: Snapshot) -> Finding | None:
    """Find a loss or a gradient that is not finite."""
    if math.isfinite(snapshot.loss) and math.isfinite(snapshot.sensitivity):
        return None
    return Finding(
        f"the loss is {snapshot.loss:g} and its gradient {snapshot.sensitivity:g}",
        "a step with it destroys the weights",
        "lower the learning rate, clip gradients, or compute features in float32",
    )


@check("prototypes-not-trained")
def prototypes_not_trained(snapshot: Snapshot) -> Finding | None:
    """Find prototypes that the optimizer does not hold."""
    if snapshot.held is not False:
        return None
    return Finding(
        "the optimizer does not hold the prototypes",
        "they stay random, and the network has to bend to them",
        "give it criterion.param_groups(backbone, lr=...), which has both",
    )


@check("loss-at-chance")
def loss_at_chance(snapshot: Snapshot) -> Finding | None:
    """Find a loss that has plateaued where all classes have the same score.

    That is log C, plus the margin if features and prototypes have collapsed to one point.
    """
    main, losses = snapshot.main, snapshot.losses
    known = main.term.name in (*KINDS, *PLAIN)
    early = snapshot.steps is not None and snapshot.steps < LONG
    if not known or early or len(losses) < RESTING or not _is_low(snapshot):
        return None
    chance = math.log(snapshot.classes)
    paid = snapshot.scale * max(1 - bent(0.0, margins_of(main.term)), 0.0)
    is_chance = (1 - NEAR) * chance <= main.value <= (1 + NEAR) * (chance + paid)
    last = losses[-max(2, len(losses) // 2) :]
    before, after = fmean(last[: len(last) // 2]), fmean(last[len(last) // 2 :])
    if not is_chance or abs(after - before) > REST * abs(before):
        return None
    return Finding(
        f"the loss of {main.name} rests at {main.value:.3g} with an accuracy of "
        f"{100 * (snapshot.accuracy or 0):.1f} %; guessing costs log C = {chance:.3g}"
        + (f", and up to {chance + paid:.3g} with the margin" if paid > 0 else ""),
        "all classes have the same score, so nothing is learned",
        "lower the learning rate or warm it up; if it does not help, check labels and images",
    )


def _is_low(snapshot: Snapshot) -> bool:
    """Whether the accuracy is hardly above chance."""
    chance = 1 / snapshot.classes
    return snapshot.accuracy is not None and snapshot.accuracy < chance + LOW * (1 - chance)


@check("saturated")
def saturated(snapshot: Snapshot) -> Finding | None:
    """Find a loss without gradient although the accuracy is low."""
    accuracy = snapshot.accuracy
    if accuracy is None or accuracy >= LEARNED or snapshot.sensitivity >= NO_GRADIENT:
        return None
    return Finding(
        f"a relative change of the features by 1 changes the loss by {snapshot.sensitivity:.2g}, "
        f"with an accuracy of {100 * accuracy:.1f} %",
        "the loss is satisfied and no longer trains, although examples are wrong",
        "use a smaller scale, or a margin above 0",
    )


@check("learning-rate")
def learning_rate(snapshot: Snapshot) -> Finding | None:
    """Find a loss that jumps in the first steps."""
    for kind, losses in (("trial steps", snapshot.trial), ("first losses", snapshot.losses)):
        first, later = losses[:1], losses[1:FIRST]
        if not first or not later or (snapshot.scheduled and kind == "first losses"):
            # A scheduled margin raises the loss by itself.
            continue
        highest = max(loss if math.isfinite(loss) else math.inf for loss in later)
        if highest <= first[0] + JUMP * max(abs(first[0]), 1.0):
            continue
        rate = "" if snapshot.lr is None else f" at a learning rate of {snapshot.lr:g}"
        return Finding(
            f"the loss rises from {first[0]:.3g} to {highest:.3g} in the {kind}{rate}",
            "the first steps destroy more than they learn, and a network may never recover",
            "use a third of the learning rate, or warm it up over the first epochs",
        )
    return None
