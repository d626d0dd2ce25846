"""Checkpoints that survive: written in one step, checked when read, the one before kept.

The name of a file holds the step and a checksum of its content, so a file that was cut off or
altered is noticed, and nothing has to be written beside it. ``torch.load(path)`` reads it.
"""

import hashlib
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tammes import checkpoint
from tammes.checkpoint.manifest import check_parts, read
from tammes.criterion.criterion import Criterion
from tammes.distributed.process_group import RankGroup
from tammes.lab.config.schema import Config
from tammes.lab.records.atomic_io import clear_leftovers, write_atomically
from tammes.lab.training.model import Model

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


class SharedCheckpoints:
    """The checkpoints of a run whose head is spread over processes.

    Each is a folder, see :mod:`tammes.checkpoint`. All processes save and load together, and it is
    of no matter how many there are.

    Args:
        folder: where they are; made when the first is saved.
        criterion: of the run.
        optimizer: of the run.
        report: is told of damage in a sentence.
    """

    def __init__(
        self,
        folder: Path,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        report: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.report = folder, report
        self.criterion, self.optimizer = criterion, optimizer

    @property
    def _first(self) -> bool:
        """Whether this is the process that takes folders away."""
        return RankGroup().rank == 0

    def save(self, kind: str, step: int, state: dict[str, Any]) -> None:
        """See :meth:`Checkpoints.save`; criterion and optimizer are saved as they are."""
        beside = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
        optimizer = self.optimizer if "optimizer" in state else None
        where = self.folder / f"{kind}-{step:09d}"
        checkpoint.save(where, self.criterion, optimizer, beside=beside, model=_others(state))
        if kind == "last" and self._first:
            for path in self._saved("last")[KEPT:]:
                shutil.rmtree(path)

    def load_last(self) -> dict[str, Any] | None:
        """The newest state that is intact, or none; criterion and optimizer have theirs already."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for path in self._saved("last"):
            try:
                more = checkpoint.load(path, self.criterion, self.optimizer)
            except checkpoint.CheckpointError as error:
                if _intact(path):
                    # Of something else than this run: no reason to lose it.
                    raise
                self.report(f"{error}; going on from the one before it")
                if self._first:
                    path.rename(path.with_suffix(".damaged"))
                continue
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            return {**more["beside"], **self._together(more), "optimizer": None}
        return None

    def load_best(self, step: int) -> dict[str, Any] | None:
        """See :meth:`Checkpoints.load_best`."""
        path = self.folder / f"best-{step:09d}"
        try:
            return self._together(checkpoint.load(path, self.criterion))
        except checkpoint.CheckpointError:
            return None

    def keep_best(self, step: int | None) -> None:
        """Drop all best states but the one saved at a step."""
        for path in self._saved("best") if self._first else []:
            if path.name != f"best-{step or 0:09d}":
                shutil.rmtree(path)

    def _together(self, more: dict[str, Any]) -> dict[str, Any]:
        own = {f"criterion.{name}": value for name, value in self.criterion.state_dict().items()}
        return {"model": {**more["model"], **own}}

    def _saved(self, kind: str) -> list[Path]:
        """Folders of a kind that were finished, the newest first."""
        found = self.folder.glob(f"{kind}-{'[0-9]' * 9}/index.json")
        return sorted((path.parent for path in found), reverse=True)


def _intact(folder: Path) -> bool:
    """Whether all parts of a checkpoint are there, as they were written."""
    try:
        check_parts(folder, read(folder))
    except checkpoint.CheckpointError:
        return False
    return True


def make_checkpoints(
    folder: Path,
    config: Config,
    model: Model,
    optimizer: torch.optim.Optimizer,
    report: Callable[[str], None],
) -> Checkpoints | SharedCheckpoints:
    """The checkpoints of a run, as its head asks for them."""
    if config.shard:
        return SharedCheckpoints(folder, model.criterion, optimizer, report)
    return Checkpoints(folder, report)


def _others(state: dict[str, Any]) -> dict[str, Any]:
    """What a model has beside its criterion."""
    return {name: v for name, v in state["model"].items() if not name.startswith("criterion.")}


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
