"""Direct and spectral sums: a metric loss that does not disturb the classifier.

The gradient of a softmax loss lies in the span of the prototypes. Give the metric loss only what is
left of the features outside of that span, and the two pull in orthogonal directions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tammes.checks import transforming
from tammes.compose import Loss, Term
from tammes.kernels.problem import full_precision, working_dtype
from tammes.shards import WHOLE, Shards


class Complement:
    """A projection away from the prototypes; a small value, like a term."""

    detach: bool

    def project(self, features: Tensor, prototypes: Tensor, shards: Shards = WHOLE) -> Tensor:
        """What is left of the features, shape ``(N, D)``."""
        dtype = working_dtype(features, prototypes)
        prototypes = prototypes.detach() if self.detach else prototypes
        if shards.count(prototypes) <= prototypes.shape[1]:
            # No more than the Gram matrix would be.
            prototypes, shards = shards.whole(prototypes), WHOLE
        with full_precision(features.device):
            return self._project(features.to(dtype), prototypes.to(dtype), shards)

    def _project(self, features: Tensor, prototypes: Tensor, shards: Shards) -> Tensor:
        raise NotImplementedError

    def check(self, embedding_size: int, num_classes: int) -> None:
        """Refuse sizes for which nothing would be left."""


@dataclass(frozen=True)
class OrthogonalComplement(Complement):
    """The complement of the span: exact, or with the paper's ridge ``eps``."""

    eps: float | None = None
    detach: bool = True

    def _project(self, features: Tensor, prototypes: Tensor, shards: Shards) -> Tensor:
        if self.eps is None:
            if self.detach and (basis := _independent(prototypes, shards)) is not None:
                basis = basis.to(features.dtype)
                return features - features @ basis @ basis.T
            # At p = 0 every direction the prototypes have counts fully, and no other does; unlike
            # a QR, it takes no more than their span where they depend on each other.
            return SpectralComplement(0.0, self.detach)._project(features, prototypes, shards)
        wide = _wide(prototypes)
        gram = wide @ wide.T
        ridge = gram + self.eps * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor = torch.linalg.cholesky(ridge)
        coefficients = torch.cholesky_solve(wide @ features.to(wide.dtype).T, factor)
        return features - (coefficients.T @ wide).to(features.dtype)

    def check(self, embedding_size: int, num_classes: int) -> None:
        """With as many classes as dimensions the span is everything."""
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

    def _project(self, features: Tensor, prototypes: Tensor, shards: Shards) -> Tensor:
        if not self.detach:
            power: Tensor = _SpectralPower.apply(prototypes, shards, self.p)
            return features - features @ power
        basis, ratio, present, _ = _spectrum(prototypes, shards, full=False)
        basis = basis.to(features.dtype)
        weight = _power(ratio, present, self.p).to(features.dtype)
        return features - (features @ basis * weight) @ basis.T


def _wide(tensor: Tensor) -> Tensor:
    """In double precision, where the device has it."""
    return tensor if tensor.device.type == "mps" else tensor.double()


def _independent(prototypes: Tensor, shards: Shards) -> Tensor | None:
    """Orthonormal columns ``(D, C)`` that span the prototypes, or None where they may be fewer.

    As a rule prototypes are far from depending on each other, and singular values take several
    times as long. It asks the device for a number, so there must be one.
    """
    count, size = shards.count(prototypes), prototypes.shape[1]
    if count > size or not _has_values(prototypes):
        return None
    basis, triangle = torch.linalg.qr(_wide(prototypes).T)
    inverse = torch.linalg.solve_triangular(triangle, torch.eye(count).to(triangle), upper=True)
    # Not above the smallest singular value over the largest.
    share = 1 / (torch.linalg.matrix_norm(triangle) * torch.linalg.matrix_norm(inverse))
    return basis if bool(share > _noise(prototypes, count)) else None


def _has_values(tensor: Tensor) -> bool:
    """Whether numbers can be asked for: not of what is traced, recorded, or only a shape."""
    traced = transforming() or torch._C._len_torch_dispatch_stack() > 0
    recorded = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (traced or recorded or tensor.device.type in ("meta", "mps"))


def _noise(prototypes: Tensor, count: int) -> float:
    """Share of the largest singular value that is no more than rounding."""
    eps = torch.finfo(_wide(prototypes[:0]).dtype).eps
    return max(4 * torch.finfo(prototypes.dtype).eps, max(count, prototypes.shape[1]) * eps)


