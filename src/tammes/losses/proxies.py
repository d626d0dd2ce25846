"""Losses between the examples of a batch and prototypes as proxies of their classes."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tammes._validation import transforming
from tammes.distributed.sharded_rows import ALL_ROWS_LOCAL, ShardedRows
from tammes.kernels.tiling import cut
from tammes.similarity import directions, unit
from tammes.terms import Batch, Setting, term

_SCORES = 1 << 24
"""Cosines in memory at a time; above, blocks of classes are computed again in backward."""


def _check_scale(scale: float, margin: float) -> None:
    if not scale > 0:
        raise ValueError(f"proxy_anchor expects scale above 0, got {scale}")


@term(on="proxies", reads="", check=_check_scale)
def proxy_anchor(
    batch: Batch,
    prototypes: Tensor,
    *,
    scale: Setting = 32.0,
    margin: Setting = 0.1,
    shards: ShardedRows = ALL_ROWS_LOCAL,
) -> Tensor:
    r"""Proxy-Anchor: each prototype pulls the hardest of its examples and pushes all others.

    .. math::
        \ell = \frac{1}{|P|}\sum_{c\in P}
        \log\Bigl(1 + \sum_{i:\,y_i = c} e^{-\alpha(\cos\theta_{ic} - \delta)}\Bigr)
        + \frac1C\sum_c
        \log\Bigl(1 + \sum_{i:\,y_i \ne c} e^{\alpha(\cos\theta_{ic} + \delta)}\Bigr)

    with :math:`P` the classes of the batch. The sums are over the examples of the batch, on all
    ranks over those of the global batch, where a softmax sums over classes: it has one value for
    the batch, so weights of examples do not enter. It uses cosines whatever the head. Beyond 16
    million cosines only a block of classes is in memory.

    Args:
        batch: features and labels.
        prototypes: shape ``(C, D)``.
        scale: :math:`\alpha`; the scale of the head does not enter.
        margin: cosine :math:`\delta` by which examples are to be nearer, or farther.
        shards: access to the prototypes of other ranks; the criterion supplies it.

    Returns:
        The loss, a scalar.

    Example:
        >>> criterion = tammes.Criterion(tammes.CosineHead(4, 3), tammes.proxy_anchor())
        >>> loss = criterion(torch.randn(8, 4), torch.randint(3, (8,)))

    References:
        Kim et al., Proxy Anchor Loss for Deep Metric Learning, CVPR 2020, eq. 4.
    """
    features, proxies = directions(batch.features), unit(prototypes)
    labels = torch.where(batch.valid, batch.labels - shards.start, -1)

    def sums(features: Tensor, proxies: Tensor, first: int) -> Tensor:
        """Positive and negative parts of some classes, and how many are in the batch."""
        cosine = features @ proxies.T
        classes = torch.arange(first, first + len(proxies), device=labels.device)
        own = labels[:, None] == classes
        others = ~own & batch.valid[:, None]
        zero = cosine.new_zeros(1, len(proxies))
        # With the one as a score of zero: finite also where a sum is over no example.
        near = torch.where(own, -scale * (cosine - margin), -torch.inf)
        far = torch.where(others, scale * (cosine + margin), -torch.inf)
        pulled = torch.cat([zero, near]).logsumexp(0).sum()
        pushed = torch.cat([zero, far]).logsumexp(0).sum()
        return torch.stack([pulled, pushed, own.any(0).sum().to(cosine.dtype)])

    total = features.new_zeros(3)
    most = max(1, _SCORES // max(1, len(features)))
    if len(proxies) <= most or transforming():
        total = sums(features, proxies, 0)
    else:
        for block in cut(len(proxies), most):
            again = (features, proxies[block], block.start)
            total = total + checkpoint(sums, *again, use_reentrant=False, preserve_rng_state=False)
    pulled, pushed, present = shards.all_reduce(total)
    return pulled / present.detach().clamp_min(1) + pushed / shards.count(prototypes)
