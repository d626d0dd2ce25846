"""Similarities: how a feature is compared with a prototype, nearly always by an inner product.

All but those of :mod:`tammes.heads.distance` have the form ``query(x) . key(w) + offset``. So a
kernel only needs to know how to turn features into queries and prototypes into keys (row by row, so
that any block of classes can be processed alone), and how to compare an example with its own
prototype. That is computed separately from the products, in full precision, since margins act on
it.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

TINY = 1e-12
"""A vector shorter than this has no direction."""
HUGE = 2.0**56
"""Largest magnitude whose squares can be summed over a row in single precision."""


_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", "privateuseone")
_AUTOCAST = frozenset(name for name in _DEVICES if torch.amp.is_autocast_available(name))
"""Device types with autocast; looked up once, since torch 2.11 cannot compile the call."""


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Dtype of scores and losses: single precision, or wider if an input is wider."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.dtype is not dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast if it is on: scores and losses stay in the working dtype."""
    if device.type not in _AUTOCAST or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def product_dtype(device: torch.device) -> torch.dtype | None:
    """Dtype of the inputs of products under autocast on CUDA, or none; outputs are float32."""
    if device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return None


def has_exact_products(dtype: torch.dtype) -> bool:
    """Whether matrix products are as exact as sums over pairs of rows."""
    return dtype == torch.float64 or _has_exact_floats()


def _has_exact_floats() -> bool:
    """Whether float32 products are made of float32 numbers, not of shorter ones."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # torch raises once a precision has been set for a single backend.
        return False


# Dynamo cannot trace the call, but compiles again when the setting changes. This is what
# ``torch.compiler.assume_constant_result`` sets, which imports the compiler.
_has_exact_floats._dynamo_marked_constant = True  # type: ignore[attr-defined]


def norm(vectors: Tensor) -> Tensor:
    """Euclidean length of each row."""
    return torch.linalg.vector_norm(vectors, dim=-1)


def unit(vectors: Tensor, length: Tensor | None = None) -> Tensor:
    """Scale rows to length one; a zero row stays zero and gets a zero gradient.

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    length = norm(vectors) if length is None else length
    inverse = torch.where(length > TINY, length.clamp_min(TINY).reciprocal(), 0.0)
    return vectors * inverse.unsqueeze(-1)


def directions(features: Tensor) -> Tensor:
    """Normalise features, even those so large that their squares overflow.

    Such rows are first scaled down by a power of two, which is exact.

    Example:
        >>> directions(torch.tensor([[3e30, 4e30], [3.0, 4.0]]))
        tensor([[0.6000, 0.8000],
                [0.6000, 0.8000]])
    """
    largest = features.detach().abs().amax(-1, keepdim=True)
    return unit(features * torch.where(largest > HUGE, 2.0**-80, 1.0).to(features.dtype))


def angle_gaps(
    features: Tensor, prototypes: Tensor, query: Tensor | None = None, *, both: bool = True
) -> dict[str, Tensor]:
    """Distance of the cosine of paired rows from 1 and from -1, accurate at both ends.

    ``gap`` is one minus the cosine, computed as half the squared distance of the unit vectors;
    ``opposite`` is one plus the cosine, as half the squared norm of their sum. A zero row counts as
    orthogonal to everything: both are one.

    Args:
        features: shape ``(N, D)``.
        prototypes: shape ``(N, D)``.
        query: the normalised features, if known.
        both: whether to compute ``opposite`` too.

    Example:
        >>> angle_gaps(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.ones(2, 2))
        {'gap': tensor([0.2929, 1.0000]), 'opposite': tensor([1.7071, 1.0000])}
    """
    length = norm(prototypes)
    directed = (norm(features.detach()) > TINY) & (length > TINY)
    left = directions(features) if query is None else query
    right = unit(prototypes, length)
    sums = {"gap": left - right, "opposite": left + right} if both else {"gap": left - right}
    return {
        name: torch.where(directed, vectors.square().sum(-1) / 2, 1.0)
        for name, vectors in sums.items()
    }


