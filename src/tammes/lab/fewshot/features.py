"""Features to draw few-shot episodes from: of a run's model, or from a file."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tammes.lab.config import parse_loss
from tammes.lab.config.expressions import did_you_mean
from tammes.lab.data import Images
from tammes.lab.data.sources.loading import KNOWN, say
from tammes.lab.fewshot import class_lists
from tammes.lab.fewshot.class_lists import ClassLists, Part
from tammes.lab.fewshot.protocol import Examples
from tammes.lab.measure import files
from tammes.lab.measure.formats import FileError
from tammes.lab.records.run_folder import RecordError, Run, write_tensors
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.model import Model, load_model
from tammes.terms import Loss

_ROWS = 512
"""Images in a batch."""

Chosen = tuple[ClassLists, Part]
"""Class lists and one of their parts."""


def from_file(
    path: str | os.PathLike[str],
    *,
    chosen: Chosen | str | None = None,
    base: str | os.PathLike[str] | None = None,
    keys: dict[str, str | None] | None = None,
) -> Examples:
    """Features and labels of a file, as ``tammes measure`` reads them.

    Args:
        path: of the file.
        chosen: the classes to take, such as ``"lists.json:novel"``; its names are those in the
            file. All of them by default.
        base: a file with features of the base classes, for their mean; without it the base classes
            of the split are looked for in the file itself.
        keys: see :func:`tammes.lab.measure.files.read`.
    """
    features, labels, names = _read(path, keys)
    base_mean = None
    if base is not None:
        base_features, base_labels, base_names = _read(base, keys)
        if base_features.shape[1] != features.shape[1]:
            raise FileError(
                f"{base}: base features of {base_features.shape[1]} dimensions do not go with the "
                f"{features.shape[1]} of {path}"
            )
        base_mean = base_features.mean(0)
    title = os.fspath(path)
    if chosen is None:
        return Examples(features, labels, names, base_mean, title)
    lists, part = class_lists.parse(chosen) if isinstance(chosen, str) else chosen
    wanted = lists.part(part)
    if base is not None and part != "base":
        # A file of numbers alone names no class.
        named = [base_names[label] for label in base_labels.unique().tolist()]
        check_apart(os.fspath(base), named, wanted)
    if base is None and lists.base and set(lists.base) <= set(names):
        base_mean = features[_of(labels, names, lists.base) >= 0].mean(0)
    missing = [name for name in wanted if name not in names]
    if missing and _are_numbers(names):
        raise FileError(
            f"{title}: class_names are expected to find {lists.name}:{part} by, got numbers alone"
        )
    if missing:
        raise FileError(
            f"{title}: there is no class {missing[0]!r} of {lists.name}:{part} among its "
            f"{len(names)}{did_you_mean(missing[0], names)}"
        )
    own = _of(labels, names, wanted)
    return Examples(features[own >= 0], own[own >= 0], wanted, base_mean, title)


def _read(
    path: str | os.PathLike[str], keys: dict[str, str | None] | None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    given = files.read([path], keys=keys)
    if given.examples is None:
        raise FileError(f"{path}: embeddings with labels are expected, got prototypes only")
    features, labels = given.examples
    return features, labels, given.names or tuple(map(str, range(int(labels.max()) + 1)))


def _of(labels: Tensor, names: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Place of each example's class among those wanted, or -1."""
    place = {name: number for number, name in enumerate(wanted)}
    return torch.tensor([place.get(name, -1) for name in names])[labels]


