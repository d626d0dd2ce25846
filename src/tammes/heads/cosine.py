"""Cosine classifier: only the directions of features and prototypes count."""

import torch
from torch import Tensor, nn

from tammes._validation import check_sizes, check_without_gradient
from tammes.heads.head import Head, Scale
from tammes.kernels.dispatch import Implementation
from tammes.pooling import Pooling, pooled
from tammes.similarity import Cosine


class CosineHead(Head):
    r"""Cosines to unit prototypes: :math:`f_c = s\cos\theta_c`.

    The head of NormFace, CosFace, ArcFace and LM-Softmax. The rows of ``weight`` need not be unit
    vectors; ``prototypes`` returns them normalised.

    With ``subcenters`` each class has K prototypes, for classes with several modes or noisy labels:
    :math:`\cos\theta_c` is the cosine to the nearest of them (sub-centre ArcFace), or their average
    with weights :math:`\operatorname{softmax}_k(\cos\theta_{ck} / \gamma)` (SoftTriple). ``weight``
    then has the shape ``(C, K, D)``; losses and everything else work unchanged.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        scale: factor of the cosines, ``"learnable"``, or ``"adaptive"`` for the scale of AdaCos,
            which the criterion updates during training.
        normalize_features: with ``False`` features keep their norm, :math:`f_c = s\,\lVert x
            \rVert\cos\theta_c`, as in SphereFace.
        subcenters: number K of prototypes per class.
        pooling: over the prototypes of a class: ``"max"`` or ``"soft"``.
        temperature: :math:`\gamma` of soft pooling; 0.1 in SoftTriple.
        implementation: ``"auto"``, ``"dense"``, ``"streamed"`` or ``"fused"``.

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
        check_without_gradient(
            "CosineHead", "temperature", temperature, "float(...) takes its value"
        )
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
    """Random rows of norm about 1, so that the usual learning rates turn them at a usual pace."""
    return torch.randn(shape) / shape[-1] ** 0.5
