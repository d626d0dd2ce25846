"""Who has which rows of a table that is spread over ranks, and how they come to others."""

import hashlib
import json

import torch
from torch import Tensor, nn

from tammes._validation import transforming
from tammes.distributed.process_group import Ranks
from tammes.optim.state_transfer import find

_BYTES = 1 << 25
"""Size of a block of rows that travels at once."""


def bounds(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """First row of a rank and the first that is no longer its own.

    No rank has more than it must; the last ones may have fewer, or none. It is how ``Shard(0)`` of
    ``torch.distributed.tensor`` splits, so that a shard is also one of those.

    Example:
        >>> [bounds(10, 4, rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def shared_seed(ranks: Ranks) -> int:
    """A number from torch's generator: that of the first rank, on all of them."""
    return ranks.exchange(seed=int(torch.randint(1 << 62, (), device="cpu")))["seed"][0]


def texts(ranks: Ranks, text: str, device: torch.device) -> list[str]:
    """The text of every rank."""
    data = text.encode()
    longest = int(ranks.gather(torch.tensor([len(data)], device=device)).max())
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    gathered = ranks.gather(padded.to(device)).cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in gathered]


def checksum(data: bytes) -> int:
    """A number that tells whether others have the same."""
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big")


def marked(ranks: Ranks, here: Tensor, start: int, rows: int) -> Tensor:
    """Which rows of a table are marked, shape ``(rows,)``.

    On a CPU by any rank; elsewhere, where nobody is to wait for it, by this one.

    Args:
        ranks: that the table is spread over.
        here: which of the rows that are here, shape ``(K,)``.
        start: number of the first of them.
        rows: number of all.
    """
    every = here.new_zeros(rows)
    every[start : start + len(here)] = here
    if ranks.size == 1 or here.device.type != "cpu" or transforming():
        return every
    return ranks.sum(every.long()) > 0


def move_rows(
    ranks: Ranks, rows: Tensor, start: int, sources: Tensor, first: int, last: int
) -> Tensor:
    """Some rows of a new table, each bit for bit as it is in an old one, whoever has it.

    All ranks take part, each with the rows it has of the old table and those it wants of the new.

    Args:
        ranks: that the table is spread over.
        rows: those of the old table that are here, shape ``(K, ...)``.
        start: number of the first of them in the old table.
        sources: number in the old table of every row of the new one, shape ``(M,)``, the same on
            all ranks.
        first: number in the new table of the first row that is wanted here.
        last: number of the first that is no longer wanted.
    """
    if ranks.size == 1:
        return rows[sources[first:last].to(rows.device)]
    shape = rows.shape[1:]
    size = max(shape.numel() * rows.element_size(), 1)
    # A single number may have any stride and still count as contiguous.
    flat = rows.contiguous().as_strided((rows.numel(),), (1,))
    bits = flat.view(torch.uint8).view(len(rows), size)
    result = bits.new_empty(last - first, size)
    step = max(_BYTES // size, 1)
    for begin in range(0, len(sources), step):
        places = sources[begin : begin + step].to(rows.device) - start
        here = ((places >= 0) & (places < len(rows))).nonzero().flatten()
        block = bits.new_zeros(len(places), size)
        block[here] = bits[places[here]]
        # One rank has each row and the others zeros: a sum of bytes has its bits, -0.0 included.
        block = ranks.sum(block)
        low, high = max(first, begin), min(last, begin + len(places))
        if low < high:
            result[low - first : high - first] = block[low - begin : high - begin]
    return result.view(-1).view(rows.dtype).view(last - first, *shape)


def mean_row(ranks: Ranks, rows: Tensor) -> Tensor:
    """Mean of the rows of all ranks, which may have different numbers of them."""
    total = ranks.sum(torch.cat([rows.sum(0).flatten(), rows.new_tensor([len(rows)])]))
    return (total[:-1] / total[-1]).view(rows.shape[1:])


def row_states(
    ranks: Ranks, optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> dict[str, Tensor]:
    """What an optimizer has for each row of a parameter; the same kinds on every rank."""
    find(optimizer, parameter)
    state = optimizer.state.get(parameter, {})
    found = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape
    }
    kinds = json.dumps({key: str(value.dtype).split(".")[1] for key, value in found.items()})
    everyone = [json.loads(text) for text in texts(ranks, kinds, parameter.device)]
    if found != {} and set(found) != set(everyone[0]):
        raise ValueError(
            f"{type(optimizer).__name__} is expected to have the same state on all ranks, "
            f"got {sorted(found)} on rank {ranks.rank} and {sorted(everyone[0])} on the first"
        )
    for key, dtype in everyone[0].items():
        # A rank without classes may have never taken a step with them.
        found.setdefault(key, torch.zeros_like(parameter, dtype=getattr(torch, dtype)).detach())
    return found
