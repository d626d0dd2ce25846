"""Classifier with a Gaussian around each prototype."""

import torch
from torch import Tensor, nn

from tammes._validation import check_sizes
from tammes.heads.head import Head, Scale
from tammes.kernels.dispatch import Implementation
from tammes.similarity import SquaredDistance


class GaussianHead(Head):
    r"""Squared distances: :math:`f_c = -\frac{s}{2}\lVert x - \mu_c\rVert^2`.

    The head of the large-margin Gaussian mixture loss, with unit covariances; margin and likelihood
    are in the term :func:`tammes.large_margin_gaussian`.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        scale: factor of the similarities, or ``"learnable"``.
        implementation: ``"auto"``, ``"dense"``, ``"streamed"`` or ``"fused"``.

    Example:
        >>> head = tammes.GaussianHead(2, 3)
        >>> head.logits(head.prototypes.detach()).argmax(1)
        tensor([0, 1, 2])
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        scale: Scale = 1.0,
        implementation: Implementation = "auto",
    ) -> None:
        check_sizes("GaussianHead", embedding_size, num_classes)
        super().__init__(
            nn.Parameter(torch.randn(num_classes, embedding_size)),
            SquaredDistance(),
            scale=scale,
            implementation=implementation,
        )

    def _initial(self, n: int) -> Tensor:
        return torch.randn(n, self.embedding_size)
