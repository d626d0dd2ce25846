"""A run as a folder of plain files: configuration, metrics and results.

======================  ==========================================================================
``config.json``         the configuration as it was given
``data.json``           class names and counts, size of the images, mean and standard deviation
``environment.json``    versions, commit, machine, command, and what ``auto`` resolved to
``metrics.jsonl``       a line for each epoch; the same for the same configuration on the same
                        machine, however often the run was interrupted
``timing.jsonl``        a line for each epoch: seconds and images per second
``health.json``         findings of the looks during training, see :mod:`tammes.doctor`
``look_seconds.json``   seconds that each look took, by its epoch
``subset.safetensors``  indices and labels of the training examples
``final.json``          metrics of the finished model; only a finished run has it
``failure.json``        reason for a failure
``prototypes.safetensors``, ``embeddings.safetensors``, ``examples.safetensors``
                        prototypes, features of the test images, and some of the images
``resamples.safetensors``
                        metrics of each resample of the test identities, if there are any
``model.safetensors``   backbone and criterion
``fewshot*``            features and accuracies of few-shot episodes, if evaluated
``checkpoints/``        checkpoints to resume from; see :mod:`tammes.lab.training.checkpoints`
======================  ==========================================================================

Every file is written atomically. Checkpoints are read with ``weights_only``; no other file can hold
code.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from tammes.lab.config.schema import Config
from tammes.lab.records.atomic_io import write_atomically
from tammes.optional import require

Status = Literal["done", "failed", "unfinished"]


class RecordError(ValueError):
    """A folder is not a run, or one of its files is damaged; the message is one sentence."""


@dataclass(frozen=True)
class Run:
    """A run, read lazily from its folder."""

    folder: Path

    @cached_property
    def config(self) -> Config:
        """The configuration of the run."""
        values = self._json("config.json")
        try:
            return Config.from_dict(values)
        except (ValueError, TypeError) as error:
            raise RecordError(f"{self.folder / 'config.json'}: {error}") from error

    @property
    def status(self) -> Status:
        """Whether the run is done, failed, or unfinished."""
        if (self.folder / "final.json").exists():
            return "done"
        return "failed" if (self.folder / "failure.json").exists() else "unfinished"

    @cached_property
    def data(self) -> dict[str, Any]:
        """``classes`` (names), ``counts`` (training examples of each), ``image`` (C, H, W)..."""
        return self._json("data.json")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, commit, machine, command."""
        return self._json("environment.json")

    @cached_property
    def final(self) -> dict[str, Any]:
        """Metrics of the finished model: on ``test`` and ``validation``, of ``prototypes``..."""
        return self._json("final.json")

    @cached_property
    def failure(self) -> dict[str, Any]:
        """Reason for a failure: ``kind``, ``message`` and details."""
        return self._json("failure.json")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each epoch; empty before the first."""
        return self._lines("metrics.jsonl")

    @cached_property
    def timing(self) -> list[dict[str, Any]]:
        """Seconds and images per second of each epoch, as far as measured."""
        return self._lines("timing.jsonl")

    @cached_property
    def health(self) -> list[dict[str, Any]]:
        """Looks during training: ``epoch``, ``step``, ``findings``, ``measured``; may be empty."""
        known = self.folder / "health.json"
        looks = self._json("health.json").get("looks", []) if known.exists() else []
        if not isinstance(looks, list):
            raise RecordError(f"{self.folder / 'health.json'}: damaged (a list is expected)")
        return looks

    @property
    def look_seconds(self) -> dict[str, float]:
        """Duration of each look in seconds, by epoch; empty for runs of earlier versions."""
        known = self.folder / "look_seconds.json"
        return self._json("look_seconds.json") if known.exists() else {}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Load a safetensors file by its name: ``prototypes``, ``embeddings``, ``examples``..."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            raise RecordError(f"{self.folder}: the run has no {path.name}")
        safetensors = require("safetensors.torch", extra="lab")
        try:
            loaded: dict[str, Tensor] = safetensors.load_file(path)
        except Exception as error:
            raise RecordError(f"{path}: damaged ({type(error).__name__})") from error
        return loaded

    def has(self, name: str) -> bool:
        """Whether the run has a safetensors file of that name."""
        return (self.folder / f"{name}.safetensors").exists()

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            value = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise RecordError(f"{self.folder}: not a run, it has no {name}") from None
        except ValueError as error:
            raise RecordError(f"{path}: damaged ({error})") from error
        if not isinstance(value, dict):
            raise RecordError(f"{path}: damaged (an object is expected)")
        return value

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.exists():
            return []
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise RecordError(f"{path}: damaged ({error})") from error


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Find runs in run folders, or anywhere below folders, sorted by path.

    Raises:
        RecordError: a path is missing or has no run.
    """
    runs: dict[Path, Run] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise RecordError(f"{path}: there is no such folder")
        configs = sorted(path.rglob("config.json"))
        if path.suffix == ".html" and len(paths) > 1:
            # A page beside the runs, which a pattern such as runs/* matches too.
            continue
        if not configs:
            raise RecordError(f"{path}: there is no run in it")
        runs.update({config.parent: Run(config.parent) for config in configs})
    if paths and not runs:
        raise RecordError(f"{', '.join(map(str, paths))}: there is no run in it")
    return [runs[path] for path in sorted(runs)]


def read_each(runs: Iterable[Run], name: str) -> Iterator[tuple[Run, Any]]:
    """Yield each run with the content of a file, such as ``data``, unless missing or damaged."""
    for run in runs:
        try:
            content = getattr(run, name)
        except RecordError:
            continue
        yield run, content


def finished_run(folder: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, which must have a trained model.

    Raises:
        RecordError: the folder is not a run, or the run is unfinished or failed.
    """
    run = Run(Path(folder))
    if not run.has("model"):
        # Reading the configuration first gives a clearer error for a folder that is not a run.
        status = run.config and run.status
        raise RecordError(f"{run.folder}: the run has no model.safetensors, it is {status}")
    return run


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON; a non-finite number raises ValueError."""
    try:
        data = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        # A folder name may not be valid UTF-8.
        data = json.dumps(value, indent=2, allow_nan=False).encode()
    write_atomically(path, data + b"\n")


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, atomically."""
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    write_atomically(path, "".join(lines).encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors."""
    safetensors = require("safetensors.torch", extra="lab")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, safetensors.save(plain))


def holds_run(run: Run, config: Config) -> bool:
    """Whether the folder holds a run of this configuration; raises if it holds another."""
    if not (run.folder / "config.json").exists():
        return False
    theirs, ours = run.config.identity(), config.identity()
    for key, value in ours.items():
        if theirs[key] != value:
            raise RecordError(
                f"{run.folder}: holds a run with {key} {theirs[key]!r}, got {value!r}; "
                "choose another folder"
            )
    return True


def check_same_data(run: Run, described: dict[str, Any]) -> None:
    """Reject resuming a run with different images."""
    if not (run.folder / "data.json").exists():
        return
    for key in ("digest", "test_digest"):
        if run.data.get(key) != described[key]:
            raise RecordError(
                f"{run.folder}: the images of {described['source']} have changed since this run "
                "started; choose another folder"
            )


def number(row: Any, path: Sequence[str]) -> float | None:
    """Return the number at a path in nested objects; None if it is missing or not finite."""
    for part in path:
        row = row.get(part) if isinstance(row, Mapping) else None
    if isinstance(row, bool) or not isinstance(row, int | float) or not math.isfinite(row):
        return None
    return float(row)
