"""Classifiers by Euclidean distance, to prototypes or from reciprocal points."""

from typing import Any

import torch
from torch import Tensor, nn

from tammes._validation import check_sizes, check_without_gradient, transforming
from tammes.heads.head import Head, Scale
from tammes.kernels.dispatch import Implementation, check_dense
from tammes.similarity import Similarity, norm


def _distances(query: Tensor, keys: Tensor) -> Tensor:
    return torch.cdist(query, keys, compute_mode="donot_use_mm_for_euclid_dist")


class _Distances(torch.autograd.Function):
    """Pairwise distances of rows, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor) -> Tensor:
        distances = _distances(query, keys)
        ctx.save_for_backward(query, keys, distances)
        return distances

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, distances = ctx.saved_tensors
        if torch.is_grad_enabled():
            distances = _Distances.apply(query, keys)
        sides = (gradient, query, keys, distances), (gradient.T, keys, query, distances.T)
        return tuple(
            _Distances._side(*side) if needed else None
            for side, needed in zip(sides, ctx.needs_input_grad, strict=True)
        )

    @staticmethod
    def _side(gradient: Tensor, rows: Tensor, others: Tensor, distances: Tensor) -> Tensor:
        """Gradient of one side of the distances."""
        if torch.is_grad_enabled():
            # The gradient of a distance of zero is defined as zero.
            apart = distances > 0
            pull = torch.where(apart, gradient / torch.where(apart, distances, 1.0), 0.0)
            return pull.sum(1, keepdim=True) * rows - pull @ others
        # From differences: near a prototype, the products above would cancel.
        given = (each.contiguous() for each in (gradient, rows, others))
        found: Tensor = torch.ops.aten._cdist_backward(*given, 2.0, distances.contiguous())
        return found


class Distance(Similarity):
    """``-|x - w|``: minus the Euclidean distance, which is not a product of rows."""

    has_angle = False
    has_kernels = False
    is_product = False

    def products(self, query: Tensor, keys: Tensor) -> Tensor:
        """Minus the distances, from differences: an expanded square would cancel small ones."""
        if transforming():
            return -_distances(query, keys)
        distances: Tensor = _Distances.apply(query, keys)
        return -distances

    def target(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Minus the distances of paired rows."""
        return -norm(features - prototypes)


class Reciprocal(Similarity):
    """``|x - w|^2 / D - x . w``: the farther from a prototype, the more similar."""

    has_angle = False
    has_kernels = False
    is_product = False

    @property
    def options(self) -> dict[str, Any]:
        """Option of the head that selects it."""
        return {"reciprocal": True}

    def query(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features times ``-(1 + 2 / D)``, and their mean square."""
        return -(1 + 2 / features.shape[-1]) * features, features.square().mean(-1)

    def keys(self, prototypes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Prototypes, and their mean square."""
        return prototypes, prototypes.square().mean(-1)

    def target(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Mean squared difference of paired rows minus their inner product."""
        return self.distance(features, prototypes) - (features * prototypes).sum(-1)

    def distance(self, features: Tensor, prototypes: Tensor) -> Tensor:
        """Mean squared difference of paired rows."""
        return (features - prototypes).square().mean(-1)


class DistanceHead(Head):
    r"""Distances to prototypes: :math:`f_c = -s\,\lVert x - w_c\rVert`, for open sets.

    The head of :func:`tammes.cac` and, with ``reciprocal=True``, of :func:`tammes.arpl`. Distances
    are not products, so all N x C scores are in memory: it cannot be streamed or sharded.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        anchors: fixed prototypes at this distance from the origin, each on its own axis, as in CAC;
            :math:`C \le D`. By default prototypes are learned.
        reciprocal: prototypes are points that the examples of their class stay away from,
            :math:`f_c = s\bigl(\frac1D\lVert x - w_c\rVert^2 - x\cdot w_c\bigr)`.
        scale: factor of the distances, or ``"learnable"``.
        implementation: ``"auto"`` or ``"dense"``.

    Example:
        >>> head = tammes.DistanceHead(3, 3, anchors=10.0)
        >>> head.logits(torch.tensor([[10.0, 0.0, 0.0]]))
        tensor([[ -0.0000, -14.1421, -14.1421]])
        >>> list(head.parameters())
        []
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        anchors: float | None = None,
        reciprocal: bool = False,
        scale: Scale = 1.0,
        implementation: Implementation = "auto",
    ) -> None:
        check_sizes("DistanceHead", embedding_size, num_classes)
        check_dense("DistanceHead", implementation)
        if anchors is not None and not hasattr(anchors, "__float__"):
            raise TypeError(f"DistanceHead expects anchors to be a number, got {anchors!r}")
        check_without_gradient("DistanceHead", "anchors", anchors, "float(...) takes its value")
        if anchors is not None and (reciprocal or not anchors > 0):
            raise ValueError(
                "DistanceHead expects anchors to be a distance above 0, and no reciprocal points "
                f"beside them, got anchors={anchors} and reciprocal={reciprocal}"
            )
        self.anchors = anchors
        weight = self._rows(0, num_classes, embedding_size, reciprocal)
        super().__init__(
            nn.Parameter(weight) if anchors is None else weight,
            Reciprocal() if reciprocal else Distance(),
            scale=scale,
            implementation=implementation,
        )

    def _rows(self, first: int, n: int, size: int, reciprocal: bool) -> Tensor:
        """Initial prototypes of the classes from ``first`` on."""
        if self.anchors is None:
            return torch.randn(n, size) * (0.1 if reciprocal else 1.0)
        if first + n > size:
            raise ValueError(
                f"DistanceHead expects an axis for each anchor, got {first + n} classes and "
                f"{size} axes; leave anchors out to learn prototypes"
            )
        return self.anchors * torch.eye(first + n, size)[first:]

    def extra_repr(self) -> str:
        """Sizes and options as in any head, and the distance of the anchors."""
        anchors = "" if self.anchors is None else f", anchors={self.anchors:g}"
        return super().extra_repr() + anchors

    def _initial(self, n: int) -> Tensor:
        reciprocal, size = isinstance(self.similarity, Reciprocal), self.embedding_size
        if self.anchors is None:
            return self._rows(0, n, size, reciprocal)
        # A removed class leaves a free axis, which need not be among the last.
        free = (self.weight == 0).all(0).nonzero().flatten()
        if n > len(free):
            raise ValueError(
                f"DistanceHead expects an axis for each anchor, got {n} new classes and "
                f"{len(free)} free axes"
            )
        return self.anchors * torch.eye(size)[free[:n].cpu()]
