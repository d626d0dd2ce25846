"""Heads whose prototypes are sharded over the processes of a run."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tammes.distributed.process_group import RankGroup
from tammes.distributed.sharded_rows import ShardedRows
from tammes.heads.head import Head
from tammes.heads.sharded import SPREAD, ShardedHead
from tammes.heads.sharded_init import KINDS
from tammes.lab.config.head_expressions import head_settings


def shard_head(head: Head) -> ShardedHead:
    """Build a sharded head of the same kind and settings.

    The prototypes of ``head`` are not read, so it may be on the meta device.
    """
    kind = type(head)
    if kind not in KINDS:
        raise ValueError(
            f"shard expects a cosine, linear or gaussian head, got {kind.__name__}, "
            "whose prototypes or distances need all classes"
        )
    return ShardedHead(kind, head.embedding_size, head.num_classes, **head_settings(head))


def gather_head(head: Head) -> Head:
    """Gather a sharded head into a plain one, on every process."""
    if not isinstance(head, ShardedHead):
        return head
    whole = head.kind(head.embedding_size, head.num_classes, **head.options)
    shards = ShardedRows.of_head(head)
    state = {
        name: shards.all_gather(value) if name in SPREAD else value
        for name, value in head.named_parameters()
    }
    if head.adaptive_scale is not None:
        state["adaptive_scale"] = head.adaptive_scale
    whole.load_state_dict(state)
    if not isinstance(head.scale_setting, str):
        # The current scale, which may differ from the initial one.
        whole.scale = head.scale_setting
    whole.implementation = head.implementation
    return whole.to(head.weight.device)


def exclude_from_ddp(model: nn.Module, head: Head) -> None:
    """Exclude the sharded tensors of a head from ``DistributedDataParallel``."""
    shards = {id(tensor) for tensor in (head.weight, head.bias, getattr(head, "place", None))}
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, tensor in named if id(tensor) in shards]
    # torch.compile prefixes the names.
    names += [f"_orig_mod.{name}" for name in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def clip_global_norm(model: nn.Module, head: Head, max_norm: float) -> None:
    """Clip the gradient norm of a model with a sharded head over all processes, as on one."""
    shards = {id(head.weight), id(head.bias)}
    gradients = [(id(p) in shards, p.grad) for p in model.parameters() if p.grad is not None]
    squares = head.weight.new_zeros(2, dtype=torch.double)
    for is_shard, gradient in gradients:
        squares[int(is_shard)] += gradient.detach().double().square().sum()
    total = squares[0] + RankGroup().all_reduce(squares[1:])[0]
    factor = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(factor.to(gradient))
