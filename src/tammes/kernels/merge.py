"""Merge the numbers of a split from those of parts of the classes: blocks or shards."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tammes.split import ALONGSIDE, SUMMED

if TYPE_CHECKING:
    from tammes.distributed.process_group import RankGroup

_ADDED = ("target", *ALONGSIDE, "mean", *SUMMED, "rivals")
"""Numbers that add up over parts; those of the target class are zero in all parts but one."""


def merge(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the numbers of P parts of the classes.

    Sums add up, ``others`` is the log-sum-exp over parts, ``expected`` the average weighted by
    their softmax, ``hardest`` the maximum.

    Args:
        parts: numbers by name, one row per part, shape ``(P, n)``.

    Example:
        >>> merge({"others": torch.zeros(2, 1), "expected": torch.tensor([[1.0], [3.0]])})
        {'others': tensor([0.6931]), 'expected': tensor([2.])}
    """
    merged = {name: value.sum(0) for name, value in parts.items() if name in _ADDED}
    if "hardest" in parts:
        merged["hardest"] = parts["hardest"].max(0).values
    if "others" in parts:
        merged["others"] = parts["others"].logsumexp(0)
    if "expected" in parts:
        # Relative to the total, so that rounding in the shares does not multiply large scores.
        total = torch.where(merged["others"] > float("-inf"), merged["others"], 0.0)
        share = (parts["others"] - total).exp()
        merged["expected"] = total + (share * (parts["expected"] - total)).sum(0)
    return merged


def exchange(group: "RankGroup", mine: Mapping[str, Tensor], *, alike: bool) -> dict[str, Tensor]:
    """Merge the numbers of this rank's classes with those of the other ranks.

    Args:
        group: ranks that hold the other classes.
        mine: this rank's numbers, shape ``(n,)`` each.
        alike: whether every rank computes the same loss from the result, so that the backward pass
            needs no communication.
    """
    names = sorted(mine)
    stack = torch.stack([mine[name] for name in names])
    if alike:
        every = group.all_gather(stack.detach())
        every = torch.cat([every[: group.rank], stack[None], every[group.rank + 1 :]])
    else:
        every = _Exchange.apply(stack, group)
    return merge({name: every[:, i] for i, name in enumerate(names)})


class _Exchange(torch.autograd.Function):
    """All-gather; backward, the mean over ranks of the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: "RankGroup") -> Tensor:
        ctx.group = group
        return group.all_gather(mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        return group.all_reduce(grad)[group.rank] / group.world_size, None


class _SumGradient(torch.autograd.Function):
    """Identity; backward, the sum of the gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: "RankGroup") -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad), None


class _ScaleGradient(torch.autograd.Function):
    """Identity; backward, the gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def sum_gradient(value: Tensor, group: "RankGroup") -> Tensor:
    """Identity in forward; all-reduces the gradient."""
    result: Tensor = _SumGradient.apply(value, group)
    return result


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Identity in forward; multiplies the gradient by a factor."""
    result: Tensor = value if factor == 1 else _ScaleGradient.apply(value, factor)
    return result
