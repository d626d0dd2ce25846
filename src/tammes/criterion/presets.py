"""Ready-made criteria: a head and a loss with their defaults, in one line.

Margins are those of the papers. On unit features, the default scale is that of
:mod:`tammes.advise.defaults` for the loss, its margin and the number of classes: the one that
``tammes advise`` recommends and the lab uses.
Each is a :class:`tammes.Criterion` and takes its options too: ``reduction``, ``ignore_index``,
``class_weights``, ``validate``, ``implementation``, ``group``, ``averaged``, ``even``.
"""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from torch import Tensor

from tammes._validation import check_sizes
from tammes.criterion.criterion import Criterion, Reduction
from tammes.heads import CosineHead, GaussianHead, LinearHead
from tammes.heads.head import Scale
from tammes.kernels.dispatch import Implementation
from tammes.losses import (
    arcface,
    combined_margin,
    cosface,
    gm_softmax,
    l_softmax,
    large_margin_gaussian,
    ldam,
    lm_softmax,
    normface,
    softmax,
    sphereface,
)
from tammes.terms import Loss, Setting


class Options(TypedDict, total=False):
    """Keyword arguments that every ready-made criterion accepts."""

    reduction: Reduction
    ignore_index: int
    class_weights: Sequence[float] | Tensor | None
    validate: bool | None
    implementation: Implementation | None
    group: Any
    averaged: bool
    even: bool


def _cosine_head(
    embedding_size: int, num_classes: int, scale: Scale | None, loss: Loss
) -> CosineHead:
    """Build a cosine head, by default with the scale recommended for the loss."""
    check_sizes("CosineHead", embedding_size, num_classes)
    if scale is None:
        # Imported on first use, so that importing tammes stays light.
        from tammes.advise.defaults import recommended_scale

        scale = recommended_scale(loss, embedding_size, num_classes)
    return CosineHead(embedding_size, num_classes, scale=scale)


class Softmax(Criterion):
    """Softmax cross entropy on a linear classifier: :func:`tammes.softmax` on ``LinearHead``.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        bias: learn an additive bias for each class.
        smoothing: label smoothing.
        margin: score by which the target class must win.
        scale: factor of the scores.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.Softmax(embedding_size=8, num_classes=3)
        >>> loss = criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        bias: bool = True,
        smoothing: float = 0.0,
        margin: Setting = 0.0,
        scale: Scale = 1.0,
        **options: Unpack[Options],
    ) -> None:
        head = LinearHead(embedding_size, num_classes, bias=bias, scale=scale)
        super().__init__(head, softmax(smoothing=smoothing, margin=margin), **options)


class LSoftmax(Criterion):
    """L-Softmax (Liu et al. 2016): :func:`tammes.l_softmax` on a linear head without bias.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        margin: factor of the angle; 1 to 4 in the paper, need not be an integer.
        blend: weight of the plain cosine; anneal it with :mod:`tammes.schedules`.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> from tammes.schedules import LambdaAnnealing
        >>> criterion = tammes.LSoftmax(8, 3, margin=2).schedule(blend=LambdaAnnealing())
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        margin: Setting = 4.0,
        blend: Setting = 0.0,
        **options: Unpack[Options],
    ) -> None:
        head = LinearHead(embedding_size, num_classes, bias=False)
        super().__init__(head, l_softmax(margin=margin, blend=blend), **options)


class SphereFace(Criterion):
    """SphereFace (Liu et al. 2017): :func:`tammes.sphereface` on unit prototypes.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        margin: factor of the angle; 4 in the paper.
        blend: weight of the plain cosine; anneal it with :mod:`tammes.schedules`.
        scale: factor of the scores; with ``normalize_features``, of the cosines.
        normalize_features: the later variant with unit features; use a scale of 30 or more and a
            margin of about 1.5 with it.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.SphereFace(8, 3, margin=1.5, scale=30.0, normalize_features=True)
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        margin: Setting = 4.0,
        blend: Setting = 0.0,
        scale: Scale = 1.0,
        normalize_features: bool = False,
        **options: Unpack[Options],
    ) -> None:
        head = CosineHead(
            embedding_size, num_classes, scale=scale, normalize_features=normalize_features
        )
        super().__init__(head, sphereface(margin=margin, blend=blend), **options)


class NormFace(Criterion):
    """NormFace (Wang et al. 2017): :func:`tammes.normface` on a cosine head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        scale: inverse temperature; 20 (a temperature of 0.05) by default, more if many classes
            crowd few dimensions.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.NormFace(8, 3, scale="learnable")
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        scale: Scale | None = None,
        **options: Unpack[Options],
    ) -> None:
        loss = normface()
        super().__init__(_cosine_head(embedding_size, num_classes, scale, loss), loss, **options)


