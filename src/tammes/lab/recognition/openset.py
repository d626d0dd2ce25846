"""Open sets: search probes in a gallery that need not have their identity (1:N)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.lab.recognition.embeddings import IdentityEmbeddings
from tammes.lab.recognition.ranking import first_items, one_of_each
from tammes.lab.recognition.results import (
    Listing,
    OperatingPoint,
    Ranking,
    Recognition,
    as_curve,
    as_number,
    counted,
    grid,
    measurable,
    measured,
    places_at,
    positives_at,
    without_warnings,
)
from tammes.lab.recognition.retrieval import FAILING, ITEMS, SHOWN, check_sides, example_counts
from tammes.metrics.functional import (
    IdentificationResult,
    OpenSetResult,
    identification,
    openset,
)
from tammes.metrics.functional.operating_points import rank_scores
from tammes.metrics.functional.retrieval import (
    Search,
    as_search,
    check_similarity,
    rank_gallery,
)

RATES = (0.3, 0.1, 0.01, 1e-3, 1e-4)
"""False positive identification rates of the table of thresholds, as far as measurable."""


@without_warnings
def evaluate_openset(
    examples: IdentityEmbeddings,
    *,
    enrol: int = 1,
    fpirs: Sequence[float] | None = None,
    similarity: str = "cosine",
    resamples: int = 200,
    seed: int = 0,
) -> Recognition:
    """Search probes in a gallery, and accept the first item at or above a threshold.

    Without sides, the identities are divided at random into two disjoint galleries, as IJB-B and
    IJB-C do: ``enrol`` examples of each identity are in its gallery, all others are probes, and
    every probe is searched in both. Its identity is known to one and unknown to the other.

    Args:
        examples: probes (queries) and gallery, or examples without sides.
        enrol: examples of each identity in its gallery, if there are no sides.
        fpirs: false positive identification rates; by default those that can be measured.
        similarity: see :func:`tammes.metrics.functional.retrieval`.
        resamples: resamples of the intervals over identities.
        seed: seed of the resamples and of the galleries.

    Raises:
        ValueError: every probe is known, or none is; or there are too few for a rate.
    """
    check_similarity("openset", similarity)
    notes = examples.first_notes()
    if examples.cameras is not None:
        notes.append("cameras are not used: every item of the gallery is searched")
    probes, gallery, member = _galleries(examples, enrol, seed, notes)
    check_sides(examples, probes, gallery)
    asked = examples.features[probes], examples.features[gallery]
    names = examples.of(probes), examples.of(gallery)
    result = identification(*asked, *names, galleries=member, similarity=similarity)
    search = as_search("openset", *asked, *names)
    nonmated = min(int((each.rank == 0).sum()) for each in result.searches)
    _check_kinds(examples.title, result, nonmated)
    searches = _search_all(search, member, similarity)
    separated = openset(
        searches.top.flatten(),
        (searches.rank > 0).flatten(),
        (searches.rank == 1).flatten(),
        identities=names[0] * len(result.searches),
    )
    targets = measurable(RATES, nonmated) if fpirs is None else list(fpirs)
    for fpir in targets:
        result.tpir(fpir)
    if fpirs is None:
        notes.append(f"a FPIR below {1 / nonmated:.2g} cannot be measured with so few probes")
    rates, curve = torch.tensor(targets, dtype=torch.double), grid(nonmated)
    ranked = [
        rank_scores(score.where(rank <= 1, -torch.inf), rank > 0) for score, rank in result.searches
    ]

    fixed = [places_at(each.points(), rates) for each in ranked]

    def measure(result: IdentificationResult) -> dict[str, Any]:
        points = [each.points(result.weights) for each in ranked]
        reached = [
            each.negatives[place] / each.all_negatives
            for each, place in zip(points, fixed, strict=True)
        ]
        rows = {
            "tpir": [positives_at(each, rates) for each in points],
            "fpir": reached,
            "curve": [positives_at(each, curve) for each in points],
        }
        means = {name: torch.stack(each).mean(0).tolist() for name, each in rows.items()}
        numbers = {f"{name}.{i}": v for name, row in means.items() for i, v in enumerate(row)}
        return {"rank_1": result.rank_1, **numbers}

    def measure_separation(result: OpenSetResult) -> dict[str, Any]:
        return {
            "auroc": result.auroc,
            "fpr95": result.fpr95,
            "aupr_in": result.aupr_in,
            "aupr_out": result.aupr_out,
            "oscr": result.oscr,
            **{f"roc.{i}": v for i, v in enumerate(positives_at(result.points, curve).tolist())},
        }

    found = measured(result, measure, notes, resamples=resamples, seed=seed)
    found |= measured(separated, measure_separation, notes, resamples=resamples, seed=seed)
    working = min(targets, key=lambda fpir: abs(fpir - 0.1)) if targets else 1.0
    parts = len(result.searches)
    known = separated.known
    return Recognition(
        "openset",
        examples.title,
        (
            f"{counted(len(probes), 'probe')} of "
            f"{counted(len(set(names[0])), 'identity', 'identities')}, "
            f"{counted(len(gallery), 'gallery item')} of "
            f"{counted(len(set(names[1])), 'identity', 'identities')}"
            + (f" in {parts} disjoint galleries" if parts > 1 else "")
            + f"; {counted(known, 'search', 'searches')} of known and {separated.unknown:,} of "
            "unknown identities",
        ),
        {
            **example_counts(examples),
            "probes": len(probes),
            "gallery": len(gallery),
            "galleries": parts,
            "junk": int(examples.junk.sum()),
            "known": known,
            "unknown": separated.unknown,
        },
        tuple(notes),
        (
            as_number("auroc", "AUROC", found["auroc"]),
            as_number("fpr95", "FPR95 (known positive)", found["fpr95"]),
            as_number("aupr_in", "AUPR, known positive", found["aupr_in"]),
            as_number("aupr_out", "AUPR, unknown positive", found["aupr_out"]),
            as_number("oscr", "OSCR", found["oscr"]),
            as_number("rank_1", "rank-1 of known", found["rank_1"]),
            *(
                as_number(f"tpir_at_{fpir:g}", f"TPIR at FPIR {100 * fpir:g} %", found[f"tpir.{i}"])
                for i, fpir in enumerate(targets)
            ),
        ),
        _failing(names[0], searches, result.threshold(working), working),
        ("FPIR", "TPIR"),
        tuple(
            OperatingPoint(
                fpir,
                tuple(result.threshold(fpir).tolist()),
                as_number(f"fpir_at_{fpir:g}", "FPIR", found[f"fpir.{i}"]),
                as_number(f"tpir_at_{fpir:g}", "TPIR", found[f"tpir.{i}"]),
            )
            for i, fpir in enumerate(targets)
        ),
        {
            "tpir": as_curve(curve, [found[f"curve.{i}"] for i in range(len(curve))]),
            "known": as_curve(curve, [found[f"roc.{i}"] for i in range(len(curve))]),
        },
        {
            "known, first item right": searches.top[searches.rank == 1],
            "known, first item wrong": searches.top[searches.rank > 1],
            "unknown": searches.top[searches.rank == 0],
        },
        _rankings(search, probes, gallery, searches, similarity),
    )


def _galleries(
    examples: IdentityEmbeddings, enrol: int, seed: int, notes: list[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of the probes and of the gallery, and the gallery of each item."""
    junk = int(examples.junk.sum())
    if junk:
        notes.append(f"{counted(junk, 'junk example')} ignored")
    query, items = examples.sides()
    if examples.query is not None:
        items = items[~examples.junk[items]]
        return query, items, torch.zeros_like(items)
    if enrol < 1:
        raise ValueError(f"--enrol is expected to be 1 or more, got {enrol}")
    rows: dict[Any, list[int]] = {}
    for row, name in zip(query.tolist(), examples.of(query), strict=True):
        rows.setdefault(name, []).append(row)
    enough = [own for own in rows.values() if len(own) > enrol]
    few = len(rows) - len(enough)
    if len(enough) < 2:
        raise ValueError(
            f"{examples.title}: 2 identities or more with {enrol + 1} examples are expected, "
            f"{enrol} to enrol and a probe, got {len(enough)} of {len(rows):,}; --gallery FILE "
            "names a gallery"
        )
    if few:
        notes.append(
            f"{counted(few, 'identity', 'identities')} with fewer than {enrol + 1} examples are in "
            "no gallery, unknown to both"
        )
    generator = torch.Generator().manual_seed(seed)
    enrolled, member = [], []
    for place, number in enumerate(torch.randperm(len(enough), generator=generator).tolist()):
        own = torch.tensor(enough[number])
        enrolled.append(own[torch.randperm(len(own), generator=generator)[:enrol]])
        member.append(torch.full((enrol,), place % 2))
    gallery = torch.cat(enrolled)
    return query[~torch.isin(query, gallery)], gallery, torch.cat(member)


