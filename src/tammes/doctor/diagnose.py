"""Diagnose a criterion on a batch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tammes.criterion.criterion import Criterion
from tammes.doctor.collapse import (
    features_collapsed,
    features_dead,
    features_zero,
    prototypes_collapsed,
)
from tammes.doctor.finding import Finding
from tammes.doctor.gradients import first_gradient, gradient_ratio
from tammes.doctor.settings import few_examples, margin_infeasible, negative_margin, scale_small
from tammes.doctor.snapshot import optimizer_state, take_snapshot
from tammes.doctor.training import (
    learning_rate,
    loss_at_chance,
    not_finite,
    prototypes_not_trained,
    saturated,
)

CHECKS = (
    not_finite,
    prototypes_not_trained,
    prototypes_collapsed,
    features_collapsed,
    features_zero,
    features_dead,
    loss_at_chance,
    saturated,
    learning_rate,
    first_gradient,
    gradient_ratio,
    negative_margin,
    margin_infeasible,
    scale_small,
    few_examples,
)
"""All checks, in the order in which findings are listed."""
NAMES = tuple(check.name for check in CHECKS)
"""Names of the checks."""


@dataclass(frozen=True)
class Diagnosis:
    """Findings, and the numbers they come from; printed, it is a readable text.

    Attributes:
        findings: the findings that are not muted, warnings first.
        measured: the measured numbers by name.

    Example:
        >>> print(Diagnosis((), {}))
        healthy
    """

    findings: tuple[Finding, ...]
    measured: dict[str, Any]

    @property
    def healthy(self) -> bool:
        """Whether there is no warning."""
        return all(finding.severity != "warning" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and dictionaries; NaN and infinity become None.

        Example:
            >>> Diagnosis((), {}).to_dict()
            {'healthy': True, 'findings': [], 'measured': {}}
        """
        findings = [finding.to_dict() for finding in self.findings]
        return {"healthy": self.healthy, "findings": findings, "measured": _plain(self.measured)}

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "healthy"


def diagnose(
    criterion: Criterion,
    features: Tensor,
    labels: Tensor,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float | None = None,
    steps: int | None = None,
    losses: Sequence[float] = (),
    trial: Sequence[float] = (),
    counts: Sequence[int] | None = None,
    company: float | None = None,
    posterior: float = 0.9,
    mute: Iterable[str] = (),
) -> Diagnosis:
    """Say what is wrong with a training run, why, and what to change.

    For any training loop: call it before the first step and every few hundred steps. It costs one
    forward and one backward pass of each term on up to 512 examples, not of the network, and
    changes nothing: no gradient, state, schedule, logged term or random number.

    Args:
        criterion: the criterion being trained.
        features: features of a training batch, shape ``(N, D)``.
        labels: class of each example, shape ``(N,)``.
        optimizer: optimizer of the training, for its learning rate and whether it holds the
            prototypes.
        lr: learning rate of the next step, if it is not that of the optimizer.
        steps: steps taken so far.
        losses: mean losses so far, oldest first, one for each call or epoch. If empty, training has
            not begun, and checks of a running training are skipped.
        trial: losses of one batch before and after trial steps on it.
        counts: number of training examples of each class.
        company: fraction of the examples of a training batch whose class has another example in it,
            if ``features`` are not a training batch.
        posterior: posterior that an example at its prototype should have.
        mute: names of checks to skip, see :data:`tammes.doctor.NAMES`.

    Returns:
        The :class:`tammes.doctor.Diagnosis`.

    Example:
        >>> criterion = tammes.CosFace(64, 100, scale=30.0, margin=-0.3)
        >>> features, labels = torch.randn(32, 64), torch.randint(100, (32,))
        >>> diagnosis = tammes.diagnose(criterion, features, labels)
        >>> [finding.name for finding in diagnosis.findings]
        ['negative-margin']
    """
    muted = (mute,) if isinstance(mute, str) else tuple(mute)
    check_muted("diagnose", muted)
    known = optimizer_state(criterion, optimizer)
    known |= {"lr": lr} if lr is not None else {}
    known |= {"company": company} if company is not None else {}
    snapshot = take_snapshot(
        criterion,
        features,
        labels,
        **known,
        steps=steps,
        losses=tuple(losses),
        trial=tuple(trial),
        examples_per_class=None if counts is None else sum(counts) / max(len(counts), 1),
        posterior=posterior,
    )
    findings = [check(snapshot) for check in CHECKS if check.name not in muted]
    found = [finding for finding in findings if finding is not None]
    found.sort(key=lambda finding: finding.severity != "warning")
    return Diagnosis(tuple(found), snapshot.measured())


def check_muted(owner: str, muted: Iterable[str]) -> None:
    """Reject names of unknown checks; the message begins with ``owner``."""
    for name in muted:
        if name not in NAMES:
            raise ValueError(f"{owner} expects names among {', '.join(NAMES)}, got {name!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
