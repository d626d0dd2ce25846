"""NVIDIA's Multi-Process Service: several processes compute on one GPU at the same time.

Without it they take turns. The service is optional: it is used if it is installed and works.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

_CONTROL = "nvidia-cuda-mps-control"
_PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
steps = (
    lambda: cuda.cuInit(0),
    lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
    lambda: cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device),
)
sys.exit(any(step() for step in steps))
"""
"""Program that checks GPU access through the driver alone, which is faster than importing torch."""


@contextlib.contextmanager
def shared_gpu(*, wanted: bool) -> Iterator[Mapping[str, str]]:
    """Start the service if processes share a GPU, and stop it afterwards.

    Yields:
        Environment variables for these processes; empty if the service is not wanted, missing, not
        working, or already running.
    """
    control = shutil.which(_CONTROL) if wanted else None
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    # A short path: socket paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = _run([control, "-d"], variables)
        try:
            works = started and _run([sys.executable, "-c", _PROBE], variables)
            yield variables if works else {}
        finally:
            if started:
                _run([control], variables, "quit\n")


def _run(command: list[str], variables: Mapping[str, str], stdin: str = "") -> bool:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            input=stdin,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
