r"""Several prototypes per class: the similarities to the centres of a class are pooled to one.

The similarity to a class is that to the nearest of its K centres (sub-centre ArcFace, ``max``), or
an average weighted towards the near ones (SoftTriple, ``soft``):

.. math:: a_c = \max_k a_{ck} \qquad\text{or}\qquad
          a_c = \sum_k p_{ck}\,a_{ck},\quad p_{ck} = \operatorname{softmax}_k(a_{ck} / \gamma).

Pooling is part of the similarity, so losses, splits and criteria do not see it. Prototypes have the
shape ``(C, K, D)``, so that a block, shard or sample of the classes keeps the centres of a class
together.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tammes._validation import whole_number
from tammes.similarity import Operand, Similarity

Pooling = Literal["max", "soft"]
_ALONG = ("target", "gap", "opposite", "distance")
"""Numbers of the target class that soft pooling averages over the centres."""


class Slopes(NamedTuple):
    """Derivatives of pooled scores with respect to the products.

    Attributes:
        winners: index of the largest product, shape ``(n, k)``; max pooling only.
        weights: derivatives, shape ``(n, k, K)``; soft pooling only.
        excess: sum of products times derivatives, minus the pooled score, shape ``(n, k)``; soft
            pooling only. It corrects the gradient of the scale, since the temperature is in units
            of the similarity.
    """

    winners: Tensor | None = None
    weights: Tensor | None = None
    excess: Tensor | None = None


def pooled(
    name: str, inner: Similarity, centers: int, pooling: str, temperature: float
) -> Similarity:
    """Pool a similarity over the centres of a class; with one centre, return it unchanged.

    Args:
        name: name of the caller, for errors.
        inner: similarity of a feature and a centre.
        centers: number K of centres per class.
        pooling: ``"max"`` or ``"soft"``.
        temperature: temperature of soft pooling.
    """
    centers = whole_number(name, "subcenters", centers)
    if not 1 <= centers <= 255:
        raise ValueError(f"{name} expects subcenters from 1 to 255, got {centers}")
    if pooling not in get_args(Pooling):
        raise ValueError(f"{name} expects pooling 'max' or 'soft', got {pooling!r}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"{name} expects temperature above 0, got {temperature}")
    if centers == 1:
        return inner
    return Pooled(inner, centers, None if pooling == "max" else float(temperature))


def to_nearest(inner: Similarity, prototypes: Tensor) -> Similarity:
    """Compare with prototypes of shape ``(C, D)``, or with the nearest of ``(C, K, D)``."""
    return inner if prototypes.ndim == 2 else Pooled(inner, prototypes.shape[1])


@dataclass(frozen=True)
class Pooled(Similarity):
    """Similarity to the K centres of a class, pooled.

    Args:
        inner: similarity of a feature and a centre, a product of rows.
        centers: K, two or more.
        temperature: temperature of soft pooling, or none for max pooling.
    """

    inner: Similarity
    centers: int
    temperature: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_angle", self.inner.has_angle)
        object.__setattr__(self, "is_cosine", self.inner.is_cosine)
        object.__setattr__(self, "is_product", self.temperature is None and self.inner.is_product)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the inner similarity, and of pooling."""
        own: dict[str, Any] = {"subcenters": self.centers}
        if self.temperature is not None:
            own |= {"pooling": "soft", "temperature": self.temperature}
        return self.inner.options | own

    def over(self, inner: Similarity) -> Similarity:
        """Pool another similarity as this one does."""
        return replace(self, inner=inner)

    def query(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the features, shape ``(N, D)``."""
        return self.inner.query(features)

    def keys(self, prototypes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the centres, shape ``(C, K, D)``."""
        return self.inner.keys(prototypes)

    def products(self, query: Tensor, keys: Tensor) -> Tensor:
        """Multiply queries with all centres and pool those of a class, shape ``(N, C)``."""
        each = (query @ keys.flatten(0, 1).T).unflatten(1, (len(keys), self.centers))
        if self.temperature is None:
            # max, unlike amax, gives the whole gradient to one of several tied centres.
            return each.max(-1).values
        return ((each / self.temperature).softmax(-1) * each).sum(-1)

    def nearest(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Index of the most similar of each row's centres, shape ``(N,)``.

        Args:
            features: shape ``(N, D)``.
            prototypes: centres of the class of each row, shape ``(N, K, D)``.
        """
        with torch.no_grad():
            query, keys = self.inner.query(features)[0], self.inner.keys(prototypes)[0]
            return torch.linalg.vecdot(query.unsqueeze(1), keys).argmax(1)

    def own(
        self,
        features: Tensor,
        prototypes: Tensor,
        reads: frozenset[str],
        query: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the requested numbers of rows and their own centres, shape ``(N, K, D)``.

        Angles are those to the nearest centre or, with soft pooling, averages of gaps, which stay
        accurate near 0, unlike one minus an average of cosines.
        """
        if self.temperature is None:
            nearest = self.nearest(features, prototypes)[:, None, None]
            rows = prototypes.gather(1, nearest.expand(-1, 1, prototypes.shape[2])).squeeze(1)
            return self.inner.own(features, rows, reads, query)
        column = None if query is None else query.unsqueeze(1)
        each = self.inner.own(features.unsqueeze(1), prototypes, reads | {"target"}, column)
        weights = (each["target"] / self.temperature).softmax(1)
        # Numbers that depend on the features alone are the same for all centres.
        return {
            name: (weights * value).sum(1) if name in _ALONG else value[:, 0]
            for name, value in each.items()
            if name in reads or name == "opposite"
        }

    def target(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Similarity of rows to their centres of shape ``(N, K, D)``, shape ``(N,)``."""
        return self.own(features, prototypes, frozenset(("target",)))["target"]

    def prototypes_operand(self, prototypes: Tensor) -> Operand:
        """Return centres, shape ``(k K, D)``, as they enter products."""
        return self.inner.prototypes_operand(prototypes)

    def prototypes_gradient(
        self, operand: Operand, d_values: Tensor, d_offset: Tensor | None
    ) -> Tensor:
        """Return the gradient of centres, in the memory of ``d_values``."""
        return self.inner.prototypes_gradient(operand, d_values, None)

    def kept_bytes(self, width: int) -> int:
        """Bytes that :meth:`pool` saves per score, given the item size."""
        return 1 if self.temperature is None else width * (self.centers + 1)

    def pool(self, products: Tensor, scale: Tensor, out: Tensor, *, to_scale: bool) -> Slopes:
        """Pool scores in closed form.

        Args:
            products: products of queries, times the scale, with centres, shape ``(n, k K)``.
            scale: the scale in them.
            out: where pooled scores are written, shape ``(n, k)``.
            to_scale: whether to compute ``excess``, for the gradient of the scale.
        """
        each = products.unflatten(1, (-1, self.centers))
        if self.temperature is None:
            top, place = each.max(-1)
            out.copy_(top)
            return Slopes(place.to(torch.uint8))
        temperature = self.temperature * scale
        weights = (each / temperature).softmax(-1)
        out.copy_(torch.linalg.vecdot(weights, each))
        weights = weights.mul_((each - out.unsqueeze(-1)).div_(temperature).add_(1.0))
        excess = torch.linalg.vecdot(weights, each) - out if to_scale else None
        return Slopes(None, weights, excess)

    def unpool(self, gradient: Tensor, slopes: Slopes) -> Tensor:
        """Return the gradient of the products, shape ``(n, k K)``, given that of pooled scores."""
        if slopes.winners is not None:
            each = gradient.new_zeros(*gradient.shape, self.centers)
            each.scatter_(-1, slopes.winners.long().unsqueeze(-1), gradient.unsqueeze(-1))
        else:
            assert slopes.weights is not None
            each = gradient.unsqueeze(-1) * slopes.weights
        return each.flatten(1)
