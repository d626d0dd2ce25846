"""Advise on margins and scales, initial settings, and the cost of a step.

``tammes advise`` on the command line, :func:`advise` in Python. Formulas and their sources are in
docs/advise.md, and in :mod:`tammes.advise.feasibility`, :mod:`tammes.advise.warnings` and
:mod:`tammes.advise.memory_plan`.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tammes.advise.defaults import POSTERIOR, default_scale
from tammes.advise.evidence import Grid, GridTrial, grids
from tammes.advise.feasibility import (
    KINDS,
    LINEAR,
    NO_MARGINS,
    SUMS,
    FeasibleMargin,
    adapts_scale,
    bent,
    builder,
    definition,
    feasible_margins,
    largest_sample_margin_of_any,
    log_odds,
    scale_for,
    starting_loss,
    term_names,
)
from tammes.advise.memory_plan import Cost, plan
from tammes.advise.recommend import Recommendation, best_margin, recommendations
from tammes.advise.snippet import Snippet
from tammes.advise.warnings import Caution, Choice, cautions
from tammes.advise.workload import Machine, Workload, choose_machine
from tammes.geometry.bounds import LargestClassMargin, largest_class_margin
from tammes.heads.adaptive_scale import adacos_scale
from tammes.pooling import pooled
from tammes.similarity import Cosine, InnerProduct, Similarity, SquaredDistance
from tammes.terms import Term


@dataclass(frozen=True)
class Scales:
    """Scales for a desired posterior.

    Attributes:
        posterior: desired posterior of an example at its prototype.
        least: smallest scale that can reach it without a margin, in any dimension.
        about: scale that reaches it without a margin at the largest class margin.
        adacos: fixed scale of AdaCos.
        least_with_margin: like ``least``, for the loss and margin of the advice; ``None`` if no
            theorem applies.
        about_with_margin: like ``about``, for that loss and margin; infinite if the margin cannot
            be met.
    """

    posterior: float
    least: float
    about: float
    adacos: float
    least_with_margin: float | None
    about_with_margin: float


@dataclass(frozen=True)
class Evidence:
    """Result of a loss's advised setting in a grid of training runs.

    Attributes:
        data: dataset.
        classes: number of its classes.
        images: training images per class.
        quantity: what was measured, in %.
        advised: the setting that is advised for it.
        best: the best setting of the grid.
        seeds: seeds of each setting.
    """

    data: str
    classes: int
    images: int
    quantity: str
    advised: GridTrial
    best: GridTrial
    seeds: int


@dataclass(frozen=True)
class Advice:
    """Result of :func:`advise`; ``print`` it, or call :meth:`to_dict`.

    Attributes:
        work: sizes of the job.
        machine: machine to run on.
        loss: loss, as given or recommended.
        margin: its margin, as given or recommended; ``None`` if it has none.
        scale: its scale, as given or recommended; the initial one if it is adaptive.
        lr: learning rate of the head, if given.
        class_margin: largest possible class margin.
        sample_margin: largest sample margin of examples at their prototypes,
            ``1 - cos(class margin)``.
        sample_margin_limit: upper bound of the sample margin of any examples.
        margins: feasible margins of every loss.
        scales: scales for the desired posterior.
        start: mean loss before training, or ``None`` if unknown.
        recommendations: recommended initial settings.
        cautions: warnings about the settings.
        costs: bytes and seconds of every implementation.
        implementation: the one that a head chooses by default, or ``""`` without a head.
        evidence: training runs with the advised settings of this loss, and the best of their grid.

    Example:
        >>> advice = advise(1000, 128, loss="cosface")
        >>> advice.margin, advice.scale, advice.cautions
        (0.1, 30.0, ())
    """

    work: Workload
    machine: Machine
    loss: str
    margin: float | None
    scale: float
    lr: float | None
    class_margin: LargestClassMargin
    sample_margin: float
    sample_margin_limit: float
    margins: tuple[FeasibleMargin, ...]
    scales: Scales
    start: float | None
    recommendations: tuple[Recommendation, ...]
    cautions: tuple[Caution, ...]
    costs: tuple[Cost, ...]
    implementation: str
    evidence: tuple[Evidence, ...]

    @property
    def code(self) -> str:
        """Lines of Python that build the criterion and its optimizer."""
        return Snippet(self).code()

    @property
    def command(self) -> str:
        """Command that trains with the same settings on a folder of images."""
        return Snippet(self).command()

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and dictionaries; infinity becomes None."""
        plain = asdict(self)
        work = {k: v for k, v in plain["work"].items() if k not in ("similarity", "reads")}
        plain["work"] = {
            **work,
            "reads": sorted(self.work.reads),
            "subcenters": self.work.centers,
        }
        plain["class_margin"]["degrees"] = self.class_margin.degrees
        plain["costs"] = [cost.to_dict() for cost in self.costs]
        plain |= {"code": self.code, "command": self.command}
        return plain_values(plain)

    def __str__(self) -> str:
        from tammes.advise.text import text

        return text(self)


