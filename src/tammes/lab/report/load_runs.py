"""Load runs for a page: every file is read once, damaged files are reported and skipped."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tammes.lab.records.run_folder import RecordError, Run
from tammes.lab.report.charts.distributions import selection
from tammes.lab.stats.seed_groups import Group, Study, Trouble, study
from tammes.pooling import to_nearest
from tammes.similarity import Cosine, unit
from tammes.split import Split, split

EXAMPLES_SHOWN = 20_000
"""Largest number of examples in histograms."""
_COSINES = 1 << 25
"""Largest number of cosines in memory."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class InspectedRun:
    """Tensors and details of one run of a group; None if its record lacks them.

    Attributes:
        names: names of the classes.
        prototypes: shape ``(C, D)``, or ``(C, K, D)`` with several per class.
        features: features of test examples, a selection if there are many, shape ``(N, D)``.
        cosines: cosines of these examples to the prototypes, split by their labels.
        total: number of test examples.
        counts: number of test examples per class, shape ``(C,)``.
        confused: number of errors by label and prediction.
        images: some of the images, uint8, shape ``(M, channels, height, width)``.
        image_margins: cosine to the true class minus that to the predicted one, for mistakes.
    """

    seed: int
    names: Sequence[str]
    prototypes: Tensor | None = None
    features: Tensor | None = None
    labels: Tensor | None = None
    cosines: Split | None = None
    total: int = 0
    counts: Tensor | None = None
    confused: Mapping[tuple[int, int], int] = field(default_factory=dict)
    images: Tensor | None = None
    image_labels: Sequence[int] = ()
    image_predictions: Sequence[int] = ()
    image_margins: Sequence[float | None] = ()

    @property
    def drawable(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """One prototype of each class, features and labels; None if the run lacks any of them."""
        prototypes, features, labels = self.prototypes, self.features, self.labels
        if self.cosines is None or prototypes is None or features is None or labels is None:
            return None
        return (prototypes, features, labels) if prototypes.ndim == 2 else None

    def name(self, place: int) -> str:
        """Return the name of a class, or its number if it has none."""
        return self.names[place] if place < len(self.names) else str(place)


@dataclass(frozen=True, eq=False)
class LoadedRuns:
    """Everything that a page shows about a set of runs.

    ``metrics`` and ``timing`` have the lines of ``metrics.jsonl`` and ``timing.jsonl`` by folder,
    ``seen`` one finished run of each group by its label.
    """

    study: Study
    metrics: Mapping[Path, Sequence[Mapping[str, Any]]]
    timing: Mapping[Path, Sequence[Mapping[str, Any]]]
    seen: Mapping[str, InspectedRun]
    troubles: Sequence[Trouble]

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups in display order."""
        return self.study.groups

    @property
    def runs(self) -> list[Run]:
        """All runs of the groups, finished or not."""
        return [run for group in self.groups for run in group.every]


def load_runs(runs: Sequence[Run], baseline: str | None = None) -> LoadedRuns:
    """Load everything that a page needs; raises RecordError if no run can be read."""
    grouped = study(runs, baseline)
    if not grouped.groups:
        first = grouped.troubles[0].reason if grouped.troubles else "no run was given"
        raise RecordError(f"there is no run that can be read: {first}")
    troubles = list(grouped.troubles)
    metrics, timing, seen = {}, {}, {}
    for group in grouped.groups:
        for run in group.every:
            read = partial(_read, group, run, troubles)
            metrics[run.folder] = read(lambda run: _rows(run, "metrics")) or []
            timing[run.folder] = read(lambda run: _rows(run, "timing")) or []
    for group, seed in representative_seeds(grouped.groups).items():
        seen[group.label] = _inspect(group, seed, troubles)
    return LoadedRuns(grouped, metrics, timing, seen, troubles)


def representative_seeds(groups: Sequence[Group]) -> dict[Group, int]:
    """Return the seed shown in detail for each group: the first one that most groups have."""
    seeds = [seed for group in groups for seed in group.runs]
    order = sorted(set(seeds), key=lambda seed: (-seeds.count(seed), seed))
    return {
        group: next(seed for seed in order if seed in group.runs) for group in groups if group.runs
    }


def _read(group: Group, run: Run, troubles: list[Trouble], piece: Callable[[Run], T]) -> T | None:
    """Read part of a record; an error is not raised but added to ``troubles``, once."""
    try:
        return piece(run)
    except RecordError as error:
        reason = str(error)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError) as error:  # fmt: skip
        reason = f"{run.folder}: damaged ({type(error).__name__}: {error})"
    if not any(each.run is run and each.reason == reason for each in troubles):
        troubles.append(Trouble(run, group.label, run.config.seed, "damaged", reason))
    return None


def _rows(run: Run, name: str) -> list[dict[str, Any]]:
    rows = getattr(run, name)
    for place, row in enumerate(rows, 1):
        epoch = row.get("epoch") if isinstance(row, dict) else None
        if not isinstance(epoch, int) or isinstance(epoch, bool):
            path = run.folder / f"{name}.jsonl"
            raise RecordError(f"{path}: damaged (line {place} has no epoch)")
    return list(rows)


def _inspect(group: Group, seed: int, troubles: list[Trouble]) -> InspectedRun:
    run = group.runs[seed]
    read = partial(_read, group, run, troubles)
    prototypes = read(_prototypes)
    names = read(lambda run: _names(run, prototypes)) or []
    values: dict[str, Any] = {"prototypes": prototypes}
    if run.has("embeddings") and not run.config.identities:
        values |= read(lambda run: _embeddings(run, prototypes)) or {}
    known = values.pop("margins", {})
    if run.has("examples"):
        values |= read(lambda run: _images(run, known)) or {}
    return InspectedRun(seed, names, **values)


def _names(run: Run, prototypes: Tensor | None) -> list[str]:
    names = run.data.get("classes")
    if not isinstance(names, list) or (prototypes is not None and len(names) != len(prototypes)):
        raise RecordError(f"{run.folder / 'data.json'}: damaged (no name for every class)")
    return [str(name) for name in names]


def _tensors(run: Run, name: str, *keys: str, optional: str = "") -> list[Tensor]:
    """Return tensors of a file, ending with the ``optional`` one if the file has it."""
    found = run.tensors(name)
    keys += (optional,) * (optional in found)
    for key in keys:
        if key not in found:
            path = run.folder / f"{name}.safetensors"
            raise RecordError(f"{path}: damaged (it has no {key})")
    return [found[key] for key in keys]


def _check(run: Run, name: str, right: bool, what: str) -> None:
    if not right:
        raise RecordError(f"{run.folder / name}.safetensors: damaged ({what})")


def _prototypes(run: Run) -> Tensor | None:
    if not run.has("prototypes"):
        return None
    (prototypes,) = _tensors(run, "prototypes", "prototypes")
    right = prototypes.ndim in (2, 3) and len(prototypes) > 1
    _check(run, "prototypes", right, f"prototypes of shape {tuple(prototypes.shape)}")
    _check(run, "prototypes", bool(prototypes.isfinite().all()), "numbers that are not finite")
    return prototypes.float()


def _embeddings(run: Run, prototypes: Tensor | None) -> dict[str, Any]:
    features, labels, predictions, *index = _tensors(
        run, "embeddings", "features", "labels", "predictions", optional="index"
    )
    right = features.ndim == 2 and labels.shape == predictions.shape == features.shape[:1]
    _check(run, "embeddings", right, "features, labels and predictions do not belong together")
    labels, predictions = labels.long(), predictions.long()
    both = torch.cat([labels, predictions])
    classes = 1 + max(both.tolist(), default=0) if prototypes is None else len(prototypes)
    right = not len(both) or (int(both.min()) >= 0 and int(both.max()) < classes)
    _check(run, "embeddings", right, f"labels outside of 0 to {classes - 1}")
    wrong = labels != predictions
    pairs, counts = torch.stack([labels[wrong], predictions[wrong]], 1).unique(
        dim=0, return_counts=True
    )
    values = {
        "total": len(labels),
        "counts": torch.bincount(labels, minlength=classes),
        "confused": {(i, j): n for (i, j), n in zip(pairs.tolist(), counts.tolist(), strict=True)},
    }
    if index and prototypes is not None and features.shape[1] == prototypes.shape[-1]:
        values["margins"] = _margins_of_mistakes(
            features, labels, predictions, prototypes, index[0]
        )
    chosen = selection(len(labels), max(1, min(EXAMPLES_SHOWN, _COSINES // classes)))
    features, labels = features[chosen].float(), labels[chosen]
    finite = bool(features.isfinite().all())
    _check(run, "embeddings", finite, "numbers that are not finite")
    values |= {"features": features, "labels": labels}
    if prototypes is not None and len(labels) and features.shape[1] == prototypes.shape[-1]:
        similarity = to_nearest(Cosine(), prototypes)
        cosines = similarity.products(unit(features), unit(prototypes))
        values["cosines"] = split(cosines, labels)
    return values


def _margins_of_mistakes(
    features: Tensor, labels: Tensor, predictions: Tensor, prototypes: Tensor, index: Tensor
) -> dict[int, float]:
    """Return the cosine to the true minus that to the predicted class, by index of the mistake."""
    wrong = (labels != predictions).nonzero().flatten()
    similarity, rows = to_nearest(Cosine(), prototypes), features[wrong].float()
    own, predicted = (
        similarity.target(rows, prototypes[classes[wrong]]) for classes in (labels, predictions)
    )
    margins = own - predicted
    return dict(zip(index[wrong].tolist(), margins.tolist(), strict=True))


def _images(run: Run, margins: Mapping[int, float]) -> dict[str, Any]:
    """Return images, with the margins of those whose index has one."""
    images, labels, predictions, *index = _tensors(
        run, "examples", "images", "labels", "predictions", optional="index"
    )
    right = images.ndim == 4 and images.dtype == torch.uint8 and images.shape[1] in (1, 3)
    right = right and labels.shape == predictions.shape == images.shape[:1]
    _check(run, "examples", right, "images, labels and predictions do not belong together")
    return {
        "images": images,
        "image_labels": labels.tolist(),
        "image_predictions": predictions.tolist(),
        "image_margins": [margins.get(each) for each in index[0].tolist()] if index else [],
    }
