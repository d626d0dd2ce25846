"""Direct and spectral sums: a metric loss that does not disturb the classifier.

The gradient of a softmax loss lies in the span of the prototypes. If the metric loss sees only the
part of the features outside of that span, the gradients of the two are orthogonal.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tammes.cuda_graphs import outside_graph
from tammes.distributed.sharded_rows import ALL_ROWS_LOCAL, ShardedRows
from tammes.similarity import full_precision, working_dtype
from tammes.terms import Loss, Term


class Complement:
    """Projection away from the prototypes; an immutable value, like a term.

    With eigenvectors v and eigenvalues g of the Gram matrix of the prototypes, it removes a
    fraction h(g) of the direction v.
    """

    detach: bool

    def shares(self, squares: Tensor) -> Tensor:
        """Fraction of each singular direction to remove, shape ``(R,)``.

        Args:
            squares: squared singular values of the prototypes, the largest first, 0 beyond their
                rank; shape ``(R,)``.
        """
        raise NotImplementedError

    def slopes(self, squares: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of the shares by their own square and by the largest one, both ``(R,)``."""
        raise NotImplementedError

    def project(
        self, features: Tensor, prototypes: Tensor, shards: ShardedRows = ALL_ROWS_LOCAL
    ) -> Tensor:
        """Project the features, shape ``(N, D)``."""
        dtype = working_dtype(features, prototypes)
        if shards.count(prototypes) <= prototypes.shape[1]:
            # The prototypes are no larger than their Gram matrix.
            prototypes, shards = shards.all_gather(prototypes), ALL_ROWS_LOCAL
        with full_precision(features.device):
            features, prototypes = features.to(dtype), prototypes.to(dtype)
            if not self.detach:
                removed: Tensor = _RemovedPart.apply(prototypes, shards, self)
                return features - features @ removed
            basis, squares = outside_graph(partial(_spectrum, shards=shards), prototypes)
            shares = self.shares(squares).to(dtype)
            basis = basis.to(dtype)
            return features - (features @ basis * shares) @ basis.T

    def check(self, embedding_size: int, num_classes: int) -> None:
        """Raise ``ValueError`` for sizes at which the projection would be zero."""


