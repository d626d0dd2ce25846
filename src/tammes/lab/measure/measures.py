"""The measurements of ``tammes measure``: every margin, and its optimum."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tammes
from tammes.geometry import largest_class_margin, largest_sample_margin
from tammes.kernels.problem import Problem
from tammes.kernels.reference import similarity_matrix
from tammes.lab.measure.files import MeasureInput
from tammes.metrics import functional
from tammes.metrics.functional import AnglesResult, SampleMarginResult
from tammes.pooling import to_nearest
from tammes.similarity import Cosine, InnerProduct, Similarity, unit
from tammes.split import Split, split

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MEANS = "class_means"
"""Prefix of the keys of measures that use class means as prototypes."""
_BLOCK = 1 << 24
"""Largest number of similarities in memory."""
_HULL = 300
"""Largest number of classes for which the best margin of given prototypes is computed."""
_PAIRS = 5000
"""Largest number of classes for which the closest pairs are listed."""


@dataclass(frozen=True)
class Measure:
    """A measured number and its optimum.

    Attributes:
        key: name in JSON.
        name: name in tables.
        bound: whether ``optimum`` is only a bound.
        unit: ``"°"``, ``"%"`` or empty.
        share: whether the ratio of value to optimum is meaningful.
    """

    key: str
    name: str
    value: float
    optimum: float | None = None
    bound: bool = False
    unit: str = ""
    note: str = ""
    share: bool = False

    @property
    def of_optimum(self) -> float | None:
        """Ratio of value to optimum, or None if it is not meaningful."""
        return self.value / self.optimum if self.share and self.optimum else None

    def shown(self) -> str:
        """Format the value."""
        return format_number(self.value, self.unit)

    def shown_optimum(self) -> str:
        """Format the optimum; empty if there is none."""
        if self.optimum is None:
            return ""
        return f"{'at most ' if self.bound else ''}{format_number(self.optimum, self.unit)}"


@dataclass(frozen=True, eq=False)
class Measured:
    """All measures, and the data of their plots.

    Attributes:
        groups: measures by heading.
        scale: scale of the cosines, or None if scores are inner products.
        directions: unit prototypes, or unit class means in their place.
        split: cosines of the examples; None without examples, as are angles and margins.
        pairs: closest class pairs: angle in degrees and both classes.
    """

    given: MeasureInput
    groups: tuple[tuple[str, tuple[Measure, ...]], ...]
    notes: tuple[str, ...]
    scale: float | None
    directions: Tensor
    split: Split | None
    angles: AnglesResult | None
    margins: SampleMarginResult | None
    pairs: tuple[tuple[float, int, int], ...]

    def measure(self, key: str) -> Measure | None:
        """Return a measure by its key, of the prototypes or of the class means; None if missing."""
        keys = (key, f"{_MEANS}.{key}")
        return next((m for _, group in self.groups for m in group if m.key in keys), None)

    def name(self, label: int) -> str:
        """Return the name of a class, or its number if it has none."""
        return self.given.names[label] if self.given.names else str(label)


def measure(given: MeasureInput, *, scale: float | None = None) -> Measured:
    """Measure prototypes, embeddings with labels, or both.

    Without prototypes, the class means of the unit embeddings take their place. With several
    prototypes per class, the nearest counts. The softmax bias is that of a cosine head with this
    scale or, without a scale, of a linear head.
    """
    notes: list[str] = []
    prototypes = given.prototypes
    if given.ignored:
        notes.append(f"{given.ignored} examples labelled -100 are ignored.")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if prototypes is None:
            assert given.examples is not None
            prototypes = _class_means(*given.examples)
            notes.append(
                "No prototypes were given: the means of the unit embeddings of each class "
                "take their place."
            )
        of_means = given.prototypes is None

        def named(measured: Iterator[Measure]) -> tuple[Measure, ...]:
            return tuple(map(_of_means, measured) if of_means else measured)

        heading = "class means" if of_means else "prototypes"
        groups = [(heading, named(_of_prototypes(given, prototypes)))]
        examples, angles, margins = None, None, None
        if given.examples is not None:
            examples, answers = _split(*given.examples, prototypes, Cosine(), scale or 1.0)
            margins = functional.sample_margin(examples, quantiles=QUANTILES)
            angles = functional.angles(examples, bins=90)
            measured = _of_examples(given, prototypes, examples, angles, margins, scale)
            groups.append(("examples", named(measured)))
            # Neural collapse is defined for one prototype per class.
            single = None if prototypes.ndim == 3 else given.prototypes
            measured = _of_features(single, *given.examples, answers)
            groups.append(("features", tuple(measured)))
    notes += dict.fromkeys(
        f"{warning.message}." for warning in caught if warning.category is UserWarning
    )
    return Measured(
        given=given,
        groups=tuple(groups),
        notes=tuple(notes),
        scale=scale,
        directions=unit(prototypes),
        split=examples,
        angles=angles,
        margins=margins,
        pairs=closest_pairs(prototypes),
    )


def _of_means(measure: Measure) -> Measure:
    """Rename a measure, as class means stand for the prototypes."""
    name = measure.name.replace(" prototype", " class mean")
    if name == measure.name:
        name = f"{name} (class means)"
    return replace(measure, key=f"{_MEANS}.{measure.key}", name=name)


def _class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    sums = torch.zeros(int(labels.max()) + 1, embeddings.shape[1], dtype=torch.double)
    sums.index_add_(0, labels, unit(embeddings.double()))
    return (sums / labels.bincount()[:, None]).to(embeddings.dtype)


def _split(
    embeddings: Tensor, labels: Tensor, prototypes: Tensor, similarity: Similarity, scale: float
) -> tuple[Split, Tensor]:
    """Compute the :class:`tammes.Split` and the prediction of all examples, block by block."""
    reads = frozenset(("target", "others", "hardest", "length", "norm", "gap"))
    parts, answers = [], []
    similarity = to_nearest(similarity, prototypes)
    block = max(1, _BLOCK // (len(prototypes) * similarity.centers))
    for rows, own_labels in zip(embeddings.split(block), labels.split(block), strict=True):
        matrix = similarity_matrix(Problem(rows, prototypes, None, scale, similarity))
        own_prototypes = prototypes[own_labels].to(matrix.dtype)
        own = similarity.own(rows.to(matrix.dtype), own_prototypes, reads)
        parts.append(split(matrix, own_labels, scale=scale, own=own, reads=reads))
        answers.append(matrix.argmax(1))
    whole: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in (*reads, "labels")
    }
    return parts[0]._replace(**whole), torch.cat(answers)


def _measure(
    key: str, name: str, value: Tensor | float, optimum: float | None = None, **more: Any
) -> Measure:
    return Measure(key, name, float(value), optimum, **more)


def _of_prototypes(given: MeasureInput, prototypes: Tensor) -> Iterator[Measure]:
    margin = functional.class_margin(prototypes)
    best = largest_class_margin(len(prototypes), prototypes.shape[-1])
    norms = functional.prototype_norms(prototypes)
    first, second = margin.pair.tolist()
    name = given.names.__getitem__ if given.names else str
    note = f"closest: {name(first)} and {name(second)}; optimum: {best.bound} ({best.source})"
    limit = {"optimum": best.degrees, "bound": not best.exact, "share": True}
    yield _measure("class_margin.angle", "class margin", margin.angle, unit="°", note=note, **limit)
    centroid = tammes.zero_centroid()(prototypes.double().flatten(0, -2))
    yield _measure("centroid", "squared norm of the mean of unit prototypes", centroid, 0.0)
    if given.prototypes is not None:
        note = f"from {float(norms.smallest):.4g} to {float(norms.largest):.4g}"
        yield _measure(
            "norms.ratio", "longest over shortest prototype", norms.ratio, 1.0, note=note
        )


def _of_examples(
    given: MeasureInput,
    prototypes: Tensor,
    examples: Split,
    angles: AnglesResult,
    margins: SampleMarginResult,
    scale: float | None,
) -> Iterator[Measure]:
    classes = len(prototypes)
    # The simplex attains it; in too few dimensions for a simplex it is only a bound.
    best = {
        "optimum": classes / (classes - 1),
        "bound": classes > prototypes.shape[-1] + 1,
        "share": True,
    }
    counts = margins.counts.double()
    mean_note, least_note = "", ""
    if classes <= _HULL and prototypes.ndim == 2:
        attainable = largest_sample_margin(unit(prototypes.double())).margin
        mean = float((attainable * counts).sum() / counts.sum())
        mean_note = f"these prototypes allow {mean:.4g}"
        least_note = f"these prototypes allow {float(attainable[counts > 0].min()):.4g}"
    if not bool((counts == counts[0]).all()):
        mean_note += f"{'; ' if mean_note else ''}the optimum assumes classes of equal size"
    right = 100 * (examples.target > examples.hardest).double().mean()
    yield _measure("accuracy", "accuracy, nearest prototype", right, 100.0, unit="%")
    for key, words, value, note in (
        ("mean", "mean", margins.mean, mean_note),
        ("minimum", "smallest", margins.minimum, least_note),
    ):
        yield _measure(f"sample_margin.{key}", f"sample margin, {words}", value, note=note, **best)
    for level, value in zip(QUANTILES, margins.quantiles, strict=True):
        name = f"sample margin, {100 * level:g} % quantile"
        yield _measure(f"sample_margin.quantile_{100 * level:g}", name, value)
    yield _measure("angles.own", "angle to the true class, mean", angles.own_mean, 0.0, unit="°")
    widest = largest_class_margin(classes, prototypes.shape[-1])
    note = f"{'at most ' if not widest.exact else ''}{widest.degrees:.4g}° if all examples lie on "
    note += "optimal prototypes"
    name = "angle to the nearest wrong class, mean"
    yield _measure("angles.hardest", name, angles.hardest_mean, unit="°", note=note)
    scored, note = examples, f"of {scale:g} times the cosine" if scale is not None else ""
    if scale is None:
        if given.prototypes is None or given.examples is None:
            return
        scored, _ = _split(*given.examples, prototypes, InnerProduct(), 1.0)
        note = "of inner products; --scale S uses S times the cosine"
    bias = functional.softmax_bias(scored)
    limit = {"optimum": float(bias.bound), "bound": True, "share": True}
    yield _measure("softmax_bias.mean", "softmax bias, mean", bias.mean, note=note, **limit)


def _of_features(
    prototypes: Tensor | None, embeddings: Tensor, labels: Tensor, answers: Tensor
) -> Iterator[Measure]:
    distances = functional.discriminability(embeddings, labels).base
    collapse = functional.neural_collapse(
        embeddings, labels, prototypes=prototypes, predictions=answers
    )
    name = "distance within classes, D_intra"
    yield _measure("discriminability.intra", name, distances.intra, 0.0)
    present = len(labels.unique())
    best = present / (present - 1) if present > 1 else None
    name = "distance between classes, D_inter"
    yield _measure("discriminability.inter", name, distances.inter, best, share=True)
    name = "discriminability, D_inter over D_intra"
    yield _measure("discriminability.ratio", name, distances.ratio, note="larger is better")
    name = "NC1: within over between class variability"
    yield _measure("collapse.nc1", name, collapse.nc1, 0.0)
    of_simplex = {
        "equinorm": "deviation of the norms",
        "equiangular": "deviation of the cosines",
        "widest": "cosines off the simplex",
    }
    for key, subject in (("nc2", "class means"), ("nc2_prototypes", "prototypes")):
        result = getattr(collapse, key)
        for field, words in of_simplex.items() if result is not None else ():
            name = f"NC2: {subject}, {words}"
            yield _measure(f"collapse.{key}.{field}", name, getattr(result, field), 0.0)
    for key, name in (
        ("nc3", "NC3: prototypes against class means"),
        ("nc4", "NC4: disagreement with the nearest class mean"),
    ):
        value = getattr(collapse, key)
        if value is not None:
            yield _measure(f"collapse.{key}", name, value, 0.0)


def degrees_between(first: Tensor, second: Tensor) -> float:
    """Return the smallest angle between two unit vectors, or two sets of them.

    It is accurate for small angles too.
    """
    first, second = first.view(-1, 1, first.shape[-1]), second.view(-1, second.shape[-1])
    apart, together = (first - second).norm(dim=-1), (first + second).norm(dim=-1)
    return math.degrees(2 * float(torch.atan2(apart, together).min()))


def closest_pairs(prototypes: Tensor, count: int = 10) -> tuple[tuple[float, int, int], ...]:
    """Return the closest pairs of classes, nearest first; empty with too many classes."""
    classes = len(prototypes)
    if classes > _PAIRS:
        return ()
    rows = unit(prototypes.double())
    similarity = to_nearest(InnerProduct(), rows)
    pairs: list[tuple[float, int, int]] = []
    for start in range(0, classes, 1000):
        some = rows[start : start + 1000].flatten(0, -2)
        # From each centre to the nearest of every class, then the nearest over its own class.
        cosine = similarity.products(some, rows).unflatten(0, (-1, similarity.centers)).amax(1)
        cosine.masked_fill_(torch.ones_like(cosine, dtype=torch.bool).tril(start), -2.0)
        top = cosine.flatten().topk(min(count, cosine.numel()))
        for value, position in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            if value > -1.5:
                i, j = start + position // classes, position % classes
                pairs.append((degrees_between(rows[i], rows[j]), i, j))
    return tuple(sorted(pairs)[:count])


def format_number(value: float, unit: str = "") -> str:
    """Format a number with its unit."""
    if not math.isfinite(value):
        return {math.inf: "infinite", -math.inf: "minus infinite"}.get(value, "undefined")
    # Rounding errors are shown as zero.
    digits = f"{value:.2f}" if unit else f"{0.0 if abs(value) < 1e-12 else value:.4g}"
    return f"{digits}{' %' if unit == '%' else unit}"
