"""Numbers of parts of the classes, and how they become those of all: the split."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tammes.split import ALONGSIDE, SUMMED

if TYPE_CHECKING:
    from tammes.distributed.process_group import RankGroup

_ADDED = ("target", *ALONGSIDE, "mean", *SUMMED, "rivals")
"""Numbers of parts that simply add up; what belongs to the own class is zero on other parts."""


def merge(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Numbers of all classes from those of their parts.

    Sums add up, a log-sum-exp is that of the parts', an expectation the average weighted by them,
    the hardest is the largest.

    Args:
        parts: by name, one row for each part, shape ``(P, n)``.

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
        # From the total: shares that miss one by their rounding must not multiply large scores.
        total = torch.where(merged["others"] > float("-inf"), merged["others"], 0.0)
        share = (parts["others"] - total).exp()
        merged["expected"] = total + (share * (parts["expected"] - total)).sum(0)
    return merged


def exchange(group: "RankGroup", mine: Mapping[str, Tensor], *, alike: bool) -> dict[str, Tensor]:
    """Merge the numbers of this rank's classes with those of the other ranks.

    Args:
        group: ranks that hold the other classes.
        mine: this rank's numbers, shape ``(n,)`` each.
        alike: whether every rank computes the same loss from the result, so that the gradient of
            this rank's numbers needs no message.
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
    """Numbers of all ranks; backward, the mean over ranks of what each wants of mine."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: "RankGroup") -> Tensor:
        ctx.group = group
        return group.all_gather(mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        return group.all_reduce(grad)[group.rank] / group.world_size, None


class _SumGradient(torch.autograd.Function):
    """The tensor itself; backward, the sum over ranks of its gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: "RankGroup") -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad), None


class _ScaleGradient(torch.autograd.Function):
    """The tensor itself; backward, its gradient times a factor."""

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
    """The same value with a gradient multiplied by a factor."""
    result: Tensor = value if factor == 1 else _ScaleGradient.apply(value, factor)
    return result
