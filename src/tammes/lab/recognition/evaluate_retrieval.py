"""Retrieval: rank the gallery for each query."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tammes.lab.recognition.embeddings import IdentityEmbeddings
from tammes.lab.recognition.results import (
    FAILING,
    Listing,
    RankedItem,
    Ranking,
    Recognition,
    as_curve,
    as_number,
    counted,
    measured,
    without_warnings,
)
from tammes.metrics.functional import RetrievalResult
from tammes.metrics.functional.retrieval import (
    AveragePrecision,
    Search,
    as_search,
    check_ap,
    check_similarity,
    finish_retrieval,
    similarity_blocks,
)

SHOWN = 5
"""Number of best and of worst queries shown."""
ITEMS = 8
"""Number of items of a ranking shown."""
_RANKS = 50
"""Largest rank of the CMC curve."""


@without_warnings
def evaluate_retrieval(
    examples: IdentityEmbeddings,
    *,
    ranks: Sequence[int] = (1, 5, 10),
    similarity: str = "cosine",
    ap: AveragePrecision = "step",
    resamples: int = 200,
    seed: int = 0,
) -> Recognition:
    """Rank the gallery for each query, with the rules of Market-1501.

    Without separate queries, each example is searched among all others. ``ranks`` are the k of
    recall@k; ``similarity`` and ``ap`` are as in :func:`tammes.metrics.functional.retrieval`, and
    ``resamples`` is the number of bootstrap resamples of identities.

    Raises:
        ValueError: there is no query or no gallery, or no query has a match.
    """
    check_similarity("retrieval", similarity)
    check_ap("retrieval", ap)
    query, gallery = examples.sides()
    check_sides(examples, query, gallery)
    notes = examples.first_notes()
    search = _search(examples, query, gallery)
    result = finish_retrieval("retrieval", search, similarity, ap)
    _check_matches(examples, search, result)
    cmc = range(1, min(_RANKS, len(result.cmc)) + 1)

    def measure(result: RetrievalResult) -> dict[str, Any]:
        return {
            "map": result.mean_average_precision,
            **{f"rank_{k}": result.recall_at(k) for k in ranks},
            "minp": result.minp,
            "map_at_r": result.map_at_r,
            "r_precision": result.r_precision,
            "gap": result.gap,
            **{f"cmc.{k}": value for k, value in zip(cmc, result.cmc.tolist(), strict=False)},
        }

    found = measured(result, measure, notes, resamples=resamples, seed=seed)
    names = {
        "map": "mAP",
        **{f"rank_{k}": f"rank-{k}" for k in ranks},
        "minp": "mINP",
        "map_at_r": "MAP@R",
        "r_precision": "R-precision",
        "gap": "GAP",
    }
    missing, junk = result.queries_without_match, int(examples.junk.sum())
    if missing:
        notes.append(
            f"{missing:,} of {counted(len(query), 'query', 'queries')} have no match in the "
            "gallery: left out of the means, errors of GAP"
        )
    if junk:
        notes.append(f"{counted(junk, 'junk example')} ignored")
    values = result.per_query
    chosen = _extremes(result)
    failing = _failing_queries(examples, query, result)
    asked = torch.cat([*chosen.values(), *(wrong for _, _, _, _, wrong in failing)])
    items = first_items(search, asked, gallery, similarity, ITEMS)
    return Recognition(
        "retrieval",
        examples.title,
        (_summary(examples, len(query), len(gallery)),),
        {
            **example_counts(examples),
            "queries": len(query),
            "gallery": len(gallery) - result.junk,
            "junk": junk,
            "queries_without_match": missing,
        },
        tuple(notes),
        tuple(as_number(key, name, found[key]) for key, name in names.items()),
        Listing(
            ("identity", "queries", "mAP %", "rank-1 %", "most often taken for"),
            [
                (name, count, 100 * mean, 100 * first, _mistaken(examples, items, wrong))
                for name, count, mean, first, wrong in failing
            ],
        ),
        curves={"cmc": as_curve(torch.tensor(cmc).double(), [found[f"cmc.{k}"] for k in cmc])},
        scores={
            "nearest match": values.best_match[values.matches > 0],
            "nearest wrong item": values.best_wrong[values.best_wrong.isfinite()],
        },
        rankings={
            heading: [
                Ranking(int(query[place]), items[place], _remark(result, place))
                for place in places.tolist()
            ]
            for heading, places in chosen.items()
        },
    )


def check_sides(examples: IdentityEmbeddings, query: Tensor, gallery: Tensor) -> None:
    """Raise ``ValueError`` if there is no query or no gallery."""
    if not len(query) or not len(gallery):
        junk = int(examples.junk.sum())
        raise ValueError(
            f"{examples.title}: queries and a gallery are expected, got "
            f"{counted(len(query), 'query', 'queries')} and {counted(len(gallery), 'gallery item')}"
            + (f", as {counted(junk, 'example')} of {len(examples):,} are junk" if junk else "")
        )


def example_counts(examples: IdentityEmbeddings) -> dict[str, int]:
    """Count embeddings, dimensions and identities."""
    known = torch.arange(len(examples))[~examples.junk]
    return {
        "embeddings": len(examples),
        "dimensions": examples.features.shape[1],
        "identities": len(set(examples.of(known))),
    }


def _summary(examples: IdentityEmbeddings, queries: int, items: int) -> str:
    counts = example_counts(examples)
    text = (
        f"{counted(counts['embeddings'], 'embedding')} of "
        f"{counted(counts['identities'], 'identity', 'identities')} in "
        f"{counted(counts['dimensions'], 'dimension')}; "
    )
    if examples.query is None:
        text += f"each of {queries:,} is searched among all others"
    else:
        text += f"{counted(queries, 'query', 'queries')}, {counted(items, 'gallery item')}"
    if examples.cameras is not None:
        cameras = len(set(examples.cameras))
        text += (
            f"; {counted(cameras, 'camera')}, items of the query's identity and camera are ignored"
        )
    return text


def _search(examples: IdentityEmbeddings, query: Tensor, gallery: Tensor) -> Search:
    asked = examples.features[query], examples.of(query), examples.cameras_of(query)
    if examples.query is None:
        return as_search("retrieval", asked[0], None, asked[1], None, asked[2])
    return as_search(
        "retrieval",
        asked[0],
        examples.features[gallery],
        asked[1],
        examples.of(gallery),
        asked[2],
        examples.cameras_of(gallery),
        examples.junk[gallery],
    )


def _check_matches(examples: IdentityEmbeddings, search: Search, result: RetrievalResult) -> None:
    """Raise ``ValueError`` if no query has a match, and say why."""
    if result.queries_without_match < result.queries:
        return
    matches = torch.isin(search.query_ids, search.gallery_ids[~search.junk])
    if examples.cameras is not None and bool(matches.any()):
        cameras = list(dict.fromkeys(examples.cameras))
        which = f"all are of camera {cameras[0]!r}" if len(cameras) == 1 else "there is none"
        raise ValueError(
            f"{examples.title}: a match of another camera is expected for some query, {which}; "
            "--ignore-cameras counts matches of the same camera"
        )
    found = (
        "every identity has one example"
        if examples.query is None
        else f"none of the {len(search.query_ids.unique()):,} identities of the queries is among "
        f"the {len(search.gallery_ids.unique()):,} of the gallery"
    )
    raise ValueError(
        f"{examples.title}: an identity with a query and a match is expected, but {found}; are "
        "the identities the right column (--identities KEY)?"
    )


def _extremes(result: RetrievalResult) -> dict[str, Tensor]:
    """Return the places of the worst and of the best queries, by average precision."""
    values = result.per_query
    places = (values.matches > 0).nonzero().squeeze(1)
    # Break ties by how much closer the best match is than the nearest wrong item.
    gap = (values.best_match - values.best_wrong)[places]
    places = places[gap.argsort(stable=True)]
    order = places[values.average_precision[places].argsort(stable=True)]
    identities = result.identities[0]
    return {
        "Worst queries": one_of_each(order, identities, SHOWN),
        "Best queries": one_of_each(order.flip(0), identities, SHOWN),
    }


def first_items(
    search: Search, rows: Tensor, gallery: Tensor, similarity: str, count: int
) -> dict[int, tuple[RankedItem, ...]]:
    """Return the first ``count`` gallery items of some queries, by index of the query.

    Items that a ranking ignores are left out; a wrong item is ahead of a match of equal similarity.
    ``gallery`` has the row of each gallery item among the examples.
    """
    keep = (~search.junk).nonzero().squeeze(1)
    scores, tie = similarity_blocks("ranking", search, similarity, keep)
    found: dict[int, tuple[RankedItem, ...]] = {}
    for row in rows.unique().tolist():
        values = scores(torch.tensor([row]))[0]
        own = search.gallery_ids[keep] == search.query_ids[row]
        match = own
        if search.query_cameras is not None and search.gallery_cameras is not None:
            match = own & (search.gallery_cameras[keep] != search.query_cameras[row])
        values = values.masked_fill(own & ~match, -torch.inf)
        ahead = values - tie * match
        order = ahead.argsort(descending=True, stable=True)[:count]
        order = order[values[order] > -torch.inf]
        found[row] = tuple(
            RankedItem(int(gallery[keep[place]]), float(values[place]), bool(match[place]))
            for place in order
        )
    return found


def one_of_each(order: Tensor, identities: Tensor, count: int) -> Tensor:
    """Return the first ``count`` places of an order, at most one per identity."""
    chosen: dict[int, int] = {}
    for place in order.tolist():
        chosen.setdefault(int(identities[place]), place)
        if len(chosen) == count:
            break
    return torch.tensor(list(chosen.values()), dtype=torch.long)


def _remark(result: RetrievalResult, place: int) -> str:
    values = result.per_query
    precision = 100 * float(values.average_precision[place])
    matches = counted(int(values.matches[place]), "match", "matches")
    rank = int(values.first_rank[place])
    return f"average precision {precision:.1f} %; {matches}, the first at rank {rank:,}"


def _failing_queries(
    examples: IdentityEmbeddings, query: Tensor, result: RetrievalResult
) -> list[tuple[str, int, float, float, Tensor]]:
    """Return the identities with the lowest mAP, and their queries whose first item is wrong."""
    values = result.per_query
    places = (values.matches > 0).nonzero().squeeze(1)
    member = result.identities[0][places].unique(return_inverse=True)[1]
    counts = torch.bincount(member)
    first = (values.first_rank[places] == 1).double()
    means = torch.bincount(member, values.average_precision[places]) / counts
    rates = torch.bincount(member, first) / counts
    found = []
    for code in means.argsort(stable=True)[: min(FAILING, int((means < 1).sum()))].tolist():
        own = places[member == code]
        (name,) = examples.of(query[own[:1]])
        wrong = own[values.first_rank[own] > 1]
        found.append((str(name), int(counts[code]), float(means[code]), float(rates[code]), wrong))
    return found


def _mistaken(examples: IdentityEmbeddings, items: dict[int, Any], wrong: Tensor) -> str:
    """Return the most frequent identity of the wrong first items, with its count."""
    firsts = torch.tensor([items[place][0].row for place in wrong.tolist()], dtype=torch.long)
    common = Counter(examples.of(firsts)).most_common(1)
    return f"{common[0][0]} ({common[0][1]:,})" if common else ""
