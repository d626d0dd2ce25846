"""Lists of pairs: ``pairs.txt`` of LFW, trial lists of VoxCeleb."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from tammes.lab.config.expressions import short
from tammes.lab.data.identities.examples import (
    IdentityPairs,
    existing_file,
    existing_files,
    existing_folder,
)
from tammes.lab.data.images import DataError

_SUFFIXES = (".jpg", ".png", ".jpeg", ".webp", ".bmp")
"""Suffixes of the images in copies of LFW, in order of preference."""


def read_lfw(
    pairs: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
) -> IdentityPairs:
    """Read pairs of Labeled Faces in the Wild: ``NAME 1 4`` or ``NAME 1 OTHER 2``.

    The first line is the number of folds, 10, and the number n of pairs of each kind in a fold:
    each fold lists n pairs of one person, then n of two. ``pairsDevTrain.txt`` and
    ``pairsDevTest.txt``, which have one fold, give n alone.

    Args:
        pairs: path of ``pairs.txt``.
        folder: folder with the images, ``NAME/NAME_0001.jpg`` (or .png); by default the folder of
            ``pairs``.

    Returns:
        The pairs, with their folds and the names of the persons.

    References:
        Huang et al., Labeled Faces in the Wild, 2007.
    """
    source = existing_file(pairs, "pairs")
    root = existing_folder(source.parent if folder is None else folder, "images")
    rows = lfw_rows(source)
    named = [(_image_of(root, name), row.line) for row in rows for name in (row.left, row.right)]
    hint = "images are expected as NAME/NAME_0001.jpg in the folder"
    items, known = existing_files(source, root, named, hint)
    sides = torch.tensor([known[path] for path, _ in named]).view(-1, 2)
    return IdentityPairs(
        items=items,
        left=sides[:, 0],
        right=sides[:, 1],
        same=torch.tensor([row.same for row in rows]),
        folds=torch.tensor([row.fold for row in rows]),
        identities=[path.partition("/")[0] for path in known],
    )


class ListedPair(NamedTuple):
    """A line of a pair list: two names, whether they are of one identity, and the fold."""

    line: int
    left: str
    right: str
    same: bool
    fold: int = 0


def lfw_rows(source: Path) -> list[ListedPair]:
    """Read the lines of ``pairs.txt``; images are named ``NAME/NAME_0001``."""
    lines = _read_lines(source)
    line, header = lines[0]
    if not (len(header) in (1, 2) and all(map(_is_count, header))):
        raise DataError(_malformed(source, line, header, "FOLDS PAIRS, such as 10 300"))
    each = int(header[-1])
    wanted = 2 * each * (int(header[0]) if len(header) == 2 else 1)
    rows = lines[1:]
    if len(rows) != wanted:
        raise DataError(
            f"{source}: {wanted:,} pairs are expected after the line {' '.join(header)!r}, "
            f"got {len(rows):,}"
        )
    pairs = []
    for place, (line, words) in enumerate(rows):
        same = place % (2 * each) < each
        form = "NAME N N" if same else "NAME N OTHER N"
        if len(words) != (3 if same else 4) or not (_is_count(words[1]) and _is_count(words[-1])):
            raise DataError(_malformed(source, line, words, form))
        first, second = words[0], words[0 if same else 2]
        left = f"{first}/{first}_{int(words[1]):04d}"
        right = f"{second}/{second}_{int(words[-1]):04d}"
        if left == right:
            raise DataError(_malformed(source, line, words, f"{form} of two images"))
        if not same and first == second:
            raise DataError(_malformed(source, line, words, f"{form} of two names"))
        pairs.append(ListedPair(line, left, right, same, place // (2 * each)))
    return pairs


def _image_of(root: Path, name: str) -> str:
    paths = [f"{name}{suffix}" for suffix in _SUFFIXES]
    return next((path for path in paths if (root / path).is_file()), paths[0])


def read_trials(
    trials: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
) -> IdentityPairs:
    """Read a trial list of VoxCeleb: ``1 FIRST SECOND`` for one speaker, ``0`` for two.

    Paths that begin with the speaker, such as ``id10270/GWXujl-xAVM/00017.wav``, give the
    identities, and a trial that contradicts them is an error.

    Args:
        trials: path of the list.
        folder: folder that its paths are relative to; by default the folder of the list.

    Returns:
        The pairs, without folds.

    References:
        Nagrani, Chung and Zisserman, VoxCeleb: A Large-scale Speaker Identification Dataset,
        Interspeech 2017.
    """
    source = existing_file(trials, "trials")
    root = existing_folder(source.parent if folder is None else folder, "recordings")
    rows = trial_rows(source)
    for row in rows:
        sides = _speaker_of(row.left), _speaker_of(row.right)
        if None not in sides and (sides[0] == sides[1]) != row.same:
            raise DataError(
                f"{source} line {row.line}: 1 is expected for one speaker and 0 for two, "
                f"got {int(row.same)} for {sides[0]} and {sides[1]}"
            )
    named = [(path, row.line) for row in rows for path in (row.left, row.right)]
    hint = "the paths of a list are relative to the folder"
    items, known = existing_files(source, root, named, hint)
    places = torch.tensor([known[path] for path, _ in named]).view(-1, 2)
    speakers = [_speaker_of(path) for path in known]
    identities = [speaker for speaker in speakers if speaker is not None]
    return IdentityPairs(
        items=items,
        left=places[:, 0],
        right=places[:, 1],
        same=torch.tensor([row.same for row in rows]),
        identities=identities if len(identities) == len(known) else None,
    )


def trial_rows(source: Path) -> list[ListedPair]:
    """Read the lines of a trial list."""
    rows = []
    for line, words in _read_lines(source):
        if len(words) != 3 or words[0] not in ("0", "1"):
            raise DataError(_malformed(source, line, words, "1 FIRST SECOND or 0 FIRST SECOND"))
        rows.append(ListedPair(line, words[1], words[2], words[0] == "1"))
    return rows


def holds_lfw(source: Path) -> bool:
    """Whether a file begins like ``pairs.txt``, with one or two numbers."""
    _, words = _read_lines(source)[0]
    return len(words) < 3 and all(map(_is_count, words))


def _speaker_of(path: str) -> str | None:
    match = re.match(r"(id\d+)/", path)
    return match[1] if match else None


def _read_lines(path: Path) -> list[tuple[int, list[str]]]:
    """Return the line number and words of each line that is not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: text in UTF-8 is expected, got byte {error.start}") from error
    lines = [(number, line.split()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, words) for number, words in lines if words]
    if not lines:
        raise DataError(f"{path}: a list of pairs is expected, got an empty file")
    return lines


def _is_count(word: str) -> bool:
    return re.fullmatch(r"0*[1-9][0-9]{0,8}", word) is not None


def _malformed(path: Path, line: int, words: list[str], form: str) -> str:
    return f"{path} line {line}: {form} is expected, got {short(' '.join(words))!r}"
