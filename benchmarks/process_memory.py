"""Measure the memory of one step on the CPU, as seen by the operating system.

The allocator is configured to return freed memory at once (a fixed ``M_MMAP_THRESHOLD`` of 64 KiB,
``malloc_trim`` before the step): otherwise it keeps an amount that varies from run to run. The
kernel's high-water mark is reset just before the step, because creating the parameters may have
needed more; where that is not possible (only Linux can), ``ru_maxrss`` is used and may be too low.
"""

import contextlib
import ctypes
import gc
import os
import platform
import resource
from pathlib import Path


def resident():
    """Return the current resident size of this process in bytes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def reset_highest():
    """Reset the kernel's high-water mark; no effect outside Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def highest():
    """Return the peak resident size of this process in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def allocator(action, *arguments):
    """Call a function of glibc's allocator; no effect with another C library."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL("libc.so.6"), action)(*arguments)


def extra_memory(make, size, warm_up):
    """Return the bytes that one step needs beyond the memory in use; run it in a fresh process.

    Args:
        make: function of a size that returns a step and a function that clears its gradients.
        size: size of the measured step.
        warm_up: size of a step before, which loads code and permanent buffers of libraries.
    """
    threshold = -3  # M_MMAP_THRESHOLD of mallopt
    allocator("mallopt", threshold, 1 << 16)
    step, forget = make(*size)
    small_step, _ = make(*warm_up)
    small_step()
    del small_step
    gc.collect()
    allocator("malloc_trim", 0)
    before = resident()
    reset_highest()
    kept = step()
    peak = highest()
    del kept, forget
    return peak - before


def processor():
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor()
