"""Lists of base, validation and novel classes for few-shot recognition.

The lists of CIFAR-FS, FC100, mini-ImageNet, CUB and Omniglot are in ``class_lists.json``; others
come from the user's own files.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.data.images import DataError, Images
from tammes.lab.data.sources.loading import data_folder, load, say

Part = Literal["base", "validation", "novel"]
PARTS: tuple[Part, ...] = ("base", "validation", "novel")
_ALIASES: dict[str, Part] = {
    "base": "base", "train": "base", "training": "base",
    "validation": "validation", "val": "validation", "valid": "validation",
    "novel": "novel", "test": "novel",
}  # fmt: skip
"""Names of the three lists in files."""
_KEYS = (*_ALIASES, "source", "classes")
"""Keys that a file of lists may have."""


@dataclass(frozen=True)
class ClassLists:
    """Base, validation and novel classes; no class is in two of the lists.

    Attributes:
        base: classes to train on.
        validation: classes for choosing margins, epochs and batches; may be empty.
        novel: classes that are recognised from a few images.
        source: data set of the classes, as :func:`.load` knows it; empty if unknown.
    """

    name: str
    base: tuple[str, ...]
    validation: tuple[str, ...]
    novel: tuple[str, ...]
    source: str = ""

    def __post_init__(self) -> None:
        where: dict[str, str] = {}
        for part in PARTS:
            for each in getattr(self, part):
                if each in where:
                    both = f"twice in {part}" if where[each] == part else f"in {where[each]} too"
                    raise DataError(
                        f"{self.name}: a class is expected in one part only, "
                        f"got {each!r} of {part} {both}"
                    )
                where[each] = part

    def part(self, name: str) -> tuple[str, ...]:
        """Return the classes of a list, which must not be empty.

        Args:
            name: ``base``, ``validation`` or ``novel``; also ``train``, ``val`` or ``test``.
        """
        if name not in _ALIASES:
            raise DataError(
                f"{self.name}: there is no part {name!r}"
                f"{did_you_mean(name, _ALIASES)}; the parts are base, validation and novel"
            )
        classes: tuple[str, ...] = getattr(self, _ALIASES[name])
        if not classes:
            raise DataError(f"{self.name}: there is no class in its part {_ALIASES[name]}")
        return classes


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("class_lists.json").read_text(encoding="utf-8")
    lists: dict[str, dict[str, Any]] = json.loads(text)
    return lists


def names() -> list[str]:
    """Return the names of the shipped class lists.

    Example:
        >>> names()
        ['cifar-fs', 'fc100', 'mini-imagenet', 'cub', 'omniglot']
    """
    return list(_shipped())


def read(name: str | os.PathLike[str]) -> ClassLists:
    """Read class lists.

    Args:
        name: one of :func:`names`; a JSON file of three lists ``base``, ``validation`` and
            ``novel`` (or ``train``, ``val``, ``test``); a folder with ``base.txt``,
            ``validation.txt`` and ``novel.txt``, one class per line; or the name of a JSON file in
            ``$TAMMES_DATA/splits``.

    Raises:
        DataError: the lists do not exist or are invalid.

    Example:
        >>> lists = read("cifar-fs")
        >>> len(lists.base), len(lists.validation), len(lists.novel)
        (64, 16, 20)
    """
    title = os.fspath(name)
    if not title:
        raise DataError("class lists are expected, such as cifar-fs, got none")
    if title in _shipped():
        return _from_lists(title, _shipped()[title])
    path = Path(title).expanduser()
    if path.is_dir():
        return _from_lists(title, _text_files(path))
    folder = data_folder()
    places = [path] if folder is None else [path, folder / "splits" / f"{title}.json"]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"{title}: there is no such file, folder or known class list"
            f"{did_you_mean(title, names(), otherwise='the known ones are')}"
        )
    try:
        lists = json.loads(found.read_bytes())
    except ValueError as error:
        raise DataError(f"{found}: not JSON ({error})") from error
    return _from_lists(title, lists)


def parse(text: str, default: Part = "novel") -> tuple[ClassLists, Part]:
    """Parse class lists and one of their parts.

    Args:
        text: such as ``cifar-fs:novel`` or ``lists.json:validation``.
        default: the part if none is named.

    Example:
        >>> lists, part = parse("cub:val")
        >>> part, lists.part(part)[0]
        ('validation', '002.Laysan_Albatross')
    """
    name, colon, part = text.rpartition(":")
    # A path may contain a colon.
    if not colon or "/" in part or os.sep in part or Path(text).exists():
        name, part = text, default
    lists = read(name)
    lists.part(part)
    return lists, _ALIASES[part]


def _text_files(folder: Path) -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.txt")):
        if file.stem in _ALIASES:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError as error:
                raise DataError(f"{file}: not a text in UTF-8 ({error})") from error
            lists[file.stem] = [line.strip() for line in lines if line.strip()]
    return lists


def _from_lists(title: str, lists: Any) -> ClassLists:
    """Build class lists from a mapping with any of the known keys."""
    if not isinstance(lists, Mapping) or not any(key in _ALIASES for key in lists):
        raise DataError(f"{title}: lists base, validation and novel are expected, got none of them")
    parts: dict[Part, list[str]] = {part: [] for part in PARTS}
    for key, value in lists.items():
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS, otherwise="it may have")
            raise DataError(f"{title}: lists of classes are expected, got {key!r}{hint}")
        if key in _ALIASES:
            if parts[_ALIASES[key]]:
                raise DataError(f"{title}: {_ALIASES[key]} is given twice, once as {key!r}")
            parts[_ALIASES[key]] = list(_flat(title, value, lists.get("classes")))
    source = lists.get("source", "")
    tuples = {part: tuple(classes) for part, classes in parts.items()}
    return ClassLists(title, **tuples, source=source if isinstance(source, str) else "")


def _flat(title: str, value: Any, classes: Any, above: str = "") -> Iterator[str]:
    """Yield class names given as strings, as indices into ``classes``, or nested under a name."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _flat(title, below, classes, key)
        return
    if not isinstance(value, list):
        raise DataError(f"{title}: a list of classes is expected, got {value!r}")
    if above and len(value) == 2 and all(isinstance(each, int) for each in value):
        # The first and the last character of an alphabet.
        yield from (f"{above}/character{number:02d}" for number in range(value[0], value[1] + 1))
        return
    for each in value:
        if isinstance(each, int) and not isinstance(each, bool) and isinstance(classes, list):
            if not 0 <= each < len(classes):
                raise DataError(f"{title}: class {each} is not among its {len(classes)} classes")
            yield str(classes[each])
        elif isinstance(each, str) and each:
            yield f"{above}/{each}" if above else each
        else:
            raise DataError(f"{title}: names of classes are expected, got {each!r}")