def from_run(
    folder: str | os.PathLike[str],
    *,
    source: str | None = None,
    chosen: Chosen | str | None = None,
    base: bool = False,
    prototypes: bool = False,
    images: int = 0,
    report: Callable[[str], None] = say,
) -> Examples:
    """Features that the model of a run makes of images it was not trained on.

    They are kept in the run's folder, and computed once.

    Args:
        folder: of a finished run.
        source: where the images of new classes are; by default where those of the run are, if it
            was trained on classes of the same split, else where the split's are.
        chosen: the classes to take, such as ``"omniglot:novel"``; all of the source by default.
            Of ``base`` those images are taken that the run held out, its test images.
        base: give the mean feature of the images the run was trained on too.
        prototypes: give those of the run's head too.
        images: of each class, at most, the first ones; 0 for all.
        report: is told what takes time.

    Raises:
        ValueError: the run has no model, or was trained on these classes or images.
    """
    run = Run(Path(folder))
    if not run.has("model"):
        # Names what is missing of a folder that is no run at all.
        status = run.config and run.status
        raise RecordError(f"{run.folder}: the run has no model.safetensors, it is {status}")
    if source is None and chosen is None:
        raise ValueError(
            f"{run.folder}: images of new classes are expected, named by --split or --data"
        )
    chosen = class_lists.parse(chosen) if isinstance(chosen, str) else chosen
    trained = _prototypes(run) if prototypes else None
    if chosen is not None and chosen[1] == "base":
        found = _held_out(run, source, chosen[0].part("base"))
    else:
        found = _new(run, source, chosen, report)
    if images:
        labels = range(len(found.classes))
        places = [(found.labels == label).nonzero()[:images, 0] for label in labels]
        found = found.subset(torch.cat(places))
    return Examples(
        _features(run, found, report),
        found.labels,
        found.classes,
        base_mean=_base_mean(run, report) if base else None,
        title=str(run.folder),
        prototypes=trained,
    )


def check_apart(who: str, trained: Collection[str], wanted: Sequence[str]) -> None:
    """Refuse new classes that were trained on."""
    both = [name for name in wanted if name in set(trained)]
    if both:
        raise ValueError(
            f"{who}: novel classes are expected to be other than the base classes, "
            f"got {len(both)} of {len(wanted)} that are both, such as {both[0]!r}"
        )


def classifies(loss: Loss) -> bool:
    """Whether a loss trains the prototypes of a head to tell classes apart."""
    return any(term.definition.on == "split" for _, term in loss.leaves())


def _prototypes(run: Run) -> Tensor:
    """Of the head, where a loss has trained it."""
    if not classifies(parse_loss(run.config.loss)):
        raise ValueError(
            f"{run.folder}: a run with trained prototypes is expected, got the loss "
            f"{run.config.loss}, which has no part that classifies"
        )
    return run.tensors("model")["criterion.head.weight"]


def check_way(way: int, lists: ClassLists, part: str) -> None:
    """Refuse a part of a split that has too few classes for an episode."""
    count = len(lists.part(part))
    if count < way:
        raise ValueError(
            f"{way}-way episodes expect at least {way} classes, got {count} of {lists.name}:{part}"
        )


def _held_out(run: Run, source: str | None, classes: Sequence[str]) -> Images:
    """Images of base classes that a run was tested on, not trained on."""
    if run.config.whole:
        raise ValueError(
            f"{run.folder}: base classes are expected in images held out of training, got a run "
            "with whole"
        )
    if source not in (None, run.config.data):
        raise ValueError(
            f"{run.folder}: base classes are expected in the images that it held out of "
            f"{run.config.data}, got {source}"
        )
    return class_lists.select_classes(prepare_data(run.config, lambda text: None)[2], classes)


def _new(
    run: Run, source: str | None, chosen: Chosen | None, report: Callable[[str], None]
) -> Images:
    """Images of classes that a run was not trained on."""
    who, own, trained = str(run.folder), run.config.data, run.data["classes"]
    if chosen is not None:
        lists, part = chosen
        check_apart(who, trained, lists.part(part))
        # Where some classes of a split are, there are the others.
        same = run.config.classes and set(trained) <= set(lists.base)
        return _load(run, source or (not same and lists.source) or own, lists.part(part), report)
    where = source or own
    images = _load(run, where, None, report)
    apart = Path(where).resolve() != Path(own).resolve()
    if apart and (_is_numbered(where, images.classes) or _is_numbered(own, trained)):
        report(f"{where}: its classes are numbers, taken for others than those of {who}")
    else:
        check_apart(who, trained, images.classes)
    return images


