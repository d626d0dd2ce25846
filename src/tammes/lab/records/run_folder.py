"""A run as a folder of plain files: what was asked, what happened, what came out.

======================  ==========================================================================
``config.json``         the configuration as it was given
``data.json``           names and counts of the classes, size of the images, mean and deviation
``environment.json``    versions, commit, machine, command, and what ``auto`` became
``metrics.jsonl``       a line for each epoch; the same for the same configuration on the same
                        machine, however often the run was interrupted
``timing.jsonl``        a line for each epoch: seconds and images per second
``subset.safetensors``  which training examples were used, with which labels
``final.json``          measures of the finished model; only a finished run has it
``failure.json``        why a run stopped, if it did
``prototypes.safetensors``, ``embeddings.safetensors``, ``examples.safetensors``
                        prototypes, features of the test images, and some of the images
``model.safetensors``   backbone and criterion
``fewshot*``            features and accuracies of few-shot episodes, where they were asked for
``checkpoints/``        to go on from; see :mod:`.training.checkpoint`
======================  ==========================================================================

Every file is written in one step. Checkpoints are read with ``weights_only``; no other file could
hold code at all.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
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
    """A folder is not a run, or a file of it is damaged; the message is one sentence."""


@dataclass(frozen=True)
class Run:
    """A run that is read from its folder; its files are read when they are asked for.

    Attributes:
        folder: where it is.
    """

    folder: Path

    @cached_property
    def config(self) -> Config:
        """The configuration it was run with."""
        values = self._json("config.json")
        try:
            return Config.from_dict(values)
        except (ValueError, TypeError) as error:
            raise RecordError(f"{self.folder / 'config.json'}: {error}") from error

    @property
    def status(self) -> Status:
        """Whether it finished, stopped with a reason, or is still to go on."""
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
        """Measures of the finished model: on ``test`` and ``validation``, of ``prototypes``..."""
        return self._json("final.json")

    @cached_property
    def failure(self) -> dict[str, Any]:
        """Why it stopped: ``kind``, ``message``, and what else is known."""
        return self._json("failure.json")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One entry for each epoch; empty before the first."""
        return self._lines("metrics.jsonl")

    @cached_property
    def timing(self) -> list[dict[str, Any]]:
        """Seconds and images per second of each epoch, as far as they were measured."""
        return self._lines("timing.jsonl")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of one of its safetensors files: ``prototypes``, ``embeddings``, ``examples``...

        Args:
            name: of the file, without its suffix.
        """
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
        """Whether there is a safetensors file of that name."""
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


def find(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Runs in folders, and in folders of runs, sorted by path.

    Args:
        paths: each a run, or a folder with runs somewhere below.

    Raises:
        RecordError: where a path is missing or has no run.
    """
    found: dict[Path, Run] = {}
    for given in paths:
        path = Path(given)
        if not path.exists():
            raise RecordError(f"{path}: there is no such folder")
        configs = sorted(path.rglob("config.json"))
        if not configs:
            raise RecordError(f"{path}: there is no run in it")
        found.update({config.parent: Run(config.parent) for config in configs})
    return [found[path] for path in sorted(found)]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object; a number that is not finite is an error of ours."""
    try:
        data = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        # The name of a folder need not be text in any encoding.
        data = json.dumps(value, indent=2, allow_nan=False).encode()
    write_atomically(path, data + b"\n")


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one object a line, all of them in one step."""
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    write_atomically(path, "".join(lines).encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors."""
    safetensors = require("safetensors.torch", extra="lab")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, safetensors.save(plain))


def same_run(run: Run, config: Config) -> bool:
    """Whether the folder holds a run of this configuration; an error if it holds another."""
    if not (run.folder / "config.json").exists():
        return False
    theirs, ours = run.config.identity(), config.identity()
    for key, value in ours.items():
        if theirs[key] != value:
            raise RecordError(
                f"{run.folder}: holds a run with {key} {theirs[key]!r}, got {value!r}; "
                "give this one a folder of its own"
            )
    return True


def same_data(run: Run, described: dict[str, Any]) -> None:
    """Refuse to go on with other images than a run was begun with."""
    if not (run.folder / "data.json").exists():
        return
    for key in ("digest", "test_digest"):
        if run.data.get(key) != described[key]:
            raise RecordError(
                f"{run.folder}: was begun with other images of {described['source']} than are "
                "there now; give this run a folder of its own"
            )


def number(row: Any, path: Sequence[str]) -> float | None:
    """A number within nested objects; None where it is not there or not finite."""
    for part in path:
        row = row.get(part) if isinstance(row, Mapping) else None
    if isinstance(row, bool) or not isinstance(row, int | float) or not math.isfinite(row):
        return None
    return float(row)
