"""Folders of Market-1501, DukeMTMC-reID and LFW as sources of training and test images."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tammes.lab.data.identities.examples import IdentityExamples
from tammes.lab.data.identities.identity_protocol import IdentityProtocol
from tammes.lab.data.identities.layouts import PARTITIONS, read_dukemtmc, read_market1501
from tammes.lab.data.identities.pairs import read_lfw
from tammes.lab.data.listing import EVERYTHING, Entries, Files, Partitions, hash_of
from tammes.lab.data.sources.folder import list_classes

_PAIRS = "pairs.txt"


def partitions(folder: Path) -> Partitions | None:
    """Return the partitions of a folder in a known layout, or None if its layout is another.

    Market-1501 and DukeMTMC-reID have ``train`` and ``novel``: queries, then the gallery without
    junk. In a folder with ``pairs.txt`` of LFW, ``novel`` has the images of the pairs.
    """
    if _holds_boxes(folder):
        return {
            "train": lambda: _entries(folder, *_boxes(folder, ["train"])[:2]),
            "novel": lambda: _entries(folder, *_boxes(folder, ["query", "gallery"])[:2]),
        }
    if (folder / _PAIRS).is_file():
        return {EVERYTHING: lambda: list_classes(folder), "novel": lambda: _lfw(folder)}
    return None


def read_protocol(folder: Path) -> IdentityProtocol:
    """Return the evaluation protocol of the partition ``novel``."""
    if _holds_boxes(folder):
        _, identities, cameras = _boxes(folder, ["query", "gallery"])
        queries = len(_boxes(folder, ["query"])[1])
        return IdentityProtocol(
            cameras=torch.tensor(cameras), query=torch.arange(len(identities)) < queries
        )
    if (folder / _PAIRS).is_file():
        pairs = read_lfw(folder / _PAIRS)
        return IdentityProtocol(pairs=torch.stack([pairs.left, pairs.right], 1), folds=pairs.folds)
    return IdentityProtocol()


def _holds_boxes(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in PARTITIONS.values())


def _boxes(folder: Path, names: Sequence[str]) -> tuple[list[str], list[int], list[int]]:
    """Return the paths, identities and cameras of boxes that are not junk."""
    paths: list[str] = []
    identities: list[int] = []
    cameras: list[int] = []
    for name in names:
        found = _reader(folder)(folder, name)
        assert isinstance(found.items, Files)
        assert found.cameras is not None
        for row in (~found.junk).nonzero().squeeze(1).tolist():
            paths.append(f"{PARTITIONS[name]}/{found.items.paths[row]}")
            identities.append(int(found.identities[row]))
            cameras.append(int(found.cameras[row]))
    return paths, identities, cameras


def _reader(folder: Path) -> Callable[[Path, str], IdentityExamples]:
    """Return the reader that fits the file names of the queries."""
    with os.scandir(folder / PARTITIONS["query"]) as inside:
        market = any(re.match(r"(-1|\d+)_c\d+s\d+_", entry.name) for entry in inside)
    return read_market1501 if market else read_dukemtmc


def _lfw(folder: Path) -> Entries:
    pairs = read_lfw(folder / _PAIRS)
    assert isinstance(pairs.items, Files)
    assert pairs.identities is not None
    return _entries(folder, pairs.items.paths, pairs.identities)


def _entries(folder: Path, paths: Sequence[str], identities: Sequence[Any]) -> Entries:
    names = sorted(set(identities))
    numbers = {name: number for number, name in enumerate(names)}
    stats = [os.stat(folder / path) for path in paths]
    return Entries(
        items=Files(str(folder), tuple(paths)),
        labels=torch.tensor([numbers[name] for name in identities]),
        names=tuple(map(str, names)),
        stamp=hash_of((str(folder.absolute()), paths, [(s.st_size, s.st_mtime_ns) for s in stats])),
        origin=hash_of((paths, [s.st_size for s in stats])),
    )
