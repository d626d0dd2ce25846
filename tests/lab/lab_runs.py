"""What tests of runs share."""

import contextlib
import subprocess
import sys

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

    from tammes.lab.config import Config
    from tammes.lab.train import train

    torch.set_num_threads(1)
    train(Config.from_dict(values), Path(folder))


_HOLD = """
import sys
from pathlib import Path
from tammes.lab.atomic import alone
with alone(Path(sys.argv[1]), "no"):
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
