"""Curves of a loss as a function of the angle, computed by the term itself."""

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tammes
from tammes.advise.feasibility import PLAIN, builder
from tammes.lab.report.charts.chart import Chart, Line, Panel, numbers, plot
from tammes.lab.report.render import html_page, matplotlib_charts
from tammes.losses.adaptive import NormStatistics
from tammes.losses.pairwise import Centers
from tammes.split import REDUCED, Split, split
from tammes.states import LearnedNumber
from tammes.terms import Batch, Setting, Term

CLASSES = 10
HARDEST = 60.0
"""Degrees to the nearest wrong class; the other wrong classes are at a right angle."""
ABSENT = -1e3
"""Similarity that makes a class negligible."""
COUNTS = tuple(round(1000 * 0.01 ** (c / (CLASSES - 1))) for c in range(CLASSES))
"""Examples per class for a loss that needs them: a long tail of 100 to 1."""


@dataclass(frozen=True, eq=False)
class Curve:
    r"""Loss as a function of the angle.

    Attributes:
        name: name of the variant, if a term has several.
        gradient: derivative with respect to the angle in radians, shape ``(T,)``.
        score: :math:`\psi(\theta)`, which replaces :math:`\cos\theta` in the softmax, shape
            ``(T,)``; None if the loss is not a softmax with such a score.
    """

    name: str
    loss: Tensor
    gradient: Tensor
    score: Tensor | None


def term_named(name: str, **settings: Setting) -> Term:
    """Build a term by name, with default class counts if it needs them.

    Example:
        >>> from tammes.lab.report.charts.loss_curves import term_named
        >>> term_named("cosface", margin=0.2)
        cosface(margin=0.2)
    """
    build = builder(name)
    if "counts" in inspect.signature(build).parameters:
        settings = {"counts": COUNTS, **settings}
    return build(**settings)


def split_at(
    theta: Tensor,
    *,
    scale: float = 1.0,
    others: Tensor | None = None,
    classes: int = CLASSES,
    label: int = 0,
    norm: float = 1.0,
    distance: bool = False,
) -> Split:
    r"""Return the split, with ``rest``, of unit examples at given angles to their prototype.

    Args:
        theta: angles to the true class prototype in radians, shape ``(N,)``.
        scale: inverse temperature.
        others: cosines to the wrong classes; by default one is at 60 degrees and the rest are at a
            right angle.
        classes: number of classes, including the true one.
        label: the true class.
        norm: norm of the features; similarities use their directions.
        distance: use :math:`-\tfrac12\lVert x-w\rVert^2 = \cos\theta - 1` instead of the cosine.
    """
    if others is None:
        others = theta.new_zeros(classes - 1)
        others[0] = math.cos(math.radians(HARDEST))
    gap = 2 * (theta / 2).sin().square()
    offset = 1.0 if distance else 0.0
    rest = (others - offset).expand(len(theta), -1)
    target = 1 - gap - offset
    similarity = torch.cat([rest[:, :label], target[:, None], rest[:, label:]], 1)
    return split(
        similarity,
        torch.full(theta.shape, label),
        scale=scale,
        own={
            "target": target,
            "gap": gap,
            "length": torch.ones_like(theta),
            "norm": torch.full_like(theta, norm),
            "distance": 2 * (theta / 2).sin(),
        },
        reads=(*REDUCED, "rest"),
    )


def over_angle(term: Term, theta: Tensor, *, scale: float = 30.0) -> list[Curve]:
    """Compute the curves of a term over the angle.

    A term on the split gets an example at the angle from the prototype of its class, with the wrong
    classes of :func:`split_at`. A term on prototypes gets two of them at the angle. A term on
    features gets an anchor at the angle from another example of its class, or from its centre, with
    another class at a right angle to both. The angles are in radians, strictly between 0 and pi.

    Returns:
        One :class:`Curve`, or more if the term also depends on the class or the norm.

    Example:
        >>> import math, torch, tammes
        >>> from tammes.lab.report.charts.loss_curves import over_angle
        >>> curve, = over_angle(tammes.arcface(margin=0.5), torch.tensor([1.0]))
        >>> round(float(curve.score), 4), round(math.cos(1.5), 4)
        (0.0707, 0.0707)
    """
    theta = theta.detach().double()
    if term.definition.on != "split":
        return [_curve("", theta, lambda angle: _one_by_one(term, angle))]
    distance = term.name == "large_margin_gaussian"
    curves = []
    for name, options, arguments in _variants(term):
        evaluate = partial(
            _loss_and_others, term, arguments, scale=scale, distance=distance, **options
        )
        curve = _curve(name, theta, lambda angle, run=evaluate: run(angle)[0])  # type: ignore[misc]
        if not distance:
            score = _score(evaluate, theta, scale, options.get("classes", CLASSES))
            curve = replace(curve, score=score)
        curves.append(curve)
    return curves


