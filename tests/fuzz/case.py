"""One random case of the fuzz: a criterion and its batches, drawn from one integer."""

import dataclasses
import math
import random as python_random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fuzz.ranges import (
    FEATURE_TERMS,
    HEADS,
    SETTINGS,
    STATEFUL_TERMS,
    Choice,
    Counts,
    Number,
    fits,
    on_grid,
)


class Batch(NamedTuple):
    """Inputs of one call of a criterion.

    Attributes:
        features: shape ``(N, D)``.
        labels: shape ``(N,)``.
        weights: shape ``(N,)``, or none.
        settings: settings of this call: numbers, or tensors of shape ``(N,)``.
        upstream: gradient of the loss, one number or shape ``(N,)``.
    """

    features: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor | None
    settings: dict[str, Any]
    upstream: torch.Tensor


class Parameters(NamedTuple):
    """Parameters of the head.

    Attributes:
        weight: shape ``(C, D)``.
        bias: shape ``(C,)``, or none.
        log_scale: a scalar, or none where the scale is a number.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    log_scale: torch.Tensor | None


@dataclass
class Case:
    """A criterion and its batches.

    Attributes:
        seed: seed of all numbers in the tensors.
        terms: factor, name and settings of each term.
        head: name of the head.
        scale: scale of the head.
        learnable: whether the scale is learned.
        rows: N.
        classes: C.
        size: D.
        dtype: dtype of the features.
        parameter_dtype: dtype of the head.
        reduction: of the criterion.
        training: whether the criterion is in training mode.
        steps: number of calls.
        ignored: number of ignored rows.
        ignore_index: label of the ignored rows.
        nan_ignored: whether ignored rows hold NaN, with ``validate=None``.
        weights: ``""``, ``"given"`` or ``"learned"`` (they take a gradient).
        class_weights: weight of each class, or none.
        masked: number of classes with a bias of minus infinity.
        masked_own: whether an example's own class is one of them, which is an error.
        at_call: settings given at the call: a number, ``"each"`` for one per example, or
            ``"learned"`` for one per example that takes a gradient.
        schedules: name of a schedule and its arguments by setting.
        special: ``zero``, ``aligned``, ``opposite`` or ``repeated`` rows among the features,
            ``zero_prototype`` or ``repeated_prototype`` among the prototypes.
        spread: length of the features.
        labels: dtype of the labels.
        within: none, ``("direct_sum", eps, detach)`` or ``("spectral_sum", p, detach)``.
        autocast: whether the call is made under autocast to bfloat16.
    """

    seed: int
    terms: tuple = ((1.0, "softmax", {}),)
    head: str = "linear"
    scale: float = 1.0
    learnable: bool = False
    rows: int = 3
    classes: int = 3
    size: int = 2
    dtype: str = "float64"
    parameter_dtype: str = "float64"
    reduction: str = "mean"
    training: bool = True
    steps: int = 1
    ignored: int = 0
    ignore_index: int = -100
    nan_ignored: bool = False
    weights: str = ""
    class_weights: tuple | None = None
    masked: int = 0
    masked_own: bool = False
    at_call: dict = field(default_factory=dict)
    schedules: dict = field(default_factory=dict)
    special: tuple = ()
    spread: float = 1.0
    labels: str = "int64"
    within: tuple | None = None
    autocast: bool = False

    def __repr__(self):
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.name == "seed" or getattr(self, f.name) != _default(f)
        ]
        return f"Case({', '.join(changed)})".replace("-inf", "float('-inf')")

    @property
    def names(self):
        """Name of each term in the criterion; a second one of the same name is numbered."""
        terms = [name for _, name, _ in self.ordered]
        counts = [terms[: place + 1].count(name) for place, name in enumerate(terms)]
        return [
            name if count == 1 else f"{name}_{count}"
            for name, count in zip(terms, counts, strict=True)
        ]

    @property
    def ordered(self):
        """The terms in the order of the criterion: in a direct sum those on features come last."""
        if self.within is None:
            return self.terms
        return (*self.classification, *self.metric)

    @property
    def classification(self):
        """The terms that are not on features."""
        return tuple(term for term in self.terms if term[1] not in FEATURE_TERMS)

    @property
    def metric(self):
        """The terms on features."""
        return tuple(term for term in self.terms if term[1] in FEATURE_TERMS)

    @property
    def stateful(self):
        """Whether a term remembers anything."""
        return any(name in STATEFUL_TERMS for _, name, _ in self.terms)

    @property
    def working_dtype(self):
        """Dtype in which the library promises to compute."""
        dtype = torch.promote_types(self.torch_dtype, self.torch_parameter_dtype)
        return torch.promote_types(dtype, torch.float32)

    @property
    def torch_dtype(self):
        """Dtype of the features."""
        return getattr(torch, self.dtype)

    @property
    def torch_parameter_dtype(self):
        """Dtype of the head."""
        return getattr(torch, self.parameter_dtype)

    def masked_classes(self):
        """Which classes have a bias of minus infinity, shape ``(C,)``."""
        masked = torch.zeros(self.classes, dtype=torch.bool)
        masked[python_random.Random(self.seed).sample(range(self.classes), self.masked)] = True
        return masked

    def parameters(self):
        """Parameters of the head, in its dtype."""
        random = torch.Generator().manual_seed(self.seed)
        dtype, shape = self.torch_parameter_dtype, (self.classes, self.size)
        weight = torch.randn(shape, generator=random, dtype=torch.float64)
        if self.head != "gaussian":
            weight = weight / self.size**0.5
        if self.head == "simplex":
            weight = _simplex(self.classes, self.size)
        elif "repeated_prototype" in self.special:
            weight[-1] = weight[0]
        elif "zero_prototype" in self.special:
            weight[-1] = 0
        bias = None
        if self.head == "linear":
            bias = torch.randn(self.classes, generator=random, dtype=torch.float64)
            bias = bias.masked_fill(self.masked_classes(), -math.inf).to(dtype)
        log_scale = torch.tensor(math.log(self.scale)).to(dtype) if self.learnable else None
        return Parameters(weight.to(dtype), bias, log_scale)

    def batch(self, step=0):
        """Inputs of one call."""
        random = torch.Generator().manual_seed(1000 * self.seed + 7 + step)
        weight = self.parameters().weight.double()
        allowed = (~self.masked_classes()).nonzero().flatten()
        if 0 <= self.ignore_index < self.classes:
            allowed = allowed[allowed != self.ignore_index]
        labels = allowed[torch.randint(len(allowed), (self.rows,), generator=random)]
        features = torch.randn(self.rows, self.size, generator=random, dtype=torch.float64)
        features = self.spread * features
        rows = iter(range(self.rows))
        for kind in self.special:
            row = next(rows, None)
            if row is None:
                break
            if kind == "zero":
                features[row] = 0
            elif kind == "aligned":
                features[row] = 2 * weight[labels[row]]
            elif kind == "opposite":
                features[row] = -2 * weight[labels[row]]
            elif kind == "repeated":
                features[row] = features[-1]
        features = features.to(self.torch_dtype)
        ignored = torch.randperm(self.rows, generator=random)[: self.ignored]
        if self.nan_ignored:
            features[ignored] = math.nan
        if self.masked_own and self.rows:
            labels[-1] = self.masked_classes().nonzero()[0, 0]
        labels[ignored] = self.ignore_index
        working = self.working_dtype
        weights = None
        if self.weights:
            weights = torch.randint(0, 129, (self.rows,), generator=random).to(working) / 64
        settings = {}
        for key, value in self.at_call.items():
            if value in ("each", "learned"):
                low, high = self.range_of(key)
                drawn = torch.rand(self.rows, generator=random, dtype=torch.float64)
                value = ((low + (high - low) * drawn) * 64).round().clamp(low * 64, high * 64) / 64
                value = value.to(working)
            settings[key] = value
        shape = (self.rows,) if self.reduction == "none" else ()
        upstream = torch.randint(32, 129, shape, generator=random).to(working) / 64
        return Batch(features, labels.to(getattr(torch, self.labels)), weights, settings, upstream)

    def range_of(self, key):
        """Values of a setting that every term with this name accepts."""
        specs = [SETTINGS[name][key] for _, name, _ in self.terms if key in SETTINGS[name]]
        ranges = [spec.usual or (spec.low, spec.high) for spec in specs]
        return max(low for low, _ in ranges), min(high for _, high in ranges)

    def per_example(self):
        """Settings that may have one value per example."""
        return [key for key in self.adjustable() if not self._of_features(key)]

    def adjustable(self):
        """Settings that a call may change: numbers, within the range of every term with the name."""
        keys = {key: [] for _, name, _ in self.terms for key in SETTINGS[name]}
        for key, specs in keys.items():
            specs += [SETTINGS[name][key] for _, name, _ in self.terms if key in SETTINGS[name]]
        linear = any(settings.get("extension") == "linear" for _, _, settings in self.terms)
        return [
            key
            for key, specs in keys.items()
            if all(isinstance(spec, Number) and spec.at_call for spec in specs)
            and self.range_of(key)[0] < self.range_of(key)[1]
            and not (key == "m1" and linear)
        ]

    def _of_features(self, key):
        return any(name in FEATURE_TERMS and key in SETTINGS[name] for _, name, _ in self.terms)


def _default(spec):
    if spec.default is not dataclasses.MISSING:
        return spec.default
    return spec.default_factory() if spec.default_factory is not dataclasses.MISSING else None


def _simplex(classes, size):
    """Corners of a regular simplex, or of a polygon in the plane."""
    if size == 2 and classes > 3:
        angles = torch.arange(classes, dtype=torch.float64) * 2 * math.pi / classes
        return torch.stack([angles.cos(), angles.sin()], 1)
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    _, values, directions = torch.linalg.svd(centred)
    corners = (centred @ directions.T)[:, : classes - 1]
    corners = torch.nn.functional.pad(corners, (0, size - classes + 1))
    return corners / torch.linalg.vector_norm(corners, dim=1, keepdim=True)


def draw(seed):
    """Draw a case from an integer."""
    random = python_random.Random(seed)

    def chance(probability):
        return random.random() < probability

    head = random.choice(HEADS)
    small = not chance(0.12)
    case = Case(
        seed,
        head=head,
        rows=random.choice((0, 1, 1, 2, 3, 4, 5, 7, 9) if small else (13, 33, 65)),
        classes=random.choice((2, 3, 4, 5, 7, 9, 12) if small else (17, 63, 65, 130)),
        size=random.choice((1, 2, 3, 4, 6, 7, 9) if small else (5, 16, 33)),
        scale=random.choice((0.5, 1.0, 1.0, 4.0, 8.0, 30.0, 64.0)),
        learnable=chance(0.25),
        reduction=random.choice(("mean", "mean", "sum", "none")),
        training=not chance(0.1),
        spread=random.choice((0.125, 1.0, 1.0, 1.0, 8.0)),
        labels=random.choice(("int64", "int64", "int32", "int16")),
        ignore_index=random.choice((-100, -100, -1, 0)),
    )
    if head == "simplex" and case.classes > case.size + 1 and case.size != 2:
        case.classes = case.size + 1
    case.dtype, case.parameter_dtype = random.choice(
        4 * [("float64", "float64")]
        + 4 * [("float32", "float32")]
        + [(half, "float32") for half in ("bfloat16", "float16")]
        + [(half, half) for half in ("bfloat16", "float16")]
        + [("float32", "float64"), ("float64", "float32")]
    )
    case.autocast = case.parameter_dtype == "float32" and chance(0.15)
    names = [name for name in SETTINGS if fits(name, head)]
    chosen = [random.choice(names) for _ in range(random.choice((1, 1, 2, 2, 3)))]
    case.terms = tuple(
        (random.choice((1.0, 1.0, 0.5, 0.25, 2.0, -0.5)), name, _draw_settings(random, name, case))
        for name in chosen
    )
    if case.classification and case.metric and chance(0.5):
        options = [("spectral_sum", random.choice((0.25, 0.5, 1.0, 2.0)), chance(0.7))]
        if case.size > case.classes:
            options.append(("direct_sum", random.choice((None, 0.125)), chance(0.7)))
        case.within = random.choice(options)
    if case.rows:
        case.ignored = random.choice((0, 0, 1, random.randint(0, case.rows)))
        case.nan_ignored = case.ignored > 0 and chance(0.2)
        special = ["zero", "aligned", "opposite", "repeated"]
        if case.within is None and head != "simplex":
            special += ["zero_prototype", "repeated_prototype"]
        case.special = tuple(random.sample(special, random.choice((0, 0, 0, 1, 2))))
    case.weights = random.choice(("", "", "given", "learned"))
    if chance(0.25):
        case.class_weights = tuple(on_grid(random, 0, 3) for _ in range(case.classes))
    if head == "linear" and case.classes > 2 and chance(0.4):
        case.masked = random.randint(1, case.classes - 2)
        usable = case.classes - case.masked
        if 0 <= case.ignore_index < case.classes:
            usable -= not bool(case.masked_classes()[case.ignore_index])
        if usable < 1:
            case.masked = 0
        case.masked_own = case.masked > 0 and case.rows > case.ignored and chance(0.08)
        if case.masked_own:
            case.ignored, case.nan_ignored = 0, False
    if case.classes < 3 and case.ignore_index == 0:
        case.ignore_index = -100
    _draw_changes(random, case)
    if case.stateful or case.schedules:
        case.steps = 3
    return case


def _draw_settings(random, name, case):
    settings = {}
    for key, spec in SETTINGS[name].items():
        if isinstance(spec, Choice):
            settings[key] = random.choice(spec.values)
        elif isinstance(spec, Counts):
            settings[key] = tuple(random.randint(1, 200) for _ in range(case.classes))
        elif spec.per_class and random.random() < 0.15:
            settings[key] = tuple(spec.draw(random) for _ in range(case.classes))
        else:
            settings[key] = spec.draw(random)
    if settings.get("extension") == "linear":
        settings.pop("m1", None)
    return settings


def _draw_changes(random, case):
    """Draw what changes from call to call: settings at the call, and schedules."""
    for key in case.adjustable():
        kind = random.random()
        low, high = case.range_of(key)
        per_class = any(isinstance(s.get(key), tuple) for _, _, s in case.terms)
        if kind < 0.1:
            case.at_call[key] = on_grid(random, low, high)
        elif kind < 0.3 and key in case.per_example():
            case.at_call[key] = random.choice(("each", "each", "learned"))
        elif kind < 0.45 and not per_class:
            case.schedules[key] = _draw_schedule(random, key, low, high)
    if case.class_weights is None and random.random() < 0.08:
        counts = tuple(random.randint(1, 200) for _ in range(case.classes))
        case.schedules["class_weights"] = ("DeferredReweighting", (counts,), {"start": 1})


def _draw_schedule(random, key, low, high):
    if key == "blend" and random.random() < 0.5:
        return random.choice(
            (
                ("LambdaAnnealing", (8.0,), {"gamma": 0.5, "power": 2.0, "minimum": 0.125}),
                ("LambdaDecay", (4,), {"start": 8.0, "end": 0.5}),
            )
        )
    shape = random.choice(("linear", "linear", "cosine", "exponential"))
    ends = (on_grid(random, low, high), on_grid(random, low, high))
    return ("WarmUp", ends, {"steps": 2, "shape": shape, "delay": random.choice((0, 0, 1))})
