"""Checks of settings: margins and scales that the sphere does not allow, too few examples."""

import math

from tammes.advise.feasibility import (
    KINDS,
    PLAIN,
    bent,
    class_radius,
    log_odds,
    margins_of,
    scale_for,
)
from tammes.advise.warnings import FEW
from tammes.doctor.finding import Finding, check
from tammes.doctor.snapshot import Snapshot, TermReading
from tammes.geometry.bounds import largest_class_margin

STRONG_SCALE, STRONG_MARGIN = 64.0, 0.3
"""Scale and margin from which training with few examples per class is reported to fail: see
:mod:`tammes.advise.warnings`."""
COMPANY = 0.5
"""Fraction of a batch whose class must have another example in it, for a loss between examples."""


def _with_margins(snapshot: Snapshot) -> list[TermReading]:
    return [t for t in snapshot.terms if t.term.name in KINDS or t.term.name == "softmax"]


@check("negative-margin")
def negative_margin(snapshot: Snapshot) -> Finding | None:
    """Find a negative margin that satisfies the loss before training."""
    limit = math.log(snapshot.classes)
    if not snapshot.is_cosine:
        # Inner products are unbounded, and outgrow any margin.
        return None
    for each in _with_margins(snapshot):
        # Score that the margin adds to an untrained example, at a right angle to its prototype.
        gain = snapshot.scale * bent(math.pi / 2, margins_of(each.term))
        if gain > limit:
            start = math.log1p((snapshot.classes - 1) * math.exp(-gain))
            return Finding(
                f"the negative margin of {each.name} adds {gain:.3g} to the own score at scale "
                f"{snapshot.scale:g}, where log C is {limit:.3g}",
                f"the loss of an untrained network is already about {start:.2g} and hardly trains",
                f"use a margin above {-limit / snapshot.scale:.2g} at this scale, or a scale below "
                f"{snapshot.scale * limit / gain:.3g} at this margin",
            )
    return None


@check("margin-infeasible")
def margin_infeasible(snapshot: Snapshot) -> Finding | None:
    """Find a margin that not all classes can meet on the sphere."""
    if not snapshot.is_cosine or snapshot.dim < 2:
        return None
    best = largest_class_margin(snapshot.classes, snapshot.dim)
    for each in _with_margins(snapshot):
        margins = margins_of(each.term)
        if class_radius(best.angle, margins) is not None:
            continue
        kind = KINDS.get(each.term.name)
        largest = "a smaller margin"
        if kind is not None and each.term.name != "combined_margin":
            largest = f"{kind.setting} of at most {kind.largest(best.angle):.3g}"
        settings = ", ".join(f"{value:g}" for value in margins)
        return Finding(
            f"{each.name} asks for margins ({settings}), but {snapshot.classes} classes in "
            f"{snapshot.dim} dimensions are at most {best.degrees:.1f}° apart",
            "not even an example on its prototype can meet them, so classes are pulled against "
            "each other without end",
            f"use {largest}, or more dimensions",
        )
    return None


@check("scale-small")
def scale_small(snapshot: Snapshot) -> Finding | None:
    """Find a scale at which no arrangement of classes reaches the desired posterior.

    The margin is ignored, since predictions do not use it; so a reported scale fails with any
    margin.
    """
    softmaxes = [t for t in snapshot.terms if t.term.name in (*KINDS, *PLAIN)]
    if not snapshot.is_cosine or snapshot.learned_scale or not softmaxes:
        return None
    classes = snapshot.classes
    least = scale_for(log_odds(snapshot.posterior, classes), 1.0, -1 / (classes - 1))
    if snapshot.scale >= least:
        return None
    gap = snapshot.scale * (1 + 1 / (classes - 1))
    posterior = 1 / (1 + (classes - 1) * math.exp(-gap))
    return Finding(
        f"at scale {snapshot.scale:g} the mean posterior of {classes} classes is at most "
        f"{posterior:.2g}, where {snapshot.posterior:g} is wanted",
        "the loss keeps pulling examples that are already as near to their prototype as possible",
        f"use a scale of at least {least:.3g}, or a learnable one",
    )


@check("few-examples")
def few_examples(snapshot: Snapshot) -> Finding | None:
    """Find classes with too few examples, in the training set or in a batch."""
    metric = [t.name for t in snapshot.terms if t.term.definition.on == "features"]
    if metric and snapshot.company < COMPANY:
        return Finding(
            f"{100 * snapshot.company:.0f} % of the batch share their class with another example",
            f"{' and '.join(metric)} learns from those alone",
            "draw K examples of each of N/K classes",
        )
    count = snapshot.examples_per_class
    if count is None or count > FEW or not snapshot.is_cosine or snapshot.scale < STRONG_SCALE:
        return None
    for each in _with_margins(snapshot):
        _, m2, m3 = margins_of(each.term)
        if max(m2, m3) >= STRONG_MARGIN:
            return Finding(
                f"{count:.3g} examples per class, with scale {snapshot.scale:g} and the margin of "
                f"{each.name} {max(m2, m3):g}",
                "users report that this does not train (pytorch-metric-learning #351, #186)",
                "begin with margin 0 and a smaller scale, and warm the margin up "
                "(tammes.schedules.WarmUp)",
            )
    return None
