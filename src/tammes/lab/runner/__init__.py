"""Run many cells, each in its own process: on this machine or on a Ray cluster."""

from tammes.lab.runner.process_pool import (
    PER_GPU,
    Cell,
    Event,
    Resources,
    Result,
    plan_resources,
    run_cells,
)
from tammes.lab.runner.ray_pool import run_cells_on_ray
from tammes.lab.runner.worker import Emit

__all__ = [
    "PER_GPU",
    "Cell",
    "Emit",
    "Event",
    "Resources",
    "Result",
    "plan_resources",
    "run_cells",
    "run_cells_on_ray",
]
