"""Calibrate a threshold on the scores of all pairs of a query and an identity."""

from typing import NamedTuple

import torch
from torch import Tensor

from tammes.gallery.exact_search import score_blocks
from tammes.gallery.ids import Id
from tammes.gallery.templates import Templates
from tammes.metrics.functional.operating_points import (
    OperatingPoints,
    accumulated,
    check_rate,
    smallest_threshold,
)
from tammes.metrics.functional.verification import bin_edges, score_sums

_PAIRS = 4 * 2**20
"""Pairs that are counted at a time."""
_BINS = 65_536
"""Bins of the histogram of scores."""


class CalibratedThreshold(NamedTuple):
    """Result of :meth:`Gallery.threshold`.

    Attributes:
        threshold: smallest threshold whose FAR does not exceed the target.
        far: fraction of different-identity pairs accepted at it.
        tar: fraction of same-identity pairs accepted at it; NaN without such pairs.
        same: number of same-identity pairs.
        different: number of different-identity pairs.
    """

    threshold: float
    far: float
    tar: float
    same: int
    different: int


def pair_points(templates: Templates, query: Tensor, ids: list[Id]) -> OperatingPoints:
    """Count the scores of all pairs of a query, normalised, and an identity."""
    many, device = len(templates.ids), templates.rows.device
    if len(ids) != len(query):
        raise ValueError(
            f"Gallery.threshold expects {len(query):,} ids, one for each row, got {len(ids):,}"
        )
    limits, own = (-1.0, 1.0), torch.tensor([templates.place.get(each, -1) for each in ids])
    owners = None
    if templates.kind == "nearest":
        owners = torch.tensor(templates.owners, device=device)
    sums = None
    for rows in torch.arange(len(query)).split(max(_PAIRS // many, 1)):
        scores = torch.full((len(rows), many), -torch.inf, device=device)
        for begin, block in score_blocks(query[rows], templates.rows.blocks()):
            columns = slice(begin, begin + block.shape[1])
            if owners is None:
                scores[:, columns] = block
            else:
                scores.scatter_reduce_(1, owners[columns].expand_as(block), block, "amax")
        same = own[rows, None].to(device) == torch.arange(many, device=device)
        counted = score_sums(scores.clamp_(-1, 1).view(-1), same.view(-1), limits, _BINS)
        sums = counted if sums is None else type(sums)(*map(torch.add, sums, counted))
    assert sums is not None
    edges = bin_edges(limits, _BINS, device)
    return accumulated(edges, sums.same.flip(0), sums.different.flip(0))


def calibrate(name: str, points: OperatingPoints, far: float) -> CalibratedThreshold:
    """Find the smallest threshold whose FAR does not exceed a target."""
    same, different = int(points.all_positives), int(points.all_negatives)
    check_rate(name, "FAR", far, different, "pairs of different identities")
    place = smallest_threshold(points, far)
    return CalibratedThreshold(
        float(points.thresholds[place]),
        float(points.negatives[place] / points.all_negatives),
        float(points.positives[place] / points.all_positives),
        same,
        different,
    )
