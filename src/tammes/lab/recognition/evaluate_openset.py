"""Open-set identification (1:N): search probes in a gallery that may lack their identity."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.lab.recognition.embeddings import IdentityEmbeddings, numbered
from tammes.lab.recognition.evaluate_retrieval import (
    ITEMS,
    SHOWN,
    check_sides,
    example_counts,
    first_items,
    one_of_each,
)
from tammes.lab.recognition.results import (
    Listing,
    Ranking,
    Recognition,
    as_curve,
    as_number,
    counted,
    failing_identities,
    grid,
    measurable,
    measured,
    operating_points,
    positives_at,
    without_warnings,
)
from tammes.metrics.functional import BootstrapInterval, OpenSetResult, openset
from tammes.metrics.functional.operating_points import (
    check_rate,
    rank_scores,
    smallest_threshold,
)
from tammes.metrics.functional.retrieval import (
    Search,
    as_search,
    check_similarity,
    rank_gallery,
)

RATES = (0.3, 0.1, 0.01, 1e-3, 1e-4)
"""False positive identification rates of the table of thresholds, as far as measurable."""
_FAILING = ("identity", "known searches", "missed %", "unknown searches", "accepted %")


class Searches(NamedTuple):
    """Searches of all Q probes in each gallery.

    ``top`` is the similarity of the first item, ``rank`` the rank of the best match, 0 for an
    identity that is not in the gallery; both have shape ``(galleries, Q)``.
    """

    top: Tensor
    rank: Tensor


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

    Without separate queries, the identities are divided at random into two disjoint galleries, as
    in IJB-B and IJB-C: ``enrol`` examples of each identity are in its gallery, all others are
    probes, and every probe is searched in both. One gallery has its identity, the other does not.

    ``fpirs`` are false positive identification rates, by default those that can be measured;
    ``similarity`` and ``resamples`` are as in :func:`.evaluate_retrieval`.

    Raises:
        ValueError: every probe is known, or none is; or there are too few for a rate.
    """
    check_similarity("openset", similarity)
    notes = examples.first_notes()
    if examples.cameras is not None:
        notes.append("cameras are not used: every item of the gallery is searched")
    probes, gallery, member = _galleries(examples, enrol, seed, notes)
    check_sides(examples, probes, gallery)
    names, enrolled = examples.of(probes), examples.of(gallery)
    features = examples.features[probes], examples.features[gallery]
    search = as_search("openset", *features, names, enrolled)
    galleries = torch.stack([member == part for part in member.unique()])
    searches, behind = _search_all(search, galleries, similarity)
    _check_kinds(examples.title, searches)
    parts = len(searches.rank)
    summary = (
        f"{counted(len(probes), 'probe')} of {counted(len(set(names)), 'identity', 'identities')}, "
        f"{counted(len(gallery), 'gallery item')} of "
        f"{counted(len(set(enrolled)), 'identity', 'identities')}"
        + (f" in {parts} disjoint galleries" if parts > 1 else "")
    )
    counts = {
        **example_counts(examples),
        "probes": len(probes),
        "gallery": len(gallery),
        "galleries": parts,
        "junk": int(examples.junk.sum()),
    }
    found = report_searches(
        examples.title, names, searches, notes, fpirs=fpirs, resamples=resamples, seed=seed
    )

    def rankings(badness: Tensor) -> list[Ranking]:
        """Return the first items of the worst searches."""
        order = badness.flatten().argsort(descending=True, stable=True)
        order = order[badness.flatten()[order] > -torch.inf]
        shown = []
        for place in one_of_each(order, search.query_ids.repeat(parts), SHOWN).tolist():
            part, probe = divmod(place, len(probes))
            inside, rank = galleries[part], int(searches.rank[part, probe])
            items = first_items(
                search.within(inside), torch.tensor([probe]), gallery[inside], similarity, ITEMS
            )
            remark = f"first match at rank {rank:,}" if rank else "not in the gallery"
            shown.append(Ranking(int(probes[probe]), items[probe], remark))
        return shown

    return replace(
        found,
        summary=(f"{summary}; {found.summary[0]}",),
        counts=counts | found.counts,
        rankings={
            "Unknown, most similar to someone": rankings(
                searches.top.masked_fill(searches.rank > 0, -torch.inf)
            ),
            "Known, furthest behind a wrong item": rankings(
                behind.masked_fill(searches.rank < 2, -torch.inf)
            ),
        },
    )


class _Probes(NamedTuple):
    """Probes with weights, for :func:`tammes.metrics.functional.intervals`."""

    identities: tuple[Tensor] | None
    weights: Tensor

    def weighted(self, weights: Tensor) -> "_Probes":
        return self._replace(weights=weights)