def plain_values(value: Any) -> Any:
    """Convert tuples within a value to lists for JSON, and numbers that are not finite to None."""
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def advise(
    classes: int,
    dim: int,
    *,
    batch: int = 256,
    gpus: int = 1,
    dtype: str = "float32",
    autocast: str | None = None,
    optimizer: str = "momentum",
    lr: float | None = None,
    samples_per_class: float | None = None,
    imbalance: float = 1.0,
    identities: bool = False,
    loss: str | None = None,
    scale: float | None = None,
    margin: float | None = None,
    annealing: bool = False,
    posterior: float = POSTERIOR,
    sample_rate: float = 0.1,
    subcenters: int = 1,
    device: str | None = None,
    machine: Machine | str | None = None,
) -> Advice:
    """Advise on feasible margins and scales, initial settings, problems in training, and cost.

    Args:
        classes: number of classes C.
        dim: size D of a feature.
        batch: examples in a step, over all GPUs.
        gpus: number of ranks.
        dtype: dtype of the prototypes.
        autocast: dtype of matrix products under autocast, or ``None``.
        optimizer: ``"sgd"``, ``"momentum"`` (SGD with momentum), ``"adagrad"``, ``"rmsprop"``,
            ``"adam"`` or ``"adamw"``.
        lr: learning rate of the head.
        samples_per_class: number of training examples per class.
        imbalance: size of the largest class over that of the smallest.
        identities: whether the model will be used on identities that it was not trained on, as in
            retrieval and verification.
        loss: name of a loss, or several joined by ``+``, the main one first;
            ``cosface`` by default. ``direct_sum`` and ``spectral_sum`` may be among them.
        scale: scale of the head, if already chosen.
        margin: margin of the loss, if already chosen; radians for angles.
        annealing: whether ``blend`` of L-Softmax or SphereFace will be annealed.
        posterior: desired posterior of an example at its prototype.
        sample_rate: fraction of the classes per step with sampled classes.
        subcenters: prototypes per class.
        device: ``"cuda"`` or ``"cpu"``; that of the machine by default.
        machine: one accelerator, or its name in :data:`tammes.advise.workload.MACHINES`; by default
            the machine at hand.

    Returns:
        The :class:`Advice`.

    Example:
        >>> advice = advise(10_000, 512, loss="arcface", margin=0.5, scale=64, samples_per_class=3)
        >>> [caution.code for caution in advice.cautions]
        ['few-samples']
        >>> round(advice.class_margin.degrees, 1), round(advice.scales.adacos, 1)
        (88.6, 13.0)
    """
    written = _names("cosface" if loss is None else loss)
    names = tuple(term_names(written))
    given, main = next(pair for pair in zip(written, names, strict=True) if pair[1] not in SUMS)
    for name, value, least in (
        ("samples_per_class", samples_per_class, 1.0),
        ("imbalance", imbalance, 1.0),
        ("scale", scale, 0.0),
        ("lr", lr, 0.0),
    ):
        if value is not None and not (least <= value < math.inf and value > 0):
            allowed = "above 0" if least == 0 else f"of {least:g} or more"
            raise ValueError(f"advise expects {name} {allowed}, got {value:g}")
    if margin is not None and not math.isfinite(margin):
        raise ValueError(f"advise expects a finite margin, got {margin}")
    if margin is not None and not _has_margin(given):
        raise ValueError(f"advise expects no margin for {given}, which has none, got {margin:g}")
    if scale is not None and adapts_scale(names):
        sum_of = "+".join(written)
        raise ValueError(
            f"advise expects no scale for {sum_of}, whose head adapts it, got {scale:g}"
        )
    if margin is not None and main == "arcface" and margin > math.pi:
        raise ValueError(
            f"advise expects a margin in radians, up to pi, got {margin:g}; "
            f"{margin:g} degrees are {math.radians(margin):.4g}"
        )
    machine, device = choose_machine(machine, device, gpus)
    parts = [definition(name) for name in names if name not in SUMS]
    reads = frozenset(field for part in parts if part.on == "split" for field in part.reads)
    work = Workload(
        classes=classes,
        dim=dim,
        batch=batch,
        gpus=gpus,
        dtype=dtype,
        autocast=autocast,
        optimizer=optimizer,
        reads=reads,
        similarity=_similarity(names, main, subcenters),
        sample_rate=sample_rate,
        device=device,
    )
    odds = log_odds(posterior, classes)
    limit = largest_class_margin(classes, dim)
    suggested = best_margin(main, classes, limit.angle, odds, scale, samples_per_class)
    used_margin = suggested if margin is None else margin
    kind = KINDS.get(main)
    placed = NO_MARGINS if kind is None or used_margin is None else kind.place(used_margin)
    target, reach = bent(0.0, placed), math.cos(limit.angle)
    about = scale_for(odds, target, reach)
    used_scale = adacos_scale(classes) if adapts_scale(names) else scale
    if used_scale is None:
        used_scale = default_scale(main, placed, classes, dim, posterior, identities=identities)
    term = _term(given, used_margin)
    start = None if main in LINEAR else starting_loss(term, classes, dim, used_scale)
    choice = Choice(
        work=work,
        names=names,
        angle=limit.angle,
        exact=limit.exact,
        scale=used_scale,
        margin=used_margin,
        margins=placed,
        posterior=posterior,
        lr=lr,
        samples_per_class=samples_per_class,
        imbalance=imbalance,
        identities=identities,
        annealing=annealing,
        start=start,
    )
    # Losses between examples do not use a head.
    costs = plan(work, machine) if reads else ()
    return Advice(
        work=work,
        machine=machine,
        loss="+".join(written),
        margin=used_margin,
        scale=used_scale,
        lr=lr,
        class_margin=limit,
        sample_margin=1 - reach,
        sample_margin_limit=largest_sample_margin_of_any(classes, dim, limit.angle),
        margins=feasible_margins(limit.angle),
        scales=Scales(
            posterior=posterior,
            least=scale_for(odds, 1.0, -1 / (classes - 1)),
            about=scale_for(odds, 1.0, reach),
            adacos=adacos_scale(classes),
            least_with_margin=choice.least_scale,
            about_with_margin=about,
        ),
        start=start,
        recommendations=recommendations(choice, suggested, costs, free=loss is None),
        cautions=cautions(choice),
        costs=costs,
        implementation=work.automatic() if reads else "",
        evidence=tuple(_evidence(main)),
    )


