"""Checkpoints of a head, sharded or not: saved on any number of ranks, loaded on any other."""

from tammes.checkpoint.safetensors_io import CheckpointError
from tammes.checkpoint.save_load import divide, export, load, save

__all__ = ["CheckpointError", "divide", "export", "load", "save"]
