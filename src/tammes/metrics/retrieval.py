"""Retrieval from features that are accumulated over batches and ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tammes.metrics.functional.identities import Identities, encode_identities
from tammes.metrics.functional.inputs import check_features
from tammes.metrics.functional.operating_points import check_flags
from tammes.metrics.functional.retrieval import (
    AveragePrecision,
    RetrievalResult,
    Search,
    check_ap,
    check_cameras,
    check_similarity,
    finish_retrieval,
)
from tammes.metrics.streaming import Metric, gather_all_tensors

_QUERY, _GALLERY, _JUNK = 1, 2, 4
_COLUMNS = 6
"""Columns of ``names``: role, identity, whether it is a string, group, whether there is one, D."""


class GalleryMetric(Metric):
    """Base of metrics that keep the features of queries and of a gallery."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    features: list[Tensor]
    names: list[Tensor]

    def __init__(self, *, similarity: str = "cosine", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_similarity(type(self).__name__, similarity)
        self.similarity = similarity
        # Flat, so that a rank without examples can take part without knowing the dimension.
        self.add_state("features", [], dist_reduce_fx="cat")
        self.add_state("names", [], dist_reduce_fx="cat")

    def _add(
        self,
        name: str,
        features: Tensor,
        identities: Identities,
        query: Tensor | bool | None,
        groups: Identities | None,
        junk: Tensor | None = None,
    ) -> None:
        count = len(features)
        if not count:
            return
        check_features(name, "query or gallery", features)
        codes = encode_identities(name, "identities", identities, count, features.device)
        role = torch.full_like(codes.values, _QUERY + _GALLERY)
        if query is not None:
            if isinstance(query, bool):
                query = torch.full_like(role, query, dtype=torch.bool)
            asked = check_flags(name, query, features, "query")
            role = torch.where(asked, _QUERY, _GALLERY)
        if junk is not None:
            role = role + _JUNK * check_flags(name, junk, features, "junk")
        group = torch.zeros_like(role)
        if groups is not None:
            group = encode_identities(name, "groups", groups, count, features.device).values
        constants = (codes.strings, groups is not None, features.shape[1])
        strings, grouped, size = (torch.full_like(role, value) for value in constants)
        table = torch.stack([role, codes.values, strings, group, grouped, size], 1)
        self.features.append(features.detach().double().flatten())
        self.names.append(table.flatten())

    def _search(self, name: str) -> Search:
        """Queries and gallery of all updates."""
        if not len(self.names):
            raise ValueError(f"{name} expects an update before compute, got none")
        table = _joined(self.names).view(-1, _COLUMNS)
        role, identity, strings, group, grouped, size = table.unbind(1)
        if len(size.unique()) > 1:
            raise ValueError(
                f"{name} expects features of one dimension, got {size.unique().tolist()}"
            )
        features = _joined(self.features).view(len(role), -1)
        query, gallery = (role & _QUERY) > 0, (role & _GALLERY) > 0
        if bool((query & gallery).any()) and not bool(grouped.any()):
            # A group of its own for each item, so that a query ignores itself.
            group, grouped = torch.arange(len(role), device=role.device), torch.ones_like(grouped)
        if len(strings.unique()) > 1:
            raise TypeError(f"{name} expects identities of one kind, got strings and integers")

        def groups(side: Tensor) -> Tensor | None:
            if len(grouped[side].unique()) > 1:
                raise ValueError(f"{name} expects groups in all updates or in none, got both")
            return group[side] if bool(grouped[side].any()) else None

        for what, side in (("query", query), ("gallery", gallery)):
            check_features(name, what, features[side])
        return Search(
            features[query],
            features[gallery],
            identity[query],
            identity[gallery],
            groups(query),
            groups(gallery),
            (role[gallery] & _JUNK) > 0,
        )

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None
    ) -> None:
        # torchmetrics would send an empty state of another dtype.
        self.features = self.features or [torch.zeros(0, dtype=torch.double, device=self.device)]
        self.names = self.names or [torch.zeros(0, dtype=torch.long, device=self.device)]
        super()._sync_dist(dist_sync_fn, process_group)


def _joined(state: list[Tensor] | Tensor) -> Tensor:
    """Return a state as one tensor; a synchronised one is."""
    return state if isinstance(state, Tensor) else torch.cat(state)


class Retrieval(GalleryMetric):
    """Rank a gallery for each query: mAP, CMC, mINP, recall@k, R-precision, MAP@R, GAP.

    All features are kept, in float64, and gathered from all ranks. Rules, formulas and references:
    :func:`tammes.metrics.functional.retrieval`.

    Args:
        similarity: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"k_reciprocal"``.
        ap: ``"step"`` or ``"trapezoid"``.
        kwargs: see :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from tammes.metrics import Retrieval
        >>> metric = Retrieval()
        >>> metric.update(torch.tensor([[1.0, 0.1], [1.0, 0.2]]), ["ann", "eve"], query=False)
        >>> metric.update(torch.tensor([[1.0, 0.5], [0.1, 1.0]]), ["ann", "bob"], query=False)
        >>> metric.update(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), ["ann", "bob"], query=True)
        >>> round(float(metric.compute().mean_average_precision), 4)
        0.9167
    """

    def __init__(
        self, *, similarity: str = "cosine", ap: AveragePrecision = "step", **kwargs: Any
    ) -> None:
        super().__init__(similarity=similarity, **kwargs)
        check_ap("Retrieval", ap)
        self.ap = ap

    def update(
        self,
        features: Tensor,
        identities: Identities,
        *,
        query: Tensor | bool | None = None,
        cameras: Identities | None = None,
        junk: Tensor | None = None,
    ) -> None:
        """Add queries or gallery items.

        Args:
            features: shape ``(N, D)``.
            identities: integers or strings, shape ``(N,)``.
            query: whether they are queries, else of the gallery; one for all, or shape ``(N,)``.
                None: both, and each query is searched among all others.
            cameras: integers or strings, shape ``(N,)``; in all updates or in none.
            junk: mask of gallery items to ignore, shape ``(N,)``.
        """
        self._add("Retrieval", features, identities, query, cameras, junk)

    def compute(self) -> RetrievalResult:
        """Compute the metric over all examples since the last reset, of all ranks."""
        search = self._search("Retrieval")
        check_cameras("Retrieval", search.query_cameras, search.gallery_cameras)
        return finish_retrieval("Retrieval", search, self.similarity, self.ap)
