"""What became of a model: measured on images it was not trained on, and written down."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tammes.lab.data import Images
from tammes.lab.measure.classification import (
    Examined,
    examine_all,
    mean_loss,
    measure_prototypes,
    optimum,
    per_class_accuracy,
    summarise,
    telling_examples,
)
from tammes.lab.records.run_folder import write_json, write_tensors
from tammes.lab.training.loader import Feed
from tammes.lab.training.model import Model

_ROWS = 512
"""Images in a batch without gradients."""
_PICTURE = 64
"""Pixels of a side of an example that is kept."""


class Outcome(NamedTuple):
    """What a model makes of a set of images.

    Attributes:
        features: shape ``(N, D)``, on the CPU.
        labels: shape ``(N,)``.
        seen: each of them.
        measures: in a line of ``metrics.jsonl``.
    """

    features: Tensor
    labels: Tensor
    seen: Examined
    measures: dict[str, float]


@torch.no_grad()
def evaluate(fabric: Any, model: Model, source: Feed) -> Outcome:
    """Features, predictions and margins of images, without augmentation.

    Args:
        fabric: precision and processes; each of them looks at its share of the images.
        model: put into evaluation mode; whoever trains puts it back.
        source: of the images.
    """
    model.eval()
    if fabric.world_size > 1:
        # Each process has running statistics of its own; those of the first are kept.
        for buffer in model.backbone.buffers():
            torch.distributed.broadcast(buffer, 0)
    rank, count = fabric.global_rank, fabric.world_size
    parts = []
    for pixels, _, index in source.in_order(_ROWS, rank=rank, world_size=count):
        with fabric.autocast():
            parts.append(model.features(pixels, index, 0).float())
    size = model.criterion.head.embedding_size
    features = torch.cat(parts) if parts else torch.zeros(0, size, device=fabric.device)
    total = len(source.images)
    if count > 1:
        # Every process has one row more or less than another.
        features = F.pad(features, (0, 0, 0, -(-total // count) - len(features)))
        features = fabric.all_gather(features).transpose(0, 1).flatten(0, 1)[:total]
    labels = source.images.labels
    seen = examine_all(model.criterion.head, features, labels)
    measures = summarise(seen)
    loss = mean_loss(model.criterion, features, labels)
    if loss is not None:
        measures["loss"] = loss
    return Outcome(features.cpu(), labels, seen, measures)


def finish(
    folder: Path,
    model: Model,
    testing: Images,
    outcomes: Mapping[str, Outcome],
    last: Mapping[str, Any],
    *,
    chosen: str,
) -> None:
    """Write down a finished run; ``final.json`` comes last, so that it says that all is there.

    Args:
        folder: of the run.
        model: the one that is kept.
        testing: images it was tested on.
        outcomes: on the test images, and on the validation images if there are any.
        last: the line of ``metrics.jsonl`` of the epoch that is kept.
        chosen: how that epoch was chosen.
    """
    head, tested = model.criterion.head, outcomes["test"]
    kept = {"prototypes": head.weight, "scale": torch.as_tensor(head.scale).float()}
    if head.bias is not None:
        kept["bias"] = head.bias
    write_tensors(folder / "prototypes.safetensors", kept)
    embeddings = {
        "features": tested.features,
        "labels": tested.labels,
        "predictions": tested.seen.predictions,
        "index": testing.index,
    }
    write_tensors(folder / "embeddings.safetensors", embeddings)
    write_tensors(folder / "examples.safetensors", _examples(testing, tested))
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(("backbone.", "criterion."))
    }
    write_tensors(folder / "model.safetensors", weights)
    final: dict[str, Any] = {
        "epoch": last["epoch"],
        "step": last["step"],
        "chosen": chosen,
        "train": last["train"],
        "prototypes": measure_prototypes(head),
        "optimum": optimum(head.num_classes, head.embedding_size),
    }
    for name, outcome in outcomes.items():
        final[name] = {
            **outcome.measures,
            "sample_margin_min": float(outcome.seen.margins.min()),
            "per_class_accuracy": per_class_accuracy(
                outcome.seen, outcome.labels, head.num_classes
            ),
        }
    write_json(folder / "final.json", final)


def _examples(testing: Images, tested: Outcome) -> dict[str, Tensor]:
    """Some test images, small: the clearest mistakes, and right ones beside them."""
    chosen = telling_examples(tested.seen, tested.labels, len(testing.classes))
    channels, height, width = testing.shape
    pictures = torch.zeros(0, channels, height, width, dtype=torch.uint8)
    if len(chosen):
        pictures = torch.stack([testing.read(place) for place in chosen.tolist()])
    if max(height, width) > _PICTURE and len(chosen):
        share = _PICTURE / max(height, width)
        small = F.interpolate(pictures.float(), scale_factor=share, mode="bilinear", antialias=True)
        pictures = small.round().clamp(0, 255).byte()
    return {
        "images": pictures,
        "labels": tested.labels[chosen],
        "predictions": tested.seen.predictions[chosen],
        "index": testing.index[chosen],
    }
