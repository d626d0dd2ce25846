"""Split of a global batch by a sharded head."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tammes._validation import check_classes, check_labels
from tammes.distributed.global_batch import GlobalBatch, WeightedBatch
from tammes.heads.sharded import ShardedHead
from tammes.kernels.dispatch import split
from tammes.kernels.merge import scale_gradient
from tammes.split import Split, read_fields
from tammes.terms import Batch


def split_together(
    head: ShardedHead, features: Tensor, labels: Tensor, reads: str | Iterable[str]
) -> Split:
    """Split the examples of all ranks and keep those of this one; see :class:`ShardedHead`."""
    masked, fields = head.masked(), read_fields("ShardedHead", reads)

    def check() -> None:
        head.check(features)
        check_labels("ShardedHead", labels, features)
        if labels.device.type == "cpu":
            check_classes("ShardedHead", labels, head.num_classes, masked)

    batches = GlobalBatch(head.group, sharded=True, averaged=head.averaged, even=False)
    max_rows = batches.validate("ShardedHead", check, features, num_classes=head.num_classes)
    batch = Batch(features, labels.long(), torch.ones_like(labels, dtype=torch.bool))
    (whole, *_), mine = batches.gather(WeightedBatch(batch, None, {}), max_rows, features=True)
    problem = head.problem(whole.features, whole.labels)
    found = split(problem, whole.labels, fields, head.implementation)
    numbers = {
        name: value
        for name, value in found._asdict().items()
        if isinstance(value, Tensor) and value.ndim and value.is_floating_point()
    }
    # Stacked, so that backward has one collective even if ranks use different numbers.
    rows, _ = batches.combine(torch.stack([*numbers.values()], 1), [], {}, mine)
    kept: dict[str, Any] = dict(zip(numbers, rows.unbind(1), strict=True))
    if isinstance(found.scale, Tensor):
        # The kernel assumes that every rank continues with the rows of all ranks.
        kept["scale"] = scale_gradient(found.scale, head.group.world_size / batches.factor)
    return found._replace(**kept, labels=batch.labels)
