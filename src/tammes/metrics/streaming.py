"""What the classes stand on: torchmetrics, and sums whose names say how they combine."""

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
    Metric = require("torchmetrics", extra="metrics").Metric
    BinaryCalibrationError = require(
        "torchmetrics.classification", extra="metrics"
    ).BinaryCalibrationError
    gather_all_tensors = require(
        "torchmetrics.utilities.distributed", extra="metrics"
    ).gather_all_tensors

__all__ = [
    "BinaryCalibrationError",
    "Metric",
    "fold",
    "gather_all_tensors",
    "held",
    "hold",
    "writable",
]

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def _reduction(name: str) -> str:
    return {"smallest": "min", "largest": "max"}.get(name, "sum")


def hold(metric: Metric, nothing: Any) -> None:
    """Register sums as a metric's state, with the sums of no example to start from."""
    for name, value in nothing._asdict().items():
        metric.add_state(name, default=value, dist_reduce_fx=_reduction(name))


def fold(metric: Metric, sums: Any) -> None:
    """Add a batch's sums to the state."""
    for name, value in sums._asdict().items():
        state: Tensor = getattr(metric, name)
        setattr(metric, name, _COMBINE[_reduction(name)](state, value))


def writable(state: Tensor) -> Tensor:
    """A state that examples can be added to in place.

    A model cast to half precision takes its metrics along, but sums stay in float64; and what was
    reset in inference mode may not be written to outside of it.
    """
    if state.is_floating_point():
        state = state.double()
    frozen = state.is_inference() and not torch.is_inference_mode_enabled()
    return state.clone() if frozen else state


def held(metric: Metric, kind: Any) -> Any:
    """The state as the sums it is made of."""
    return kind(*(getattr(metric, name) for name in kind._fields))
