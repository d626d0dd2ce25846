"""Redistribute the rows of a sharded table, and the optimizer state that belongs to them."""

import hashlib
import json

import torch
from torch import Tensor, nn

from tammes._validation import transforming
from tammes.distributed.process_group import RankGroup
from tammes.optim.state_transfer import find_param_group

_BYTES = 1 << 25
"""Size of a block of rows that is sent at once."""


def shard_bounds(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """First row of a rank, and the row after its last.

    Ranks have equally many rows, except that the last ones may have fewer, or none. ``Shard(0)`` of
    ``torch.distributed.tensor`` splits in the same way, so a shard can be used as one of those.

    Example:
        >>> [shard_bounds(10, 4, rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    per_rank = -(-rows // world_size)
    return min(rank * per_rank, rows), min((rank + 1) * per_rank, rows)


def shared_seed(group: RankGroup) -> int:
    """Draw a seed from torch's generator; all ranks get that of the first rank."""
    return group.all_gather_ints(seed=int(torch.randint(1 << 62, (), device="cpu")))["seed"][0]


def all_gather_strings(group: RankGroup, text: str, device: torch.device) -> list[str]:
    """Gather a string from every rank."""
    data = text.encode()
    max_bytes = int(group.all_gather(torch.tensor([len(data)], device=device)).max())
    padded = torch.zeros(max(max_bytes, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    gathered = group.all_gather(padded.to(device)).cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in gathered]


def checksum(data: bytes) -> int:
    """Checksum of 32 bits, to compare data between ranks."""
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big")


def all_gather_mask(group: RankGroup, mask: Tensor, start: int, rows: int) -> Tensor:
    """Mask over all rows of a table from the masks of the ranks, shape ``(rows,)``.

    On an accelerator, only the rows of this rank are set, to avoid synchronising.

    Args:
        group: ranks that the table is sharded over.
        mask: mask of the rows of this rank, shape ``(K,)``.
        start: index of the first of them in the table.
        rows: number of rows of the table.
    """
    result = mask.new_zeros(rows)
    result[start : start + len(mask)] = mask
    if group.world_size == 1 or mask.device.type != "cpu" or transforming():
        return result
    return group.all_reduce(result.long()) > 0


def redistribute_rows(
    group: RankGroup, rows: Tensor, start: int, sources: Tensor, first: int, last: int
) -> Tensor:
    """Fetch rows of a new table, each a bit-identical copy of a row of an old table.

    All ranks take part, each with its rows of the old table and the range it needs of the new one.

    Args:
        group: ranks that the tables are sharded over.
        rows: rows of the old table on this rank, shape ``(K, ...)``.
        start: index of the first of them in the old table.
        sources: index in the old table of every row of the new one, shape ``(M,)``, the same on
            all ranks.
        first: index in the new table of the first row that this rank needs.
        last: index after the last one.
    """
    if group.world_size == 1:
        return rows[sources[first:last].to(rows.device)]
    shape = rows.shape[1:]
    size = max(shape.numel() * rows.element_size(), 1)
    # A tensor of one element may have any stride and still count as contiguous.
    flat = rows.contiguous().as_strided((rows.numel(),), (1,))
    bits = flat.view(torch.uint8).view(len(rows), size)
    result = bits.new_empty(last - first, size)
    step = max(_BYTES // size, 1)
    for begin in range(0, len(sources), step):
        indices = sources[begin : begin + step].to(rows.device) - start
        local = ((indices >= 0) & (indices < len(rows))).nonzero().flatten()
        block = bits.new_zeros(len(indices), size)
        block[local] = bits[indices[local]]
        # One rank holds each row and the others have zeros: a sum of bytes keeps the bits.
        block = group.all_reduce(block)
        low, high = max(first, begin), min(last, begin + len(indices))
        if low < high:
            result[low - first : high - first] = block[low - begin : high - begin]
    return result.view(-1).view(rows.dtype).view(last - first, *shape)


def global_mean_row(group: RankGroup, rows: Tensor) -> Tensor:
    """Mean of the rows of all ranks, which may have different numbers of them."""
    total = group.all_reduce(torch.cat([rows.sum(0).flatten(), rows.new_tensor([len(rows)])]))
    return (total[:-1] / total[-1]).view(rows.shape[1:])


def per_row_state(
    group: RankGroup, optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> dict[str, Tensor]:
    """Optimizer state of each row of a parameter, with the same keys on every rank."""
    find_param_group(optimizer, parameter)
    state = optimizer.state.get(parameter, {})
    local = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape
    }
    dtypes = json.dumps({key: str(value.dtype).split(".")[1] for key, value in local.items()})
    gathered = [json.loads(text) for text in all_gather_strings(group, dtypes, parameter.device)]
    if local != {} and set(local) != set(gathered[0]):
        raise ValueError(
            f"{type(optimizer).__name__} is expected to have the same state on all ranks, "
            f"got {sorted(local)} on rank {group.rank} and {sorted(gathered[0])} on the first"
        )
    for key, dtype in gathered[0].items():
        # A rank without classes may never have taken a step with them.
        local.setdefault(key, torch.zeros_like(parameter, dtype=getattr(torch, dtype)).detach())
    return local