def _are_numbers(names: Collection[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _is_numbered(source: str, names: Collection[str]) -> bool:
    """Whether classes are numbers of a table without names; folders and known sets have names."""
    if not _are_numbers(names):
        return False
    path = Path(source)
    return any(path.rglob("*.parquet")) if path.is_dir() else source not in ("digits", *KNOWN)


def _load(
    run: Run, source: str, classes: Sequence[str] | None, report: Callable[[str], None]
) -> Images:
    """Images as the run's model takes them."""
    shape = tuple(run.data["image"])
    images = class_lists.load_classes(source, classes, size=run.config.image_size, report=report)
    if images.shape != shape and shape[1] == shape[2]:
        images = class_lists.load_classes(source, classes, size=shape[1], report=report)
    if images.shape != shape:
        given, own = ("×".join(map(str, each)) for each in (images.shape, shape))
        raise ValueError(f"{run.folder}: its model takes images of {own}, got {given} of {source}")
    return images


def model_features(model: Model, images: Images) -> Tensor:
    """Features of images, shape ``(N, D)``, float32, on the CPU.

    Args:
        model: in evaluation mode; it works where it is.
        images: nothing is augmented.
    """
    device = model.criterion.head.weight.device
    size = model.criterion.head.embedding_size
    with torch.no_grad():
        parts = [
            model.features(pixels).float().cpu()
            for pixels, _, _ in ImageLoader(images, device).in_order(_ROWS)
        ]
    return torch.cat(parts) if parts else torch.zeros(0, size)


def _ready(run: Run) -> Model:
    return load_model(run).to(_device())


def _features(run: Run, images: Images, report: Callable[[str], None]) -> Tensor:
    def compute() -> Tensor:
        report(f"{run.folder}: features of {len(images):,} images of {len(images.classes)} classes")
        return model_features(_ready(run), images)

    return _kept(run, "fewshot", images.digest, compute, report, rows=len(images))


def _base_mean(run: Run, report: Callable[[str], None]) -> Tensor:
    digest = run.data["digest"]

    def compute() -> Tensor:
        training = prepare_data(run.config, report)[0]
        report(f"{run.folder}: features of the {len(training):,} images it was trained on")
        return model_features(_ready(run), training).mean(0, keepdim=True)

    return _kept(run, "fewshot-base", digest, compute, report, rows=1)[0]


def _kept(
    run: Run,
    kind: str,
    images: str,
    compute: Callable[[], Tensor],
    report: Callable[[str], None],
    *,
    rows: int,
) -> Tensor:
    """Features from the run's folder, or computed and put there; those of another model do not do.

    Args:
        run: whose.
        kind: begins the name of the file.
        images: letters that stand for which images.
        compute: gives the features where they are not there.
        report: is told where they cannot be kept.
        rows: how many there are to be.
    """
    weights = hashlib.sha256((run.folder / "model.safetensors").read_bytes()).hexdigest()
    name = f"{kind}-{hashlib.sha256(f'{images} {weights}'.encode()).hexdigest()[:16]}"
    if run.has(name):
        try:
            found = run.tensors(name)["features"]
            if found.ndim == 2 and len(found) == rows:
                return found
        except (RecordError, KeyError):
            report(f"{run.folder}: {name}.safetensors is damaged, features are computed again")
    features = compute()
    try:
        write_tensors(run.folder / f"{name}.safetensors", {"features": features})
    except OSError as error:
        report(f"{run.folder}: features cannot be kept there ({error.strerror or error})")
    return features


def on_device(examples: Examples) -> Examples:
    """The same with its features where episodes are computed: on a GPU, if there is one."""
    return dataclasses.replace(examples, features=examples.features.to(_device()))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
