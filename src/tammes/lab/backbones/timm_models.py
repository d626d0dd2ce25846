"""Networks from timm."""

from typing import Any

from tammes.lab.backbones.blocks import Backbone, Blocks, Shape, bnneck
from tammes.lab.config.expressions import did_you_mean
from tammes.optional import require


def from_timm(
    name: str,
    *,
    shape: Shape,
    pretrained: bool = False,
    features: int | None = None,
    neck: bool = False,
) -> Backbone:
    """Build a network of timm without its classifier.

    ``pretrained`` weights are downloaded; ``features`` adds a linear layer of that size, ``neck`` a
    batch normalisation without a shift after the features (BNNeck).

    Raises:
        ImportError: timm cannot be imported.
        ValueError: timm has no network of this name.
    """
    timm = import_timm(name)
    blocks = Blocks(f"timm:{name}", shape, 1, features, 1.0, "batch")
    body = timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=shape[0])
    # Some networks have a layer between their features and the classifier.
    size = int(getattr(body, "head_hidden_size", None) or body.num_features)
    network = blocks.finish({"body": body}, size)
    if not neck:
        return network
    return Backbone({"body": network, "neck": bnneck(network.num_features)}, network.num_features)


def import_timm(name: str) -> Any:
    """Import timm and check that it has a network; see :func:`from_timm` for the errors."""
    timm = require("timm", extra="timm")
    if not timm.is_model(name.partition(".")[0]):
        hint = did_you_mean(f"timm:{name}", [f"timm:{each}" for each in timm.list_models()])
        raise ValueError(f"timm has no network {name!r}{hint}")
    return timm


_FAMILIES = ("resnet", "vit_", "convnext", "efficientnet", "mobilenetv", "densenet", "swin")
"""Prefixes of model names in timm, for messages if timm is not installed."""


def offered_by_timm(name: str) -> bool:
    """Whether timm has a network of this name; without timm, whether it probably has."""
    try:
        return bool(require("timm", extra="timm").is_model(name))
    except ImportError:
        return name.startswith(_FAMILIES)
