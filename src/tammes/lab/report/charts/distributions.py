"""Figures of measurements: histograms, angles, features on the sphere, training curves."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tammes.lab.report.charts.chart import (
    DASHES,
    LEGEND,
    PALETTE,
    Ball,
    Bars,
    Chart,
    HeatMap,
    Layer,
    Line,
    Panel,
    Points,
    Rule,
    numbers,
    plot,
)
from tammes.metrics.functional import class_margin
from tammes.metrics.functional import margins as sample_margins
from tammes.similarity import unit
from tammes.split import Split

CLASSES_SHOWN = 200
POINTS_SHOWN = 3000
SHARE = "share of the examples"


def histogram(values: Tensor, low: float, high: float, bins: int, name: str, place: int) -> Bars:
    """Compute a histogram with bins of equal width; ``place`` is its palette index."""
    edges = torch.linspace(low, high, bins + 1, dtype=torch.double)
    # Values that rounding moved out of the range count in the outermost bins.
    inside = values.detach().double().cpu().clamp(low, high)
    heights = torch.histogram(inside, edges).hist
    return Bars(numbers(edges), numbers(heights / max(len(values), 1)), name, place)


@plot
def similarity_histogram(split: Split, *, bins: int = 80, title: str = "similarities") -> Chart:
    """Histogram of the cosines to the true class and to the nearest wrong class.

    As in Zhou 2022, Fig. 9 (a-c); ``split`` holds the cosines of the examples.
    """
    layers = [
        histogram(split.target, -1, 1, bins, "true class", 0),
        histogram(split.hardest, -1, 1, bins, "nearest wrong class", 1),
    ]
    return Chart([Panel(layers, title, "cosine", SHARE, x_range=(-1.0, 1.0))])


@plot
def margin_histogram(
    split: Split, *, bins: int = 80, optimum: float | None = None, title: str = "sample margins"
) -> Chart:
    """Histogram of the sample margins, with their mean and, if given, their optimum.

    As in Zhou 2022, Fig. 9 (d-f); ``split`` holds the cosines of the examples.
    """
    values = sample_margins(split).double()
    marks = [0.0, float(values.mean())] + ([] if optimum is None else [optimum])
    low, high = min(*marks, float(values.min())), max(*marks, float(values.max()))
    # The axis ends at multiples of 0.05.
    low, high = math.floor(20 * low) / 20, math.ceil(20 * high + 1e-9) / 20
    bars = histogram(values, low, high, bins, "sample margin", 2)
    layers: list[Layer] = [bars, Rule(marks[1], f"mean {marks[1]:.3f}")]
    if optimum is not None:
        layers.append(Rule(optimum, f"at most {optimum:.3f}"))
    if low < 0:
        layers.append(Rule(0.0, "errors below 0"))
    return Chart([margin_panel(layers, max(bars.heights), title)])


def margin_panel(layers: Sequence[Layer], top: float, title: str) -> Panel:
    """Return a panel of sample margins, with room above the bars for the labels of rules."""
    axis = "cosine, true − nearest wrong class"
    return Panel(layers, title, axis, SHARE, y_range=(0.0, 1.35 * top))


@plot
def histograms(splits: Mapping[str, Split], *, bins: int = 80) -> Chart:
    """Histograms of the similarities and margins of several models, as in Zhou 2022, Fig. 9."""
    kinds = ((similarity_histogram, "similarities"), (margin_histogram, "margins"))
    return Chart(
        [
            drawing.chart(split, bins=bins, title=f"{name}: {what}").panels[0]
            for drawing, what in kinds
            for name, split in splits.items()
        ],
        columns=len(splits),
    )


@plot
def angle_histogram(own: Tensor, hardest: Tensor, edges: Tensor) -> Chart:
    """Histogram of the angles to the true class and to the nearest wrong class.

    As in ArcFace (Deng 2019), Fig. 3. The counts in B bins, and the B + 1 edges of the bins in
    degrees, are those of :func:`tammes.metrics.functional.angles`.
    """
    total = max(float(own.sum()), 1.0)
    layers = [
        Bars(numbers(edges), numbers(own.double() / total), "true class", 0),
        Bars(numbers(edges), numbers(hardest.double() / total), "nearest wrong class", 1),
    ]
    return Chart([Panel(layers, "angles", "degrees", SHARE, x_step=30)])


def class_names(count: int, names: Sequence[str] = ()) -> list[str]:
    """Return the names of the classes, or their numbers if there are none."""
    return list(names) if names else [str(place) for place in range(count)]


def shown_classes(count: int, limit: int = CLASSES_SHOWN, always: Sequence[int] = ()) -> Tensor:
    """Return the classes to show: all, or an evenly spaced selection and those in ``always``."""
    if count <= limit:
        return torch.arange(count)
    spread = torch.linspace(0, count - 1, limit - len(set(always))).round().long()
    return torch.cat([spread, torch.tensor(list(always), dtype=torch.long)]).unique()


@plot
def angle_heat_map(
    prototypes: Tensor,
    names: Sequence[str] = (),
    *,
    limit: int = CLASSES_SHOWN,
    always: Sequence[int] = (),
) -> Chart:
    """Heat map of the angles between prototypes ``(C, D)``, in degrees.

    Of more than ``limit`` classes, an evenly spaced selection and those in ``always`` are shown.
    """
    shown = shown_classes(len(prototypes), limit, always)
    rows = unit(prototypes.detach().double().cpu()[shown])
    apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    together = torch.cdist(rows, -rows, compute_mode="donot_use_mm_for_euclid_dist")
    angles = torch.rad2deg(2 * torch.atan2(apart, together)).tolist()
    # The zeros on the diagonal would stretch the colour scale.
    values = [[None if i == j else v for j, v in enumerate(row)] for i, row in enumerate(angles)]
    all_names = class_names(len(prototypes), names)
    heat = HeatMap(values, [all_names[place] for place in shown.tolist()], "°")
    some = "" if len(shown) == len(prototypes) else f", {len(shown)} of {len(prototypes)} classes"
    return Chart([Panel([heat], f"angles between prototypes{some}", equal=True)])


def selection(count: int, limit: int) -> Tensor:
    """Return the examples to show: all, or a fixed random selection."""
    if count <= limit:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[:limit].sort().values


@plot
def sphere(
    prototypes: Tensor,
    features: Tensor | None = None,
    labels: Tensor | None = None,
    names: Sequence[str] = (),
    *,
    limit: int = POINTS_SHOWN,
    title: str = "",
) -> Chart:
    """Prototypes and features on the unit sphere, as in Zhou 2022, Fig. 1.

    Only directions are shown: of the prototypes ``(C, 3)``, and of at most ``limit`` features
    ``(N, 3)``.
    """
    _check_size("sphere", prototypes, 3)
    points, classes = _shown_points("sphere", features, labels, 3, limit)
    ball = Ball(
        unit(prototypes.detach().double().cpu()).tolist(),
        unit(points).tolist(),
        classes.tolist(),
        class_names(len(prototypes), names),
    )
    return Chart([Panel([ball], title, equal=True, bare=True)])


@plot
def spheres(
    arrangements: Mapping[str, tuple[Tensor, Tensor]], *, limit: int = POINTS_SHOWN
) -> Chart:
    """Several spheres side by side, with one feature per class and the class margin of each.

    As in Zhou 2022, Fig. 1; ``arrangements`` has prototypes and features by name, ``(C, 3)`` each.
    """
    panels: list[Panel] = []
    for name, (prototypes, features) in arrangements.items():
        angle = float(class_margin(prototypes).angle)
        labels = torch.arange(len(features))
        title = f"{name}: {angle:.2f}°"
        panels += sphere.chart(prototypes, features, labels, limit=limit, title=title).panels
    return Chart(panels, columns=5)


@plot
def feature_scatter(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor | None = None,
    names: Sequence[str] = (),
    *,
    limit: int = POINTS_SHOWN,
    title: str = "features",
) -> Chart:
    """Two-dimensional features by class, with the directions of the prototypes.

    As in L-Softmax (Liu 2016), Fig. 5; at most ``limit`` of the features ``(N, 2)`` are shown.
    """
    points, classes = _shown_points("feature_scatter", features, labels, 2, limit)
    count = int(labels.max()) + 1 if prototypes is None else len(prototypes)
    known = class_names(count, names)
    reach = float(points.norm(dim=1).max()) if len(points) else 1.0
    layers: list[Layer] = [*class_points(points, classes, known)]
    if prototypes is not None:
        _check_size("feature_scatter", prototypes, 2)
        for place, (x, y) in enumerate(unit(prototypes.detach().double().cpu()).tolist()):
            layers.append(Line([0, reach * x], [0, reach * y], "", "solid", place))
    return Chart([Panel(layers, title, "first feature", "second feature", equal=True)])


def class_points(
    points: Tensor, classes: Tensor, names: Sequence[str], *, rings: bool = False
) -> list[Points]:
    """Return points in the plane, one layer per class, or per colour and symbol if there are many.

    Each point has its class as text; with ``rings`` the points are prototypes.
    """
    few = len(names) <= LEGEND
    looks = classes if few else classes % (len(PALETTE) * len(DASHES))
    what = "prototype of " if rings else ""
    layers = []
    for place in looks.unique().tolist():
        x, y = points[looks == place].T
        texts = [f"{what}{names[each]}" for each in classes[looks == place].tolist()]
        name = names[place] if few and not rings else ""
        size = 11 if rings else 3
        layers.append(Points(numbers(x), numbers(y), name, place, size, rings, texts))
    return layers


def _check_size(name: str, vectors: Tensor, size: int) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != size:
        raise ValueError(f"{name} expects vectors of shape (·, {size}), got {tuple(vectors.shape)}")


def _shown_points(
    name: str, features: Tensor | None, labels: Tensor | None, size: int, limit: int
) -> tuple[Tensor, Tensor]:
    if features is None or labels is None:
        return torch.zeros(0, size, dtype=torch.double), torch.zeros(0, dtype=torch.long)
    _check_size(name, features, size)
    shown = selection(len(features), limit)
    return features.detach().double().cpu()[shown], labels.cpu()[shown]


@plot
def during_training(
    series: Mapping[str, Sequence[float]],
    steps: Sequence[float] | None = None,
    *,
    quantity: str,
    unit_of_steps: str = "epoch",
    bound: float | None = None,
    bound_name: str = "bound",
) -> Chart:
    """Training curves of a quantity by name of the run, with a theoretical bound if given.

    The steps are 1, 2, 3 and so on by default.
    """
    lines = []
    for place, (name, values) in enumerate(series.items()):
        at = list(range(1, len(values) + 1)) if steps is None else list(steps)
        if len(at) != len(values):
            raise ValueError(
                f"during_training expects a value for each of {len(at)} steps, "
                f"got {len(values)} for {name!r}"
            )
        lines.append(Line(at, numbers(values), name, color=place))
    layers: list[Layer] = [*lines]
    if bound is not None:
        layers.append(Rule(bound, f"{bound_name} {bound:.3g}", "y"))
    return Chart([Panel(layers, f"{quantity} during training", unit_of_steps, quantity)])


@plot
def bias_during_training(
    series: Mapping[str, Sequence[float]],
    classes: int,
    steps: Sequence[float] | None = None,
    *,
    unit_of_steps: str = "epoch",
) -> Chart:
    r"""Training curves of the softmax bias :math:`\hat\rho`, bounded by :math:`\log(C-1)`.

    As in Kobayashi 2019, Fig. 3; ``classes`` is C, the rest is as in :func:`during_training`.
    """
    return during_training.chart(
        series,
        steps,
        quantity="softmax bias ρ̂",
        unit_of_steps=unit_of_steps,
        bound=math.log(classes - 1),
        bound_name="log(C − 1) =",
    )
