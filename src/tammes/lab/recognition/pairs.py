"""Pairs of examples to verify: from a list, or all pairs, of which a sample is drawn if many."""

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.data.identities.examples import existing_file
from tammes.lab.data.identities.pairs import holds_lfw, lfw_rows, trial_rows
from tammes.lab.measure.formats import FileError
from tammes.lab.recognition.embeddings import IdentityEmbeddings, PairRows

_COMPARED = 20_000
"""Largest number of names that a missing one is compared with."""


def read_pairs(path: str, examples: IdentityEmbeddings) -> PairRows:
    """Read a list of pairs: ``pairs.txt`` of LFW, or trials ``1 FIRST SECOND``, ``0 ...``.

    Names are the paths of the examples, with or without their folders and suffix; they are numbers
    of rows if the embeddings have no paths.

    Raises:
        FileError: pairs name examples that are not there.
    """
    source = existing_file(path, "pairs")
    folds = None
    if holds_lfw(source):
        listed = lfw_rows(source)
        folds = torch.tensor([row.fold for row in listed])
        names = [
            (f"{name}/{name}_{number:04d}", row.line)
            for row in listed
            for name, number in (row.left, row.right)
        ]
        same = [row.same for row in listed]
    else:
        trials = trial_rows(source)
        names = [(name, row.line) for row in trials for name in (row.left, row.right)]
        same = [row.same for row in trials]
    rows = _find_rows(source, names, examples).view(-1, 2)
    return PairRows(rows[:, 0], rows[:, 1], torch.tensor(same), folds)


def _find_rows(
    source: Path, names: Sequence[tuple[str, int]], examples: IdentityEmbeddings
) -> Tensor:
    known = _names(examples)
    missing: dict[str, int] = {}
    for name, line in names:
        if name not in known:
            missing.setdefault(name, line)
    if missing:
        name, line = next(iter(missing.items()))
        lost = sum(name in missing for name, _ in names)
        # Comparing a name with a great many others takes minutes.
        hint = did_you_mean(name, known) if len(known) <= _COMPARED else ""
        if not hint and not examples.named:
            hint = "; without a column of paths, pairs name rows from 0; --paths KEY names one"
        raise FileError(
            f"{source}: {len(missing):,} of {len({name for name, _ in names}):,} images that it "
            f"names have no embedding (named {lost:,} times of {len(names):,}), the first is "
            f"{name!r} in line {line}{hint}"
        )
    return torch.tensor([known[name] for name, _ in names])


def _names(examples: IdentityEmbeddings) -> dict[str, int]:
    """Return the row of each name; shorter forms of a path are known where they are unique."""
    if not examples.named:
        return {str(row): row for row in range(len(examples))}
    known: dict[str, int] = {}
    forms: tuple[Callable[[str], str], ...] = (_without_folders, _without_suffix, str)
    for form in forms:
        found: dict[str, int | None] = {}
        for row, name in enumerate(examples.names):
            short = form(name)
            found[short] = None if short in found else row
        known |= {name: row for name, row in found.items() if row is not None}
    return known


def _without_suffix(name: str) -> str:
    return str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name).name else name


def _without_folders(name: str) -> str:
    """Return the last folder and the name without its suffix: ``NAME/NAME_0001`` of LFW."""
    return "/".join(PurePosixPath(_without_suffix(name)).parts[-2:])


class SampledPairs(NamedTuple):
    """Pairs of examples, and how many there are.

    Attributes:
        rows: the pairs.
        same: number of pairs of one identity there are.
        different: number of pairs of two identities there are.
        one_camera: number of pairs of one identity and one camera, which are left out.
    """

    rows: PairRows
    same: int
    different: int
    one_camera: int


def sample_pairs(examples: IdentityEmbeddings, limit: int, seed: int) -> SampledPairs:
    """Return all pairs of two examples, or a random sample of the pairs of each kind.

    Pairs are of a query and a gallery item, or of any two examples if there are no sides. Junk is
    in no pair. If cameras are known, pairs of one identity and one camera are left out, as the
    ranking of a gallery leaves them out.

    Args:
        examples: the examples.
        limit: largest number of pairs of each kind.
        seed: seed of the sample.
    """
    assert examples.identities is not None
    identity = _numbers(examples.identities)
    # Without cameras every example has its own, so that no pair is left out.
    camera = torch.arange(len(examples))
    if examples.cameras is not None:
        camera = _numbers(examples.cameras)
    first, second = examples.sides()
    second = second[~examples.junk[second]]
    apart = examples.query is not None
    place = identity * (int(camera.max()) + 1) + camera
    totals = [_count(codes, first, second, apart) for codes in (identity, place)]
    everything = len(first) * len(second) if apart else len(first) * (len(first) - 1) // 2
    generator = torch.Generator().manual_seed(seed)
    same = _same_pairs(identity, camera, first, second, apart)
    kept = [totals[0] - totals[1], everything - totals[0]]
    if len(same) > limit:
        same = same[torch.randperm(len(same), generator=generator)[:limit].sort().values]
    different = _different_pairs(identity, first, second, apart, kept[1], limit, generator)
    rows = torch.cat([same, different])
    flags = torch.arange(len(rows)) < len(same)
    return SampledPairs(PairRows(rows[:, 0], rows[:, 1], flags), kept[0], kept[1], totals[1])


def _numbers(values: Sequence[int] | Sequence[str]) -> Tensor:
    known = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([known[value] for value in values])


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
        return pairs[torch.randperm(len(pairs), generator=generator)[:wanted].sort().values]
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
    chosen = codes[torch.randperm(len(codes), generator=generator)[:wanted].sort().values]
    return torch.stack([chosen // size, chosen % size], 1)
