"""Training runs behind the defaults: grids over scale, margin, head rate, optimizer, warm-up.

``evidence.json`` is written by ``scripts/advice_evidence.py`` from the ledgers of the recipes
``advice/classes`` and ``advice/identities`` under ``results/advice``.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("evidence.json")


@dataclass(frozen=True)
class GridTrial:
    """One setting of a grid.

    Attributes:
        loss: name of the loss.
        scale: scale of the head.
        margin: margin of the loss.
        mean: main metric in %, averaged over seeds.
        error: its standard error.
        optimizer: optimizer.
        head_rate: learning rate of the head over that of the network.
        warm_up: fraction of the training in which the margin rises from 0.
    """

    loss: str
    scale: float
    margin: float
    mean: float
    error: float
    optimizer: str = "sgd"
    head_rate: float = 1.0
    warm_up: float = 0.0

    @property
    def beyond_defaults(self) -> str:
        """Optimizer, head rate and warm-up in words, if they differ from the defaults."""
        words = f", {self.optimizer}" if self.optimizer != "sgd" else ""
        words += f", head rate × {self.head_rate:g}" if self.head_rate != 1 else ""
        return words + (", margin warmed up" if self.warm_up else "")


@dataclass(frozen=True)
class Grid:
    """All settings trained on one dataset.

    Attributes:
        data: name of the dataset.
        classes: number of classes.
        dim: size of a feature.
        images: training images per class.
        quantity: main metric, in %; higher is better.
        seeds: number of seeds of each setting.
        device: device it ran on.
        trials: the settings.
    """

    data: str
    classes: int
    dim: int
    images: int
    quantity: str
    seeds: int
    device: str
    trials: tuple[GridTrial, ...]

    @property
    def identities(self) -> bool:
        """Whether it was tested on classes not seen in training."""
        return self.quantity != "accuracy"

    @property
    def best(self) -> GridTrial:
        """Setting with the best mean."""
        return max(self.trials, key=lambda trial: trial.mean)

    def find(self, loss: str, scale: float, margin: float | None) -> GridTrial | None:
        """Return the trial of a loss with the default optimizer, head rate and no warm-up."""
        wanted = (loss, scale, margin, "")
        for each in self.trials:
            if (each.loss, each.scale, each.margin, each.beyond_defaults) == wanted:
                return each
        return None


@cache
def grids() -> tuple[Grid, ...]:
    """Read all grids, the one with the fewest classes first."""
    values = json.loads(FILE.read_text(encoding="utf-8"))
    found = [
        Grid(**{**each, "trials": tuple(GridTrial(**trial) for trial in each["trials"])})
        for each in values
    ]
    return tuple(sorted(found, key=lambda grid: grid.classes))


def effect(change: str) -> str:
    """Describe the effect of a change to the defaults, over all grids.

    Args:
        change: a change as :attr:`GridTrial.beyond_defaults` writes it.

    Example:
        >>> effect(", lion")
        'not measured'
    """
    differences, data = [], set()
    for grid in grids():
        for trial in grid.trials:
            plain = grid.find(trial.loss, trial.scale, trial.margin)
            if plain is not None and trial.beyond_defaults == change:
                differences.append(trial.mean - plain.mean)
                data.add(grid.data)
    if not differences:
        return "not measured"
    ends = dict.fromkeys(f"{end:+.1f}" for end in (min(differences), max(differences)))
    sets = "1 data set" if len(data) == 1 else f"{len(data)} data sets"
    return f"{' to '.join(ends)} points on {sets}"
