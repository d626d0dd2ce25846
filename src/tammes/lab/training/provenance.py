"""Provenance of a run: versions, commit, machine, command."""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tammes


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Collect what a result may depend on: versions, hardware, commit and command."""
    return {
        "tammes": tammes.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": _device(device),
        "threads": torch.get_num_threads(),
        "world_size": world_size,
        "commit": _commit(),
        "command": command(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command() -> str:
    """Return the command line of this process, quoted for a shell."""
    path = Path(sys.argv[0])
    script = path.suffix == ".py" and path.name != "__main__.py"
    name = "tammes" if path.name == "__main__.py" else path.name
    return shlex.join([*(("python", str(path)) if script else (name,)), *sys.argv[1:]])


def without_place(command: str) -> str:
    """Return a command without its ``--out``, for published records.

    Example:
        >>> without_place("tammes reproduce zhou2022/fig1 --out /tmp/here --seeds 3")
        'tammes reproduce zhou2022/fig1 --seeds 3'
    """
    return re.sub(r" --out[ =]('[^']*'|\S+)", "", command)


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores"


def _commit() -> str | None:
    """Return the commit of this package's checkout, marked if tracked files differ from it."""
    folder = Path(tammes.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package may lie inside another project's checkout.
    top = git("rev-parse", "--show-toplevel")
    if top is None or not (Path(top) / "src" / "tammes" / "__init__.py").exists():
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit} with changes" if git("status", "--porcelain", "-uno") else commit
