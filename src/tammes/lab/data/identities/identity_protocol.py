"""Evaluation protocol for test identities: queries and gallery, cameras, pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class IdentityProtocol:
    """Rules for comparing test images, as far as the data set prescribes them.

    Attributes:
        cameras: camera of each image, shape ``(N,)``, or None.
        query: whether an image is a query or in the gallery, shape ``(N,)``; None if each image is
            searched for among all others.
        pairs: rows of the pairs to verify, shape ``(P, 2)``; None for all pairs.
        folds: fold of each pair, shape ``(P,)``, or None.
    """

    cameras: Tensor | None = None
    query: Tensor | None = None
    pairs: Tensor | None = None
    folds: Tensor | None = None

    def select(self, index: Tensor) -> "IdentityProtocol":
        """Keep the images at ``index``, and the pairs of them."""
        cameras, query = (
            None if each is None else each[index] for each in (self.cameras, self.query)
        )
        pairs, folds = self.pairs, self.folds
        if pairs is not None:
            place = torch.full((int(max(pairs.max(), index.max())) + 1,), -1)
            place[index] = torch.arange(len(index))
            pairs = place[pairs]
            kept = (pairs >= 0).all(1)
            pairs, folds = pairs[kept], None if folds is None else folds[kept]
        return IdentityProtocol(cameras, query, pairs, folds)

    def tensors(self, labels: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a run folder keeps beside features and labels."""
        found = {"camera": self.cameras, "pairs": self.pairs, "fold": self.folds}
        if self.query is not None:
            found["query"] = self.query.byte()
        if self.pairs is not None:
            found["same"] = (labels[self.pairs[:, 0]] == labels[self.pairs[:, 1]]).byte()
        return {name: tensor for name, tensor in found.items() if tensor is not None}
