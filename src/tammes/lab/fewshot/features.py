"""Features for few-shot episodes: computed by the model of a run, or read from a file."""

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
from tammes.lab.fewshot.protocol import LabelledFeatures
from tammes.lab.measure import files
from tammes.lab.measure.classification import classifies
from tammes.lab.measure.formats import FileError
from tammes.lab.records.run_folder import RecordError, Run, finished_run, write_tensors
from tammes.lab.training.datasets import prepare_data
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.model import Model, load_model

_ROWS = 512
"""Batch size."""

ClassPart = tuple[ClassLists, Part]
"""Class lists and the name of one of their parts."""


def from_file(
    path: str | os.PathLike[str],
    *,
    classes: ClassPart | str | None = None,
    base: str | os.PathLike[str] | None = None,
) -> LabelledFeatures:
    """Read features and labels from a file in a format of ``tammes measure``.

    Args:
        path: path of the file.
        classes: classes to use, such as ``"lists.json:novel"``, by their names in the file; all by
            default.
        base: file with features of the base classes, for their mean; by default the base classes of
            the split, if the file has them.
    """
    features, labels, names = _read(path)
    base_mean = None
    if base is not None:
        base_features, base_labels, base_names = _read(base)
        if base_features.shape[1] != features.shape[1]:
            raise FileError(
                f"{base}: base features of {base_features.shape[1]} dimensions do not go with the "
                f"{features.shape[1]} of {path}"
            )
        base_mean = base_features.mean(0)
    title = os.fspath(path)
    if classes is None:
        return LabelledFeatures(features, labels, names, base_mean, title)
    lists, part = class_lists.parse(classes) if isinstance(classes, str) else classes
    wanted = lists.part(part)
    if base is not None and part != "base":
        # Without class names, the label numbers are the names.
        named = [base_names[label] for label in base_labels.unique().tolist()]
        check_disjoint(os.fspath(base), named, wanted)
    if base is None and lists.base and set(lists.base) <= set(names):
        base_mean = features[_positions(labels, names, lists.base) >= 0].mean(0)
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
    own = _positions(labels, names, wanted)
    return LabelledFeatures(features[own >= 0], own[own >= 0], wanted, base_mean, title)


def _read(path: str | os.PathLike[str]) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    given = files.read([path])
    if given.examples is None:
        raise FileError(f"{path}: embeddings with labels are expected, got prototypes only")
    features, labels = given.examples
    return features, labels, given.names or tuple(map(str, range(int(labels.max()) + 1)))


