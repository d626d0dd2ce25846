"""Load images of a source by name and partition."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.config.typecheck import as_source
from tammes.lab.data.csv_rows import TABLES
from tammes.lab.data.decode_partition import PartitionDecoder
from tammes.lab.data.identities.identity_protocol import IdentityProtocol
from tammes.lab.data.images import DataError, Images, unknown_classes
from tammes.lab.data.listing import EVERYTHING, Partitions
from tammes.lab.data.sources import folder as folders
from tammes.lab.data.sources import hub, identity_folders, labelled_files, parquet
from tammes.lab.data.sources.class_split import split_by_class
from tammes.lab.data.subsets import hold_out
from tammes.optional import require

KNOWN: dict[str, tuple[str, str | None]] = {
    "cifar10": ("uoft-cs/cifar10", None),
    "cifar100": ("uoft-cs/cifar100", None),
    "mnist": ("ylecun/mnist", None),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", None),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    "imagenet": ("ILSVRC/imagenet-1k", None),
    "places365": ("", None),
    "cub": ("bentrevett/caltech-ucsd-birds-200-2011", None),
    "omniglot": ("GATE-engine/omniglot", None),
    "market1501": ("", None),
    "mini-imagenet": ("", None),
    "tiered-imagenet": ("", None),
    "inat2017": ("", None),
    "chimpanzees": ("", None),
    "audiomnist": ("", None),
    "dukemtmc": ("", None),
    "lfw": ("", None),
    "webface": ("", None),
}
"""Name and configuration on the hub of each data set with a short name; empty if unknown."""
CLASS_SPLITS: dict[str, tuple[str, int]] = {"cub:retrieval": ("cub", 100)}
"""Data set of each class-disjoint split, and how many of its first classes are for training."""
_FILES = {
    "cub": ("cub", "cub200", "cub_200_2011"),
    "fashion_mnist": ("fashion_mnist", "fashion"),
    "chimpanzees": ("chimpanzees", "chimpanzee-faces"),
}
"""Prefixes of the files of a data set in ``$TAMMES_DATA``, if not its name alone."""

_TRAIN = ("train", "training")
_VALIDATION = ("validation", "val", "valid", "dev")
_TEST = ("test", "testing", *_VALIDATION, "eval")
_ALIASES = {"train": _TRAIN, "test": _TEST, "validation": _VALIDATION, "val": _VALIDATION}
"""Names of each partition, in order of preference."""
_HELD_OUT = 0.2
"""Share held out as the test partition of a source without one."""


def say(text: str) -> None:
    """Print a message to stderr."""
    print(text, file=sys.stderr)


def load(
    source: str | os.PathLike[str],
    partition: str,
    *,
    size: int | tuple[int, int] | None = None,
    skip_corrupt: bool = False,
    memory: int = 4 << 30,
    like: Images | None = None,
    whole: bool = False,
    novel: bool = False,
    report: Callable[[str], None] = say,
) -> Images:
    """Load the images of one partition of a source.

    Args:
        source: ``digits``, a name in :data:`KNOWN` or :data:`CLASS_SPLITS`, a folder of class
            folders, a CSV table of paths and labels, a folder of images with such a table, a
            file name pattern such as ``photos/{label}_*.jpg``, a parquet file, a folder of parquet
            files, or ``OWNER/NAME`` (``OWNER/NAME:CONFIG``) on the Hugging Face hub.
        partition: ``train``, ``test``, or another one the source has. If there is no test
            partition, a fixed fifth of every class is held out (a quarter of ``digits``).
        size: side of the square images, or height and width; by default that of the images if all
            have the same, else 64. Images are resized to just cover it, and centre-cropped.
        skip_corrupt: leave out unreadable images instead of raising.
        memory: largest size of the pixels in bytes; images of larger sets are read on demand.
        like: training images; the result gets their shape and classes.
        whole: hold nothing out of a source without a test partition; for a source that is used for
            training only, or for testing only.
        novel: test images have classes of their own, not those of training; they are in a partition
            ``novel``, or else in the test partition.
        report: called with one-line messages.

    Returns:
        The images. Their classes are those of the training partition, unless they are novel.

    Raises:
        DataError: the source cannot be used; the message is one sentence.

    Example:
        >>> load("digits", "train").shape
        (1, 8, 8)
    """
    title = as_source("source", source)
    sides = (size, size) if isinstance(size, int) else size
    if sides is not None and min(sides) < 1:
        raise ValueError(f"load expects a size of at least 1, got {size}")
    if title == "digits":
        if partition not in ("train", "test"):
            raise DataError(f"digits: there is no partition {partition!r}, it has train and test")
        images = _digits(like.shape if like is not None else (1, *(sides or (8, 8))))
        part = hold_out(images, 0.25, seed=0)[partition == "test"]
        return part if like is None else part.match(like.classes)
    available = _find(title, report)
    name, held_out = _pick(title, available, partition, whole=whole, novel=novel, report=report)
    entries = available[name]()
    if like is None or novel:
        classes = _classes(title, available, name, entries.present(), novel=novel)
    else:
        classes = [*like.classes]
    images = PartitionDecoder(
        source=title,
        entries=entries,
        size=size,
        shape=None if like is None else like.shape,
        skip_corrupt=skip_corrupt,
        memory=memory,
        report=report,
    ).images()
    images = images.match(classes)
    if partition == "train" and like is None:
        _report_imbalance(images, report)
    if held_out:
        images = hold_out(images, _HELD_OUT, seed=0)[partition == "test"]
    return images


def _report_imbalance(images: Images, report: Callable[[str], None]) -> None:
    """Report the smallest and the largest class if the latter is at least ten times as large."""
    counts = images.counts()
    least, most = min(counts), max(counts)
    if most >= 10 * least:
        small, large = (images.classes[counts.index(count)] for count in (least, most))
        report(
            f"{images.source}: the classes differ in size, from {least:,} of {small!r} to "
            f"{most:,} of {large!r}; the loss logit_adjustment() may help"
        )


def _digits(shape: tuple[int, int, int]) -> Images:
    """Load the 1,797 handwritten digits of scikit-learn, 8×8 grey."""
    values = require("sklearn.datasets", extra="lab").load_digits()
    grey = torch.from_numpy(values.images).float().mul(255 / 16)[:, None]
    if shape[1:] != (8, 8):
        grey = torch.nn.functional.interpolate(
            grey, size=shape[1:], mode="bilinear", antialias=True, align_corners=False
        )
    pixels = grey.round().clamp(0, 255).to(torch.uint8).repeat(1, shape[0], 1, 1)
    return Images(
        labels=torch.from_numpy(values.target).long(),
        index=torch.arange(len(pixels)),
        classes=tuple("0123456789"),
        shape=shape,
        pixels=pixels,
        source="digits",
        origin="digits",
    )


def identity_protocol(source: str, testing: Images) -> IdentityProtocol:
    """Return the evaluation protocol of a folder for its novel images, or an empty one."""
    local = data_folder()
    path = Path(source).expanduser()
    if source in KNOWN and local is not None:
        path = local / source
    return identity_folders.read_protocol(path).select(testing.index)


def data_folder() -> Path | None:
    """Return the folder of local data sets, ``$TAMMES_DATA``, or None."""
    folder = os.environ.get("TAMMES_DATA")
    return Path(folder).expanduser() if folder else None


def _find(title: str, report: Callable[[str], None]) -> Partitions:
    """Resolve the name of a source to its partitions."""
    if title in KNOWN:
        return _known(title, report)
    if title in CLASS_SPLITS:
        name, trained = CLASS_SPLITS[title]
        return split_by_class(title, _known(name, report), trained)
    path = Path(title).expanduser()
    if re.search(r"\{\w+\}", title) and not path.exists():
        return labelled_files.pattern_partitions(title, report)
    if path.is_dir():
        files = _parquet(path)
        if files:
            return parquet.partitions(files, root=path, report=report)
        table = folders.label_table(path)
        if table is not None:
            report(f"{title}: the labels are in {table.name}")
            return labelled_files.table_partitions(table, report)
        return identity_folders.partitions(path) or folders.partitions(path)
    if path.is_file():
        if path.suffix.lower() in TABLES:
            return labelled_files.table_partitions(path, report)
        if path.suffix.lower() != ".parquet":
            raise DataError(
                f"{title}: a folder, a .csv, .tsv or .parquet file is expected, "
                f"got {path.suffix or 'a file'}"
            )
        return parquet.partitions([path], root=None, report=report)
    name, _, config = title.partition(":")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and path.suffix.lower() != ".parquet":
        if path.parent.is_dir():
            # A mistyped path looks like a name on the hub, and the network may be slow.
            report(f"{title}: no such local folder, trying the Hugging Face hub")
        return hub.partitions(name, config or None)
    hint = did_you_mean(title, ["digits", *KNOWN, *CLASS_SPLITS])
    if not hint and "*" in title:
        hint = (
            "; a pattern of file names has {label} where the class is, as in photos/{label}_*.png"
        )
    hint = hint or "; a name on the hub is OWNER/NAME"
    raise DataError(f"{title}: there is no such file, folder or known name{hint}")


def _parquet(folder: Path) -> list[Path]:
    paths: list[Path] = []
    for root, inside, files in os.walk(folder):
        inside[:] = [name for name in inside if not name.startswith(".")]
        # By name only: a folder may hold a million images.
        paths += [
            Path(root, name)
            for name in files
            if name.lower().endswith(".parquet") and not name.startswith(".")
        ]
    return paths


def _known(title: str, report: Callable[[str], None]) -> Partitions:
    """Resolve a short name: local files or a folder of that name, else the hub."""
    local = data_folder()
    for prefix in _FILES.get(title, (title,)):
        if local is None:
            break
        if (local / prefix).is_dir():
            return _find(str(local / prefix), report)
        pattern = re.compile(rf"{re.escape(prefix)}(?![a-z0-9]).*\.parquet", re.IGNORECASE)
        files = [file for file in local.glob("*.parquet") if pattern.fullmatch(file.name)]
        if files:
            return parquet.partitions(files, root=local, report=report)
    name, config = KNOWN[title]
    if not name:
        where = local or "$TAMMES_DATA, which is not set"
        raise DataError(
            f"{title}: no files in {where}, and no copy on the hub is known; "
            "give its folder, or OWNER/NAME on the hub"
        )
    return hub.partitions(name, config, title=title)


def _pick(
    title: str,
    available: Partitions,
    partition: str,
    *,
    whole: bool,
    novel: bool,
    report: Callable[[str], None],
) -> tuple[str, bool]:
    """Return the partition of the source to read, and whether to hold out a share of it."""
    wanted = partition.lower()
    if novel and wanted == "test" and "novel" in available:
        return "novel", False
    train, test, own = (
        next((name for name in _ALIASES.get(word, (word,)) if name in available), None)
        for word in ("train", "test", wanted)
    )
    if own is not None and (wanted != "train" or test is not None or whole):
        if wanted == "test" and own not in ("test", "testing"):
            report(f"{title}: no test partition, so {own} is used for testing")
        unused = next((name for name in _VALIDATION if name in available and name != test), None)
        if wanted == "train" and unused and not novel:
            report(f"{title}: {unused} is not used; validation images are held out of {own}")
        return own, False
    everything = train or (EVERYTHING if EVERYTHING in available else None)
    if everything is None and test is None and len(available) == 1:
        # The only partition, under a name such as "full".
        everything = next(iter(available))
    if wanted not in ("train", "test") or everything is None:
        names = ", ".join(sorted(filter(None, available))) or "none, so train and test are made"
        raise DataError(f"{title}: there is no partition {partition!r}, it has {names}")
    if whole:
        return everything, False
    report(f"{title}: no test partition, so {_HELD_OUT:.0%} of every class is held out for testing")
    return everything, True


def _classes(
    title: str, available: Partitions, name: str, present: list[str], *, novel: bool
) -> list[str]:
    """Return the classes of the training partition; only ``novel`` images may have others."""
    train = next((word for word in _TRAIN if word in available), None)
    classes = present
    if name in _TEST and train is not None and name in available and not novel:
        classes = available[train]().present()
        known = set(classes)
        unknown = [each for each in present if each not in known]
        if unknown:
            raise DataError(f"{title}: {unknown_classes(unknown, len(classes))}")
    if len(classes) < 2:
        only = f" ({classes[0]!r})" if classes else ""
        tables = folders.list_tables(Path(title)) if Path(title).is_dir() else []
        hint = f"; {tables[0]} may have the labels, give its path" if tables else ""
        raise DataError(f"{title}: images of 2 classes or more are needed, got 1{only}{hint}")
    return classes
