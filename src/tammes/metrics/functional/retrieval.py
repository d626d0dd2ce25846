"""Rank a gallery for each query: mAP, CMC, mINP, recall@k, R-precision, MAP@R, GAP."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tammes.metrics.functional.identities import Codes, Identities, check_kinds, encode_identities
from tammes.metrics.functional.inputs import check_features, check_one_space, warn_undefined
from tammes.metrics.functional.operating_points import check_flags, precision_sum, rank_scores
from tammes.metrics.functional.reranking import k_reciprocal_blocks
from tammes.similarity import directions, norm

AveragePrecision = Literal["step", "trapezoid"]
TIE = 2.0**-40
"""Similarities that differ by less than this fraction of their largest possible value are equal."""
BUDGET = 128 * 2**20
"""Bytes for a block: similarities, their positions among the matches, and masks; 16 times as many
on a GPU."""


class QueryValues(NamedTuple):
    """Values of each query; those of a query without a match are NaN, its ranks are 0.

    Attributes:
        matches: number R of matches in the gallery, shape ``(Q,)``.
        first_rank: rank of the first match, from 1, shape ``(Q,)``.
        last_rank: rank of the last match, shape ``(Q,)``.
        average_precision: mean over the matches of the precision at their ranks, shape ``(Q,)``.
        r_precision: fraction of matches among the first R, shape ``(Q,)``.
        average_precision_at_r: sum of the precisions at the matches among the first R, divided by
            R, shape ``(Q,)``.
        best_match: largest similarity of a match, -inf if there is none, shape ``(Q,)``.
        best_wrong: largest similarity of another identity, -inf if there is none, shape ``(Q,)``.
    """

    matches: Tensor
    first_rank: Tensor
    last_rank: Tensor
    average_precision: Tensor
    r_precision: Tensor
    average_precision_at_r: Tensor
    best_match: Tensor
    best_wrong: Tensor


class RetrievalResult(NamedTuple):
    """Result of :func:`retrieval`; means are over the queries that have a match.

    Attributes:
        mean_average_precision: mean of the average precisions, mAP.
        minp: mean inverse negative penalty: number of matches over the rank of the last, mINP.
        map_at_r: mean of the average precision among the first R, R the number of matches.
        r_precision: mean of the fraction of matches among the first R.
        precision_at_1: fraction of queries whose first item is a match; rank-1 accuracy.
        gap: global average precision of the first items of all queries, ordered by similarity;
            queries without a match count as errors.
        cmc: fraction of queries with a match among the first k, for k from 1 to the size of the
            gallery, shape ``(G,)``.
        queries: number of queries.
        queries_without_match: number of queries without a match, which the means leave out.
        junk: number of gallery items that were ignored as junk.
        per_query: values of each query.
        identities: code of the identity of each query, for intervals.
    """

    mean_average_precision: Tensor
    minp: Tensor
    map_at_r: Tensor
    r_precision: Tensor
    precision_at_1: Tensor
    gap: Tensor
    cmc: Tensor
    queries: int
    queries_without_match: int
    junk: int
    per_query: QueryValues
    identities: tuple[Tensor]

    def recall_at(self, k: int) -> Tensor:
        """Fraction of queries with a match among the first k items."""
        if k < 1:
            raise ValueError(f"recall_at expects k of 1 or more, got {k}")
        return self.cmc[min(k, len(self.cmc)) - 1]

    def weighted(self, weights: Tensor) -> "RetrievalResult":
        """Weight the queries, shape ``(Q,)``."""
        return _summary(self.per_query, weights, len(self.cmc), self.junk, self.identities)


@torch.no_grad()
def retrieval(
    query: Tensor,
    gallery: Tensor | None,
    query_ids: Identities,
    gallery_ids: Identities | None,
    query_cameras: Identities | None = None,
    gallery_cameras: Identities | None = None,
    gallery_junk: Tensor | None = None,
    similarity: str | Tensor = "cosine",
    *,
    ap: AveragePrecision = "step",
) -> RetrievalResult:
    r"""Rank a gallery for each query, with the rules of Market-1501.

    A match is a gallery item of the query's identity. Items of the query's identity and camera and
    junk items are ignored, as if they were not in the gallery; all others are wrong. With
    :math:`r_1 < \dots < r_R` the ranks of the matches of a query:

    .. math::
        \mathrm{AP} = \frac{1}{R}\sum_{j=1}^R \frac{j}{r_j},\quad
        \mathrm{CMC}_k = [r_1 \le k],\quad
        \mathrm{INP} = \frac{R}{r_R},\quad
        \mathrm{RP} = \frac{\#\{j: r_j \le R\}}{R},\quad
        \mathrm{AP@R} = \frac{1}{R}\sum_{j: r_j\le R}\frac{j}{r_j}

    and their means over the queries with a match. ``ap="trapezoid"`` replaces :math:`j/r_j` by its
    mean with :math:`(j-1)/(r_j-1)` (1 if :math:`r_j=1`), as the published Matlab code of Market
    does. GAP orders the first items of all queries by similarity: it is the sum, over those that
    are matches, of the precision among the items of at least this similarity, over the number of
    queries with a match.

    Ties: a wrong item is ranked ahead of a match of equal similarity, so that the order of the
    gallery has no effect and constant features gain nothing. Equal means within ``2**-40`` (1e-12)
    of the largest product of norms; similarities are computed in float64.

    Queries are processed in blocks of at most 128 MiB (2 GiB on a GPU), or one at a time, next to a
    float64 copy of the gallery; the matrix of all similarities is never stored.

    Args:
        query: features of the queries, shape ``(Q, D)``.
        gallery: features of the gallery, shape ``(G, D)``; None: each query is searched among all
            other queries.
        query_ids: identity of each query, integers or strings, shape ``(Q,)``.
        gallery_ids: identity of each gallery item, shape ``(G,)``.
        query_cameras: camera of each query; with ``gallery_cameras`` only.
        gallery_cameras: camera of each gallery item.
        gallery_junk: mask of gallery items to ignore, shape ``(G,)``.
        similarity: ``"cosine"``, ``"dot"``, ``"euclidean"`` (minus the squared distance),
            ``"k_reciprocal"`` (see :func:`k_reciprocal`), or similarities of shape ``(Q, G)``.
        ap: ``"step"`` or ``"trapezoid"``.

    Returns:
        The :class:`RetrievalResult`. If no query has a match, the means are NaN, with a warning.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import retrieval
        >>> query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> gallery = torch.tensor([[1.0, 0.1], [1.0, 0.2], [1.0, 0.5], [0.1, 1.0]])
        >>> result = retrieval(query, gallery, ["ann", "bob"], ["ann", "eve", "ann", "bob"])
        >>> round(float(result.mean_average_precision), 4), float(result.recall_at(1))
        (0.9167, 1.0)

    References:
        Zheng et al., Scalable Person Re-identification: A Benchmark, ICCV 2015 (mAP, CMC, junk); Ye
        et al., Deep Learning for Person Re-identification, PAMI 2021 (mINP); Musgrave et
        al., A Metric Learning Reality Check, ECCV 2020 (MAP@R); Weyand et al., Google
        Landmarks Dataset v2, CVPR 2020 (GAP).
    """
    check_similarity("retrieval", similarity)
    check_ap("retrieval", ap)
    search = as_search(
        "retrieval",
        query,
        gallery,
        query_ids,
        gallery_ids,
        query_cameras,
        gallery_cameras,
        gallery_junk,
    )
    return finish_retrieval("retrieval", search, similarity, ap)


class Search(NamedTuple):
    """Checked input of a retrieval: features, and codes of identities and cameras.

    Attributes:
        query: shape ``(Q, D)``.
        gallery: shape ``(G, D)``.
        query_ids: shape ``(Q,)``.
        gallery_ids: shape ``(G,)``.
        query_cameras: shape ``(Q,)``, or None.
        gallery_cameras: shape ``(G,)``, or None.
        junk: shape ``(G,)``.
    """

    query: Tensor
    gallery: Tensor
    query_ids: Tensor
    gallery_ids: Tensor
    query_cameras: Tensor | None
    gallery_cameras: Tensor | None
    junk: Tensor

    def within(self, items: Tensor) -> "Search":
        """Keep some items of the gallery, in a search without cameras."""
        return self._replace(
            gallery=self.gallery[items], gallery_ids=self.gallery_ids[items], junk=self.junk[items]
        )


def as_search(
    name: str,
    query: Tensor,
    gallery: Tensor | None,
    query_ids: Identities,
    gallery_ids: Identities | None,
    query_cameras: Identities | None = None,
    gallery_cameras: Identities | None = None,
    gallery_junk: Tensor | None = None,
) -> Search:
    """Check queries and gallery; without a gallery each query is searched among the others."""
    check_features(name, "query", query)
    if gallery is None:
        if gallery_ids is not None or gallery_cameras is not None:
            raise ValueError(f"{name} expects gallery ids and cameras with a gallery only")
        gallery, gallery_ids = query, query_ids
        # Each query as its own camera, so that the item with the same camera, itself, is ignored.
        query_cameras = torch.arange(len(query)) if query_cameras is None else query_cameras
        gallery_cameras = query_cameras
    check_features(name, "gallery", gallery)
    check_one_space(name, query, gallery, "gallery")
    if gallery_ids is None:
        raise ValueError(f"{name} expects gallery_ids with a gallery, got none")
    check_cameras(name, query_cameras, gallery_cameras)

    def encode(what: str, names: Identities, rows: Tensor) -> Codes:
        return encode_identities(name, what, names, len(rows), rows.device)

    identities = encode("query_ids", query_ids, query), encode("gallery_ids", gallery_ids, gallery)
    check_kinds(name, *identities)
    cameras: tuple[Tensor | None, Tensor | None] = (None, None)
    if query_cameras is not None and gallery_cameras is not None:
        codes = (
            encode("query_cameras", query_cameras, query),
            encode("gallery_cameras", gallery_cameras, gallery),
        )
        check_kinds(name, *codes)
        cameras = codes[0].values, codes[1].values
    if gallery_junk is None:
        junk = torch.zeros(len(gallery), dtype=torch.bool, device=gallery.device)
    else:
        junk = check_flags(name, gallery_junk, gallery, "gallery_junk")
    return Search(query, gallery, identities[0].values, identities[1].values, *cameras, junk)


def check_cameras(name: str, query: object | None, gallery: object | None) -> None:
    """Raise ``ValueError`` if only one side has cameras."""
    if (query is None) != (gallery is None):
        raise ValueError(f"{name} expects cameras of queries and of the gallery, or of neither")


def check_similarity(name: str, similarity: str | Tensor) -> None:
    """Raise ``ValueError`` for an unknown similarity."""
    names = ("cosine", "dot", "euclidean", "k_reciprocal")
    if not isinstance(similarity, Tensor) and similarity not in names:
        raise ValueError(
            f"{name} expects similarity 'cosine', 'dot', 'euclidean' or 'k_reciprocal', "
            f"got {similarity!r}"
        )


def check_ap(name: str, ap: str) -> None:
    """Raise ``ValueError`` for an unknown form of the average precision."""
    if ap not in ("step", "trapezoid"):
        raise ValueError(f"{name} expects ap 'step' or 'trapezoid', got {ap!r}")


def finish_retrieval(
    name: str, search: Search, similarity: str | Tensor, ap: AveragePrecision
) -> RetrievalResult:
    """Rank the gallery for each query, and summarise the ranks."""
    values = rank_gallery(name, search, similarity, ap)
    missing = int((values.matches == 0).sum())
    if missing == len(values.matches):
        why = "no gallery item has the identity of a query"
        if search.query_cameras is not None:
            why += " and another camera"
        warn_undefined(name, f"{why}; all means are NaN")
    junk = int(search.junk.sum())
    every = torch.ones_like(values.average_precision)
    return _summary(values, every, len(search.gallery) - junk, junk, (search.query_ids,))


def rank_gallery(
    name: str, search: Search, similarity: str | Tensor, ap: AveragePrecision = "step"
) -> QueryValues:
    """Rank the gallery for each query, a block of queries at a time."""
    keep = (~search.junk).nonzero().squeeze(1)
    if not len(keep):
        raise ValueError(
            f"{name} expects a gallery item that is not junk, got {len(search.junk):,} junk items"
        )
    # Sorted by identity, so that the items of a query's identity are a range.
    gallery_ids, order = search.gallery_ids[keep].sort(stable=True)
    columns = keep[order]
    cameras = None if search.gallery_cameras is None else search.gallery_cameras[columns]
    start = torch.searchsorted(gallery_ids, search.query_ids)
    count = torch.searchsorted(gallery_ids, search.query_ids, right=True) - start
    width = max(int(count.max()), 1)
    scores, tie = similarity_blocks(name, search, similarity, columns)
    budget = BUDGET if start.device.type == "cpu" else 16 * BUDGET
    size = max(budget // (25 * len(columns) + 64 * width), 1)
    blocks = []
    for rows in torch.arange(len(search.query), device=start.device).split(size):
        own = torch.arange(width, device=start.device) < count[rows, None]
        places = (start[rows, None] + torch.arange(width, device=start.device)).where(own, 0)
        match = own
        if cameras is not None and search.query_cameras is not None:
            match = own & (cameras[places] != search.query_cameras[rows, None])
        blocks.append(_rank_block(scores(rows), tie, places, own, match, ap))
    return QueryValues(*(torch.cat(part) for part in zip(*blocks, strict=True)))


def _rank_block(
    similarity: Tensor,
    tie: float,
    places: Tensor,
    own: Tensor,
    match: Tensor,
    ap: AveragePrecision,
) -> QueryValues:
    """Values of a block of queries from its similarities, which are overwritten.

    Args:
        similarity: shape ``(B, G)``.
        tie: largest difference of equal similarities.
        places: columns of the items of the query's identity, shape ``(B, W)``.
        own: which of the places are used, shape ``(B, W)``.
        match: those that are matches, shape ``(B, W)``.
        ap: form of the average precision.
    """
    # Matches by ascending similarity; then infinity for the unused places.
    levels = similarity.gather(1, places).where(match, math.inf).sort(1).values
    similarity[own.nonzero(as_tuple=True)[0], places[own]] = -math.inf
    wrong = similarity.amax(1)
    # The number of matches that a wrong item is ahead of, counted in each row.
    ahead = torch.searchsorted(levels - tie, similarity, right=True)
    rows, width = places.shape
    some = ahead > 0
    # Most are ahead of none; on a GPU, all of those would contend for one counter.
    ahead += torch.arange(rows, device=ahead.device)[:, None] * (width + 1)
    counts = torch.bincount(ahead.masked_select(some), minlength=rows * (width + 1)).view(rows, -1)
    wrong_ahead = counts.flip(1).cumsum(1).flip(1)[:, 1:]

    matches = match.sum(1)
    index = torch.arange(width, device=places.device)
    real = index < matches[:, None]
    nth = (matches[:, None] - index).clamp_min(0)
    ranks = (nth + wrong_ahead).where(real, 0)
    precision = nth / ranks.double().clamp_min(1)
    first_r = real & (ranks <= matches[:, None])
    gains = precision
    if ap == "trapezoid":
        before = ((nth - 1) / (ranks - 1).double()).where(ranks > 1, 1.0)
        gains = (precision + before) / 2
    top = (matches - 1).clamp_min(0)[:, None]

    def rounded(values: Tensor) -> Tensor:
        # So that similarities of different queries that are equal up to rounding compare equal.
        return (values / tie).round() * tie if tie else values

    return QueryValues(
        matches=matches,
        first_rank=ranks.gather(1, top).squeeze(1),
        last_rank=ranks[:, 0],
        average_precision=gains.where(real, 0.0).sum(1) / matches,
        r_precision=first_r.sum(1).double() / matches,
        average_precision_at_r=precision.where(first_r, 0.0).sum(1) / matches,
        best_match=rounded(levels.gather(1, top).squeeze(1)).where(matches > 0, -math.inf),
        best_wrong=rounded(wrong),
    )


def similarity_blocks(
    name: str, search: Search, similarity: str | Tensor, columns: Tensor
) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return a function from query rows to similarities with the columns, and the tie width."""
    query, gallery = search.query, search.gallery
    if isinstance(similarity, Tensor):
        shape = (len(query), len(gallery))
        if similarity.shape != shape:
            raise ValueError(
                f"{name} expects similarities of shape {shape}, got {tuple(similarity.shape)}"
            )
        if not bool(similarity.isfinite().all()):
            raise ValueError(f"{name} expects finite similarities, got NaN or infinity")
        table = similarity.detach()
        return lambda rows: table[rows[:, None], columns].double(), 0.0
    if similarity in ("cosine", "k_reciprocal"):
        _warn_zeros(name, query, gallery)
        query, gallery = directions(query.double()), directions(gallery.double())
        if similarity == "k_reciprocal":
            blocks = k_reciprocal_blocks(query, gallery)
            return lambda rows: blocks(rows)[:, columns], TIE
        gallery = gallery[columns]
        return lambda rows: query[rows] @ gallery.T, TIE
    query, gallery = query.double(), gallery[columns].double()
    lengths = float(norm(query).amax()), float(norm(gallery).amax())
    if similarity == "dot":
        return lambda rows: query[rows] @ gallery.T, _tie(lengths[0] * lengths[1])
    squares = gallery.square().sum(1)

    def euclidean(rows: Tensor) -> Tensor:
        block = query[rows]
        return torch.addmm(-squares, block, gallery.T, alpha=2).sub_(block.square().sum(1)[:, None])

    return euclidean, _tie(sum(lengths) ** 2)


def _tie(largest: float) -> float:
    """Tie width for similarities of at most this magnitude; a power of two."""
    return math.ldexp(TIE, math.frexp(largest)[1]) if largest else 0.0


def _warn_zeros(name: str, query: Tensor, gallery: Tensor) -> None:
    zeros = [int((norm(features.double()) == 0).sum()) for features in (query, gallery)]
    if any(zeros):
        warn_undefined(
            name,
            f"{zeros[0]:,} of {len(query):,} queries and {zeros[1]:,} of {len(gallery):,} gallery "
            "items are zero and have cosine 0 with everything",
        )


def _summary(
    values: QueryValues, weights: Tensor, size: int, junk: int, identities: tuple[Tensor]
) -> RetrievalResult:
    """Weighted means of the queries' values."""
    some = values.matches > 0
    counted = weights.where(some, 0.0)
    total = counted.sum()

    def mean(numbers: Tensor) -> Tensor:
        return (counted * numbers.where(some, 0.0)).sum() / total

    firsts = weights.new_zeros(size + 1).index_add(0, values.first_rank, counted)
    cmc = firsts[1:].cumsum(0) / total
    best = torch.maximum(values.best_match, values.best_wrong)
    points = rank_scores(best, values.first_rank == 1).points(weights)
    return RetrievalResult(
        mean_average_precision=mean(values.average_precision),
        minp=mean(values.matches.double() / values.last_rank),
        map_at_r=mean(values.average_precision_at_r),
        r_precision=mean(values.r_precision),
        precision_at_1=cmc[0],
        gap=precision_sum(points) / total,
        cmc=cmc,
        queries=len(values.matches),
        queries_without_match=int((~some).sum()),
        junk=junk,
        per_query=values,
        identities=identities,
    )
