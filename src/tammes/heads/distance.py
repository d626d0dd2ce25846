"""Euclidean distances to prototypes, near or far."""

import torch
from torch import Tensor, nn

from tammes._validation import check_sizes
from tammes.heads.head import Head, Scale
from tammes.kernels.dispatch import Implementation, check_dense
from tammes.similarity import Distance, Reciprocal


class DistanceHead(Head):
    r"""Distances to prototypes: :math:`f_c = -s\,\lVert x - w_c\rVert`, for open sets.

    The head of :func:`tammes.cac` and, with ``reciprocal=True``, of :func:`tammes.arpl`. Its
    distances are no products, so all N x C scores are in memory: it cannot be streamed or sharded.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        anchors: fixed prototypes at this distance from the origin, each on an axis of its own, as
            CAC has them; :math:`C \le D`. By default prototypes are learned.
        reciprocal: prototypes are points that their class is far from,
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
        """Prototypes that classes from ``first`` on start with."""
        if self.anchors is None:
            return torch.randn(n, size) * (0.1 if reciprocal else 1.0)
        if first + n > size:
            raise ValueError(
                f"DistanceHead expects an axis for each anchor, got {first + n} classes and "
                f"{size} axes; leave anchors out to learn prototypes"
            )
        return self.anchors * torch.eye(first + n, size)[first:]

    def extra_repr(self) -> str:
        """Sizes and options as of any head, and the distance of the anchors."""
        anchors = "" if self.anchors is None else f", anchors={self.anchors:g}"
        return super().extra_repr() + anchors

    def _initial(self, n: int) -> Tensor:
        reciprocal, size = isinstance(self.similarity, Reciprocal), self.embedding_size
        if self.anchors is None:
            return self._rows(0, n, size, reciprocal)
        # After a class was removed its axis is free, and the last ones are not.
        free = (self.weight == 0).all(0).nonzero().flatten()
        if n > len(free):
            raise ValueError(
                f"DistanceHead expects an axis for each anchor, got {n} new classes and "
                f"{len(free)} free axes"
            )
        return self.anchors * torch.eye(size)[free[:n].cpu()]
