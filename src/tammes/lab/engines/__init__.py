"""Many pieces of work, each in a process of its own."""

from tammes.lab.engines.cluster import run_cells_on_ray
from tammes.lab.engines.local import PER_GPU, Cell, Event, Places, Result, places, run_cells
from tammes.lab.engines.worker import Emit

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
