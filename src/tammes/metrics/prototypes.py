"""Metrics of the prototypes of the last update."""

from typing import Any

import torch
from torch import Tensor

from tammes.metrics.functional.inputs import as_prototypes
from tammes.metrics.functional.prototypes import (
    ClassMarginResult,
    NormSums,
    PrototypeNormsResult,
    class_margin,
    finish_norms,
    norm_sums,
)
from tammes.metrics.streaming import Metric, SumMetric


class ClassMargin(Metric):
    """Smallest angle between two prototypes, and its ratio to the largest possible.

    ``update`` keeps a reference to the prototypes, and ``compute`` measures those of the last
    update: nothing is copied, so call ``compute`` before they change. Formula and
    reference: :func:`tammes.metrics.functional.class_margin`.

    Args:
        sharded: whether each rank holds a different part of the classes. Then the parts are
            gathered in the order of the ranks. By default every rank has all classes, and nothing
            is communicated.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import ClassMargin
        >>> metric = ClassMargin()
        >>> metric.update(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]))
        >>> metric.compute().angle
        tensor(90., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    # The last update replaces the previous one, which a sum of states cannot express.
    full_state_update = True

    prototypes: list[Tensor]

    def __init__(self, *, sharded: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"sync_on_compute": sharded, **kwargs})
        self.sharded = sharded
        self.add_state("prototypes", [], dist_reduce_fx="cat")

    def update(self, prototypes: Tensor) -> None:
        """Set the prototypes of all classes or of this rank's, ``(C, D)`` or ``(C, K, D)``."""
        self.prototypes = [as_prototypes("ClassMargin", prototypes, several=True)]

    def compute(self) -> ClassMarginResult:
        """Compute the metric of the prototypes of the last update."""
        if isinstance(self.prototypes, Tensor):
            return class_margin(self.prototypes)
        if not self.prototypes:
            raise ValueError("ClassMargin expects an update before compute, got none")
        return class_margin(self.prototypes[0])


class PrototypeNorms(SumMetric):
    """Ratio of the longest to the shortest prototype.

    Uses the prototypes of the last update. Each rank may hold all classes or a part of them.
    Formula and reference: :func:`tammes.metrics.functional.prototype_norms`.

    Args:
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import PrototypeNorms
        >>> metric = PrototypeNorms()
        >>> metric.update(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        >>> metric.compute().ratio
        tensor(2.5000, dtype=torch.float64)
    """

    higher_is_better = False
    full_state_update = True

    counts: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        zero = torch.tensor(0.0, dtype=torch.double)
        self._register(NormSums(zero, zero.long(), zero + torch.inf, zero - torch.inf))

    def update(self, prototypes: Tensor) -> None:
        """Measure prototypes of shape ``(C, D)`` or ``(C, K, D)``, replacing the previous ones."""
        sums = norm_sums(as_prototypes("PrototypeNorms", prototypes, several=True))
        for name, value in sums._asdict().items():
            setattr(self, name, value)

    def compute(self) -> PrototypeNormsResult:
        """Compute the metric of the prototypes of the last update, of all ranks."""
        if not bool(self.counts):
            raise ValueError("PrototypeNorms expects an update before compute, got none")
        return finish_norms(self._collected(NormSums))
