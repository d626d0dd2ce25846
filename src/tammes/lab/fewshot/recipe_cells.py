"""Recipe cells of the kind ``fewshot``: train on base classes, then evaluate few-shot episodes.

Results are kept in ``fewshot.json`` in the run folder, by the digest of the settings: one run may
be evaluated in several ways, such as with several margins in fine-tuning.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch

from tammes.lab.config.schema import Config, digest_of
from tammes.lab.config.typecheck import at_least, construct, not_empty
from tammes.lab.data import DataError
from tammes.lab.fewshot import class_lists, protocol
from tammes.lab.fewshot.features import check_disjoint, check_way, from_run, on_device
from tammes.lab.fewshot.margin_analysis import analyse
from tammes.lab.fewshot.protocol import LabelledFeatures
from tammes.lab.measure.classification import classifies
from tammes.lab.records.run_folder import Run, write_json
from tammes.lab.training.datasets import classes_of
from tammes.lab.training.model import load_model

FILE = "fewshot.json"
Part = Literal["novel", "validation", "base"]
_PREFIX: dict[str, str] = {"novel": "", "validation": "validation_", "base": "base_"}
"""Prefixes of the quantity names, by part of the class split."""
_QUICK = {"episodes": 20, "queries": 5}


@dataclass(frozen=True, kw_only=True)
class FewShotSettings:
    """Settings of a cell of the kind ``fewshot``.

    Args:
        split: class split such as ``cifar-fs``; the images are those of the run's data.
        way: classes per episode.
        shots: labelled images per class, one or several numbers.
        queries: images to recognise per class.
        episodes: number of episodes.
        method: such as ``l2``; the table shows the first of several, the ledger keeps all.
        parts: classes to recognise: ``novel``, ``validation``, and ``base`` for held-out images of
            the base classes.
        analyse: whether to measure distances on base and novel classes, and P^s.
        seed: seed of the episodes.
        images: largest number of images per class; 0 for all.
    """

    split: Annotated[str, not_empty]
    way: Annotated[int, at_least(2)] = 5
    shots: Annotated[tuple[Annotated[int, at_least(1)], ...], not_empty] = (1, 5)
    queries: Annotated[int, at_least(1)] = 15
    episodes: Annotated[int, at_least(1)] = 10_000
    method: str = "l2"
    parts: Annotated[tuple[Part, ...], not_empty] = ("novel", "validation")
    analyse: bool = False
    seed: Annotated[int, at_least(0)] = 0
    images: Annotated[int, at_least(0)] = 0

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "FewShotSettings":
        """Build checked settings from plain values.

        Example:
            >>> FewShotSettings.from_dict({"split": "cub", "shots": [1], "queries": 16}).shots
            (1,)
        """
        found = construct(cls, settings, "fewshot")
        protocol.methods(found.method)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values."""
        return {**asdict(self), "shots": [*self.shots], "parts": [*self.parts]}

    @property
    def digest(self) -> str:
        """Digest of the settings."""
        return digest_of(self.to_dict())

    def quick(self) -> "FewShotSettings":
        """Return settings for a smoke test, with few episodes and few images."""
        less = {key: min(value, getattr(self, key)) for key, value in _QUICK.items()}
        return replace(self, **less, images=max(self.shots) + less["queries"])

    def check(self, config: Config, *, tried: bool = False) -> None:
        """Reject a run that these settings cannot evaluate or, if ``tried``, cannot tune."""
        if tried and ("validation" not in self.parts or 1 not in self.shots):
            raise ValueError(
                "fewshot expects the part validation and 1 among its shots where something is "
                f"tuned, got {', '.join(self.parts)} and {[*self.shots]}"
            )
        if config.whole and ("base" in self.parts or self.analyse):
            raise ValueError(
                "fewshot expects images held out of training for its part base and to analyse, "
                "got a run with whole"
            )
        try:
            lists = class_lists.read(self.split)
            trained = classes_of(config.classes) if config.classes else ()
        except DataError:
            # The lists may exist only on the machine that runs the cells, which checks again.
            return
        for part in self.parts:
            check_way(self.way, lists, part)
            if part != "base":
                check_disjoint(config.classes, trained, lists.part(part))


