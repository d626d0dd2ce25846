"""Streaming detection of unknown examples, and identification in a gallery."""

from typing import Any

import torch
from torch import Tensor

from tammes.metrics.functional.angles import check_bins
from tammes.metrics.functional.identities import Identities
from tammes.metrics.functional.openset import (
    IdentificationResult,
    OpenSetResult,
    OpenSetSums,
    finish_identification,
    finish_open_set_sums,
    open_set_sums,
)
from tammes.metrics.functional.quantiles import check_limits
from tammes.metrics.retrieval import GalleryMetric
from tammes.metrics.streaming import SumMetric


class OpenSet(SumMetric):
    """AUROC, FPR95, AUPR and OSCR of a score that is higher for known examples.

    The state is a set of histograms: scores in one bin count as equal. Formulas and
    references: :func:`tammes.metrics.functional.openset`, which is exact.

    Args:
        limits: range of the scores; those beyond count in one bin at each end.
        bins: number of bins between the limits.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import OpenSet
        >>> metric = OpenSet()
        >>> metric.update(torch.tensor([0.9, 0.8, 0.4]), torch.tensor([1, 1, 1]))
        >>> metric.update(torch.tensor([0.5, 0.1]), torch.tensor([0, 0]))
        >>> round(float(metric.compute().auroc), 4)
        0.8333
    """

    higher_is_better = True

    def __init__(
        self, *, limits: tuple[float, float] = (-1.0, 1.0), bins: int = 65_536, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_bins("OpenSet", bins)
        check_limits("OpenSet", limits)
        self.limits = limits
        self.bins = bins
        nothing = torch.zeros(bins + 2, dtype=torch.long)
        self._register(OpenSetSums(nothing, nothing, nothing, torch.tensor(0)))

    def update(self, scores: Tensor, known: Tensor, correct: Tensor | None = None) -> None:
        """Add examples: scores, whether they are known, and whether correct, shape ``(N,)`` each.

        Args:
            scores: shape ``(N,)``.
            known: whether an example is of a known class.
            correct: whether it is classified correctly, for OSCR; in all updates or in none.
        """
        sums = open_set_sums("OpenSet", scores, known, correct, self.limits, self.bins)
        self._accumulate(sums)

    def compute(self) -> OpenSetResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        return finish_open_set_sums("OpenSet", self._collected(OpenSetSums), self.limits)


class Identification(GalleryMetric):
    """Search each probe in a gallery (1:N): TPIR at a FPIR.

    All features are kept, and gathered from all ranks. Formula and
    reference: :func:`tammes.metrics.functional.identification`.

    Args:
        similarity: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"k_reciprocal"``.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import Identification
        >>> metric = Identification()
        >>> metric.update(torch.eye(2), ["ann", "bob"], query=False)
        >>> metric.update(torch.tensor([[1.0, 0.0], [0.8, -0.6]]), ["ann", "eve"], query=True)
        >>> float(metric.compute().tpir(1.0))
        1.0
    """

    def update(
        self,
        features: Tensor,
        identities: Identities,
        *,
        query: Tensor | bool,
        galleries: Identities | None = None,
    ) -> None:
        """Add probes or gallery items.

        Args:
            features: shape ``(N, D)``.
            identities: integers or strings, shape ``(N,)``.
            query: whether they are probes; one for all, or shape ``(N,)``.
            galleries: gallery of each item, if there are several; not read for probes.
        """
        self._add("Identification", features, identities, query, galleries)

    def compute(self) -> IdentificationResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        search = self._search("Identification")
        member, search = (
            search.gallery_cameras,
            search._replace(query_cameras=None, gallery_cameras=None),
        )
        return finish_identification("Identification", search, member, self.similarity)
