"""Evaluate a model on validation and test images, and write the results of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tammes.heads.head import Head
from tammes.heads.subcenters import drop_subcenters
from tammes.lab.data import Images
from tammes.lab.data.identities.identity_protocol import IdentityProtocol
from tammes.lab.data.images import shrink
from tammes.lab.measure.classification import (
    ExampleMetrics,
    accuracy_by_count,
    confused_examples,
    example_metrics_in_blocks,
    mean_loss,
    measure_prototypes,
    optimum,
    per_class_accuracy,
    summarise,
)
from tammes.lab.measure.identities import (
    identity_intervals,
    identity_resamples,
    measure_identities,
)
from tammes.lab.records.run_folder import write_json, write_tensors
from tammes.lab.training.loader import ImageLoader
from tammes.lab.training.model import Model
from tammes.metrics.functional import SubcenterUsageResult, subcenter_usage

_BATCH = 512
"""Images in an evaluation batch."""
_THUMBNAIL = 64
"""Longest side of a stored example, in pixels."""


class Evaluation(NamedTuple):
    """Features, on the CPU, and metrics of a model on a set of images.

    ``examples`` is None for identities that are not training classes; ``measures`` are means, as in
    a line of ``metrics.jsonl``.
    """

    features: Tensor
    labels: Tensor
    examples: ExampleMetrics | None
    measures: dict[str, float]
    protocol: IdentityProtocol = IdentityProtocol()


def evaluation_features(
    model: Model,
    pixels: Tensor,
    index: Tensor | None = None,
    *,
    projected: bool = True,
    flip: bool = False,
) -> Tensor:
    """Compute features of uint8 pixels as in the evaluation of a run, float32 ``(N, D)``.

    The projection layer, if there is one, is applied unless ``projected`` is false; ``flip``
    averages the features of an image and its mirror image.
    """
    features = model.features(pixels, index, 0, projected=projected).float()
    if flip:
        mirrored = model.features(pixels.flip(3), index, 0, projected=projected)
        features = (features + mirrored.float()) / 2
    return features


@torch.no_grad()
def evaluate(
    fabric: Any,
    model: Model,
    loader: ImageLoader,
    *,
    flip: bool = False,
    protocol: IdentityProtocol | None = None,
) -> Evaluation:
    """Compute features, predictions and margins of images, without augmentation.

    Every rank evaluates its share of the images. The model is left in evaluation mode. With a
    ``protocol``, images are compared by identity instead of classified.
    """
    features = gather_features(fabric, model, loader, flip=flip)
    labels = loader.images.labels
    if protocol is not None:
        finite = bool(features.isfinite().all())
        measures = measure_identities(features, labels, protocol) if finite else {}
        return Evaluation(features.cpu(), labels, None, measures, protocol)
    examples = example_metrics_in_blocks(model.criterion.head, features, labels)
    measures = summarise(examples)
    loss = mean_loss(model.criterion, features, labels)
    if loss is not None:
        measures["loss"] = loss
    return Evaluation(features.cpu(), labels, examples, measures)


@torch.no_grad()
def gather_features(
    fabric: Any, model: Model, loader: ImageLoader, *, projected: bool = True, flip: bool = False
) -> Tensor:
    """Compute :func:`evaluation_features` of all images, divided among the ranks.

    The model is left in evaluation mode.
    """
    model.eval()
    if fabric.world_size > 1:
        # Every rank has its own running statistics; all use those of rank 0.
        for buffer in model.backbone.buffers():
            torch.distributed.broadcast(buffer, 0)
    rank, world_size = fabric.global_rank, fabric.world_size
    parts = []
    for pixels, _, index in loader.in_order(_BATCH, rank=rank, world_size=world_size):
        with fabric.autocast():
            own = evaluation_features(model, pixels, index, projected=projected, flip=flip)
        parts.append(own)
    size = model.num_features(projected=projected)
    features = torch.cat(parts) if parts else torch.zeros(0, size, device=fabric.device)
    total = len(loader.images)
    if world_size > 1:
        # Ranks differ by at most one row.
        features = F.pad(features, (0, 0, 0, -(-total // world_size) - len(features)))
        features = fabric.all_gather(features).transpose(0, 1).flatten(0, 1)[:total]
    return features


def write_results(
    folder: Path,
    model: Model,
    testing: Images,
    evaluations: Mapping[str, Evaluation],
    last: Mapping[str, Any],
    *,
    chosen: str,
    counts: Sequence[int],
    usage: SubcenterUsageResult | None = None,
) -> None:
    """Write the results of a finished run; ``final.json`` comes last and marks it complete.

    The model, its evaluations by partition and ``last``, a line of ``metrics.jsonl``, are those of
    the kept epoch, described by ``chosen``. ``counts`` are the training examples of each class;
    ``usage`` tells how many of them use each prototype, if classes have several.
    """
    head, tested = model.criterion.head, evaluations["test"]
    kept = {"prototypes": head.weight, "scale": torch.as_tensor(head.scale).float()}
    if head.bias is not None:
        kept["bias"] = head.bias
    write_tensors(folder / "prototypes.safetensors", kept)
    embeddings = {
        "features": tested.features,
        "labels": tested.labels,
        "index": testing.index,
        **tested.protocol.tensors(tested.labels),
    }
    if tested.examples is not None:
        embeddings["predictions"] = tested.examples.predictions
        if usage is not None:
            prototypes = head.weight.detach().cpu()
            of_test = subcenter_usage(tested.features, tested.labels, prototypes)
            embeddings["subcenters"] = of_test.center
        pictures = _examples(testing, tested.labels, tested.examples)
        write_tensors(folder / "examples.safetensors", pictures)
    write_tensors(folder / "embeddings.safetensors", embeddings)
    resamples: dict[str, Tensor] = {}
    if tested.examples is None:
        features = tested.features.to(head.weight.device)
        resamples = identity_resamples(features, tested.labels, tested.protocol)
        write_tensors(folder / "resamples.safetensors", resamples)
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
    for name, result in evaluations.items():
        final[name] = {**result.measures, **_details(result, head, counts)}
        if usage is not None and result.examples is not None:
            dominant = drop_subcenters(head, usage.counts)
            found = example_metrics_in_blocks(dominant, result.features, result.labels)
            final[name]["accuracy_dominant"] = found.correct.double().mean().item()
    if usage is not None:
        final["subcenters"] = {
            "share_dominant": float(usage.share),
            "used": float((usage.counts > 0).sum(1).double().mean()),
        }
    if resamples:
        final["test"]["intervals"] = identity_intervals(resamples)
    write_json(folder / "final.json", final)


def _details(result: Evaluation, head: Head, counts: Sequence[int]) -> dict[str, Any]:
    """Return the metrics that are computed for ``final.json`` only."""
    if result.examples is None:
        return {}
    per_class = per_class_accuracy(result.examples, result.labels, head.num_classes)
    return {
        "sample_margin_min": float(result.examples.margins.min()),
        "per_class_accuracy": per_class,
        **accuracy_by_count(per_class, counts),
    }


def _examples(testing: Images, labels: Tensor, examples: ExampleMetrics) -> dict[str, Tensor]:
    """Return thumbnails of the clearest mistakes, and of correct examples beside them."""
    chosen = confused_examples(examples, labels, len(testing.classes))
    pictures = torch.zeros(0, *testing.shape, dtype=torch.uint8)
    if len(chosen):
        pictures = torch.stack([testing.read(position) for position in chosen.tolist()])
    return {
        "images": shrink(pictures, _THUMBNAIL),
        "labels": labels[chosen],
        "predictions": examples.predictions[chosen],
        "index": testing.index[chosen],
    }