class Operand(NamedTuple):
    """Features or prototypes as they enter products, for gradients in closed form.

    Attributes:
        values: rows of the product, shape ``(n, D)``.
        inverse: inverse norms of rows that are compared by direction, 0 for a zero row, shape
            ``(n, 1)``. Features are already normalised in ``values``; prototypes are not, so their
            products have to be multiplied by it.
        offset: added to the products, shape ``(n,)``.
        directed: whether all rows are known to be nonzero.
    """

    values: Tensor
    inverse: Tensor | None = None
    offset: Tensor | None = None
    directed: bool = True


def inverse_norm(vectors: Tensor, *, large: bool = False) -> tuple[Tensor, bool]:
    """Inverse norm of each row, shape ``(n, 1)``, and whether all rows are known to be nonzero.

    It is 0 for a zero row. On a CPU, where reading them is free, checking the norms first avoids
    the extra work for zero and for very large rows.

    Args:
        vectors: rows of any norm.
        large: handle rows whose squares overflow, at the price of a copy.

    Example:
        >>> inverse_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        (tensor([[0.2000],
                [0.0000]]), False)
    """
    if vectors.device.type == "cpu" and vectors.shape[0]:
        length = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        shortest, longest = torch.aminmax(length)
        if shortest.item() > TINY and longest.item() < HUGE:
            return length.reciprocal_(), True
    shrink = None
    if large:
        largest = vectors.abs().amax(1, keepdim=True)
        shrink = torch.where(largest > HUGE, 2.0**-80, 1.0).to(vectors.dtype)
        vectors = vectors * shrink
    length = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    inverse = torch.where(length > TINY, length.clamp_min(TINY).reciprocal(), 0.0)
    return inverse if shrink is None else inverse * shrink, False


