"""The processes that work on one batch: who they are, and the few things they tell each other."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tammes._compile import apart

_P = ParamSpec("_P")
_T = TypeVar("_T")


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method run as it is where ``torch.compile`` meets it: a graph ends before it.

    A process that is alone, as the ``group`` of the object tells, has nothing to run apart.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        alone = getattr(args[0], "group", None) is None
        return (function if alone else apart(function))(*args, **kwargs)

    return run


class Ranks:
    """A group of processes, or one process alone.

    Without a group it is the default one of ``torch.distributed``, looked up whenever it is used,
    so that it may also be started later; where none is started, the process is alone. A copy keeps
    the group. A group cannot be pickled: what is unpickled has the default one.

    Every process of the group has to make the same calls in the same order. Where that fails, as
    when one of them has died, each of the others gets a ``RuntimeError`` that names the group.

    Args:
        group: a process group, other ranks, or none.

    Example:
        >>> ranks = Ranks()
        >>> ranks.size, ranks.rank, ranks.name
        (1, 0, 'alone')
        >>> ranks.sum(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(self, group: "Ranks | Any | None" = None) -> None:
        self._group: Any = group._group if isinstance(group, Ranks) else group
        if self._group is not None and not isinstance(self._group, dist.ProcessGroup):
            # torch stands a number for a group in the processes that are not in it.
            raise TypeError(
                f"Ranks expects a process group that this process is in, got {self._group!r}"
            )

    @property
    def group(self) -> Any:
        """The process group, or none where the process is alone."""
        if self._group is not None:
            return self._group
        started = dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if started else None

    @property
    def size(self) -> int:
        """Number of processes."""
        group = self.group
        return 1 if group is None else dist.get_world_size(group)

    @property
    def rank(self) -> int:
        """Place of this process among them."""
        group = self.group
        return 0 if group is None else dist.get_rank(group)

    @property
    def name(self) -> str:
        """What messages call it."""
        group = self.group
        if group is None:
            return "alone"
        members = dist.get_process_group_ranks(group)
        which = "the default group" if group is dist.group.WORLD else "the group"
        if len(members) > 16:
            return f"{which} of {len(members)} ranks from {members[0]} to {members[-1]}"
        return f"{which} of rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"

    @uncompiled
    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, without gradient.

        Args:
            tensor: of the same shape on every rank.

        Returns:
            Shape ``(size, *shape)``.
        """
        tensor, size = tensor.detach(), self.size
        if self.group is None or not tensor.numel():
            return tensor.expand(size, *tensor.shape)
        together = tensor.new_empty(size * tensor.numel())
        collective = _collective("all_gather_single", "all_gather_into_tensor")
        self._run("gather", collective, together, tensor.contiguous().view(-1), group=self.group)
        return together.view(size, *tensor.shape)

    @uncompiled
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, without gradient; halves are summed in single precision.

        Args:
            tensor: of the same shape on every rank; stays as it is.
        """
        total = tensor.detach().to(_summed_in(tensor), copy=True)
        total = total.contiguous()
        if self.group is not None and total.numel():
            self._run("sum", dist.all_reduce, total, group=self.group)
        return total.to(tensor.dtype)

    @uncompiled
    def gather_rows(self, tensor: Tensor, longest: int) -> Tensor:
        """The rows of all ranks, one rank after the other.

        What a rank has fewer than ``longest`` is filled up with zeros. The gradient of a row is the
        sum of what all ranks want of it.

        Args:
            tensor: shape ``(n, ...)``, where n may differ between the ranks.
            longest: the largest of their n, the same on every rank.

        Returns:
            Shape ``(size * longest, ...)``.
        """
        rows: Tensor = _GatherRows.apply(tensor, self, longest)
        return rows

    def scatter_rows(self, tensor: Tensor, rows: int) -> Tensor:
        """What :meth:`gather_rows` has for a gradient: each rank's rows, summed over the ranks.

        Args:
            tensor: shape ``(size * longest, ...)``.
            rows: how many of its ``longest`` this rank has.

        Returns:
            Shape ``(rows, ...)``.
        """
        mine: Tensor = _ScatterRows.apply(tensor, self, rows)
        return mine

    @uncompiled
    def exchange(self, **numbers: int) -> dict[str, list[int]]:
        """The numbers of every rank, by name, in the order of the ranks."""
        own = torch.tensor([*numbers.values()], dtype=torch.long, device=self._device())
        by_name = self.gather(own).T.tolist()
        return dict(zip(numbers, by_name, strict=True))

    def agree(self, who: str, **numbers: int) -> None:
        """Refuse to go on where ranks do not have the same numbers.

        Args:
            who: expects it; the message begins with it.
            **numbers: by what they are called, such as ``embedding_size``.
        """
        self.check_same(who, self.exchange(**numbers))

    def check_same(self, who: str, exchanged: dict[str, list[int]]) -> None:
        """Refuse numbers that were exchanged and are not the same on every rank."""
        for what, values in exchanged.items():
            if len(set(values)) > 1:
                told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"{who} expects the same {what.replace('_', ' ')} on all of {self.name}, "
                    f"got {told}"
                )

    def _device(self) -> torch.device:
        """Where small tensors have to be: on the CPU if the group works there."""
        accelerator = torch.accelerator.current_accelerator()
        if self.group is None or accelerator is None or "gloo" in dist.get_backend(self.group):
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def _run(self, what: str, collective: Callable[..., _T], *args: Any, **options: Any) -> _T:
        try:
            return collective(*args, **options)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            raise RuntimeError(f"a {what} over {self.name} failed: {reason}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self.group is other.group

    def __hash__(self) -> int:
        return hash(id(self.group))

    def __copy__(self) -> "Ranks":
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> "Ranks":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, ()

    def __repr__(self) -> str:
        return f"Ranks({self.name})"


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, longest: int) -> Tensor:
        rows = len(tensor)
        if rows > longest:
            raise ValueError(f"gather_rows expects at most {longest} rows on a rank, got {rows}")
        ctx.ranks, ctx.rows = ranks, rows
        filled = tensor
        if rows < longest:
            filled = tensor.new_zeros(longest, *tensor.shape[1:])
            filled[:rows] = tensor
        return ranks.gather(filled).reshape(ranks.size * longest, *tensor.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.scatter_rows(grad, ctx.rows), None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, rows: int) -> Tensor:
        longest = len(tensor) // ranks.size
        ctx.ranks, ctx.longest = ranks, longest
        if ranks.group is None or not tensor.numel():
            return tensor[:rows].clone()
        flat = tensor.to(_summed_in(tensor)).contiguous().view(-1)
        mine = flat.new_empty(len(flat) // ranks.size)
        collective = _collective("reduce_scatter_single", "reduce_scatter_tensor")
        ranks._run("sum of rows", collective, mine, flat, group=ranks.group)
        return mine.view(longest, *tensor.shape[1:])[:rows].to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.gather_rows(grad, ctx.longest), None, None


def _summed_in(tensor: Tensor) -> torch.dtype:
    """Parts of a gradient meet in single precision, as they do within a process."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.promote_types(tensor.dtype, torch.float32)


def _collective(name: str, older: str) -> Callable[..., Any]:
    """A collective by its name, or by the one it had before torch 2.13."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return found
