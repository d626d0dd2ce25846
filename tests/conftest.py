"""What tests share: seeded numbers, and one example of everything there is."""

import contextlib
import os
import warnings
from pathlib import Path

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Read when torch is imported: processes side by side share the cores.
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# cuBLAS reads it when it starts; without it, it refuses to be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Copies of the real data beside the checkout, as the Makefile sets it too.
_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
if _BESIDE.is_dir():
    os.environ.setdefault("TAMMES_DATA", str(_BESIDE))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the share of the tests that this process runs (``make gpu`` has several processes)."""
    if "TAMMES_TEST_SHARE" in os.environ:
        number, count = map(int, os.environ["TAMMES_TEST_SHARE"].split("/"))
        items[:] = items[number::count]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Decoded images go to a folder of the tests' own, unless another one is asked for."""
    os.environ.setdefault("TAMMES_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def unwaited():
    """Makes a context in which whatever waits for the GPU is an error."""

    @contextlib.contextmanager
    def unwaited():
        with warnings.catch_warnings():
            # It does not see every wait, and says so once.
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return unwaited


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def shared_data():
    """Folder of the real datasets."""
    folder = os.environ.get("TAMMES_DATA")
    if folder is None or not Path(folder).is_dir():
        pytest.skip("needs real data: TAMMES_DATA names no folder")
    return Path(folder)
