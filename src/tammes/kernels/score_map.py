"""Maps of the scores of the other classes: as a term has one, and as a block of rows uses it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.split import OthersMap, Split, columns


class ScoreMap(NamedTuple):
    """Map of the other scores, as one term has it.

    Attributes:
        function: maps similarities.
        row_numbers: makes the numbers of the rows that it takes, of a split of which the own class
            is known, or none.
        top: k, where these ask for the cutoff above which there are k other classes, else 0.
    """

    function: OthersMap
    row_numbers: Callable[[Split], Sequence[Tensor | float]] | None
    top: int = 0

    def numbers(self, known: Split) -> Sequence[Tensor | float]:
        """Numbers of the rows."""
        return () if self.row_numbers is None else self.row_numbers(known)


class MappedRows(NamedTuple):
    """Map of the other scores of some rows.

    Attributes:
        function: maps similarities.
        numbers: the scale of the scores and the numbers that the function takes, shape ``(n,)``
            each. Those that require a gradient get one.
    """

    function: OthersMap
    numbers: tuple[Tensor, ...]

    def __call__(self, scores: Tensor) -> Tensor:
        """Map scores to scores."""
        scale, *numbers = columns(self.numbers)
        return self.function(scores / scale, *numbers) * scale

    def take(self, block: slice) -> "MappedRows":
        """The same for some of the rows; their numbers are leaves of a graph."""
        taken = (n[block].detach().requires_grad_(n.requires_grad) for n in self.numbers)
        return self._replace(numbers=tuple(taken))

    def gradient(self, scores: Tensor, wanted: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of scores and numbers from that of the mapped scores."""
        leaves, scores = self.take(slice(None)), scores.detach().requires_grad_()
        inputs = [scores, *(n for n in leaves.numbers if n.requires_grad)]
        with torch.enable_grad():
            mapped = leaves(scores)
        if not mapped.requires_grad:
            # A map that is detached as a whole: nobody is pushed.
            return torch.zeros_like(scores), [
                torch.zeros_like(n) if n.requires_grad else None for n in leaves.numbers
            ]
        d_scores, *found = torch.autograd.grad(
            mapped, inputs, wanted, allow_unused=True, materialize_grads=True
        )
        rest = iter(found)
        return d_scores, [next(rest) if n.requires_grad else None for n in leaves.numbers]