def _check_kinds(title: str, result: IdentificationResult, nonmated: int) -> None:
    if result.mated and nonmated:
        return
    if result.mated:
        why = "every probe has an identity of the gallery, so that none is unknown"
        hint = "leave some identities out of the gallery"
    else:
        why = "no probe has an identity of the gallery, so that none is known"
        hint = "are the identities the right column (--identities KEY)?"
    raise ValueError(f"{title}: known and unknown probes are expected, but {why}; {hint}")


class _Searches(NamedTuple):
    """Searches of all probes in each gallery, all of shape ``(galleries, Q)``.

    Attributes:
        top: similarity of the first item.
        rank: rank of the best match; 0 for an unknown identity.
        behind: how far the best match is behind the nearest wrong item; negative if it is ahead.
        galleries: which gallery items are in each gallery, shape ``(galleries, G)``.
    """

    top: Tensor
    rank: Tensor
    behind: Tensor
    galleries: Tensor


def _search_all(search: Search, member: Tensor, similarity: str) -> _Searches:
    """Search all probes in each gallery."""
    galleries = torch.stack([member == part for part in member.unique()])
    values = [rank_gallery("openset", _part(search, inside), similarity) for inside in galleries]
    return _Searches(
        torch.stack([torch.maximum(each.best_match, each.best_wrong) for each in values]),
        torch.stack([each.first_rank for each in values]),
        torch.stack([each.best_wrong - each.best_match for each in values]),
        galleries,
    )