@dataclass(frozen=True)
class OrthogonalComplement(Complement):
    """Orthogonal complement of the span: exact, or with the paper's ridge ``eps``."""

    eps: float | None = None
    detach: bool = True

    def shares(self, squares: Tensor) -> Tensor:
        """Remove every direction of the span completely, or with ``eps`` weak ones partly."""
        if self.eps is None:
            return (squares > 0).to(squares)
        return squares / (squares + self.eps)

    def slopes(self, squares: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Complement.slopes`."""
        flat = torch.zeros_like(squares)
        if self.eps is None:
            return flat, flat
        return self.eps / (squares + self.eps).square(), flat

    def check(self, embedding_size: int, num_classes: int) -> None:
        """Raise ``ValueError`` if the prototypes can span the whole space."""
        if embedding_size <= num_classes:
            raise ValueError(
                "direct_sum expects more dimensions than classes, "
                f"got embedding_size={embedding_size} and num_classes={num_classes}: "
                "use spectral_sum"
            )


@dataclass(frozen=True)
class SpectralComplement(Complement):
    r"""Directions weighted by :math:`1 - (\lambda/\lambda_{\max})^p`, from the singular values."""

    p: float = 0.3
    detach: bool = True

    def shares(self, squares: Tensor) -> Tensor:
        """Power of the ratio, and zero beyond the rank, since 0 ** 0 is 1 in torch."""
        there = squares > 0
        ratio = torch.where(there, squares, 1.0) / torch.where(there[:1], squares[:1], 1.0)
        return torch.where(there, ratio ** (self.p / 2), 0.0)

    def slopes(self, squares: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Complement.slopes`."""
        there = squares > 0
        steep = self.p / 2 * shares
        largest = torch.where(there[:1], squares[:1], 1.0)
        return steep / torch.where(there, squares, 1.0), -steep / largest

    def check(self, embedding_size: int, num_classes: int) -> None:
        """Raise ``ValueError`` if p = 0 and the prototypes can span the whole space."""
        if self.p == 0 and embedding_size <= num_classes:
            raise ValueError(
                "spectral_sum with p=0 expects more dimensions than classes, "
                f"got embedding_size={embedding_size} and num_classes={num_classes}: "
                "use p above 0"
            )


_SMALL = 100
"""Largest GPU matrix whose eigenvalues the CPU computes faster: 0.50 against 1.00 ms at 64 rows,
1.06 against 1.48 at 100, but 2.65 against 1.61 at 128 (H200, double precision)."""


def _spectrum(prototypes: Tensor, shards: ShardedRows) -> tuple[Tensor, Tensor]:
    """Singular directions of the prototypes and squared singular values, the largest first.

    The Gram matrix is small, and in float64 it is accurate enough for prototypes in float32. For
    prototypes in float64 only a singular value decomposition is accurate, which takes ten times as
    long (results/README.md); with more classes than dimensions the Gram matrix is used anyway.

    Args:
        prototypes: shape ``(C, D)``; if there are more than D, those of this rank.
        shards: access to the prototypes of other ranks.

    Returns:
        Orthonormal columns ``(D, R)`` and squares ``(R,)``: zero if a singular value is within
        rounding error, and its column may be zero too.
    """
    wide, (count, size) = _wide(prototypes), (shards.count(prototypes), prototypes.shape[1])
    eps = torch.finfo(wide.dtype).eps
    noise = max(4 * torch.finfo(prototypes.dtype).eps, max(count, size) * eps)
    if count <= size and prototypes.dtype == wide.dtype:
        # The default driver on a GPU took four times as long.
        driver = "gesvd" if wide.is_cuda else None
        _, values, transposed = torch.linalg.svd(wide, full_matrices=False, driver=driver)
        basis, squares = transposed.T, values.square()
    else:
        # The Gram matrix squares the rounding error.
        noise = max(noise, (count * eps) ** 0.5)
        squares, vectors = _eigh(
            wide @ wide.T if count < size else shards.all_reduce(wide.T @ wide)
        )
        squares, basis = squares.clamp_min(0).flip(0), vectors.flip(1)
    there = squares > noise**2 * squares[:1]
    if len(basis) != size:
        columns = wide.T @ basis * torch.where(there, squares, torch.inf).rsqrt()
        # Squared rounding error of the angles between weak directions.
        basis = 1.5 * columns - 0.5 * columns @ (columns.T @ columns)
    to = prototypes.device
    return basis.to(to), torch.where(there, squares, 0.0).to(to)


def _wide(tensor: Tensor) -> Tensor:
    """Convert to float64; on the CPU if the device does not support it."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order, and eigenvectors as columns."""
    on = "cpu" if matrix.is_cuda and len(matrix) <= _SMALL else matrix.device
    values, vectors = torch.linalg.eigh(matrix.to(on))
    return values.to(matrix.device), vectors.to(matrix.device)


class _RemovedPart(torch.autograd.Function):
    r"""Matrix of the removed part, with a gradient that is finite at repeated eigenvalues.

    The derivative of a function h of a symmetric matrix G with eigenvectors U is
    ``U (Gamma * (U^T dG U)) U^T`` with ``Gamma_ij = (h_i - h_j) / (g_i - g_j)`` and ``h'`` where
    two are equal (Daleckii and Krein). The block of zero eigenvalues has no gradient: to first
    order the Gram matrix does not change there.
    """

    @staticmethod
    def forward(
        ctx: Any, prototypes: Tensor, shards: ShardedRows, complement: Complement
    ) -> Tensor:
        basis, squares = outside_graph(partial(_spectrum, shards=shards), prototypes)
        ctx.save_for_backward(prototypes, basis, squares)
        ctx.complement = complement
        return ((basis * complement.shares(squares)) @ basis.T).to(prototypes.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        prototypes, basis, squares = ctx.saved_tensors
        shares = ctx.complement.shares(squares)
        slopes, of_largest = ctx.complement.slopes(squares, shares)
        gap = squares[:, None] - squares
        equal = gap.abs() <= 1e-9 * (squares[:, None] + squares)
        rise = (shares[:, None] - shares) / torch.where(equal, 1.0, gap)
        gamma = torch.where(equal, (slopes[:, None] + slopes) / 2, rise)
        across = basis.T @ ((grad + grad.T).to(basis.dtype) / 2)
        inner = across @ basis
        to_gram = gamma * inner
        # The largest square is an eigenvalue too.
        to_gram[0, 0] += inner.diagonal() @ of_largest
        # Outside of the span: a difference to zero.
        outside = shares / torch.where(squares > 0, squares, 1.0)
        rows = to_gram @ basis.T + outside[:, None] * (across - inner @ basis.T)
        own = prototypes.to(basis.dtype) @ basis
        return (2 * own @ rows).to(prototypes.dtype), None, None


@dataclass(frozen=True, repr=False)
class ProjectedSum(Loss):
    """Classification loss plus a metric loss on the complement of the classifier."""

    classification: Loss
    metric: Loss
    within: OrthogonalComplement | SpectralComplement

    def leaves(self) -> Iterator[tuple[float, Term]]:
        """Yield the classification terms, then the metric terms with their projection."""
        yield from self.classification.leaves()
        for weight, term in self.metric.leaves():
            yield weight, replace(term, within=self.within)

    def map(self, change: Callable[[Term], Term]) -> "ProjectedSum":
        """Apply a function to all terms of the sum."""
        return replace(
            self, classification=self.classification.map(change), metric=self.metric.map(change)
        )

    def __repr__(self) -> str:
        name = "direct_sum" if isinstance(self.within, OrthogonalComplement) else "spectral_sum"
        options = ", ".join(f"{k}={v!r}" for k, v in vars(self.within).items())
        return f"{name}({self.classification!r}, {self.metric!r}, {options})"


def _check_parts(name: str, classification: Loss, metric: Loss) -> None:
    for role, loss, on in (
        ("classification", classification, ("split", "prototypes", "proxies")),
        ("metric", metric, ("features",)),
    ):
        if not isinstance(loss, Loss):
            raise TypeError(f"{name} expects its {role} loss to be made of terms, got {loss!r}")
        for _, term in loss.leaves():
            if term.definition.on not in on:
                raise ValueError(f"{name} expects a {role} loss on {' or '.join(on)}, got {term!r}")


def direct_sum(
    classification: Loss, metric: Loss, *, eps: float | None = None, detach: bool = True
) -> ProjectedSum:
    r"""Add a metric loss in the orthogonal complement of the classifier.

    .. math:: \ell = \ell_{cls}(X, W) + \ell_{met}\bigl(X(I - P)\bigr),\qquad
              P = W^\top(WW^\top + \epsilon I)^{-1}W

    with prototypes as rows of :math:`W`. On a :class:`tammes.LinearHead` the gradients of the two
    losses with respect to the features are orthogonal. With normalized features they are nearly
    orthogonal, since that of the classification loss has a part along the feature itself. It needs
    more dimensions than classes; :func:`tammes.spectral_sum` does not.

    Args:
        classification: a loss on the split.
        metric: a loss on features, such as :func:`tammes.nca`.
        eps: ``None`` for the exact complement, or :math:`\epsilon` of the paper's form.
        detach: block the gradient of the metric loss to the prototypes through the projection.

    Returns:
        A loss for a criterion.

    Example:
        >>> loss = tammes.direct_sum(tammes.softmax(), tammes.nca())
        >>> criterion = tammes.Criterion(tammes.LinearHead(64, 10, bias=False), loss)

    References:
        Kobayashi, Direct-Sum of losses, 2024, eq. 8 and vi.
    """
    _check_parts("direct_sum", classification, metric)
    if eps is not None and not 0 < eps < float("inf"):
        raise ValueError(f"direct_sum expects eps above 0, or None for the exact form, got {eps}")
    return ProjectedSum(classification, metric, OrthogonalComplement(eps, detach))


def spectral_sum(
    classification: Loss, metric: Loss, *, p: float = 0.3, detach: bool = True
) -> ProjectedSum:
    r"""Add a metric loss where the classifier's spectrum is small.

    .. math:: \ell = \ell_{cls}(X, W) + \ell_{met}(X Q_p),\qquad
              Q_p = V\,\mathrm{diag}\bigl(1 - (\lambda/\lambda_{\max})^p\bigr)V^\top

    with :math:`\lambda` the singular values of the prototypes, zero beyond their rank. ``p=0``
    is the exact :func:`tammes.direct_sum`, and like it needs more dimensions than classes.

    Args:
        classification: a loss on the split.
        metric: a loss on features, such as :func:`tammes.nca`.
        p: exponent, 0 or more; the larger, the more of the features the metric loss sees.
        detach: block the gradient of the metric loss to the prototypes through the projection.

    Returns:
        A loss for a criterion.

    Example:
        >>> tammes.spectral_sum(tammes.softmax(), 0.5 * tammes.proto()).within
        SpectralComplement(p=0.3, detach=True)

    References:
        Kobayashi, Direct-Sum of losses, 2024, eq. viii-xi.
    """
    _check_parts("spectral_sum", classification, metric)
    if not 0 <= p < float("inf"):
        raise ValueError(f"spectral_sum expects p of 0 or more, got {p}")
    return ProjectedSum(classification, metric, SpectralComplement(p, detach))