def _loss_and_others(
    term: Term, arguments: dict[str, Any], theta: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    at = split_at(theta, **options)
    return term(at, **arguments), at.others


def _variants(term: Term) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return the variants of a term: name, options of the split, arguments of the term."""
    if term.name == "adaface":
        state = NormStatistics(term.settings["momentum"])
        state.mean.fill_(20.0)
        state.std.fill_(1.0)
        kinds = {"short feature": 1.0, "average feature": 20.0, "long feature": 100.0}
        return [(name, {"norm": norm}, {"state": state}) for name, norm in kinds.items()]
    if term.name == "curricularface":
        means = {"at first": 0.0, "mean cosine 0.6": 0.6}
        return [(name, {}, {"state": torch.tensor([mean])}) for name, mean in means.items()]
    learned = term.make_state(tammes.CosineHead(2, CLASSES).double())
    if isinstance(learned, LearnedNumber):
        return [("", {}, {"state": learned.value.detach().squeeze()})]
    for key, values in term.settings.items():
        if isinstance(values, tuple):
            # A setting per class: the first and the last class represent all.
            count = len(values)
            what = {0: f"{key} {values[0]:g}", count - 1: f"{key} {values[-1]:g}"}
            return [(name, {"classes": count, "label": label}, {}) for label, name in what.items()]
    return [("", {}, {})]


def _curve(name: str, theta: Tensor, loss: Callable[[Tensor], Tensor]) -> Curve:
    angle = theta.clone().requires_grad_()
    values = loss(angle)
    if not values.requires_grad:
        return Curve(name, values.detach(), torch.zeros_like(theta), None)
    (gradient,) = torch.autograd.grad(values.sum(), angle, allow_unused=True)
    gradient = torch.zeros_like(theta) if gradient is None else gradient
    return Curve(name, values.detach(), gradient, None)


def _score(
    loss_and_others: Callable[..., tuple[Tensor, Tensor]],
    theta: Tensor,
    scale: float,
    classes: int,
) -> Tensor | None:
    """Return the target score over the scale, if the loss is the softplus of others minus score."""
    found = []
    for degrees in (60.0, 90.0):
        others = theta.new_full((classes - 1,), ABSENT)
        others[0] = math.cos(math.radians(degrees))
        loss, lifted = loss_and_others(theta, others=others)
        # Invert the softplus.
        excess = loss + (-torch.expm1(-loss)).log()
        found.append((lifted - excess) / scale)
    first, second = found
    same = bool(first.isfinite().all()) and bool(((first - second).abs() < 1e-6).all())
    return first if same else None


def _one_by_one(term: Term, theta: Tensor) -> Tensor:
    """Evaluate a term on prototypes or features at each angle."""
    fixed = theta.new_tensor([1.0, 0.0, 0.0])
    values = []
    for angle in theta:
        turned = torch.stack([angle.cos(), angle.sin(), torch.zeros_like(angle)])
        if term.definition.on == "prototypes":
            values.append(term(torch.stack([fixed, turned])))
            continue
        if term.definition.on == "proxies":
            one = torch.ones(1, dtype=torch.bool)
            batch = Batch(turned[None], torch.zeros(1, dtype=torch.long), one)
            proxies = torch.stack([fixed, theta.new_tensor([0.0, 0.0, 1.0])])
            values.append(term(batch, proxies).sum())
            continue
        away = theta.new_tensor([0.0, 0.0, 1.0])
        batch = Batch(
            features=torch.stack([turned, fixed, away, away]),
            labels=torch.tensor([0, 0, 1, 1]),
            valid=torch.ones(4, dtype=torch.bool),
        )
        arguments = {}
        if term.definition.state is not None:
            arguments["state"] = Centers(torch.stack([fixed, away]), rate=0.5)
            arguments["state"].centers = torch.stack([fixed, away])
        values.append(term(batch, **arguments)[0][0])
    return torch.stack(values)


@plot
def loss(term: Term | str, *, scale: float = 30.0, points: int = 359) -> Chart:
    r"""Target score :math:`\psi(\theta)`, loss and gradient of a term over the angle.

    The term may be given by its name; the angles are ``points`` between 0 and 180 degrees.
    """
    term = term_named(term) if isinstance(term, str) else term
    # Leave out the ends, where the derivative is one-sided.
    degrees = torch.linspace(0, 180, points + 2, dtype=torch.double)[1:-1]
    theta = torch.deg2rad(degrees)
    curves = over_angle(term, theta, scale=scale)
    x = numbers(degrees)

    plain: dict[str, Line] = {}
    if term.definition.on == "split" and term.name not in PLAIN:
        (softmax,) = over_angle(tammes.normface(), theta, scale=scale)
        for field, name in (("score", "cos θ"), ("loss", "softmax"), ("gradient", "softmax")):
            if field == "score" or term.name not in _NO_SOFTMAX:
                values = numbers(getattr(softmax, field))
                plain[field] = Line(x, values, name, "dashed", None)

    def panel(field: str, y: str, title: str = "") -> Panel:
        lines = [plain[field]] if field in plain else []
        for place, curve in enumerate(curves):
            values = numbers(getattr(curve, field))
            lines.append(Line(x, values, curve.name or term.name, color=place))
        return Panel(lines, title or field, _AXIS[term.definition.on], y, x_step=45)

    panels = [panel("loss", "ℓ"), panel("gradient", "dℓ/dθ (per radian)")]
    if all(curve.score is not None for curve in curves):
        panels.insert(0, panel("score", "ψ(θ)", "target score"))
    where = f", s = {scale:g}" if term.definition.on == "split" else ""
    return Chart(panels, title=f"{_short(term)}{where}")


_AXIS = {
    "split": "angle to the true class prototype θ (degrees)",
    "prototypes": "angle between two prototypes θ (degrees)",
    "features": "angle to the true class θ (degrees)",
    "proxies": "angle to the true class prototype θ (degrees)",
}
_NO_SOFTMAX = ("lm_softmax", "sample_margin", "logit_divergence", "large_margin_gaussian")
"""Losses too different in magnitude to draw the softmax for comparison."""


def _short(term: Term) -> str:
    shown = {k: v for k, v in term.settings.items() if v != term.definition.defaults.get(k, ())}
    shown = shown or {k: v for k, v in term.settings.items() if k == "margin"}
    parts = [f"{k}={v}" for k, v in shown.items() if not isinstance(v, tuple)]
    return f"{term.name}({', '.join(parts)})"


def plot_loss(
    name: str, path: str | os.PathLike[str], *, scale: float = 30.0, **settings: Setting
) -> None:
    r"""Plot :math:`\psi(\theta)`, loss and gradient of a loss to a file.

    Args:
        name: name of the loss, such as ``"arcface"``.
        path: file to write, with the suffix ``.png``, ``.svg``, ``.pdf``, or ``.html`` for an
            interactive page.
        scale: inverse temperature.
        settings: settings of the loss that replace its defaults.
    """
    path = Path(path)
    known = (".png", ".svg", ".pdf", ".html")
    if path.suffix.lower() not in known:
        raise ValueError(f"plot_loss writes {', '.join(known)}, got {str(path)!r}")
    chart = loss.chart(term_named(name, **settings), scale=scale)
    if path.suffix.lower() != ".html":
        matplotlib_charts.save(matplotlib_charts.draw(chart), path)
        return
    html_page.write(
        path, html_page.render(chart.title, [html_page.Section("", html_page.pictures(chart))])
    )
