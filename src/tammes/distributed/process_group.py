"""Collectives over a process group that also work in a single process."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tammes._compile import outside_compile

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _HasProcessGroup(Protocol):
    @property
    def process_group(self) -> Any: ...


_Owner = TypeVar("_Owner", bound=_HasProcessGroup)


def uncompiled(
    method: Callable[Concatenate[_Owner, _P], _T],
) -> Callable[Concatenate[_Owner, _P], _T]:
    """Run a method outside of ``torch.compile``: the graph breaks before it.

    Without a ``process_group`` there is no collective, and the method is compiled as usual.
    """

    @functools.wraps(method)
    def run(self: _Owner, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        call = method if self.process_group is None else outside_compile(method)
        return call(self, *args, **kwargs)

    return run


class RankGroup:
    """Process group with the collectives that the library needs, or a single process.

    Without a group it is the default one of ``torch.distributed``, looked up at every use, so that
    it may be initialized later; until then this is a single process. A copy keeps the group. A
    process group cannot be pickled: an unpickled object has the default one.

    Every process of the group must make the same calls in the same order. If a collective fails,
    for instance because a process has died, the others get a ``RuntimeError`` that names the group.

    Args:
        group: a process group, another :class:`RankGroup`, or ``None``.

    Example:
        >>> group = RankGroup()
        >>> group.world_size, group.rank, group.name
        (1, 0, 'alone')
        >>> group.all_reduce(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(self, group: "RankGroup | Any | None" = None) -> None:
        self._group: Any = group._group if isinstance(group, RankGroup) else group
        if self._group is not None and not isinstance(self._group, dist.ProcessGroup):
            # torch represents a group by a number in the processes that do not belong to it.
            raise TypeError(
                f"RankGroup expects a process group that this process is in, got {self._group!r}"
            )

    @property
    def process_group(self) -> Any:
        """The ``torch.distributed`` group, or ``None`` in a single process."""
        if self._group is not None:
            return self._group
        initialized = dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if initialized else None

    @property
    def world_size(self) -> int:
        """Number of processes."""
        group = self.process_group
        return 1 if group is None else dist.get_world_size(group)

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        group = self.process_group
        return 0 if group is None else dist.get_rank(group)

    @property
    def name(self) -> str:
        """Name of the group in messages."""
        group = self.process_group
        if group is None:
            return "alone"
        members = dist.get_process_group_ranks(group)
        which = "the default group" if group is dist.group.WORLD else "the group"
        if len(members) > 16:
            return f"{which} of {len(members)} ranks from {members[0]} to {members[-1]}"
        return f"{which} of rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"

    @uncompiled
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather a tensor of one shape from all ranks, ``(world_size, *shape)``; no gradient."""
        tensor, size = tensor.detach(), self.world_size
        if self.process_group is None or not tensor.numel():
            return tensor.expand(size, *tensor.shape)
        gathered = tensor.new_empty(size * tensor.numel())
        collective = _collective("all_gather_single", "all_gather_into_tensor")
        flat = tensor.contiguous().view(-1)
        self._run("gather", collective, gathered, flat, group=self.process_group)
        return gathered.view(size, *tensor.shape)

    @uncompiled
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor of one shape over the ranks, without gradient.

        Half precision is summed in float32; the tensor is not modified.
        """
        total = tensor.detach().to(_sum_dtype(tensor), copy=True)
        total = total.contiguous()
        if self.process_group is not None and total.numel():
            self._run("sum", dist.all_reduce, total, group=self.process_group)
        return total.to(tensor.dtype)

    @uncompiled
    def all_gather_rows(self, tensor: Tensor, max_rows: int) -> Tensor:
        """Gather the rows of all ranks, in the order of the ranks.

        A rank with fewer than ``max_rows`` rows is padded with zeros. The gradient of a row is the
        sum of its gradients on all ranks.

        Args:
            tensor: shape ``(n, ...)``, where n may differ between the ranks.
            max_rows: the largest n of all ranks, the same on every rank.

        Returns:
            Shape ``(world_size * max_rows, ...)``.
        """
        rows: Tensor = _AllGatherRows.apply(tensor, self, max_rows)
        return rows

    def reduce_scatter_rows(self, tensor: Tensor, rows: int) -> Tensor:
        """Sum rows over the ranks and keep those of this rank: :meth:`all_gather_rows` transposed.

        Args:
            tensor: shape ``(world_size * max_rows, ...)``.
            rows: number of rows of this rank, at most ``max_rows``.

        Returns:
            Shape ``(rows, ...)``.
        """
        local: Tensor = _ReduceScatterRows.apply(tensor, self, rows)
        return local

    @uncompiled
    def all_gather_ints(self, **numbers: int) -> dict[str, list[int]]:
        """Gather named integers: for each name the values of all ranks, in order."""
        local = torch.tensor([*numbers.values()], dtype=torch.long, device=self._device())
        by_name = self.all_gather(local).T.tolist()
        return dict(zip(numbers, by_name, strict=True))

    def check_equal(self, caller: str, **numbers: int) -> None:
        """Raise ``ValueError`` unless the named integers are equal on all ranks."""
        self.check_gathered_equal(caller, self.all_gather_ints(**numbers))

    def check_gathered_equal(self, caller: str, gathered: dict[str, list[int]]) -> None:
        """Raise ``ValueError`` unless the result of :meth:`all_gather_ints` has equal values."""
        for name, values in gathered.items():
            if len(set(values)) > 1:
                per_rank = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(
                    f"{caller} expects the same {name.replace('_', ' ')} on all of {self.name}, "
                    f"got {per_rank}"
                )

    def _device(self) -> torch.device:
        """Device for small tensors: the CPU if the backend of the group is gloo."""
        group, accelerator = self.process_group, torch.accelerator.current_accelerator()
        if group is None or accelerator is None or "gloo" in dist.get_backend(group):
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def _run(self, what: str, collective: Callable[..., _T], *args: Any, **options: Any) -> _T:
        try:
            return collective(*args, **options)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            raise RuntimeError(f"a {what} over {self.name} failed: {reason}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankGroup) and self.process_group is other.process_group

    def __hash__(self) -> int:
        return hash(id(self.process_group))

    def __copy__(self) -> "RankGroup":
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> "RankGroup":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RankGroup, ()

    def __repr__(self) -> str:
        return f"RankGroup({self.name})"


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup, max_rows: int) -> Tensor:
        rows = len(tensor)
        if rows > max_rows:
            raise ValueError(
                f"all_gather_rows expects at most {max_rows} rows on a rank, got {rows}"
            )
        ctx.group, ctx.rows = group, rows
        padded = tensor
        if rows < max_rows:
            padded = tensor.new_zeros(max_rows, *tensor.shape[1:])
            padded[:rows] = tensor
        return group.all_gather(padded).reshape(group.world_size * max_rows, *tensor.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.reduce_scatter_rows(grad, ctx.rows), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: RankGroup, rows: int) -> Tensor:
        max_rows = len(tensor) // group.world_size
        ctx.group, ctx.max_rows = group, max_rows
        if group.process_group is None or not tensor.numel():
            return tensor[:rows].clone()
        flat = tensor.to(_sum_dtype(tensor)).contiguous().view(-1)
        local = flat.new_empty(len(flat) // group.world_size)
        collective = _collective("reduce_scatter_single", "reduce_scatter_tensor")
        group._run("sum of rows", collective, local, flat, group=group.process_group)
        return local.view(max_rows, *tensor.shape[1:])[:rows].to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather_rows(grad, ctx.max_rows), None, None


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype to sum in: at least float32, as gradients are accumulated within a process."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.promote_types(tensor.dtype, torch.float32)


def _collective(name: str, older: str) -> Callable[..., Any]:
    """Look up a collective by its name, or by its name before torch 2.13."""
    collective: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return collective
