"""Collect ledger entries from the folders of cells."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tammes.kernels.problem import Problem
from tammes.kernels.reference import similarity_matrix
from tammes.lab.fewshot.recipe_cells import FewShotSettings, find_results
from tammes.lab.records.run_folder import Run, number
from tammes.lab.reproduce.ledger import Entry, Ledger
from tammes.lab.reproduce.quantities import read_all, read_intervals
from tammes.lab.reproduce.recipe import ALWAYS, PlannedCell, Recipe
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.model import load_model
from tammes.lab.training.provenance import without_place
from tammes.similarity import Cosine
from tammes.split import split

CELL = "cell.json"
"""File with the result of a cell that trains no network."""
MACHINE = ("device", "torch", "python", "tammes", "commit", "platform")
_BINS = 80
_POINTS = 1000
"""Largest number of points in a scatter plot of one split."""


def collect_entry(
    recipe: Recipe, planned: PlannedCell, folder: Path, ledger: Ledger
) -> Entry | None:
    """Return the entry of a cell, or None if it has not ended; add its machine to the ledger."""
    about = _cell_key(planned)
    if planned.kind == "sphere":
        path = folder / CELL
        if not path.exists():
            return None
        found = json.loads(path.read_bytes())
        return Entry(**about, **_machine_and_command(found.pop("environment", {}), ledger), **found)
    run = Run(folder)
    if run.status == "unfinished":
        return None
    around = run.environment if (folder / "environment.json").exists() else {}
    about |= _machine_and_command(around, ledger)
    if run.status == "failed":
        why = run.failure
        return Entry(
            **about,
            status="diverged" if why.get("kind") == "not finite" else "failed",
            step=int(why.get("step", 0)),
            reason=str(why.get("message", "")),
        )
    final, kept = run.final, {}
    if planned.kind == "fewshot":
        shots = find_results(run, FewShotSettings.from_dict(planned.settings))
        if shots is None:
            # Trained, but the few-shot evaluation is missing or failed.
            if not (folder / "failure.json").exists():
                return None
            return Entry(**about, status="failed", reason=str(run.failure.get("message", "")))
        final = {**final, "fewshot": shots["measures"]}
        halves = {key: _significant(value, 4) for key, value in shots["intervals"].items()}
        kept["fewshot"] = {**shots, "intervals": halves}
        del kept["fewshot"]["measures"]
    if run.config.identities:
        ends = read_intervals(final).items()
        kept["identities"] = {
            "intervals": {key: [_significant(end, 5) for end in pair] for key, pair in ends},
            **_resamples(recipe, run),
        }
    if run.config.whole:
        # The test images were trained on.
        final = {key: value for key, value in final.items() if key != "test"}
    best = final.get("optimum", {})
    return Entry(
        **about,
        status="done",
        values={key: _significant(value, 7) for key, value in read_all(final).items()},
        optimum={key: _significant(v, 7) for key, v in best.items() if isinstance(v, float)},
        epochs=run.config.epochs,
        step=int(final["step"]),
        seconds=round(math.fsum(row["seconds"] for row in run.timing), 1),
        chosen=str(final["chosen"]),
        curves=_curves(run, [*ALWAYS, *recipe.curves]),
        kept=kept | {what: found for what in recipe.keep if (found := _KEEP[what](run))},
    )


def _cell_key(planned: PlannedCell) -> dict[str, Any]:
    """Return the fields that identify an entry."""
    return {name: getattr(planned, name) for name in ("row", "column", "seed", "digest")}


def failed_entry(planned: PlannedCell, reason: str) -> Entry:
    """Return the entry of a cell whose folder cannot be read."""
    return Entry(**_cell_key(planned), status="failed", reason=reason)


def lacks(recipe: Recipe, entry: Entry) -> bool:
    """Return whether an entry lacks curves or extras that the recipe now keeps."""
    # Scatter points are kept for two-dimensional features only.
    kept = {*recipe.keep} - {"scatter"}
    extras = entry.status == "done" and not kept <= {*entry.kept}
    return extras or lacks_curves(recipe, entry)


def lacks_curves(recipe: Recipe, entry: Entry) -> bool:
    """Return whether an entry has curves, but not all that the recipe now keeps."""
    return entry.status == "done" and bool(entry.curves) and not {*recipe.curves} <= {*entry.curves}


def tuning_score(trial: PlannedCell, run: Run) -> dict[str, Any] | None:
    """Return the validation score of a tuning run, or None if it has not ended.

    Returns:
        ``accuracy`` in percent, on held-out training images or in 1-shot episodes of the validation
        classes; or the kind of failure under ``failed``.
    """
    if run.status == "unfinished":
        return None
    if run.status == "done" and trial.kind == "fewshot":
        found = find_results(run, FewShotSettings.from_dict(trial.settings))
        if found is not None:
            return {"accuracy": round(100 * found["measures"]["validation_shot1"], 3)}
        if not (run.folder / "failure.json").exists():
            return None
    elif run.status == "done":
        # The last epoch, as in the tables.
        return {"accuracy": round(100 * run.metrics[-1]["validation"]["accuracy"], 3)}
    return {"failed": run.failure.get("kind", "error")}


def _machine_and_command(around: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    """Return the index of the machine in the ledger, and the command."""
    machine = {key: around[key] for key in MACHINE if key in around}
    number = ledger.machine(machine) if machine else None
    return {"machine": number, "command": without_place(str(around.get("command", "")))}


def _curves(run: Run, paths: Sequence[str]) -> dict[str, list[float | None]]:
    rows = [row for row in run.metrics if "test" in row] or run.metrics
    found: dict[str, list[float | None]] = {"epoch": [row["epoch"] for row in rows]}
    for path in dict.fromkeys(paths):
        if run.config.whole and path.startswith("test."):
            # The test images were trained on.
            continue
        values = (number(row, path.split(".")) for row in rows)
        found[path] = [None if value is None else _significant(value, 5) for value in values]
    return found


def _resamples(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Return the resamples of identities for the quantities of the recipe, if the run has them."""
    if not run.has("resamples"):
        return {}
    drawn = run.tensors("resamples")
    found = {}
    for quantity in recipe.quantities:
        values = drawn.get(quantity.path[-1])
        if values is not None and bool(values.isfinite().all()):
            found[quantity.key] = [_significant(quantity.convert(v), 4) for v in values.tolist()]
    return {"resamples": found}


