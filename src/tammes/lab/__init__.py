"""The lab: train, compare and reproduce, as the command ``tammes`` does.

The names below are imported on first use, so that ``import tammes.lab`` stays light. The function
``reproduce`` is in :mod:`tammes.lab.reproduce.run`.

Example:
    >>> from tammes.lab import Config, train
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tammes.lab.config.schema import Config
    from tammes.lab.runner.sweep import compare
    from tammes.lab.training.loop import train
    from tammes.lab.training.model import load_model

__all__ = ["Config", "compare", "load_model", "train"]

_MODULES = {
    "Config": "tammes.lab.config.schema",
    "compare": "tammes.lab.runner.sweep",
    "load_model": "tammes.lab.training.model",
    "train": "tammes.lab.training.loop",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__})
