"""Embeddings with identities, from a run or from files in the formats of ``tammes measure``."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tammes.lab.config.expressions import did_you_mean
from tammes.lab.measure import files
from tammes.lab.measure.formats import FileError, load
from tammes.lab.measure.identity_pairs import SampledPairs, sample_pairs
from tammes.lab.recognition.pictures import FilePictures, Pictures, RunPictures
from tammes.lab.records.run_folder import RecordError, Run
from tammes.similarity import norm

KEYS: dict[str, tuple[str, ...]] = {
    "embeddings": files.KEYS["embeddings"],
    "identities": (
        "identities",
        "identity",
        "ids",
        "id",
        "pids",
        "pid",
        "person_id",
        *files.KEYS["labels"],
    ),
    "cameras": ("cameras", "camera", "camids", "camid"),
    "junk": ("junk",),
    "paths": ("paths", "path", "file_names", "file_name"),
    "split": ("split", "splits", "role", "roles", "partition"),
    "names": ("class_names",),
}
"""Keys of each column of a file, in order of preference."""
JUNK = (-1, files.IGNORED)
"""Identities that mark junk: -1 as in Market-1501, and the label of ignored examples."""
_ROLES = {"query": True, "probe": True, "gallery": False}
"""Values of a split column, and whether they mark queries."""


class PairRows(NamedTuple):
    """Rows ``(P, 2)`` of pairs of examples, whether each is of one identity, and their folds."""

    rows: Tensor
    same: Tensor
    folds: Tensor | None = None


@dataclass(frozen=True, eq=False)
class IdentityEmbeddings:
    """Embeddings of examples whose identities are known.

    Attributes:
        title: the run or files they come from.
        identities: all integers or all strings; None if unknown.
        junk: examples that count neither as a match nor as wrong, shape ``(N,)``.
        query: whether an example is a query or in the gallery, shape ``(N,)``; None if each is
            searched among all others.
        names: paths or row numbers of the examples.
        named: whether the names are paths.
        notes: sentences about what was left out or may surprise.
        pairs: pairs that the data set prescribes for verification, or None.
    """

    title: str
    features: Tensor
    identities: Sequence[int] | Sequence[str] | None
    cameras: Sequence[int] | Sequence[str] | None
    junk: Tensor
    query: Tensor | None
    names: Sequence[str]
    named: bool = False
    pictures: Pictures | None = None
    notes: tuple[str, ...] = ()
    pairs: PairRows | None = None

    def __len__(self) -> int:
        return len(self.features)

    def of(self, rows: Tensor) -> list[Any]:
        """Return the identities of some rows."""
        assert self.identities is not None
        return [self.identities[row] for row in rows.tolist()]

    def cameras_of(self, rows: Tensor) -> list[Any] | None:
        """Return the cameras of some rows, or None."""
        return None if self.cameras is None else [self.cameras[row] for row in rows.tolist()]

    def first_notes(self) -> list[str]:
        """Return the notes, and one about embeddings that are zero."""
        zeros = int((norm(self.features.double()) == 0).sum())
        if not zeros:
            return list(self.notes)
        note = f"{zeros:,} of {len(self):,} embeddings are zero, with cosine 0 to all others"
        return [*self.notes, note]

    def without_cameras(self) -> "IdentityEmbeddings":
        """Return the same embeddings without cameras."""
        return replace(self, cameras=None)

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return the rows of queries and of the gallery; without :attr:`query`, both are all rows.

        Junk is never a query; it stays in a separate gallery, where rankings ignore it.
        """
        rows = torch.arange(len(self))
        if self.query is None:
            return rows[~self.junk], rows[~self.junk]
        return rows[self.query & ~self.junk], rows[~self.query]

    def sample_pairs(self, limit: int, seed: int) -> SampledPairs:
        """Sample pairs without junk: of a query and a gallery item, or of any two examples."""
        assert self.identities is not None
        first, second = self.sides()
        return sample_pairs(
            numbered(self.identities),
            first,
            None if self.query is None else second[~self.junk[second]],
            camera=None if self.cameras is None else numbered(self.cameras),
            limit=limit,
            seed=seed,
        )


def numbered(values: Sequence[Any]) -> Tensor:
    """Number values in the order in which they appear."""
    known = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([known[value] for value in values])


