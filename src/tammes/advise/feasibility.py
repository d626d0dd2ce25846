r"""Feasible margins and scales on the sphere.

Let :math:`A` be the angle between the closest two prototypes, the class margin. An example at angle
:math:`\theta` to its own prototype can be as near as :math:`A - \theta` to another. It meets the
margins of a loss if its own class wins after they are applied,

.. math:: \Phi(m_1\theta + m_2) - m_3 \ge \cos(A - \theta),

with the monotone :math:`\Phi` of :func:`tammes.losses.angular.target_similarity`. The left side
decreases and the right side increases with :math:`\theta`, so a solution exists only if
:math:`\Phi(m_2) - m_3 \ge \cos A`, and then up to one angle, the radius of a class.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tammes import losses
from tammes.losses.aliases import ALIASES
from tammes.split import SUMMED, Split, split
from tammes.terms import Definition, Term

Margins = tuple[float, float, float]
"""Factor of the angle, radians added to it, cosine subtracted."""
NO_MARGINS: Margins = (1.0, 0.0, 0.0)
SUMS = ("direct_sum", "spectral_sum")
"""Combinations of a classification and a metric loss, which appear as a name in a sum."""


def builder(name: str) -> Callable[..., Term]:
    """Find the builder of a loss by its name, an alias, or the name of its class.

    Example:
        >>> builder("CosFace")()
        cosface(margin=0.35)
    """
    found = {name: getattr(losses, name) for name in losses.__all__} | ALIASES
    plain = {known.replace("_", ""): known for known in found}
    wanted = name.strip().lower().replace("_", "").replace("-", "")
    if wanted not in plain:
        near = difflib.get_close_matches(wanted, plain, n=1)
        hint = f"; did you mean {plain[near[0]]}?" if near else "; `tammes losses` lists them"
        raise ValueError(f"there is no loss {name!r}{hint}")
    return found[plain[wanted]]


def definition(name: str) -> Definition:
    """Return the definition shared by all terms of a name."""
    return builder(name).definition  # type: ignore[attr-defined]


def term_names(written: Iterable[str]) -> list[str]:
    """Names of the terms that the losses of a sum build; combinations keep their own."""
    return [name if name in SUMS else definition(name).name for name in written]


def adapts_scale(names: Iterable[str]) -> bool:
    """Return whether any loss of a sum needs a head with an adaptive scale."""
    return any(definition(name).requires == "adaptive" for name in names if name not in SUMS)


def bent(theta: float, margins: Margins = NO_MARGINS) -> float:
    r"""Score of the target class after the margins, over the scale: :math:`\Phi(\theta) - m_3`."""
    m1, m2, m3 = margins
    phi = m1 * theta + m2
    turns = math.floor(phi / math.pi)
    return (-1) ** (turns % 2) * math.cos(phi) - 2 * turns - m3


def largest_where(holds: Callable[[float], bool], high: float) -> float:
    """Find the largest number from 0 to ``high`` where a condition still holds, by bisection."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def class_radius(angle: float, margins: Margins = NO_MARGINS) -> float | None:
    r"""Largest angle to its prototype at which an example meets the margins, in radians.

    Towards the nearest other class, with prototypes ``angle`` apart. In closed form
    :math:`A/2` without margin, :math:`(A-m)/2` for ArcFace, :math:`A/(m+1)` for SphereFace and
    :math:`A/2 - \arcsin\frac{m}{2\sin(A/2)}` for CosFace.

    Args:
        angle: angle between the closest prototypes, in radians.
        margins: margins of the loss.

    Returns:
        The radius, or ``None`` if no example meets the margins.

    Example:
        >>> round(class_radius(1.5, (1.0, 0.5, 0.0)), 6)
        0.5
    """
    if bent(0.0, margins) < math.cos(angle) - 1e-12:
        return None
    return largest_where(lambda theta: bent(theta, margins) >= math.cos(angle - theta), angle)


def _largest_adaface(angle: float) -> float:
    """Root of ``2 - cos(m) - 2 m = cos(angle)``: the largest margins of AdaFace, at k = 1."""
    return largest_where(lambda m: bent(0.0, (1.0, -m, 2 * m)) >= math.cos(angle), math.pi)


def _gap(angle: float) -> float:
    """Compute ``1 - cos(angle)`` accurately."""
    return 2 * math.sin(angle / 2) ** 2


def _unlimited(_: float) -> float:
    return math.inf


@dataclass(frozen=True)
class Kind:
    """Margin of a loss: the name of its setting, and its effect on the target.

    Attributes:
        loss: name of the loss.
        setting: name of the setting.
        place: the three margins for a value of the setting.
        largest: largest feasible value for a class margin.
        rule: the same in words.
        default: default of the preset criterion, if the builder has no usual default.
    """

    loss: str
    setting: str
    place: Callable[[float], Margins]
    largest: Callable[[float], float]
    rule: str
    default: float | None = None


