"""Measures of prototypes; the last update counts."""

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
from tammes.metrics.streaming import Metric, held, hold


class ClassMargin(Metric):
    r"""The smallest angle between two prototypes, and how near it is to the largest possible.

    .. math:: m_c(W) = \min_{i\ne j}\angle(w_i, w_j)

    An update names the prototypes, ``compute`` measures them: the last update counts, and nothing
    is copied, so that call ``compute`` before they change. See
    :func:`tammes.metrics.functional.class_margin`.

    Args:
        sharded: whether each rank holds its own part of the classes. Then the parts are gathered,
            in the order of the ranks. By default every rank has all classes, and nothing is
            exchanged.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import ClassMargin
        >>> metric = ClassMargin()
        >>> metric.update(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]))
        >>> metric.compute().angle
        tensor(90., dtype=torch.float64)

    References:
        Zhou et al., Learning Towards the Largest Margins, ICLR 2022, class margin.
    """

    is_differentiable = False
    higher_is_better = True
    # The last update replaces the one before, which a sum of states could not do.
    full_state_update = True

    prototypes: list[Tensor]

    def __init__(self, *, sharded: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"sync_on_compute": sharded, **kwargs})
        self.sharded = sharded
        self.add_state("prototypes", [], dist_reduce_fx="cat")

    def update(self, prototypes: Tensor) -> None:
        """Name the prototypes of all classes, or of this rank's, shape ``(C, D)``."""
        self.prototypes = [as_prototypes("ClassMargin", prototypes)]

    def compute(self) -> ClassMarginResult:
        """The measure of the prototypes of the last update."""
        if isinstance(self.prototypes, Tensor):
            return class_margin(self.prototypes)
        if not self.prototypes:
            raise ValueError("ClassMargin expects an update before compute, got none")
        return class_margin(self.prototypes[0])


class PrototypeNorms(Metric):
    r"""The longest prototype against the shortest.

    .. math:: r = \max_c\lVert w_c\rVert \,/\, \min_c\lVert w_c\rVert

    The last update counts. It does not matter whether ranks hold all classes or each its own
    part. See :func:`tammes.metrics.functional.prototype_norms`.

    Args:
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import PrototypeNorms
        >>> metric = PrototypeNorms()
        >>> metric.update(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        >>> metric.compute().ratio
        tensor(2.5000, dtype=torch.float64)

    References:
        Kang et al., Decoupling Representation and Classifier for Long-tailed Recognition,
        ICLR 2020, Section 4.2.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = True

    counts: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        zero = torch.tensor(0.0, dtype=torch.double)
        hold(self, NormSums(zero, zero.long(), zero + torch.inf, zero - torch.inf))

    def update(self, prototypes: Tensor) -> None:
        """Measure the prototypes, shape ``(C, D)``, in place of those before."""
        sums = norm_sums(as_prototypes("PrototypeNorms", prototypes))
        for name, value in sums._asdict().items():
            setattr(self, name, value)

    def compute(self) -> PrototypeNormsResult:
        """The measure of the prototypes of the last update, of all ranks."""
        if not bool(self.counts):
            raise ValueError("PrototypeNorms expects an update before compute, got none")
        return finish_norms(held(self, NormSums))
