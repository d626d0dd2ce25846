"""Default scales, optimizer and learning rates: one table for criteria, lab and advice.

The ready-made criteria (:mod:`tammes.criterion.presets`), the lab (``head: auto``, the fields of
its configuration) and ``tammes advise`` all read it. Losses default to the margins of their papers,
as their names promise; the advice departs from them where our training runs do better with others.
Every number names its evidence; the runs are in :mod:`tammes.advise.evidence`, and a test compares
the table with them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tammes import losses
from tammes.advise.feasibility import (
    LINEAR,
    NO_MARGINS,
    Margins,
    bent,
    log_odds,
    margins_of,
    scale_for,
)
from tammes.geometry.bounds import largest_class_margin
from tammes.heads.head import Scale
from tammes.terms import Loss, Term

POSTERIOR = 0.9
"""Posterior that an example at its prototype should reach."""


@dataclass(frozen=True)
class Default:
    """Default value of a setting.

    Attributes:
        value: the value.
        evidence: where it comes from.
        basis: ``"measured"`` in our own training runs, or ``"literature"``.
    """

    value: float
    evidence: str
    basis: str = "measured"


MANY_CLASSES = 10_000
"""Number of classes from which the papers' scale is the default."""
FEW_CLASSES = 20
"""Number of classes up to which the papers' margins are advised; measured with 10 and with 59."""
FEW_CLASSES_SCALE = Default(
    30.0,
    "64 loses 7 points on Omniglot and 9 on CIFAR-100 (CosFace, margin 0.1), 16 at most 1",
)
IDENTITIES_SCALE = Default(
    64.0,
    "the papers' value; 1 to 2 points of rank 1 above 30 at every margin on chimpanzee faces",
)
MANY_CLASSES_SCALE = Default(
    64.0,
    f"the papers' value, from {MANY_CLASSES:,} classes as theirs; no training of ours has as many",
    "literature",
)
SCALES: Mapping[str, Default] = {
    "normface": Default(20.0, "a temperature of 0.05, as in Wang 2017", "literature"),
    "lm_softmax": Default(64.0, "Zhou 2022; the loss hardly depends on it", "literature"),
    "ldam": Default(30.0, "Cao 2019", "literature"),
}
"""Scales of losses that do not use those above."""
MARGINS: Mapping[str, Default] = {
    "cosface": Default(
        0.1, "the paper's 0.35 loses 1 point on Omniglot, 2 on CIFAR-100, 8 on chimpanzee faces"
    ),
    "arcface": Default(
        0.1, "the paper's 0.5 loses 21 points on Omniglot, 38 on CIFAR-100, 13 on chimpanzee faces"
    ),
}
"""Margins to advise between :data:`FEW_CLASSES` and :data:`MANY_CLASSES` classes."""
_LARGER = (20.0, 30.0, 64.0)
"""Usual scales, from which to choose if the default is too small for the sphere."""

OPTIMIZER: Final = "sgd"
LEARNING_RATES: Final = {"sgd": 0.1, "momentum": 0.1, "adam": 0.001, "adamw": 0.001}
"""Learning rates by optimizer, as in the training runs; ``momentum`` is SGD with momentum."""
MOMENTUM: Final = 0.9
WEIGHT_DECAY: Final = 5e-4


def usual_scale(name: str, classes: int, *, identities: bool = False) -> Default:
    """Return the default scale of a loss on unit features, without regard to the sphere."""
    few = IDENTITIES_SCALE if identities else FEW_CLASSES_SCALE
    return SCALES.get(name, MANY_CLASSES_SCALE if classes >= MANY_CLASSES else few)


def measured_margin(name: str, classes: int) -> Default | None:
    """Return the margin that did better than the paper's in our training runs, if any."""
    return MARGINS.get(name) if FEW_CLASSES < classes < MANY_CLASSES else None


def default_scale(
    name: str,
    margins: Margins,
    classes: int,
    dim: int,
    posterior: float = POSTERIOR,
    *,
    identities: bool = False,
) -> float:
    """Return the default scale of a loss, or a larger one if the sphere requires it.

    Losses on raw features have a scale of 1.

    Args:
        name: name of the loss.
        margins: its factor of the angle, radians added to it, and cosine subtracted.
        classes: number of classes.
        dim: size of a feature.
        posterior: posterior that an example at its prototype should reach.
        identities: whether the features will be used to compare classes not seen in training.

    Example:
        >>> default_scale("cosface", (1.0, 0.0, 0.35), 1000, 128)
        30.0
        >>> default_scale("cosface", (1.0, 0.0, 0.01), 100, 3)
        110.0
    """
    if name in LINEAR:
        return 1.0
    usual = usual_scale(name, classes, identities=identities).value
    reach = math.cos(largest_class_margin(classes, dim).angle)
    about = scale_for(log_odds(posterior, classes), bent(0.0, margins), reach)
    if usual >= about or math.isinf(about):
        # No scale helps if the sphere has no room for the margin.
        return usual
    return next((each for each in _LARGER if each >= about), float(math.ceil(about)))


def main_term(loss: Loss) -> Term | None:
    """Return the classifying term: the first term on the split that is not a regularizer."""
    on_split = [term for _, term in loss.leaves() if term.definition.on == "split"]
    regularizers = losses.regularizers.__name__
    learning = [t for t in on_split if t.definition.function.__module__ != regularizers]
    return next(iter(learning or on_split), None)


def recommended_scale(loss: Loss, embedding_size: int, num_classes: int) -> Scale:
    """Return the default scale on unit features for the main term of a loss, at its margin.

    It is ``"adaptive"`` if a term requires that.

    Example:
        >>> import tammes
        >>> recommended_scale(tammes.cosface(margin=0.35), 128, 1000)
        30.0
    """
    if any(term.definition.requires == "adaptive" for _, term in loss.leaves()):
        return "adaptive"
    term = main_term(loss)
    if term is None or term.name in LINEAR:
        return default_scale("normface", NO_MARGINS, num_classes, embedding_size)
    return default_scale(term.name, margins_of(term), num_classes, embedding_size)
