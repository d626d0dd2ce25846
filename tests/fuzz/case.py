"""One random case of the fuzz: a criterion and its batches, printable as code."""

import dataclasses
import math
import random as python_random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fuzz.ranges import CENTERS, FEATURE_TERMS, PROXY_TERMS, SETTINGS, STATEFUL_TERMS, Number


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
        weight: shape ``(C, D)``, or ``(C, K, D)`` with several prototypes per class.
        bias: shape ``(C,)``, or none.
        log_scale: shape ``(1,)``, or none where the scale is a number.
        adaptive_scale: first scale of a head whose scale adapts, shape ``(1,)``, or none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    log_scale: torch.Tensor | None
    adaptive_scale: torch.Tensor | None


@dataclass
class Case:
    """A criterion and its batches.

    Attributes:
        seed: seed of all numbers in the tensors.
        terms: factor, name and settings of each term.
        head: name of the head.
        scale: scale of the head, the first one where it adapts.
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
    def adaptive(self):
        """Whether the scale follows the batches."""
        return self.head == "cosine_adaptive"

    @property
    def stateful(self):
        """Whether a term or the scale remembers anything."""
        return self.adaptive or any(name in STATEFUL_TERMS for _, name, _ in self.terms)

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
        if self.head in CENTERS:
            shape = (self.classes, CENTERS[self.head], self.size)
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
        log_scale = torch.tensor([math.log(self.scale)]).to(dtype) if self.learnable else None
        wide = torch.promote_types(dtype, torch.float32)
        adaptive_scale = torch.tensor([self.scale], dtype=wide) if self.adaptive else None
        return Parameters(weight.to(dtype), bias, log_scale, adaptive_scale)

    def batch(self, step=0):
        """Inputs of one call."""
        random = torch.Generator().manual_seed(1000 * self.seed + 7 + step)
        weight = self.parameters().weight.double().view(self.classes, -1, self.size)[:, 0]
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
            masked = self.masked_classes().nonzero().flatten()
            labels[-1] = masked[masked != self.ignore_index][0]
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
        """Settings that a call may change: numbers, in a range of all terms that have them."""
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
        compared = (*FEATURE_TERMS, *PROXY_TERMS)
        return any(name in compared and key in SETTINGS[name] for _, name, _ in self.terms)


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
    directions = torch.linalg.svd(centred).Vh
    corners = (centred @ directions.T)[:, : classes - 1]
    corners = torch.nn.functional.pad(corners, (0, size - classes + 1))
    return corners / torch.linalg.vector_norm(corners, dim=1, keepdim=True)
