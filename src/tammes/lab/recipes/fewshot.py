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
PARTS = ("novel", "validation", "base")
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
            if part not in PARTS:
                hint = did_you_mean(part, PARTS)
                raise ValueError(f"fewshot knows the parts {', '.join(PARTS)}, got {part!r}{hint}")
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
        if "base" in self.parts and config.whole:
            raise ValueError(
                "fewshot expects images held out of training for its part base, got a run with "
                "whole"
            )


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
    return found


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
        measures |= _analysed(run, shots, report)
    return {
        "settings": shots.to_dict(),
        "measures": measures,
        "intervals": intervals,
        "rows": rows,
    }


def _examples(run: Run, shots: FewShot, part: str, report: Callable[[str], None]) -> "Examples":
    """Features of the images of a part, where the episodes are computed."""
    import torch

    from tammes.lab.data import splits
    from tammes.lab.protocols.fewshot import Examples, NearestCentroid, methods
    from tammes.lab.protocols.fewshot_features import check_apart, from_run, model_features, on
    from tammes.lab.training.model import load_model
    from tammes.lab.training.preparation import prepare_data

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split = splits.read(shots.split)
    centred = any(
        isinstance(each, NearestCentroid) and each.centre for each in methods(shots.method).values()
    )
    if part != "base" and not shots.images:
        chosen = splits.parse(f"{shots.split}:{part}")
        data = run.config.data
        found = from_run(run.folder, source=data, chosen=chosen, base=centred, report=report)
        return on(found, device)
    if part == "base":
        images = prepare_data(run.config, lambda text: None)[2]
    else:
        check_apart(str(run.folder), run.data["classes"], split.part(part))
        size = run.data["image"][1]
        images = splits.load_classes(run.config.data, split.part(part), size=size, report=report)
    if shots.images:
        # The first of each class; classes need not be of one size.
        places = [(images.labels == label).nonzero() for label in range(len(images.classes))]
        images = images.subset(torch.cat([each[: shots.images, 0] for each in places]))
    model = load_model(run).to(device)
    mean = None
    if centred:
        mean = model_features(model, prepare_data(run.config, lambda text: None)[0]).mean(0)
    features = model_features(model, images)
    return on(Examples(features, images.labels, images.classes, mean, str(run.folder)), device)


def _analysed(run: Run, shots: FewShot, report: Callable[[str], None]) -> dict[str, float]:
    """Distances on test images of base classes and on novel ones, and P^s."""
    import torch

    from tammes.lab.protocols.margin_analysis import analyse
    from tammes.lab.training.model import load_model

    base, novel = (_examples(run, shots, part, report) for part in ("base", "novel"))
    criterion = load_model(run).criterion.to(novel.features.device)
    assigned = None
    if any(term.definition.on == "split" for _, term in criterion.loss.leaves()):
        with torch.no_grad():
            assigned = criterion.logits(novel.features).argmax(1).cpu()
    on_base, on_novel = ((each.features.cpu(), each.labels) for each in (base, novel))
    found = analyse(on_base, on_novel, assigned)
    return {
        "d_intra_base": found.base_intra,
        "d_inter_base": found.base_inter,
        "phi_base": found.base_ratio,
        "d_intra_novel": found.novel_intra,
        "d_inter_novel": found.novel_inter,
        "phi_novel": found.novel_ratio,
        "p_same": found.same_base_class,
    }
