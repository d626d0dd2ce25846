"""Enrol identities, identify queries among them, and reject the unknown."""

import heapq
import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from tammes.gallery.approximate_search import ENGINES, Engine, SearchIndex
from tammes.gallery.exact_search import score_blocks, search_rows
from tammes.gallery.gallery_file import StoredGallery, read_gallery, write_gallery
from tammes.gallery.ids import Id, as_ids, shown
from tammes.gallery.row_blocks import RowBlocks
from tammes.metrics.functional.operating_points import (
    OperatingPoints,
    accumulated,
    check_rate,
    check_scores,
    rank_scores,
    smallest_threshold,
)
from tammes.metrics.functional.verification import bin_edges, score_sums
from tammes.similarity import directions, norm

Template = Literal["mean", "nearest"]
"""Comparison with an identity: with the mean of its embeddings, or with the nearest of them."""
Existing = Literal["refuse", "add", "replace"]
"""Treatment of an identity that is enrolled already."""
_ROWS = 8192
"""Embeddings or images that are enrolled at once."""
_PAIRS = 4 * 2**20
"""Scores of pairs that a calibration counts at once."""
_BINS = 65_536
"""Bins of the histogram of scores of a calibration."""


class EmbeddedImages(Protocol):
    """Embeddings of a batch of images."""

    @property
    def positions(self) -> list[int]:
        """Place of each among the images given; an unreadable image has none."""

    @property
    def names(self) -> list[str]:
        """Name of each, such as the path of its file."""

    @property
    def embeddings(self) -> Tensor:
        """Embeddings, shape ``(n, D)``."""


class Embedder(Protocol):
    """Model that embeds images, such as :func:`tammes.load` returns."""

    @property
    def digest(self) -> str:
        """Hash of its weights and of its preprocessing."""

    def embed_batches(
        self, images: Any, *, unreadable: Callable[[Any], None] | None = None
    ) -> Iterator[EmbeddedImages]:
        """Embed images batch by batch; report unreadable images, or raise for the first."""


class _Embedded(NamedTuple):
    """Checked embeddings in blocks, and the names and the number of the images given."""

    blocks: list[Tensor]
    positions: list[int]
    names: list[str]
    given: int


class Identified(NamedTuple):
    """Result of :meth:`Gallery.identify`.

    Attributes:
        ids: identities of each query, the most similar first.
        scores: their cosine similarities, shape ``(Q, K)``; -inf in the last places if an
            approximate search found fewer.
        known: whether the first is similar enough, shape ``(Q,)``; True without a threshold.
        sources: source of the most similar enrolled image of each identity, with template
            ``"mean"`` of its first one; empty if not given.
    """

    ids: list[list[Id]]
    scores: Tensor
    known: Tensor
    sources: list[list[str]]

    @property
    def best(self) -> list[Id | None]:
        """Most similar identity of each query, None for an unknown one."""
        pairs = zip(self.ids, self.known.tolist(), strict=True)
        return [ids[0] if known else None for ids, known in pairs]


class CalibratedThreshold(NamedTuple):
    """Result of :meth:`Gallery.threshold`.

    Attributes:
        threshold: smallest threshold whose FAR does not exceed the target.
        far: share of the different pairs that are accepted at it.
        tar: share of the same pairs that are accepted at it; NaN without such pairs.
        same: number of pairs of one identity.
        different: number of pairs of two identities.
    """

    threshold: float
    far: float
    tar: float
    same: int
    different: int


class Recall(NamedTuple):
    """Agreement of an approximate search with the exact one; see :meth:`Gallery.search_with`.

    Attributes:
        recall: share of the exact results that it finds.
        queries: number of queries.
        top: number of results of a query.
    """

    recall: float
    queries: int
    top: int


