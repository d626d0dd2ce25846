"""Measure a criterion on one batch, without changing it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tammes.criterion.criterion import Criterion
from tammes.heads.head import Head
from tammes.similarity import unit
from tammes.states import snapshot as copy_state
from tammes.terms import Term

ROWS = 512
"""Largest number of examples that are measured."""
_BLOCK = 1 << 16
"""Prototypes that are normalised at a time."""


@dataclass(frozen=True)
class TermReading:
    """Measurements of a term on the batch.

    Attributes:
        name: name of the term in the criterion.
        term: the term with its current settings; a scheduled setting has its current value.
        weight: weight of the term in the loss.
        value: mean over the examples, before the weight.
        gradient: mean norm of the gradient of an example's weighted loss with respect to its
            feature.
    """

    name: str
    term: Term
    weight: float
    value: float
    gradient: float


@dataclass(frozen=True)
class Snapshot:
    """Everything that the checks need: plain numbers, measured once.

    Attributes:
        classes: number of classes C.
        dim: size D of a feature.
        scale: scale of the head.
        learned_scale: whether the scale is learned or adaptive.
        has_angle: whether similarities are a length times a cosine, not distances.
        is_cosine: whether features and prototypes are compared by their cosine.
        terms: the terms of the loss, in order.
        loss: mean loss.
        sensitivity: mean norm of an example's gradient times the norm of its feature: the change of
            the loss per relative change of the feature.
        accuracy: fraction of examples whose class has the highest score; None if no term
            classifies.
        prototype_cosine: mean cosine of two prototypes; None if no term classifies, or if they are
            compared by distance.
        feature_cosine: mean cosine of two features.
        zero_features: fraction of features that are exactly zero.
        live_dimensions: number of dimensions that are nonzero in some feature.
        company: fraction of examples whose class has another one in the batch.
        examples_per_class: mean number of training examples per class, if known.
        lr: learning rate of the next step, if known.
        adaptive: whether the optimizer normalises gradients by their magnitude, as Adam does.
        held: whether the optimizer holds the prototypes; None if unknown, or if they are frozen.
        losses: mean losses of the diagnoses or epochs so far, oldest first; empty before the first.
        steps: steps taken so far, if known.
        trial: losses of one batch before and after trial steps.
        scheduled: whether a setting of the loss follows a schedule.
        posterior: posterior that an example at its prototype should have.
    """

    classes: int
    dim: int
    scale: float
    learned_scale: bool
    has_angle: bool
    is_cosine: bool
    terms: tuple[TermReading, ...]
    loss: float
    sensitivity: float
    accuracy: float | None
    prototype_cosine: float | None
    feature_cosine: float
    zero_features: float
    live_dimensions: int
    company: float
    examples_per_class: float | None = None
    lr: float | None = None
    adaptive: bool = False
    held: bool | None = None
    losses: tuple[float, ...] = ()
    steps: int | None = None
    trial: tuple[float, ...] = ()
    scheduled: bool = False
    posterior: float = 0.9

    @property
    def started(self) -> bool:
        """Whether training has begun."""
        return bool(self.losses)

    @property
    def main(self) -> TermReading:
        """The first term that classifies, or the first of all."""
        return next((t for t in self.terms if t.term.definition.on == "split"), self.terms[0])

    def measured(self) -> dict[str, Any]:
        """Return the measured numbers by name."""
        left_out = ("terms", "losses", "scheduled", "posterior", "adaptive", "held")
        kept = {key: value for key, value in vars(self).items() if key not in left_out}
        numbers = {key: value for key, value in kept.items() if value not in (None, ())}
        terms = {t.name: {"value": t.value, "gradient": t.gradient} for t in self.terms}
        return {**numbers, "terms": terms}


def take_snapshot(criterion: Criterion, features: Tensor, labels: Tensor, **known: Any) -> Snapshot:
    """Measure a criterion on a batch.

    One forward and one backward pass for each term, on copies of the features and in evaluation
    mode: no gradient, state, schedule, logged term or random number is changed.

    Args:
        criterion: any criterion whose prototypes are all in this process.
        features: shape ``(N, D)``.
        labels: class of each example, shape ``(N,)``.
        **known: fields of the snapshot that cannot be measured on the batch.
    """
    if criterion.head.is_sharded:
        raise ValueError(
            "diagnose expects a head with all prototypes in this process, got one whose classes "
            "are sharded over several"
        )
    if labels.ndim != 1:
        raise ValueError(
            f"diagnose expects one label per example, got labels of shape {tuple(labels.shape)}"
        )
    head = copy.copy(criterion.head)
    # On the copy only: in training mode, a head that samples classes would draw new ones.
    head.training = False
    with (
        torch.inference_mode(False),
        torch.random.fork_rng(devices=[features.device] if features.is_cuda else []),
        torch.autocast(features.device.type, enabled=False),
    ):
        counted = labels != criterion.ignore_index
        features, labels = features.detach()[counted].clone(), labels[counted].long()
        if not len(labels):
            raise ValueError("diagnose expects a batch with at least one label that counts, got 0")
        _, group, sizes = labels.unique(return_inverse=True, return_counts=True)
        company = float((sizes[group] > 1).float().mean())
        features, labels = features[:ROWS], labels[:ROWS]
        features = features.to(torch.promote_types(features.dtype, torch.float))
        readings, loss, gradient = _read_terms(criterion, head, features, labels)
        prototypes = head.weight.detach().flatten(0, -2)
        classifies = any(t.term.definition.on == "split" for t in readings)
        accuracy = None
        if classifies:
            with torch.no_grad():
                own = head.split(features, labels, ("target", "hardest"))
            accuracy = float((own.target > own.hardest).float().mean())
        norms = torch.linalg.vector_norm(features, dim=1)
        sensitivity = (torch.linalg.vector_norm(gradient, dim=1) * norms).mean()
        angular = classifies and head.similarity.has_angle
        return Snapshot(
            classes=head.num_classes,
            dim=head.embedding_size,
            scale=float(torch.as_tensor(head.scale).detach()),
            learned_scale=isinstance(head.scale_setting, str),
            has_angle=head.similarity.has_angle,
            is_cosine=head.similarity.is_cosine,
            terms=readings,
            loss=loss,
            sensitivity=float(sensitivity),
            accuracy=accuracy,
            prototype_cosine=_mean_cosine(prototypes) if angular else None,
            feature_cosine=_mean_cosine(features[norms > 0]),
            zero_features=float((norms == 0).float().mean()),
            live_dimensions=int((features != 0).any(0).sum()),
            scheduled=len(criterion.schedules) > 0,
            **{"company": company, **known},
        )


def _read_terms(
    criterion: Criterion, head: Head, features: Tensor, labels: Tensor
) -> tuple[tuple[TermReading, ...], float, Tensor]:
    """Evaluate every term; return their readings, the loss, and its gradient per example."""
    readings, total, loss = [], torch.zeros_like(features), 0.0
    taken: dict[str, int] = {}
    for weight, term in criterion.loss.leaves():
        taken[term.name] = number = taken.get(term.name, 0) + 1
        name = term.name if number == 1 else f"{term.name}_{number}"
        term = term.altered(**_scheduled(criterion, name, term))
        one = Criterion(head, term, class_weights=_class_weights(criterion), validate=None)
        for key in one.states:
            one.states[key] = copy_state(criterion.states[name])
        one.states.eval()
        # Not eval(), which would change modules of the head that the copy shares.
        one.training = False
        value, gradient = _differentiate(one, features, labels)
        total += weight * gradient
        loss += weight * value
        size = float(torch.linalg.vector_norm(weight * gradient, dim=1).mean())
        readings.append(TermReading(name, term, weight, value, size))
    return tuple(readings), loss, total


def _differentiate(criterion: Criterion, features: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    with torch.enable_grad():
        leaf = features.detach().requires_grad_()
        loss = criterion(leaf, labels)
        gradient = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    # Undo the division by the batch size in the mean.
    size = len(features)
    value = float(loss.detach())
    return value, torch.zeros_like(features) if gradient is None else gradient * size


def _scheduled(criterion: Criterion, name: str, term: Term) -> dict[str, float]:
    """Return the current values of a term's scheduled settings."""
    everywhere, own = criterion.schedules, {}
    if name in everywhere and isinstance(everywhere[name], nn.ModuleDict):
        own = dict(everywhere[name].items())  # type: ignore[operator]
    found = {k: s for k, s in everywhere.items() if k in term.settings} | own
    return {key: float(schedule().detach()) for key, schedule in found.items()}


def _class_weights(criterion: Criterion) -> Tensor | None:
    if "class_weights" in criterion.schedules:
        weights: Tensor = criterion.schedules["class_weights"]()
        return weights
    return criterion.class_weights


def _mean_cosine(rows: Tensor) -> float:
    """Mean cosine of two different rows, from the norm of their mean direction."""
    count = len(rows)
    if count < 2:
        return 0.0
    # In blocks, to avoid a copy of all prototypes.
    total = sum(unit(block.float()).sum(0) for block in rows.split(_BLOCK))
    return float((torch.as_tensor(total / count).square().sum() * count - 1) / (count - 1))


def optimizer_state(
    criterion: Criterion, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Return the learning rate of an optimizer, its kind, and whether it holds the prototypes."""
    if optimizer is None:
        return {}
    prototypes = criterion.head.weight
    groups: Sequence[dict[str, Any]] = optimizer.param_groups
    held = any(each is prototypes for group in groups for each in group["params"])
    trained = prototypes.requires_grad and any(
        term.definition.on != "features" for _, term in criterion.loss.leaves()
    )
    return {
        "lr": max(float(group["lr"]) for group in groups),
        "adaptive": not isinstance(optimizer, torch.optim.SGD),
        "held": held if trained else None,
    }