def _part(search: Search, inside: Tensor) -> Search:
    return search._replace(
        gallery=search.gallery[inside],
        gallery_ids=search.gallery_ids[inside],
        junk=search.junk[inside],
    )


def _failing(names: list[Any], searches: _Searches, thresholds: Tensor, fpir: float) -> Listing:
    """List the identities with the largest share of wrong decisions at a threshold."""
    accepted = searches.top >= thresholds[:, None]
    known = searches.rank > 0
    missed = known & ~(accepted & (searches.rank == 1))
    everyone = list(dict.fromkeys(names))
    places = {name: place for place, name in enumerate(everyone)}
    member = torch.tensor([places[name] for name in names])

    def total(flags: Tensor) -> Tensor:
        return torch.bincount(member, flags.sum(0).double(), len(everyone))

    asked = total(known), total(~known)
    wrong = total(missed), total(~known & accepted)
    rates = [w / count.clamp_min(1) for w, count in zip(wrong, asked, strict=True)]
    badness = (rates[0] + rates[1]).tolist()
    order = sorted(filter(badness.__getitem__, range(len(everyone))), key=lambda i: -badness[i])
    return Listing(
        ("identity", "known searches", "missed %", "unknown searches", "accepted %"),
        [
            (
                str(everyone[i]),
                int(asked[0][i]),
                100 * float(rates[0][i]),
                int(asked[1][i]),
                100 * float(rates[1][i]),
            )
            for i in order[:FAILING]
        ],
        f"At the thresholds of a FPIR of {100 * fpir:g} %."
        if len(thresholds) > 1
        else f"At the threshold {float(thresholds[0]):.4g} of a FPIR of {100 * fpir:g} %.",
    )


def _rankings(
    search: Search, probes: Tensor, gallery: Tensor, searches: _Searches, similarity: str
) -> dict[str, list[Ranking]]:
    """Return unknown probes with the most similar items, and known ones whose match is behind."""
    unknown = searches.top.masked_fill(searches.rank > 0, -torch.inf)
    behind = searches.behind.masked_fill(searches.rank < 2, -torch.inf)
    size = len(probes)
    found: dict[str, list[Ranking]] = {}
    for heading, badness in (
        ("Unknown, most similar to someone", unknown),
        ("Known, furthest behind a wrong item", behind),
    ):
        order = badness.flatten().argsort(descending=True, stable=True)
        order = order[badness.flatten()[order] > -torch.inf]
        chosen = one_of_each(order, search.query_ids.repeat(len(searches.rank)), SHOWN)
        found[heading] = []
        for place in chosen.tolist():
            number, probe = divmod(place, size)
            inside = searches.galleries[number]
            items = first_items(
                _part(search, inside), torch.tensor([probe]), gallery[inside], similarity, ITEMS
            )
            rank = int(searches.rank[number, probe])
            remark = f"first match at rank {rank:,}" if rank else "not in the gallery"
            found[heading].append(Ranking(int(probes[probe]), items[probe], remark))
    return found
