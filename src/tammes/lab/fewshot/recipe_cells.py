"""Cells of the kind ``fewshot``: train on base classes, then recognise others from a few images.

What comes out is kept in ``fewshot.json`` in the folder of the run, by the digest of the settings:
one run may be looked at in several ways, such as with several margins in fine-tuning.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tammes.lab.config.schema import Config, digest_of
from tammes.lab.config.typecheck import at_least, construct, not_empty
from tammes.lab.records.run_folder import Run, write_json

if TYPE_CHECKING:
    from tammes.lab.fewshot.protocol import Examples

FILE = "fewshot.json"
Part = Literal["novel", "validation", "base"]
_PREFIX: dict[str, str] = {"novel": "", "validation": "validation_", "base": "base_"}
"""Beginnings of the names of a part's quantities."""
_QUICK = {"episodes": 20, "queries": 5}


@dataclass(frozen=True, kw_only=True)
class FewShot:
    """Settings of a cell of the kind ``fewshot``.

    Args:
        split: of the classes, such as ``cifar-fs``; the images are those of the run's data.
        way: classes in an episode.
        shots: labelled images of each, one or several numbers.
        queries: images of each to recognise.
        episodes: how many.
        method: such as ``l2``; of several the first is in the table, the others are kept beside it.
        parts: classes to recognise: ``novel``, ``validation``, and ``base`` for images of the base
            classes that were held out of training.
        analyse: whether to measure distances on base and novel classes, and P^s.
        seed: of the episodes.
        images: of each class, at most; 0 for all.
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
    def from_dict(cls, settings: Mapping[str, Any]) -> "FewShot":
        """Build checked settings from plain values.

        Example:
            >>> FewShot.from_dict({"split": "cub", "shots": [1], "queries": 16}).shots
            (1,)
        """
        from tammes.lab.fewshot.protocol import methods

        found = construct(cls, settings, "fewshot")
        methods(found.method)
        return found

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values."""
        return {**asdict(self), "shots": [*self.shots], "parts": [*self.parts]}

    @property
    def digest(self) -> str:
        """Letters that stand for these settings."""
        return digest_of(self.to_dict())

    def quick(self) -> "FewShot":
        """In the form that only shows that it works: few episodes, of few images."""
        less = {key: min(value, getattr(self, key)) for key, value in _QUICK.items()}
        return replace(self, **less, images=max(self.shots) + less["queries"])

    def check(self, config: Config, *, tried: bool = False) -> None:
        """Refuse a run that these settings cannot look at.

        Args:
            config: of the run.
            tried: whether something is to be chosen by what comes out.
        """
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
        self._check_classes(config)

    def _check_classes(self, config: Config) -> None:
        from tammes.lab.data import DataError
        from tammes.lab.fewshot import class_lists
        from tammes.lab.fewshot.features import check_apart, check_way
        from tammes.lab.training.datasets import classes_of

        try:
            lists = class_lists.read(self.split)
            trained = classes_of(config.classes) if config.classes else ()
        except DataError:
            # The lists may be where the cells are run; they are looked for again before training.
            return
        for part in self.parts:
            check_way(self.way, lists, part)
            if part != "base":
                check_apart(config.classes, trained, lists.part(part))


def evaluate_run(run: Run, several: Sequence[FewShot], report: Callable[[str], None]) -> None:
    """Recognise other classes with the model of a run, and keep what comes out in its folder.

    What is there already is left.

    Args:
        run: that finished.
        several: settings, one after the other.
        report: is told what takes time.
    """
    for shots in several:
        if find(run, shots) is None:
            found = _evaluate(run, shots, report)
            write_json(run.folder / FILE, {**_kept(run), shots.digest: found})


def find(run: Run, shots: FewShot) -> dict[str, Any] | None:
    """What came out with these settings; None where it is not known yet.

    Returns:
        ``measures`` by the name of the quantity (shares, not percent), ``intervals`` (halves of
        the 95 % intervals over episodes, in percent) and ``rows`` of all methods by part.
    """
    found: dict[str, Any] | None = _kept(run).get(shots.digest)
    if found is None:
        return None
    # A list of the user's own may have other classes by now under the same name.
    before, now = found.get("classes"), _letters(shots)
    return None if before and now and before != now else found


def _letters(shots: FewShot) -> str:
    """Letters that stand for the names of the classes; none where the lists are not here."""
    from tammes.lab.data import DataError
    from tammes.lab.fewshot import class_lists

    try:
        lists = class_lists.read(shots.split)
    except DataError:
        return ""
    return digest_of([lists.base, lists.validation, lists.novel])


def _kept(run: Run) -> dict[str, Any]:
    """By digest; a file that is damaged has nothing, and is made anew."""
    try:
        kept = json.loads((run.folder / FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _evaluate(run: Run, shots: FewShot, report: Callable[[str], None]) -> dict[str, Any]:
    from tammes.lab.fewshot import protocol

    measures: dict[str, float] = {}
    intervals: dict[str, float] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    first = next(iter(protocol.methods(shots.method)))
    for part in shots.parts:
        found = protocol.evaluate(
            _examples(run, shots, part, report),
            way=shots.way,
            shots=shots.shots,
            queries=shots.queries,
            episodes=shots.episodes,
            method=shots.method,
            seed=shots.seed,
        )
        rows[part] = [row.as_dict() for row in found]
        for row in (each for each in found if each.method == first):
            key = f"{_PREFIX[part]}shot{row.shot}"
            measures[key] = row.accuracy.mean
            if math.isfinite(row.accuracy.half):
                intervals[key] = 100 * row.accuracy.half
    if not run.config.whole:
        measures["base_accuracy"] = run.final["test"]["accuracy"]
    if shots.analyse:
        # Of a model that collapsed some are not finite; its accuracies are kept.
        found_too = _analysed(run, shots, report).items()
        measures |= {name: value for name, value in found_too if math.isfinite(value)}
    return {
        "settings": shots.to_dict(),
        "classes": _letters(shots),
        "measures": measures,
        "intervals": intervals,
        "rows": rows,
    }


def _examples(run: Run, shots: FewShot, part: str, report: Callable[[str], None]) -> "Examples":
    """Features of the images of a part, where the episodes are computed."""
    from tammes.lab.fewshot.features import from_run, on_device
    from tammes.lab.fewshot.protocol import methods, needs_base_mean, needs_prototypes

    wanted = methods(shots.method)
    found = from_run(
        run.folder,
        source=run.config.data,
        chosen=f"{shots.split}:{part}",
        base=needs_base_mean(wanted),
        prototypes=needs_prototypes(wanted),
        images=shots.images,
        report=report,
    )
    return on_device(found)


def _analysed(run: Run, shots: FewShot, report: Callable[[str], None]) -> dict[str, float]:
    """Distances on test images of base classes and on novel ones, and P^s."""
    import torch

    from tammes.lab.fewshot.features import classifies
    from tammes.lab.fewshot.margin_analysis import analyse
    from tammes.lab.training.model import load_model

    base, novel = (_examples(run, shots, part, report) for part in ("base", "novel"))
    criterion = load_model(run).criterion.to(novel.features.device)
    assigned = None
    if classifies(criterion.loss):
        with torch.no_grad():
            assigned = criterion.logits(novel.features).argmax(1).cpu()
    on_base, on_novel = ((each.features.cpu(), each.labels) for each in (base, novel))
    return analyse(on_base, on_novel, assigned).measures()
