"""The cosine classifier: only directions count."""

import torch
from torch import Tensor, nn

from tammes._validation import check_sizes
from tammes.heads.head import Head, Scale
from tammes.kernels.dispatch import Implementation
from tammes.similarity import Cosine


class CosineHead(Head):
    r"""Cosines to unit prototypes: :math:`f_c = s\cos\theta_c`.

    The head of NormFace, CosFace, ArcFace, LM-Softmax. The stored ``weight`` need not have unit
    rows; ``prototypes`` has.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        scale: factor of the cosines, or ``"learnable"``.
        normalize_features: with ``False`` features keep their length, :math:`f_c = s\,\lVert x
            \rVert\cos\theta_c`, as SphereFace has it.
        implementation: ``"auto"``, ``"dense"`` or ``"streamed"``.

    Example:
        >>> head = tammes.CosineHead(4, 3, scale=30.0)
        >>> split = head.split(torch.randn(2, 4), torch.tensor([0, 2]))
        >>> bool((split.target.abs() <= 1).all())
        True
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        scale: Scale = 64.0,
        normalize_features: bool = True,
        implementation: Implementation = "auto",
    ) -> None:
        check_sizes("CosineHead", embedding_size, num_classes)
        super().__init__(
            nn.Parameter(_random_directions(num_classes, embedding_size)),
            Cosine(normalize_features),
            scale=scale,
            implementation=implementation,
        )

    def _initial(self, n: int) -> Tensor:
        return _random_directions(n, self.embedding_size)


def _random_directions(n: int, size: int) -> Tensor:
    """Rows of length about one, so that an optimizer turns them at its usual rate."""
    return torch.randn(n, size) / size**0.5
