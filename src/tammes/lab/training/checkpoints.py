"""Checkpoints of a run: written atomically, verified when read; the previous one is kept.

The file name holds the step and a checksum of the content, so a truncated or altered file is
detected without a second file. ``torch.load(path)`` reads it.
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
from tammes.lab.records.atomic_io import clear_leftovers, write_atomically

_NAME = re.compile(r"(last|best)-(\d{9})-([0-9a-f]{16})\.pt")
KEPT = 2
"""Number of checkpoints kept to resume from: the last, and the one before in case of damage."""


class Checkpoints:
    """The checkpoints of one run; ``report`` is called with a message about a damaged one."""

    def __init__(self, folder: Path, report: Callable[[str], None] = print) -> None:
        self.folder, self.report = folder, report

    def save(self, kind: str, step: int, state: dict[str, Any]) -> None:
        """Save the state after ``step`` steps: ``"last"``, to resume from, or ``"best"``.

        Of the former only the newest two are kept; :meth:`keep_best` prunes the latter.
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
        """Load the newest intact state, or None; a damaged file is reported and renamed."""
        clear_leftovers(self.folder)
        for path in self._saved("last"):
            state = _read(path)
            if state is not None:
                return state
            self.report(
                f"{path}: this checkpoint is damaged (its checksum does not match); "
                "resuming from the previous one"
            )
            path.rename(path.with_suffix(".damaged"))
        return None

    def load_best(self, step: int) -> dict[str, Any] | None:
        """Load the best state, saved at ``step``; None if it is missing or damaged."""
        for path in self._saved("best"):
            state = _read(path) if _step(path) == step else None
            if state is not None:
                return state
        return None

    def keep_best(self, step: int | None) -> None:
        """Delete all best states but the one saved at ``step``."""
        for path in self._saved("best"):
            if _step(path) != step:
                path.unlink()

    def _saved(self, kind: str) -> list[Path]:
        """Return the files of a kind, newest first."""
        paths = [path for path in self.folder.glob(f"{kind}-*.pt") if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (_step(path), path.stat().st_mtime_ns), reverse=True)


class ShardedCheckpoints:
    """The checkpoints of a run with a sharded head.

    Each is a folder, see :mod:`tammes.checkpoint`. All processes save and load together; their
    number may change between saving and loading.
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
    def _is_main(self) -> bool:
        """Whether this process deletes and renames folders."""
        return RankGroup().rank == 0

    def save(self, kind: str, step: int, state: dict[str, Any]) -> None:
        """Save like :meth:`Checkpoints.save`; criterion and optimizer are read directly."""
        beside = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
        model = {k: v for k, v in state["model"].items() if not k.startswith("criterion.")}
        optimizer = self.optimizer if "optimizer" in state else None
        path = self.folder / f"{kind}-{step:09d}"
        checkpoint.save(path, self.criterion, optimizer, beside=beside, model=model)
        if kind == "last" and self._is_main:
            for path in self._saved("last")[KEPT:]:
                shutil.rmtree(path)

    def load_last(self) -> dict[str, Any] | None:
        """Load the newest intact state, or None; criterion and optimizer are restored in place."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for path in self._saved("last"):
            try:
                loaded = checkpoint.load(path, self.criterion, self.optimizer)
            except checkpoint.CheckpointError as error:
                if _intact(path):
                    # An intact checkpoint of another run: keep it.
                    raise
                self.report(f"{error}; resuming from the previous one")
                if self._is_main:
                    path.rename(path.with_suffix(".damaged"))
                continue
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            return {**loaded["beside"], **self._model_state(loaded), "optimizer": None}
        return None

    def load_best(self, step: int) -> dict[str, Any] | None:
        """Load like :meth:`Checkpoints.load_best`."""
        path = self.folder / f"best-{step:09d}"
        try:
            return self._model_state(checkpoint.load(path, self.criterion))
        except checkpoint.CheckpointError:
            return None

    def keep_best(self, step: int | None) -> None:
        """Delete all best states but the one saved at ``step``."""
        for path in self._saved("best") if self._is_main else []:
            if path.name != f"best-{step or 0:09d}":
                shutil.rmtree(path)

    def _model_state(self, loaded: dict[str, Any]) -> dict[str, Any]:
        own = {f"criterion.{name}": value for name, value in self.criterion.state_dict().items()}
        return {"model": {**loaded["model"], **own}}

    def _saved(self, kind: str) -> list[Path]:
        """Return the complete folders of a kind, newest first."""
        manifests = self.folder.glob(f"{kind}-{'[0-9]' * 9}/index.json")
        return sorted((path.parent for path in manifests), reverse=True)


def _intact(folder: Path) -> bool:
    """Whether all parts of a checkpoint are present and unchanged."""
    try:
        check_parts(folder, read(folder))
    except checkpoint.CheckpointError:
        return False
    return True


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[2])


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    """Read the state of a file, or None if its checksum does not match."""
    match = _NAME.fullmatch(path.name)
    data = path.read_bytes()
    if match is None or _checksum(data) != match[3]:
        return None
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # The checksum matches, so the file is not damaged, but we never write such content.
        raise ValueError(
            f"{path}: checkpoint rejected, it holds more than tensors, numbers and strings "
            f"({type(error).__name__})"
        ) from error
    return state
