"""Many pieces of work, each in a process of its own."""

from tammes.lab.runner.process_pool import PER_GPU, Cell, Event, Places, Result, places, run_cells
from tammes.lab.runner.ray_pool import run_cells_on_ray
from tammes.lab.runner.worker import Emit

__all__ = [
    "PER_GPU",
    "Cell",
    "Emit",
    "Event",
    "Places",
    "Result",
    "places",
    "run_cells",
    "run_cells_on_ray",
]
