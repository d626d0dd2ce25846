"""Prototypes that are not learned: they stand where the margin is largest."""

import torch
from torch import Tensor

from tammes.checks import check_sizes
from tammes.geometry.simplex import simplex
from tammes.heads.head import Head, Scale
from tammes.kernels import Implementation
from tammes.similarity import Cosine, unit


class SimplexHead(Head):
    r"""Cosines to fixed prototypes at the corners of a regular simplex.

    The class margin is the largest there is, :math:`\arccos\frac{-1}{C-1}`, from the first step;
    only the features learn. Needs :math:`C \le D + 1`.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        scale: factor of the cosines, or ``"learnable"``.
        implementation: ``"auto"``, ``"dense"`` or ``"streamed"``.

    Example:
        >>> head = tammes.SimplexHead(3, 4)
        >>> (head.prototypes @ head.prototypes.T)[0].round(decimals=4)
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
        >>> list(head.parameters())
        []
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        scale: Scale = 64.0,
        implementation: Implementation = "auto",
    ) -> None:
        check_sizes("SimplexHead", embedding_size, num_classes)
        if num_classes > embedding_size + 1:
            raise ValueError(
                "SimplexHead expects num_classes <= embedding_size + 1, "
                f"got num_classes={num_classes} and embedding_size={embedding_size}"
            )
        super().__init__(
            simplex(num_classes, embedding_size),
            Cosine(),
            scale=scale,
            implementation=implementation,
        )

    def _initial(self, n: int) -> Tensor:
        """Directions as far as possible from those taken and from each other."""
        taken = self.weight.detach().double().cpu()
        generator = torch.Generator().manual_seed(len(taken))
        free = torch.randn(n, taken.shape[1], generator=generator, dtype=torch.double)
        free.requires_grad_()
        optimizer = torch.optim.Adam([free], lr=0.1)
        with torch.enable_grad():
            for sharpness in torch.logspace(0, 2, 300).tolist():
                points = unit(free)
                cosine = points @ torch.cat([taken, points]).T
                cosine = cosine - 2 * torch.eye(n, n + len(taken), dtype=cosine.dtype).roll(
                    len(taken), 1
                )
                optimizer.zero_grad()
                (cosine.mul(sharpness).logsumexp((0, 1)) / sharpness).backward()
                optimizer.step()
        return unit(free.detach())
