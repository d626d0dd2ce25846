"""Toy problem on the sphere (Zhou 2022, Fig. 1): free prototypes and features.

There are no images and no network: prototypes and features are trained directly, and show where a
loss drives them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

import tammes
from tammes.lab.config import parse_head, parse_loss
from tammes.lab.config.typecheck import above_zero, at_least, construct
from tammes.lab.measure.classification import optimum
from tammes.metrics.functional import class_margin
from tammes.similarity import unit

_DIGITS = 6
"""Decimal places that are kept."""


@dataclass(frozen=True, kw_only=True)
class SphereSettings:
    """Settings of a cell of the kind ``sphere``.

    Args:
        loss: stateless loss, such as ``lm_softmax()``.
        scale: scale of the cosines.
        classes: number of prototypes.
        size: dimension of the points; 3 can be drawn.
        features: number of free features per class.
        optimizer: ``sgd`` with momentum 0.9, or ``adam``.
        lr: initial learning rate, annealed to 0 along a cosine.
        steps: number of steps.
        unit: whether to normalize all points after each step; otherwise their norms grow, which
            slows them down.
    """

    loss: str
    scale: Annotated[float, above_zero]
    classes: Annotated[int, at_least(2)] = 8
    size: Annotated[int, at_least(2)] = 3
    features: Annotated[int, at_least(1)] = 1
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Annotated[float, above_zero] = 0.1
    steps: Annotated[int, at_least(1)] = 3000
    unit: bool = True


def run_sphere(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Train points with the fields of :class:`SphereSettings`, and measure their margins.

    Returns:
        Plain values: ``values`` (class margin in degrees, mean sample margin), ``optimum`` (their
        largest possible values), and the points under ``sphere``.

    Raises:
        ValueError: a setting is invalid, or the points diverged.

    Example:
        >>> found = run_sphere({"loss": "lm_softmax()", "scale": 30, "steps": 200}, seed=0)
        >>> sorted(found["values"]), len(found["sphere"]["prototypes"])
        (['class_margin', 'sample_margin'], 8)
    """
    toy = construct(SphereSettings, settings, "sphere")
    prototypes, features, labels = _train(toy, seed)
    cosines = features @ prototypes.T
    own = tammes.split(cosines, labels)
    best = optimum(toy.classes, toy.size)
    return {
        "values": {
            "class_margin": round(float(class_margin(prototypes).angle), _DIGITS),
            "sample_margin": round(float((own.target - own.hardest).mean()), _DIGITS),
        },
        "optimum": {k: round(float(best[k]), _DIGITS) for k in ("class_margin", "sample_margin")},
        "sphere": {
            "prototypes": _plain(prototypes),
            "features": _plain(features),
            "labels": labels.tolist(),
        },
    }


def _train(toy: SphereSettings, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return prototypes ``(C, D)``, features ``(N, D)`` and labels ``(N,)`` after training."""
    loss = parse_loss(toy.loss)
    if any(term.definition.state is not None for _, term in loss.leaves()):
        raise ValueError(f"sphere expects a loss without a memory, got {toy.loss}")
    head = parse_head(f"cosine(scale={toy.scale})", loss, toy.size, toy.classes)
    criterion = tammes.Criterion(head, loss).double()
    generator = torch.Generator().manual_seed(seed)
    count = toy.classes * toy.features
    # Drawn in float32 and all at once, as in examples/sphere.py.
    drawn = unit(torch.randn(toy.classes + count, toy.size, generator=generator).double())
    with torch.no_grad():
        head.weight.copy_(drawn[: toy.classes])
    features = nn.Parameter(drawn[toy.classes :].clone())
    labels = torch.arange(toy.classes).repeat_interleave(toy.features)
    points = [head.weight, features]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(points, lr=toy.lr, momentum=0.9)
    if toy.optimizer == "adam":
        optimizer = torch.optim.Adam(points, lr=toy.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, toy.steps)
    for _ in range(toy.steps):
        optimizer.zero_grad()
        criterion(features, labels).backward()
        optimizer.step()
        schedule.step()
        if toy.unit:
            with torch.no_grad():
                for point in points:
                    point.copy_(unit(point))
    if not all(bool(torch.isfinite(point).all()) for point in points):
        raise ValueError(f"sphere: points are not finite after training with {toy.loss}")
    return unit(head.weight.detach()), unit(features.detach()), labels


def _plain(points: Tensor) -> list[list[float]]:
    return [[round(value, _DIGITS) for value in point] for point in points.tolist()]
