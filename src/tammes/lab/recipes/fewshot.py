"""Cells of the kind ``fewshot``: train on base classes, then recognise others from a few images.

What comes out is kept in ``fewshot.json`` in the folder of the run, by the digest of the settings:
one run may be looked at in several ways, such as with several margins in fine-tuning.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from tammes.lab.config import Config, digest_of
from tammes.lab.expression.syntax import did_you_mean
from tammes.lab.record import Run, write_json

if TYPE_CHECKING:
    from tammes.lab.protocols.fewshot import Examples

FILE = "fewshot.json"
_PREFIX = {"novel": "", "validation": "validation_", "base": "base_"}
"""What quantities of a part begin with."""
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

    split: str
    way: int = 5
    shots: tuple[int, ...] = (1, 5)
    queries: int = 15
    episodes: int = 10_000
    method: str = "l2"
    parts: tuple[str, ...] = ("novel", "validation")
    analyse: bool = False
    seed: int = 0
    images: int = 0

    def __post_init__(self) -> None:
        from tammes.lab.protocols.fewshot import methods

        for name, low in (("way", 2), ("queries", 1), ("episodes", 1), ("seed", 0), ("images", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ValueError(f"fewshot expects {name} of at least {low}, got {value!r}")
        if not self.shots or any(type(each) is not int or each < 1 for each in self.shots):
            raise ValueError(f"fewshot expects shots such as [1, 5], got {[*self.shots]}")
        for part in self.parts:
            if part not in _PREFIX:
                hint, known = did_you_mean(part, _PREFIX), ", ".join(_PREFIX)
                raise ValueError(f"fewshot knows the parts {known}, got {part!r}{hint}")
        if not self.parts:
            raise ValueError("fewshot expects a part to recognise, got none")
        methods(self.method)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "FewShot":
        """Settings from plain values; what is none of them is refused.

        Example:
            >>> FewShot.from_dict({"split": "cub", "shots": [1], "queries": 16}).shots
            (1,)
        """
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise ValueError(f"fewshot has no setting {name!r}{did_you_mean(name, known)}")
        for name, kind in (("split", str), ("method", str), ("analyse", bool)):
            if name in settings and not isinstance(settings[name], kind):
                wanted = "a text" if kind is str else "true or false"
                raise ValueError(f"fewshot expects {name} to be {wanted}, got {settings[name]!r}")
        if not settings.get("split"):
            raise ValueError("fewshot expects a split of classes, got none")
        listed = {}
        for name in ("shots", "parts"):
            value = settings.get(name, getattr(cls, name))
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise ValueError(f"fewshot expects {name} to be a list, got {value!r}")
            listed[name] = tuple(value)
        return cls(**{**settings, **listed})

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
        from tammes.lab.data import DataError, splits
        from tammes.lab.protocols.fewshot_features import check_apart, check_way
        from tammes.lab.training.preparation import classes_of

        try:
            split = splits.read(self.split)
            trained = classes_of(config.classes) if config.classes else ()
        except DataError:
            # The lists may be where the cells are run; they are looked for again before training.
            return
        for part in self.parts:
            check_way(self.way, split, part)
            if part != "base":
                check_apart(config.classes, trained, split.part(part))


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
    from tammes.lab.data import DataError, splits

    try:
        split = splits.read(shots.split)
    except DataError:
        return ""
    return digest_of([split.base, split.validation, split.novel])


def _kept(run: Run) -> dict[str, Any]:
    """By digest; a file that is damaged has nothing, and is made anew."""
    try:
        kept = json.loads((run.folder / FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _evaluate(run: Run, shots: FewShot, report: Callable[[str], None]) -> dict[str, Any]:
    from tammes.lab.protocols import fewshot

    measures: dict[str, float] = {}
    intervals: dict[str, float] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    first = next(iter(fewshot.methods(shots.method)))
    for part in shots.parts:
        found = fewshot.evaluate(
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
    from tammes.lab.protocols.fewshot import methods, needs_base_mean, needs_prototypes
    from tammes.lab.protocols.fewshot_features import from_run, on_device

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

    from tammes.lab.protocols.fewshot_features import classifies
    from tammes.lab.protocols.margin_analysis import analyse
    from tammes.lab.training.model import load_model

    base, novel = (_examples(run, shots, part, report) for part in ("base", "novel"))
    criterion = load_model(run).criterion.to(novel.features.device)
    assigned = None
    if classifies(criterion.loss):
        with torch.no_grad():
            assigned = criterion.logits(novel.features).argmax(1).cpu()
    on_base, on_novel = ((each.features.cpu(), each.labels) for each in (base, novel))
    return analyse(on_base, on_novel, assigned).measures()