def read_embeddings(
    paths: Sequence[str | os.PathLike[str]],
    *,
    gallery: Sequence[str | os.PathLike[str]] = (),
    keys: Mapping[str, str | None] | None = None,
    partition: str | None = None,
    images: str | os.PathLike[str] | None = None,
    need_identities: bool = True,
    need_cameras: bool = True,
) -> IdentityEmbeddings:
    """Read embeddings and identities from files; several files are concatenated.

    Args:
        paths: files of all examples, or of the queries.
        gallery: files of the gallery. Without them, a column ``split`` with the values ``query``
            and ``gallery`` tells the two apart.
        keys: key of ``"embeddings"``, ``"identities"``, ``"cameras"``, ``"junk"``, ``"paths"`` or
            ``"split"`` if it is not one of :data:`KEYS`.
        partition: value of the column ``split`` whose rows are read.
        images: folder that image paths are relative to; by default that of the first file.
        need_identities: whether files without identities are an error.
        need_cameras: whether it is an error if only queries or only the gallery have cameras;
            otherwise cameras are then ignored.

    Raises:
        FileError: one sentence that names the file.
    """
    wanted = {kind: key for kind, key in (keys or {}).items() if key is not None}
    first = _read_files(paths, wanted, partition, need_identities)
    if gallery:
        second = _read_files(gallery, wanted, partition, need_identities)
        for given, is_query in ((first, True), (second, False)):
            if given.query is not None and bool((given.query != is_query).any()):
                raise FileError(
                    f"{given.title}: {'queries' if is_query else 'a gallery'} alone is expected "
                    "with --gallery, got a split column with the other too; leave --gallery out"
                )
        if not need_cameras and None in (first.cameras, second.cameras):
            first, second = first.without_cameras(), second.without_cameras()
        first = _join(first, second)
    elif first.query is not None and len(first.query.unique()) == 1:
        side, other = ("query", "gallery") if bool(first.query[0]) else ("gallery", "query")
        raise FileError(
            f"{first.title}: queries and a gallery are expected in the split column, got "
            f"{len(first):,} rows of {side} and none of {other}; --gallery FILE reads another file"
        )
    folder = Path(paths[0]).parent if images is None else Path(images)
    if images is not None and not folder.is_dir():
        raise FileError(f"{folder}: a folder of images is expected by --images, got no such folder")
    pictures = FilePictures(str(folder), tuple(first.names)) if first.named else None
    if images is not None and not first.named:
        raise FileError(
            f"{first.title}: a column of paths is expected with --images, got none; name it with "
            "--paths KEY"
        )
    return replace(first, pictures=pictures)


def _read_files(
    paths: Sequence[str | os.PathLike[str]],
    wanted: Mapping[str, str],
    partition: str | None,
    need_identities: bool,
) -> IdentityEmbeddings:
    """Read the columns of files, and select the rows of a partition."""
    title = ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3} more" if paths[3:] else "")
    columns: dict[str, list[Any]] = {kind: [] for kind in KEYS}
    for path in map(Path, paths):
        for kind, values in _read_file(path, wanted).items():
            columns[kind].append(values)
    if not columns["embeddings"]:
        raise FileError(f"{title}: embeddings are expected, got none; name them with --embeddings")
    features = _join_features(columns["embeddings"], title)
    joined: dict[str, Any] = {
        kind: list(itertools.chain.from_iterable(columns[kind])) or None
        for kind in KEYS
        if kind != "embeddings"
    }
    if joined["identities"] is None and need_identities:
        raise FileError(
            f"{title}: an identity of each embedding is expected, got none; name their key with "
            "--identities KEY"
        )
    for kind, values in joined.items():
        if values is None or kind == "names":
            continue
        if len(values) != len(features):
            raise FileError(
                f"{title}: {kind} of {len(values):,} examples do not go with "
                f"{len(features):,} embeddings"
            )
        if len({isinstance(value, str) for value in values}) > 1:
            raise FileError(f"{title}: some {kind} are texts and some are numbers")
    identities, notes = _named(joined["identities"], joined["names"]), []
    junk = torch.zeros(len(features), dtype=torch.bool)
    if joined["junk"] is not None:
        junk = torch.tensor(joined["junk"], dtype=torch.bool)
    elif identities is not None and any(value in JUNK for value in set(identities)):
        junk = torch.tensor([value in JUNK for value in identities])
        notes.append(
            f"{int(junk.sum()):,} examples of identity -1 or {files.IGNORED} are junk, as in "
            "Market-1501"
        )
    found = IdentityEmbeddings(
        title,
        features,
        identities,
        joined["cameras"],
        junk,
        None,
        joined["paths"] or [f"row {row}" for row in range(len(features))],
        joined["paths"] is not None,
        notes=tuple(notes),
    )
    return _select(found, joined["split"], partition)


