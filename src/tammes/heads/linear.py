"""The linear classifier."""

import math

import torch
from torch import Tensor, nn

from tammes.heads.head import Head, Scale
from tammes.kernels import Implementation
from tammes.similarity import InnerProduct


class LinearHead(Head):
    r"""Inner products: :math:`f_c = s\,(x\cdot w_c + b_c)`.

    The head of plain softmax, and without bias of L-Softmax. Its ``weight`` and ``bias`` are those
    of :class:`torch.nn.Linear`, so a trained classifier loads as it is.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        bias: learn an additive bias for each class.
        scale: factor of the similarities, or ``"learnable"``.
        implementation: ``"auto"``, ``"dense"`` or ``"streamed"``.

    Example:
        >>> head = tammes.LinearHead(4, 3)
        >>> head.logits(torch.randn(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        bias: bool = True,
        scale: Scale = 1.0,
        implementation: Implementation = "auto",
    ) -> None:
        super().__init__(
            embedding_size,
            num_classes,
            InnerProduct(),
            scale=scale,
            implementation=implementation,
        )
        bound = 1 / math.sqrt(embedding_size)
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_size).uniform_(-bound, bound))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_classes).uniform_(-bound, bound))

    def _initial(self, n: int) -> Tensor:
        bound = 1 / math.sqrt(self.embedding_size)
        return torch.empty(n, self.embedding_size).uniform_(-bound, bound)