def report_searches(
    title: str,
    names: Sequence[Any] | None,
    searches: Searches,
    notes: list[str],
    *,
    fpirs: Sequence[float] | None,
    resamples: int,
    seed: int,
) -> Recognition:
    """Report searches of known and unknown probes: separation, TPIR, thresholds.

    ``names`` are the identities of the probes, or None; notes are appended to ``notes``.
    """
    known = searches.rank > 0
    unknown = int((~known).sum(1).min())
    targets = measurable(RATES, unknown) if fpirs is None else list(fpirs)
    for fpir in targets:
        check_rate("openset", "FPIR", fpir, unknown, "unknown probes of a gallery")
    if fpirs is None:
        notes.append(f"a FPIR below {1 / unknown:.2g} cannot be measured with so few probes")
    found, thresholds = _measure(searches, names, targets, notes, resamples, seed)
    curve = grid(unknown)
    working = min(range(len(targets)), key=lambda i: abs(targets[i] - 0.1), default=None)
    counts = {"known": int(known.sum()), "unknown": int((~known).sum())}
    return Recognition(
        "openset",
        title,
        (
            f"{counted(counts['known'], 'search', 'searches')} of known and "
            f"{counts['unknown']:,} of unknown identities",
        ),
        counts,
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
        Listing(_FAILING, [])
        if names is None or working is None
        else _failing(list(names), searches, thresholds[:, working], targets[working]),
        ("FPIR", "TPIR"),
        operating_points(targets, ("FPIR", "TPIR"), thresholds, found),
        {
            "tpir": as_curve(curve, [found[f"curve.{i}"] for i in range(len(curve))]),
            "known": as_curve(curve, [found[f"roc.{i}"] for i in range(len(curve))]),
        },
        {
            "known, right": searches.top[searches.rank == 1],
            "known, wrong": searches.top[searches.rank > 1],
            "unknown": searches.top[searches.rank == 0],
        },
    )


def _measure(
    searches: Searches,
    names: Sequence[Any] | None,
    targets: Sequence[float],
    notes: list[str],
    resamples: int,
    seed: int,
) -> tuple[dict[str, BootstrapInterval | float], Tensor]:
    """Measure all numbers and curves; return them, and the thresholds of each gallery."""
    top, rank = searches.top, searches.rank
    parts, size = rank.shape
    separated = openset(
        top.flatten(),
        (rank > 0).flatten(),
        (rank == 1).flatten(),
        identities=None if names is None else list(names) * parts,
    )
    rates = torch.tensor(targets, dtype=torch.double)
    curve = grid(int((rank == 0).sum(1).min()))
    # A probe whose match is not first is never accepted.
    ranked = [
        rank_scores(score.where(place <= 1, -torch.inf), place > 0)
        for score, place in zip(top, rank, strict=True)
    ]
    fixed = [smallest_threshold(each.points(), rates) for each in ranked]
    thresholds = torch.stack(
        [each.points().thresholds[place] for each, place in zip(ranked, fixed, strict=True)]
    )
    identities = None if separated.identities is None else (separated.identities[0][:size],)
    probes = _Probes(identities, torch.ones(size, dtype=torch.double))

    def measure(probes: _Probes) -> dict[str, Any]:
        points = [each.points(probes.weights) for each in ranked]
        first = (probes.weights * (rank == 1)).sum(1) / (probes.weights * (rank > 0)).sum(1)
        rows = {
            "rank": [rate.view(1) for rate in first],
            "tpir": [positives_at(each, rates) for each in points],
            "fpir": [
                each.negatives[place] / each.all_negatives
                for each, place in zip(points, fixed, strict=True)
            ],
            "curve": [positives_at(each, curve) for each in points],
        }
        means = {name: torch.stack(each).mean(0).tolist() for name, each in rows.items()}
        numbers = {f"{name}.{i}": v for name, row in means.items() for i, v in enumerate(row)}
        return {"rank_1": numbers.pop("rank.0"), **numbers}

    def measure_separation(result: OpenSetResult) -> dict[str, Any]:
        accepted = positives_at(result.points, curve).tolist()
        return {
            "auroc": result.auroc,
            "fpr95": result.fpr95,
            "aupr_in": result.aupr_in,
            "aupr_out": result.aupr_out,
            "oscr": result.oscr,
            **{f"roc.{i}": value for i, value in enumerate(accepted)},
        }

    found = measured(probes, measure, notes, resamples=resamples, seed=seed)
    found |= measured(separated, measure_separation, notes, resamples=resamples, seed=seed)
    return found, thresholds


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


def _check_kinds(title: str, searches: Searches) -> None:
    mated = searches.rank > 0
    if bool(mated.any()) and bool((~mated).any(1).all()):
        return
    if bool(mated.any()):
        why = "every probe has an identity of the gallery, so that none is unknown"
        hint = "leave some identities out of the gallery"
    else:
        why = "no probe has an identity of the gallery, so that none is known"
        hint = "are the identities the right column (--identities KEY)?"
    raise ValueError(f"{title}: known and unknown probes are expected, but {why}; {hint}")


def _search_all(search: Search, galleries: Tensor, similarity: str) -> tuple[Searches, Tensor]:
    """Search all probes in each gallery; also return how far a match is behind a wrong item."""
    values = [rank_gallery("openset", search.within(part), similarity) for part in galleries]
    top = [torch.maximum(each.best_match, each.best_wrong) for each in values]
    behind = torch.stack([each.best_wrong - each.best_match for each in values])
    return Searches(torch.stack(top), torch.stack([each.first_rank for each in values])), behind


def _failing(names: list[Any], searches: Searches, thresholds: Tensor, fpir: float) -> Listing:
    """List the identities with the largest share of wrong decisions at a threshold."""
    accepted = searches.top >= thresholds[:, None]
    known = searches.rank > 0
    missed = known & ~(accepted & (searches.rank == 1))
    everyone, member = list(dict.fromkeys(names)), numbered(names)

    def total(flags: Tensor) -> Tensor:
        return torch.bincount(member, flags.sum(0).double(), len(everyone))

    asked = total(known), total(~known)
    wrong = total(missed), total(~known & accepted)
    at = "s" if len(thresholds) > 1 else f" {float(thresholds[0]):.4g}"
    caption = f"At the threshold{at} of a FPIR of {100 * fpir:g} %."
    return failing_identities(_FAILING, everyone, asked, wrong, caption)
