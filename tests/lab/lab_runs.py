"""What tests of runs share."""

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
