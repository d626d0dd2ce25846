"""Charts of features of any dimension: on a sphere, in a plane, or projected onto a plane."""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tammes.lab.report.charts.chart import Chart, Layer, Panel, plot
from tammes.lab.report.charts.distributions import (
    POINTS_SHOWN,
    class_names,
    class_points,
    feature_scatter,
    selection,
    sphere,
)
from tammes.optional import require
from tammes.similarity import unit

CAPTIONS = {
    "sphere": "On the sphere arrows are prototypes and points are examples, pale on the far side; "
    "drag to turn it.",
    "plane": "In the plane lines are directions of prototypes and points are examples.",
    "pca": "Directions on their first two principal components; rings are prototypes.",
    "umap": "UMAP keeps neighbours together, and distances between groups say little; rings are "
    "prototypes.",
}
"""Captions of the kinds of charts."""
_NEIGHBOURS = 15
"""Size of the neighbourhoods that UMAP preserves."""


def feature_charts(
    prototypes: Tensor,
    features: Tensor,
    labels: Tensor,
    names: Sequence[str] = (),
    *,
    limit: int = POINTS_SHOWN,
    title: str = "",
) -> dict[str, Chart]:
    """Return the charts of features and prototypes that suit their dimension, by kind.

    Three dimensions give a ``sphere``, two a ``plane``. Others are projected: ``pca``, and ``umap``
    if umap-learn is installed. At most ``limit`` features are shown on the sphere, and half as many
    in the plane.
    """
    look: dict[str, Any] = {"names": names, "title": title}
    if prototypes.shape[1] == 3:
        return {"sphere": sphere.chart(prototypes, features, labels, limit=limit, **look)}
    look |= {"prototypes": prototypes, "limit": limit // 2}
    if prototypes.shape[1] == 2:
        return {"plane": feature_scatter.chart(features, labels, **look)}
    charts = {"pca": feature_projection.chart(features, labels, **look)}
    with contextlib.suppress(ImportError):
        if len(features) > _NEIGHBOURS:
            charts["umap"] = feature_projection.chart(features, labels, method="umap", **look)
    return charts


@plot
def feature_projection(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    names: Sequence[str] = (),
    *,
    method: Literal["pca", "umap"] = "pca",
    limit: int = POINTS_SHOWN,
    title: str = "features",
) -> Chart:
    """Directions of features of any dimension, projected onto a plane.

    The method is principal components, or UMAP with the cosine metric, which needs umap-learn. At
    most ``limit`` features are shown, with the prototypes of their classes as rings.
    """
    if not features.ndim == prototypes.ndim == 2 or prototypes.shape[1] != features.shape[1]:
        raise ValueError(
            "feature_projection expects features (N, D) and prototypes (C, D), "
            f"got {tuple(features.shape)} and {tuple(prototypes.shape)}"
        )
    shown = selection(len(features), limit)
    points, classes = unit(features.detach().double().cpu()[shown]), labels.cpu()[shown]
    present = classes.unique()
    rings = unit(prototypes.detach().double().cpu()[present])
    if method == "pca":
        placed, shares = _principal_components(points, rings)
        first, second = (f"component, {100 * share:.0f} % of the variance" for share in shares)
        x, y = f"first {first}", f"second {second}"
    else:
        placed, x, y = _umap(torch.cat([points, rings])), "", ""
    flat = placed.round(decimals=4)
    known = class_names(1 + max(present.tolist(), default=-1), names)
    layers: list[Layer] = [
        *class_points(flat[: len(points)], classes, known),
        *class_points(flat[len(points) :], present, known, rings=True),
    ]
    return Chart([Panel(layers, title, x, y, equal=True, bare=method == "umap")])


def _principal_components(points: Tensor, others: Tensor) -> tuple[Tensor, list[float]]:
    """Project vectors onto the first two principal components of the points.

    Returns:
        Points and others in the plane, shape ``(N + M, 2)``; shares of the variance.
    """
    center = points.mean(0)
    _, spread, axes = torch.linalg.svd(points - center, full_matrices=False)
    # The signs of the axes are arbitrary: make the largest loading positive.
    axes = axes[:2] * axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)).sign()
    variance = spread.square()
    shares = (variance / variance.sum().clamp_min(1e-300))[:2].tolist()
    flat = (torch.cat([points, others]) - center) @ axes.T
    missing = 2 - flat.shape[1]
    return torch.nn.functional.pad(flat, (0, missing)), [*shares, *[0.0] * missing]


def _umap(vectors: Tensor) -> Tensor:
    # Not plain umap, which an unrelated package on PyPI also installs.
    umap = require("umap.umap_", extra="umap")
    model = umap.UMAP(n_neighbors=_NEIGHBOURS, metric="cosine", random_state=0, n_jobs=1)
    return torch.from_numpy(model.fit_transform(vectors.numpy())).double()