_IN_COMBINED = 0.3
_COSINE_RULE = "m <= 1 - cos A"

KINDS = {
    kind.loss: kind
    for kind in (
        Kind("cosface", "margin", lambda m: (1.0, 0.0, m), _gap, _COSINE_RULE),
        Kind("arcface", "margin", lambda m: (1.0, m, 0.0), lambda angle: angle, "m <= A"),
        Kind("elasticface", "margin", lambda m: (1.0, m, 0.0), lambda angle: angle, "m <= A"),
        Kind("mv_softmax", "margin", lambda m: (1.0, 0.0, m), _gap, _COSINE_RULE),
        Kind("magface", "max_margin", lambda m: (1.0, m, 0.0), lambda angle: angle, "m <= A"),
        Kind("sphereface", "margin", lambda m: (m, 0.0, 0.0), _unlimited, "any m >= 1"),
        Kind("l_softmax", "margin", lambda m: (m, 0.0, 0.0), _unlimited, "any m >= 1"),
        Kind(
            "combined_margin",
            "m3",
            lambda m: (1.0, _IN_COMBINED, m),
            lambda angle: math.cos(_IN_COMBINED) - math.cos(angle),
            f"m3 <= cos m2 - cos A, at m2 = {_IN_COMBINED}",
            0.2,
        ),
        Kind(
            "gm_softmax", "-beta1", lambda m: (1.0, 0.0, m), _gap, "-beta1 <= alpha1 - cos A", 0.0
        ),
        Kind("ldam", "max_margin", lambda m: (1.0, 0.0, m), _gap, _COSINE_RULE),
        Kind(
            "adaface",
            "margin",
            lambda m: (1.0, -m, 2 * m),
            _largest_adaface,
            "cos m + 2m <= 2 - cos A",
        ),
    )
}
"""Losses with a margin on the sphere."""


def margins_of(term: Term) -> Margins:
    """Return factor of the angle, radians added to it and cosine subtracted, of any term.

    Of per-class margins, the largest counts.

    Example:
        >>> import tammes
        >>> margins_of(tammes.arcface(margin=0.5)), margins_of(tammes.softmax(margin=-1.0))
        ((1.0, 0.5, 0.0), (1.0, 0.0, -1.0))
    """
    settings = {key: max(v) if isinstance(v, tuple) else v for key, v in term.settings.items()}
    if term.name in ("combined_margin", "interclass_filter"):
        return settings["m1"], settings["m2"], settings["m3"]
    if term.name in ("curricularface", "inter_topk"):
        return 1.0, settings["margin"], 0.0
    if term.name == "gm_softmax":
        return 1.0, 0.0, -settings["beta1"]
    if term.name == "softmax":
        return 1.0, 0.0, settings["margin"]
    kind = KINDS.get(term.name)
    return NO_MARGINS if kind is None else kind.place(float(settings[kind.setting]))


CHORDS = ("triplet", "contrastive")
"""Losses whose margin is a distance between unit features: at most ``2 sin(A/2)``."""

PLAIN = ("softmax", "normface", "adacos")
"""Softmax losses without a margin, or with none by default."""

LINEAR = (
    *("softmax", "focal", "hard_bias", "crammer_singer", "hinge", "bce", "l_softmax"),
    *("large_margin_gaussian", "logit_adjustment", "vs_softmax", "cac", "arpl"),
)
"""Losses for unnormalized features, whose norms grow until any margin is met."""


@dataclass(frozen=True)
class FeasibleMargin:
    """Feasible margins of a loss.

    Attributes:
        loss: name of the loss.
        setting: name of the margin, ``""`` where there is none.
        default: default margin.
        largest: largest margin that all classes can meet, infinite if any can be met; if the class
            margin is only an upper bound, so is this.
        feasible: whether the default can be met.
        radius: largest angle of an example to its prototype at the default margin, in radians, or
            ``None`` if the margin cannot be met.
        rule: formula of ``largest``, with A the class margin.
    """

    loss: str
    setting: str
    default: float | None
    largest: float
    feasible: bool
    radius: float | None
    rule: str


