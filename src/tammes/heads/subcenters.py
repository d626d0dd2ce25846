"""Drop sub-centres that few examples use."""

import copy
from dataclasses import replace

from torch import Tensor, nn

from tammes._validation import whole_number
from tammes.heads.head import Head
from tammes.heads.sharded import ShardedHead
from tammes.pooling import Pooled


def drop_subcenters(head: Head, counts: Tensor, *, keep: int = 1) -> Head:
    """Copy a head, keeping for each class only the prototypes that most examples use.

    Args:
        head: with ``subcenters``; it is not changed.
        counts: number of examples at each prototype of all classes, shape ``(C, K)``, as
            :func:`tammes.metrics.functional.subcenter_usage` counts them.
        keep: number of prototypes to keep per class; 1 gives a plain head.

    Returns:
        The new head, for a new criterion and optimizer.

    Example:
        >>> head = tammes.CosineHead(4, 3, subcenters=3)
        >>> features, labels = torch.randn(20, 4), torch.arange(20) % 3
        >>> usage = tammes.metrics.functional.subcenter_usage(features, labels, head.prototypes)
        >>> tammes.heads.drop_subcenters(head, usage.counts)
        CosineHead(4, 3, scale=64)
    """
    similarity = head.similarity
    if not isinstance(similarity, Pooled):
        raise ValueError(
            "drop_subcenters expects a head with several prototypes per class, such as "
            f"CosineHead(..., subcenters=3), got {head}"
        )
    shape = (head.num_classes, similarity.centers)
    if tuple(counts.shape) != shape:
        raise ValueError(
            f"drop_subcenters expects counts of shape {shape}, got {tuple(counts.shape)}"
        )
    keep = whole_number("drop_subcenters", "keep", keep)
    if not 1 <= keep <= similarity.centers:
        raise ValueError(f"drop_subcenters expects keep from 1 to {similarity.centers}, got {keep}")
    result = copy.deepcopy(head)
    if isinstance(head, ShardedHead) and isinstance(result, ShardedHead):
        counts = counts[head.start : head.stop]
        result.options = {**head.options, "subcenters": keep}
    order = counts.to(head.weight.device).argsort(dim=1, descending=True, stable=True)
    chosen = order[:, :keep].sort(1).values.unsqueeze(2)
    rows = head.weight.detach().gather(1, chosen.expand(-1, -1, head.embedding_size))
    rows = rows.squeeze(1) if keep == 1 else rows
    result.weight = nn.Parameter(rows, requires_grad=head.weight.requires_grad)
    result.similarity = similarity.inner if keep == 1 else replace(similarity, centers=keep)
    return result
