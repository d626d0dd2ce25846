"""The cosine classifier: only directions count."""

import torch
from torch import Tensor, nn

from tammes._validation import check_sizes
from tammes.heads.head import Head, Scale
from tammes.kernels.dispatch import Implementation
from tammes.pooling import Pooling, pooled
from tammes.similarity import Cosine


class CosineHead(Head):
    r"""Cosines to unit prototypes: :math:`f_c = s\cos\theta_c`.

    The head of NormFace, CosFace, ArcFace, LM-Softmax. The stored ``weight`` need not have unit
    rows; ``prototypes`` has.

    With ``subcenters`` a class has K prototypes, for classes with several modes or wrong labels:
    :math:`\cos\theta_c` is the cosine to the nearest (sub-centre ArcFace), or their average with
    weights :math:`\operatorname{softmax}_k(\cos\theta_{ck} / \gamma)` (SoftTriple). ``weight``
    then has the shape ``(C, K, D)``; every loss, and everything else, stays as it is.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        scale: factor of the cosines, ``"learnable"``, or ``"adaptive"`` for that of AdaCos, which a
            criterion sets in training.
        normalize_features: with ``False`` features keep their length, :math:`f_c = s\,\lVert x
            \rVert\cos\theta_c`, as SphereFace has it.
        subcenters: number K of prototypes per class.
        pooling: ``"max"``, the nearest of them, or ``"soft"``, all by their nearness.
        temperature: :math:`\gamma` of soft pooling; 0.1 in SoftTriple.
        implementation: ``"auto"``, ``"dense"`` or ``"streamed"``.

    Example:
        >>> head = tammes.CosineHead(4, 3, scale=30.0)
        >>> split = head.split(torch.randn(2, 4), torch.tensor([0, 2]))
        >>> bool((split.target.abs() <= 1).all())
        True
        >>> tammes.CosineHead(4, 3, subcenters=2).weight.shape
        torch.Size([3, 2, 4])

    References:
        Deng et al., Sub-center ArcFace: Boosting Face Recognition by Large-scale Noisy Web Faces,
        ECCV 2020, eq. 3.
        Qian et al., SoftTriple Loss: Deep Metric Learning Without Triplet Sampling, ICCV 2019,
        eq. 5. https://arxiv.org/abs/1909.05235
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        scale: Scale = 64.0,
        normalize_features: bool = True,
        subcenters: int = 1,
        pooling: Pooling = "max",
        temperature: float = 0.1,
        implementation: Implementation = "auto",
    ) -> None:
        check_sizes("CosineHead", embedding_size, num_classes)
        if not hasattr(temperature, "__float__"):
            raise TypeError(f"CosineHead expects temperature to be a number, got {temperature!r}")
        similarity = pooled(
            "CosineHead", Cosine(normalize_features), subcenters, pooling, temperature
        )
        shape = (embedding_size,) if subcenters == 1 else (subcenters, embedding_size)
        super().__init__(
            nn.Parameter(_random_directions(num_classes, *shape)),
            similarity,
            scale=scale,
            implementation=implementation,
        )

    def _initial(self, n: int) -> Tensor:
        return _random_directions(n, *self.weight.shape[1:])


def _random_directions(*shape: int) -> Tensor:
    """Rows of length about one, so that an optimizer turns them at its usual rate."""
    return torch.randn(shape) / shape[-1] ** 0.5
