"""Figures of the papers that follow from formulas alone."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import tammes
from tammes.lab.report.charts.chart import (
    Arrow,
    Chart,
    Layer,
    Line,
    Note,
    Panel,
    Points,
    Region,
    Rule,
    numbers,
    plot,
)
from tammes.lab.report.charts.loss_curves import split_at
from tammes.losses.angular import target_similarity
from tammes.optional import require
from tammes.split import split

_ANGLE = "angle to the true class prototype θ (degrees)"


def _grid(low: float, high: float, count: int = 401) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.double)


def _lines(x: Tensor, curves: Mapping[str, Tensor]) -> list[Line]:
    """Return curves over the same x values, by name."""
    named = enumerate(curves.items())
    return [Line(numbers(x), numbers(y), name, color=place) for place, (name, y) in named]


@plot
def hinge_and_softplus(*, reach: float = 4.0) -> Chart:
    r"""Hinge and softplus as functions of the biased margin :math:`\xi`.

    Kobayashi 2019, Fig. 1a. Both are computed by the losses themselves, with one wrong class
    whose score is :math:`\xi` above the target's.
    """
    excess = _grid(-reach, reach)
    scores = torch.stack([torch.zeros_like(excess), excess], 1)
    both = split(scores, torch.zeros(len(excess), dtype=torch.long))
    terms = {"hinge": tammes.crammer_singer(margin=0.0), "softplus": tammes.hard_bias(margin=0.0)}
    lines = _lines(excess, {name: term(both) for name, term in terms.items()})
    axis = "biased margin ξ = f_c* − f_y + ρ"
    return Chart([Panel(lines, "hinge and softplus", axis, "loss L(ξ)")])


@plot
def margins_in_losses(
    target: float = 3.6,
    others: Sequence[float] = (1.4, 0.3, -0.4, -1.2),
    *,
    extra: float = 1.0,
    uniformity: float = 0.75,
) -> Chart:
    r"""Margins that losses add to the largest wrong logit before comparing it with the target.

    Kobayashi 2019, Fig. 2. (a) the hinge adds the constant 1; (b) large-margin losses add their
    own bias :math:`\check\rho` to the :math:`\hat\rho` implicit in the softmax; (c) the regulariser
    pulls the wrong logits together, which increases :math:`\hat\rho`.

    The logits are those of the true class and of the others; ``extra`` is :math:`\check\rho` of
    (b), and ``uniformity``, from 0 to 1, how far (c) moves the others towards equality.
    """
    spread = torch.tensor(others, dtype=torch.double)
    if len(spread) < 2:
        raise ValueError(f"margins_in_losses expects 2 other classes or more, got {len(spread)}")
    hardest = float(spread.max())
    together = hardest - (hardest - spread) * (1 - uniformity)

    def bias(logits: Tensor) -> float:
        return float(logits.logsumexp(0) - logits.max())

    def panel(title: str, logits: Tensor, steps: Sequence[tuple[str, float]]) -> Panel:
        layers: list[Layer] = [
            Points(numbers(spread), [0.0] * len(spread), "before", None, 9, hollow=True),
            Points(numbers(logits), [0.0] * len(logits), "wrong classes", 0, 9),
            Points([target], [0.0], "true class f_y", 1, 9),
        ]
        at = hardest
        for height, (name, step) in enumerate(steps):
            level = 0.3 + 0.25 * height
            layers.append(Arrow((at, level), (at + step, level), f"{name} = {step:.2f}", 2))
            at += step
        layers.append(Arrow((target, 0.9), (at, 0.9), f"ξ = {at - target:.2f}", None))
        layers += [Rule(hardest, "f_c*"), Rule(target, "f_y")]
        return Panel(
            layers, title, "logit", x_range=(min(others) - 0.6, target + 0.9), y_range=(-0.2, 1.3)
        )

    hidden = ("ρ̂", bias(spread))
    return Chart(
        [
            panel("(a) hinge", spread, [("ρ", 1.0)]),
            panel("(b) large-margin losses", spread, [hidden, ("ρ̌", extra)]),
            panel("(c) logits regularised", together, [("ρ̂", bias(together))]),
        ],
        title="margins in various losses",
        one_legend=True,
    )


@plot
def psi(margins: Sequence[float] = (1, 2, 3, 4)) -> Chart:
    r"""Target function :math:`\psi(\theta)` of L-Softmax for several margins.

    L-Softmax (Liu 2016), Fig. 3. Margins are factors of the angle, integer or not; 1 is the cosine
    of the softmax.
    """
    degrees = _grid(0, 180)
    at = split_at(torch.deg2rad(degrees))
    lines = _lines(degrees, {f"m = {m:g}": target_similarity(at, m1=m) for m in margins})
    return Chart([Panel(lines, "ψ(θ) of L-Softmax", _ANGLE, "ψ(θ)", x_step=45)])


@plot
def extensions(margin: float = 0.5) -> Chart:
    r"""Extensions of ArcFace's :math:`\cos(\theta+m)` past :math:`\pi`, for m in radians."""
    degrees = _grid(0, 180)
    theta = torch.deg2rad(degrees)
    at = split_at(theta)
    x = numbers(degrees)
    lines = [
        Line(x, numbers(theta.cos()), "cos θ", "dotted", None),
        Line(x, numbers((theta + margin).cos()), "cos(θ + m)", "dashed", None),
        Line(x, numbers(target_similarity(at, m2=margin)), "monotone", color=0),
        Line(x, numbers(target_similarity(at, m2=margin, extension="linear")), "linear", color=1),
    ]
    rule = Rule(180 - math.degrees(margin), "π − m")
    title = f"past π, m = {margin:g}"
    return Chart([Panel([*lines, rule], title, _ANGLE, "Φ(θ)", x_step=45)])


