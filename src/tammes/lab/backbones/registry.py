"""Networks by name."""

from collections.abc import Callable, Sequence
from functools import partial

from tammes.lab.backbones import convnets, imagenet, resnet
from tammes.lab.backbones.blocks import Backbone, Shape
from tammes.lab.backbones.timm_models import from_timm, import_timm, offered_by_timm
from tammes.lab.config import build as build_call
from tammes.lab.config.expressions import Call, check_call, parse_call

TABLE: dict[str, Callable[..., Backbone]] = {
    "mnist_cnn": convnets.mnist_cnn,
    "lsoftmax_mnist": convnets.lsoftmax_mnist,
    "lsoftmax_cifar": convnets.lsoftmax_cifar,
    "lsoftmax_2d": convnets.lsoftmax_2d,
    "conv4": convnets.conv4,
    "layer13": convnets.layer13,
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet32": resnet.resnet32,
    "wrn28_10": resnet.wrn28_10,
    "resnet12": resnet.resnet12,
    "resnet12_basic": resnet.resnet12_basic,
    "resnet18_224": resnet.resnet18_224,
    "resnet50_bnneck": resnet.resnet50_bnneck,
    "vgg16": imagenet.vgg16,
    "vgg16_mod": imagenet.vgg16_mod,
    "mobilenet": imagenet.mobilenet,
    "resnext50": imagenet.resnext50,
}
"""Factories of networks by name; each takes ``shape=`` and the settings of its expression."""

_TIMM = "timm:"


def resolve(text: str, shape: Sequence[int]) -> str:
    """Resolve ``auto`` for images of this shape; any other expression is returned unchanged.

    Example:
        >>> resolve("auto(features=3)", (1, 28, 28))
        'mnist_cnn(features=3)'
        >>> resolve("auto", (3, 32, 32))
        'conv4'
    """
    name, bracket, settings = text.strip().partition("(")
    if name.strip() != "auto":
        return text
    # Up to the size of MNIST, or too small for conv4, which pools four times.
    known = "mnist_cnn" if min(shape[1:]) < 16 or max(shape[1:]) <= 28 else "conv4"
    return f"{known}{bracket}{settings}"


def build(text: str, *, shape: Sequence[int]) -> Backbone:
    """Build the network of an expression.

    Args:
        text: expression such as ``"resnet18"``, ``"mnist_cnn(features=3)"``, ``"auto"``, or
            ``"timm:resnet50(pretrained=True)"``.
        shape: channels, height and width of the images.

    Returns:
        A module from images ``(N, C, H, W)`` to features ``(N, num_features)``. Its weights are
        drawn from the global generator.

    Raises:
        ValueError: one sentence on what is wrong in the expression.
        ImportError: ``timm:`` needs timm, which cannot be imported.

    Example:
        >>> import torch
        >>> network = build("conv4(width=0.25)", shape=(3, 32, 32))
        >>> network(torch.zeros(2, 3, 32, 32)).shape == (2, network.num_features)
        True
    """
    channels, height, width = shape
    fixed: Shape = (int(channels), int(height), int(width))
    call, table = _look_up(resolve(text, shape))
    return build_call(call, table, what="backbone", shape=fixed)


def check(text: str) -> None:
    """Reject an expression with an unknown name or setting, whatever the shape of the images."""
    call, table = _look_up(resolve(text, (3, 32, 32)))
    check_call(call, table, what="backbone", context=("shape",))


def _look_up(text: str) -> tuple[Call, dict[str, Callable[..., Backbone]]]:
    """Return the call of an expression, and the table that has its name."""
    text = text.strip()
    if text.startswith(_TIMM):
        name, bracket, settings = text[len(_TIMM) :].partition("(")
        import_timm(name.strip())
        call = parse_call(f"timm{bracket}{settings}", what="backbone")
        return call, {"timm": partial(from_timm, name.strip())}
    call = parse_call(text, what="backbone")
    if call.name not in TABLE and offered_by_timm(call.name):
        raise ValueError(f"there is no backbone {call.name!r}; timm:{call.name} is that of timm")
    return call, TABLE