def _read_file(path: Path, wanted: Mapping[str, str]) -> dict[str, Any]:
    """Read the columns of a file, by kind."""
    known = {name for names in KEYS.values() for name in names} | set(wanted.values())
    content = load(path, known)
    found: dict[str, Any] = {}
    for kind in KEYS:
        key = files.find_key(path, kind, content, wanted, KEYS)
        if key is None or content[key] is None:
            continue
        if kind == "embeddings":
            found[kind] = files.as_matrix(path, kind, key, content[key])
        else:
            found[kind] = _as_values(path, kind, key, content[key])
    missing = [(kind, key) for kind, key in wanted.items() if key not in content]
    if missing and (missing[0][0] in ("embeddings", "identities") or not found):
        kind, key = missing[0]
        hint = did_you_mean(key, content, otherwise="there are")
        raise FileError(f"{path}: there is no {key!r} of {kind} in it{hint}")
    if not found:
        shown = ", ".join(map(repr, itertools.islice(content, 8))) or "nothing"
        raise FileError(
            f"{path}: no embeddings or identities in it, only {shown}; name the right key with "
            "--embeddings or --identities"
        )
    return found


def _as_values(path: Path, kind: str, key: str, value: Any) -> list[Any]:
    """Convert a column to a list of strings, integers or booleans."""
    if files.is_text(value):
        if kind == "junk":
            raise FileError(f"{path}: junk ({key!r}) is expected to be 0 and 1, got texts")
        return [str(text) for text in value]
    if kind in ("paths", "split", "names"):
        raise FileError(f"{path}: {kind} ({key!r}) are expected to be texts, got something else")
    tensor = files.as_tensor(path, key, value)
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim != 1:
        raise FileError(
            f"{path}: {kind} ({key!r}) are expected to be one value for each example, "
            f"got shape {tuple(tensor.shape)}"
        )
    if kind == "junk":
        if bool(((tensor != 0) & (tensor != 1)).any()):
            raise FileError(f"{path}: junk ({key!r}) is expected to be 0 and 1, got other numbers")
        return tensor.bool().tolist()
    if tensor.dtype == torch.bool or tensor.is_complex() or bool((tensor != tensor.long()).any()):
        raise FileError(f"{path}: {kind} ({key!r}) are expected to be whole numbers or texts")
    return tensor.long().tolist()


def _join_features(parts: Sequence[Tensor], title: str) -> Tensor:
    sizes = {part.shape[1] for part in parts}
    if len(sizes) > 1:
        raise FileError(
            f"{title}: embeddings of one dimension are expected, got {sorted(sizes)}; were they "
            "written by one network?"
        )
    return torch.cat(list(parts))


def _named(identities: list[Any] | None, names: list[str] | None) -> list[Any] | None:
    """Replace numbers with the class names of the file, if it names every class."""
    if identities is None or not names or isinstance(identities[0], str):
        return identities
    if any(not 0 <= number < len(names) for number in identities if number not in JUNK):
        return identities
    if any(number in JUNK for number in identities):
        return identities
    return [names[number] for number in identities]


def _select(
    found: IdentityEmbeddings, split: list[str] | None, partition: str | None
) -> IdentityEmbeddings:
    """Select the rows of a partition, or tell queries and gallery apart."""
    if split is None:
        if partition is not None:
            raise FileError(
                f"{found.title}: a column split is expected with --partition, got none; name it "
                "with --split KEY"
            )
        return found
    values = sorted(set(split))
    if partition is not None:
        if partition not in values:
            hint = did_you_mean(partition, values, otherwise="there are")
            raise FileError(f"{found.title}: no row has the split {partition!r}{hint}")
        return _rows(found, [row for row, value in enumerate(split) if value == partition])
    if not any(value in _ROLES for value in values):
        note = f"all rows are used, of split {', '.join(values[:4])}; --partition NAME selects some"
        return replace(found, notes=(*found.notes, note)) if len(values) > 1 else found
    left_out = [value for value in split if value not in _ROLES]
    kept = [row for row, value in enumerate(split) if value in _ROLES]
    query = torch.tensor([_ROLES[split[row]] for row in kept])
    notes = found.notes
    if left_out:
        which = ", ".join(sorted(set(left_out))[:4])
        notes = (*notes, f"{len(left_out):,} rows of split {which} are left out")
    return replace(_rows(found, kept), query=query, notes=notes)