class CosFace(Criterion):
    """CosFace (Wang et al. 2018): :func:`tammes.cosface` on a cosine head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        margin: cosine by which the target class must win; negative for few-shot pre-training.
        scale: factor of the cosines; :func:`tammes.advise.defaults.recommended_scale` by default.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.CosFace(embedding_size=8, num_classes=3, margin=0.35, scale=64.0)
        >>> loss = criterion(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        margin: Setting = 0.35,
        scale: Scale | None = None,
        **options: Unpack[Options],
    ) -> None:
        loss = cosface(margin=margin)
        super().__init__(_cosine_head(embedding_size, num_classes, scale, loss), loss, **options)


class ArcFace(Criterion):
    """ArcFace (Deng et al. 2019): :func:`tammes.arcface` on a cosine head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        margin: angle in radians by which the target class must win.
        scale: factor of the cosines; :func:`tammes.advise.defaults.recommended_scale` by default.
        extension: ``"monotone"`` or ``"linear"`` past pi.
        gradient: ``"exact"`` or ``"detached"``.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.ArcFace(8, 3, margin=0.5, scale=64.0)
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        margin: Setting = 0.5,
        scale: Scale | None = None,
        extension: str = "monotone",
        gradient: str = "exact",
        **options: Unpack[Options],
    ) -> None:
        loss = arcface(margin=margin, extension=extension, gradient=gradient)
        super().__init__(_cosine_head(embedding_size, num_classes, scale, loss), loss, **options)


class CombinedMargin(Criterion):
    """All three margins at once: :func:`tammes.combined_margin` on a cosine head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        m1: factor of the angle.
        m2: radians added to the angle.
        m3: cosine subtracted.
        scale: factor of the cosines; :func:`tammes.advise.defaults.recommended_scale` by default.
        extension: ``"monotone"`` or ``"linear"`` past pi.
        gradient: ``"exact"`` or ``"detached"``.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.CombinedMargin(8, 3, m1=1.0, m2=0.3, m3=0.2)
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        m1: Setting = 1.0,
        m2: Setting = 0.3,
        m3: Setting = 0.2,
        scale: Scale | None = None,
        extension: str = "monotone",
        gradient: str = "exact",
        **options: Unpack[Options],
    ) -> None:
        loss = combined_margin(m1=m1, m2=m2, m3=m3, extension=extension, gradient=gradient)
        super().__init__(_cosine_head(embedding_size, num_classes, scale, loss), loss, **options)


class GMSoftmax(Criterion):
    """GM-Softmax (Zhou et al. 2022): :func:`tammes.gm_softmax` on a cosine head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        alpha1: factor of the target cosine in the numerator.
        beta1: constant added in the numerator.
        alpha2: factor of the target cosine in the denominator.
        beta2: constant added in the denominator.
        scale: factor of the cosines; :func:`tammes.advise.defaults.recommended_scale` by default.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.GMSoftmax(8, 3, alpha1=0.9, beta1=-0.1)
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        alpha1: Setting = 1.0,
        beta1: Setting = 0.0,
        alpha2: Setting = 1.0,
        beta2: Setting = 0.0,
        scale: Scale | None = None,
        **options: Unpack[Options],
    ) -> None:
        loss = gm_softmax(alpha1=alpha1, beta1=beta1, alpha2=alpha2, beta2=beta2)
        super().__init__(_cosine_head(embedding_size, num_classes, scale, loss), loss, **options)


class LMSoftmax(Criterion):
    """LM-Softmax (Zhou et al. 2022): :func:`tammes.lm_softmax` on a cosine head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        scale: factor of the cosines, 64 by default; the loss is not sensitive to it.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.LMSoftmax(8, 3)
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        scale: Scale | None = None,
        **options: Unpack[Options],
    ) -> None:
        loss = lm_softmax()
        super().__init__(_cosine_head(embedding_size, num_classes, scale, loss), loss, **options)


class LDAM(Criterion):
    """LDAM (Cao et al. 2019): :func:`tammes.ldam` on a cosine head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        counts: number of training examples of each class.
        max_margin: margin of the rarest class.
        scale: factor of the cosines; 30 by default, more if many classes crowd few dimensions.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.LDAM(8, 3, counts=[500, 50, 5])
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        counts: Sequence[float] | Tensor,
        max_margin: Setting = 0.5,
        scale: Scale | None = None,
        **options: Unpack[Options],
    ) -> None:
        loss = ldam(counts, max_margin=max_margin)
        super().__init__(_cosine_head(embedding_size, num_classes, scale, loss), loss, **options)


class LargeMarginGaussian(Criterion):
    """LGM (Wan et al. 2018): :func:`tammes.large_margin_gaussian` on a Gaussian head.

    Args:
        embedding_size: size D of a feature.
        num_classes: number of classes C.
        margin: relative increase of the squared distance to the target mean.
        likelihood: weight of the likelihood term.
        **options: of :class:`tammes.Criterion`.

    Example:
        >>> criterion = tammes.LargeMarginGaussian(8, 3)
    """

    def __init__(
        self,
        embedding_size: int,
        num_classes: int,
        *,
        margin: Setting = 0.3,
        likelihood: Setting = 0.1,
        **options: Unpack[Options],
    ) -> None:
        head = GaussianHead(embedding_size, num_classes)
        super().__init__(
            head, large_margin_gaussian(margin=margin, likelihood=likelihood), **options
        )
