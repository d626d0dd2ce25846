"""Base of the metric classes: torchmetrics, and sums whose names define their reduction."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tammes.optional import require

if TYPE_CHECKING:
    from torchmetrics import Metric
    from torchmetrics.classification import BinaryCalibrationError
    from torchmetrics.utilities.distributed import gather_all_tensors
else:
    _torchmetrics = require("torchmetrics", extra="metrics")
    Metric = _torchmetrics.Metric
    BinaryCalibrationError = _torchmetrics.classification.BinaryCalibrationError
    gather_all_tensors = _torchmetrics.utilities.distributed.gather_all_tensors

__all__ = [
    "BinaryCalibrationError",
    "Metric",
    "SumMetric",
    "gather_all_tensors",
    "writable",
]

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def _reduction(name: str) -> str:
    return {"smallest": "min", "largest": "max"}.get(name, "sum")


class SumMetric(Metric):
    """Base of metrics whose state is sums over the examples."""

    is_differentiable = False
    full_state_update = False

    def _register(self, initial: Any) -> None:
        """Register sums as the state, with their values for no examples."""
        for name, value in initial._asdict().items():
            self.add_state(name, default=value, dist_reduce_fx=_reduction(name))

    def _accumulate(self, sums: Any) -> None:
        """Add a batch's sums to the state."""
        for name, value in sums._asdict().items():
            state: Tensor = getattr(self, name)
            setattr(self, name, _COMBINE[_reduction(name)](state, value))

    def _collected(self, kind: Any) -> Any:
        """Return the state as sums."""
        return kind(*(getattr(self, name) for name in kind._fields))


def writable(state: Tensor) -> Tensor:
    """Return a state that can be updated in place.

    Casting a model to half precision casts its metrics too, but sums stay in float64; and a state
    that was reset in inference mode cannot be updated outside of it.
    """
    if state.is_floating_point():
        state = state.double()
    frozen = state.is_inference() and not torch.is_inference_mode_enabled()
    return state.clone() if frozen else state
