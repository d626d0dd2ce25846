"""Templates: unit rows, and the identities that they belong to."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tammes.gallery.ids import Id, shown
from tammes.gallery.row_blocks import RowBlocks
from tammes.similarity import directions, norm

Template = Literal["mean", "nearest"]
"""Comparison with an identity: with the mean of its embeddings, or with the nearest of them."""
ROWS = 8192
"""Rows that are processed at a time."""


@dataclass
class Templates:
    """Identities with a mean template each, or with all their embeddings.

    Attributes:
        kind: ``"mean"`` or ``"nearest"``.
        rows: unit templates; of size 0 while there are none.
        ids: identities in the order of their enrolment.
        images: number of images of each identity.
        lengths: norm of the sum of each identity's unit embeddings; empty for ``"nearest"``.
        owners: index of the identity of each row; empty for ``"mean"``.
        sources: source of each row.
    """

    kind: Template
    rows: RowBlocks
    ids: list[Id] = field(default_factory=list)
    images: "array[int]" = field(default_factory=lambda: array("q"))
    lengths: "array[float]" = field(default_factory=lambda: array("f"))
    owners: "array[int]" = field(default_factory=lambda: array("q"))
    sources: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = {identity: place for place, identity in enumerate(self.ids)}

    def known(self, name: str, ids: Iterable[Id]) -> list[int]:
        """Return the indices of identities; raise ``ValueError`` if one is missing."""
        listed = list(ids)
        missing = [identity for identity in listed if identity not in self.place]
        if missing:
            raise ValueError(
                f"{name} expects identities of the gallery, got {shown(missing)}, which "
                f"{'are' if len(missing) > 1 else 'is'} not among its {len(self.ids):,}"
            )
        return [self.place[identity] for identity in listed]

    def add(self, rows: Tensor, names: list[Id], sources: list[str]) -> None:
        """Add unit rows, shape ``(n, D)``, with their identities and sources."""
        if not self.rows.size:
            self.rows = RowBlocks(rows.shape[1], self.rows.device)
        places = [self._placed(identity) for identity in names]
        for place in places:
            self.images[place] += 1
        if self.kind == "nearest":
            begin = len(self.rows)
            self.rows.extend(len(rows))
            self.rows[begin : begin + len(rows)] = rows
            self.owners.extend(places)
            self.sources += sources
            return
        missing = len(self.ids) - len(self.rows)
        self.rows.extend(missing)
        self.lengths.extend([0.0] * missing)
        self.sources += [""] * missing
        changed, where = torch.tensor(places).unique(return_inverse=True)
        listed, device = changed.tolist(), self.rows.device
        lengths = torch.tensor([self.lengths[place] for place in listed], device=device)
        sums = self.rows[changed] * lengths[:, None]
        sums.index_add_(0, where.to(device), rows)
        for place, length in zip(listed, norm(sums).tolist(), strict=True):
            self.lengths[place] = length
        for place, source in zip(places, sources, strict=True):
            self.sources[place] = self.sources[place] or source
        self.rows[changed] = directions(sums)

    def _placed(self, identity: Id) -> int:
        """Return the index of an identity; a new one is added."""
        place = self.place.setdefault(identity, len(self.ids))
        if place == len(self.ids):
            self.ids.append(identity)
            self.images.append(0)
        return place

    def remove(self, gone: set[int]) -> None:
        """Remove identities by index."""
        mean = self.kind == "mean"
        owners = range(len(self.ids)) if mean else self.owners
        kept = [row for row, owner in enumerate(owners) if owner not in gone]
        for first in range(0, len(kept), ROWS):
            # Rows only move towards the front, so none is overwritten before it has been moved.
            rows = torch.tensor(kept[first : first + ROWS])
            self.rows[first : first + len(rows)] = self.rows[rows]
        self.rows.truncate(len(kept))
        self.sources = [self.sources[row] for row in kept]
        places = [place for place in range(len(self.ids)) if place not in gone]
        if mean:
            self.lengths = array("f", [self.lengths[place] for place in places])
        else:
            new = {place: number for number, place in enumerate(places)}
            self.owners = array("q", [new[self.owners[row]] for row in kept])
        self.images = array("q", [self.images[place] for place in places])
        self.ids = [self.ids[place] for place in places]
        self.place = {identity: place for place, identity in enumerate(self.ids)}
        if not self.ids:
            self.rows = RowBlocks(0, self.rows.device)