def boundaries(
    norms: tuple[float, float], *, margin: float = 2.0, angle: float = math.pi / 2
) -> tuple[float, float, float]:
    r"""Decision boundaries of two classes, for L-Softmax and for the softmax.

    The prototypes are at :math:`\pm\alpha/2`. The first class is certain where
    :math:`\lVert w_1\rVert\psi(\theta_1) > \lVert w_2\rVert\cos\theta_2`, with the factor m of
    L-Softmax in :math:`\psi`. The angle is in radians.

    Returns:
        Directions in radians: where the first class is certain, where the softmax decides, where
        the second class is certain.

    Example:
        >>> import math
        >>> from tammes.lab.report.charts.paper_figures import boundaries
        >>> [round(math.degrees(edge), 4) for edge in boundaries((1.0, 1.0), margin=2.0)]
        [15.0, 0.0, -15.0]
    """
    first, second = norms
    if min(norms) <= 0 or not 0 < angle < math.pi:
        raise ValueError(
            "boundaries expects positive norms and an angle between 0 and pi, "
            f"got {norms} and {angle}"
        )

    def lead(direction: float, own: float, other: float, bend: float) -> float:
        # Score of the class minus that of the other.
        to_own, to_other = abs(direction - angle / 2), abs(direction + angle / 2)
        at = split_at(torch.tensor([to_own], dtype=torch.double))
        return own * float(target_similarity(at, m1=bend)) - other * math.cos(to_other)

    def solve(own: float, other: float, bend: float) -> float:
        low, high = -angle / 2, angle / 2
        if not lead(low, own, other, bend) < 0 < lead(high, own, other, bend):
            raise ValueError(
                f"boundaries expects norms whose classes meet between the prototypes, got {norms}"
            )
        solver = require("scipy.optimize", extra="lab")
        return float(solver.brentq(lead, low, high, args=(own, other, bend)))

    return solve(first, second, margin), solve(first, second, 1.0), -solve(second, first, margin)


