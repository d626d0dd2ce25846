"""What a run is carried out on: device, precision, processes, loggers; by ``lightning.fabric``."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tammes.lab.config.schema import Config
from tammes.optional import require

_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def check_machine(config: Config) -> str:
    """Refuse what this machine cannot do, before anything is begun.

    Args:
        config: of a run.

    Returns:
        What it runs on: ``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: with a sentence on what cannot be.
    """
    there = torch.cuda.is_available()
    if config.accelerator == "cuda" and not there:
        raise ValueError("accelerator cuda is asked for, but torch finds no CUDA device")
    on_cpu = config.accelerator == "cpu" or not there
    if on_cpu and config.precision == "fp16":
        raise ValueError("precision fp16 needs a GPU; bf16 and fp32 work on a CPU")
    if on_cpu and config.graphs == "on":
        raise ValueError("graphs are CUDA graphs, and this run is on a CPU")
    if config.graphs == "on" and (_processes() > 1 or config.precision == "fp16"):
        raise ValueError("graphs work with one process and with precision fp32 or bf16")
    if config.shard and _processes() > 1 and config.precision == "fp16":
        raise ValueError(
            "shard expects precision fp32 or bf16, got fp16: its steps are left out one by one, "
            "and the processes would not leave out the same"
        )
    for name in _logger_names(config):
        if name not in LOGGERS:
            raise ValueError(f"loggers are tensorboard, mlflow and wandb, got {name!r}")
        require(name, extra=name)
    return "cpu" if on_cpu else "cuda"


def _processes() -> int:
    """How many processes ``torchrun`` has started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _logger_names(config: Config) -> list[str]:
    return [name.strip() for name in config.loggers.split(",") if name.strip()]


def start(config: Config, folder: Path) -> Any:
    """Device, precision and processes: those that ``torchrun`` has started, or one.

    Args:
        config: of the run.
        folder: of the run, for what loggers write.

    Returns:
        A ``lightning.fabric.Fabric`` that is launched.
    """
    fabric_module = require("lightning.fabric", extra="lab")
    accelerator = check_machine(config)
    processes = _processes()
    if config.deterministic:
        # cuBLAS reads it when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif accelerator == "cuda":
        torch.backends.cudnn.benchmark = True
    strategy: Any = "auto"
    if processes > 1:
        strategy = require("lightning.fabric.strategies", extra="lab").DDPStrategy(
            # A loss between examples alone leaves the prototypes without a gradient.
            find_unused_parameters=True
        )
    # It says which precision it would rather have, each time.
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    fabric = fabric_module.Fabric(
        accelerator=accelerator,
        devices=local,
        num_nodes=processes // local,
        strategy=strategy,
        precision=_PRECISION[config.precision],
        loggers=make_loggers(config, folder),
    )
    fabric.launch()
    return fabric


def uses_graphs(config: Config, fabric: Any) -> bool:
    """Whether steps are recorded as a CUDA graph."""
    possible = (
        fabric.device.type == "cuda" and fabric.world_size == 1 and config.precision != "fp16"
    )
    return config.graphs == "on" or (config.graphs == "auto" and possible)


def make_loggers(config: Config, folder: Path) -> list[Any]:
    """The loggers a configuration names."""
    return [LOGGERS[name](folder) for name in _logger_names(config)]


def _tensorboard(folder: Path) -> Any:
    loggers = require("lightning.fabric.loggers", extra="lab")
    return loggers.TensorBoardLogger(folder / "tensorboard", name="", version="")


def _mlflow(folder: Path) -> Any:
    loggers = require("lightning.pytorch.loggers", extra="lab")
    # A file beside the runs, unless the user has a server.
    beside = f"sqlite:///{folder.parent.resolve() / 'mlflow.db'}"
    uri = os.environ.get("MLFLOW_TRACKING_URI", beside)
    return loggers.MLFlowLogger("tammes", run_name=folder.name, tracking_uri=uri)


def _wandb(folder: Path) -> Any:
    loggers = require("lightning.pytorch.loggers", extra="lab")
    return loggers.WandbLogger(name=folder.name, save_dir=folder)


LOGGERS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
"""What can be told of every epoch, by name; each is a package of that name."""
