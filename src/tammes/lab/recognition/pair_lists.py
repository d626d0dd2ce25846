"""Read lists of pairs to verify."""

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.data.identities.examples import existing_file
from tammes.lab.data.identities.pairs import holds_lfw, lfw_rows, trial_rows
from tammes.lab.measure.formats import FileError
from tammes.lab.recognition.embeddings import IdentityEmbeddings, PairRows

_COMPARED = 20_000
"""Largest number of names among which a near match of a missing one is sought."""


def read_pairs(path: str, examples: IdentityEmbeddings) -> PairRows:
    """Read a list of pairs: ``pairs.txt`` of LFW, or trials ``1 FIRST SECOND``, ``0 ...``.

    Names are the paths of the examples, with or without folders and suffix, or row numbers if the
    embeddings have no paths.

    Raises:
        FileError: pairs name examples that are not there.
    """
    source = existing_file(path, "pairs")
    folded = holds_lfw(source)
    listed = lfw_rows(source) if folded else trial_rows(source)
    names = [(name, pair.line) for pair in listed for name in (pair.left, pair.right)]
    rows = _find_rows(source, names, examples).view(-1, 2)
    same = torch.tensor([pair.same for pair in listed])
    folds = torch.tensor([pair.fold for pair in listed]) if folded else None
    return PairRows(rows, same, folds)


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
    """Return the row of each name, including shorter forms of a path if they are unique."""
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
