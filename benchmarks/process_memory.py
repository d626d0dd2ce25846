"""Memory that one step of a process takes, seen from outside: for steps on the CPU.

The allocator is told to give back at once what is freed (a fixed ``M_MMAP_THRESHOLD`` of 64 KiB,
``malloc_trim`` before the step): otherwise it keeps a share that varies from run to run. The
kernel's high-water mark is reset just before the step, because making the parameters may have been
higher; where that cannot be done (not on Linux), ``ru_maxrss`` is used and may come out too low.
"""

import contextlib
import ctypes
import gc
import os
import platform
import resource
from pathlib import Path


def resident():
    """Bytes of this process in memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def reset_highest():
    """Start the kernel's high-water mark anew; without effect outside Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def highest():
    """The most bytes of this process that were in memory at once."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def allocator(action, *arguments):
    """Ask the C library's allocator for something; without effect where it is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL("libc.so.6"), action)(*arguments)


def extra_memory(make, size, warm_up):
    """Bytes that one step needs beyond what is there before it; for a process of its own.

    Args:
        make: gives a step and what forgets its gradients, from a size.
        size: of the step that is measured.
        warm_up: of a step before, which loads the code and the buffers that libraries keep.
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
    """Name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor()
