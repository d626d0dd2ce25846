"""What a compiler is to leave alone."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def apart(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that runs as it is where ``torch.compile`` meets it: a graph ends before it.

    ``torch.compiler.disable`` as a decorator would import the compiler together with tammes.
    """
    if not torch.compiler.is_compiling():
        return function
    disabled: Callable[_P, _T] = torch.compiler.disable(function)
    return disabled