def _positions(labels: Tensor, names: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Return the position of each example's class among those wanted, or -1."""
    place = {name: number for number, name in enumerate(wanted)}
    return torch.tensor([place.get(name, -1) for name in names])[labels]


def from_run(
    folder: str | os.PathLike[str],
    *,
    source: str | None = None,
    classes: ClassPart | str | None = None,
    base: bool = False,
    prototypes: bool = False,
    images: int = 0,
    report: Callable[[str], None] = say,
) -> LabelledFeatures:
    """Compute features with the model of a run, of images that it was not trained on.

    The features are cached in the run folder.

    Args:
        folder: folder of a finished run.
        source: data set of the novel classes; by default that of the run if it was trained on the
            same class split, otherwise that of the split.
        classes: classes to use, such as ``"omniglot:novel"``; by default all classes of the source.
            For ``base``, the test images of the run are used.
        base: also compute the mean feature of the training images.
        prototypes: also return the prototypes of the head.
        images: use only this many images per class, the first ones; 0 for all.
        report: called with progress messages.

    Raises:
        ValueError: the run has no model, or was trained on these classes or images.
    """
    run = finished_run(folder)
    if source is None and classes is None:
        raise ValueError(
            f"{run.folder}: images of new classes are expected, named by --split or --data"
        )
    classes = class_lists.parse(classes) if isinstance(classes, str) else classes
    trained = _prototypes(run) if prototypes else None
    if classes is not None and classes[1] == "base":
        found = _held_out(run, source, classes[0].part("base"))
    else:
        found = _novel_images(run, source, classes, report)
    if images:
        labels = range(len(found.classes))
        places = [(found.labels == label).nonzero()[:images, 0] for label in labels]
        found = found.subset(torch.cat(places))
    return LabelledFeatures(
        _features(run, found, report),
        found.labels,
        found.classes,
        base_mean=_base_mean(run, report) if base else None,
        title=str(run.folder),
        prototypes=trained,
    )


def check_disjoint(who: str, trained: Collection[str], wanted: Sequence[str]) -> None:
    """Reject novel classes that were trained on."""
    both = [name for name in wanted if name in set(trained)]
    if both:
        raise ValueError(
            f"{who}: novel classes are expected to be other than the base classes, "
            f"got {len(both)} of {len(wanted)} that are both, such as {both[0]!r}"
        )


def _prototypes(run: Run) -> Tensor:
    """Return the prototypes of the head, if the loss trains them."""
    if run.config.projection:
        raise ValueError(
            f"{run.folder}: prototypes among the features of the network are expected, got those "
            f"of a run with projection {run.config.projection}"
        )
    if not classifies(parse_loss(run.config.loss, counts=run.data["counts"])):
        raise ValueError(
            f"{run.folder}: a run with trained prototypes is expected, got the loss "
            f"{run.config.loss}, which has no part that classifies"
        )
    return run.tensors("model")["criterion.head.weight"].flatten(0, -2)


def check_way(way: int, lists: ClassLists, part: str) -> None:
    """Reject class lists with too few classes for an episode."""
    count = len(lists.part(part))
    if count < way:
        raise ValueError(
            f"{way}-way episodes expect at least {way} classes, got {count} of {lists.name}:{part}"
        )


def _held_out(run: Run, source: str | None, classes: Sequence[str]) -> Images:
    """Return the test images of a run, restricted to base classes."""
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


def _novel_images(
    run: Run, source: str | None, classes: ClassPart | None, report: Callable[[str], None]
) -> Images:
    """Load images of classes that a run was not trained on."""
    who, own, trained = str(run.folder), run.config.data, run.data["classes"]
    if classes is not None:
        lists, part = classes
        check_disjoint(who, trained, lists.part(part))
        # A run on base classes of the lists has the novel classes in the same data set.
        same = run.config.classes and set(trained) <= set(lists.base)
        return _load(run, source or (not same and lists.source) or own, lists.part(part), report)
    where = source or own
    images = _load(run, where, None, report)
    apart = Path(where).resolve() != Path(own).resolve()
    if apart and (_is_numbered(where, images.classes) or _is_numbered(own, trained)):
        report(f"{where}: its classes are numbers, assumed to differ from those of {who}")
    else:
        check_disjoint(who, trained, images.classes)
    return images


def _are_numbers(names: Collection[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _is_numbered(source: str, names: Collection[str]) -> bool:
    """Return whether the class names are only numbers, as in a parquet table without names."""
    if not _are_numbers(names):
        return False
    path = Path(source)
    return any(path.rglob("*.parquet")) if path.is_dir() else source not in ("digits", *KNOWN)


def _load(
    run: Run, source: str, classes: Sequence[str] | None, report: Callable[[str], None]
) -> Images:
    """Load images in the size that the model of a run expects."""
    shape = tuple(run.data["image"])
    images = class_lists.load_classes(source, classes, size=run.config.image_size, report=report)
    if images.shape != shape and shape[1] == shape[2]:
        images = class_lists.load_classes(source, classes, size=shape[1], report=report)
    if images.shape != shape:
        given, own = ("×".join(map(str, each)) for each in (images.shape, shape))
        raise ValueError(f"{run.folder}: its model takes images of {own}, got {given} of {source}")
    return images


def model_features(model: Model, images: Images) -> Tensor:
    """Compute features of images in evaluation mode, shape ``(N, D)``, float32, on the CPU.

    They are taken before any projection, which serves training only.
    """
    device = model.criterion.head.weight.device
    with torch.no_grad():
        parts = [
            model.features(pixels, projected=False).float().cpu()
            for pixels, _, _ in ImageLoader(images, device).in_order(_ROWS)
        ]
    return torch.cat(parts) if parts else torch.zeros(0, model.num_features(projected=False))


def _features(run: Run, images: Images, report: Callable[[str], None]) -> Tensor:
    def compute() -> Tensor:
        report(f"{run.folder}: features of {len(images):,} images of {len(images.classes)} classes")
        return model_features(load_model(run).to(_device()), images)

    return _cached(run, "fewshot", images.digest, compute, report, rows=len(images))


def _base_mean(run: Run, report: Callable[[str], None]) -> Tensor:
    def compute() -> Tensor:
        training = prepare_data(run.config, report)[0]
        report(f"{run.folder}: features of the {len(training):,} images it was trained on")
        return model_features(load_model(run).to(_device()), training).mean(0, keepdim=True)

    return _cached(run, "fewshot-base", run.data["digest"], compute, report, rows=1)[0]


def _cached(
    run: Run,
    kind: str,
    images: str,
    compute: Callable[[], Tensor],
    report: Callable[[str], None],
    *,
    rows: int,
) -> Tensor:
    """Return features from the cache in the run folder, or compute and cache them.

    The key holds a digest of the images and of the weights, so that features of another model are
    never used; cached features with another number of ``rows`` are ignored too.
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


def on_device(examples: LabelledFeatures) -> LabelledFeatures:
    """Move the features to a GPU if there is one."""
    return dataclasses.replace(examples, features=examples.features.to(_device()))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
