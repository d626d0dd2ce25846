"""Linear classifier."""

import math

import torch
from torch import Tensor, nn

from tammes._validation import check_sizes
from tammes.heads.head import Head, Scale
from tammes.kernels.dispatch import Implementation
from tammes.similarity import InnerProduct


class LinearHead(Head):
    r"""Inner products: :math:`f_c = s\,(x\cdot w_c + b_c)`.

    The head of plain softmax and, without bias, of L-Softmax. ``weight`` and ``bias`` are those of
    a :class:`torch.nn.Linear`, so the ``state_dict`` of a trained classifier loads unchanged.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        bias: learn an additive bias for each class.
        scale: factor of the similarities, or ``"learnable"``.
        implementation: ``"auto"``, ``"dense"``, ``"streamed"`` or ``"fused"``.

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
        check_sizes("LinearHead", embedding_size, num_classes)
        super().__init__(
            nn.Parameter(_uniform((num_classes, embedding_size), embedding_size)),
            InnerProduct(),
            bias=_uniform((num_classes,), embedding_size) if bias else None,
            scale=scale,
            implementation=implementation,
        )

    def _initial(self, n: int) -> Tensor:
        return _uniform((n, self.embedding_size), self.embedding_size)


def _uniform(shape: tuple[int, ...], embedding_size: int) -> Tensor:
    """Initial values as in :class:`torch.nn.Linear`."""
    bound = 1 / math.sqrt(embedding_size)
    return torch.empty(shape).uniform_(-bound, bound)
