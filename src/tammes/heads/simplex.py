"""Cosine classifier with fixed prototypes at maximal margin."""

import torch
from torch import Tensor

from tammes._validation import check_sizes
from tammes.geometry.packing import pack
from tammes.heads.head import Head, Scale
from tammes.kernels.dispatch import Implementation
from tammes.similarity import Cosine, unit


class SimplexHead(Head):
    r"""Cosines to fixed prototypes that are as far apart as possible.

    The class margin is maximal from the first step; only the features learn. For
    :math:`C \le D + 1` the prototypes are the vertices of a regular simplex, at an angle of
    :math:`\arccos\frac{-1}{C-1}`; for more classes they are the best packing that
    :func:`tammes.geometry.pack` finds, which takes seconds for tens of classes and minutes for
    thousands. They are saved with the head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        scale: factor of the cosines, ``"learnable"``, or ``"adaptive"`` for the scale of AdaCos,
            which the criterion updates during training.
        implementation: ``"auto"``, ``"dense"``, ``"streamed"`` or ``"fused"``.

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
        device = torch.get_default_device()
        # Nothing can be computed on the meta device.
        with torch.device("cpu" if device.type == "meta" else device):
            points = pack(num_classes, embedding_size, starts=8, steps=1000).points
        super().__init__(
            points.to(device, torch.get_default_dtype()),
            Cosine(),
            scale=scale,
            implementation=implementation,
        )

    def _initial(self, n: int) -> Tensor:
        """Directions as far as possible from the existing ones and from each other."""
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
