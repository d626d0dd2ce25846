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
