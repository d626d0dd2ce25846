"""Ways to produce a split, and the choice between them."""

from typing import Literal

from tammes.checks import transforming
from tammes.kernels.problem import Problem

Implementation = Literal["auto", "dense", "streamed"]

_SMALL = 1 << 20
"""Scores below which the plain form is at least as fast, and small anyway."""


def choose(implementation: Implementation, problem: Problem) -> Literal["dense", "streamed"]:
    """The kernel for one call: the plain one where a compiler or a transform has to see it."""
    if transforming():
        return "dense"
    if implementation not in ("auto", "dense", "streamed"):
        raise ValueError(
            f"a head expects implementation 'auto', 'dense' or 'streamed', got {implementation!r}"
        )
    if implementation != "auto":
        return implementation
    return "dense" if len(problem.features) * len(problem.prototypes) < _SMALL else "streamed"
