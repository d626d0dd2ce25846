"""Device, precision, processes and loggers of a run, through ``lightning.fabric``."""

import atexit
import gc
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
    """Reject a configuration that this machine cannot run; return ``"cuda"`` or ``"cpu"``."""
    has_cuda = torch.cuda.is_available()
    if config.accelerator == "cuda" and not has_cuda:
        raise ValueError("accelerator cuda expects a CUDA device, but torch finds none")
    on_cpu = config.accelerator == "cpu" or not has_cuda
    if on_cpu and config.precision == "fp16":
        raise ValueError("precision fp16 needs a GPU; bf16 and fp32 work on a CPU")
    if on_cpu and config.graphs == "on":
        raise ValueError("graphs are CUDA graphs, and this run is on a CPU")
    if config.graphs == "on" and (_processes() > 1 or config.precision == "fp16"):
        raise ValueError("graphs work with one process and with precision fp32 or bf16")
    if config.shard and _processes() > 1 and config.precision == "fp16":
        raise ValueError(
            "shard expects precision fp32 or bf16, got fp16: its gradient scaler skips steps, "
            "and the processes would not skip the same ones"
        )
    for name in _logger_names(config):
        if name not in LOGGERS:
            raise ValueError(f"loggers are tensorboard, mlflow and wandb, got {name!r}")
        require(name, extra=name)
    return "cpu" if on_cpu else "cuda"


def _processes() -> int:
    """Return the number of processes that ``torchrun`` started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _logger_names(config: Config) -> list[str]:
    return [name.strip() for name in config.loggers.split(",") if name.strip()]


def launch(config: Config, folder: Path) -> Any:
    """Launch ``lightning.fabric.Fabric`` on the processes that ``torchrun`` started, or on one.

    Loggers write to the run folder; MLflow, by default, to a file next to it.
    """
    fabric_module = require("lightning.fabric", extra="lab")
    accelerator = check_machine(config)
    processes = _processes()
    if config.deterministic:
        # cuBLAS reads this when it is initialised.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif accelerator == "cuda":
        torch.backends.cudnn.benchmark = True
    strategy: Any = "auto"
    if processes > 1:
        strategy = require("lightning.fabric.strategies", extra="lab").DDPStrategy(
            # A loss with only metric terms gives the prototypes no gradient.
            find_unused_parameters=True
        )
    # Lightning prints a hint about precision at every launch.
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    fabric = fabric_module.Fabric(
        accelerator=accelerator,
        devices=local,
        num_nodes=processes // local,
        strategy=strategy,
        precision=_PRECISION[config.precision],
        loggers=[LOGGERS[name](folder) for name in _logger_names(config)],
    )
    fabric.launch()
    if processes > 1:
        atexit.register(_leave_group)
    return fabric


def _leave_group() -> None:
    """Destroy the process group while Python still runs.

    Gloo's threads may hold tensors for a moment after the last collective; releasing them during
    interpreter shutdown aborts the process.
    """
    # The group's threads end when nothing refers to it any longer.
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def uses_graphs(config: Config, fabric: Any) -> bool:
    """Whether steps are recorded as a CUDA graph."""
    possible = (
        fabric.device.type == "cuda" and fabric.world_size == 1 and config.precision != "fp16"
    )
    return config.graphs == "on" or (config.graphs == "auto" and possible)


def _tensorboard(folder: Path) -> Any:
    loggers = require("lightning.fabric.loggers", extra="lab")
    return loggers.TensorBoardLogger(folder / "tensorboard", name="", version="")


def _mlflow(folder: Path) -> Any:
    loggers = require("lightning.pytorch.loggers", extra="lab")
    # A file next to the runs, unless the user has a server.
    local = f"sqlite:///{folder.parent.resolve() / 'mlflow.db'}"
    uri = os.environ.get("MLFLOW_TRACKING_URI", local)
    return loggers.MLFlowLogger("tammes", run_name=folder.name, tracking_uri=uri)


def _wandb(folder: Path) -> Any:
    loggers = require("lightning.pytorch.loggers", extra="lab")
    return loggers.WandbLogger(name=folder.name, save_dir=folder)


LOGGERS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
"""Loggers by name; each needs the package of that name."""
