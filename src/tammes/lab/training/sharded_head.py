"""A head whose prototypes are spread over the processes of a run."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tammes.distributed.process_group import RankGroup
from tammes.distributed.sharded_rows import ShardedRows
from tammes.heads.head import Head
from tammes.heads.linear import LinearHead
from tammes.heads.sharded import SPREAD, ShardedHead
from tammes.heads.sharded_init import KINDS
from tammes.similarity import Cosine


def spread(head: Head) -> ShardedHead:
    """The same head, made anew and spread over the processes there are.

    Args:
        head: its kind and settings count, not its prototypes; it may be without memory.
    """
    kind = type(head)
    if kind not in KINDS:
        raise ValueError(
            f"shard expects a cosine, linear or gaussian head, got {kind.__name__}, "
            "whose prototypes are not drawn one by one"
        )
    options: dict[str, Any] = {
        "scale": "learnable" if head.log_scale is not None else head.scale,
        "implementation": head.implementation,
    }
    if isinstance(head.similarity, Cosine):
        options["normalize_features"] = head.similarity.normalize_features
    if kind is LinearHead:
        options["bias"] = head.bias is not None
    return ShardedHead(kind, head.embedding_size, head.num_classes, **options)


def is_spread(head: Head) -> bool:
    """Whether a head's prototypes are on several processes."""
    return head.is_sharded


def gather_head(head: Head) -> Head:
    """A plain head with the prototypes of all processes, on each of them."""
    if not isinstance(head, ShardedHead):
        return head
    whole = head.kind(head.embedding_size, head.num_classes, **head.options)
    shards = ShardedRows.of_head(head)
    state = {
        name: shards.all_gather(value) if name in SPREAD else value
        for name, value in head.named_parameters()
    }
    whole.load_state_dict(state)
    if head.log_scale is None:
        # Not what it was made with: somebody may have set another.
        whole.scale = head._scale
    whole.implementation = head.implementation
    return whole.to(head.weight.device)


def leave_to_itself(model: nn.Module, head: Head) -> None:
    """Let ``DistributedDataParallel`` pass by what differs between the processes."""
    own = {id(tensor) for tensor in (head.weight, head.bias, getattr(head, "place", None))}
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, tensor in named if id(tensor) in own]
    # A compiled module has its names with a prefix.
    names += [f"_orig_mod.{name}" for name in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def clip_together(model: nn.Module, head: Head, largest: float) -> None:
    """Clip the norm of the gradient of all processes, as one process would.

    Args:
        model: with gradients.
        head: whose prototypes are on several processes.
        largest: norm to clip to.
    """
    own = {id(head.weight), id(head.bias)}
    gradients = [(id(p) in own, p.grad) for p in model.parameters() if p.grad is not None]
    squares = head.weight.new_zeros(2, dtype=torch.double)
    for here_alone, gradient in gradients:
        squares[int(here_alone)] += gradient.detach().double().square().sum()
    total = squares[0] + RankGroup().all_reduce(squares[1:])[0]
    factor = (largest / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(factor.to(gradient))