@plot
def decision_geometry(
    *,
    margin: float = 2.0,
    angle: float = math.pi / 2,
    norms: Sequence[tuple[float, float]] = ((1.0, 1.0), (1.4, 1.0), (1.0, 1.4)),
) -> Chart:
    r"""Decision boundaries of L-Softmax for two classes, of equal and unequal norms.

    L-Softmax (Liu 2016), Fig. 2 and 4: between the two boundaries is the margin; the longer
    prototype has the larger feasible angle. The arguments are those of :func:`boundaries`, with the
    norms of each panel.
    """
    reach = 1.15 * max(max(pair) for pair in norms)

    def towards(direction: float, length: float) -> tuple[float, float]:
        # The bisector of the prototypes points up, with the first class on the left.
        return (-length * math.sin(direction), length * math.cos(direction))

    def wedge(low: float, high: float) -> tuple[list[float], list[float]]:
        rim = [towards(d, reach) for d in numbers(_grid(low, high, 41))]
        xs, ys = zip((0.0, 0.0), *rim, strict=True)
        return list(xs), list(ys)

    panels = []
    for first, second in norms:
        upper, middle, lower = boundaries((first, second), margin=margin, angle=angle)
        sign = "=" if first == second else ">" if first > second else "<"
        layers: list[Layer] = [
            Region(*wedge(upper, angle / 2 + 0.5), "class 1", 0),
            Region(*wedge(-angle / 2 - 0.5, lower), "class 2", 1),
            Region(*wedge(lower, upper), "margin", None),
        ]
        edge = towards(middle, reach)
        layers.append(Line([0, edge[0]], [0, edge[1]], "softmax", "dashed", None))
        for place, (direction, limit) in enumerate(((angle / 2, upper), (-angle / 2, lower))):
            own, edge = towards(direction, (first, second)[place]), towards(limit, reach)
            layers.append(Line([0, edge[0]], [0, edge[1]], "L-Softmax" * (not place), color=place))
            layers.append(Arrow((0.0, 0.0), own, "", place))
            layers.append(Note(1.1 * own[0], 1.1 * own[1], f"W{place + 1}"))
        opening = math.degrees(upper - lower)
        panels.append(
            Panel(
                layers,
                f"‖W1‖ {sign} ‖W2‖, margin {opening:.1f}°",
                x_range=(-1.1 * reach, 1.1 * reach),
                y_range=(-0.15 * reach, 1.1 * reach),
                equal=True,
                bare=True,
            )
        )
    title = f"decision boundaries of L-Softmax, m = {margin:g}"
    return Chart(panels, title, one_legend=True)


@plot
def divergences() -> Chart:
    r"""Three divergences from uniform for two wrong classes, over the share of one of them.

    Kobayashi 2019, Fig. 4, computed by :func:`tammes.logit_divergence` itself.
    """
    share = _grid(0.001, 0.999, 999)
    logits = torch.stack([torch.zeros_like(share), share.log(), (1 - share).log()], 1)
    at = split(logits, torch.zeros(len(share), dtype=torch.long))
    kinds = {"symmetric": "D̃(q)", "q_u": "D(q‖u)", "u_q": "D(u‖q)"}
    curves = {name: tammes.logit_divergence(kind=kind)(at) for kind, name in kinds.items()}
    title = "divergence from uniform, two categories {q, 1 − q}"
    return Chart([Panel(_lines(share, curves), title, "q", "divergence", y_range=(0.0, 2.0))])


@plot
def spectral_overlap(powers: Sequence[float] = (0.0, 0.1, 0.3, 0.5, 1.0, 2.0)) -> Chart:
    r"""Overlap :math:`\lambda(1-\lambda^p)` of the spectral complement with the classifier.

    Kobayashi 2024, Fig. A. The largest overlap is :math:`p(1+p)^{-(1+1/p)}` at
    :math:`\lambda = (1+p)^{-1/p}`; a power of zero is the direct sum.
    """
    if min(powers) < 0:
        raise ValueError(f"spectral_overlap expects powers of 0 or more, got {tuple(powers)}")
    share = _grid(0.0, 1.0)
    # Define 0 ** p as 0, so that p = 0 keeps the null space.
    weights = {f"p = {power:g}": torch.where(share > 0, share**power, 0.0) for power in powers}
    lines = _lines(share, {name: share * (1 - weight) for name, weight in weights.items()})
    tops = [((1 + power) ** (-1 / power), power) for power in powers if power > 0]
    layers: list[Layer] = [*lines]
    if tops:
        xs, ys = zip(*((top, top * (1 - top**power)) for top, power in tops), strict=True)
        layers.append(Points(xs, ys, "largest", None, 6, hollow=True))
    return Chart([Panel(layers, "overlap λ(1 − λᵖ)", "normalised singular value λ", "λ(1 − λᵖ)")])