def select_classes(images: Images, classes: Sequence[str]) -> Images:
    """Select the images of some classes, relabelled in the order of ``classes``.

    Raises:
        DataError: a class is not among those of the images.

    Example:
        >>> some = select_classes(load("digits", "train"), ["7", "3"])
        >>> some.classes, some.labels.unique()
        (('7', '3'), tensor([0, 1]))
    """
    numbers = {name: number for number, name in enumerate(images.classes)}
    missing = [name for name in classes if name not in numbers]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"{images.source}: there is no class {missing[0]!r}{others} among its "
            f"{len(numbers)}{did_you_mean(missing[0], numbers)}"
        )
    lookup = torch.full((len(numbers),), -1)
    lookup[[numbers[name] for name in classes]] = torch.arange(len(classes))
    labels = lookup[images.labels]
    kept = (labels >= 0).nonzero().squeeze(1)
    some = images.subset(kept, labels[kept])
    return dataclasses.replace(some, classes=tuple(classes), digest="")


def load_classes(
    source: str | os.PathLike[str],
    classes: Sequence[str] | None = None,
    *,
    size: int | tuple[int, int] | None = None,
    report: Callable[[str], None] = say,
) -> Images:
    """Load all images of some classes, from the training and test partitions of a source.

    Class lists cut across these partitions: CIFAR-FS has all 600 images of every class. The
    arguments are those of :func:`.load`; without ``classes`` all classes are loaded.
    """
    parts: list[Images] = []
    for partition in ("train", "test"):
        images = load(source, partition, size=size or None, whole=True, report=report)
        # A source without a test partition returns all its images for both.
        if all(images.digest != before.digest for before in parts):
            parts.append(images)
    if len({part.shape for part in parts}) > 1:
        shapes = " and ".join("×".join(map(str, part.shape)) for part in parts)
        raise DataError(f"{os.fspath(source)}: images of one size are expected, got {shapes}")
    wanted = parts[0].classes if classes is None else classes
    return _join([select_classes(part, wanted) for part in parts])


@dataclass(frozen=True)
class _InTurn:
    """Reads the images of several partitions, in memory or not, as one sequence."""

    parts: tuple[Images, ...]
    starts: tuple[int, ...]

    def read(self, row: int) -> Tensor:
        number = max(n for n, start in enumerate(self.starts) if start <= row)
        part, index = self.parts[number], row - self.starts[number]
        return part.read(int((part.index == index).nonzero()))


def _join(parts: Sequence[Images]) -> Images:
    """Concatenate images; their indices are renumbered consecutively."""
    if len(parts) == 1:
        return parts[0]
    starts, index = [0], [parts[0].index]
    for before, part in itertools.pairwise(parts):
        starts.append(starts[-1] + (int(before.index.max()) + 1 if len(before) else 0))
        index.append(part.index + starts[-1])
    pixels = [part.pixels for part in parts if part.pixels is not None]
    in_memory = len(pixels) == len(parts)
    return dataclasses.replace(
        parts[0],
        labels=torch.cat([part.labels for part in parts]),
        index=torch.cat(index),
        pixels=torch.cat(pixels) if in_memory else None,
        reader=None if in_memory else _InTurn(tuple(parts), tuple(starts)),
        origin=" ".join(part.origin for part in parts),
        digest="",
    )
