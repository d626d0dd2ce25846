"""Choice of the kernel for a call, by device, size and what the terms read."""

import logging
from collections.abc import Iterable
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tammes._validation import transforming
from tammes.kernels.dense import dense_split
from tammes.kernels.problem import Problem
from tammes.kernels.reference import reference_split
from tammes.kernels.streamed.functions import streamed_split
from tammes.kernels.tiling import Plan, most_prototypes
from tammes.similarity import full_precision, product_dtype
from tammes.split import Split

Implementation = Literal["auto", "dense", "streamed", "fused"]
Way = Literal["dense", "reference", "streamed", "fused"]

_IMPLEMENTATIONS = frozenset(get_args(Implementation))

_SMALL = 1 << 20
"""Scores below which the dense kernel is at least as fast, and its matrices small anyway."""
_log = logging.getLogger("tammes")


def check_implementation(name: str, implementation: str) -> None:
    """Reject an unknown implementation."""
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"{name} expects implementation 'auto', 'dense', 'streamed' or 'fused', "
            f"got {implementation!r}"
        )


def choose_kernel(implementation: Implementation, problem: Problem, reads: frozenset[str]) -> Way:
    """Choose the kernel of one call; a compiler or a transform gets the reference."""
    check_implementation("a head", implementation)
    if problem.share is None:
        if "rest" in reads or transforming() or forward_ad._current_level >= 0:
            return "reference"
        rows, classes = problem.features.shape[0], problem.prototypes.shape[0]
        if implementation == "dense" or (implementation == "auto" and rows * classes < _SMALL):
            return "dense" if rows else "reference"
    elif "rest" in reads:
        raise ValueError(
            "a head that has only some of the classes expects terms without rest, "
            "got one that reads it"
        )
    # Of classes that are spread over ranks there is no plain form.
    if implementation == "fused" or (implementation == "auto" and _pays(problem)):
        reason = why_not_fused(problem, reads)
        if reason is None:
            return "fused"
        if implementation == "fused":
            _tell(reason)
    return "streamed"


def _scores(problem: Problem) -> int:
    return len(problem.features) * most_prototypes(problem)


def _pays(problem: Problem) -> bool:
    """Whether the fused kernel is faster: where products take half precision."""
    return product_dtype(problem.features.device) is not None and _scores(problem) >= _SMALL


def why_not_fused(problem: Problem, reads: frozenset[str]) -> str | None:
    """Return the reason a problem cannot use the fused kernel, or none."""
    try:
        from tammes.kernels.fused.engine import why_not
    except Exception as error:
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    return why_not(problem, reads)


@cache
def _tell(reason: str) -> None:
    """Warn once that another kernel runs than the one requested."""
    _log.warning("tammes: implementation='fused' falls back to 'streamed': %s", reason)


def split(
    problem: Problem, labels: Tensor, reads: Iterable[str], implementation: Implementation
) -> Split:
    """Split a batch by its labels; differentiable, whichever way is taken.

    Args:
        problem: features and prototypes.
        labels: class of each example, shape ``(N,)``.
        reads: names of the fields to compute.
        implementation: how; the fused kernel is for losses, a split alone is streamed.
    """
    reads = frozenset(reads)
    if "excess" in reads:
        raise ValueError(
            "a split expects reads without excess, whose threshold belongs to a term, got it: "
            "use a criterion"
        )
    kernel = choose_kernel(implementation, problem, reads)
    if kernel == "reference":
        return reference_split(problem, labels, reads)
    if kernel == "dense":
        with full_precision(problem.features.device):
            return dense_split(problem, labels, reads)
    low = product_dtype(problem.features.device)
    plan = Plan(reads, _never, (), product_dtype=low)
    return streamed_split(problem, labels, plan)


def _never(*_: object) -> torch.Tensor:
    raise AssertionError("a split alone has no terms")
