"""Enrol identities, identify queries among them, and reject unknown ones."""

import heapq
import math
import os
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tammes.gallery.approximate_search import ENGINES, Engine, Recall, SearchIndex
from tammes.gallery.embedder import (
    Embedder,
    check_lengths,
    embed,
    model_digest,
    unit_rows,
)
from tammes.gallery.exact_search import search_rows
from tammes.gallery.gallery_file import read_gallery, write_gallery
from tammes.gallery.ids import Id, as_ids, shown
from tammes.gallery.pair_scores import CalibratedThreshold, calibrate, pair_points
from tammes.gallery.row_blocks import RowBlocks
from tammes.gallery.templates import ROWS, Template, Templates
from tammes.metrics.functional.operating_points import check_scores, rank_scores

Existing = Literal["refuse", "add", "replace"]
"""Treatment of an identity that is already enrolled."""


class Identified(NamedTuple):
    """Result of :meth:`Gallery.identify`.

    Attributes:
        ids: identities of each query, the most similar first.
        scores: their cosine similarities, shape ``(Q, K)``; -inf in the last places if an
            approximate search found fewer.
        known: whether the first is similar enough, shape ``(Q,)``; True without a threshold.
        sources: source of the most similar enrolled image of each identity, or of its first image
            with template ``"mean"``; empty if not given.
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


class Gallery:
    r"""Known identities with one or more embeddings each, searched by cosine similarity.

    With ``template="mean"`` an identity has one template, the normalised mean of its unit
    embeddings; with ``"nearest"`` it keeps them all, and the most similar one counts:

    .. math::
        s(x, a) = \frac{\langle x, t_a\rangle}{\|x\|\,\|t_a\|},\quad
        t_a = \sum_{i: y_i = a} \frac{e_i}{\|e_i\|}
        \qquad\text{or}\qquad
        s(x, a) = \max_{i: y_i = a} \frac{\langle x, e_i\rangle}{\|x\|\,\|e_i\|}

    A query whose best similarity is below :attr:`accept_at` is unknown. The search is exact, in
    blocks; :meth:`search_with` selects an approximate one.

    Args:
        model: model that embeds images, or its digest. A gallery rejects embeddings of another
            model. Without it, the origin of embeddings is not checked.
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
        self.digest = None if model is None else model_digest(model)
        self.template, self.device = template, torch.device(device)
        self.accept_at: float | None = None
        self._templates = Templates(template, RowBlocks(0, self.device))
        self._engine: Engine | None = None
        self._index: SearchIndex | None = None
        self._needed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._templates.ids)

    def __contains__(self, identity: object) -> bool:
        return identity in self._templates.place

    def __repr__(self) -> str:
        return (
            f"Gallery({len(self):,} identities, {sum(self._templates.images):,} images, "
            f"size={self.size}, template={self.template!r}, accept_at={self.accept_at})"
        )

    @property
    def ids(self) -> list[Id]:
        """Identities in the order of their enrolment."""
        return list(self._templates.ids)

    @property
    def size(self) -> int | None:
        """Dimension of the embeddings; None while the gallery is empty."""
        return self._templates.rows.size or None

    def images(self, identity: Id) -> int:
        """Return the number of enrolled images of an identity."""
        (place,) = self._templates.known("Gallery.images", [identity])
        return self._templates.images[place]

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
            existing: what to do with an identity that is already in the gallery: ``"refuse"`` it,
                ``"add"`` the embeddings to its own, or ``"replace"`` those.
            sources: where each comes from, such as the path of its file; :meth:`identify` returns
                them. By default the names of images, and empty for embeddings.
            digest: digest of the model of the embeddings, to be compared with the gallery's.
            unreadable: called for each image that cannot be read, which is left out; by default
                the first one is an error.
        """
        name = "Gallery.enrol"
        if existing not in get_args(Existing):
            raise ValueError(
                f"{name} expects existing 'refuse', 'add' or 'replace', got {existing!r}"
            )
        names = as_ids(name, ids, self._templates.ids)
        before = [identity for identity in dict.fromkeys(names) if identity in self]
        if before and existing == "refuse":
            raise ValueError(
                f"{name} expects identities that are not enrolled yet, got {shown(before)}; "
                "existing='add' adds to their images, existing='replace' replaces them"
            )
        self._check_digest(name, digest)
        embedded = embed(name, x, self.model, self.size, unreadable)
        for what, values in (("ids", names), ("sources", sources)):
            if values is not None and len(values) != embedded.given:
                raise ValueError(
                    f"{name} expects {embedded.given:,} {what}, one for each row, "
                    f"got {len(values):,}"
                )
        if not embedded.blocks:
            return
        check_lengths(name, embedded.blocks)
        names = [names[position] for position in embedded.positions]
        if sources is None:
            listed = embedded.names
        else:
            listed = [os.fsdecode(sources[position]) for position in embedded.positions]
        if existing == "replace":
            self.remove([each for each in dict.fromkeys(names) if each in self])
        self._changed()
        begin = 0
        waiting = embedded.blocks[::-1]
        embedded.blocks.clear()
        while waiting:
            # Freed as they are enrolled, so that embeddings are in memory only once.
            blocks = [waiting.pop()]
            while waiting and sum(map(len, blocks)) + len(waiting[-1]) <= ROWS:
                blocks.append(waiting.pop())
            block = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
            for some in block.split(ROWS):
                part = slice(begin, begin + len(some))
                rows = unit_rows(some, self.device)
                self._templates.add(rows, names[part], listed[part] or [""] * len(rows))
                begin += len(some)

    def remove(self, ids: Any) -> None:
        """Remove identities with all their images; none is removed if one of them is unknown."""
        name = "Gallery.remove"
        gone = set(self._templates.known(name, as_ids(name, ids)))
        if gone:
            self._changed()
            self._templates.remove(gone)

    def _changed(self) -> None:
        """Drop everything computed from the rows."""
        self._index = None
        self._needed.clear()

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
        templates = self._templates
        scores, rows = self._search(query, self._rows_for(top))
        # An approximate search may find too few rows; the others are -1.
        listed = places = [[row for row in found if row >= 0] for found in rows.tolist()]
        if self.template == "nearest":
            owners = templates.owners
            chosen = [_first_of_each([owners[row] for row in found], top) for found in listed]
            listed = [[found[k] for k in ks] for found, ks in zip(listed, chosen, strict=True)]
            places = [[owners[row] for row in found] for found in listed]
            columns = [(ks + [0] * top)[:top] for ks in chosen]
            scores = scores.gather(1, torch.tensor(columns, dtype=torch.long).view(-1, top))
        counts = torch.tensor([len(found) for found in listed])
        scores[torch.arange(top) >= counts[:, None]] = -torch.inf
        return Identified(
            [[templates.ids[place] for place in found] for found in places],
            scores,
            (scores[:, 0] >= threshold) & (counts > 0),
            [[templates.sources[row] for row in found] for found in listed],
        )

    def _search(self, query: Tensor, top: int, *, exact: bool = False) -> tuple[Tensor, Tensor]:
        """Return similarities and rows of the most similar templates, shape ``(Q, top)``."""
        templates = self._templates.rows
        if self._engine is None or exact:
            scores, rows = search_rows(query, templates.blocks, top)
            return scores.cpu(), rows.cpu()
        if self._index is None:
            self._index = ENGINES[self._engine](templates.blocks(), templates.size)
        return self._index.search(query, top)

    def _rows_for(self, top: int) -> int:
        """Return a number of rows that is sure to contain at least ``top`` identities."""
        if self.template == "mean":
            return top
        # In the worst case, the first rows all belong to the identities with most images.
        if top not in self._needed:
            self._needed[top] = 1 + sum(heapq.nlargest(top - 1, self._templates.images))
        return self._needed[top]

    @torch.no_grad()
    def search_with(
        self, engine: Engine | Literal["exact"], queries: Any = None, *, top: int = 10
    ) -> Recall:
        """Search with FAISS or usearch from now on, or exactly again; measure the recall.

        The index (HNSW) is built here, and rebuilt after the gallery changes. It holds a copy of
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
        rows = self._templates.rows
        if queries is None:
            self._check_enrolled(name)
            count = min(len(rows), 256)
            query = rows[torch.arange(count) * len(rows) // count]
        else:
            query = self._queries(name, queries, None)
        before = self._engine, self._index
        self._engine, self._index = (None if engine == "exact" else engine), None
        top = min(top, len(rows))
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

        A pair is a query and an identity of the gallery. At a FAR of 1 %, an unknown query is
        accepted as 1 % of the identities, so the fraction of unknown queries accepted as some
        identity is larger, and grows with the gallery.

        Args:
            far: largest fraction of different-identity pairs to accept; at least ``1 / far`` such
                pairs are needed.
            x: embeddings or images that are not enrolled, of enrolled identities or of others.
            ids: identity of each.
            pairs: instead of both, scores of pairs, shape ``(P,)``, and whether each pair is of the
                same identity, shape ``(P,)``.
            digest: digest of the model of the embeddings, to be compared with the gallery's.

        Returns:
            The :class:`CalibratedThreshold`: the edge of one of 65,536 bins from -1 to 1 or, with
            ``pairs``, one of the scores.
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
            points = pair_points(self._templates, query, as_ids(name, ids, self._templates.ids))
        found = calibrate(name, points, far)
        self.accept_at = found.threshold
        return found

    # ------------------------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the gallery to a safetensors file, which is replaced only if that succeeds.

        The file holds templates, ids, sources, the threshold and the digest of the model; neither
        the model nor an index of :meth:`search_with`.
        """
        self._check_enrolled("Gallery.save")
        settings = {"model": self.digest, "accept_at": self.accept_at}
        write_gallery(path, self._templates, {"template": self.template, **settings})

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
            model: model that embeds images, or its digest; it must be the gallery's.
            device: device of the embeddings.

        Raises:
            ValueError: the gallery is of another model; or, as ``CheckpointError``, the file is
                missing, damaged, or not a gallery.
        """
        templates, settings = read_gallery(path, device)
        gallery = cls(settings["model"], template=templates.kind, device=device)
        if model is not None:
            gallery.use_model(model)
        gallery.accept_at, gallery._templates = settings["accept_at"], templates
        return gallery

    def use_model(self, model: Embedder | str) -> None:
        """Embed images with this model from now on; it must be the model of the gallery."""
        digest = model_digest(model)
        if len(self) or self.digest is not None:
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
        if not len(self):
            raise ValueError(f"{name} expects an enrolled identity, got an empty gallery")

    def _queries(self, name: str, x: Any, digest: str | None) -> Tensor:
        """Return the normalised embeddings of queries."""
        self._check_enrolled(name)
        self._check_digest(name, digest)
        blocks = embed(name, x, self.model, self.size).blocks
        if not blocks:
            return torch.empty(0, self.size or 0, device=self.device)
        parts = (part for block in blocks for part in block.split(ROWS))
        return torch.cat([unit_rows(part, self.device) for part in parts])


def _check_top(name: str, top: int) -> int:
    """Validate the number of results, which may be a numpy integer."""
    if isinstance(top, bool) or not isinstance(top, Integral) or top < 1:
        raise ValueError(f"{name} expects top to be an integer of 1 or more, got {top!r}")
    return int(top)


def _check_threshold(name: str, threshold: Any) -> float:
    """Return a threshold as a number; ``None`` accepts every query."""
    if threshold is None:
        return -math.inf
    if not isinstance(threshold, Real | Tensor) or math.isnan(threshold):
        raise ValueError(f"{name} expects threshold to be a number, got {threshold!r}")
    return float(threshold)


def _first_of_each(owners: list[int], top: int) -> list[int]:
    """Return the index of the first row of each of the first ``top`` identities."""
    first: dict[int, int] = {}
    for place, owner in enumerate(owners):
        if first.setdefault(owner, place) == place and len(first) == top:
            break
    return list(first.values())