def _spectrum(
    prototypes: Tensor, shards: Shards, *, full: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Directions of the prototypes, their singular values over the largest, and which are there.

    Args:
        prototypes: shape ``(C, D)``; where there are more than D, those of this rank.
        shards: where the others are.
        full: also give the directions that the prototypes do not have.

    Returns:
        Orthonormal columns ``(D, R)``, ratios ``(R,)``, whether each is more than rounding, and
        the largest singular value.
    """
    wide, count = _wide(prototypes), shards.count(prototypes)
    noise = _noise(prototypes, count)
    if count <= prototypes.shape[1]:
        # The default on a GPU took four times as long (results/README.md).
        driver = "gesvd" if wide.is_cuda else None
        _, values, transposed = torch.linalg.svd(wide, full_matrices=full, driver=driver)
        basis = transposed.T
        values = torch.nn.functional.pad(values, (0, basis.shape[1] - len(values)))
    else:
        # The Gram matrix is small however many classes there are, but squares the rounding.
        squares, basis = torch.linalg.eigh(shards.sum(wide.T @ wide))
        values, basis = squares.clamp_min(0).sqrt().flip(0), basis.flip(1)
        noise = max(noise, (count * torch.finfo(wide.dtype).eps) ** 0.5)
    largest = values[0].clamp_min(torch.finfo(values.dtype).tiny)
    ratio = values / largest
    return basis, ratio, ratio > noise, largest


def _power(ratio: Tensor, present: Tensor, p: float) -> Tensor:
    """Ratios to the power p, and zero for what is not there: 0 ** 0 is 1 in torch."""
    return torch.where(present, torch.where(present, ratio, 1.0) ** p, 0.0)


class _SpectralPower(torch.autograd.Function):
    r"""``(W^T W / lambda_max^2)^(p/2)`` with a gradient that repeated eigenvalues do not break.

    Of a function h of a symmetric matrix G with eigenvectors U, the derivative is
    ``U (Gamma * (U^T dG U)) U^T`` with ``Gamma_ij = (h_i - h_j) / (g_i - g_j)`` and ``h'`` where
    two are equal (Daleckii and Krein). The block of zero eigenvalues gets none: to first order
    the Gram matrix does not change there.
    """

    @staticmethod
    def forward(ctx: Any, prototypes: Tensor, shards: Shards, p: float) -> Tensor:
        basis, ratio, present, largest = _spectrum(prototypes, shards, full=True)
        powers = _power(ratio, present, p)
        ctx.save_for_backward(prototypes, basis, ratio, powers, present, largest)
        ctx.p = p
        return ((basis * powers) @ basis.T).to(prototypes.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        prototypes, basis, ratio, powers, present, largest = ctx.saved_tensors
        wide = prototypes.to(basis.dtype)
        squares = torch.where(present, ratio.square(), 0.0)
        gap = squares[:, None] - squares
        equal = gap.abs() <= 1e-9 * (squares[:, None] + squares)
        slope = torch.where(present, ctx.p / 2 * powers / torch.where(present, squares, 1.0), 0.0)
        rise = (powers[:, None] - powers) / torch.where(equal, 1.0, gap)
        gamma = torch.where(equal, (slope[:, None] + slope) / 2, rise)
        symmetric = (grad + grad.T).to(basis.dtype) / 2
        d_ratio = basis @ (gamma * (basis.T @ symmetric @ basis)) @ basis.T
        # Through the division by the largest eigenvalue, whose gradient is its own direction.
        top = basis[:, :1]
        shared = (d_ratio * (basis * squares @ basis.T)).sum()
        d_gram = (d_ratio - shared * (top @ top.T)) / largest / largest
        return (2 * wide @ d_gram).to(prototypes.dtype), None, None


@dataclass(frozen=True, repr=False)
class ProjectedSum(Loss):
    """A classification loss, and a metric loss on the complement of the classifier."""

    classification: Loss
    metric: Loss
    within: OrthogonalComplement | SpectralComplement

    def leaves(self) -> Iterator[tuple[float, Term]]:
        """The classification terms, then the metric terms with their projection."""
        yield from self.classification.leaves()
        for weight, term in self.metric.leaves():
            yield weight, replace(term, within=self.within)

    def map(self, change: Callable[[Term], Term]) -> "ProjectedSum":
        """The same sum of changed terms."""
        return replace(
            self, classification=self.classification.map(change), metric=self.metric.map(change)
        )

    def __repr__(self) -> str:
        name = "direct_sum" if isinstance(self.within, OrthogonalComplement) else "spectral_sum"
        options = ", ".join(f"{k}={v!r}" for k, v in vars(self.within).items())
        return f"{name}({self.classification!r}, {self.metric!r}, {options})"


def _check_parts(name: str, classification: Loss, metric: Loss) -> None:
    for role, loss, on in (
        ("classification", classification, ("split", "prototypes")),
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
    losses with respect to the features are orthogonal; where features are normalised, that of the
    classification loss has a part along the feature itself, and they are nearly so. It needs more
    dimensions than classes; :func:`tammes.spectral_sum` does not.

    Args:
        classification: a loss on the split.
        metric: a loss on features, such as :func:`tammes.nca`.
        eps: ``None`` for the exact complement, or :math:`\epsilon` of the paper's form.
        detach: do not let the metric loss move the prototypes through the projection.

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

    with :math:`\lambda` the singular values of the prototypes, zero where there are none. ``p=0``
    is the exact :func:`tammes.direct_sum`.

    Args:
        classification: a loss on the split.
        metric: a loss on features, such as :func:`tammes.nca`.
        p: exponent, 0 or more; the larger, the more is left to the metric loss.
        detach: do not let the metric loss move the prototypes through the projection.

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
