"""What tests of runs share."""

import contextlib
import subprocess
import sys

import pytest

SAME = (
    "config.json",
    "data.json",
    "metrics.jsonl",
    "final.json",
    "subset.safetensors",
    "prototypes.safetensors",
    "embeddings.safetensors",
    "examples.safetensors",
    "model.safetensors",
)
"""Files that are the same, bit for bit, however often a run was interrupted."""


def train_in_a_process(values, folder):
    """Train from plain values, in a process that the tests may kill."""
    from pathlib import Path

    import torch

    from tammes.lab.config.schema import Config
    from tammes.lab.training.loop import train

    torch.set_num_threads(1)
    train(Config.from_dict(values), Path(folder))


_HOLD = """
import sys
from pathlib import Path
from tammes.lab.records.atomic_io import locked
with locked(Path(sys.argv[1]), "no"):
    print("mine", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held_by_another_process(folder):
    """Another process has a folder to itself; it is killed in the end."""
    command = [sys.executable, "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"mine\n"
        yield
        other.kill()


def some_of_cifar100(shared_data, folder, classes, each):
    """Some images of some classes of CIFAR-100, as a parquet file."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(shared_data / "cifar100-test.parquet")
    left = dict.fromkeys(range(classes), each)
    rows = []
    for row, label in enumerate(table.column("label").to_pylist()):
        if left.get(label, 0):
            left[label] -= 1
            rows.append(row)
    path = folder / "few.parquet"
    parquet.write_table(table.take(pyarrow.array(rows)), path)
    return path
