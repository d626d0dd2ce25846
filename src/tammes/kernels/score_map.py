"""Maps of the other classes' scores: as a term defines one, and as applied to a block of rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tammes.split import OthersMap, Split, columns


class ScoreMap(NamedTuple):
    """Map of the other classes' scores, as defined by a term.

    Attributes:
        function: map of the similarities.
        row_numbers: computes its per-row arguments from a split in which only the numbers of the
            target class are known; or none.
        top: k, if they need the cutoff above which there are k other classes, else 0.
    """

    function: OthersMap
    row_numbers: Callable[[Split], Sequence[Tensor | float]] | None
    top: int = 0

    def numbers(self, known: Split) -> Sequence[Tensor | float]:
        """Compute the per-row arguments of the function."""
        return () if self.row_numbers is None else self.row_numbers(known)


class MappedRows(NamedTuple):
    """Map of the other classes' scores, for some rows.

    Attributes:
        function: map of the similarities.
        numbers: the scale and the per-row arguments of the function, shape ``(n,)`` each. Those
            that require a gradient get one.
    """

    function: OthersMap
    numbers: tuple[Tensor, ...]

    def __call__(self, scores: Tensor) -> Tensor:
        """Map the scores."""
        scale, *numbers = columns(self.numbers)
        return self.function(scores / scale, *numbers) * scale

    def take(self, block: slice) -> "MappedRows":
        """Select rows; their numbers become leaves of a new graph."""
        taken = (n[block].detach().requires_grad_(n.requires_grad) for n in self.numbers)
        return self._replace(numbers=tuple(taken))

    def gradient(self, scores: Tensor, wanted: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of scores and numbers, given that of the mapped scores."""
        leaves, scores = self.take(slice(None)), scores.detach().requires_grad_()
        inputs = [scores, *(n for n in leaves.numbers if n.requires_grad)]
        with torch.enable_grad():
            mapped = leaves(scores)
        if not mapped.requires_grad:
            # A map that is detached as a whole has no gradient.
            return torch.zeros_like(scores), [
                torch.zeros_like(n) if n.requires_grad else None for n in leaves.numbers
            ]
        d_scores, *found = torch.autograd.grad(
            mapped, inputs, wanted, allow_unused=True, materialize_grads=True
        )
        rest = iter(found)
        return d_scores, [next(rest) if n.requires_grad else None for n in leaves.numbers]