def _evidence(loss: str) -> Iterator[Evidence]:
    """Compare the advised settings of a loss with the best in every grid that contains them."""
    for grid in grids():
        trial = grid.find(loss, *defaults_of(loss, grid))
        if trial is not None:
            yield Evidence(
                grid.data, grid.classes, grid.images, grid.quantity, trial, grid.best, grid.seeds
            )


def defaults_of(loss: str, grid: Grid) -> tuple[float, float | None]:
    """Return the scale and margin advised for a loss on the data of a grid."""
    classes, dim = grid.classes, grid.dim
    angle, odds = largest_class_margin(classes, dim).angle, log_odds(POSTERIOR, classes)
    margin = best_margin(loss, classes, angle, odds, None, grid.images)
    placed = NO_MARGINS if margin is None else KINDS[loss].place(margin)
    return default_scale(loss, placed, classes, dim, identities=grid.identities), margin


def _names(loss: str) -> tuple[str, ...]:
    """Names of the builders of the losses in a sum; a variant of a loss has its own builder."""
    if "(" in loss:
        raise ValueError(
            f"advise expects names of losses alone, got {loss!r}; margin and scale are settings of "
            "their own"
        )
    parts = [part.strip() for part in loss.split("+")]
    names = tuple(part if part in SUMS else builder(part).__name__ for part in parts)
    if all(name in SUMS for name in names):
        raise ValueError(
            f"advise expects the losses that {loss} combines too, as in {loss}+softmax"
        )
    return names


def _has_margin(loss: str) -> bool:
    """Return whether a loss has a margin to set; a variant may fix that of its loss."""
    name = definition(loss).name
    if name != loss:
        return "margin" in inspect.signature(builder(loss)).parameters
    return name in KINDS or "margin" in definition(name).defaults


def _similarity(names: Sequence[str], main: str, subcenters: int) -> Similarity:
    """Similarity of the head for which the main loss of a sum is made."""
    if subcenters != 1 and definition(main).on == "features":
        raise ValueError(f"advise expects subcenters with losses on prototypes only, got {main}")
    if main not in LINEAR or adapts_scale(names):
        return pooled("advise", Cosine(), subcenters, "max", 1.0)
    if subcenters != 1:
        raise ValueError(f"advise expects subcenters with losses of cosines only, got {main}")
    return SquaredDistance() if main == "large_margin_gaussian" else InnerProduct()


def _term(loss: str, margin: float | None) -> Term:
    """Build a loss with the margin in its setting."""
    name = definition(loss).name
    # For ldam the margin is that of the rarest class; with equal counts the others are a softmax.
    equal = {"ldam": "cosface", "logit_adjustment": "softmax", "vs_softmax": "softmax"}.get(name)
    loss, name = (equal, equal) if equal else (loss, name)
    kind = KINDS.get(name)
    settings: dict[str, float] = {}
    if kind is not None and margin is not None and _has_margin(loss):
        settings = {kind.setting: margin}
        if name == "combined_margin":
            settings["m2"] = kind.place(margin)[1]
        elif name == "gm_softmax":
            settings = {"beta1": -margin, "beta2": -margin}
    return builder(loss)(**settings)
