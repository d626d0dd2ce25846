"""Examples with identities, and pairs of them, in the form that the metrics take."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tammes.lab.data.images import DataError
from tammes.lab.data.listing import Files, Items


@dataclass(frozen=True, eq=False)
class IdentityExamples:
    """Examples with identities: queries, a gallery or training examples.

    Identities, cameras and junk are arguments of :func:`tammes.metrics.functional.retrieval`.

    Attributes:
        items: files or encoded images; ``items.fetch(row)`` returns a path or bytes.
        identities: identity of each item, all integers or all strings.
        cameras: camera of each item, or None.
        junk: items that count neither as a match nor as wrong, shape ``(N,)``.
    """

    items: Items
    identities: Sequence[int] | Sequence[str]
    cameras: Sequence[int] | Sequence[str] | None
    junk: Tensor

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, eq=False)
class IdentityPairs:
    """Pairs of the same identity or of different ones.

    An item in several pairs is listed once, so that its features are computed once. The scores of
    the pairs are then ``(features[left] * features[right]).sum(1)``.

    Attributes:
        items: files or encoded images; ``items.fetch(row)`` returns a path or bytes.
        left: row of the first item of each pair, shape ``(P,)``.
        right: row of the second item of each pair, shape ``(P,)``.
        same: whether both items have the same identity, shape ``(P,)``.
        folds: fold of each pair from 0, shape ``(P,)``, or None.
        identities: identity of each item, or None if the source does not name it.
    """

    items: Items
    left: Tensor
    right: Tensor
    same: Tensor
    folds: Tensor | None = None
    identities: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.same)

    def sides(self) -> tuple[list[str], list[str]] | None:
        """Return the identities of the first and the second item of each pair, or None.

        Pass them as ``identities`` to :func:`tammes.metrics.functional.verification`.
        """
        if self.identities is None:
            return None
        known = self.identities
        return [known[row] for row in self.left.tolist()], [
            known[row] for row in self.right.tolist()
        ]


def existing_folder(path: str | os.PathLike[str], holds: str) -> Path:
    """Return the path of a folder that must exist; ``holds`` names its content in the message."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise DataError(f"{folder}: a folder of {holds} is expected, got {got}")
    return folder


def existing_file(path: str | os.PathLike[str], holds: str) -> Path:
    """Return the path of a file that must exist; ``holds`` names its content in the message."""
    file = Path(path).expanduser()
    if not file.is_file():
        got = "a folder" if file.is_dir() else "no such file"
        raise DataError(f"{file}: a file of {holds} is expected, got {got}")
    return file


def existing_files(
    source: Path, folder: Path, used: Iterable[tuple[str, int]], hint: str
) -> tuple[Files, dict[str, int]]:
    """List files below a folder once each, in the order of their first use; all must exist.

    ``used`` has the path and the line in ``source`` of each use; ``hint`` ends the message about
    missing files. Returns the files, and the row of each path.
    """
    rows: dict[str, int] = {}
    missing: dict[str, int] = {}
    uses = lost = 0
    for path, line in used:
        if path not in rows:
            rows[path] = len(rows)
            if not (folder / path).is_file():
                missing[path] = line
        uses += 1
        lost += path in missing
    if missing:
        path, line = next(iter(missing.items()))
        raise DataError(
            f"{source}: {len(missing):,} of {len(rows):,} files that it names are missing (named "
            f"{lost:,} times of {uses:,}), the first is {str(folder / path)!r} in line {line}; "
            f"{hint}"
        )
    return Files(str(folder), tuple(rows)), rows