def _histograms(run: Run) -> dict[str, list[float]]:
    """Return histograms of target cosines, hardest other cosines and margins of the test images."""
    kept, prototypes = run.tensors("embeddings"), run.tensors("prototypes")["prototypes"]
    problem = Problem(kept["features"], prototypes, None, 1.0, Cosine())
    own = split(similarity_matrix(problem), kept["labels"])

    def counts(values: Tensor, low: float, high: float) -> list[float]:
        return torch.histc(values.clamp(low, high), _BINS, low, high).long().tolist()

    return {
        "edges_cosine": _edges(-1.0, 1.0),
        "own": counts(own.target, -1.0, 1.0),
        "hardest": counts(own.hardest, -1.0, 1.0),
        "edges_margin": _edges(-2.0, 2.0),
        "margin": counts(own.target - own.hardest, -2.0, 2.0),
    }


def _edges(low: float, high: float) -> list[float]:
    return [round(low + (high - low) * place / _BINS, 4) for place in range(_BINS + 1)]


def _scatter(run: Run) -> dict[str, Any]:
    """Return points of training and test images and the prototypes, if features are 2-D."""
    kept = run.tensors("embeddings")
    if kept["features"].shape[1] != 2:
        return {}
    training, _, _ = prepare_data(run.config, lambda text: None)
    chosen = _evenly_spaced(len(training))
    pixels = torch.stack([training.read(place) for place in chosen.tolist()])
    with torch.no_grad():
        features = load_model(run).features(pixels).float()
    tested = _evenly_spaced(len(kept["labels"]))
    return {
        "train": _points(features, training.labels[chosen]),
        "test": _points(kept["features"][tested], kept["labels"][tested]),
        "prototypes": _plain(run.tensors("prototypes")["prototypes"]),
    }


def _evenly_spaced(count: int) -> Tensor:
    return torch.linspace(0, count - 1, min(count, _POINTS)).round().long()


def _points(features: Tensor, labels: Tensor) -> dict[str, list[float]]:
    return {"x": _plain(features[:, 0]), "y": _plain(features[:, 1]), "label": labels.tolist()}


def _plain(values: Tensor) -> list[Any]:
    if values.ndim == 1:
        return [_significant(value, 4) for value in values.tolist()]
    return [_plain(row) for row in values]


def _significant(value: float, digits: int) -> float:
    """Round to a number of significant digits."""
    return float(f"{value:.{digits}g}")


def _health(run: Run) -> dict[str, Any]:
    """Return findings, main numbers and time of each health check, and the time of an epoch."""
    kept = ("loss", "accuracy", "prototype_cosine", "feature_cosine")
    looks = [
        {
            "epoch": look["epoch"],
            "findings": [finding["name"] for finding in look["findings"]],
            **{k: _significant(v, 4) for k, v in look["measured"].items() if k in kept},
            "seconds": run.look_seconds.get(str(look["epoch"])),
        }
        for look in run.health
    ]
    epoch = statistics.median(row["seconds"] for row in run.timing)
    return {"looks": looks, "epoch_seconds": _significant(epoch, 4)}


_KEEP = {"health": _health, "histograms": _histograms, "scatter": _scatter}