def _rows(found: IdentityEmbeddings, rows: list[int]) -> IdentityEmbeddings:
    index = torch.tensor(rows)

    def some(values: Sequence[Any] | None) -> list[Any] | None:
        return None if values is None else [values[row] for row in rows]

    return replace(
        found,
        features=found.features[index],
        identities=some(found.identities),
        cameras=some(found.cameras),
        junk=found.junk[index],
        names=[found.names[row] for row in rows],
    )


def _join(query: IdentityEmbeddings, gallery: IdentityEmbeddings) -> IdentityEmbeddings:
    """Join queries and a gallery from separate files."""
    sizes = query.features.shape[1], gallery.features.shape[1]
    if sizes[0] != sizes[1]:
        raise FileError(
            f"{gallery.title}: a gallery of {sizes[1]} dimensions does not go with queries of "
            f"{sizes[0]} in {query.title}; were both written by one network?"
        )
    for what in ("identities", "cameras"):
        sides = getattr(query, what), getattr(gallery, what)
        if (sides[0] is None) != (sides[1] is None):
            without = query.title if sides[0] is None else gallery.title
            hint = "; --ignore-cameras does without" if what == "cameras" else ""
            raise FileError(
                f"{without}: {what} are expected of queries and of the gallery, got none{hint}"
            )
        if sides[0] is not None and isinstance(sides[0][0], str) != isinstance(sides[1][0], str):
            raise FileError(
                f"{gallery.title}: {what} are expected to be texts or numbers in both files, "
                f"got {sides[0][0]!r} in {query.title} and {sides[1][0]!r} here"
            )
    first = torch.arange(len(query) + len(gallery)) < len(query)

    def both(what: str) -> Any:
        own = getattr(query, what)
        return None if own is None else [*own, *getattr(gallery, what)]

    return IdentityEmbeddings(
        f"{query.title} in {gallery.title}",
        torch.cat([query.features, gallery.features]),
        both("identities"),
        both("cameras"),
        torch.cat([query.junk, gallery.junk]),
        first,
        both("names"),
        query.named and gallery.named,
        notes=tuple(dict.fromkeys((*query.notes, *gallery.notes))),
    )


def run_embeddings(folder: str | os.PathLike[str]) -> IdentityEmbeddings:
    """Read the embeddings of the test images of a finished run.

    Raises:
        RecordError: the folder is no run, or has no usable embeddings.
    """
    run = Run(Path(folder))
    path = run.folder / "embeddings.safetensors"
    if not run.has("embeddings"):
        status = run.config and run.status
        raise RecordError(f"{run.folder}: the run has no {path.name}, it is {status}")
    tensors = run.tensors("embeddings")
    if not {"features", "labels"} <= set(tensors):
        raise RecordError(f"{path}: damaged (it has no features or no labels)")
    labels, names = tensors["labels"].tolist(), _identity_names(run)
    features = files.as_matrix(path, "embeddings", "features", tensors["features"])
    if len(labels) != len(features) or any(not 0 <= label < len(names) for label in labels):
        raise RecordError(f"{path}: damaged (features, labels and classes do not belong together)")
    identities = [names[label] for label in labels]
    trained, present = set(map(str, run.data["classes"])), set(identities)
    notes = []
    both = len(trained & present)
    if both:
        notes.append(
            f"{both:,} of {len(present):,} identities were trained on: the numbers do not say how "
            "well new ones are recognised"
        )
    index = tensors.get("index", torch.arange(len(labels)))
    query, cameras = tensors.get("query"), tensors.get("camera")
    pairs = None
    if "pairs" in tensors:
        pairs = PairRows(tensors["pairs"], tensors["same"].bool(), tensors.get("fold"))
    return IdentityEmbeddings(
        str(run.folder),
        features,
        identities,
        None if cameras is None else cameras.tolist(),
        torch.zeros(len(labels), dtype=torch.bool),
        None if query is None else query.bool(),
        [f"image {place}" for place in index.tolist()],
        pictures=RunPictures(run, index),
        notes=tuple(notes),
        pairs=pairs,
    )


def _identity_names(run: Run) -> list[str]:
    """Return the names of the labels of the test images."""
    names = run.data.get("identities", run.data.get("classes"))
    if not isinstance(names, list):
        raise RecordError(f"{run.folder / 'data.json'}: damaged (no list of classes)")
    return [str(name) for name in names]
