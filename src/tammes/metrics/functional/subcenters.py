"""Usage of the prototypes of each class, if it has several."""

from typing import NamedTuple

import torch
from torch import Tensor

from tammes._validation import check_labels, check_range
from tammes.metrics.functional.inputs import as_prototypes, wide
from tammes.pooling import Pooled
from tammes.similarity import Cosine, angle_gaps

_BLOCK = 1 << 24
"""Most numbers of gathered prototypes in memory at a time."""


class SubcenterUsageResult(NamedTuple):
    """Result of :func:`subcenter_usage`.

    Attributes:
        center: index of each example's nearest prototype among those of its class, shape ``(N,)``.
        counts: number of examples at each prototype, shape ``(C, K)``; adds up over batches.
        dominant: index of the prototype with most examples in each class, shape ``(C,)``.
        angle: angle of each example to the dominant prototype of its class, in degrees, shape
            ``(N,)``; large for a wrong label.
        share: fraction of examples at the dominant prototype of their class.
    """

    center: Tensor
    counts: Tensor
    dominant: Tensor
    angle: Tensor
    share: Tensor


@torch.no_grad()
def subcenter_usage(features: Tensor, labels: Tensor, prototypes: Tensor) -> SubcenterUsageResult:
    """Find which prototype of its class each example uses, and the dominant ones.

    Sub-centre ArcFace uses this to clean its data: with 3 prototypes per class, wrong labels gather
    at those that are not dominant. Examples more than 75 degrees from the dominant prototype are
    dropped, and :func:`tammes.heads.drop_subcenters` drops the other prototypes.

    Args:
        features: features of all examples or of a batch, shape ``(N, D)``.
        labels: class of each example, shape ``(N,)``.
        prototypes: shape ``(C, K, D)``.

    Returns:
        The :class:`SubcenterUsageResult`; angles in float64.

    Example:
        >>> import torch
        >>> from tammes.metrics.functional import subcenter_usage
        >>> prototypes = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[-1.0, 0.0], [0.0, -1.0]]])
        >>> features = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
        >>> usage = subcenter_usage(features, torch.tensor([0, 0, 0, 1]), prototypes)
        >>> usage.counts, usage.angle
        (tensor([[2, 1],
                [1, 0]]), tensor([ 0.,  0., 90.,  0.], dtype=torch.float64))

    References:
        Deng et al., Sub-center ArcFace: Boosting Face Recognition by Large-scale Noisy Web Faces,
        ECCV 2020, Section 3.3.
    """
    prototypes = as_prototypes("subcenter_usage", prototypes, several=True)
    if prototypes.ndim == 2:
        prototypes = prototypes.unsqueeze(1)
    classes, count, size = prototypes.shape
    if features.ndim != 2 or features.shape[1] != size:
        raise ValueError(
            f"subcenter_usage expects features of shape (N, {size}), got {tuple(features.shape)}"
        )
    check_labels("subcenter_usage", labels, features)
    check_range("subcenter_usage", labels, classes)
    labels, similarity, centers = labels.long(), Pooled(Cosine(), count), wide(prototypes)
    block = max(1, _BLOCK // (count * size))
    parts = [
        similarity.nearest(wide(rows), centers[own])
        for rows, own in zip(features.split(block), labels.split(block), strict=True)
    ]
    center = torch.cat(parts)
    counts = torch.bincount(labels * count + center, minlength=classes * count)
    counts = counts.view(classes, count)
    # If tied, the first; as for equally near ones.
    dominant = (counts == counts.amax(1, keepdim=True)).byte().argmax(1)
    own = prototypes[labels, dominant[labels]].double()
    gaps = angle_gaps(features.double(), own)
    angle = 2 * torch.atan2(gaps["gap"].sqrt(), gaps["opposite"].sqrt())
    return SubcenterUsageResult(
        center=center,
        counts=counts,
        dominant=dominant,
        angle=torch.rad2deg(angle),
        share=(center == dominant[labels]).double().mean(),
    )