def evaluate_run(
    run: Run, several: Sequence[FewShotSettings], report: Callable[[str], None]
) -> None:
    """Evaluate the model of a finished run with each of the settings that has no results yet."""
    for shots in several:
        if find_results(run, shots) is None:
            found = _evaluate(run, shots, report)
            write_json(run.folder / FILE, {**_read_results(run), shots.digest: found})


def find_results(run: Run, shots: FewShotSettings) -> dict[str, Any] | None:
    """Return the results with these settings, or None if there are none yet.

    Returns:
        ``measures`` by quantity (shares, not percent), ``intervals`` (half widths of the 95 %
        intervals over episodes, in percent) and ``rows`` of all methods by part.
    """
    found: dict[str, Any] | None = _read_results(run).get(shots.digest)
    if found is None:
        return None
    # The user may have changed their own list under the same name.
    before, now = found.get("classes"), _classes_digest(shots)
    return None if before and now and before != now else found


def _classes_digest(shots: FewShotSettings) -> str:
    """Return a digest of the class names, or an empty string if the lists are not available."""
    try:
        lists = class_lists.read(shots.split)
    except DataError:
        return ""
    return digest_of([lists.base, lists.validation, lists.novel])


def _read_results(run: Run) -> dict[str, Any]:
    """Read the results by digest; a missing or damaged file counts as empty."""
    try:
        kept = json.loads((run.folder / FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _evaluate(run: Run, shots: FewShotSettings, report: Callable[[str], None]) -> dict[str, Any]:
    measures: dict[str, float] = {}
    intervals: dict[str, float] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    first = next(iter(protocol.methods(shots.method)))
    names = ("way", "shots", "queries", "episodes", "method", "seed")
    settings: dict[str, Any] = {name: getattr(shots, name) for name in names}
    for part in shots.parts:
        found = protocol.evaluate(_examples(run, shots, part, report), **settings)
        rows[part] = [row.as_dict() for row in found]
        for row in (each for each in found if each.method == first):
            key = f"{_PREFIX[part]}shot{row.shot}"
            measures[key] = row.accuracy.mean
            if math.isfinite(row.accuracy.half):
                intervals[key] = 100 * row.accuracy.half
    if not run.config.whole:
        measures["base_accuracy"] = run.final["test"]["accuracy"]
    if shots.analyse:
        # Some are not finite for a collapsed model, whose accuracies are still kept.
        found_too = _margin_analysis(run, shots, report).items()
        measures |= {name: value for name, value in found_too if math.isfinite(value)}
    return {
        "settings": shots.to_dict(),
        "classes": _classes_digest(shots),
        "measures": measures,
        "intervals": intervals,
        "rows": rows,
    }


def _examples(
    run: Run, shots: FewShotSettings, part: str, report: Callable[[str], None]
) -> LabelledFeatures:
    """Compute the features of a part of the class split."""
    wanted = protocol.methods(shots.method)
    found = from_run(
        run.folder,
        source=run.config.data,
        classes=f"{shots.split}:{part}",
        base=protocol.needs_base_mean(wanted),
        prototypes=protocol.needs_prototypes(wanted),
        images=shots.images,
        report=report,
    )
    return on_device(found)


def _margin_analysis(
    run: Run, shots: FewShotSettings, report: Callable[[str], None]
) -> dict[str, float]:
    """Measure distances on test images of base classes and on novel classes, and P^s."""
    base, novel = (_examples(run, shots, part, report) for part in ("base", "novel"))
    model = load_model(run).to(novel.features.device)
    assigned = None
    if classifies(model.criterion.loss):
        with torch.no_grad():
            assigned = model.criterion.logits(model.project(novel.features)).argmax(1).cpu()
    on_base, on_novel = ((each.features.cpu(), each.labels) for each in (base, novel))
    return analyse(on_base, on_novel, assigned).measures()