def feasible_margins(angle: float) -> tuple[FeasibleMargin, ...]:
    """Feasible margins of every loss on the sphere, for prototypes at most ``angle`` apart.

    Example:
        >>> best = {row.loss: row for row in feasible_margins(math.pi / 2)}
        >>> round(best["cosface"].largest, 4), round(best["arcface"].largest, 4)
        (1.0, 1.5708)
    """
    half = class_radius(angle)
    rows = [
        FeasibleMargin(name, "", None, math.inf, True, half, "no margin to set")
        for name in ("normface", "lm_softmax")
    ]
    for kind in KINDS.values():
        default = kind.default
        if default is None:
            default = float(definition(kind.loss).defaults[kind.setting])
        largest, radius = kind.largest(angle), class_radius(angle, kind.place(default))
        feasible = radius is not None
        rows.append(
            FeasibleMargin(kind.loss, kind.setting, default, largest, feasible, radius, kind.rule)
        )
    chord = 2 * math.sin(angle / 2)
    for name in CHORDS:
        default = float(definition(name).defaults["margin"])
        rule = "m <= 2 sin(A/2), on unit features"
        rows.append(FeasibleMargin(name, "margin", default, chord, default <= chord, None, rule))
    return tuple(rows)


def largest_sample_margin_of_any(classes: int, dim: int, angle: float) -> float:
    r"""Proven upper bound of the sample margin that all examples can have.

    :math:`\frac{k}{k-1}` for :math:`k \le d+1` (Proposition 3 of Zhou et al. 2022). With more
    classes, two groups of the prototypes have hulls that meet in a point p (Radon): an example of
    one group wins over p by at most :math:`\lVert w - p\rVert`, and the mean square of that is
    :math:`1 - \lVert p\rVert^2`. So the limit is 1, which the orthoplex reaches, and no more than
    the distance of the closest two prototypes, :math:`2\sin(A/2)`.
    """
    if classes <= dim + 1:
        return classes / (classes - 1)
    return min(1.0, 2 * math.sin(angle / 2))


def log_odds(posterior: float, classes: int) -> float:
    """Compute ``log((C - 1) p / (1 - p))``: score margin over equal others for posterior p."""
    if not 0 < posterior < 1:
        raise ValueError(f"advise expects posterior between 0 and 1, got {posterior}")
    return math.log(classes - 1) + math.log(posterior) - math.log1p(-posterior)


def scale_for(odds: float, target: float, cosine: float) -> float:
    r"""Scale at which the target class has the desired posterior against C - 1 others.

    .. math:: s \ge \frac{\log\frac{(C-1)\,p}{1-p}}{t - \cos A}

    Args:
        odds: see :func:`log_odds`.
        target: cosine to the target prototype after the margins, :math:`t`.
        cosine: cosine to the other prototypes.

    Returns:
        The scale; infinite if the target class cannot win, 0 if it need not.
    """
    if odds <= 0:
        return 0.0
    return odds / (target - cosine) if target > cosine else math.inf


_ANGLES, _DRAWS = 20_000, 512


def random_start(classes: int, dim: int, scale: float) -> Split:
    """Split of a cosine head before training: random directions, at every target angle.

    Args:
        classes: number of classes C.
        dim: size of a feature, at least 2.
        scale: factor of the cosines.

    Returns:
        A split of examples at target angles from 0 to pi, with the fraction of the sphere at each
        as weight in ``norm``; ``others``, ``hardest``, ``expected`` and ``mean`` are those of C - 1
        random directions.
    """
    theta = (torch.arange(_ANGLES, dtype=torch.double) + 0.5) * (math.pi / _ANGLES)
    share = ((dim - 2) * theta.sin().log()).softmax(0)
    cosine, count = theta.cos(), classes - 1
    below = share.cumsum(0)
    if count <= 1000:
        # Few classes: average over some random draws.
        generator = torch.Generator().manual_seed(0)
        level = torch.rand(_DRAWS, count, dtype=torch.double, generator=generator)
        score = scale * cosine[torch.searchsorted(below, level).clamp_max(_ANGLES - 1)]
        logs, nearest = score, score.amax(1) / scale
    else:
        # Many classes: the distribution of angles, cut off where less than one class is expected.
        first = int(torch.searchsorted(below, math.log(2) / count))
        score = scale * cosine[None, first:]
        logs, nearest = score + (count * share[first:]).log(), cosine[first]
    filled = {
        "others": logs.logsumexp(1).mean(),
        "hardest": nearest.mean(),
        "expected": (logs.softmax(1) * score).sum(1).mean(),
        "mean": score.new_zeros(()),
    }
    labels = torch.zeros(_ANGLES, dtype=torch.long)
    rows = split(torch.stack([cosine, cosine], 1), labels, scale=scale)
    tensors: dict[str, Any] = {n: value.expand_as(cosine) for n, value in filled.items()}
    return rows._replace(**tensors, norm=share, classes=classes, rivals=count)


def starting_loss(term: Term, classes: int, dim: int, scale: float) -> float | None:
    """Mean loss of a term on a cosine head before training, or ``None`` if unknown."""
    needs = term.definition
    if dim < 2 or needs.on != "split" or needs.state is not None:
        return None
    if needs.has_own_scores or not needs.reads.isdisjoint(("rest", *SUMMED)):
        return None
    rows = random_start(classes, dim, scale)
    return float(term(rows) @ rows.norm)
