"""Checkpoints that survive: written in one step, checked when read, the one before kept.

The name of a file holds the step and a checksum of its content, so a file that was cut off or
altered is noticed, and nothing has to be written beside it. ``torch.load(path)`` reads it.
"""

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tammes.lab.atomic import clear_leftovers, write_atomically

_NAME = re.compile(r"(last|best)-(\d{9})-([0-9a-f]{16})\.pt")
KEPT = 2
"""Checkpoints to go on from that are kept: the last, and one in case it is damaged."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when the first is saved.
        report: is told of damage in a sentence.
    """

    def __init__(self, folder: Path, report: Callable[[str], None] = print) -> None:
        self.folder, self.report = folder, report

    def save(self, kind: str, step: int, state: dict[str, Any]) -> None:
        """Save a state; the older ones go only after it is there.

        Args:
            kind: ``"last"``, of which two are kept, or ``"best"``.
            step: how many steps of training it has behind it.
            state: tensors, numbers, texts, and lists and dictionaries of them.
        """
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        name = f"{kind}-{step:09d}-{_checksum(data)}.pt"
        write_atomically(self.folder / name, data)
        if kind == "last":
            for path in self._saved("last")[KEPT:]:
                path.unlink()

    def load_last(self) -> dict[str, Any] | None:
        """The newest state that is intact, or none; a damaged one is reported and put aside."""
        clear_leftovers(self.folder)
        for path in self._saved("last"):
            state = _read(path)
            if state is not None:
                return state
            self.report(
                f"{path}: this checkpoint is damaged (its checksum does not match); "
                "going on from the one before it"
            )
            path.rename(path.with_suffix(".damaged"))
        return None

    def load_best(self, step: int) -> dict[str, Any] | None:
        """The best state, saved at a step; none where it is missing or damaged."""
        for path in self._saved("best"):
            state = _read(path) if _step(path) == step else None
            if state is not None:
                return state
        return None

    def keep_best(self, step: int | None) -> None:
        """Drop all best states but the one saved at a step."""
        for path in self._saved("best"):
            if _step(path) != step:
                path.unlink()

    def _saved(self, kind: str) -> list[Path]:
        """Files of a kind, the newest first."""
        paths = [path for path in self.folder.glob(f"{kind}-*.pt") if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (_step(path), path.stat().st_mtime_ns), reverse=True)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[2])


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    """The state in a file, or none where the file is not what was written."""
    match = _NAME.fullmatch(path.name)
    data = path.read_bytes()
    if match is None or _checksum(data) != match[3]:
        return None
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # Nobody's accident: it is what was written, and we write nothing of the kind.
        raise ValueError(
            f"{path}: this checkpoint is refused, it holds more than tensors, numbers and texts "
            f"({type(error).__name__})"
        ) from error
    return state
