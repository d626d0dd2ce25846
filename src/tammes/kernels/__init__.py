"""Ways to produce a split, and the choice between them."""

from typing import Literal

import torch

from tammes.kernels.problem import Problem

Implementation = Literal["auto", "dense", "streamed"]

_SMALL = 1 << 20
"""Scores below which the plain form is at least as fast, and small anyway."""


def transforming() -> bool:
    """Whether this code is being traced or transformed rather than run."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def choose(implementation: Implementation, problem: Problem) -> Literal["dense", "streamed"]:
    """The kernel for one call: the plain one where a compiler or a transform has to see it."""
    if transforming():
        return "dense"
    if implementation != "auto":
        return implementation
    return "dense" if len(problem.features) * len(problem.prototypes) < _SMALL else "streamed"
