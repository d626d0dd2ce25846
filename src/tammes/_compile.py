"""Run functions outside of ``torch.compile``."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_compile(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function so that ``torch.compile`` breaks the graph there and runs it eagerly.

    ``torch.compiler.disable`` as a decorator would import the compiler along with tammes.
    """
    if not torch.compiler.is_compiling():
        return function
    disabled: Callable[_P, _T] = torch.compiler.disable(function)
    return disabled