class Gallery:
    r"""Known identities, each with one embedding or more, to be searched by cosine similarity.

    With ``template="mean"`` an identity has one template, the direction of the mean of its unit
    embeddings; with ``"nearest"`` it has them all, and the most similar counts:

    .. math::
        s(x, a) = \frac{\langle x, t_a\rangle}{\|x\|\,\|t_a\|},\quad
        t_a = \sum_{i: y_i = a} \frac{e_i}{\|e_i\|}
        \qquad\text{or}\qquad
        s(x, a) = \max_{i: y_i = a} \frac{\langle x, e_i\rangle}{\|x\|\,\|e_i\|}

    A query whose best similarity is below :attr:`accept_at` is unknown. The search is exact, by
    blocks; :meth:`search_with` replaces it by an approximate one.

    Args:
        model: model that embeds images, or its digest. A gallery refuses embeddings of another.
            Without one the gallery knows nothing of the origin of its embeddings.
        template: ``"mean"`` or ``"nearest"``.
        device: device of the embeddings.

    Attributes:
        accept_at: smallest similarity of a known query; None accepts every query.

    Example:
        >>> import torch, tammes
        >>> gallery = tammes.Gallery()
        >>> gallery.enrol(torch.tensor([[2.0, 0.0], [1.0, 0.2], [0.0, 1.0]]), ["ann", "ann", "bob"])
        >>> found = gallery.identify(torch.tensor([[0.1, 0.9], [-1.0, -1.0]]), threshold=0.5)
        >>> found.best, found.ids[0]
        (['bob', None], ['bob', 'ann'])
    """

    def __init__(
        self,
        model: Embedder | str | None = None,
        *,
        template: Template = "mean",
        device: torch.device | str = "cpu",
    ) -> None:
        if template not in get_args(Template):
            raise ValueError(f"Gallery expects template 'mean' or 'nearest', got {template!r}")
        self.model = None if isinstance(model, str) else model
        self.digest = None if model is None else _digest(model)
        self.template, self.device = template, torch.device(device)
        self.accept_at: float | None = None
        self._rows: RowBlocks | None = None
        self._ids: list[Id] = []
        self._place: dict[Id, int] = {}
        self._images = array("q")
        self._lengths = array("f")
        # With template "nearest", the identity of each row.
        self._owners = array("q")
        self._sources: list[str] = []
        self._engine: Engine | None = None
        self._index: SearchIndex | None = None
        self._needed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, identity: object) -> bool:
        return identity in self._place

    def __repr__(self) -> str:
        return (
            f"Gallery({len(self):,} identities, {sum(self._images):,} images, "
            f"size={self.size}, template={self.template!r}, accept_at={self.accept_at})"
        )

    @property
    def ids(self) -> list[Id]:
        """Identities in the order of their enrolment."""
        return list(self._ids)

    @property
    def size(self) -> int | None:
        """Dimension of the embeddings; None while the gallery is empty."""
        return None if self._rows is None else self._rows.size

    def images(self, identity: Id) -> int:
        """Return the number of enrolled images of an identity."""
        (identity,) = self._known("Gallery.images", [identity])
        return self._images[self._place[identity]]

    # ------------------------------------------------------------------------------- enrolment

    @torch.no_grad()
    def enrol(
        self,
        x: Any,
        ids: Any,
        *,
        existing: Existing = "refuse",
        sources: Sequence[str | os.PathLike[str]] | None = None,
        digest: str | None = None,
        unreadable: Callable[[Any], None] | None = None,
    ) -> None:
        """Enrol embeddings or images. All of them are enrolled, or none if an error is raised.

        Args:
            x: embeddings of a floating type, shape ``(N, D)``; or images, which the model embeds
                batch by batch.
            ids: identity of each, strings or integers; several embeddings may have one identity.
            existing: what to do with an identity that is in the gallery: ``"refuse"``, ``"add"``
                the embeddings to those that it has, or ``"replace"`` these.
            sources: where each comes from, such as the path of its file; :meth:`identify` returns
                them. By default the names of images, and nothing for embeddings.
            digest: digest of the model of the embeddings, to be compared with the gallery's.
            unreadable: called for each image that cannot be read, which is left out; by default
                the first one is an error.
        """
        name = "Gallery.enrol"
        if existing not in get_args(Existing):
            raise ValueError(
                f"{name} expects existing 'refuse', 'add' or 'replace', got {existing!r}"
            )
        names = as_ids(name, ids, self._ids)
        before = [identity for identity in dict.fromkeys(names) if identity in self._place]
        if before and existing == "refuse":
            raise ValueError(
                f"{name} expects identities that are not enrolled yet, got {shown(before)}; "
                "existing='add' adds to their images, existing='replace' replaces them"
            )
        embedded = self._embedded(name, x, digest, unreadable)
        for what, values in (("ids", names), ("sources", sources)):
            if values is not None and len(values) != embedded.given:
                raise ValueError(
                    f"{name} expects {embedded.given:,} {what}, one for each row, "
                    f"got {len(values):,}"
                )
        if not embedded.blocks:
            return
        self._check_lengths(name, embedded.blocks)
        names = [names[position] for position in embedded.positions]
        if sources is None:
            listed = embedded.names
        else:
            listed = [os.fsdecode(sources[position]) for position in embedded.positions]
        if existing == "replace":
            self.remove([each for each in dict.fromkeys(names) if each in self._place])
        if self._rows is None:
            self._rows = RowBlocks(embedded.blocks[0].shape[1], self.device)
        self._changed()
        begin = 0
        waiting = embedded.blocks[::-1]
        embedded.blocks.clear()
        while waiting:
            # Freed as they are enrolled, so that the memory is that of the embeddings once.
            blocks = [waiting.pop()]
            while waiting and sum(map(len, blocks)) + len(waiting[-1]) <= _ROWS:
                blocks.append(waiting.pop())
            block = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
            part = slice(begin, begin + len(block))
            self._enrol(block, names[part], listed[part] or [""] * len(block))
            begin += len(block)

    def _enrol(self, embeddings: Tensor, names: list[Id], sources: list[str]) -> None:
        """Enrol checked embeddings, a block at a time."""
        assert self._rows is not None
        for first in range(0, len(names), _ROWS):
            part = slice(first, first + _ROWS)
            rows = _unit_rows(embeddings[part], self.device)
            places = [self._placed(identity) for identity in names[part]]
            for place in places:
                self._images[place] += 1
            if self.template == "nearest":
                begin = len(self._rows)
                self._rows.extend(len(rows))
                self._rows[begin : begin + len(rows)] = rows
                self._owners.extend(places)
                self._sources += sources[part]
                continue
            missing = len(self._ids) - len(self._rows)
            self._rows.extend(missing)
            self._lengths.extend([0.0] * missing)
            self._sources += [""] * missing
            changed, where = torch.tensor(places).unique(return_inverse=True)
            listed = changed.tolist()
            lengths = torch.tensor([self._lengths[place] for place in listed], device=self.device)
            sums = self._rows[changed] * lengths[:, None]
            sums.index_add_(0, where.to(self.device), rows)
            for place, length in zip(listed, norm(sums).tolist(), strict=True):
                self._lengths[place] = length
            for place, source in zip(places, sources[part], strict=True):
                self._sources[place] = self._sources[place] or source
            self._rows[changed] = directions(sums)

    def _placed(self, identity: Id) -> int:
        """Return the number of an identity, which is added if it is new."""
        place = self._place.setdefault(identity, len(self._ids))
        if place == len(self._ids):
            self._ids.append(identity)
            self._images.append(0)
        return place

    def _changed(self) -> None:
        """Drop what was computed from the rows."""
        self._index = None
        self._needed.clear()

    def remove(self, ids: Any) -> None:
        """Remove identities with all their images; none is removed if one of them is unknown."""
        name = "Gallery.remove"
        gone = {self._place[identity] for identity in self._known(name, as_ids(name, ids))}
        if not gone:
            return
        assert self._rows is not None
        self._changed()
        mean = self.template == "mean"
        owners = range(len(self._ids)) if mean else self._owners
        kept = [row for row, owner in enumerate(owners) if owner not in gone]
        for first in range(0, len(kept), _ROWS):
            # A row never moves beyond a row that is still to be moved.
            rows = torch.tensor(kept[first : first + _ROWS])
            self._rows[first : first + len(rows)] = self._rows[rows]
        self._rows.truncate(len(kept))
        self._sources = [self._sources[row] for row in kept]
        places = [place for place in range(len(self._ids)) if place not in gone]
        if mean:
            self._lengths = array("f", [self._lengths[place] for place in places])
        else:
            new = {place: number for number, place in enumerate(places)}
            self._owners = array("q", [new[self._owners[row]] for row in kept])
        self._images = array("q", [self._images[place] for place in places])
        self._ids = [self._ids[place] for place in places]
        self._place = {identity: place for place, identity in enumerate(self._ids)}
        if not self._ids:
            self._rows = None

    # ------------------------------------------------------------------------------- searching

    @torch.no_grad()
    def identify(
        self,
        x: Any,
        top: int = 5,
        *,
        threshold: float | None = None,
        digest: str | None = None,
    ) -> Identified:
        """Find the most similar identities.

        Args:
            x: embeddings, shape ``(Q, D)`` or ``(D,)``, or images.
            top: number of identities K for each query; all if there are fewer.
            threshold: smallest similarity of a known query; by default :attr:`accept_at`.
            digest: digest of the model of the embeddings, to be compared with the gallery's.
        """
        name = "Gallery.identify"
        top = _check_top(name, top)
        threshold = _check_threshold(name, self.accept_at if threshold is None else threshold)
        query = self._queries(name, x, digest)
        top = min(top, len(self))
        scores, rows = self._search(query, self._rows_for(top))
        # An approximate search may find too few rows; the others are -1.
        listed = places = [[row for row in found if row >= 0] for found in rows.tolist()]
        if self.template == "nearest":
            chosen = [_first_of_each([self._owners[row] for row in found], top) for found in listed]
            listed = [[found[k] for k in ks] for found, ks in zip(listed, chosen, strict=True)]
            places = [[self._owners[row] for row in found] for found in listed]
            columns = [(ks + [0] * top)[:top] for ks in chosen]
            scores = scores.gather(1, torch.tensor(columns, dtype=torch.long).view(-1, top))
        counts = torch.tensor([len(found) for found in listed])
        scores[torch.arange(top) >= counts[:, None]] = -torch.inf
        return Identified(
            [[self._ids[place] for place in found] for found in places],
            scores,
            (scores[:, 0] >= threshold) & (counts > 0),
            [[self._sources[row] for row in found] for found in listed],
        )

    def _search(self, query: Tensor, top: int, *, exact: bool = False) -> tuple[Tensor, Tensor]:
        """Return similarities and rows of the most similar templates, shape ``(Q, top)``."""
        assert self._rows is not None
        if self._engine is None or exact:
            scores, rows = search_rows(query, self._rows.blocks, top)
            return scores.cpu(), rows.cpu()
        if self._index is None:
            self._index = ENGINES[self._engine](self._rows.blocks(), self._rows.size)
        return self._index.search(query, top)

    def _rows_for(self, top: int) -> int:
        """Return the number of rows that are of ``top`` identities or more, whichever they are."""
        if self.template == "mean":
            return top
        # In the worst case the first rows are all those of the largest identities.
        if top not in self._needed:
            self._needed[top] = 1 + sum(heapq.nlargest(top - 1, self._images))
        return self._needed[top]

    @torch.no_grad()
    def search_with(
        self, engine: Engine | Literal["exact"], queries: Any = None, *, top: int = 10
    ) -> Recall:
        """Search with FAISS or usearch from now on, or exactly again; measure the recall.

        The index (HNSW) is built here, and again after a change of the gallery. It holds a copy of
        the embeddings and is not saved.

        Args:
            engine: ``"faiss"``, ``"usearch"`` or ``"exact"``.
            queries: embeddings or images to measure the recall on; by default 256 templates of
                the gallery, which are easier to find than real queries.
            top: number of results that are compared.

        Returns:
            The :class:`Recall` against the exact search.
        """
        name = "Gallery.search_with"
        if engine not in ("exact", *ENGINES):
            raise ValueError(f"{name} expects engine 'exact', 'faiss' or 'usearch', got {engine!r}")
        top = _check_top(name, top)
        if queries is None:
            self._check_enrolled(name)
            assert self._rows is not None
            count = min(len(self._rows), 256)
            query = self._rows[torch.arange(count) * len(self._rows) // count]
        else:
            query = self._queries(name, queries, None)
            assert self._rows is not None
        before = self._engine, self._index
        self._engine, self._index = (None if engine == "exact" else engine), None
        top = min(top, len(self._rows))
        try:
            found = self._search(query, top)[1]
        except BaseException:
            self._engine, self._index = before
            raise
        wanted = self._search(query, top, exact=True)[1]
        hits = (found[:, :, None] == wanted[:, None, :]).any(2)
        return Recall(float(hits.double().mean()), len(query), top)

    @torch.no_grad()
    def threshold(
        self,
        far: float = 0.01,
        x: Any = None,
        ids: Any = None,
        *,
        pairs: tuple[Tensor, Tensor] | None = None,
        digest: str | None = None,
    ) -> CalibratedThreshold:
        """Set :attr:`accept_at` to the smallest threshold whose FAR does not exceed a target.

        The pairs are of a query and an identity of the gallery. At a FAR of 1 % a query that nobody
        knows is accepted for 1 % of the identities, so the share of unknown queries that are
        accepted for some identity is larger, the more so the larger the gallery.

        Args:
            far: largest share of accepted pairs of different identities; ``1 / far`` of them or
                more are needed.
            x: embeddings or images that are not enrolled, of enrolled identities or of others.
            ids: identity of each.
            pairs: instead of both, scores of pairs, shape ``(P,)``, and whether a pair is of one
                identity, shape ``(P,)``.
            digest: digest of the model of the embeddings, to be compared with the gallery's.

        Returns:
            The :class:`CalibratedThreshold`: the edge of one of 65,536 bins from -1 to 1, or, of
            given pairs, one of the scores.
        """
        name = "Gallery.threshold"
        if (x is None) != (ids is None) or (x is None) == (pairs is None):
            raise ValueError(f"{name} expects embeddings or images with their ids, or pairs")
        if pairs is not None:
            scores, same = pairs
            same = check_scores(name, scores, same, "same")
            points = rank_scores(scores, same).points()
        else:
            query = self._queries(name, x, digest)
            points = self._pair_points(query, as_ids(name, ids, self._ids))
        alike, different = int(points.all_positives), int(points.all_negatives)
        check_rate(name, "FAR", far, different, "pairs of different identities")
        place = smallest_threshold(points, far)
        self.accept_at = float(points.thresholds[place])
        return CalibratedThreshold(
            self.accept_at,
            float(points.negatives[place] / points.all_negatives),
            float(points.positives[place] / points.all_positives),
            alike,
            different,
        )

    def _pair_points(self, query: Tensor, ids: list[Id]) -> OperatingPoints:
        """Count the scores of all pairs of a query and an identity."""
        assert self._rows is not None
        if len(ids) != len(query):
            raise ValueError(
                f"Gallery.threshold expects {len(query):,} ids, one for each row, got {len(ids):,}"
            )
        limits, own = (-1.0, 1.0), torch.tensor([self._place.get(each, -1) for each in ids])
        owners = None
        if self.template == "nearest":
            owners = torch.tensor(self._owners, device=self.device)
        sums = None
        for rows in torch.arange(len(query)).split(max(_PAIRS // len(self), 1)):
            scores = torch.full((len(rows), len(self)), -torch.inf, device=self.device)
            for begin, block in score_blocks(query[rows], self._rows.blocks()):
                columns = slice(begin, begin + block.shape[1])
                if owners is None:
                    scores[:, columns] = block
                else:
                    scores.scatter_reduce_(1, owners[columns].expand_as(block), block, "amax")
            same = own[rows, None].to(self.device) == torch.arange(len(self), device=self.device)
            counted = score_sums(scores.clamp_(-1, 1).view(-1), same.view(-1), limits, _BINS)
            sums = counted if sums is None else type(sums)(*map(torch.add, sums, counted))
        assert sums is not None
        edges = bin_edges(limits, _BINS, self.device)
        return accumulated(edges, sums.same.flip(0), sums.different.flip(0))

    # ------------------------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the gallery to a safetensors file, which is replaced only if that succeeds.

        The file holds templates, ids, sources, the threshold and the digest of the model; neither
        the model nor an index of :meth:`search_with`.
        """
        if self._rows is None:
            raise ValueError("Gallery.save expects an enrolled identity, got an empty gallery")
        write_gallery(
            path,
            StoredGallery(
                self._rows,
                self._ids,
                self._images,
                self._lengths,
                self._owners,
                self._sources,
                {
                    "template": self.template,
                    "model": self.digest,
                    "accept_at": self.accept_at,
                },
            ),
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Embedder | str | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> "Gallery":
        """Read a gallery from a file.

        Args:
            path: file that :meth:`save` wrote.
            model: model that embeds images, or its digest; it must be the one of the gallery.
            device: device of the embeddings.

        Raises:
            ValueError: the gallery is of another model; or, as ``CheckpointError``, the file is
                missing, damaged, or not a gallery.
        """
        stored = read_gallery(path, device)
        gallery = cls(stored.settings["model"], template=stored.settings["template"], device=device)
        if model is not None:
            gallery.use_model(model)
        gallery.accept_at = stored.settings["accept_at"]
        gallery._rows, gallery._ids = stored.rows, stored.ids
        gallery._images, gallery._lengths = stored.images, stored.lengths
        gallery._owners, gallery._sources = stored.owners, stored.sources
        gallery._place = {identity: place for place, identity in enumerate(stored.ids)}
        return gallery

    def use_model(self, model: Embedder | str) -> None:
        """Embed images with this model from now on; it must be the model of the gallery."""
        digest = _digest(model)
        if self._ids or self.digest is not None:
            self._check_digest("Gallery", digest)
        self.model, self.digest = (None if isinstance(model, str) else model), digest

    def _check_digest(self, name: str, digest: str | None) -> None:
        if digest is None or digest == self.digest:
            return
        if self.digest is None:
            raise ValueError(
                f"{name} expects a gallery that knows its model, to compare it with {digest[:16]}; "
                "make it with tammes.Gallery(model)"
            )
        raise ValueError(
            f"{name} expects embeddings of the model of the gallery ({self.digest[:16]}), got "
            f"those of another ({digest[:16]}); embeddings of two models cannot be compared"
        )

    # ------------------------------------------------------------------------------- embeddings

    def _check_enrolled(self, name: str) -> None:
        if self._rows is None:
            raise ValueError(f"{name} expects an enrolled identity, got an empty gallery")

    def _known(self, name: str, ids: Iterable[Id]) -> list[Id]:
        listed = list(ids)
        missing = [identity for identity in listed if identity not in self._place]
        if missing:
            raise ValueError(
                f"{name} expects identities of the gallery, got {shown(missing)}, which "
                f"{'are' if len(missing) > 1 else 'is'} not among its {len(self):,}"
            )
        return listed

    def _queries(self, name: str, x: Any, digest: str | None) -> Tensor:
        """Return unit embeddings to search for."""
        self._check_enrolled(name)
        blocks = self._embedded(name, x, digest).blocks
        if not blocks:
            return torch.empty(0, self.size or 0, device=self.device)
        parts = (part for block in blocks for part in block.split(_ROWS))
        return torch.cat([_unit_rows(part, self.device) for part in parts])

    def _embedded(
        self,
        name: str,
        x: Any,
        digest: str | None,
        unreadable: Callable[[Any], None] | None = None,
    ) -> _Embedded:
        self._check_digest(name, digest)
        if _is_float_array(x) and not isinstance(x, Tensor):
            x = torch.as_tensor(x)
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim <= 2:
            x = x[None] if x.ndim == 1 else x
            self._check(name, x, self.size)
            return _Embedded([x][: len(x)], list(range(len(x))), [], len(x))
        if self.model is None:
            raise TypeError(
                f"{name} expects embeddings of a floating type, shape (N, D), or a gallery with a "
                f"model to embed images, got {type(x).__name__}"
            )
        found, size, skipped = _Embedded([], [], [], 0), self.size, 0

        def skip(image: Any) -> None:
            nonlocal skipped
            skipped += 1
            assert unreadable is not None
            unreadable(image)

        for batch in self.model.embed_batches(x, unreadable=unreadable and skip):
            block = batch.embeddings.detach()
            self._check(name, block, size)
            size = block.shape[1]
            found.blocks.append(block)
            found.positions.extend(batch.positions)
            found.names.extend(batch.names)
        return found._replace(given=len(found.positions) + skipped)

    def _check(self, name: str, embeddings: Tensor, size: int | None) -> None:
        """Raise ``ValueError`` for embeddings of another dimension, NaN or infinity."""
        if embeddings.ndim != 2 or embeddings.shape[1] != (size or embeddings.shape[1] or -1):
            hint = "" if size is None else "; were they made by another model?"
            raise ValueError(
                f"{name} expects embeddings of shape (N, {size or 'D'}), "
                f"got {tuple(embeddings.shape)}{hint}"
            )
        for first in range(0, len(embeddings), _ROWS):
            block = embeddings[first : first + _ROWS]
            # One sum is cheaper than a test of every element.
            if bool(block.sum(dtype=torch.double).isfinite()):
                continue
            wrong = (~block.isfinite()).any(1).nonzero()
            if len(wrong):
                raise ValueError(
                    f"{name} expects finite embeddings, got NaN or infinity in row "
                    f"{first + int(wrong[0])} of {len(embeddings):,}"
                )

    def _check_lengths(self, name: str, blocks: list[Tensor]) -> None:
        """Raise ``ValueError`` for embeddings of zeros, which have no direction."""
        zeros = sum(
            int((part.amax(1) == 0).logical_and(part.amin(1) == 0).sum())
            for block in blocks
            for part in block.split(_ROWS)
        )
        if zeros:
            count = sum(map(len, blocks))
            raise ValueError(
                f"{name} expects embeddings other than zero, got {zeros:,} of {count:,} that are "
                "zero and have no direction"
            )


def _digest(model: Embedder | str) -> str:
    """Return the digest of a model, which may be given instead of it."""
    if isinstance(model, str):
        return model
    if not callable(getattr(model, "embed_batches", None)):
        raise TypeError(
            "Gallery expects model to be a model that tammes.load returns, or its digest, got "
            f"{type(model).__name__}"
        )
    return model.digest


def _check_top(name: str, top: int) -> int:
    """Return a number of results, which may be an integer of numpy."""
    if isinstance(top, bool) or not isinstance(top, Integral) or top < 1:
        raise ValueError(f"{name} expects top to be an integer of 1 or more, got {top!r}")
    return int(top)


def _check_threshold(name: str, threshold: Any) -> float:
    """Return a threshold as a number; without one every query is known."""
    if threshold is None:
        return -math.inf
    if not isinstance(threshold, Real | Tensor) or math.isnan(threshold):
        raise ValueError(f"{name} expects threshold to be a number, got {threshold!r}")
    return float(threshold)


def _unit_rows(embeddings: Tensor, device: torch.device) -> Tensor:
    """Return the directions of rows in float32, also where float32 cannot hold their lengths."""
    rows = embeddings.detach().to(device)
    largest = rows.abs().amax(1, keepdim=True).double()
    usual = (largest == 0) | ((largest > 2.0**-60) & (largest < 2.0**60))
    if bool(usual.all()):
        return directions(rows.float())
    rows = rows.double() / torch.where(largest > 0, largest, 1.0)
    # A row is at least as long as its largest number, which is one now; or it is zero.
    return (rows / rows.norm(dim=1, keepdim=True).clamp_min(1)).float()


def _is_float_array(x: Any) -> bool:
    """Whether a value is a numpy array of a floating type with at most two dimensions."""
    return getattr(getattr(x, "dtype", None), "kind", "") == "f" and getattr(x, "ndim", 3) <= 2


def _first_of_each(owners: list[int], top: int) -> list[int]:
    """Return the places of the first row of each of the first identities."""
    first: dict[int, int] = {}
    for place, owner in enumerate(owners):
        if first.setdefault(owner, place) == place and len(first) == top:
            break
    return list(first.values())
