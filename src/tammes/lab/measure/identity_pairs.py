"""Pairs of examples to verify, all of them or a random sample of each kind, and their scores."""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_PAIRS = 100_000
"""Default largest number of pairs of each kind."""
_BLOCK = 1 << 14
"""Largest number of pairs whose features are in memory at once."""


class SampledPairs(NamedTuple):
    """Pairs of examples, those of one identity first, and how many of each kind there are.

    ``rows`` has shape ``(P, 2)``; the ``one_camera`` pairs of one identity and camera are left out.
    """

    rows: Tensor
    is_same: Tensor
    same: int
    different: int
    one_camera: int


def sample_pairs(
    identity: Tensor,
    first: Tensor | None = None,
    second: Tensor | None = None,
    *,
    camera: Tensor | None = None,
    limit: int = MAX_PAIRS,
    seed: int = 0,
) -> SampledPairs:
    """Return all pairs of two examples, or a random sample of the pairs of each kind.

    Pairs of one identity and one camera are left out, as the ranking of a gallery leaves them out.

    Identities and cameras are numbers; by default every example has its own camera. The rows
    ``first`` (such as queries; by default all) are paired with the rows ``second`` (such as a
    gallery; by default with each other). There are at most ``limit`` pairs of each kind.
    """
    apart = second is not None
    first = torch.arange(len(identity)) if first is None else first
    second = first if second is None else second
    camera = torch.arange(len(identity)) if camera is None else camera
    place = identity * (int(camera.max()) + 1) + camera
    totals = [_count(codes, first, second, apart) for codes in (identity, place)]
    everything = len(first) * len(second) if apart else len(first) * (len(first) - 1) // 2
    generator = torch.Generator().manual_seed(seed)
    same = _same_pairs(identity, camera, first, second, apart)
    alike, others = totals[0] - totals[1], everything - totals[0]
    if len(same) > limit:
        same = _sample(same, limit, generator)
    different = _different_pairs(identity, first, second, apart, others, limit, generator)
    rows = torch.cat([same, different])
    is_same = torch.arange(len(rows)) < len(same)
    return SampledPairs(rows, is_same, alike, others, totals[1])


def pair_scores(features: Tensor, pairs: Tensor, similarity: str = "dot") -> Tensor:
    """Score the pairs ``(P, 2)`` of rows: inner products, or minus squared distances."""

    def score(block: Tensor) -> Tensor:
        left, right = features[block].unbind(1)
        if similarity == "euclidean":
            return -(left - right).square().sum(1)
        return (left * right).sum(1)

    return torch.cat([score(block) for block in pairs.split(_BLOCK)])


def _count(codes: Tensor, first: Tensor, second: Tensor, apart: bool) -> int:
    """Count the pairs of equal codes."""
    size = int(codes.max()) + 1
    one, two = (torch.bincount(codes[side], minlength=size) for side in (first, second))
    return int((one * two).sum()) if apart else int((one * (one - 1) // 2).sum())


def _same_pairs(
    identity: Tensor, camera: Tensor, first: Tensor, second: Tensor, apart: bool
) -> Tensor:
    """Return the pairs of one identity and two cameras, shape ``(P, 2)``."""
    found = [torch.zeros(0, 2, dtype=torch.long)]
    groups = _groups(identity, second)
    if not apart:
        found += [torch.combinations(own) for own in groups.values() if len(own) > 1]
    else:
        for code, own in _groups(identity, first).items():
            if code in groups:
                found.append(torch.cartesian_prod(own, groups[code]))
    pairs = torch.cat(found)
    return pairs[camera[pairs[:, 0]] != camera[pairs[:, 1]]]


def _groups(identity: Tensor, rows: Tensor) -> dict[int, Tensor]:
    """Return the rows of each identity."""
    codes, order = identity[rows].sort(stable=True)
    present, counts = codes.unique_consecutive(return_counts=True)
    return dict(zip(present.tolist(), rows[order].split(counts.tolist()), strict=True))


def _different_pairs(
    identity: Tensor,
    first: Tensor,
    second: Tensor,
    apart: bool,
    total: int,
    limit: int,
    generator: torch.Generator,
) -> Tensor:
    """Return pairs of two identities, shape ``(P, 2)``: all, or a sample without repetition."""
    wanted = min(total, limit)
    if total <= 2 * limit:
        pairs = torch.cartesian_prod(first, second) if apart else torch.combinations(first)
        pairs = pairs.view(-1, 2)
        pairs = pairs[identity[pairs[:, 0]] != identity[pairs[:, 1]]]
        return _sample(pairs, wanted, generator)
    size = len(identity)
    codes = torch.zeros(0, dtype=torch.long)
    while len(codes) < wanted:
        drawn = [
            side[torch.randint(len(side), (wanted,), generator=generator)]
            for side in (first, second)
        ]
        left, right = drawn if apart else (torch.minimum(*drawn), torch.maximum(*drawn))
        other = identity[left] != identity[right]
        codes = torch.cat([codes, (left * size + right)[other]]).unique()
    chosen = _sample(codes, wanted, generator)
    return torch.stack([chosen // size, chosen % size], 1)


def _sample(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return at most ``count`` random rows, in their order."""
    return rows[torch.randperm(len(rows), generator=generator)[:count].sort().values]
