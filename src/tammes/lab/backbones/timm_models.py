"""Networks from timm."""

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

    Args:
        name: name in timm, such as ``resnet50`` or ``vit_small_patch16_224.dino``.
        shape: channels, height and width of the images.
        pretrained: download and use the weights of timm; random weights otherwise.
        features: adds a linear layer of this size.
        neck: adds a batch normalisation without shift after the features (BNNeck).

    Raises:
        ImportError: timm cannot be imported.
        ValueError: timm has no network of this name.
    """
    timm = require("timm", extra="timm")
    blocks = Blocks(f"timm:{name}", shape, 1, features, 1.0, "batch")
    if not timm.is_model(name.partition(".")[0]):
        hint = did_you_mean(f"timm:{name}", [f"timm:{each}" for each in timm.list_models()])
        raise ValueError(f"timm has no network {name!r}{hint}")
    body = timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=shape[0])
    # Some networks have a layer between their features and the classifier.
    size = int(getattr(body, "head_hidden_size", None) or body.num_features)
    network = blocks.finish({"body": body}, size)
    if not neck:
        return network
    return Backbone({"body": network, "neck": bnneck(network.num_features)}, network.num_features)
