"""Scale of AdaCos: fixed by the number of classes, or adapted to the angles of each batch."""

import math

import torch
from torch import Tensor

from tammes.split import Split

ADAPTIVE_READS = frozenset(("target", "others"))
"""Fields of the split that determine the scale of a batch."""
_CLASSES = 3
"""Smallest number of classes for the fixed scale: with two, the formula gives 0."""


def adacos_scale(num_classes: int) -> float:
    r"""Fixed scale of AdaCos, :math:`\sqrt2\log(C-1)`; for two classes, that of three.

    Args:
        num_classes: number of classes C.

    Example:
        >>> round(tammes.heads.adacos_scale(1000), 3)
        9.768

    References:
        Zhang et al., AdaCos: Adaptively Scaling Cosine Logits for Effectively Learning Deep Face
        Representations, CVPR 2019, eq. 13.
    """
    return math.sqrt(2) * math.log(max(num_classes, _CLASSES) - 1)


def adapted_scale(split: Split, valid: Tensor, now: Tensor) -> Tensor:
    r"""Scale of AdaCos for a batch, shape ``(1,)``.

    .. math:: s = \frac{\log \frac1N\sum_i e^{\Lambda_i}}{\cos\min(\pi/4,\ \theta_{med})}

    with :math:`\Lambda_i` at the current scale and the median :math:`\theta_{med}` of the angles to
    the target class. It is never below the fixed scale of three classes, and does not change if the
    batch has no valid example or has overflowed.

    Args:
        split: cosines of N examples, with ``target`` and ``others``.
        valid: which examples count, shape ``(N,)``.
        now: the current scale, shape ``(1,)``.
    """
    count = valid.sum()
    if not len(valid):
        return now
    # With an even count, the smaller of the two middle angles, as torch.median returns.
    cosines = torch.where(valid, split.target, -torch.inf).sort(descending=True).values
    median = cosines.gather(0, ((count - 1) // 2).clamp_min(0).view(1))
    total = torch.where(valid, split.others, -torch.inf).logsumexp(0)
    scale = (total - count.to(total.dtype).log()) / median.clamp_min(math.cos(math.pi / 4))
    known = (count > 0) & median.isfinite() & ~total.isnan() & (total < torch.inf)
    return torch.where(known, scale.clamp_min(adacos_scale(_CLASSES)), now.to(scale.dtype))
