"""Streaming neural collapse: class sums and one scatter matrix."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tammes.metrics.functional.collapse import (
    CollapseSums,
    NeuralCollapseResult,
    absorb_,
    disagreement,
    finish_collapse,
    merge,
    no_collapse_sums,
)
from tammes.metrics.functional.inputs import as_prototypes
from tammes.metrics.streaming import Metric, gather_all_tensors, writable


class NeuralCollapse(Metric):
    """Four measures of neural collapse, exact for any division into batches.

    NC1 to NC3 need one pass: the state is the sum of each class and the scatter of all features
    about their class means, in float64. NC4 needs the class means in advance: those of the
    training set when the test set is measured, as in the paper, or :meth:`class_means` of a first
    pass. Formulas and reference:
    :func:`tammes.metrics.functional.neural_collapse`.

    Args:
        num_classes: number of classes C.
        embedding_size: size D of a feature.
        means: class means for NC4, shape ``(C, D)``.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch, tammes
        >>> from tammes.metrics import NeuralCollapse
        >>> simplex, labels = tammes.geometry.simplex(4, 3), torch.arange(4).repeat(2)
        >>> metric = NeuralCollapse(4, 3)
        >>> metric.update(simplex[labels], labels, prototypes=2 * simplex)
        >>> bool(metric.compute().nc3 < 1e-6)
        True
    """

    is_differentiable = False
    higher_is_better = False
    # The sums of two parts cannot simply be added: the class means of the parts differ.
    full_state_update = True

    sums: Tensor
    counts: Tensor
    within: Tensor
    differ: Tensor
    judged: Tensor

    def __init__(
        self, num_classes: int, embedding_size: int, *, means: Tensor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        shape = (num_classes, embedding_size)
        if means is not None and tuple(means.shape) != shape:
            raise ValueError(
                f"NeuralCollapse expects means of shape {shape}, got {tuple(means.shape)}"
            )
        self.num_classes = num_classes
        self.means = None if means is None else means.detach()
        # Every rank has the same prototypes, so they are not a state to be summed.
        self._prototypes: Tensor | None = None
        self._theirs: Tensor | None = None
        for name, value in no_collapse_sums(num_classes, embedding_size)._asdict().items():
            self.add_state(name, value, dist_reduce_fx=None)
        self.add_state("differ", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("judged", torch.tensor(0), dist_reduce_fx="sum")

    def update(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        predictions: Tensor | None = None,
        prototypes: Tensor | None = None,
    ) -> None:
        """Add examples.

        Args:
            features: shape ``(N, D)``.
            labels: class of each example, or -100, shape ``(N,)``.
            predictions: class predicted by the classifier, shape ``(N,)``; for NC4.
            prototypes: rows of the classifier, shape ``(C, D)``; for NC2 and NC3. Those of the
                last update are used, without a copy.
        """
        if predictions is not None:
            if self.means is None:
                raise ValueError(
                    "NeuralCollapse expects class means for NC4, got none: give it means=, such as "
                    "class_means() of a first pass"
                )
            means = self.means.to(features.device)
            differ, judged = disagreement("NeuralCollapse", features, labels, predictions, means)
            self.differ = self.differ + differ
            self.judged = self.judged + judged
        sums = CollapseSums(*map(writable, (self.sums, self.counts, self.within)))
        self.sums, self.counts, self.within = absorb_("NeuralCollapse", sums, features, labels)
        if prototypes is not None:
            self._prototypes = as_prototypes("NeuralCollapse", prototypes)

    def compute(self) -> NeuralCollapseResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        nc4 = self.differ.double() / self.judged if bool(self.judged) else None
        prototypes = self._theirs if self._prototypes is None else self._prototypes
        return finish_collapse("NeuralCollapse", self._merged(), prototypes, nc4)

    def class_means(self) -> Tensor:
        """Mean of each class over all ranks, NaN where it has no example, shape ``(C, D)``."""
        with self.sync_context(should_unsync=True):
            return self._merged().means()

    def forward(self, *args: Any, **kwargs: Any) -> NeuralCollapseResult:
        """Add examples as :meth:`update` does, and return the metric of this batch alone."""
        known = self._prototypes
        value: NeuralCollapseResult = super().forward(*args, **kwargs)
        # The metric of the batch begins with a reset, which must not forget the prototypes.
        self._prototypes = known if self._prototypes is None else self._prototypes
        return value

    def reset(self) -> None:
        """Discard all examples and the prototypes."""
        super().reset()
        self._prototypes = self._theirs = None

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None
    ) -> None:
        super()._sync_dist(dist_sync_fn, process_group)
        # A rank without examples has no prototypes: it gets those of another rank.
        group = process_group or self.process_group
        own, self._theirs = self._prototypes, None
        rows = self.sums.new_empty(0, self.sums.shape[-1]) if own is None else own
        rows = rows.to(self.sums)
        counts = dist_sync_fn(torch.tensor(len(rows), device=rows.device), group=group)
        if len({int(count) for count in counts}) > 1:
            self._theirs = next(some for some in dist_sync_fn(rows, group=group) if len(some))

    def _merged(self) -> CollapseSums:
        """Return the sums of this rank, or of all ranks if their states are stacked."""
        state = CollapseSums(self.sums, self.counts, self.within)
        if self.counts.ndim == 1:
            return state
        return reduce(merge, (CollapseSums(*part) for part in zip(*state, strict=True)))