class Similarity:
    """Interface between a similarity and the kernels and heads.

    It has two forms. The plain form (``query``, ``keys``, ``own``) is pure and differentiable any
    number of times. The closed form (``features_operand`` and the methods after it) implements its
    gradients explicitly, for kernels that compute them without a graph.

    Attributes:
        has_angle: whether the target is ``length * cosine``, so that angular margins make sense.
        is_cosine: whether it is the cosine of unit features and unit prototypes, bounded by one.
        has_kernels: whether it has the closed form; otherwise scores are computed in plain torch.
        is_product: whether scaling a prototype (or its direction) scales the similarity.
        centers: prototypes per class; if several, they have the shape ``(C, K, D)`` and are pooled,
            see :mod:`tammes.pooling`.
    """

    has_angle: bool = True
    is_cosine: bool = False
    has_kernels: bool = True
    is_product: bool = True
    centers: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Options of the head that select this similarity, if they are not the default."""
        return {}

    def over(self, inner: "Similarity") -> "Similarity":
        """Apply the pooling of this similarity to another one."""
        return inner

    def bind(self, prototypes: Tensor) -> "Similarity":
        """Fix what depends on all prototypes, before they are cut into blocks."""
        return self

    def query(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows to multiply with keys, shape ``(N, D)``, and what to add to each row's products."""
        return features, None

    def keys(self, prototypes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows to multiply with queries, shape ``(C, D)``, and what to add for each class."""
        return prototypes, None

    def products(self, query: Tensor, keys: Tensor) -> Tensor:
        """Multiply queries with keys, shape ``(N, C)``."""
        return query @ keys.T

    def target(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Similarity of paired rows, shape ``(N,)``."""
        return (features * prototypes).sum(-1)

    def distance(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Euclidean distance of paired rows as they are compared, shape ``(N,)``."""
        return norm(self.query(features)[0] - self.keys(prototypes)[0])

    def length(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Product of the norms that the similarity of paired rows does not normalise, ``(N,)``.

        One for a distance, which has no angle.
        """
        if not self.has_angle:
            return torch.ones_like(norm(features))
        return norm(features) * norm(prototypes)

    def own(
        self,
        features: Tensor,
        prototypes: Tensor,
        reads: frozenset[str],
        query: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the requested numbers of paired rows: ``target`` and those in ``ALONGSIDE``.

        The query of the features is passed if it is known.
        """
        known = {}
        if "target" in reads:
            known["target"] = self.target(features, prototypes)
        if "length" in reads:
            known["length"] = self.length(features, prototypes)
        if "norm" in reads:
            known["norm"] = norm(features)
        if "distance" in reads:
            known["distance"] = self.distance(features, prototypes)
        if "gap" in reads:
            known |= angle_gaps(features, prototypes)
        return known

    def features_operand(self, features: Tensor) -> Operand:
        """Return the features as they enter products."""
        raise NotImplementedError

    def features_gradient(
        self, operand: Operand, d_values: Tensor, d_offset: Tensor | None
    ) -> Tensor:
        """Return the gradient of the features, in the memory of ``d_values``."""
        return d_values

    def prototypes_operand(self, prototypes: Tensor) -> Operand:
        """Return the prototypes as they enter products."""
        raise NotImplementedError

    def prototypes_gradient(
        self, operand: Operand, d_values: Tensor, d_offset: Tensor | None
    ) -> Tensor:
        """Return the gradient of the prototypes, in the memory of ``d_values``.

        Args:
            operand: as :meth:`prototypes_operand` returned it.
            d_values: gradient of the rows that entered the products, shape ``(C, D)``.
            d_offset: gradient of the offset, shape ``(C,)``.
        """
        return d_values

    def paired(
        self, left: Tensor, right: Tensor, reads: Collection[str], nearly: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
        """Compute the requested numbers of features and their own prototypes, outside of autograd.

        Args:
            left: features, normalised if the similarity is a cosine, shape ``(N, D)``.
            right: prototypes, normalised if they are compared by direction, shape ``(N, D)``; may
                be overwritten.
            reads: ``target``; for cosines also ``gap`` and ``opposite``.
            nearly: similarities up to rounding, shape ``(N,)``, if angles are read.

        Returns:
            The numbers, shape ``(N,)`` each. If the similarity is more accurate than a product,
            ``apart`` and ``sign`` too: its gradient by the feature is ``apart``, by the prototype
            ``-sign * apart``, up to what a projection removes. The sign is 1 if it is none.
        """
        return {"target": torch.linalg.vecdot(left, right)}, None, None


class InnerProduct(Similarity):
    """``x . w``: a linear classifier."""

    def features_operand(self, features: Tensor) -> Operand:
        """Return the features."""
        return Operand(features)

    def prototypes_operand(self, prototypes: Tensor) -> Operand:
        """Return the prototypes."""
        return Operand(prototypes)


@dataclass(frozen=True)
class Cosine(Similarity):
    """``cos(x, w)``, or ``|x| cos(x, w)`` if features are not normalised."""

    normalize_features: bool = True

    def __post_init__(self) -> None:
        # Bounded by one only where the features are normalised too.
        object.__setattr__(self, "is_cosine", self.normalize_features)

    @property
    def options(self) -> dict[str, Any]:
        """``normalize_features``, if it is not the default."""
        return {} if self.normalize_features else {"normalize_features": False}

    def query(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """The features, normalised unless ``normalize_features`` is off."""
        return (directions(features) if self.normalize_features else features), None

    def keys(self, prototypes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Unit prototypes."""
        return unit(prototypes), None

    def target(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """One minus the gap, so never above one; a product if features are not normalised."""
        if self.normalize_features:
            return 1 - angle_gaps(features, prototypes, both=False)["gap"]
        return (features * unit(prototypes)).sum(-1)

    def length(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """One, or the norm of the feature."""
        if self.normalize_features:
            return features.new_ones(features.shape[:-1])
        return norm(features)

    def own(
        self,
        features: Tensor,
        prototypes: Tensor,
        reads: frozenset[str],
        query: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the requested numbers, normalising only once."""
        if not self.normalize_features or reads.isdisjoint(("target", "gap")):
            return super().own(features, prototypes, reads)
        known = super().own(features, prototypes, reads - {"target", "gap"})
        found = angle_gaps(features, prototypes, query, both="gap" in reads)
        if "gap" in reads:
            known |= found
        if "target" in reads:
            known["target"] = 1 - found["gap"]
        return known

    def features_operand(self, features: Tensor) -> Operand:
        """Return the features, normalised unless ``normalize_features`` is off."""
        if not self.normalize_features:
            return Operand(features)
        inverse, directed = inverse_norm(features, large=True)
        return Operand(features * inverse, inverse, directed=directed)

    def features_gradient(
        self, operand: Operand, d_values: Tensor, d_offset: Tensor | None
    ) -> Tensor:
        """Project the gradient orthogonally to the features and divide it by their norm."""
        rows, inverse, *_ = operand
        if inverse is None:
            return d_values
        along = (rows * d_values).sum(1, keepdim=True)
        return d_values.addcmul_(rows, along, value=-1).mul_(inverse)

    def prototypes_operand(self, prototypes: Tensor) -> Operand:
        """Return the prototypes as stored, and their inverse norms."""
        inverse, directed = inverse_norm(prototypes)
        return Operand(prototypes, inverse, directed=directed)

    def prototypes_gradient(
        self, operand: Operand, d_values: Tensor, d_offset: Tensor | None
    ) -> Tensor:
        """Project the gradient orthogonally to the prototypes."""
        rows, inverse, *_ = operand
        assert inverse is not None
        along = (rows * d_values).sum(1, keepdim=True).mul_(inverse).mul_(inverse)
        return d_values.addcmul_(rows, along, value=-1)

    def paired(
        self, left: Tensor, right: Tensor, reads: Collection[str], nearly: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
        """Compute the distance of unit rows, or of opposite ones that of one and minus the other.

        Half its square is the gap, or ``opposite``; the larger one of the two is 2 minus that.
        """
        if not self.normalize_features:
            return super().paired(left, right, reads, nearly)
        if nearly is None:
            apart = right.sub_(left)
            return {"target": torch.rsub(norm(apart).square_(), 1, alpha=0.5)}, apart, None
        sign = torch.copysign(torch.ones_like(nearly), nearly)
        apart = right.addcmul_(left, sign.unsqueeze(1), value=-1)
        half = norm(apart).square_().mul_(0.5)
        rest, near = 2 - half, sign > 0
        found = {"gap": torch.where(near, half, rest), "opposite": torch.where(near, rest, half)}
        if "target" in reads:
            found["target"] = 1 - found["gap"]
        return found, apart, sign


@dataclass(frozen=True, eq=False)
class SquaredDistance(Similarity):
    """``-|x - w|^2 / 2``: the log-density of a unit Gaussian around each prototype."""

    centre: Tensor | None = None

    has_angle = False
    is_product = False

    def bind(self, prototypes: Tensor) -> "SquaredDistance":
        """Take the mean prototype as origin, so that the expanded square loses no digits.

        Distances do not depend on the origin, so it needs no gradient.
        """
        if self.centre is not None:
            return self
        centre = prototypes.detach().mean(0) if len(prototypes) else prototypes.new_zeros(())
        return replace(self, centre=centre)

    def query(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features, and minus half their squared norm."""
        return self._with_half_square(features)

    def keys(self, prototypes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Prototypes, and minus half their squared norm."""
        return self._with_half_square(prototypes)

    def target(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Minus half the squared distance of paired rows, without expanding the square."""
        return (features - prototypes).square().sum(-1) / -2

    def features_operand(self, features: Tensor) -> Operand:
        """Return the centred rows, and minus half their squared norm."""
        rows, offset = self._with_half_square(features)
        return Operand(rows, offset=offset)

    def prototypes_operand(self, prototypes: Tensor) -> Operand:
        """Do the same for the prototypes."""
        return self.features_operand(prototypes)

    def features_gradient(
        self, operand: Operand, d_values: Tensor, d_offset: Tensor | None
    ) -> Tensor:
        """Add the gradient that comes through the offset."""
        assert d_offset is not None
        return d_values.addcmul_(operand.values, d_offset.unsqueeze(1), value=-1)

    prototypes_gradient = features_gradient

    def paired(
        self, left: Tensor, right: Tensor, reads: Collection[str], nearly: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
        """Compute minus half the squared distance of paired rows."""
        apart = right.sub_(left)
        return {"target": torch.linalg.vecdot(apart, apart) * -0.5}, apart, None

    def _with_half_square(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        if self.centre is not None:
            vectors = vectors - self.centre.to(vectors.dtype)
        return vectors, vectors.square().sum(-1) / -2
